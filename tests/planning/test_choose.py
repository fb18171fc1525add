"""What `auto` chooses, and that the choice fits."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from app.assembly.auto import resolve_auto, resolve_strategy
from app.config import load_config
from app.planning.advice import Candidate, list_candidates
from app.planning.choose import (
    choose_micro_batch,
    choose_recompute,
    choose_strategy,
    recompute_modes,
)
from app.planning.communication import ALL_GATHER, ALL_TO_ALL, list_collectives
from app.planning.flops import estimate_flops
from app.planning.hardware import HardwareConfig
from app.planning.memory import PlannedRun, estimate_gpu_memory, fits
from app.planning.planned import on_hardware, plan_run
from app.planning.speed import estimate_speed
from app.planning.training import detect_hardware
from app.preflight import check_compatibility
from app.run import describe_global_batch, global_batch_of
from app.strategy.settings import DdpConfig, FsdpConfig, divisors, strategy_words
from app.training.trainer import Environment
from common.errors import UserError
from data_modules import BatchSpec
from tests.planning.test_planned import STRATEGIES

LORA_8B, LORA_70B = "model=llama8b", "model=llama70b"
PURE_70B = "model=llama70b adapter=full trainer.precision=bf16-pure"
SLOW = "hardware=4x8xa100_80gb hardware.network_gb_per_second=3"

NO_SPLIT: dict[str, Any] = {"allows": lambda run: False}

OFFLOAD = "fsdp_offload"
NO_DEEPSPEED: dict[str, Any] = {"has_deepspeed": False}
TABLE: list[tuple[str, dict[str, Any], str]] = [
    (f"{LORA_8B} hardware=h100", {}, "single"),
    (f"{LORA_8B} hardware=8xa100_80gb", {}, "ddp"),
    (f"{LORA_70B} hardware=8xa100_80gb", {}, "fsdp"),
    (f"{LORA_8B} adapter=full hardware=8xa100_80gb", {}, "fsdp_grad_op"),
    (f"{LORA_70B} quantization=nf4 hardware=2xrtx4090", {}, "fsdp"),  # no strategy shards more
    (f"{LORA_70B} quantization=int8 hardware=8xl40s", {}, "zero2"),  # its weights stay whole
    (f"{LORA_70B} quantization=int8 hardware=8xl40s", NO_DEEPSPEED, "ddp"),
    (f"{LORA_70B} hardware=8xa100_80gb", {"is_stored": True}, "ddp"),  # quantized files
    (f"{LORA_8B} hardware=4x8xa100_80gb", {}, "ddp"),
    (f"{LORA_70B} {SLOW}", {}, "fsdp_hybrid"),
    (f"{LORA_70B} hardware=4x8xa100_80gb", {}, "fsdp"),
    (f"{PURE_70B} {SLOW}", NO_DEEPSPEED | NO_SPLIT, "fsdp"),
    (f"{PURE_70B} {SLOW}", {}, "zero3_hpz"),
    # Of one pack, for each of which zero3_hpz gathers the weights.
    (f"{PURE_70B} {SLOW}", {"has_micro_batch": True}, "fsdp_pp"),
    (f"{PURE_70B} hardware=4xa100_80gb", {}, OFFLOAD),
]


@cache
def planned(words: str) -> PlannedRun:
    """Return a planned run without `auto`."""
    defaults = ["data=dolly", "data.sequence_len=2048", "strategy=ddp", "recompute=full"]
    config: Any = load_config("plan", [*defaults, *words.split()])
    hardware = on_hardware(config, config.hardware)
    run, _ = plan_run(config, hardware, config.model.architecture, strategies=STRATEGIES)
    return replace(run, micro_batch_size=1, accumulation=8)


@pytest.mark.parametrize(("words", "how", "name"), TABLE)
def test_the_strategy_with_the_least_communication_that_fits(
    words: str, how: dict[str, Any], name: str
) -> None:
    run, modes = planned(words), recompute_modes("auto", compiles=False)
    choice = choose_strategy(run, STRATEGIES, modes, **how)
    assert choice.strategy.name == name, choice
    tried = [replace(run.under(choice.strategy), recompute=mode) for mode in modes]
    if run.num_ranks > 1 and not how and "nf4" not in words and name not in ("zero2", OFFLOAD):
        assert any(fits(each, estimate_gpu_memory(each)) for each in tried)


ROWS = "model=llama8b hardware=8xh100 model.context_len={n} data.sequence_len={n}"
MIXTURE = "model=qwen3_30b_a3b hardware="


@pytest.mark.parametrize(
    ("words", "typed", "packs"),
    [
        (f"{PURE_70B} {SLOW}", "fsdp_pp strategy.pipeline_parallel_size=4 "
         "strategy.tensor_parallel_size=8", 256),
        (ROWS.format(n=32768), "ddp", 8),
        (ROWS.format(n=65536), "ddp strategy.context_parallel_size=8", 64),
        (ROWS.format(n=131072) + " adapter=full", "fsdp strategy.context_parallel_size=4", 32),
        (ROWS.format(n=2**20) + " quantization=int8", "ddp strategy.context_parallel_size=4", 32),
        (MIXTURE + "8xh100 adapter=full", "fsdp strategy.expert_parallel_size=8", 8),
        (MIXTURE + "8xh100 adapter=full", "fsdp", 8),  # gathers weights once for all its packs
        (MIXTURE + "8xh100", "ddp", 8),  # sends only the adapter's gradients
    ],
)  # fmt: skip
def test_rows_layers_and_experts_are_split_where_that_is_needed_or_faster(
    words: str, typed: str, packs: int
) -> None:
    """By more than the estimate's error; ranks take as many packs per step as before."""
    run, modes = planned(words), recompute_modes("auto", compiles=False)
    has_one_pack = "pipeline" in typed or "expert" in typed
    choice = choose_strategy(run, STRATEGIES, modes, has_micro_batch=has_one_pack)
    assert strategy_words(choice.strategy) == typed, choice
    split, whole = run.under(choice.strategy), choose_strategy(run, STRATEGIES, modes, **NO_SPLIT)
    assert (split.accumulation, split.tokens_per_step) == (packs, run.tokens_per_step)
    found = [
        max(
            (estimate_speed(each).tokens_per_second
             for each in (replace(run.under(one), recompute=mode) for mode in modes)
             if fits(each, estimate_gpu_memory(each))),
            default=0.0,
        )
        for one in (choice.strategy, whole.strategy)
    ]  # fmt: skip
    assert found[0] > 0
    assert (found[0] > 1.15 * found[1]) == (choice.strategy != whole.strategy)
    assert ("nothing else does" in choice.reason) == (found[1] == 0)


