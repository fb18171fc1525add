"""Probing the chosen micro-batch size before a run: halved until a real micro-batch fits.

Only where every rank holds all weights, so that a rank that runs out of memory in a forward or
backward pass leaves no other rank waiting. The packs per optimizer step never change.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

from app.strategy.settings import (
    STATE_BLOCK_BYTES,
    DdpConfig,
    StrategyConfig,
    context_parallel_size,
    divisors,
)
from app.training.optimizers import (
    embedding_weights,
    states_of_weights,
    vocabulary_weights,
)

if TYPE_CHECKING:
    import torch

    from app.training.module import FinetuneModule
    from data_modules import Batch

log = logging.getLogger(__name__)


def can_probe_micro_batch(strategy: StrategyConfig) -> bool:
    """Return whether a rank may run out of memory in a micro-batch without blocking other ranks.

    It may not if it gathers weights, sends gradients or exchanges heads during the pass.
    """
    is_whole = strategy.name == "single" or isinstance(strategy, DdpConfig)
    return is_whole and context_parallel_size(strategy) == 1


def probe_micro_batch(module: FinetuneModule, optimizer: str | None) -> None:
    """Run the fullest micro-batch forward and backward; halve its size until all ranks have room.

    Memory is reserved for the states that `optimizer` allocates in its first step; None if they are
    on a disk. The gradients are discarded. Raises OutOfMemoryError if a single pack does not fit.
    """
    trainer: Any = module.trainer
    data = trainer.datamodule
    while (failure := _probe_all_ranks(module, data.fullest_batch(), optimizer)) is not None:
        batching = data.batching
        packs = batching.micro_batch_size * batching.accumulation_steps
        smaller = [size for size in divisors(packs) if size <= batching.micro_batch_size // 2]
        if not smaller:
            raise failure
        if module.global_rank == 0:
            log.warning(
                "micro-batch: %d packs do not fit in memory; using %d instead",
                batching.micro_batch_size,
                smaller[-1],
            )
        data.set_micro_batch_size(smaller[-1])


def _probe_all_ranks(
    module: FinetuneModule, batch: Batch, optimizer: str | None
) -> torch.OutOfMemoryError | None:
    """Return an error on every rank if any rank runs out of memory; None if `batch` fits."""
    import torch

    strategy = module.strategy
    part = strategy.shard_batch(batch).to(strategy.root_device)
    failure = _probe(module, part, optimizer)
    module.reset_step()
    gc.collect()
    if strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()
    fits: Any = torch.tensor(failure is None, dtype=torch.int32, device=strategy.root_device)
    if module.trainer.strategy.all_gather(fits).min().item():
        return None
    return failure or torch.OutOfMemoryError("another rank has no room for a micro-batch")


def _probe(
    module: FinetuneModule, batch: Batch, optimizer: str | None
) -> torch.OutOfMemoryError | None:
    """Run a step's passes with room for the optimizer states; return this rank's error, if any."""
    import torch

    trainer: Any = module.trainer
    on_disk = 2 * STATE_BLOCK_BYTES
    num_bytes = on_disk if optimizer is None else allocated_states(module.model, optimizer)
    try:
        states = torch.empty(num_bytes, dtype=torch.uint8, device=module.strategy.root_device)
        # Twice: from the second micro-batch on, gradients are in memory next to the activations.
        for _ in range(min(2, trainer.datamodule.batching.accumulation_steps)):
            with module.trainer.precision_plugin.forward_context():
                loss = module.loss(batch)
            loss.backward()
        del states
    except torch.OutOfMemoryError as error:
        return error.with_traceback(None)  # its frames keep the activations alive
    return None


def allocated_states(model: torch.nn.Module, optimizer: str) -> int:
    """Return the bytes of the states that an optimizer allocates on the device."""
    parts = {id(weight): "head" for weight in vocabulary_weights(model)}
    parts |= {id(weight): "embedding" for weight in embedding_weights(model)}
    total = 0.0
    for weight in model.parameters():
        if weight.requires_grad:
            part = parts.get(id(weight), "rest")
            total += states_of_weights(optimizer, part, weight.numel(), weight.nbytes)
    return int(total)
