"""Textbook byte-pair encoding with Qwen2's rules, as a reference for tokenizers."""

import itertools
import unicodedata
from collections.abc import Iterable

import regex

# Qwen2's rule written out: contractions in either case, a run of letters with at most one other
# character before it, single digits, other symbols with the line ends after them, white space.
CUTS = regex.compile(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
TEXTS = [
    "In 12345 days it'll be I'M, WE'RE and they've.",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(10))\t\t",
    "   leading, trailing   \r\n\r\n and  double  spaces ",
    "Grüße, e\u0301te\u0301, 中文字符, 日本語のテキスト, 한국어, ½ ٣٤ Ⅻ",
    "x=1;y+=2.5e-3!!!\n???\n 'quoted' \"s 's 'S 'll",
    "<|im_start|>user\nhi 12<|im_end|>\n<|endoftext|>",
    "emoji 👩‍🚀 and \u00a0 no-break \u2003 em space\u200b",
    "",
    " ",
    "\n",
]


def alphabet() -> dict[int, str]:
    """GPT-2's printable character for every byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


class TextbookBPE:
    def __init__(
        self, vocabulary: dict[str, int], merges: Iterable[tuple[str, str]], added: Iterable[str]
    ) -> None:
        self._ids, self._letters = vocabulary, alphabet()
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        longest_first = sorted(added, key=len, reverse=True)
        self._added = regex.compile("(" + "|".join(map(regex.escape, longest_first)) + ")")

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._added.split(text)):
            if number % 2:  # an added token
                ids.append(self._ids[part])
                continue
            for piece in CUTS.findall(unicodedata.normalize("NFC", part)):
                ids += [self._ids[token] for token in self._merged(piece)]
        return ids

    def _merged(self, piece: str) -> list[str]:
        word = [self._letters[byte] for byte in piece.encode()]
        while len(word) > 1:
            pairs = list(itertools.pairwise(word))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            word[at : at + 2] = ["".join(best)]
        return word
