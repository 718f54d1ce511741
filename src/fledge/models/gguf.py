"""A GGUF file's metadata, and its tokenizer, built from the file's own tables."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.core.reading import Flag, ListOf, Table, Text, Whole, check, open_regular

MAGIC = b"GGUF"
_TOKENIZER = "tokenizer.ggml"
_TOKEN_ID = Whole(0, 2**32)
_MOST_TOKENS = 2**24
# The metadata that this module reads.
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
    reader = _open(path)
    keys = (key for key in reader.fields if not key.startswith("GGUF."))
    fields = {key: reader.fields[key].contents() for key in keys}
    check(fields, _FIELDS, where=str(path), what="its metadata")
    names = (tensor.name.split(".") for tensor in reader.tensors)
    blocks = {parts[1] for parts in names if parts[0] == "blk" and len(parts) > 1}
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return Facts(fields, parameters, len(blocks), int(reader.data_offset))


def _open(path: Path) -> Any:
    """The file in gguf's reader, with what that does not check: beyond the end of the file it reads
    empty values, an array of 2^60 of them for ever, and tensors may lie upon each other. Any damage
    is some kind of exception."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]  # a library without types
        def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **more: Any) -> Any:
            end = int(offset) + int(count) * dtype().itemsize
            if end > len(self.data):
                raise ValueError(f"its header says {end:,} bytes, it has {len(self.data):,}")
            return super()._get(offset, dtype, count, *order, **more)

    open_regular(path).close()
    reader = Reader(path)
    if sum(int(tensor.n_bytes) for tensor in reader.tensors) > len(reader.data):
        raise ValueError("its tensors overlap")
    return reader


# --- tokenizer -----------------------------------------------------------------------------------
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
