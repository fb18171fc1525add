"""An asynchronous save holds the state of its step; saves run one at a time, and none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from app.training.checkpoint import saving
from app.training.checkpoint.checkpoint import read_tensors, write_tensors
from app.training.checkpoint.saving import BackgroundWriter
from app.training.checkpoint.store import CheckpointStore
from common.installation import ROOT
from tests.processes import LONGEST


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


def test_buffers_are_used_again(writer: BackgroundWriter) -> None:
    state = {"a": torch.ones(5), "b": torch.ones(3, dtype=torch.int8), "c": torch.empty(0)}
    first = writer.snapshot("model", state)
    second = writer.snapshot("model", state)
    assert [first[name].data_ptr() for name in "ab"] == [second[name].data_ptr() for name in "ab"]
    other = writer.snapshot("optimizer", state)
    assert other["a"].data_ptr() != first["a"].data_ptr()
    larger = writer.snapshot("model", {"a": torch.full((500,), 4.0)})
    assert larger["a"].tolist() == [4.0] * 500


def test_room_made_beforehand_is_what_a_snapshot_uses(
    writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.ones(70, dtype=torch.bfloat16), "b": torch.ones(3), "c": torch.tensor(2.0)}
    made_in = []
    plain = saving._new_buffer

    def new_buffer(num_bytes: int, is_pinned: bool) -> torch.Tensor:
        made_in.append(threading.current_thread() is threading.main_thread())
        return plain(num_bytes, is_pinned)

    monkeypatch.setattr(saving, "_new_buffer", new_buffer)
    writer.reserve({"model": state, "optimizer": dict(list(state.items())[:2])})
    found = writer.snapshot("model", state)
    writer.snapshot("optimizer", dict(list(state.items())[:2]))
    assert made_in == [False, False]
    assert all(torch.equal(found[name], state[name]) for name in state)
    writer.snapshot("other", state)
    assert made_in == [False, False, True]


def test_what_failed_is_raised_by_the_next_save(writer: BackgroundWriter) -> None:
    def fail() -> None:
        raise OSError("no room")

    for go_on in (
        lambda: writer.snapshot("model", {}),
        lambda: writer.reserve({}),
        lambda: writer.submit(lambda: None),
        writer.wait,
    ):
        writer.submit(fail)
        with pytest.raises(OSError, match="no room"):
            go_on()
    writer.wait()  # raised only once


def test_a_failed_write_is_reported_after_the_next_step(writer: BackgroundWriter) -> None:
    under_way = threading.Event()

    def fail() -> None:
        under_way.wait(LONGEST)
        raise OSError("no room")

    writer.submit(fail)
    writer.check()  # nobody is kept waiting
    under_way.set()
    until = time.monotonic() + LONGEST
    with pytest.raises(OSError, match="no room"):
        while time.monotonic() < until:
            writer.check()
    writer.check()


def test_closing_waits_and_raises() -> None:
    done = []
    writer = BackgroundWriter()

    def write_slowly() -> None:
        threading.Event().wait(0.2)
        done.append(1)

    writer.submit(write_slowly)
    writer.close()
    assert done == [1]
    writer = BackgroundWriter()
    writer.submit(lambda: 1 / 0 and None)
    with pytest.raises(ZeroDivisionError):
        writer.close()


@pytest.mark.slow
def test_a_process_that_ends_by_an_error_ends_the_last_save_first(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
import torch
from app.training.checkpoint.saving import BackgroundWriter
from app.training.checkpoint.checkpoint import write_tensors
writer = BackgroundWriter()
state = writer.snapshot("model", {{"a": torch.ones(3)}})
writer.submit(lambda: (time.sleep(0.5), write_tensors(Path({str(tmp_path / "file")!r}), state)))
raise SystemExit(4)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=LONGEST)
    assert ended.returncode == 4
    assert read_tensors(tmp_path / "file")["a"].tolist() == [1.0] * 3


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
