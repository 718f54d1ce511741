"""Conversations -> token ids with a loss mask, part by part, in any process."""

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.data.conversation import parse_conversation, plain_text
from fledge.data.drops import CUT_UNSUPERVISED, TOO_LONG, BadRow, DropReport
from fledge.data.mask import LONGEST_ROW, MaskedText, masked_texts
from fledge.data.sources import Part
from fledge.data.template import ChatTemplate
from fledge.data.tokenizer import TokenizerFacts

_BATCH = 1 << 23  # characters tokenized at a time: their encodings take fifty bytes each


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
    """A tokenizer with its template: turns every conversation into token rows."""

    def __init__(self, tokenizer: Any, options: TokeniseOptions) -> None:
        """`tokenizer`: a Hugging Face tokenizer, or the facts of one."""
        from tokenizers import Tokenizer

        facts = tokenizer
        if not isinstance(facts, TokenizerFacts):
            facts = TokenizerFacts.of(tokenizer)
        if facts.backend is None:
            raise BadInput(
                "the tokenizer has no fast version, so the mask cannot be aligned with its tokens",
                where=facts.name,
                fix="add a tokenizer.json (tokenizers library) to the model",
            )
        self.options, self._facts = options, facts
        # Offsets must cover each token's whole text: trimmed ones omit a leading space or newline,
        # and a token at a boundary would land on the wrong side. The ids are not affected.
        spec = json.loads(facts.backend)
        spec["truncation"] = spec["padding"] = None
        self._backend = Tokenizer.from_str(json.dumps(_untrimmed(spec)))

    @classmethod
    def load(
        cls, model_dir: str | Path, options: TokeniseOptions, *, trust_remote_code: bool = False
    ) -> "Encoder":
        facts = TokenizerFacts.load(model_dir, trust_remote_code=trust_remote_code)
        return cls(facts, options)

    def texts(self, raw: Any) -> list[MaskedText]:
        """The masked texts of one raw row."""
        if isinstance(raw, BadRow):
            raise raw
        texts = self._masked_texts(raw)
        for text in texts:
            if len(text.text) > LONGEST_ROW:
                raise BadRow("row is too long", f"more than {LONGEST_ROW:,} characters")
            try:
                text.text.encode()
            except UnicodeEncodeError as error:  # a lone surrogate, e.g. in a tool's arguments
                raise BadRow("broken UTF-8", repr(text.text[error.start :][:40])) from None
        return texts

    def _masked_texts(self, raw: Any) -> list[MaskedText]:
        plain = plain_text(raw)
        if plain is not None:
            return [self._plain(plain)]
        return masked_texts(
            parse_conversation(raw),
            self.template,
            last_turn_only=self.options.last_turn_only,
            mask_reasoning=self.options.mask_reasoning,
        )

    @cached_property
    def template(self) -> ChatTemplate:
        """Loaded for the first conversation: models for plain text may not have one."""
        return ChatTemplate.of(self._facts, self.options.template_options)

    def _plain(self, text: str) -> MaskedText:
        """Plain text with everything supervised except the first token, which has no context: the
        bos token where the tokenizer adds one."""
        if not text.startswith(self._facts.bos):
            text = self._facts.bos + text
        return MaskedText(text, ((1, len(text)),))  # 1: inside the first token

    def encode(self, texts: Sequence[MaskedText], places: Sequence[str]) -> list[TokenRow]:
        """Tokenize rows; a token is supervised if its whole text lies in a supervised span."""
        plain = [text.text for text in texts]
        encodings = self._backend.encode_batch(plain, add_special_tokens=False)
        return list(map(_mask_tokens, texts, places, encodings))

    def encode_to_show(
        self, text: MaskedText, place: str
    ) -> tuple[TokenRow, list[tuple[str, bool]]]:
        """A row after `fit`, and the text of each token with whether it is supervised. A character
        that spans several tokens is shown with the first of them."""
        encoding = self._backend.encode(text.text, add_special_tokens=False)
        row = self.fit(_mask_tokens(text, place, encoding))
        pieces, begin = [], 0
        for (_, end), supervised in zip(encoding.offsets, row.loss_mask.tolist(), strict=False):
            if end > begin:
                pieces.append((text.text[begin:end], bool(supervised)))
                begin = end
        return row, pieces

    def fit(self, row: TokenRow) -> TokenRow:
        """Apply the length limit; a row without a supervised token is dropped."""
        limit = self.options.max_length
        if not row.loss_mask.any():
            raise BadRow("no supervised token")
        if limit is None or len(row.input_ids) <= limit:
            return row
        if self.options.overlong == "drop":
            raise BadRow(TOO_LONG, f"more than {limit} tokens")
        if not row.loss_mask[:limit].any():
            raise BadRow(CUT_UNSUPERVISED, f"more than {limit} tokens")
        cut = bool(row.loss_mask[limit])  # the cut went through an answer
        ids_T, mask_T = row.input_ids[:limit], row.loss_mask[:limit]
        return TokenRow(ids_T, mask_T, row.place, row.truncated or cut)


def _mask_tokens(text: MaskedText, place: str, encoding: Any) -> TokenRow:
    ids_T = np.asarray(encoding.ids, dtype=np.int32)
    offsets_T2 = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    mask_T = np.zeros(len(ids_T), dtype=np.uint8)
    if text.spans:  # does any span that begins before a token end after it?
        begins_S, ends_S = np.asarray(sorted(text.spans), dtype=np.int64).T
        span_T = np.searchsorted(begins_S, offsets_T2[:, 0], side="right") - 1
        mask_T[:] = (span_T >= 0) & (offsets_T2[:, 1] <= np.maximum.accumulate(ends_S)[span_T])
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
    """All rows of a part; bad rows are counted, never raised."""
    drops = DropReport()
    rows: list[TokenRow] = []
    for texts, places in _batches(part, encoder, drops):
        for place, group in itertools.groupby(encoder.encode(texts, places), lambda row: row.place):
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


def _batches(
    part: Part, encoder: Encoder, drops: DropReport
) -> Iterator[tuple[list[MaskedText], list[str]]]:
    """The texts of a part with their places, in batches of bounded size; those of one conversation
    stay together."""
    texts: list[MaskedText] = []
    places: list[str] = []
    size = 0
    for place, raw in part.rows():
        try:
            masked = encoder.texts(raw)
        except BadRow as bad:
            drops.add(place, bad)
            continue
        texts += masked
        places += [place] * len(masked)
        size += sum(len(text.text) for text in masked)
        if size >= _BATCH:
            yield texts, places
            texts, places, size = [], [], 0
    yield texts, places


def checksum(path: Path) -> int:
    """CRC-32 of a file, streamed."""
    crc = 0
    with path.open("rb") as handle:
        while block := handle.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc
