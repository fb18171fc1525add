"""DeepSpeed ZeRO: optimizer states, gradients or weights sharded over the ranks.

The engine is DeepSpeed's. Optimizer, schedule, autocast and checkpoints are the same as under DDP.
Operators that DeepSpeed compiles on first use are built before, on one rank, with a log line.

Reads private attributes of DeepSpeed's optimizers (flat groups, positions, averaged gradients),
tested with 0.19.8. The public `safe_get_full_*` functions do not allow bit-identical checkpoints:
they cast to fp32, sum shards as floats (which loses the sign of zeros), and return no states before
the first step.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from app.model.adapter import external_parameters, unfuse_adapters
from app.process.collectives import run_on_ranks
from app.strategy.deepspeed_config import deepspeed_config
from app.strategy.loading import Broadcaster, log_host_memory, peak_host_bytes
from app.strategy.mixin import Allocate, BuildModel, ShardedTensor, StateTensor, StrategyMixin
from app.strategy.rendezvous import connect_ranks
from app.strategy.settings import TIMEOUT, ZeroConfig
from common.errors import UserError

if TYPE_CHECKING:
    import lightning as L

log = logging.getLogger(__name__)

_LOCK = "lock"
"""name of torch's lock file in an operator's build folder; torch waits for it without a timeout"""
STARTUP_SECONDS = 10.0
"""time after which a running build must have started its compiler"""


def check_zero_config(config: Mapping[str, Any]) -> None:
    """Validate `zero_optimization` by DeepSpeed's config model; UserError names the full keys."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except ValidationError as error:
        raise UserError(
            f"strategy.config.zero_optimization.{'.'.join(map(str, problem['loc']))} is "
            f"{problem['input']!r}: {problem['msg']}; type a value that DeepSpeed accepts, or "
            "remove the key"
            for problem in error.errors()
        ) from error


