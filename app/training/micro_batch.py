"""How many packs run forward and backward at once: what a plan has chosen, tried before the run.

Where ranks hold whole weights, so that none waits for another in a forward or backward pass, a real
micro-batch is run, and halved until it fits on all of them. The packs of an optimizer step stay.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

from app.strategy.settings import DdpConfig, StrategyConfig
from app.training.memory import EIGHT_BIT_STATES, STATES

if TYPE_CHECKING:
    import torch

    from app.training.module import FinetuneModule
    from data_modules import Batch

log = logging.getLogger(__name__)


def divisors(number: int) -> list[int]:
    """Return all divisors, smallest first."""
    return [one for one in range(1, number + 1) if number % one == 0]


def can_try(strategy: StrategyConfig) -> bool:
    """Return whether a rank may run out of memory in a micro-batch without leaving others behind.

    Not where it gathers weights, or sends gradients, in the midst of it.
    """
    return strategy.name == "single" or isinstance(strategy, DdpConfig)


def try_micro_batch(module: FinetuneModule, optimizer: str) -> None:
    """Run the fullest micro-batch forward and backward, and halve it until it fits on all ranks.

    Room is kept for the states that the optimizer of that name makes in its first step. Gradients
    are dropped afterwards. Raises OutOfMemoryError where a single pack does not fit.
    """
    trainer: Any = module.trainer
    data = trainer.datamodule
    while (failure := _find_failure(module, data.fullest_batch(), optimizer)) is not None:
        batching = data.batching
        packs = batching.micro_batch_size * batching.accumulation_steps
        smaller = [one for one in divisors(packs) if one <= batching.micro_batch_size // 2]
        if not smaller:
            raise failure
        if module.global_rank == 0:
            log.warning(
                "micro-batch: %d packs at once do not fit after all; %d instead",
                batching.micro_batch_size,
                smaller[-1],
            )
        _set_micro_batch_size(trainer, smaller[-1])


def _set_micro_batch_size(trainer: Any, size: int) -> None:
    """Give the trainer and its data other micro-batches; its steps stay what they are."""
    data, before = trainer.datamodule, trainer.accumulate_grad_batches
    data.set_micro_batch_size(size)
    trainer.accumulate_grad_batches = data.batching.accumulation_steps
    trainer.val_check_interval *= data.batching.accumulation_steps
    trainer.val_check_interval //= before


def _find_failure(
    module: FinetuneModule, batch: Batch, optimizer: str
) -> torch.OutOfMemoryError | None:
    """Return the error of a rank that has no room for a step, on all ranks; None where it fits."""
    import torch

    strategy = module.strategy
    failure = _run_out_of_memory(module, batch.to(strategy.root_device), optimizer)
    module.zero_grad()
    module.reset_step()
    gc.collect()
    if strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()
    fits: Any = torch.tensor(failure is None, dtype=torch.int32, device=strategy.root_device)
    everywhere = module.trainer.strategy.all_gather(fits)
    if everywhere.min().item():
        return None
    return failure or torch.OutOfMemoryError("another rank has no room for a micro-batch")


def _run_out_of_memory(
    module: FinetuneModule, batch: Batch, optimizer: str
) -> torch.OutOfMemoryError | None:
    import torch

    trained = [weight for weight in module.model.parameters() if weight.requires_grad]
    states = sum(
        weight.numel()
        * (STATES.get(optimizer, 0) * weight.element_size() + EIGHT_BIT_STATES.get(optimizer, 0))
        for weight in trained
    )
    device = module.strategy.root_device
    try:
        room = torch.empty(states, dtype=torch.uint8, device=device)
        # Twice: from the second micro-batch on, gradients are there beside the activations.
        for _ in range(min(2, module.trainer.accumulate_grad_batches)):
            with module.trainer.precision_plugin.forward_context():
                loss = module.loss(batch)
            loss.backward()
        del room
    except torch.OutOfMemoryError as error:
        return error.with_traceback(None)  # whose frames hold the activations
    return None
