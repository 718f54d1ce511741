"""DFlash and DSpark exports in the real speculators package: all tensors loaded, equal logits."""

import shutil

import pytest
import torch
from torch.nn import functional as F

from export.block_cases import KINDS, make_block, whole_block
from export.export_cases import rewrite
from fledge import export_draft
from fledge.formats.self_check import CheckOptions
from fledge.methods.block.plan import lay_out_blocks, supervised_blocks
from fledge.rollout.slots import RowMasks, flatten_slots

pytestmark = pytest.mark.engine

CHECK = CheckOptions(limit=2, max_new_tokens=8)
T, SLOTS = 24, 5
ANCHORS = range(1, T - SLOTS)
READ = ["dflash", "dflash, small vocabulary", "dspark", "dspark, small vocabulary"]


@pytest.fixture(scope="module")
def made(speculators, tiny_target, tmp_path_factory):
    """kind -> (our draft, its export)."""
    root = tmp_path_factory.mktemp("speculators-blocks")
    exports = {}
    for kind in READ:
        draft_dir = make_block(root / kind, **KINDS[kind])
        target_path = str(tiny_target)  # they read the shared tables from the named target
        options = {
            "engine": "speculators",
            "target": target_path,
            "target_name": target_path,
            "check": CHECK,
        }
        out = export_draft(draft_dir, root / f"{kind}-out", **options)
        exports[kind] = whole_block(draft_dir, tiny_target), out
    return exports


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(T, 64), torch.randint(4, 400, (T,))


def load(speculators, directory):
    """Their model, with attention that runs on this CPU."""
    from speculators.models.attention import create_float_mask

    model = speculators.SpeculatorModel.from_pretrained(directory)
    layers = model.config.transformer_layer_config
    layers._attn_implementation = model._attn_impl = "eager"
    model._create_mask_fn = create_float_mask
    return model.eval()


def check_whole(model, draft):
    """Check that their model has all of our tensors, and otherwise only the target's."""
    theirs = dict(model.state_dict())
    for name, tensor in draft.state_dict().items():
        assert torch.equal(theirs.pop(name), tensor), name
    shared = ("verifier_", "embed_tokens.", "lm_head.")
    assert all(name.startswith(shared) for name in theirs)
    for name in ("lm_head", "embed_tokens"):
        assert torch.equal(getattr(model, name).weight, getattr(draft, name).weight), name


@torch.no_grad()
def their_blocks(model, inputs, monkeypatch):
    """Their logits [N, J, W] at all anchors, and Markov biases and confidences if any."""
    from speculators.models.dflash import core

    anchor_N = torch.tensor(list(ANCHORS))
    chosen = (anchor_N, torch.ones(len(anchor_N), dtype=torch.bool))
    monkeypatch.setattr(core, "select_anchors", lambda *_: chosen)
    aux_TD, ids_T = inputs
    seen = {}
    for name in ("lm_head", "markov_head.markov_w2", "confidence_head"):
        module = dict(model.named_modules()).get(name)
        if module is not None:
            module.register_forward_hook(lambda *a, name=name: seen.__setitem__(name, a[-1]))
    options = {"loss_config": core.resolve_loss_config("kl_div", "eager")}
    if "markov_head.markov_w2" in dict(model.named_modules()):
        options["tv_loss_fn"] = core.resolve_loss_config("tv", "eager")["tv"][0]
    model(
        hidden_states=aux_TD[None], input_ids=ids_T[None], loss_mask=torch.ones(1, T),
        verifier_last_hidden_states=torch.randn(1, T, 32), max_anchors=len(anchor_N),
        document_ids=torch.zeros(1, T, dtype=torch.long),
        **options,
    )  # fmt: skip
    return {name: value.reshape(len(anchor_N), SLOTS, -1) for name, value in seen.items()}


@torch.no_grad()
def our_blocks(draft, inputs):
    """The same from our model, which training, replay and decoding share."""
    aux_TD, ids_T = inputs
    ones = torch.ones(1, T, dtype=torch.long)
    slots = flatten_slots(RowMasks(ones, ones))
    place = (SLOTS, draft.spec.first_place)
    supervised_SK = supervised_blocks(
        slots, slots.target, slots.target, draft.spec.drafts, contiguous=False
    )
    plan = lay_out_blocks(slots, supervised_SK, place, device=torch.device("cpu"))
    aux = plan.on_key_axis(aux_TD[None])
    ids = plan.on_key_axis(ids_T.roll(-1)[None])  # a slot holds the token after its features
    rows = plan.blocks
    states = draft(aux, ids.index_select(0, rows.slot_N), plan.position_T, rows)
    newest_N = plan.position_T[rows.slot_N] + 1  # the position that each block starts with
    states = states[[newest_N.tolist().index(anchor) for anchor in ANCHORS]]
    outputs = {"lm_head": F.linear(states, draft.lm_head.weight)}
    if draft.token_head is not None:
        place_NJ = torch.tensor(list(ANCHORS))[:, None] + torch.arange(SLOTS)
        features = draft.token_head.features(ids_T[place_NJ], torch.empty(0), None)
        outputs["markov_head.markov_w2"] = F.linear(features, draft.token_head.out_WR)
        outputs["confidence_head"] = draft.confidence_head(states, features)[..., None]
    return outputs


@pytest.mark.parametrize("kind", READ)
def test_they_load_and_compute_our_logits(speculators, made, inputs, monkeypatch, kind):
    draft, directory = made[kind]
    model = load(speculators, directory)
    assert model.config.speculators_model_type == kind.partition(",")[0]
    check_whole(model, draft)
    theirs, ours = their_blocks(model, inputs, monkeypatch), our_blocks(draft, inputs)
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-4)
        assert value.std() > 0.05


BREAKS = {
    "mask token": {"config": lambda values: values.update(mask_token_id=7)},
    "rotary": {
        "config": lambda values: values["transformer_layer_config"]["rope_parameters"].update(
            rope_theta=1e4
        )
    },
    "norm of features": {"tensors": lambda state: state["hidden_norm.weight"].fill_(1.0)},
    "sliding": {
        "config": lambda values: values["transformer_layer_config"].update(
            layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=3
        )
    },
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_wrong_file_is_detected(speculators, made, inputs, monkeypatch, tmp_path, fault):
    draft, directory = made["dflash"]
    broken = shutil.copytree(directory, tmp_path / "broken")
    rewrite(broken, **BREAKS[fault])
    theirs = their_blocks(load(speculators, broken), inputs, monkeypatch)
    difference = (theirs["lm_head"] - our_blocks(draft, inputs)["lm_head"]).abs().max()
    assert difference > 1e-2