class Zero(StrategyMixin, DDPStrategy):
    """DeepSpeed's engine, in processes that are set up as for DDP."""

    # Not Lightning's DeepSpeedStrategy (2.6): it needs GPUs, hides our optimizer, casts weights and
    # inputs by its own rules, and writes DeepSpeed's checkpoint format.

    keeps_gradients = False  # the engine takes them during the backward pass

    def __init__(self, config: ZeroConfig, accumulation: int = 1) -> None:
        """`accumulation`: micro-batches of an optimizer step."""
        super().__init__(timeout=TIMEOUT)
        self.zero_config, self._accumulation = config, accumulation
        self.shards_weights = config.stage == 3
        self.gathers_by_module, self.fuses_adapters = self.shards_weights, not self.shards_weights
        self._zero: Any = None
        """DeepSpeed's optimizer, after setup"""
        self._weights_by_group: list[list[torch.nn.Parameter]] = []
        self._peak_before = 0
        """peak memory of this process before it built the model, in bytes, for the log"""

    def setup_distributed(self) -> None:
        """Connect the ranks as under DDP, and initialize DeepSpeed."""
        connect_ranks(self)
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
        # DeepSpeed 0.19 would compile, for a minute, an operator that only its inference uses.
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(self._get_process_group_backend(), verbose=False)

    def build_model(self, build: BuildModel) -> Any:
        """Build the model; if weights are sharded, only rank 0 reads them."""
        if self.zero_config.quantized_weights or self.zero_config.quantized_gradients:
            run_on_ranks(self._prepare_quantizer, runs=self.local_rank == 0)
        if not self.shards_weights:
            return super().build_model(build)
        self._peak_before = peak_host_bytes()
        model = build(on_meta=self.global_rank != 0, on_host=True, device=self.root_device)
        unfuse_adapters(model)
        return model

    def _prepare_quantizer(self) -> None:
        """Compile DeepSpeed's quantizer on one rank instead of on all ranks at its first use."""
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("QuantizerBuilder")
        prepare_operator(builder, "type strategy=zero3_hpz")

    def setup(self, trainer: L.Trainer) -> None:
        """Build the optimizer, shard the weights and pass both to DeepSpeed's engine."""
        import deepspeed

        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        # Before sharding, since parameter groups depend on full shapes.
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
            accumulation=self._accumulation,
            max_norm=trainer.gradient_clip_val or 0.0,
        )
        check_zero_config(config)
        if self.shards_weights:
            self._shard_weights(module, config)
        self.model_to_device()
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=trained, optimizer=optimizer, config=config
        )
        # The engine clears gradients and its persistent buffers itself.
        optimizer.zero_grad = lambda *args, **kwargs: None
        engine.set_gradient_accumulation_boundary(True)
        self.model, self._zero = engine, engine.optimizer
        if self.shards_weights:
            for layer, weight in external_parameters(module):
                deepspeed.zero.register_external_parameter(layer, weight)

    def _shard_weights(self, module: torch.nn.Module, config: dict[str, Any]) -> None:
        import deepspeed

        broadcaster = Broadcaster(self.root_device, self.world_size, self.world_size)
        broadcaster.check_same(module)
        for owner in module.modules():
            broadcaster.broadcast_buffers(owner)
        deepspeed.zero.Init(
            module=_Materializing(list(module.parameters()), self.root_device),
            config_dict_or_path=config,
        )
        log_host_memory(self._peak_before, reads_here=broadcaster.reads_here)

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        if not self.shards_weights:
            return super().gathered(module)
        import deepspeed

        gather: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(module.parameters(recurse=False))
        )
        return gather

    def set_leaf_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Mark modules as ZeRO-3 leaves, whose weights are gathered with those of all submodules.

        ZeRO-3 otherwise gathers at each call of a submodule, and a mixer calls its submodules once
        per group of documents: a different number of times on each rank, which would deadlock.
        """
        from deepspeed.utils import set_z3_leaf_module

        if not self.shards_weights or not (leaves := list(modules)):
            return
        for module in leaves:
            set_z3_leaf_module(module, True)
        # Private in 0.19.8: publicly, hooks are registered again only when the engine compiles.
        offload = self._zero.parameter_offload
        offload._remove_module_hooks()
        offload.setup_zero_stage3_hooks()
        for module in leaves:
            hook = module.register_forward_pre_hook(_release_after_backward, with_kwargs=True)
            offload.backward_hooks.append(hook)

    def run_backward(self, loss: Tensor) -> None:
        """Run the engine's backward pass, which reduces gradients as they are computed."""
        assert self.model is not None
        self.model.backward(loss, scale_wrt_gas=False)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Tell the engine that no optimizer step follows the micro-batches in this context."""
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
        """Step through the engine, which passes this rank's gradients to our optimizer."""
        module, engine = self.lightning_module, self.model
        assert module is not None
        assert engine is not None
        result = closure()
        # Calls the hooks around gradient clipping, as Lightning 2.6's own DeepSpeed plugin does.
        self.precision_plugin._after_closure(module, optimizer)
        engine.step()
        return result

    @torch.no_grad()
    def clip(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Return the global gradient norm; the engine itself clips in its step."""
        from deepspeed.accelerator import get_accelerator

        if self._steps_in_host_memory:
            # Gradients are still being copied; the engine would wait for them only in its step.
            get_accelerator().synchronize()
            gradients = [flat.grad for flat in self._flats if flat.grad is not None]
        else:
            gradients = [part for each in self._zero.averaged_gradients.values() for part in each]
        squares = torch.zeros((), device=self.root_device)
        for gradient in gradients:
            squares += gradient.float().square().sum().to(self.root_device)
        torch.distributed.all_reduce(squares)
        # A fused AdamW on the host would read a flag in device memory before it has been copied.
        return squares.sqrt().to("cpu" if self._steps_in_host_memory else self.root_device)

    @property
    def _steps_in_host_memory(self) -> bool:
        return self.zero_config.offload_optimizer != "none"

    @property
    def _flats(self) -> list[Tensor]:
        """The tensors that our optimizer steps: this rank's shards, concatenated per group."""
        flats: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat
            if self.shards_weights
            else self._zero.single_partition_of_fp32_groups
        )
        return flats

    def weights_by_group(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """Return the weights of each group as it was before the engine put in its flat tensors."""
        return self._weights_by_group

    def weight_state(self, weight: torch.nn.Parameter) -> StateTensor:
        if not _is_sharded(weight):
            return weight.detach()
        shard = self._shard_of(weight)
        return self._sharded(weight, shard.flat.dtype, lambda: shard.flat)

    def optimizer_dtype(self, weight: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype of this rank's shards."""
        return self._shard_of(weight).flat.dtype

    def optimizer_state_of(
        self, optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter
    ) -> dict[str, Any]:
        """Return the optimizer state of a weight: its step, and ShardedTensors."""
        states = optimizer.state.get(self._shard_of(weight).flat, {})
        return {
            key: self._sharded(weight, value.dtype, partial(states.get, key))
            if value.ndim
            else value
            for key, value in states.items()
        }

    def _sharded(
        self, weight: torch.nn.Parameter, dtype: torch.dtype, flat: Callable[[], Any]
    ) -> ShardedTensor:
        return ShardedTensor(_shape(weight), dtype, partial(self._gather, weight, flat))

    @torch.no_grad()
    def _gather(self, weight: torch.nn.Parameter, flat: Callable[[], Tensor]) -> Tensor:
        shard, local = self._shard_of(weight), flat()
        full = torch.zeros(_shape(weight), dtype=local.dtype, device=self.root_device)
        shard.of(full).copy_(local[shard.at : shard.at + shard.length])
        # Summed as bytes: the other ranks' zeros then keep every bit, also the sign of a zero.
        torch.distributed.all_reduce(full.view(torch.uint8))
        return full

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a full tensor into a weight; before sharding, only rank 0 has the weight."""
        if not _is_sharded(weight):
            if not weight.is_meta:
                weight.data.copy_(value)
            return
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.copy_(value)
        shard = self._shard_of(weight)
        shard.flat.data[shard.at : shard.at + shard.length].copy_(shard.of(value))

    def restore_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        weight: torch.nn.Parameter,
        states: Mapping[str, Tensor],
        allocate: Allocate,
    ) -> None:
        """Restore this rank's shards of full states."""
        shard = self._shard_of(weight)
        own = optimizer.state[shard.flat]
        for key, value in states.items():
            if not value.ndim:
                own[key] = allocate(key, value).copy_(value)
                continue
            if key not in own:
                own[key] = torch.zeros_like(shard.flat, dtype=value.dtype)
            own[key][shard.at : shard.at + shard.length].copy_(shard.of(value))

    def full_tensor(self, weight: Tensor) -> Tensor:
        if not _is_sharded(weight):
            return weight.detach()
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def _shard_of(self, weight: torch.nn.Parameter) -> _Shard:
        zero, rank = self._zero, self.global_rank
        if self.shards_weights:
            group, at, size = zero.grad_position[zero.get_param_id(weight)]
            return _Shard(self._flats[group], at, rank * size, weight.ds_numel, size)
        group = next(
            number
            for number, weights in enumerate(zero.bit16_groups)
            if any(other is weight for other in weights)
        )
        # The weights of a group are concatenated; each rank holds an equal slice of the result.
        size = int(zero.partition_size[group])
        begin = weight.storage_offset() - zero.bit16_groups_flat[group].storage_offset()
        start = max(rank * size - begin, 0)
        at = max(begin - rank * size, 0)
        return _Shard(self._flats[group], at, start, weight.numel(), size - at)

    def teardown(self) -> None:
        """Tear down; the engine's hooks on sharded weights stay, for saving and evaluation."""
        engine = self.model
        if not self.shards_weights and self._zero is not None:
            engine.destroy()
        super().teardown()
        if self.shards_weights:
            self.model = engine


@dataclass(frozen=True, slots=True)
class _Shard:
    flat: Tensor
    """tensor that the optimizer steps"""
    at: int
    """start of the shard in `flat`"""
    start: int
    """start of the shard in the flattened weight"""
    numel: int
    """number of elements of the full weight"""
    capacity: int
    """largest number of the weight's elements that fit this rank's slice"""

    @property
    def length(self) -> int:
        return max(0, min(self.capacity, self.numel - self.start))

    def of(self, full: Tensor) -> Tensor:
        return full.view(-1)[self.start : self.start + self.length]


class _Materializing(torch.nn.Module):
    """A module whose parameters are materialized on the device one at a time, as ZeRO-3 shards."""

    def __init__(self, weights: list[torch.nn.Parameter], device: torch.device) -> None:
        super().__init__()
        self._weights, self._device = tuple(weights), device

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Yield each parameter, after allocating it on ranks that have not read it."""
        for weight in self._weights:
            if weight.is_meta:
                allocated = torch.nn.Parameter(
                    torch.empty_like(weight, device=self._device),
                    requires_grad=weight.requires_grad,
                )
                torch.utils.swap_tensors(weight, allocated)  # the optimizer refers to this object
            yield weight


def _is_sharded(weight: Tensor) -> bool:
    return "ds_id" in vars(weight)


def _shape(weight: Any) -> torch.Size:
    shape: torch.Size = weight.ds_shape if _is_sharded(weight) else weight.shape
    return shape


def _release_after_backward(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Have ZeRO-3 release a module's weights once the gradients of its inputs are computed.

    DeepSpeed's own hook, which has already run, handles positional inputs only.
    """
    hooked = {
        name: module.post_bwd_fn.apply(value)
        if isinstance(value, Tensor) and value.requires_grad
        else value
        for name, value in kwargs.items()
    }
    return args, hooked


def prepare_operator(builder: Any, advice: str) -> None:
    """Build one of DeepSpeed's operators unless it exists; UserError if that fails.

    One rank per machine calls this before the others load the operator. `advice`: what to type
    instead, for the error.
    """
    # Private, tested with torch 2.13: the folder also depends on TORCH_EXTENSIONS_DIR and CUDA.
    from torch.utils.cpp_extension import _get_build_directory

    name: str = builder.name
    if not builder.is_compatible(verbose=False):
        raise UserError(
            f"DeepSpeed cannot build its operator {name} on this machine (`python -m "
            f"deepspeed.env_report` lists what is missing); {advice}"
        )
    folder = Path(_get_build_directory(name, verbose=False))
    with (folder / ".in_use").open("w") as held:
        # Against builds of other runs; the kernel releases it if this run is killed.
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_stale_lock(folder)
        if any(folder.glob("*.so")):
            return
        log.info("building DeepSpeed's %s in %s: takes some minutes, once", name, folder)
        started = time.monotonic()
        try:
            builder.load(verbose=False)
        except Exception as error:  # DeepSpeed raises many types, e.g. for a CUDA mismatch
            reason = str(error).strip() or type(error).__name__
            raise UserError(
                f"DeepSpeed's operator {name} could not be built in {folder}: "
                f"{reason.splitlines()[0]}; {advice}"
            ) from error
        log.info("built %s in %.0f s", name, time.monotonic() - started)


def remove_stale_lock(folder: Path) -> None:
    """Remove the lock of a killed build, for which every later build would wait."""
    lock = folder / _LOCK
    while not _is_in_use(folder):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # no lock, or its build has just ended
            return
        if age > STARTUP_SECONDS:
            lock.unlink(missing_ok=True)
            log.info("removed %s, left behind by a killed build", lock)
            return
        time.sleep(0.5)


def _is_in_use(folder: Path) -> bool:
    """Return whether `folder` is the working directory of a process, such as a compiler."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cwd").resolve() == folder.resolve():
                    return True
            except OSError:  # the process has ended, or belongs to another user
                continue
    return False
