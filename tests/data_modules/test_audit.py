"""The audit: counts, duplicates, overlap, and the rules that make warnings and errors of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, Origin
from data_modules.audit import audit
from data_modules.audit.audit import audit_documents, find_overlap
from data_modules.audit.findings import AuditConfig, DatasetFacts, RunSettings
from data_modules.tokens.encode import Counts
from data_modules.types import Example

STOP = 2
OF_DATASET = {"path", "format", "kept_tokens", "on_long", "is_trained"}
RANDOM = np.random.Generator(np.random.PCG64(3))


@dataclass(frozen=True)
class Doc:
    ids: Sequence[int]
    weights: Sequence[float]
    dataset: int = 0
    double_bos: bool = False
    rejected_start: int = 0


class Side:
    """The documents of one side, with columns computed in the simplest way."""

    def __init__(self, docs: Sequence[Doc], file: str) -> None:
        self.docs, self.file = list(docs), file
        self.lengths = np.array([len(doc.ids) for doc in docs], dtype=np.int64)
        self.trained = np.array([np.count_nonzero(d.weights[1:]) for d in docs], dtype=np.int64)
        self.datasets = np.array([doc.dataset for doc in docs], dtype=np.int64)
        hashes = [hashlib.sha256(np.int32(doc.ids).tobytes()).digest()[:8] for doc in docs]
        self.digests = np.array([int.from_bytes(h, "little") for h in hashes], dtype=np.uint64)
        last = [([0, *np.array(doc.ids)[np.array(doc.weights) > 0]])[-1] for doc in docs]
        self.ends_in_stop = np.array(last, np.int64) == STOP
        self.double_bos = np.array([doc.double_bos for doc in docs], dtype=np.bool_)
        self.rejected_starts = np.array([doc.rejected_start for doc in docs], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, index: int, /) -> Example:
        doc = self.docs[index]
        ids, weights = np.array(doc.ids, np.int32), np.array(doc.weights, np.float32)
        return Example(ids, weights, doc.dataset, self.origin(index))

    def origin(self, index: int) -> Origin:
        return Origin(self.file, index + 1)

    def token_ids(self, indices: Any) -> tuple[Any, Any]:
        lists = [self.docs[index].ids for index in indices.tolist()]
        flat = [token for ids in lists for token in ids]
        return np.array(flat, np.int32), np.array([len(ids) for ids in lists], np.int64)


def chat(num: int = 30, dataset: int = 0, **changes: Any) -> Doc:
    """Return a masked prompt of 10 tokens, and a trained answer with its stop token."""
    ids = [*RANDOM.integers(100, 30_000, num - 1).tolist(), STOP]
    doc = Doc(ids, [0.0] * 10 + [1.0] * (num - 10), dataset)
    return replace(doc, **changes)


def facts(name: str = "a", **changes: Any) -> DatasetFacts:
    """Return the facts of a data set; `changes` are of its counts, or of itself."""
    given = {"path": f"{name}.jsonl", "format": "messages", "rows": 8, "chats": 8} | changes
    own = {field: given.pop(field) for field in OF_DATASET & given.keys()}
    return DatasetFacts(name=name, counts=Counts(**given), **own)


def run_audit(
    train: Sequence[Doc],
    validation: Sequence[Doc] = (),
    *,
    benchmarks: Sequence[Doc] | None = None,
    config: AuditConfig | None = None,
    run: RunSettings | None = None,
    datasets: Sequence[DatasetFacts] | None = None,
) -> audit.Audit:
    return audit_documents(
        config or AuditConfig(),
        datasets or [facts()],
        Side(train, "train.jsonl"),
        Side(validation, "val.jsonl"),
        benchmarks=None if benchmarks is None else Side(benchmarks, "bench.jsonl"),
        benchmark_names=["bench"] if benchmarks is not None else [],
        run=run,
    )


def test_clean_data_has_no_warnings_and_a_small_table(tmp_path: Path) -> None:
    found = run_audit([chat() for _ in range(6)], [chat(), chat()])
    assert (found.problems, found.warnings, found.facts) == ([], [], [])
    found.check()
    heading, row, longest = found.lines()
    assert heading.split() == ["data", "set", "rows", "train", "validation", "tokens", "trained"]
    assert row.split() == ["a", "8", "6", "2", "180", "120", "(67", "%)"]
    assert longest == "longest rows, in tokens: train.jsonl:1 30, :2 30, :3 30, :4 30, :5 30"
    found.write(tmp_path)
    assert (tmp_path / "audit.txt").read_text().splitlines() == found.full_lines()
    assert json.loads((tmp_path / "audit.json").read_text()) == found.as_dict()


@pytest.mark.parametrize(("wins", "kind"), [(7, "longer"), (4, ""), (1, "shorter")])
def test_pairs_whose_length_gives_the_chosen_answer_away_are_named(wins: int, kind: str) -> None:
    """Of 8 pairs with a prompt of 10 tokens, `wins` have the longer answer chosen."""
    starts = [30 + number if number < wins else 15 for number in range(8)]
    pairs = [chat(45 + number, rejected_start=start) for number, start in enumerate(starts)]
    found = run_audit(pairs, datasets=[facts(format="preference")])
    (line,) = found.warnings if kind else found.facts
    chosen = np.array([*starts, *(len(p.ids) - s for p, s in zip(pairs, starts, strict=True))])
    centered = chosen - np.tile([len(pair.ids) / 2 for pair in pairs], 2)
    correlation = np.corrcoef(centered, [1] * 8 + [-1] * 8)[0, 1]
    assert f"being chosen: {correlation:+.2f})" in line
    if kind:
        assert f"7 of 8 training examples have a chosen answer that is {kind}" in line
        assert "objective=ipo or simpo" in line
    else:
        assert found.warnings == []


def test_every_count_has_its_column_and_the_total_adds_up() -> None:
    evil = "a\x1b[31m"
    both = [
        facts(evil, rows=10, dropped=2, empty=1, empty_origins=["a.jsonl:3"]),
        facts("b", rows=7, truncated=3, rejected=1, notes={"lost_system": (2, "b.jsonl:5")}),
    ]
    shared = chat()
    train = [shared, chat(), shared, chat(dataset=1), chat(dataset=1, double_bos=True)]
    found = run_audit(train, [replace(shared, dataset=1)], datasets=both)
    heading, *rows = ([c.strip() for c in row.split("  ") if c] for row in found.full_lines()[:4])
    assert heading[1:] == [
        *("rows", "train", "validation", "tokens", "trained", "bad", "too long", "truncated"),
        *("nothing to train on", "two BOS", "duplicates", "in both", "overlap", "lost system"),
    ]
    cells = [" ".join(cell for cell in row if cell) for row in rows]
    assert cells[0] == "a\\x1b[31m 10 3 0 90 60 (67 %) - 2 - 1 - 1 - - -"
    assert cells[1] == "b 7 2 1 60 40 (67 %) 1 - 3 - 1 - 1 1 2"
    assert cells[2].startswith("all 17 5 1 150 100 (67 %) 1 2 3 1 1 1 1 1 2")
    lines = "\n".join(found.warnings)
    assert "1 of 10 rows have nothing to train on" in lines and ", first a.jsonl:3" in lines
    assert "have a system turn that the chat template drops, first b.jsonl:5; set" in lines
    assert "b: 1 of 2 documents begin with two BOS tokens" in lines
    assert "1 of 3 training examples are duplicates, first train.jsonl:3, the same as" in lines
    assert "b: 1 of 1 validation documents are also in the training data, first val.jso" in lines
    assert found.problems == []
    assert "\x1b" not in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([[0.0] * 30], "0 % of the 30 tokens of chat data set a are trained"),
        ([[1.0] * 30], "100 % of the 30 tokens of chat data set a"),
        ([[0.0] + [1.0] * 29], "100 % of the 30 tokens"),  # all but BOS
        (
            [[0.0] * 10 + [1.0] * 19 + [0.0]] * 2,
            "no stop token is trained on in any of the 2 documents of data set a",
        ),
        ([], "no document of data set a is left to train on (8 rows"),
    ],
)
def test_an_implausible_mask_stops_the_run(weights: list[list[float]], problem: str) -> None:
    docs = [chat(weights=each) for each in weights]
    found = run_audit(docs, [chat()])
    with pytest.raises(DataError) as caught:
        found.check()
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"a.jsonl: {problem}")
    assert found.full_lines()[-1] == f"problem: {caught.value.problems[0]}"
    if docs:  # the same weights are plausible for rows without a chat template
        raw = facts(chats=0, format="completion")
        assert run_audit(docs, [chat()], datasets=[raw]).problems == []


def test_an_intended_mask_is_no_problem() -> None:
    everything, no_stop = chat(weights=[1.0] * 30), chat(weights=[0.0] * 10 + [1.0] * 19 + [0.0])
    assert run_audit([everything], run=RunSettings(trains_prompts=True)).problems == []
    assert run_audit([everything], run=RunSettings(is_encoder_decoder=True)).problems == []
    found = run_audit([no_stop], run=RunSettings(train_on_eos="none"))
    assert found.problems == []
    assert "train on no stop token (data.train_on_eos=none)" in found.warnings[0]
    some = run_audit([no_stop, chat()])
    assert some.problems == []
    assert "1 of 2 documents end their trained tokens without a stop token" in some.warnings[0]


SHARED_WORDS = list(range(50_000, 50_020))


def with_words(words: Sequence[int], at: int = 5) -> Doc:
    doc = chat(40)
    return replace(doc, ids=[*doc.ids[:at], *words, *doc.ids[at + len(words) :]])


def test_a_threshold_stops_the_run_only_if_it_is_set() -> None:
    leak = [with_words(SHARED_WORDS), chat()], [with_words(SHARED_WORDS, at=15), chat()]
    twice = chat()
    for name, stops, passes, sides, counted in (
        ("max_truncated_share", 0.3, 0.5, ([chat()],), facts(truncated=4)),
        ("max_duplicate_share", 0.2, 0.25, ([chat(), twice, twice, chat()],), facts()),
        ("max_overlap_share", 0.4, 0.5, leak, facts()),
        ("min_trained_share", 0.7, 0.6, ([chat(30)],), facts()),
    ):
        for value, is_problem in ((None, False), (stops, True), (passes, False)):
            config = AuditConfig(**{name: value})
            found = run_audit(*sides, config=config, datasets=[counted]).problems
            expected = f"data.audit.{name} is {value}"
            assert [expected in problem for problem in found] == [True] * is_problem


def test_shared_ngrams_are_found_at_any_position() -> None:
    train = [chat(60), with_words(SHARED_WORDS, at=19), chat(60)]
    held_out = [chat(60), with_words(SHARED_WORDS), with_words(SHARED_WORDS[:12])]
    found = run_audit(train, held_out, benchmarks=held_out)
    assert found.datasets[0].overlapping == 1
    assert (found.benchmarks[0].overlapping, found.benchmarks[0].rows) == (1, 3)
    assert found.benchmarks[0].repeated == 0
    lines = "\n".join(found.full_lines())
    for what, side in (("validation", "val"), ("test", "bench")):
        assert f"1 of 3 {what} documents overlap with training" in lines
        assert f"first {side}.jsonl:2 with train.jsonl:2" in lines
    # The screen names test data with rows that are trained on.
    assert not any("as a training document" in line for line in found.lines())
    found = run_audit(train, held_out, benchmarks=[train[0], train[2], chat()])
    expected = "test documents with the same tokens as a training document: bench 2 of 3"
    assert expected in found.lines()
    found = run_audit(train, held_out, config=AuditConfig(overlap=False))
    assert (found.datasets[0].overlapping, found.warnings) == (0, [])
    # The document that shares most is named.
    run = list(range(60_000, 60_030))
    found = run_audit([with_words(run[:14]), with_words(run[12:])], [with_words(run)])
    assert "first val.jsonl:1 with train.jsonl:2" in found.warnings[0]


def long_rows(name: str = "a", **changes: Any) -> DatasetFacts:
    given = {"rows": 1160, "dropped": 419, "lost_tokens": 9_300, "kept_tokens": 700} | changes
    return facts(name, longest=[(2201, f"{name}.jsonl:7")], **given)


@pytest.mark.parametrize(
    ("lost", "is_pair", "count", "end"),
    [
        (long_rows(chats=0), False, 419, "dropped; data.on_long=split or a larger"),
        (long_rows(chats=0), True, 419, "dropped; a larger"),
        (long_rows(on_long="truncate_left", dropped=0, truncated=419), False, 419, "cut; a larger"),
        # Of a tree of conversations only some branches may be too long.
        (long_rows(dropped=2, notes={"branch_dropped": (21, "")}), False, 23, "dropped; a larger"),
    ],
)
def test_tokens_lost_with_long_rows_are_reported_first(
    lost: DatasetFacts, is_pair: bool, count: int, end: str
) -> None:
    noted = lost.counts.notes | {"lost_system": (3, "a.jsonl:2")}
    lost = replace(lost, counts=replace(lost.counts, notes=noted))
    run = RunSettings(sequence_len=512, is_encoder_decoder=is_pair)
    found = run_audit([chat(40), chat(30)], [chat(50)], datasets=[lost], run=run)
    assert found.warnings[0].startswith(
        f"a: {count} of 1,160 rows (93 % of the tokens) are longer than data.sequence_len=512 and "
        f"{end} data.sequence_len keeps them"
    )
    assert found.warnings[0].endswith("; the longest has 2,201 tokens")
    # The longest rows are measured before the cut.
    assert found.longest[:3] == [(2201, "a.jsonl:7"), (50, "val.jsonl:1"), (40, "train.jsonl:1")]
    assert found.as_dict()["datasets"][0]["lost_share"] == 0.93
    few = run_audit([chat()], [chat()], datasets=[long_rows(lost_tokens=7, kept_tokens=693)])
    assert few.warnings == []
    # By default, the tokens of both sides are the tokens that are kept.
    found = run_audit([chat()], [chat()], datasets=[long_rows(lost_tokens=60, kept_tokens=None)])
    assert found.datasets[0].lost_share == 0.5


def test_warnings_of_many_data_sets_take_one_line_per_kind() -> None:
    names = [f"data_set_number_{number}" for number in range(11)]
    several = [
        long_rows(name, chats=int(name.endswith("0")), notes={"lost_tools": (2, f"{name}.jsonl:5")})
        for name in names
    ]
    train = [chat(dataset=number) for number in range(11)]
    found = run_audit(train, datasets=several, run=RunSettings(sequence_len=512))
    lines = [line for line in found.lines() if line.startswith("warning")]
    assert len(lines) == 3, "too long: chat and text; tools"
    assert lines[0] == (
        "warning: rows are longer than data.sequence_len=512 and dropped (tokens lost): "
        "data_set_number_0 419 of 1,160 (93 %), data_set_number_10 419 of 1,160 (93 %); a larger "
        "data.sequence_len keeps them, data.on_long=truncate_right keeps a part"
    )
    assert all(any(name in line for line in found.full_lines()) for name in names)


def test_a_similar_question_overlaps_only_with_a_similar_answer() -> None:
    story, answer, other = words(60), words(20), words(20)
    trained = answered(story, answer)
    changed = [*story[:30], *words(30)]
    others = [answered(words(60), words(20)) for _ in range(30)]
    for held_out, is_overlap in (
        (answered(changed, other), False),  # the same exercise with other numbers
        (answered(changed, answer[:3]), False),
        (answered(changed, [*words(3), *answer]), True),
        (answered(story, other), True),  # the question itself
        (answered([*words(10), *story], other), True),
        (Doc([*HEADER, *changed], [1] * 90), True),  # a text, trained on as a whole
    ):
        found = run_audit([trained, *others], [held_out])
        assert found.datasets[0].overlapping == is_overlap
    one_is_enough, held_out = AuditConfig(overlap_share=0), [answered(changed, other)]
    everything = run_audit([trained, *others], held_out, config=one_is_enough)
    assert everything.datasets[0].overlapping == 1


HEADER = list(range(40_000, 40_030))
"""the chat template's text before every prompt"""


