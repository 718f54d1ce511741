"""Files of ours in other trainers' own loaders, and what these save in ours."""

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from export.block_cases import make_block
from export.export_cases import make_draft, rewrite, tensors_of
from fledge import export_draft
from fledge.formats.import_draft import import_draft
from fledge.formats.self_check import CheckOptions

pytestmark = pytest.mark.engine

REASON = "make test-trainers installs it"
CHECK = CheckOptions(limit=1, max_new_tokens=4)
DRAFTS = {
    "eagle3": {},
    "whole vocabulary": {"draft_vocab_size": None},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "peagle": {"parallel_drafting": True, "mask_token_id": 0, "num_hidden_layers": 2},
}
_DSPARK = {"sample_from_anchor": True, "markov_rank": 8, "confidence_head": True}
BLOCKS = {"dflash": {}, "dspark": _DSPARK}


@pytest.fixture(scope="module")
def written(tiny_target, tmp_path_factory):
    """kind, engine -> (our files, the files to load): the same, or exported for an engine."""
    root = tmp_path_factory.mktemp("trainers")

    def make(kind, engine):
        ours, out = root / kind, root / f"{kind}-{engine}"
        if not ours.exists():
            if kind in DRAFTS:
                make_draft(ours, tiny_target, **DRAFTS[kind])
            else:
                make_block(ours, **BLOCKS[kind])
            rewrite(ours, tensors=round_to_bfloat16)
        if engine is None:
            return ours, ours
        if not out.exists():
            target = str(tiny_target)
            named = {"target_name": target} if engine == "speculators" else {}  # they open it
            export_draft(ours, out, engine=engine, target=target, check=CHECK, **named)
        return ours, out

    return make


def round_to_bfloat16(tensors):
    """AutoModel holds norms in bfloat16, whatever the rest is in."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.bfloat16().to(tensor.dtype)


def load(kind, directory, *, missing=(), **options):
    """Their model, with every weight from the files except those in `missing`."""
    model, report = kind.from_pretrained(directory, output_loading_info=True, **options)
    assert set(report["missing_keys"]) == set(missing)
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model


def assert_holds(model, ours, *, rename=lambda name: name, shared=()):
    """Check that a model has exactly our tensors, and otherwise only those in `shared`."""
    theirs = {rename(name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in tensors_of(ours).items():
        if name not in shared:
            assert torch.equal(theirs.pop(name).to(tensor.dtype), tensor), name
    assert theirs.keys() <= set(shared)


def assert_imported(model, ours, tmp_path, target):
    """Check that what they save comes back as our draft, bit for bit."""
    model.save_pretrained(tmp_path / "theirs")
    import_draft(tmp_path / "theirs", tmp_path / "imported", target=str(target))
    imported, expected = tensors_of(tmp_path / "imported"), tensors_of(ours)
    assert imported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(imported[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("engine", [None, "vllm"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_automodel(written, tiny_target, tmp_path, kind, engine):
    pytest.importorskip("nemo_automodel", reason=REASON)
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

    ours, files = written(kind, engine)
    model = load(LlamaEagle3DraftModel, files, attn_implementation="eager")
    assert_holds(model, ours, rename=lambda name: name.removeprefix("model."))
    # as their recipe writes it: a copy of the target's config, with that number of layers
    model.config.num_hidden_layers = 4 if kind != "peagle" else 2
    assert_imported(model, ours, tmp_path, tiny_target)


@pytest.mark.parametrize("kind", ["eagle3", "whole vocabulary"])
def test_specforge(written, tiny_target, tmp_path, kind):
    """From the files for SGLang, which they train for. The embeddings are the target's."""
    pytest.importorskip("specforge", reason=REASON)
    from specforge.modeling.auto import AutoDraftModel

    ours, files = written(kind, "sglang")
    maps = {"d2t", "t2d"} if kind == "whole vocabulary" else set()
    missing = {"embed_tokens.weight", *maps}
    model = load(AutoDraftModel, files, missing=missing)
    assert_holds(
        model, ours, shared=missing, rename=lambda name: name.replace("midlayer.", "layers.0.")
    )
    model.embed_tokens.weight.data = tensors_of(ours)["embed_tokens.weight"]
    if maps:  # which loading left uninitialized
        model.t2d.fill_(True)
        model.d2t.zero_()
    assert_imported(model, ours, tmp_path, tiny_target)


def test_specforge_peagle(written, tiny_target, tmp_path):
    pytest.importorskip("specforge", reason=REASON)
    from specforge.modeling.draft.peagle import PEagleDraftModel

    ours, files = written("peagle", "vllm")
    model = PEagleDraftModel.from_pretrained(files)  # it cannot report what it loaded
    assert_holds(model, ours)
    model.config.mask_token_id = 0  # theirs is a setting of the run
    assert_imported(model, ours, tmp_path, tiny_target)


