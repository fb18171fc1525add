"""Run steps of a run's own code on the fake device, as rank 0 of fake ranks.

Strategy, module, adapter, kernels, loss, clipping and optimizer are those of a training run. Only
the checks that compare values before the fit are skipped, since fake tensors have none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from app.assembly.base import build_objective
from app.assembly.training import build_strategy
from app.model.architecture import load_architecture
from app.model.attention import choose_backend
from app.model.base import ModelConfig
from app.model.build import apply_streaming, build_model
from app.model.hub import newest_cached_file
from app.model.kernels import FusedGate, unfuse_layers
from app.model.recompute import WHOLE_LAYERS
from app.planning.memory import PlannedRun
from app.strategy.fsdp import Fsdp
from app.strategy.loading import Broadcaster
from app.strategy.mixin import Placement, StrategyMixin
from app.strategy.settings import DdpConfig
from app.training.algorithms import MuonWithAdamW
from app.training.metrics import Metrics
from app.training.module import FinetuneModule
from app.training.objective.settings import KtoConfig, ObjectiveConfig, PairConfig
from app.training.optimizers import build_optimizer
from app.training.prepare import prepare_model
from app.training.trainer import Environment, build_lightning_trainer
from data_modules import Batch, DecoderInputs
from tools.simulate.device import FakeDeviceError
from tools.simulate.live import LiveMemory

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from app.config.verbs import TrainConfig

T = TypeVar("T")
DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The counts of simulated steps on one rank."""

    live: LiveMemory
    """memory, with the peak of the last step, and kernels"""
    accumulated: int
    """number of micro-batches in the counted step"""


def take_steps(config: TrainConfig, run: PlannedRun) -> Steps:
    """Count an optimizer step of `run`, which `config` describes, after one that creates states."""
    micro_batches = min(2, run.accumulation)
    live = LiveMemory(num_pairs=float(run.micro_batch_size * run.sequence_len**2))
    with ExitStack() as stack:
        stack.enter_context(_ranks(run.num_ranks))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        stack.enter_context(live.watching_fsdp())
        module, optimizer = _begin_fit(config, run, folder, live)
        batch = _batch(config.objective, run)
        # Fused rope is patched into a Python module, and would affect the next run.
        stack.callback(unfuse_layers, module.model)
        stack.enter_context(live.watching_modules())
        stack.enter_context(live.watching_gradients(_trained(module)))
        if isinstance(run.strategy, DdpConfig):  # makes gradients views of DDP's buckets
            _take_step(module, optimizer, batch, 1, live)
        else:
            for weight in _trained(module):
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
            live.assign((weight.grad for weight in _trained(module)), "gradients")
        live.assign(_states(optimizer), "optimizer")
        live.tally.kernels.clear()
        live.forget_peak()
        _take_step(module, optimizer, batch, micro_batches, live)
    return Steps(live=live, accumulated=micro_batches)


@contextmanager
def _ranks(num_ranks: int) -> Iterator[None]:
    """Create a process group with fake ranks; everything sent to them is dropped."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    nothing = lambda *_, **__: None  # noqa: E731
    try:
        with (
            patch.multiple(
                dist,
                broadcast=nothing,
                broadcast_object_list=nothing,
                all_gather_object=nothing,
                barrier=nothing,
            ),
            patch("app.strategy.fsdp.log_host_memory", nothing),
            # Communication of DDP's constructor.
            patch("torch.nn.parallel.distributed._verify_param_shape_across_processes", nothing),
            patch("torch.nn.parallel.distributed._sync_module_states", nothing),
            patch.object(_fsdp_param, "_chunk_with_empty", _first_chunks),
            patch.object(Fsdp, "_init_mesh", _with_real_tensors(Fsdp._init_mesh)),
            patch.object(Placement, "shard_batch", _with_real_tensors(Placement.shard_batch)),
            patch.object(Broadcaster, "_parameter", _receive),
            patch("bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module", _set_state),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _first_chunks(tensor: torch.Tensor, number: int, dim: int) -> list[torch.Tensor]:
    """Return the first chunk in place of all chunks, of which rank 0 uses no other.

    With many ranks, creating a tensor for each would take half of the time.
    """
    length = -(-tensor.shape[dim] // number)
    return [tensor.narrow(dim, 0, min(length, tensor.shape[dim]))] * number


def _with_real_tensors(function: Callable[..., T]) -> Callable[..., T]:
    """Run a function outside of fake mode: it reads the numbers of ranks, or of columns."""

    def wrapped(*args: Any) -> T:
        with _disable_current_modes():
            return function(*args)

    return wrapped


def _receive(self: Broadcaster, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a weight as received; does not check its class, as fake tensors have their own."""
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
    return torch.nn.Parameter(full, parameter.requires_grad)


def _set_state(layer: Any) -> None:
    """Attach the scales to a gathered 4-bit weight; bitsandbytes' class rejects fake tensors."""
    layer.weight.quant_state = layer.quant_state


