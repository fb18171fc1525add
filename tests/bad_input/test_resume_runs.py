"""Runs that go on after they were moved, and after what they learn from was changed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.run import Run
from app.training.module import FinetuneModule
from common.errors import UserError
from tests.conftest import read_column
from tests.resumed import contents, go_on
from tests.runs import MEASURED
from tests.tiny import SAMPLES, train_into

pytestmark = pytest.mark.slow

WORDS = (
    "trainer.checkpoint.every_steps=2",
    "trainer.checkpoint.keep_last=9",
    "adapter.dropout=0.1",
    "optimizer.lr=1e-3",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nobody disturbed, on data of its own."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("lists_test.json", "orders_test.jsonl"):
        shutil.copy(SAMPLES / name, folder / name)
    return train_into(folder / "run", f"data.datasets={datasets(folder)}", *WORDS)


@pytest.fixture
def killed(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, with data of its own, as if it had been killed in its third step."""
    shutil.copytree(whole.parent, tmp_path / "copy")
    run = tmp_path / "copy" / "run"
    shutil.rmtree(run / "checkpoints" / "step-4")
    shutil.rmtree(run / "adapter")
    (run / "metrics.json").unlink()
    return run


def datasets(folder: Path) -> str:
    """Word the two data sets that lie in a folder."""
    lists, orders = folder / "lists_test.json", folder / "orders_test.jsonl"
    return f"[{{path: {lists}, name: lists}}, {{path: {orders}, name: orders}}]"


ATTEMPT = ("run.lock", "status.json")
"""files that say of the last start, also of one that was refused"""


def refused(run: Path, *typed: str) -> str:
    """Return what is said where a run may not go on; nothing of it may change."""
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.name not in ATTEMPT}
    with pytest.raises(UserError) as caught:
        go_on(run, *typed)
    after = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.name not in ATTEMPT}
    assert {file for file in before if before[file] != after.get(file)} - {run} == set()
    return str(caught.value)


def test_a_moved_run_goes_on_as_if_nothing_had_been(
    whole: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(killed)
    # The data that it knows lies where it was; its checkpoints are found beside its settings.
    go_on(Path("../run"))
    for name in ("train/loss", "val/loss", "train/lr", "train/grad_norm"):
        assert read_column(killed, name) == read_column(whole, name)
    adapters = [run / "adapter" / "adapter_model.safetensors" for run in (whole, killed)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    manifest = json.loads((killed / "manifest.json").read_text())
    assert [one["until_step"] for one in manifest["earlier"]] == [2]
    one, other = (json.loads((run / "metrics.json").read_text()) for run in (whole, killed))
    assert {k: v for k, v in one.items() if not k.startswith(MEASURED)} == {
        k: v for k, v in other.items() if not k.startswith(MEASURED)
    }


def test_a_finished_run_goes_back_to_the_checkpoint_that_is_named(
    whole: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    seen: list[list[str]] = []

    def look(start: Run) -> None:
        take_over(start)
        seen.append(sorted(folder.name for folder in (run / "checkpoints").glob("step-*")))

    take_over = Run.discard_later_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "discard_later_steps", look)
        back = ["optimizer.lr=5e-4", "resume_allow=[lr]", f"output.dir={run}"]
        go_on(run / "checkpoints" / "step-2", *back)
    # Should it die now, it must not go on from the course that it has left.
    assert seen == [["step-2"]]
    ours, before = (read_column(one, "train/loss") for one in (run, whole))
    assert [step for step in before if ours[step] != before[step]] == [4]
    assert (run / "metrics.json").exists()


def test_going_back_that_fails_while_it_loads_leaves_the_curves(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = {file: data for file, data in contents(run).items() if file not in ATTEMPT}

    def fail(module: FinetuneModule, checkpoint: dict[str, Any]) -> None:
        raise RuntimeError("does not fit")

    monkeypatch.setattr(FinetuneModule, "on_load_checkpoint", fail)
    with pytest.raises(RuntimeError, match="does not fit"):
        go_on(run / "checkpoints" / "step-2", f"output.dir={run}")
    after = contents(run)
    assert {file: after.get(file) for file in before} == before


def test_changed_rows_are_refused_and_may_be_allowed(whole: Path, killed: Path) -> None:
    file = killed.parent / "lists_test.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps(rows[:-1]))
    words = f"data.datasets={datasets(killed.parent)}"
    said = refused(killed, words)
    assert "data.datasets[0] lists: sha256 of its rows (200 -> 199 rows) was" in said
    assert "type 'resume_allow=[data]'" in said
    assert "orders" not in said and "tokens" not in said
    go_on(killed, words, "resume_allow=[data]")
    ours, before = read_column(killed, "train/loss"), read_column(whole, "train/loss")
    assert [ours[step] == before[step] for step in (1, 2, 3)] == [True, True, False]


def test_a_longer_run_follows_the_longer_schedule(whole: Path, killed: Path) -> None:
    go_on(killed, "trainer.max_steps=8", "resume_allow=[epochs]")
    ours, before = read_column(killed, "train/lr"), read_column(whole, "train/lr")
    assert list(ours) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [ours[1], ours[2]] == [before[1], before[2]]
    # Half a cosine over the seven steps after the warm-up's only one.
    assert ours[3] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi / 7)))
    assert ours[8] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 6 / 7)))
