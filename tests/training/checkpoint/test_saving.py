"""When a run saves, what the save is rated by, what it costs, and saves in the background."""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from functools import partial
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
from app.training.checkpoint.checkpoint import read_tensors, write_tensors
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
from app.training.trainer import CheckpointConfig, TrainerConfig
from common.errors import ENVIRONMENT_ERROR, TrainingFault, UserError, exit_code
from tests.conftest import read_column
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


def test_a_run_saves_ten_times_and_at_ends_of_epochs_or_every_so_many_steps(tmp_path: Path) -> None:
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


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The syncs of metrics.csv and the commits of checkpoints, in their order."""
    done: list[str] = []
    for cls, name in ((CsvLogger, "save"), (CheckpointStore, "commit")):
        plain = getattr(cls, name)

        def noted(*args: Any, plain: Any = plain, name: str = name, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            done.append(name)

        monkeypatch.setattr(cls, name, noted)
    return done


def test_the_best_are_kept_by_the_validation_behind_them(tmp_path: Path, done: list[str]) -> None:
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
    assert [done[index - 1] for index, name in enumerate(done) if name == "commit"] == ["save"] * 6


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_save_keeps_no_nonfinite_number(
    asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        words = ("trainer.checkpoint.every_steps=1", f"trainer.checkpoint.async={asynchronous}")
        train_into(tmp_path / "run", *QUIET, *words)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=9)
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [2, 3]
    assert not list(store.folder.glob("*.tmp"))
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_rows_are_on_the_disk_before_an_asynchronous_checkpoint_behind_them(
    tmp_path: Path, done: list[str]
) -> None:
    words = ("trainer.checkpoint.every_steps=2", "trainer.checkpoint.async=true")
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


saver_of: Any = partial(CheckpointSaver, is_due=bool, validates_after=bool)


def test_space_is_checked_again_once_ranks_have_states_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(saving, "check_space", lambda folder, size, number: sizes.append(size))
    saver = saver_of(StoredCheckpoints(CheckpointStore(tmp_path), None))
    local: dict[str, torch.Tensor] = {}
    strategy = SimpleNamespace(local_state=lambda _: local)
    trainer: Any = SimpleNamespace(is_global_zero=True, world_size=2, strategy=strategy)
    module = SimpleNamespace(checkpoint_tensors=lambda: ({}, {}), optimizer=None)
    saver._prepare(trainer, module)
    local["weight/a"] = torch.zeros(1000)
    for _ in range(2):
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
    saver = saver_of(StoredCheckpoints(CheckpointStore(tmp_path), None, writer))
    writer.submit(lambda: may_write.wait(LONGEST) and write_file(tmp_path / "file", [b"a", b"b"]))
    wait = writer.wait
    monkeypatch.setattr(writer, "wait", lambda: may_write.set() or wait())
    saver._wait()
    writer.close()
    assert len(messages) == 2


@pytest.mark.parametrize("error", [MeasurementInterrupted(SIGTERM), DataStalled(SIGTERM, "")])
def test_several_ranks_save_after_a_signal_only_if_all_have_agreed(
    error: DataStalled, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_of(SimpleNamespace(source=None, store=None))
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


@pytest.fixture
def writer() -> object:
    writer = BackgroundWriter()
    yield writer
    writer.wait()


def test_what_is_written_is_what_was_at_the_step(writer: BackgroundWriter, tmp_path: Path) -> None:
    weight, moment = torch.full((1000,), 1.0), torch.full((7, 3), 2.0, dtype=torch.bfloat16)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=5)
    may_write = threading.Event()
    for step in (1, 2, 3):
        state = writer.snapshot("model", {"weight": weight, "moment": moment.T})
        may_write.clear()

        def save(step: int = step, state: dict = state) -> None:
            assert may_write.wait(10)
            store.begin(step)
            store.add_tensors(step, "model", state)
            store.commit(step)

        writer.submit(save)
        weight += 1  # training continues
        moment += 1
        may_write.set()
    writer.wait()
    for checkpoint in store.checkpoints():
        found = checkpoint.tensors("model")
        assert found["weight"].unique().tolist() == [checkpoint.step]
        assert found["moment"].shape == (3, 7)
        assert found["moment"].unique().tolist() == [checkpoint.step + 1]
    assert len(store.checkpoints()) == 3


def test_a_snapshot_waits_for_the_write_that_reads_its_buffers(writer: BackgroundWriter) -> None:
    value = torch.zeros(10)
    seen = []
    state = writer.snapshot("model", {"a": value})

    def look_later() -> None:
        threading.Event().wait(0.2)
        seen.append(state["a"].clone())

    writer.submit(look_later)
    value.fill_(7)
    again = writer.snapshot("model", {"a": value})
    assert seen[0].tolist() == [0.0] * 10
    assert again["a"].tolist() == [7.0] * 10


def test_what_failed_is_raised_once_by_whatever_comes_next(writer: BackgroundWriter) -> None:
    under_way = threading.Event()

    def fail() -> None:
        under_way.wait(LONGEST)
        raise OSError("no room")

    for go_on in (lambda: writer.snapshot("model", {}), lambda: writer.submit(lambda: None)):
        under_way.clear()
        writer.submit(fail)
        writer.check()
        under_way.set()
        with pytest.raises(OSError, match="no room"):
            go_on()
    writer.wait()
    writer.check()


@pytest.mark.gpu
def test_a_gpu_goes_on_while_its_state_is_copied_and_written(
    writer: BackgroundWriter, tmp_path: Path
) -> None:
    weight = torch.zeros(1 << 26, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    writer.snapshot("model", {"weight": weight})  # pins the memory
    for step in (1, 2, 3):
        for _ in range(200):
            busy = torch.tanh(busy @ busy)
        weight += 1  # comes after all that
        state = writer.snapshot("model", {"weight": weight})
        copied = torch.cuda.current_stream().record_event()
        assert not copied.query()  # the host did not wait for the copy
        assert state["weight"].is_pinned()
        file = tmp_path / f"{step}"
        writer.submit(lambda file=file, state=state: write_tensors(file, state) and None)
        weight += 100  # must not be seen
        weight -= 100
        writer.wait()
        assert read_tensors(file)["weight"].unique().tolist() == [float(step)]
