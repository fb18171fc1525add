"""When a run saves, what the save is rated by, and what it costs in memory and in room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.process import heartbeat
from app.process.signals import DataStalled, MeasurementInterrupted
from app.training.checkpoint import saving
from app.training.checkpoint.disk import SaveError, write_file
from app.training.checkpoint.saving import (
    BackgroundWriter,
    CheckpointSaver,
    StoredCheckpoints,
    build_checkpoints,
    build_saver,
)
from app.training.checkpoint.store import CheckpointStore
from app.training.loggers import CsvLogger
from app.training.metrics import Metrics
from app.training.trainer import CheckpointConfig, TrainerConfig
from common.errors import ENVIRONMENT_ERROR, TrainingFault, UserError, exit_code
from tests.conftest import ROOT, read_column
from tests.processes import LONGEST
from tests.tiny import train_into

Usage = namedtuple("Usage", "total used free")
QUIET = ("evaluation.exact_match=false", "logger=csv")


def saves_of(
    tmp_path: Path,
    every: int | None,
    total: int,
    *,
    epoch: int = 3,
    has_validation: bool = True,
    keep_best: int = 0,
) -> tuple[list[int], list[int]]:
    """Steps after which a run saves, and those that it validates behind."""
    config = TrainerConfig(
        checkpoint=CheckpointConfig(every_steps=every, keep_best=keep_best), validate_every_steps=2
    )
    plan = SimpleNamespace(num_steps=total, ends_epoch=lambda step: step % epoch == 0)
    checkpoints = build_checkpoints(config.checkpoint, tmp_path, None)
    saver = build_saver(config, checkpoints, plan, has_validation=has_validation)
    steps = range(1, total + 1)
    return [s for s in steps if saver.is_due(s)], [s for s in steps if saver.validates_after(s)]


def test_a_run_saves_ten_times_and_at_ends_of_epochs_or_every_so_many_steps(
    tmp_path: Path,
) -> None:
    often = [3, 6, 9, 11, 12, 15, 18, 21, 22, 24, 27, 29]
    assert saves_of(tmp_path, None, 29, epoch=11)[0] == often
    assert saves_of(tmp_path, None, 1000, epoch=10_000)[0] == list(range(100, 1001, 100))
    assert saves_of(tmp_path, None, 3) == ([1, 2, 3], [2, 3])
    assert saves_of(tmp_path, 4, 8) == ([4, 8], [2, 4, 6, 8])
    assert saves_of(tmp_path, 50, 5, has_validation=False) == ([5], [])


def test_the_best_of_checkpoints_without_a_loss_are_refused(tmp_path: Path) -> None:
    """Validations and saves need not coincide: a step that is among the best is saved anyway."""
    assert saves_of(tmp_path, 3, 7, keep_best=1)[0] == [3, 6, 7]
    assert saves_of(tmp_path, 3, 6, keep_best=1)[0] == [3, 6]
    with pytest.raises(
        UserError, match=r"only the last step is .* type trainer.validate_every_steps=1"
    ):
        saves_of(tmp_path, 2, 2, keep_best=1)
    with pytest.raises(UserError, match=r"no validation rows; type data.val_set_size=0.05 or "):
        saves_of(tmp_path, 2, 6, keep_best=1, has_validation=False)


def test_the_best_are_kept_by_the_validation_behind_them(tmp_path: Path) -> None:
    words = ("trainer.max_steps=6", "trainer.validate_every_steps=2", *QUIET, "optimizer.lr=1e-2")
    words += ("trainer.checkpoint.every_steps=1", "trainer.checkpoint.keep_last=1")
    words += ("trainer.checkpoint.keep_best=2", "schedule=constant", "schedule.warmup_steps=6")
    run = train_into(tmp_path / "run", *words)
    losses = read_column(run, "val/loss")
    kept = CheckpointStore(run / "checkpoints").checkpoints()
    rated = {checkpoint.step: checkpoint.metric for checkpoint in kept}
    best = sorted((step for step in (2, 4, 6)), key=losses.__getitem__)[:2]
    assert set(rated) == {6, *best}
    assert all(metric == losses[step] for step, metric in rated.items())


def test_nothing_is_saved_of_a_step_whose_loss_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Metrics.add

    def spoil(self: Metrics, record: Any, reduce: Any) -> None:
        if record.step == 3:
            record.sums[0] = float("nan")
        plain(self, record, reduce)

    monkeypatch.setattr(Metrics, "add", spoil)
    with pytest.raises(TrainingFault, match="step 3: loss nan"):
        words = ("trainer.checkpoint.every_steps=1", "trainer.validate_every_steps=4")
        train_into(tmp_path / "run", *QUIET, *words)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=9)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]
    assert not list(store.folder.glob("*.tmp"))


def test_an_asynchronous_save_keeps_no_nonfinite_number_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CheckpointSaver.save

    def save(self: CheckpointSaver, trainer: Any, module: Any) -> None:
        moments = module.checkpoint_tensors()[1]
        kept = moments["exp_avg/" + next(iter(module.checkpoint_tensors()[0]))]
        before = kept.clone()
        if trainer.global_step == 4:  # the last: what the thread finds is raised by the end
            kept.fill_(float("inf"))
        plain(self, trainer, module)
        kept.copy_(before)  # the thread looks at what was saved, not at what is there later

    monkeypatch.setattr(CheckpointSaver, "save", save)
    with pytest.raises(TrainingFault, match=r"step 4: exp_avg/.* has non-finite values"):
        words = ("trainer.checkpoint.every_steps=1", "trainer.checkpoint.async=true")
        train_into(tmp_path / "run", *QUIET, *words)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=9)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [2, 3]
    assert not list(store.folder.glob("*.tmp"))
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize("way", ["false", "true"])
def test_rows_are_on_the_disk_before_the_checkpoint_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    done: list[str] = []
    for cls, name in ((CsvLogger, "save"), (CheckpointStore, "commit")):
        plain = getattr(cls, name)

        def noted(
            self: Any, *args: Any, plain: Any = plain, name: str = name, **kwargs: Any
        ) -> Any:
            result = plain(self, *args, **kwargs)
            done.append(name)
            return result

        monkeypatch.setattr(cls, name, noted)
    words = ("trainer.checkpoint.every_steps=2", f"trainer.checkpoint.async={way}")
    run = train_into(tmp_path / "run", *QUIET, *words)
    commits = [index for index, name in enumerate(done) if name == "commit"]
    assert len(commits) == 2
    assert "save" in done[: commits[0]] and "save" in done[commits[0] + 1 : commits[1]]
    for checkpoint in CheckpointStore(run / "checkpoints").checkpoints():
        assert "random-rank-0" in checkpoint.names()


@pytest.mark.parametrize(("free", "last_step"), [(1000, None), (1_500_000, "1")])
def test_space_is_checked_before_the_first_step_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, last_step: str | None
) -> None:
    # Some 0.6 MB of adapter, and 1.3 MB more of AdamW's moments.
    words = (*QUIET, "trainer.checkpoint.keep_last=1", "trainer.log_every_steps=1")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    with pytest.raises(SaveError, match=r"1 checkpoints and the one .* are free") as caught:
        train_into(tmp_path / "run", *words)
    assert exit_code(caught.value) == ENVIRONMENT_ERROR
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert (lines[-1].split(",")[0] if len(lines) > 2 else None) == last_step


PEAK = """
import resource, sys, torch
from pathlib import Path
from signal import SIGTERM
from app.model.adapter import FullConfig
from app.training.checkpoint.saving import StoredCheckpoints
from app.training.checkpoint.state import optimizer_state
from app.training.checkpoint.state import model_state
from app.training.checkpoint.store import CheckpointStore
from tests.tiny import tiny_llama

