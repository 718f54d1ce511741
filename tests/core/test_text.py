"""Untrusted text: control characters are escaped; its value in JSON is unchanged."""

import io
import json
import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from fledge.core.terminal import Terminal, counted, json_text, marked, visible

HOSTILE = (
    "\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "over\rwritten", "\u202eltr", "\x08\x08", "\x7f",
    "[red]loud[/]", "[link=http://a]b[/link]", ":warning:", "\u2066a\u2069", "\udcff", "\x85",
)  # fmt: skip
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")  # what rich writes for a style


@given(st.text(st.characters()))
def test_no_control_characters_are_left(text):
    shown = visible(text)
    kinds = {unicodedata.category(char) for char in shown if char not in "\n\t"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(char) for char in shown} & {
        "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
    }  # fmt: skip
    assert visible(shown) == shown
    shown.encode()


def test_escapes_keep_the_rest_of_the_text():
    text, kept = "\x1b[2J\ta\nb\u202e\x9b\udcff", " é 😀 👩\u200d💻"
    assert visible(text + kept) == "\\x1b[2J\ta\nb\\u202e\\x9b\\udcff" + kept


@given(st.recursive(st.text(st.characters()) | st.integers(), st.lists))
def test_json_reads_back_equal_and_has_no_control_characters(value):
    for indent in (None, 2):
        text = json_text(value, indent=indent)
        assert json.loads(text) == value
        assert not OBEYED.search(text)
        text.encode()


def printed(*, colours):
    file = io.StringIO()
    terminal = Terminal(file=file, force_terminal=colours, width=300)
    for text in HOSTILE:
        terminal.say(text, style="bold")
        terminal.print(text)
        terminal.plain(text)
        terminal.print(Text(text, style="red"))
        terminal.print(marked("[bold]{}[/]", text))
        table = Table(text, "b", title=text, caption=text)
        table.add_row(text, Text.assemble((text, "green")))
        terminal.print(table)
        terminal.rule(text)
        with terminal.waiting(text):
            pass
    return file.getvalue()


def test_the_terminal_escapes_control_characters_and_ignores_markup():
    shown = printed(colours=False)
    assert not OBEYED.search(shown)
    for word in ("\\x1b[2J", "\\x9b31m", "over\\rwritten".replace("\\r", "\\x0d"), "\\u202e"):
        assert shown.count(word) >= 5, word
    for word in ("[red]loud[/]", "[link=http://a]b[/link]", ":warning:"):
        assert shown.count(word) >= 9, word


def test_the_terminal_escapes_control_characters_in_color():
    shown = STYLES.sub("", printed(colours=True))
    shown = re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", shown)  # the spinner's cursor
    assert not OBEYED.search(shown)


def test_values_of_marked_text_are_not_markup():
    text = marked("[bold]{}[/] {:,}", "[red]a[/] \\", 1234)
    assert text.plain == "[red]a[/] \\ 1,234"
    assert [str(span.style) for span in text.spans] == ["bold"]


def test_counted_uses_the_singular_for_one():
    assert [counted(n, "row") for n in (0, 1, 2, 2000)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "2,000 rows",
    ]
    assert counted(1, "tensor is", "tensors are") == "1 tensor is"
    assert counted(2, "tensor is", "tensors are") == "2 tensors are"
