"""Ranks that walk through the same work together, where the first one alone writes.

What fails on one of them is raised on all: none is left waiting for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from app.process.errors import ENVIRONMENT_ERROR, USER_ERROR, TrainingFault, UserError, exit_code

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


def is_first() -> bool:
    """Tell whether this is the first of the ranks that have met."""
    import torch.distributed as dist

    return dist.get_rank() == 0


def run_on_rank0(work: Callable[[], T]) -> T | None:
    """Do `work` on the first rank while the others wait; its result there, None on the others.

    What it raises is raised on every rank, with the same exit code.
    """
    return run_on_ranks(work, here=is_first())


def run_on_ranks(work: Callable[[], T], *, here: bool) -> T | None:
    """Do `work` on the ranks that say `here`, such as one of each machine, while the others wait.

    What one of them raises is raised on every rank, with the same exit code.
    """
    import torch.distributed as dist

    result: T | None = None
    failure: Exception | None = None
    if here:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the others hear of it, then it is raised
            failure = error
    own = None if failure is None else (exit_code(failure), str(failure))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    if failure is not None:
        raise failure
    for one in told:
        if one is not None:
            raise _as_told(*one)
    return result


def _as_told(code: int, message: str) -> Exception:
    if code == USER_ERROR:
        return UserError(message)
    return OSError(message) if code == ENVIRONMENT_ERROR else TrainingFault(message)


def broadcast_from_rank0(value: Tensor, device: torch.device) -> Tensor:
    """Return the first rank's values of a tensor that has one shape and dtype on all ranks."""
    import torch
    import torch.distributed as dist

    if is_first():
        told = value.to(device).contiguous()
    else:
        told = torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.broadcast(told, src=0)
    return told


def all_gather_list(problems: list[str]) -> list[str]:
    """Return the problems of all ranks, on every rank, in the order of the ranks."""
    import torch.distributed as dist

    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, problems)
    return [problem for one in told for problem in one]
