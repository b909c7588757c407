"""Chromium, driven over a pair of pipes by its DevTools protocol: no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-sync", "--disable-component-update", "--no-proxy-server", "--remote-debugging-pipe"),
)
COMMANDS, ANSWERS = 3, 4
"""File descriptors that Chromium reads from and writes to."""


class Browser:
    """One page."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number = to, back, b"", 0
        self.trouble: list[str] = []
        """What the console called an error, exceptions, and requests for anything but the page itself."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser with all of its processes, so that nothing writes into its profile any more."""
        self._call("Browser.close")

    def open(self, page: Path) -> None:
        """Load a file and wait until its script has set everything up."""
        self.page = page.resolve().as_uri()
        self.call("Page.navigate", url=self.page)
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        """Return when the expression is true."""
        promise = f"new Promise(done => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
        assert self.value(promise) is True

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def show(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether it is dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG of the page or of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a DevTools method, for the page."""
        return self._call(method, session=self._session, **parameters)

    def _call(self, method: str, *, session: str | None = None, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            data = os.read(self._back, 1 << 20)
            assert data, "the browser is gone"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.trouble.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.trouble.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.trouble.append(json.dumps(parameters["args"]))
            case "Page.javascriptDialogOpening":
                self.trouble.append(f"dialog: {parameters['message']}")
            case "Network.requestWillBeSent" if (url := parameters["request"]["url"]) != self.page and not url.startswith("data:"):
                self.trouble.append(f"request: {url}")


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser for the block, which keeps what it keeps in the folder `profile`."""
    assert CHROMIUM is not None
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    redirected = f'exec "$@" {COMMANDS}<&{read_commands} {ANSWERS}>&{write_answers}'
    arguments = ["bash", "-c", redirected, "bash", CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(arguments, pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(read_commands)
    os.close(write_answers)
    try:
        found = Browser(commands, answers)
        yield found
        found.close()
        process.wait(timeout=30)
    finally:
        os.close(commands)
        os.close(answers)
        process.kill()
        process.wait(timeout=30)
