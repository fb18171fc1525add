"""The ranks of an evaluation: what each has measured, gathered through the hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.shares import Shares
from app.process.launch import local_rank, read_launch

if TYPE_CHECKING:
    from torch import Tensor


WAITS = timedelta(hours=12)


def build_shares(
    folder: Path, identity: Any, show: Callable[[str, int, int], None], *, on_gpu: bool
) -> Shares:
    """Join the other ranks that were started with this one; a rank on GPUs takes its own."""
    num_ranks = read_launch().num_ranks or 1
    stamp = json.dumps(identity, sort_keys=True, default=str)
    if num_ranks == 1:
        return Shares(folder=folder, identity=stamp, show=show)
    import torch
    import torch.distributed as dist

    if on_gpu:
        torch.cuda.set_device(local_rank())
    # A judge's questions are answered by the first rank alone, while the others wait.
    dist.init_process_group("gloo", rank=local_rank(), world_size=num_ranks, timeout=WAITS)

    def gather(own: dict[int, Any]) -> Sequence[dict[int, Any]]:
        parts: list[Any] = [None] * num_ranks
        dist.all_gather_object(parts, own)
        return parts

    return Shares(
        folder=folder,
        identity=stamp,
        rank=local_rank(),
        num_ranks=num_ranks,
        gather=gather,
        show=show,
    )


def sum_over_ranks(shares: Shares) -> Callable[[Tensor], Tensor] | None:
    """Return what sums a tensor over all ranks; None for a single one."""
    if shares.num_ranks == 1:
        return None
    import torch.distributed as dist

    def total(values: Tensor) -> Tensor:
        on_host = values.cpu()
        dist.all_reduce(on_host)
        return on_host

    return total
