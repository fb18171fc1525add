"""ZeRO by DeepSpeed: optimizer states, gradients or weights in parts, one on each rank.

The engine is DeepSpeed's; all around it stays as under DDP: our optimizer, Lightning's schedule and
autocast, our own checkpoints. The DeepSpeed config is made from our settings alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from app.model.adapter import reached_weights, unfuse_adapters
from app.process.collectives import run_on_ranks
from app.strategy.deepspeed_config import deepspeed_config
from app.strategy.deepspeed_operators import prepare_operator
from app.strategy.loading import Broadcaster, log_host_memory, peak_host_bytes
from app.strategy.mixin import BuildModel, ShardedTensor, StateTensor, StrategyMixin
from app.strategy.rendezvous import meet_on_loopback
from app.strategy.settings import ZeroConfig

if TYPE_CHECKING:
    import lightning as L


def build_zero(config: ZeroConfig, *, accelerator: str) -> StrategyMixin:
    """Build the strategy of one of ZeRO's stages; on "cpu" too, by gloo."""
    # DeepSpeed looks once, while it is imported.
    os.environ["DS_ACCELERATOR"] = {"gpu": "cuda"}.get(accelerator, accelerator)
    return Zero(config)


class Zero(StrategyMixin, DDPStrategy):
    """DeepSpeed's engine in the processes that DDP would have."""

    # Not Lightning's own DeepSpeedStrategy: that is for GPUs alone, hides the optimizer that was
    # built, casts weights and inputs by rules of its own, and writes DeepSpeed's checkpoints.

    keeps_gradients = False  # the engine takes them away as they come

    def __init__(self, config: ZeroConfig) -> None:
        super().__init__()
        self.zero_config = config
        self.shards_weights = config.stage == 3
        self.fuses_adapters = not self.shards_weights
        self._zero: Any = None
        """DeepSpeed's optimizer, once it is there"""
        self._weights_by_group: list[list[torch.nn.Parameter]] = []
        self._peak_before = 0
        """most bytes that this process had held before it built the model"""

    def setup_distributed(self) -> None:
        """Meet the other ranks as under DDP, and tell DeepSpeed of it."""
        meet_on_loopback(self)
        super().setup_distributed()
        environment = self.cluster_environment
        assert environment is not None
        os.environ |= {
            "RANK": str(self.global_rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
        }
        import deepspeed
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        # It would compile an operator for a minute that nothing but its inference uses.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(self._get_process_group_backend(), verbose=False)

    def build_model(self, build: BuildModel) -> Any:
        """Build the model, its weights on the first rank alone where each will hold parts."""
        if self.zero_config.quantized_weights or self.zero_config.quantized_gradients:
            run_on_ranks(self._prepare_quantizer, here=self.local_rank == 0)
        if not self.shards_weights:
            return build()
        self._peak_before = peak_host_bytes()
        model = build(on_meta=self.global_rank != 0)
        unfuse_adapters(model)
        return model

    def _prepare_quantizer(self) -> None:
        """Have compiled what would be compiled by all ranks at once when it is first used."""
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("QuantizerBuilder")
        prepare_operator(builder, "type strategy=zero3_hpz")

    def setup(self, trainer: L.Trainer) -> None:
        """Make the optimizer, spread the weights, and hand both to DeepSpeed's engine."""
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        # Before the weights are spread: its groups go by the shapes of whole ones.
        self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        module: Any = self.lightning_module
        optimizer: Any = self.optimizers[0]
        self._weights_by_group = [list(group["params"]) for group in optimizer.param_groups]
        trained = [weight for weights in self._weights_by_group for weight in weights]
        config = deepspeed_config(
            self.zero_config,
            on_gpu=self.root_device.type == "cuda",
            dtype=trained[0].dtype,
            num_trained=sum(weight.numel() for weight in trained),
            ranks_per_node=self.num_processes,
            accumulation=trainer.accumulate_grad_batches,
            max_norm=trainer.gradient_clip_val or 0.0,
        )
        if self.shards_weights:
            self._spread_weights(module, config)
        self.model_to_device()
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=trained, optimizer=optimizer, config=config
        )
        # The engine clears gradients itself, also those that it keeps for good.
        optimizer.zero_grad = lambda *args, **kwargs: None
        engine.set_gradient_accumulation_boundary(True)
        self.model, self._zero = engine, engine.optimizer
        if self.shards_weights:
            for layer, weight in reached_weights(module):
                deepspeed.zero.register_external_parameter(layer, weight)

    def _spread_weights(self, module: torch.nn.Module, config: dict[str, Any]) -> None:
        """Give every rank its parts of what the first one has read, a weight at a time."""
        import deepspeed

        first = Broadcaster(self.root_device, self.world_size, self.world_size)
        first.check_same(module)
        for owner in module.modules():
            first.hand_unlearned(owner)
        deepspeed.zero.Init(
            module=_OneByOne(list(module.parameters()), self.root_device),
            config_dict_or_path=config,
        )
        log_host_memory(self._peak_before, reads_here=first.reads_here)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the module's training step through the engine."""
        return self._through_engine("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the module's validation step through the engine."""
        return self._through_engine("validation_step", *args, **kwargs)

    def _through_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        module: Any = self.lightning_module

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Opened inside: the engine turns an autocast off that is open around it.
            with self.precision_plugin.forward_context():
                return getattr(module, method)(*args, **kwargs)

        module.forward = forward
        try:
            return self.model(*args, **kwargs)
        finally:
            del module.forward

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Let the engine go backward: it spreads the gradients as they come."""
        module, engine = self.lightning_module, self.model
        assert module is not None
        assert engine is not None
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        engine.backward(loss, scale_wrt_gas=False)
        return self.precision_plugin.post_backward(loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Mark micro-batches that no optimizer step follows."""
        engine = self.model
        assert engine is not None
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step our optimizer within the engine, which gives it the gradients of its parts."""
        module, engine = self.lightning_module, self.model
        assert module is not None
        assert engine is not None
        result = closure()
        self.precision_plugin._after_closure(module, optimizer)
        engine.step()
        return result

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Return the global norm; the engine clips by it as it steps."""
        from deepspeed.accelerator import get_accelerator

        if self._steps_in_host_memory:
            # Gradients are still on their way there: the engine waits for them in its own step.
            get_accelerator().synchronize()
        squares = torch.zeros((), device=self.root_device)
        for gradient in self._gradients():
            squares += gradient.float().square().sum().to(self.root_device)
        torch.distributed.all_reduce(squares)
        # The fused AdamW would read a flag of the device in host memory before it has come there;
        # the other way round it waits.
        return squares.sqrt().to("cpu" if self._steps_in_host_memory else self.root_device)

    def _gradients(self) -> Iterator[Tensor]:
        """Go over the gradients of this rank's parts, averaged over the ranks."""
        if self._steps_in_host_memory:
            yield from (flat.grad for flat in self._flats if flat.grad is not None)
        else:
            yield from (part for parts in self._zero.averaged_gradients.values() for part in parts)

    @property
    def _steps_in_host_memory(self) -> bool:
        return self.zero_config.offload_optimizer != "none"

    @property
    def _flats(self) -> list[Tensor]:
        """What our optimizer moves: this rank's parts of weights, one behind the other."""
        flats: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat
            if self.shards_weights
            else self._zero.single_partition_of_fp32_groups
        )
        return flats

    def weights_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """Return what was in the groups before the engine put its parts there."""
        return self._weights_by_group

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        """Return a weight, or how to gather it."""
        if not _is_spread(weight):
            return weight.detach()
        piece = self._piece(weight)
        return self._scattered(weight, piece.flat.dtype, lambda: piece.flat)

    def optimizer_dtype(self, weight: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype of this rank's parts."""
        return self._piece(weight).flat.dtype

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return how to gather the states of a weight, and its step."""
        states = optimizer.state.get(self._piece(weight).flat, {})
        return {
            key: self._scattered(weight, value.dtype, partial(states.get, key))
            if value.ndim
            else value
            for key, value in states.items()
        }

    def _scattered(
        self, weight: torch.nn.Parameter, dtype: torch.dtype, flat: Callable[[], Any]
    ) -> ShardedTensor:
        return ShardedTensor(_shape(weight), dtype, partial(self._gather, weight, flat))

    @torch.no_grad()
    def _gather(self, weight: torch.nn.Parameter, flat: Callable[[], Tensor]) -> Tensor:
        """Put a whole together out of every rank's part of it, bit for bit."""
        piece, own = self._piece(weight), flat()
        whole = torch.zeros(_shape(weight), dtype=own.dtype, device=self.root_device)
        piece.of(whole).copy_(own[piece.at : piece.at + piece.length])
        # As bytes: zeros of the others leave them as they are, also the sign of a zero.
        torch.distributed.all_reduce(whole.view(torch.uint8))
        return whole

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a whole value into a weight, which only the first rank has before it is spread."""
        if not _is_spread(weight):
            if not weight.is_meta:
                weight.data.copy_(value)
            return
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.copy_(value)
        piece = self._piece(weight)
        piece.flat.data[piece.at : piece.at + piece.length].copy_(piece.of(value))

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        room: Callable[[str, Tensor], Tensor],
    ) -> None:
        """Cut this rank's part out of whole states."""
        piece = self._piece(weight)
        kept = optimizer.state[piece.flat]
        for key, value in states.items():
            if not value.ndim:
                kept[key] = room(key, value).copy_(value)
                continue
            if key not in kept:
                kept[key] = torch.zeros_like(piece.flat, dtype=value.dtype)
            kept[key][piece.at : piece.at + piece.length].copy_(piece.of(value))

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Gather a weight."""
        if not _is_spread(weight):
            return weight.detach()
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def _piece(self, weight: torch.nn.Parameter) -> _Piece:
        """Find this rank's part of a weight that trains."""
        zero, rank = self._zero, self.global_rank
        if self.shards_weights:
            group, at, size = zero.grad_position[zero.get_param_id(weight)]
            return _Piece(self._flats[group], at, rank * size, weight.ds_numel, size)
        group = next(
            number
            for number, weights in enumerate(zero.bit16_groups)
            if any(other is weight for other in weights)
        )
        # All weights of a group lie one behind the other, and every rank has an equal run of that.
        size = int(zero.partition_size[group])
        begin = weight.storage_offset() - zero.bit16_groups_flat[group].storage_offset()
        start = max(rank * size - begin, 0)
        at = max(begin - rank * size, 0)
        return _Piece(self._flats[group], at, start, weight.numel(), size - at)

    def teardown(self) -> None:
        """Leave a model that is whole as DDP would, and one that is spread where it is."""
        if not self.shards_weights:
            if self._zero is not None:
                self.model.destroy()
            self.model = self.lightning_module
            super().teardown()
            return
        # What is saved and measured after the training still goes through the engine's hooks.
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a rank keeps what part of a weight."""

    flat: Tensor
    """what the optimizer moves"""
    at: int
    """where the part begins in it"""
    start: int
    """where it begins in the weight, counted in elements"""
    numel: int
    """of the whole weight"""
    room: int
    """elements that the rank has room for"""

    @property
    def length(self) -> int:
        return max(0, min(self.room, self.numel - self.start))

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a whole, or of a state of one, as a view."""
        return whole.view(-1)[self.start : self.start + self.length]


class _OneByOne(torch.nn.Module):
    """Parameters of a model of which only one that is not spread yet is on the device at a time."""

    def __init__(self, weights: list[torch.nn.Parameter], device: torch.device) -> None:
        super().__init__()
        self._weights, self._device = tuple(weights), device

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Make room for each as its turn comes, on ranks that have not read it."""
        for weight in self._weights:
            if weight.is_meta:
                room = torch.nn.Parameter(
                    torch.empty_like(weight, device=self._device),
                    requires_grad=weight.requires_grad,
                )
                torch.utils.swap_tensors(weight, room)  # the optimizer knows it by its identity
            yield weight


def _is_spread(weight: Tensor) -> bool:
    return "ds_id" in vars(weight)


def _shape(weight: Any) -> torch.Size:
    shape: torch.Size = weight.ds_shape if _is_spread(weight) else weight.shape
    return shape