def answered(run: Sequence[int], answer: Sequence[int], dataset: int = 0) -> Doc:
    """Return a document as a template writes it: header, prompt, separator, and trained answer."""
    prompt = [*HEADER, *run, *range(41_000, 41_005)]
    return Doc([*prompt, *answer, STOP], [0] * len(prompt) + [1] * (len(answer) + 1), dataset)


def words(num: int) -> list[int]:
    return RANDOM.integers(100, 30_000, num).tolist()


@pytest.mark.parametrize("num_train", [1, 2, 3, 19, 21, 60])
def test_template_text_is_no_overlap_even_with_few_documents(num_train: int) -> None:
    train = [answered([7, i], [9, i, 10]) for i in range(num_train)]
    for num_held_out in (1, 2, 5):
        held_out = [answered([7, 500 + i], [9, 500 + i, 10]) for i in range(num_held_out)]
        found = run_audit(train, held_out, benchmarks=held_out)
        assert found.datasets[0].overlapping == 0, (num_train, num_held_out)
        assert found.benchmarks[0].overlapping == 0
    # Also for a small data set next to a large one.
    several = [facts("a"), facts("b")]
    mixed = [*train, *(answered(words(8), words(30), 1) for _ in range(60))]
    held_out = [answered([7, 800 + i], [9, i, 8], i % 2) for i in range(4)]
    found = run_audit(mixed, held_out, datasets=several)
    assert [dataset.overlapping for dataset in found.datasets] == [0, 0]


