"""The store: documents are restored in any process and memory-mapped, not loaded."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from data_modules.tokens.store import Documents, Examples, StoreWriter, TokenStore

Lists = list[list[int]]


def documents(tokens: Lists, first_row: int = 0, file: str = "a.jsonl") -> Documents:
    count = len(tokens)
    flat = np.array([token for one in tokens for token in one], dtype=np.int32)
    return Documents(
        file=file,
        input_ids=flat,
        lengths=np.array([len(one) for one in tokens], dtype=np.int64),
        weights=(flat % 2).astype(np.float32),
        target_ids=None,
        target_lengths=None,
        rows=np.arange(first_row, first_row + count),
        lines=np.arange(1, count + 1),
        trained=np.array([sum(t % 2 for t in one[1:]) for one in tokens], dtype=np.int64),
        label_weights=np.array([float(sum(t % 2 for t in one[1:])) for one in tokens]),
        digests=np.array([hash(tuple(one)) & 0xFFFF for one in tokens], dtype=np.uint64),
        ends_in_stop=np.array([one[-1] % 2 == 1 for one in tokens], dtype=np.bool_),
        double_bos=np.zeros(count, dtype=np.bool_),
        rejected_starts=np.zeros(count, dtype=np.int64),
        row_labels=np.full(count, np.nan),
    )


def write(folder: Path, *chunks: Documents) -> TokenStore:
    writer = StoreWriter(folder)
    for chunk in chunks:
        writer.add(chunk)
    writer.close()
    return TokenStore(folder)


@hypothesis.given(
    st.lists(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_every_document_is_restored(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[Lists]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = write(folder, *(documents(c, file=f"{n}.jsonl") for n, c in enumerate(chunks)))
    expected = [
        (f"{n}.jsonl:{k + 1}", one) for n, c in enumerate(chunks) for k, one in enumerate(c)
    ]
    found = [store.example(index, 0) for index in range(len(store))]
    assert [(str(e.origin), e.input_ids.tolist()) for e in found] == expected
    assert all((e.weights == e.input_ids % 2).all() for e in found)
    assert store.lengths.tolist() == [len(one) for _, one in expected]
    assert store.ends_in_stop.tolist() == [one[-1] % 2 == 1 for _, one in expected]


def test_a_pickled_store_opens_its_file_again(tmp_path: Path) -> None:
    store = write(tmp_path, documents([[1, 2], [3]]))
    sent = pickle.dumps(store)
    assert len(sent) < 300
    assert pickle.loads(sent).example(1, 4).input_ids.tolist() == [3]  # noqa: S301  our own


def with_targets() -> Documents:
    return dataclasses.replace(
        documents([[1, 2], [3, 4, 5]]),
        target_ids=np.array([7, 8, 9, 6], dtype=np.int32),
        target_lengths=np.array([3, 1]),
        weights=np.array([1, 1, 0.5, 1], dtype=np.float32),
    )


def test_targets_are_stored_and_length_is_that_of_the_longer_side(tmp_path: Path) -> None:
    both = with_targets()
    store = write(tmp_path, both)
    assert store.lengths.tolist() == [3, 3]
    first = store.example(0, 0)
    assert first.target_ids is not None
    assert first.target_ids.tolist() == [7, 8, 9]
    assert first.weights.tolist() == [1, 1, 0.5]
    assert first.num_tokens == 3
    assert both.largest_token() == (9, "a.jsonl:1")
    streamed = [each.target_ids for each in both.examples(0)]
    assert [each is not None and each.tolist() for each in streamed] == [[7, 8, 9], [6]]


@pytest.mark.parametrize("name", ["input_ids", "weights", "target_ids"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, with_targets())
    os.truncate(tmp_path / name, 4)
    with pytest.raises(ValueError, match="belong together"):
        TokenStore(tmp_path)


def test_examples_choose_from_several_stores(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stores = [
        write(tmp_path / "a", documents([[1], [2, 2], [3, 3, 3]])),
        write(tmp_path / "b", documents([[4] * 4, [5] * 5], file="b.jsonl")),
    ]
    examples = Examples(stores, [np.array([2, 0]), np.array([1])])
    assert [e.input_ids[0] for e in examples] == [3, 1, 5]
    assert examples.lengths.tolist() == [3, 1, 5]
    assert examples.datasets.tolist() == [0, 0, 1]
    assert [e.dataset for e in examples] == [0, 0, 1]
    assert str(examples.origin(2)) == "b.jsonl:2"
    assert str(examples[-1].origin) == "b.jsonl:2"
    assert not Examples([], [])
    ids, sizes = examples.token_ids(np.array([2, 0, 1, 0]))
    assert ids.tolist() == [5] * 5 + [3] * 3 + [1] + [3] * 3 and sizes.tolist() == [5, 3, 1, 3]
    ids, sizes = examples.token_ids(np.zeros(0, np.int64))
    assert len(ids) == len(sizes) == 0
