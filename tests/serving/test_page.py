"""The chat page in a headless Chromium: streaming, buttons, and no HTML from the model.

Chromium is controlled through chromedriver's HTTP API, without a Python package: `apt-get install
chromium chromium-driver`; the tests are skipped without them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_for
from tests.serving.running import ScriptedResponder, serving

DRIVER = shutil.which("chromedriver")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="needs chromium and chromedriver"
)


class Browser:
    """One browser window."""

    def __init__(self, driver: str, folder: Path) -> None:
        self._driver = driver
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += ["--window-size=1280,900", f"--user-data-dir={folder}"]
        options = {"binary": BROWSER, "args": arguments}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "", {"capabilities": {"alwaysMatch": capabilities}})[
            "sessionId"
        ]
        self._session = f"/{session}"

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

    def console_messages(self) -> list[str]:
        """Return the messages of the console: script errors and policy violations."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._send("DELETE", self._session)


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start a driver with one window; both are closed on exit."""
    assert DRIVER is not None
    process = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "started successfully on port" in line)
        port = line.rstrip(".\n").rsplit(" ", 1)[1]
        browser = Browser(f"http://127.0.0.1:{port}", folder)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait(20)


HOSTILE = (
    "<script>document.title = 'stolen'</script>",
    "<img src=x onerror=\"document.title='stolen'\">",
    "</div><iframe src='javascript:alert(1)'></iframe>\n",
    "[a](javascript:alert(1)) **not bold** &lt;b&gt;",
)
TEXTS = "return [...document.querySelectorAll('.turn')].map(t => t.className + '|' + t.textContent)"


@needs_browser
@pytest.mark.slow
def test_the_page_streams_answers_as_text_stops_them_and_requires_a_key(tmp_path: Path) -> None:
    resume = threading.Event()
    responder = ScriptedResponder(
        *HOSTILE, " end", before=lambda: responder.num_generated < 4 or resume.wait(20)
    )
    with serving(responder, key="s3cret") as address, browsing(tmp_path / "profile") as browser:
        browser.open(address + "/")
        wait_for(lambda: browser.run("return !document.getElementById('key-form').hidden"))
        assert "Bearer KEY" in browser.run(TEXTS)[-1]
        browser.type_into("#key", "s3cret\ue007")
        wait_for(lambda: browser.run("return document.title") == "tiny")
        browser.type_into("#question", "go")
        browser.click("#send")
        wait_for(lambda: "".join(HOSTILE) in browser.run(TEXTS)[-1])  # the rest is held back
        browser.click("#send")
        wait_for(lambda: browser.run(TEXTS)[-1] == "turn note|stopped")
        resume.set()
        assert responder.has_ended.wait(10)
        browser.click("#reset")
        assert browser.run(TEXTS) == []
        responder.num_generated, responder.num_turns = 0, []
        browser.type_into("#question", "Are you <b>bold</b>?\ue007")
        answer = "".join(responder.pieces)
        wait_for(lambda: browser.run(TEXTS)[-1:] == [f"turn assistant|{answer}"])
        assert browser.run(TEXTS)[0] == "turn user|Are you <b>bold</b>?"
        assert responder.num_turns == [1]
        num_elements = "return document.querySelectorAll('.turn *, img, iframe').length"
        assert browser.run(num_elements) == 0 and browser.run("return document.title") == "tiny"
        assert [line for line in browser.console_messages() if "401" not in line] == []
