"""The command that writes the offline cache, used as its specification describes.

Each test quotes the sentence of the specification that it checks.
"""

import argparse
import inspect
import json
import logging
from types import SimpleNamespace

import pytest
import torch

from fledge import BadInput, CachedEagle3TargetModel, HFEagle3TargetModel, load_recipe
from fledge import precompute_eagle3 as command
from fledge import precompute_eagle3 as implementation
from fledge.core.head import target_distribution
from target.contract import padded_rows
from target.tiny_models import tiny_model


def test_the_documented_command_line():
    """python -m ...precompute_eagle3 --target-model ... --dtype bf16, and defaults for the rest."""
    documented = (
        "--target-model meta-llama/Llama-3.1-8B-Instruct "
        "--input-data Aeala/ShareGPT_Vicuna_unfiltered "
        "--output-dir /data/eagle3_cache/sharegpt_llama31 "
        "--seq-length 2048 --draft-vocab-size 8192 --batch-size 4 --shard-size 256 --dtype bf16"
    )
    parser = command._build_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    args = parser.parse_args(documented.split())
    assert args.target_model == "meta-llama/Llama-3.1-8B-Instruct"
    assert (args.seq_length, args.draft_vocab_size) == (2048, 8192)
    assert (args.batch_size, args.shard_size, args.dtype) == (4, 256, "bf16")
    assert (args.shuffle_seed, args.target_probs_topk, args.resume) == (42, 0, False)
    assert args.log_level == "INFO"
    assert command.logger.name == command._run.__module__
    assert isinstance(command.logger, logging.Logger)
    for name in ("_run", "_validate_args"):
        assert list(inspect.signature(getattr(command, name)).parameters) == ["args"]
    assert inspect.signature(command.main).parameters["argv"].default is None


@pytest.fixture
def argv(tiny_target, tiny_chats, tmp_path):
    def make(*extra):
        return [
            "--target-model", str(tiny_target), "--input-data", str(tiny_chats), "--output-dir",
            str(tmp_path / "cache"), "--seq-length", "64", "--draft-vocab-size", "128",
            "--batch-size", "4", "--shard-size", "32", "--dtype", "fp32", "--aux-layer-ids",
            "0,1,2", "--encoding", "probs", "--num-workers", "1", "--device", "cpu", *extra,
        ]  # fmt: skip

    return make


BAD = {
    "--seq-length": "0", "--batch-size": "0", "--shard-size": "-3", "--draft-vocab-size": "0",
    "--dtype": "fp7", "--target-probs-topk": "-1", "--shuffle-seed": "-1",
}  # fmt: skip


@pytest.mark.parametrize("flag", BAD)
def test_bad_values_are_rejected_before_any_model_is_loaded(argv, monkeypatch, capsys, flag):
    """ "Reject invalid CLI values before loading any model." Also if a program calls `_run`."""

    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("fledge.target.hf.model.load_hf_model", refuse)
    arguments = argv(flag, BAD[flag])
    args = command._build_parser().parse_args(arguments)
    for function in (command._validate_args, command._run):
        with pytest.raises(BadInput, match=flag):
            function(args)
    assert command.main(arguments) == 2  # "Parses argv and returns the process exit code."
    stderr = capsys.readouterr().err
    assert flag in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(("flag", "value"), [("--shuffle-seed", "x"), ("--log-level", "LOUD")])
def test_other_values_are_rejected_in_one_line(argv, capsys, flag, value):
    with pytest.raises(SystemExit, match="2"):
        command.main(argv(flag, value))
    [line] = capsys.readouterr().err.splitlines()
    assert flag in line


def places(directory):
    store = CachedEagle3TargetModel(directory).store
    return [place for shard in store.shards for place in shard.places]


def test_a_cache_is_written_resumed_and_read_back(argv, tmp_path, monkeypatch, capsys, tiny_chats):
    """ "This script runs the target once over a dataset and writes the supervision to disk"; "Load
    the target, scan the dataset once, and write the sharded cache. Returns an exit code." """
    cache = tmp_path / "cache"
    arguments = argv("--target-probs-topk", "0", "--log-level", "CRITICAL")
    assert command._run(command._build_parser().parse_args(arguments)) == 0
    monkeypatch.setattr("sys.argv", ["precompute_eagle3", *arguments, "--resume"])
    assert command.main() == 0  # complete: nothing to do
    shuffled = places(cache)

    # "Refuse to --resume into a cache produced with a different configuration": "after changing
    # e.g. --input-data or --shuffle-seed"
    other = tmp_path / "other.jsonl"
    other.write_text(tiny_chats.read_text().splitlines()[0] + "\n")
    for change in (["--shuffle-seed", "7"], ["--input-data", str(other)], ["--seq-length", "48"]):
        assert command.main([*arguments, *change, "--resume"]) == 2
        assert change[0].lstrip("-").replace("-", "_").removeprefix("input_") in (
            stderr := capsys.readouterr().err
        ), stderr
    assert places(cache) == shuffled

    # the default order is that of seed 42, and "none" keeps the data's order
    for seed in ("42", "none"):
        out = tmp_path / seed
        assert command.main([*arguments, "--shuffle-seed", seed, "--output-dir", str(out)]) == 0
    assert places(tmp_path / "42") == shuffled
    in_order = places(tmp_path / "none")
    numbers = [int(place.rpartition(":")[2].split()[-1]) for place in in_order]
    assert numbers == sorted(numbers)
    assert in_order != shuffled
    assert sorted(in_order) == sorted(shuffled)


