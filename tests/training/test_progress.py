"""What a person sees of a run's progress where there is no terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from app.process.logs import LOG_FILE, Screen, open_run_log, set_verbose, start_logging
from app.training.callbacks import ProgressBar
from app.training.metrics import Metrics


def started(
    total: int, every_steps: int, *, rank: int = 0
) -> tuple[Metrics, ProgressBar, Any, Any]:
    """Return the metrics and the progress bar of a run, its trainer and its module."""
    metrics, bar = Metrics(["a"], [], every_steps), ProgressBar()
    trainer = SimpleNamespace(is_global_zero=rank == 0, max_steps=total, global_step=0)
    return metrics, bar, trainer, SimpleNamespace(metrics=metrics)


def run_steps(total: int, every_steps: int, *, rank: int = 0) -> None:
    """Take the steps of a run as a trainer would: metrics write the first and every n-th."""
    metrics, bar, trainer, module = started(total, every_steps, rank=rank)
    bar.on_fit_start(trainer, module)
    for step in range(1, total + 1):
        trainer.global_step = step
        if step == 1 or step % every_steps == 0:
            metrics.write(step, {"train/loss": 10.0 - step, "train/lr": 1e-3})
        bar.on_train_batch_end(trainer, module, None, None, step - 1)
    metrics.write(total, {"train/loss": 10.0 - total})
    metrics.write(total, {"val/loss": 0.25})
    bar.on_fit_end(trainer, module)


@pytest.mark.parametrize(
    ("total", "every", "steps"),
    [
        (1, 10, [1]),
        (5, 10, [1, 5]),
        (20, 10, [1, 10, 20]),
        (100, 10, [1, *range(20, 101, 10)]),
        (103, 1, [1, 12, 23, 34, 45, 56, 67, 78, 89, 100, 103]),
    ],
)
def test_the_last_step_is_always_printed(
    total: int, every: int, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run_steps(total, every)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == steps
    assert lines[-1].startswith(f"step {total}/{total}  loss {10 - total:.4f}  val 0.2500  ")
    assert lines[-1].endswith("done")
    assert all(line.endswith("s left") for line in lines[:-1])


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_steps(5, 10, rank=1)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_counts_its_own_steps_for_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 120.0])
    monkeypatch.setattr("app.training.callbacks.time.monotonic", lambda: next(clock))
    metrics, bar, trainer, module = started(1000, 10)
    bar.on_fit_start(trainer, module)
    trainer.global_step = 900
    bar.on_train_start(trainer, module)
    trainer.global_step = 910
    metrics.write(910, {"train/loss": 1.0})
    bar.on_train_batch_end(trainer, module, None, None, 9)
    assert capsys.readouterr().out.endswith("3.0 min left\n")


def test_every_validation_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    metrics, bar, trainer, module = started(40, 10)
    bar.on_fit_start(trainer, module)
    bar.on_train_start(trainer, module)
    for step in range(1, 41):
        trainer.global_step = step
        if step == 1 or step % 10 == 0:
            metrics.write(step, {"train/loss": 1.0})
        bar.on_train_batch_end(trainer, module, None, None, step)
        if step % 4 == 0:
            metrics.write(step, {"val/loss": step / 100})
            bar.on_validation_end(trainer, module)
    bar.on_fit_end(trainer, module)
    shown = re.findall(r"val (0\.\d+)", capsys.readouterr().out)
    assert [float(loss) for loss in shown] == [step / 100 for step in range(4, 41, 4)]


@pytest.mark.parametrize(("step", "outcome"), [(10, "done"), (6, "stopped early")])
def test_the_last_line_tells_an_early_stop(
    step: int, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, bar, trainer, module = started(10, 1)
    trainer.global_step = step
    metrics.write(step, {"train/loss": 1.0})
    bar.on_fit_end(trainer, module)
    assert capsys.readouterr().out == f"step {step}/10  loss 1.0000  {outcome}\n"


def test_messages_are_above_the_bar_which_shows_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    metrics, bar, trainer, module = started(12000, 1)
    bar.console = Console(file=screen, force_terminal=True, width=80)
    handler = Screen()
    bar.on_fit_start(trainer, module)
    trainer.global_step = 11_999
    values = {"train/loss": 1.5, "val/loss": 1.25, "speed/tokens_per_second": 123_456.0}
    metrics.write(11_999, {**values, "train/lr": 1e-3})
    bar.on_train_batch_end(trainer, module, None, None, 0)
    handler.emit(logging.LogRecord("app", logging.INFO, "", 0, "a message", (), None))
    bar.on_exception(trainer, module, KeyboardInterrupt())
    written = [line.rpartition("\x1b[2K")[2] for line in screen.getvalue().split("\n")]  # erased
    lines = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", line) for line in written]
    assert "a message" in lines
    last = [line for line in lines if line.strip()][-1]
    assert last.startswith("stopped ") and len(last) <= 80
    assert "11999/12000 loss 1.5000  val 1.2500" in last


def test_the_log_of_a_run_has_what_was_said_before_it_had_a_folder(tmp_path: Path) -> None:
    start_logging()
    log = logging.getLogger("app.of_this_test")
    log.debug("a detail of %s", "hf_" + "a" * 34)
    open_run_log(tmp_path)
    log.info("said later")
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert "DEBUG a detail of <redacted>" in lines[0] and lines[1].endswith("INFO said later")
    (tmp_path / LOG_FILE).unlink()
    (tmp_path / LOG_FILE).symlink_to(tmp_path / "elsewhere")
    log.info("not through a link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("verbose", "shown"), [(True, True), (False, False)])
def test_details_are_on_the_screen_where_they_are_asked_for(
    verbose: bool, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    set_verbose(verbose)
    start_logging()
    logging.getLogger("app.of_this_test").debug("a detail")
    set_verbose(False)
    assert ("a detail" in capsys.readouterr().out) == shown
