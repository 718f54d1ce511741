"""Conversations with their supervised tokens in color."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from fledge.core.terminal import MARKS, counted, visible
from fledge.data.drops import BadRow
from fledge.data.pack import pack_rows
from fledge.data.rows import digests, repeats
from fledge.data.sources import make_parts
from fledge.data.store import TokenRows
from fledge.data.tokenise import Encoder
from fledge.data.vocab import count_supervised, coverage_curve


@dataclass(frozen=True)
class PreviewRow:
    """One row as it would be trained on, or the reason why it would not."""

    place: str
    pieces: tuple[tuple[str, bool], ...] = ()  # token text, supervised
    truncated: bool = False
    dropped: str = ""

    @property
    def supervised(self) -> int:
        return sum(supervised for _, supervised in self.pieces)

    def to_json(self) -> dict[str, Any]:
        tokens = [{"text": text, "supervised": flag} for text, flag in self.pieces]
        facts = {"truncated": self.truncated, "tokens": tokens}
        return {"place": self.place, "dropped": self.dropped or None, **facts}

    def title(self) -> str:
        if self.dropped:
            return f"{self.place}  dropped: {self.dropped}"
        cut = ", end missing" if self.truncated else ""
        tokens = counted(len(self.pieces), "token")
        return f"{self.place}  {tokens}, {self.supervised:,} supervised{cut}"


def preview_rows(data: list[str], encoder: Encoder, count: int) -> Iterator[PreviewRow]:
    """The first `count` conversations of the data, dropped ones included."""
    rows = itertools.chain.from_iterable(part.rows() for part in make_parts(data))
    for place, raw in itertools.islice(rows, count):
        try:
            for text in encoder.texts(raw):
                row, pieces = encoder.encode_to_show(text, place)
                yield PreviewRow(place, tuple(pieces), row.truncated)
        except BadRow as bad:
            reason = f"{bad.reason} ({bad.detail})" if bad.detail else bad.reason
            yield PreviewRow(place, dropped=reason)


def to_terminal(row: PreviewRow, *, colors: bool = True) -> Text:
    """Supervised tokens in two greens (to show token boundaries), the rest dim; without colors,
    supervised text between marks."""
    text = Text()
    text.append(f"{visible(row.title())}\n", style="bold red" if row.dropped else "bold")
    if colors:
        for index, (piece, supervised) in enumerate(row.pieces):
            green = "black on green3" if index % 2 else "black on pale_green1"
            shown = visible(piece.replace("\n", "⏎\n") if supervised else piece)
            text.append(shown, style=green if supervised else "dim")
        return text
    for supervised, group in itertools.groupby(row.pieces, key=lambda piece: piece[1]):
        run = visible("".join(piece for piece, _ in group))
        text.append(f"{MARKS[0]}{run}{MARKS[1]}" if supervised else run)
    return text


# --- stats ---------------------------------------------------------------------------------------


_QUANTILES = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def row_figures(rows: TokenRows) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "tokens": rows.tokens,
        "supervised": rows.supervised,
        "truncated": rows.truncated,  # rows whose last answer is missing its end
        "repeated": repeats(digests(rows)),  # rows that repeat an earlier one, token by token
        "drops": rows.drops.to_json(),
    }


def data_stats(rows: TokenRows, vocab_size: int, pack_tokens: int) -> dict[str, Any]:
    """What informs a recipe about prepared rows: lengths, supervision, packing, vocabulary."""
    lengths, packing = rows.lengths, pack_rows(rows.lengths, pack_tokens)
    counts_V = count_supervised(rows.flat(), vocab_size)
    return {
        **row_figures(rows),
        "lengths": {name: int(np.percentile(lengths, q)) for name, q in _QUANTILES.items()},
        "pack_tokens": pack_tokens,
        "packs": len(packing.packs),
        "padding_share": packing.padding_share,
        "overlong": packing.cut,  # rows longer than a pack
        # (draft vocabulary, share of supervised tokens)
        "coverage": coverage_curve(counts_V, [size for size in _SIZES if size < vocab_size]),
        "distinct": int((counts_V > 0).sum()),  # target tokens among the supervised ones
        "supervised_share": rows.supervised / rows.tokens,
    }
