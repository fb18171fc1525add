"""Name -> Lightning strategy. The only place that knows how ranks talk to each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from app.process.launch import free_port
from app.strategy.settings import DdpConfig, FsdpConfig, StrategyConfig, ZeroConfig

if TYPE_CHECKING:
    from app.strategy.mixin import StrategyMixin


def build_strategy(config: StrategyConfig, *, accelerator: str, num_ranks: int) -> StrategyMixin:
    """Build the strategy that `num_ranks` processes train under; `auto` is resolved before."""
    from app.strategy.mixin import OneDevice, Replicated

    _meet_anew_after_a_restart()
    if isinstance(config, ZeroConfig):
        from app.strategy.deepspeed import build_zero

        return build_zero(config, accelerator=accelerator)
    if isinstance(config, FsdpConfig):
        from app.strategy.fsdp import build_sharded

        return build_sharded(config, accelerator=accelerator, num_ranks=num_ranks)
    if isinstance(config, DdpConfig) and config.compression != "none":
        from app.strategy.compression import Compressed

        return Compressed(config, gradient_as_bucket_view=True)
    if isinstance(config, DdpConfig) or num_ranks > 1:
        return Replicated(gradient_as_bucket_view=True)
    return OneDevice("cuda:0" if accelerator == "gpu" else "cpu")


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
