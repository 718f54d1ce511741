"""Commands with a target on hostile servers: one line, exit code 2 or 3, nothing written."""

import json
import time

import pytest
import torch

from fledge.cli.main import run
from fledge.target.cache.manifest import copied_files
from fledge.target.remote.wire import Message
from target.remote.hostile import INFO, Hostile, http, message
from target.remote.test_hostile_answers import DEEP, as_dtype


@pytest.fixture(scope="module")
def good(tiny_target):
    """What a server of the tiny target answers, up to the states."""
    facts = {**INFO, "hidden_size": 32, "vocab_size": 400}
    return {"/v1/info": http(facts), "/v1/files": files(tiny_target), **parts()}


def files(directory, **changes):
    """The files of a target, with changes to some of the JSON ones; None leaves a file out."""
    contents = {path.name: path.read_bytes() for path in copied_files(directory)}
    for name, change in changes.items():
        whole = contents.pop(f"{name}.json")
        if change is not None:
            contents[f"{name}.json"] = json.dumps({**json.loads(whole), **change}).encode()
    tensors = {
        name: torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for name, content in contents.items()
    }
    return http(Message(tensors, {}).to_bytes())


def parts():
    return {"/v1/embeddings": http(message(embed_tokens=torch.ones(400, 32)))}


CODE = {"model_type": "evil", "auto_map": {"AutoConfig": "org/repo--evil.Config"}}
CASES = {
    "deep": ({"/v1/info": http(DEEP)}, "its /v1/info cannot be read ("),
    "layers": ({"/v1/info": http({**INFO, "aux_layer_ids": 5})}, "'aux_layer_ids' is 5"),
    "no config": ({"/v1/files": {"config": None}}, "no config.json"),
    "code": ({"/v1/files": {"config": CODE}}, "Python code"),
    "trusted code": ({"/v1/files": {"config": CODE}}, "which is never run for a server"),
    "states": ({"/v1/generate": as_dtype(torch.uint8, width=32)}, "should be torch.float32 ["),
}  # fmt: skip


@pytest.mark.parametrize("command", ["train", "precompute"])
@pytest.mark.parametrize("case", CASES)
def test_one_line_an_exit_code_and_nothing_written(
    case, command, good, tiny_target, tiny_chats, tmp_path, capfd, monkeypatch
):
    replies, line = CASES[case]
    if isinstance(changes := replies.get("/v1/files"), dict):
        replies = {"/v1/files": files(tiny_target, **changes)}
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    begin = time.monotonic()
    with Hostile({**good, **replies}) as server, pytest.raises(SystemExit) as stop:
        run([
            command, *(["-o", str(out)] if command == "precompute" else [f"run.output_dir={out}"]),
            "target.backend=remote", f"target.urls={server.url}", "target.timeout_s=0.4",
            "target.wait_s=0.2", "target.retries=0", f"data.train={tiny_chats}", "data.workers=1",
            "data.max_length=64", "training.device=cpu", "training.steps=2", "data.valid_rows=4",
            f"target.trust_remote_code={case == 'trusted code'}",
        ])  # fmt: skip
    assert time.monotonic() - begin < 15
    error = capfd.readouterr().err
    assert stop.value.code in (2, 3)
    assert "Traceback" not in error
    assert line in error.strip().splitlines()[-1]
    written = [path.name for path in out.rglob("*") if not path.is_dir()]
    if "/v1/generate" in replies:  # to be continued, from what is written before the first answer
        assert not [name for name in written if name.startswith(("shard-", "model", "."))]
    else:
        assert written == []
