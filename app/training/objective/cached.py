"""What the base or a teacher says of all rows, computed once and stored with the data's tokens."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from app.process.heartbeat import refresh_liveness
from app.training.objective.distill import Distill
from app.training.objective.pairs import base_log_probs
from app.training.objective.settings import DistillConfig
from common.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from app.assembly.base import Base
    from app.training.module import FinetuneModule
    from app.training.objective.settings import ObjectiveConfig
    from data_modules import Batch, FinetuneDataModule

log = logging.getLogger(__name__)


def _reference_identity(base: Base, precision: str) -> str:
    """Return a hash of everything besides the tokens that determines log-probabilities of a base.

    Its files or commit, its settings, quantization, and the precision in which it computes.
    """
    parts = [sorted(base.description.items()), base.config, base.quantization, base.dtype]
    return hashlib.sha256(repr([*parts, base.backend, precision]).encode()).hexdigest()


def open_references(
    config: ObjectiveConfig, data: FinetuneDataModule, base: Base, precision: str
) -> Callable[[FinetuneModule], None] | None:
    """Give each row its stored log-probabilities; return what computes and stores missing ones.

    None if the objective does not use stored ones. Raises UserError if a resumed run finds none of
    its base, which its weights may no longer be; a teacher is asked again.
    """
    if isinstance(config, DistillConfig) and config.teacher_logits == "cached":
        assert base.teacher is not None
        identity = f"{config.teacher_top_k} of {base.teacher.identity}"
        data.read_references(identity, by_token=True)
        return store_references
    if config.reference_source != "cached":
        return None
    is_found = data.read_references(_reference_identity(base, precision))
    if not is_found and data.first_step:
        raise UserError(
            "objective.reference=cached: the log-probabilities of the base, which the run computed "
            "before its first step, are gone from data.cache_dir, or settings that determine them "
            "have changed; put the folder back, or type resume=never to start again"
        )
    return store_references


def store_references(module: FinetuneModule) -> None:
    """Compute what the base or teacher says of all rows and store it, unless every rank has it.

    All ranks call this, before the first step of a run; each computes a share of the rows.
    """
    strategy, data = module.strategy, module.trainer.datamodule
    teacher = module.objective if isinstance(module.objective, Distill) else None
    key = "objective.reference=cached" if teacher is None else "objective.teacher_logits=cached"
    device = strategy.root_device
    is_found: Any = torch.tensor(data.train_examples.has_stored, device=device).int()
    if module.trainer.strategy.all_gather(is_found).min().item():
        log.info("%s: found in the cache", key)
        return
    sum_over_ranks = module.sum_over_ranks if strategy.num_data_ranks > 1 else None
    began, rows = time.monotonic(), data.referenced_examples()
    loader, order = data.ordered_loader(rows, strategy.num_data_ranks, strategy.data_rank)

    def compute(batch: Batch) -> Tensor:
        part = strategy.shard_batch(batch).to(device)
        if teacher is not None:
            # Much more than a number a pair: on the host, unless ranks add up their shares.
            return teacher.likeliest(part).to(device if sum_over_ranks else "cpu")
        found: Tensor = strategy.run_forward(base_log_probs, module.model, part, module.backend)
        return found

    counts = [1] * len(rows) if teacher is None else rows.trained.tolist()
    values = measure_references(loader, order, counts, compute, sum_over_ranks)
    data.store_references(values)
    what = "pairs" if teacher is None else "rows"
    seconds = time.monotonic() - began
    log.info("%s: computed for %s %s in %.1f s, now cached", key, f"{len(rows):,}", what, seconds)
    if teacher is not None:
        teacher.teacher = None  # its memory is free for the training
        held = np.exp(values[:, 1]).sum(1)
        log.info(
            "%s: the %d likeliest tokens hold %.2f %% of the teacher's probability (of the worst "
            "hundredth of positions at most %.2f %%); more with objective.teacher_top_k",
            *(key, values.shape[2], 100 * held.mean(), 100 * np.quantile(held, 0.01)),
        )


@torch.no_grad()
def measure_references(
    batches: Iterable[Batch],
    order: Sequence[int],
    counts: Sequence[int],
    compute: Callable[[Batch], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> npt.NDArray[Any]:
    """Return `compute` of all rows, [pairs, 2] or [trained tokens, ...].

    `order`: indices of the rows in `batches`; `counts`: number of values of each row.
    """
    found = []
    for batch in batches:
        found.append(compute(batch))
        refresh_liveness()
    computed = torch.cat(found)
    values = computed.new_zeros(sum(counts), *computed.shape[1:])
    starts = np.cumsum(counts) - counts
    places = [np.arange(starts[row], starts[row] + counts[row]) for row in order]
    values[torch.from_numpy(np.concatenate([*places, starts[:0]])).to(values.device)] = computed
    whole = values if sum_over_ranks is None else sum_over_ranks(values)
    return whole.cpu().numpy()
