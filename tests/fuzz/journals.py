"""Files from which jobs resume: prepared rows, the journal and manifest of `regenerate`."""

import contextlib
import json
import shutil

from fledge.core.errors import BadInput
from fledge.data.dialogue import EndedTask, Reply, Sampling
from fledge.data.prepare import prepare_rows
from fledge.data.regenerate import regenerate
from fledge.data.store import TokenRows, part_path, read_record
from fuzz.mutate import json_bytes, mutated_bytes
from fuzz.survive import Case
from train.tiny import make_chats, make_target


class Parrot:
    """Answers every turn with the same words, and fails after `patience` rows."""

    together = 1

    def __init__(self, patience=99):
        self.patience = patience

    def identity(self):
        return {"target": {"name": "parrot"}, "template": "t"}

    def run(self, tasks, report):
        for count, task in enumerate(tasks):
            if count == self.patience:
                raise BadInput("broke down")
            while task.dialogue.question is not None:
                task.dialogue.hear(Reply("so it is", "stop", 3))
            report(EndedTask(task))


class PreparedRows(Case):
    """A part that does not match its record is rebuilt, never read."""

    examples = 150

    def build(self):
        make_target(self.root / "target")
        chats = make_chats(self.root / "chats.jsonl", count=6)
        rows = prepare_rows([str(chats)], self.root / "target", workers=1, cache=self.root / "c")
        self.rows = rows
        shutil.copytree(rows.directory, self.place, dirs_exist_ok=True)

    def spoil(self, rng):
        arrow = part_path(self.place, 0)
        record = arrow.with_suffix(".json")
        if rng.random() < 0.5:
            record.write_bytes(json_bytes(json.loads(record.read_bytes()), rng))
            return
        from fledge.data.tokenise import checksum

        arrow.write_bytes(mutated_bytes(arrow.read_bytes(), rng))
        content = json.loads(record.read_bytes())
        record.write_text(json.dumps({**content, "crc32": checksum(arrow)}))

    def read(self):
        if read_record(self.place, 0) is None:
            raise BadInput("made again")
        rows = TokenRows(self.place, 1, self.rows.drops, "x")
        for row in rows:
            assert len(row.input_ids) == len(row.loss_mask)
        assert rows.tokens >= 0


class Regenerated(Case):
    """A job that was stopped (below: one that finished), which the next command reads."""

    examples = 100
    patience = 3

    def build(self):
        make_chats(self.root / "chats.jsonl", count=6)
        self.out = self.place / "new.jsonl"
        with contextlib.suppress(BadInput):
            self.regenerate(Parrot(self.patience))

    def regenerate(self, parrot):
        return regenerate([str(self.root / "chats.jsonl")], self.out, parrot, Sampling())

    def spoil(self, rng):
        paths = sorted(self.place.rglob("*.json*"))
        path = rng.choice([path for path in paths if path.is_file() and path != self.out])
        lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
        at = rng.randrange(len(lines))
        lines[at] = json_bytes(json.loads(lines[at]), rng)
        path.write_bytes(b"\n".join(lines) + b"\n")

    def read(self):
        assert self.regenerate(Parrot()).written >= 0
        assert len(self.out.read_bytes().splitlines()) == 6


class Finished(Regenerated):
    patience = 99
