"""Copy a run's folder to the URL of its output.dir while it trains, in a process of its own.

Sharing the interpreter with training, the uploads would delay each step. Of a checkpoint the marker
is uploaded last. Of several machines the first one's folder is copied, and the others download
what they need of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from app.process import launch
from app.process.collectives import run_on_rank0, run_on_ranks
from app.process.heartbeat import refresh_liveness, waiting_for_thread
from app.process.signals import HANDLED
from app.process.status import STATUS_FILE
from app.run.folder import LOCK_FILE, METRICS_FILE, UNFINISHED
from app.run.remote import ObjectStore, fetch_checkpoint, open_store, url_of
from app.training.checkpoint.checkpoint import MARKER
from app.training.checkpoint.store import CHECKPOINTS, CheckpointStore
from common.errors import UserError
from common.installation import child_command
from common.text import duration

log = logging.getLogger(__name__)

PAUSES = (1, 2, 4, 8, 16, 32, 60)
"""seconds before each further attempt, after those of the file system itself"""
_LOOK_SECONDS, _STATUS_SECONDS = 0.5, 30.0
"""time between looks for a new checkpoint, and between uploads of status.json"""
SILENT_SECONDS = 1800.0
"""how long the end waits for the process that uploads without a word of it: three requests"""
_DRAIN_SECONDS = 5.0
"""time to read the last words of the process, whose pipe an orphan may hold open"""
_SNAPSHOT = ".upload"
"""suffix of a folder of hard links: a checkpoint that is removed while it is uploaded"""
_NOT_UPLOADED = {CHECKPOINTS, LOCK_FILE, UNFINISHED, "partial"}
_LAST = (METRICS_FILE, STATUS_FILE)
"""files uploaded after all others: a run with metrics.json counts as finished"""


def share_checkpoint(folder: Path, step: int) -> None:
    """Bring a checkpoint that the first machine has to all machines of a run; all ranks call it."""
    url = url_of(folder)
    if url is None or launch.read_launch().num_nodes == 1:
        return

    def upload() -> None:
        with open_store(url) as store:
            Uploader(folder, url).put_checkpoint(store, step, folder / CHECKPOINTS / f"step-{step}")

    def download() -> None:
        if step not in CheckpointStore(folder / CHECKPOINTS).steps():
            with open_store(url) as store:
                if not fetch_checkpoint(store, store.sizes(), folder, step):
                    raise UserError(f"{url}: step-{step} is damaged: resume the run")

    run_on_rank0(upload)
    run_on_ranks(download, runs=launch.is_first_on_machine())


@contextlib.contextmanager
def uploading(folder: Path) -> Iterator[None]:
    """Copy the run in `folder` to its URL, if it has one, while the block runs and at its end.

    OSError if the copy is not complete in the end.
    """
    url = url_of(folder)
    if url is None or not launch.is_first_rank():
        yield
        return
    process = _UploadProcess(folder)
    try:
        yield
    except BaseException:
        process.end(url)
        raise
    if (reason := process.end(url)) is not None:
        raise OSError(
            f"{url} lacks what is new in {folder}: {reason}; type resume={folder} to upload it"
        )


class _UploadProcess:
    """The process that uploads, which ends with this one; what it says is logged here."""

    def __init__(self, folder: Path) -> None:
        self._is_ending = self._has_uploaded = False
        self._failure: str | None = None
        self._heard = time.monotonic()
        """when it said something"""
        self._process = subprocess.Popen(
            [*child_command("app.run.upload"), str(folder)],
            env=launch.child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._relay = threading.Thread(
            target=self._log_messages, args=(self._process.stdout,), name="upload", daemon=True
        )
        self._relay.start()

    def _log_messages(self, messages: IO[bytes]) -> None:
        for line in messages:
            if not line.endswith(b"\n"):  # killed while it wrote
                continue
            message = json.loads(line)
            if "level" in message:
                log.log(message["level"], "%s", message["text"])
            self._failure = message.get("failure", self._failure)
            self._has_uploaded = "uploaded" in message
            self._heard = time.monotonic()
            refresh_liveness()
        if not self._is_ending:
            log.warning(
                "the process that uploads has ended with %s: what is new stays here until the run "
                "is resumed",
                self._process.wait(),
            )

    def end(self, url: str) -> str | None:
        """Wait until all is uploaded; return why it is not, or None."""
        assert self._process.stdin is not None
        log.info("uploading the rest to %s", url)
        self._is_ending, self._heard = True, time.monotonic()
        # Not by closing: workers that were forked meanwhile hold the pipe open.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"end\n")
            self._process.stdin.flush()
        with waiting_for_thread():
            while self._process.poll() is None:
                if time.monotonic() - self._heard > SILENT_SECONDS:
                    self._process.kill()
                    return f"the process that uploads said nothing for {duration(SILENT_SECONDS)}"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOOK_SECONDS)
        self._relay.join(_DRAIN_SECONDS)
        if self._has_uploaded:
            return None
        return self._failure or f"the process that uploads ended with {self._process.returncode}"


@dataclass(slots=True)
class Uploader:
    """Uploads each new checkpoint, with the other files of the run."""

    folder: Path
    url: str
    on_progress: Callable[[], object] = refresh_liveness
    """called after each MiB"""
    uploaded: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """size and modification time of the run's files as they were uploaded"""
    failure: str | None = None
    """why something is not uploaded"""
    _newest: int | None = None
    """step of the newest checkpoint that has been dealt with"""

    def run(self, ended: Callable[[float], bool]) -> None:
        """Upload what is new until the run has ended, then the rest.

        `ended` waits until then, for at most as many seconds as it is given.
        """
        for leftover in (self.folder / CHECKPOINTS).glob(f"*{_SNAPSHOT}"):
            shutil.rmtree(leftover)
        next_status = 0.0
        while not ended(_LOOK_SECONDS):
            if self._local().newest_step() != self._newest:
                self._upload()
            elif time.monotonic() >= next_status:
                self._put_changed(self.folder / STATUS_FILE)
                next_status = time.monotonic() + _STATUS_SECONDS
        self.failure = None  # what has failed is tried again
        self._upload()

    def _local(self) -> CheckpointStore:
        return CheckpointStore(self.folder / CHECKPOINTS)

    def _upload(self) -> None:
        """Upload the run's files, then the newest checkpoint; remove those that are gone here."""
        step = self._local().newest_step()
        snapshot = None if step is None else self._link(step)
        for file in sorted(self.folder.rglob("*"), key=lambda file: (file.name in _LAST, file)):
            if file.name not in _LAST or self.failure is None:
                self._put_changed(file)
        self._newest = step
        if snapshot is None or step is None:
            return
        if self._try(lambda store: self.put_checkpoint(store, step, snapshot)):
            self._try(self._rotate)
        shutil.rmtree(snapshot)

    def _link(self, step: int) -> Path | None:
        """Return a folder of links to a checkpoint's files; None if it is being removed."""
        source = self.folder / CHECKPOINTS / f"step-{step}"
        snapshot = source.with_suffix(_SNAPSHOT)
        try:
            shutil.copytree(source, snapshot, copy_function=os.link)
        except (OSError, shutil.Error):
            shutil.rmtree(snapshot, ignore_errors=True)
            return None
        # A removal deletes the marker first.
        return snapshot if (source / MARKER).exists() else None

    def _put_changed(self, file: Path) -> None:
        name = file.relative_to(self.folder)
        if name.parts[0] in _NOT_UPLOADED or any(part.startswith(".") for part in name.parts):
            return
        with contextlib.suppress(FileNotFoundError):  # of files that are replaced meanwhile
            facts = file.stat()
            known = (facts.st_size, facts.st_mtime_ns)
            if not file.is_file() or self.uploaded.get(file) == known:
                return
            with file.open("rb") as source:
                if self._try(lambda store: store.put(name.as_posix(), source, self.on_progress)):
                    self.uploaded[file] = known

    def put_checkpoint(self, store: ObjectStore, step: int, snapshot: Path) -> None:
        """Upload a checkpoint's files, its marker once all of them have arrived as they are."""
        above, there = f"{CHECKPOINTS}/step-{step}", store.sizes()
        if f"{above}/{MARKER}" in there:
            return
        files = [file for file in sorted(snapshot.iterdir()) if file.name != MARKER]
        sizes = {f"{above}/{file.name}": file.stat().st_size for file in files}
        for file in files:
            with file.open("rb") as source:
                store.put(f"{above}/{file.name}", source, self.on_progress)
            newer = [saved for saved in self._local().steps() if saved > step]
            if len(newer) > 1:
                log.warning(
                    "upload to %s: step-%d is still on its way, and step-%d is saved already; type "
                    "a larger trainer.checkpoint.every_steps",
                    *(self.url, step, newer[-1]),
                )
        arrived = store.sizes()
        if wrong := [name for name, size in sizes.items() if arrived.get(name) != size]:
            raise OSError(f"{wrong[0]} has not arrived as it is")
        with (snapshot / MARKER).open("rb") as source:
            store.put(f"{above}/{MARKER}", source, self.on_progress)
        log.info("uploaded: %s/%s", self.url, above)

    def _rotate(self, store: ObjectStore) -> None:
        """Remove the checkpoints that are gone here, the marker of each first."""
        kept = {f"step-{step}" for step in self._local().steps()} | {f"step-{self._newest}"}
        gone = [
            name
            for name in store.sizes()
            if name.startswith(f"{CHECKPOINTS}/") and PurePosixPath(name).parts[1] not in kept
        ]
        for name in sorted(gone, key=lambda name: not name.endswith(f"/{MARKER}")):
            store.remove(name)

    def _try(self, work: Callable[[ObjectStore], object]) -> bool:
        for pause in (*PAUSES, None):
            self.on_progress()
            try:
                with open_store(self.url) as store:
                    work(store)
                return True
            except UserError as error:
                if pause is None:
                    self.failure = str(error)
                    log.warning("upload: %s", error)
                else:
                    time.sleep(pause)
        return False


class _Messages(logging.Handler):
    """Sends what is logged to the training process."""

    def emit(self, record: logging.LogRecord) -> None:
        _send(level=record.levelno, text=self.format(record))


def _send(**message: Any) -> None:
    print(json.dumps(message), flush=True, file=sys.__stdout__)


def _ended(seconds: float = 0.0) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def main(folder: Path) -> None:
    """Upload the run in `folder` until the process that trains says that it has ended."""
    launch.exit_with_parent()
    sys.stdout = sys.stderr  # for what libraries print: the other process reads messages only
    for signum in HANDLED:  # the process that trains decides what they mean
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, handlers=[_Messages()])
    log.setLevel(logging.INFO)
    url = url_of(folder)
    assert url is not None

    def on_progress() -> None:
        if _ended():  # while it trains, this would only disturb it
            _send()

    uploader = Uploader(folder, url, on_progress)
    uploader.run(_ended)
    if uploader.failure is None:
        _send(uploaded=True)
    else:
        _send(failure=uploader.failure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
