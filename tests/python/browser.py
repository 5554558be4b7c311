"""A headless Chromium, driven by its own protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

# Of Debian, of Ubuntu's runners, and of other distributions.
PROGRAMS = ["chromium-headless-shell", "chromium", "google-chrome-stable", "google-chrome", "chromium-browser"]
TIMEOUT_SECONDS = 300


def find() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page at a time. Messages of its console that are errors or warnings are in `complaints`."""

    def __init__(self, profile: Path):
        (down, self._write), (self._read, up) = os.pipe(), os.pipe()
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe", f"--user-data-dir={profile}",
        ]  # fmt: skip
        # The browser reads descriptor 3 and writes descriptor 4.
        command = ["bash", "-c", f'exec 3<&{down} 4>&{up}; exec "$0" "$@"', find(), *flags, "about:blank"]
        with open(profile.parent / "browser.log", "wb") as log:
            self._process = subprocess.Popen(command, pass_fds=(down, up), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        os.close(down)
        os.close(up)
        self._buffer, self._next, self._session = b"", 0, None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = next(row for row in self._call("Target.getTargets")["targetInfos"] if row["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self._call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _message(self, until: float) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict) -> None:
        more = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = more["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if more["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(more["args"]))
            case "Log.entryAdded" if more["entry"]["level"] in ("error", "warning"):
                self.complaints.append(more["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(more["request"]["url"])

    def _call(self, method: str, **parameters: object) -> dict:
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + TIMEOUT_SECONDS
        while True:
            answer = self._message(until)
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def window(self, width: int, height: int, dark: bool = False) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        self.requests.clear()
        self._call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + TIMEOUT_SECONDS
        while self.value("document.readyState === 'complete' && document.URL !== 'about:blank'") is not True:
            assert time.monotonic() < until, f"{page} does not load"
            time.sleep(0.02)

    def value(self, expression: str):
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A place in an element, by fractions of its size."""
        box = self.value(f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()")
        return box[0] + x * box[2], box[1] + y * box[3]

    def move(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, target: Path, whole: bool = False) -> bytes:
        image = base64.b64decode(self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(image)
        return image
