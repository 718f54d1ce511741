"""Maliciously crafted caches are refused before any number in them is trusted."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.core.errors import BadInput
from fledge.data.vocab import DraftVocabulary
from fledge.precompute_eagle3 import main
from fledge.target.cache.backend import CachedEagle3TargetModel, CacheStore
from fledge.target.cache.manifest import ensure_free
from fledge.target.cache.shard import Shard
from target.cache.caches import rewrite_manifest, verb, words_of

BEFORE = Path(__file__).parent.parent.parent / "train" / "written_before" / "cache"
SHARD = "shard-00000.safetensors"


@pytest.fixture
def cache(tmp_path):
    return shutil.copytree(BEFORE, tmp_path / "cache")


def read_all(cache):
    target = CachedEagle3TargetModel(cache)
    return [target.store.check(row) for row in range(len(target.store))]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rows": 10**14}, "390624999999 of 390625000000 shards are missing"),
        ({"rows": 10**30}, "'rows' is 10000"),
        ({"format": 9}, "cache format 9"),
        ({"shard_size": 0}, "'shard_size' is 0"),
        ({"held_out_rows": 17}, "17 of 16 rows cannot be held out"),
        ({"hidden_size": -16}, "'hidden_size' is -16"),
        ({"aux_layer_ids": ["a"]}, "aux_layer_ids[0]"),
        ({"vocabulary": {"size": True}}, "vocabulary.size"),
        ({"vocab_size": 5}, "damaged"),  # tokens outside the target's vocabulary
        ({"target": {}}, "'target.depth' is absent"),
    ],
)
def test_a_bad_field_in_the_manifest_is_refused(cache, fields, told):
    rewrite_manifest(cache, **fields)
    with pytest.raises(BadInput) as caught:
        read_all(cache)
    assert told in str(caught.value)


REQUIRED = ["encoding", "dtype", "rows", "shard_size", "hidden_size", "target"]
DAMAGED = [(name, value) for name in REQUIRED for value in ("nonsense", None, [1])]


@pytest.mark.parametrize(("name", "value"), [*DAMAGED, ("vocabulary", "x"), ("vocabulary", [1])])
def test_a_damaged_manifest_is_a_one_line_error(cache, capsys, name, value):
    rewrite_manifest(cache, **{name: value})
    for action in ("info", "verify"):
        assert verb("cache", action, cache) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"the manifest is damaged: '{name}' is {value!r}" in shown.err


@pytest.mark.parametrize("facts", [{"dtype": "nn"}, {"head": {"scale": "x"}}, {"final_norm": [1]}])
def test_bad_facts_about_the_target_are_refused(cache, facts):
    target_facts = json.loads((cache / "manifest.json").read_bytes())["target"]
    rewrite_manifest(cache, target={**target_facts, **facts})
    with pytest.raises(BadInput, match="the manifest is damaged: 'target"):
        CachedEagle3TargetModel(cache)


def test_target_tensors_of_wrong_shapes_are_refused(cache):
    tensors = load_file(cache / "target.safetensors")
    target_facts = json.loads((cache / "manifest.json").read_bytes())["target"]
    rewrite_manifest(cache, target={**target_facts, "crc": {}})
    for name in ("embed_tokens", "lm_head", "final_norm"):
        save_file({**tensors, name: torch.zeros(3, 5, 7)}, cache / "target.safetensors")
        with pytest.raises(BadInput, match=f"{name} is torch.float32"):
            CachedEagle3TargetModel(cache)


@pytest.mark.parametrize("name", ["manifest.json", SHARD, "target.safetensors"])
def test_links_out_of_the_cache_and_pipes_are_refused(cache, tmp_path, name):
    outside = (cache / name).rename(tmp_path / name)
    (cache / name).symlink_to(outside)
    with pytest.raises(BadInput, match="leads out"):
        CachedEagle3TargetModel(cache)
    with pytest.raises(BadInput, match="leads out"):  # nor is it written to
        ensure_free(cache, resume=True)
    (cache / name).unlink()
    os.mkfifo(cache / name)
    with pytest.raises(BadInput, match="pipe"):
        CachedEagle3TargetModel(cache)


def starts_of(path):
    """The bytes of the shard, and the slice of them that is its `row_start`."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])["row_start"]["data_offsets"]
    return data, slice(8 + length + begin, 8 + length + end)


@pytest.mark.parametrize("change", [(1, -5), (3, 2**62), (0, 7), (-1, 2**40)])
def test_inconsistent_row_starts_are_refused(cache, change):
    path = cache / SHARD
    data, place = starts_of(path)
    starts = np.frombuffer(data[place], dtype=np.int64).copy()
    starts[change[0]] = change[1]
    data[place] = starts.tobytes()
    path.write_bytes(data)
    with pytest.raises(BadInput, match="damaged"):
        CacheStore(cache)


def test_a_header_longer_than_its_shard_is_refused(cache):
    path = cache / SHARD
    shape = CacheStore(cache).shape
    for length in (2**63, 2**40, path.stat().st_size):
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
        with pytest.raises(BadInput, match="damaged"):
            Shard(path, shape)


def test_a_vocabulary_of_invalid_tokens_is_refused(tmp_path):
    path = tmp_path / "vocabulary.safetensors"
    DraftVocabulary(np.arange(4), 9, 1.0).save(path)
    whole = DraftVocabulary.load(path)
    assert whole.size == 4
    facts = {"fledge": json.dumps({"coverage": 1.0, "rows": "", "digest": whole.digest()})}
    t2d = torch.zeros(9, dtype=torch.bool)
    for d2t in (torch.full((4,), 10**12), torch.full((4,), -9), torch.zeros(2, 2).long()):
        save_file({"d2t": d2t, "t2d": t2d}, path, metadata=facts)
        with pytest.raises(BadInput, match="vocabulary"):
            DraftVocabulary.load(path)
    for text in ("{}", "[]", '{"coverage": NaN, "rows": "", "digest": ""}', "{" * 9999):
        save_file({"d2t": torch.zeros(4).long(), "t2d": t2d}, path, metadata={"fledge": text})
        with pytest.raises(BadInput, match="vocabulary"):
            DraftVocabulary.load(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [SHARD, "target.safetensors", "target/config.json"])
def test_what_is_not_a_file_does_not_block_a_precompute(
    name, tiny_target, tiny_chats, tmp_path, capsys
):
    """Opening a pipe waits for whoever reads it; a socket or a directory cannot be replaced."""
    cache = tmp_path / "cache"
    paths = {"target_model": tiny_target, "input_data": tiny_chats, "output_dir": cache}
    argv = words_of(**paths, resume=True)
    assert main(argv) == 0
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    for make in (os.mkfifo, os.mkdir):
        (cache / name).rename(tmp_path / "kept")
        make(cache / name)
        assert main(argv) == 2
        assert f"{name}: a file of the cache is a " in capsys.readouterr().err
        (cache / name).rmdir() if make is os.mkdir else (cache / name).unlink()
        (tmp_path / "kept").rename(cache / name)
    assert {path: path.stat().st_mtime_ns for path in before if path.is_file()} == {
        path: time_ns for path, time_ns in before.items() if path.is_file()
    }
