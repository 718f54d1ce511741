"""GGUF files: everything before the data."""

import shutil
import struct

from fledge.models.gguf import convert
from fledge.models.resolve import public_name
from fuzz.mutate import NUMBERS, mutated_bytes
from fuzz.survive import Case
from models.tiny_gguf import tiny_llama, write_gguf

# Sizes in the metadata, each a 32-bit number after its name and type.
SIZES = (
    b"llama.block_count", b"llama.context_length", b"llama.embedding_length",
    b"llama.feed_forward_length", b"llama.attention.head_count", b"llama.attention.head_count_kv",
    b"llama.vocab_size", b"llama.rope.dimension_count", b"tokenizer.ggml.bos_token_id",
)  # fmt: skip


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
