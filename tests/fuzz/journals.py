"""Files from which jobs resume: prepared rows."""

import json
import shutil

from fledge.core.errors import BadInput
from fledge.data.prepare import prepare_rows
from fledge.data.store import TokenRows, part_path, read_record
from fuzz.mutate import json_bytes, mutated_bytes
from fuzz.survive import Case
from train.tiny import make_chats, make_target


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
        arrow.write_bytes(mutated_bytes(arrow.read_bytes(), rng))

    def read(self):
        if read_record(self.place, 0) is None:
            raise BadInput("made again")
        rows = TokenRows(self.place, 1, self.rows.drops, "x")
        for row in rows:
            assert len(row.input_ids) == len(row.loss_mask)
        assert rows.tokens >= 0
