"""Drafts as GGUF files: read back by a reader of its own, refused where the format cannot hold
them, quantised. What a real llama.cpp does with them: tests/engines/llamacpp."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
import torch

from export import block_cases, export_cases
from export.export_cases import AUX, CHECK, make_draft
from fledge import export_draft
from fledge.core.errors import BadInput
from fledge.formats import export as export_module
from fledge.formats.codec import PlainDraft
from fledge.formats.export import read_export_record
from fledge.formats.gguf_tokenizer import tokenizer_keys
from fledge.formats.quantise import choose_types, decoded, encoded, file_bytes, types_of
from fledge.formats.reread import TargetSide, reread

SCALED = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
HELD = {
    "eagle3": {},
    "full vocabulary": {"draft_vocab_size": None},
    "own embeddings": {"target": None},
    "llama3 rotary": {"rope_parameters": LLAMA3},
    "yarn rotary": {"rope_parameters": {**SCALED, "rope_type": "yarn"}},
    "linear rotary": {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}},
}
BLOCKS = ("dflash", "dflash, small vocabulary", "dspark", "dspark, small vocabulary",
          "dspark without confidence")  # fmt: skip
REFUSED = {
    "several layers": {"num_hidden_layers": 2},
    "not three aux layers": {"aux_layer_ids": [0, 2], "num_aux_hidden_states": 2},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "q/k norms": {"qk_norm": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "partial rotary": {"rope_parameters": PARTIAL},
    "yarn attention factor": {
        "rope_parameters": {**SCALED, "rope_type": "yarn", "attention_factor": 1.5}
    },
    "last layer": {"aux_layer_ids": AUX},
}
REFUSED_BLOCKS = {
    "causal blocks": {"causal": True},
    "sliding layers": {"sliding_layers": [0], "sliding_window": 6},
    "llama3 rotary of blocks": {"rope_parameters": LLAMA3},
}


def made(kind, target, directory):
    if kind in block_cases.KINDS:
        return block_cases.make_block(directory, **block_cases.KINDS[kind])
    options = {"target": target} | HELD[kind]
    return make_draft(directory, options.pop("target"), **options)


def exported(draft, out, target, **options):
    options = {"check": CHECK} | options
    return export_draft(draft, out, engine="llama.cpp", target=str(target), **options)


@pytest.mark.parametrize("kind", [*HELD, *BLOCKS])
def test_every_number_is_read_back(kind, tiny_target, tmp_path):
    """The self-check compares tensors bit for bit, and decodes."""
    draft = made(kind, tiny_target, tmp_path / "draft")
    out = exported(draft, tmp_path / "out", tiny_target)
    assert {file.name for file in out.iterdir()} == {
        "README.md",
        "draft.gguf",
        "fledge_export.json",
    }
    record = read_export_record(out)
    assert record["self_check"]["decoded"]["same_as_checkpoint"]
    own = "embed_tokens.weight" in reread(out, "llama.cpp", TargetSide(4)).tensors
    assert own == (kind == "own embeddings")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_half_precision(kind, dtype, tiny_target, tmp_path):
    draft = made(kind, tiny_target, tmp_path / "draft")
    out = exported(draft, tmp_path / "out", tiny_target, dtype=dtype, without_target=True)
    assert reread(out, "llama.cpp", TargetSide(4)).tensors["fc.weight"].dtype == dtype


@pytest.mark.parametrize("feature", [*REFUSED, *REFUSED_BLOCKS])
def test_what_the_format_cannot_hold_is_refused(feature, tiny_target, tmp_path):
    if feature in REFUSED_BLOCKS:
        draft = block_cases.make_block(tmp_path / "draft", **REFUSED_BLOCKS[feature])
    else:
        draft = make_draft(tmp_path / "draft", tiny_target, **REFUSED[feature])
    with pytest.raises(BadInput, match=f"cannot serve a draft with {feature}"):
        exported(draft, tmp_path / "out", tiny_target)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_other_methods_and_targets_are_refused(tiny_target, tmp_path):
    parallel = export_cases.KINDS["peagle"]
    draft = make_draft(tmp_path / "draft", tiny_target, **parallel)
    with pytest.raises(BadInput, match="does not read P-EAGLE"):
        exported(draft, tmp_path / "out", tiny_target)
    draft = make_draft(tmp_path / "eagle3", tiny_target)
    with pytest.raises(BadInput, match="its tokenizer goes into the file"):
        exported(draft, tmp_path / "out", "", without_target=True)
    with pytest.raises(BadInput, match="reads no quantised drafts"):
        export_draft(draft, tmp_path / "out", engine="vllm", target=str(tiny_target),
                     quantise="q8_0")  # fmt: skip


def _keys(**changed):
    return lambda path, layout, draft, keys, tokenizer: (layout, draft, keys | changed, tokenizer)


def _layout(**changed):
    return lambda path, layout, draft, keys, tokenizer: (
        dataclasses.replace(layout, **changed), draft, keys, tokenizer,
    )  # fmt: skip


def _tensors(change):
    def changed(path, layout, draft, keys, tokenizer):
        tensors = {**draft.tensors, **change(draft.tensors)}
        return layout, PlainDraft(draft.config, tensors), keys, tokenizer

    return changed


WRONG = {
    "layers": ("eagle3", _keys(target_layers=[2, 3, 4])),
    "layers of a block": ("dflash", _keys(target_layers=[2, 3])),
    "rotary base": ("eagle3", _keys(**{"rope.freq_base": 7.0})),
    "norm": ("eagle3", _keys(**{"attention.layer_norm_rms_epsilon": 1e-3})),
    "residual": ("eagle3", _keys(norm_before_residual=True)),
    "block": ("dflash", _keys(block_size=4)),
    "placeholder": ("dflash", _keys(**{"tokenizer.ggml.mask_token_id": 7})),
    "first slot": ("dspark", _keys(sample_from_anchor=False)),
    "order of q and k": ("eagle3", _layout(pairs_channels=False)),
    "order of q and k of a block": ("dflash", _layout(pairs_channels=True)),
    "offsets": ("eagle3", _tensors(lambda t: {"d2t": t["d2t"] - torch.arange(len(t["d2t"]))})),
    "gate and up": (
        "eagle3",
        _tensors(lambda t: {"layers.0.mlp.gate_proj.weight": t["layers.0.mlp.up_proj.weight"]}),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_self_check_notices(wrong, tiny_target, tmp_path, monkeypatch):
    kind, change = WRONG[wrong]
    write = export_module.write_gguf

    def changed(path, *arguments, **options):
        write(path, *change(path, *arguments), **options)

    monkeypatch.setattr(export_module, "write_gguf", changed)
    draft = made(kind, tiny_target, tmp_path / "draft")
    with pytest.raises(BadInput, match="self-check"):
        exported(draft, tmp_path / "out", tiny_target, without_target=True)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_killed_export_leaves_nothing_that_looks_finished(tiny_target, tmp_path):
    draft, out = made("eagle3", tiny_target, tmp_path / "draft"), tmp_path / "served" / "out"
    child = os.fork()
    if not child:
        try:
            export_module.check_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            exported(draft, out, tiny_target, without_target=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not out.exists()
    [left] = out.parent.iterdir()
    assert left.name.startswith(".out.")
    assert not (left / "fledge_export.json").exists()
    exported(draft, out, tiny_target, without_target=True)


# --- the tokenizer --------------------------------------------------------------------------------


def test_the_tokenizer_is_the_targets(tiny_target, tmp_path):
    keys = tokenizer_keys(str(tiny_target), 400)
    values = json.loads((tiny_target / "tokenizer.json").read_text())
    tokens = keys["tokenizer.ggml.tokens"]
    vocabulary = values["model"]["vocab"]
    assert len(tokens) == len(keys["tokenizer.ggml.token_type"]) == 400
    assert all(tokens[index] == token for token, index in vocabulary.items())
    assert tokens[-1] == "[PAD399]" or 399 in vocabulary.values()
    from gguf import GGUFWriter

    writer = GGUFWriter(path := tmp_path / "target.gguf", "llama")
    writer.add_string("tokenizer.ggml.pre", "something new")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    copied = {"tokenizer.ggml.pre": "something new", "tokenizer.ggml.tokens": tokens}
    assert tokenizer_keys(str(path), 400) == copied  # of a GGUF target: as they are


def test_an_unknown_split_of_text_is_refused(tiny_target, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    values = json.loads((target / "tokenizer.json").read_text())
    values["pre_tokenizer"] = {"type": "Whitespace"}
    (target / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(BadInput, match="has no name that we know"):
        tokenizer_keys(str(target), 400)


# --- quantised ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bits", "error"), [
    ("Q8_0", 8.5, 0.007), ("Q6_K", 6.5625, 0.02), ("Q5_0", 5.5, 0.05), ("Q4_K", 4.5, 0.08),
])  # fmt: skip
def test_blocks(kind, bits, error):
    from gguf import quants

    torch.manual_seed(0)
    weights = torch.randn(48, 512) * torch.rand(48, 1).exp()
    weights[3], weights[4, :40] = 0, 0
    blocks = encoded(weights, kind)
    assert blocks.data.nbytes * 8 == bits * weights.numel()
    back = torch.from_numpy(quants.dequantize(blocks.data, blocks.kind))
    assert (back - weights).norm() < error * weights.norm()
    assert not back[3].any()


def wide():
    """A draft of which only the head and the MLP's output matter, to `lost` below."""
    shapes = {"fc.weight": (64, 192), "layers.0.mlp.down_proj.weight": (64, 512),
              "lm_head.weight": (90, 64), "norm.weight": (64,)}  # fmt: skip
    return PlainDraft(None, {name: torch.randn(shape) for name, shape in shapes.items()})


