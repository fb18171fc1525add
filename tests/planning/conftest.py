"""Bases whose sizes only their modules tell are built once for all plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from app.planning import planned_model
from app.planning.planned_model import PlannedModel


@pytest.fixture(autouse=True, scope="session")
def _models_are_built_once() -> Iterator[None]:
    build, kept = planned_model.model_from_meta, dict[str, PlannedModel]()

    def build_once(*args: Any) -> PlannedModel:
        key = repr(args)
        if key not in kept:
            kept[key] = build(*args)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_model, "model_from_meta", build_once)
        yield