def of_memory(gib: float, words: str = LORA_8B, packs: int = 8) -> PlannedRun:
    """Return a Llama 8B with LoRA and sequences of 4,096 tokens on a GPU with `gib` of memory."""
    run = planned(f"{words} hardware=h100 hardware.memory_gib={gib} strategy=single")
    return replace(run, sequence_len=4096, accumulation=packs)


@pytest.mark.parametrize(
    ("gib", "packs", "mode"),
    [
        (79.2, 2, "none"),
        (79.2, 4, "selective"),
        (31.5, 2, "full"),
        (19.5, 1, "offload"),
    ],
)
def test_the_fastest_recompute_that_fits(gib: float, packs: int, mode: str) -> None:
    run = replace(of_memory(gib), micro_batch_size=packs)
    choice = choose_recompute(run)
    assert choice.name == mode, choice
    order = ["none", "selective", "full", "offload"]
    each = replace(run, recompute=mode)
    assert fits(each, estimate_gpu_memory(each)) != choice.reason.startswith("no mode fits")
    twice = replace(run, hardware=replace(run.hardware, memory_gib=2 * gib))
    assert order.index(choose_recompute(twice).name) <= order.index(mode)
    if mode == "selective":
        assert choose_recompute(run, compiles=True).name == "full"


def test_gradients_are_averaged_once_per_step_where_that_is_faster() -> None:
    run = planned(f"{LORA_8B} adapter=full trainer.precision=bf16-pure hardware=8xh100")
    run, modes = replace(run, sequence_len=4096), recompute_modes("auto", compiles=False)
    choice = choose_strategy(run, STRATEGIES, modes)
    assert strategy_words(choice.strategy) == "fsdp_grad_op strategy.sync_each_micro_batch=false"
    under = run.under(choice.strategy)
    assert estimate_gpu_memory(under).gradients == 2 * run.model.count(trained=True)  # in bf16
    # Twice the activations leave no room for whole gradients.
    larger = run.with_micro_batch(2)
    choice = choose_strategy(larger, STRATEGIES, modes, has_micro_batch=True)
    assert strategy_words(choice.strategy) == "fsdp_grad_op"
    rounded = replace(choice.strategy, reduce_dtype="bf16")
    sums = [larger.under(each) for each in (choice.strategy, rounded)]
    assert estimate_speed(sums[0]) == estimate_speed(sums[1])  # they are in bf16 anyway
    sums = [replace(each, precision="bf16") for each in sums]
    assert estimate_speed(sums[0]).messages > estimate_speed(sums[1]).messages


