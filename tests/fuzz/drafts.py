"""Drafts: config.json and the header of the weights, from fledge and from other trainers."""

import json
import shutil

import torch

from engines.block_case import DSPARK
from engines.cases import engine_target, make_draft
from fledge.formats.export import export_draft
from fledge.formats.foreign import read_files
from fledge.methods.registry import load_draft
from fuzz.caches import BEFORE
from fuzz.mutate import json_bytes, mutated_header
from fuzz.survive import Case

DRAFT = BEFORE / "peagle" / "checkpoints" / "step-00000003"


class Config(Case):
    examples = 150

    def build(self):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(DRAFT / name, self.place)

    def spoil(self, rng):
        path = self.place / "config.json"
        path.write_bytes(json_bytes(json.loads(path.read_bytes()), rng))

    def read(self):
        draft = load_draft(self.place)
        assert all(tensor.isfinite().all() for tensor in draft.state_dict().values())


class Weights(Config):
    def spoil(self, rng):
        path = self.place / "model.safetensors"
        path.write_bytes(mutated_header(path.read_bytes(), rng))


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
