"""The data module end to end: from files to the batches of every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from common.errors import DataError
from data_modules import Batch, DataConfig, DatasetConfig, DataSpec, PackingConfig
from data_modules.datamodule import FinetuneDataModule
from data_modules.settings import MixtureConfig, check_datasets
from data_modules.types import BatchSpec, ModelSpec
from tests.batches import micro_batches
from tests.data_modules.conftest import alpaca, write_jsonl

NUMBERS = ["one", "two", "three", "one two", "two three"]
ROW = {"instruction": "q", "output": "a"}


def numbers(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Make alpaca rows that differ."""
    return [
        {"instruction": f"q {i}", "output": NUMBERS[i % 5]} for i in range(start, start + count)
    ]


@pytest.fixture
def files(tmp_path: Path) -> list[DatasetConfig]:
    """Write three data sets in three formats."""
    ask, again = {"from": "human", "value": "yes?"}, {"from": "gpt", "value": "no"}
    chats = [
        {
            "conversations": [
                {"from": "human", "value": f"what is {i}?"},
                {"from": "gpt", "value": NUMBERS[i % 5]},
                *(ask, again),
            ]
        }
        for i in range(30)
    ]
    pairs = "".join(f"1 2,3 {i}\n" for i in range(20))
    (tmp_path / "pairs.csv").write_text(f"prompt,completion\n{pairs}")
    return [
        write_jsonl(tmp_path / "lists.jsonl", numbers(40)),
        write_jsonl(tmp_path / "chats.jsonl", chats),
        DatasetConfig(path=str(tmp_path / "pairs.csv")),
    ]


