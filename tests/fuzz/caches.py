"""Caches: manifests, shards, the target's tables, the draft vocabulary."""

import json
import shutil
from pathlib import Path

import fledge.target.cache.manifest as manifests
from fledge.cli.cache import _facts
from fledge.data.vocab import DraftVocabulary
from fledge.target.cache.backend import CachedEagle3TargetModel
from fuzz.mutate import json_bytes, mutated_bytes, mutated_header
from fuzz.survive import Case

BEFORE = Path(__file__).parent.parent / "train" / "written_before"


class Manifest(Case):
    examples = 150
    file = manifests.MANIFEST

    def build(self):
        shutil.copytree(BEFORE / "cache", self.place, dirs_exist_ok=True)

    def spoil(self, rng):
        path = self.place / self.file
        path.write_bytes(json_bytes(json.loads(path.read_bytes()), rng))

    def read(self):
        """As `fledge cache info` and training do; an accepted cache can be read to its last row."""
        _facts(self.place)
        target = CachedEagle3TargetModel(self.place)
        try:
            for number, row in enumerate(target.rows()):
                target.store.check(number)
                assert int(row.input_ids.max()) < target.info().vocab_size
        finally:
            target.close()


class ShardHeader(Manifest):
    file = "shard-00000.safetensors"

    def spoil(self, rng):
        path = self.place / self.file
        path.write_bytes(mutated_header(path.read_bytes(), rng))


class ShardBytes(ShardHeader):
    def spoil(self, rng):
        path = self.place / self.file
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))


class TargetTables(ShardHeader):
    file = manifests.TARGET


class Vocabulary(Case):
    examples = 100

    def build(self):
        shutil.copy(BEFORE / "eagle3" / "vocabulary.safetensors", self.place)

    def spoil(self, rng):
        path = self.place / "vocabulary.safetensors"
        spoilt = mutated_header if rng.random() < 0.7 else mutated_bytes
        path.write_bytes(spoilt(path.read_bytes(), rng))

    def read(self):
        vocabulary = DraftVocabulary.load(self.place / "vocabulary.safetensors")
        assert vocabulary.t2d.sum() == vocabulary.size
