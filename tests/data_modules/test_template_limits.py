"""The time and memory of the checks of a template are limited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import DataError, Origin
from common.untrusted import LimitError, ProcessLimits, run_limited
from data_modules.template import ChatTemplate, RowRefusedError, rendering
from data_modules.types import Conversation, Encoded, Turn
from tests.data_modules.test_template import CHATML

SMALL = ProcessLimits(seconds=1.0, memory_mb=256)
BRIEF = ProcessLimits(seconds=0.2, memory_mb=256)


def test_the_result_and_the_errors_of_another_process() -> None:
    assert run_limited(os.getpid, SMALL) != os.getpid()

    def fail() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="failed"):  # no limit
        run_limited(fail, SMALL)


def test_a_busy_machine_is_waited_for() -> None:
    def wait() -> int:
        time.sleep(1.5)  # as long as others have the processor
        return 3

    assert run_limited(wait, SMALL) == 3


@pytest.mark.parametrize(
    ("work", "limits", "expected"),
    [
        (lambda: 9**99999999, BRIEF, "within 0.2 s"),  # holds the interpreter lock
        (lambda: bytearray(2**40), SMALL, "within 256 MB"),
        (lambda: os.kill(os.getpid(), 9), SMALL, "within 256 MB"),
    ],
)
def test_time_and_memory_limits(
    work: Callable[[], object], limits: ProcessLimits, expected: str
) -> None:
    started = time.perf_counter()
    with pytest.raises(LimitError, match=expected):
        run_limited(work, limits)
    assert time.perf_counter() - started < 50


LOOP = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "limits", "said"),
    [
        (LOOP, BRIEF, "within 0.2 s"),
        ("{% if messages | length > 4 %}{{ 'a' * 10**12 }}{% endif %}", SMALL, "within 256 MB"),
    ],
)
def test_a_template_beyond_the_limits_is_an_error(
    text: str, limits: ProcessLimits, said: str, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], eos="<|im_end|>")
    tokenizer.chat_template = text + CHATML
    with pytest.raises(DataError, match=f"own chat template does not render 28 .* {said}.*=plain"):
        ChatTemplate.resolve(tokenizer, None, limits=limits)


LOOPS = (
    "{% for m in messages %}{% if 'loop' in m.content %}{% for a in range(90000) %}"
    "{% for b in range(90000) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}" + CHATML
)


def test_a_row_on_which_the_template_loops_is_named_and_the_others_are_encoded(
    make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MAX_SLOW", 2)
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], eos="<|im_end|>")
    tokenizer.chat_template = LOOPS
    template = ChatTemplate.resolve(tokenizer, None, limits=ProcessLimits(seconds=3.0))
    template._renderer.seconds = 0.15
    rows = [
        Conversation((Turn("user", text), Turn("assistant", "one")), Origin("rows.json", line))
        for line, text in enumerate(["what?", "loop", "and?", "loop", "loop"], 1)
    ]
    results = list(template.encode(rows))
    assert [isinstance(result, Encoded) for result in results] == [True, False, True, False, False]
    slow, last = results[1], results[4]
    assert isinstance(slow, RowRefusedError) and isinstance(last, RowRefusedError)
    assert str(slow).startswith("the chat template does not render this row within")
    assert str(last).startswith("not rendered: 2 rows before it took the chat template longer")
