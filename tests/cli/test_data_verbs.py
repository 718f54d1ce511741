"""`fledge data ...` as a user runs it."""

import json

import pytest

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "Name a bird."},
            {"role": "assistant", "content": "A <b>wren</b>."},
        ]
    },
    {"messages": [{"role": "assistant", "content": "x"}]},
]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return path


@pytest.mark.slow
def test_preview_shows_supervised_and_dropped(fledge, chats, smollm2):
    shown = json.loads(fledge("data", "preview", chats, "--model", smollm2, "--json").out)
    supervised = "".join(token["text"] for token in shown[0]["tokens"] if token["supervised"])
    assert supervised == "A <b>wren</b>.<|im_end|>"
    assert shown[1]["dropped"] == "assistant first"
    text = fledge("data", "preview", chats).out
    assert "dropped: assistant first" in text
    assert "<b>wren</b>" in text


@pytest.mark.slow
def test_a_pipe_shows_supervision_without_colors_and_what_was_left_out(fledge, tmp_path, smollm2):
    rows = [
        {"messages": [{"role": "assistant", "content": "Hello!"}, *CHATS[0]["messages"]]},
        {"text": "Once upon a time."},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = fledge("data", "preview", path, "--model", smollm2).out
    assert "⟦A <b>wren</b>.<|im_end|>⟧" in text
    assert "Once⟦ upon a time.⟧" in text
    assert "what is in ⟦⟧ is supervised" in " ".join(text.split())
    prepared = fledge("data", "prepare", path, "--model", smollm2).out
    assert prepared.startswith("2 rows, ")
    assert "0 answers without an end" in " ".join(prepared.split())
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(CHATS[0]) + "\n")
    assert fledge("data", "prepare", one, "--model", smollm2).out.startswith("1 row, ")


def test_preview_page_escapes_what_it_shows(fledge, chats, tmp_path):
    fledge("data", "preview", chats, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;" in page
    assert "<b>wren</b>" not in page
    assert "http" not in page  # self-contained


@pytest.mark.slow
def test_prepare_and_stats_as_json(fledge, chats):
    facts = json.loads(fledge("data", "prepare", chats, "--max-drop-share", 0.5, "--json").out)
    assert facts["rows"] == 1
    assert facts["drops"]["counts"] == {"assistant first": 1}
    stats = json.loads(fledge("data", "stats", chats, "--pack", 64, "--json").out)
    assert stats["packs"] == 1
    assert stats["supervised"] == facts["supervised"]
    assert stats["coverage"][0][0] == 1024
    assert "supervised" in fledge("data", "stats", chats).out
