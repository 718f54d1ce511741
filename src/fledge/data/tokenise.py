"""Conversations -> token ids with a loss mask, part by part, in any process."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.data.conversation import parse_conversation
from fledge.data.drops import BadRow, DropReport
from fledge.data.mask import MaskedText, MaskOptions, masked_texts
from fledge.data.sources import Part
from fledge.data.template import ChatTemplate


@dataclass(frozen=True)
class TokeniseOptions:
    """Everything, besides the data and the tokenizer, that shapes the token rows."""

    max_length: int | None = None  # longer rows are cut or dropped
    overlong: Literal["cut", "drop"] = "cut"
    last_turn_only: bool = False
    mask_reasoning: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)  # e.g. enable_thinking

    def fingerprint(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Encoder:
    """A tokenizer with its template: the one way from a conversation to token rows."""

    def __init__(self, tokenizer: Any, options: TokeniseOptions) -> None:
        from tokenizers import Tokenizer

        if not getattr(tokenizer, "is_fast", False):
            raise BadInput(
                "the tokenizer has no fast version, so the mask cannot be aligned with its tokens",
                where=str(tokenizer.name_or_path),
                fix="add a tokenizer.json (tokenizers library) to the model",
            )
        self.options = options
        self.template = ChatTemplate.of(tokenizer, options.template_options)
        self._mask_options = MaskOptions(options.last_turn_only, options.mask_reasoning)
        # Offsets must cover each token's whole text: trimmed ones hide a leading space or newline,
        # and a boundary token would land on the wrong side. The ids are not affected.
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        spec["truncation"] = spec["padding"] = None
        self._backend = Tokenizer.from_str(json.dumps(_untrimmed(spec)))

    @classmethod
    def load(
        cls, model_dir: str | Path, options: TokeniseOptions, *, trust_remote_code: bool = False
    ) -> "Encoder":
        from fledge.models.resolve import load_tokenizer

        tokenizer = load_tokenizer(str(model_dir), trust_remote_code=trust_remote_code)
        return cls(tokenizer, options)

    def texts(self, raw: Any) -> list[MaskedText]:
        """The masked texts of one raw row."""
        if isinstance(raw, BadRow):
            raise raw
        return masked_texts(parse_conversation(raw), self.template, self._mask_options)

    def encode(self, texts: Sequence[MaskedText], places: Sequence[str]) -> list[TokenRow]:
        """Tokenise rows; a token is supervised when its whole text lies in a supervised span."""
        encodings = self._backend.encode_batch([t.text for t in texts], add_special_tokens=False)
        rows = zip(texts, places, encodings, strict=True)
        return [_masked(text, place, encoding) for text, place, encoding in rows]

    def encode_to_show(
        self, text: MaskedText, place: str
    ) -> tuple[TokenRow, list[tuple[str, bool]]]:
        """A row as `fit` leaves it, and each token's own text with whether it is supervised. A
        character that takes several tokens is shown with the first of them."""
        encoding = self._backend.encode(text.text, add_special_tokens=False)
        row = self.fit(_masked(text, place, encoding))
        pieces, at = [], 0
        for (_, end), supervised in zip(encoding.offsets, row.loss_mask.tolist(), strict=False):
            if end > at:
                pieces.append((text.text[at:end], bool(supervised)))
                at = end
        return row, pieces

    def fit(self, row: TokenRow) -> TokenRow:
        """Apply the length limit; a row without a supervised token is dropped."""
        limit = self.options.max_length
        if not row.loss_mask.any():
            raise BadRow("no supervised token")
        if limit is None or len(row.input_ids) <= limit:
            return row
        if self.options.overlong == "drop":
            raise BadRow("longer than max_length", f"{len(row.input_ids)} tokens")
        if not row.loss_mask[:limit].any():
            raise BadRow("cut before any supervised token", f"{len(row.input_ids)} tokens")
        cut = bool(row.loss_mask[limit])  # the cut went through something the assistant said
        ids_T, mask_T = row.input_ids[:limit], row.loss_mask[:limit]
        return TokenRow(ids_T, mask_T, row.place, row.truncated or cut)


def _masked(text: MaskedText, place: str, encoding: Any) -> TokenRow:
    ids_T = np.asarray(encoding.ids, dtype=np.int32)
    offsets_T2 = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    mask_T = np.zeros(len(ids_T), dtype=np.uint8)
    for start, end in text.spans:
        mask_T |= (offsets_T2[:, 0] >= start) & (offsets_T2[:, 1] <= end)
    return TokenRow(ids_T, mask_T, place, text.truncated)


def _untrimmed(value: Any) -> Any:
    """A tokenizer's JSON with every `trim_offsets` off."""
    if isinstance(value, dict):
        return {k: False if k == "trim_offsets" else _untrimmed(v) for k, v in value.items()}
    return [_untrimmed(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class TokenisedPart:
    rows: list[TokenRow]
    drops: DropReport


def tokenise_part(part: Part, encoder: Encoder) -> TokenisedPart:
    """All rows of a part: a bad one is counted, never raised."""
    drops = DropReport()
    places: list[str] = []
    texts: list[MaskedText] = []
    for place, raw in part.rows():
        try:
            masked = encoder.texts(raw)
        except BadRow as bad:
            drops.add(place, bad)
            continue
        texts += masked
        places += [place] * len(masked)
    rows = []
    for place, group in _by_place(encoder.encode(texts, places)):
        kept, last = [], None
        for row in group:
            try:
                kept.append(encoder.fit(row))
            except BadRow as bad:
                last = bad
        if kept:
            drops.kept += 1
            rows += kept
        elif last is not None:
            drops.add(place, last)
    return TokenisedPart(rows, drops)


def _by_place(rows: Sequence[TokenRow]) -> Iterator[tuple[str, list[TokenRow]]]:
    """Rows that one conversation fanned out to stand together."""
    group: list[TokenRow] = []
    for row in rows:
        if group and row.place != group[0].place:
            yield group[0].place, group
            group = []
        group.append(row)
    if group:
        yield group[0].place, group


def checksum(path: Path) -> int:
    """CRC of a file, streamed."""
    crc = 0
    with path.open("rb") as handle:
        while block := handle.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
