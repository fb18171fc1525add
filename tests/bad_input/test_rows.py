"""Rows as people have them, with a mistake: named with file and line, or put aside; mended, fine.

Each case stands on line 3 of a file of good rows. Its twin differs in the mistake alone. Here are
cases of each stage of a row; `tests/data_modules/test_format*.py` have all that a format refuses.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.bad_input.prepared import prepare, problems_of, quarantined

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
)


def chat(*turns: Any, **columns: Any) -> str:
    """Write a row of messages; a turn is (role, content) or the whole of it."""
    messages = [t if isinstance(t, dict) else {"role": t[0], "content": t[1]} for t in turns]
    return json.dumps({"messages": messages, **columns})


ASK, SAY = ("user", "what is it?"), ("assistant", "one")
GOOD = chat(ASK, SAY)


class Case(NamedTuple):
    """Hold a row, what is said of it behind its file's name, and the row without the mistake."""

    bad: str | bytes
    said: str
    twin: str | bytes
    settings: dict[str, Any] = {}  # noqa: RUF012  never changed


LONG = chat(ASK, ("assistant", "one " * 400))
CASES = {
    "D1 invalid JSON": Case(
        '{"messages": [}', r":3:15 invalid JSON: Expecting value, near `{\"messages\": \[}`$", GOOD
    ),
    "D4 wrong key": Case(
        GOOD.replace('"messages"', '"message"'),
        r":3 missing 'messages'; found \['message'\]; did you mean 'messages' instead of "
        r"'message'\? \(3 rows are of format messages, first data.jsonl:1\)$",
        GOOD,
    ),
    "D10 role": Case(
        chat(("usr", "q"), SAY),
        r":3 messages\[0\] has role 'usr'; known roles are system, developer, user, human, .*tool",
        chat(("human", "q"), SAY),
    ),
    "D13 empty answer": Case(
        chat(ASK, ("assistant", " \n")),
        r":3 messages\[1\] is an empty answer: there is nothing to train on; drop the row, or set",
        GOOD,
    ),
    "D17 huge": Case(
        LONG,
        rf":3 row of {len(LONG):,} bytes; data.max_row_bytes is 1,000; raise it, or remove",
        LONG[:800] + LONG[-5:],
        {"max_row_bytes": 1000},
    ),
    "D18 latin-1": Case(
        chat(ASK, ("assistant", "caf_")).replace("_", "\xe9").encode("latin-1"),
        r":3 byte 0xE9 at column 96 is not UTF-8 \(latin-1\?\); save the file as UTF-8",
        chat(ASK, ("assistant", "caf_")).replace("_", "\xe9").encode(),
    ),
    "D26 control token": Case(
        chat(("user", "what is <|im_end|>?"), SAY),
        r":3 its text contains the control token `<\|im_end\|>`; remove it, or set "
        r"data.control_tokens=escape",
        chat(("user", "what is |im_end|?"), SAY),
        {"control_tokens": "error"},
    ),
    "D27 NUL": Case(
        chat(("user", "a\0b"), SAY),
        r":3 messages\[0\].content has a control character, '\\x00', at character 2; remove it",
        chat(("user", "a\tb"), SAY),
    ),
    "refused by the template": Case(
        chat(("system", "be kind"), ASK, SAY),
        ":3 .*no system here",
        GOOD,
        {"chat_template": "own", "unsupported_turns": "refuse"},
    ),
}


def write(folder: Path, *lines: str | bytes) -> Path:
    """Write a file of these lines."""
    file = folder / "data.jsonl"
    raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
    file.write_bytes(b"".join(line + b"\n" for line in raw))
    return file


@pytest.mark.parametrize("name", CASES)
def test_a_bad_row_is_named_or_quarantined(name: str, tmp_path: Path, base: Any) -> None:
    case = CASES[name]
    settings = dict(case.settings)
    if "chat_template" in settings:
        settings["chat_template"] = str(tmp_path / "own.jinja")
        (tmp_path / "own.jinja").write_text(NO_SYSTEM)
    file = write(tmp_path, GOOD, GOOD, case.bad, GOOD)
    problems = problems_of(file, base, **settings)
    assert len(problems) == 1
    assert re.match(f"data.jsonl{case.said}", problems[0]), problems[0]

    rest = prepare(file, base, **settings, on_bad_row="quarantine")
    (row,) = quarantined(rest)
    assert row["origin"] == f"{file}:3"
    assert problems[0].startswith(row["problem"].replace(f"{tmp_path}/", ""))
    assert row["row"]
    assert (rest.counts.kept, rest.counts.rejected) == (3, 1)
    assert rest.store.lines.tolist() == [1, 2, 4]

    twin = prepare(write(tmp_path, GOOD, GOOD, case.twin, GOOD), base, **settings)
    assert (twin.counts.kept, twin.counts.rejected) == (4, 0)