model = tiny_llama(hidden_size=1024, intermediate_size=4096)
optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "name": "all"}], fused=True)
for weight in model.parameters():
    weight.grad = torch.zeros_like(weight)
optimizer.step()
optimizer.zero_grad()
tensors, numbers = optimizer_state(model, optimizer)
parts = {"model": model_state(model), "optimizer": tensors}
checkpoint = {
    "training": {"step": 1, "optimizer": numbers}, "metric": None, "details": {"num_ranks": 0}
}
size = sum(t.nbytes for part in parts.values() for t in part.values())
store = CheckpointStore(Path(sys.argv[1]) / "checkpoints")
store.begin(1)
before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
Path("/proc/self/clear_refs").write_text("5")
checkpoints = StoredCheckpoints(store)
checkpoints.add_tensors(1, parts, rank=0, num_ranks=1)
checkpoints.save_checkpoint(checkpoint, store.folder / "step-1")
peak = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM")]
print(size, int(peak[0].split()[1]) * 1024 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_save_takes_hardly_any_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST,
    )
    size, more = map(int, done.stdout.split()[-2:])
    assert size > 200_000_000
    assert more <= 0.1 * size


def test_space_is_checked_again_if_ranks_have_separate_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(saving, "check_space", lambda folder, size, number: sizes.append(size))
    saver = CheckpointSaver(
        StoredCheckpoints(CheckpointStore(tmp_path), None),
        is_due=lambda step: False,
        validates_after=lambda step: False,
    )
    local: dict[str, torch.Tensor] = {}
    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        world_size=2,
        strategy=SimpleNamespace(local_state=lambda optimizer: local),
    )
    module = SimpleNamespace(checkpoint_tensors=lambda: ({}, {}), optimizer=None)
    saver._prepare(trainer, module)
    saver._prepare(trainer, module)
    assert len(sizes) == 1
    local["weight/a"] = torch.zeros(1000)
    for _ in range(3):
        saver._prepare(trainer, module)
    assert len(sizes) == 2 and sizes[1] - sizes[0] >= 2 * 4000


