"""Verbs draft as many tokens as a draft was trained for; bad options fail before models load."""

import json

import pytest
from typer.testing import CliRunner

from fledge.cli import chat as chat_verb
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.formats.source import read_source
from fledge.training.runs import trained_tokens


@pytest.fixture(scope="module")
def place(trained, tmp_path_factory):
    """A run of depth 3 and copies of its draft: with the depth in its config, and without."""
    root = tmp_path_factory.mktemp("copies")
    (root / "run").symlink_to(trained)
    for name in ("alone", "older"):
        (root / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (root / name / file).write_bytes((trained / "best" / file).read_bytes())
    config = json.loads((root / "older" / "config.json").read_text())
    assert config.pop("ttt_steps") == 3
    (root / "older" / "config.json").write_text(json.dumps(config))
    (root / "asked.jsonl").write_text('{"prompt": "count to 5"}\n{"prompt": "count to 9"}\n')
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))


DEPTHS = {"run": 3, "alone": 3, "older": 5}


def test_the_depth_comes_from_the_run_then_the_config_then_is_five(place):
    drafts = {"run": place / "run" / "best", "alone": place / "alone", "older": place / "older"}
    assert {name: trained_tokens(path) for name, path in drafts.items()} == DEPTHS
    sources = {name: read_source(path).num_draft_tokens for name, path in drafts.items()}
    assert sources == DEPTHS


def fledge(*arguments, text=None):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)
    assert result.exit_code == 0, result.output
    return result


def test_eval_uses_the_trained_depth_of_each_draft(place, tiny_target):
    options = ["--target", tiny_target, "--prompts", place / "asked.jsonl", "--json"]
    options += ["--max-new-tokens", 8, "--live", 1, "--aux-layers", "0,1,2", "--device", "cpu"]
    drafts = [place / name for name in DEPTHS]
    reports = json.loads(fledge("eval", *drafts, *options).stdout)["drafts"]
    assert [len(report["joint"]) for report in reports] == list(DEPTHS.values())
    [short] = json.loads(fledge("eval", drafts[0], "--draft-tokens", 2, *options).stdout)["drafts"]
    assert len(short["joint"]) == 2


def test_chat_uses_the_trained_depth(place, monkeypatch):
    real, depths = chat_verb._Chat, []

    def recorded(*arguments):
        depths.append(arguments[2]["num_draft_tokens"])
        return real(*arguments)

    monkeypatch.setattr(chat_verb, "_Chat", recorded)
    for extra in ([], ["--draft-tokens", 2]):
        options = ["--max-new-tokens", 4, "--device", "cpu", "--json", *extra]
        fledge("chat", place / "run", *options, text="count to 5\n")
    assert depths == [3, 2]


@pytest.mark.parametrize("verb", ["eval", "chat"])
def test_an_unsupported_method_is_refused_before_the_target_is_loaded(place, monkeypatch, verb):
    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("fledge.training.runs.load_target", load)
    result = CliRunner().invoke(app, [verb, str(place / "run"), "--method", "parallel"], input="x")
    assert isinstance(result.exception, BadInput)
    assert "not trained for parallel drafting" in str(result.exception)
