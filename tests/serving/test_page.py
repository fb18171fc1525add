"""The chat page in a headless Chromium: streaming, buttons, and no HTML from the model."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.serving.browser import browsing, needs_browser
from tests.serving.running import ScriptedResponder, serving, wait_for

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
    pieces, resume = (*HOSTILE, *(f" word{n}" for n in range(200))), threading.Event()
    responder = ScriptedResponder(
        *pieces, before=lambda: responder.num_generated < 4 or resume.wait(20)
    )
    with serving(responder) as address, browsing(tmp_path / "profile", width) as browser:
        browser.open(address + "/")
        wait_for(lambda: browser.run("return document.title") == "tiny")
        browser.type_into("#question", "Are you <b>bold</b>?\ue007")
        wait_for(lambda: "".join(HOSTILE) in browser.run(TEXTS)[-1])  # the rest is held back
        assert browser.run("return document.getElementById('send').textContent") == "Stop"
        resume.set()
        wait_for(
            lambda: browser.run("return document.getElementById('send').textContent") == "Send"
        )
        assert browser.run(TEXTS) == [
            "turn user|Are you <b>bold</b>?",
            "turn assistant|" + "".join(pieces),
        ]
        num_elements = "return document.querySelectorAll('.turn *, img, iframe').length"
        assert browser.run(num_elements) == 0 and browser.run("return document.title") == "tiny"
        overflow = (
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert browser.run(overflow) <= 0
        assert browser.console_messages() == []
        browser.screenshot(tmp_path / f"page-{width}.png")


@needs_browser
@pytest.mark.slow
def test_the_page_stops_an_answer_starts_a_new_conversation_and_requires_a_key(
    tmp_path: Path,
) -> None:
    resume = threading.Event()
    responder = ScriptedResponder(
        "one", " two", before=lambda: responder.num_generated < 1 or resume.wait(20)
    )
    with serving(responder, key="s3cret") as address, browsing(tmp_path / "profile") as browser:
        browser.open(address + "/")
        wait_for(lambda: browser.run("return !document.getElementById('key-form').hidden"))
        assert "Bearer KEY" in browser.run(TEXTS)[-1]
        browser.type_into("#key", "s3cret\ue007")
        wait_for(lambda: browser.run("return document.title") == "tiny")
        browser.type_into("#question", "go")
        browser.click("#send")
        wait_for(lambda: browser.run(TEXTS)[-1] == "turn assistant|one")
        browser.click("#send")
        wait_for(lambda: browser.run(TEXTS)[-1] == "turn note|stopped")
        resume.set()
        assert responder.has_ended.wait(10)
        browser.click("#reset")
        assert browser.run(TEXTS) == []
        responder.num_generated, responder.num_turns = 0, []
        resume.clear()
        browser.type_into("#question", "first\ue007")
        wait_for(lambda: browser.run(TEXTS)[-1:] == ["turn assistant|one"])
        browser.click("#reset")  # while the answer streams
        resume.set()
        browser.type_into("#question", "second\ue007")
        wait_for(lambda: browser.run(TEXTS)[-1:] == ["turn assistant|one two"])
        assert browser.run(TEXTS)[0] == "turn user|second" and responder.num_turns == [1, 1]
        assert [line for line in browser.console_messages() if "401" not in line] == []
