"""`fledge precompute` and `fledge cache info | verify | convert`."""

import json

import pytest
import torch

from fledge.precompute_eagle3 import main
from fledge.target.cache.backend import CachedEagle3TargetModel, CacheStore
from target.cache.caches import break_row, payload, verb, words_of
from target.cache.test_cached_training import cache_recipe, train
from train.test_fit import comparable, differing, final_weights
from train.tiny import make_chats


@pytest.fixture
def command(capsys):
    """Run a command; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        code = verb(*arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture
def overrides(tiny_target, tiny_chats):
    """Recipe overrides for a tiny cache."""
    return [
        f"target.model={tiny_target}", "target.aux_layer_ids=0,1,2", "target.dtype=float32",
        f"data.train={tiny_chats}", "data.max_length=64", "data.workers=1", "training.device=cpu",
        "draft.draft_vocab_size=128", "data.valid_rows=8",
    ]  # fmt: skip


def test_the_recipe_form_writes_what_the_plain_flags_write(
    command, overrides, tiny_target, tiny_chats, tmp_path
):
    flags = ["-o", tmp_path / "a", "--shard-size", 16, "--json"]
    code, text, error = command("precompute", *overrides, "data.valid_rows=0", *flags)
    assert code == 0
    assert "bytes a token" in error
    facts = json.loads(text)
    assert facts["rows"] == 60
    words = words_of(
        target_model=tiny_target, input_data=tiny_chats, output_dir=tmp_path / "b", shard_size=16,
        draft_vocab_size=128, shuffle_seed="none",
    )  # fmt: skip
    assert main(words) == 0
    assert payload(tmp_path / "a") == payload(tmp_path / "b")
    code, _, error = command("precompute", *overrides, "--output-dir", tmp_path / "a")
    assert code == 2
    assert "--resume" in error


def test_probs_of_the_recipe_form_have_the_vocabulary_of_a_live_run(
    command, overrides, recipe, tmp_path
):
    """It is counted on the training rows alone: the run from the cache equals the live run, also
    on held-out rows."""
    cache = tmp_path / "cache"
    flags = ["--encoding", "probs", "--batch-size", 1]
    assert command("precompute", *overrides, "--output-dir", cache, *flags)[0] == 0
    alone = ("packing.padded=true", "training.micro_batch=1", "training.accumulate=2")
    train(recipe(*alone, "target.supervision=probs", "evaluation.every_steps=1000", run="live"))
    train(cache_recipe(recipe, cache, *alone, "evaluation.every_steps=1000"))
    assert differing(final_weights(tmp_path / "live"), final_weights(tmp_path / "cached")) == []
    evaluated = [
        [line["evaluation"]["tau"] for line in comparable(tmp_path / run) if "evaluation" in line]
        for run in ("live", "cached")
    ]
    assert evaluated[0] == evaluated[1]


def test_separate_held_out_data_is_stored_in_the_cache(command, overrides, recipe, tmp_path):
    from fledge.training.drafts import make_target
    from fledge.training.setup import known_data

    valid = make_chats(tmp_path / "valid.jsonl", count=7)
    cache = tmp_path / "cache"
    named = (f"data.valid={valid}",)
    assert command("precompute", *overrides, *named, "-o", cache)[0] == 0
    cached = cache_recipe(recipe, cache)
    with make_target(cached, torch.device("cpu")) as target:
        train_rows, held_out, _ = known_data(cached, target)
    assert (len(train_rows), len(held_out)) == (60, 7)
    assert {held_out[i].place.rpartition(":")[0] for i in range(7)} == {str(valid)}


def test_bad_arguments_are_one_line_errors(command, overrides, tmp_path):
    for flags, expected in (
        (["--encoding", "hiden"], "did you mean 'hidden'"),
        (["--encoding", "topk"], "--top-k"),
        (["--dtype", "float31"], "did you mean 'float32'"),
        (["target.supervision=logits"], "target.supervision=hidden"),
        (["data.train=[]"], "no training data"),
    ):
        code, _, error = command("precompute", *overrides, "-o", tmp_path / "c", *flags)
        assert code == 2, flags
        assert expected in error
    cached = ["target.backend=cache", "target.cached_target_path=x"]
    code, _, error = command("precompute", *cached, "-o", tmp_path / "c")
    assert code == 2
    assert "fledge cache convert" in error
    assert not (tmp_path / "c").exists()


def test_info_and_verify(command, overrides, tmp_path):
    cache = tmp_path / "cache"
    assert command("precompute", *overrides, "-o", cache, "--shard-size", 16)[0] == 0
    facts = json.loads(command("cache", "info", cache, "--json")[1])
    assert facts["complete"]
    assert (facts["rows"], facts["shards"], facts["encoding"]) == (60, 4, "hidden")
    assert facts["bytes"] == sum(len(data) for data in payload(cache).values())
    assert "weights fingerprint" in command("cache", "info", cache)[1]
    assert command("cache", "verify", cache)[0] == 0
    break_row(cache, 33)
    code, text, _ = command("cache", "verify", cache, "--json")
    assert code == 1
    [message] = json.loads(text)["damaged"]
    assert "chats.jsonl:34; shard-00002.safetensors, row 1" in message
    (cache / "shard-00001.safetensors").unlink()
    assert "unfinished" in command("cache", "info", cache)[1]
    assert command("cache", "verify", cache)[0] == 2
    assert command("cache", "info", tmp_path)[0] == 2


def test_convert_equals_precompute(command, overrides, tmp_path):
    """hidden -> anything is what precompute would have written."""
    hidden = tmp_path / "hidden"
    assert command("precompute", *overrides, "data.valid_rows=0", "-o", hidden)[0] == 0
    for encoding, flags in (
        ("hidden-fp8", []),
        ("probs", ["--draft-vocab-size", 128]),
        ("topk", ["--draft-vocab-size", 128, "--top-k", 7]),
    ):
        converted, expected = tmp_path / f"made-{encoding}", tmp_path / f"wanted-{encoding}"
        code, _, error = command(
            "cache", "convert", hidden, "-o", converted, "--encoding", encoding, *flags
        )
        assert code == 0, error
        direct = [f for f in flags if f not in ("--draft-vocab-size", 128)]
        direct += ["data.valid_rows=0", "--encoding", encoding]
        assert command("precompute", *overrides, "-o", expected, *direct)[0] == 0
        converted_store, expected_store = CacheStore(converted), CacheStore(expected)
        assert [s.layout.header for s in converted_store.shards] == [
            s.layout.header for s in expected_store.shards
        ]
        for a, b in zip(converted_store.shards, expected_store.shards, strict=True):
            if encoding.startswith("hidden"):
                assert a.bytes.tobytes() == b.bytes.tobytes()
            else:  # a matrix product over other rows: equal up to its rounding
                name = "target_probs" if encoding == "probs" else "topk_probs"
                ps = [
                    torch.frombuffer(bytearray(b"".join(s.payload(name, i) for i in range(len(s)))),
                                     dtype=torch.float32) for s in (a, b)
                ]  # fmt: skip
                torch.testing.assert_close(*ps, rtol=1e-4, atol=1e-6)


def test_convert_refuses_what_is_impossible(command, overrides, tmp_path):
    probs = tmp_path / "probs"
    assert command("precompute", *overrides, "-o", probs, "--encoding", "probs")[0] == 0
    code, _, error = command("cache", "convert", probs, "-o", tmp_path / "x", "--encoding=hidden")
    assert code == 2
    assert "probabilities do not determine the hidden states" in error
    flags = ["--encoding", "topk", "--top-k", 4]
    code, _, error = command(
        "cache", "convert", probs, "-o", tmp_path / "x", *flags, "--draft-vocab-size", 60
    )
    assert code == 2
    assert "made for a draft vocabulary of 128" in error
    assert not (tmp_path / "x").exists()
    assert command("cache", "convert", probs, "-o", tmp_path / "x", *flags)[0] == 0
    target = CachedEagle3TargetModel(tmp_path / "x")
    assert target.shape.top_k == 4
    assert target.vocabulary.digest() == CachedEagle3TargetModel(probs).vocabulary.digest()
    assert command("cache", "convert", probs, "-o", tmp_path / "x", *flags)[0] == 2
    assert command("cache", "convert", probs, "-o", tmp_path / "x", *flags, "--resume")[0] == 0
