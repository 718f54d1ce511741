"""What is kept of a tokenizer stands for it: same rows, without transformers."""

import json
import subprocess
import sys

import pytest

from fledge.data.tokenizer import TokenizerFacts
from fledge.models.resolve import load_tokenizer


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A cache of its own; returns its files."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return lambda: sorted((tmp_path / "cache" / "tokenizers").glob("*.json"))


def test_facts_are_kept_until_the_model_changes(tiny_target, tmp_path, kept):
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_target.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    facts = TokenizerFacts.of(load_tokenizer(str(model)))
    assert TokenizerFacts.load(model) == facts
    [file] = kept()
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos": "kept"}))
    assert TokenizerFacts.load(model).bos == "kept"  # read, not loaded again
    file.write_text("{")
    assert TokenizerFacts.load(model) == facts  # a damaged file is written again
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "note": 1}))
    assert TokenizerFacts.load(model) == facts
    assert len(kept()) == 2
    TokenizerFacts.load(model, trust_remote_code=True)
    assert len(kept()) == 2


def test_a_second_preview_needs_no_transformers(tiny_target, tiny_chats, kept):
    """Importing it takes four of the five seconds that a preview took."""
    TokenizerFacts.load(tiny_target.resolve())
    [_] = kept()
    script = "import sys; from fledge.cli.main import app; app(sys.argv[1:], standalone_mode=False)"
    script += "; print(*sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    words = ["data", "preview", str(tiny_chats), "--model", str(tiny_target)]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert "supervised" in done.stdout
    assert done.stderr.strip() == ""
