"""Damaged caches are refused in one line that names what is damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fledge.core.errors import BadInput
from fledge.data.vocab import DraftVocabulary
from fledge.target.cache.backend import CachedEagle3TargetModel
from target.cache.caches import rewrite_manifest, verb

BEFORE = Path(__file__).parent.parent.parent / "train" / "written_before" / "cache"


@pytest.fixture
def cache(tmp_path):
    return shutil.copytree(BEFORE, tmp_path / "cache")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rows": 1000}, "unfinished: 3 of 4 shards are missing"),
        ({"format": 9}, "cache format 9"),
        ({"shard_size": 0}, "'shard_size' is 0"),
        ({"hidden_size": -16}, "'hidden_size' is -16"),
        ({"encoding": "nonsense"}, "'encoding' is 'nonsense'"),
        ({"aux_layer_ids": ["a"]}, "aux_layer_ids[0]"),
        ({"target": {}}, "'target.depth' is absent"),
    ],
)
def test_a_bad_field_in_the_manifest_is_refused(cache, capsys, fields, told):
    rewrite_manifest(cache, **fields)
    with pytest.raises(BadInput) as caught:
        CachedEagle3TargetModel(cache)
    assert told in str(caught.value)
    assert verb("cache", "verify", cache) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line


def test_inconsistent_row_starts_are_refused(cache):
    path = cache / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    base = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:base])["row_start"]["data_offsets"]
    starts = np.frombuffer(data[base + begin : base + end], dtype=np.int64)
    for index, value in [(1, -5), (3, 2**62), (0, 7), (-1, 2**40)]:
        changed = starts.copy()
        changed[index] = value
        data[base + begin : base + end] = changed.tobytes()
        path.write_bytes(data)
        with pytest.raises(BadInput, match="damaged"):
            CachedEagle3TargetModel(cache)


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
