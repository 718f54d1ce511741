"""The draft network: tensor names, vocabulary maps, the split projection, files."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from fledge import BadInput, LlamaEagle3DraftModel
from fledge.methods.shared.rotary import _in_both_spellings, rope_parameters


def make_config(**changes):
    settings = {
        "vocab_size": 23, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "draft_vocab_size": 9, "target_hidden_size": 10,
    }  # fmt: skip
    return LlamaConfig(**(settings | changes))


def make_draft(**changes):
    torch.manual_seed(0)
    return LlamaEagle3DraftModel(make_config(**changes))


def some_vocabulary():
    ids = torch.tensor([0, 2, 3, 7, 11, 12, 18, 20, 22])
    mask = torch.zeros(23, dtype=torch.bool)
    mask[ids] = True
    return ids, mask


LAYER = {
    "self_attn.q_proj.weight": (24, None),
    "self_attn.k_proj.weight": (12, None),
    "self_attn.v_proj.weight": (12, None),
    "self_attn.o_proj.weight": (12, 24),
    "mlp.gate_proj.weight": (20, 12),
    "mlp.up_proj.weight": (20, 12),
    "mlp.down_proj.weight": (12, 20),
    "input_layernorm.weight": (12,),
    "post_attention_layernorm.weight": (12,),
}


def test_state_dict_has_the_expected_layout():
    draft = make_draft(num_hidden_layers=2, fc_norm=True, norm_output=True)
    expected = {
        "embed_tokens.weight": (23, 12),
        "fc.weight": (12, 30),
        "norm.weight": (12,),
        "lm_head.weight": (9, 12),
        "d2t": (9,),
        "t2d": (23,),
        "layers.0.hidden_norm.weight": (12,),
    }
    expected |= {f"fc_norm.{i}.weight": (10,) for i in range(3)}
    for index, width in ((0, 24), (1, 12)):
        for name, shape in LAYER.items():
            expected[f"layers.{index}.{name}"] = tuple(width if n is None else n for n in shape)
    assert {name: tuple(t.shape) for name, t in draft.state_dict().items()} == expected
    assert draft.d2t.dtype == torch.int64
    assert draft.t2d.dtype == torch.bool


def test_a_full_vocabulary_has_no_maps():
    draft = make_draft(draft_vocab_size=None)
    assert draft.lm_head.weight.shape == (23, 12)
    assert not {"d2t", "t2d"} & set(draft.state_dict())
    assert not any(name.startswith(("fc_norm", "mask_hidden")) for name in draft.state_dict())
    draft.set_vocab_mapping(torch.arange(23), torch.ones(23, dtype=torch.bool))


def test_d2t_is_an_offset():
    draft = make_draft()
    assert draft.selected_token_ids is None
    ids, mask = some_vocabulary()
    draft.set_vocab_mapping(ids, mask)
    assert (torch.arange(9) + draft.d2t).tolist() == ids.tolist()
    assert torch.equal(draft.t2d, mask)
    assert torch.equal(draft.selected_token_ids, ids)
    draft.set_vocab_mapping(ids.int(), mask.float())  # setting the same map again is fine


def test_invalid_maps_are_rejected():
    ids, mask = some_vocabulary()
    other = mask.roll(1)
    twice = ids.clone()
    twice[0] = twice[1]
    negative = torch.where(ids == 22, -1, ids)  # same token as an index, another one in d2t
    bad_maps = [(ids[:-1], mask), (ids, mask[:-1]), (ids, other), (twice, mask)]
    bad_maps += [(negative, mask), (ids + 23, mask), (ids.float(), mask)]
    for bad_ids, bad_mask in bad_maps:
        with pytest.raises(ValueError, match="selected_token"):
            make_draft().set_vocab_mapping(bad_ids, bad_mask)
    draft = make_draft()
    draft.set_vocab_mapping(ids, mask)
    with pytest.raises(ValueError, match="another map"):
        draft.set_vocab_mapping(other.nonzero().flatten(), other)


def test_embeddings_and_head_come_from_the_target():
    draft = make_draft()
    table = torch.nn.Embedding(23, 12)
    head = torch.nn.Linear(12, 23, bias=False)
    draft.copy_embeddings_from_target(table)
    assert torch.equal(draft.embed_tokens.weight, table.weight)
    with pytest.raises(ValueError, match="mapping"):
        draft.copy_head_from_target(head)
    ids, mask = some_vocabulary()
    draft.set_vocab_mapping(ids, mask)
    draft.copy_head_from_target(head)
    assert torch.equal(draft.lm_head.weight, head.weight[ids])
    with pytest.raises(ValueError, match="embedding"):
        draft.copy_embeddings_from_target(torch.nn.Embedding(22, 12))


def test_casting_the_draft_keeps_fp32_angles():
    draft = make_draft()
    position = torch.tensor([63])
    before = draft.rotary(position, torch.float32)
    draft.to(torch.bfloat16)
    assert torch.equal(draft.rotary(position, torch.float32)[0], before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_draft_is_loaded_back_bitwise(tmp_path, dtype):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    draft = make_draft(
        fc_norm=True, norm_output=True, num_hidden_layers=2, rope_theta=5e5, rope_scaling=rope
    ).to(dtype)
    draft.set_vocab_mapping(*some_vocabulary())
    draft.save_pretrained(tmp_path / "draft")
    loaded = LlamaEagle3DraftModel.from_pretrained(tmp_path / "draft")
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert tensor.dtype == loaded.state_dict()[name].dtype
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    for name in ("fc_norm", "norm_output", "draft_vocab_size", "target_hidden_size", "head_dim"):
        assert getattr(loaded.config, name) == getattr(draft.config, name)
    assert torch.equal(loaded.rotary.inv_freq, draft.rotary.inv_freq)
    assert loaded.rotary.scale == draft.rotary.scale != 1.0
    assert (
        LlamaEagle3DraftModel.from_pretrained(
            tmp_path / "draft", dtype=torch.float64
        ).fc.weight.dtype
        == torch.float64
    )


def test_config_json_has_the_fields_that_engines_read(tmp_path):
    draft = make_draft(rope_theta=5e5)
    draft.save_pretrained(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config.items() >= {
        "model_type": "llama", "vocab_size": 23, "draft_vocab_size": 9, "num_hidden_layers": 1,
        "tie_word_embeddings": False, "rope_theta": 5e5, "target_hidden_size": 10,
    }.items()  # fmt: skip
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["rope_parameters"]["rope_theta"] == 5e5
    assert sorted(p.name for p in (tmp_path / "draft").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip


def test_loading_reports_what_is_missing(tmp_path):
    with pytest.raises(BadInput, match=r"config\.json"):
        LlamaEagle3DraftModel.from_pretrained(tmp_path)
    make_draft().save_pretrained(tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["extra"] = tensors.pop("fc.weight")
    save_file(tensors, path)
    with pytest.raises(BadInput, match=r"tensors missing: fc\.weight, unknown: extra;"):
        LlamaEagle3DraftModel.from_pretrained(tmp_path / "draft")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", "the config cannot be read (not JSON"),
        (b"\xff\xfe", "the config cannot be read (not JSON"),
        (b"[1]", "it is [1], expected an object"),
        (b'{"rms_norm_eps": NaN}', "'rms_norm_eps' is nan"),
        (b"{}", "shape than config.json says"),  # a default Llama of 32 layers, never built
        ({"hidden_size": "big"}, "'hidden_size' is 'big', expected a whole number"),
        ({"hidden_size": 10**9}, "'hidden_size' is 1000000000, expected"),
        ({"hidden_size": 10**7}, "shape than config.json says: embed_tokens.weight"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ({"qk_norm": 3}, "'qk_norm' is 3, expected true or false"),
        ({"head_dim": 2**23}, "head_dim"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e9}}, "partial"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "rope_parameters.factor"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"draft_vocab_size": 10**9}, "draft_vocab_size"),
        ({"num_hidden_layers": 9}, "and 6"),  # the list of names is shortened
        (
            {"intermediate_size": 7},
            "shape than config.json says: layers.0.mlp.down_proj",
        ),
    ],
)
def test_a_broken_config_gives_a_short_error(tmp_path, config, message):
    make_draft().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if isinstance(config, dict):
        config = json.dumps({**json.loads(path.read_text()), **config}).encode()
    path.write_bytes(config)
    with pytest.raises(BadInput) as caught:
        LlamaEagle3DraftModel.from_pretrained(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_rope_settings_are_written_in_both_spellings_of_transformers():
    """transformers 4 reads `rope_scaling` and `rope_theta` where 5 reads `rope_parameters`."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    config = SimpleNamespace(rope_parameters=rope)
    copied = _in_both_spellings(config, rope_parameters(config))
    assert copied.rope_parameters == copied.rope_scaling == rope
    assert (copied.rope_theta, copied.partial_rotary_factor) == (500.0, 1.0)
    assert vars(config) == {"rope_parameters": rope}  # a copy


@pytest.mark.parametrize("content", [b"", b"\x00" * 999, "half", "nan"])
def test_broken_weights_are_rejected(tmp_path, content):
    make_draft().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    if content == "nan":
        tensors = load_file(path)
        tensors["fc.weight"][0, 0] = torch.nan
        save_file(tensors, path)
    else:
        path.write_bytes(path.read_bytes()[:4000] if content == "half" else content)
    with pytest.raises(
        BadInput, match="NaN or infinity: tensor fc.weight" if content == "nan" else "broken"
    ):
        LlamaEagle3DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"draft_vocab_size": 24}, "draft_vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_aux_hidden_states": 0}, "num_aux_hidden_states"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True, "qk_norm": True}, "attention_bias"),
        ({"mlp_bias": True, "qk_norm": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
    ],
)
def test_config_errors_name_the_field(changes, field):
    with pytest.raises(ValueError, match=field):
        make_draft(**changes)


def test_num_labels_in_a_config_is_ignored(tmp_path):
    make_draft().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_labels": 10**12}))
    assert LlamaEagle3DraftModel.from_pretrained(tmp_path).config.num_labels == 2
