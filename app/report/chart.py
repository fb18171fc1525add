"""Line charts over steps, as SVG for an HTML page and as PNG for a model card.

Decides scales, ticks and which points are drawn; knows nothing about runs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH, _HEIGHT = 420.0, 220.0
"""size of a chart in SVG units: as wide as a phone screen, so that text stays readable there"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, WIDTH - 12.0, 12.0, _HEIGHT - 30.0
"""edges of the drawing area in SVG units"""
MAX_BUCKETS = 300
"""maximum number of buckets of a line; the lowest and highest value of each are drawn"""
_MAX_STRIPS = 60
"""maximum number of strips of a chart; each shows its values while the pointer is over it"""
_LOG_RATIO = 20.0
"""ratio of the highest to the lowest value from which the value axis is logarithmic"""
COLORS = ("#3358d4", "#c2410c", "#1a7f5a", "#a144af", "#96691d", "#0e7490")
"""colors of the lines, in turn"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    """(step, value)"""
    color_index: int = 0
    """index into `COLORS`"""
    is_sparse: bool = False
    """whether a dot is drawn at each point, as for validations"""

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """Return the finite points, thinned out to the extremes of `MAX_BUCKETS` buckets."""
        finite = [point for point in self.points if math.isfinite(point[1])]
        size = math.ceil(len(finite) / MAX_BUCKETS)
        if size <= 2:
            return finite
        thinned: list[tuple[float, float]] = []
        for start in range(0, len(finite), size):
            bucket = finite[start : start + size]
            extremes = {min(bucket, key=_value), max(bucket, key=_value)}
            thinned += sorted(extremes)
        return thinned


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    series: Sequence[Series]
    unit: str = ""
    """unit of the values, shown after the title"""
    starts_at_zero: bool = False
    is_share: bool = False
    """whether values are shares, which are shown in percent"""

    def text_of(self, value: float) -> str:
        return format_number(value, is_share=self.is_share)

    def strips(self, last: float) -> list[tuple[float, float, str]]:
        """Return (first step, end, text with the values of all lines) of strips up to `last`."""
        number = min(_MAX_STRIPS, int(last) + 1)
        steps = (last + 1) / number
        found: dict[int, dict[str, str]] = {}
        for line in self.series:
            for step, value in line.points:
                if math.isfinite(value):
                    text = f"{line.name}: {self.text_of(value)} at step {step:,g}"
                    found.setdefault(int(step / steps), {})[line.name] = text
        return [
            (index * steps - 0.5, (index + 1) * steps - 0.5, "\n".join(texts.values()))
            for index, texts in found.items()
        ]


def format_number(value: float, *, is_share: bool = False) -> str:
    """Return a number in four digits, a large one with all of them: 12,345; a share in percent."""
    if is_share:
        return f"{100 * value:.4g} %"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """The scales of a drawing area: steps 0 to `last` and values `low` to `high`."""

    last: float
    low: float
    high: float

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high > _LOG_RATIO * self.low

    def to_xy(self, step: float, value: float) -> tuple[float, float]:
        x = _LEFT + step / max(self.last, 1) * (_RIGHT - _LEFT)
        scale = math.log if self.is_log else float
        low, high = scale(self.low), scale(self.high)
        share = (scale(value) - low) / (high - low) if high > low else 0.5
        return x, _BOTTOM - share * (_BOTTOM - _TOP)

    def polyline(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the points of an SVG polyline; a single point is repeated, which draws a dot."""
        placed = [self.to_xy(*point) for point in points]
        placed *= 2 if len(placed) == 1 else 1
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)

    @property
    def value_ticks(self) -> list[tuple[float, float]]:
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            ticks = [10.0**exponent for exponent in range(first, last + 1)]
        else:
            ticks = _round_numbers(self.low, self.high, 4)
        inside = [tick for tick in ticks if self.low <= tick <= self.high] or [self.low, self.high]
        return [(self.to_xy(0, tick)[1], tick) for tick in inside]

    @property
    def step_ticks(self) -> list[tuple[float, str]]:
        ticks = [tick for tick in _round_numbers(0, self.last, 4) if tick == int(tick)]
        labels = ["step 0", *(f"{tick:,.0f}" for tick in ticks[1:])]
        return [
            (self.to_xy(tick, self.low)[0], label)
            for tick, label in zip(ticks, labels, strict=True)
        ]


