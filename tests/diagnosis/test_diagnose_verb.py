"""`fledge diagnose` as users see it: text, JSON, exit codes, --fix, and unusable files."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_diagnose_faults import (
    assert_same_files,
    broken_copy,
    errors_and_warnings,
    no_decoding,
    put,
)
from typer.testing import CliRunner

from export.drafts import NEW_TOKENS, PROMPTS, files_of
from export.layouts import write_as
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.formats.checks.probe import SETTINGS
from fledge.formats.diagnose import NUMERIC, STATIC, diagnose


def run(place, draft, *options):
    arguments = ["diagnose", str(draft), "--target", str(place / "target"), "--device", "cpu"]
    limits = ["--prompts", str(PROMPTS), "--max-new-tokens", str(NEW_TOKENS)]
    return CliRunner().invoke(app, [*arguments, *limits, *options])


def test_a_healthy_draft_as_text(place):
    result = run(place, place / "eagle3")
    assert result.exit_code == 0, result.output
    assert "healthy" in result.stdout.splitlines()[-1]
    assert "replay of the files" in result.stdout


def test_fix_repairs_and_verifies_the_repair(place, tmp_path):
    broken = broken_copy(
        place / "eagle3", tmp_path / "broken", put(num_hidden_layers=8, aux_layer_ids=[2, 4, 5])
    )
    result = run(place, broken, "--fix", str(tmp_path / "fixed"), "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    errors = {f["check"]: f for f in printed["findings"] if f["severity"] == "error"}
    assert set(errors) == {"sizes", "aux-shifted"}
    assert all(error["repairable"] and error["fix"] for error in errors.values())
    assert printed["repaired"]["healthy"]
    assert printed["repaired_acceptance"] == printed["repaired"]["acceptance"]
    assert_same_files(tmp_path / "fixed", place / "eagle3")
    again = run(place, broken, "--fix", str(tmp_path / "fixed"))
    assert again.exit_code == 2 or "exists already" in str(again.exception)


def test_what_cannot_be_repaired_stays_an_error(place, tmp_path):
    broken = broken_copy(place / "eagle3", tmp_path / "broken", lambda c, t: t.pop("fc.weight"))
    result = run(place, broken, "--fix", str(tmp_path / "fixed"))
    assert result.exit_code == 1
    assert "missing" in result.stdout
    assert "behavioral checks: network must be repaired first" in result.stdout
    assert not (tmp_path / "fixed").exists()


def test_static_does_not_read_the_targets_weights(place, tmp_path):
    shutil.copytree(
        place / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors")
    )
    diagnosis = diagnose(place / "eagle3", str(tmp_path / "target"), static=True)
    assert diagnosis.healthy
    assert "--static" in diagnosis.skipped[0]
    with pytest.raises(BadInput, match="no weights"):
        diagnose(place / "eagle3", str(tmp_path / "target"))


@pytest.mark.parametrize(
    ("layout", "kind", "engine", "faults"),
    [
        ("specforge", "eagle3", "sglang", set()),
        ("specforge", "eagle3", "vllm", set()),
        ("speculators", "eagle31", "vllm", set()),
        ("speculators", "eagle3", "sglang", {"serving"}),
        ("automodel", "eagle3", "vllm", {"serving"}),
        ("automodel", "eagle3", "sglang", {"serving"}),
        ("modelopt", "eagle3", "vllm", {"serving"}),
        ("eagle", "eagle3", "sglang", {"serving"}),
        ("speculators", "peagle", "sglang", {"serving", "embeddings"}),
        ("eagle", "eagle1", "vllm", set()),
        ("eagle", "eagle1", "sglang", {"serving"}),
    ],
)
def test_an_engines_limits_become_errors(place, made, tmp_path, layout, kind, engine, faults):
    foreign = write_as(layout, made(kind), tmp_path / "foreign", place / "target")
    diagnosis = diagnose(foreign, str(place / "target"), engine=engine, answering=no_decoding)
    assert set(errors_and_warnings(diagnosis)) <= faults
    assert faults <= {*errors_and_warnings(diagnosis), "embeddings"}


def test_bad_input_is_a_one_line_error(place, tmp_path):
    with pytest.raises(BadInput, match="not an engine"):
        diagnose(place / "eagle3", str(place / "target"), engine="tensorrt")
    with pytest.raises(BadInput, match=r"no config\.json"):
        diagnose(tmp_path, str(place / "target"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        diagnose(tmp_path, str(place / "target"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="no weights here"):
        diagnose(tmp_path, str(place / "target"))
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(BadInput, match="cannot be read"):
        diagnose(tmp_path, str(place / "target"))


JUNK = st.sampled_from(
    [None, "", "x", -1, 0, 1, 3, 7, 2.5, True, [], [1, 2], ["a"], {}, {"a": 1}, 10**9]
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_file_makes_it_crash(place, eagle1, tmp_path_factory, data):
    """Whatever the files contain, the result is findings or a one-line error, not a traceback."""
    kind = data.draw(st.sampled_from(["eagle3", "peagle", eagle1.name]))
    layouts = ["fledge", "specforge", "speculators", "modelopt"]
    if kind == eagle1.name:
        layouts = ["fledge", "eagle1-sglang"]
    layout = data.draw(st.sampled_from(layouts))
    root = tmp_path_factory.mktemp("junk")
    source = place / kind
    if layout != "fledge":
        source = write_as(layout, source, root / "source", place / "target")
    config, tensors = files_of(source)
    for _ in range(data.draw(st.integers(1, 3))):
        section = config
        if layout == "speculators" and data.draw(st.booleans()):
            section = config["transformer_layer_config"]
        if data.draw(st.booleans()):
            if isinstance(section, dict) and section:
                section[data.draw(st.sampled_from(sorted(section)))] = data.draw(JUNK)
        else:
            name = data.draw(st.sampled_from(sorted(tensors)))
            shape = data.draw(st.sampled_from([(), (0,), (1,), (5,), (3, 4), (32, 32), (2, 2, 2)]))
            dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
            tensors[name] = torch.ones(shape).to(dtype)
    (root / "draft").mkdir()
    (root / "draft" / "config.json").write_text(json.dumps(config))
    save_file(tensors, root / "draft" / "model.safetensors")
    with contextlib.suppress(BadInput):  # a one-line error is fine
        diagnosis = diagnose(root / "draft", str(place / "target"), answering=no_decoding)
        json.dumps(diagnosis.to_json())


def test_the_page_lists_every_check():
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    section = page.partition("## Every check")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)
    measured = [setting.name for setting in SETTINGS]
    assert listed == [*STATIC, *NUMERIC, "network", *measured, "acceptance"]
