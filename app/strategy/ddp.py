"""One device, DDP, and DDP with compressed gradients."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from app.process.launch import is_first_rank
from app.strategy.mixin import StrategyMixin
from app.strategy.rendezvous import meet_on_loopback
from app.strategy.settings import TIMEOUT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from app.strategy.settings import DdpConfig

log = logging.getLogger(__name__)

UNCOMPRESSED_STEPS = 10
"""backward passes before PowerSGD compresses: the first gradients are the steepest, and DDP
rebuilds its buckets after the very first"""


class OneDevice(StrategyMixin, SingleDeviceStrategy):
    """One process on one device."""


class Replicated(StrategyMixin, DDPStrategy):
    """DDP: every rank holds all weights, and gradients are averaged."""

    def __init__(self) -> None:
        super().__init__(
            timeout=TIMEOUT,
            gradient_as_bucket_view=True,
            # Those of a language model are constants; rank 0 would send them in every forward pass.
            broadcast_buffers=False,
        )

    def setup_distributed(self) -> None:
        """Connect the ranks, over the loopback interface if all are on this machine."""
        meet_on_loopback(self)
        super().setup_distributed()


class Compressed(Replicated):
    """DDP with a communication hook of PyTorch's."""

    def __init__(self, config: DdpConfig) -> None:
        super().__init__()
        self._compression = config.compression
        self._rank = config.powersgd_rank
        self._powersgd: Any = None
        """PowerSGD's error feedback; not in checkpoints, a resumed run starts without it"""

    def configure_ddp(self) -> None:
        """Wrap the model and register the communication hook, for gloo and NCCL."""
        super().configure_ddp()
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        model: Any = self.model
        if self._compression == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=UNCOMPRESSED_STEPS,
            )
            model.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        else:
            compress = {
                "bf16": default_hooks.bf16_compress_hook,
                "fp16": default_hooks.fp16_compress_hook,
            }[self._compression]
            # Wrapped: without NCCL DDP refuses bf16_compress_hook by name; gloo can sum bf16.
            model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Return a checkpoint's dictionary, and log that it lacks PowerSGD's state."""
        if self._compression == "powersgd" and is_first_rank():
            log.info(
                "RESUME: PowerSGD starts without its error feedback, and with %d backward passes "
                "of uncompressed gradients: the next steps are not bit for bit those of an "
                "uninterrupted run",
                UNCOMPRESSED_STEPS,
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip gradients; clear PowerSGD's state if they are not finite."""
        norm = super().clip(optimizer, max_norm)
        # Its error feedback would carry NaNs into the next step. Reads one number per step.
        if self._powersgd is not None and not math.isfinite(norm.item()):
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self._powersgd, memory).clear()
        return norm
