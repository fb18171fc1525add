"""Streams: the ranks together read every row once, and the weights of the steps are exact."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import DataError
from data_modules import Batch, DataConfig, DatasetConfig
from data_modules.datamodule import FinetuneDataModule
from data_modules.settings import MixtureConfig, check_datasets
from data_modules.stream import StreamPlan
from tests.batches import micro_batches
from tests.data_modules.conftest import write_jsonl
from tests.data_modules.test_datamodule import build as build_module
from tests.reliability.shell import Shell


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("data_modules.source.opening.CHUNK_BYTES", 1000)
    monkeypatch.setattr("data_modules.stream.WINDOW_PACKS", 4)
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / "cache"))


def write(file: Path, count: int, word: str = "one") -> DatasetConfig:
    return write_jsonl(
        file, [{"prompt": f"{index}", "completion": f" {word} {index}"} for index in range(count)]
    )


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


def test_the_ranks_together_read_each_row_once_before_any_repeats(
    tmp_path: Path, tokenizer: Any
) -> None:
    files = [write(tmp_path / "a.jsonl", 150)]
    seen = texts(stream_of(build(files, tokenizer), 60), tokenizer)
    # A window may reach from one round into the next, and the end cuts through one.
    counts = Counter(seen)
    assert len(counts) == 150 and max(counts.values()) - min(counts.values()) <= 2
    modules = [build(files, tokenizer, rank=rank, num_ranks=3) for rank in range(3)]
    shares = [set(texts(stream_of(module, 30), tokenizer)) for module in modules]
    assert sum(map(len, shares)) == len(set.union(*shares)) == 150
    few = build([write(tmp_path / "b.jsonl", 2)], tokenizer, rank=3, num_ranks=4)
    with pytest.raises(DataError, match=r"too small for a stream: set data\.streaming=false"):
        stream_of(few, 1)


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


def test_a_tenth_of_a_stream_counts_as_an_epoch() -> None:
    for steps, ends in ((40, 10), (8, 8), (25, 8)):
        assert sum(map(StreamPlan(steps, 4).ends_epoch, range(1, steps + 1))) == ends


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


def test_weights_are_shares_of_rows(tmp_path: Path, tokenizer: Any) -> None:
    files = [write(tmp_path / "a.jsonl", 300), write(tmp_path / "b.jsonl", 300, "two")]
    files[0].weight, files[1].weight = 3.0, 1.0
    for weights in ("rows", "tokens"):
        module = build(files, tokenizer, mixture=MixtureConfig(weights=weights))
        seen = texts(stream_of(module, 30), tokenizer)
        sizes = [len(tokenizer(text)["input_ids"]) if weights == "tokens" else 1 for text in seen]
        ours = sum(size for size, text in zip(sizes, seen, strict=True) if "one" in text)
        assert abs(ours / sum(sizes) - 0.75) < 0.05


def test_rows_for_validation_are_never_trained_on_even_if_they_repeat(
    tmp_path: Path, tokenizer: Any
) -> None:
    dataset = write(tmp_path / "a.jsonl", 60)
    lines = Path(dataset.path).read_text().splitlines(keepends=True)
    Path(dataset.path).write_text("".join(lines + lines[:20]))
    module = build([dataset], tokenizer, val_set_size=10)
    held_out = {tokenizer.decode(example.input_ids) for example in module.val_examples}
    seen = set(texts(stream_of(module, 60), tokenizer))
    assert len(held_out) == 10 and len(seen) == 50 and not held_out & seen
    assert "its first 10 rows are for validation" in module.report.lines()[0]
    without = build([dataset], tokenizer)
    assert without.prompts(5) == {} and not without.val_dataloader()
    without.write_reports(tmp_path)
    assert len(without.probe()["input_ids"]) > 3


def test_rows_that_stop_a_stream_are_named(tmp_path: Path, tokenizer: Any) -> None:
    dataset = write(tmp_path / "a.jsonl", 30)
    with pytest.raises(DataError, match=r"a\.jsonl:\d+ holds token id .* embedding has 50 rows"):
        stream_of(build([dataset], tokenizer, vocab_size=50), 1)
    with Path(dataset.path).open("a") as file:
        file.write(json.dumps({"prompt": "q", "completion": "one " * 99}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:31 has \d+ tokens"):
        stream_of(build([dataset], tokenizer, on_long="error"), 99)
    assert len(stream_of(build([dataset], tokenizer), 30)) == 30
    with pytest.raises(DataError, match=r"trainer\.max_steps"):
        build([dataset], tokenizer, max_steps=None).train_dataloader()
    # All ranks read the format of the first row.
    rows: list[dict[str, str]] = [{"prompt": "q", "completion": "a"}, {"text": "one"}] * 20
    files = [write_jsonl(tmp_path / "b.jsonl", rows)]
    with pytest.raises(DataError, match="missing"):
        stream_of(build(files, tokenizer, rank=1, num_ranks=2), 3)


def test_an_error_of_a_worker_is_reported_as_it_is(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.stream.WINDOW_PACKS", 8)  # it ends after one that it reads
    dataset = write(tmp_path / "a.jsonl", 30)
    with Path(dataset.path).open("a") as file:
        file.write('{"prompt": 3, "completion": "x"}\n' * 2)
    before = set(multiprocessing.active_children())
    assert len(stream_of(build([dataset], tokenizer, on_bad_row="quarantine"), 9)) == 9
    with pytest.raises(DataError) as caught:
        list(build([dataset], tokenizer, max_steps=99, num_workers=1).train_dataloader())
    problems = [problem.split("/")[-1][:17] for problem in caught.value.problems]
    assert problems == ["a.jsonl:31 prompt", "a.jsonl:32 prompt"]
    del caught
    assert set(multiprocessing.active_children()) <= before  # its worker has ended with it


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
    write(tmp_path / "a.jsonl", 400)
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
