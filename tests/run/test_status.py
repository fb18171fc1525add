"""status.json says what a run is doing, and `app.status` says it as text, JSON and exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app.config.dispatch import run_plain_verb
from app.process.launch import set_run_dir
from app.process.reporting import report
from app.process.status import STATUS_FILE, begin_status, end_status, restart_status, update_status
from app.run.find import files_in_outputs
from app.status import StatusConfig, show_status
from common.errors import Interrupted
from tests.conftest import ROOT


def ask(*words: str) -> int:
    return run_plain_verb("status", StatusConfig, show_status, words)


def written(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / STATUS_FILE).read_text())
    return content


def change(folder: Path, **values: Any) -> None:
    (folder / STATUS_FILE).write_text(json.dumps(written(folder) | values))


def test_the_exit_code_tells_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = f"run={tmp_path}"
    begin_status(tmp_path, 3)
    assert ask(word) == 75
    update_status(tmp_path, state="training", steps=1200, loss=0.25, hours_left=1.5)
    assert ask(word) == 75
    shown = capsys.readouterr().out
    for fragment in ("training", "step 3 of 1,200", "loss 0.2500", "90.0 min left"):
        assert fragment in shown
    assert shown.splitlines()[-1] == f"run: {tmp_path}"
    end_status(tmp_path, "finished", 0)
    assert ask(word) == 0
    for code in (2, 3, 4):
        end_status(tmp_path, "failed", code, "error: no room\n  free some")
        assert ask(word) == code
    assert "no room" in capsys.readouterr().out


def test_progress_does_not_hide_an_error_that_another_rank_has_reported(tmp_path: Path) -> None:
    end_status(tmp_path, "failed", 3, "no room")
    update_status(tmp_path, state="training")
    restart_status(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [], "of another verb"
    begin_status(tmp_path, 0)
    end_status(tmp_path, "failed", 4, "loss is nan")
    update_status(tmp_path, state="training", step=9)
    assert (written(tmp_path)["state"], written(tmp_path)["step"]) == ("failed", 0)
    restart_status(tmp_path, 5)  # the supervisor starts the ranks again
    assert (written(tmp_path)["state"], written(tmp_path)["message"]) == ("starting", None)
    update_status(tmp_path, state="training", step=9)
    assert written(tmp_path)["step"] == 9


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (OSError(28, "No space left"), "failed", 3),
        (Interrupted(15, "step 7 is saved"), "stopped", 143),
    ],
)
def test_an_error_and_a_signal_are_recorded_with_their_code(
    error: BaseException, state: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    begin_status(tmp_path, 7)
    set_run_dir(tmp_path)
    assert report(error) == code
    now = written(tmp_path)
    assert (now["state"], now["exit_code"], now["step"]) == (state, code, 7)
    assert str(error).partition("]")[2].strip() in now["message"]
    assert ask(f"run={tmp_path}") == code


def test_a_killed_or_silent_run_has_stalled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word = f"run={tmp_path}"
    begin_status(tmp_path, 3)
    gone = subprocess.Popen(["true"])
    gone.wait()
    change(tmp_path, pid=gone.pid)
    assert ask(word) == 76 and "was killed" in capsys.readouterr().out
    change(tmp_path, pid=os.getpid(), state="training", written=time.time() - 700)
    assert ask(word) == 76 and "12 minutes" in capsys.readouterr().out
    change(tmp_path, seconds_per_step=71.0)  # ten of these are longer
    assert ask(word) == 75
    change(tmp_path, host="another", pid=gone.pid, state="starting", seconds_per_step=None)
    assert ask(word, "json=true") == 75
    change(tmp_path, written=time.time() - 3700)
    capsys.readouterr()
    assert ask(word, "json=true") == 76
    shown = json.loads(capsys.readouterr().out)
    assert "another" in shown["stalled"] and 3700 <= shown["seconds_ago"] < 3800


def test_a_folder_without_or_with_a_damaged_status_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask() == 2 and "train first" in capsys.readouterr().err
    assert ask(f"run={tmp_path}") == 2 and "there is no status.json" in capsys.readouterr().err
    begin_status(tmp_path, 3)
    change(tmp_path, step="three")
    assert ask(f"run={tmp_path}") == 2 and "step" in capsys.readouterr().err
    (tmp_path / STATUS_FILE).write_text("{")
    assert ask(f"run={tmp_path}") == 2 and "invalid JSON" in capsys.readouterr().err


def test_the_newest_run_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A run has the depth of its name and time, or that of its own output.dir.
    for number, name in enumerate(("train/old", "train/new", "mine", "s3:/bucket/runs/mine")):
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        begin_status(folder, number)
        os.utime(folder / STATUS_FILE, (0, 10 + number))
        assert ask() == 75
        assert capsys.readouterr().out.splitlines()[-1] == f"run: outputs/{name}"


def test_runs_are_found_behind_links_and_while_folders_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("scratch/a", "scratch/b", "outputs/kept/checkpoints"):
        Path(folder).mkdir(parents=True)
        begin_status(Path(folder), 1)
    Path("outputs/mine").symlink_to(tmp_path / "scratch")
    Path("scratch/a/again").symlink_to(tmp_path / "scratch")
    found = files_in_outputs(STATUS_FILE)
    assert {file.parent for file in found} == {Path("outputs/mine/a"), Path("outputs/mine/b")}
    found = files_in_outputs(STATUS_FILE)
    seen = next(found).parent
    shutil.rmtree({"a": "scratch/b", "b": "scratch/a"}[seen.name])
    assert list(found) == []


def test_the_verbs_import_no_torch(tmp_path: Path) -> None:
    begin_status(tmp_path, 1)
    code = (
        "import app.chat, app.evaluate, app.merge, app.plan, app.preview, app.push, app.serve\n"
        "import sys\nfrom app.status import StatusConfig, status\n"
        f"assert status(StatusConfig(run={str(tmp_path)!r})) == 75\n"
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