def _block_classes():
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
    from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    return {
        ("nemo_automodel", "dflash"): Qwen3DFlashDraftModel,
        ("nemo_automodel", "dspark"): Qwen3DSparkModel,
        ("specforge", "dflash"): DFlashDraftModel,
        ("specforge", "dspark"): DSparkDraftModel,
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("trainer", "kind"),
    [("nemo_automodel", "dflash"), ("nemo_automodel", "dspark"), ("specforge", "dflash")],
)
def test_blocks(written, tiny_target, tmp_path, trainer, kind, engine):
    """Embedding and head are the target's."""
    pytest.importorskip(trainer, reason=REASON)
    ours, files = written(kind, engine)
    shared = ("embed_tokens.weight", "lm_head.weight")
    own = shared if (trainer, kind) == ("nemo_automodel", "dspark") else ()
    config = Qwen3Config.from_pretrained(files)
    config.num_anchors = 64  # of a run of theirs
    model = load(_block_classes()[trainer, kind], files, missing=own, config=config)
    assert_holds(model, ours, shared=shared)
    assert_imported(model, ours, tmp_path, tiny_target)


def test_specforge_dspark(written, tiny_target, tmp_path):
    """Their class reads its heads' settings from `dflash_config`, where engines do not look."""
    pytest.importorskip("specforge", reason=REASON)
    ours, files = written("dspark", "vllm")
    config = Qwen3Config.from_pretrained(files)
    config.dflash_config = {
        name: getattr(config, name)
        for name in (
            "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type",
            "enable_confidence_head", "confidence_head_with_markov",
        )
    }  # fmt: skip
    model = load(_block_classes()["specforge", "dspark"], files, config=config)
    assert_holds(model, ours)
    assert_imported(model, ours, tmp_path, tiny_target)


@pytest.mark.parametrize("kind", [*DRAFTS, *BLOCKS])
def test_speculators(written, tiny_target, tmp_path, kind):
    """That their classes load our exports, and compute our logits, is tested in tests/export."""
    speculators = pytest.importorskip("speculators", reason=REASON)
    ours, files = written(kind, "speculators")
    model = speculators.SpeculatorModel.from_pretrained(files)
    assert_imported(model, ours, tmp_path, tiny_target)


# --- ModelOpt: a draft is part of its target until it is exported ---------------------------------


@pytest.fixture(scope="module")
def deep_target(tiny_target, tmp_path_factory):
    """The tiny target with eight layers: ModelOpt chooses the layers that a draft reads."""
    path = shutil.copytree(tiny_target, tmp_path_factory.mktemp("modelopt") / "target")
    config = AutoConfig.from_pretrained(tiny_target, num_hidden_layers=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


MODELOPT = {
    "eagle3": ("eagle", "EagleExporter", {"draft_vocab_size": 90, "has_lm_head": True}),
    "dflash": ("dflash", "DFlashExporter", {}),
    "dspark": ("dflash", "DSparkExporter", {"projector_type": "dspark", "markov_rank": 8}),
    "domino": (
        "dflash", "DominoExporter",
        {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 12,
         "pure_draft_prefix_len": 1, "shift_label": True},
    ),
}  # fmt: skip


def modelopt_export(kind, target, out):
    """A random draft as ModelOpt makes and exports it."""
    from modelopt.torch import speculative
    from modelopt.torch.export.plugins import hf_spec_export
    from modelopt.torch.speculative.eagle.default_config import default_eagle_config

    mode, exporter, changes = MODELOPT[kind]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    changes = {"num_hidden_layers": 1, "intermediate_size": 48, **sizes, **changes}
    settings = {f"{mode}_use_torch_compile": False}
    if mode == "eagle":
        aux = {"use_aux_hidden_state": True, "use_last_layernorm": True, "torch_dtype": "float32"}
        settings |= {
            "eagle_export_rope_scaling": {}
        }  # by default they write another rotary scaling
        changes = default_eagle_config | changes | aux
    else:
        settings |= {"dflash_mask_token_id": 0}
        changes |= {"use_confidence_head": kind == "dspark"}
    model = AutoModelForCausalLM.from_pretrained(target)
    speculative.convert(model, [(mode, settings | {f"{mode}_architecture_config": changes})])
    if mode == "eagle":
        ids = torch.randperm(400)[:90].sort().values
        model.eagle_module.d2t.copy_(ids - torch.arange(90))
    getattr(hf_spec_export, exporter)(model).export(out)
    return out


@pytest.mark.parametrize("kind", MODELOPT)
def test_modelopt(deep_target, tmp_path, kind):
    pytest.importorskip("modelopt", reason=REASON)
    theirs = modelopt_export(kind, deep_target, tmp_path / "theirs")
    import_draft(theirs, tmp_path / "ours", target=str(deep_target))
    ours, heads = tensors_of(tmp_path / "ours"), {}
    if kind == "dspark":
        heads = {"markov_w": "markov_head.markov_w", "confidence_proj.": "confidence_head.proj."}
    if kind == "domino":
        heads = {name: f"domino_head.{name}" for name in ("prefix_gru.", "embed_proj.")}
    for name, tensor in tensors_of(theirs).items():
        for beginning, own in heads.items():
            if name.startswith(beginning):
                name = own + name.removeprefix(beginning)
        assert torch.equal(ours.pop(name), tensor), name
    assert set(ours) <= {"embed_tokens.weight", "t2d"}
