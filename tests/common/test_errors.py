"""Exit codes and messages, of one process and of several ranks."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from app.process.reporting import report
from app.run.folder import OutputConfig, check_output, decide_run_dir
from common.errors import DataError, Interrupted, TrainingFault, UserError, exit_code
from tests.in_process import make_data, make_model, refused, run_command

GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


@pytest.mark.parametrize(
    ("error", "code", "fragment"),
    [
        (UserError(["one", "two"]), 2, "error: 2 problems"),
        (DataError("d.jsonl:3 no output"), 2, "error: d.jsonl:3 no output"),
        (OSError(28, "No space left on device"), 3, "No space left on device"),
        (MemoryError(), 3, "MemoryError"),
        (TrainingFault("loss is nan at step 3"), 4, "loss is nan at step 3"),
        (TrainingFault("loss is nan: nccl/igloo.jsonl:3"), 4, "nccl/igloo.jsonl:3"),
        (RuntimeError("size mismatch"), 4, "RuntimeError: size mismatch"),
        (RuntimeError("of \x1b]0;a file"), 4, r"RuntimeError: of \x1b]0;a file"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            Interrupted(signal.SIGTERM, "step 5 is saved"),
            143,
            "stopped by SIGTERM: step 5 is saved",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
            3,
            "type a smaller data.num_workers",
        ),
        (RuntimeError("port: 1, name: EADDRINUSE"), 3, "EADDRINUSE"),
        (RuntimeError("CUDA error: unspecified launch failure"), 3, "launch failure"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), 3, "cuDNN error"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            3,
            "can't allocate memory",
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), 4, "device-side assert"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == code
    said = capsys.readouterr().err
    assert fragment in said and "Traceback" not in said


def test_a_verb_ends_with_the_code_of_its_error(words: list[str]) -> None:
    result = run_command(*words, error=TrainingFault("loss is nan at step 3"))
    assert result.code == 4
    assert result.stderr.startswith("error (training stopped): loss is nan at step 3\n")


def test_a_traceback_is_shown_when_asked_for() -> None:
    assert "Traceback" in refused("oops=1", environment={"LOFT_TRACEBACK": "1"})


SECOND_RANK = {
    "LOCAL_RANK": "1",
    "NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def of_a_launcher(folder: Path) -> dict[str, str]:
    """What a process finds that this program's supervisor has started."""
    return {"LOFT_RUN_DIR": str(folder), "LOFT_PARENT": str(os.getppid())}


@pytest.mark.parametrize("error", [TrainingFault("loss is nan"), OSError(28, "No space left")])
def test_ranks_that_fail_together_say_it_once(
    words: list[str], tmp_path: Path, error: Exception
) -> None:
    of_run = of_a_launcher(tmp_path)
    results = [
        run_command(*words, error=error, environment=of_run | SECOND_RANK),
        run_command(*words, error=error, environment=of_run),
    ]
    assert len({result.code for result in results}) == 1
    assert [bool(result.stderr) for result in results] == [True, False]
    assert (tmp_path / "error.txt").read_text() == results[0].stderr


def test_the_echo_of_a_lost_rank_is_left_to_the_first(words: list[str], tmp_path: Path) -> None:
    of_run = of_a_launcher(tmp_path)
    result = run_command(*words, error=GLOO, environment=of_run | SECOND_RANK)
    assert (result.code, result.stderr) == (3, "")
    result = run_command(*words, error=GLOO, environment=of_run)
    assert (result.code, "Connection closed" in result.stderr) == (3, True)


def test_before_the_folder_exists_only_the_first_rank_reports() -> None:
    torchrun = SECOND_RANK | {"RANK": "1"}
    result = run_command("oops=1", environment=torchrun)
    assert (result.code, result.stderr) == (2, "")
    result = run_command("oops=1", environment=torchrun | {"RANK": "0", "LOCAL_RANK": "0"})
    assert (result.code, "oops" in result.stderr) == (2, True)


def test_a_message_that_cannot_be_left_in_the_folder_is_said(
    words: list[str], tmp_path: Path
) -> None:
    of_run = of_a_launcher(tmp_path / "gone")
    assert "nan" in run_command(*words, error=TrainingFault("nan"), environment=of_run).stderr
    assert (
        run_command(*words, error=TrainingFault("nan"), environment=of_run | SECOND_RANK).stderr
        == ""
    )


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (None, 3)])
def test_a_lost_peer_after_a_signal_is_not_a_fault(
    words: list[str], monkeypatch: pytest.MonkeyPatch, signum: int | None, code: int
) -> None:
    monkeypatch.setattr("app.process.reporting.signal_received", lambda: signum)
    result = run_command(*words, error=GLOO)
    assert (result.code, result.stderr == "") == (code, code == 143)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("/sys/kernel/run", "Operation not permitted|Permission denied"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, folder: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    said = f"output.dir=.*: cannot be written: ({reason}); type output.dir=FOLDER of your own"
    with pytest.raises(OSError, match=said) as caught:
        decide_run_dir(OutputConfig(dir=str(tmp_path / folder)))
    assert exit_code(caught.value) == 3
    assert check_output(OutputConfig(dir=str(tmp_path / "new" / "run"))) == []


def test_an_existing_folder_that_is_read_only_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match="cannot be written: Read-only file system; type"):
        decide_run_dir(OutputConfig(dir=str(tmp_path)))


def test_a_new_run_forgets_why_an_earlier_one_never_started(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "error.txt").write_text("error: old")
    decide_run_dir(OutputConfig(dir=str(tmp_path)))
    monkeypatch.delenv("LOFT_RUN_DIR")
    assert not (tmp_path / "error.txt").exists()
