"""Data: rows of arbitrary JSON. A bad row is dropped and never ends the job."""

import json

from fledge.core.errors import BadInput
from fledge.data.sources import make_parts
from fledge.data.tokenise import Encoder, TokeniseOptions, tokenise_part
from fuzz.mutate import json_bytes
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
    examples = 150
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

    def write(self, lines):
        (self.place / self.name).write_bytes(b"[" + b", ".join(lines) + b"]")

    def spoil(self, rng):
        (self.place / self.name).write_bytes(json_bytes(list(ROWS), rng))

    def read(self):
        parts = make_parts([str(self.place / self.name)])
        if not parts:
            raise BadInput("no rows")
        for part in parts:
            tokenise_part(part, self.encoder).drops.check(0.9)
