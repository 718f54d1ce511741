"""Which files of a model are copied into a cache or sent by a server: its config and tokenizer, and
nothing that only resembles them."""

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


def test_code_is_copied_if_a_config_names_it(tmp_path):
    model = tmp_path / "model"
    fill(model, ["modeling_x.py"])
    (model / "config.json").write_text("{}")
    assert code_files(model) == []
    (model / "config.json").write_text('{"auto_map": {"AutoConfig": "modeling_x.C"}}')
    assert code_files(model) == [model / "modeling_x.py"]


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
