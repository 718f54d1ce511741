"""Whatever a target server answers, a client ends with one line, no later than its deadline."""

import contextlib
import json
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.target.remote import fleet
from fledge.target.remote.client import RemoteEagle3TargetModel
from fledge.target.remote.http import Server, ServerDown, ServerFault
from target.contract import padded_rows
from target.remote.hostile import (
    GOOD,
    INFO,
    VOCAB,
    Hostile,
    answer,
    drip,
    forever,
    http,
    message,
    reset,
    then_silence,
)  # fmt: skip

TIMEOUT_S, WAIT_S = 0.3, 0.1
SLACK_S = 5.0  # for a busy machine, and for requests that went well before
DEEP = b"[" * 200_000 + b"]" * 200_000
DEEP_FIELD = b'{"error": ' + DEEP + b"}"
DIGITS = b"9" * 5_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def info(**changes):
    return http({**INFO, **changes})


def without(name):
    return http({key: value for key, value in INFO.items() if key != name})


def health(queue):
    return http(b'{"status": "ok", "queue": ' + queue + b"}")


def busy(retry_after, **facts):
    return http({"error": "full", **facts}, "429 Too Many Requests", Retry_After=retry_after)


def files(**contents):
    return http(message(**{
        name.replace("__", "."): torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for name, text in contents.items()
    }))  # fmt: skip


def states(**changes):
    return answer(lambda tensors, metadata: tensors.update(changes))


def facts(**changes):
    return answer(lambda tensors, metadata: metadata.update(changes))


def as_dtype(dtype, **options):
    def change(tensors, metadata):
        tensors["last_hidden_states"] = tensors["last_hidden_states"].to(dtype)

    return answer(change, **options)


def header(text):
    """A message with a header of our own and a digest that fits."""
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return http(whole + xxhash.xxh3_64(whole).digest()[::-1])


