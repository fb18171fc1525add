"""FSDP2, tensor parallelism and expert parallelism.

One device mesh with the dimensions (replicate, shard, tensor): groups of ranks that each hold a
full copy of the weights, ranks that shard one copy, and ranks that split each layer's matrices and
see the same data. Experts have a mesh of their own (shard, expert): ranks that shard the same
experts, and neighbours that hold different ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

from app.model.head import LossHead
from app.model.layers import decoder_layers
from app.model.quantization import bind_scales
from app.strategy.disk_states import AdamWOnDisk, DiskTensor
from app.strategy.loading import Broadcaster, log_host_memory, peak_host_bytes
from app.strategy.mixin import (
    Allocate,
    BuildModel,
    ShardedTensor,
    StateTensor,
    StrategyMixin,
    clip_in_step,
    clips_in_step,
    local,
)
from app.strategy.rendezvous import connect_ranks
from app.strategy.settings import MAX_UNSHARDED_SHARE, TIMEOUT, FsdpConfig
from app.strategy.tensor_parallel import ExpertParallel, SplitWeight, TensorParallel, experts_of

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COUNTS = "counts below are per rank"


class Fsdp(StrategyMixin, ModelParallelStrategy):
    """FSDP2 and tensor parallelism on top of Lightning's ModelParallelStrategy.

    Uses the private `_device_mesh`, `_setup_distributed` and `_timeout` of Lightning 2.6: its mesh
    has two dimensions, and it has no public way to set another one.
    """

    shards_weights = True

    def __init__(self, config: FsdpConfig) -> None:
        super().__init__(timeout=TIMEOUT)
        self.config = config
        self.fuses_adapters = config.tensor_parallel_size == 1
        self.accumulates_in_products = config.sync_each_micro_batch is False
        self.model_root: Any = None
        self._accumulates_unsharded = False
        """whether gradients stay unsharded between the micro-batches of a step"""
        self._splits: dict[torch.nn.Parameter, SplitWeight] = {}
        """weights that tensor or expert parallelism has split"""
        self._partial_grads: set[torch.nn.Parameter] = set()
        """replicated weights whose gradients are partial sums under tensor parallelism"""
        self._owners: dict[torch.nn.Module, FSDPModule] = {}
        """FSDP module that gathers the weights of a module"""
        self._expert_mesh: DeviceMesh
        self._experts: set[torch.nn.Module] = set()
        """modules of which each rank holds a part of the experts"""

    # Ranks

    @property
    def tensor_size(self) -> int:
        """Number of ranks that split each matrix."""
        return self.config.tensor_parallel_size or self.num_processes

    @property
    def num_data_ranks(self) -> int:
        """Number of groups with different rows: tensor parallel or context parallel ones."""
        return self._stage_ranks // (self.tensor_size * self.context_size)

    @property
    def data_rank(self) -> int:
        """Index of this rank's group among those with different rows."""
        return self.global_rank % self._stage_ranks // (self.tensor_size * self.context_size)

    @property
    def _stage_ranks(self) -> int:
        """Number of ranks that hold the same stages, or the whole model."""
        return self.world_size // self.pipeline_size

    @property
    def num_averaged_ranks(self) -> int:
        """Number of replicas times shards; local SGD averages the former in its own steps."""
        return self._stage_ranks // self.tensor_size

    @property
    def num_loss_copies(self) -> int:
        """Number of ranks of a tensor parallel group, which all compute the whole loss."""
        return self.tensor_size

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False, as for other strategies: `configure_model` has already placed the weights."""
        return False

    def setup_environment(self) -> None:
        """Connect the ranks; `build_model` sets up the mesh, after ranks have compared settings."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        connect_ranks(self)
        self._setup_distributed()

    def _init_mesh(self) -> None:
        replicas, shards = self._divide()
        sizes = {"replicate": replicas, "shard": shards, "tensor": self.tensor_size}
        if self.pipeline_size > 1:
            sizes = {"pipe": self.pipeline_size} | sizes
        self._device_mesh = self._make_mesh(sizes)
        if (split := self.config.expert_parallel_size) > 1:
            self._expert_mesh = self._make_mesh({"shard": shards // split, "expert": split})

    def _make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        mesh = init_device_mesh(
            self.root_device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        # NCCL's default timeout is 10 minutes. Private, tested with torch 2.13: a mesh creates its
        # own groups and takes no timeout.
        for group in mesh.get_all_groups():
            _set_pg_timeout(self._timeout, group)
        return mesh

    @property
    def _split_group(self) -> dist.ProcessGroup:
        """The ranks that hold parts of the split weights."""
        if self.config.expert_parallel_size > 1:
            return self._expert_mesh.get_group("expert")
        return self.device_mesh.get_group("tensor")

    def _divide(self) -> tuple[int, int]:
        """Return the number of replicas, and of the ranks that shard each (`check_layout`)."""
        groups = self._stage_ranks // self.tensor_size
        replicas = self.num_nodes if self.config.replicas is None else self.config.replicas
        if not self.config.shards_data_parallel:
            replicas = groups
        return replicas, groups // replicas

    # Model

    def build_model(self, build: BuildModel) -> Any:
        """Build the model; ranks that read weights broadcast them, sharded layer by layer."""
        self._init_mesh()
        model = self._load(build, splits=True)
        # Counted only now: all ranks must agree, and quantized weights have the same packed size on
        # every rank only after loading.
        num_trained = sum(w.numel() for w in model.parameters() if w.requires_grad)
        num_weights = sum(w.numel() for w in model.parameters())
        each = self.config.sync_each_micro_batch
        is_small = num_trained <= MAX_UNSHARDED_SHARE * num_weights
        self._accumulates_unsharded = is_small if each is None else not each
        self.model_root = model
        return model

    def build_frozen(self, build: BuildModel) -> Any:
        """Build another model, which nothing trains, sharded as the trained one."""
        return self._load(build, splits=False)

    def release(self, model: Any) -> None:
        """Forget a model of `build_frozen`."""
        for module in model.modules():
            self._owners.pop(module, None)

    def _load(self, build: BuildModel, *, splits: bool) -> Any:
        """Build and shard a model; `splits`: its layers or experts also by matrix or number."""
        before = peak_host_bytes()
        broadcaster = Broadcaster(self.root_device, self.world_size, self.num_processes)
        model = build(on_meta=not broadcaster.reads_here, on_host=True, device=self.root_device)
        broadcaster.check_same(model)
        names = decoder_layers(model, "model.wrap_class=NAME")
        parallel = self._parallel(model, names) if splits else None
        for layer in [model.get_submodule(name) for name in names]:
            broadcaster.broadcast_quantization(layer)
            broadcaster.broadcast(layer.modules())
            if parallel:
                parallel.split(layer)
            if isinstance(parallel, ExpertParallel):
                for experts in experts_of(layer):
                    self._experts.add(experts)
                    self._shard(experts)
            self._shard(layer)
            bind_scales(layer)
        inner = {module for name in names for module in model.get_submodule(name).modules()}
        broadcaster.broadcast_quantization(model)
        broadcaster.broadcast(module for module in model.modules() if module not in inner)
        head, ends = model.get_output_embeddings(), _untied_ends(model)
        if isinstance(parallel, TensorParallel) and head in ends:
            parallel.split_head(head)
        for module in ends:  # the largest weights, gathered only while in use
            trains = any(weight.requires_grad for weight in module.parameters())
            if isinstance(module, LossHead) and not trains:
                module.register_forward_hook(_detach_empty_output, prepend=True)
            # The backward pass of a trained head directly follows its forward pass.
            self._shard(module, reshard_after_forward=not (trains and module is head))
        self._shard(model)
        if parallel:
            self._splits = {getattr(split.module, split.name): split for split in parallel.splits}
            self._partial_grads = {w for m in parallel.partial_grads for w in m.parameters()}
        log_host_memory(before, reads_here=broadcaster.reads_here)
        return model

    def _parallel(self, model: Any, names: Sequence[str]) -> TensorParallel | ExpertParallel | None:
        """Return what splits the layers `names` of a model, or their experts."""
        if (size := self.config.expert_parallel_size) > 1:
            log.info("expert parallel: experts are split over %d ranks; %s", size, _COUNTS)
            return ExpertParallel(model, self._split_group)
        if self.tensor_size > 1:
            log.info(
                "tensor parallel: matrices are split over %d ranks; %s", self.tensor_size, _COUNTS
            )
            return TensorParallel(model, self._split_group, names)
        return None

    def _shard(self, module: Any, *, reshard_after_forward: bool = True) -> None:
        """Shard a module's weights, except those of already sharded submodules."""
        mesh, offloads = self._gradient_mesh, self.config.offload_parameters
        if mesh.size() == 1 and not offloads:
            return
        if module in self._experts:
            mesh = self._expert_mesh["shard"]
        owned = [child for child in module.modules() if child not in self._owners]
        options: dict[str, Any] = {}
        is_whole = self.device_mesh["shard"].size() == 1 and not offloads
        if is_whole or not (self.config.reshard_after_forward and reshard_after_forward):
            options["reshard_after_forward"] = False
        if self.pipeline_size > 1:  # weights of other stages stay on meta
            options["ignored_params"] = {each for each in module.parameters() if each.is_meta}
        if offloads:
            options["offload_policy"] = CPUOffloadPolicy()
        if self._computes_in_bf16(module):
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=_DTYPES[self.config.reduce_dtype],
                cast_forward_inputs=False,
            )
        fully_shard(module, mesh=mesh, **options)
        module.register_forward_hook(_reshard_without_grad)
        self._owners |= dict.fromkeys(owned, module)

    @property
    def _gradient_mesh(self) -> DeviceMesh:
        """The ranks over which FSDP averages gradients in every step."""
        mesh = self.device_mesh
        replicates = mesh["replicate"].size() > 1
        return mesh["replicate", "shard"] if replicates else mesh["shard"]

    def _computes_in_bf16(self, module: torch.nn.Module) -> bool:
        """Return whether FSDP should gather a module's weights in bf16.

        Otherwise autocast would keep a bf16 copy of all weights of a layer for the backward pass,
        and an fp32 embedding would make the hidden states fp32.
        """
        own = {weight.dtype for weight in module.parameters() if not isinstance(weight, DTensor)}
        return own == {torch.float32} and self.precision_plugin.precision == "bf16-mixed"

    def model_to_device(self) -> None:
        """Do nothing: `build_model` has placed the weights."""

    @contextmanager
    def gathered(self, module: torch.nn.Module) -> Iterator[None]:
        """Gather a module's own weights; all ranks enter this together."""
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
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # Step

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients locally if they are small enough unsharded, else sharded.

        Sharded gradients are reduce-scattered each time, but not all-reduced between replicas.
        Weights that stay gathered after a forward pass do so until the step's last backward pass.
        """
        root = self.model_root
        if not isinstance(root, FSDPModule):
            yield
            return
        set_sync = root.set_requires_all_reduce
        if self._accumulates_unsharded:
            set_sync = root.set_requires_gradient_sync
        set_sync(False)
        root.set_reshard_after_backward(self.config.reshard_after_forward)
        try:
            yield
        finally:
            set_sync(True)
            root.set_reshard_after_backward(True)

    def gradient(self, weight: torch.nn.Parameter) -> Tensor | None:
        return None if weight.grad is None else local(weight.grad)

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip by the norm over the shards of all ranks; return the norm."""
        if self.tensor_size > 1:
            self._sync_replicated_gradients(optimizer)
        shards = []
        by_copies: dict[int, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    shard = local(weight.grad)
                    shards.append(shard)
                    by_copies.setdefault(self._num_copies(weight), []).append(shard)
        squares = torch.zeros((), device=self.root_device)
        for num_copies, replicated in by_copies.items():
            norm = torch.nn.utils.get_total_norm(replicated).to(self.root_device, torch.float32)
            squares += norm.square() / num_copies
        self._sum_over_ranks(squares)
        norm = squares.sqrt()
        if clips_in_step(optimizer):
            clip_in_step(optimizer, norm, max_norm)
        elif shards:
            norm = norm.to(shards[0].device)
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(shards, scale)
        return norm

    def _sum_over_ranks(self, squares: Tensor) -> None:
        """Sum this rank's part of the squared norm over all ranks that step together."""
        dist.all_reduce(squares)

    def _sync_replicated_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Make gradients of replicated weights equal on all ranks of a tensor parallel group.

        Each rank has computed them, but kernels may round differently and weights would diverge.
        """
        group = self.device_mesh["tensor"].get_group()
        for weight in (w for param_group in optimizer.param_groups for w in param_group["params"]):
            if weight.grad is None or weight in self._splits:
                continue
            if weight in self._partial_grads:
                dist.all_reduce(local(weight.grad), group=group)
            else:
                dist.broadcast(local(weight.grad), group=group, group_src=0)

    def _num_copies(self, weight: Tensor) -> int:
        """Return the number of ranks that hold the same shard of a weight as this rank."""
        num_parts = self._split_group.size() if weight in self._splits else 1
        if isinstance(weight, DTensor):
            num_parts *= weight.device_mesh.shape[-1]
        return self._stage_ranks // num_parts

    # State

    def full_tensor(self, weight: Tensor) -> Tensor:
        return self._full(weight.detach(), self._splits.get(weight))

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return a weight for a checkpoint; a ShardedTensor if the weight is sharded or split."""
        return self._as_state(weight.detach(), self._splits.get(weight))

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        split, found = self._splits.get(weight), {}
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, DiskTensor):
                gather = partial(self._gather_from_disks, weight, value, split)
                value = ShardedTensor(self._full_shape(weight, split), value.dtype, gather)
            elif isinstance(value, Tensor) and value.shape == weight.shape:  # no count of steps
                value = self._as_state(value, split)
            found[key] = value
        return found

    def _gather_from_disks(
        self, weight: Tensor, value: DiskTensor, split: SplitWeight | None
    ) -> Tensor:
        """Gather a state of which each rank has the part of its shard of `weight` on its disk."""
        part = value.gather()
        if isinstance(weight, DTensor):
            part = self._on_device(part, weight)
        return self._full(part, split)

    def _on_device(self, part: Tensor, like: DTensor) -> DTensor:
        """Return a tensor that is sharded like another, of which this rank has `part`."""
        return DTensor.from_local(
            part.to(self.root_device),
            *(like.device_mesh, like.placements),
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy this rank's shard of a full tensor into a weight."""
        local(weight.detach()).copy_(self._shard_of(weight, value))

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        allocate: Allocate,
    ) -> None:
        """Restore this rank's shards of full optimizer states."""
        shape = self._full_shape(weight, self._splits.get(weight))
        for key, value in states.items():
            is_like = value.shape == shape
            part = self._shard_of(weight, value) if is_like else value
            if is_like and not isinstance(optimizer, AdamWOnDisk):
                state = torch.zeros_like(weight, dtype=value.dtype, requires_grad=False)
                local(state).copy_(part)
            else:
                state = allocate(key, value).copy_(part)
            optimizer.state[weight][key] = state

    def _as_state(self, tensor: Tensor, split: SplitWeight | None) -> StateTensor:
        if not isinstance(tensor, DTensor) and split is None:
            return tensor
        gather = partial(self._full, tensor, split)
        return ShardedTensor(self._full_shape(tensor, split), tensor.dtype, gather)

    def _full_shape(self, tensor: Tensor, split: SplitWeight | None) -> torch.Size:
        if split is None:
            return tensor.shape
        return split.full_shape(tensor.shape, self._split_group.size())

    @torch.no_grad()
    def _full(self, tensor: Tensor, split: SplitWeight | None) -> Tensor:
        if isinstance(tensor, DTensor):
            if tensor.device != self.root_device:  # offloaded shards are gathered on the devices
                tensor = self._on_device(tensor.to_local(), tensor)
            tensor = tensor.full_tensor()
        if split is None:
            return tensor
        group = self._split_group
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return split.join(parts)

    def _shard_of(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return this rank's shard of `value`, a full tensor of the weight; it may be on a GPU."""
        if (split := self._splits.get(weight)) is not None:
            value = split.part(value, self._split_group.rank(), self._split_group.size())
        if not isinstance(weight, DTensor):
            return value
        placement = weight.device_mesh, weight.placements
        value = value.to(self.root_device).contiguous()
        return distribute_tensor(value, *placement, src_data_rank=None).to_local()


def _untied_ends(model: Any) -> list[torch.nn.Module]:
    """Return the embedding and the head, each unless it shares a weight with another module."""
    if model.config.is_encoder_decoder:
        return []  # encoder and decoder call the same embedding
    owners = Counter(
        id(weight)
        for module in model.modules()
        for _, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return [end for end in ends if all(owners[id(weight)] == 1 for weight in end.parameters())]


def _detach_empty_output(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Detach the empty output of a head that has computed the loss and its gradients.

    Otherwise FSDP would gather a frozen head again for a backward pass that has nothing to do.
    """
    return output if output.numel() else output.detach()


def _reshard_without_grad(module: Any, inputs: Any, output: Any) -> None:
    """Reshard the weights after a forward pass that no backward pass follows."""
    if not torch.is_grad_enabled():
        module.reshard()