@pytest.mark.parametrize(("gib", "mode", "top"), [(66, "selective", 32), (26, "full", 20)])
def test_only_as_many_layers_are_recomputed_as_memory_asks_for(
    gib: float, mode: str, top: int
) -> None:
    """Of those with a backward pass, the top ones; the others come first and are not counted."""
    trained = f"adapter.layers={[*range(32 - top, 32)]}".replace(" ", "")
    run = replace(of_memory(gib, f"{LORA_8B} {trained}"), micro_batch_size=4)
    choice = choose_recompute(run)
    assert choice.name == mode and choice.num_layers is not None, choice
    assert f"{mode} recompute.num_layers={choice.num_layers} (the other " in str(choice)

    def needs(number: int) -> bool:
        each = replace(run, recompute=mode, recompute_layers=number)
        return not fits(each, estimate_gpu_memory(each))

    assert [needs(number) for number in (choice.num_layers - 1, choice.num_layers)] == [True, False]
    part = replace(run, recompute=mode, recompute_layers=choice.num_layers)
    assert part.recomputed_layers == choice.num_layers - (32 - top)
    whole = [estimate_speed(replace(part, recompute_layers=n)).step for n in (32, None)]
    assert whole[0] == whole[1] > estimate_speed(part).step
    given = replace(run, recompute_layers=31)
    assert choose_recompute(given).num_layers is None  # stays as it is


@pytest.mark.parametrize(
    ("words", "first", "mode", "packs"),
    [
        # Without recompute one pack fits, and its experts are gathered for 2,048 tokens.
        ("model=qwen3_30b_a3b hardware=8xl40s", "none", "selective", 8),
        # A gain of 1.7 % is within the error of an estimate.
        ("+experiment=qwen3_30b_a3b hardware=4xa100_40gb", "selective", "selective", 2),
        # On a card whose links are not known, nothing can be said about speed.
        ("model=qwen3_30b_a3b hardware=8xl40s hardware.name=own", "none", "none", 1),
    ],
)
def test_a_mode_is_chosen_with_the_micro_batch_that_it_leaves_room_for(
    words: str, first: str, mode: str, packs: int
) -> None:
    config: Any = load_config("plan", [*words.split(), "strategy=fsdp"])
    hardware, numbers = on_hardware(config, config.hardware), config.model.architecture
    run, lines = plan_run(config, hardware, numbers, strategies=STRATEGIES)
    assert (run.recompute, run.micro_batch_size) == (mode, packs)
    before = replace(run.with_micro_batch(1), recompute=first)
    assert choose_recompute(before).name == first
    if mode != first:
        assert "its larger micro-batches make it " in lines[0] and f"as fast as {first}" in lines[0]
        other = before.with_micro_batch(choose_micro_batch(before).size)
        assert estimate_speed(run).tokens_per_second > 1.2 * estimate_speed(other).tokens_per_second


@pytest.mark.parametrize(
    ("gib", "packs", "mode", "size"),
    [
        (79.2, 8, "none", 2),  # 35 GiB of activations, as traced; four packs would be 70
        (79.2, 8, "full", 8),
        (79.2, 7, "none", 1),  # 7 packs divide into 1 or 7
    ],
)
def test_the_largest_divisor_that_fits(gib: float, packs: int, mode: str, size: int) -> None:
    run = replace(of_memory(gib, packs=packs), recompute=mode)
    choice = choose_micro_batch(run)
    assert choice.size == size, choice
    if size < packs:
        larger = next(number for number in divisors(packs) if number > size)
        assert f"{larger}, the next divisor" in str(choice)


def test_untried_micro_batches_leave_more_memory_free() -> None:
    run = replace(of_memory(139.8, packs=24), recompute="none", strategy=STRATEGIES["ddp"])
    tried = choose_micro_batch(run)
    untried = choose_micro_batch(replace(run, strategy=STRATEGIES["zero1"]))
    assert untried.size < tried.size