# How connections behave and what HTTP allows or does not: tried on every path.
TRANSPORT = {
    "headers drip": drip(b"HTTP/1.1 200 OK\r\nX-Long: a"),
    "headers drip in lines": drip(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 90, 0.002),
    "status drips": drip(b"HTTP/1.1 200 O"),
    "100 for ever": forever(CONTINUE),
    "100 for ever, slowly": drip(CONTINUE * 1000),
    "102 and silence": then_silence(b"HTTP/1.1 102 Processing\r\n\r\n"),
    "silence": then_silence(),
    "silence after the headers": then_silence(HEAD + b"\r\n"),
    "silence in the body": then_silence(HEAD + b"\r\n" + b"x" * 500),
    "body drips": drip(HEAD + b"\r\n{"),
    "body drips, to be closed": drip(HEAD + b"Connection: close\r\n\r\n{"),
    "close at once": b"",
    "close in the status": b"HTTP/1.1 20",
    "close in the headers": HEAD,
    "close after the headers": HEAD + b"\r\n",
    "close in the body": HEAD + b"\r\n{}",
    "reset at once": reset(),
    "reset in the headers": reset(HEAD),
    "reset in the body": reset(HEAD + b"\r\n{}"),
    "no length": http(b"{}", Content_Length=None),
    "a negative length": http(b"{}", Content_Length="-5"),
    "a length of 5,000 digits": http(b"{}", Content_Length=DIGITS.decode()),
    "a length of an exabyte": http(b"{}", Content_Length=str(1 << 60)),
    "a length that is no number": http(b"{}", Content_Length="many"),
    "broken chunks": http(b"zz\r\n{}", Content_Length=None, Transfer_Encoding="chunked"),
    "endless chunks": forever(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "an endless status": forever(b"HTTP/1.1 200 " + b"a" * 1000),
    "a thousand headers": HEAD + b"A: b\r\n" * 1000 + b"\r\n",
    "binary garbage": bytes(range(256)) * 10,
    "HTTP/9": b"HTTP/9.9 200 OK\r\n\r\n",
    "a status of words": b"HTTP/1.1 two OK\r\n\r\n",
    "a status of 5,000 digits": b"HTTP/1.1 " + DIGITS + b" OK\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "redirect": http(b"", "302 Found", Location="http://127.0.0.1:1/"),
    "404": http(b"<html>", "404 Not Found"),
    "401": http({"error": "no"}, "401 Unauthorized"),
    "400, deep": http(DEEP, "400 Bad Request"),
    "500, deep": http(DEEP_FIELD, "500 Internal Server Error"),
    "500, lists": http({"error": [[1]], "final": [2]}, "500 Internal Server Error"),
    "500, final": http({"error": "NaN", "final": True}, "500 Internal Server Error"),
    "500, a megabyte": http({"error": "a\n" * 400_000}, "500 Internal Server Error"),
    "503": http(b"", "503 Service Unavailable"),
    "429": http(b"", "429 Too Many Requests"),
    "429, deep": http(DEEP, "429 Too Many Requests"),
    **{
        f"429, after {text}": busy(text)
        for text in ("nan", "inf", "-1", "0", "1e999", "9" * 5000, "soon", "")
    },
    **{f"429, after {value!r}": busy("1", retry_after_s=value) for value in (None, [1], -7, 1e300)},
    "not JSON": http(b"<html>"),
    "not UTF-8": http(b'{"queue": "\xff"}'),
    "a list": http([]),
    "deep": http(DEEP),
    "a key twice": http(b'{"queue": 1, "queue": 2}'),
}  # fmt: skip

HEALTH = {
    f"health: queue is {queue[:20].decode()}": {"/health": health(queue)}
    for queue in (b"null", b"[1]", b"1e999", b"NaN", b"-1", b'"1"', b"0.5", b"true", DIGITS, DEEP)
} | {"health: no queue": {"/health": http({"status": "ok"})}}

BAD_FACTS = {
    "hidden_size": ("x", 0, -8, 1e9, None, 2**60), "aux_layer_ids": (5, [], ["a"], [[1]], None),
    "depth": (None, "4", 0, 4.5), "dtype": ("int8", None, ["float32"]), "vocab_size": ("x", 2**40),
    "protocol": (None, "1"), "weights_fingerprint": (5, "../../x", "a" * 9999),
    "tokenizer_fingerprint": ("/etc/x", {}), "head": (None, {"scale": "x"}),
    "final_norm": (5, [1, 2, 3]), "weight_dtypes": (None,),
}  # fmt: skip
INFOS = {
    **{
        f"info: {name} is {json.dumps(value)[:20]}": {"/v1/info": info(**{name: value})}
        for name, values in BAD_FACTS.items()
        for value in values
    },
    **{f"info: no {name}": {"/v1/info": without(name)} for name in INFO},
}

PARTS = {
    "embeddings: none": {"/v1/embeddings": http(message())},
    "embeddings: whole numbers": {
        "/v1/embeddings": http(message(embed_tokens=torch.ones(40, 8, dtype=torch.int64)))
    },
    "embeddings: too narrow": {"/v1/embeddings": http(message(embed_tokens=torch.ones(40, 7)))},
    "embeddings: another rank": {"/v1/embeddings": http(message(embed_tokens=torch.ones(320)))},
    "embeddings: another digest": {
        "/v1/embeddings": http(GOOD["/v1/embeddings"].partition(b"\r\n\r\n")[2][:-1] + b"\0")
    },
    "head: too wide": {"/v1/head": http(message(lm_head=torch.ones(40, 9)))},
    "head: bytes": {"/v1/head": http(message(lm_head=torch.ones(40, 8, dtype=torch.uint8)))},
    "files: none": {"/v1/files": files()},
    "files: no config": {"/v1/files": files(tokenizer__json="{}")},
    "files: code": {"/v1/files": files(config__json="{}", modeling_x__py="1")},
    "files: elsewhere": {"/v1/files": http(message(**{
        "config.json": torch.ones(1, dtype=torch.uint8),
        "../config.json": torch.ones(1, dtype=torch.uint8),
    }))},
    "files: numbers": {"/v1/files": http(message(**{"config.json": torch.ones(3)}))},
    **{
        f"message: {text[:30].decode()}": {"/v1/embeddings": header(text)}
        for text in (
            b"[]", b'{"a": 5}', b'{"__metadata__": {"a": 3}}', b"[" * 100_000,
            b'{"digest": {"dtype": "U8", "shape": [9e99], "data_offsets": [0, 8]}}',
        )
    },
}  # fmt: skip

ANSWERS = {
    "answer: to another request": facts(request_id="0" * 32),
    "answer: to a long request": facts(request_id="0" * 300_000),
    "answer: to no request": answer(lambda tensors, metadata: metadata.clear()),
    "answer: no states": answer(lambda tensors, metadata: tensors.clear()),
    "answer: other shapes": states(aux_hidden_states=torch.zeros(1, 2, 3)),
    "answer: another rank": states(last_hidden_states=torch.zeros(7)),
    "answer: empty": states(last_hidden_states=torch.zeros(0)),
    **{
        f"answer: {dtype}": as_dtype(dtype)
        for dtype in (
            torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool,
            torch.float8_e4m3fn,
        )
    },
    "answer: cut short": answer(damage=lambda whole: whole[:-9]),
    "answer: longer": answer(damage=lambda whole: whole + b"\0" * 8),
    "answer: one bit flipped": answer(damage=lambda whole: whole[:-99] + b"\1" + whole[-98:]),
    "answer: 5,000 bytes of zero": answer(damage=lambda whole: bytes(5000)),
    "answer: JSON": http({}),
}  # fmt: skip

GROUPS = {
    path: {name: {path: reply} for name, reply in TRANSPORT.items()}
    for path in ("/health", "/v1/info", "/v1/embeddings", "/v1/generate")
} | {
    "health": HEALTH,
    "info": INFOS,
    "parts": PARTS,
    "answers": {name: {"/v1/generate": reply} for name, reply in ANSWERS.items()},
}


def use(url, directory, retries=2):
    """Everything that a run asks of its servers."""
    options = {"timeout_s": TIMEOUT_S, "wait_s": WAIT_S, "retries": retries}
    with RemoteEagle3TargetModel(url, **options) as target:
        target.get_input_embeddings()
        target.info()
        target.fetch_files(directory)
        return target.answer(padded_batch())


def padded_batch():
    return TokenBatch(*(tensor % VOCAB for tensor in padded_rows()))


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


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (drip(HEAD + b"X-Long: a"), "still waiting for the headers of its reply"),
        (then_silence(HEAD + b"\r\n" + b"x" * 500), "after 500 of 1000 bytes"),
        (busy("inf"), "target.timeout_s: no answer within 0.3 s .*busy for another 60.0 s"),
    ],
)
def test_the_error_says_the_deadline_and_what_was_awaited(reply, told, tmp_path):
    with Hostile({"/v1/generate": reply}) as server, pytest.raises(BadInput, match=told) as caught:
        use(server.url, tmp_path, retries=0)
    assert "0.3 s" in str(caught.value)
    assert "target.timeout_s" in str(caught.value)