def test_a_table_of_columns_over_several_lines_is_named(tmp_path: Path, base: Any) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"instruction": ["p", "q"], "output": ["a", "b"]}, indent=2))
    (problem,) = problems_of(file, base)
    assert problem.endswith("one row a line; 'instruction' and the others are columns of a table")


def test_empty_answers_can_be_dropped_and_counted(tmp_path: Path, base: Any) -> None:
    file = write(tmp_path, GOOD, chat(ASK, ("assistant", " ")), GOOD)
    counts = prepare(file, base, drop_empty=True).counts
    assert (counts.rows, counts.kept, counts.empty) == (3, 2, 1)
    assert counts.empty_origins == [f"{file}:2"]
    (problem,) = problems_of(file, base)
    assert problem.endswith("with data.drop_empty=true or data.on_bad_row=quarantine")


def test_schemas_in_one_file_are_counted(tmp_path: Path, base: Any) -> None:
    alpaca = '{"instruction": "q", "output": "one"}'
    pair = '{"prompt": "q", "completion": "one"}'
    file = write(tmp_path, GOOD, alpaca, alpaca, GOOD, pair, GOOD)
    assert problems_of(file, base) == [
        "data.jsonl:2 missing 'messages'; found ['instruction', 'output'] (1 more rows have these "
        "columns; 3 rows are of format messages, first data.jsonl:1)",
        "data.jsonl:5 missing 'messages'; found ['prompt', 'completion'] (3 rows are of format "
        "messages, first data.jsonl:1)",
    ]
    rest = prepare(file, base, on_bad_row="quarantine")
    assert [row["origin"][-2:] for row in quarantined(rest)] == [":2", ":3", ":5"]
    assert json.loads(quarantined(rest)[0]["row"]) == json.loads(alpaca)
    assert prepare(write(tmp_path, alpaca, alpaca), base).format == "alpaca"


def test_a_first_row_like_no_other_hides_no_format(tmp_path: Path, base: Any) -> None:
    bad = GOOD.replace('"messages"', '"msgs"')
    file = write(tmp_path, bad, GOOD, GOOD)
    (problem,) = problems_of(file, base)
    assert problem.startswith("data.jsonl:1 missing 'messages'; found ['msgs']")
    rest = prepare(file, base, on_bad_row="quarantine")
    assert (rest.format, rest.counts.kept, rest.counts.rejected) == ("messages", 2, 1)
    # Most rows are of no format: then one row that is of some says nothing of the file.
    (problem,) = problems_of(write(tmp_path, bad, bad, bad, GOOD), base)
    assert "data.jsonl:1 columns ['msgs']: format not recognized; set" in problem


def test_all_problems_of_a_file_come_together(tmp_path: Path, base: Any) -> None:
    # Rows with the same other columns are counted as one problem.
    cases = [each for name, each in CASES.items() if not each.settings and name[:2] != "D4"] * 8
    file = write(tmp_path, GOOD, *(case.bad for case in cases))
    problems = problems_of(file, base)
    assert len(problems) == 20
    assert problems[-1] == f"... and {len(cases) - 19} more like these"
    for line, (problem, case) in enumerate(zip(problems[:2], cases[:2], strict=True), 2):
        assert re.match("data.jsonl" + case.said.replace(":3", f":{line}"), problem)
    rest = prepare(file, base, on_bad_row="quarantine")
    assert (rest.counts.kept, rest.counts.rejected) == (1, len(cases))
    lines = [int(row["origin"].rpartition(":")[2]) for row in quarantined(rest)]
    assert lines == list(range(2, len(cases) + 2))


def test_nothing_but_bad_rows_is_an_error_in_a_quarantine_too(tmp_path: Path, base: Any) -> None:
    file = write(tmp_path, *[chat(("usr", "q"), SAY)] * 7)
    problems = problems_of(file, base, on_bad_row="quarantine")
    assert problems[0] == "data.jsonl: all 7 rows are bad; the first:"
    assert [problem[:20] for problem in problems[1:]] == [
        f"data.jsonl:{line} message"[:20] for line in range(1, 6)
    ]
    # What only the template refuses counts as well.
    file = write(tmp_path, chat(("user", "<|im_end|>"), SAY))
    settings = {"on_bad_row": "quarantine", "control_tokens": "error"}
    assert "all 1 rows are bad" in problems_of(file, base, **settings)[0]
