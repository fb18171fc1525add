"""What this process says: the short of it on the screen, all of it in the run's folder.

Messages of INFO and above are for the screen, those of DEBUG are details: `--verbose` shows them,
and `train.log` has both. Says nothing by itself but that libraries are loaded.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

from app.process.files import open_no_follow
from app.process.launch import is_first_rank
from data_modules import printable, redact

LOG_FILE = "train.log"
"""in a run's folder: all that was said of it, with the time"""
OURS = ("app", "data_modules")
"""loggers whose details are kept; those of libraries are not"""
NOISY = ("bitsandbytes", "httpx", "httpx2")

log = logging.getLogger(__name__)


class CleanFormatter(logging.Formatter):
    """Log messages without secrets, and with control characters in names escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a log record."""
        return printable(redact(super().format(record)), keep="\n")


class Screen(logging.StreamHandler):
    """Write to what stdout is at that moment: a live bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        self.stream = sys.stdout
        super().emit(record)


class RunLog(logging.Handler):
    """Keep messages until the run owns its folder; from then on they go into its log file.

    A disk that takes no more costs the log and not the run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(message)s"))
        self.file: Path | None = None
        self._waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, or keep it."""
        try:
            self._waiting.append(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001  as every handler: a malformed message stops nothing
            self.handleError(record)
        if self.file is not None:
            self._write(self.file)

    def write_into(self, folder: Path) -> None:
        """Write what was said so far into `folder`, and what is said from now on."""
        self.file = folder.absolute() / LOG_FILE
        self._write(self.file)

    def _write(self, file: Path) -> None:
        text = "".join(self._waiting)
        self._waiting.clear()
        with (
            contextlib.suppress(OSError),
            open_no_follow(file, "a", encoding="utf-8", errors="backslashreplace") as stream,
        ):
            stream.write(text)


_is_verbose = False
_run_log = RunLog()


def be_verbose(is_verbose: bool) -> None:
    """Show details on the screen too, or not; for `start_logging`."""
    global _is_verbose
    _is_verbose = is_verbose


def is_verbose() -> bool:
    """Return whether details are for the screen too."""
    return _is_verbose


def start_logging() -> None:
    """Begin to log, on the first rank all and on others warnings; call it once in a process."""
    global _run_log
    _run_log, screen = RunLog(), Screen()
    screen.setFormatter(CleanFormatter("%(message)s"))
    is_first = is_first_rank()
    screen.setLevel(logging.DEBUG if _is_verbose and is_first else logging.INFO)
    level = logging.INFO if is_first else logging.WARNING
    handlers: list[logging.Handler] = [screen, _run_log] if is_first else [screen]
    logging.basicConfig(level=level, handlers=handlers, force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.DEBUG if is_first else logging.NOTSET)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # As torch sets it at the end of its import: a signal during that would print statistics.
    logging.getLogger("torch").setLevel(logging.WARNING)


def keep_log(folder: Path) -> None:
    """Write the log of this process into the `folder` of the run that it owns."""
    if is_first_rank():
        _run_log.write_into(folder)


def print_loading() -> None:
    """Print that libraries are being loaded: for seconds nothing else is seen."""
    log.info("loading libraries ...")