# On this machine.

ONE = Environment(
    accelerator="gpu", devices=1, num_ranks=1, num_data_ranks=1, precision="bf16", accumulation=8
)
EIGHT = replace(ONE, devices=8, num_ranks=8, num_data_ranks=8, accumulation=1)
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake GPUs of this machine."""
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu.total_memory, gpu.total_memory))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr("app.preflight.couplings.devices.count_gpus", lambda: 8)
    monkeypatch.setattr("app.preflight.couplings.devices.is_installed", lambda module: True)
    return gpu


def base_of(architecture: Any = LLAMA_8B) -> Any:
    return SimpleNamespace(
        architecture=architecture, backend="varlen", shapes_builder=lambda *_: None
    )


def data_of(sequence_len: int, taken: list[int] | None = None) -> Any:
    return SimpleNamespace(
        sequence_len=sequence_len,
        total_steps=1000,
        set_micro_batch_size=([] if taken is None else taken).append,
        set_batching=lambda _: None,
        adapt_to_small_data=lambda: None,
        set_accumulation=lambda _: None,
        batching=BatchSpec(accumulation_steps=8),
    )


class NewRun(SimpleNamespace):
    def global_batch(self, _: int) -> dict[str, int] | None:
        return None


def test_recompute_is_chosen_on_gpus_only(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    config: Any = load_config("train", ["+experiment=llama8b", "trainer.micro_batch_size=1"])
    on_cpu = replace(EIGHT, accelerator="cpu", precision="fp32")
    on_cpu_config, _, _ = resolve_auto(
        replace(config, plan=replace(config.plan, enforce="off")),
        base_of(),
        data_of(4096),
        on_cpu,
        NewRun(),
    )
    assert (on_cpu_config.recompute.mode, on_cpu_config.strategy.name) == ("auto", "ddp")
    with caplog.at_level(logging.INFO):
        chosen, _, estimate = resolve_auto(config, base_of(), data_of(4096), EIGHT, NewRun())
    assert (chosen.recompute.mode, chosen.strategy.name) == ("none", "ddp")
    assert "strategy: ddp (everything fits each GPU" in caplog.text
    assert "GiB of a GPU's 79.0 at the peak of a step" in caplog.text
    assert estimate is not None and estimate.speed is not None
    gpu.total_memory, gpu.name = 24 * 2**30, "Some Card"
    less, _, estimate = resolve_auto(config, base_of(), data_of(4096), EIGHT, NewRun())
    assert less.recompute.mode == "full"
    assert estimate is not None and estimate.speed is None  # its rates are not known


def test_micro_batch_on_gpu_on_cpu_and_in_a_resumed_run(gpu: Any) -> None:
    config: Any = load_config(
        "train", ["+experiment=llama8b", "trainer.devices=1", "plan.enforce=off"]
    )
    assert config.trainer.micro_batch_size == "auto"

    def resolve(config: Any, env: Environment, run: Any) -> tuple[int, int, bool]:
        taken: list[int] = []
        _, found, _ = resolve_auto(config, base_of(), data_of(2048, taken), env, run)
        assert taken == [found.micro_batch_size]
        return found.micro_batch_size, found.accumulation, found.probes_micro_batch

    assert resolve(config, ONE, NewRun()) == (4, 2, True)
    on_cpu = replace(ONE, accelerator="cpu", precision="fp32")
    assert resolve(config, on_cpu, NewRun()) == (1, 8, False)
    streamed = replace(config, data=replace(config.data, streaming=True))
    assert resolve(streamed, ONE, NewRun()) == (1, 8, False)
    resumed: Any = SimpleNamespace(global_batch=lambda _: {"packs": 8, "micro_batch_size": 2})
    assert resolve(config, ONE, resumed) == (2, 4, False)
    before = {"packs": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_ranks": 1}
    assert describe_global_batch(config.trainer, 1, before) == before


def test_unknown_layer_sizes(gpu: Any) -> None:
    config: Any = load_config("train", ["+experiment=llama8b"])
    base = base_of()
    base.shapes_builder = lambda *_: lambda: SimpleNamespace(config=SimpleUnknown())
    base.architecture = SimpleUnknown()
    chosen, env, estimate = resolve_auto(config, base, data_of(2048), EIGHT, NewRun())
    assert (chosen.recompute.mode, chosen.strategy.name, estimate) == ("full", "fsdp", None)
    assert env.micro_batch_size == 1


class SimpleUnknown(SimpleNamespace):
    """A config.json without layer sizes."""

    is_encoder_decoder = False

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "unknown"}

    def get_text_config(self) -> Any:
        return self


def test_a_chosen_strategy_has_the_settings_of_its_file(gpu: Any) -> None:
    words = ["+experiment=llama8b", "trainer.devices=8"]
    config: Any = load_config("train", words)
    chosen = resolve_strategy(config, base_of(), EIGHT, planned(TABLE[3][0]))
    assert chosen == load_config("train", [*words, "strategy=fsdp_grad_op"]).strategy  # type: ignore[union-attr]
    typed: Any = load_config("train", [*words, "strategy=fsdp_tp"])
    assert resolve_strategy(typed, base_of(), EIGHT, None) == FsdpConfig(
        name="fsdp_tp", tensor_parallel_size=2
    )


def test_a_run_whose_rows_are_split_keeps_its_packs_and_is_resumed(gpu: Any) -> None:
    words = ["model=llama8b", "data=dolly", "trainer.devices=8", "data.sequence_len=1048576"]
    words += ["model.context_len=1048576", "trainer.gradient_accumulation_steps=auto"]
    config: Any = load_config("train", words)
    long = LlamaConfig(**{**LLAMA_8B.to_dict(), "max_position_embeddings": 1048576})
    env = replace(EIGHT, accumulation=8)

    def resolve(run: Any, config: Any = config) -> tuple[Any, Environment, BatchSpec]:
        taken: list[BatchSpec] = []
        data = data_of(1048576)
        data.set_batching = taken.append
        chosen, found, _ = resolve_auto(config, base_of(long), data, env, run)
        return chosen.strategy, found, taken[-1]

    strategy, found, batching = resolve(NewRun())
    size = strategy.context_parallel_size  # by this machine's host memory
    assert size > 1 and found.split == f"context parallel {size}"
    assert (found.num_data_ranks, found.context_size) == (8 // size, size)
    assert (batching.num_ranks, batching.row_slices) == (8 // size, size)
    assert found.accumulation == batching.accumulation_steps == 8 * size
    before = global_batch_of(batching.micro_batch_size, batching.accumulation_steps, 8 // size)
    folder: Any = partial(describe_global_batch, config.trainer, before=before)
    again = SimpleNamespace(global_batch=folder)
    assert resolve(again) == (strategy, found, batching)
    assert folder(8)["packs"] == before["packs"] == 64
    eager = base_of(long)
    eager.backend = "eager"
    plan = replace(planned(f"{LORA_8B} hardware=8xh100"), sequence_len=1048576)
    assert strategy_words(resolve_strategy(config, base_of(long), env, plan)) != "fsdp_offload"
    assert strategy_words(resolve_strategy(config, eager, env, plan)) == "fsdp_offload"


def test_a_choice_that_conflicts_with_an_override_is_refused(gpu: Any) -> None:
    words = ["+experiment=llama8b", "trainer.devices=8", "optimizer=muon"]
    config: Any = load_config("train", words)
    assert check_compatibility(config, num_gpus=8) == []
    with pytest.raises(UserError) as caught:
        resolve_strategy(config, base_of(), EIGHT, planned(f"{LORA_70B} hardware=8xa100_80gb"))
    message = str(caught.value)
    assert message.startswith("strategy=auto is fsdp (it does not fit one GPU")
    assert "; but optimizer=muon cannot update shards" in message


@pytest.mark.parametrize(
    ("free_gib", "own_gib", "found_gib"), [(79.5, 0, 80), (30, 20, 51), (79, 0.5, 80)]
)
def test_memory_that_other_processes_use_is_not_planned_with(
    free_gib: float, own_gib: float, found_gib: float, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process's own allocations and context are its own to use."""
    gib = 2**30
    gpu.name, gpu.total_memory = "NVIDIA A100-SXM4-80GB", 80 * gib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gib * gib), 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(own_gib * gib))
    found = detect_hardware(ONE, 1, lambda card: HardwareConfig(name=card))
    assert found.memory_gib == pytest.approx(found_gib)
    assert found.name == "a100_80gb"
    sizes = [79 * gib, 40 * gib]  # of several, the smallest counts
    smaller = [SimpleNamespace(name="Some Card", total_memory=size) for size in sizes]
    monkeypatch.setattr(torch.cuda, "get_device_properties", smaller.__getitem__)
    two = replace(ONE, devices=2, num_ranks=2)
    found = detect_hardware(two, 1, lambda card: HardwareConfig(name=card))
    assert (found.name, found.memory_gib, found.gpus_per_node) == ("Some Card", 40, 2)


