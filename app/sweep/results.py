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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from app.process.logs import show, text_table
from app.report.chart import frame_around
from app.report.template import render_template
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
WIDTH, HEIGHT, MARGIN = 900.0, 340.0, 70.0
"""size of a chart and its margin, in SVG units"""
ABOVE, BELOW, BESIDE = -8.0, 24.0, 6.0
"""offsets of a label from the top or the bottom of a chart, where no line is, or from an axis"""
_MAX_LABEL = 16
"""maximum characters of a word at an axis; longer ones are shortened"""


def describe_outcome(trial: Trial) -> str:
    """Return the result of a trial in words."""
    if trial.error is not None:
        return f"{trial.error[:200]} (exit {trial.exit_code}; {trial.number}.log)"
    value = "not measured" if trial.objective is None else f"{trial.objective:.4f}"
    pruned = "" if trial.stopped_at is None else f", pruned at step {trial.stopped_at}"
    return f"{trial.metric} {value}{pruned}"


def write_page(trials: Sequence[Trial], folder: Path, parameters: Sequence[Parameter]) -> None:
    """Write sweep.html, the page that compares all trials by the settings that vary."""
    keys = [parameter.key for parameter in varied(parameters)]
    views = []
    for trial in _sort_best_first(trials):
        values, own_page = _values_of(trial), Path(trial.folder) / "report.html"
        views.append(
            TrialView(
                number=trial.number,
                values={key: printable(values[key]) for key in keys},
                curve=read_curve(Path(trial.folder), trial.metric),
                objective=trial.objective,
                outcome=printable(redact(describe_outcome(trial))),
                page=quote(os.path.relpath(own_page, folder)) if own_page.is_file() else "",
            )
        )
    best = next(iter(_completed(trials)), None)
    full_run = "" if best is None else printable(_full_run(best, parameters))
    page = render_sweep_page(printable(str(folder)), views, _metric_of(trials), full_run)
    write_atomically(folder / PAGE_FILE, page)


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
    """Return the command that trains like a trial, without what a sweep's file sets for trials."""
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
    """Return a number with four significant digits, any other text unchanged."""
    try:
        return value if value.lstrip("-").isdigit() else f"{float(value):.4g}"
    except ValueError:
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialView:
    """A trial as the page shows it."""

    number: int
    values: Mapping[str, str]
    """value of each varied setting"""
    curve: Mapping[int, float]
    """step -> metric by which trials are ranked"""
    objective: float | None
    outcome: str
    """how the trial ended, in words"""
    page: str = ""
    """relative address of the trial's own page; empty if it has none"""


def render_sweep_page(
    title: str, trials: Sequence[TrialView], objective: str, full_run: str = ""
) -> str:
    """Return the page as HTML; `trials` are sorted, best first.

    `full_run`: the command that trains with the settings of the best trial.
    """
    axes, coordinates = parallel_coordinates(trials, objective)
    ends, curves = _curve_lines(trials)
    return render_template(
        "sweep",
        title=title,
        objective=objective,
        better="lower" if is_lower_better(objective) else "higher",
        full_run=full_run,
        trials=trials,
        keys=list(trials[0].values) if trials else [],
        axes=axes,
        coordinates=coordinates,
        ends=ends,
        curves=curves,
        width=WIDTH,
        height=HEIGHT,
        margin=MARGIN,
    )


def parallel_coordinates(
    trials: Sequence[TrialView], objective: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return an axis for each varied setting and the objective, and a line for each trial.

    An axis has its x, its name with an SVG text-anchor that keeps it on the page, and its ticks as
    (x, y, label).
    """
    shown = [
        trial for trial in trials if trial.objective is not None and math.isfinite(trial.objective)
    ]
    if not shown:
        return [], []
    columns = {key: [trial.values[key] for trial in shown] for key in shown[0].values}
    columns[objective] = [f"{trial.objective:.4f}" for trial in shown]
    axes, heights = [], []
    for index, (name, values) in enumerate(columns.items()):
        of_trials, ticks = _scale(values)
        x = MARGIN + index * (WIDTH - 2 * MARGIN) / max(len(columns) - 1, 1)
        anchor = "start" if index == 0 else "end" if name == objective else "middle"
        placed = [(*_label_place(x, y), text) for y, text in ticks]
        axes.append({"x": x, "name": name, "anchor": anchor, "ticks": placed})
        heights.append(of_trials)
    lines = []
    for index, trial in enumerate(shown):
        points = " ".join(
            f"{axis['x']:.1f},{of_trials[index]:.1f}"
            for axis, of_trials in zip(axes, heights, strict=True)
        )
        lines.append(_line(trial, points, index, len(shown)))
    return axes, lines[::-1]  # the best is drawn last, on top of the others


def _label_place(x: float, y: float) -> tuple[float, float]:
    """Return where the label of a tick stands: outside of the lines, or beside its axis."""
    if y <= MARGIN:
        return x, MARGIN + ABOVE
    return (x, y + BELOW) if y >= HEIGHT - MARGIN else (x + BESIDE, y + BESIDE)


def _curve_lines(
    trials: Sequence[TrialView],
) -> tuple[list[tuple[float, float, str]], list[dict[str, Any]]]:
    """Return the labels (x, y, text) of the axes, and the metric of each trial by step."""
    drawn = [
        [point for point in sorted(trial.curve.items()) if math.isfinite(point[1])]
        for trial in trials
    ]
    area = (MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN)
    # Logarithmic, so that a diverged trial leaves room for the others.
    frame = frame_around(drawn, area, is_log=True)
    if frame is None:
        return [], []
    lines = [
        _line(trial, frame.polyline(points), index, len(trials))
        for index, (trial, points) in enumerate(zip(trials, drawn, strict=True))
        if points
    ]
    bottom = HEIGHT - MARGIN + BELOW
    ends = [
        (0.0, MARGIN + ABOVE, f"{frame.high:.3f}"),
        (0.0, bottom, f"{frame.low:.3f}"),
        (WIDTH - 2 * MARGIN, bottom, f"step {frame.last:,g}"),
    ]
    return ends, lines[::-1]


def _line(trial: TrialView, points: str, index: int, total: int) -> dict[str, Any]:
    """Return a trial's line; its goodness is 1 for the best of `total` trials, 0 for the worst."""
    settings = " ".join(f"{key}={value}" for key, value in trial.values.items())
    return {
        "points": points,
        "title": f"trial {trial.number}: {settings}: {trial.outcome}",
        "goodness": 1 - index / max(total - 1, 1),
        "is_dot": len(set(points.split())) == 1,
    }


def _scale(values: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the y of each value on an axis, and the axis's ticks.

    Numbers are placed by size, logarithmically if the largest is at least 100 times the smallest;
    words are placed in alphabetical order.
    """
    try:
        numbers = [float(value) for value in values]
        ticks = {end: f"{end:g}" for end in (min(numbers), max(numbers))}
    except ValueError:
        words = sorted(set(values))
        numbers = [float(words.index(value)) for value in values]
        short = (w if len(w) <= _MAX_LABEL else f"{w[: _MAX_LABEL - 1]}…" for w in words)
        ticks = dict(enumerate(short))
    low, high = min(numbers), max(numbers)
    scale = math.log10 if 0 < low * 100 <= high else float

    def to_y(value: float) -> float:
        span = scale(high) - scale(low)
        share = (scale(value) - scale(low)) / span if span else 0.5
        return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)

    return list(map(to_y, numbers)), [(to_y(place), text) for place, text in ticks.items()]
