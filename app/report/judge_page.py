"""The page of a judge: a radar chart of the categories, all grades, answers and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from app.report.template import render_template

SIZE, RADIUS = 420.0, 150.0
"""width and height of the radar chart, and the radius of its largest ring, in SVG units"""
_RINGS = (2.5, 5.0, 7.5, 10.0)
"""grades at which rings are drawn"""
_HIGHEST = 10.0
"""grade at the largest ring"""


def render_judge_page(
    title: str,
    facts: Sequence[str],
    table: Sequence[Sequence[str]],
    scores: Mapping[str, Mapping[str, float]],
    questions: Sequence[Mapping[str, Any]],
) -> str:
    """Return the page as HTML.

    `table`: heading row and rows; `scores`: variant -> category -> mean grade from 0 to 10, none
    for no chart; `questions`: each with its name and turns: question, reference, and of each
    model's answer variant, text, grade (in words, empty if it has none) and the judge's reply.
    """
    names = list(dict.fromkeys(name for by_category in scores.values() for name in by_category))
    return render_template(
        "judge",
        title=title,
        facts=facts,
        cells=table,
        spokes=spokes(names),
        rings=[outline([ring] * len(names)) for ring in _RINGS],
        shapes={
            variant: outline([by_category.get(name, 0.0) for name in names])
            for variant, by_category in scores.items()
        },
        questions=questions,
        size=SIZE,
    )


def spokes(names: Sequence[str]) -> list[tuple[str, float, float, float, float, str]]:
    """Place the axes of the categories around the center, the first one at the top.

    Returns name, end (x, y), and position (x, y) and text-anchor of the label.
    """
    placed = []
    for number, name in enumerate(names):
        text_x, text_y = _place(number, len(names), _HIGHEST * 1.1)
        side = round(text_x - SIZE / 2)
        anchor = "middle" if side == 0 else "start" if side > 0 else "end"
        placed.append((name, *_place(number, len(names), _HIGHEST), text_x, text_y, anchor))
    return placed


def outline(grades: Sequence[float]) -> str:
    """Return the points of a model's polygon in the radar chart, from one grade per category."""
    points = (_place(number, len(grades), grade) for number, grade in enumerate(grades))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _place(number: int, count: int, grade: float) -> tuple[float, float]:
    angle, distance = 2 * math.pi * number / count, RADIUS * grade / _HIGHEST
    return SIZE / 2 + distance * math.sin(angle), SIZE / 2 - distance * math.cos(angle)