def listed(words: list[str], strategy: str) -> list[Candidate]:
    """Return the candidates of a plan under one strategy."""
    config: Any = load_config("plan", words)
    hardware, numbers = on_hardware(config, config.hardware), config.model.architecture
    run, _ = plan_run(config, hardware, numbers, strategies=STRATEGIES)
    known = {strategy: STRATEGIES[strategy]}
    return list_candidates(config, hardware, numbers, run.model, known)


def test_a_plan_lists_shared_rows_and_split_experts_where_they_are_worth_it() -> None:
    """With more packs in a micro-batch, weights are gathered less often, for more tokens."""
    rows = ["model=llama3_8b", "data=dolly", "strategy=fsdp", "hardware=8xh100"]
    for tokens, is_worth_it in ((4096, False), (2**20, True)):
        length = [f"model.context_len={tokens}", f"data.sequence_len={tokens}"]
        found = [each for each in listed([*rows, *length], "fsdp") if each.run.context_size > 1]
        assert bool(found) is is_worth_it and all(each.fits for each in found)
    assert ("strategy.context_parallel_size=2", "recompute=offload") in [
        each.overrides for each in found
    ]
    mixture = ["model=qwen3_30b_a3b", "data=dolly", "strategy=fsdp", "hardware=8xl40s"]
    for typed, size in (([], 1), (["strategy.expert_parallel_size=8"], 8)):
        fitting = [each for each in listed([*mixture, *typed], "fsdp") if each.fits]
        assert {each.run.expert_size for each in fitting} == {size}


