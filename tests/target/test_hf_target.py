"""The co-located target over many architectures, against transformers' own hidden states."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import (
    draft_vocabulary,
    each_document,
    packed_rows,
    padded_rows,
    shifted,
    some_documents,
)
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn
from torch._dynamo.exc import TorchDynamoException

import fledge
from fledge.core.head import target_distribution
from fledge.core.rows import shift_left
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import CompiledLayers


def whole_forward(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_aux_and_logits_equal_transformers_bitwise(architecture: str) -> None:
    model = tiny_model(architecture)
    ids, mask, loss = padded_rows()
    expected = whole_forward(model, ids, mask)
    batch = fledge.HFEagle3TargetModel(model).generate_batch(ids, mask, loss)
    aux = torch.cat([expected.hidden_states[i + 1] for i in (1, 3, 4)], dim=-1)
    assert torch.equal(batch.aux_hidden_states, aux)
    assert torch.equal(batch.logits, shifted(expected.logits))


@pytest.mark.parametrize(
    "rows", [padded_rows(), packed_rows(some_documents(), 13)], ids=["padded", "packed"]
)
def test_one_past_the_last_layer_is_the_last_hidden_state(rows: tuple[Any, ...]) -> None:
    model = tiny_model("llama")
    batch = HFEagle3TargetModel(model, supervision="hidden", num_aux_layers=1).generate_batch(*rows)
    assert batch.last_hidden_states is not None
    assert torch.equal(shift_left(batch.aux_hidden_states), batch.last_hidden_states)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_three_encodings_agree(architecture: str) -> None:
    model = tiny_model(architecture)
    rows = padded_rows()
    vocabulary = draft_vocabulary(model)
    logits, probs, hidden = (
        HFEagle3TargetModel(model, supervision=s) for s in ("logits", "probs", "hidden")
    )
    probs.set_vocab_mapping(*vocabulary)
    from_logits = logits.generate_batch(*rows).with_probs(None, *vocabulary)
    from_probs = probs.generate_batch(*rows)
    from_hidden = hidden.generate_batch(*rows)
    expected, covered = target_distribution(
        logits.generate_batch(*rows).logits[from_logits.loss_mask.bool()], *vocabulary
    )
    supervised = from_logits.loss_mask.bool()
    assert torch.equal(from_logits.target_probs[supervised], expected)
    assert torch.equal(from_logits.position_mask[supervised][:, 0], covered)
    assert torch.equal(from_probs.target_probs, from_logits.target_probs)
    assert torch.equal(from_probs.position_mask, from_logits.position_mask)
    full = logits.generate_batch(*rows).logits
    again = from_hidden.with_logits(hidden.info().head).logits
    torch.testing.assert_close(again, full, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_equals_alone_in_double_precision(architecture: str) -> None:
    model = tiny_model(architecture, dtype=torch.float64)
    documents = some_documents()
    target = HFEagle3TargetModel(model, supervision="hidden")
    packed = target.generate_batch(*packed_rows(documents, 14))
    logits = packed.with_logits(target.info().head).logits
    for ids, slots in each_document(documents):
        alone = whole_forward(model, ids, torch.ones_like(ids))
        aux = torch.cat([alone.hidden_states[i + 1] for i in (1, 3, 4)], dim=-1)
        for actual, expected in (
            (packed.aux_hidden_states[slots], aux[0]),
            (logits[slots][:-1], alone.logits[0, 1:]),
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_scale_and_cap_are_learned_from_the_model() -> None:
    heads = {name: HFEagle3TargetModel(tiny_model(name)).info().head for name in ARCHITECTURES}
    assert heads["cohere"].scale == 0.0625
    assert heads["granite"].divisor == 13.0
    assert heads["gemma2"].softcap == 3.0
    plain = set(ARCHITECTURES) - {"cohere", "granite", "gemma2"}
    for name in plain:
        assert (heads[name].scale, heads[name].divisor, heads[name].softcap) == (1.0, 1.0, None)


def test_hidden_supervision_never_runs_the_head() -> None:
    model = tiny_model("llama")
    target = HFEagle3TargetModel(model, supervision="hidden")
    model.lm_head.weight.data.fill_(float("nan"))
    batch = target.generate_batch(*padded_rows())
    assert all(bool(t.isfinite().all()) for _, t in batch.tensors())


def test_probs_run_the_head_on_supervised_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFEagle3TargetModel(tiny_model("llama"), supervision="probs")
    target.set_vocab_mapping(*draft_vocabulary(target.model))
    rows_seen: list[int] = []
    plain = type(target.info().head).logits

    def counting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows_seen.append(len(hidden))
        return plain(self, hidden)

    monkeypatch.setattr(type(target.info().head), "logits", counting)
    batch = target.generate_batch(*padded_rows())
    assert sum(rows_seen) == int(batch.loss_mask.sum())


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_leaks() -> None:
    model = tiny_model("llama")
    before = hooks_of(model), set(model.lm_head.__dict__)
    target = HFEagle3TargetModel(model, supervision="hidden")
    batch = target.generate_batch(*padded_rows())
    aux_states = weakref.ref(batch.aux_hidden_states)
    del batch
    gc.collect()
    assert aux_states() is None, "the target keeps its last batch alive"
    tensors = _live_tensors()
    for _ in range(5):
        target.generate_batch(*padded_rows())
    assert _live_tensors() == tensors
    assert (hooks_of(model), set(model.lm_head.__dict__)) == before
    parts = [weakref.ref(part) for part in (model, model.lm_head, model.lm_head.weight)]
    target.close()
    del model
    gc.collect()
    assert [part() for part in parts] == [None] * 3, "a closed target keeps its model alive"


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_hooks_are_removed_when_the_forward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    target = HFEagle3TargetModel(model, supervision="hidden")

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("out of memory in layer 5")

    monkeypatch.setattr(model.model.layers[5].mlp, "forward", fail)
    with pytest.raises(MemoryError):
        target.generate_batch(*padded_rows())
    assert hooks_of(model) == 0
    assert "forward" not in model.lm_head.__dict__


def test_without_a_compiler_layers_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = HFEagle3TargetModel(tiny_model("llama"), supervision="hidden")
    expected = target.generate_batch(*padded_rows()).aux_hidden_states

    def fail(*_: Any, **__: Any) -> None:
        raise TorchDynamoException("no C compiler")

    monkeypatch.setattr(torch, "compile", lambda forward: fail)
    monkeypatch.setattr(target, "_compiled", CompiledLayers(target._layers))
    for _ in range(2):
        assert torch.equal(target.generate_batch(*padded_rows()).aux_hidden_states, expected)
    assert caplog.text.count("compilation failed (no C compiler)") == 1


def test_model_stays_frozen_and_in_eval_mode() -> None:
    model = tiny_model("llama")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    target = HFEagle3TargetModel(model.train())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    first = target.generate_batch(*padded_rows())
    model.train()
    assert torch.equal(target.generate_batch(*padded_rows()).logits, first.logits)


@dataclass
class LayerOutput:
    attention: None
    hidden_states: torch.Tensor


WRAPPERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None),
    "list": lambda x: [x],
    "mapping": lambda x: {"weights": None, "hidden_states": x},
    "dataclass": lambda x: LayerOutput(None, x),
}


class HandMade(nn.Module):
    """A causal LM from no library: its layers are under `path`, their outputs wrapped."""

    def __init__(self, path: str, container: str, wrap: str) -> None:
        super().__init__()
        self.wrap = WRAPPERS[wrap]
        layers = [nn.Linear(6, 6) for _ in range(8)]
        for layer in layers:
            layer.register_forward_hook(lambda _m, _a, out: self.wrap(out))
        if container == "list":
            layer_container: nn.Module = nn.ModuleList(layers)
        else:
            # keyed by str(i), out of order on purpose
            layer_container = nn.ModuleDict({str(i): layers[i] for i in (3, 0, 7, 1, 2, 6, 5, 4)})
        parent: nn.Module = self
        *parents, last = path.split(".")
        for name in parents:
            setattr(parent, name, nn.Module())
            parent = getattr(parent, name)
        setattr(parent, last, layer_container)
        self.ordered = layers
        self.embed, self.lm_head = nn.Embedding(97, 6), nn.Linear(6, 97)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        states = self.embed(input_ids)
        for layer in self.ordered:
            output = layer(states)
            if isinstance(output, torch.Tensor):
                states = output
            elif isinstance(output, tuple | list):
                states = output[0]
            else:
                states = (
                    output["hidden_states"] if isinstance(output, dict) else output.hidden_states
                )
        return SimpleNamespace(logits=self.lm_head(states))


@pytest.mark.parametrize("container", ["list", "dict"])
@pytest.mark.parametrize(
    "path",
    [
        "model.layers",
        "model.language_model.layers",
        "language_model.layers",
        "layers",
        "transformer.h",
    ],
)
def test_layers_are_found_wherever_they_live(path: str, container: str) -> None:
    torch.manual_seed(0)
    model = HandMade(path, container, "tuple")
    target = HFEagle3TargetModel(model)
    assert target._layers == model.ordered
    assert target.aux_layer_ids == [1, 3, 4]


@pytest.mark.parametrize("wrap", sorted(WRAPPERS))
@pytest.mark.parametrize("supervision", ["logits", "hidden"])
def test_layer_outputs_of_any_kind(wrap: str, supervision: Any) -> None:
    torch.manual_seed(0)
    model = HandMade("model.layers", "dict", wrap)
    target = HFEagle3TargetModel(model, [4, 0, 2], supervision=supervision)
    ids, mask, loss = padded_rows()
    batch = target.generate_batch(ids, mask, loss)
    states, seen = model.embed(ids), []
    for layer in model.ordered:
        states = nn.functional.linear(states, layer.weight, layer.bias)
        seen.append(states)
    torch.testing.assert_close(
        batch.aux_hidden_states, torch.cat([seen[4], seen[0], seen[2]], dim=-1)
    )
    logits = batch.logits
    if supervision == "hidden":
        logits = batch.with_logits(target.info().head).logits
    torch.testing.assert_close(logits, shifted(model.lm_head(states)))


def test_a_layer_that_never_runs_is_reported() -> None:
    model = HandMade("model.layers", "list", "tensor")
    model.ordered = model.ordered[:3]
    with pytest.raises(RuntimeError, match=r"\[3, 4\]"):
        HFEagle3TargetModel(model).generate_batch(*padded_rows())


class OddHead(HandMade):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        logits = super().forward(input_ids, attention_mask).logits
        return SimpleNamespace(logits=torch.relu(logits))


def test_a_head_that_cannot_be_represented_is_refused_at_once() -> None:
    model = OddHead("model.layers", "list", "tensor")
    HFEagle3TargetModel(model).generate_batch(*padded_rows())
    with pytest.raises(fledge.BadInput, match="use supervision 'logits'"):
        HFEagle3TargetModel(model, supervision="hidden")
    headless = HandMade("model.layers", "list", "tensor")
    headless.lm_head = None
    with pytest.raises(fledge.BadInput, match="no output head"):
        HFEagle3TargetModel(headless, supervision="hidden")


def test_an_unknown_supervision_suggests_the_closest() -> None:
    with pytest.raises(fledge.BadInput, match="did you mean 'hidden'"):
        HFEagle3TargetModel(tiny_model("llama"), supervision="hiden")  # type: ignore[arg-type]


class Strict(HandMade):
    """Passes whatever it does not name on to its layers, which name everything they take."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **attn_kwargs: Any
    ) -> Any:
        (lambda *, position_ids=None: None)(**attn_kwargs)
        return super().forward(input_ids, attention_mask)


