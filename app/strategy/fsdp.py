"""FSDP2 and tensor parallelism: a layer's weights are whole only while it runs, if at all.

One mesh, (replicate, shard, tensor): groups of ranks that each hold all weights, ranks that share
one copy, and within those ranks that compute parts of the same matrices on the same data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

from app.model.layers import decoder_layers
from app.process.errors import UserError
from app.strategy.loading import Broadcaster, log_host_memory, peak_host_bytes
from app.strategy.mixin import BuildModel, ShardedTensor, StateTensor, StrategyMixin
from app.strategy.rendezvous import meet_on_loopback
from app.strategy.settings import FsdpConfig
from app.strategy.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

FEW = 0.1
"""the share of a model that may train with its gradients whole on every rank between two steps"""


def build_sharded(config: FsdpConfig, *, accelerator: str, num_ranks: int) -> StrategyMixin:
    """Build what `config` says of `num_ranks` processes.

    UserError where they cannot be divided so, or the device cannot do it.
    """
    if config.offload_parameters and accelerator != "gpu":
        raise UserError(
            f"strategy={config.name} keeps weights in pinned host memory, from which a GPU reads, "
            "and this run is on the CPU; type strategy=fsdp"
        )
    return Sharded(config)


class Sharded(StrategyMixin, ModelParallelStrategy):
    """Weights, gradients and optimizer states in parts, by torch's own means."""

    shards_weights = True

    def __init__(self, config: FsdpConfig) -> None:
        super().__init__()
        self.config = config
        self.fuses_adapters = config.tensor_parallel_size == 1
        self.model_root: Any = None
        self._keeps_gradients_whole = False
        self._cut: dict[torch.nn.Parameter, int] = {}
        """dimension along which tensor parallelism has cut a weight"""
        self._on_parts: set[torch.nn.Parameter] = set()
        """weights whose gradients tensor parallelism leaves as parts of a sum"""
        self._owners: dict[torch.nn.Module, FSDPModule] = {}
        """which module's weights are gathered with a module's"""

    # Where ranks are.

    @property
    def tensor_size(self) -> int:
        """Count the ranks that compute parts of the same matrices."""
        return self.config.tensor_parallel_size or self.num_processes

    @property
    def num_data_ranks(self) -> int:
        """Count the groups of ranks that see data of their own."""
        return self.world_size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """Say which of the `num_data_ranks` this rank belongs to."""
        return self.global_rank // self.tensor_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Say whose data this rank sees."""
        return {"num_replicas": self.num_data_ranks, "rank": self.data_rank}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Restore as early as any other strategy: `configure_model` has put the weights here."""
        return False

    def setup_environment(self) -> None:
        """Meet the other ranks; whether all were told the same is asked before more is."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        meet_on_loopback(self)
        self._setup_distributed()

    def _lay_out_mesh(self) -> None:
        replicas, shards = self._divide()
        self._device_mesh = init_device_mesh(
            self.root_device.type,
            (replicas, shards, self.tensor_size),
            mesh_dim_names=("replicate", "shard", "tensor"),
        )

    def _divide(self) -> tuple[int, int]:
        tensor, ranks = self.tensor_size, self.world_size
        if ranks % tensor:
            raise UserError(
                f"strategy.tensor_parallel_size={tensor} does not divide the {ranks} ranks; type a "
                f"divisor of {ranks}"
            )
        groups = ranks // tensor
        replicas = self.num_nodes if self.config.replicas is None else self.config.replicas
        if not self.config.shards_data_parallel:
            replicas = groups
        if groups % replicas:
            raise UserError(
                f"strategy.replicas={replicas} does not divide the {groups} ranks that see data of "
                f"their own; type a divisor of {groups}"
            )
        return replicas, groups // replicas

    # The model.

    def build_model(self, build: BuildModel) -> Any:
        """Build the model where it is read, and share it out a layer at a time."""
        self._lay_out_mesh()
        before = peak_host_bytes()
        handing = Broadcaster(self.root_device, self.world_size, self.num_processes)
        model = build(on_meta=not handing.reads_here, on_host=True)
        handing.check_same(model)
        names = decoder_layers(model, "model.wrap_class=NAME")
        parallel = None
        if self.tensor_size > 1:
            parallel = TensorParallel(model, self.device_mesh["tensor"].get_group(), names)
            log.info(
                "tensor parallel: matrices are split over %d ranks; what is counted below is one's",
                self.tensor_size,
            )
        for layer in [model.get_submodule(name) for name in names]:
            handing.hand_states(layer)
            handing.hand(layer.modules())
            if parallel:
                parallel.cut(layer)
            self._shard(layer)
        inner = {module for name in names for module in model.get_submodule(name).modules()}
        handing.hand_states(model)
        handing.hand(module for module in model.modules() if module not in inner)
        self._shard(model)
        if parallel:
            self._cut = {cut.module._parameters[cut.name]: cut.dim for cut in parallel.cuts}
            self._on_parts = {w for m in parallel.on_parts for w in m.parameters()}
        # Counted here, where quantized weights are packed on every rank: all must come to the same.
        numbers = [(weight.requires_grad, weight.numel()) for weight in model.parameters()]
        trained = sum(number for trains, number in numbers if trains)
        self._keeps_gradients_whole = trained <= FEW * sum(number for _, number in numbers)
        self.model_root = model
        log_host_memory(before, reads_here=handing.reads_here)
        return model

    def _shard(self, module: Any) -> None:
        """Leave of a module's weights what this rank keeps; those inside it that were left stay."""
        mesh, offloads = self.device_mesh, self.config.offload_parameters
        if self.num_data_ranks == 1 and not offloads:
            return
        owned = [one for one in module.modules() if one not in self._owners]
        options: dict[str, Any] = {}
        is_whole = mesh["shard"].size() == 1 and not offloads
        if is_whole or not self.config.reshard_after_forward:
            options["reshard_after_forward"] = False
        if offloads:
            options["offload_policy"] = CPUOffloadPolicy()
        if self._computes_in_bf16(module):
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
        replicates = mesh["replicate"].size() > 1
        fully_shard(
            module, mesh=mesh["replicate", "shard"] if replicates else mesh["shard"], **options
        )
        module.register_forward_hook(_let_go_unless_training)
        self._owners |= dict.fromkeys(owned, module)

    def _computes_in_bf16(self, module: torch.nn.Module) -> bool:
        """Say whether autocast would copy all of a layer's weights, to keep them for the backward.

        They are gathered in bf16 instead. The root is not: its embedding gives the hidden states
        their fp32.
        """
        own = {weight.dtype for weight in module.parameters() if not isinstance(weight, DTensor)}
        is_layer = not any(isinstance(inner, FSDPModule) for inner in module.modules())
        return (
            is_layer and own == {torch.float32} and self.precision_plugin.precision == "bf16-mixed"
        )

    def model_to_device(self) -> None:
        """Leave everything where `build_model` has put it."""

    @contextmanager
    def gathered(self, module: torch.nn.Module) -> Iterator[None]:
        """Have a module's own weights whole; all ranks enter together."""
        owner = self._owners.get(module)
        if owner is None:
            yield
            return
        owner.unshard()
        try:
            yield
        finally:
            owner.reshard()

    def reshard(self, model: Any) -> None:
        """Let every weight go back to its parts."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # A step.

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Add gradients up without sending them, where whole ones are small enough to be kept."""
        root = self.model_root
        if not isinstance(root, FSDPModule):
            yield
            return
        switch = root.set_requires_all_reduce
        if self._keeps_gradients_whole:
            switch = root.set_requires_gradient_sync
        switch(False)
        try:
            yield
        finally:
            switch(True)

    def gradient(self, weight: torch.nn.Parameter) -> Tensor | None:
        """Return this rank's part of a weight's gradient; None without."""
        return None if weight.grad is None else _local(weight.grad)

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by the norm over the parts of all ranks; return it."""
        parts = []
        if self.tensor_size > 1:
            self._agree_on_gradients(optimizer)
        squares = torch.zeros((), device=self.root_device)
        by_copies: dict[int, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    part = _local(weight.grad)
                    parts.append(part)
                    by_copies.setdefault(self._num_copies(weight), []).append(part)
        for copies, alike in by_copies.items():
            norm = torch.nn.utils.get_total_norm(alike).to(self.root_device, torch.float32)
            squares += norm.square() / copies
        dist.all_reduce(squares)
        norm = squares.sqrt()
        if parts:
            norm = norm.to(parts[0].device)
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(parts, scale)
        return norm

    def _agree_on_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ranks that split matrices have one gradient of what they hold whole.

        Each has computed it, though kernels need not round alike, and weights would drift apart.
        """
        group = self.device_mesh["tensor"].get_group()
        for weight in (weight for one in optimizer.param_groups for weight in one["params"]):
            if weight.grad is None or weight in self._cut:
                continue
            if weight in self._on_parts:
                dist.all_reduce(_local(weight.grad), group=group)
            else:
                dist.broadcast(_local(weight.grad), group=group, group_src=0)

    def _num_copies(self, weight: Tensor) -> int:
        """Count the ranks that hold the same part of a weight as this one."""
        num_parts = self.tensor_size if weight in self._cut else 1
        if isinstance(weight, DTensor):
            num_parts *= self.device_mesh["shard"].size()
        return self.world_size // num_parts

    # What is kept.

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Return a weight from all its parts."""
        return self._whole(weight.detach(), self._cut.get(weight))

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return what a checkpoint keeps of a weight: its parts, and how to put them together."""
        return self._kept(weight.detach(), self._cut.get(weight))

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return an optimizer's state of a weight by key."""
        states = optimizer.state.get(weight, {})
        cut = self._cut.get(weight)
        return {
            key: self._kept(value, cut) if _is_like(value, weight) else value
            for key, value in states.items()
        }

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy this rank's part of a whole value into a weight."""
        _local(weight.detach()).copy_(self._part(weight, value))

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        room: Callable[[str, Tensor], Tensor],
    ) -> None:
        """Give a weight this rank's parts of whole states."""
        shape = self._whole_shape(weight, self._cut.get(weight))
        for key, value in states.items():
            if value.shape == shape:
                state = torch.zeros_like(weight, dtype=value.dtype, requires_grad=False)
                _local(state).copy_(self._part(weight, value))
            else:
                state = room(key, value).copy_(value)
            optimizer.state[weight][key] = state

    def _kept(self, tensor: Tensor, cut: int | None) -> StateTensor:
        if not isinstance(tensor, DTensor) and cut is None:
            return tensor
        gather = partial(self._whole, tensor, cut)
        return ShardedTensor(self._whole_shape(tensor, cut), tensor.dtype, gather)

    def _whole_shape(self, tensor: Tensor, cut: int | None) -> torch.Size:
        shape = list(tensor.shape)
        if cut is not None:
            shape[cut] *= self.tensor_size
        return torch.Size(shape)

    @torch.no_grad()
    def _whole(self, tensor: Tensor, cut: int | None) -> Tensor:
        if isinstance(tensor, DTensor):
            if tensor.device != self.root_device:  # parts in host memory travel over the devices
                part = tensor.to_local().to(self.root_device)
                placed = tensor.device_mesh, tensor.placements
                tensor = DTensor.from_local(
                    part, *placed, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            tensor = tensor.full_tensor()
        if cut is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.tensor_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.device_mesh["tensor"].get_group())
        return torch.cat(parts, cut)

    def _part(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return this rank's part of a whole value for a weight, wherever it is."""
        cut = self._cut.get(weight)
        if cut is not None:
            value = value.chunk(self.tensor_size, cut)[self.device_mesh["tensor"].get_local_rank()]
        if not isinstance(weight, DTensor):
            return value
        placed = weight.device_mesh, weight.placements
        value = value.to(self.root_device).contiguous()
        return distribute_tensor(value, *placed, src_data_rank=None).to_local()

    def teardown(self) -> None:
        """Let go of what a fit has used, writers of checkpoints too."""
        super().teardown()
        self.checkpoint_io.teardown()


def _let_go_unless_training(module: Any, inputs: Any, output: Any) -> None:
    """Let weights go that no backward pass will ask for."""
    if not torch.is_grad_enabled():
        module.reshard()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, not copied."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_like(value: Any, weight: Tensor) -> bool:
    """Tell a state that has a number for each of a weight's from a count."""
    return isinstance(value, Tensor) and value.shape == weight.shape