def test_training_reads_it_back_via_cached_target_path(argv, tmp_path):
    """ "training then reads it back via cached_target_path instead of loading or running the target
    at all"; "Then point the recipe at it: recipe_args.cached_target_path"."""
    assert command.main(argv("--log-level", "CRITICAL")) == 0
    path = str(tmp_path / "cache")
    recipe = load_recipe(None, [f"target.cached_target_path={path}"])
    assert (recipe.target.backend, recipe.target.cached_target_path) == ("cache", path)
    recipe_file = tmp_path / "r.yaml"
    recipe_file.write_text(f"recipe_args:\n  cached_target_path: {path}\n")
    for same in (
        load_recipe(recipe_file),
        load_recipe(None, [f"recipe_args.cached_target_path={path}"]),
        load_recipe(None, {"recipe_args": {"cached_target_path": path}}),
    ):
        assert same == recipe
    with pytest.raises(BadInput, match="unknown section 'recipe_args'"):
        load_recipe(None, ["recipe_args.something_else=1"])
    with pytest.raises(BadInput, match=str(tmp_path / "nothing")):
        CachedEagle3TargetModel(cached_target_path=tmp_path / "nothing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_becomes_the_tensors_that_are_cached(dtype):
    """ "the cached target_probs / position_mask are numerically identical to the live path. Float
    fields are downcast to cache_dtype; everything is moved to CPU for writing." """
    model = tiny_model("llama")
    ids = torch.arange(0, 90, 2)
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    batch = HFEagle3TargetModel(model).generate_batch(*padded_rows())
    cached = command._compute_batch_cache(batch, ids, mask, dtype)
    probs, covered = target_distribution(batch.logits.flatten(0, 1), ids, mask)
    assert torch.equal(cached["target_probs"].flatten(0, 1), probs.to(dtype))
    charged = covered & batch.loss_mask.bool().flatten()
    assert torch.equal(cached["position_mask"].flatten(), charged)
    assert torch.equal(cached["aux_hidden_states"], batch.aux_hidden_states.to(dtype))
    assert torch.equal(cached["input_ids"], batch.input_ids)
    assert torch.equal(cached["loss_mask"], batch.loss_mask)
    assert {tensor.device.type for tensor in cached.values()} == {"cpu"}


def test_the_distribution_is_the_one_that_the_trainer_computes(monkeypatch):
    """ "Reuses _compute_target_distribution — the exact function the online trainer calls" """
    model, ids = tiny_model("llama"), torch.arange(0, 90, 2)
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    batch = HFEagle3TargetModel(model).generate_batch(*padded_rows())
    probs, position_mask = command._compute_target_distribution(
        batch.logits, ids, mask, batch.loss_mask
    )
    assert torch.equal(probs, batch.logits[..., ids].softmax(-1))
    covered = mask[batch.logits.argmax(-1)] & batch.loss_mask.bool()
    assert torch.equal(position_mask, covered[..., None])
    assert 0 < covered.sum() < batch.loss_mask.sum()
    monkeypatch.setattr(
        implementation, "_compute_target_distribution", lambda *_: (probs * 0, position_mask)
    )
    cached = command._compute_batch_cache(batch, ids, mask, torch.float32)
    assert not cached["target_probs"].any()


def test_a_batch_is_any_object_with_its_attributes():
    """`_compute_batch_cache(target_batch, ...)`, without a type."""
    model, ids = tiny_model("llama"), torch.arange(0, 90, 2)
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    batch = HFEagle3TargetModel(model).generate_batch(*padded_rows())
    names = ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "logits")
    same = SimpleNamespace(**{name: getattr(batch, name) for name in names})
    cached = command._compute_batch_cache(same, ids, mask, torch.float32)
    expected = command._compute_batch_cache(batch, ids, mask, torch.float32)
    assert (
        cached.keys() == expected.keys() == {*names, "target_probs", "position_mask"} - {"logits"}
    )
    assert all(torch.equal(cached[name], expected[name]) for name in cached)


def test_resuming_with_a_different_configuration_names_the_fields(tmp_path):
    """`_ensure_resume_compatible(cache_dir: str, manifest: dict, existing_shards: set[int])`"""
    cache = str(tmp_path)
    command._ensure_resume_compatible(cache, {"seq_length": 64}, set())
    with pytest.raises(BadInput, match="without a manifest"):
        command._ensure_resume_compatible(cache, {"seq_length": 64}, {0})
    (tmp_path / "manifest.json").write_text(json.dumps({"seq_length": 64, "dtype": "float32"}))
    command._ensure_resume_compatible(cache, {"seq_length": 64, "dtype": "float32"}, {0, 1})
    for shards in ({0, 1}, set()):
        with pytest.raises(BadInput, match="seq_length: 64 -> 32"):
            command._ensure_resume_compatible(cache, {"seq_length": 32, "dtype": "float32"}, shards)
        with pytest.raises(BadInput, match="dtype: 'float32' -> None"):
            command._ensure_resume_compatible(cache, {"seq_length": 64}, shards)
    (tmp_path / "manifest.json").write_text(json.dumps({"seq_length": 64, "target": "A"}))
    with pytest.raises(BadInput, match="target: 'A' -> None"):
        command._ensure_resume_compatible(cache, {"seq_length": 64}, {0})
