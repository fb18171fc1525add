"""The page of a sweep: its trials as parallel coordinates, as loss curves, and in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.report.chart import frame_around
from app.report.template import render_template

WIDTH, HEIGHT, MARGIN = 900.0, 340.0, 70.0
"""size of a chart and its margin, in SVG units"""
ABOVE, BELOW, BESIDE = -8.0, 24.0, 6.0
"""offsets of a label from the top or the bottom of a chart, where no line is, or from an axis"""
MAX_LABEL = 16
"""maximum characters of a word at an axis; longer ones are shortened"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialView:
    """A trial as the page shows it."""

    number: int
    values: Mapping[str, str]
    """value of each varied setting"""
    curve: Mapping[int, float]
    """step -> validation loss"""
    objective: float | None
    outcome: str
    """how the trial ended, in words"""
    page: str = ""
    """relative address of the trial's own page; empty if it has none"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One vertical axis of the parallel coordinates."""

    x: float
    name: str
    anchor: str
    """SVG text-anchor of the name: start or end for the outer axes, so that it stays on the page"""
    ticks: Sequence[tuple[float, float, str]]
    """(x, y, label)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One trial's line in a chart."""

    points: str
    """points of the SVG polyline"""
    title: str
    goodness: float
    """1 for the best trial, 0 for the worst"""

    @property
    def is_dot(self) -> bool:
        """Whether all points are the same."""
        return len(set(self.points.split())) == 1


def render_sweep_page(
    title: str, trials: Sequence[TrialView], objective: str, full_run: str = ""
) -> str:
    """Return the page as HTML; `trials` are sorted, best first.

    `full_run`: the command that trains with the settings of the best trial.
    """
    axes, coordinates = parallel_coordinates(trials, objective)
    ends, curves = curve_lines(trials)
    return render_template(
        "sweep",
        title=title,
        objective=objective,
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
) -> tuple[list[Axis], list[Line]]:
    """Return an axis for each varied setting and the objective, and a line for each trial."""
    shown = [trial for trial in trials if _is_number(trial.objective)]
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
        axes.append(Axis(x=x, name=name, anchor=anchor, ticks=placed))
        heights.append(of_trials)
    lines = []
    for index, trial in enumerate(shown):
        points = " ".join(
            f"{axis.x:.1f},{of_trials[index]:.1f}"
            for axis, of_trials in zip(axes, heights, strict=True)
        )
        lines.append(_line(trial, points, index, len(shown)))
    return axes, lines[::-1]  # the best is drawn last, on top of the others


def _label_place(x: float, y: float) -> tuple[float, float]:
    """Return where the label of a tick stands: outside of the lines, or beside its axis."""
    if y <= MARGIN:
        return x, MARGIN + ABOVE
    return (x, y + BELOW) if y >= HEIGHT - MARGIN else (x + BESIDE, y + BESIDE)


def curve_lines(trials: Sequence[TrialView]) -> tuple[list[tuple[float, float, str]], list[Line]]:
    """Return the labels (x, y, text) of the axes, and the validation loss of each trial by step."""
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


def _line(trial: TrialView, points: str, index: int, total: int) -> Line:
    settings = " ".join(f"{key}={value}" for key, value in trial.values.items())
    return Line(
        points=points,
        title=f"trial {trial.number}: {settings}: {trial.outcome}",
        goodness=1 - index / max(total - 1, 1),
    )


def _scale(values: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the y of each value on an axis, and the axis's ticks.

    Numbers are placed by size, logarithmically if the largest is at least 100 times the smallest;
    words are placed in alphabetical order.
    """
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        words = sorted(set(values))
        numbers = [float(words.index(value)) for value in values]
        ticks = [(_to_y(i, 0, len(words) - 1), _shorten(word)) for i, word in enumerate(words)]
        return [_to_y(number, 0, len(words) - 1) for number in numbers], ticks
    low, high = min(numbers), max(numbers)
    is_log = 0 < low * 100 <= high
    scale = math.log10 if is_log else float
    heights = [_to_y(scale(number), scale(low), scale(high)) for number in numbers]
    ticks = [(_to_y(scale(end), scale(low), scale(high)), f"{end:g}") for end in {low, high}]
    return heights, ticks


def _to_y(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)


def _shorten(word: str) -> str:
    return word if len(word) <= MAX_LABEL else f"{word[: MAX_LABEL - 1]}…"


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
