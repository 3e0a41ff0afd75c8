"""Headless Chromium, driven through its debugging pipe with the standard library only."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE_S = 30.0
PHONE = (390, 844)
DESKTOP = (1280, 900)


def find_browser() -> str | None:
    """Return ``RLVCR_BROWSER``, or the first Chromium on the path."""
    named = os.environ.get("RLVCR_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Context manager for one page of a Chromium without window and network."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(
            prefix="rlvcr-browser-", ignore_cleanup_errors=True
        )
        self._read, answers = os.pipe()
        commands, self._write = os.pipe()
        # The browser reads from descriptor 3 and writes to descriptor 4. Our descriptors must
        # differ.
        child_descriptors = [
            fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (commands, answers)
        ]
        shell = f'exec "$0" "$@" 3<&{child_descriptors[0]} 4>&{child_descriptors[1]}'
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        profile = f"--user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags, profile, "about:blank"],
            pass_fds=child_descriptors,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (commands, answers, *child_descriptors):
            os.close(descriptor)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools command.

        Raises ``RuntimeError`` for an error and ``TimeoutError`` after ``DEADLINE_S``.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") != self._number:
                continue  # an event
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            return answer["result"]

    def _message(self) -> bytes:
        end = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser sent nothing for {DEADLINE_S:.0f} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return message

    def show(self, address: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Open ``address`` in a window of ``size`` pixels and wait until the page is ready."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # Without it, an address that differs only in its fragment is not loaded again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready !== undefined")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, with promises awaited.

        Raises ``RuntimeError`` with the JavaScript error.
        """
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return when a JavaScript condition holds; ``TimeoutError`` after ``DEADLINE_S``."""
        end = time.monotonic() + DEADLINE_S
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"the condition did not become true in the page: {condition}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key by its name, for example ``j``, ``Enter`` or ``ArrowRight``."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        down: dict[str, Any] = {
            "type": "keyDown" if text else "rawKeyDown",
            "key": key,
            "text": text,
        }
        if key == "Enter":
            down["windowsVirtualKeyCode"] = 13
        self.call("Input.dispatchKeyEvent", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, selector: str, right: float = 0.5, down: float = 0.5) -> None:
        """Click the first element of ``selector`` at these shares of its width and height."""
        box = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        position = {"x": box[0] + right * box[2], "y": box[1] + down * box[3]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **position)
        for kind in ("mousePressed", "mouseReleased"):
            press = {"type": kind, "button": "left", "clickCount": 1, **position}
            self.call("Input.dispatchMouseEvent", **press)

    def screenshot(self, path: Path) -> None:
        """Write the visible part of the page to ``path`` as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))
