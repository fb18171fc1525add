"""The trials of a sweep: starting, watching and ending them, and what came of them.

Results are a printed table, sweep.json, sweep.csv and an HTML page.

A trial is a process of this machine, or a single-node SLURM job by the batch script of
`loft launch`. Jobs outlive the sweep's process. Their ids are kept in the sweep's folder, so that a
resumed sweep waits for the existing job of a trial and does not start it twice.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from app.config.overrides import quote_value
from app.process.launch import child_environment
from app.process.logs import show, text_table
from app.process.status import STATUS_FILE
from app.report.chart import COLORS, Chart, Series
from app.report.run_page import PAGE_FILE, PageSection, render_sections
from app.run.folder import CONFIG_FILE, METRICS_FILE
from app.run.job import (
    FORGOTTEN,
    JOB_ENDED,
    SETTLED_POLLS,
    SUBMITTED,
    check_names,
    job_name,
    run_scheduler,
    slurm_script,
    submit_job,
)
from app.run.job import Job as JobFile
from app.sweep.parameters import Parameter, format_overrides, varied
from app.training import run_documents as documents
from app.training.trainer import DEFAULT_MONITOR
from common.errors import DONE, ENVIRONMENT_ERROR, INTERRUPTED, TERMINATED, UserError
from common.files import open_no_follow, write_atomically
from common.installation import child_command, verb_command
from common.redaction import redact, redacted
from common.text import counted, duration, printable

if TYPE_CHECKING:
    from app.config import LauncherConfig, TrainConfig

RESULTS_FILE, TABLE_FILE, SWEEP_PAGE = "sweep.json", "sweep.csv", "sweep.html"
TRAIN = tuple(child_command("app.train")[1:])
"""Python arguments that start a trial"""
_HELD_OUT = "val/tokens/"
"""prefix of the metrics with the number of held-out tokens of a data set"""
_MAX_ERROR_LINES = 200
"""number of last lines of a trial's log that are searched for its error"""
_JOBS_FOLDER = "slurm"
"""folder in a sweep's folder with the script of each trial's job, and its id"""
_USER_ID = re.compile(r"UserId=\S*\((\d+)\)")
_OUTPUT = re.compile(r"^\s*StdOut=(.*)$", re.MULTILINE)
_STATE = re.compile(r"JobState=(\w+)")
_EXIT_CODE = re.compile(r"ExitCode=(\d+):")
_RUN_TIME = re.compile(r"RunTime=(?:(\d+)-)?(\d+):(\d+):(\d+)")
_MAX_ID = 30
"""bytes that are read of the file of an id"""
_COMMANDS = ("sbatch", "srun", "scancel", "scontrol")
_SIGNALLED = 128
"""exit code to which shells add the number of the signal that ended a process"""
_DECIDED = ("trainer.devices", "trainer.num_nodes")
"""overrides that the job's script states itself"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One finished run of a sweep and its result."""

    number: int
    overrides: list[str]
    """overrides of the trial, without secrets"""
    folder: str
    exit_code: int
    seconds: float
    objective: float | None
    """final value of `metric`; None if there is none"""
    error: str | None
    """error message of a failed trial"""
    stopped_at: int | None = None
    """step of the validation after which the trial was pruned; None if it was not"""
    metric: str = DEFAULT_MONITOR
    """metric of the validation by which trials are ranked"""

    @property
    def sort_key(self) -> tuple[bool, float, int]:
        """Key that sorts by objective, trials without a finite one last."""
        known = self.objective is not None and math.isfinite(self.objective)
        value = self.objective if known and self.objective is not None else 0.0
        return not known, value if documents.is_lower_better(self.metric) else -value, self.number

    @property
    def has_failed(self) -> bool:
        """Whether it neither completed nor was pruned."""
        return self.exit_code != DONE and self.stopped_at is None


class LocalJob:
    """A trial's process on this machine; `gpus` is its CUDA_VISIBLE_DEVICES, None to inherit it."""

    problem: str | None = None
    """why it ended, if the trial itself could not report it"""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, gpus: str | None) -> None:
        self._started = time.monotonic()
        command = [*command, f"output.dir={quote_value(str(folder))}"]
        if (folder / CONFIG_FILE).exists():  # an earlier process of this sweep started it
            command.append("resume=auto")
        environment = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        with open_no_follow(log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                env=child_environment() | environment,  # the trial exits when this process does
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # signals reach the trial only if this process sends them
            )
        self.id = str(self._process.pid)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code  # as shells count a signal

    def send_signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)


