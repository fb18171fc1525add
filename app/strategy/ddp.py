"""DDP whose gradients travel in fewer bytes than they are kept in."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from app.process.launch import is_first_rank
from app.strategy.mixin import StrategyMixin
from app.strategy.rendezvous import meet_on_loopback

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from app.strategy.settings import DdpConfig

log = logging.getLogger(__name__)

WHOLE_STEPS = 10
"""backward passes of a run whose gradients PowerSGD sends whole: the first are the steepest, and
DDP lays its buckets out anew behind the very first"""


class OneDevice(StrategyMixin, SingleDeviceStrategy):
    """One process on one device."""


class Replicated(StrategyMixin, DDPStrategy):
    """DDP: every rank holds all weights, gradients are averaged."""

    def setup_distributed(self) -> None:
        """Meet the other ranks, on this machine alone where they are all here."""
        meet_on_loopback(self)
        super().setup_distributed()


class Compressed(Replicated):
    """DDP with a communication hook of PyTorch's."""

    def __init__(self, config: DdpConfig, **options: Any) -> None:
        super().__init__(**options)
        self._compression = config.compression
        self._rank = config.powersgd_rank
        self._powersgd: Any = None
        """what PowerSGD remembers; not kept in checkpoints, a resumed run begins without"""

    def configure_ddp(self) -> None:
        """Wrap the model, and say how its gradients travel; by gloo as well as by NCCL."""
        super().configure_ddp()
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        model: Any = self.model
        if self._compression == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=WHOLE_STEPS,
            )
            model.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        else:
            compress = {
                "bf16": default_hooks.bf16_compress_hook,
                "fp16": default_hooks.fp16_compress_hook,
            }[self._compression]
            # By another name: DDP turns bf16 by its name away without NCCL, though gloo adds it up.
            model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Return the dictionary of a checkpoint, and say what of PowerSGD is not in it."""
        if self._compression == "powersgd" and is_first_rank():
            log.info(
                "RESUME: PowerSGD begins without its memory, and with %d backward passes whose "
                "gradients travel whole: the next steps are not bit for bit those of an "
                "uninterrupted run",
                WHOLE_STEPS,
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip as ever; forget what PowerSGD remembers of gradients that are not finite."""
        norm = super().clip(optimizer, max_norm)
        # It carries over to the next step what it left out of this one. One number is read a step.
        if self._powersgd is not None and not math.isfinite(norm.item()):
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self._powersgd, memory).clear()
        return norm
