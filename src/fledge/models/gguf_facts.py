"""The metadata of a GGUF file, validated before use."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.expected import Flag, ListOf, Table, Text, Whole
from fledge.core.reading import check
from fledge.models.gguf_header import check_header

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
