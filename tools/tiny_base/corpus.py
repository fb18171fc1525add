"""Generate the raw text that a tiny base is trained on: no chat, no question, no instruction.

A document is a list of segments. What follows from the text before it (an answer) weighs 1, what
does not (facts drawn at random, fillers) weighs little: a small model then spends its capacity on
the skill, not on guessing names. No wording of a tuning row is used here: tuning is to teach the
format only.

About a tenth of the problems is held out: they occur in no document and in no tuning row, only in
tests and probes. Names, cities and jobs are not held out: a test asks for new combinations.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypedDict, TypeVar

WORDS_FILE = Path(__file__).with_name("words.json")
"""names, cities and jobs, and the ways in which facts and cues are worded"""
TEXT_WEIGHT = 0.1
ANSWER_WEIGHT = 1.0
_NEW_LINE_SHARE = 0.4
# Sorting and reversing take longer to learn than finding one digit.
_OPERATION_SHARES = {"sort": 3, "reverse": 3, "largest": 1, "smallest": 1}
OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
    "sort": sorted,
    "reverse": lambda digits: digits[::-1],
    "largest": lambda digits: [max(digits)],
    "smallest": lambda digits: [min(digits)],
}
FIELDS = ("name", "city", "job", "age")
CORPORA = {"list_corpus": ("list", 1, 55_000), "extract_corpus": ("extract", 2, 35_000)}
"""name -> the skill that the corpus shows, its seed, its documents"""


@functools.cache
def words() -> dict[str, Any]:
    """Return the word lists and wordings of the corpora."""
    found: dict[str, Any] = json.loads(WORDS_FILE.read_text("utf-8"))
    return found


class Problem(Protocol):
    """A task whose `key` alone decides its side of the split."""

    @property
    def key(self) -> str: ...


@dataclass(frozen=True)
class DigitList:
    """A list of three to five digits; all operations on it are on the same side of the split."""

    digits: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join(self.digits)

    def solve(self, operation: str, separator: str = " ") -> str:
        """Return the result of `operation`, joined by `separator`."""
        return separator.join(OPERATIONS[operation](list(self.digits)))


@dataclass(frozen=True)
class Person:
    """The facts of one sentence; name and city together decide the split."""

    name: str
    city: str
    job: str
    age: str

    @property
    def key(self) -> str:
        return f"{self.name} of {self.city}"


AnyProblem = TypeVar("AnyProblem", bound=Problem)


class Segment(TypedDict):
    """A piece of text and its weight in the loss."""

    text: str
    weight: float


class Document(TypedDict):
    """A document: the concatenation of its segments."""

    segments: list[Segment]


def read_corpus(name: str) -> Iterator[Document]:
    """Yield the documents of one of CORPORA; deterministic."""
    skill, seed, num_documents = CORPORA[name]
    rng = Random(seed)
    for _ in range(num_documents):
        yield {"segments": WRITERS[skill](rng)}


def _is_held_out(problem: Problem) -> bool:
    """Return whether `problem` is in the tenth reserved for tests."""
    return zlib.crc32(problem.key.encode()) % 10 == 0


def draw_list(rng: Random, held_out: bool) -> DigitList:
    """Draw three to five digits from one side of the split."""
    return _draw(lambda: DigitList(tuple(rng.choices("0123456789", k=rng.randint(3, 5)))), held_out)


def draw_person(rng: Random, held_out: bool) -> Person:
    """Draw a person from one side of the split."""
    names, cities, jobs = (words()[kind] for kind in ("names", "cities", "jobs"))
    return _draw(
        lambda: Person(
            rng.choice(names), rng.choice(cities), rng.choice(jobs), str(rng.randint(18, 79))
        ),
        held_out,
    )


def _draw(make: Callable[[], AnyProblem], held_out: bool) -> AnyProblem:
    while _is_held_out(problem := make()) is not held_out:
        pass
    return problem


def _write_list(rng: Random) -> list[Segment]:
    """Write what operations make of a list, or what one operation makes of several lists."""
    if rng.random() < 0.5:
        (operation,) = rng.choices(tuple(_OPERATION_SHARES), tuple(_OPERATION_SHARES.values()))
        problems = [draw_list(rng, held_out=False) for _ in range(rng.randint(2, 5))]
        return _word_table(rng, problems, operation)
    num_answers = rng.choice((1, 1, 2, 3))
    return word_list(
        rng, draw_list(rng, held_out=False), rng.sample(tuple(OPERATIONS), num_answers)
    )


def _word_table(rng: Random, problems: list[DigitList], operation: str) -> list[Segment]:
    """Word each of `problems` and its answer in the same way."""
    comma = rng.choice((" ", " ", " ", ", "))
    cue = rng.choice(words()["list_cues"][operation])
    wording = rng.choice([*words()["list_cue_first"], *words()["list_cue_last"]])
    separator = _draw_separator(rng)
    between = rng.choice(("\n", "; ", "\n"))
    segments = []
    for number, problem in enumerate(problems):
        text = wording.format(cue=cue, list=comma.join(problem.digits))
        segments.append(_context((between if number else "") + text + separator))
        segments.append(_answer(separator, problem.solve(operation, comma)))
    return segments


def word_list(rng: Random, problem: DigitList, operations: list[str]) -> list[Segment]:
    """Word `problem` and the answers of `operations`, the last answer last."""
    comma = rng.choice((" ", " ", " ", ", "))
    digits = comma.join(problem.digits)
    if len(operations) == 1 and rng.random() < 0.35:
        cue = rng.choice(words()["list_cues"][operations[0]])
        text = rng.choice(words()["list_cue_first"]).format(cue=cue, list=digits)
        return _cue_and_answer(rng, text, problem.solve(operations[0], comma))
    facts = rng.choice(words()["list_facts"]).format(list=digits)
    segments = [_context(facts + _pause(rng))]
    for number, operation in enumerate(operations):
        if number:
            segments.append(_context(rng.choice(("\n", "; ", "\n"))))
        cue = rng.choice(words()["list_cues"][operation])
        segments += _cue_and_answer(rng, cue, problem.solve(operation, comma))
    return segments


def _write_extract(rng: Random) -> list[Segment]:
    """Write a sentence about a person, then one to four of its fields."""
    fields = rng.sample(FIELDS, rng.randint(1, 4))
    return word_person(rng, draw_person(rng, held_out=False), fields)


def word_person(rng: Random, person: Person, fields: list[str]) -> list[Segment]:
    """Word `person` and the values of `fields`, the last answer last."""
    facts = rng.choice(words()["person_facts"]).format(
        name=person.name, city=person.city, job=person.job, age=person.age
    )
    segments = [_context(facts + _pause(rng))]
    separator = _draw_separator(rng)
    between = rng.choice(("\n", "; ", "\n"))
    for number, field in enumerate(fields):
        cue = rng.choice(words()["person_cues"][field])
        segments.append(_context((between if number else "") + cue + separator))
        segments.append(_answer(separator, getattr(person, field)))
    return segments


WRITERS: dict[str, Callable[[Random], list[Segment]]] = {
    "list": _write_list,
    "extract": _write_extract,
}


def _context(text: str) -> Segment:
    """Make a segment of text that cannot be predicted."""
    return {"text": text, "weight": TEXT_WEIGHT}


def _answer(separator: str, text: str) -> Segment:
    """Make a segment of an answer, with the space that `separator` leaves to it."""
    return {"text": text if separator.endswith("\n") else f" {text}", "weight": ANSWER_WEIGHT}


def _cue_and_answer(rng: Random, cue: str, text: str) -> list[Segment]:
    separator = _draw_separator(rng)
    return [_context(cue + separator), _answer(separator, text)]


def _draw_separator(rng: Random) -> str:
    """Draw what stands between a cue and its answer.

    An answer after a space carries that space itself, so that the weight of its first token is the
    answer's.
    """
    new_line = rng.random() < _NEW_LINE_SHARE
    separator: str = rng.choice(words()["new_line" if new_line else "same_line"])
    return separator


def _pause(rng: Random) -> str:
    """Draw what stands between the facts and the first cue: in half the cases fillers too."""
    num_fillers = rng.choice((0, 0, 0, 1, 1, 2))
    fillers = rng.sample(words()["fillers"], num_fillers)
    return rng.choice((" ", "\n")).join(["", *fillers, ""]) if fillers else rng.choice((" ", "\n"))