@pytest.mark.parametrize("num_train", [1, 2, 3, 8, 21, 60])
def test_a_leak_is_found_even_with_few_documents(num_train: int) -> None:
    run, answer = words(25), words(40)
    others = [answered(words(25), words(40)) for _ in range(num_train - 1)]
    held_out = [answered(words(25), words(40)), answered(run, [*answer[:-1], 5])]
    for leaked in (answered(run, answer), answered(words(10), answer)):
        assert run_audit([*others, leaked], held_out).datasets[0].overlapping == 1
    # A question with another answer can be told from the header if there is another row.
    same_question = answered(run, words(40))
    expected = int(num_train > 1)
    assert run_audit([*others, same_question], held_out).datasets[0].overlapping == expected
    # An exact copy is found at any length and in any number of documents.
    short = answered([7], [8])
    assert run_audit([*others, short], [short]).datasets[0].overlapping == 1


def grams_of(doc: Doc, ngram: int) -> dict[tuple[int, ...], bool]:
    """Return the n-grams of a document, and whether an occurrence has a trained token."""
    found: dict[tuple[int, ...], bool] = {}
    for i in range(len(doc.ids) - ngram + 1):
        gram = tuple(doc.ids[i : i + ngram])
        found[gram] = found.get(gram, False) or any(doc.weights[i : i + ngram])
    return found