def test_waiting_for_a_save_sends_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(heartbeat, "send_to_supervisor", messages.append)
    monkeypatch.setattr(heartbeat, "_step", 3)
    monkeypatch.setattr(heartbeat, "_thread", threading.current_thread())
    writer, may_write = BackgroundWriter(), Event()
    saver = CheckpointSaver(
        StoredCheckpoints(CheckpointStore(tmp_path), None, writer),
        is_due=lambda step: True,
        validates_after=lambda step: False,
    )

    def write() -> None:
        may_write.wait(LONGEST)
        write_file(tmp_path / "file", [b"a", b"b"])

    def begin(plain: Callable[[], None] = writer.wait) -> None:
        may_write.set()
        plain()

    writer.submit(write)
    monkeypatch.setattr(writer, "wait", begin)
    saver._wait()
    writer.close()
    assert len(messages) == 2


@pytest.mark.parametrize("error", [MeasurementInterrupted(SIGTERM), DataStalled(SIGTERM, "")])
def test_several_ranks_save_after_a_signal_only_if_all_have_agreed(
    error: DataStalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: Any = SimpleNamespace(source=None, store=None)
    saver = CheckpointSaver(checkpoints, is_due=bool, validates_after=bool)
    done: list[str] = []
    for name in ("_prepare", "save", "_wait_for_all"):
        monkeypatch.setattr(saver, name, lambda *_, name=name: done.append(name))
    trainer: Any = SimpleNamespace(
        world_size=2, global_step=3, sanity_checking=False, validating=True
    )
    module = SimpleNamespace(step_losses=[], has_pending_validation=False)
    saver.on_exception(trainer, module, error)
    is_agreed = isinstance(error, MeasurementInterrupted)
    assert done == ["_prepare", "save", "_wait_for_all"] * is_agreed
    assert module.has_pending_validation is is_agreed
