"""A headless Chromium, driven over its debugging pipe. Also takes screenshots:

python tests/report/browser.py report.html report-dark.png dark 1160 1900
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; records every request it makes and every error or warning it logs."""

    def __init__(self, send, receive):
        self._send, self._receive, self._number, self._session = send, receive, 0, None
        self._buffer = b""
        self.requests, self.complaints, self.events = [], [], []

    def call(self, method, session=True, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session and self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def wait_for(self, event, timeout_s=30):
        limit = time.monotonic() + timeout_s
        while event not in self.events:
            self._note(self._next(limit - time.monotonic()))

    def _next(self, timeout_s=30):
        while b"\0" not in self._buffer:
            assert select.select([self._receive], [], [], timeout_s)[0], "the browser is silent"
            part = os.read(self._receive, 1 << 16)
            assert part, "the browser is gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        method, params = message.get("method"), message.get("params", {})
        self.events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["exception"].get("description"))
        elif (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")) or (
            method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
        ):
            self.complaints.append(json.dumps(params)[:300])

    def attach(self):
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{part}.enable")

    def open(self, path, scheme="light", width=1160, height=1900):
        """Open a page, which must not complain."""
        self.complaints.clear()
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=Path(path).absolute().as_uri())
        self.wait_for("Page.loadEventFired")
        assert self.complaints == []

    def show(self, html, directory, scheme="light", **size):
        (directory / "page.html").write_text(html)
        self.open(directory / "page.html", scheme, **size)

    def text(self, selector="main"):
        return self.run(f"document.querySelector('{selector}').innerText")

    def run(self, expression):
        """The value of a JavaScript expression."""
        response = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def point_at(self, selector):
        """Move the mouse onto an element."""
        box = self.run(
            f"(() => {{ const n = document.querySelector({selector!r}); n.scrollIntoView();"
            "const b = n.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def picture(self, path):
        data = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]
        Path(path).write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_browser():
    child_in, send = os.pipe()
    receive, child_out = os.pipe()
    with tempfile.TemporaryDirectory() as home:
        command = [
            find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
            "--remote-debugging-pipe", f"--user-data-dir={home}/profile",
        ]  # fmt: skip

        def connect_pipes():  # Chromium reads commands from descriptor 3 and answers on 4
            read, write = os.dup(child_in), os.dup(child_out)
            os.dup2(read, 3)
            os.dup2(write, 4)

        process = subprocess.Popen(
            command, preexec_fn=connect_pipes, close_fds=False, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        try:
            browser = Browser(send, receive)
            browser.attach()
            yield browser
            browser.call("Browser.close", session=False)
        finally:
            process.terminate()
            process.wait(20)
            os.close(send)
            os.close(receive)


if __name__ == "__main__":
    page, out, scheme, width, height = [*sys.argv[1:], "light", "1160", "1900"][:5]
    with open_browser() as camera:
        camera.open(page, scheme, int(width), int(height))
        camera.picture(out)
