"""What a sweep leaves: a table on the screen, sweep.json, sweep.csv and a page."""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.process.errors import DONE, UserError
from app.process.files import write_whole
from app.report.sweep_page import TrialView, render_sweep_page
from app.sweep.trials import OBJECTIVE, Trial, read_curve
from app.sweep.words import Swept, as_words, varied
from data_modules import printable, redact, redacted

RESULTS_FILE, TABLE_FILE, PAGE_FILE = "sweep.json", "sweep.csv", "sweep.html"


def outcome_of(trial: Trial) -> str:
    """Return how a trial ended, in words."""
    if trial.error is not None:
        return f"{trial.error[:200]} (exit {trial.exit_code}; {trial.number}.log)"
    loss = "no validation loss" if trial.objective is None else f"{trial.objective:.4f}"
    stopped = "" if trial.stopped_at is None else f", stopped at step {trial.stopped_at}"
    return f"{OBJECTIVE} {loss}{stopped}"


def write_page(trials: Sequence[Trial], folder: Path, keys: Sequence[str]) -> None:
    """Write sweep.html: all trials by their settings, and their curves."""
    views = []
    for trial in sorted(trials, key=lambda one: one.rank):
        values = dict(word.split("=", 1) for word in trial.overrides)
        views.append(
            TrialView(
                number=trial.number,
                values={key: printable(values[key]) for key in keys},
                curve=read_curve(Path(trial.folder)),
                objective=trial.objective,
                outcome=printable(redact(outcome_of(trial))),
            )
        )
    page = render_sweep_page(printable(str(folder)), views, OBJECTIVE)
    write_whole(folder / PAGE_FILE, page)


def save_results(trials: Sequence[Trial], folder: Path) -> None:
    """Write sweep.json and sweep.csv, best trials first."""
    best_first = [dataclasses.asdict(one) for one in sorted(trials, key=lambda one: one.rank)]
    rows: list[dict[str, Any]] = redacted(best_first)
    write_whole(folder / RESULTS_FILE, json.dumps(rows, indent=2) + "\n")
    with (folder / TABLE_FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Trial)])
        writer.writeheader()
        writer.writerows(row | {"overrides": " ".join(row["overrides"])} for row in rows)


def read_results(folder: Path) -> list[Trial]:
    """Return the trials of a sweep that have ended, in their order; UserError if unreadable."""
    file = folder / RESULTS_FILE
    if not file.exists():
        return []
    try:
        trials = [Trial(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: {error}; copy the sweep's folder again") from error
    return sorted(trials, key=lambda one: one.number)


def show_results(trials: Sequence[Trial], swept: Sequence[Swept], typed: Mapping[str, str]) -> None:
    """Print the trials, best first, why the best is it, and the command that trains it in full.

    What a `sweep=NAME` file sets for all trials, as their length, is left out of that.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    best_first, keys = sorted(trials, key=lambda one: one.rank), [one.key for one in varied(swept)]
    table = Table(title=f"{len(trials)} trials by {OBJECTIVE}", title_justify="left")
    shown_error = ["error"] if any(trial.error for trial in trials) else []
    for column in ("trial", *keys, OBJECTIVE, "seconds", "exit", *shown_error):
        table.add_column(column, justify="right" if column in (OBJECTIVE, "seconds") else "left")
    for trial in best_first:
        values = dict(word.split("=", 1) for word in trial.overrides)
        objective = "-" if trial.objective is None else f"{trial.objective:.4f}"
        stopped = trial.stopped_at is not None
        table.add_row(
            str(trial.number),
            *(escape(_short(values[key])) for key in keys),
            objective,
            f"{trial.seconds:.0f}",
            f"stopped at {trial.stopped_at}" if stopped else str(trial.exit_code),
            *[escape((trial.error or "")[:100])] * len(shown_error),
        )
    Console().print(table)
    done = [one for one in best_first if one.exit_code == DONE and one.stopped_at is None]
    whole = [one for one in done if one.objective is not None]
    if whole:
        shared = redacted(as_words(dict(typed)))
        best = " ".join(word for word in whole[0].overrides if word not in shared)
        print(printable(f"best: {best} -> {whole[0].folder}"))
        for reason in reasons_for(whole, trials, varied(swept)):
            print(f"  {printable(redact(reason))}")
        of_file = {one.key for one in swept if one.is_of_file and not one.varies}
        full = [word for word in whole[0].overrides if word.partition("=")[0] not in of_file]
        print(printable(f"  python -m app.train {shlex.join(full)}"))


def reasons_for(
    whole: Sequence[Trial], trials: Sequence[Trial], swept: Sequence[Swept]
) -> Iterator[str]:
    """Say why the best trial is it, and where a better one may lie beyond what was searched.

    `whole` are those of `trials` that ran to their end, the best first.
    """
    stopped = [one for one in trials if one.stopped_at is not None]
    reason = f"lowest {OBJECTIVE} ({whole[0].objective:.4f}) of {len(whole)} that ran to their end"
    if stopped:
        reason += f"; {len(stopped)} were stopped, since others were better at the same step"
    own, keys = set(whole[0].overrides), {one.key for one in swept}
    for other in whole[1:2]:
        words = [w for w in other.overrides if w.partition("=")[0] in keys and w not in own]
        reason += f"; next {other.objective:.4f} with {' '.join(words)}"
    yield reason
    values = dict(word.split("=", 1) for word in whole[0].overrides)
    for one in swept:
        if one.interval is not None and one.interval.is_edge(float(values[one.key])):
            yield (
                f"{one.key}={values[one.key]} is at the edge of {one.interval}: search a wider "
                "interval"
            )


def _short(value: str) -> str:
    """Return a number with four digits, anything else as it is."""
    try:
        return value if value.lstrip("-").isdigit() else f"{float(value):.4g}"
    except ValueError:
        return value
