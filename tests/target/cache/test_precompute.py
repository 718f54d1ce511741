"""precompute_eagle3: its flags, refusals before anything is written, byte-exact resumption."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.precompute_eagle3 import _compute_batch_cache, main
from fledge.target.cache import precompute
from fledge.target.cache import shard as cache_shard
from fledge.target.cache.backend import CacheStore
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training import precompute as cache_job
from ranks import run_ranks
from target.cache.caches import other_target, payload, words_of
from target.contract import draft_vocabulary, padded_rows
from target.tiny_models import tiny_model
from train.tiny import make_chats, make_target

PROBS = {"encoding": "probs", "draft_vocab_size": 128}


@pytest.fixture
def argv(tiny_target, tiny_chats, tmp_path):
    """The command with some flags changed."""
    paths = {"target_model": tiny_target, "input_data": tiny_chats}
    small = {**paths, "output_dir": tmp_path / "cache", "shard_size": 8}
    return lambda **flags: words_of(**{**small, **flags})


def forbid_loading(monkeypatch):
    """Any attempt to load weights is an error."""

    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("fledge.target.hf.model.load_hf_model", refuse)


def shards(directory):
    return sorted(path.name for path in Path(directory).glob("shard-*"))


@pytest.mark.parametrize("encoding", ["hidden", "hidden-fp8", "probs", "topk"])
def test_sizes_are_predicted_to_the_byte(argv, tmp_path, encoding, monkeypatch):
    plans = []
    real = precompute.plan_cache

    def spying(job, **more):
        plans.append(real(job, **more))
        assert not (tmp_path / "cache").exists()  # before anything is written
        return plans[-1]

    monkeypatch.setattr(precompute, "plan_cache", spying)
    top_k = 5 if encoding == "topk" else None
    assert main(argv(encoding=encoding, draft_vocab_size=100, target_probs_topk=top_k)) == 0
    sizes = [(tmp_path / "cache" / name).stat().st_size for name in shards(tmp_path / "cache")]
    assert sizes == list(plans[0].shard_bytes)


BAD = [  # and those of tests/seeds
    ({"aux_layer_ids": "0,1,1"}, "distinct layers"),
    ({"aux_layer_ids": "0,x"}, "--aux-layer-ids"),
    ({"aux_layer_ids": "0,1,4"}, "out of range"),
    ({"aux_layer_ids": None}, "too shallow"),
    ({"seq_length": 513}, "513 tokens, and the target takes 512; at most 512"),
    ({"target_probs_topk": 9, "draft_vocab_size": 8}, "cannot be kept"),
    ({"encoding": "topk"}, "--target-probs-topk"),
    ({"encoding": "probs", "target_probs_topk": 4}, "--target-probs-topk"),
    ({"encoding": "hiden"}, "--encoding"),
    ({"num_workers": -1}, "--num-workers"),
    ({"quota_gb": 0}, "--quota-gb"),
    ({"split": "test"}, "--split"),
    ({"target_model": "/nowhere"}, "no such model"),
    ({"input_data": "/nowhere.jsonl"}, "no such file"),
    ({"device": "cuda"}, "no GPU"),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=[str(flags) for flags, _ in BAD])
def test_bad_input_is_a_one_line_error_and_touches_nothing(
    argv, flags, words, monkeypatch, capsys, tmp_path
):
    if flags.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    forbid_loading(monkeypatch)
    assert main(argv(**flags)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("precompute_eagle3: ")
    assert words in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("manifest", "resume", "words"),
    [
        (True, False, "continue it with --resume"),
        (False, False, "a cache is here already"),
        (False, True, "without a manifest"),
    ],
)
def test_an_existing_cache_is_left_as_it_is(
    argv, tmp_path, finished, monkeypatch, capsys, manifest, resume, words
):
    cache = tmp_path / "cache"
    shutil.copytree(finished, cache)
    if not manifest:
        (cache / "manifest.json").unlink()
    forbid_loading(monkeypatch)
    before = payload(cache)
    assert main(argv(resume=resume)) == 2
    assert words in capsys.readouterr().err
    assert payload(cache) == before


def test_a_directory_with_other_files_is_refused(argv, tmp_path, monkeypatch, capsys):
    forbid_loading(monkeypatch)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.tex").write_text("all of it")
    for resume in (True, False):
        assert main(argv(resume=resume)) == 2
        assert "thesis.tex" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(argv(output_dir=tmp_path / "file")) == 2
    assert "not a directory" in capsys.readouterr().err


def other_chats(path):
    return make_chats(path.with_suffix(".jsonl"), count=59)


def other_template(directory):
    make_target(directory)
    path = directory / "chat_template.jinja"
    path.write_text("{# the same #}" + path.read_text())
    return directory


CHANGES = [
    ({"seq_length": 40}, "seq_length: 64 -> 40"),
    ({"dtype": "bf16"}, "dtype: 'float32' -> 'bfloat16'"),
    ({"draft_vocab_size": 64}, "draft_vocab_size: 128 -> 64"),
    ({"shard_size": 16}, "shard_size: 8 -> 16"),
    ({"aux_layer_ids": "0,1,3"}, "aux_layer_ids: [0, 1, 2] -> [0, 1, 3]"),
    ({"encoding": "hidden"}, "encoding: 'probs' -> 'hidden'"),
    ({"encoding": None, "target_probs_topk": 4}, "top_k: None -> 4"),
    ({"input_data": other_chats}, "data: '"),
    ({"target_model": other_target}, "model_files: '"),
    ({"target_model": other_template}, "template: '"),
]


@pytest.fixture(scope="module")
def finished(tiny_target, tiny_chats, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "cache"
    words = words_of(
        target_model=tiny_target, input_data=tiny_chats, output_dir=path, shard_size=8,
        **PROBS,
    )  # fmt: skip
    assert main(words) == 0
    return path


@pytest.mark.parametrize(("flags", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_resuming_with_another_configuration_names_the_field(
    argv, finished, monkeypatch, capsys, tmp_path, flags, words
):
    flags = {n: v(tmp_path / "other") if callable(v) else v for n, v in flags.items()}
    forbid_loading(monkeypatch)
    before = payload(finished)
    assert main(argv(**{**PROBS, "output_dir": finished, "resume": True, **flags})) == 2
    error = capsys.readouterr().err
    assert "made with another configuration" in error
    assert words in error
    assert payload(finished) == before


def test_changed_weights_behind_the_same_files_are_detected(argv, tmp_path, monkeypatch, capsys):
    """The files' fingerprint is a sample; the loaded weights are compared in full."""
    monkeypatch.setattr(cache_job, "files_fingerprint", lambda _: "the same")
    assert main(argv()) == 0
    (tmp_path / "cache" / "shard-00003.safetensors").unlink()
    before = payload(tmp_path / "cache")
    assert main(argv(target_model=other_target(tmp_path / "other"), resume=True)) == 2
    assert "target.weights_fingerprint" in capsys.readouterr().err
    assert payload(tmp_path / "cache") == before


