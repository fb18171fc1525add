"""One device, DDP, and DDP with compressed gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from app.model.adapter import trainable_weights
from app.process.launch import is_first_rank
from app.strategy.mixin import StrategyMixin
from app.strategy.rendezvous import connect_ranks
from app.strategy.settings import TIMEOUT
from common.errors import UserError

if TYPE_CHECKING:
    from app.strategy.settings import DdpConfig

log = logging.getLogger(__name__)

UNCOMPRESSED_STEPS = 10
"""backward passes before PowerSGD starts to compress: the first gradients are the largest, and DDP
rebuilds its buckets after the very first backward pass"""
_UNSENT = "unsent/"
"""prefix of a weight's name in a rank's file of a checkpoint"""


class SingleDevice(StrategyMixin, SingleDeviceStrategy):
    """One process on one device."""

    accumulates_in_products = True  # nothing waits for the gradient of a weight


class Ddp(StrategyMixin, DDPStrategy):
    """DDP: every rank holds all weights, and gradients are averaged."""

    def __init__(self) -> None:
        super().__init__(
            timeout=TIMEOUT,
            gradient_as_bucket_view=True,
            # A language model's buffers are constant; rank 0 would send them in each forward pass.
            broadcast_buffers=False,
        )

    def setup_distributed(self) -> None:
        """Connect the ranks, over the loopback interface if all are on this machine."""
        connect_ranks(self)
        super().setup_distributed()

    def accumulating(self) -> AbstractContextManager[None]:
        """Return DDP's context of backward passes that send no gradients."""
        context: AbstractContextManager[None] = self.model.no_sync()
        return context


class CompressedDdp(Ddp):
    """DDP with compressed gradients: a communication hook of PyTorch's, or top-k."""

    def __init__(self, config: DdpConfig) -> None:
        super().__init__()
        self._topk = _TopK(config.topk_share) if config.compression == "topk" else None
        self._compression = config.compression
        self._rank = config.powersgd_rank
        self._powersgd: Any = None
        """PowerSGD's error feedback; not in checkpoints, so a resumed run starts without it"""

    def configure_ddp(self) -> None:
        """Wrap the model in DDP and register the communication hook, for gloo and NCCL."""
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
        elif self._topk is not None:
            # In a lambda: DDP checks the annotations of a hook, which are strings in this module.
            model.register_comm_hook(self._topk, lambda state, bucket: state.reduce(bucket))
        else:
            compress = {
                "bf16": default_hooks.bf16_compress_hook,
                "fp16": default_hooks.fp16_compress_hook,
            }[self._compression]
            # In a lambda: without NCCL DDP refuses bf16_compress_hook by name; gloo can sum bf16.
            model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Return a checkpoint's dictionary; log that it lacks PowerSGD's state."""
        if self._compression == "powersgd" and is_first_rank():
            log.info(
                "RESUME: PowerSGD starts without its error feedback, and with %d backward passes "
                "of uncompressed gradients: the next steps are not bit-identical to those of an "
                "uninterrupted run",
                UNCOMPRESSED_STEPS,
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip gradients; clear the error feedback if they are not finite."""
        norm = super().clip(optimizer, max_norm)
        has_feedback = self._powersgd is not None or self._topk is not None
        # The feedback would carry NaNs into the next step. Costs one device sync per step.
        if has_feedback and not math.isfinite(norm.item()):
            if self._topk is not None:
                self._topk.residuals.clear()
            else:
                for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
                    getattr(self._powersgd, name).clear()
        return norm

    def local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the part of this rank's gradients that top-k has not sent yet."""
        if self._topk is None:
            return {}
        residuals, weights = self._topk.residuals, trainable_weights(self.lightning_module.model)
        return {
            _UNSENT + w.name: residuals[w.parameter] for w in weights if w.parameter in residuals
        }

    def restore_local_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
    ) -> None:
        """Restore top-k's unsent gradients; start without any if the checkpoint has none."""
        if self._topk is None:
            return
        self._topk.residuals.clear()
        # The checkpoint of another strategy has other tensors here.
        unsent = {key.removeprefix(_UNSENT): state[key] for key in state if key.startswith(_UNSENT)}
        if not unsent and is_first_rank():
            log.info("RESUME: top-k starts without the gradients that had not been sent yet")
        weights = {w.name: w.parameter for w in trainable_weights(self.lightning_module.model)}
        for name, saved in unsent.items():
            weight = weights.get(name)
            if weight is None or saved.shape != (weight.numel(),) or saved.dtype != weight.dtype:
                raise UserError(
                    f"resume: the checkpoint holds unsent gradients of {name!a} {list(saved.shape)}"
                    ", which match no trainable weight; resume with the settings it was made with "
                    "(the run's config.yaml)"
                )
            self._topk.residuals[weight] = saved.to(weight.device, copy=True)


class _TopK:
    """Averages the largest gradients of each weight; adds the rest to the next step's gradients.

    Error feedback as in arXiv 1809.07599. Each rank selects its own largest gradients, and all
    ranks gather their values and indices: the bytes grow with the number of ranks.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.residuals: dict[torch.nn.Parameter, Tensor] = {}
        """flat gradients that this rank has not sent yet; keyed by weight, since DDP rebuilds its
        buckets, also after a resume"""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Return the mean of the gradients that the ranks send for a bucket, as a DDP comm hook."""
        buffer = bucket.buffer()
        values, indices = [], []
        for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            flat = buffer[start : start + gradient.numel()]
            if weight in self.residuals:
                flat += self.residuals[weight]
            count = math.ceil(self.share * len(flat))
            selected = flat.abs().topk(count, sorted=False).indices
            self.residuals[weight] = flat.clone().index_fill_(0, selected, 0)
            values.append(buffer[start + selected])
            indices.append((start + selected).int())
        num_ranks = dist.get_world_size()
        # One message of bytes: all values, then all indices.
        sent = torch.cat([torch.cat(part).view(torch.uint8) for part in (values, indices)])
        received = sent.new_empty(num_ranks * len(sent))
        gathering = dist.all_gather_into_tensor(received, sent, async_op=True)
        num_value_bytes = sum(map(len, indices)) * buffer.itemsize

        def mean(_: object) -> Tensor:
            buffer.zero_()
            for part in received.chunk(num_ranks):
                values = part[:num_value_bytes].view(buffer.dtype) / num_ranks
                buffer.index_add_(0, part[num_value_bytes:].clone().view(torch.int32), values)
            return buffer

        return gathering.get_future().then(mean)