def build(
    datasets: list[DatasetConfig],
    tokenizer: Any,
    *,
    method: str = "multipack",
    rank: int = 0,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    first_rows: int | None = None,
    **options: Any,
) -> FinetuneDataModule:
    """Build and set up a data module with 128-token packs."""
    batching = BatchSpec(**{"micro_batch_size": 2, "accumulation_steps": 2} | options)
    module = FinetuneDataModule(
        DataSpec(
            config=DataConfig(datasets=datasets, **(data or {})),
            packing=PackingConfig(method=method),
            tokenizer=tokenizer,
            model=ModelSpec(**{"context_len": 128} | (model or {})),
            batching=batching,
            seed=seed,
            first_rows=first_rows,
        )
    )
    module.trainer = SimpleNamespace(
        world_size=batching.num_ranks,
        distributed_sampler_kwargs={"num_replicas": batching.num_ranks, "rank": rank},
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    module.setup("fit")
    return module


def labels(batches: list[Batch]) -> list[tuple[int, int, int]]:
    """Return (position, label, data set) of all labels, sorted."""
    found = []
    for batch in batches:
        for where in (batch.labels != -100).nonzero().tolist():
            cell = tuple(where)
            values = (batch.position_ids[cell], batch.labels[cell], batch.dataset_ids[cell])
            found.append(tuple(int(value) for value in values))
    return sorted(found)


def steps(modules: list[FinetuneDataModule], accumulation: int) -> list[list[Batch]]:
    """Return the micro-batches of all ranks by global step."""
    found = []
    for ranks in zip(*(module.train_dataloader() for module in modules), strict=True):
        assert {len(batches) for batches in ranks} == {accumulation}
        found.append([batch for batches in ranks for batch in batches])
    return found


def test_global_steps_do_not_depend_on_ranks_accumulation_and_packing(
    files: list[DatasetConfig], tokenizer: Any
) -> None:
    found: dict[str, list[list[list[tuple[int, int, int]]]]] = {}
    for method in ("multipack", "none"):
        for micro, accumulation, world in ((8, 1, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2)):
            batching = {"micro_batch_size": micro, "accumulation_steps": accumulation}
            modules = [
                build(
                    *(files, tokenizer),
                    method=method,
                    rank=rank,
                    num_ranks=world,
                    data={"train_on_inputs": True},  # but for the first token of a document
                    **batching,
                )
                for rank in range(world)
            ]
            by_step = steps(modules, accumulation)
            assert len(by_step) == modules[0].total_steps > 0
            for batches in by_step:
                total = sum(float(batch.loss_weights.sum()) for batch in batches)
                assert {batch.step_weight for batch in batches} == {total}
                if method == "multipack":
                    shapes = {batch.input_ids.shape[0] for batch in batches}
                    assert shapes == {1} and batches[0].input_ids.shape[1] <= 128 * micro
            found.setdefault(method, []).append([labels(batches) for batches in by_step])
        assert all(other == found[method][0] for other in found[method])
    packed, padded = (sorted(chain.from_iterable(one[0])) for one in found.values())
    assert packed == padded


def test_a_trainer_of_other_ranks_than_planned_is_refused(
    files: list[DatasetConfig], tokenizer: Any
) -> None:
    module = build(files, tokenizer)
    module.trainer.distributed_sampler_kwargs["num_replicas"] = 2
    with pytest.raises(ValueError, match="planned for 1 ranks"):
        module.train_dataloader()


def test_validation_rows_are_not_trained_on(files: list[DatasetConfig], tokenizer: Any) -> None:
    module = build(files, tokenizer, data={"val_set_size": 0.1})
    origins = [
        {(e.origin.file, e.origin.line) for e in examples}
        for examples in (module.train_examples, module.val_examples)
    ]
    assert not origins[0] & origins[1]
    assert len(origins[0] | origins[1]) == 90
    assert [report.validation_rows for report in module.report.datasets] == [4, 3, 2]
    again = build(files, tokenizer, data={"val_set_size": 0.1}, max_steps=3, micro_batch_size=1)
    assert [e.origin for e in again.val_examples] == [e.origin for e in module.val_examples]


@pytest.mark.parametrize("world", [1, 2])
def test_a_validation_pass_has_each_row_once(
    files: list[DatasetConfig], tokenizer: Any, world: int
) -> None:
    loaders = []
    for rank in range(world):
        module = build(files, tokenizer, rank=rank, num_ranks=world, data={"val_set_size": 0.3})
        loaders.append(list(module.val_dataloader()))
    assert len({len(loader) for loader in loaders}) == 1
    batches = [batch for loader in loaders for batch in loader]
    tokens = sum(len(e.input_ids) for e in module.val_examples)
    assert sum(batch.num_tokens for batch in batches) == tokens
    assert {batch.step_weight for batch in batches} == {1.0}


def test_weights_of_data_sets_without_validation(
    files: list[DatasetConfig], tokenizer: Any
) -> None:
    files[0].weight, files[1].weight = 2.0, 0.5
    module = build(files, tokenizer, data={"val_set_size": 0})
    assert module.val_dataloader() == [] and module.prompts(5) == {}
    counts = [0, 0, 0]
    for batch in micro_batches(module):
        starts = (batch.position_ids == 0) & (batch.input_ids != -1)
        if batch.num_tokens:
            for dataset in batch.dataset_ids[starts].tolist():
                counts[dataset] += 1
    assert counts == [80, 15, 20]


@pytest.mark.parametrize(
    ("requested", "context_len", "sequence_len"),
    [(None, 512, 512), (None, 8192, 2048), (None, None, 2048), (4096, 8192, 4096)],
)
def test_sequence_len(requested: int | None, context_len: int | None, sequence_len: int) -> None:
    spec = DataSpec(
        config=DataConfig(sequence_len=requested),
        packing=PackingConfig(),
        tokenizer=None,
        model=ModelSpec(context_len=context_len),
        batching=BatchSpec(),
        seed=0,
    )
    assert spec.sequence_len == sequence_len
    above = replace(spec, model=ModelSpec(context_len=512), config=DataConfig(sequence_len=1024))
    with pytest.raises(DataError, match=r"sequence_len is 1,024, the model's context 512 tokens"):
        _ = above.sequence_len


def test_prompts_come_from_validation_or_test_rows(
    files: list[DatasetConfig], tokenizer: Any, tmp_path: Path
) -> None:
    module = build(files, tokenizer, data={"val_set_size": 4})
    prompts = module.prompts(3)
    assert {name: len(rows) for name, rows in prompts.items()} == dict.fromkeys(
        ("lists", "chats", "pairs"), 3
    )
    assert tokenizer.decode(prompts["pairs"][0].input_ids) == "1 2"
    assert all(rows[0].input_ids for rows in prompts.values())
    assert [prompt.answer[:2] for prompt in prompts["pairs"]] == ["3 "] * 3
    held_out = {str(example.origin) for example in module.val_examples}
    requested = [str(prompt.origin) for rows in module.prompts(9).values() for prompt in rows]
    assert len(requested) == 12 and set(requested) == held_out
    requested = tokenizer.decode(prompts["chats"][0].input_ids)
    assert requested.endswith("yes?\n\n### Assistant:\n")
    test = write_jsonl(tmp_path / "test.jsonl", [ROW])
    prompts = build(files, tokenizer, data={"test_datasets": [test]}).prompts(3)
    assert [prompt.answer for prompt in prompts["test"]] == ["a"] and len(prompts) == 1


def test_test_rows_are_read_at_setup_and_need_no_training_data(
    tokenizer: Any, tmp_path: Path
) -> None:
    test = DatasetConfig(path=str(tmp_path / "test.jsonl"))
    with pytest.raises(DataError, match=r"test.jsonl: no such file"):
        build([], tokenizer, data={"test_datasets": [test]})
    write_jsonl(tmp_path / "test.jsonl", [ROW])
    module = build([], tokenizer, data={"test_datasets": [test]}, model={"vocab_size": 999})
    (kept,) = module.report.test_datasets
    assert (kept.name, kept.path, len(kept.sha256)) == ("test", test.path, 64)
    assert len(module.prompts(9)["test"]) == 1 and module.val_dataloader() == []
    assert module.template.stop_token_ids == {tokenizer.eos_token_id}
    assert module.report.datasets == []


def test_too_long_prompts_are_skipped_with_a_warning(
    files: list[DatasetConfig], tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"instruction": q, "output": "one"} for q in ("q", "two " * 500, "three", "q" * 999)]
    test = write_jsonl(tmp_path / "test.jsonl", rows)
    module = build(files, tokenizer, data={"test_datasets": [test]})
    assert len(module.prompts(9)["test"]) == 2
    assert "test: 2 of 4 prompts are longer than 128 tokens and are left out" in caplog.text


