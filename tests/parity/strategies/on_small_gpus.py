"""Run `app.train` on CPU ranks whose `auto` settings are resolved for H100s with little memory."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from typing import Any

import app.assembly.auto
import app.run.ranks
from app.config import settings_of
from app.planning.memory import CONTEXT_GIB, USABLE_SHARE
from app.planning.training import plan_training
from common.installation import child_command

ROOM_MIB = 2.8
"""usable memory besides what CUDA takes"""
MODULE = "tests.parity.strategies.on_small_gpus"


def plan_for_gpus(*args: Any, **kwargs: Any) -> Any:
    """Plan the run for a GPU a rank."""
    plan = plan_training(*args, **kwargs)
    assert plan is not None
    gib = (CONTEXT_GIB + ROOM_MIB / 1024) / USABLE_SHARE
    card = settings_of("hardware", "h100")
    card = replace(card, memory_gib=gib, gpus_per_node=plan.hardware.gpus_per_node)
    return replace(plan, hardware=card, is_on_gpu=True)


if __name__ == "__main__":
    app.assembly.auto.plan_training = plan_for_gpus
    app.run.ranks.child_command = lambda _: child_command(MODULE)
    sys.modules.pop("app.train", None)  # it becomes __main__
    runpy.run_module("app.train", run_name="__main__", alter_sys=True)
