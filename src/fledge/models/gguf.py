"""The header of a GGUF file, checked against the file itself before a library trusts its numbers.

    4 bytes  GGUF       u32 version     u64 tensors     u64 keys
    keys     string, u32 type, value (an array: u32 type, u64 count, items)
    tensors  string, u32 dimensions, u64 each, u32 type, u64 offset into the data
    data     from the next multiple of `general.alignment` on

Every count and length must fit into the rest of the file, and every tensor into the data. Only the
names are allocated here.
"""

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.reading import Flag, ListOf, Table, Text, Whole, check, open_regular

MAGIC = b"GGUF"
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _U32 = 8, 9, 4
_LONGEST_NAME, _MOST_DIMENSIONS = 1 << 12, 4


class _DamageError(Exception):
    """The header is damaged; the message says how, in a few words."""


def check_header(path: Path) -> None:
    """Refuse a file whose header describes more than the file can hold."""
    with open_regular(path) as handle:
        try:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # empty
            raise BadInput("not a GGUF file (it is empty)", where=str(path)) from None
    with data:
        try:
            _HeaderReader(data).check()
        except _DamageError as damage:
            fix = "the file is cut short or damaged: fetch it again"
            raise BadInput(
                f"cannot convert: its header says {damage}", where=str(path), fix=fix
            ) from None


class _HeaderReader:
    """Reads a header from its first byte to its last."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._offset = data, len(data), 0

    def check(self) -> None:
        if self._take(4) != MAGIC or self._number(4) not in (2, 3):
            raise _DamageError("neither version 2 nor 3")
        tensors, keys = self._number(8), self._number(8)
        self._check_fits(tensors, 24, "tensors")
        self._check_fits(keys, 13, "keys")
        names: set[bytes] = set()
        alignment = 32
        for _ in range(keys):
            name, kind = self._name(names), self._number(4)
            if name == b"general.alignment" and kind == _U32:
                alignment = int.from_bytes(self._data[self._offset : self._offset + 4], "little")
            self._skip_value(kind)
        if alignment < 1 or alignment > 1 << 20:
            raise _DamageError(f"an alignment of {alignment}")
        names.clear()
        extents = [self._tensor(names) for _ in range(tensors)]
        data_bytes = self._size - -(-self._offset // alignment) * alignment
        if any(offset + count > data_bytes for offset, count in extents):
            raise _DamageError("a tensor ends after the file does")
        if sum(count for _, count in extents) > data_bytes:
            raise _DamageError("tensors overlap")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._offset:
            raise _DamageError(f"{count} bytes at byte {self._offset} of {self._size}")
        self._offset += count
        return self._data[self._offset - count : self._offset]

    def _number(self, n_bytes: int) -> int:
        return int.from_bytes(self._take(n_bytes), "little")

    def _check_fits(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._offset:
            raise _DamageError(f"{count} {what} at byte {self._offset} of {self._size}")

    def _name(self, names: set[bytes]) -> bytes:
        length = self._number(8)
        if not 0 < length <= _LONGEST_NAME:
            raise _DamageError(f"a name of {length} bytes")
        name = self._take(length)
        if name in names:
            raise _DamageError(f"{name[:60]!r} stands there twice")
        names.add(name)
        return name

    def _skip_value(self, kind: int) -> None:
        """Skip one value."""
        if kind in _ITEM_BYTES:
            self._take(_ITEM_BYTES[kind])
        elif kind == _STRING:
            self._skip_items(self._number(8), 1)
        elif kind == _ARRAY:
            item, count = self._number(4), self._number(8)
            if item in _ITEM_BYTES:
                self._skip_items(count, _ITEM_BYTES[item])
            elif item == _STRING:
                self._check_fits(count, 8, "strings")
                for _ in range(count):
                    self._skip_items(self._number(8), 1)
            else:
                raise _DamageError(f"an array of type {item}")
        else:
            raise _DamageError(f"a value of type {kind}")

    def _skip_items(self, count: int, item_bytes: int) -> None:
        """Skip items without reading them."""
        self._check_fits(count, item_bytes, "items")
        self._offset += count * item_bytes

    def _tensor(self, names: set[bytes]) -> tuple[int, int]:
        """(offset, bytes) of one tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dimensions = self._name(names), self._number(4)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _DamageError(f"{name[:60]!r} has {dimensions} dimensions")
        shape = [self._number(8) for _ in range(dimensions)]
        kind, offset = self._number(4), self._number(8)
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise _DamageError(f"{name[:60]!r} is of type {kind}") from None
        if 0 in shape or shape[0] % block:
            raise _DamageError(f"{name[:60]!r} has the shape {shape}")
        return offset, math.prod(shape) // block * block_bytes


