"""Streams: the ranks together read every row once, and the weights of the steps are exact."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import DataError
from data_modules import Batch, DataConfig, DatasetConfig, Example
from data_modules.datamodule import FinetuneDataModule
from data_modules.settings import MixtureConfig, check_datasets
from data_modules.stream import StreamPlan, TokenStream
from tests.batches import micro_batches
from tests.data_modules.test_datamodule import build as build_module
from tests.processes import LONGEST
from tests.reliability.shell import Shell


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("data_modules.source.opening.CHUNK_BYTES", 1000)
    monkeypatch.setattr("data_modules.stream.WINDOW_PACKS", 4)
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / "cache"))


def write(file: Path, count: int, word: str = "one") -> DatasetConfig:
    rows = ({"prompt": f"{index}", "completion": f" {word} {index}"} for index in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(file))


def build(
    datasets: list[DatasetConfig],
    tokenizer: Any,
    *,
    num_ranks: int = 1,
    max_steps: int | None = 6,
    vocab_size: int | None = None,
    rank: int = 0,
    **data: Any,
) -> FinetuneDataModule:
    settings = {"streaming": True, "val_set_size": 0, **data}
    model = {"context_len": 64, "vocab_size": vocab_size}
    batching = {"micro_batch_size": 1, "num_ranks": num_ranks, "max_steps": max_steps}
    return build_module(
        datasets, tokenizer, rank=rank, data=settings, model=model, seed=3, **batching
    )


def texts(batches: list[Batch], tokenizer: Any) -> list[str]:
    found = []
    for batch in batches:
        ids = batch.input_ids[0].split(batch.document_lengths[0])
        found += [tokenizer.decode(one) for one in ids]
    return found


def stream_of(module: FinetuneDataModule, count: int) -> list[Batch]:
    return list(itertools.islice(iter(module._stream()), count))


def test_number_and_weight_of_steps_are_exact(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 200)], tokenizer)
    steps = list(module.train_dataloader())
    assert len(steps) == len(module.train_dataloader()) == module.total_steps == 6
    for first, second in steps:
        weight = float(first.loss_weights.sum() + second.loss_weights.sum())
        assert first.step_weight == second.step_weight == weight > 0


def test_each_row_is_read_once_before_any_repeats(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 150)], tokenizer)
    seen = texts(stream_of(module, 60), tokenizer)
    # A window may reach from one round into the next, and the end cuts through one.
    assert len(set(seen)) == 150
    counts = [seen.count(text) for text in set(seen)]
    assert max(counts) - min(counts) <= 2


def test_ranks_read_different_rows_and_miss_none(tmp_path: Path, tokenizer: Any) -> None:
    files = [write(tmp_path / "a.jsonl", 200)]
    shares = []
    for rank in range(3):
        module = build(files, tokenizer, rank=rank, num_ranks=3)
        shares.append(set(texts(stream_of(module, 40), tokenizer)))
    assert sum(map(len, shares)) == len(set.union(*shares)) == 200


def test_loader_workers_share_the_rows_of_a_rank(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 200)], tokenizer, num_workers=2, max_steps=8)
    seen = texts(micro_batches(module), tokenizer)
    assert len(seen) == len(set(seen)) > 50


def test_the_order_depends_on_the_seed_and_can_start_later(tmp_path: Path, tokenizer: Any) -> None:
    files = [write(tmp_path / "a.jsonl", 200)]
    everything = micro_batches(build(files, tokenizer))
    module = build(files, tokenizer)
    module.first_step = 4
    rest = micro_batches(module)
    assert len(rest) == 2 * len(module.train_dataloader()) == 4
    for batch, expected in zip(rest, everything[8:], strict=True):
        assert torch.equal(batch.input_ids, expected.input_ids)
        assert batch.step_weight == expected.step_weight
    window = texts(everything, tokenizer)
    assert window != sorted(window, key=lambda text: int(text.split(" ")[0]))


@pytest.mark.parametrize(("steps", "ends"), [(40, 10), (8, 8), (25, 8)])
def test_a_tenth_of_a_stream_counts_as_an_epoch(steps: int, ends: int) -> None:
    plan = StreamPlan(steps, 4)
    assert sum(map(plan.ends_epoch, range(1, steps + 1))) == ends


def test_ranks_share_the_weight_of_a_step_without_reading_it(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda number: number.mul_(2))
    module = build([write(tmp_path / "a.jsonl", 200)], tokenizer, num_ranks=2)
    (first, second), *_ = module.train_dataloader()
    own = first.loss_weights.sum() + second.loss_weights.sum()
    assert isinstance(first.step_weight, torch.Tensor)
    assert first.step_weight.device == torch.device("cpu") and first.step_weight.shape == ()
    assert first.step_weight == second.step_weight == 2 * own > 0


def test_the_next_window_is_prefetched(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    take = TokenStream._take_window

    def counted(stream: TokenStream, *args: Any) -> Iterator[Example]:
        started.append(threading.current_thread().name)
        return take(stream, *args)

    monkeypatch.setattr(TokenStream, "_take_window", counted)
    batches = iter(build([write(tmp_path / "a.jsonl", 200)], tokenizer)._stream())
    next(batches)
    until = time.monotonic() + LONGEST
    while len(started) < 2:
        assert time.monotonic() < until, "nothing is read ahead"
        time.sleep(0.01)
    list(itertools.islice(batches, 3))  # the rest of the first window
    assert len(started) == 2
    assert threading.main_thread().name not in started
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name in started]


def test_a_fatal_row_does_not_affect_earlier_windows(tmp_path: Path, tokenizer: Any) -> None:
    good = write(tmp_path / "a.jsonl", 60)
    whole = stream_of(build([good], tokenizer), 4)
    with Path(good.path).open("a") as file:
        file.write('{"prompt": 3, "completion": "x"}\n')
    batches = iter(build([good], tokenizer)._stream())
    for expected in whole:
        assert torch.equal(next(batches).input_ids, expected.input_ids)
    with pytest.raises(DataError, match=r"a\.jsonl:61 prompt"):
        list(batches)
    assert len(stream_of(build([good], tokenizer, on_bad_row="quarantine"), 9)) == 9


def test_weights_are_shares_of_rows(tmp_path: Path, tokenizer: Any) -> None:
    files = [write(tmp_path / "a.jsonl", 300), write(tmp_path / "b.jsonl", 300, "two")]
    files[0].weight, files[1].weight = 3.0, 1.0
    for weights in ("rows", "tokens"):
        module = build(files, tokenizer, mixture=MixtureConfig(weights=weights))
        seen = texts(stream_of(module, 30), tokenizer)
        sizes = [len(tokenizer(text)["input_ids"]) if weights == "tokens" else 1 for text in seen]
        ours = sum(size for size, text in zip(sizes, seen, strict=True) if "one" in text)
        assert abs(ours / sum(sizes) - 0.75) < 0.05


def test_rows_for_validation_are_never_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 100)], tokenizer, val_set_size=10)
    held_out = {tokenizer.decode(example.input_ids) for example in module.val_examples}
    seen = set(texts(stream_of(module, 60), tokenizer))
    assert len(held_out) == 10 and len(seen) == 90 and not held_out & seen
    assert "its first 10 rows are for validation" in module.report.lines()[0]
    assert [one.train for one in module.audit.datasets] == [10]


def test_a_repeated_validation_row_is_masked(tmp_path: Path, tokenizer: Any) -> None:
    dataset = write(tmp_path / "a.jsonl", 60)
    lines = Path(dataset.path).read_text().splitlines(keepends=True)
    Path(dataset.path).write_text("".join(lines + lines[:20]))
    module = build([dataset], tokenizer, val_set_size=10)
    seen = set(texts(stream_of(module, 60), tokenizer))
    held_out = {tokenizer.decode(example.input_ids) for example in module.val_examples}
    assert len(seen) == 50 and not held_out & seen


def test_all_ranks_read_one_format(tmp_path: Path, tokenizer: Any) -> None:
    kinds = [{"prompt": "q", "completion": "a"}, {"text": "one"}]
    rows = kinds * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [DatasetConfig(path=str(tmp_path / "a.jsonl"))]
    with pytest.raises(DataError, match="missing"):
        for rank in range(2):
            stream_of(build(files, tokenizer, rank=rank, num_ranks=2), 3)


def test_a_stream_without_validation_has_no_prompts(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 30)], tokenizer)
    assert module.prompts(5) == {} and not module.val_dataloader()
    module.write_reports(tmp_path)
    assert len(module.probe()["input_ids"]) > 3


def test_tokens_beyond_the_embedding_are_named(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 30)], tokenizer, vocab_size=50)
    with pytest.raises(DataError, match=r"a\.jsonl:\d+ holds token id .* embedding has 50 rows"):
        stream_of(module, 1)


def test_long_rows_can_stop_a_stream(tmp_path: Path, tokenizer: Any) -> None:
    dataset = write(tmp_path / "a.jsonl", 30)
    with Path(dataset.path).open("a") as file:
        file.write(json.dumps({"prompt": "q", "completion": "one " * 99}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:31 has \d+ tokens"):
        stream_of(build([dataset], tokenizer, on_long="error"), 99)
    assert len(stream_of(build([dataset], tokenizer), 30)) == 30


def test_an_error_of_a_worker_is_reported_as_it_is(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.stream.WINDOW_PACKS", 8)  # it ends after one that it reads
    dataset = write(tmp_path / "a.jsonl", 30)
    with Path(dataset.path).open("a") as file:
        file.write('{"prompt": 3, "completion": "x"}\n' * 2)
    before = set(multiprocessing.active_children())
    with pytest.raises(DataError) as caught:
        list(build([dataset], tokenizer, max_steps=99, num_workers=1).train_dataloader())
    problems = [problem.split("/")[-1][:17] for problem in caught.value.problems]
    assert problems == ["a.jsonl:31 prompt", "a.jsonl:32 prompt"]
    del caught
    assert set(multiprocessing.active_children()) <= before  # its worker has ended with it


def test_a_stream_without_an_end_needs_max_steps(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 100)], tokenizer, max_steps=None)
    with pytest.raises(DataError, match=r"trainer\.max_steps"):
        module.train_dataloader()


def test_too_few_rows_for_the_ranks(tmp_path: Path, tokenizer: Any) -> None:
    module = build([write(tmp_path / "a.jsonl", 2)], tokenizer, rank=3, num_ranks=4)
    with pytest.raises(DataError, match=r"too small for a stream: set data\.streaming=false"):
        stream_of(module, 1)


def test_settings_not_available_for_streams_are_refused(tmp_path: Path) -> None:
    datasets = [write(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", 3)]
    datasets[0].split, datasets[1].max_rows = "train[:90%]", 5
    found = check_datasets(DataConfig(datasets=datasets, streaming=True, max_dropped_share=0.1))
    assert [problem.split(" ")[0].split("=")[0] for problem in found] == [
        "data.val_set_size",
        "data.datasets[0].split",
        "data.max_dropped_share",
        "data.datasets[1].max_rows",
        "data.mixture.weights",
    ]


@pytest.mark.slow
def test_a_run_trains_on_a_stream_with_workers(shell: Shell, tmp_path: Path, stories: Path) -> None:
    # In a process of its own: a tokenizer that used its threads before the fork hung the workers.
    rows = [{"prompt": f"Once upon a time {index}", "completion": " yes"} for index in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"model.path={stories}",
        f"data.datasets=[{{path: {tmp_path / 'a.jsonl'}}}]",
        "data.streaming=true",
        "data.val_set_size=20",
        "data.num_workers=2",
        "trainer.max_steps=3",
        "logger=csv",
    ]
    shell.train_into(tmp_path / "run", *words, environment={"TOKENIZERS_PARALLELISM": "true"})
    assert (tmp_path / "run/metrics.json").exists()
