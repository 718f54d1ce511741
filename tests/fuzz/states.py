"""Files of hidden states in a directory that other programs write to."""

import torch
from safetensors.torch import save_file

from fledge.target.vllm.engine import take_states
from fuzz.mutate import mutated_bytes, mutated_header
from fuzz.survive import Case

TOKENS = list(range(12))


class States(Case):
    examples = 150

    def build(self):
        states = torch.randn(len(TOKENS), 4, 8)
        path = self.place / "one.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.tensor(TOKENS)}, path)
        (self.place / "one.safetensors.lock").touch()

    def spoil(self, rng):
        path = self.place / "one.safetensors"
        spoilt = mutated_header if rng.random() < 0.7 else mutated_bytes
        path.write_bytes(spoilt(path.read_bytes(), rng))

    def read(self):
        states = take_states(self.place / "one.safetensors", TOKENS)
        assert states is not None
        assert len(states) == len(TOKENS)
