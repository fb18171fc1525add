"""Collectives over all ranks, for work that only some ranks do.

An error on one rank is raised on all ranks, so that none waits forever for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from common.errors import ENVIRONMENT_ERROR, USER_ERROR, TrainingFault, UserError, exit_code

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_T = TypeVar("_T")


def is_rank0() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def run_on_rank0(work: Callable[[], _T]) -> _T | None:
    """Run `work` on rank 0 while the others wait; return its result there, None on the others.

    An error is raised on every rank, with the same exit code.
    """
    return run_on_ranks(work, runs=is_rank0())


def run_on_ranks(work: Callable[[], _T], *, runs: bool) -> _T | None:
    """Run `work` on the ranks that pass `runs=True`, such as one per machine; the others wait.

    An error is raised on every rank, with the same exit code.
    """
    result: _T | None = None
    failure: Exception | None = None
    if runs:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised after the others have received it
            failure = error
    own = None if failure is None else (exit_code(failure), str(failure))
    failures = all_gather(own)
    if failure is not None:
        raise failure
    kinds = {USER_ERROR: UserError, ENVIRONMENT_ERROR: OSError}
    for code, message in filter(None, failures):
        raise kinds.get(code, TrainingFault)(message)
    return result


def broadcast_from_rank0(value: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's values of a tensor that has the same shape and dtype on all ranks."""
    import torch
    import torch.distributed as dist

    if is_rank0():
        values = value.to(device).contiguous()
    else:
        values = torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.broadcast(values, src=0)
    return values


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank, in the order of the ranks."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def all_gather_list(problems: list[str]) -> list[str]:
    """Return the problems of all ranks, on every rank, in the order of the ranks."""
    return [problem for problems_of_rank in all_gather(problems) for problem in problems_of_rank]