# --- gguf facts ----------------------------------------------------------------------------------
# The metadata of a GGUF file, validated before use.


_TOKENIZER = "tokenizer.ggml"
_TOKEN_ID = Whole(0, 2**32)
_MOST_TOKENS = 2**24
# The metadata that this module and `gguf_tokenizer` read.
_FIELDS = Table(
    {"general.architecture": Text(64)},
    optional={
        **dict.fromkeys((f"{_TOKENIZER}.model", f"{_TOKENIZER}.pre"), Text(64)),
        f"{_TOKENIZER}.tokens": ListOf(Text(), most=_MOST_TOKENS),
        f"{_TOKENIZER}.merges": ListOf(Text(), most=_MOST_TOKENS),
        f"{_TOKENIZER}.token_type": ListOf(Whole(0, 2**31), most=_MOST_TOKENS),
        f"{_TOKENIZER}.add_bos_token": Flag(),
        "tokenizer.chat_template": Text(2**24),
        **{
            f"{_TOKENIZER}.{name}_token_id": _TOKEN_ID
            for name in ("bos", "eos", "padding", "unknown")
        },
    },
)


@dataclass(frozen=True)
class Facts:
    """The file's metadata."""

    fields: dict[str, Any]
    n_parameters: int
    blocks: int  # number of layers that have tensors
    data_offset: int  # where the metadata ends and the weights begin

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(key, default)

    def token(self, key: str) -> str | None:
        """The text of a special token, which the file stores by id."""
        index = self.get(f"tokenizer.ggml.{key}_token_id")
        tokens = self.get("tokenizer.ggml.tokens", [])
        return tokens[index] if index is not None and index < len(tokens) else None


def read_facts(path: Path) -> Facts:
    from gguf import GGUFReader

    check_header(path)
    reader = GGUFReader(path)
    keys = (key for key in reader.fields if not key.startswith("GGUF."))
    fields = {key: reader.fields[key].contents() for key in keys}
    check(fields, _FIELDS, where=str(path), what="its metadata")
    names = (tensor.name.split(".") for tensor in reader.tensors)
    blocks = {parts[1] for parts in names if parts[0] == "blk" and len(parts) > 1}
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return Facts(fields, parameters, len(blocks), int(reader.data_offset))


# --- gguf tokenizer ------------------------------------------------------------------------------
# The tokenizer of a GGUF file, built from the file's own tables.
#
# The conversion in transformers loses the pre-tokenizer (without SmolLM2's, 2 % of prompts tokenize
# differently) and the end-of-turn token (it reports the bos token as eos).


_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType, as stored in tokenizer.ggml.token_type

# `tokenizer.ggml.pre` -> how text is split before byte-pair merging. Names that share a rule share
# a value. Other names are refused: a wrong split would go unnoticed until serving.
_PRE_TOKENIZER = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(path: Path, facts: Facts) -> Any:
    """A fast tokenizer with the special tokens and the chat template of the file."""
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if facts.get("tokenizer.ggml.model") == "gpt2":
        backend = _byte_level_bpe(path, facts)
    else:  # SentencePiece families: the conversion in transformers keeps their rules
        backend = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        ).backend_tokenizer
    bos = facts.token("bos")
    if facts.get("tokenizer.ggml.add_bos_token") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    special = {
        "bos_token": bos,
        "eos_token": facts.token("eos"),
        "pad_token": facts.token("padding") or facts.token("eos"),
        "unk_token": facts.token("unknown"),
    }
    architecture = facts.get("general.architecture", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=facts.get("tokenizer.chat_template"),
        model_max_length=facts.get(f"{architecture}.context_length", int(1e30)),
        clean_up_tokenization_spaces=False,
        **{key: token for key, token in special.items() if token is not None},
    )


def _byte_level_bpe(path: Path, facts: Facts) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    pre = facts.get("tokenizer.ggml.pre", "gpt-2")
    rule = _PRE_TOKENIZER.get(pre)
    if rule is None:
        raise BadInput(
            f"its pre-tokenizer '{pre}' is not known, and guessing would tokenize text wrongly",
            where=str(path),
            fix="use the model's Hugging Face directory or hub id instead",
        )
    tokens: list[str] = facts.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule == "llama3"))
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = facts.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, k in pairs if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, k in pairs if k == _USER_DEFINED]
    )
    return tokenizer


def _pre_tokenizer(rule: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    use_regex = rule in ("gpt2", "digits")  # ByteLevel then splits by GPT-2's pattern
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    if rule == "gpt2":
        return bytes_
    if rule == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    pattern = Regex(_SPLIT_PATTERN % ("{1,3}" if rule == "llama3" else ""))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), bytes_])
