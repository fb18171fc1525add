"""From the settings of a run to what is planned: every `auto` resolved for the hardware typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import LoraConfig, saves_whole_model
from app.model.base import ModelConfig
from app.model.hub import cache_folder
from app.model.recompute import BY_SPEED
from app.model.token_ids import text_numbers
from app.planning.hardware import HardwareConfig
from app.planning.memory import GIB, PlannedRun, estimate_gpu_memory, fits
from app.planning.model_size import PlannedModel, build_planned_model, size_for
from app.preflight import check_compatibility
from app.preflight.base_model import BaseModel, check_config, inspect_base
from app.preflight.files import check_sequence_len, check_tensor_parallel
from app.process.errors import UserError
from app.process.untrusted import read_json_object
from app.strategy.build import Facts, StrategyChoice, choose_strategy
from app.strategy.settings import StrategyConfig
from app.training.micro_batch import divisors
from app.training.model_states import EIGHT_BIT_STATES, STATES
from data_modules import setting

if TYPE_CHECKING:
    from app.config.verbs import PlanConfig

DEFAULT_LEN = 2048
"""tokens of a sequence where none are typed and the context is longer, as in the data room"""
FAST_NETWORK = 25.0
"""GB/s a node from which links between nodes count as fast: one adapter of 200 Gb/s"""


@dataclass(kw_only=True, slots=True)
class PlanningConfig:
    """What a plan is asked."""

    tokens: int | None = setting(None, ge=1, shown=True)
    """tokens that the run trains on, all epochs together; null = trainer.max_steps times those of a
    step, where they are typed"""
    write: str | None = setting(None, shown=True)
    """file to write the best plan to, as an experiment: +experiment=FILE.yaml"""


def read_numbers(model: ModelConfig) -> Mapping[str, Any]:
    """Return what the base's config.json says; UserError where none is on this machine."""
    folder = None if model.path is None else Path(model.path)
    if folder is not None and folder.is_dir():
        return _numbers_of_folder(model, folder)
    if "model_type" in model.architecture:
        if problems := check_config("model.architecture", model.architecture):
            raise UserError(problems)
        return text_numbers(model.architecture)
    found = inspect_base(replace(model, tokenizer_path=None)) if model.path else None
    if found is not None and (missing := [p for p in found.problems if "model.path" in p]):
        raise UserError(missing)
    snapshots = cache_folder() / f"models--{str(model.path).replace('/', '--')}" / "snapshots"
    cached = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if cached:
        numbers, problem = read_json_object(cached[-1])
        if problem is not None:
            raise UserError(problem)
        return text_numbers(numbers)
    raise UserError(
        f"model.path={model.path}: a plan fetches nothing, and its config.json is not on this "
        "machine; type model=NAME for a base that is known (--help model lists them), the folder "
        "of a config.json, or its numbers: 'model.architecture={model_type: llama, ...}'"
    )


def _numbers_of_folder(model: ModelConfig, folder: Path) -> Mapping[str, Any]:
    """Return the numbers of a base's folder; weights need not be there, but none may be broken."""
    has_weights = any(folder.glob("*.safetensors*"))
    base = inspect_base(model)
    problems = base.problems
    if not has_weights and (folder / "config.json").is_file():
        problems = check_config(str(folder / "config.json"), base.numbers)
    if problems:
        raise UserError(problems)
    return text_numbers(base.numbers)


def on_hardware(config: PlanConfig, hardware: HardwareConfig) -> HardwareConfig:
    """Return the part of the hardware that the settings ask for; UserError for more than it has."""
    trainer, problems = config.trainer, []
    if trainer.accelerator == "cpu":
        problems.append("trainer.accelerator=cpu: a plan is for GPUs; leave it out")
    devices = trainer.devices if isinstance(trainer.devices, int) else hardware.gpus_per_node
    if devices > hardware.gpus_per_node:
        problems.append(
            f"trainer.devices={devices}, but hardware={hardware.name} has "
            f"{hardware.gpus_per_node} a machine; type hardware={devices}x{hardware.name}"
        )
    if trainer.num_nodes > hardware.num_nodes:
        each = f"{hardware.gpus_per_node}x{hardware.name}"
        problems.append(
            f"trainer.num_nodes={trainer.num_nodes}, but the hardware has {hardware.num_nodes}; "
            f"type hardware={trainer.num_nodes}x{each}"
        )
    if problems:
        raise UserError(problems)
    nodes = trainer.num_nodes if trainer.num_nodes > 1 else hardware.num_nodes
    return replace(hardware, gpus_per_node=devices, num_nodes=nodes)


def config_on(config: PlanConfig, hardware: HardwareConfig) -> PlanConfig:
    """Return the settings with the hardware's devices typed, for the checks."""
    trainer = replace(config.trainer, devices=hardware.gpus_per_node, num_nodes=hardware.num_nodes)
    return replace(config, trainer=trainer)


def check_planned(
    config: PlanConfig, hardware: HardwareConfig, numbers: Mapping[str, Any]
) -> list[str]:
    """List what does not go together, of the settings and of this base."""
    placed = config_on(config, hardware)
    problems = check_compatibility(placed, hardware.gpus_per_node, on_this_machine=False)
    base = BaseModel(config.model.path or "model.architecture", numbers)
    if config.data.sequence_len is not None:
        problems += check_sequence_len(config.data.sequence_len, base)
    size = getattr(config.strategy, "tensor_parallel_size", 1)
    return problems + check_tensor_parallel(size or hardware.gpus_per_node, base)


