"""Whatever a target server answers, a client ends with one line, and soon."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.remote.client import RemoteEagle3TargetModel
from target.contract import padded_rows
from target.remote.hostile import (
    GOOD,
    INFO,
    VOCAB,
    Hostile,
    answer,
    http,
    message,
    reset,
    then_silence,
)  # fmt: skip

TIMEOUT_S, WAIT_S = 0.3, 0.1
SLACK_S = 5.0  # for a busy machine, and for requests that went well before
DEEP = b"[" * 200_000 + b"]" * 200_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n"


def info(**changes):
    return http({**INFO, **changes})


def states(**changes):
    return answer(lambda tensors, metadata: tensors.update(changes))


def as_dtype(dtype, **options):
    def change(tensors, metadata):
        tensors["last_hidden_states"] = tensors["last_hidden_states"].to(dtype)

    return answer(change, **options)


# How connections behave and what HTTP allows or does not: tried on every path.
TRANSPORT = {
    "silence": then_silence(),
    "silence in the body": then_silence(HEAD + b"\r\n" + b"x" * 500),
    "close at once": b"",
    "close in the headers": HEAD,
    "close in the body": HEAD + b"\r\n{}",
    "reset in the body": reset(HEAD + b"\r\n{}"),
    "no length": http(b"{}", Content_Length=None),
    "a length of an exabyte": http(b"{}", Content_Length=str(1 << 60)),
    "binary garbage": bytes(range(256)) * 10,
    "redirect": http(b"", "302 Found", Location="http://127.0.0.1:1/"),
    "404": http(b"<html>", "404 Not Found"),
    "500, deep": http(b'{"error": ' + DEEP + b"}", "500 Internal Server Error"),
    "500, final": http({"error": "NaN", "final": True}, "500 Internal Server Error"),
    "503": http(b"", "503 Service Unavailable"),
    "429": http(b"", "429 Too Many Requests"),
    "not JSON": http(b"<html>"),
    "a list": http([]),
    "deep": http(DEEP),
}

PARTS = {
    "health: no queue": {"/health": http({"status": "ok"})},
    "info: no depth": {"/v1/info": http({k: v for k, v in INFO.items() if k != "depth"})},
    "info: a huge size": {"/v1/info": info(hidden_size=2**60)},
    "embeddings: too narrow": {"/v1/embeddings": http(message(embed_tokens=torch.ones(40, 7)))},
    "embeddings: another digest": {
        "/v1/embeddings": http(GOOD["/v1/embeddings"].partition(b"\r\n\r\n")[2][:-1] + b"\0")
    },
    "head: too wide": {"/v1/head": http(message(lm_head=torch.ones(40, 9)))},
    "files: none": {"/v1/files": http(message())},
    "files: elsewhere": {"/v1/files": http(message(**{
        "config.json": torch.ones(1, dtype=torch.uint8),
        "../config.json": torch.ones(1, dtype=torch.uint8),
    }))},
    "files: numbers": {"/v1/files": http(message(**{"config.json": torch.ones(3)}))},
}  # fmt: skip

ANSWERS = {
    "to another request": answer(lambda _, metadata: metadata.update(request_id="0" * 32)),
    "to no request": answer(lambda tensors, metadata: metadata.clear()),
    "no states": answer(lambda tensors, metadata: tensors.clear()),
    "other shapes": states(aux_hidden_states=torch.zeros(1, 2, 3)),
    "half precision": as_dtype(torch.float16),
    "whole numbers": as_dtype(torch.int64),
    "cut short": answer(damage=lambda whole: whole[:-9]),
    "longer": answer(damage=lambda whole: whole + b"\0" * 8),
    "one bit flipped": answer(damage=lambda whole: whole[:-99] + b"\1" + whole[-98:]),
    "JSON": http({}),
}

GROUPS = {
    path: {name: {path: reply} for name, reply in TRANSPORT.items()}
    for path in ("/health", "/v1/info", "/v1/embeddings", "/v1/generate")
} | {
    "parts": PARTS,
    "answers": {name: {"/v1/generate": reply} for name, reply in ANSWERS.items()},
}


def use(url, directory):
    """Everything that a run asks of its servers."""
    options = {"timeout_s": TIMEOUT_S, "wait_s": WAIT_S, "retries": 2}
    with RemoteEagle3TargetModel(url, **options) as target:
        target.get_input_embeddings()
        target.info()
        target.fetch_files(directory)
        return target.answer(TokenBatch(*(tensor % VOCAB for tensor in padded_rows())))


def test_the_server_of_these_tests_is_understood_where_it_behaves(tmp_path):
    with Hostile() as server:
        assert use(server.url, tmp_path).aux_hidden_states.shape[-1] == 24
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def fault(replies, directory):
    """What is wrong with the end that a client comes to; None: it is one line, in time."""
    begin = time.monotonic()
    with Hostile(replies) as server:
        try:
            use(server.url, directory)
        except BadInput as error:
            line = str(error)
            bad = "\n" in line or len(line) > 1000
        except Exception as error:  # noqa: BLE001  (the fault that is looked for)
            return repr(error)[:200]
        else:
            return "no error"
    seconds = time.monotonic() - begin
    if seconds > TIMEOUT_S + WAIT_S + SLACK_S:
        return f"took {seconds:.1f} s"
    written = [path.name for path in directory.iterdir() if "/v1/generate" not in replies]
    return line[:200] if bad else f"wrote {written}" if written else None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group", GROUPS)
def test_one_line_by_the_deadline_whatever_is_answered(group, tmp_path):
    cases, directories = GROUPS[group], [tmp_path / str(n) for n in range(len(GROUPS[group]))]
    for directory in directories:
        directory.mkdir()
    with ThreadPoolExecutor(12) as pool:
        faults = dict(zip(cases, pool.map(fault, cases.values(), directories), strict=True))
    assert {name: found for name, found in faults.items() if found} == {}
