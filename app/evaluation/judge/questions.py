"""Read multi-turn questions and their reference answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from data_modules import open_regular

QUESTIONS_FILE, REFERENCE_FILES = "question.jsonl", "reference_answer*"
MAX_BYTES = 2**26
"""largest file of questions in bytes"""
MAX_LISTED = 20
"""problems listed in an error message"""
NEED_REFERENCES = ("math", "reasoning", "coding")
"""categories in which a judge is unreliable without a reference answer"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A question of one or more turns; `reference` has one answer for each turn, or is empty."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()


def read_questions(
    path: Path, references: Path | None = None, max_questions: int | None = None
) -> list[Question]:
    """Read lines in MT-bench's format: `{question_id, category, turns: [...], reference: [...]}`.

    A folder has the questions in question.jsonl and reference answers in reference_answer*. Raises
    UserError with all problems by file and line.
    """
    if path.is_dir():
        folder, path = path, path / QUESTIONS_FILE
        files = sorted(file for file in folder.glob(REFERENCE_FILES) if file.is_file())
        files += sorted(folder.glob("reference_answer/*.jsonl"))
        references = references or (files[0] if files else None)
    problems: list[str] = []
    questions: dict[str, Question] = {}
    for where, row in _rows(path, problems):
        question = _parse_question(row, where, problems)
        if question and question.id in questions:
            problems.append(f"{where} duplicate question_id {question.id}")
        elif question:
            questions[question.id] = question
    if references is not None:
        for where, row in _rows(references, problems):
            _add_reference(row, where, questions, problems)
    if not questions and not problems:
        problems.append(f"{path}: contains no questions")
    if problems:
        more = len(problems) - MAX_LISTED
        raise UserError(problems[:MAX_LISTED] + [f"and {more} more"] * (more > 0))
    chosen = list(questions.values())[:max_questions]
    without = [q.id for q in chosen if q.category in NEED_REFERENCES and not q.reference]
    if without:
        log.warning(
            "judge: %d questions of %s have no reference answer (question_id %s ...); without one, "
            "a judge is often wrong in these categories: type evaluation.judge.references=FILE",
            len(without),
            ", ".join(NEED_REFERENCES),
            without[0],
        )
    return chosen


def _rows(file: Path, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the JSON objects of a file, each with its `file:line`."""
    with open_regular(file) as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(
            f"{file}: larger than {MAX_BYTES // 2**20} MiB, the limit for a file of questions"
        )
    for number, line in enumerate(data.split(b"\n"), 1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            problems.append(f"{where} is not JSON: {error}")
            continue
        if isinstance(row, dict):
            yield where, row
        else:
            problems.append(f"{where} is a JSON {type(row).__name__}; expected an object")


def _parse_question(row: Mapping[str, Any], where: str, problems: list[str]) -> Question | None:
    missing = [name for name in ("question_id", "turns") if name not in row]
    if missing:
        problems.append(f"{where} has no {' and no '.join(missing)}; found {sorted(row)}")
        return None
    turns = _texts(row["turns"])
    if not turns or not all(map(str.strip, turns)):
        problems.append(f"{where} turns: expected a list of non-empty questions")
        return None
    reference = _texts(row.get("reference") or [])
    if reference is None or len(reference) not in (0, len(turns)):
        problems.append(f"{where} reference: expected {len(turns)} answers, one for each turn")
        return None
    category = str(row.get("category") or "general")
    return Question(str(row["question_id"]), category, turns, reference)


def _texts(value: Any) -> tuple[str, ...] | None:
    is_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return tuple(value) if is_list else None


def _add_reference(
    row: Mapping[str, Any], where: str, questions: dict[str, Question], problems: list[str]
) -> None:
    """Add the answers of MT-bench's `{question_id, choices: [{turns: [...]}]}` to its question."""
    choices = row.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    turns = _texts(first.get("turns")) if isinstance(first, dict) else None
    question = questions.get(str(row.get("question_id")))
    if "question_id" not in row or turns is None:
        problems.append(
            f"{where} is not a reference answer: expected question_id and choices[0].turns, found "
            f"{sorted(row)}"
        )
    elif question and len(turns) != len(question.turns):
        problems.append(
            f"{where} has {len(turns)} answers, but question {question.id} has "
            f"{len(question.turns)} turns"
        )
    elif question:
        questions[question.id] = replace(question, reference=turns)
