"""What is learned is counted, compared and judged before training."""

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

from data_modules import DataError
from data_modules.audit import (
    Asked,
    AuditConfig,
    DatasetFacts,
    audit,
    audit_documents,
    check_audit,
    overlap,
)
from data_modules.audit.overlap import find_overlap, hash_grams
from data_modules.types import Example, Origin

STOP = 2
RANDOM = np.random.Generator(np.random.PCG64(3))


@dataclass(frozen=True)
class Doc:
    ids: Sequence[int]
    weights: Sequence[float]
    dataset: int = 0
    double_bos: bool = False


class Side:
    """One side's documents with their columns, computed here the plain way."""

    def __init__(self, docs: Sequence[Doc], file: str) -> None:
        self.docs, self.file = list(docs), file
        self.lengths = np.array([len(doc.ids) for doc in docs], dtype=np.int64)
        self.trained = np.array([np.count_nonzero(d.weights[1:]) for d in docs], dtype=np.int64)
        self.datasets = np.array([doc.dataset for doc in docs], dtype=np.int64)
        hashes = [hashlib.sha256(np.int32(doc.ids).tobytes()).digest()[:8] for doc in docs]
        self.digests = np.array([int.from_bytes(h, "little") for h in hashes], dtype=np.uint64)
        self.ends_in_stop = np.array([self._stops(doc) for doc in docs], dtype=np.bool_)
        self.double_bos = np.array([doc.double_bos for doc in docs], dtype=np.bool_)

    @staticmethod
    def _stops(doc: Doc) -> bool:
        learned = np.flatnonzero(doc.weights)
        return bool(len(learned)) and doc.ids[learned[-1]] == STOP

    def __len__(self) -> int:
        return len(self.docs)

    def __getitem__(self, index: int, /) -> Example:
        doc = self.docs[index]
        ids, weights = np.array(doc.ids, np.int32), np.array(doc.weights, np.float32)
        return Example(ids, weights, doc.dataset, self.origin(index))

    def origin(self, index: int) -> Origin:
        return Origin(self.file, index + 1)


def chat(num: int = 30, dataset: int = 0, **changes: Any) -> Doc:
    """A prompt of 10 tokens that is not learned, an answer that is, and its stop token."""
    ids = [*RANDOM.integers(100, 30_000, num - 1).tolist(), STOP]
    doc = Doc(ids, [0.0] * 10 + [1.0] * (num - 10), dataset)
    return replace(doc, **changes)


def facts(name: str = "a", **changes: Any) -> DatasetFacts:
    given = {"path": f"{name}.jsonl", "format": "messages", "is_chat": True, "rows": 8} | changes
    return DatasetFacts(name=name, **given)


def run_audit(
    train: Sequence[Doc],
    validation: Sequence[Doc] = (),
    *,
    benchmarks: Sequence[Doc] | None = None,
    config: AuditConfig | None = None,
    asked: Asked | None = None,
    datasets: Sequence[DatasetFacts] | None = None,
) -> audit.Audit:
    return audit_documents(
        config or AuditConfig(),
        datasets or [facts()],
        Side(train, "train.jsonl"),
        Side(validation, "val.jsonl"),
        benchmarks=None if benchmarks is None else Side(benchmarks, "bench.jsonl"),
        benchmark_names=["bench"] if benchmarks is not None else [],
        asked=asked,
    )


def test_clean_data_says_nothing_and_shows_a_small_table() -> None:
    found = run_audit([chat() for _ in range(6)], [chat(), chat()])
    assert (found.problems, found.warnings, found.facts) == ([], [], [])
    found.check()
    heading, row, longest = found.lines()
    assert heading.split() == ["data", "set", "rows", "train", "validation", "tokens", "learned"]
    assert row.split() == ["a", "8", "6", "2", "180", "120", "(67%)"]
    assert longest.startswith("longest rows, in tokens: train.jsonl:1 30, train.jsonl:2 30")


