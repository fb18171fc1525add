"""Held-out problems for the base model in the style of its corpus, before any tuning.

A skill that the base does not have, tuning does not give it: the build of the base is gated on the
share of probes in which every token of the answer is the most likely one, given those before it.
"""

from __future__ import annotations

from random import Random
from typing import TypedDict

from tools.tiny_base import corpus
from tools.tiny_base.corpus import FIELDS, OPERATIONS, draw_list, draw_person

GATE = {"list": 0.90, "extract": 0.95}


class Probe(TypedDict):
    """A text and its only right continuation; the answer may start with a space."""

    prompt: str
    answer: str


def probe_rows(skill: str, num_rows: int = 200, seed: int = 7) -> list[Probe]:
    """Return held-out problems of `skill`, one question each."""
    rng = Random(f"{skill} {seed}")
    rows = []
    for _ in range(num_rows):
        *before, last = _word_problem(rng, skill)
        rows.append(Probe(prompt="".join(part["text"] for part in before), answer=last["text"]))
    return rows


def _word_problem(rng: Random, skill: str) -> list[corpus.Segment]:
    if skill == "list":
        return corpus.word_list(rng, draw_list(rng, True), [rng.choice(tuple(OPERATIONS))])
    return corpus.word_person(rng, draw_person(rng, True), [rng.choice(FIELDS)])
