"""Which model names are accepted, and the errors for models that cannot be found."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors
from tiny_gguf import tiny_llama, write_gguf

from fledge.core.errors import BadInput
from fledge.models import resolve
from fledge.models.resolve import load_config, load_model, load_tokenizer, local_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_directory_is_returned_as_it_is(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_model(str(directory)) == directory
    monkeypatch.chdir(directory.parent)
    assert local_model("tiny") == directory
    assert load_config("./tiny").hidden_size == 32


def test_models_load_in_the_requested_dtype(directory: Path) -> None:
    import torch

    for dtype in ("bfloat16", torch.bfloat16):
        assert next(load_model(str(directory), dtype=dtype).parameters()).dtype == torch.bfloat16
    with pytest.raises(BadInput, match="bf17"):
        load_model(str(directory), dtype="bf17")


def test_a_directory_without_a_model_or_tokenizer_is_refused(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="cannot load the tokenizer of") as caught:
        load_tokenizer(str(directory))
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"has no config\.json; it must hold"):
        local_model(str(tmp_path / "empty"))
    write_gguf(tmp_path / "empty" / "w.gguf", tiny_llama())
    with pytest.raises(BadInput, match=r"name the file itself: .*w\.gguf"):
        local_model(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm2-135", r"did you mean 'smollm2-135m'\?"),
        ("qwen2.5-coder-0.5", r"did you mean 'qwen2.5-coder-0.5b'\?"),
        ("gpt2", "valid names: qwen2.5-coder-0.5b, smollm2-135m give a directory"),
        ("./nowhere", "no such model './nowhere'; give a directory"),
        ("/a/b/c", "no such model"),
        ("a b/c", "no such model"),
        ("", "no such model"),
    ],
)
def test_unknown_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        local_model(name)


def bare(kind: type[Exception]) -> Exception:
    """An error of the hub library without its HTTP response."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (bare(errors.GatedRepoError), "'org/name@v1' is gated; accept its license"),
        (bare(errors.RepositoryNotFoundError), "the hub has no 'org/name@v1', or failed"),
        (errors.LocalEntryNotFoundError("x"), "is not on the disk, and the hub cannot be reached"),
    ],
)
def test_every_hub_error_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(BadInput, match=says):
        local_model("org/name@v1")


def test_weights_are_downloaded_only_when_needed(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    calls: list[tuple[str, str | None, list[str]]] = []

    def give(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((repo, revision, allow_patterns))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    load_config("org/name@abc")
    load_model("org/name")
    assert [call[:2] for call in calls] == [("org/name", "abc"), ("org/name", None)]
    assert "*.safetensors" not in calls[0][2]
    assert "*.safetensors" in calls[1][2]


OFFLINE = """
import sys
from fledge.core.errors import BadInput
from fledge.models.resolve import local_model
for name in sys.argv[1:]:
    try:
        print(local_model(name))
    except BadInput as error:
        print(error)
"""


def test_offline_cached_models_work_and_others_are_refused(directory: Path, tmp_path: Path) -> None:
    """The real library in offline mode, on a cache in its own layout."""
    repository = tmp_path / "hf" / "models--org--name"
    revision = "a" * 40
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    directory.rename(repository / "snapshots" / revision)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "org/name", f"org/name@{revision}", "org/other"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    latest, pinned, refused = done.stdout.splitlines()
    assert latest == pinned == str(repository / "snapshots" / revision)
    assert "'org/other': it is not on the disk, and the hub cannot be reached" in refused
    assert "unset HF_HUB_OFFLINE" in refused


def test_public_names_contain_no_local_paths(tmp_path: Path) -> None:
    assert resolve.public_name("org/model@main") == "org/model@main"
    assert resolve.public_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / "mine").mkdir()
    assert resolve.public_name(str(tmp_path / "mine")) == "mine"
    assert resolve.public_name(str(tmp_path / "gone" / "model")) == "model"
    write_gguf(tmp_path / "tiny-Q4.gguf", tiny_llama())
    assert resolve.public_name(str(tmp_path / "tiny-Q4.gguf")) == "tiny-Q4"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert resolve.public_name(str(snapshot)) == "org/name"
