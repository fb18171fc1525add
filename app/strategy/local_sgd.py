"""Local SGD: nodes train independently and average their weights every few steps.

Post-local SGD (arXiv 1808.07217): the first steps average gradients over all nodes. Then each node
steps by its own gradients, sharded over its ranks by FSDP2, with its own optimizer states. Every
`sync_every_steps` steps, and after the last one, the trainable weights become their mean over the
nodes, or the result of an outer Nesterov step towards that mean (DiLoCo, arXiv 2311.08105).

Between two averages, validations and saved models use the mean. A checkpoint holds the mean, which
any strategy can resume from, and the state of each rank, which makes a resume bit-identical.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from app.model.adapter import trainable_weights
from app.process.launch import is_first_rank
from app.strategy.fsdp import Fsdp
from app.strategy.settings import LocalSgdConfig
from app.strategy.state import ShardedTensor, StateTensor, local
from common.errors import UserError

log = logging.getLogger(__name__)

_BUCKET_SIZE = 2**24
"""elements that nodes average in one message: 64 MiB in fp32"""


class LocalSgd(Fsdp):
    """FSDP2 within each node, local SGD between nodes."""

    norms_differ = True

    def __init__(self, config: LocalSgdConfig) -> None:
        super().__init__(config)
        self.local_config = config
        self._weights_differ = False
        """whether nodes have stepped independently since their last average"""
        self._moments_differ = False
        """whether nodes have ever stepped independently: optimizer states are never averaged"""
        self._own_weights: dict[torch.nn.Parameter, Tensor] = {}
        """this rank's weights while the model holds the mean"""
        self._anchor: dict[torch.nn.Parameter, Tensor] = {}
        """fp32 weights after the last outer step; empty without an outer optimizer"""
        self._momentum: dict[torch.nn.Parameter, Tensor] = {}
        """momentum of the outer optimizer"""

    @property
    def _gradient_mesh(self) -> DeviceMesh:
        """The ranks of this node: FSDP averages gradients within a node only."""
        return self.device_mesh["shard"]

    def _sum_over_ranks(self, squares: Tensor) -> None:
        dist.all_reduce(squares, group=self.device_mesh["shard"].get_group())

    def _num_copies(self, weight: Tensor) -> int:
        return super()._num_copies(weight) // self.device_mesh["replicate"].size()

    def _weights(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.model_root.parameters() if weight.requires_grad]

    # Step

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by the norm over all ranks in synchronous steps, else by this node's norm."""
        weights = self._weights()
        if self._num_steps() < self.local_config.synchronous_steps:
            for weight in weights:
                if weight.grad is None:  # no token of this node has reached this weight
                    weight.grad = torch.zeros_like(weight)
            self._average(local(weight.grad) for weight in weights if weight.grad is not None)
        else:
            if not self._weights_differ and not self._anchor:
                self._set_anchor()
            self._weights_differ = self._moments_differ = True
        return super().clip(optimizer, max_norm)

    def _num_steps(self) -> int:
        """Return the number of completed optimizer steps."""
        step: int = self.lightning_module.trainer.global_step
        return step

    @torch.no_grad()
    def end_step(self, step: int, *, is_last: bool) -> None:
        """Average the weights over the nodes every `sync_every_steps` and after the last step."""
        if self._weights_differ and (is_last or self._averages_after(step)):
            self._average(local(weight.detach()) for weight in self._weights())
            self._take_outer_step()
            self._weights_differ = False

    def _averages_after(self, step: int) -> bool:
        config = self.local_config
        return (step - config.synchronous_steps) % config.sync_every_steps == 0

    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their fp32 means over the nodes; all ranks pass the same tensors."""
        mesh = self.device_mesh["replicate"]
        for bucket in _split_into_buckets(tensors):
            flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
            dist.all_reduce(flat, group=mesh.get_group())
            flat /= mesh.size()
            parts = flat.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _set_anchor(self) -> None:
        if not self.local_config.uses_outer_optimizer:
            return
        for weight in self._weights():
            self._anchor[weight] = local(weight.detach()).to(torch.float32, copy=True)
            self._momentum[weight] = torch.zeros_like(self._anchor[weight])

    def _take_outer_step(self) -> None:
        """Step from the anchor towards the mean, which the model holds, by SGD with Nesterov."""
        if not self._anchor:  # also if a run has resumed between two averages without an anchor
            self._set_anchor()
            return
        config = self.local_config
        for weight in self._weights():
            mean, anchor = local(weight.detach()), self._anchor[weight]
            pseudo_gradient = anchor - mean
            momentum = self._momentum[weight].mul_(config.outer_momentum).add_(pseudo_gradient)
            update = pseudo_gradient.add_(momentum, alpha=config.outer_momentum)
            anchor.sub_(update, alpha=config.outer_lr)
            mean.copy_(anchor)

    # Evaluation

    @torch.no_grad()
    def load_averaged_weights(self) -> None:
        """Load the mean over the nodes into the model, for evaluation or saving."""
        if self._weights_differ and not self._own_weights:
            weights = {weight: local(weight.detach()) for weight in self._weights()}
            self._own_weights = {weight: own.clone() for weight, own in weights.items()}
            self._average(weights.values())

    @torch.no_grad()
    def load_local_weights(self) -> None:
        """Load this node's own weights into the model again."""
        for weight, own in self._own_weights.items():
            local(weight.detach()).copy_(own)
        self._own_weights = {}

    # State

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return the mean of a weight over the nodes, for a checkpoint."""
        if self._weights_differ and not self._own_weights:
            return self._mean_state(weight.detach())
        return super().weight_state(weight)

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return the optimizer state of a weight by key, averaged over the nodes."""
        if not self._moments_differ:
            return super().optimizer_state_of(optimizer, weight)
        return {
            key: self._mean_state(value) if value.shape == weight.shape else value
            for key, value in optimizer.state.get(weight, {}).items()
        }

    def _mean_state(self, tensor: Tensor) -> ShardedTensor:
        return ShardedTensor(tensor.shape, tensor.dtype, partial(self._full_mean, tensor))

    @torch.no_grad()
    def _full_mean(self, tensor: Tensor) -> Tensor:
        mean = tensor.clone()
        self._average([local(mean)])
        return self._full(mean, None)

    def local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this rank's weights and states without a copy; empty in synchronous steps."""
        return self._own_state(optimizer) if self._moments_differ else {}

    def _own_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for trained in trainable_weights(self.model_root):
            weight = trained.parameter
            states = {"weight": self._own_weights.get(weight, weight.detach())}
            states |= optimizer.state.get(weight, {})
            if self._anchor:
                states |= {"anchor": self._anchor[weight], "momentum": self._momentum[weight]}
            own |= {f"{key}/{trained.name}": local(value) for key, value in states.items()}
        return own

    @torch.no_grad()
    def restore_local_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]
    ) -> None:
        """Restore this rank's weights and states.

        If any rank has none in the checkpoint, or shards of another size, all nodes start from the
        mean.
        """
        num_steps = self._num_steps()
        # The checkpoint of another strategy has other tensors here.
        has_own = any(name.startswith("weight/") for name in state)
        if has_own and any(name.startswith("anchor/") for name in state):
            self._set_anchor()
        own = self._own_state(optimizer)
        fits = has_own and all(
            own[name].shape == state[name].shape for name in own.keys() & state.keys()
        )
        if not self._is_true_on_all_ranks(fits):
            self._anchor, self._momentum = {}, {}
            if num_steps > self.local_config.synchronous_steps and is_first_rank():
                log.info("RESUME: every node starts from the mean of the nodes' weights")
            return
        if differing := sorted(own.keys() ^ state.keys()):
            places = ("this run", "the checkpoint")
            present, missing = places if differing[0] in own else reversed(places)
            raise UserError(
                f"resume: this rank's tensor {differing[0]!a} is in {present}, but not in {missing}"
                "; resume with the settings that the checkpoint was made with (the run's "
                "config.yaml)"
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._moments_differ = True
        self._weights_differ = not self._averages_after(num_steps)

    def _is_true_on_all_ranks(self, flag: bool) -> bool:
        """Return whether `flag` is true on every rank, so that all ranks take the same branch."""
        smallest = torch.tensor(int(flag), device=self.root_device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return bool(smallest.item())


def _split_into_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors, in their order, into buckets of at least _BUCKET_SIZE elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(member.numel() for member in bucket) >= _BUCKET_SIZE:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
