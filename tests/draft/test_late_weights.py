"""Casting weights where they are used gives the same numbers and keeps no copies."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from fledge.methods.shared.layer import gated_mlp, kept_mlps
from fledge.methods.shared.norms import late_linear, rms_norm
from live_bytes import watch_saved
from objective.naive_block import make_block_draft
from objective.naive_eagle3 import make_draft

EPS = 1e-5
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),  # a step in bf16 on fp32 masters
]


def random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def leaves(rows, outs, *, dtype, master):
    """x, a norm's weight, and one master weight for each number of outputs."""
    masters = [random(out, 13, dtype=master, seed=2 + i) for i, out in enumerate(outs)]
    return random(rows, 13, dtype=dtype, seed=0), random(13, dtype=dtype, seed=1), *masters


def results(function, inputs):
    out = function(*inputs)
    weight = random(*out.shape, dtype=out.dtype, seed=9).detach()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)]


def assert_equal(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def cast_early(x, masters):
    return F.linear(x, torch.cat([weight.to(x.dtype) for weight in masters]))


@pytest.mark.parametrize(("dtype", "master"), DTYPES)
@pytest.mark.parametrize("outs", [(11,), (7, 3, 3)])
@pytest.mark.parametrize("rows", [1, 190])
@pytest.mark.parametrize("normed", [False, True])
def test_values_and_gradients_equal_those_of_weights_cast_early(rows, outs, dtype, master, normed):
    def late(x, norm, *masters):
        return late_linear(x, masters, norm if normed else None, EPS)

    def early(x, norm, *masters):
        return cast_early(rms_norm(x, norm if normed else None, EPS), masters)

    inputs = leaves(rows, outs, dtype=dtype, master=master)
    actual = results(late, inputs)
    assert_equal(actual, results(early, inputs))
    assert [grad.dtype for grad in actual[3:]] == [master] * len(outs)


def attention_and_mlp(layer, dtype, *, used_once):
    """Everything that a layer computes with its weights, and the gradients of all weights."""
    weights = layer.weights(dtype, used_once=used_once)
    assert (weights.late_qkv is not None) is used_once
    size = layer.mlp.gate_proj.in_features
    state, context = (random(rows, size, dtype=dtype, seed=rows) for rows in (9, 5))
    qkv, kv = weights.project_normed(state), weights.project_keys(context)
    out = weights.finish(state, qkv[:, : weights.q_size])
    total = (qkv.square().sum() + kv.square().sum() + out.square().sum()).float()
    named = dict(layer.named_parameters())
    inputs = {"state": state, "context": context, **named}
    grads = torch.autograd.grad(total, [*inputs.values()], allow_unused=True)
    return {"qkv": qkv, "kv": kv, "out": out, **dict(zip(inputs, grads, strict=True))}


@pytest.mark.parametrize(("dtype", "master"), DTYPES)
def test_a_layer_used_once_computes_the_same(dtype, master):
    layer = make_block_draft(dtype=master).layers[0]
    late, early = (attention_and_mlp(layer, dtype, used_once=once) for once in (True, False))
    for name, expected in early.items():
        if expected is None:
            continue  # head norms, which are not used here
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        if dtype == torch.bfloat16:  # k and v are used twice; their two gradients are added in fp32
            tolerance = 2**-7
        scale = expected.abs().max().item()
        torch.testing.assert_close(late[name], expected, rtol=0, atol=tolerance * scale)
    for name in ("qkv", "kv"):
        assert torch.equal(late[name], early[name]), name


@pytest.mark.parametrize("used_once", [False, True])
def test_a_layer_used_once_saves_no_copy_of_a_matrix(used_once):
    """The control, not used once, does keep copies: q, k and v side by side, and o."""
    layer = make_block_draft(dtype=torch.float32).layers[0]
    size = layer.mlp.gate_proj.in_features
    with watch_saved(layer.parameters()) as saved:
        weights = layer.weights(torch.bfloat16, used_once=used_once)
        state, context = (random(rows, size, dtype=torch.bfloat16, seed=rows) for rows in (9, 5))
        qkv, _ = weights.project_normed(state), weights.project_keys(context)
        weights.finish(state, qkv[:, : weights.q_size])
    matrices = {tuple(p.shape) for p in layer.parameters() if p.ndim == 2}
    matrices |= {shape[::-1] for shape in matrices} | {(size, len(qkv[0])), (len(qkv[0]), size)}
    assert bool(saved.shapes & matrices) is not used_once


# --- MLPs that recompute their activations -------------------------------------------------------


def kept_and_gradients(recompute):
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape, dtype=torch.float64) for shape in ((7, 5), (9, 5), (9, 5), (5, 9))
    ]
    for tensor in tensors:
        tensor.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = gated_mlp(*tensors, recompute=recompute)
    out.square().sum().backward()
    return kept, [out.detach(), *(tensor.grad for tensor in tensors)]


