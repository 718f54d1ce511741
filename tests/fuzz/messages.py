"""Network input: the body of a question to a target server.

Refused means ValueError, which the server answers with 400; anything else would be a 500.
"""

import torch
import xxhash

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.protocol import Question
from fledge.target.remote.server.answers import Target
from fledge.target.remote.server.queue import Limits
from fledge.target.remote.wire import DIGEST_BYTES
from fuzz.mutate import mutated_bytes, mutated_header
from fuzz.survive import Case
from target.tiny_models import tiny_model


class Body(Case):
    examples = 250

    def build(self):
        backend = HFEagle3TargetModel(tiny_model("llama"), supervision="hidden")
        self.target = Target(backend, Limits())
        ids = torch.arange(12).reshape(2, 6)
        ones, ids_W = torch.ones_like(ids), torch.arange(0, 30, 3)
        rows = TokenBatch(ids, ones, ones)
        question = Question("0123456789", rows, encoding="topk", top_k=3, vocabulary=ids_W)
        self.valid = question.to_message().to_bytes()
        self.body = self.valid

    def restore(self):
        self.body = self.valid

    def spoil(self, rng):
        spoilt = mutated_header if rng.random() < 0.7 else mutated_bytes
        body = spoilt(self.valid, rng)
        if rng.random() < 0.9:  # a matching digest, so that the checks behind it run too
            covered = body[:-DIGEST_BYTES]
            body = covered + xxhash.xxh3_64(covered).digest()[::-1]
        self.body = body

    def read(self):
        body = bytearray(self.body)
        try:
            self.target.read(body)
        except ValueError as error:
            raise BadInput(str(error)[:1000]) from error