class LocalLauncher:
    """Runs trials as processes on this machine.

    `slots`: CUDA_VISIBLE_DEVICES of each slot for a trial, None to inherit it.
    """

    poll_seconds = 0.2
    """interval between two checks of the running trials, in seconds"""
    jobs_outlive_sweep = False
    """whether running trials continue after the sweep's process has ended"""

    def __init__(self, slots: Sequence[str | None]) -> None:
        self._slots = slots
        self.num_slots = len(slots)

    def start(self, slot: int, overrides: Sequence[str], folder: Path, log: Path) -> LocalJob:
        """Start a process that sees only the GPUs of its slot."""
        command = [sys.executable, *TRAIN, *overrides]
        return LocalJob(command, folder, log, self._slots[slot])


class RunningTrial:
    """A started trial of the sweep in `folder`, whose output is logged there to NUMBER.log."""

    def __init__(
        self,
        number: int,
        overrides: list[str],
        folder: Path,
        slot: int,
        launcher: LocalLauncher | SlurmLauncher,
        metric: str,
    ) -> None:
        self.number, self.overrides, self.metric = number, overrides, metric
        self.folder = folder / str(number)
        self.log = folder / f"{number}.log"
        self.stopped_at: int | None = None
        self._is_signalled = False
        self.job: LocalJob | SlurmJob = launcher.start(slot, overrides, self.folder, self.log)

    def prune(self, step: int) -> None:
        """Stop the trial, which saves a checkpoint, because others are better at `step`."""
        self.stopped_at = step
        self.send_signal_once(signal.SIGTERM)

    def send_signal_once(self, signum: signal.Signals) -> None:
        """Send a signal, at most once: a second one would end the trial without a checkpoint."""
        if not self._is_signalled:
            self._is_signalled = True
            self.job.send_signal(signum)

    def result(self) -> Trial:
        """Return the result of a trial that has ended."""
        code = self.job.poll()
        assert code is not None, "the trial is still running"
        if self.stopped_at is not None and code in (DONE, TERMINATED):
            # Later steps are ignored: how many there are depends on the speed of the machine.
            curve = read_curve(self.folder, self.metric)
            until_pruned = [value for step, value in curve.items() if step <= self.stopped_at]
            best = min if documents.is_lower_better(self.metric) else max
            objective, error, code = best(until_pruned, default=None), None, TERMINATED
        else:
            objective = read_final(self.folder, self.metric) if code == DONE else None
            reason = self.job.problem or _find_error(self.log) or f"exit code {code}"
            error = None if code == DONE else reason
        return Trial(
            number=self.number,
            overrides=redacted(self.overrides),
            folder=str(self.folder),
            exit_code=code,
            seconds=round(self.job.seconds, 1),
            objective=objective,
            error=error,
            stopped_at=self.stopped_at,
            metric=self.metric,
        )


def read_curve(folder: Path, metric: str) -> dict[int, float]:
    """Return a metric of a run's validations by step, without step 0."""
    rows = documents.read_curves(folder / documents.CSV_FILE)
    return {step: row[metric] for step, row in rows if metric in row and step > 0}


def read_final(folder: Path, metric: str) -> float | None:
    """Return a metric of a finished run; None if it was not measured."""
    file = folder / METRICS_FILE
    if not file.exists():
        return None
    value: float | None = documents.read_document(file, documents.METRICS).get(metric)
    return value


def _find_error(log: Path) -> str | None:
    if not log.exists():  # the job never started
        return None
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_MAX_ERROR_LINES:]
    errors = [line.strip() for line in lines if line.startswith("error")]
    return errors[-1] if errors else next((line for line in reversed(lines) if line.strip()), None)


