"""A chat server in a thread, built on the standard library, that can fail in many ways."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def said(question: str) -> str:
    return f"You asked: {question}"


def answer(text, *, finish="stop", tokens=5, **message):
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


class ChatServer:
    """`behave(body, tries)` returns (status, headers, JSON value or bytes or an iterator of chunks
    of text that ends with an empty one), or "hang up", "stall".

    `tries` counts earlier requests with the same messages. By default it echoes the last message.
    """

    def __init__(self, behave=None, models=("tiny",)):
        self.behave = behave or (lambda body, tries: (200, {}, echo(body)))
        self.models, self.requests, self.paths, self.headers = models, [], [], []
        self.pages = {"/v1/models": lambda: {"data": [{"id": name} for name in self.models]}}
        self.tries, self.closing = {}, threading.Event()
        self.on_request = lambda count: None
        self._lock = threading.Lock()

    def note(self, handler, body):
        key = json.dumps(body["messages"])
        with self._lock:
            self.requests.append(body)
            self.paths.append(handler.path)
            self.headers.append(dict(handler.headers))
            tries = self.tries.get(key, 0)
            self.tries[key] = tries + 1
            self.on_request(len(self.requests))
        return tries

    @contextlib.contextmanager
    def serving(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.closing.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def _handler(outer):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                page = outer.pages.get(self.path)
                self.send(*((200, {}, page()) if page else (404, {}, {})))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reaction = outer.behave(body, outer.note(self, body))
                if reaction == "stall":
                    outer.closing.wait(30)
                if isinstance(reaction, str):
                    self.close_connection = True
                    return
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send(*reaction)

            def send(self, status, headers, value):
                if isinstance(value, Iterator):
                    length, chunks = {"Transfer-Encoding": "chunked"}, map(framed, value)
                else:
                    data = value if isinstance(value, bytes) else json.dumps(value).encode()
                    length, chunks = {"Content-Length": str(len(data))}, [data]
                self.send_response(status)
                for name, text in {**length, **headers}.items():
                    self.send_header(name, text)
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(chunk)

        return Handler


def framed(text):
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def echo(body):
    return answer(said(body["messages"][-1]["content"]))
