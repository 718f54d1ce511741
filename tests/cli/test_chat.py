"""Chat through a pipe and a terminal: the same text as without a draft; draft tokens in color."""

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from contextlib import suppress

from typer.testing import CliRunner

from fledge.cli.chat import SHADES, coloured
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.core.terminal import visible
from fledge.decode.accept import Round
from fledge.decode.speculative import Generation


def chat(run, text, *arguments):
    command = ["chat", str(run), "--max-new-tokens", "20", "--device", "cpu", *arguments]
    return CliRunner().invoke(app, command, input=text)


def test_a_pipe_of_questions_as_json(trained):
    result = chat(trained, "count to 5\n\ncount to 7\n", "--json", "--compare")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    for answer in (first, second):
        assert answer["same_text"] is True
        assert answer["tokens"] == answer["drafted"] + answer["rounds"] + 1
        assert answer["tokens_per_s"] > 0
        assert answer["plain_tokens_per_s"] > 0
    alone = json.loads(chat(trained, "count to 7\n", "--json").stdout)
    assert alone["text"] != second["text"]  # the second question had the first as context
    again = chat(trained, "count to 5\n/reset\ncount to 7\n/quit\nnever\n", "--json").stdout
    assert [json.loads(line)["text"] for line in again.splitlines()] == [
        first["text"],
        alone["text"],
    ]


def test_answers_go_to_stdout_and_figures_to_stderr(trained):
    expected = json.loads(chat(trained, "count to 5\n", "--json").stdout)
    result = chat(trained, "count to 5\n", "--compare")
    assert result.stdout == visible(expected["text"]) + "\n"  # may hold control characters
    assert f"{expected['tokens']} tokens in {expected['rounds']} rounds" in result.stderr
    assert "the same text" in result.stderr


class Terminal:
    """A chat in its own pseudo-terminal, into which the test types."""

    def __init__(self, *arguments, **environment):
        self._controller, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fledge", "chat", *arguments, "--device", "cpu"],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "300", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that keys send signals
        )  # fmt: skip
        os.close(terminal)
        self._shown = ""

    def until(self, pattern):
        """Read until a pattern appears; return the text up to and including it."""
        while (match := re.search(pattern, self._shown, re.S)) is None:
            assert select.select([self._controller], [], [], 60)[0], self._shown
            self._shown += os.read(self._controller, 65536).decode(errors="replace")
        before, self._shown = self._shown[: match.end()], self._shown[match.end() :]
        return before

    def rest(self):
        """All that is shown until the chat ends, which it must."""
        with suppress(OSError):  # the other end is closed
            while True:
                self._shown += os.read(self._controller, 65536).decode(errors="replace")
        assert self.process.wait(60) == 0
        return self._shown

    def type(self, keys):
        os.write(self._controller, keys.encode())


def test_a_terminal_shows_draft_tokens_in_green(trained):
    """A real terminal on both ends: prompt, colours, end of input."""
    expected = json.loads(chat(trained, "count to 5\n", "--json").stdout)
    colours = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    terminal = Terminal(str(trained), "--max-new-tokens", "20", **colours)
    terminal.until("›")
    terminal.type("count to 5\n/quit\n")
    text = terminal.rest().replace("\r\n", "\n")
    assert f"{expected['tokens']} tokens in {expected['rounds']} rounds" in " ".join(text.split())
    green = re.findall(r"\x1b\[30;48;2;(\d+;\d+;\d+)m", text)
    shades = {";".join(str(int(s[i : i + 2], 16)) for i in (1, 3, 5)) for s in SHADES}
    assert set(green) <= shades
    assert bool(green) == (expected["drafted"] > 0)


def test_ctrl_c_stops_the_answer_but_not_the_chat(trained):
    """On a real terminal, where Ctrl-C is a signal."""
    questions = [f"count to {n}" for n in range(8)]
    limit = ["--max-new-tokens", "440"]
    lines = chat(trained, "\n/reset\n".join(questions) + "\n", *limit, "--json").stdout.splitlines()
    answers = dict(zip(questions, map(json.loads, lines), strict=True))
    long = max(answers, key=lambda question: answers[question]["tokens"])
    terminal = Terminal(str(trained), *limit)
    terminal.until("›")
    terminal.type(f"{long}\n")
    terminal.until(f"{long}\r\n.*?\\S")  # the answer has started
    terminal.type("\x03")
    terminal.until("stopped.*?›")
    terminal.type(f"{long}\n")
    whole = terminal.until("tokens/s with the draft.*?›")  # the stopped answer left no trace
    assert f"{answers[long]['tokens']} tokens in {answers[long]['rounds']} rounds" in whole
    terminal.type("/quit\n")
    terminal.rest()


def test_depths_and_colours_of_a_worked_example(monkeypatch):
    # A prompt of 2, then a; round 1: b and c by the draft, d by the target; round 2: e.
    rounds = [Round(context=3, accepted=2, emitted=3), Round(context=6, accepted=0, emitted=1)]
    generation = Generation([7, 7], [0, 1, 2, 3, 4], rounds=rounds)
    assert generation.depths == [0, 1, 2, 0, 0]
    marked = coloured(list("abcde"), generation.depths)
    assert marked.plain == "a⟦bc⟧de"
    monkeypatch.setattr("fledge.cli.chat.in_color", lambda: True)
    text = coloured(list("abcde"), generation.depths)
    assert text.plain == "abcde"
    spans = {text.plain[s.start : s.end]: str(s.style) for s in text.spans if s.style}
    assert spans == {"b": f"black on {SHADES[0]}", "c": f"black on {SHADES[1]}"}


def test_bad_drafts_prompts_and_methods_are_refused(trained, tmp_path):
    result = chat(tmp_path, "hi\n")
    assert isinstance(result.exception, BadInput)
    assert "neither a draft nor a run" in str(result.exception)
    result = chat(trained, "word " * 700 + "\n")
    assert isinstance(result.exception, BadInput)
    assert "/reset" in str(result.exception)
    result = chat(trained, "hi\n", "--method", "parallel")
    assert isinstance(result.exception, BadInput)