def reference(
    train: list[Doc], held_out: list[Doc], ngram: int, min_share: float, few: int
) -> list[bool]:
    """Return which held-out documents share enough n-grams with training, by Python sets."""
    known: set[tuple[int, ...]] = set()
    common: set[tuple[int, ...]] = set()
    for side in ([doc for doc in train if doc.dataset == number] for number in (0, 1)):
        grams = [grams_of(doc, ngram) for doc in side]
        counts = Counter(gram for each in grams for gram in each)
        trained_grams = {gram for each in grams for gram in each if each[gram]}
        common |= {gram for gram, count in counts.items() if count > max(2, 0.1 * len(side))}
        most_prompts = min(1, len(side) - 1) if len(side) <= few else len(side)
        known |= {g for g, count in counts.items() if g in trained_grams or count <= most_prompts}
    of_held_out = Counter(gram for doc in held_out for gram in grams_of(doc, ngram))
    common_here = {g for g, count in of_held_out.items() if count > max(2, 0.1 * len(held_out))}
    copies = {tuple(doc.ids) for doc in train}
    flagged = []
    for doc in held_out:
        own = grams_of(doc, ngram).keys() - common_here
        shared = own & (known - common)
        is_copy = tuple(doc.ids) in copies
        is_near = bool(shared) and len(shared) >= min_share * len(own)
        flagged.append(is_copy or is_near)
    return flagged


