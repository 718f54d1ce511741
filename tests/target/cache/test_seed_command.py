"""The documented precompute command, verbatim, and what training takes from its cache."""

import json
import shlex
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.precompute_eagle3 import main
from fledge.recipe.schema import RESOLVED_NAME, load_recipe
from fledge.target.cache.backend import CachedEagle3TargetModel
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.fit import fit
from fledge.training.setup import set_up
from target.cache.caches import verb, words_of
from train.test_fit import final_weights
from train.tiny import Notes, make_target

COMMAND = """
--target-model meta-llama/Llama-3.1-8B-Instruct
--input-data Aeala/ShareGPT_Vicuna_unfiltered
--output-dir /data/eagle3_cache/sharegpt_llama31
--seq-length 2048 --draft-vocab-size 8192
--batch-size 4 --shard-size 256 --dtype bf16
"""


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory):
    """A target deep enough for the default layers, with a larger vocabulary than requested."""
    directory = make_target(tmp_path_factory.mktemp("deep"))
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=9000, hidden_size=16, intermediate_size=32, num_hidden_layers=8,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048,
        )
    ).save_pretrained(directory)  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def made(deep_target, tiny_chats, tmp_path_factory):
    """Run the command with its three paths replaced and flags added; returns the cache."""
    root = tmp_path_factory.mktemp("caches")

    def make(name="seed", *flags):
        paths = {
            "meta-llama/Llama-3.1-8B-Instruct": deep_target,
            "Aeala/ShareGPT_Vicuna_unfiltered": tiny_chats,
            "/data/eagle3_cache/sharegpt_llama31": root / name,
        }
        if not (root / name).exists():
            words = [str(paths.get(word, word)) for word in shlex.split(COMMAND)]
            assert main([*words, *flags]) == 0
        return root / name

    return make


def recipe_words(cache, output_dir, *more):
    """Overrides of a recipe that does not set the draft's vocabulary."""
    return [
        f"target.cached_target_path={cache}", "training.device=cpu", "training.steps=2",
        "data.valid_rows=4", "objective.ttt_steps=2", f"run.output_dir={output_dir}", *more,
    ]  # fmt: skip


def vocabulary_of(words):
    opened = set_up(load_recipe(None, words))
    opened.parts.target.close()
    return opened.vocabulary


def test_training_uses_the_vocabulary_size_of_the_command(made, tmp_path):
    """The resolved recipe records it, so that resuming, reading and repeating the run agree."""
    words = recipe_words(made(), tmp_path / "run")
    training = set_up(load_recipe(None, words))
    assert fit(training, Notes()).finished
    assert final_weights(tmp_path / "run")["lm_head.weight"].shape == (8192, 16)
    resolved = load_recipe(tmp_path / "run" / RESOLVED_NAME)
    assert resolved.draft.draft_vocab_size == 8192
    assert fit(set_up(load_recipe(None, words)), Notes()).finished
    sections = (f"{name}={json.dumps(value)}" for name, value in resolved.model_dump().items())
    again = vocabulary_of([*sections, f"run.output_dir={tmp_path / 'again'}"])
    assert again.digest() == training.vocabulary.digest()


@pytest.mark.parametrize(("said", "size"), [("64", 64), ("null", 9000), ("32000", 9000)])
def test_a_cache_of_hidden_states_only_suggests_a_vocabulary_size(made, tmp_path, said, size):
    words = recipe_words(made(), tmp_path / "run", f"draft.draft_vocab_size={said}")
    assert vocabulary_of(words).size == size


def test_a_cache_of_probabilities_allows_only_its_vocabulary_size(made, tmp_path):
    cache = made("probs", "--encoding", "probs")
    assert vocabulary_of(recipe_words(cache, tmp_path / "run")).size == 8192
    for value, shown in (("64", "64"), ("null", "None"), ("32000", "32000")):
        with pytest.raises(BadInput, match=f"of 8192, draft.draft_vocab_size says {shown}"):
            vocabulary_of(recipe_words(cache, tmp_path / "run", f"draft.draft_vocab_size={value}"))


def test_a_warm_start_keeps_its_vocabulary(made, tmp_path):
    """Whether or not the recipe sets a size; for a cache of probabilities it must be the same."""
    probs, start = made("probs", "--encoding", "probs"), tmp_path / "start"
    for size, cache in ((8192, probs), (64, made())):
        size_word = f"draft.draft_vocab_size={size}"
        assert fit(set_up(load_recipe(None, recipe_words(cache, start, size_word))), Notes())
        warm = recipe_words(cache, tmp_path / "run", f"draft.init_from={start}")
        for words in (warm, [*warm, "draft.draft_vocab_size=32000"]):
            assert vocabulary_of(words).size == size
        if cache != probs:
            with pytest.raises(BadInput, match="made for another draft vocabulary"):
                vocabulary_of(recipe_words(probs, tmp_path / "run", f"draft.init_from={start}"))
        shutil.rmtree(start)


def test_a_converted_cache_suggests_the_same_vocabulary(made, tmp_path):
    hidden = CachedEagle3TargetModel(made()).info().suggested
    for encoding in ("hidden-fp8", "probs"):
        assert (
            verb("cache", "convert", made(), "-o", tmp_path / encoding, "--encoding", encoding) == 0
        )
        info = CachedEagle3TargetModel(tmp_path / encoding).info()
        vocabulary = info.vocabulary if encoding == "probs" else info.suggested
        assert vocabulary.digest() == hidden.digest()


def test_states_are_stored_in_dtype_and_computed_in_the_dtype_of_the_target(made, deep_target):
    """bfloat16 states of a float32 target are its answers, rounded once."""
    cached = CachedEagle3TargetModel(made())
    rows = cached.rows()
    live = HFEagle3TargetModel.from_pretrained(deep_target, device="cpu")
    assert cached.info().dtype == torch.float32
    batches = [token_batch(rows[i]) for i in (0, 7)]
    for batch in batches:
        stored, exact = cached.answer(batch), live.answer(batch)
        for name in ("aux_hidden_states", "last_hidden_states"):
            cached_states, live_states = getattr(stored, name), getattr(exact, name)
            assert cached_states.dtype == torch.bfloat16
            assert live_states.dtype == torch.float32
            torch.testing.assert_close(cached_states.float(), live_states, rtol=2**-8, atol=1e-6)
    low = CachedEagle3TargetModel(made("low", "--target-dtype", "bf16"))
    assert low.info().dtype == torch.bfloat16
    states, low_states = (t.answer(batches[1]).aux_hidden_states for t in (cached, low))
    assert not torch.equal(states, low_states)


def token_batch(row):
    ids, mask = (torch.tensor([values.tolist()]) for values in (row.input_ids, row.loss_mask))
    return TokenBatch(ids, torch.ones_like(ids), mask)


def test_the_advice_about_unusable_rows_can_be_followed(deep_target, tmp_path, capsys):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}
    data = tmp_path / "half.jsonl"
    data.write_text(f"{json.dumps(good)}\n{{}}\n")
    paths = {"target_model": deep_target, "input_data": data, "output_dir": tmp_path / "cache"}
    words = words_of(**paths, dtype=None, aux_layer_ids=None, num_workers=None)
    assert main(words) == 2
    assert "max_drop_share" in capsys.readouterr().err
    assert main([*words, "--max-drop-share", "0.5"]) == 0
    assert main([*words, "--max-drop-share", "1.5"]) == 2
