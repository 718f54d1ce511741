"""A newcomer's first hour: a clone, a fresh home, the README's commands, data of one's own.

Everything is typed into a shell as a person would type it. Whatever is printed on the way may name
commands: each of them must exist, with the flags and keys it is shown with. `make test-newcomer`.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from command_lines import ROOT, understand

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(3600)]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
TOPICS = ("a pony", "the moon", "a lost key", "two friends", "a small boat", "an old clock")
OURS = (".git", ".venv*", "build", "site", "runs", "demo_out", "__pycache__", ".carry")
SHORT = "--limit 2 --max-new-tokens 24"


class Newcomer:
    """A shell in a clone, and all that it has shown so far."""

    def __init__(self, root: Path) -> None:
        self.home, self.clone, self.shown = root / "home", root / "fledge", ""
        self.home.mkdir()
        ours = ("VIRTUAL_ENV", "PYTHONPATH", "FLEDGE_CACHE", "OMP_NUM_THREADS", "TRITON_INTERPRET")
        inherited = {name: value for name, value in os.environ.items() if name not in ours}
        tools = [folder for folder in inherited["PATH"].split(":") if ".venv" not in folder]
        self.environment = {
            **inherited, "HOME": str(self.home), "PATH": ":".join(tools), "COLUMNS": "200",
        }  # fmt: skip
        if subprocess.run(["git", "clone", "--quiet", ROOT, self.clone]).returncode:
            # somebody else's checkout, or none: what a clone would have, and a little more
            shutil.copytree(ROOT, self.clone, symlinks=True, ignore=shutil.ignore_patterns(*OURS))

    def type(self, line: str, *, code: int = 0) -> str:
        """What a command prints; it must end with that code."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.clone, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.shown += f"$ {line}\n{done.stdout}"
        assert done.returncode == code, f"{line}\n{done.stdout[-4000:]}"
        assert "Traceback" not in done.stdout, done.stdout[-4000:]
        return done.stdout

    def fledge(self, line: str, *, code: int = 0) -> str:
        return self.type(f"source .venv/bin/activate && fledge {line}", code=code)

    def talk(self, line: str, *questions: str) -> str:
        """A conversation through a terminal."""
        ours, theirs = pty.openpty()
        command = ["bash", "-c", f"source .venv/bin/activate && fledge {line}"]
        process = subprocess.Popen(
            command, cwd=self.clone, env={**self.environment, "TERM": "xterm-256color"},
            stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
        )  # fmt: skip
        os.close(theirs)
        shown, waiting = "", list(questions)
        while True:
            try:
                shown += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            if waiting and shown.count("›") > len(questions) - len(waiting):
                os.write(ours, f"{waiting.pop(0)}\n".encode())
        os.close(ours)
        self.shown += ESCAPES.sub("", shown).replace("\r\n", "\n")
        assert process.wait(60) == 0, shown[-4000:]
        return shown


def readme_commands(heading: str) -> list[str]:
    """The lines of the first block below a heading, without comments."""
    block = (ROOT / "README.md").read_text().split(f"## {heading}\n")[1].split("```")[1]
    return [line.split("#")[0].strip() for line in block.strip().splitlines()]


def write_own_data(folder: Path) -> list[str]:
    """The same chats in four formats that people have; two hundred words are enough to see it."""
    folder.mkdir()
    asked = [f"Tell me something about {topic}, please." for topic in TOPICS for _ in range(4)]
    told = [f"There was {topic}, and it was {n}. The end." for n, topic in enumerate(TOPICS * 4)]
    turns = list(zip(asked, told, strict=True))
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in turns
    ]
    pairs = [{"prompt": a, "response": b} for a, b in turns]
    alpaca = [{"instruction": a, "input": "", "output": b} for a, b in turns]
    plain = [{"text": f"{a}\n{b}"} for a, b in turns]
    formats = {"chats.jsonl": chats, "pairs.jsonl": pairs, "plain.jsonl": plain}
    for name, rows in formats.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    return [f"{folder.name}/{name}" for name in (*formats, "alpaca.json")]


def named_commands(shown: str) -> set[str]:
    """Every command of the output: `fledge ...` at the start of a line, in quotes or behind a
    colon, and by its path anywhere; what the newcomer typed, and a mention in a sentence, aside."""
    lines = [line for line in ESCAPES.sub("", shown).splitlines() if not line.startswith("$ ")]
    told = re.compile(r"(?:(?:^\s*|[`:;] *)|\S*/)fledge ([a-z][^`]*?)(?=\s{2}|`|$)")
    return {f"fledge {words}" for line in lines for words in told.findall(line)}


def test_the_first_hour(tmp_path):
    newcomer = Newcomer(tmp_path)
    demo, test = readme_commands("Two commands")
    assert (demo, test) == ("make demo", "make test")  # the second is what CI runs beside this

    newcomer.type("make .venv/.ready")  # so that the clock below is the demo's
    begin = time.monotonic()
    told = newcomer.type(demo)
    print(f"demo: {time.monotonic() - begin:.0f} s")
    for verb in ("chat", "report", "export"):  # what to type next, by the path that works here
        assert re.search(rf"\.venv/bin/fledge {verb} ", told), verb
    for line in readme_commands("Install"):
        newcomer.type(line)
    newcomer.fledge("doctor")

    own = write_own_data(newcomer.clone / "mine")
    for path in own:
        assert "supervised" in newcomer.fledge(f"data preview {path}")
    newcomer.fledge(f"data stats {' '.join(own)}")
    everything = f"data.train=[{','.join(own)}]"
    train = f"train recipes/smollm2_cpu.yaml '{everything}' training.steps=8 run.output_dir=runs/x"
    newcomer.fledge(train.replace("train ", "plan ", 1))
    newcomer.fledge(train)
    assert "already finished at step 8" in newcomer.fledge(train)
    newcomer.fledge(f"eval runs/x/best --target smollm2-135m {SHORT} --live 1")
    newcomer.fledge(f"report runs/x --measure {SHORT} --live 1")
    assert (newcomer.clone / "runs/x/report.html").stat().st_size > 10_000
    newcomer.fledge(f"export runs/x --engine vllm {SHORT} --shortfall 1")
    newcomer.fledge(f"export runs/x --engine vllm {SHORT} --shortfall 1", code=2)  # it is there
    talked = newcomer.talk("chat runs/x --max-new-tokens 12", "Hello?", "/help", "/quit")
    assert "tokens in" in talked
    newcomer.fledge("train recipes/smollm2_cpu.yaml training.learning_rate=1", code=2)

    (tmp_path / "transcript.txt").write_text(newcomer.shown)
    named = named_commands(newcomer.shown)
    assert {line.split()[1] for line in named} >= {"chat", "report", "export", "recipe"}
    for line in sorted(named):
        understand(line)
    stray = [path.name for path in newcomer.home.iterdir() if "fledge" in path.name]
    assert not stray, "what fledge keeps lies in ~/.cache"
