"""Log-probabilities of the base for all pairs, computed once and stored with the data's tokens."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from app.process.heartbeat import refresh_liveness
from app.training.objective.pairs import base_log_probs
from common.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from app.assembly.base import Base
    from app.training.module import FinetuneModule
    from app.training.objective.settings import ObjectiveConfig
    from data_modules import Batch, FinetuneDataModule

log = logging.getLogger(__name__)


def reference_identity(base: Base, precision: str) -> str:
    """Return a hash of everything besides the tokens that determines log-probabilities of a base.

    Its files or commit, its settings, quantization, and the precision in which it computes.
    """
    parts = [sorted(base.description.items()), base.config, base.quantization, base.dtype]
    return hashlib.sha256(repr([*parts, base.backend, precision]).encode()).hexdigest()


def open_references(
    config: ObjectiveConfig, data: FinetuneDataModule, base: Base, precision: str
) -> Callable[[FinetuneModule], None] | None:
    """Give each pair its stored log-probabilities; return what computes and stores missing ones.

    None if the objective does not use stored ones. Raises UserError if a resumed run finds none:
    its weights may no longer be those of the base.
    """
    if config.reference_source != "cached":
        return None
    is_found = data.read_references(reference_identity(base, precision))
    if not is_found and data.first_step:
        raise UserError(
            "objective.reference=cached: the log-probabilities of the base, which the run computed "
            "before its first step, are gone from data.cache_dir, or settings that determine them "
            "have changed; put the folder back, or type resume=never to start again"
        )
    return store_references


def store_references(module: FinetuneModule) -> None:
    """Compute the base's log-probabilities of all pairs and store them, unless every rank has them.

    All ranks call this, before the first step of a run; each computes a share of the pairs.
    """
    strategy, data = module.strategy, module.trainer.datamodule
    device = strategy.root_device
    is_found: Any = torch.tensor(data.train_examples.references is not None, device=device).int()
    if module.trainer.strategy.all_gather(is_found).min().item():
        log.info("objective.reference=cached: found in the cache")
        return
    began, pairs = time.monotonic(), data.referenced_examples()
    loader, order = data.ordered_loader(pairs, strategy.num_data_ranks, strategy.data_rank)

    def compute(batch: Batch) -> Tensor:
        part = strategy.shard_batch(batch).to(device)
        found: Tensor = strategy.run_forward(base_log_probs, module.model, part, module.backend)
        return found

    data.store_references(
        measure_references(loader, order, len(pairs), compute, module.sum_over_ranks)
    )
    log.info(
        "objective.reference=cached: computed for %s pairs in %.1f s, now cached",
        *(f"{len(pairs):,}", time.monotonic() - began),
    )


@torch.no_grad()
def measure_references(
    batches: Iterable[Batch],
    order: Sequence[int],
    num_pairs: int,
    compute: Callable[[Batch], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> npt.NDArray[np.float64]:
    """Return `compute` of all pairs [pairs, 2]; `order`: indices of those in `batches`."""
    found = []
    for batch in batches:
        found.append(compute(batch))
        refresh_liveness()
    log_probs = torch.cat(found)
    values = log_probs.new_zeros(num_pairs, 2)
    values[torch.tensor(order, dtype=torch.long, device=values.device)] = log_probs
    whole = values if sum_over_ranks is None else sum_over_ranks(values)
    return whole.cpu().numpy()