def test_every_count_has_its_column_and_the_total_adds_up() -> None:
    both = [
        facts("a", rows=10, dropped_long=2, empty=1, empty_origins=["a.jsonl:3"]),
        facts("b", rows=7, truncated=3, bad_rows=1, notes={"lost_system": (2, "b.jsonl:5")}),
    ]
    shared = chat()
    train = [shared, chat(), shared, chat(dataset=1), chat(dataset=1, double_bos=True)]
    found = run_audit(train, [replace(shared, dataset=1)], datasets=both)
    table = [line.split("  ") for line in found.lines()[:4]]
    columns = [" ".join(c.split()) for c in table[0] if c]
    rows = {row[0]: [c.strip() for c in row[1:] if c.strip()] for row in table[1:]}
    assert columns[1:] == [
        *("rows", "train", "validation", "tokens", "learned", "bad", "too long", "truncated"),
        *("nothing to learn", "two BOS", "duplicates", "in both", "overlap", "lost system"),
    ]
    of_a = ["10", "3", "0", "90", "60 (67%)", "-", "2", "-", "1", "-", "1", "-", "-", "-"]
    of_b = ["7", "2", "1", "60", "40 (67%)", "1", "-", "3", "-", "1", "-", "1", "1", "2"]
    assert rows["a"] == of_a
    assert rows["b"] == of_b
    assert rows["all"][:5] == ["17", "5", "1", "150", "100 (67%)"]
    said = "\n".join(found.warnings)
    assert "a: 1 of 10 rows have nothing to learn and are left out (a.jsonl:3" in said
    assert "b: 2 of 7 rows, first b.jsonl:5: the chat template drops their system turn" in said
    assert "b: 1 of 2 documents begin with two BOS tokens" in said
    assert (
        "a: 1 of 3 training documents are there already, first train.jsonl:3, the same as" in said
    )
    assert "b: 1 of 1 validation documents also stand in training, first val.jsonl:1" in said
    assert found.problems == []


def test_the_longest_rows_are_those_before_the_cut() -> None:
    cut = facts(longest=[(900, "a.jsonl:7"), (20, "a.jsonl:1")])
    found = run_audit([chat(40), chat(30)], [chat(50)], datasets=[cut])
    wanted = [(900, "a.jsonl:7"), (50, "val.jsonl:1"), (40, "train.jsonl:1")]
    assert found.longest[:3] == wanted
    assert len(found.longest) == 5


MASKS: list[tuple[str, list[Doc], str]] = [
    ("nothing", [chat(weights=[0.0] * 30)], "0 % of the 30 tokens of chat data set a are learned"),
    ("everything", [chat(weights=[1.0] * 30)], "100 % of the 30 tokens of chat data set a"),
    ("all but BOS", [chat(weights=[0.0] + [1.0] * 29)], "100 % of the 30 tokens"),
    (
        "no stop",
        [chat(weights=[0.0] * 10 + [1.0] * 19 + [0.0])] * 2,
        "no stop token is learned in any of the 2 documents of data set a",
    ),
    ("no document", [], "no document of data set a is left to train on (8 rows"),
]


@pytest.mark.parametrize(("docs", "problem"), [m[1:] for m in MASKS], ids=[m[0] for m in MASKS])
def test_a_mask_that_cannot_be_meant_stops_the_run(docs: list[Doc], problem: str) -> None:
    found = run_audit(docs, [chat()])
    with pytest.raises(DataError) as caught:
        found.check()
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"a.jsonl: {problem}")
    assert any(line.startswith("problem: a.jsonl: ") for line in found.lines())
    if docs:  # the same tokens are right where they went through no template
        raw = facts(is_chat=False, format="completion")
        assert run_audit(docs, [chat()], datasets=[raw]).problems == []


def test_what_was_asked_for_is_no_mistake() -> None:
    everything, no_stop = chat(weights=[1.0] * 30), chat(weights=[0.0] * 10 + [1.0] * 19 + [0.0])
    assert run_audit([everything], asked=Asked(learns_prompts=True)).problems == []
    assert run_audit([everything], asked=Asked(is_encoder_decoder=True)).problems == []
    found = run_audit([no_stop], asked=Asked(train_on_eos="none"))
    assert found.problems == []
    assert "no stop token is learned (data.train_on_eos=none)" in found.warnings[0]
    some = run_audit([no_stop, chat()])
    assert some.problems == []
    assert "in 1 of 2 documents the last learned token is no stop token" in some.warnings[0]


SHARED_WORDS = list(range(50_000, 50_020))