def lost(sets):
    cost = {"Q8_0": 0.0005, "Q5_0": 0.004, "Q6_K": 0.008, "Q4_K": 0.1}
    return [2.0 * (1 - sum(cost[kind] for kind in types.values())) for types in sets]


def test_auto_takes_the_smallest_file_within_one_percent():
    draft = wide()
    small = {"fc.weight": "Q5_0", "layers.0.mlp.down_proj.weight": "Q6_K", "lm_head.weight": "Q8_0"}
    assert types_of(draft, "q4_k_m", ()) == small
    assert set(types_of(draft, "q8_0", {"fc.weight"}).values()) == {"Q8_0"}
    chosen = choose_types(draft, "auto", (), lost)
    assert chosen.types == small | {"layers.0.mlp.down_proj.weight": "Q8_0"}
    assert chosen.full_length == 2.0
    assert chosen.length == lost([chosen.types])[0]
    assert chosen.each["layers.0.mlp.down_proj.weight"] == 2.0 * 0.992
    assert file_bytes(draft, small) < file_bytes(draft, chosen.types) < file_bytes(draft, {})
    assert choose_types(draft, "q4_k_m", (), None).types == small
    numbers = decoded(draft, small).tensors
    assert torch.equal(numbers["norm.weight"], draft.tensors["norm.weight"])
    assert not torch.equal(numbers["fc.weight"], draft.tensors["fc.weight"])


