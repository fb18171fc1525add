"""The global batch of a run: the packs of an optimizer step, and the factors that make them.

The order of the data depends on the packs of a step, so a resumed run must keep their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.run.changes import Change

if TYPE_CHECKING:
    from app.training.trainer import TrainerConfig

STREAMED = ("trainer.micro_batch_size", "data.num_workers")
"""settings that the order of a stream depends on, beside the number of ranks"""


def describe_global_batch(trainer: TrainerConfig, num_ranks: int) -> dict[str, int]:
    """Return the packs of an optimizer step on all ranks, and the factors that make them."""
    accumulation = trainer.gradient_accumulation_steps
    if trainer.global_batch_size is not None:
        accumulation = trainer.global_batch_size // (trainer.micro_batch_size * num_ranks)
    return {
        "packs": trainer.micro_batch_size * accumulation * num_ranks,
        "micro_batch_size": trainer.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "num_ranks": num_ranks,
    }


def check_global_batch(
    before: Mapping[str, int], now: Mapping[str, int], trainer: TrainerConfig
) -> tuple[list[str], list[str]]:
    """Return the problems that forbid resuming with this batch, and the notes to print."""
    if before == now:
        return [], []
    if before["packs"] == now["packs"]:
        return [], [
            f"a global step is {_factors(now)} and was {_factors(before)}: the same order of data "
            "(the last digits may differ, and what dropout leaves out)"
        ]
    return [
        f"the run took {before['packs']} packs a step ({_factors(before)}) and would now take "
        f"{now['packs']} ({_factors(now)}): the order of its data depends on it; type "
        f"{_fitting(before, now, trainer)}"
    ], []


def check_stream(
    changes: Sequence[Change], before: Mapping[str, int], now: Mapping[str, int]
) -> list[str]:
    """List the changes on which the order of a stream depends."""
    problems = [
        f"{change}, and the order of data.streaming=true depends on it; {change.way_back}"
        for change in changes
        if change.what in STREAMED
    ]
    if before["num_ranks"] != now["num_ranks"]:
        problems.append(
            f"the run had {_ranks(before['num_ranks'])} and would now have {now['num_ranks']}, and "
            "the order of data.streaming=true depends on it; type "
            f"trainer.devices={before['num_ranks']}"
        )
    return problems


def _factors(batch: Mapping[str, int]) -> str:
    return (
        f"micro_batch_size {batch['micro_batch_size']} x accumulation "
        f"{batch['gradient_accumulation_steps']} x {_ranks(batch['num_ranks'])}"
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def _fitting(before: Mapping[str, int], now: Mapping[str, int], trainer: TrainerConfig) -> str:
    if trainer.global_batch_size is not None:
        return f"trainer.global_batch_size={before['packs']}"
    accumulation, rest = divmod(before["packs"], now["micro_batch_size"] * now["num_ranks"])
    if rest == 0:
        return f"trainer.gradient_accumulation_steps={accumulation}"
    if before["packs"] % now["num_ranks"] == 0:
        accumulation = before["packs"] // now["num_ranks"]
        return f"trainer.micro_batch_size=1 trainer.gradient_accumulation_steps={accumulation}"
    return f"trainer.devices={before['num_ranks']} (or another divisor of {before['packs']})"
