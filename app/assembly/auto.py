"""Resolve the `auto` settings of a run: strategy, micro-batch size and recompute, by its plan.

The chosen micro-batch size is probed before a run, where every rank holds all weights, so that a
rank that runs out of memory in a forward or backward pass leaves no other rank waiting: it is
halved until a real micro-batch fits. The packs per optimizer step never change.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from app.assembly.base import batch_spec
from app.config import TrainConfig, settings_of
from app.model.description import BaseDescription
from app.model.quantization import stored_quantization
from app.planning.choose import (
    MicroBatchChoice,
    RecomputeChoice,
    StrategyChoice,
    choose_micro_batch,
    choose_recompute,
    choose_strategy,
    recompute_modes,
)
from app.planning.memory import PlannedRun
from app.planning.planned import load_strategies, with_strategy_of
from app.planning.training import (
    Estimate,
    check_disk,
    check_room,
    detect_hardware,
    estimate_training,
    plan_training,
    suggest_overrides,
)
from app.preflight import check_compatibility
from app.preflight.files import check_split
from app.process.launch import is_first_rank
from app.strategy import settings as strategies
from app.training.optimizers import embedding_weights, states_of_weights, vocabulary_weights
from app.training.trainer import Environment, adapts_to_small_data
from common.errors import UserError

if TYPE_CHECKING:
    import torch

    from app.assembly.base import Base
    from app.run import Run
    from app.training.module import FinetuneModule
    from data_modules import Batch, FinetuneDataModule

log = logging.getLogger(__name__)


def resolve_auto(
    config: TrainConfig, base: Base, data: FinetuneDataModule, env: Environment, run: Run
) -> tuple[TrainConfig, Environment, Estimate | None]:
    """Return settings and environment with each `auto` resolved, and the estimated cost of the run.

    The estimate is None for a model whose memory cannot be planned. UserError if the run does not
    fit and plan.enforce refuses that.
    """
    env = _resolve_accumulation(config, data, env, run)
    plan = plan_training(
        config,
        env,
        detect_hardware(env, config.trainer.nodes, partial(settings_of, "hardware")),
        whole=base.architecture.to_dict(),
        backend=base.backend,
        sequence_len=data.sequence_len,
        build_on_meta=base.shapes_builder(config, env),
    )  # None if the memory of such a model cannot be planned
    config = replace(config, strategy=resolve_strategy(config, base, env, plan))
    env, plan = env.under(config.strategy), plan and plan.under(config.strategy)
    data.set_batching(batch_spec(config, env))
    config, env = resolve_micro_batch(config, data, env, run, plan)
    plan = plan and plan.with_micro_batch(env.micro_batch_size)
    config = resolve_recompute(config, env, plan)
    if plan is None:
        return config, env, None
    mode = config.recompute.mode
    number = config.recompute.num_layers
    plan = replace(plan, recompute="none" if mode == "auto" else mode, recompute_layers=number)
    if config.strategy.offload_optimizer == "disk":
        check_disk(plan, strategies.states_folder(config.strategy, run.folder))
    return config, env, check_plan(config, base, data, plan)


def resolve_strategy(
    config: TrainConfig, base: Base, env: Environment, plan: PlannedRun | None
) -> strategies.StrategyConfig:
    """Return the strategy of `config`; `auto` becomes one whose memory fits a GPU."""
    if config.strategy.name != "auto":
        return config.strategy
    known = strategies.with_states_of(config.strategy, load_strategies(settings_of))
    if plan is None and env.num_ranks > 1:
        name = "ddp" if env.accelerator == "cpu" else "fsdp"
        choice = StrategyChoice(known[name], "the sizes of the model's layers are unknown")
    elif plan is None:
        choice = StrategyChoice(known["single"], "1 process")
    else:
        choice = choose_strategy(
            plan,
            known,
            recompute_modes(config.recompute.mode, compiles=config.trainer.compile),
            is_stored=stored_quantization(base.architecture) is not None,
            has_deepspeed=find_spec("deepspeed") is not None,
            has_micro_batch=config.trainer.micro_batch_size != "auto",
            allows=lambda split: not _new_conflicts(config, with_strategy_of(split, config), base),
        )
    chosen = replace(config, strategy=choice.strategy)
    if plan is not None:
        chosen = with_strategy_of(plan.under(choice.strategy), config)
    if problems := _new_conflicts(config, chosen, base):
        raise UserError([f"strategy=auto is {choice}; but {problem}" for problem in problems])
    if is_first_rank():
        level = logging.DEBUG if choice.strategy.name == "single" else logging.INFO
        log.log(level, "strategy: %s", choice)
    return choice.strategy


def _new_conflicts(config: TrainConfig, chosen: TrainConfig, base: Base) -> list[str]:
    """List conflicts of a chosen strategy that the settings did not have without it."""
    before = check_compatibility(config)
    problems = [problem for problem in check_compatibility(chosen) if problem not in before]
    known = BaseDescription(name=str(config.model.path), config=base.architecture.to_dict())
    return problems + check_split(chosen.strategy, known, base.backend)


def _resolve_accumulation(
    config: TrainConfig, data: FinetuneDataModule, env: Environment, run: Run
) -> Environment:
    """Resolve trainer.gradient_accumulation_steps=auto: set it in `data`, and return `env` with it.

    Small data lowers it; a resumed run keeps its global batch.
    """
    trainer = config.trainer
    if not trainer.has_auto_batch:
        return env
    if (before := run.global_batch(env.num_data_ranks)) is not None:
        data.set_accumulation(before["packs"] // (env.num_data_ranks * env.micro_batch_size))
    elif adapts_to_small_data(trainer, config.strategy) and (
        sentence := data.adapt_to_small_data()
    ):
        if is_first_rank():
            log.info("%s", sentence)
    else:
        return env
    return replace(env, accumulation=data.batching.accumulation_steps)


def resolve_micro_batch(
    config: TrainConfig,
    data: FinetuneDataModule,
    env: Environment,
    run: Run,
    plan: PlannedRun | None,
) -> tuple[TrainConfig, Environment]:
    """Resolve trainer.micro_batch_size=auto: set it in `data`, and return `env` with it.

    A resumed run keeps its size. On a GPU the size is estimated from the plan, together with
    recompute=auto in `config`, and probed before the first step if possible. The packs of a step
    stay the same. `plan` has the run's strategy.
    """
    if config.trainer.micro_batch_size != "auto":
        return config, env
    is_tried = False
    if (before := run.global_batch(env.num_data_ranks)) is not None:
        choice = MicroBatchChoice(before["micro_batch_size"], "as in the resumed run")
    elif config.data.streaming:
        choice = MicroBatchChoice(1, "the order of a stream depends on it")
    elif env.accelerator == "cpu":
        choice = MicroBatchChoice(1, "larger sizes are chosen by the memory of a GPU")
    elif plan is None:
        choice = MicroBatchChoice(1, "the sizes of the model's layers are unknown")
    else:
        is_tried = strategies.can_probe_micro_batch(plan.strategy)
        config = resolve_recompute(config, env, plan, has_micro_batch=False)
        mode, number = config.recompute.mode, config.recompute.num_layers
        choice = choose_micro_batch(replace(plan, recompute=mode, recompute_layers=number))
    if is_first_rank():
        log.log(logging.INFO if is_tried else logging.DEBUG, "micro-batch: %s", choice)
    data.set_micro_batch_size(choice.size)
    env = env.with_micro_batch(choice.size)
    return config, replace(env, probes_micro_batch=is_tried and choice.size > 1)


def resolve_recompute(
    config: TrainConfig, env: Environment, plan: PlannedRun | None, *, has_micro_batch: bool = True
) -> TrainConfig:
    """Return `config` with recompute=auto resolved by what fits a GPU; unchanged on a CPU.

    `plan` has the run's strategy, and with `has_micro_batch` its micro-batch size.
    """
    if config.recompute.mode != "auto" or env.accelerator == "cpu":
        return config
    choice = RecomputeChoice("full", "the memory of this run cannot be planned")
    if plan is not None:
        compiles = config.trainer.compile
        choice = choose_recompute(plan, compiles=compiles, has_micro_batch=has_micro_batch)
    if is_first_rank():
        log.info("recompute: %s", choice)
    number = choice.num_layers or config.recompute.num_layers
    return replace(config, recompute=replace(config.recompute, mode=choice.name, num_layers=number))


def check_plan(
    config: TrainConfig, base: Base, data: FinetuneDataModule, plan: PlannedRun
) -> Estimate:
    """Log the estimated cost of a run; UserError if plan.enforce refuses it."""
    estimate = estimate_training(plan)
    if is_first_rank():
        # Printed for a GPU, which may be rented; for a CPU only in train.log.
        log.log(
            logging.INFO if plan.is_on_gpu else logging.DEBUG,
            "memory: %s",
            estimate.line(data.total_steps),
        )
    whole = base.architecture.to_dict()
    strategies = partial(load_strategies, settings_of)
    suggest = partial(suggest_overrides, config, plan, whole, strategies)
    check_room(plan, estimate, config.plan.enforce, suggest)
    return estimate


def probe_micro_batch(module: FinetuneModule, optimizer: str | None) -> None:
    """Run the fullest micro-batch forward and backward; halve its size until all ranks have room.

    Memory is reserved for the states that `optimizer` allocates in its first step; None if they are
    on a disk. The gradients are discarded. Raises OutOfMemoryError if a single pack does not fit.
    """
    import torch

    strategy, data = module.strategy, cast("Any", module.trainer).datamodule
    while True:
        part = strategy.shard_batch(data.fullest_batch()).to(strategy.root_device)
        failure = _probe(module, part, optimizer)
        module.reset_step()
        gc.collect()
        if strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()
        fits: Any = torch.tensor(failure is None, dtype=torch.int32, device=strategy.root_device)
        if module.trainer.strategy.all_gather(fits).min().item():
            return
        batching = data.batching
        packs = batching.micro_batch_size * batching.accumulation_steps
        smaller = [
            size for size in strategies.divisors(packs) if size <= batching.micro_batch_size // 2
        ]
        if not smaller:
            raise failure or torch.OutOfMemoryError("another rank has no room for a micro-batch")
        if module.global_rank == 0:
            log.warning(
                "micro-batch: %d packs do not fit in memory; using %d instead",
                batching.micro_batch_size,
                smaller[-1],
            )
        data.set_micro_batch_size(smaller[-1])


def _probe(
    module: FinetuneModule, batch: Batch, optimizer: str | None
) -> torch.OutOfMemoryError | None:
    """Run a step's passes with room for the optimizer states; return this rank's error, if any."""
    import torch

    trainer: Any = module.trainer
    on_disk = 2 * strategies.STATE_BLOCK_BYTES
    num_bytes = on_disk if optimizer is None else allocated_states(module.model, optimizer)
    try:
        states = torch.empty(num_bytes, dtype=torch.uint8, device=module.strategy.root_device)
        # Twice: from the second micro-batch on, gradients are in memory next to the activations.
        for _ in range(min(2, trainer.datamodule.batching.accumulation_steps)):
            with module.trainer.precision_plugin.forward_context():
                loss = module.loss(batch)
            loss.backward()
        del states
    except torch.OutOfMemoryError as error:
        return error.with_traceback(None)  # its frames keep the activations alive
    return None


def allocated_states(model: torch.nn.Module, optimizer: str) -> int:
    """Return the bytes of the states that an optimizer allocates on the device."""
    parts = {id(weight): "head" for weight in vocabulary_weights(model)}
    parts |= {id(weight): "embedding" for weight in embedding_weights(model)}
    total = 0.0
    for weight in model.parameters():
        if weight.requires_grad:
            part = parts.get(id(weight), "rest")
            total += states_of_weights(optimizer, part, weight.numel(), weight.nbytes)
    return int(total)