class SlurmJob:
    """A queued, running or ended job of a trial; `file` has held its id since it was submitted."""

    def __init__(self, number: str, file: Path, folder: Path, log: Path) -> None:
        self.id, self._file, self._folder, self._log = number, file, folder, log
        self.seconds = 0.0
        self.problem: str | None = None
        self._code: int | None = None
        self._ended_polls = 0

    def poll(self) -> int | None:
        """Return the trial's exit code; 3 (environment) if the job died, None until it ends."""
        if self._code is None:
            shown = _show(self.id)
            self._ended_polls = self._ended_polls + 1 if _has_ended(shown) else 0
            if self._ended_polls == SETTLED_POLLS:
                self._code = self._read_end(shown)
        return self._code

    def finds_result(self, shown: str) -> bool:
        """Return whether the job, of which scontrol says `shown`, need not be submitted again."""
        if not _has_ended(shown):
            return True
        code = self._read_end(shown)
        return self.problem is None and code not in (INTERRUPTED, TERMINATED)

    def _read_end(self, shown: str) -> int:
        if FORGOTTEN in shown:
            code, state = self._code_in_status(), "unknown to SLURM"
        else:
            (state,), (exit_code,) = _STATE.findall(shown), _EXIT_CODE.findall(shown)
            code = TERMINATED if state == "CANCELLED" else int(exit_code)
            if code == DONE and state != "COMPLETED":  # SLURM has ended it
                code = None
            days, hours, minutes, seconds = (int(each or 0) for each in _RUN_TIME.findall(shown)[0])
            self.seconds = float(((24 * days + hours) * 60 + minutes) * 60 + seconds)
        if code is None or (code > _SIGNALLED and code not in (INTERRUPTED, TERMINATED)):
            self.problem = f"job {self.id} ended as {state}: {self._log}"
        return ENVIRONMENT_ERROR if code is None else code

    def _code_in_status(self) -> int | None:
        file = self._folder / STATUS_FILE
        if not file.exists():
            return None
        status = documents.read_document(file, documents.STATUS)
        code: int | None = status.get("exit_code")
        return code if status["written"] > self._file.stat().st_mtime else None

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the trial's ranks; nothing if the job has ended."""
        run_scheduler(["scancel", f"--signal={signum.name.removeprefix('SIG')}", self.id])


def _read_id(file: Path) -> str:
    """Return the id of a job; UserError if the file holds something else, for scontrol to read."""
    with open_no_follow(file, "rb") as stream:
        number = stream.read(_MAX_ID).decode(errors="replace").strip()
    if not number.isdecimal():
        raise UserError(f"{file}: {number!r} is not the id of a job; remove {file.parent}")
    return number


def _show(number: str) -> str:
    return run_scheduler(["scontrol", "show", "job", number])[1]


def _has_ended(shown: str) -> bool:
    return FORGOTTEN in shown or JOB_ENDED.search(shown) is not None


def check_slurm() -> None:
    """Raise OSError, with the fix, if jobs cannot be submitted from here."""
    if missing := [name for name in _COMMANDS if shutil.which(name) is None]:
        raise OSError(
            f"launcher=slurm: {missing[0]} was not found; start the sweep on a machine from which "
            "SLURM jobs can be submitted"
        )


def check_jobs(config: LauncherConfig, parameters: Sequence[Parameter]) -> list[str]:
    """List the settings that cannot be written into the files of a job."""
    return check_names(config) + [
        f"{parameter.key}: contains a secret, and the script of a job states its settings; "
        "use launcher=local, or data that needs no secret"
        for parameter in parameters
        if redacted(parameter.values) != list(parameter.values)
    ]


def check_own_job(number: str, shown: str, log: Path) -> None:
    """Raise UserError unless SLURM says that a job of this user writes its output into `log`.

    The sweep's folder may be somebody else's, and the number in it that of any job of this user,
    which the sweep would wait for and could cancel.
    """
    user, output = _USER_ID.search(shown), _OUTPUT.search(shown)
    is_own = user is not None and int(user[1]) == os.getuid()
    if not is_own or output is None or Path(output[1].replace("%%", "%")) != log:
        raise UserError(
            f"{log}: SLURM does not list job {number} as a job of yours that writes into this file "
            f"(scontrol show job {number}); remove {log.parent / _JOBS_FOLDER} to submit the "
            "trials again"
        )


class SlurmLauncher:
    """Submits trials as jobs; reuses the job of a trial that was submitted before.

    `config`: settings of the first trial of the sweep in `folder`.
    """

    poll_seconds = 2.0
    jobs_outlive_sweep = True

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.num_slots = config.sweep.parallel
        self._config, self._folder = config, (folder / _JOBS_FOLDER).absolute()

    def start(self, slot: int, overrides: Sequence[str], folder: Path, log: Path) -> SlurmJob:
        """Submit a trial, or return its existing job if that did not die and was not cancelled."""
        file, log, folder = self._folder / f"{folder.name}.id", log.absolute(), folder.absolute()
        if file.exists():
            number = _read_id(file)
            job, shown = SlurmJob(number, file, folder, log), _show(number)
            if FORGOTTEN not in shown:
                check_own_job(number, shown, log)
            if job.finds_result(shown):
                _release(number)
                return job
        open_no_follow(log, "ab").close()  # not through a link, as SLURM would
        self._folder.mkdir(parents=True, exist_ok=True)
        script = file.with_suffix(".sbatch")
        write_atomically(script, slurm_script(self._build_job(overrides, folder, log)))
        # Held until its id is kept: a sweep that is killed in between has started nothing.
        number = submit_job(["sbatch", "--hold", str(script)], SUBMITTED)
        write_atomically(file, f"{number}\n")
        _release(number)
        return SlurmJob(number, file, folder, log)

    def _build_job(self, overrides: Sequence[str], folder: Path, log: Path) -> JobFile:
        values = dict(word.partition("=")[::2] for word in overrides)
        devices = values.get("trainer.devices", str(self._config.trainer.devices))
        launcher = self._config.launcher
        return JobFile(
            name=f"{job_name(folder.parent.name)}-{folder.name}",
            folder=str(folder),
            log=str(log).replace("%", "%%"),
            words=[f"{key}={value}" for key, value in values.items() if key not in _DECIDED]
            + ["resume=auto"],
            nodes=1,
            ranks_per_node=int(devices) if devices.isdecimal() else launcher.gpus or 1,
            card=None if self._config.trainer.accelerator == "cpu" else "auto",
            launcher=launcher,
        )