def test_recomputing_gives_the_same_gradients_from_fewer_saved_tensors():
    saved, expected = kept_and_gradients(recompute=False)
    saved_recomputing, actual = kept_and_gradients(recompute=True)
    assert all(torch.equal(got, want) for got, want in zip(actual, expected, strict=True))
    assert [x.shape for x in saved if x.shape == (7, 9)] == [(7, 9)] * 2
    assert not [x.shape for x in saved_recomputing if x.shape == (7, 9)]


@pytest.mark.parametrize(("rows", "kept"), [(2**17, 1), (2**17 + 1, 0)])
def test_activations_are_recomputed_only_beyond_the_limit(rows, kept):
    config = LlamaConfig(intermediate_size=4096)  # two products of 4096 bf16 values: 16 KiB per row
    assert kept_mlps(config, rows, torch.bfloat16, layers=1, kept_gib=2.0) == kept


@pytest.mark.parametrize("make", [make_block_draft, make_draft])
def test_the_last_layers_keep_what_fits_the_limit_or_the_free_memory(make, monkeypatch):
    """A step of 3 layers whose MLPs keep 1 GiB each: a limit, what a GPU has to spare, and how many
    layers keep theirs. Without gradients nothing is kept, and the GPU is not asked."""
    draft = make(num_hidden_layers=3).train()
    rows = 2**30 // (2 * draft.spec.intermediate_size * 4)

    def recomputed(limit):
        layers = draft.step_weights(torch.float32, rows, kept_gib=limit)
        return [layer.recompute_mlp for layer in layers]

    for limit, spare, kept in ((0.9, 0, 0), (1.0, 0.5, 1), (1.0, 2.9, 2), (3.0, -1, 3), (0, 8, 3)):
        monkeypatch.setattr(type(draft), "_spare_gib", lambda _, spare=spare: spare)
        assert recomputed(limit) == [True] * (3 - kept) + [False] * kept
    monkeypatch.setattr(type(draft), "_spare_gib", lambda _: pytest.fail("asked"))
    with torch.no_grad():
        recomputed(0.0)
    draft.gradient_checkpointing_enable()
    assert recomputed(0.0) == [False] * 3


def test_checkpointed_layers_keep_no_activations():
    """Those that a node of the graph holds itself would not be dropped."""
    draft = make_block_draft().train()
    size, rows = draft.spec.hidden_size, 5
    attended = torch.randn(rows, draft.spec.num_attention_heads, draft.spec.head_dim).double()

    def held():
        layer, *_ = draft.step_weights(torch.float64, rows, kept_gib=1.0, used_once=True)
        state = torch.randn(rows, size).double().requires_grad_()
        out = draft._run_draft_layer(layer.finish, state, attended)
        nodes, found = [out.grad_fn], []
        while nodes:
            node = nodes.pop()
            found += getattr(node, "kept", None) or []
            nodes += [parent for parent, _ in node.next_functions if parent is not None]
        return found

    assert len(held()) == 2
    draft.gradient_checkpointing_enable()
    assert held() == []


def test_spare_memory_is_a_quarter_of_what_stays_free(monkeypatch):
    draft = make_block_draft(num_hidden_layers=1)
    assert draft._spare_gib() == 0  # on a CPU
    trained = sum(p.numel() for p in draft.parameters())
    gib = 2**30
    monkeypatch.setattr(type(draft), "device", torch.device("cuda"))
    for name, value in {
        "is_current_stream_capturing": False, "mem_get_info": (5 * gib, 80 * gib),
        "memory_reserved": 9 * gib, "memory_allocated": 6 * gib,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert draft._spare_gib() == pytest.approx((8 - 12 * trained / gib) / 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert draft._spare_gib() == 0  # a recording must not ask