def with_words(words: Sequence[int], at: int = 5) -> Doc:
    doc = chat(40)
    return replace(doc, ids=[*doc.ids[:at], *words, *doc.ids[at + len(words) :]])


THRESHOLDS: list[tuple[str, float, float, dict[str, Any]]] = [
    # the setting, a value that stops this data, one that lets it pass, the data
    (
        "max_truncated_share",
        0.3,
        0.5,
        {"datasets": [facts(truncated=4)], "train": [chat()]},
    ),
    ("max_duplicate_share", 0.2, 0.25, {"train": [chat(), *([chat()] * 2), chat()]}),
    (
        "max_overlap_share",
        0.4,
        0.5,
        {
            "train": [with_words(SHARED_WORDS), chat()],
            "validation": [with_words(SHARED_WORDS, at=15), chat()],
        },
    ),
    ("min_trained_share", 0.7, 0.6, {"train": [chat(30)]}),
]


@pytest.mark.parametrize(
    ("name", "stops", "passes", "data"), THRESHOLDS, ids=[row[0] for row in THRESHOLDS]
)
def test_a_threshold_stops_the_run_only_where_it_is_set(
    name: str, stops: float, passes: float, data: dict[str, Any]
) -> None:
    assert run_audit(**data).problems == []
    (problem,) = run_audit(**data, config=AuditConfig(**{name: stops})).problems
    assert f"data.audit.{name} is {stops}" in problem
    assert run_audit(**data, config=AuditConfig(**{name: passes})).problems == []


def test_settings_out_of_range_are_named() -> None:
    assert check_audit(AuditConfig()) == []
    assert check_audit(AuditConfig(ngram=1)) == [
        "data.audit.ngram is 1; give 2 tokens or more (13 is usual)"
    ]
    for share in (-0.1, 1.5, float("nan")):
        (problem,) = check_audit(AuditConfig(min_trained_share=share))
        assert problem.startswith(f"data.audit.min_trained_share is {share}; give a share")


def test_shared_words_are_found_wherever_they_stand() -> None:
    train = [chat(60), with_words(SHARED_WORDS, at=19), chat(60)]
    held_out = [chat(60), with_words(SHARED_WORDS), with_words(SHARED_WORDS[:12])]
    found = run_audit(train, held_out, benchmarks=held_out)
    assert found.datasets[0].overlapping == 1
    assert (found.benchmarks[0].overlapping, found.benchmarks[0].rows) == (1, 3)
    assert found.benchmarks[0].repeated == 0
    said = "\n".join(found.lines())
    for what, side in (("validation", "val"), ("test", "bench")):
        assert f"1 of 3 {what} documents overlap with training" in said
        assert f"first {side}.jsonl:2 with train.jsonl:2" in said
    found = run_audit(train, held_out, config=AuditConfig(overlap=False))
    assert (found.datasets[0].overlapping, found.warnings) == (0, [])


def test_one_run_of_words_alone_says_little() -> None:
    few = SHARED_WORDS[:13]  # 1 of the 28 runs of a document of 40 tokens
    train, held_out = [with_words(few, at=19)], [with_words(few)]
    assert run_audit(train, held_out).datasets[0].overlapping == 0
    config = AuditConfig(overlap_share=0)
    assert run_audit(train, held_out, config=config).datasets[0].overlapping == 1


def test_the_document_that_shares_most_is_named() -> None:
    words = list(range(60_000, 60_030))
    train = [with_words(words[:14]), with_words(words[12:]), with_words(words[:14])]
    found = run_audit(train, [with_words(words)])
    assert "first val.jsonl:1 with train.jsonl:2" in found.warnings[0]


def test_words_that_many_documents_share_are_scaffolding() -> None:
    system = RANDOM.integers(100, 30_000, 20).tolist()
    prompted = [with_words(system, at=0) for _ in range(8)]
    assert run_audit(prompted[:5], prompted[5:]).datasets[0].overlapping == 0
    # One held-out document alone cannot show it, but training does.
    assert run_audit(prompted[:5], prompted[5:6]).datasets[0].overlapping == 0
    # A few documents share what was copied, not what all are told.
    copied = replace(prompted[5], ids=[*system, *prompted[0].ids[20:]])
    assert run_audit(prompted[:5], [copied, *prompted[6:]]).datasets[0].overlapping == 1


