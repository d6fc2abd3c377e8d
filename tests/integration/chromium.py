"""Drive a headless Chromium over its debugging pipe: enough of the protocol for page tests, no extra package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--disable-dev-shm-usage",
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """Path of a Chromium or Chrome on this machine, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One browser with one page. `profile` is a fresh empty folder. Use as a context manager."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False):
        binary = find()
        if binary is None:
            raise RuntimeError("no chromium on this machine")
        read_end, write_end = self._pipes()
        self._next = 0
        self._buffer = b""
        self._session: str | None = None
        self.exceptions: list[str] = []
        self.requests: list[str] = []
        self._read, self._write = read_end[0], write_end[1]

        def set_pipes() -> None:
            os.dup2(write_end[0], 3)
            os.dup2(read_end[1], 4)

        self.process = subprocess.Popen(
            [binary, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=set_pipes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(write_end[0])
        os.close(read_end[1])
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)
        self.theme(dark)

    @staticmethod
    def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
        """Two pipes (from the browser, to the browser) whose numbers stay clear of 3 and 4."""
        ends = []
        for _ in range(2):
            low = os.pipe()
            ends.append(tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in low))
            for fd in low:
                os.close(fd)
        return ends[0], ends[1]

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, timeout: float = 60, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; RuntimeError if the browser refuses it."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser did not answer")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise RuntimeError(f"the browser ended with {self.process.poll()}")
            self._buffer += got
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.exceptions.append(details.get("exception", {}).get("description") or details.get("text", ""))
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def size(self, width: int, height: int) -> None:
        """Set the window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def theme(self, dark: bool) -> None:
        """Pretend that the system prefers dark or light."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, file: Path | str, fragment: str = "", timeout: float = 30) -> None:
        """Load a file or an address and wait until the page says it is ready."""
        self.call("Page.navigate", url="about:blank")
        self.requests.clear()
        self.call("Page.navigate", url=(file if isinstance(file, str) else file.resolve().as_uri()) + fragment)
        self.wait("document.documentElement?.dataset.ready === '1'", timeout)

    def wait(self, condition: str, timeout: float = 15) -> None:
        """Wait until a JavaScript expression is true; AssertionError with what the page reported if it never is."""
        deadline = time.monotonic() + timeout
        while not self.eval(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                errors = self.eval("document.documentElement.dataset.errors || ''")
                raise AssertionError(f"never true: {condition}; errors: {errors or self.exceptions}")
            time.sleep(0.05)

    def eval(self, expression: str) -> Any:
        """Value of a JavaScript expression (a promise is awaited)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def key(self, name: str, code: int = 0) -> None:
        """Press and release a key such as ArrowRight or Enter."""
        text = {"text": "\r"} if name == "Enter" else {"text": name} if len(name) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **more)

    def screenshot(self, target: Path, whole: bool = False) -> Path:
        """Save a PNG of the window, or of the whole page."""
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        else:
            shot = self.call("Page.captureScreenshot", format="png")
        target.write_bytes(base64.b64decode(shot["data"]))
        return target
