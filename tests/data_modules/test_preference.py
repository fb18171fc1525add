"""Preference pairs: what is read as their prompt, and that both answers stay one document."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.model.base import ModelConfig
from app.model.tokenizer import build_tokenizer
from common.errors import Origin
from data_modules import DataConfig, DatasetConfig, FinetuneDataModule, check_datasets, with_format
from data_modules.collator import Collator
from data_modules.format import PREFERENCE, RowError
from data_modules.tokens.encode import Counts
from data_modules.tokens.store import DocumentBuilder, StoreWriter, TokenStore
from data_modules.types import Document, Encoded
from tests.data_modules.conftest import items_of
from tests.data_modules.test_datamodule import build as build_module
from tests.tiny import SAMPLES, TINY_BASE

ASK = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
FIRST = [ASK, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
CHATS: list[dict[str, Any]] = [
    {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [ASK], "chosen": "good", "rejected": "bad"},
    {"prompt": "q", "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    {"prompt": "q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score_chosen": 7.0},
    {"instruction": "q", "chosen": "good", "rejected": "bad"},
    {"question": "q", "chosen": "good", "rejected": "bad"},
    {"conversations": [{"from": "human", "value": "q"}], "chosen": GOOD, "rejected": BAD},
    {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
]


def convert(values: dict[str, Any]) -> list[Any]:
    return items_of(values, PREFERENCE)


def test_both_answers_follow_the_same_prompt() -> None:
    for values in CHATS:
        for item, answer in zip(convert(values), ("good", "bad"), strict=True):
            assert [(t.role, t.content) for t in item.turns] == [
                ("user", "q"),
                ("assistant", answer),
            ]
            assert item.turns[-1].weight is None
    for item, answer in zip(convert(CHATS[1] | {"prompt": "q"}), ("good", "bad"), strict=True):
        assert isinstance(item, Document)
        assert [(part.text, part.weight) for part in item.segments] == [("q", 0.0), (answer, 1.0)]
    # Answers in the prompt are masked.
    for values in (
        {"chosen": [*FIRST, GOOD], "rejected": [*FIRST, BAD]},
        {"prompt": FIRST, "chosen": "good", "rejected": "bad"},
    ):
        weights = [turn.weight for turn in convert(values)[0].turns if turn.role == "assistant"]
        assert weights == [0.0, None]
    chosen, _ = convert({"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"})
    assert chosen.turns[0].content == "q\n\ni"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "p"}, BAD]}, "the same prompt"),
        ({"prompt": "p", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "the prompt ends with"),
        (
            {"prompt": "q", "completions": [{"response": "a"}, {"response": "b"}], "ranks": [1, 2]},
            "write a row for each pair .* rejected: completions.1.response",
        ),
        ({"chosen": "good", "rejected": "bad"}, "have no prompt before them"),
        ({"prompt": "q", "chosen": "", "rejected": "bad"}, "chosen is empty"),
        ({"prompt": "q", "chosen": "good"}, "missing 'rejected'.*objective=sft"),
        ({"prompt": [ASK], "chosen": [GOOD, ASK], "rejected": [BAD]}, "chosen ends with a turn of"),
    ],
)
def test_pairs_that_are_none_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        convert(values)


# What the builder asks a template.
FACTS: Any = SimpleNamespace(bos_token_id=None, stop_token_ids={2}, tail_ids=[])


def encoded(prompt: list[int], answer: list[int], weight: float = 1.0) -> Encoded:
    weights = [0.0] * len(prompt) + [weight] * len(answer)
    return Encoded(np.array(prompt + answer, np.int32), np.array(weights, np.float32))


def build(
    *pairs: tuple[Encoded, Encoded], sequence_len: int = 20, on_long: str = "drop"
) -> tuple[Any, Counts]:
    counts = Counts()
    builder = DocumentBuilder("pairs.jsonl", FACTS, sequence_len, on_long, counts)
    for number, pair in enumerate(pairs):
        builder.add_pair(pair, number, Origin("pairs.jsonl", number + 1))
    return builder.build(), counts


def test_a_pair_is_stored_and_collated_as_one_example_of_two_documents(tmp_path: Path) -> None:
    pairs = [
        (encoded([5, 6], [7, 2], 0.5), encoded([5, 6], [8, 9, 2], 0.5)),
        (encoded([5], [3, 2]), encoded([5], [4, 2])),
    ]
    documents, _ = build(*pairs)
    assert documents.label_weights.tolist() == [0.5, 1.0]  # of a pair, not of its tokens
    assert documents.lengths.tolist() == [9, 6] and documents.trained.tolist() == [5, 4]
    writer = StoreWriter(tmp_path)
    writer.add(documents)
    writer.close()
    store = TokenStore(tmp_path)
    for examples in ([store.example(i, 0) for i in range(2)], list(documents.examples(0))):
        for example, pair in zip(examples, pairs, strict=True):
            for document, answer in zip(example.documents(), pair, strict=True):
                assert document.input_ids.tolist() == answer.input_ids.tolist()
                assert document.weights.tolist() == answer.weights.tolist()
    packed = Collator(0, True)([examples], 1.5)
    assert packed.document_lengths == [[4, 5, 3, 3]]
    assert packed.unit_weights is not None and packed.unit_weights.tolist() == [0.5, 1.0]
    assert packed.own_weight == 1.5
    # The last position of the chosen answer does not predict the first token of the rejected one.
    assert packed.labels[0].tolist() == [
        *(-100, 7, 2, -100), *(-100, 8, 9, 2, -100), *(3, 2, -100), *(4, 2, -100),
    ]  # fmt: skip
    padded = Collator(0, False)([[example] for example in examples], 1.5)
    assert padded.document_lengths == [[4], [5], [3], [3]]
    assert padded.unit_weights is not None and padded.unit_weights.tolist() == [0.5, 1.0]


def test_stored_references_stay_with_their_pairs_whatever_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer(ModelConfig(path=str(TINY_BASE)))

    def made(seed: int, **dataset: Any) -> FinetuneDataModule:
        pairs = DatasetConfig(path=str(SAMPLES / "pairs.json"), format="preference", **dataset)
        settings = {"val_set_size": 20, "cache_dir": str(tmp_path)}
        return build_module(
            [pairs], tokenizer, data=settings, seed=seed, model={"context_len": 1024}
        )

    module = made(0)
    assert not module.read_references("base")
    pairs = module.referenced_examples()
    lines = np.array([example.origin.line for example in pairs], dtype=float)
    module.store_references(np.stack([lines, -lines], axis=1))
    again = made(1)
    assert again.read_references("base") and not made(1).read_references("another base")
    assert not made(0, max_rows=50).read_references("base")
    for one in (module, again):
        for examples in (one.train_examples, one.val_examples):
            for example in examples:
                line = example.origin.line
                assert example.reference is not None
                assert example.reference.tolist() == [line, -line]
        (batch, *_) = one.val_dataloader()
        rows = [one.val_examples[row].origin.line for row in one.val_order]
        assert batch.reference is not None
        assert batch.reference[:, 0].tolist() == rows[: len(batch.reference)]
    assert module.val_order and module.val_examples[0].origin != again.val_examples[0].origin
    monkeypatch.setattr("data_modules.tokens.prepare.is_whole", lambda folder: False)
    with pytest.raises(AssertionError, match="cannot be read back"):
        module.store_references(np.stack([lines, -lines], axis=1))


def test_the_longer_answer_of_a_long_pair_is_cut_and_one_without_a_difference_is_left_out() -> None:
    for chosen, rejected, left in ((12, 4, (6, 4)), (4, 12, (4, 6)), (9, 8, (5, 5))):
        pair = encoded([1], [3] * (chosen - 1)), encoded([1], [4] * (rejected - 1))
        documents, counts = build(pair, sequence_len=10, on_long="truncate_right")
        (example,) = documents.examples(0)
        assert tuple(len(document.input_ids) for document in example.documents()) == left
        assert (counts.truncated, counts.lost_tokens) == (1, chosen + rejected - 10)
        assert build(pair, sequence_len=10)[1].dropped == 1
    same = encoded([1], [3, 2]), encoded([1], [3, 2])
    late = encoded([1], [3] * 8 + [2]), encoded([1], [3] * 8 + [4, 2])
    for pair, note in ((same, "same_answers"), (late, "cut_to_the_same")):
        documents, counts = build(pair, sequence_len=10, on_long="truncate_right")
        assert documents is None and counts.notes == {note: (1, "pairs.jsonl:1")}
        assert counts.empty == 1


def test_the_format_is_said_by_the_objective_and_never_guessed(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(values) + "\n" for values in CHATS))
    config = DataConfig(datasets=[DatasetConfig(path=str(file))])
    assert "objective=dpo" in check_datasets(config)[0]
    assert check_datasets(with_format(config, PREFERENCE)) == []
    assert with_format(config, None) is config
