"""Status: what a run is doing, from the status.json that it keeps in its folder.

`python -m app.status run=FOLDER`. Needs neither torch nor the machine that the run is on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config.dispatch import run_plain_verb
from app.process.environment import run_program
from app.process.status import FAILED, FINISHED, NO_NEWS, RUNNING, STATUS_FILE, STOPPED, TRAINING
from app.run.find import files_in_outputs
from app.run.folder import OUTPUTS, expand_home, refuse_special_entries
from app.run.remote import is_store_url, open_store, working_folder
from app.training.run_documents import STATUS, read_document
from common.errors import DONE, UserError
from common.facts import setting
from common.installation import verb_command
from common.redaction import redact
from common.text import duration, printable

_SILENT_SECONDS = {TRAINING: 600.0}
"""time without news after which a run counts as stalled; in another state _OTHERWISE_SILENT"""
_OTHERWISE_SILENT = 3600.0
"""loading weights, compiling and measuring write nothing in between"""
_PAUSE_FACTOR = 10
"""seconds of a step -> seconds without news that are no stall"""


@dataclass(kw_only=True, slots=True)
class StatusConfig:
    """Show what a training run is doing, as it last wrote itself into its folder.

    Exit code: 0 = finished; 75 = running; 76 = no news, it has stalled or was killed; else that of
    the run: 2 the user's input, 3 the environment, 4 training went bad, 130 and 143 a signal.
    """

    run: str | None = None
    """folder or URL of a run; null = the one under outputs/ that wrote last"""
    as_json: bool = setting(False, typed="json")
    """whether to print status.json, with `seconds_ago` and `stalled` (the reason, or null)"""


def status(config: StatusConfig) -> int:
    """Print the status of the run; return the exit code that says it."""
    if config.run is not None and is_store_url(config.run):
        where, known = config.run, fetch_status(config.run)
    else:
        folder = _find_folder(config.run)
        where, known = str(folder), read_status(folder)
    seconds_ago = max(0.0, time.time() - known["written"])
    stalled = _stall_reason(known, seconds_ago)
    if config.as_json:
        print(json.dumps(known | {"seconds_ago": seconds_ago, "stalled": stalled}, indent=2))
    else:
        lines = [*_status_lines(known), f"written {duration(seconds_ago)} ago"]
        lines += [] if stalled is None else [f"stalled: {stalled}"]
        print(printable(redact("\n".join([*lines, f"run: {where}"])), keep="\n"))
    return _code_of(known, stalled)


def _find_folder(run: str | None) -> Path:
    if run is None:
        newest = max(
            files_in_outputs(STATUS_FILE), key=lambda file: file.stat().st_mtime, default=None
        )
        if newest is None:
            raise UserError(
                f"no run under {OUTPUTS} has a {STATUS_FILE}: type run=FOLDER, or train first with "
                f"{verb_command('train')}"
            )
        return newest.parent
    folder = expand_home("run", run)
    if not (folder / STATUS_FILE).is_file():
        missing = "no such folder" if not folder.is_dir() else f"there is no {STATUS_FILE}"
        raise UserError(
            f"run={run}: {missing}; type the folder of a training run: it writes the file when it "
            "starts (an evaluation, or an earlier version, writes none)"
        )
    return folder


def fetch_status(url: str) -> dict[str, Any]:
    """Return the status of the run that is copied to `url`; UserError if there is none."""
    working_folder("run", url)  # checks the URL
    with tempfile.TemporaryDirectory() as copy, open_store(url) as store:
        if STATUS_FILE not in store.sizes():
            raise UserError(f"run={url}: there is no {STATUS_FILE}; type the output.dir of a run")
        store.get(STATUS_FILE, Path(copy) / STATUS_FILE)
        return read_status(Path(copy))


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status of the run in `folder`; UserError if the file is damaged."""
    refuse_special_entries(folder)
    known: dict[str, Any] = read_document(folder / STATUS_FILE, STATUS)
    return known


def _stall_reason(known: Mapping[str, Any], seconds_ago: float) -> str | None:
    """Return why a run that has not ended no longer makes progress, or None."""
    state, pid = known["state"], known["pid"]
    if state in (FINISHED, STOPPED, FAILED):
        return None
    if known["host"] == socket.gethostname() and not _exists(pid):
        return f"process {pid} has ended without saying why: it was killed"
    longest = _PAUSE_FACTOR * (known.get("seconds_per_step") or 0.0)
    if seconds_ago <= max(longest, _SILENT_SECONDS.get(state, _OTHERWISE_SILENT)):
        return None
    return (
        f"no news for {seconds_ago / 60:.0f} minutes from process {pid} on {known['host']}: it "
        "hangs, or its machine is down"
    )


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _status_lines(known: Mapping[str, Any]) -> list[str]:
    state, step, steps = known["state"], known["step"], known.get("steps")
    parts = [state, f"step {step:,}" + ("" if steps is None else f" of {steps:,}")]
    forms = {
        "epoch": "epoch {:.2f}",
        "loss": "loss {:.4f}",
        "val_loss": "val loss {:.4f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "checkpoint": "saved: {}",
        "late": "the others wait for {}",
        "exit_code": "exit code {}",
    }
    parts += [form.format(known[key]) for key, form in forms.items() if known.get(key) is not None]
    if (hours := known.get("hours_left")) is not None:
        parts.append(f"{duration(3600 * hours)} left")
    message = known.get("message")
    return ["  ".join(parts), *([] if message is None else [message])]


def _code_of(known: Mapping[str, Any], stalled: str | None) -> int:
    if known["state"] == FINISHED:
        return DONE
    if known["state"] in (STOPPED, FAILED):
        return known.get("exit_code") or NO_NEWS
    return RUNNING if stalled is None else NO_NEWS


def show_status(config: StatusConfig) -> None:
    """Print the status, and end with the exit code that says it."""
    sys.exit(status(config))


if __name__ == "__main__":
    run_program(lambda: run_plain_verb("status", StatusConfig, show_status))