@st.composite
def documents(draw: st.DrawFn, num_datasets: int) -> list[Doc]:
    docs = []
    for ids in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=8)):
        run = draw(st.integers(0, len(ids)))
        weights = [0.0] * run + [1.0] * (len(ids) - run)
        docs.append(Doc(ids, weights, draw(st.integers(0, num_datasets - 1))))
    return docs


@given(
    documents(2),
    documents(1),
    st.integers(2, 9),
    st.sampled_from([0, 0.25, 0.5, 1]),
    st.sampled_from([8, 1 << 20]),
    st.sampled_from([0, 3, 20]),
)
def test_overlap_equals_the_reference_with_sets(
    train: list[Doc], held_out: list[Doc], ngram: int, min_share: float, chunk: int, few: int
) -> None:
    sides = [Side(docs, "f") for docs in (train, held_out)]
    limits = {"max_train_tokens": 10**9, "max_held_out_tokens": 10**9}
    with (
        mock.patch.object(audit, "CHUNK_TOKENS", chunk),
        mock.patch.object(audit, "FEW_DOCUMENTS", few),
        mock.patch.object(audit, "_is_other_exercise", return_value=False),  # tested above
    ):
        found = find_overlap(*sides, ngram, min_share=min_share, **limits)
    assert found.flagged.tolist() == reference(train, held_out, ngram, min_share, few)


def test_pieces_of_one_row_are_not_duplicates() -> None:
    piece = chat()
    train, validation = Side([piece, piece, chat(), piece], "t.jsonl"), Side([], "v.jsonl")
    lines = [1, 1, 2, 3]
    with mock.patch.object(train, "origin", lambda index: Origin("t.jsonl", lines[index])):
        found = audit_documents(AuditConfig(), [facts()], train, validation)
    assert found.datasets[0].duplicates == 1
    assert "first t.jsonl:3, the same as t.jsonl:1" in found.warnings[0]


def test_a_search_of_a_sample_is_reported() -> None:
    train = [chat(50) for _ in range(40)]
    with mock.patch.object(audit, "MAX_TRAIN_TOKENS", 1000):
        near = [replace(doc, ids=[7, *doc.ids[1:]]) for doc in train[:2]]
        found = run_audit([*train, chat(50)], [train[0], train[1], *near])
    assert found.datasets[0].repeated == 2, "all digests are compared"
    assert found.datasets[0].overlapping == 3, "every third document, and copies in all of them"
    (fact,) = found.facts
    assert "searched in 34 % of the training tokens" in fact