def test_documents_shorter_than_the_words_are_compared_whole() -> None:
    short = Doc([5, 6, 7, STOP], [0, 0, 1, 1])
    longer = Doc([5, 6, 7, *range(200, 230)], [0, 0] + [1] * 31)
    assert run_audit([short, longer], [short]).datasets[0].overlapping == 1
    assert run_audit([longer], [short]).datasets[0].overlapping == 0


def reference(
    train: list[list[int]], held_out: list[list[int]], ngram: int, min_share: float
) -> list[bool]:
    """Which held-out documents share enough n-grams that are no scaffolding, by Python sets."""

    def grams(ids: list[int]) -> set[tuple[int, ...]]:
        return {tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)}

    def common(side: list[list[int]]) -> set[tuple[int, ...]]:
        counts = Counter(gram for ids in side for gram in grams(ids))
        return {gram for gram, count in counts.items() if count > max(2, 0.1 * len(side))}

    known = {gram for ids in train for gram in grams(ids)} - common(train)
    short = {tuple(ids) for ids in train if len(ids) < ngram}
    own = [grams(ids) - common(held_out) for ids in held_out]
    return [
        bool(each & known) and len(each & known) >= min_share * len(each)
        if len(ids) >= ngram
        else tuple(ids) in short
        for ids, each in zip(held_out, own, strict=True)
    ]


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=8)


@given(
    DOCUMENTS,
    DOCUMENTS,
    st.integers(2, 9),
    st.sampled_from([0, 0.25, 0.5, 1]),
    st.sampled_from([8, 1 << 20]),
)
def test_overlap_is_that_of_plain_sets(
    train: list[list[int]], held_out: list[list[int]], ngram: int, min_share: float, chunk: int
) -> None:
    sides = [Side([Doc(ids, [1.0] * len(ids)) for ids in docs], "f") for docs in (train, held_out)]
    limits = {"max_train_tokens": 10**9, "max_held_out_tokens": 10**9}
    with mock.patch.object(overlap, "CHUNK_TOKENS", chunk):
        found = find_overlap(*sides, ngram, min_share=min_share, **limits)
    assert found.flagged.tolist() == reference(train, held_out, ngram, min_share)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40), st.integers(2, 20))
def test_hashes_depend_on_the_words_alone(ids: list[int], ngram: int) -> None:
    if len(ids) < ngram:
        return
    hashes = hash_grams(np.array(ids, np.int32), ngram)
    assert len(hashes) == len(ids) - ngram + 1
    alone = [
        int(hash_grams(np.array(ids[i : i + ngram], np.int32), ngram)[0])
        for i in range(len(hashes))
    ]
    assert hashes.tolist() == alone
    words = [tuple(ids[i : i + ngram]) for i in range(len(hashes))]
    assert len(set(hashes.tolist())) == len(set(words))


def test_too_many_tokens_are_searched_in_part_and_this_is_said() -> None:
    train = [chat(50) for _ in range(40)]
    with mock.patch.object(audit, "MAX_TRAIN_TOKENS", 1000):
        found = run_audit([*train, chat(50)], [train[0], train[1]])
    assert found.datasets[0].repeated == 2, "digests are compared all the same"
    assert found.datasets[0].overlapping == 1, "every third document is searched"
    (said,) = found.facts
    assert "searched in 34% of the training tokens" in said


def test_what_a_file_says_cannot_steer_the_terminal() -> None:
    evil = facts("a\x1b[31m", notes={"control_token": (1, "a.jsonl:2 \x1b]0;x\x07")})
    found = run_audit([chat()], datasets=[evil])
    text = "\n".join(found.lines())
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b" in text


def test_it_is_kept_beside_the_run(tmp_path: Path) -> None:
    found = run_audit([chat(), chat(weights=[0.0] * 29 + [1.0])], [chat()])
    found.write(tmp_path)
    assert (tmp_path / "audit.txt").read_text().splitlines() == found.lines()
    kept = json.loads((tmp_path / "audit.json").read_text())
    assert kept == found.as_dict()
    assert kept["datasets"][0]["trained_share"] == pytest.approx(21 / 60)
    assert kept["longest"][0] == {"tokens": 30, "origin": "train.jsonl:1"}
