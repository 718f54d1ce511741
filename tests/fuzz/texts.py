"""What people write or read: rows of data, recipes and overrides, and the files of a run that
`fledge report` reads (partly through the command line itself)."""

import contextlib
import io
import json
import shutil

from fledge.cli import main
from fledge.core.errors import BadInput
from fledge.core.files import write_json
from fledge.core.machine import MACHINE_NAME, describe_machine
from fledge.data.sources import make_parts
from fledge.data.tokenise import Encoder, TokeniseOptions, tokenise_part
from fledge.recipe.schema import load_recipe, recipe_shapes
from fledge.report.page import gather, render
from fuzz.mutate import HOSTILE, json_bytes, mutated_json, mutated_json_lines, mutated_yaml
from fuzz.runs import BEFORE
from fuzz.survive import Case
from train.tiny import make_target

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
ROWS = (
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "count to 3"}]},
            {"role": "assistant", "content": "1 2 3", "reasoning_content": "easy"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "1 2 3", "tool_call_id": "1"},
            {"role": "assistant", "content": "1 2 3", "finish_reason": "stop"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"instruction": "count", "input": "to 3", "output": "1 2 3", "system_prompt": "be brief"},
    {"prompt": [{"role": "user", "content": "hi"}], "completion": "ho", "images": ["bird.png"]},
    {"text": "Once upon a time there was a wren."},
)


class Lines(Case):
    """A bad row is dropped and never ends the job."""

    name = "rows.jsonl"

    def build(self):
        make_target(self.root / "target")
        self.encoder = Encoder.load(self.root / "target", TokeniseOptions(max_length=64))
        self.write([json.dumps(row).encode() for row in ROWS])

    def write(self, lines):
        (self.place / self.name).write_bytes(b"\n".join(lines) + b"\n")

    def spoil(self, rng):
        lines = [json_bytes(rng.choice(ROWS), rng) for _ in range(3)]
        self.write([line.replace(b"\n", b" ") for line in lines])

    def read(self):
        """Dropped rows are counted; when no row is left, the job is refused."""
        for part in make_parts([str(self.place / self.name)]):
            tokenised = tokenise_part(part, self.encoder)
            assert all(len(row.input_ids) == len(row.loss_mask) for row in tokenised.rows)
            tokenised.drops.check(0.9)


class WholeFile(Lines):
    name = "rows.json"
    spoiled = ((name, mutated_json),)

    def write(self, lines):
        (self.place / self.name).write_bytes(b"[" + b", ".join(lines) + b"]")

    def read(self):
        parts = make_parts([str(self.place / self.name)])
        if not parts:
            raise BadInput("no rows")
        for part in parts:
            tokenise_part(part, self.encoder).drops.check(0.9)


class RecipeFile(Case):
    spoiled = (("recipe.yaml", mutated_yaml),)

    def build(self):
        shutil.copy(BEFORE / "eagle3" / "recipe.yaml", self.place)

    def read(self):
        recipe = load_recipe(self.place / "recipe.yaml")
        assert load_recipe(None).differences(recipe) is not None
        assert recipe.to_yaml()


class Override(Case):
    def build(self):
        self.words = ["training.lr=1e-4"]
        self.known = [
            f"{name}.{key}" for name, shape in recipe_shapes().items() for key in shape.all_keys()
        ]

    def spoil(self, rng):
        ends = ("", ".x", ".kind", ".a.b.c")
        yaml = ("[" * 500, "{a: 1, a: 2}", "!!python/name:os.system", "'", "1e999", "{")
        values = [*map(str, HOSTILE), *yaml]
        self.words = [
            f"{rng.choice(self.known)}{rng.choice(ends)}={rng.choice(values)}"
            for _ in range(rng.randint(1, 3))
        ]

    def restore(self):
        self.words = ["training.lr=1e-4"]

    def read(self):
        assert load_recipe(None, self.words).to_yaml()


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
    spoiled = (
        ("metrics.jsonl", mutated_json_lines),
        ("recipe.yaml", mutated_yaml),
        ("eval.json", mutated_json),
        (MACHINE_NAME, mutated_json),
    )

    def build(self):
        for name in ("metrics.jsonl", "recipe.yaml"):
            shutil.copy(BEFORE / "eagle3" / name, self.place)
        write_json(self.place / "eval.json", FIGURES)
        write_json(self.place / MACHINE_NAME, describe_machine())

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
