"""A headless Chromium, controlled through chromedriver's HTTP API without a Python package.

`apt-get install chromium chromium-driver`; tests that need it are skipped if it is not installed.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DRIVER = shutil.which("chromedriver")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="needs chromium and chromedriver"
)
OUTSIDE = """
const texts = "h1, h2, h3, p, li, td, th, pre, figcaption, svg text";
const outside = [...document.querySelectorAll(texts)]
  .filter(one => { const box = one.getBoundingClientRect();
    return box.width && (box.left < 0 || box.right > document.documentElement.clientWidth + 1); })
  .map(one => one.textContent);
const cut = [...document.querySelectorAll("*")].filter(one =>
  one.scrollWidth > one.clientWidth + 1 && one.clientWidth
    && getComputedStyle(one).overflowX != "visible");
return {outside, cut: cut.length,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  charts: document.querySelectorAll("svg polyline").length, images: document.images.length};
"""
"""what stands outside of the window or is cut, and how many charts and images a page has"""


class Browser:
    """One browser window."""

    def __init__(self, driver: str, width: int, folder: Path) -> None:
        self._driver = driver
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += [f"--window-size={width},900", f"--user-data-dir={folder}"]
        options = {"binary": BROWSER, "args": arguments}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "", {"capabilities": {"alwaysMatch": capabilities}})[
            "sessionId"
        ]
        self._session = f"/{session}"
        # A headless window is at least 500 pixels wide; the emulated screen may be narrower.
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._post("/goog/cdp/execute", command)

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"{self._driver}/session{path}"
        request = urllib.request.Request(url, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]

    def _post(self, path: str, body: Any) -> Any:
        return self._send("POST", self._session + path, body)

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a function body in the page; the page stays under its Content-Security-Policy."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def type_into(self, css: str, text: str) -> None:
        found = self._post("/element", {"using": "css selector", "value": css})
        (element,) = found.values()
        self._post(f"/element/{element}/value", {"text": text})

    def click(self, css: str) -> None:
        found = self._post("/element", {"using": "css selector", "value": css})
        (element,) = found.values()
        self._post(f"/element/{element}/click", {})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._send("GET", f"{self._session}/screenshot")))

    def console_messages(self) -> list[str]:
        """Return the messages of the console: script errors and policy violations."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._send("DELETE", self._session)


@contextmanager
def browsing(folder: Path, width: int = 1280) -> Iterator[Browser]:
    """Start a driver with one window; both are closed on exit."""
    assert DRIVER is not None
    process = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "started successfully on port" in line)
        port = line.rstrip(".\n").rsplit(" ", 1)[1]
        browser = Browser(f"http://127.0.0.1:{port}", width, folder)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait(20)