def test_a_quota_is_never_exceeded_and_resume_continues(argv, tmp_path, finished, caplog):
    total = sum(path.stat().st_size for path in finished.glob("shard-*"))
    with caplog.at_level("INFO"):
        assert main(argv(**PROBS, quota_gb=0.6 * total / 1e9)) == 3
    assert "--resume continues" in caplog.text
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("shard-*")}
    written = sum(path.stat().st_size for path in times)
    assert 0.3 * total < written <= 0.6 * total
    with pytest.raises(BadInput, match="unfinished"):
        CacheStore(tmp_path / "cache")
    assert main(argv(**PROBS, resume=True)) == 0
    assert payload(tmp_path / "cache") == payload(finished)
    for path, mtime in times.items():  # what was complete was not written again
        assert path.stat().st_mtime_ns == mtime


def test_a_full_disk_leaves_a_resumable_cache(argv, tmp_path, finished, monkeypatch, capsys):
    real, calls = os.posix_fallocate, []

    def filling(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache_shard.os, "posix_fallocate", filling)
        assert main(argv(**PROBS)) == 3
    assert "the disk is full" in capsys.readouterr().err
    assert shards(tmp_path / "cache") == shards(finished)[:2]
    assert not list((tmp_path / "cache").glob(".*.tmp"))
    assert main(argv(**PROBS, resume=True)) == 0
    assert payload(tmp_path / "cache") == payload(finished)


