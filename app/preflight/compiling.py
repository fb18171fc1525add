"""Which bases cannot be compiled, said before any weight is read."""

from __future__ import annotations

from typing import Any

from app.model.layers import why_not_compiled
from app.preflight.base_model import BaseModel


def check_compile_of_base(trainer: Any, base: BaseModel) -> list[str]:
    """List why the layers of this base cannot be compiled once for all batches."""
    problem = why_not_compiled(base.numbers or {}) if trainer.compile else None
    return [problem] if problem else []
