"""A target server that misbehaves: raw bytes from a thread, on a port from the OS."""

import contextlib
import json
import socket
import struct
import threading

import torch

from fledge.target.remote.protocol import Question, WireShape
from fledge.target.remote.wire import Message, unpack

LAYERS, WIDTH, VOCAB = [0, 1, 2], 8, 40
INFO = {
    "protocol": 1, "depth": 4, "dtype": "float32", "weight_dtypes": "float32",
    "weights_fingerprint": "a" * 16, "tokenizer_fingerprint": "b" * 16, "vocab_size": VOCAB,
    "head": {"scale": 1.0, "softcap": None, "divisor": 1.0}, "final_norm": None,
    "hidden_size": WIDTH, "aux_layer_ids": LAYERS,
}  # fmt: skip


def http(body=b"", status="200 OK", **headers):
    """A whole reply; a header given as None is left out."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Content-Length": len(body)} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"{name}: {value}\r\n" for name, value in fields.items() if value is not None]
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}\r\n".encode() + body


def then_silence(data=b""):
    """Send some bytes and wait until the client hangs up."""

    def send(connection, body):
        connection.sendall(data)
        connection.recv(1)

    return send


def reset(data=b""):
    """Send some bytes and reset the connection instead of closing it."""

    def send(connection, body):
        connection.sendall(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return send


def answer(change=lambda tensors, metadata: None, damage=lambda message: message, width=WIDTH):
    """The answer to whatever is asked, all zeros, after a change to its parts or its bytes."""

    def send(connection, body):
        question = Question.read(*unpack(bytearray(body)))
        shape = WireShape.of(question, hidden_size=width, aux_layers=3, dtype=torch.float32)
        tensors = {
            field.name: torch.zeros(*question.rows.shape, field.width, dtype=field.dtype)
            for field in (*shape.token_fields(), *shape.slot_fields())
        }
        metadata = {"request_id": question.request_id}
        change(tensors, metadata)
        connection.sendall(http(damage(Message(tensors, metadata).to_bytes())))
        return True

    return send


def message(**tensors):
    return Message(tensors, {}).to_bytes()


GOOD = {
    "/health": http({"status": "ok", "queue": 0}),
    "/v1/info": http(INFO),
    "/v1/embeddings": http(message(embed_tokens=torch.ones(VOCAB, WIDTH))),
    "/v1/head": http(message()),
    "/v1/files": http(Message({"config.json": torch.zeros(2, dtype=torch.uint8)}, {}).to_bytes()),
    "/v1/generate": answer(),
}


class Hostile:
    """Answers as GOOD does, except on the paths in `replies`: bytes, or a function that sends what
    it likes on the connection and says whether that is kept. After bytes that are not a whole reply
    the connection is closed."""

    def __init__(self, replies=()):
        self.replies = {**GOOD, **dict(replies)}
        self.asked = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                connection.settimeout(10)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as file:
            while line := file.readline():
                path, length = line.split()[1].decode(), 0
                while (header := file.readline().strip()) != b"":
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                self.asked.append(path)
                if not self._reply(connection, self.replies[path], file.read(length)):
                    return

    @staticmethod
    def _reply(connection, reply, body):
        """Whether the connection can be used for another request."""
        if callable(reply):
            return reply(connection, body)
        connection.sendall(reply)
        head, _, rest = reply.partition(b"\r\n\r\n")
        return f"Content-Length: {len(rest)}".encode() in head
