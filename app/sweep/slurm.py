"""Trials as jobs of SLURM, submitted by submitit: each on a node of its own choosing.

A job outlives its sweep. What was submitted is known by submitit's files in the sweep's folder, so
that a sweep which goes on waits for a trial's job and does not start the trial twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.errors import ENVIRONMENT_ERROR, INTERRUPTED, TERMINATED
from app.process.files import write_whole
from app.sweep.trials import start_process

if TYPE_CHECKING:
    from app.config import LauncherConfig

JOBS = "slurm"
"""in a sweep's folder: a folder of submitit's files for each trial"""
END_FILE = "end.json"
SUBMITTED = re.compile(r"(\d+)_submitted\.pkl")
COMMANDS = ("sbatch", "srun", "sacct", "scancel")
OF_A_STEP = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID")
"""by them a process is a rank that srun started: a trial starts its own"""


class TrialJob:
    """What a job does: it trains one trial, and leaves its exit code in a file.

    submitit calls `checkpoint` before a job's time is over, and at a preemption where the cluster
    sends the job's signal then (PreemptParameters=send_user_signal), and puts the job back into the
    queue, where the trial resumes. A trial that scancel ended resumes with its sweep.
    """

    def __init__(self, command: Sequence[str], folder: Path, log: Path, end: Path) -> None:
        self._command, self._folder, self._log, self._end = command, folder, log, end

    def __call__(self) -> int:
        """Train until the trial ends."""
        started = time.time()
        for name in OF_A_STEP:
            os.environ.pop(name, None)
        with self._log.open("ab") as output:
            self._process = start_process(self._command, self._folder, output.fileno())
        # submitit ignores it; it is what scancel sends, and what stops a trial.
        signal.signal(signal.SIGTERM, lambda *_: self._process.send_signal(signal.SIGTERM))
        # In a thread: `checkpoint` is called while this waits, and waits too.
        self._waiter = threading.Thread(target=self._process.wait)
        self._waiter.start()
        self._waiter.join()
        outcome = {"exit_code": self._process.returncode, "seconds": time.time() - started}
        write_whole(self._end, json.dumps(outcome) + "\n")
        return int(self._process.returncode)

    def checkpoint(self) -> Any:
        """Have the trial save itself; returns what the job does when it runs again."""
        from submitit.helpers import DelayedSubmission

        self._process.send_signal(signal.SIGTERM)
        self._waiter.join()
        return DelayedSubmission(TrialJob(self._command, self._folder, self._log, self._end))


class SlurmJob:
    """A trial's job in the queue or on its node.

    Args:
        job: submitit's.
        end: file in which the job leaves the trial's exit code.
    """

    def __init__(self, job: Any, end: Path) -> None:
        self.id, self._job, self._end = str(job.job_id), job, end
        self.seconds = 0.0
        self.problem: str | None = None
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the trial's exit code; that of a broken environment where the job died."""
        if self._code is None and (self._end.exists() or self._job.done()):
            if self._end.exists():
                self._code, self.seconds = _read_end(self._end)
            else:
                self._code = ENVIRONMENT_ERROR
                self.problem = f"job {self.id} ended as {self._job.state}: {self._job.paths.stderr}"
        return self._code

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the processes of the job's step."""
        command = ["scancel", f"--signal={signum.name.removeprefix('SIG')}", self.id]
        subprocess.run(command, check=False, capture_output=True)


def _read_end(file: Path) -> tuple[int, float]:
    """Return the exit code of a trial, and its seconds."""
    end = json.loads(file.read_text(encoding="utf-8"))
    return int(end["exit_code"]), float(end["seconds"])


def check_slurm() -> None:
    """Raise ImportError or OSError with what to do where no jobs can be submitted."""
    if find_spec("submitit") is None:
        raise ImportError("launcher=slurm needs submitit: pip install -e '.[slurm]'")
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        raise OSError(
            f"launcher=slurm: there is no {missing[0]} here; start the sweep on a machine from "
            "which jobs are submitted"
        )


class Slurm:
    """Submits trials as jobs; a trial whose job was submitted before is waited for.

    Args:
        devices: trainer.devices.
        folder: the sweep's.
    """

    cluster = "slurm"
    """submitit's name of it"""
    poll_seconds = 1.0
    outlives_sweep = True

    def __init__(self, config: LauncherConfig, devices: int | str, folder: Path, num: int) -> None:
        import submitit

        self.num_slots = num
        self._submitit, self._config = submitit, config
        self._folder = (folder / JOBS).absolute()
        typed = devices if isinstance(devices, int) else 1
        self._gpus = typed if config.gpus is None else config.gpus

    def start(self, slot: int, command: Sequence[str], folder: Path, log: Path) -> SlurmJob:
        """Submit a trial, or return its job if that has not died or been cancelled."""
        where = self._folder / folder.name
        end = where / END_FILE
        if end.exists() and _read_end(end)[0] in (INTERRUPTED, TERMINATED):
            end.unlink()
            known = None
        else:
            known = self._submitted(where)
        if known is not None and (end.exists() or not known.done(True)):
            return SlurmJob(known, end)
        config = self._config
        executor = self._submitit.AutoExecutor(where, cluster=self.cluster)
        executor.update_parameters(
            name=f"loft-{self._folder.parent.name}-{folder.name}",
            timeout_min=config.minutes,
            cpus_per_task=config.cpus,
            mem_gb=config.memory_gib,
            gpus_per_node=self._gpus or None,
            slurm_partition=config.partition,
            slurm_account=config.account,
        )
        where.mkdir(parents=True, exist_ok=True)
        trial = TrialJob(command, folder.absolute(), log.absolute(), end)
        try:
            return SlurmJob(executor.submit(trial), end)
        except self._submitit.core.utils.FailedJobError as error:  # what sbatch said
            raise OSError(f"launcher=slurm: trial {folder.name}: {error}") from error

    def _submitted(self, folder: Path) -> Any:
        """Return the newest job of a trial; None where it has none.

        submitit names a job's file by its id only after sbatch has said it, and a job without that
        file ends by itself: what is not found here does not train.
        """
        ids = [int(match[1]) for file in folder.glob("*") if (match := SUBMITTED.match(file.name))]
        return self._submitit.SlurmJob(folder, str(max(ids))) if ids else None
