"""The draft vocabulary: which target tokens the draft can predict, and how much of the data they
cover.

Priority (docs/semantics.md): bos, eos, pad, unk; then by count over supervised tokens (ties: lower
id); then unseen ids ascending; cut at the requested size. The selection is then sorted by target
id, as the engines need it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.core.errors import BadInput, first_line
from fledge.core.files import atomic_file


def count_supervised(
    rows: Iterable[tuple[NDArray[np.int32], NDArray[np.uint8] | NDArray[np.bool_]]], vocab_size: int
) -> NDArray[np.int64]:
    """Counts [V] of each target token among the supervised tokens."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for ids, mask in rows:
        supervised = ids[mask.astype(bool)]
        if len(supervised) and int(supervised.max()) >= vocab_size:
            raise BadInput(
                f"token id {int(supervised.max())} is outside the vocabulary of {vocab_size}",
                fix="the data was tokenized with another model's tokenizer",
            )
        counts_V += np.bincount(supervised, minlength=vocab_size)
    return counts_V


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The selected target tokens and their two maps."""

    selected_token_ids: NDArray[np.int64]  # [W] target ids, ascending, in draft order
    vocab_size: int  # V of the target
    coverage: float  # share of supervised tokens it covers, in the rows it was built from
    fingerprint: str = ""  # of the rows whose tokens were counted

    @property
    def size(self) -> int:
        return len(self.selected_token_ids)

    @property
    def d2t(self) -> NDArray[np.int64]:
        """[W] offsets: target id = draft id + d2t[draft id]."""
        return self.selected_token_ids - np.arange(self.size, dtype=np.int64)

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """[V] membership."""
        member_V = np.zeros(self.vocab_size, dtype=np.bool_)
        member_V[self.selected_token_ids] = True
        return member_V

    def digest(self) -> str:
        """Equal maps have equal digests."""
        header = f"{self.vocab_size}:{self.size}:".encode()
        return hashlib.sha256(header + self.selected_token_ids.tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the maps to a safetensors file, with coverage and fingerprints as metadata."""
        from safetensors.numpy import save

        facts = {"coverage": self.coverage, "rows": self.fingerprint, "digest": self.digest()}
        payload = save({"d2t": self.d2t, "t2d": self.t2d}, metadata={"fledge": json.dumps(facts)})
        with atomic_file(path) as handle:
            handle.write(payload)

    @classmethod
    def load(cls, path: Path) -> "DraftVocabulary":
        from safetensors import SafetensorError, safe_open

        where = str(path)
        try:
            with safe_open(where, framework="numpy") as file:
                facts = json.loads(file.metadata()["fledge"])
                d2t, size = file.get_tensor("d2t"), len(file.get_tensor("t2d"))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            what = f"not a draft vocabulary ({first_line(error)})"
            raise BadInput(what, where=where) from None
        ids = d2t + np.arange(len(d2t), dtype=np.int64)
        vocabulary = cls(ids, size, facts["coverage"], facts["rows"])
        if vocabulary.digest() != facts["digest"]:
            raise BadInput("the draft vocabulary is damaged", where=where, fix="build it again")
        return vocabulary


def special_token_ids(tokenizer: Any) -> list[int | None]:
    """The ids of bos, eos, pad and unk; None where the tokenizer has none."""
    return [getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")]


def select_vocabulary(
    counts_V: NDArray[np.int64],
    size: int | None,
    *,
    special_ids: Iterable[int | None] = (),
    fingerprint: str = "",
) -> DraftVocabulary:
    """Choose `size` target tokens; None or the whole vocabulary keeps every id. `special_ids` (see
    `special_token_ids`) are taken before any other."""
    vocab_size = len(counts_V)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise BadInput(f"draft_vocab_size must be a positive whole number, not {size!r}")
    if size is None or size >= vocab_size:
        return DraftVocabulary(np.arange(vocab_size, dtype=np.int64), vocab_size, 1.0, fingerprint)
    ids = np.arange(vocab_size)
    by_count = np.lexsort((ids, -counts_V))  # ties and unseen tokens by id
    first = [i for i in special_ids if i is not None and 0 <= i < vocab_size]
    order = np.concatenate([np.asarray(first, dtype=np.int64), by_count])
    _, first_index = np.unique(order, return_index=True)  # the first occurrence counts
    chosen = np.sort(order[np.sort(first_index)[:size]])
    total = int(counts_V.sum())
    coverage = float(counts_V[chosen].sum() / total) if total else 0.0
    return DraftVocabulary(chosen, vocab_size, coverage, fingerprint)


def coverage_curve(counts_V: NDArray[np.int64], sizes: Iterable[int]) -> list[tuple[int, float]]:
    """Share of supervised tokens that the most frequent `size` tokens cover, for each size."""
    cumulative = np.cumsum(np.sort(counts_V)[::-1])
    total = max(1, int(cumulative[-1]) if len(cumulative) else 0)
    return [(s, float(cumulative[min(s, len(counts_V)) - 1] / total)) for s in sizes if s > 0]
