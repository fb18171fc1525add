"""The page in a real headless Chromium: it streams, and what a model writes stays text."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.serving.browser import browsing, needs_browser
from tests.serving.running import Told, serving, wait_for

HOSTILE = (
    "<script>document.title = 'stolen'</script>",
    "<img src=x onerror=\"document.title='stolen'\">",
    "</div><iframe src='javascript:alert(1)'></iframe>\n",
    "[a](javascript:alert(1)) **not bold** &lt;b&gt;",
)
TEXTS = "return [...document.querySelectorAll('.turn')].map(t => t.className + '|' + t.textContent)"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_streams_answers_and_shows_them_as_text(width: int, tmp_path: Path) -> None:
    pieces, goes_on = (*HOSTILE, *(f" word{n}" for n in range(200))), threading.Event()
    told = Told(*pieces, before=lambda: told.num_given < 4 or goes_on.wait(20))
    with serving(told) as address, browsing(tmp_path / "profile", width) as browser:
        browser.open(address + "/")
        wait_for(lambda: browser.run("return document.title") == "tiny")
        browser.type_into("#question", "Are you <b>bold</b>?\ue007")
        wait_for(lambda: "".join(HOSTILE) in browser.run(TEXTS)[-1])  # the rest is still to come
        assert browser.run("return document.getElementById('send').textContent") == "Stop"
        goes_on.set()
        wait_for(
            lambda: browser.run("return document.getElementById('send').textContent") == "Send"
        )
        assert browser.run(TEXTS) == [
            "turn user|Are you <b>bold</b>?",
            "turn assistant|" + "".join(pieces),
        ]
        inside = "return document.querySelectorAll('.turn *, img, iframe').length"
        assert browser.run(inside) == 0 and browser.run("return document.title") == "tiny"
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.run(wide) <= 0
        assert browser.complaints() == []
        browser.screenshot(tmp_path / f"page-{width}.png")


@needs_browser
@pytest.mark.slow
def test_the_page_stops_an_answer_begins_anew_and_asks_for_a_key(tmp_path: Path) -> None:
    goes_on = threading.Event()
    told = Told("one", " two", before=lambda: told.num_given < 1 or goes_on.wait(20))
    with serving(told, key="s3cret") as address, browsing(tmp_path / "profile") as browser:
        browser.open(address + "/")
        wait_for(lambda: browser.run("return !document.getElementById('enter').hidden"))
        assert "Bearer KEY" in browser.run(TEXTS)[-1]
        browser.type_into("#key", "s3cret\ue007")
        wait_for(lambda: browser.run("return document.title") == "tiny")
        browser.type_into("#question", "go")
        browser.click("#send")
        wait_for(lambda: browser.run(TEXTS)[-1] == "turn assistant|one")
        browser.click("#send")
        wait_for(lambda: browser.run(TEXTS)[-1] == "turn note|stopped")
        goes_on.set()
        assert told.has_ended.wait(10)
        browser.click("#reset")
        assert browser.run(TEXTS) == []
        told.num_given, told.num_turns = 0, []
        goes_on.clear()
        browser.type_into("#question", "first\ue007")
        wait_for(lambda: browser.run(TEXTS)[-1:] == ["turn assistant|one"])
        browser.click("#reset")  # while it is answered
        goes_on.set()
        browser.type_into("#question", "second\ue007")
        wait_for(lambda: browser.run(TEXTS)[-1:] == ["turn assistant|one two"])
        assert browser.run(TEXTS)[0] == "turn user|second" and told.num_turns == [1, 1]
        assert [line for line in browser.complaints() if "401" not in line] == []
