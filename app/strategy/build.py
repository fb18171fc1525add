"""Name -> Lightning strategy. The only place that knows how ranks talk to each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from app.launch import free_port

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

NAMES = ("auto", "single", "ddp")


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    name: str = "auto"
    """auto: `single` on one device, `ddp` on several; ddp: every rank holds all weights"""


def build_strategy(config: StrategyConfig, num_ranks: int) -> Strategy | str:
    """Build the strategy that `num_ranks` processes train under."""
    name = config.name
    if name == "auto":
        name = "ddp" if num_ranks > 1 else "single"
    if name == "single":
        return "auto"  # Lightning's SingleDeviceStrategy, placed on the accelerator it finds
    from lightning.pytorch.strategies import DDPStrategy

    _meet_anew_after_a_restart()
    return DDPStrategy(gradient_as_bucket_view=True)


def _meet_anew_after_a_restart() -> None:
    """Let ranks that torchrun has started again meet where nothing is left of those before them.

    It keeps its store over restarts, in which they would find the addresses of dead ranks (seen
    with torch 2.13; its #135712 was meant to end that). Between machines that restart apart nobody
    counts the restarts for all: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun helps.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restart == "0" or not is_one_machine or not shares_store:
        return
    from torch.distributed import TCPStore

    shared = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(minutes=5),
    )
    key = f"port of restart {restart}"
    if os.environ["RANK"] == "0":
        shared.set(key, str(free_port()))
    os.environ["MASTER_PORT"] = shared.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
