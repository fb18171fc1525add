"""output.dir=s3://...: a run is copied to an S3 server while it trains, and goes on from there."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, run_verb
from app.launch.__main__ import launch
from app.process.launch import Launch, free_port
from app.process.status import begin_status, confirm_finished, end_status
from app.run.remote import check_store, fetch_run, open_store, url_of, working_folder
from app.run.upload import Uploader, share_checkpoint, uploading
from app.status import fetch_status
from app.training.checkpoint.checkpoint import MARKER
from app.training.checkpoint.store import CheckpointStore
from common.errors import UserError
from data_modules.source import read_chunks
from tests.in_process import make_data
from tests.processes import LONGEST, start_train
from tests.reliability.shell import Shell
from tests.resumed import contents, make_run
from tests.tiny import small_run

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.moto_server.werkzeug_app")
ROOT = Path(__file__).parents[2]
URL = "s3://bucket/team/run"
Fault = Callable[[dict[str, Any]], str | None]


class Server:
    """moto's S3 on loopback; `fault` returns the status of a request that is not to succeed."""

    def __init__(self) -> None:
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Handler(WSGIRequestHandler):
            def handle_expect_100(self) -> bool:
                return True  # werkzeug says it; after a second one aiohttp has no timeout

            def connection_dropped(self, *given: Any) -> None:
                self.close_connection = True

        backend = moto.DomainDispatcherApplication(moto.create_backend_app)
        self.fault: Fault = lambda request: None

        def application(request: dict[str, Any], respond: Any) -> Any:
            status = self.fault(request)
            if status == "cut":
                raise ConnectionError("cut by the test")
            if status is None:
                return backend(request, respond)
            code = "AccessDenied" if status == "403 Forbidden" else "RequestTimeTooSkewed"
            respond(status.partition(" skew")[0], [("Content-Type", "text/xml")])
            return [f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()]

        self.server = make_server(
            "127.0.0.1", 0, application, threaded=True, request_handler=Handler
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 server with an empty bucket; the test runs in a folder of its own."""
    started = Server()
    for name, value in {
        "AWS_ENDPOINT_URL": started.address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("app.run.upload.PAUSES", (0.05,) * 8)
    monkeypatch.setattr("app.run.upload.SILENT_SECONDS", LONGEST / 10)
    monkeypatch.chdir(tmp_path)
    s3fs.S3FileSystem.clear_instance_cache()
    with open_store(URL) as store:
        if store.files.exists("bucket"):  # moto's state is one for the process
            store.files.rm("bucket", recursive=True)
        store.files.mkdir("bucket")
    yield started
    started.server.shutdown()


def upload(folder: Path) -> None:
    """Upload a run that has ended, in this process, where the waits are the test's."""
    assert why_not_uploaded(folder) is None


def why_not_uploaded(folder: Path) -> str | None:
    uploader = Uploader(folder, URL)
    uploader.run(lambda seconds: True)
    return uploader.failure


def names() -> set[str]:
    with open_store(URL) as store:
        return set(store.sizes())


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Path:
    """A killed run with checkpoints of steps 2 and 4, in the working folder of the URL."""
    folder = tmp_path / "outputs/s3:/bucket/team/run"
    make_run(folder)
    return folder


def test_a_run_comes_back_equal_on_an_empty_machine(run: Path, tmp_path: Path) -> None:
    assert url_of(run) == url_of(run.relative_to(tmp_path)) == URL
    upload(run)
    assert {name for name in names() if name.endswith(MARKER)} == {f"checkpoints/step-4/{MARKER}"}
    before = contents(run)
    shutil.rmtree(run)
    config = load_config("train", [*small_run(), f"output.dir={URL}", "resume=auto"])
    assert Path(str(config.output.dir)) == run.relative_to(tmp_path)
    after = contents(run)
    assert after == {name: before[name] for name in after}
    assert {"config.yaml", "manifest.json", f"checkpoints/step-4/{MARKER}"} <= {
        str(name) for name in after
    }


def test_what_a_machine_has_saved_after_its_last_upload_stays_unless_there_are_several(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(run)
    shutil.copytree(run / "checkpoints/step-4", run / "checkpoints/step-9")
    before = contents(run)
    fetch_run(URL, run, resumes=True)
    assert contents(run) == before
    with monkeypatch.context() as several:
        launch = Launch(num_ranks=2, num_local_ranks=1)
        several.setattr("app.run.remote.read_launch", lambda: launch)
        with pytest.raises(UserError, match="does not hold the run whose step-9"):
            fetch_run(f"{URL}-empty", run, resumes=True)
        assert contents(run) == before
        fetch_run(URL, run, resumes=True)
        assert CheckpointStore(run / "checkpoints").newest_step() == 4
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["run"] = {**manifest.get("run", {}), "id": "of another run"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="another run"):
        fetch_run(URL, run, resumes=True)


def test_a_run_killed_during_its_last_upload_is_completed_from_an_empty_machine(
    server: Server, run: Path
) -> None:
    """metrics.json, by which a run counts as finished, arrives after all but status.json."""
    begin_status(run, 4)
    upload(run)
    (run / "metrics.json").write_text("{}")
    (run / "report.html").write_text("a page")
    end_status(run, "finished", 0)
    arrived: list[str] = []

    def fault(request: dict[str, Any]) -> str | None:
        if request["REQUEST_METHOD"] == "PUT":
            arrived.append(Path(request["PATH_INFO"]).name)
            return "403 Forbidden" if arrived[-1] == "status.json" else None
        return None

    server.fault = fault
    assert "no right to list" in str(why_not_uploaded(run))
    assert list(dict.fromkeys(arrived))[-3:] == ["report.html", "metrics.json", "status.json"]
    server.fault = lambda request: None
    assert fetch_status(URL)["state"] == "starting"
    shutil.rmtree(run)
    fetch_run(URL, run, resumes=True)
    confirm_finished(run)
    upload(run)
    assert fetch_status(URL)["state"] == "finished"


def test_an_upload_survives_a_third_of_its_requests_failing(server: Server, run: Path) -> None:
    chance, failed = random.Random(0), set[str]()

    def fault(request: dict[str, Any]) -> str | None:
        if request["REQUEST_METHOD"] in ("PUT", "POST") and chance.random() < 0.34:
            answer = chance.choice(["500 Internal", "cut"])
            failed.add(answer)
            return answer
        return None

    server.fault = fault
    upload(run)
    server.fault = lambda request: None
    assert failed == {"500 Internal", "cut"}
    before = contents(run)
    shutil.rmtree(run)
    fetch_run(URL, run, resumes=True)
    after = contents(run)
    assert after == {name: before[name] for name in after}
    assert CheckpointStore(run / "checkpoints").steps() == [4]


def test_a_request_whose_answer_never_comes_is_tried_again(
    server: Server, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp's own timeout is lost by a second 100 Continue."""
    monkeypatch.setattr("app.run.remote.REQUEST_SECONDS", 1.0)
    over, lost = threading.Event(), list[str]()

    def fault(request: dict[str, Any]) -> None:
        if request["REQUEST_METHOD"] == "PUT" and not lost:
            lost.append(request["PATH_INFO"])
            request["wsgi.input"].read(int(request["CONTENT_LENGTH"]))
            request["werkzeug.socket"].sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            over.wait(LONGEST)

    server.fault = fault
    uploads = threading.Thread(target=upload, args=(run,), daemon=True)
    uploads.start()
    uploads.join(LONGEST / 10)
    over.set()
    assert lost and not uploads.is_alive()
    assert {"config.yaml", f"checkpoints/step-4/{MARKER}"} <= names()


def test_a_checkpoint_without_its_marker_or_with_damage_does_not_count(run: Path) -> None:
    newest, older = run / "checkpoints/step-4", run / "checkpoints/step-2"
    shutil.move(newest, run.parent / "step-4")
    upload(run)
    shutil.move(run.parent / "step-4", newest)
    with open_store(URL) as store:
        for file in newest.iterdir():
            if file.name != MARKER:
                name = f"checkpoints/step-4/{file.name}"
                store.put(name, file.open("rb"), on_progress=lambda: None)
        shutil.rmtree(run)
        fetch_run(URL, run, resumes=True)
        assert CheckpointStore(run / "checkpoints").steps() == [2]
        shutil.rmtree(run)
        store.files.pipe_file(f"{store.root}/checkpoints/step-4/{MARKER}", b"another hash")
    fetch_run(URL, run, resumes=True)
    assert CheckpointStore(run / "checkpoints").steps() == [2]
    assert older.is_dir()


def test_a_process_uploads_and_what_it_says_is_logged(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with uploading(run):
        pass
    assert f"checkpoints/step-4/{MARKER}" in names()
    assert f"uploaded: {URL}/checkpoints/step-4" in caplog.text


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('print(\'{"failure": "no bucket"}\')', r"no bucket; type resume=.* to upload it"),
        (
            "import os; os.write(1, b'{\"failure\": '); os.kill(os.getpid(), 9)",
            "the process that uploads ended with -9",
        ),
        ("import os, time; os.close(1); time.sleep(9999)", "said nothing for 0.5 s"),
    ],
)
def test_why_a_run_was_not_uploaded_is_said_at_its_end(
    code: str, said: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.run.upload.SILENT_SECONDS", 0.5 if "sleep" in code else LONGEST)
    monkeypatch.setattr("app.run.upload.child_command", lambda module: [sys.executable, "-c", code])
    with pytest.raises(OSError, match=said), uploading(run):
        pass
    with pytest.raises(KeyError), uploading(run):  # what has ended the run is said instead
        raise KeyError


def test_a_process_that_ends_before_the_run_does_is_said_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr("app.run.upload.child_command", lambda module: command)
    until = time.monotonic() + LONGEST / 10
    with pytest.raises(OSError, match="ended with -9"), uploading(run):
        while "has ended with -9: what is new stays here" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_an_upload_two_checkpoints_behind_is_said(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (6, 8):
        shutil.copytree(run / "checkpoints/step-4", run / f"checkpoints/step-{step}")
    with open_store(URL) as store:
        Uploader(run, URL).put_checkpoint(store, 4, run / "checkpoints/step-4")
    assert "step-4 is still on its way, and step-8 is saved" in caplog.text


def test_the_process_that_uploads_is_ended_by_the_end_of_the_one_that_trains_only(
    server: Server, run: Path
) -> None:
    code = (
        "import pathlib, signal, sys; from app.run.upload import uploading\n"
        "with uploading(pathlib.Path(sys.argv[1])): signal.pause()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    training = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], env=environment, stderr=subprocess.PIPE
    )

    def wait_for(step: int) -> None:
        while f"checkpoints/step-{step}/{MARKER}" not in names():
            assert training.poll() is None
            time.sleep(0.1)

    wait_for(4)
    [child] = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(int(child), signum)
    shutil.copytree(run / "checkpoints/step-4", run / "checkpoints/step-6")
    wait_for(6)
    killed, tried = threading.Event(), threading.Event()

    def hang(request: dict[str, Any]) -> None:
        tried.set()
        killed.wait()

    server.fault = hang
    shutil.copytree(run / "checkpoints/step-4", run / "checkpoints/step-8")
    tried.wait()
    training.kill()
    training.communicate(timeout=LONGEST)  # until the child, too, has closed stderr
    killed.set()


def test_what_is_wrong_with_a_bucket_is_refused_before_training(
    server: Server, run: Path, tmp_path: Path
) -> None:
    config = load_config("train", [*small_run(), f"output.dir={URL}"])

    def problems(url: str, *, resume: str = "never") -> str:
        config.output.dir = str(working_folder("output.dir", url))
        config.resume = resume
        return "\n".join(check_store(config))

    assert problems(URL) == ""
    assert "there is no bucket nowhere" in problems("s3://nowhere/run")
    upload(run)
    assert "holds another run" in problems(URL)
    assert problems(URL, resume="auto") == ""
    assert "holds other files" in problems("s3://bucket/team")
    for answer, said in (("403 Forbidden", "AWS_ACCESS_KEY_ID"), ("403 skew", "clock")):
        server.fault = lambda request, answer=answer: (
            answer if request["REQUEST_METHOD"] == "PUT" else None
        )
        assert said in problems("s3://bucket/new")
    for wrong in ("s3://bucket", "s3://me:word@bucket/run", "gs://bucket/../run"):
        with pytest.raises(UserError, match="expected s3://BUCKET/PATH"):
            problems(wrong)


def test_data_that_exist_only_here_are_uploaded_by_the_command_that_launch_names(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows").mkdir()
    make_data(Path("rows/some.jsonl"))

    def start(data: str) -> int:
        words = ["launcher=kubernetes", "launch.image=i", "launch.submit=false", "model=tiny"]
        words += ["trainer.accelerator=cpu", f"output.dir={URL}", data]
        return run_verb("launch", lambda config: launch(config, words), words=words)

    assert start("data.datasets=[{path: rows/*.jsonl}]") == 2
    said = re.search(r"type (\S+ -c '.*') to upload it, and (.*) in its", capsys.readouterr().err)
    assert said is not None
    subprocess.run(["bash", "-c", said[1]], check=True)
    assert start(f"data.datasets=[{{path: {said[2]}}}]") == 0
    assert sum(chunk.count() for chunk in read_chunks(said[2])) > 0


def start_training(
    python: str, folder: Path, *words: str, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a run of eight steps that saves each of them, in `folder`, which may be new."""
    folder.mkdir(exist_ok=True)
    settings = small_run(
        "trainer.max_steps=8", "trainer.checkpoint.every_steps=1", "logger=csv", *words
    )
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {"PYTHONPATH": path, "LOFT_RUN_DIR": None, **(variables or {})}
    how: dict[str, Any] = {"cwd": folder, "stderr": subprocess.STDOUT}
    return start_train(*settings, python=python, environment=environment, **how)


def finished(process: subprocess.Popen[str]) -> str:
    """Wait for a run to end well; return what it has printed."""
    said, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, said
    return said


def last_weights(folder: Path) -> bytes:
    return (folder / "adapter/adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_killed_on_one_machine_ends_bit_equal_on_another(
    server: Server, shell: Shell, tmp_path: Path
) -> None:
    longer = ("trainer.max_steps=80", "trainer.checkpoint.every_steps=4")
    finished(start_training(shell.python, tmp_path, *longer, f"output.dir={tmp_path / 'whole'}"))
    words = (*longer, f"output.dir={URL}", "resume=auto")
    markers, tried, killed = list[str](), threading.Event(), threading.Event()

    def hang_at_the_second_marker(request: dict[str, Any]) -> None:
        if request["REQUEST_METHOD"] == "PUT" and request["PATH_INFO"].endswith(MARKER):
            markers.append(request["PATH_INFO"])
            if len(markers) > 1:
                tried.set()
                killed.wait(LONGEST)

    server.fault = hang_at_the_second_marker
    process = start_training(shell.python, tmp_path / "first", *words)
    while not tried.wait(0.1):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, said
    killed.set()
    server.fault = lambda request: None
    assert "RESUME: from " in finished(start_training(shell.python, tmp_path / "last", *words))
    last = tmp_path / "last/outputs/s3:/bucket/team/run"
    assert last_weights(last) == last_weights(tmp_path / "whole")
    assert {"adapter/adapter_model.safetensors", "report.html", "metrics.json"} <= names()
    assert fetch_status(URL)["state"] == "finished"


def start_machines(
    python: str, folders: Sequence[Path], *words: str
) -> list[subprocess.Popen[str]]:
    """Start a run on two machines of one rank each, as torchrun does; each sees its folder only."""
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"TORCHELASTIC_RUN_ID": "one", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [
        start_training(
            *(python, folder, "trainer.num_nodes=2", "trainer.devices=1", "resume=auto", *words),
            variables={**shared, "RANK": rank},
        )
        for rank, folder in zip("01", folders, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "until", "kept"),
    [
        # The first machine has finished, of which the bucket knows nothing.
        ("ddp_compressed strategy.compression=topk", "metrics.json", [(True, False)]),
        ("fsdp optimizer.lr=1 trainer.checkpoint.keep_best=1", "metrics.csv", [(False, True)]),
    ],
)
def test_a_run_of_two_machines_without_a_shared_folder_ends_bit_equal(
    strategy: str,
    until: str,
    kept: list[tuple[bool, bool]],
    server: Server,
    shell: Shell,
    tmp_path: Path,
) -> None:
    """Both are killed, at random moments or so late; those not `kept` are replaced by empty ones.

    With topk each rank has tensors of its own, which the second machine's sends to the first. With
    a large learning rate an early step is the best, which the second machine does not have.
    """
    words = (*f"strategy={strategy}".split(), "output.from=best")
    for process in start_machines(
        shell.python, [tmp_path / "a", tmp_path / "b"], *words, f"output.dir={tmp_path}/whole"
    ):
        finished(process)
    chance = random.Random(1)
    server.fault = lambda request: time.sleep(0.05)  # uploads take longer than steps
    folders = [tmp_path / "first-0", tmp_path / "second-0"]
    for kill, stays in enumerate(kept):
        processes = start_machines(shell.python, folders, *words, f"output.dir={URL}")
        training = folders[0] / "outputs/s3:/bucket/team/run" / until
        # A machine that stays has nothing of which the bucket knows nothing.
        while not (training.exists() and "config.yaml" in names()) and processes[0].poll() is None:
            time.sleep(0.1)
        if until == "metrics.csv":
            time.sleep(chance.uniform(0, 4))
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert until == "metrics.csv" or until not in names()
        empty = (tmp_path / f"{name}-{kill + 1}" for name in ("first", "second"))
        folders = [
            old if is_kept else new for old, new, is_kept in zip(folders, empty, stays, strict=True)
        ]
    server.fault = lambda request: None
    for process in start_machines(shell.python, folders, *words, f"output.dir={URL}"):
        finished(process)
    first, second = (folder / "outputs/s3:/bucket/team/run" for folder in folders)
    assert last_weights(first) == last_weights(tmp_path / "whole")
    assert fetch_status(URL)["state"] == "finished"
    best = json.loads((first / "manifest.json").read_text())["result"]["step"]
    if "lr=1" in strategy:
        assert best < 8 and best in CheckpointStore(second / "checkpoints").steps()


def test_a_checkpoint_damaged_on_its_way_to_another_machine_stops_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(num_ranks=2, num_local_ranks=1)
    monkeypatch.setattr("app.run.upload.launch.read_launch", lambda: launch)
    monkeypatch.setattr("app.run.upload.url_of", lambda folder: URL)
    monkeypatch.setattr("app.run.upload.run_on_rank0", lambda work: None)
    monkeypatch.setattr("app.run.upload.run_on_ranks", lambda work, runs: work())
    upload(run)
    with open_store(URL) as store:
        store.files.pipe_file(f"{store.root}/checkpoints/step-4/{MARKER}", b"another hash")
    shutil.rmtree(run / "checkpoints/step-4")
    with pytest.raises(UserError, match="step-4 is damaged"):
        share_checkpoint(run, 4)
