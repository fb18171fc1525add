"""The page of a judge: a radar of the categories, a table, and what was said of each answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SIZE, RADIUS = 420.0, 150.0
"""of the radar, in its own units"""
RINGS = (2.5, 5.0, 7.5, 10.0)
HIGHEST = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerView:
    """A model's answer to one turn, its grade and the judge's words."""

    variant: str
    text: str
    score: float | None
    judge: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnView:
    """One turn of a question, its reference, and what each model answered."""

    question: str
    reference: str
    answers: Sequence[AnswerView]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionView:
    """A question with all its turns."""

    name: str
    turns: Sequence[TurnView]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoke:
    """A category's axis of the radar: its end, and where its name stands."""

    name: str
    x: float
    y: float
    text_x: float
    text_y: float
    anchor: str


def render_judge_page(
    title: str,
    facts: Sequence[str],
    table: Sequence[Sequence[str]],
    scores: Mapping[str, Mapping[str, float]],
    questions: Sequence[QuestionView],
) -> str:
    """Return one HTML file that needs no script, font or network.

    `table` has its headings first; `scores`: model -> category -> mean grade from 0 to 10.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    names = list(dict.fromkeys(name for of_model in scores.values() for name in of_model))
    return environment.get_template("judge.html.jinja").render(
        title=title,
        facts=facts,
        table=table,
        spokes=spokes(names),
        rings=[(ring, outline([ring] * len(names))) for ring in RINGS],
        shapes={
            variant: outline([of_model.get(name, 0.0) for name in names])
            for variant, of_model in scores.items()
        },
        questions=questions,
        size=SIZE,
    )


def spokes(names: Sequence[str]) -> list[Spoke]:
    """Place the categories around the centre, the first one at the top."""
    placed = []
    for number, name in enumerate(names):
        x, y = _place(number, len(names), HIGHEST)
        text_x, text_y = _place(number, len(names), HIGHEST * 1.1)
        side = round(text_x - SIZE / 2)
        anchor = "middle" if side == 0 else "start" if side > 0 else "end"
        placed.append(Spoke(name=name, x=x, y=y, text_x=text_x, text_y=text_y, anchor=anchor))
    return placed


def outline(grades: Sequence[float]) -> str:
    """Return the points of a model's shape in the radar, one grade a category."""
    points = (_place(number, len(grades), grade) for number, grade in enumerate(grades))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _place(number: int, count: int, grade: float) -> tuple[float, float]:
    angle, distance = 2 * math.pi * number / count, RADIUS * grade / HIGHEST
    return SIZE / 2 + distance * math.sin(angle), SIZE / 2 - distance * math.cos(angle)
