"""The results of a sweep: a printed table, sweep.json, sweep.csv and an HTML page."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from app.process.logs import show, text_table
from app.report.chart import COLORS, Chart, Series
from app.report.run_page import PAGE_FILE as RUN_PAGE
from app.report.run_page import Section, render_sections
from app.sweep.parameters import Parameter, format_overrides, varied
from app.sweep.trials import Trial, read_curve
from app.training.run_documents import TRIALS, is_lower_better, read_document
from app.training.trainer import DEFAULT_MONITOR
from common.errors import DONE
from common.files import write_atomically
from common.installation import verb_command
from common.redaction import redact, redacted
from common.text import counted, duration, printable

RESULTS_FILE, TABLE_FILE, PAGE_FILE = "sweep.json", "sweep.csv", "sweep.html"


def describe_outcome(trial: Trial) -> str:
    """Return the result of a trial in words."""
    if trial.error is not None:
        return f"{trial.error[:200]} (exit {trial.exit_code}; {trial.number}.log)"
    value = "not measured" if trial.objective is None else f"{trial.objective:.4f}"
    pruned = "" if trial.stopped_at is None else f", pruned at step {trial.stopped_at}"
    return f"{trial.metric} {value}{pruned}"


def write_page(trials: Sequence[Trial], folder: Path, parameters: Sequence[Parameter]) -> None:
    """Write sweep.html, the page that compares all trials by the settings that vary."""
    best_first, metric = _sort_best_first(trials), _metric_of(trials)
    keys = [parameter.key for parameter in varied(parameters)]
    cells, lines = [["trial", *keys, metric, "ended"]], list[Series]()
    for trial in best_first:
        values, objective = _values_of(trial), trial.objective
        shown = [printable(values[key]) for key in keys]
        shown.append("-" if objective is None else f"{objective:.4f}")
        cells.append([_link_of(trial, folder), *shown, printable(redact(describe_outcome(trial)))])
        curve = sorted(read_curve(Path(trial.folder), trial.metric).items())
        curve = [point for point in curve if math.isfinite(point[1])]
        if curve and len(lines) < len(COLORS):
            name = f"trial {trial.number}"
            lines.append(Series(name=name, points=curve, color_index=len(lines), is_sparse=True))
    sections = [
        Section(
            title="Curves",
            description=f"Of the {counted(len(lines), 'best trial')}.",
            charts=[Chart(title=metric, series=lines)] if lines else [],
        ),
        Section(title="Trials", tables=[cells]),
    ]
    if completed := _completed(trials):
        best = completed[0]
        found = f"Trial {best.number}, with {metric} {best.objective:.4f}. To train like it, type:"
        command = printable(_full_run(best, parameters))
        sections.insert(0, Section(title="Best trial", description=found, command=command))
    kind = "lowest" if is_lower_better(metric) else "highest"
    facts = [f"{counted(len(trials), 'trial')}, the {kind} {metric} first"]
    write_atomically(folder / PAGE_FILE, render_sections(str(folder), facts, sections))


def _link_of(trial: Trial, folder: Path) -> str:
    """Return a trial's number, as a link to its own page in HTML if it has one."""
    page = Path(trial.folder) / RUN_PAGE
    if not page.is_file():
        return str(trial.number)
    return Markup('<a href="{}">{}</a>').format(quote(os.path.relpath(page, folder)), trial.number)


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
    trials = [Trial(**row) for row in read_document(file, TRIALS)]
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
    for reason in explain_best(completed, trials, varied(parameters)):
        show(f"  {printable(redact(reason))}")
    print(printable(f"  {_full_run(best, parameters)}"))


def explain_best(
    completed: Sequence[Trial], trials: Sequence[Trial], parameters: Sequence[Parameter]
) -> Iterator[str]:
    """Yield why the best trial won, and which intervals to widen because it is at their edge.

    `completed` are the trials of `trials` that ran to their end, the best one first.
    """
    best = completed[0]
    num_pruned = sum(trial.stopped_at is not None for trial in trials)
    kind = "lowest" if is_lower_better(best.metric) else "highest"
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