def _reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return DDP's bucket as a communication hook does, without communication."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class _KeptBuckets:
    """DDP's reducer without rebuilding buckets, for which rank 0 would send values."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _begin_fit(
    config: TrainConfig, run: PlannedRun, folder: Path, live: LiveMemory
) -> tuple[FinetuneModule, Optimizer]:
    """Build the module and the optimizer as `app.train` does before the first batch."""
    devices, nodes = run.hardware.gpus_per_node, run.num_nodes
    env = Environment(
        accelerator="gpu",
        devices=devices,
        num_ranks=run.num_ranks,
        num_data_ranks=run.num_data_ranks,
        precision=run.precision,
        accumulation=run.accumulation,
        micro_batch_size=run.micro_batch_size,
    )
    strategy: Any = build_strategy(run.strategy, accelerator="gpu", num_ranks=run.num_ranks)
    trainer = build_lightning_trainer(
        replace(config.trainer, num_nodes=nodes),
        env=env,
        strategy=strategy,
        total_steps=2,
        loggers=[],
        callbacks=[],
        folder=folder,
    )
    if run.num_ranks > 1:
        strategy.set_world_ranks()
    module = _module(config, run, strategy, _base(config.model, folder))
    module.trainer = trainer
    strategy.connect(module)
    with live.making("weights"):
        module.configure_model()
    weights = list(module.model.parameters())
    live.assign((weight for weight in weights if not weight.requires_grad), "weights")
    live.assign((weight for weight in weights if weight.requires_grad), "trainable")
    optimizer = module.build_optimizer(module.model)
    start_fit(module)
    if strategy.shards_weights is False and run.num_ranks > 1:
        strategy.configure_ddp()
        strategy.model.register_comm_hook(None, lambda _, bucket: _reduce(bucket))
        strategy.model.logger = Mock()  # DDP's logger would read a GPU's clock
        strategy.model.reducer = _KeptBuckets(strategy.model.reducer)
    return module, optimizer


def _base(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return a base that has only a config.json."""
    if config.path is not None and Path(config.path).is_dir():
        return config
    file = folder / "config.json"
    cached = None if config.path is None else newest_cached_file(config.path, file.name)
    if "model_type" in config.architecture or cached is None:
        file.write_text(json.dumps(config.architecture))
    else:
        file.write_bytes(cached.read_bytes())
    return replace(config, path=str(folder), from_scratch=False)


def _module(
    config: TrainConfig, run: PlannedRun, strategy: StrategyMixin, model: ModelConfig
) -> FinetuneModule:
    architecture = load_architecture(model)
    backend = choose_backend(config.attention, architecture, "gpu", run.precision).backend
    if backend == "flex":
        raise FakeDeviceError("flex attention is compiled for a real GPU")
    if "linear_attention" in (getattr(architecture.get_text_config(), "layer_types", None) or ()):
        raise FakeDeviceError(
            f"the kernels of {architecture.model_type}'s recurrent layers cannot be simulated"
        )
    build = partial(
        build_model,
        model,
        run.quantization,
        backend,
        config.adapter,
        replace(config.recompute, mode=run.recompute, num_layers=run.recompute_layers),
        run.precision,
        on_meta=True,
    )
    return FinetuneModule(
        partial(_build_placed, build, model, is_sharded=strategy.shards_weights),
        backend=backend,
        objective=build_objective(config.objective),
        build_optimizer=partial(
            build_optimizer,
            config=config.optimizer,
            adapter=config.adapter,
            lr=1e-4,
            fused=run.precision != "fp16",
        ),
        schedule=config.schedule,
        total_steps=2,
        is_packed=True,
        metrics=Metrics(["simulated"], [], 1),
        uses_fused_kernels=config.trainer.kernels == "auto" and not config.trainer.compile,
        recomputes_layers=run.recompute in WHOLE_LAYERS,
    )


def _build_placed(
    build: Callable[[], Any], config: ModelConfig, *, is_sharded: bool, **_: Any
) -> Any:
    """Build a model with fake weights on the device, or on the host if they move from there."""
    with _disable_current_modes():  # bitsandbytes' class rejects fake tensors
        model = build()
    place(model, HOST if is_sharded or config.stream else DEVICE)
    with patch.object(type(model), "to", place):  # PyTorch's own swaps fake tensors, which fails
        apply_streaming(model, config, DEVICE)
    return model


def _take_step(
    module: FinetuneModule, optimizer: Optimizer, batch: Batch, number: int, live: LiveMemory
) -> None:
    """Take one optimizer step of `number` micro-batches, in the order of a run."""
    strategy: Any = module.trainer.strategy
    weights = _trained(module)

    def loss(part: Batch) -> torch.Tensor:
        live.assign((weight.grad for weight in weights), "gradients")
        live.phase = "forward"
        value = module.micro_batch_loss(part)
        live.phase = "backward"
        return value

    optimizer.zero_grad()
    batches = [batch] * number
    live.phase = "forward"
    with module.trainer.precision_plugin.forward_context():
        module.objective.begin(module.model, batches, module.backend, DEVICE)
    strategy.run_micro_batches(batches, loss)
    live.assign((weight.grad for weight in weights), "gradients")
    live.phase = "step"
    module.configure_gradient_clipping(optimizer, module.trainer.gradient_clip_val)
    optimizer.step()
    module.reset_step()