def _round_numbers(low: float, high: float, number: int) -> list[float]:
    """Return about `number` round numbers from `low` to `high`, 1, 2 or 5 times 10^n apart."""
    if not high > low:
        return [low]
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + index) * step for index in range(count)]


def frame_of(chart: Chart) -> _Frame | None:
    """Return the frame that contains all finite points of a chart, None if it has none."""
    points = [point for line in chart.series for point in line.drawn]
    if not points:
        return None
    low, high = min(map(_value, points)), max(map(_value, points))
    low = min(low, 0.0) if chart.starts_at_zero else low
    return _Frame(last=max(step for step, _ in points), low=low, high=high)


def draw_svg(chart: Chart) -> Markup:
    """Return a chart that has a finite point as escaped SVG; its colors are in the page's CSS."""
    from markupsafe import Markup

    frame = frame_of(chart)
    assert frame is not None
    rule = Markup('<line x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    label = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    line = Markup('<polyline points="{}" class="h{}{}"><title>{}</title></polyline>')
    dot = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" class="h{}"><title>{}</title></circle>')
    strip = Markup(
        '<rect x="{:.1f}" y="{:g}" width="{:.1f}" height="{:g}"><title>{}</title></rect>'
    )
    elements = []
    for y, value in frame.value_ticks:
        elements.append(rule.format(_LEFT, _RIGHT, y, y))
        elements.append(label.format(_LEFT - 5, y + 4, "end", chart.text_of(value)))
    for x, text in frame.step_ticks:
        anchor = "end" if x > _RIGHT - 12 else "middle"
        elements.append(label.format(x, _HEIGHT - 12, anchor, text))
    for start, end, text in chart.strips(frame.last):
        x0, x1 = (frame.to_xy(min(max(step, 0), frame.last), frame.low)[0] for step in (start, end))
        elements.append(strip.format(x0, _TOP, x1 - x0, _BOTTOM - _TOP, text))
    for series in chart.series:
        points, color = series.drawn, series.color_index % len(COLORS)
        if not points:
            continue
        sparse = " sparse" if series.is_sparse else ""
        elements.append(line.format(frame.polyline(points), color, sparse, series.name))
        has_dots = series.is_sparse and len(points) <= MAX_BUCKETS // 4
        if has_dots or len(points) == 1:
            elements += [
                dot.format(
                    *frame.to_xy(*point), color, f"step {point[0]:g}: {chart.text_of(point[1])}"
                )
                for point in points
            ]
    head = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">')
    parts = [head.format(WIDTH, _HEIGHT, f"{chart.title} over steps"), *elements, Markup("</svg>")]
    return Markup("").join(parts)


def draw_png(charts: Sequence[Chart]) -> bytes:
    """Draw charts as a PNG, two in a row, at twice their size.

    Pillow is imported here; TensorBoard depends on it.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale, title_height, legend_height = 2.0, 22.0, 18.0
    columns = min(2, len(charts))
    tallest = max(len(chart.series) for chart in charts)
    cell = title_height + _HEIGHT + legend_height * math.ceil(tallest / 2)
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

        draw.text(at(_LEFT, -title_height + 6), chart.title, "black", font=bold)
        for y, value in frame.value_ticks:
            draw.line([at(_LEFT, y), at(_RIGHT, y)], "#d9d9e0", 1)
            text = chart.text_of(value)
            draw.text(at(_LEFT - 5, y), text, "#60646c", font=font, anchor="rm")
        for x, text in frame.step_ticks:
            anchor = "ra" if x > _RIGHT - 12 else "ma"
            draw.text(at(x, _BOTTOM + 5), text, "#60646c", font=font, anchor=anchor)
        for index, series in enumerate(chart.series):
            points = [at(*frame.to_xy(*point)) for point in series.drawn]
            color = COLORS[series.color_index % len(COLORS)]
            width = 5 if series.is_sparse else 2
            if len(points) > 1:
                draw.line(points, color, width, joint="curve")
            for x, y in points if series.is_sparse or len(points) == 1 else ():
                draw.ellipse([x - 5, y - 5, x + 5, y + 5], color)
            left = _LEFT + index % 2 * (WIDTH - _LEFT) / 2
            top = _HEIGHT + index // 2 * legend_height
            draw.line([at(left, top + 6), at(left + 14, top + 6)], color, width + 2)
            draw.text(at(left + 19, top), series.name, "#1c2024", font=font)
    content = io.BytesIO()
    image.save(content, "png")
    return content.getvalue()


def _value(point: tuple[float, float]) -> float:
    return point[1]
