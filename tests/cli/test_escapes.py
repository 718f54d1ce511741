"""Terminal control sequences in names, keys, texts and replies: every verb escapes them, piped or
not. Run in this process, through the entry point."""

import io
import json
import logging
import re
import shutil
import warnings

import pytest

from core.test_text import OBEYED, STYLES
from fledge.cli import chat, main
from fledge.cli.console import progress_bar
from fledge.core.terminal import Terminal
from train.tiny import make_chats, make_target

NAME = "\x1b]0;t\x07\x9b31m\r\u202e[red]x[link=a]"
SHOWN = "\\x1b]0;t\\x07\\x9b31m"  # the rest may be folded by a narrow table


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target with a hostile name, hostile rows, a hostile recipe."""
    root = tmp_path_factory.mktemp("escapes")
    make_target(root / NAME)
    make_chats(root / "chats.jsonl")
    good = [json.loads(line) for line in (root / "chats.jsonl").read_text().splitlines()]
    rows = [
        *({"messages": [*row["messages"][:1], {**row["messages"][1], "content": f"{NAME}."}]}
          for row in good[:3]),
        {"messages": [{"role": NAME, "content": "x"}]},
        {NAME: 1},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y",
         "tool_calls": [{"function": {"name": NAME, "arguments": NAME}}]}]},
    ]  # fmt: skip
    for name in (f"{NAME}.jsonl", "rows.jsonl"):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + f"{NAME}\n")
    (root / f"{NAME}.yaml").write_text(json.dumps({NAME: {NAME: NAME}}))
    (root / "good.yaml").write_text(json.dumps({"target": {"model": NAME}}))
    shutil.copytree(root / NAME, root / "bad-template")
    template = "{{ raise_exception(messages[0].content) }}"
    (root / "bad-template" / "chat_template.jinja").write_text(template)
    (root / "broken-template").mkdir()
    shutil.copytree(root / NAME, root / "broken-template", dirs_exist_ok=True)
    (root / "broken-template" / "chat_template.jinja").write_text("{% " + NAME + " %}")
    (root / NAME / f"{NAME}.json").write_text("{")
    return root


def run(place, monkeypatch, capfd, *arguments):
    """Exit code and all output, which is checked to hold no control characters."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("FLEDGE_CACHE", str(place.parent / "cache"))
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    written = "".join(capfd.readouterr())
    assert not OBEYED.search(written), written
    return ended.value.code, written


DATA = f"{NAME}.jsonl"
READ = ("--model", NAME)
SHOWING = [
    ("data", "preview", DATA, *READ, "-n", "9"),
    ("data", "preview", DATA, *READ, "-n", "9", "--json"),
    ("data", "prepare", DATA, *READ, "--max-drop-share", "1"),
    ("data", "prepare", DATA, *READ, "--max-drop-share", "1", "--json"),
    ("data", "stats", DATA, *READ),
    ("data", "stats", DATA, *READ, "--json"),
    ("recipe", "show", f"run.name={json.dumps(NAME)}"),
    ("recipe", "show", f"run.name={json.dumps(NAME)}", "--json"),
]


@pytest.mark.parametrize("arguments", SHOWING, ids=lambda a: " ".join(a[:2]))
def test_verbs_that_show_rows_escape_them(place, monkeypatch, capfd, arguments):
    code, written = run(place, monkeypatch, capfd, *arguments)
    assert code == 0, written
    shown = "\\u001b]0;t" if "--json" in arguments else "\\x1b]0;t"
    if arguments[:2] == ("recipe", "show") and "--json" not in arguments:
        shown = "\\e]0;t"  # YAML's escape for it
    assert shown in written


REFUSED = [
    ("data", "prepare", DATA, *READ),
    ("data", "preview", DATA, "--model", f"./{NAME}{NAME}"),
    ("data", "preview", "rows.jsonl", "--model", "bad-template"),
    ("data", "preview", "rows.jsonl", "--model", "broken-template"),
    ("data", "stats", "rows.jsonl", *READ, "--overlong", NAME),
    ("recipe", "check", f"{NAME}.yaml"),
    ("recipe", "show", f"training.lr={NAME}"),
    ("plan", f"{NAME}.yaml"),
    ("train", f"{NAME}.yaml"),
    ("precompute", f"{NAME}.yaml", "-o", "new"),
    ("eval", NAME, "--target", NAME),
    ("export", NAME, "--engine", "vllm", "--target", NAME),
    ("import", NAME, "--target", NAME, "--out", "new"),
    ("diagnose", NAME, "--target", NAME),
    ("chat", NAME, "--target", NAME),
    ("report", f"{NAME}{NAME}"),
    ("serve", NAME),
    ("cache", "verify", NAME),
    ("cache", "convert", NAME, "-o", "new"),
    ("regenerate", f"{NAME}.txt", "--out", "new.jsonl", "--target", NAME),
    ("regenerate", "rows.jsonl", "--out", "new.jsonl", "--url", f"http://{NAME}"),
    ("bench", f"http://{NAME}"),
    ("serve-target", "--target", f"./{NAME}{NAME}"),
    (NAME,),
]


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda a: " ".join(a[:2]).partition("\x1b")[0])
def test_error_messages_are_escaped(place, monkeypatch, capfd, arguments):
    code, written = run(place, monkeypatch, capfd, *arguments)
    assert code in (1, 2), written
    assert written.splitlines()[-1].startswith("fledge: ") or code == 1  # 1: a failed diagnosis


def test_server_replies_are_escaped(place, monkeypatch, capfd, tmp_path):
    """Every row fails with a hostile error message, which is counted and shown escaped."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Hostile(BaseHTTPRequestHandler):
        def _reply(self):
            body = f"<h1>{NAME}</h1>".encode()
            if self.path.endswith("/models"):
                body = json.dumps({"data": [{"id": NAME}]}).encode()
            self.send_response(200 if self.path.endswith("/models") else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _reply

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        new = str(tmp_path / "new.jsonl")
        code, written = run(
            place, monkeypatch, capfd, "regenerate", "chats.jsonl", "--out", new, "--url", url,
            "--limit", "2", "--retries", "0",
        )  # fmt: skip
        assert code in (1, 2)
        assert SHOWN in written
        assert "[red]x[link=a]" in written
        code, written = run(place, monkeypatch, capfd, "bench", url, "--requests", "1")
        assert code == 2
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("colours", [False, True])
def test_model_output_is_escaped(monkeypatch, capsys, colours):
    monkeypatch.setattr(chat, "out", Terminal(force_terminal=colours, width=200))
    pieces = ["a\tb\n", NAME, "é"]
    chat._write(pieces, [0, 2, 0], quiet=False)
    written = STYLES.sub("", capsys.readouterr().out)
    assert not OBEYED.search(written)
    assert SHOWN in written
    assert "[red]x[link=a]" in written
    if not colours:
        assert written.startswith("a\tb\n")


def test_progress_bars_warnings_and_logs_are_escaped(monkeypatch):
    file = io.StringIO()
    terminal = Terminal(file=file, width=300, force_terminal=True, color_system=None)
    monkeypatch.setattr("fledge.cli.console.err", terminal)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with progress_bar(NAME) as show:
        show(NAME, 1, 2, NAME, NAME)
    written = re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", file.getvalue())  # the bar's cursor
    assert not OBEYED.search(written)
    assert f"{SHOWN}\\x0d\\u202e[red]x[link=a]" in written
    main._escape_library_output()
    assert SHOWN in warnings.formatwarning(NAME, UserWarning, "x.py", 1)
    assert SHOWN in logging.lastResort.format(logging.makeLogRecord({"msg": NAME}))
