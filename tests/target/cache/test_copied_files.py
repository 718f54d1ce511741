"""Which files of a model are copied into a cache or sent by a server: its config and tokenizer, and
nothing that only resembles them."""

import os

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.target.cache.manifest import code_files, copied_files, is_copied

TRAVEL = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json"),
    *("qwen.tiktoken", "tiktoken.model", "sentencepiece.bpe.model"),
]
STAY = [
    *("hf_token.txt", "token", ".token", ".env", "tokens.json", "my_tokenizer.json", "token.json"),
    *("tokenization_custom.py", "evil.jinja", "model.safetensors", "config.json.bak"),
    *("CONFIG.JSON", "x/config.json", "../config.json", "/etc/config.json", "config.json\n", ""),
    "tokenizer.json.tmp",
]


def names(directory):
    return [path.name for path in copied_files(directory)]


def fill(directory, files=(*TRAVEL, *STAY)):
    directory.mkdir(parents=True, exist_ok=True)
    for name in files:
        if name and "/" not in name:
            (directory / name).write_text(name)


def test_config_and_tokenizer_files_are_copied_and_no_others(tmp_path):
    fill(tmp_path)
    assert sorted(names(tmp_path)) == sorted(TRAVEL)
    assert all(map(is_copied, TRAVEL))
    assert not any(map(is_copied, STAY))


def test_only_regular_files_in_the_directory_itself_are_copied(tmp_path):
    model, secret = tmp_path / "model", tmp_path / "secret"
    fill(model, ["config.json", "vocab.txt"])
    secret.write_text("secret")
    (model / "tokenizer.json").symlink_to(secret)
    (model / "merges.txt").symlink_to("vocab.txt")
    (model / "vocab.json").mkdir()
    (model / "chat_template.json").symlink_to(model / "nowhere")
    os.mkfifo(model / "tokenizer.model")
    assert names(model) == ["config.json", "vocab.txt"]


def test_code_is_copied_if_a_config_names_it_and_never_through_a_link(tmp_path):
    model, secret = tmp_path / "model", tmp_path / "secret.py"
    fill(model, ["modeling_x.py"])
    secret.write_text("secret")
    (model / "linked.py").symlink_to(secret)
    (model / "config.json").write_text("{}")
    assert code_files(model) == []
    (model / "config.json").write_text('{"auto_map": {"AutoConfig": "modeling_x.C"}}')
    assert code_files(model) == [model / "modeling_x.py"]


def hub_snapshot(hub):
    """A repository as huggingface_hub stores it: its files are links to blobs."""
    repository = hub / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    fill(repository / "blobs", ["1" * 40, "2" * 40])
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(f"../../blobs/{'1' * 40}")
    (snapshot / "tokenizer.json").symlink_to(f"../../blobs/{'2' * 40}")
    return snapshot


def test_links_in_the_hub_cache_may_only_lead_to_its_blobs(tmp_path):
    snapshot = hub_snapshot(tmp_path / "hub")
    fill(tmp_path / "hub" / "models--org--other" / "blobs", ["3" * 40])
    (tmp_path / "secret").write_text("secret")
    (snapshot / "vocab.json").symlink_to(tmp_path / "secret")
    (snapshot / "merges.txt").symlink_to(f"../../../models--org--other/blobs/{'3' * 40}")
    (snapshot / "vocab.txt").symlink_to("../../blobs/../refs")
    (snapshot.parent.parent / "blobs" / ("4" * 40)).symlink_to(tmp_path / "secret")
    (snapshot / "tokenizer.model").symlink_to(f"../../blobs/{'4' * 40}")
    assert names(snapshot) == ["config.json", "tokenizer.json"]
    assert copied_files(snapshot)[0].read_text() == "1" * 40
    linked = tmp_path / "linked"  # the cache itself may be behind a link
    linked.symlink_to(tmp_path / "hub")
    assert names(linked / snapshot.relative_to(tmp_path / "hub")) == names(snapshot)


def test_a_folder_called_blobs_is_not_enough(tmp_path):
    fill(tmp_path / "blobs", ["secret"])
    model = tmp_path / "models" / "mine"
    fill(model, ["config.json"])
    (model / "vocab.json").symlink_to(tmp_path / "blobs" / "secret")
    assert names(model) == ["config.json"]


def test_a_client_writes_no_other_file(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn", reason="needs the serve extra")
    from fledge.target.remote.client import RemoteEagle3TargetModel
    from target.remote.servers import running

    with running() as server, RemoteEagle3TargetModel(server.url) as target:
        text = torch.tensor(list(b"{}"), dtype=torch.uint8)
        for name in (".bashrc", "hf_token.txt", "../config.json", "tokenization_x.py"):
            monkeypatch.setattr(target, "_get", lambda *_, name=name: {name: text})
            with pytest.raises(BadInput, match="the server offers a file"):
                target.fetch_files(tmp_path / "into")
        monkeypatch.setattr(target, "_get", lambda *_: {"config.json": text.float()})
        with pytest.raises(BadInput, match="the server offers a file"):
            target.fetch_files(tmp_path / "into")
        monkeypatch.setattr(target, "_get", lambda *_: {"config.json": text})
        target.fetch_files(tmp_path / "into")
    assert [path.name for path in tmp_path.rglob("*")] == ["into", "config.json"]
