"""Stages of a pipeline are planned as PyTorch runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from app.planning import flops
from app.planning.communication import SEND, list_collectives
from app.planning.flops import bounds_of_stages, estimate_flops, micro_batches_in_flight, stages_of
from app.planning.memory import PlannedRun, estimate_gpu_memory, estimate_moments
from app.planning.planned_model import model_from_modules
from app.planning.speed import estimate_speed
from app.strategy.pipeline import Stages
from app.strategy.settings import PipelineConfig
from common.text import percent
from tests.planning.test_planned import run_of
from tests.strategy.pipeline_training import builder

LLAMA_70B = ("+experiment=llama70b_3d", "hardware=8xh100", "recompute=full")
ONE_STAGE, TWO_STAGES = PipelineConfig(), PipelineConfig(schedule="interleaved")


def passes(strategy: PipelineConfig, rank: int, size: int, batches: int) -> Iterator[int]:
    """Yield how many micro-batches have passed a rank's stages only forward, by PyTorch's order."""
    stages: Any = SimpleNamespace(
        _num_stages=size,
        _n_microbatches=batches,
        n_local_stages=strategy.stages_of_rank,
        pp_group_size=size,
        microbatches_per_round=batches // max(1, batches // size),
    )
    if strategy.stages_of_rank == 1:
        order = Schedule1F1B._get_pipeline_order(stages)[rank]  # type: ignore[index]
    else:
        order = ScheduleInterleaved1F1B._calculate_single_rank_operations(stages, rank)
    now = 0
    for action in filter(None, order):
        now += 1 if action.computation_type.name == "FORWARD" else -1
        yield now


@pytest.mark.parametrize(
    "strategy", [ONE_STAGE, TWO_STAGES, replace(TWO_STAGES, stages_per_rank=3)]
)
@pytest.mark.parametrize(("size", "batches"), [(2, 8), (4, 4), (8, 16)])
def test_micro_batches_in_flight_are_those_of_the_schedule(
    strategy: PipelineConfig, size: int, batches: int
) -> None:
    strategy = replace(strategy, pipeline_parallel_size=size)
    for rank in range(size):
        counted = max(passes(strategy, rank, size, batches)) / strategy.stages_of_rank
        assert micro_batches_in_flight(strategy, rank, batches) == counted


@pytest.mark.parametrize(
    ("family", "adapter"),
    [("llama", "top layers"), ("tied", "full"), ("gpt2", "top layers")],
)
def test_a_rank_is_planned_with_the_weights_that_it_holds(family: str, adapter: str) -> None:
    whole = model_from_modules("", builder((family, adapter, "none"))(), {})
    assert whole is not None
    bounds = [(0, 1), (1, 4)]
    for rank, own in enumerate(bounds):
        model = builder((family, adapter, "none"))()
        group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        stages = Stages(model, group, bounds, torch.float32)
        held = {w for part in stages.modules_of(stages.own[0]) for w in part.parameters()}
        planned = whole.part([own])
        # Norms behind the layers count as the first rank's.
        assert planned.num_weights == pytest.approx(sum(w.numel() for w in held), abs=64)
        trained = sum(w.numel() for w in held if w.requires_grad)
        assert planned.count(trained=True) == pytest.approx(trained, abs=64)


def parts_of(*words: str) -> tuple[PlannedRun, list[PlannedRun]]:
    run, _ = run_of(*LLAMA_70B, *words)
    return run, stages_of(run)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_rank_waits_for_its_published_share_of_a_step(stages: int) -> None:
    words = [f"strategy.stages_per_rank={stages}"] if stages > 1 else ["strategy.schedule=1f1b"]
    # With a small vocabulary, stages are equal, but for the optimizer.
    run, _ = parts_of(*words, "model.architecture.vocab_size=256")
    speed = estimate_speed(run)
    assert speed.idle / speed.step == pytest.approx(3 / (stages * 32 + 3), rel=0.02)
    assert f"waiting for other stages takes {percent(speed.idle / speed.step, 0)}" in speed.verdict


@pytest.mark.parametrize(
    ("name", "words", "most"),
    [
        ("llama8b", ["recompute=full"], 0.001),
        ("llama8b", ["adapter=full", "recompute=none"], 0.001),
        # Other kernels than products count, too.
        ("llama8b", ["adapter.layers='top 10'", "recompute=full"], 0.04),
    ],
)
def test_no_other_cut_is_planned_faster(
    name: str, words: list[str], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "strategy=fsdp_pp", "strategy.tensor_parallel_size=1"]
    run, _ = run_of(f"+experiment={name}", *words, "strategy.schedule=1f1b", "hardware=8xh100",
                    "trainer.global_batch_size=128", "trainer.micro_batch_size=1")  # fmt: skip
    run = replace(run, strategy=replace(run.strategy, pipeline_parallel_size=2))
    ((_, chosen), _), layers = bounds_of_stages(run), run.model.num_layers
    steps = {}
    for cut in range(1, layers):
        bounds = [(0, cut), (cut, layers)]
        monkeypatch.setattr(flops, "bounds_of_stages", lambda _, bounds=bounds: bounds)
        steps[cut] = estimate_speed(run).step
    assert steps[chosen] <= (1 + most) * min(steps.values())


def test_stages_are_the_whole_model() -> None:
    run, stages = parts_of()
    assert sum(stage.model.num_weights for stage in stages) == run.model.num_weights
    assert sum(estimate_flops(stage).total for stage in stages) == pytest.approx(
        estimate_flops(run).total
    )
    peaks = [max(each.total for each in estimate_moments(stage)) for stage in stages]
    assert estimate_gpu_memory(run).total == max(peaks)
    assert run.num_data_ranks == 1 and run.tokens_per_step == 32 * 4096


def test_hidden_states_are_sent_and_received_by_all_micro_batches() -> None:
    run, stages = parts_of("strategy.schedule=1f1b")
    (sent,) = [each for each in list_collectives(run) if each.kind == SEND]
    assert (sent.num_bytes, sent.times) == (4096 * 8192 * 2, 2 * 32)
    assert [stage.stage.received for stage in stages if stage.stage] == [1, 2, 2, 1]
    assert estimate_gpu_memory(run).received in (32 * sent.num_bytes, 64 * sent.num_bytes)
    # Layers below the lowest adapter send no gradients back.
    _, top = parts_of("strategy.schedule=1f1b", "adapter.layers='top 4'")
    assert [stage.stage.sent for stage in top if stage.stage] == [1, 1, 1, 0]
    slow, _ = run_of("+experiment=llama405b_3d", "hardware=4x8xh100", "recompute=full")
    (sent,) = [each for each in list_collectives(slow) if each.kind == SEND]
    assert sent.num_nodes == 2 and sent.sent_between_nodes == sent.sent > 0


def test_a_sharded_stage_keeps_weights_and_gradients_whole_in_a_step() -> None:
    words = ("adapter=full", "hardware=4x8xh100", "trainer.global_batch_size=128")
    run, (_, kept, *_) = parts_of(*words, "strategy.schedule=1f1b")
    assert run.num_data_ranks == kept.num_data_ranks == 4
    peak, weights = estimate_gpu_memory(kept), kept.model.num_weights / run.tensor_size
    assert peak.trainable == pytest.approx(weights)  # 4 bytes on each of 4 ranks
    assert peak.gradients == pytest.approx(4 * weights)
    assert peak.gathered > 2 * weights
    _, (_, again, *_) = parts_of(
        *words, "strategy.schedule=1f1b", "strategy.reshard_after_forward=true"
    )
    assert estimate_gpu_memory(again).gathered < peak.gathered / 4
    times = [
        [each.times for each in list_collectives(stage) if each.what in ("weights", "gradients")]
        for stage in (kept, again)
    ]
    assert times == [[1, 1], [2 * 32, 1]]


def test_a_micro_batch_of_a_pipeline_is_one_pack() -> None:
    run, lines = run_of(*LLAMA_70B, "trainer.micro_batch_size=auto")
    assert (run.micro_batch_size, run.accumulation) == (1, 32)
    assert "more would leave stages of the pipeline idle" in lines[0]
