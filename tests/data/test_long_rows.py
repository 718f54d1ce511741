"""Long rows: nothing takes hours, and memory is bounded."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chats import chat, write_jsonl
from fledge.data import mask, sources, tokenise
from fledge.data.drops import BadRow
from fledge.data.mask import MaskedText
from fledge.data.tokenise import Encoder, TokeniseOptions, _mask_tokens, tokenise_part

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def encoder(smollm2_tokenizer):
    return Encoder(smollm2_tokenizer, TokeniseOptions())


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=6)


@settings(max_examples=200, deadline=None)
@given(spans=spans, ends=st.lists(st.integers(0, 4), max_size=20))
def test_the_mask_covers_tokens_entirely_within_a_span(spans, ends):
    bounds = np.concatenate([[0], np.cumsum(ends, dtype=np.int64)])

    offsets = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    encoding = SimpleNamespace(ids=ends, offsets=offsets)
    row = _mask_tokens(MaskedText("", tuple(map(tuple, spans))), "x", encoding)
    inside = [any(s <= a and b <= e for s, e in spans) for a, b in offsets]
    assert row.loss_mask.tolist() == inside


def test_rows_beyond_the_limits_are_dropped_with_a_reason(encoder, monkeypatch):
    def reason(row):
        with pytest.raises(BadRow) as caught:
            encoder.texts(row)
        return caught.value.reason

    start = time.perf_counter()
    assert reason(chat(*["a"] * 20_000)) == "too many turns"
    assert reason(chat("a", "b" * (mask.LONGEST_ROW + 1))) == "row is too long"
    assert reason(chat(*["a" * 19_999] * 404)) == "too many turns"
    tools = [{"type": "function", "function": {"name": "f", "text": "x" * mask.LONGEST_ROW}}]
    assert reason({**chat("a", "b"), "tools": tools}) == "row is too long"
    assert time.perf_counter() - start < 5
    monkeypatch.setattr(encoder, "options", TokeniseOptions(last_turn_only=True))
    # the last answer takes only two renderings
    assert len(encoder.texts(chat(*["a"] * 20_000))) == 1


def test_a_row_with_many_turns_is_kept_whole_and_takes_seconds(encoder):
    start = time.process_time()
    [text] = encoder.texts(chat(*["a"] * 600))
    assert time.process_time() - start < 10
    assert text.supervised() == ["a<|im_end|>"] * 300


def test_a_lone_surrogate_anywhere_drops_the_row(smollm2_tokenizer, tmp_path):
    """JSON accepts it, tokenizers do not."""
    rows = [chat("a", "b"), chat("a", "b")]
    call = {"function": {"name": "f", "arguments": {"k": "f \ud800"}}}
    rows[0]["messages"][1]["tool_calls"] = [call]
    path = tmp_path / "a.jsonl"
    write_jsonl(path, rows)
    tokenizer = type(smollm2_tokenizer).from_pretrained(smollm2_tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ m.tool_calls[0].function.arguments.k if m.tool_calls }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    [part] = sources.make_parts([str(path)])
    tokenized = tokenise_part(part, Encoder(tokenizer, TokeniseOptions()))
    assert tokenized.drops.counts == {"broken UTF-8": 1}
    assert len(tokenized.rows) == 1


def test_the_batch_size_does_not_change_the_rows(encoder, tmp_path, monkeypatch):
    rows = [chat(f"{i}", "x" * i) if i % 3 else {} for i in range(30)]
    [part] = sources.make_parts([str(write_jsonl(tmp_path / "a.jsonl", rows))])
    seen = []
    for size in (tokenise._BATCH, 64):
        monkeypatch.setattr(tokenise, "_BATCH", size)
        made = tokenise_part(part, encoder)
        values = [(r.input_ids.tolist(), r.loss_mask.tolist(), r.place, r.truncated)
                  for r in made.rows]  # fmt: skip
        seen.append((values, made.drops))
    assert seen[0] == seen[1]


MEASURE = """
import json, resource, sys, time
from pathlib import Path
from fledge.data import sources
from fledge.data.tokenise import Encoder, TokeniseOptions, tokenise_part

encoder = Encoder.load(sys.argv[1], TokeniseOptions(max_length=2048))
base, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
parts = sources.make_parts([sys.argv[2]])
drops = [tokenise_part(part, encoder).drops.to_json() for part in parts]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([peak - base, time.process_time() - start, drops]))
"""


@pytest.mark.parametrize(
    ("megabytes", "sign", "reason"),
    [(100, "é ", "row is too long"), (2, "word ", None)],
)
def test_memory_is_proportional_to_the_length_of_a_line(smollm2, tmp_path, megabytes, sign, reason):
    path = tmp_path / "a.jsonl"
    size = megabytes << 20
    line = json.dumps(chat("x", sign * (size // len(sign.encode()))), ensure_ascii=False)
    with path.open("w") as handle:
        handle.write(f"{json.dumps(chat('x', 'y'))}\n{line}\n")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(smollm2), str(path)], capture_output=True, text=True,
        check=True, timeout=100,
    )  # fmt: skip
    kilobytes, seconds, [drops] = json.loads(done.stdout)
    assert drops["counts"] == ({reason: 1} if reason else {})
    assert drops["kept"] == (1 if reason else 2)
    if reason:
        assert kilobytes << 10 < 2 * size
        assert seconds < 5
    else:  # tokenized whole: no part can be skipped safely
        assert kilobytes << 10 < 100 * size
        assert seconds < 30
