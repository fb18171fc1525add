"""Every optimizer step and every validation has an exact row, with the loss of each data set."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.config import load_run_config, run_verb
from app.train import train
from app.training import machine
from app.training.loggers import columns
from app.training.metrics import Metrics, StepRecord
from app.training.optimizers import ScheduleConfig, lr_factor
from tests.batches import datamodule_of, micro_batches
from tests.conftest import TrainRun, read_column
from tests.tiny import NAMES, small_run, train_into

Rows = list[dict[str, str]]


def read_rows(folder: Path) -> Rows:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def train_rows(folder: Path) -> Rows:
    return [row for row in read_rows(folder) if row["train/lr"]]


def validation_steps(folder: Path) -> list[int]:
    return [int(row["step"]) for row in read_rows(folder) if row["val/loss"]]


def without_clock(rows: Rows) -> Rows:
    of_this_time = ("speed/", "machine/")
    return [
        {key: value for key, value in row.items() if not key.startswith(of_this_time)}
        for row in rows
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curves") / "run"
    return train_into(folder, "logger=csv", "schedule.warmup_steps=2")


def test_the_columns_are_fixed_by_the_data_sets(run: Path) -> None:
    assert not (run / "tensorboard").exists()  # logger=csv
    with (run / "metrics.csv").open() as file:
        header = next(csv.reader(file))
    assert header == columns(NAMES) + list(machine.MACHINE_METRICS)


def test_steps_and_validations_have_a_row_each_in_order(run: Path) -> None:
    kinds = [(int(row["step"]), bool(row["val/loss"])) for row in read_rows(run)]
    assert kinds == [(0, True), *((step, kind) for step in (1, 2, 3, 4) for kind in (False, True))]
    for row in read_rows(run):
        phases = {key.partition("/")[0] for key, value in row.items() if value}
        phases -= {"step", "speed", "machine"}
        assert len(phases) == 1, row
    for name in NAMES:  # every validation is over all rows
        tokens = list(read_column(run, f"val/tokens/{name}").values())
        assert len(tokens) == 5 and len(set(tokens)) == 1


def test_numbers_are_written_in_full_precision(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    for name in ("val/loss", *(f"val/loss/{dataset}" for dataset in NAMES)):
        values = read_column(run, name)
        assert values[4] == metrics[name]
        assert values[0] == metrics[f"base/{name}"]


def test_the_loss_of_a_step_is_the_token_mean_of_its_data_sets(run: Path) -> None:
    for row in read_rows(run):
        phase = "val" if row["val/loss"] else "train"
        tokens = [float(row[f"{phase}/tokens/{name}"]) for name in NAMES]
        # A data set that a step holds no token of has no loss there.
        losses = [float(row[f"{phase}/loss/{name}"] or 0) for name in NAMES]
        assert [n > 0 for n in tokens] == [bool(row[f"{phase}/loss/{name}"]) for name in NAMES]
        shares = [float(row[f"{phase}/share/{name}"]) for name in NAMES]
        mean = sum(n * loss for n, loss in zip(tokens, losses, strict=True)) / sum(tokens)
        assert float(row[f"{phase}/loss"]) == pytest.approx(mean, rel=1e-12)
        assert shares == pytest.approx([n / sum(tokens) for n in tokens])


def test_trained_tokens_are_those_of_the_plan(run: Path) -> None:
    datamodule = datamodule_of(load_run_config(run), accumulation_steps=2, max_steps=4)
    batches = micro_batches(datamodule)
    planned = torch.zeros(2, 4)
    for index, batch in enumerate(batches):
        for dataset in range(2):
            learned = (batch.labels != -100) & (batch.dataset_ids == dataset)
            planned[dataset, index // 2] += learned.sum()
    metrics = json.loads((run / "metrics.json").read_text())
    for dataset, name in enumerate(NAMES):
        tokens = list(read_column(run, f"train/tokens/{name}").values())
        assert tokens == planned[dataset].tolist()
        assert metrics[f"train/trained_tokens/{name}"] == sum(tokens) > 0
    assert metrics["train/tokens"] == sum(batch.num_tokens for batch in batches)


def test_the_written_rate_is_the_one_the_step_used(run: Path) -> None:
    expected = [2e-4 * lr_factor(step, 4, ScheduleConfig(warmup_steps=2)) for step in range(4)]
    assert list(read_column(run, "train/lr").values()) == pytest.approx(expected, rel=1e-12)


def test_logging_and_validation_intervals_change_no_training_row(
    run: Path, train_run: TrainRun
) -> None:
    """Dropout is on: a validation must not draw random numbers."""
    words = ("schedule.warmup_steps=2", "trainer.log_every_steps=3")
    folder = train_run(*small_run(*words, "trainer.validate_every_steps=3"))
    assert validation_steps(folder) == [0, 3, 4]
    assert without_clock(train_rows(folder)) == without_clock(train_rows(run))


TOO_MUCH = ("optimizer.lr=10", "adapter.alpha=5e18")
"""after a step of these the weights are finite, and no loss is"""


def test_a_nonfinite_validation_ends_the_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*small_run(*TOO_MUCH), "logger=csv", f"output.dir={tmp_path / 'run'}"]
    code = run_verb("train", train, words=words)
    stderr = capsys.readouterr().err
    assert code == 4
    assert "validation after step 1: loss nan (of lists, orders)" in stderr
    assert "optimizer.lr" in stderr
    assert validation_steps(tmp_path / "run") == [0, 1]
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


class RowLogger:
    """A logger that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


def record(
    step: int, loss: float = 1.0, norm: float = 1.0, *, is_scaled: bool = False
) -> StepRecord:
    losses, weights, tokens = [loss * 2, loss], [2.0, 1.0], [4.0, 2.0]
    sums = torch.tensor([losses, weights, tokens], dtype=torch.float64)
    return StepRecord(
        step=step,
        lr=1e-3,
        grad_norm=torch.tensor(norm),
        sums=sums,
        num_tokens=10,
        is_scaled=is_scaled,
        losses=[torch.tensor(loss)],
    )


def test_steps_are_reduced_and_written_in_blocks_and_the_first_at_once() -> None:
    kept, reduced = RowLogger(), []

    def twice(tensor: Tensor) -> Tensor:
        reduced.append(tensor.shape[0])
        return tensor * 2

    curves = Metrics(["a", "b"], [kept], every_steps=3)
    for step in range(1, 6):
        curves.add(record(step, loss=float(step)), twice)
    assert [step for step, _ in kept.rows] == [1, 2, 3]
    curves.flush(twice)
    curves.flush(twice)
    assert [step for step, _ in kept.rows] == [1, 2, 3, 4, 5]
    assert reduced == [1, 2, 2]
    for step, row in kept.rows:
        assert row["train/loss"] == row["train/loss/a"] == float(step)
        assert row["train/tokens/a"] == 8.0  # of both ranks
    assert curves.summary()["train/tokens"] == 5 * 20
    assert curves.summary()["train/trained_tokens/b"] == 5 * 4
