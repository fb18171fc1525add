"""The memory of one of 8 or 64 fake ranks with a 70B model equals the estimate.

PyTorch's fake process group answers for the others, and tensors have shapes and storages, but no
numbers: FSDP shards, gathers and reduces as it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from app.planning.states import ModelStates, estimate_states
from app.strategy import fsdp
from app.strategy.loading import Broadcaster
from app.strategy.mixin import local
from app.training.checkpoint.state import trainable_parameters
from benchmarks.planning.live import LiveResized

TOKENS, ROUNDING = 128, 0.05
RANKS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Case:
    words: tuple[str, ...]
    num_ranks: int
    num_layers: int = 2

    def __str__(self) -> str:
        return f"{' '.join(self.words)} on {self.num_ranks}"


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

    for silent in ("broadcast", "broadcast_object_list", "all_gather_object"):
        monkeypatch.setattr(dist, silent, lambda *args, **kwargs: None)
    monkeypatch.setattr(fsdp, "log_host_memory", lambda *args, **kwargs: None)
    monkeypatch.setattr(Broadcaster, "_parameter", receive)
    yield meet
    dist.destroy_process_group()


def build(config: Any, num_layers: int) -> Any:
    architecture = config.model.architecture | {"num_hidden_layers": num_layers}
    return build_model(
        replace(config.model, path=None, from_scratch=True, architecture=architecture),
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
    empty, live = build(config, num_layers), LiveResized()
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
    model = model_from_modules("", build(config, case.num_layers), {})
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
