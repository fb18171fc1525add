"""The time and memory of the checks of a template are limited."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError, Origin
from common.untrusted import LimitError, ProcessLimits, run_limited
from data_modules.template import ChatTemplate, RowProblem, rendering
from data_modules.types import Conversation, Encoded, Turn
from tests.data_modules.test_template import CHATML

SMALL = ProcessLimits(seconds=1.0, memory_mb=256)


def test_the_result_is_returned_from_another_process() -> None:
    assert run_limited(os.getpid, SMALL) != os.getpid()
    assert run_limited(lambda: ["a"], SMALL) == ["a"]


def test_a_busy_machine_is_waited_for() -> None:
    def wait() -> int:
        time.sleep(1.5)  # as long as others have the processor
        return 3

    assert run_limited(wait, SMALL) == 3


def test_an_error_is_not_taken_for_a_limit() -> None:
    def fail() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="failed"):
        run_limited(fail, SMALL)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: 9**99999999, "within 1 s"),  # holds the interpreter lock
        (lambda: bytearray(2**40), "within 256 MB"),
        (lambda: os.kill(os.getpid(), 9), "within 256 MB"),
    ],
)
def test_time_and_memory_limits(work: Callable[[], object], expected: str) -> None:
    started = time.perf_counter()
    with pytest.raises(LimitError, match=expected):
        run_limited(work, SMALL)
    assert time.perf_counter() - started < 50


def test_a_template_beyond_the_memory_is_an_error(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], eos="<|im_end|>")
    text = "{% if messages | length > 4 %}{{ 'a' * 10**12 }}{% endif %}" + CHATML
    tokenizer.chat_template = text
    with pytest.raises(DataError, match="the tokenizer's own chat template does not render 28"):
        ChatTemplate.resolve(tokenizer, None, limits=SMALL)


LOOPS = (
    "{% for m in messages %}{% if 'loop' in m.content %}{% for a in range(90000) %}"
    "{% for b in range(90000) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}" + CHATML
)


def test_template_that_never_ends_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "slow.jinja"
    loop = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    file.write_text(loop + CHATML)
    with pytest.raises(DataError, match=r"slow.jinja does not render .* within 0.5 s.*=plain"):
        ChatTemplate.resolve(tokenizer, str(file), limits=ProcessLimits(seconds=0.5))


def test_a_row_on_which_the_template_loops_is_named_and_the_others_are_encoded(
    make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MAX_SLOW", 2)
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], eos="<|im_end|>")
    tokenizer.chat_template = LOOPS
    template = ChatTemplate.resolve(tokenizer, None, limits=ProcessLimits(seconds=3.0))
    template._renderer.seconds = 0.3
    rows = [
        Conversation((Turn("user", text), Turn("assistant", "one")), Origin("rows.json", line))
        for line, text in enumerate(["what?", "loop", "and?", "loop", "loop"], 1)
    ]
    started = time.perf_counter()
    results = list(template.encode(rows))
    assert time.perf_counter() - started < 50
    assert [isinstance(result, Encoded) for result in results] == [True, False, True, False, False]
    slow, last = results[1], results[4]
    assert isinstance(slow, RowProblem) and isinstance(last, RowProblem)
    assert slow.problem.startswith("rows.json:2 the chat template does not render this row within")
    assert last.reason.startswith("not rendered: 2 rows before it took the chat template longer")
