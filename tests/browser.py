"""Chromium, driven through its own debugging pipe (Chrome DevTools Protocol): no package, no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0


class Browser:
    """One tab. Messages are JSON that ends in a NUL byte; what the page says meanwhile is in ``said``."""

    def __init__(self, send: int, receive: int) -> None:
        self.send_to, self.receive_from, self.rest, self.number = send, receive, b"", 0
        self.said: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.send_to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, found
                return dict(found["result"])
            self.said.append(found)

    def wait_for(self, event: str) -> None:
        """Return once the page has said ``event``."""
        while not any(each.get("method") == event for each in self.said):
            self.said.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            assert select.select([self.receive_from], [], [], PATIENCE_S)[0], "the browser does not answer"
            self.rest += os.read(self.receive_from, 1 << 20)
        message, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, file: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show the page ``file``."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.said.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What ``expression`` is in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Keys of a keyboard, one after the other."""
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                code = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
                text = {"text": "\r"} if key == "Enter" and kind == "rawKeyDown" else {}
                self.call("Input.dispatchKeyEvent", type="keyDown" if text else kind, key=key, code=key,
                          windowsVirtualKeyCode=code, **text)  # fmt: skip

    def picture(self, whole: bool = False) -> bytes:
        """The screen as PNG; ``whole``: all of the page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser of its own, its profile in ``folder``; it ends with the block."""
    assert PROGRAM is not None
    down, up = os.pipe(), os.pipe()

    def as_three_and_four() -> None:  # the numbers that the browser reads from and writes to
        first, second = os.dup(down[0]), os.dup(up[1])
        os.dup2(first, 3)
        os.dup2(second, 4)

    arguments = [
        PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
        "--disable-background-networking", f"--user-data-dir={folder}", "--hide-scrollbars",
    ]  # fmt: skip
    process = subprocess.Popen(
        arguments, preexec_fn=as_three_and_four, close_fds=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(down[0])
    os.close(up[1])
    browser = None
    try:
        browser = Browser(down[1], up[0])
        yield browser
    finally:
        with contextlib.suppress(AssertionError, OSError):
            if browser is not None:
                browser.session = None
                browser.call("Browser.close")
        process.terminate()
        process.wait(20)
        os.close(down[1])
        os.close(up[0])
