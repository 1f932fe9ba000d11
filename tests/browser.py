"""A real Chromium without a window, driven over its DevTools pipe: no driver program, no port, no package."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
_PATIENCE_S = 60.0


class Browser:
    """One page. Whatever it logs as an error, throws or asks of a network is kept in `complaints` and `requests`."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Away from 3 and 4, which the browser reads and writes.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        log = folder / "chromium.log"
        actions += [(os.POSIX_SPAWN_OPEN, at, str(log), os.O_WRONLY | os.O_CREAT, 0o600) for at in (1, 2)]
        argv = [program, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._pid = os.posix_spawn(
            program, argv, {**os.environ, "HOME": str(folder)}, file_actions=actions, setsid=True
        )
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._buffer, self._last_id = b"", 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    # --- the pipe ---

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._receive(until_s)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]
            self._note(answer)

    def _receive(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    # --- what a person does ---

    def open(self, url: str) -> None:
        self._send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Until an expression is true."""
        until_s = time.monotonic() + _PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < until_s, f"never became true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def look_like(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def without_script(self) -> None:
        self._send("Emulation.setScriptExecutionDisabled", value=True)

    def shoot(self, path: Path, whole: bool = True) -> None:
        data = self._send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def names(self) -> list[tuple[str, str]]:
        """What a screen reader is told: (role, name) of everything on the page."""
        nodes = self._send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
