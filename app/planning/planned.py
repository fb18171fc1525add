"""Build a PlannedRun from the settings of a run, with every `auto` resolved for the hardware."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import LoraConfig, saves_whole_model
from app.model.architecture import text_numbers
from app.model.attention.backends import MAX_FLASH_HEAD_DIM
from app.model.base import ModelConfig
from app.model.description import BaseDescription
from app.model.families import family_of
from app.model.hub import newest_cached_file
from app.model.rope import rope_scaling, scaled_error
from app.planning.choose import (
    choose_micro_batch,
    choose_recompute,
    choose_strategy,
    recompute_modes,
)
from app.planning.hardware import HardwareConfig
from app.planning.memory import PlannedRun
from app.planning.planned_model import (
    PlannedModel,
    build_planned_model,
    model_from_config_json,
)
from app.preflight import check_compatibility
from app.preflight.base_model import check_config, inspect_base
from app.preflight.files import (
    check_sequence_len,
    check_split,
    check_tensor_parallel,
)
from app.strategy.settings import (
    STRATEGY_CONFIGS,
    StrategyConfig,
    tensor_parallel_size,
    with_states_of,
)
from app.training.objective.settings import (
    DistillConfig,
    KtoConfig,
    ObjectiveConfig,
    PairConfig,
)
from common.errors import UserError
from common.facts import setting
from common.untrusted import read_json_object, reading
from data_modules import DEFAULT_SEQUENCE_LEN, estimate_epoch, with_format

if TYPE_CHECKING:
    from app.config.verbs import PlanConfig, TrainConfig

log = logging.getLogger(__name__)

_NOT_PLANNED = ("auto", "zero3_nvme")
"""strategy names that are resolved before planning, or that are not implemented"""
_NO_FLASH = ("attention_chunk_size", "attention_dropout", "attn_pdrop")
"""keys of config.json that FlashAttention does not support, and sdpa does"""

_BYTES_OF_TOKEN = 4
"""bytes per token of English text (OpenAI's rule of thumb), if the tokenizer is not available"""


@dataclass(kw_only=True, slots=True)
class EnforceConfig:
    """Settings of the memory check before a training run."""

    enforce: str = setting("error", choices=("error", "warn", "off"))
    """what happens if a run's estimated memory exceeds that of a GPU or of a machine: error = stop
    before weights are loaded, warn = log a warning, off = no check"""


@dataclass(kw_only=True, slots=True)
class PlanningConfig(EnforceConfig):
    """Settings of a plan."""

    tokens: int | None = setting(None, ge=1, shown=True)
    """total tokens of the run, over all epochs; null = trainer.max_steps times the tokens of a
    step, else an estimate from the data if they are on this machine"""
    write: str | None = setting(None, shown=True, grants="write")
    """file to write the fastest fitting variant to, as an experiment for +experiment=FILE.yaml"""


def load_strategies(
    settings_of: Callable[[str, str], StrategyConfig],
) -> dict[str, StrategyConfig]:
    """Return the settings of each strategy that can be planned, by name.

    `settings_of(group, name)` loads an option from conf/.
    """
    return {
        name: settings_of("strategy", name) for name in STRATEGY_CONFIGS if name not in _NOT_PLANNED
    }


def read_config_json(model: ModelConfig) -> Mapping[str, Any]:
    """Return the base's config.json; UserError if it is not on this machine."""
    if model.path is not None and (folder := Path(model.path)).is_dir():
        base, problems = inspect_base(model)
        if not any(folder.glob("*.safetensors*")) and (folder / "config.json").is_file():
            problems = check_config(str(folder / "config.json"), base.config)
        if problems:
            raise UserError(problems)
        return text_numbers(base.config)
    if "model_type" in model.architecture:
        if problems := check_config("model.architecture", model.architecture):
            raise UserError(problems)
        return text_numbers(model.architecture)
    problems = inspect_base(replace(model, tokenizer_path=None))[1] if model.path else []
    if missing := [problem for problem in problems if "model.path" in problem]:
        raise UserError(missing)
    if (cached := newest_cached_file(str(model.path), "config.json")) is not None:
        config_json, problem = read_json_object(cached)
        if problem is not None:
            raise UserError(problem)
        return text_numbers(config_json)
    raise UserError(
        f"model.path={model.path}: a plan downloads nothing, and its config.json is not on this "
        "machine; type model=NAME for a known base (--help model lists them), the folder of a "
        "config.json, or its values: 'model.architecture={model_type: llama, ...}'"
    )


def on_hardware(config: PlanConfig, hardware: HardwareConfig) -> HardwareConfig:
    """Return the requested part of the hardware; UserError if it has less than requested."""
    trainer, problems = config.trainer, []
    if trainer.accelerator == "cpu":
        problems.append("trainer.accelerator=cpu: a plan is for GPUs; remove the override")
    devices = trainer.devices if isinstance(trainer.devices, int) else hardware.gpus_per_node
    if devices > hardware.gpus_per_node:
        problems.append(
            f"trainer.devices={devices}, but hardware={hardware.name} has "
            f"{hardware.gpus_per_node} per machine; type hardware={devices}x{hardware.name}"
        )
    if trainer.nodes > hardware.num_nodes:
        each = f"{hardware.gpus_per_node}x{hardware.name}"
        problems.append(
            f"trainer.num_nodes={trainer.num_nodes}, but the hardware has {hardware.num_nodes}; "
            f"type hardware={trainer.nodes}x{each}"
        )
    if problems:
        raise UserError(problems)
    nodes = trainer.nodes if trainer.nodes > 1 else hardware.num_nodes
    return replace(hardware, gpus_per_node=devices, num_nodes=nodes)


def with_devices_of(config: TrainConfig, hardware: HardwareConfig) -> TrainConfig:
    """Return the settings with the number of devices and nodes of the hardware."""
    trainer = replace(config.trainer, devices=hardware.gpus_per_node, num_nodes=hardware.num_nodes)
    return replace(config, trainer=trainer)


def with_strategy_of(run: PlannedRun, config: TrainConfig) -> TrainConfig:
    """Return the settings with the strategy of `run`, and with its accumulation if they give it."""
    trainer = config.trainer
    if trainer.global_batch_size is None:
        trainer = replace(trainer, gradient_accumulation_steps=run.accumulation)
    return replace(config, strategy=run.strategy, trainer=trainer)


def check_planned(
    config: TrainConfig, hardware: HardwareConfig, config_json: Mapping[str, Any]
) -> list[str]:
    """List conflicts between settings, and between settings and the base."""
    placed = with_devices_of(config, hardware)
    problems = check_compatibility(placed, hardware.gpus_per_node, on_this_machine=False)
    base = BaseDescription(name=config.model.path or "model.architecture", config=config_json)
    if config.data.sequence_len is not None:
        problems += check_sequence_len(config.data.sequence_len, base, config.model.context_len)
    kind, rope = rope_scaling(text_numbers(config_json))
    if config.model.context_len is not None and base.context_len and kind != "default":
        problems.append(scaled_error(config.model.context_len, kind, rope, base.context_len))
    size = tensor_parallel_size(config.strategy, hardware.gpus_per_node)
    keeps_scores = _keeps_scores(config, config_json, hardware)
    problems += check_split(config.strategy, base, "eager" if keeps_scores else "sdpa")
    return problems + check_tensor_parallel(size, base)


def plan_run(
    config: TrainConfig,
    hardware: HardwareConfig,
    config_json: Mapping[str, Any],
    *,
    model: PlannedModel | None = None,
    strategies: Mapping[str, StrategyConfig],
) -> tuple[PlannedRun, list[str]]:
    """Return the planned run on the hardware, and a line for each `auto` that was resolved.

    `strategies`: settings of the strategies that `auto` chooses from, by name.
    """
    strategies = with_states_of(config.strategy, strategies)
    precision = _precision(config.trainer.precision, hardware)
    model = model or build_planned_model(config.model, config_json, config.adapter, precision)
    run = build_planned_run(
        config,
        hardware,
        model,
        precision=precision,
        sequence_len=_sequence_len(config, config_json),
        keeps_scores=_keeps_scores(config, config_json, hardware),
        groups_documents=_groups_documents(config, model, config_json, hardware),
        is_stored=is_stored_quantized(config_json),
    )
    run = replace(run, accumulation=max(1, config.trainer.accumulation(run.num_data_ranks)))
    lines: list[str] = []
    compiles, mode = config.trainer.compile, config.recompute.mode
    has_micro_batch = config.trainer.micro_batch_size != "auto"

    def conflicts(under: PlannedRun) -> list[str]:
        return check_planned(with_strategy_of(under, config), hardware, config_json)

    if config.strategy.name == "auto":
        choice = choose_strategy(
            run,
            strategies,
            recompute_modes(mode, compiles=compiles),
            is_stored=is_stored_quantized(config_json),
            has_micro_batch=has_micro_batch,
            allows=lambda split: not conflicts(split),
        )
        run = run.under(choice.strategy)
        lines.append(f"strategy: {choice}")
        if problems := conflicts(run):
            raise UserError([f"strategy=auto is {choice}; but {problem}" for problem in problems])
    if mode == "auto":
        chosen = choose_recompute(run, compiles=compiles, has_micro_batch=has_micro_batch)
        number = chosen.num_layers or run.recompute_layers
        run = replace(run, recompute=chosen.name, recompute_layers=number)
        lines.append(f"recompute: {chosen}")
    if not has_micro_batch:
        packs = choose_micro_batch(run)
        run = run.with_micro_batch(packs.size)
        lines.append(f"micro-batch: {packs}")
    return run, lines


def build_planned_run(
    config: TrainConfig,
    hardware: HardwareConfig,
    model: PlannedModel,
    *,
    precision: str,
    sequence_len: int,
    keeps_scores: bool,
    groups_documents: bool = False,
    fuses_norm_and_gate: bool | None = None,
    is_stored: bool = False,
    is_on_gpu: bool = True,
) -> PlannedRun:
    """Return the run of the settings; placeholders stand for settings that are `auto`.

    `fuses_norm_and_gate`: None = as on a GPU with Liger's kernels. `is_stored`: whether the base's
    files are quantized, by any method; they count as nf4.
    """
    trainer, adapter, quantization = config.trainer, config.adapter, config.quantization
    _check_precision(trainer.precision, quantization.method, model, hardware if is_on_gpu else None)
    if fuses_norm_and_gate is None:
        fuses_norm_and_gate = trainer.kernels == "auto" or trainer.compile
    return PlannedRun(
        model=model,
        hardware=hardware,
        strategy=config.strategy,
        quantization=replace(quantization, method="nf4") if is_stored else quantization,
        recompute="full" if config.recompute.mode == "auto" else config.recompute.mode,
        recompute_every=config.recompute.every,
        recompute_layers=config.recompute.num_layers,
        precision=precision,
        trains_in_fp8=trainer.precision == "fp8",
        optimizer=config.optimizer.name,
        micro_batch_size=trainer.least_micro_batch,
        sequence_len=sequence_len,
        trains_base=saves_whole_model(adapter),
        drops_inputs=isinstance(adapter, LoraConfig) and adapter.dropout > 0,
        fuses_adapters=quantization.method != "int8"
        and not (isinstance(adapter, LoraConfig) and adapter.use_dora),
        fuses_norm_and_gate=fuses_norm_and_gate,
        fuses_loss=trainer.kernels == "auto" and not trainer.compile,
        keeps_scores=keeps_scores,
        groups_documents=groups_documents,
        runs_base=config.objective.reference_source == "base",
        runs_others=isinstance(config.objective, KtoConfig),
        recomputes_head=isinstance(config.objective, PairConfig)
        and not config.objective.has_own_head,
        teacher=_plan_teacher(config.objective, precision),
        teacher_quantization=config.objective.teacher_quantization
        if isinstance(config.objective, DistillConfig)
        else "none",
        num_checkpoints=trainer.checkpoint.keep_last + trainer.checkpoint.keep_best,
        is_on_gpu=is_on_gpu,
        stream=config.model.stream,
    )


def _check_precision(
    precision: str, quantization: str, model: PlannedModel, hardware: HardwareConfig | None
) -> None:
    if hardware and "fp8" in (quantization, precision) and not hardware.fp8_tflops:
        key, instead = "trainer.precision=fp8", "trainer.precision=bf16"
        if quantization == "fp8":
            key, instead = "quantization=fp8", "quantization=nf4 or quantization=none"
        raise UserError(
            f"{key}: {hardware.name} has no FP8 products (hardware.fp8_tflops=0); type {instead}"
        )
    if model.expert_layers and quantization in ("int8", "fp8"):
        raise UserError(
            f"quantization={quantization} would leave the experts of {model.name} as they "
            "are, most of its weights; type quantization=nf4, or quantization=none"
        )


def _plan_teacher(objective: ObjectiveConfig, precision: str) -> PlannedModel | None:
    """Return the teacher of a run's steps; None without one, or if its sizes are not known here.

    One whose log-probabilities are cached is gone before the first step.
    """
    is_cached = isinstance(objective, DistillConfig) and objective.teacher_logits == "cached"
    if (path := objective.teacher_path) is None or is_cached:
        return None
    teacher = None
    try:
        config_json = read_config_json(ModelConfig(path=path))
        teacher = model_from_config_json(path, config_json, LoraConfig(), precision)
    except UserError as error:
        log.debug("%s", error)
    if teacher is None:
        _warn_unknown_teacher(path)
    return teacher


@functools.cache
def _warn_unknown_teacher(path: str) -> None:
    """Say it once, and not for each of a plan's candidates."""
    log.warning(
        "objective.teacher=%s: its config.json is not on this machine, or of a family whose "
        "sizes it does not tell: the teacher's memory and time are not in the plan",
        path,
    )


def is_stored_quantized(config_json: Mapping[str, Any]) -> bool:
    """Return whether the base's files are quantized, according to config.json."""
    return bool(config_json.get("quantization_config"))


def _has_flash(config: TrainConfig, hardware: HardwareConfig) -> bool:
    return hardware.has_bf16 and _precision(config.trainer.precision, hardware) != "fp32"


def _keeps_scores(
    config: TrainConfig, config_json: Mapping[str, Any], hardware: HardwareConfig
) -> bool:
    """Return whether attention is not one kernel; assumes for `auto` that flash-attn is missing."""
    backend = config.attention.backend
    family = family_of(config_json.get("model_type"))
    has_kernel = family.has_attention_kernel and not config_json.get("attn_logit_softcapping")
    has_kernel = has_kernel and (not family.has_sinks or _has_flash(config, hardware))
    return backend == "eager" or (backend == "auto" and not has_kernel)


def _groups_documents(
    config: TrainConfig,
    model: PlannedModel,
    config_json: Mapping[str, Any],
    hardware: HardwareConfig,
) -> bool:
    """Return whether attention is sdpa, which `auto` uses if FlashAttention is not supported."""
    backend = config.attention.backend
    if model.is_pair or _keeps_scores(config, config_json, hardware):
        return False
    base = BaseDescription(config=config_json)
    no_flash = not _has_flash(config, hardware)
    no_flash = no_flash or model.widths.widest_head > MAX_FLASH_HEAD_DIM
    no_flash = no_flash or any(map(base.get, _NO_FLASH))
    return backend == "sdpa" or (backend == "auto" and no_flash)


def _precision(typed: str, hardware: HardwareConfig) -> str:
    if typed == "auto":
        return "bf16" if hardware.has_bf16 else "fp32"
    if typed.startswith(("bf16", "fp8")) and not hardware.has_bf16:
        raise UserError(
            f"trainer.precision={typed}: {hardware.name} does not support bf16; type "
            "trainer.precision=fp16 or fp32"
        )
    return "bf16" if typed == "fp8" else typed


def _sequence_len(config: TrainConfig, config_json: Mapping[str, Any]) -> int:
    if config.data.sequence_len is not None:
        return config.data.sequence_len
    context = BaseDescription(config=config_json).context_len
    return min(DEFAULT_SEQUENCE_LEN, context or DEFAULT_SEQUENCE_LEN)


def estimate_tokens(config: TrainConfig, sequence_len: int) -> tuple[int, str]:
    """Estimate the tokens of all epochs, with a note on how; DataError if that is not possible."""
    path, file = config.model.tokenizer_path or config.model.path, None
    if path is not None:
        file = Path(path) / "tokenizer.json"
        file = file if file.is_file() else newest_cached_file(path, file.name)
    epoch = estimate_epoch(
        with_format(config.data, config.objective.row_format),
        sequence_len=sequence_len,
        tokenizer=str(path),
        count_tokens=count_bytes if file is None else _count_by(file),
    )
    epochs = config.trainer.num_epochs
    guessed = "" if file else f" at {_BYTES_OF_TOKEN} bytes a token: its tokenizer is not here"
    times = f"{epochs} x " if epochs > 1 else ""
    return epoch.tokens * epochs, f"an estimate by {times}{epoch.how}{guessed}"


def count_bytes(texts: Sequence[str]) -> list[int]:
    """Estimate the number of tokens of each text from its bytes."""
    return [-(-len(text.encode(errors="replace")) // _BYTES_OF_TOKEN) for text in texts]


def _count_by(file: Path) -> Callable[[Sequence[str]], list[int]]:
    from tokenizers import Tokenizer

    def count(texts: Sequence[str]) -> list[int]:
        with reading(file, "download it again, or type plan.tokens=N"):
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding) for encoding in encoded]

    return count
