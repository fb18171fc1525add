"""The page of a sweep: its trials as parallel coordinates, as loss curves, and in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.report.chart import frame_around
from app.report.template import render_template
from app.training.run_documents import is_lower_better

WIDTH, HEIGHT, MARGIN = 900.0, 340.0, 70.0
"""size of a chart and its margin, in SVG units"""
ABOVE, BELOW, BESIDE = -8.0, 24.0, 6.0
"""offsets of a label from the top or the bottom of a chart, where no line is, or from an axis"""
_MAX_LABEL = 16
"""maximum characters of a word at an axis; longer ones are shortened"""


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
