"""The memory of one of 8 or 64 fake ranks with a 70B model equals the estimate.

PyTorch's fake process group answers for the others, and tensors have shapes and storages, but no
numbers: FSDP shards, gathers and reduces as it would.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.config import load_config
from app.model.adapter import saves_whole_model
from app.model.attention.inputs import attention_inputs
from app.model.build import build_model
from app.model.head import head_loss
from app.model.quantization import QuantizationConfig
from app.model.recompute import RecomputeConfig
from app.planning.hardware import HardwareConfig
from app.planning.memory import PlannedRun, estimate_moments
from app.planning.planned_model import model_from_modules
from app.planning.states import ModelStates, estimate_states, size_for
from app.strategy import deepspeed as deepspeed_strategy
from app.strategy import fsdp
from app.strategy.deepspeed_config import deepspeed_config
from app.strategy.loading import Broadcaster
from app.strategy.mixin import local
from app.training.checkpoint.state import trainable_parameters
from benchmarks.planning.live import LiveResized
from tests.ranks import on_ranks

TOKENS, ROUNDING = 128, 0.05
RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Case:
    words: tuple[str, ...]
    num_ranks: int
    num_layers: int = 2

    def __str__(self) -> str:
        return f"{' '.join(self.words)} on {self.num_ranks}"


def silence(monkeypatch: pytest.MonkeyPatch, logs: Any) -> None:
    """Have ranks that do not exist send nothing, and log no memory."""
    for silent in ("broadcast", "broadcast_object_list", "all_gather_object"):
        monkeypatch.setattr(dist, silent, lambda *args, **kwargs: None)
    monkeypatch.setattr(logs, "log_host_memory", lambda *args, **kwargs: None)


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Case], Any]]:
    """Return a function that builds a strategy on one of many fake ranks."""

    def meet(case: Case) -> Any:
        dist.init_process_group("fake", rank=0, world_size=case.num_ranks, store=FakeStore())
        config = load_config("train", [f"+experiment={case.words[0]}", *case.words[1:]])

        class OneOfMany(fsdp.Fsdp):
            world_size, num_processes, global_rank = case.num_ranks, RANKS_PER_NODE, 0
            num_nodes = case.num_ranks // RANKS_PER_NODE
            root_device = torch.device("cpu")

            def _init_mesh(self) -> None:
                self._device_mesh = mesh

        strategy: Any = OneOfMany(config.strategy)
        strategy.precision_plugin = SimpleNamespace(precision="bf16-mixed")
        names = ("replicate", "shard", "tensor")
        # With numbers: its ranks.
        mesh = init_device_mesh(
            "cpu", (*strategy._divide(), strategy.tensor_size), mesh_dim_names=names
        )
        return config, strategy

    def receive(self: Broadcaster, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad
        )

    silence(monkeypatch, fsdp)
    monkeypatch.setattr(Broadcaster, "_parameter", receive)
    yield meet
    dist.destroy_process_group()


def build(config: Any, **numbers: Any) -> Any:
    return build_model(
        replace(
            config.model,
            path=None,
            from_scratch=True,
            architecture=config.model.architecture | numbers,
        ),
        QuantizationConfig(),  # quantized weights need values
        "eager",
        config.adapter,
        RecomputeConfig(mode="full"),
        config.trainer.precision,
        on_meta=True,
    )


def num_bytes(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def take_step(config: Any, strategy: Any, num_layers: int) -> ModelStates:
    """Train for a step of two micro-batches; return the memory of each part."""
    empty, live = build(config, num_hidden_layers=num_layers), LiveResized()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = strategy.build_model(lambda **_: empty)
        weights = list(trainable_parameters(model).values())
        optimizer = torch.optim.AdamW(weights, foreach=False)
        held = num_bytes(model.parameters())
        assert live.num_bytes == pytest.approx(held, rel=0.01)  # no whole copy is left
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "position_ids": torch.arange(TOKENS).unsqueeze(0),
            "use_cache": False,
        } | attention_inputs(model, "eager", [[TOKENS]], ids)
        between = live.peak = 0
        for number in range(2):
            with (
                strategy.accumulating() if number == 0 else nullcontext(),
                torch.autocast("cpu", torch.bfloat16),
            ):
                total, _ = head_loss(model, inputs, ids, torch.ones(1, TOKENS))
                total.backward()
            del total
            between = between or live.num_bytes - held
        peak = live.peak
        optimizer.step()
        states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    return ModelStates(
        weights=held,
        gradients=max(between, num_bytes(weight.grad for weight in weights)),
        optimizer=num_bytes(states),
        gathered=peak - held,  # with activations and the gradients of the first micro-batch
    )


CASES = [
    Case(("llama70b",), 8),
    Case(("llama70b", "strategy=fsdp_tp", "strategy.tensor_parallel_size=8"), 64),
]
MORE_CASES = [
    Case(("llama70b",), 64, 4),
    Case(("llama70b", "strategy=fsdp_grad_op"), 64, 4),
    Case(("llama70b", "adapter=full", "strategy.sync_each_micro_batch=false"), 64),
]
SWEPT = (pytest.mark.slow, pytest.mark.versions)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=SWEPT) for case in MORE_CASES)], ids=str
)
def test_memory_of_an_fsdp_rank_equals_the_estimate(
    fake_ranks: Callable[[Case], Any], case: Case
) -> None:
    config, strategy = fake_ranks(case)
    model = model_from_modules("", build(config, num_hidden_layers=case.num_layers), {})
    assert model is not None
    nodes = case.num_ranks // RANKS_PER_NODE
    run = PlannedRun(
        model=model,
        hardware=HardwareConfig(gpus_per_node=RANKS_PER_NODE, num_nodes=nodes),
        strategy=config.strategy,
        quantization=QuantizationConfig(),
        recompute="full",
        precision=config.trainer.precision,
        sequence_len=TOKENS,
        accumulation=2,
        trains_base=saves_whole_model(config.adapter),
        fuses_norm_and_gate=False,
        fuses_loss=False,
        keeps_scores=True,
        is_on_gpu=False,
    )
    size = run.size
    expected = estimate_states(
        size, run.strategy, num_ranks=run.num_ranks, num_nodes=nodes, accumulation=2
    )
    found = take_step(config, strategy, case.num_layers)
    # What is gathered for a forward pass stays until the step's last backward pass, or is freed.
    kept = 0 if config.strategy.reshard_after_forward else size.whole.gathered
    assert found.gradients == pytest.approx(expected.gradients + kept, rel=ROUNDING)
    for part in ("weights", "optimizer"):
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=ROUNDING), part
    if size.head.trained:
        return  # gradients on their way to their ranks are not estimated
    moments = estimate_moments(run)
    in_turn = max(one.total - one.weights - one.trainable - one.optimizer for one in moments)
    assert found.gathered == pytest.approx(in_turn, rel=ROUNDING)


def set_up_zero(num_ranks: int) -> dict[str, float]:
    """Set up the engine of ZeRO-3 on one of many fake ranks, and take an optimizer step.

    Of a 70B's kinds of layers, but narrow: every part is a share of the weights.
    """
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    import deepspeed

    config: Any = load_config("train", ["+experiment=llama70b_zero3"])
    narrow = {"num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 4096}
    narrow |= {"intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 1}
    narrow |= {"bos_token_id": 1, "eos_token_id": 2}

    class OneOfMany(deepspeed_strategy.Zero):
        world_size, num_processes, num_nodes, global_rank = num_ranks, 8, num_ranks // 8, 0
        root_device = torch.device("cpu")

    with pytest.MonkeyPatch.context() as patch:
        silence(patch, deepspeed_strategy)
        patch.setattr(import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)
        deepspeed.init_distributed("fake", verbose=False)
        strategy = OneOfMany(config.strategy)
        model = strategy.build_model(lambda **_: build(config, **narrow).to_empty(device="cpu"))
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        settings = deepspeed_config(
            config.strategy,
            on_gpu=False,
            dtype=torch.float32,
            num_trained=sum(weight.numel() for weight in trained),
            ranks_per_node=8,
            accumulation=2,
            max_norm=1.0,
        )
        strategy._shard_weights(model, settings)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=trained, optimizer=optimizer, config=settings
        )
    flats = engine.optimizer.fp32_partitioned_groups_flat
    for number, flat in enumerate(flats):
        flat.grad = torch.zeros_like(flat)
        engine.optimizer._optimizer_step(number)
    states = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    bucket = settings["zero_optimization"]["reduce_bucket_size"] * trained[0].element_size()
    planned, ranks = model_from_modules("", build(config, **narrow), {}), {"num_ranks": num_ranks}
    assert planned is not None
    size = size_for(planned, "bf16", QuantizationConfig(), config.strategy, **ranks, num_nodes=1)
    estimate = estimate_states(size, config.strategy, **ranks)
    return {
        "weights": sum(weight.ds_tensor.nbytes for weight in model.parameters()) / estimate.weights,
        "gradients": (engine.optimizer.grad_partitions_flat_buffer.nbytes + bucket)
        / estimate.gradients,
        "optimizer": sum(state.nbytes for state in (*states, *flats)) / estimate.optimizer,
    }


@pytest.mark.versions
@pytest.mark.slow
def test_memory_of_a_zero_rank_equals_the_estimate() -> None:
    (found,) = on_ranks(1, set_up_zero, 64)
    assert found == pytest.approx(dict.fromkeys(found, 1.0), rel=0.05)
