"""The shipped samples equal the output of their script, are correct, and are properly split."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_modules import source
from tests.composing import CONF
from tests.tiny import SAMPLES
from tools.tiny_base import write
from tools.tiny_base.corpus import ANSWER_WEIGHT, CORPORA, TEXT_WEIGHT, Document, read_corpus, words
from tools.tiny_base.probes import GATE, probe_rows
from tools.tiny_base.tokenizer import skills_corpus

NAMES, CITIES, JOBS = (words()[kind] for kind in ("names", "cities", "jobs"))
DATA_FILES = ("lists", "orders", "people")
NUM_DOCUMENTS = 1_000


def read_rows(stem: str) -> list[dict[str, Any]]:
    if stem.startswith("orders"):
        lines = (SAMPLES / f"{stem}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    return json.loads((SAMPLES / f"{stem}.json").read_text(encoding="utf-8"))


def read_pairs(stem: str) -> list[tuple[str, str]]:
    """Return (question, answer) of each row of any format."""
    if stem.startswith("lists"):
        return [(f"{row['instruction']}\n{row['input']}", row["output"]) for row in read_rows(stem)]
    if stem.startswith("orders"):
        turns = [row["messages"] for row in read_rows(stem)]
        return [(user["content"], answer["content"]) for _, user, answer in turns]
    turns = [row["conversations"] for row in read_rows(stem)]
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


def text_of(document: Document) -> str:
    return "".join(segment["text"] for segment in document["segments"])


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
def test_problems_are_on_their_side_of_the_split(stem: str) -> None:
    tuning = {problem_in(prompt) for prompt, _ in read_pairs(stem)}
    test = {problem_in(prompt) for prompt, _ in read_pairs(f"{stem}_test")}
    assert not any(is_held_out(problem) for problem in tuning)
    assert all(is_held_out(problem) for problem in test)


@pytest.mark.parametrize("stem", DATA_FILES)
def test_numbers_of_distinct_rows(stem: str) -> None:
    assert len(set(read_pairs(stem))) >= 0.95 * len(read_pairs(stem)) == 950
    assert len(read_pairs(f"{stem}_test")) == 200


@pytest.mark.parametrize("stem", ["lists", "lists_test", "orders", "orders_test"])
def test_list_answers_are_right(stem: str) -> None:
    for prompt, answer in read_pairs(stem):
        digits = [int(digit) for digit in re.findall(r"\d", prompt)]
        if "ascending" in prompt or "increasing" in prompt:
            right = sorted(digits)
        elif "backwards" in prompt or "Reverse" in prompt:
            right = [digits[-1 - place] for place in range(len(digits))]
        elif "largest" in prompt or "biggest" in prompt:
            right = sorted(digits)[-1:]
        else:
            assert "smallest" in prompt or "least" in prompt
            right = sorted(digits)[:1]
        assert answer == " ".join(map(str, right))


@pytest.mark.parametrize("stem", ["people", "people_test"])
def test_people_answers_are_right(stem: str) -> None:
    for prompt, answer in read_pairs(stem):
        sentence, question = prompt.split("\n")
        field = question.removesuffix("?").split()[-1]
        if field == "age":
            found = re.findall(r"\d+", sentence)
        else:
            found = words_in(sentence, {"name": NAMES, "city": CITIES, "job": JOBS}[field])
        assert set(found) == {answer}, prompt


def test_the_corpus_has_no_held_out_problem(documents: list[Document]) -> None:
    for document in documents:
        facts, *later = [s["text"] for s in document["segments"] if s["weight"] == TEXT_WEIGHT]
        problems = [problem_in(facts), *(digits for text in later for digits in lists_in(text))]
        assert not any(is_held_out(problem) for problem in problems), problems


def test_the_corpus_does_not_use_the_wording_of_the_tuning_rows(documents: list[Document]) -> None:
    wordings = [
        write.ORDER_SYSTEM,
        *(wording for wordings in write.LIST_INSTRUCTIONS.values() for wording in wordings),
        *(q.split("{")[0] for qs in write.ORDER_QUESTIONS.values() for q in qs if q[0] != "{"),
        *write.PERSON_QUESTIONS.values(),
    ]
    corpus = "\n".join(map(text_of, documents))
    assert not [wording for wording in wordings if wording in corpus]
    assert "<|im_start|>" not in corpus and "?" not in corpus
    assert not set(write.PERSON_SENTENCES) & set(words()["person_facts"])


def test_the_corpus_is_deterministic_and_extended_at_its_end(documents: list[Document]) -> None:
    assert list(skills_corpus(num_documents=100)) == documents[:100]
    assert list(skills_corpus(seed=1, num_documents=100)) != documents[:100]


def test_the_base_is_trained_on_the_files_of_its_corpora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (skill, seed, _) in CORPORA.items():
        monkeypatch.setitem(CORPORA, name, (skill, seed, 100))
    write.write_corpora(tmp_path)
    datasets = yaml.safe_load((CONF / "data/skills_corpora.yaml").read_text())["datasets"]
    paths = [Path(dataset["path"]) for dataset in datasets]
    assert {path.parent for path in paths} == {write.CORPUS_FOLDER}
    for path, name in zip(paths, CORPORA, strict=True):
        rows = [row for row, _ in source.read_rows(str(tmp_path / path.name))]
        assert len(rows) == 100 and rows == list(read_corpus(name))


def test_each_document_ends_with_an_answer_of_full_weight(documents: list[Document]) -> None:
    for document in documents:
        assert all(segment["text"] for segment in document["segments"])
        assert {segment["weight"] for segment in document["segments"]} == {
            TEXT_WEIGHT,
            ANSWER_WEIGHT,
        }
        assert document["segments"][-1]["weight"] == ANSWER_WEIGHT


@pytest.mark.parametrize("skill", GATE)
def test_probes_ask_held_out_problems(skill: str) -> None:
    rows = probe_rows(skill)
    assert len(rows) == 200 and rows == probe_rows(skill)
    assert all(is_held_out(problem_in(row["prompt"])) for row in rows)


def test_the_shipped_base_passes_the_gate() -> None:
    """It teaches the same skills with a different wording."""
    from tools.tiny_base.install import TINY_BASE, probe_accuracies

    accuracies = probe_accuracies(TINY_BASE)
    assert accuracies.keys() == GATE.keys()
    for skill, accuracy in accuracies.items():
        assert accuracy >= GATE[skill], skill
    assert (TINY_BASE / "model.safetensors").stat().st_size < 4_000_000
