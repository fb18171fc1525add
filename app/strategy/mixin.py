"""The three interfaces of a strategy, as a mixin for Lightning's.

The interfaces implement the replicated case, in which every rank holds all weights and states;
sharding strategies override what differs. Importing it needs neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app.strategy.state import State
from app.strategy.step import Step


class StrategyMixin(Step, State):
    """Makes Lightning's loops and checkpoints use the three interfaces.

    Checkpoints hold weights and states by name, in the same format for every strategy.
    """

    checkpoint_io: Any
    accelerator: Any
    cluster_environment: Any = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a distributed sampler for this rank."""
        return {"num_replicas": self.num_data_ranks, "rank": self.data_rank}

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors on the CPU unless their device is named; Lightning enters this to build.

        Lightning's own would draw the start of an adapter on the GPU, from its random numbers, so
        that a seed would give another run than on a CPU or under FSDP.
        """
        with self.precision_plugin.tensor_init_context():
            yield

    def training_step(self, *args: Any) -> Any:
        """Run an optimizer step's forward and backward passes, by the module."""
        return self.lightning_module.training_step(*args)

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: `run_micro_batches` has run the backward passes."""
        return closure_loss

    def validation_step(self, batch: Any, *args: Any) -> Any:
        """Run the module's validation step on this rank's part of a micro-batch."""
        module = self.lightning_module
        return self.run_forward(module.validation_step, self.shard_batch(batch), *args)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Pass Lightning's dictionary to the CheckpointIO, on every rank."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Return a checkpoint's dictionary, on every rank."""
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: weights are not stored in Lightning's dictionary."""
        return {}

    def teardown(self) -> None:
        """End what setup began; nothing is moved, since saving and evaluation follow.

        Lightning 2.6 would move all weights and optimizer states to the host.
        """
        self.model = self.lightning_module  # without a wrapper
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the model from a checkpoint."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dictionary: Lightning's checkpoint does not hold optimizer states."""
        return {}
