"""What runs leave behind: caches, drafts (also of other trainers), and the checkpoints from which
a run resumes."""

import shutil
from pathlib import Path

import torch

import fledge.target.cache.manifest as manifests
from engines.block_case import DSPARK
from engines.cases import engine_target, make_draft
from fledge.cli.cache import _facts
from fledge.data.vocab import DraftVocabulary
from fledge.formats.export import export_draft
from fledge.formats.foreign import read_files
from fledge.methods.registry import load_draft
from fledge.target.cache.backend import CachedEagle3TargetModel
from fuzz.mutate import mutated_bytes, mutated_header, mutated_json, mutated_tensors
from fuzz.survive import Case

BEFORE = Path(__file__).parent.parent / "train" / "written_before"
DRAFT = BEFORE / "peagle" / "checkpoints" / "step-00000003"
CHECKPOINT = "run/checkpoints/step-00000003"


class Manifest(Case):
    spoiled = ((manifests.MANIFEST, mutated_json),)

    def build(self):
        shutil.copytree(BEFORE / "cache", self.place, dirs_exist_ok=True)

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
    spoiled = (("shard-00000.safetensors", mutated_header),)


class ShardBytes(Manifest):
    spoiled = (("shard-00000.safetensors", mutated_bytes),)


class TargetTables(Manifest):
    spoiled = ((manifests.TARGET, mutated_header),)


class Vocabulary(Case):
    spoiled = (("vocabulary.safetensors", mutated_tensors),)

    def build(self):
        shutil.copy(BEFORE / "eagle3" / "vocabulary.safetensors", self.place)

    def read(self):
        vocabulary = DraftVocabulary.load(self.place / "vocabulary.safetensors")
        assert vocabulary.t2d.sum() == vocabulary.size


class Config(Case):
    spoiled = (("config.json", mutated_json),)

    def build(self):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(DRAFT / name, self.place)

    def read(self):
        draft = load_draft(self.place)
        assert all(tensor.isfinite().all() for tensor in draft.state_dict().values())


class Weights(Config):
    spoiled = (("model.safetensors", mutated_header),)


class ForeignConfig(Config):
    def read(self):
        files = read_files(self.place)
        view = files.view
        assert view.layout is not None
        assert (view.flat, view.names, view.junk, view.parallel, view.aux_layer_ids) is not None


class BlockConfig(Config):
    """A DSpark draft: its own heads, lists of layers and temperatures."""

    def build(self):
        make_draft(engine_target(), [1, 3, 5], **DSPARK).save_pretrained(self.place)


class ForeignBlockConfig(ForeignConfig):
    """Drafts in an engine's layout, including nested keys."""

    def build(self):
        draft = self.place / "own"
        make_draft(engine_target(), [1, 3, 5], block_size=5, mask_token_id=2).save_pretrained(draft)
        options = {"engine": "vllm", "target": "org/model", "without_target": True}
        exported = export_draft(draft, self.place / "out", **options)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(exported / name, self.place)


class TorchFile(Case):
    """torch's own files contain pickles: only what weights consist of is read from them."""

    def build(self):
        (self.place / "config.json").write_text("{}")
        state = {"fc.weight": torch.ones(3, 4), "norm.weight": torch.ones(4)}
        torch.save(state, self.place / "pytorch_model.bin")

    def spoil(self, rng):
        path = self.place / "pytorch_model.bin"
        if rng.random() < 0.3:  # one number that claims to be up to a trillion
            huge = torch.zeros(1).expand(rng.choice((10**6, 10**12)))
            torch.save({"fc.weight": huge, "norm.weight": rng.choice((1, "x", [huge]))}, path)
            return
        data = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)

    def read(self):
        for tensor in read_files(self.place).tensors.values():
            assert tensor.nbytes < 10**6
