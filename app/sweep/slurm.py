"""Trials as single-node SLURM jobs, submitted with submitit.

Jobs outlive the sweep's process. submitit's files in the sweep's folder record what was submitted,
so that a resumed sweep waits for the existing job of a trial and does not start it twice.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.sweep.parameters import Parameter
from app.sweep.trials import exit_code, start_process
from app.training.run_documents import END, read_document
from common.errors import ENVIRONMENT_ERROR, INTERRUPTED, TERMINATED, UserError
from common.files import open_no_follow, write_atomically
from common.installation import CHILD, install_extra
from common.redaction import redacted

if TYPE_CHECKING:
    from app.config import LauncherConfig

_JOBS_FOLDER = "slurm"
"""folder in a sweep's folder with submitit's files, in a folder per trial"""
_END_FILE = "end.json"
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")
_SUBMITTED = re.compile(r"(\d+)_submitted\.pkl")
_SLURM_NAME = re.compile(r"[\w.,:@+-]+")
"""names that sbatch reads as one word: a line break would begin a line of the job's script"""
_USER_ID = re.compile(r"UserId=\S*\((\d+)\)")
_COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
_STEP_VARIABLES = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID")
"""environment variables that mark a process as a rank started by srun; a trial starts its own"""


class TrialJob:
    """The function that a job runs: it runs one trial and writes its exit code to a file.

    submitit calls `checkpoint` shortly before the job's time limit, and at a preemption if the
    cluster then sends the job's signal (PreemptParameters=send_user_signal). It requeues the job,
    and the trial resumes. A trial that was cancelled by scancel resumes when its sweep is resumed.
    """

    def __init__(self, command: Sequence[str], folder: Path, log: Path, end: Path) -> None:
        self._command, self._folder, self._log, self._end = command, folder, log, end

    def __call__(self) -> int:
        """Run the trial until it ends; return its exit code."""
        started = time.time()
        for name in _STEP_VARIABLES:
            os.environ.pop(name, None)
        with open_no_follow(self._log, "ab") as output:
            self._process = start_process(self._command, self._folder, output.fileno())
        # submitit ignores SIGTERM, but scancel sends it, and it is how the sweep prunes a trial.
        signal.signal(signal.SIGTERM, lambda *_: self._process.send_signal(signal.SIGTERM))
        # In a thread, because the signal handler `checkpoint` interrupts this wait and waits too.
        self._waiter = threading.Thread(target=self._process.wait)
        self._waiter.start()
        self._waiter.join()
        code = exit_code(self._process.returncode)
        outcome = {"exit_code": code, "seconds": time.time() - started}
        write_atomically(self._end, json.dumps(outcome) + "\n")
        return code

    def checkpoint(self) -> Any:
        """Let the trial save a checkpoint; return the submission that resumes it."""
        from submitit.helpers import DelayedSubmission

        self._process.send_signal(signal.SIGTERM)
        self._waiter.join()
        return DelayedSubmission(TrialJob(self._command, self._folder, self._log, self._end))


class SlurmJob:
    """A queued, running or finished job of a trial.

    Args:
        job: submitit's job.
        end: file to which the job writes the trial's exit code and run time.
    """

    def __init__(self, job: Any, end: Path) -> None:
        self.id, self._job, self._end = str(job.job_id), job, end
        self.seconds = 0.0
        self.problem: str | None = None
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the trial's exit code; 3 (environment) if the job died, None until it ends."""
        if self._code is None and (self._end.exists() or self._job.done()):
            if self._end.exists():
                self._code, self.seconds = _read_end(self._end)
            else:
                self._code = ENVIRONMENT_ERROR
                self.problem = f"job {self.id} ended as {self._job.state}: {self._job.paths.stderr}"
        return self._code

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the processes of the job's steps, if it has not ended."""
        if self.poll() is not None:
            return
        command = ["scancel", f"--signal={signum.name.removeprefix('SIG')}", self.id]
        subprocess.run(command, check=False, capture_output=True)


def _read_end(file: Path) -> tuple[int, float]:
    """Return a trial's exit code and run time in seconds."""
    end = read_document(file, END)
    return end["exit_code"], float(end["seconds"])


def check_slurm() -> None:
    """Raise ImportError or OSError, with the fix, if jobs cannot be submitted from here."""
    if find_spec("submitit") is None:
        raise ImportError(f"launcher=slurm needs submitit: {install_extra('slurm')}")
    if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
        raise OSError(
            f"launcher=slurm: {missing[0]} was not found; start the sweep on a machine from which "
            "SLURM jobs can be submitted"
        )


