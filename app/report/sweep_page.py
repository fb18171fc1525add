"""The page of a sweep: parallel coordinates of its trials, their curves, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.report.chart import frame_around

WIDTH, HEIGHT, MARGIN = 900.0, 320.0, 52.0
"""of a chart's drawing area, in its own units"""
MAX_MARK = 16
"""characters of a word at an axis; the table has it whole"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialView:
    """What a page shows of a trial."""

    number: int
    values: Mapping[str, str]
    """of every varied key"""
    curve: Mapping[int, float]
    """validation losses by step"""
    objective: float | None
    outcome: str
    """how it ended, in words"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One upright axis: its place, its name, and what stands at its marks."""

    x: float
    name: str
    anchor: str
    """side of the name that is at the axis, so that the outer names stay on the page"""
    marks: Sequence[tuple[float, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One trial's line in a chart; `goodness` 1 is the best trial, 0 the worst."""

    points: str
    title: str
    goodness: float

    @property
    def is_dot(self) -> bool:
        """Whether all its points are one."""
        return len(set(self.points.split())) == 1


def render_sweep_page(title: str, trials: Sequence[TrialView], objective: str) -> str:
    """Return one HTML file that needs no script, font or network; `trials` best first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    axes, coordinates = parallel_coordinates(trials, objective)
    ends, curves = curve_lines(trials)
    return environment.get_template("sweep.html.jinja").render(
        title=title,
        objective=objective,
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
    """Place every varied key and the objective on an axis, and each trial's line across them."""
    shown = [trial for trial in trials if _is_number(trial.objective)]
    if not shown:
        return [], []
    columns = {key: [trial.values[key] for trial in shown] for key in shown[0].values}
    columns[objective] = [f"{trial.objective:.4f}" for trial in shown]
    axes, heights = [], []
    for index, (name, values) in enumerate(columns.items()):
        place, marks = _scale(values)
        x = MARGIN + index * (WIDTH - 2 * MARGIN) / max(len(columns) - 1, 1)
        anchor = "start" if index == 0 else "end" if name == objective else "middle"
        axes.append(Axis(x=x, name=name, anchor=anchor, marks=marks))
        heights.append(place)
    lines = []
    for index, trial in enumerate(shown):
        points = " ".join(
            f"{axis.x:.1f},{place[index]:.1f}" for axis, place in zip(axes, heights, strict=True)
        )
        lines.append(_line(trial, points, index, len(shown)))
    return axes, lines[::-1]  # the best is drawn last, over the others


def curve_lines(trials: Sequence[TrialView]) -> tuple[list[tuple[float, float, str]], list[Line]]:
    """Return the marks of the two axes, and each trial's validation losses over its steps."""
    drawn = [
        [point for point in sorted(trial.curve.items()) if math.isfinite(point[1])]
        for trial in trials
    ]
    area = (MARGIN, WIDTH - MARGIN, MARGIN, HEIGHT - MARGIN)
    frame = frame_around(drawn, area, is_log=True)  # one that diverged leaves the others room
    if frame is None:
        return [], []
    lines = [
        _line(trial, frame.line(points), index, len(trials))
        for index, (trial, points) in enumerate(zip(trials, drawn, strict=True))
        if points
    ]
    low, high, last = frame.low, frame.high, frame.last
    ends = [
        (0.0, frame.place(0, high)[1], f"{high:.3f}"),
        (0.0, frame.place(0, low)[1], f"{low:.3f}"),
        (frame.place(last, low)[0] - MARGIN, HEIGHT - MARGIN / 4, f"step {last}"),
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
    """Return the height of each value on an axis, and the axis's marks.

    Numbers by size (by their logarithm from a hundredfold on), words in the order of the alphabet.
    """
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        words = sorted(set(values))
        numbers = [float(words.index(value)) for value in values]
        marks = [(_between(i, 0, len(words) - 1), _short(word)) for i, word in enumerate(words)]
        return [_between(number, 0, len(words) - 1) for number in numbers], marks
    low, high = min(numbers), max(numbers)
    is_log = 0 < low * 100 <= high
    bend = math.log10 if is_log else float
    heights = [_between(bend(number), bend(low), bend(high)) for number in numbers]
    marks = [(_between(bend(end), bend(low), bend(high)), f"{end:g}") for end in {low, high}]
    return heights, marks


def _between(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN)


def _short(word: str) -> str:
    return word if len(word) <= MAX_MARK else f"{word[: MAX_MARK - 1]}…"


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