def test_token_ids_beyond_the_embedding_are_an_error(
    files: list[DatasetConfig], tokenizer: Any
) -> None:
    module = build(files, tokenizer, model={"vocab_size": None})
    examples = [*module.train_examples, *module.val_examples]
    largest = max(int(example.input_ids.max()) for example in examples)
    build(files, tokenizer, model={"vocab_size": largest + 1})
    message = (
        rf"holds token id {largest}, the model's embedding has {largest} rows; set model.token"
    )
    with pytest.raises(DataError, match=message):
        build(files, tokenizer, model={"vocab_size": largest})
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(DataError, match=rf"pad token has id {tokenizer.pad_token_id}, .* rows"):
        build(files, tokenizer, model={"vocab_size": largest + 1})


def test_batches_are_pinned_and_moved_asynchronously_only_for_a_gpu(
    files: list[DatasetConfig], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(files, tokenizer)
    # A run on the CPU of a machine with a GPU leaves the GPU alone.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda:0", "cpu"):
        module.trainer.strategy.root_device = torch.device(device)
        for loader in (module.train_dataloader()._batches, module.val_dataloader()):
            assert loader.pin_memory is (device != "cpu")
    step = next(iter(module.train_dataloader()))
    assert module.transfer_batch_to_device(step, torch.device("meta"), 0) is step
    requested = []
    monkeypatch.setattr(
        Batch, "to", lambda self, device, non_blocking: requested.append(non_blocking)
    )
    for name in ("cuda:0", "cpu"):
        module.transfer_batch_to_device(step[0], torch.device(name), 0)
    assert requested == [True, False]
    module.trainer = None  # as in `app.evaluate`
    assert module.whole_val_dataloader().pin_memory


def test_workers_are_persistent_and_give_the_same_batches(
    files: list[DatasetConfig], tokenizer: Any
) -> None:
    alone, helped = (
        build(files, tokenizer, max_steps=4, data={"num_workers": number}) for number in (0, 1)
    )
    for batch, expected in zip(micro_batches(helped), micro_batches(alone), strict=True):
        assert torch.equal(batch.labels, expected.labels)
        assert batch.document_lengths == expected.document_lengths
    loader, pids = helped.val_dataloader(), set()
    for _ in range(2):
        batches = iter(loader)
        pids.add(batches._workers[0].pid)
        assert len(list(batches)) == len(loader)
    assert len(pids) == 1


def test_loaders_do_not_change_the_global_random_state(
    files: list[DatasetConfig], tokenizer: Any
) -> None:
    module = build(files, tokenizer)
    before = torch.get_rng_state()
    list(module.train_dataloader())
    list(module.val_dataloader())
    assert torch.equal(before, torch.get_rng_state())


def test_report_and_audit_count_capped_rows(files: list[DatasetConfig], tokenizer: Any) -> None:
    files[0].max_rows = 7
    module = build(files, tokenizer)
    assert module.report.datasets[0].train_rows == 7
    assert module.audit.datasets[0].train == module.mixture_report()[0].rows == 7


def test_a_share_that_holds_out_more_rows_than_the_used_ones_suggest_is_said(
    tmp_path: Path, tokenizer: Any
) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", numbers(100))
    for size, max_rows, said in (
        (0.2, 10, True),
        (0.2, 90, False),
        (0.2, None, False),
        (9, 1, False),
    ):
        dataset = replace(file, max_rows=max_rows)
        lines = build([dataset], tokenizer, data={"val_set_size": size}).summary()
        note = "0.2 is a share of all rows, not of max_rows=10: "
        fix = "type data.val_set_size=2 to hold out fewer rows"
        assert any(note + fix in line for line in lines) == said
    other = write_jsonl(tmp_path / "e.jsonl", numbers(100))
    datasets = [replace(file, max_rows=10), other]
    (line,) = [
        line
        for line in build(datasets, tokenizer, data={"val_set_size": 0.2}).summary()
        if note in line
    ]
    assert "data.val_set_size=N holds out N rows of each data set" in line


def test_prompts_are_held_out_rows_at_any_position(tmp_path: Path, tokenizer: Any) -> None:
    # All rows on one line and a row that is dropped: neither line nor count names a row alone.
    rows = [{"instruction": f"q {i}", "output": "a " * (1 + 500 * (i == 3))} for i in range(20)]
    file = tmp_path / "d.json"
    file.write_text(json.dumps(rows))
    module = build([DatasetConfig(path=str(file))], tokenizer, data={"val_set_size": 6})
    held_out = {tokenizer.decode(e.input_ids).split("\n")[1] for e in module.val_examples}
    requested = {tokenizer.decode(p.input_ids).split("\n")[1] for p in module.prompts(9)["d"]}
    assert requested == held_out and len(requested) == 6


@pytest.mark.parametrize("method", ["multipack", "none"])
def test_pairs_for_an_encoder_decoder_model(
    method: str, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = make_tokenizer(["<pad>", "</s>"], eos="</s>")
    rows = [{"prompt": f"what is {i}?", "completion": f"it is {i}"} for i in range(12)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    module = build(
        [DatasetConfig(path=str(tmp_path / "d.json"))],
        tokenizer,
        method=method,
        data={"val_set_size": 2},
        model={"decoder_start_token_id": tokenizer.convert_tokens_to_ids("<pad>")},
    )
    seen = []
    for batch in micro_batches(module):
        assert batch.decoder is not None
        for row, (sources, targets) in enumerate(
            zip(batch.document_lengths, batch.decoder.document_lengths, strict=True)
        ):
            texts = batch.input_ids[row][: sum(sources)].split(sources)
            labels = batch.labels[row][: sum(targets)].split(targets)
            seen += [
                (tokenizer.decode(text, skip_special_tokens=True), tokenizer.decode(label))
                for text, label in zip(texts, labels, strict=True)
            ]
    assert len(seen) == len(set(seen)) == 10
    numbers = [text.removeprefix("what is ").removesuffix("?") for text, _ in seen]
    assert [label for _, label in seen] == [f"it is {number}</s>" for number in numbers]
    assert [prompt.answer[:5] for prompt in module.prompts(9)["d"]] == ["it is"] * 2


def test_a_tokenizer_without_turn_separator_accepts_only_token_rows(tmp_path: Path) -> None:
    """Such a tokenizer makes one token of any text."""
    words = {f"w{number}": number for number in range(32)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
        pad_token="w0",
        unk_token="w1",
        eos_token="w2",
    )
    ids = list(range(3, 20))
    tokens = write_jsonl(tmp_path / "tokens.jsonl", [{"input_ids": ids, "labels": ids}] * 4)
    build([replace(tokens, format="pretokenized")], tokenizer, data={"val_set_size": 0})
    turns = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 4)
    with pytest.raises(DataError, match="its loss mask is wrong"):
        build([replace(chats, format="messages")], tokenizer, data={"val_set_size": 0})


def test_what_nothing_reads_is_said_in_one_line(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data_modules.source import opening

    monkeypatch.setattr(opening, "CHUNK_BYTES", 2000)  # many chunks, in several processes
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "one", "name": "b"}]
    rows = [{"messages": chat, "id": i, "topic": "x" if i < 3 else None} for i in range(100)]
    texts = tmp_path / "texts.csv"
    texts.write_text("text,url\n" + "one two,http\n" * 40 + "three,\n")
    datasets = [write_jsonl(tmp_path / "chats.jsonl", rows), DatasetConfig(path=str(texts))]
    data = {"val_set_size": 0, "test_datasets": [datasets[1]], "num_proc": 2}
    for _ in range(2):  # also from the cache
        module = build(datasets, tokenizer, data=data)
        (line,) = [line for line in module.summary() if "nothing reads" in line]
        assert line == (
            "columns and keys that nothing reads: chats: id (100 rows), messages[].name (100 "
            "rows), topic (3 rows); texts: url (40 rows); test data texts: url (40 rows)"
        )
    full = next(line for line in module.audit.notes() if "nothing reads" in line)
    assert f"topic (3 rows, first {tmp_path}/chats.jsonl:1)" in full
    data = {"val_set_size": 0, "streaming": True, "mixture": MixtureConfig(weights="rows")}
    stream = build(datasets, tokenizer, data=data, max_steps=2)
    (line,) = [line for line in stream.summary() if "nothing reads" in line]
    assert "reads: chats: id (" in line and "; texts: url (" in line


@pytest.fixture
def train(tmp_path: Path) -> DatasetConfig:
    return write_jsonl(tmp_path / "train.jsonl", numbers(40))


@pytest.fixture
def val(tmp_path: Path) -> DatasetConfig:
    return write_jsonl(tmp_path / "held.jsonl", numbers(12, 100))


def test_the_rows_of_a_validation_file_are_all_validation(
    train: DatasetConfig, val: DatasetConfig, tokenizer: Any
) -> None:
    module = build([train], tokenizer, data={"val_datasets": [val]})
    assert module.dataset_names == ["train", "held"]
    assert module.trained_names == ["train"]
    assert len(module.train_examples) == 40  # no share is held out
    assert module.train_examples.datasets.tolist() == [0] * 40
    assert module.val_examples.datasets.tolist() == [1] * 12
    assert {example.origin.file for example in module.val_examples} == {val.path}
    trained, held = module.report.datasets
    assert (trained.train_rows, trained.validation_rows) == (40, 0)
    assert (held.train_rows, held.validation_rows, held.key) == (0, 12, "data.val_datasets[0]")
    assert "12 validation, never trained on" in held.line()
    assert "too few" not in " ".join([trained.line(), *module.summary()])
    assert any("data.val_set_size=0.05 is not applied" in line for line in module.summary())
    assert list(module.prompts(3)) == ["held"]
    module.audit.check()
    assert sum(1 for _ in module.val_dataloader()) > 0
    capped = replace(val, max_rows=5)
    one, two = (build([train], tokenizer, data={"val_datasets": [capped]}) for _ in range(2))
    assert len(one.val_examples) == 5
    assert np.array_equal(one.val_examples.digests, two.val_examples.digests)
    assert np.array_equal(one.train_examples.digests, module.train_examples.digests)
    alone = build([], tokenizer, data={"val_datasets": [val]})  # as for an evaluation
    assert alone.val_examples.datasets.tolist() == [0] * 12


def test_leaks_into_training_are_told(train: DatasetConfig, tmp_path: Path, tokenizer: Any) -> None:
    leaky = write_jsonl(tmp_path / "leaky.jsonl", numbers(10, 37))  # 3 rows of the training file
    module = build([train], tokenizer, data={"val_datasets": [leaky]})
    assert len(module.train_examples) == 40
    assert module.audit.datasets[1].repeated == 3
    text = " ".join(module.summary())
    assert "leaky" in text
    assert "are also in the training data" in text


def test_a_stream_leaves_out_validation_rows(
    train: DatasetConfig, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.stream.WINDOW_PACKS", 2)
    leaky = write_jsonl(tmp_path / "leaky.jsonl", numbers(10, 37))
    module = build(
        [train], tokenizer, data={"val_datasets": [leaky], "streaming": True}, max_steps=3
    )
    assert module.dataset_names == ["train", "leaky"]
    assert module.val_examples.datasets.tolist() == [1] * 10
    module.audit.check()
    held_out = set(module.val_examples.digests.tolist())
    batches = iter(micro_batches(module))
    assert len(held_out) == 10
    assert all(set(next(batches).dataset_ids.flatten().tolist()) <= {0} for _ in range(3))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_rows_of_a_stream_are_warned_of_as_those_of_a_file(
    tmp_path: Path, tokenizer: Any, val: DatasetConfig, streaming: bool
) -> None:
    """Rows that are too long, have no answer, or hold a control token are not passed over."""
    rows = [*numbers(60), {"instruction": "long", "output": "one " * 300}]
    chats: list[list[dict[str, Any]]] = [
        [
            {"role": "user", "content": row["instruction"]},
            {"role": "assistant", "content": row["output"]},
        ]
        for row in rows
    ]
    chats[0][0]["content"] = "q </s>"
    chats.append([{"role": "user", "content": "q"}, {**chats[1][1], "weight": 0}])
    file = write_jsonl(tmp_path / "many.jsonl", [{"messages": turns} for turns in chats])
    data = {"val_datasets": [val], "streaming": streaming}
    found = build([file], tokenizer, data=data, max_steps=3).audit
    unit = "first rows" if streaming else "rows"
    said = " | ".join(text for text in found.warnings if text.startswith("many:"))
    assert f"many: 1 of 62 {unit} (" in said and "=128 and dropped" in said
    assert f"many: 1 of 62 {unit} have nothing to train on" in said
    assert f"many: 1 of 62 {unit} have control tokens in their text" in said


def test_a_stream_whose_rows_are_all_too_long_says_so(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"instruction": "q", "output": f"{n} " * 300} for n in range(4)]
    file = write_jsonl(tmp_path / "long.jsonl", rows)
    module = build([file], tokenizer, data={"streaming": True, "val_set_size": 0}, max_steps=3)
    with pytest.raises(DataError, match="no row of 4 is left: 4 are longer than 128 tokens"):
        next(iter(micro_batches(module)))


@pytest.mark.parametrize("streaming", [False, True])
def test_settings_that_no_row_of_a_data_set_reads_are_said(
    tmp_path: Path, tokenizer: Any, val: DatasetConfig, streaming: bool
) -> None:
    ids = [{"input_ids": [5, 6, 7, n], "labels": [-100, 6, 7, n], "seen": 1} for n in range(8, 40)]
    texts = [{"text": f"text {n}"} for n in range(32)]
    chats = alpaca(*map(str, range(32)))
    kinds = {"ids": ids, "texts": texts, "chats": chats}
    files = [write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in kinds.items()]
    changes: dict[str, Any] = {
        "train_on_eos": "none",
        "roles_to_train": ["user", "assistant"],
        "val_set_size": 0,
    }
    if streaming:
        changes |= {"streaming": True, "mixture": MixtureConfig(weights="rows")}
    for more in ({}, {"val_datasets": [val]}):
        found = build(files, tokenizer, data=changes | more, max_steps=3).audit
        typed = "data.roles_to_train=[user, assistant]"
        said = [text for text in found.warnings if "no effect" in text]
        unit = "32 of 32 first rows" if streaming else "32 of 32 rows"
        assert said == [
            f"ids: {unit} hold token ids with a mask of their own, on which {typed}, "
            "data.train_on_eos=none have no effect",
            f"texts: {unit} are texts without turns, on which {typed} has no effect",
        ]
        assert [name for name, *_ in found.unread["ids"]] == ["seen"]
    defaults = {**changes, "train_on_eos": "turn", "roles_to_train": ["assistant"]}
    found = build(files, tokenizer, data=defaults, max_steps=3).audit
    assert not any("no effect" in text for text in found.warnings)


def test_wrong_settings_are_refused_by_their_key(train: DatasetConfig, val: DatasetConfig) -> None:
    train.name = "train"
    assert check_datasets(DataConfig(datasets=[train])) == []
    for change, words in (
        ({"weight": 2.0}, "data.val_datasets[0].weight=2 has no effect"),
        ({"name": "train"}, "name 'train' is already that of data.datasets[0]"),
        ({"name": "a/b"}, "holds a slash"),
        ({"format": "alpca"}, "data.val_datasets[0].format"),
    ):
        changed = [replace(val, **change)]
        (problem,) = check_datasets(DataConfig(datasets=[train], val_datasets=changed))
        assert words in problem
    tests = [replace(val, weight=0.5)]
    (problem,) = check_datasets(DataConfig(datasets=[train], test_datasets=tests))
    assert "data.test_datasets[0].weight=0.5 has no effect: each test row is measured" in problem