def plan_run(
    config: PlanConfig,
    hardware: HardwareConfig,
    numbers: Mapping[str, Any],
    *,
    model: PlannedModel | None = None,
    strategies: Mapping[str, StrategyConfig],
) -> tuple[PlannedRun, list[str]]:
    """Return the run that the settings mean on the hardware, and what was chosen for `auto`.

    `strategies`: the settings of each by name, which `auto` chooses from.
    """
    precision = _precision(config.trainer.precision, hardware)
    model = model or build_planned_model(config.model, numbers, config.adapter, precision)
    said: list[str] = []
    strategy = config.strategy
    if strategy.name == "auto":
        choice = _choose_strategy(config, hardware, model, precision)
        strategy = strategies[choice.name]
        said.append(f"strategy: {choice}")
        found = check_planned(replace(config, strategy=strategy), hardware, numbers)
        if found:
            raise UserError([f"strategy=auto is {choice}; but {problem}" for problem in found])
    trainer, adapter, mode = config.trainer, config.adapter, config.recompute.mode
    run = PlannedRun(
        model=model,
        hardware=hardware,
        strategy=strategy,
        quantization=config.quantization,
        recompute="full" if mode == "auto" else mode,
        recompute_every=config.recompute.every,
        precision=precision,
        optimizer=config.optimizer.name,
        micro_batch_size=trainer.least_micro_batch,
        sequence_len=_sequence_len(config, numbers),
        trains_base=saves_whole_model(adapter),
        drops=isinstance(adapter, LoraConfig) and adapter.dropout > 0,
        fuses_adapters=config.quantization.method != "int8"
        and not (isinstance(adapter, LoraConfig) and adapter.use_dora),
        fuses_norm_and_gate=trainer.kernels == "auto" or trainer.compile,
        keeps_scores=model.is_pair or config.attention.backend == "eager",
        num_checkpoints=trainer.checkpoint.keep_last + trainer.checkpoint.keep_best,
    )
    run = replace(run, accumulation=_accumulation(config, run))
    if mode == "auto":
        run, has_room = _with_recompute(run, compiles=trainer.compile)
        why = "the fastest that fits" if has_room else "none fits; this takes the least memory"
        said.append(f"recompute: {run.recompute} ({why})")
    if trainer.micro_batch_size == "auto":
        run, has_room = _with_micro_batch(run)
        why = "the most that fit of a rank's step" if has_room else "not even one fits"
        said.append(f"packs at once: {run.micro_batch_size} ({why})")
    return run, said


def _precision(typed: str, hardware: HardwareConfig) -> str:
    if typed == "auto":
        return "bf16" if hardware.has_bf16 else "fp32"
    if typed.startswith("bf16") and not hardware.has_bf16:
        raise UserError(
            f"trainer.precision={typed}: {hardware.name} has no bf16 of its own; type "
            "trainer.precision=fp16 or fp32"
        )
    return typed


def _sequence_len(config: PlanConfig, numbers: Mapping[str, Any]) -> int:
    if config.data.sequence_len is not None:
        return config.data.sequence_len
    context = numbers.get("max_position_embeddings", numbers.get("n_positions"))
    return min(DEFAULT_LEN, context) if isinstance(context, int) else DEFAULT_LEN


def _accumulation(config: PlanConfig, run: PlannedRun) -> int:
    trainer = config.trainer
    if trainer.global_batch_size is None:
        return trainer.gradient_accumulation_steps
    return max(1, trainer.global_batch_size // (run.micro_batch_size * run.num_data_ranks))


def _with_recompute(run: PlannedRun, *, compiles: bool) -> tuple[PlannedRun, bool]:
    """Return the run with its recompute chosen, and whether it fits then."""
    modes = [mode for mode in BY_SPEED if not (compiles and mode == "selective")]
    tried = [replace(run, recompute=mode) for mode in modes]
    size = run.size
    for each in tried:
        if fits(each, estimate_gpu_memory(each, size)):
            return each, True
    return tried[-1], False


def _with_micro_batch(run: PlannedRun) -> tuple[PlannedRun, bool]:
    """Return the run with the packs that it does at once chosen, and whether it fits then."""
    packs, size = run.accumulation, run.size
    for number in reversed(divisors(packs)):
        tried = replace(run, micro_batch_size=number, accumulation=packs // number)
        if fits(tried, estimate_gpu_memory(tried, size)):
            return tried, True
    return run, False


def _choose_strategy(
    config: PlanConfig, hardware: HardwareConfig, model: PlannedModel, precision: str
) -> StrategyChoice:
    alone = StrategyConfig(name="single")
    size = size_for(model, precision, config.quantization, alone, num_ranks=1, num_nodes=1)
    whole, optimizer = size.whole, config.optimizer.name
    states = whole.trained * (1 + STATES.get(optimizer, 0))
    states += whole.num_trained * EIGHT_BIT_STATES.get(optimizer, 0)
    return choose_strategy(
        Facts(
            num_ranks=hardware.num_gpus,
            num_nodes=hardware.num_nodes,
            device_gib=hardware.memory_gib,
            weights_gib=(whole.frozen + whole.trained) / GIB,
            states_gib=states / GIB,
            quantization=config.quantization.method,
            has_fast_links=hardware.network_gb_per_second >= FAST_NETWORK,
            has_deepspeed=True,
        )
    )
