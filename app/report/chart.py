"""Line charts over steps: an SVG for a page that needs no script, and a PNG for a model card.

Decides where a point stands and which numbers stand at the axes; knows nothing of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH, HEIGHT = 420.0, 220.0
"""of a chart, in its own units; as wide as a telephone, so that its text stays readable there"""
LEFT, RIGHT, TOP, BOTTOM = 56.0, 12.0, 12.0, 30.0
MAX_BUCKETS = 300
"""of a line: of each the lowest and the highest value are drawn"""
LOG_FROM = 20.0
"""times that the highest value is the lowest, from which on an axis is logarithmic"""
HUES = ("#3358d4", "#c2410c", "#1a7f5a", "#a144af", "#96691d", "#0e7490")
"""of the lines in turn; the page's style has the same"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line: its points by step."""

    name: str
    points: Sequence[tuple[float, float]]
    hue: int = 0
    """index into `HUES`"""
    is_measured_rarely: bool = False
    """drawn with a dot a point, as validations are"""

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """Return the finite points, thinned out to the extremes of `MAX_BUCKETS` buckets."""
        finite = [point for point in self.points if math.isfinite(point[1])]
        size = math.ceil(len(finite) / MAX_BUCKETS)
        if size <= 2:
            return finite
        kept: list[tuple[float, float]] = []
        for start in range(0, len(finite), size):
            bucket = finite[start : start + size]
            ends = {min(bucket, key=_value), max(bucket, key=_value)}
            kept += sorted(ends)
        return kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines that share their axes."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    """of the values, as it stands behind the title"""
    starts_at_zero: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A drawing area, the steps and the values that it shows."""

    left: float
    right: float
    top: float
    bottom: float
    last: float
    low: float
    high: float
    is_log: bool

    def place(self, step: float, value: float) -> tuple[float, float]:
        """Return where a point stands."""
        x = self.left + step / max(self.last, 1) * (self.right - self.left)
        bend = math.log if self.is_log else float
        low, high = bend(self.low), bend(self.high)
        share = (bend(value) - low) / (high - low) if high > low else 0.5
        return x, self.bottom - share * (self.bottom - self.top)

    def line(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the points of an SVG polyline; a single one is a line to itself: a dot."""
        placed = [self.place(*point) for point in points]
        placed *= 2 if len(placed) == 1 else 1
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)

    @property
    def value_marks(self) -> list[tuple[float, str]]:
        """Return the heights of the marks at the axis of values, and what stands there."""
        if self.is_log and self.high > LOG_FROM * self.low:
            exponents = range(
                math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
            )
            marks = [10.0**exponent for exponent in exponents]
        else:
            marks = round_numbers(self.low, self.high, 4)
        inside = [mark for mark in marks if self.low <= mark <= self.high] or [self.low, self.high]
        return [(self.place(0, mark)[1], f"{mark:.4g}") for mark in inside]

    @property
    def step_marks(self) -> list[tuple[float, str]]:
        """Return the places of the marks at the axis of steps, and what stands there."""
        marks = [mark for mark in round_numbers(0, self.last, 4) if mark == int(mark)]
        names = ["step 0", *(f"{mark:,.0f}" for mark in marks[1:])]
        return [
            (self.place(mark, self.low)[0], name) for mark, name in zip(marks, names, strict=True)
        ]


def frame_around(
    lines: Iterable[Iterable[tuple[float, float]]],
    area: tuple[float, float, float, float],
    *,
    is_log: bool | None = None,
    starts_at_zero: bool = False,
) -> Frame | None:
    """Return the frame in `area` (left, right, top, bottom) that holds all finite points.

    None where there is none. `is_log`: None = where the values span a factor of `LOG_FROM`.
    """
    points = [point for line in lines for point in line if math.isfinite(point[1])]
    if not points:
        return None
    low, high = min(map(_value, points)), max(map(_value, points))
    low = min(low, 0.0) if starts_at_zero else low
    if is_log is None:
        is_log = low > 0 and high > LOG_FROM * low
    left, right, top, bottom = area
    last = max(step for step, _ in points)
    return Frame(
        left=left, right=right, top=top, bottom=bottom, last=last, low=low, high=high,
        is_log=is_log and low > 0,
    )  # fmt: skip


def round_numbers(low: float, high: float, number: int) -> list[float]:
    """Return about `number` round numbers from `low` to `high`: multiples of 1, 2 or 5 tens."""
    if not high > low:
        return [low]
    rough = (high - low) / number
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + index) * step for index in range(count)]


def frame_of(chart: Chart) -> Frame | None:
    """Return the frame of a chart; None where it has no finite point."""
    area = (LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM)
    lines = [line.drawn for line in chart.series]
    return frame_around(lines, area, starts_at_zero=chart.starts_at_zero)


def draw_svg(chart: Chart) -> Markup:
    """Return a chart as SVG, all text of it escaped; its colours are the page's."""
    from markupsafe import Markup

    frame = frame_of(chart)
    assert frame is not None
    marks, texts = (
        Markup('<line x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'),
        Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'),
    )
    drawn = []
    for y, text in frame.value_marks:
        drawn.append(marks.format(frame.left, frame.right, y, y))
        drawn.append(texts.format(frame.left - 5, y + 4, "end", text))
    for x, text in frame.step_marks:
        anchor = "end" if x > frame.right - 12 else "middle"
        drawn.append(texts.format(x, HEIGHT - 12, anchor, text))
    line = Markup('<polyline points="{}" class="h{}{}"><title>{}</title></polyline>')
    dot = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" class="h{}"/>')
    for one in chart.series:
        points, hue = one.drawn, one.hue % len(HUES)
        if not points:
            continue
        rare = " rare" if one.is_measured_rarely else ""
        drawn.append(line.format(frame.line(points), hue, rare, one.name))
        is_dotted = one.is_measured_rarely and len(points) <= MAX_BUCKETS // 4
        if is_dotted or len(points) == 1:
            drawn += [dot.format(*frame.place(*point), hue) for point in points]
    head = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">')
    parts = [head.format(WIDTH, HEIGHT, f"{chart.title} over steps"), *drawn, Markup("</svg>")]
    return Markup("").join(parts)


def write_png(charts: Sequence[Chart], file: Path) -> None:
    """Draw charts side by side, two in a row, into a PNG of twice their size.

    Pillow is imported here: it comes with TensorBoard.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale, title_height, legend_height = 2.0, 22.0, 18.0
    columns = min(2, len(charts))
    tallest = max(len(chart.series) for chart in charts)
    cell = title_height + HEIGHT + legend_height * math.ceil(tallest / 2)
    rows = math.ceil(len(charts) / columns)
    size = (int(columns * WIDTH * scale), int(rows * cell * scale))
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    font, bold = ImageFont.load_default(11 * scale), ImageFont.load_default(13 * scale)
    for number, chart in enumerate(charts):
        frame = frame_of(chart)
        if frame is None:
            continue
        x0 = number % columns * WIDTH
        y0 = number // columns * cell + title_height

        def at(x: float, y: float, x0: float = x0, y0: float = y0) -> tuple[float, float]:
            return (x0 + x) * scale, (y0 + y) * scale

        draw.text(at(LEFT, -title_height + 6), chart.title, "black", font=bold)
        for y, text in frame.value_marks:
            draw.line([at(frame.left, y), at(frame.right, y)], "#d9d9e0", 1)
            draw.text(at(frame.left - 5, y), text, "#60646c", font=font, anchor="rm")
        for x, text in frame.step_marks:
            anchor = "ra" if x > frame.right - 12 else "ma"
            draw.text(at(x, frame.bottom + 5), text, "#60646c", font=font, anchor=anchor)
        for index, one in enumerate(chart.series):
            points = [at(*frame.place(*point)) for point in one.drawn]
            hue = HUES[one.hue % len(HUES)]
            width = 5 if one.is_measured_rarely else 2
            if len(points) > 1:
                draw.line(points, hue, width, joint="curve")
            for x, y in points if one.is_measured_rarely or len(points) == 1 else ():
                draw.ellipse([x - 5, y - 5, x + 5, y + 5], hue)
            left = LEFT + index % 2 * (WIDTH - LEFT) / 2
            top = HEIGHT + index // 2 * legend_height
            draw.line([at(left, top + 6), at(left + 14, top + 6)], hue, width + 2)
            draw.text(at(left + 19, top), one.name, "#1c2024", font=font)
    image.save(file)


def _value(point: tuple[float, float]) -> float:
    return point[1]
