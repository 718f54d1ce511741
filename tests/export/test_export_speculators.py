"""Our exports in the real speculators package: every tensor is loaded, with equal logits (fp32)."""

import shutil

import pytest
import torch
from torch.nn import functional as F

from export.export_cases import KINDS, make_draft, rewrite, tensors_of
from fledge import export_draft
from fledge.formats.self_check import CheckOptions
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks

pytestmark = pytest.mark.engine

CHECK = CheckOptions(limit=2, max_new_tokens=8)
T, DEPTHS = 128, 4  # their extended masks need whole blocks of 128


@pytest.fixture(scope="module")
def made(speculators, tiny_target, tmp_path_factory):
    """kind, engine -> (our draft, its export)."""
    root = tmp_path_factory.mktemp("speculators")
    exports = {}
    for kind in KINDS:
        directory = make_draft(root / kind, tiny_target, **KINDS[kind])
        draft = LlamaEagle3DraftModel.from_pretrained(directory)
        for engine in ("speculators", "vllm", "sglang"):
            if (kind, engine) != ("peagle", "sglang"):
                out = root / f"{kind}-{engine}"
                options = {"engine": engine, "target": str(tiny_target), "check": CHECK}
                if engine == "speculators":  # they read the target's head from the named target
                    options["target_name"] = str(tiny_target)
                exports[kind, engine] = draft, export_draft(directory, out, **options)
    return exports


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(0)
    return torch.randn(T, 96), torch.randint(0, 400, (T,))


def captured(model, **inputs):
    """The outputs of their head at every step of their own forward pass."""
    logits = []
    handle = model.lm_head.register_forward_hook(lambda *args: logits.append(args[-1][0]))
    with torch.no_grad():
        model.eval()(**inputs)
    handle.remove()
    return logits


def check_whole(model, draft):
    """Check that every tensor of their model is loaded and equals ours."""
    theirs = dict(model.state_dict())
    for name, tensor in draft.state_dict().items():
        assert torch.equal(theirs.pop(name), tensor), name
    assert all(name.startswith("verifier_") for name in theirs)


def check_logits(model, draft, inputs):
    """Compare the logits of every slot at every depth."""
    aux_TD, ids_T = inputs
    theirs = captured(
        model, hidden_states=aux_TD[None], input_ids=ids_T[None], ttt_steps=DEPTHS,
        document_ids=torch.zeros(1, T, dtype=torch.long), position_ids=torch.arange(T)[None],
    )  # fmt: skip
    ones = torch.ones(1, T, dtype=torch.long)
    plan = plan_rollout(RowMasks(ones, ones), num_depths=DEPTHS)
    with torch.no_grad():
        states = draft.eval().unroll(
            plan.on_key_axis(aux_TD[None]), plan.on_key_axis(ids_T[None]), plan
        )
    assert len(theirs) == len(states) == DEPTHS
    for depth, state_NE in enumerate(states):
        ours = F.linear(state_NE, draft.lm_head.weight)
        slot_N = plan.slot_T[plan.depths[depth].slot_N]
        assert len(slot_N) == T - depth
        torch.testing.assert_close(theirs[depth][slot_N], ours, rtol=0, atol=1e-4)
        assert ours.std() > 0.1  # not a comparison of zeros


@pytest.mark.parametrize("kind", ["eagle3", "full vocabulary", "eagle3.1"])
def test_eagle3_loads_and_computes_our_logits(speculators, made, inputs, kind):
    draft, directory = made[kind, "speculators"]
    model = speculators.SpeculatorModel.from_pretrained(directory)
    assert model.config.speculators_model_type == "eagle3"
    check_whole(model, draft)
    check_logits(model, draft, inputs)


def test_a_local_target_is_found_in_the_working_directory(
    speculators, tiny_target, tmp_path, monkeypatch
):
    """Without a name for the target, the file contains only the last part of its path."""
    directory = make_draft(tmp_path / "draft", tiny_target)
    options = {"engine": "speculators", "target": str(tiny_target), "check": CHECK}
    out = export_draft(directory, tmp_path / "out", **options)
    monkeypatch.chdir(tiny_target.parent)
    model = speculators.SpeculatorModel.from_pretrained(out)
    head_VE = tensors_of(tiny_target)["lm_head.weight"]
    assert torch.equal(model.verifier_lm_head.weight, head_VE[model.t2d.bool()])


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_wrong_flag_is_detected(speculators, made, inputs, tmp_path, flag):
    draft, directory = made["eagle3.1", "speculators"]
    broken = shutil.copytree(directory, tmp_path / "broken")
    rewrite(broken, config=lambda values: values.__setitem__(flag, not values[flag]))
    model = speculators.SpeculatorModel.from_pretrained(broken)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(model, draft, inputs)


def test_peagle_loads_and_computes_our_logits(speculators, made, inputs, monkeypatch):
    from speculators.models.peagle import core

    draft, directory = made["peagle", "speculators"]
    model = speculators.SpeculatorModel.from_pretrained(directory)
    assert model.mask_token_id == draft.config.mask_token_id
    check_whole(model, draft)
    # all rollouts at all depths, instead of a random sample
    pairs = [(t, d) for d in range(DEPTHS) for t in range(T - d)]
    anchor, depth = (torch.tensor(column) for column in zip(*pairs, strict=True))
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchor, depth))
    aux_TD, ids_T = inputs
    [theirs] = captured(
        model, hidden_states=aux_TD[None], input_ids=ids_T[None], num_depths=DEPTHS,
        document_ids=torch.zeros(1, T, dtype=torch.long), loss_mask=torch.ones(1, T),
        verifier_last_hidden_states=torch.randn(1, T, 32),
        loss_config=core.resolve_loss_config("kl_div", "eager"),
    )  # fmt: skip
    with torch.no_grad():
        real = draft.eval().project_hidden_states(aux_TD)[anchor]
        hidden = torch.where((depth == 0)[:, None], real, draft.masked_projected_hidden())
        ids = torch.where(depth == 0, ids_T[anchor], draft.config.mask_token_id)
        mask = draft.build_peagle_block_mask(anchor, depth, [T], T)
        state = draft.forward_peagle(ids[None], hidden[None], (anchor + depth)[None], mask)
        ours = draft.compute_logits(state)[0]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    assert ours.std() > 0.1


def converted(directory, target, out):
    from speculators.convert.entrypoints import convert_model

    convert_model(
        model=str(directory), verifier=str(target), algorithm="eagle3", output_path=str(out),
        validate_device=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ["eagle3", "full vocabulary"])
def test_their_converter_takes_our_plain_exports(
    speculators, made, inputs, tiny_target, tmp_path, kind
):
    draft, directory = made[kind, "vllm"]
    out = converted(directory, tiny_target, tmp_path / "converted")
    model = speculators.SpeculatorModel.from_pretrained(out)
    check_whole(model, draft)
    check_logits(model, draft, inputs)


@pytest.mark.parametrize("kind", ["eagle3", "full vocabulary"])
def test_their_converter_takes_exports_without_embeddings(
    speculators, made, tiny_target, tmp_path, kind
):
    """An export for SGLang has no embeddings, so their converted files have none, which vLLM
    supports. Their loader (0.9.0) leaves such a table uninitialized, so only files are compared."""
    draft, directory = made[kind, "sglang"]
    theirs = tensors_of(converted(directory, tiny_target, tmp_path / "converted"))
    ours = draft.state_dict()
    assert theirs.keys() == ours.keys() - {"embed_tokens.weight"}
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
