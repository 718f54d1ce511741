"""Speculative output == plain greedy output, token for token, whatever the draft proposes."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.tiny_decode import (
    AUX,
    STOPS,
    decode,
    make_draft,
    make_target,
    outcomes,
    plain_greedy,
    random_prompts,
)
from fledge.core.errors import BadInput
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategy import TreeShape

TREE = TreeShape(depth=4, width=3, nodes=9)


def decoder(target, draft=None, **options):
    given = {"aux_layer_ids": AUX, "num_draft_tokens": 4, "tree": TREE, **options}
    return SpeculativeDecoder(target, draft, **given)


def test_without_a_draft_it_is_plain_greedy_decoding(target, asked, answers):
    assert outcomes(decode(decoder(target), asked[:40], batch=8)) == answers[:40]


def letters(ids):
    return "".join(chr(65 + token) for token in ids)


@pytest.mark.parametrize("method", [None, "tree"])
def test_stop_strings_end_the_text_where_plain_decoding_ends_it(
    target, drafts, asked, answers, method
):
    answer_text = letters(answers[0][0])
    stops = Stops(14, frozenset({3}), (answer_text[5:7], answer_text[2:4] + "?"), decode=letters)
    expected = [plain_greedy(target, prompt, stops) for prompt in asked[:16]]
    assert "stop" in {finish for _, finish in expected}
    made = decoder(target, drafts["trained"], method=method)
    assert outcomes(decode(made, asked[:16], 8, stops)) == expected


def test_every_length_limit_cuts_exactly(target, drafts, asked, answers):
    speculative = decoder(target, drafts["trained"])
    for limit in range(1, 9):
        generations = speculative.generate(asked[:8], Stops(limit, STOPS.eos_token_ids))
        for text, (answer, _) in zip(generations, answers[:8], strict=True):
            assert text.token_ids == answer[:limit]


def windowed_target(kind):
    """A target with sliding windows, or with layers of two kinds."""
    small = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"] * 2
    configs = {
        "mistral": MistralConfig(**small, sliding_window=5),
        "qwen3": Qwen3Config(**small),
        "gemma3": Gemma3TextConfig(**small, sliding_window=5, layer_types=kinds),
        "gpt-oss": GptOssConfig(
            **small, sliding_window=5, layer_types=kinds, num_local_experts=2,
            num_experts_per_tok=1,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind]).eval()
    if kind != "gpt-oss":  # its grouped matrix products do not support fp64
        model = model.double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(6)
    return model


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "gemma3", "gpt-oss"])
def test_other_architectures_and_sliding_windows(kind):
    model = windowed_target(kind)
    draft = make_draft(model)
    prompts, stops = random_prompts(4, seed=3), Stops(16)
    expected = [plain_greedy(model, prompt, stops) for prompt in prompts]
    for method in ("chain", "tree"):
        speculative = decoder(model, draft, method=method)
        assert outcomes(speculative.generate(prompts, stops)) == expected
        assert outcomes(decode(speculative, prompts, 1, stops)) == expected  # no mask needed


def test_attention_without_mask_support_is_replaced_where_a_mask_is_needed(drafts, asked, answers):
    """A kernel like flash attention: aligned causal attention is all it supports."""
    calls = []

    def maskless(module, query, key, value, attention_mask, **options):
        assert attention_mask is None
        calls.append(query.shape[2])
        count, seen = query.shape[2], key.shape[2]
        visible = torch.ones(count, seen, dtype=torch.bool).tril(seen - count)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, visible, **options)

    AttentionInterface.register("maskless", maskless)
    model = make_target()
    model.config._attn_implementation = "maskless"
    for method in ("chain", "tree"):
        speculative = decoder(model, drafts["trained"], method=method)
        assert outcomes(decode(speculative, asked[:4], batch=1)) == answers[:4]
        assert outcomes(decode(speculative, asked[:8], batch=8)) == answers[:8]
    assert 5 in calls  # a chain of a single row needs no mask
    assert model.config._attn_implementation == "maskless"


def test_a_target_with_a_recurrent_state_is_refused(target, drafts):
    config = Qwen3NextConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, num_experts=2, num_experts_per_tok=1,
        intermediate_size=16, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(BadInput, match=r"linear_attention.*cannot take back tokens"):
        SpeculativeDecoder(AutoModelForCausalLM.from_config(config))


def test_a_target_that_ignores_custom_masks_is_refused():
    config = BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(BadInput, match="biases"):
        SpeculativeDecoder(AutoModelForCausalLM.from_config(config))


def test_errors_name_the_bad_argument(target, drafts):
    speculative = decoder(target, drafts["trained"])
    with pytest.raises(ValueError, match="temperature"):
        speculative.generate([[1]], STOPS, temperature=-1.0)
    with pytest.raises(ValueError, match="prompts"):
        speculative.generate([[1], []], STOPS)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        decoder(target, drafts["trained"], num_draft_tokens=0)
    with pytest.raises(BadInput, match="did you mean 'chain'"):  # more: test_decode_equalities
        decoder(target, drafts["trained"], method="chian")
    with pytest.raises(ValueError, match="max_new_tokens"):
        Stops(0)
    with pytest.raises(ValueError, match="decode"):
        Stops(4, stop_strings=("x",))
