"""What other programs send: hidden states of an engine, GGUF files (everything before the data),
and the body of a question to a target server."""

import shutil
import struct

import torch
import xxhash
from safetensors.torch import save_file

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.models.gguf import convert
from fledge.models.resolve import public_name
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.remote.protocol import Question
from fledge.target.remote.server.answers import Target
from fledge.target.remote.wire import DIGEST_BYTES
from fledge.target.vllm.engine import take_states
from fuzz.mutate import NUMBERS, mutated_bytes, mutated_tensors
from fuzz.survive import Case
from models.tiny_gguf import tiny_llama, write_gguf
from target.tiny_models import tiny_model

TOKENS = list(range(12))
# Sizes in the metadata, each a 32-bit number after its name and type.
SIZES = (
    b"llama.block_count", b"llama.context_length", b"llama.embedding_length",
    b"llama.feed_forward_length", b"llama.attention.head_count", b"llama.attention.head_count_kv",
    b"llama.vocab_size", b"llama.rope.dimension_count", b"tokenizer.ggml.bos_token_id",
)  # fmt: skip


class States(Case):
    spoiled = (("one.safetensors", mutated_tensors),)

    def build(self):
        states = torch.randn(len(TOKENS), 4, 8)
        path = self.place / "one.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.tensor(TOKENS)}, path)
        (self.place / "one.safetensors.lock").touch()

    def read(self):
        states = take_states(self.place / "one.safetensors", TOKENS)
        assert states is not None
        assert len(states) == len(TOKENS)


class Header(Case):
    examples = 40

    def build(self):
        write_gguf(self.place / "tiny.gguf", tiny_llama())

    def spoil(self, rng):
        path = self.place / "tiny.gguf"
        data = path.read_bytes()
        header = data.index(b"token_embd.weight") + 2000
        if rng.random() < 0.5:
            name = rng.choice(SIZES)
            at = data.index(name) + len(name) + 4
            number = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            path.write_bytes(data[:at] + number + data[at + 4 :])
        else:
            path.write_bytes(mutated_bytes(data, rng, near=rng.choice((24, 400, header))))

    def read(self):
        out = self.root / "converted"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        assert "/" not in public_name(str(self.place / "tiny.gguf"))  # not a repository's name
        convert(self.place / "tiny.gguf", out, name="tiny.gguf", dtype="bfloat16")


class Body(Case):
    """Refused means ValueError, which the server answers with 400; anything else is a 500."""

    examples = 250

    def build(self):
        backend = HFEagle3TargetModel(tiny_model("llama"), supervision="hidden")
        self.target = Target(backend, max_tokens=1000)
        ids = torch.arange(12).reshape(2, 6)
        ones, ids_W = torch.ones_like(ids), torch.arange(0, 30, 3)
        rows = TokenBatch(ids, ones, ones)
        question = Question("0123456789", rows, encoding="topk", top_k=3, vocabulary=ids_W)
        self.valid = question.to_message().to_bytes()
        self.body = self.valid

    def restore(self):
        self.body = self.valid

    def spoil(self, rng):
        body = mutated_tensors(self.valid, rng)
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
