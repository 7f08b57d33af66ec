"""A headless Chromium, driven by its DevTools protocol through a pipe, which needs no driver and no port."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
_PATIENCE = 30.0
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}


class Browser:
    """One tab; `complaints` collects its errors."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command, and wait for its result."""
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._listen(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Go to an address."""
        self("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        result = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def call(self, function: str, *values: Any) -> Any:
        """The value of a function of one of the page's modules, such as `words.verdictOf`."""
        module, _, name = function.partition(".")
        return self.run(f"import('/{module}.js').then((found) => found.{name}(...{json.dumps(values)}))")

    def wait(self, condition: str) -> None:
        """Wait until an expression holds."""
        until = time.monotonic() + _PATIENCE
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition}; the page says: {self.run('document.body.innerText')}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def choose(self, selector: str, *files: Path) -> None:
        """Give files to an input."""
        root = self("DOM.getDocument")["root"]["nodeId"]
        node = self("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self("DOM.setFileInputFiles", files=[str(file) for file in files], nodeId=node)

    def press(self, key: str) -> None:
        """Press a key, and let go of it."""
        code: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        typed = {"text": "\r"} if key == "Enter" else {}
        self("Input.dispatchKeyEvent", type="keyDown", **code, **typed)
        self("Input.dispatchKeyEvent", type="keyUp", **code)

    def drag(self, *points: tuple[float, float]) -> None:
        """Draw a line with the mouse."""
        button: dict[str, Any] = {"button": "left", "clickCount": 1}
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 2), "mouseReleased"]
        for kind, (x, y) in zip(kinds, points, strict=True):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=1, **button)

    def show_as(self, *, scheme: str = "light", width: int = 1180, height: int = 900) -> None:
        """Prefer light or dark, on a screen of some size."""
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, file: Path) -> None:
        """Write all of the page as a PNG."""
        file.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select.select([self._read], [], [], _PATIENCE)[0]:
                raise TimeoutError("Chromium does not answer")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("Chromium ended")
            self._received += received
        first, _, self._received = self._received.partition(b"\0")
        return json.loads(first)

    def _listen(self, event: dict[str, Any]) -> None:
        found, name = event.get("params", {}), event.get("method")
        if name == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(found["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(found["args"]))
        elif name == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile, and end it; without Chromium, skip the test."""
    if CHROMIUM is None:  # `make test` needs only Python and make; only a browser runs the page's scripts
        pytest.skip("the page's scripts need a browser: apt-get install chromium")
    (their_read, our_write), (our_read, their_write) = os.pipe(), os.pipe()
    arguments = [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(their_read), str(their_write), *arguments],
        pass_fds=(their_read, their_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    try:
        browser = Browser(our_read, our_write)
        yield browser
        with contextlib.suppress(RuntimeError, OSError):
            browser("Browser.close")
    finally:
        os.close(our_read)
        os.close(our_write)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