def test_a_long_wait_is_shown_with_its_reason(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fleet, "REMIND_S", 0.04)
    with Hostile({"/v1/generate": busy("0")}) as server, pytest.raises(BadInput):
        use(server.url, tmp_path)
    told = r"all target servers are busy \(.*busy for another 0.1 s\); waiting, for"
    assert len(re.findall(told, caplog.text)) >= 2


def test_a_server_that_is_up_and_never_answers_ends_the_wait(monkeypatch):
    """Its health is fine, and every request finds it gone: it comes and goes, without an answer."""
    monkeypatch.setattr(fleet, "_CHECK_EVERY_S", 0.01)

    def gone(state, left_s):
        raise ServerDown("connection refused")

    with Hostile() as server:
        servers = fleet.Fleet([Server(server.url)], timeout_s=0.3, wait_s=0.3)
        servers.open()
        with (
            contextlib.closing(servers),
            pytest.raises(TargetUnreachable, match="no target server answered for 0 s"),
        ):
            servers.ask(gone)


def test_a_request_that_is_read_slowly_has_the_deadline_too(certificate):
    """Under TLS, a socket's own timeout is that of each record of the body."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    over = threading.Event()

    def read_slowly():
        with context.wrap_socket(listening.accept()[0], server_side=True) as connection:
            while not over.wait(0.02):
                connection.recv(1 << 14)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        thread = threading.Thread(target=read_slowly)
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(ServerFault, match=r"within 0.5 s, still waiting for room to send"):
            Server(url, ca_file=certificate[0]).exchange("/", bytes(16 << 20), 0.5, 0)
        assert time.monotonic() - begin < 0.5 + SLACK_S
        over.set()
        thread.join()