def test_no_options_are_passed_to_a_foreign_model() -> None:
    model = Strict("model.layers", "list", "tensor")
    model.config = tiny_model("llama").config  # AutoModel's own models have such configs
    expected = HandMade.forward(model, *padded_rows()[:2]).logits
    batch = HFEagle3TargetModel(model).generate_batch(*padded_rows())
    assert torch.equal(batch.logits, shifted(expected))
    assert HFEagle3TargetModel(tiny_model("llama"))._options.keys() >= {"use_cache"}


@pytest.fixture(scope="module")
def target() -> HFEagle3TargetModel:
    try:
        fledge.local_model("smollm2-135m")
    except fledge.BadInput as missing:
        pytest.skip(str(missing))
    return HFEagle3TargetModel.from_pretrained("smollm2-135m", device="cpu")


def test_smollm2_predicts_paris_from_hidden_states(target: HFEagle3TargetModel) -> None:
    info = target.info()
    assert (info.depth, info.hidden_size, info.vocab_size) == (30, 576, 49152)
    assert target.aux_layer_ids == [1, 14, 26]
    assert info.tokenizer_fingerprint is not None
    ids = target.tokenizer("The capital of France is", return_tensors="pt").input_ids
    batch = target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    top = batch.with_logits(info.head).logits[0, -2].argmax()
    assert target.tokenizer.decode(top) == " Paris"
