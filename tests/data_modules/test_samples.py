"""The shipped samples equal the output of their script, are correct, and are properly split."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from data_modules import source
from tests.tiny import SAMPLES
from tools.tiny_base import write
from tools.tiny_base.corpus import TEXT_WEIGHT, Document, words
from tools.tiny_base.probes import GATE
from tools.tiny_base.tokenizer import skills_corpus

NAMES, CITIES, JOBS = (words()[kind] for kind in ("names", "cities", "jobs"))
DATA_FILES = ("lists", "orders", "people")
NUM_DOCUMENTS = 1_000


def read_pairs(stem: str) -> list[tuple[str, str]]:
    """Return (question, answer) of each row of any format."""
    suffix = "jsonl" if stem.startswith("orders") else "json"
    rows = [row for row, _ in source.read_rows(str(SAMPLES / f"{stem}.{suffix}"))]
    if stem.startswith("lists"):
        return [(f"{row['instruction']}\n{row['input']}", row["output"]) for row in rows]
    if stem.startswith("orders"):
        turns = [row["messages"] for row in rows]
        return [(user["content"], answer["content"]) for _, user, answer in turns]
    turns = [row["conversations"] for row in rows]
    return [(human["value"], gpt["value"]) for human, gpt in turns]


def words_in(text: str, known: list[str]) -> list[str]:
    return re.findall(rf"\b(?:{'|'.join(known)})\b", text)


def lists_in(text: str) -> list[str]:
    found = re.findall(r"(?<!\d)\d(?:(?:, | )\d){2,4}(?!\d)", text)
    return [digits.replace(",", "") for digits in found]


def problem_in(text: str) -> str:
    """Parse the problem from a text that states its facts first."""
    names, cities = words_in(text, NAMES), words_in(text, CITIES)
    if not names:
        (digits,) = lists_in(text)
        return digits
    assert len(set(names)) == 1 and len(set(cities)) == 1, text
    return f"{names[0]} of {cities[0]}"


def is_held_out(problem: str) -> bool:
    return zlib.crc32(problem.encode()) % 10 == 0


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return list(skills_corpus(num_documents=NUM_DOCUMENTS))


@pytest.mark.slow
def test_the_shipped_files_are_what_the_script_writes(tmp_path: Path) -> None:
    write.write_samples(tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 12
    for path in written:
        shipped = SAMPLES / path.relative_to(tmp_path)
        assert path.read_bytes() == shipped.read_bytes(), shipped.name


@pytest.mark.parametrize("stem", DATA_FILES)
def test_problems_are_on_their_side_of_the_split_and_their_answers_right(stem: str) -> None:
    for name, is_test in ((stem, False), (f"{stem}_test", True)):
        for prompt, answer in read_pairs(name):
            assert is_held_out(problem_in(prompt)) == is_test, prompt
            assert answer == right_answer(prompt), prompt


def right_answer(prompt: str) -> str:
    if prompt.endswith("?") and "\n" in prompt:
        sentence, question = prompt.split("\n")
        field = question.removesuffix("?").split()[-1]
        known = {"name": NAMES, "city": CITIES, "job": JOBS}
        found = words_in(sentence, known[field]) if field in known else re.findall(r"\d+", sentence)
        assert len(set(found)) == 1, prompt
        return found[0]
    digits = [int(digit) for digit in re.findall(r"\d", prompt)]
    if "ascending" in prompt or "increasing" in prompt:
        digits.sort()
    elif "backwards" in prompt or "Reverse" in prompt:
        digits.reverse()
    elif "largest" in prompt or "biggest" in prompt:
        digits = [max(digits)]
    else:
        assert "smallest" in prompt or "least" in prompt
        digits = [min(digits)]
    return " ".join(map(str, digits))


def test_the_corpus_has_no_held_out_problem(documents: list[Document]) -> None:
    for document in documents:
        facts, *later = [s["text"] for s in document["segments"] if s["weight"] == TEXT_WEIGHT]
        problems = [problem_in(facts), *(digits for text in later for digits in lists_in(text))]
        assert not any(is_held_out(problem) for problem in problems), problems


def test_the_shipped_base_passes_the_gate() -> None:
    """It teaches the same skills with a different wording."""
    from tools.tiny_base.install import TINY_BASE, probe_accuracies

    accuracies = probe_accuracies(TINY_BASE)
    assert accuracies.keys() == GATE.keys()
    for skill, accuracy in accuracies.items():
        assert accuracy >= GATE[skill], skill
    assert (TINY_BASE / "model.safetensors").stat().st_size < 4_000_000
