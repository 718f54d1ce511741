"""The formats are complete for every draft we can build, and correct about versions."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from fledge.core.errors import BadInput
from fledge.formats.codec import (
    PlainDraft,
    TargetFacts,
    draft_facts,
    draft_features,
    file_tensors,
    get_path,
    set_path,
)
from fledge.formats.engines import ENGINES, SPECULATORS_PEAGLE_LIMITS, check_representable
from fledge.formats.foreign import DraftView
from fledge.formats.gguf_layout import GgufFormat
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.registry import METHODS, method_of


def plain(**options):
    values = {
        "vocab_size": 24, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
        "num_hidden_layers": 1, "aux_layer_ids": [1, 3, 4],
    }  # fmt: skip
    model = LlamaEagle3DraftModel(LlamaConfig(**values | options))
    return PlainDraft(model.config, model.state_dict())


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 3),
    fc_norm=st.booleans(),
    norm_output=st.booleans(),
    parallel=st.booleans(),
    width=st.sampled_from([10, 24]),
    target_hidden=st.sampled_from([8, 10]),
    extra=st.sampled_from([{}, {"qk_norm": True}, {"attention_bias": True}, {"mlp_bias": True}]),
)
def test_every_tensor_has_exactly_one_name_in_every_format(
    layers, fc_norm, norm_output, parallel, width, target_hidden, extra
):
    draft = plain(
        num_hidden_layers=layers, fc_norm=fc_norm, norm_output=norm_output, draft_vocab_size=width,
        parallel_drafting=parallel, mask_token_id=3 if parallel else None,
        target_hidden_size=target_hidden, **extra,
    )  # fmt: skip
    layouts = method_of(draft.config).formats.values()
    # GGUF files have names of their own: tests/export/test_export_gguf.py
    for layout in (one for one in layouts if not isinstance(one, GgufFormat)):
        files = file_tensors(layout, draft)
        own = DraftView({}, files).state
        assert own.keys() == draft.tensors.keys() - layout.ignored
        assert all(torch.equal(own[name], draft.tensors[name]) for name in own)


REFUSED = [
    ("sglang", "0.5.9", {"parallel_drafting": True, "mask_token_id": 3}, "--engine vllm"),
    ("sglang", "0.5.23", {"parallel_drafting": True, "mask_token_id": 3}, "--engine vllm"),
    ("sglang", "0.5.9", {"num_hidden_layers": 2}, "0.5.23"),
    ("sglang", "0.5.9", {"fc_norm": True}, "0.5.23"),
    ("sglang", "0.5.22", {"norm_output": True}, "0.5.23"),
    ("sglang", "0.5.23", {"target_hidden_size": 10}, "--engine vllm"),
    ("sglang", "0.5.23", {"aux_layer_ids": [1, 3, 7]}, "below the last layer"),
    ("speculators", "0.9.0", {"target_hidden_size": 10}, "--engine vllm"),
    (
        "speculators",
        "0.9.0",
        {"parallel_drafting": True, "mask_token_id": 3, "fc_norm": True},
        "plain format",
    ),
]
ACCEPTED = [
    ("sglang", "0.5.9", {}),
    ("sglang", "0.5.9", {"draft_vocab_size": 10, "aux_layer_ids": [0, 2, 5]}),
    ("sglang", "0.5.23", {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True}),
    ("vllm", "0.32.0", {"num_hidden_layers": 4, "parallel_drafting": True, "mask_token_id": 3}),
    ("vllm", "0.32.0", {"fc_norm": True, "norm_output": True, "aux_layer_ids": [1, 3, 7]}),
    ("speculators", "0.9.0", {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2}),
    ("speculators", "0.9.0", {"parallel_drafting": True, "mask_token_id": 3}),
]


def check(engine, version, options, *, trained_embeddings=False):
    draft = plain(**options)
    features = draft_features(draft, TargetFacts(layers=8), trained_embeddings=trained_embeddings)
    layout = method_of(draft.config).formats[engine]
    check_representable(ENGINES[engine], layout, version, features)
    return features


@pytest.mark.parametrize(("engine", "version", "options", "instead"), REFUSED)
def test_unservable_drafts_are_refused_with_an_alternative(engine, version, options, instead):
    with pytest.raises(BadInput, match="cannot serve") as caught:
        check(engine, version, options)
    assert instead in str(caught.value)
    assert version in str(caught.value)


@pytest.mark.parametrize(("engine", "version", "options"), ACCEPTED)
def test_servable_drafts_are_not_refused(engine, version, options):
    check(engine, version, options)


def test_only_sglang_refuses_trained_embeddings():
    check("vllm", "0.32.0", {}, trained_embeddings=True)
    check("speculators", "0.9.0", {}, trained_embeddings=True)
    with pytest.raises(BadInput, match="freeze_embeddings=true"):
        check("sglang", "0.5.23", {}, trained_embeddings=True)


@pytest.mark.parametrize(
    ("rope", "feature"),
    [
        ({"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, "partial"),
        (
            {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.1,
                "original_max_position_embeddings": 16,
            },
            "yarn attention factor",
        ),
    ],
)  # fmt: skip
def test_rotary_settings_that_sglang_would_drop_are_refused(rope, feature):
    options = {"rope_parameters": rope, "head_dim": 8}
    assert any(name.startswith(feature) for name in check("vllm", "0.32.0", options))
    with pytest.raises(BadInput, match=feature):
        check("sglang", "0.5.23", options)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_original_context_length_is_written_out(kind):
    """transformers 5 fills it in itself, older versions leave it to the reader."""
    draft = plain()
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    config = SimpleNamespace(**draft.config.to_dict() | {"rope_parameters": rope})
    facts = draft_facts(PlainDraft(config, draft.tensors), TargetFacts(), num_draft_tokens=1)
    assert facts["rope_parameters"] == rope | {"original_max_position_embeddings": 64}


def test_versions():
    vllm = ENGINES["vllm"]
    assert vllm.check_version(None) == vllm.tested[-1] == "0.32.0"
    assert vllm.check_version("0.40.1.post2") == "0.40.1.post2"  # newer than any tested: accepted
    with pytest.raises(BadInput, match=r"0\.31\.9 .* 0\.32\.0 is the oldest"):
        vllm.check_version("0.31.9")
    with pytest.raises(BadInput, match="not a version"):
        vllm.check_version("latest")


def test_paths_reach_into_lists():
    values = {}
    set_path(values, "a.b.0.c", 1)
    set_path(values, "a.b.0.d", 2)
    set_path(values, "e", 3)
    assert values == {"a": {"b": [{"c": 1, "d": 2}]}, "e": 3}
    assert get_path(values, "a.b.0.d") == 2
    assert get_path(values, "a.b.1.d") is None
    assert get_path(values, "a.x.y") is None


# --- the tables in docs/export.md ----------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()


def table(name):
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    return PAGE.split(begin)[1].split(end)[0]


def test_the_page_lists_every_limit():
    rows = ["| engine | cannot serve | since | instead |", "|---|---|---|---|"]
    limits = [(engine.title, limit) for engine in ENGINES.values() for limit in engine.limits]
    limits += [("speculators, P-EAGLE", limit) for limit in SPECULATORS_PEAGLE_LIMITS]
    rows += [
        f"| {title} | {limit.feature} | {limit.since or 'never'} | {limit.instead} |"
        for title, limit in limits
    ]
    assert table("limits") == "\n".join(rows)


def test_the_page_lists_every_tested_version():
    for engine in ENGINES.values():
        assert f"{engine.title} {', '.join(engine.tested)}" in table("tested")
    formats = {layout.name for method in METHODS.values() for layout in method.formats.values()}
    assert not [name for name in formats if name not in table("tested")]
