"""Collectives over all ranks, for work of which only the first rank writes the result.

An error on one rank is raised on all, so that none is left waiting for the others.
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
    """Tell whether this is rank 0 of the process group."""
    import torch.distributed as dist

    return dist.get_rank() == 0


def run_on_rank0(work: Callable[[], T]) -> T | None:
    """Run `work` on rank 0 while the others wait; returns its result there, None on the others.

    An error is raised on every rank, with the same exit code.
    """
    return run_on_ranks(work, here=is_first())


def run_on_ranks(work: Callable[[], T], *, here: bool) -> T | None:
    """Run `work` on the ranks with `here`, such as one of each machine, while the others wait.

    An error is raised on every rank, with the same exit code.
    """
    import torch.distributed as dist

    result: T | None = None
    failure: Exception | None = None
    if here:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised after the others have received it
            failure = error
    own = None if failure is None else (exit_code(failure), str(failure))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    if failure is not None:
        raise failure
    for one in gathered:
        if one is not None:
            raise _error_of(*one)
    return result


def _error_of(code: int, message: str) -> Exception:
    if code == USER_ERROR:
        return UserError(message)
    return OSError(message) if code == ENVIRONMENT_ERROR else TrainingFault(message)


def broadcast_from_rank0(value: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's values of a tensor that has the same shape and dtype on all ranks."""
    import torch
    import torch.distributed as dist

    if is_first():
        values = value.to(device).contiguous()
    else:
        values = torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.broadcast(values, src=0)
    return values


def all_gather_list(problems: list[str]) -> list[str]:
    """Return the problems of all ranks, on every rank, in the order of the ranks."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, problems)
    return [problem for one in gathered for problem in one]