def test_chunks_of_feed_forwards_nearly_halve_a_recomputed_layer() -> None:
    words = "model=llama8b quantization=nf4 hardware=h100 strategy=single recompute=offload"
    run = replace(planned(words), sequence_len=350_000, accumulation=1)
    whole = replace(run, fuses_loss=False)  # trainer.kernels=torch: the model's own layers
    assert (run.feed_forward_share, whole.feed_forward_share) == (2**14 / 350_000, 1.0)
    assert fits(run, estimate_gpu_memory(run))
    chunked, need = (estimate_gpu_memory(each).activations for each in (run, whole))
    assert chunked < 0.55 * need
    assert replace(run, recompute="none").feed_forward_share == 1
    for strategy in ("zero3", "fsdp_tp"):
        assert replace(run, strategy=STRATEGIES[strategy]).feed_forward_share == 1
    experts = planned("model=qwen3_30b_a3b hardware=h100 strategy=single recompute=full")
    assert replace(experts, sequence_len=350_000).feed_forward_share == 1


def test_recurrent_layers_compute_whole_rows_on_each_rank_that_shares_them() -> None:
    """Three of four layers: they gather hidden states, and save and compute N times as much."""
    whole = planned("model=qwen3_5_9b hardware=4xh100 strategy=ddp")
    one, four = (
        replace(
            whole, strategy=DdpConfig(context_parallel_size=n), sequence_len=4096, accumulation=1
        )
        for n in (1, 4)
    )
    assert one.model.recurrent_share == 0.75
    heads, rows = list_collectives(four)[-2:]
    assert (heads.kind, heads.times) == (ALL_TO_ALL, 3 * 8)
    assert (rows.kind, rows.times) == (ALL_GATHER, 3 * 24)
    assert rows.num_bytes == 4096 * 4096 * 2
    saved = [replace(each, recompute="none") for each in (four, one)]
    share = [estimate_gpu_memory(each).activations for each in saved]
    assert 0.3 < share[0] / share[1] < 0.6  # 0.39 to 0.61 measured, on a CPU
    flops = [estimate_flops(each) for each in (one, four)]
    assert flops[0].model == flops[1].model
    added = flops[1].recomputed_products - flops[0].recomputed_products
    assert added == pytest.approx(2 * 3 * 3 * one.model.recurrent_weights)