@pytest.mark.parametrize("kind", ["eagle3", "dspark, small vocabulary"])
def test_a_quantised_draft_is_read_back_and_decodes(kind, tiny_target, tmp_path):
    draft = made(kind, tiny_target, tmp_path / "draft")
    out = exported(draft, tmp_path / "out", tiny_target, quantise="q8_0")
    record = read_export_record(out)
    assert record["dtype"] == "q8_0"
    assert set(record["quantised"]["types"].values()) == {"Q8_0"}
    assert record["quantised"]["length"] is None  # there is no run
    with pytest.raises(BadInput, match="held-out rows"):
        exported(draft, tmp_path / "auto", tiny_target, quantise="auto")
    with pytest.raises(BadInput, match="'q2' is not a kind"):
        exported(draft, tmp_path / "auto", tiny_target, quantise="q2")


def test_a_run_is_quantised_by_its_held_out_rows(tiny_target, tiny_chats, tmp_path):
    from fledge.formats.self_check import CheckOptions
    from fledge.training.fit import fit
    from fledge.training.setup import set_up
    from train.tiny import Notes, recipe_for

    recipe = recipe_for(tiny_target, tiny_chats, tmp_path / "run", "training.epochs=1",
                        "target.aux_layer_ids=[0,1,2]")  # fmt: skip
    fit(set_up(recipe), Notes())
    check = CheckOptions(limit=2, max_new_tokens=8, shortfall=1.0)
    out = export_draft(tmp_path / "run", tmp_path / "out", engine="llama.cpp", quantise="auto",
                       check=check)  # fmt: skip
    record = read_export_record(out)
    chosen, measured = record["quantised"], record["self_check"]["same_rows"]
    assert chosen["full_length"] == pytest.approx(record["self_check"]["estimate"])
    assert chosen["length"] == pytest.approx(measured)  # the file does what was chosen
    assert measured >= 0.99 * chosen["full_length"]
    assert chosen["each"].keys() == chosen["types"].keys()
