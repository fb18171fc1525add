"""Where a strategy puts the model and the rows of a batch: the first of its three interfaces.

Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from app.strategy.settings import TIMEOUT

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from data_modules import Batch

BuildModel = Callable[..., Any]
"""builds the model on `device` (the CPU by default); `on_meta=True` creates meta tensors and reads
no weights, `on_host=True` reads the weights into host memory first"""


class Placement:
    """Where modules and rows go, and how weights are made.

    Defaults: every rank holds all weights and gets rows of its own.
    """

    shards_weights = False
    """whether weights are sharded; forward passes and saves then need all ranks"""
    fuses_adapters = True
    """whether a layer may read its submodules' weights without calling their forward"""

    context_size = 1
    """neighbouring ranks that hold slices of the same rows"""

    pipeline_size = 1
    """ranks that hold stages of the same copy of the model"""

    world_size: int
    global_rank: int
    root_device: torch.device

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that get different rows."""
        return self.world_size // self.context_size

    @property
    def data_rank(self) -> int:
        """Index of this rank, or its group, among the `num_data_ranks`."""
        return self.global_rank // self.context_size

    @cached_property
    def context_ranks(self) -> ProcessGroup | None:
        """The ranks that hold slices of this rank's rows, None without; all ranks ask together."""
        if self.context_size == 1:
            return None
        import torch.distributed as dist

        # Neighbours, so that the ranks over which weights are sharded need no dimension for them.
        own, _ = dist.new_subgroups(self.context_size, timeout=TIMEOUT)
        return own

    def shard_batch(self, batch: Batch) -> Batch:
        """Return the part of a micro-batch that this rank computes: a slice of its rows, or all."""
        if (ranks := self.context_ranks) is None:
            return batch
        from data_modules import SequenceSlice

        return batch.part(SequenceSlice.of_rank(batch.input_ids.shape[1], ranks))

    def build_model(self, build: BuildModel) -> Any:
        """Build the model and place its weights; called before the optimizer is built."""
        device = self.root_device
        return build(device=None if device.type == "cpu" else device)

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Gather a module's own weights, as its forward does; all ranks enter this together."""
        return nullcontext()

    def set_leaf_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Gather each module's weights once per forward pass, with those of its submodules.

        Needed for modules that call their submodules a different number of times on each rank.
        """

    def reshard(self, model: Any) -> None:
        """Reshard all weights that forward passes have left gathered."""
