"""The files of a run that `fledge report` reads; partly through the command line itself."""

import contextlib
import io
import json
import shutil

from fledge.cli import main
from fledge.core.errors import BadInput
from fledge.core.files import write_json
from fledge.core.machine import MACHINE_NAME, describe_machine
from fledge.recipe.yaml_text import parse_yaml
from fledge.report.page import gather, render
from fuzz.caches import BEFORE
from fuzz.mutate import hostile_yaml, json_bytes
from fuzz.survive import Case

FIGURES = {
    "target": {"device": "cpu"},
    "drafts": [
        {
            "name": "d", "acceptance_length": 2.0, "joint": [0.5, 0.25], "definition": "x",
            "by_category": {"a": {"acceptance_length": 2.0}},
            "samples": [{"prompt": "p", "tokens": [["a", 0, 0, 0.5, 0.5]]}],
        }
    ],
}  # fmt: skip


class Report(Case):
    examples = 150

    def build(self):
        for name in ("metrics.jsonl", "recipe.yaml"):
            shutil.copy(BEFORE / "eagle3" / name, self.place)
        write_json(self.place / "eval.json", FIGURES)
        write_json(self.place / MACHINE_NAME, describe_machine())

    def spoil(self, rng):
        path = self.place / rng.choice(("metrics.jsonl", "recipe.yaml", "eval.json", MACHINE_NAME))
        if path.suffix == ".yaml":
            recipe, _ = parse_yaml(path.read_bytes(), where="recipe")
            path.write_bytes(hostile_yaml(recipe, rng))
        elif path.suffix == ".json":
            path.write_bytes(json_bytes(json.loads(path.read_bytes()), rng))
        else:
            lines = [json.loads(line) for line in path.read_bytes().splitlines()]
            spoilt = [json_bytes(rng.choice(lines), rng).replace(b"\n", b" ") for _ in lines]
            path.write_bytes(b"\n".join(spoilt) + b"\n")

    def read(self):
        assert render(gather(self.place)).startswith("<!")


class Verb(Report):
    """Through the command: exit code 0, or 2 and one line on stderr."""

    examples = 60

    def read(self):
        stderr = io.StringIO()
        command = ["report", str(self.place), "--out", str(self.root / "page.html"), "--json"]
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            try:
                main.run(command)
            except SystemExit as ended:
                code = ended.code
        lines = stderr.getvalue().splitlines()
        assert code in (0, 2), lines[-5:]
        if code == 2:
            [line] = lines
            assert line.startswith("fledge: ")
            raise BadInput(line)
