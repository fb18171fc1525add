"""One process at a time on a run: the lock in its folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import IO

from app.process.errors import UserError
from app.process.files import open_no_follow
from app.run.folder import into_folder

LOCK_FILE = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

log = logging.getLogger(__name__)

_held: dict[Path, IO[str]] = {}
"""locks of this process, kept open: closing any file of a lock releases it"""


def hold_run(folder: Path) -> None:
    """Lock run `folder` for this process until it ends, however it ends.

    UserError names the process that holds the lock. Ranks rely on the first one's. The process id,
    the machine and the start are written into the lock file for people to read.
    """
    import fcntl

    file = folder.resolve() / LOCK_FILE
    if file in _held:
        return
    with into_folder(folder, LOCK_FILE):
        stream = open_no_follow(file, "a+", encoding="utf-8")
    try:
        # Not flock: that would live on in a loader's workers, which are forked.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(f"{folder}: {_who(stream)} is at work on this run; {_fix()}") from error
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s: no locks here (%s): start one process a run", folder, error.strerror)
    stream.truncate(0)
    note = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    stream.write(json.dumps(note) + "\n")
    stream.flush()
    _held[file] = stream


def _who(stream: IO[str]) -> str:
    stream.seek(0)
    try:
        note = json.load(stream)
        return f"process {note['pid']} on {note['host']}, started {note['started']},"
    except (ValueError, KeyError, TypeError):  # it holds the lock and has not written yet
        return "another process"


def _fix() -> str:
    return "wait for it or stop it, or type another output.dir"
