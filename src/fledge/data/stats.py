"""Statistics of prepared rows that inform a recipe: lengths, supervision, packing, vocabulary."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fledge.data.pack import pack_rows
from fledge.data.store import TokenRows
from fledge.data.vocab import count_supervised, coverage_curve

_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class DataStats:
    rows: int
    tokens: int
    supervised: int
    truncated: int  # rows whose last answer is missing its end
    lengths: dict[str, int]  # quantiles
    histogram: list[tuple[int, int]]  # (upper bound of length, rows)
    pack_tokens: int
    packs: int
    padding_share: float
    overlong: int  # rows longer than a pack
    coverage: list[tuple[int, float]]  # (draft vocabulary, share of supervised tokens)
    distinct: int  # number of target tokens that occur among the supervised ones
    drops: dict[str, Any]

    @property
    def supervised_share(self) -> float:
        return self.supervised / self.tokens

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "supervised_share": self.supervised_share}


def data_stats(rows: TokenRows, vocab_size: int, pack_tokens: int) -> DataStats:
    lengths = rows.lengths
    quantiles = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    packing = pack_rows(lengths, pack_tokens)
    counts_V = count_supervised(rows.flat(), vocab_size)
    bounds = [2**k for k in range(5, int(lengths.max()).bit_length() + 1)]
    binned = np.histogram(lengths, bins=[0, *(bound + 1 for bound in bounds)])[0]
    return DataStats(
        rows=len(rows),
        tokens=rows.tokens,
        supervised=rows.supervised,
        truncated=rows.truncated,
        lengths={name: int(np.percentile(lengths, q)) for name, q in quantiles.items()},
        histogram=[(bound, int(n)) for bound, n in zip(bounds, binned, strict=True)],
        pack_tokens=pack_tokens,
        packs=len(packing.packs),
        padding_share=packing.padding_share,
        overlong=packing.cut,
        coverage=coverage_curve(counts_V, [size for size in _SIZES if size < vocab_size]),
        distinct=int((counts_V > 0).sum()),
        drops=rows.drops.to_json(),
    )
