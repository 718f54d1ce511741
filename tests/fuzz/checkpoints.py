"""Checkpoints: the state and the trainer's tensors from which a run resumes."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from fledge.core.errors import BadInput
from fledge.data.tokenise import checksum
from fledge.recipe.schema import load_recipe
from fledge.training.checkpoint import newest_checkpoint, read_checkpoint
from fledge.training.runs import checkpoint_state
from fledge.training.session import resume
from fledge.training.setup import set_up
from fuzz.caches import BEFORE
from fuzz.mutate import json_bytes, mutated_header
from fuzz.survive import Case
from train.tiny import Notes

CHECKPOINT = "run/checkpoints/step-00000003"


class State(Case):
    examples = 200

    def build(self):
        shutil.copytree(BEFORE / "eagle3", self.place / "run")

    def spoil(self, rng):
        path = self.place / CHECKPOINT / "state.json"
        path.write_bytes(json_bytes(json.loads(path.read_bytes()), rng))

    def read(self):
        newest_checkpoint(self.place / "run")
        checkpoint_state(self.place / CHECKPOINT)
        assert read_checkpoint(self.place / CHECKPOINT).step >= 0


class Trainer(State):
    """Tensors of other names, shapes and dtypes, with matching checksums."""

    examples = 60

    def build(self):
        super().build()
        cache = shutil.copytree(BEFORE / "cache", self.root / "cache")
        paths = [f"target.cached_target_path={cache}", f"run.output_dir={self.place / 'run'}"]
        self.training = set_up(load_recipe(self.place / "run" / "recipe.yaml", paths))

    def spoil(self, rng):
        names = ("training.safetensors", "model.safetensors")
        name = rng.choice(names)
        path = self.place / CHECKPOINT / name
        if rng.random() < 0.4:
            path.write_bytes(mutated_header(path.read_bytes(), rng))
        else:
            tensors = load_file(path)
            for _ in range(rng.randint(1, 3)):
                _spoil_tensor(tensors, rng)
            save_file(tensors, path)
        state = self.place / CHECKPOINT / "state.json"
        content = json.loads(state.read_bytes())
        state.write_text(
            json.dumps({**content, "checksums": {**content["checksums"], name: checksum(path)}})
        )

    def read(self):
        notes = Notes()
        resume(self.training, notes)
        passed_over = [note for note in notes.notes if "passing over" in note]
        if passed_over:
            raise BadInput(passed_over[0])


def _spoil_tensor(tensors, rng):
    key = rng.choice(sorted(tensors))
    old = tensors[key]
    tensors[key] = rng.choice(
        (
            torch.zeros(0), torch.zeros(3, 5), old.to(torch.float64), old.to(torch.int8),
            old.flatten()[:-1].contiguous(), torch.full_like(old, 3), old[None].contiguous(),
        )
    )  # fmt: skip
    if rng.random() < 0.3:
        del tensors[key]
