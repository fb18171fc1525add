"""Write the sample data, the tiny base's tokenizer and its corpora, deterministically.

Run `python -m tools.tiny_base.write`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tools.tiny_base.corpus import CORPORA, FIELDS, draw_list, draw_person, read_corpus
from tools.tiny_base.tokenizer import write_base

SAMPLES = Path(__file__).parents[2] / "data_modules" / "samples"
CORPUS_FOLDER = Path("outputs/tiny_base")
"""where data=skills_corpora reads what the base is trained on"""
NUM_ROWS = 1000
NUM_TEST_ROWS = 200
NUM_PAIRS = 600

LIST_INSTRUCTIONS = {
    "largest": ("Give the largest number in the list.", "Which number is the biggest?"),
    "smallest": ("Give the smallest number in the list.", "Which number is the least?"),
}

ORDER_SYSTEM = "You answer with the numbers alone."
ORDER_QUESTIONS = {
    "sort": ("Sort these in ascending order: {list}", "Put {list} into increasing order."),
    "reverse": ("Write {list} backwards.", "Reverse the order of these numbers: {list}"),
}

PERSON_SENTENCES = (
    "{name} stayed in {city}. At {age}, {name} still works as a {job}.",
    "Last year {name}, a {job} aged {age}, came to {city}.",
    "There is only one {job} in {city}, and that is {name}, {age}.",
    "{name} turned {age} and opened a shop in {city} as a {job}.",
)
PERSON_QUESTIONS = {
    "name": "What is the name?",
    "city": "What is the city?",
    "job": "What is the job?",
    "age": "What is the age?",
}

Row = dict[str, Any]
Made = TypeVar("Made")


def write_samples(folder: Path = SAMPLES) -> None:
    """Write the data sets, their held-out counterparts and the folder of the tiny base."""
    for suffix, held_out, num_rows in (("", False, NUM_ROWS), ("_test", True, NUM_TEST_ROWS)):
        write_json(folder / f"lists{suffix}.json", list_rows(num_rows, held_out))
        write_json_lines(folder / f"orders{suffix}.jsonl", order_rows(num_rows, held_out))
        write_json(folder / f"people{suffix}.json", people_rows(num_rows, held_out))
    write_json(folder / "pairs.json", pair_rows(NUM_PAIRS))
    write_json(folder / "classes.json", class_rows(NUM_PAIRS))
    write_base(folder / "tiny_base")


def write_corpora(folder: Path = CORPUS_FOLDER) -> None:
    """Write the raw text that the base is trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CORPORA:
        write_json_lines(folder / f"{name}.jsonl", read_corpus(name))


def list_rows(num_rows: int, held_out: bool) -> Iterator[Row]:
    """Yield alpaca rows: an instruction, a list of digits, one of them."""
    rng = Random(f"lists {held_out}")
    for problem, operation in _distinct(
        lambda: (draw_list(rng, held_out), rng.choice(tuple(LIST_INSTRUCTIONS))), num_rows
    ):
        yield {
            "instruction": rng.choice(LIST_INSTRUCTIONS[operation]),
            "input": " ".join(problem.digits),
            "output": problem.solve(operation),
        }


def pair_rows(num_rows: int) -> Iterator[Row]:
    """Yield preference pairs: an instruction, a list, the right number and the opposite one."""
    rng = Random("pairs")
    opposite = dict(zip(LIST_INSTRUCTIONS, reversed(LIST_INSTRUCTIONS), strict=True))
    problems = (draw_list(rng, False) for _ in itertools.count())
    has_two = (problem for problem in problems if len(set(problem.digits)) > 1)
    for problem, operation in _distinct(
        lambda: (next(has_two), rng.choice(tuple(LIST_INSTRUCTIONS))), num_rows
    ):
        yield {
            "instruction": rng.choice(LIST_INSTRUCTIONS[operation]),
            "input": " ".join(problem.digits),
            "chosen": problem.solve(operation),
            "rejected": problem.solve(opposite[operation]),
        }


def class_rows(num_rows: int) -> Iterator[Row]:
    """Yield texts with a class: a list, and whether its largest number is first, last or inside."""
    rng = Random("classes")
    for problem in _distinct(lambda: draw_list(rng, False), num_rows):
        place = problem.digits.index(max(problem.digits))
        inside = "inside" if place < len(problem.digits) - 1 else "last"
        yield {"text": " ".join(problem.digits), "label": "first" if place == 0 else inside}


def order_rows(num_rows: int, held_out: bool) -> Iterator[Row]:
    """Yield messages rows: a system turn, a question with a list in it, the list reordered."""
    rng = Random(f"orders {held_out}")
    for problem, operation in _distinct(
        lambda: (draw_list(rng, held_out), rng.choice(tuple(ORDER_QUESTIONS))), num_rows
    ):
        question = rng.choice(ORDER_QUESTIONS[operation]).format(list=" ".join(problem.digits))
        yield {
            "messages": [
                {"role": "system", "content": ORDER_SYSTEM},
                {"role": "user", "content": question},
                {"role": "assistant", "content": problem.solve(operation)},
            ]
        }


def people_rows(num_rows: int, held_out: bool) -> Iterator[Row]:
    """Yield sharegpt rows: a sentence about a person with a question, the field's value."""
    rng = Random(f"people {held_out}")
    for person in _distinct(lambda: draw_person(rng, held_out), num_rows):
        sentence = rng.choice(PERSON_SENTENCES).format(
            name=person.name, city=person.city, job=person.job, age=person.age
        )
        field = rng.choice(FIELDS)
        yield {
            "conversations": [
                {"from": "human", "value": f"{sentence}\n{PERSON_QUESTIONS[field]}"},
                {"from": "gpt", "value": getattr(person, field)},
            ]
        }


def write_json(path: Path, rows: Iterable[Row]) -> None:
    """Write a JSON array with a row per line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write a JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _distinct(make: Callable[[], Made], num: int) -> Iterator[Made]:
    seen: set[Made] = set()
    while len(seen) < num:
        made = make()
        if made not in seen:
            seen.add(made)
            yield made


if __name__ == "__main__":
    write_samples()
    write_corpora()
