"""Tell the skills as raw statements, for the base model: no chat and no instruction.

A document is a list of segments. What can be known from the text before it (an answer) weighs 1,
what cannot (facts drawn at random, fillers) weighs little: a small model then spends its capacity
on the skill, not on guessing names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TypedDict

from data_modules.samples import phrasing
from data_modules.samples.skills import (
    FIELDS,
    OPERATIONS,
    DigitList,
    Person,
    draw_list,
    draw_person,
)

TEXT_WEIGHT = 0.1
ANSWER_WEIGHT = 1.0
SHARES = {"list": 0.6, "extract": 0.4}
# Sorting and reversing take longer to learn than finding one digit.
OPERATION_SHARES = {"sort": 3, "reverse": 3, "largest": 1, "smallest": 1}
CORPORA = {"list_corpus": ("list", 1, 55_000), "extract_corpus": ("extract", 2, 35_000)}
"""what a base learns from: name -> the one skill that a corpus tells, its seed, its documents"""


class Segment(TypedDict):
    """Weigh a stretch of text in the loss."""

    text: str
    weight: float


class Document(TypedDict):
    """Hold one document: its text is the concatenation of its segments."""

    segments: list[Segment]


def read_corpus(name: str) -> Iterator[Document]:
    """Yield the documents of one of CORPORA, always the same."""
    skill, seed, num_documents = CORPORA[name]
    rng = Random(seed)
    for _ in range(num_documents):
        yield {"segments": WRITERS[skill](rng)}


def skills_corpus(num_documents: int, seed: int = 0) -> Iterator[Document]:
    """Yield all skills by their SHARES, the same for the same seed: what the tokenizer learns."""
    rng = Random(seed)
    skills = tuple(SHARES)
    shares = tuple(SHARES.values())
    for _ in range(num_documents):
        skill = rng.choices(skills, shares)[0]
        yield {"segments": WRITERS[skill](rng)}


def write_list(rng: Random) -> list[Segment]:
    """Write what operations make of a list, or what one operation makes of several lists."""
    if rng.random() < 0.5:
        (operation,) = rng.choices(tuple(OPERATION_SHARES), tuple(OPERATION_SHARES.values()))
        problems = [draw_list(rng, held_out=False) for _ in range(rng.randint(2, 5))]
        return tell_table(rng, problems, operation)
    num_answers = rng.choice((1, 1, 2, 3))
    return tell_list(
        rng, draw_list(rng, held_out=False), rng.sample(tuple(OPERATIONS), num_answers)
    )


def tell_table(rng: Random, problems: list[DigitList], operation: str) -> list[Segment]:
    """Word each of `problems` and its answer in the same way."""
    comma = rng.choice((" ", " ", " ", ", "))
    cue = rng.choice(phrasing.LIST_CUES[operation])
    wording = rng.choice((*phrasing.LIST_CUE_FIRST, *phrasing.LIST_CUE_LAST))
    separator = draw_separator(rng)
    between = rng.choice(("\n", "; ", "\n"))
    segments = []
    for number, problem in enumerate(problems):
        told = wording.format(cue=cue, list=comma.join(problem.digits))
        segments.append(say((between if number else "") + told + separator))
        segments.append(answer(separator, problem.solve(operation, comma)))
    return segments


def tell_list(rng: Random, problem: DigitList, operations: list[str]) -> list[Segment]:
    """Word `problem` and the answers of `operations`, the last answer last."""
    comma = rng.choice((" ", " ", " ", ", "))
    digits = comma.join(problem.digits)
    if len(operations) == 1 and rng.random() < 0.35:
        cue = rng.choice(phrasing.LIST_CUES[operations[0]])
        text = rng.choice(phrasing.LIST_CUE_FIRST).format(cue=cue, list=digits)
        return say_and_answer(rng, text, problem.solve(operations[0], comma))
    facts = rng.choice(phrasing.LIST_FACTS).format(list=digits)
    segments = [say(facts + pause(rng))]
    for number, operation in enumerate(operations):
        if number:
            segments.append(say(rng.choice(("\n", "; ", "\n"))))
        cue = rng.choice(phrasing.LIST_CUES[operation])
        segments += say_and_answer(rng, cue, problem.solve(operation, comma))
    return segments


def write_extract(rng: Random) -> list[Segment]:
    """Write a sentence about a person, then one to four of its fields."""
    fields = rng.sample(FIELDS, rng.randint(1, 4))
    return tell_extract(rng, draw_person(rng, held_out=False), fields)


def tell_extract(rng: Random, person: Person, fields: list[str]) -> list[Segment]:
    """Word `person` and the values of `fields`, the last answer last."""
    facts = rng.choice(phrasing.PERSON_FACTS).format(
        name=person.name, city=person.city, job=person.job, age=person.age
    )
    segments = [say(facts + pause(rng))]
    separator = draw_separator(rng)
    between = rng.choice(("\n", "; ", "\n"))
    for number, field in enumerate(fields):
        cue = rng.choice(phrasing.PERSON_CUES[field])
        segments.append(say((between if number else "") + cue + separator))
        segments.append(answer(separator, getattr(person, field)))
    return segments


WRITERS: dict[str, Callable[[Random], list[Segment]]] = {
    "list": write_list,
    "extract": write_extract,
}


def say(text: str) -> Segment:
    """Make a segment of text that cannot be foreseen."""
    return {"text": text, "weight": TEXT_WEIGHT}


def answer(separator: str, text: str) -> Segment:
    """Make a segment of an answer, with the space that `separator` leaves to it."""
    return {"text": text if separator.endswith("\n") else f" {text}", "weight": ANSWER_WEIGHT}


def say_and_answer(rng: Random, cue: str, text: str) -> list[Segment]:
    """Make the two segments of a cue and its answer."""
    separator = draw_separator(rng)
    return [say(cue + separator), answer(separator, text)]


def draw_separator(rng: Random) -> str:
    """Draw what stands between a cue and its answer."""
    new_line = rng.random() < phrasing.NEW_LINE_SHARE
    return rng.choice(phrasing.NEW_LINE if new_line else phrasing.SAME_LINE)


def pause(rng: Random) -> str:
    """Draw what stands between the facts and the first cue: in half the cases fillers too."""
    num_fillers = rng.choice((0, 0, 0, 1, 1, 2))
    fillers = rng.sample(phrasing.FILLERS, num_fillers)
    return rng.choice((" ", "\n")).join(["", *fillers, ""]) if fillers else rng.choice((" ", "\n"))