def check_names(config: LauncherConfig) -> list[str]:
    """List the names of SLURM that cannot be written into a job's script."""
    names = {"partition": config.partition, "account": config.account}
    return [
        f"launcher.{key}={name!r}: expected a name of SLURM: letters, digits, and any of _.,:@+-"
        for key, name in names.items()
        if name is not None and not _SLURM_NAME.fullmatch(name)
    ]


def check_jobs(config: LauncherConfig, parameters: Sequence[Parameter]) -> list[str]:
    """List the settings that cannot be written into the files of a job."""
    return check_names(config) + [
        f"{parameter.key}: contains a secret, and submitit writes the settings of a job to a file; "
        "use launcher=local, or data that needs no secret"
        for parameter in parameters
        if redacted(parameter.values) != list(parameter.values)
    ]


def check_job_folder(job: str, folder: Path) -> None:
    """Raise UserError unless SLURM says that a job of this user writes its output into `folder`.

    The folder may be somebody else's, and the number in it that of any job of this user, which the
    sweep would wait for and could cancel.
    """
    shown = subprocess.run(
        ["scontrol", "show", "job", job], check=False, capture_output=True, text=True
    ).stdout
    values = dict(line.strip().split("=", 1) for line in shown.splitlines() if "=" in line)
    user = _USER_ID.search(shown)
    is_own = user is not None and int(user[1]) == os.getuid()
    if not is_own or Path(values.get("StdOut", "")).parent != folder:
        raise UserError(
            f"{folder}: SLURM does not list job {job} as a job of yours that writes into this "
            f"folder (scontrol show job {job}); remove {folder} to submit the trial again"
        )


class SlurmLauncher:
    """Submits trials as jobs; reuses the job of a trial that was submitted before.

    Args:
        devices: value of trainer.devices.
        folder: the sweep's folder.
        num_slots: number of jobs in the queue at the same time.
    """

    cluster = "slurm"
    """submitit's name of the scheduler"""
    poll_seconds = 1.0
    jobs_outlive_sweep = True

    def __init__(
        self, config: LauncherConfig, devices: int | str, folder: Path, num_slots: int
    ) -> None:
        import submitit

        self.num_slots = num_slots
        self._submitit, self._config = submitit, config
        self._folder = (folder / _JOBS_FOLDER).absolute()
        num_devices = devices if isinstance(devices, int) else 1
        self._gpus = num_devices if config.gpus is None else config.gpus

    def start(self, slot: int, command: Sequence[str], folder: Path, log: Path) -> SlurmJob:
        """Submit a trial, or return its existing job if that did not die and was not cancelled."""
        job_folder = self._folder / folder.name
        end = job_folder / _END_FILE
        if end.exists() and _read_end(end)[0] in (INTERRUPTED, TERMINATED):
            end.unlink()
            existing = None
        else:
            existing = self._find_job(job_folder)
        if existing is not None and (end.exists() or not existing.done(True)):
            if not end.exists():
                check_job_folder(str(existing.job_id), job_folder)
            return SlurmJob(existing, end)
        config = self._config
        # submitit loads the job, and this module with it, by `python -u -m`.
        python = {f"{self.cluster}_python": shlex.join([sys.executable, CHILD])}
        executor = self._submitit.AutoExecutor(job_folder, cluster=self.cluster, **python)
        executor.update_parameters(
            name=f"loft-{_NOT_IN_NAMES.sub('-', self._folder.parent.name)}-{folder.name}",
            timeout_min=config.minutes,
            cpus_per_task=config.cpus,
            mem_gb=config.memory_gib,
            gpus_per_node=self._gpus or None,
            slurm_partition=config.partition,
            slurm_account=config.account,
        )
        job_folder.mkdir(parents=True, exist_ok=True)
        trial = TrialJob(command, folder.absolute(), log.absolute(), end)
        try:
            return SlurmJob(executor.submit(trial), end)
        except self._submitit.core.utils.FailedJobError as error:  # the output of sbatch
            raise OSError(f"launcher=slurm: trial {folder.name}: {error}") from error

    def _find_job(self, folder: Path) -> Any:
        """Return the newest job of a trial, or None.

        submitit names a job's file by the id that sbatch prints, and a job without that file exits
        at once. So no running trial is missed here.
        """
        ids = [int(match[1]) for file in folder.glob("*") if (match := _SUBMITTED.match(file.name))]
        return self._submitit.SlurmJob(folder, str(max(ids))) if ids else None