def test_a_disk_that_is_too_small_is_refused_before_writing(argv, tmp_path, monkeypatch, capsys):
    forbid_loading(monkeypatch)
    usage = shutil._ntuple_diskusage(10**6, 10**6, 1000)
    monkeypatch.setattr("fledge.target.cache.job.shutil.disk_usage", lambda _: usage)
    assert main(argv()) == 2
    assert "would be written" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def truncate_a_shard(cache):
    victim = cache / "shard-00002.safetensors"
    victim.write_bytes(victim.read_bytes()[:-10])


def leave_half_a_shard(cache):
    for place in (cache, cache / "target"):
        (place / ".shard-00001.safetensors.x1.tmp").write_bytes(b"half")
    (cache / "shard-00001.safetensors").unlink()


@pytest.mark.parametrize("damage", [truncate_a_shard, leave_half_a_shard])
def test_resuming_mends_a_cache(argv, tmp_path, finished, damage):
    shutil.copytree(finished, tmp_path / "cache")
    damage(tmp_path / "cache")
    assert main(argv(**PROBS, resume=True)) == 0
    assert payload(tmp_path / "cache") == payload(finished)


def test_a_batch_of_hidden_states_becomes_the_same_tensors():
    model = tiny_model("llama")
    vocabulary = draft_vocabulary(model)
    live = HFEagle3TargetModel(model).generate_batch(*padded_rows())
    cached = _compute_batch_cache(live, *vocabulary, torch.float32)
    hidden = HFEagle3TargetModel(model, supervision="hidden")
    derived = _compute_batch_cache(
        hidden.generate_batch(*padded_rows()), *vocabulary, torch.float32, head=hidden.info().head
    )
    for name, tensor in derived.items():
        torch.testing.assert_close(tensor, cached[name], rtol=1e-5, atol=1e-6)


def _run_slowly(words):
    """Run the command with a slowed-down disk, so that a kill interrupts its work."""
    torch.set_num_threads(1)
    real = cache_shard.ShardWriter.put

    def put(self, *args):
        time.sleep(0.01)
        real(self, *args)

    cache_shard.ShardWriter.put = put
    os._exit(main(words))


def test_kill_nine_at_ten_random_moments(argv, tmp_path):
    flags = {"encoding": "hidden", "shard_size": 2, "batch_size": 2}
    assert main(argv(**flags, output_dir=tmp_path / "whole")) == 0
    words = argv(**flags, resume=True)
    context = multiprocessing.get_context("fork")
    rng, kills, caught = random.Random(5), 0, 0
    while kills < 10:
        process = context.Process(target=_run_slowly, args=(words,))
        shards_before = shards(tmp_path / "cache")
        process.start()
        if kills % 3:  # let it get to work, then kill it somewhere in its next shards
            while process.is_alive() and shards(tmp_path / "cache") == shards_before:
                time.sleep(0.002)
            process.join(timeout=rng.uniform(0, 0.02))
        else:  # while it starts: reading, loading, writing the manifest
            process.join(timeout=rng.uniform(0, 0.15))
        assert process.is_alive(), "it finished before ten kills: give it more shards"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        caught += bool(list((tmp_path / "cache").glob(".shard*.tmp")))
        with pytest.raises(BadInput, match=r"unfinished|manifest"):
            CacheStore(tmp_path / "cache")
    assert caught >= 3  # kills left half-written shards behind, under no shard's name
    assert main(words) == 0
    assert payload(tmp_path / "cache") == payload(tmp_path / "whole")


def test_two_processes_write_what_one_writes(argv, tmp_path, finished):
    assert run_ranks(2, main, argv(**PROBS)) == [0, 0]
    assert payload(tmp_path / "cache") == payload(finished)
    # they may also continue the work of one process
    for name in shards(tmp_path / "cache")[2:]:
        (tmp_path / "cache" / name).unlink()
    assert run_ranks(2, main, argv(**PROBS, resume=True)) == [0, 0]
    assert payload(tmp_path / "cache") == payload(finished)