def _trained(module: FinetuneModule) -> list[torch.nn.Parameter]:
    return [weight for weight in module.model.parameters() if weight.requires_grad]


def _states(optimizer: Optimizer) -> list[torch.Tensor]:
    parts = optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)
    states = (value for part in parts for state in part.state.values() for value in state.values())
    return [value for value in states if isinstance(value, torch.Tensor)]


@_with_real_tensors
def _batch(objective: ObjectiveConfig, run: PlannedRun) -> Batch:
    """Return a micro-batch of full packs, each with one document that is trained on entirely.

    Of two answers, each takes half of a pack.
    """
    count, length = run.micro_batch_size, run.sequence_len
    if isinstance(objective, KtoConfig):
        own, others = (_documents(run, count, length // 2) for _ in range(2))
        units = torch.ones(count)
        return replace(own, unit_weights=units, unit_labels=units, others=others)
    if isinstance(objective, PairConfig):
        pairs = _documents(run, 2 * count, length // 2)
        return replace(pairs, unit_weights=torch.ones(count), unit_labels=torch.ones(count))
    return _documents(run, count, length)


def _documents(run: PlannedRun, count: int, each: int) -> Batch:
    """Return `count` documents of `each` tokens, in one row if the run packs."""
    rows, length = 1, count * each
    lengths = [[each] * count]
    if run.model.is_pair or run.keeps_scores:
        rows, length = count, each
        lengths = [[each]] * count
    ids = torch.zeros(rows, length, dtype=torch.int64)
    positions = torch.arange(each).repeat(length // each)
    positions = positions.expand(rows, -1).contiguous()
    decoder = DecoderInputs(ids, positions, lengths) if run.model.is_pair else None
    return Batch(
        input_ids=ids,
        position_ids=positions,
        labels=ids,
        loss_weights=torch.ones(rows, length),
        dataset_ids=ids,
        trained_columns=torch.arange(length),
        document_lengths=lengths,
        step_weight=float(rows * length),
        num_tokens=rows * length,
        decoder=decoder,
    )


def place(model: torch.nn.Module, device: torch.device = DEVICE) -> None:
    """Replace every weight and buffer that is elsewhere by an empty one on `device`."""
    from bitsandbytes.nn import Params4bit

    placed: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None or weight.device == device:
                continue
            if id(weight) not in placed:
                make = _pack if isinstance(weight, Params4bit) else _place
                placed[id(weight)] = make(module, weight, device)
            module._parameters[name] = placed[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        if (state := vars(module).get("quant_state")) is not None:
            state.to(device)


def _place(_: Any, weight: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    empty = torch.empty_like(weight, device=device)
    return torch.nn.Parameter(empty, requires_grad=weight.requires_grad)


def _pack(layer: Any, weight: Any, device: torch.device) -> torch.nn.Parameter:
    """Quantize a 4-bit weight to a plain parameter; bitsandbytes' class rejects fake tensors."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        torch.empty(weight.shape, dtype=layer.compute_dtype, device=device),
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    plain = torch.nn.Parameter(packed, requires_grad=False)
    for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage"):
        setattr(plain, name, getattr(weight, name))
    plain.quant_state = layer.quant_state = state
    plain.bnb_quantized = True
    return plain


def start_fit(module: FinetuneModule, *, joins_adapters: bool = False) -> None:
    """Prepare the module's model without comparing values, which fake tensors do not have.

    Layers are fused as in a fit; the kernels are assumed to be correct. `joins_adapters`: whether
    the kernel of adapters and gates is assumed to be fast, too. A plan counts without it, since it
    has not run on a GPU yet.
    """
    with (
        patch("app.training.prepare.verify_attention", lambda each, _: _hide_boundaries(each)),
        patch("app.training.prepare.check_head_loss"),
        patch("app.model.kernels.is_equal", _is_same_function),
        patch("app.model.kernels.is_faster", return_value=joins_adapters),
        patch("app.training.prepare.check_same_step"),
    ):
        prepare_model(module)


def _is_same_function(forward: Any, *_: Any) -> bool:
    """Return whether a kernel computes the same function as its module, by its activation."""
    if not isinstance(forward, FusedGate):
        return True
    parts = forward.module.children()  # the attribute of the activation has several names
    return any(forward.activation in type(part).__name__.lower() for part in parts)


def _hide_boundaries(module: FinetuneModule) -> None:
    """Have a hybrid's mixers run document by document, as if their kernels were not installed.

    Mixers that ignore document boundaries then raise a ValueError, which fake tensors can show.
    """
    from app.model.attention import mixer_search
    from app.model.attention.probes import hide_boundaries_from_mixers

    layer_types = getattr(module.model.config.get_text_config(), "layer_types", None) or ()
    if "linear_attention" in layer_types:
        with patch.object(mixer_search, "_leaks", return_value=False):
            hide_boundaries_from_mixers(module.model, module.backend, DEVICE)