def _release(number: str) -> None:
    """Let a job start that was submitted on hold; nothing if it was let already."""
    run_scheduler(["scontrol", "release", number])


def describe_outcome(trial: Trial) -> str:
    if trial.error is not None:
        return f"{trial.error[:200]} (exit {trial.exit_code}; {trial.number}.log)"
    value = "not measured" if trial.objective is None else f"{trial.objective:.4f}"
    pruned = "" if trial.stopped_at is None else f", pruned at step {trial.stopped_at}"
    return f"{trial.metric} {value}{pruned}"


def write_sweep_page(
    trials: Sequence[Trial], folder: Path, parameters: Sequence[Parameter]
) -> None:
    """Write sweep.html, the page that compares all trials by the settings that vary."""
    best_first, metric = _sort_best_first(trials), _metric_of(trials)
    keys = [parameter.key for parameter in varied(parameters)]
    cells, lines = [["trial", *keys, metric, "ended"]], list[Series]()
    for trial in best_first:
        values, objective = _values_of(trial), trial.objective
        shown = [printable(values[key]) for key in keys]
        shown.append("-" if objective is None else f"{objective:.4f}")
        link, page = str(trial.number), Path(trial.folder) / PAGE_FILE
        if page.is_file():
            link = Markup('<a href="{}">{}</a>').format(quote(os.path.relpath(page, folder)), link)
        cells.append([link, *shown, printable(redact(describe_outcome(trial)))])
        curve = sorted(read_curve(Path(trial.folder), trial.metric).items())
        curve = [point for point in curve if math.isfinite(point[1])]
        if curve and len(lines) < len(COLORS):
            name = f"trial {trial.number}"
            lines.append(Series(name=name, points=curve, color_index=len(lines), is_sparse=True))
    sections = [
        PageSection(
            title="Curves",
            description=f"Of the {counted(len(lines), 'best trial')}.",
            charts=[Chart(title=metric, series=lines)] if lines else [],
        ),
        PageSection(title="Trials", tables=[cells]),
    ]
    if completed := _completed(trials):
        best = completed[0]
        found = f"Trial {best.number}, with {metric} {best.objective:.4f}. To train like it, type:"
        command = printable(_full_run(best, parameters))
        sections.insert(0, PageSection(title="Best trial", description=found, command=command))
    kind = "lowest" if documents.is_lower_better(metric) else "highest"
    facts = [f"{counted(len(trials), 'trial')}, the {kind} {metric} first"]
    write_atomically(folder / SWEEP_PAGE, render_sections(str(folder), facts, sections))


def save_results(trials: Sequence[Trial], folder: Path) -> None:
    """Write sweep.json and sweep.csv, best trials first."""
    rows: list[dict[str, Any]] = redacted(
        [dataclasses.asdict(trial) for trial in _sort_best_first(trials)]
    )
    write_atomically(folder / RESULTS_FILE, json.dumps(rows, indent=2) + "\n")
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, [field.name for field in dataclasses.fields(Trial)])
    writer.writeheader()
    writer.writerows(row | {"overrides": " ".join(row["overrides"])} for row in rows)
    write_atomically(folder / TABLE_FILE, table.getvalue())


def load_results(folder: Path) -> list[Trial]:
    """Return the finished trials of a sweep by number; raise UserError if the file is damaged."""
    file = folder / RESULTS_FILE
    if not file.exists():
        return []
    trials = [Trial(**row) for row in documents.read_document(file, documents.TRIALS)]
    return sorted(trials, key=lambda trial: trial.number)


def print_results(
    trials: Sequence[Trial], parameters: Sequence[Parameter], shared: Mapping[str, str]
) -> None:
    """Print the table of trials, why the best one won, and the command of its full run.

    `shared` are the values that all trials have. The command leaves out what a `sweep=NAME` file
    sets for all trials, such as their length.
    """
    best_first = _sort_best_first(trials)
    keys = [parameter.key for parameter in varied(parameters)]
    error_column = ["error"] if any(trial.error for trial in trials) else []
    cells = [["trial", *keys, _metric_of(trials), "time", "exit", *error_column]]
    for trial in best_first:
        values = _values_of(trial)
        objective = "-" if trial.objective is None else f"{trial.objective:.4f}"
        was_pruned = trial.stopped_at is not None
        ended = f"pruned at {trial.stopped_at}" if was_pruned else str(trial.exit_code)
        varying = [_shorten_number(values[key]) for key in keys]
        errors = [(trial.error or "")[:100]] * len(error_column)
        figures = [objective, duration(trial.seconds), ended]
        cells.append([str(trial.number), *varying, *figures, *errors])
    title = f"{counted(len(trials), 'trial')} by {_metric_of(trials)}"
    show(text_table(cells, title, (*keys, "exit", "error")))
    if not (completed := _completed(trials)):
        return
    best = completed[0]
    shared_overrides = redacted(format_overrides(dict(shared)))
    own = " ".join(override for override in best.overrides if override not in shared_overrides)
    print(printable(f"best: {own} -> {best.folder}"))
    for reason in _explain_best(completed, trials, varied(parameters)):
        show(f"  {printable(redact(reason))}")
    print(printable(f"  {_full_run(best, parameters)}"))


def _explain_best(
    completed: Sequence[Trial], trials: Sequence[Trial], parameters: Sequence[Parameter]
) -> Iterator[str]:
    """Yield why the best trial won, and which intervals to widen because it is at their edge.

    `completed` are the trials of `trials` that ran to their end, the best one first.
    """
    best = completed[0]
    num_pruned = sum(trial.stopped_at is not None for trial in trials)
    kind = "lowest" if documents.is_lower_better(best.metric) else "highest"
    reason = f"{kind} {best.metric} ({best.objective:.4f}) of {len(completed)} completed trials"
    if num_pruned:
        reason += f"; {num_pruned} pruned, because others were better at the same step"
    keys = {parameter.key for parameter in parameters}
    for second in completed[1:2]:
        different = [
            override
            for override in second.overrides
            if override.partition("=")[0] in keys and override not in best.overrides
        ]
        reason += f"; next best: {second.objective:.4f} with {' '.join(different)}"
    yield reason
    values = _values_of(best)
    for parameter in parameters:
        interval, value = parameter.interval, values[parameter.key]
        if interval is not None and interval.is_edge(float(value)):
            yield f"{parameter.key}={value} is at the edge of {interval}: search a wider interval"
    held_out = [_held_out_tokens(Path(trial.folder)) for trial in completed]
    if any(tokens != held_out[0] for tokens in held_out):
        totals = sorted({sum(tokens.values()) for tokens in held_out})
        yield (
            f"these trials were not validated on the same tokens ({totals[0]:,.0f} to "
            f"{totals[-1]:,.0f}), and their {best.metric} measures different things: compare them "
            "by evaluate, typing the same data settings, such as data.val_datasets"
        )


def _held_out_tokens(folder: Path) -> dict[str, float]:
    """Return the number of tokens of each data set on which a finished run was validated."""
    metrics, problem = documents.find_problem(folder / METRICS_FILE, documents.METRICS)
    if problem is not None:
        return {}
    return {name: value for name, value in metrics.items() if name.startswith(_HELD_OUT)}


def _completed(trials: Sequence[Trial]) -> list[Trial]:
    return [
        trial
        for trial in _sort_best_first(trials)
        if trial.exit_code == DONE and trial.stopped_at is None and trial.objective is not None
    ]


def _full_run(best: Trial, parameters: Sequence[Parameter]) -> str:
    only_in_sweep = {each.key for each in parameters if each.is_from_file and not each.varies}
    words = [word for word in best.overrides if word.partition("=")[0] not in only_in_sweep]
    return f"{verb_command('train')} {shlex.join(words)}"


def _metric_of(trials: Sequence[Trial]) -> str:
    return trials[0].metric if trials else DEFAULT_MONITOR


def _sort_best_first(trials: Sequence[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: trial.sort_key)


def _values_of(trial: Trial) -> dict[str, str]:
    return dict(override.split("=", 1) for override in trial.overrides)


def _shorten_number(value: str) -> str:
    try:
        return value if value.lstrip("-").isdigit() else f"{float(value):.4g}"
    except ValueError:
        return value
