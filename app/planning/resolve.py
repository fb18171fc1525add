"""What `auto` is for the GPUs of a run: recompute and the micro-batch, by the memory that it takes.

Choosing needs the model's shapes and the longest pack; no weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from app.model.activation_memory import FP32, HALF, Kept, widths_of
from app.model.adapter import LoraConfig, saves_whole_model
from app.model.recompute import Memory, choose_recompute
from app.process.launch import is_first_rank
from app.strategy.settings import StrategyConfig
from app.training.micro_batch import MicroBatchChoice, can_try, choose_micro_batch
from app.training.model_states import gather_memory, measure_footprint
from app.training.trainer import Environment

if TYPE_CHECKING:
    from app.assembly import Base
    from app.config import TrainConfig
    from app.run import Run
    from data_modules import FinetuneDataModule

log = logging.getLogger(__name__)


def resolve_recompute(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
) -> TrainConfig:
    """Return `config` with recompute=auto chosen by what fits a GPU; on a CPU it stays as it is."""
    if config.recompute.mode != "auto" or env.accelerator == "cpu":
        return config
    memory = _memory_of(config, base, data, env, strategy)(env.micro_batch_size)
    choice = choose_recompute(memory, every=config.recompute.every, compiles=config.trainer.compile)
    if is_first_rank():
        log.info("recompute: %s", choice)
    return replace(config, recompute=replace(config.recompute, mode=choice.mode))


def resolve_micro_batch(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
    run: Run,
) -> Environment:
    """Return `env` with trainer.micro_batch_size=auto chosen, and have `data` take it.

    A resumed run takes its own again. What a GPU has room for is chosen by arithmetic; the module
    tries it. The packs of a step stay the same.
    """
    if config.trainer.micro_batch_size != "auto":
        return env
    is_tried = False
    if (before := run.micro_batch_size(env.num_data_ranks)) is not None:
        choice = MicroBatchChoice(before, "as the run that is resumed")
    elif config.data.streaming:
        choice = MicroBatchChoice(1, "the order of a stream depends on it")
    elif env.accelerator == "cpu":
        choice = MicroBatchChoice(1, "more are for a GPU, whose memory says how many")
    else:
        is_tried = can_try(strategy)
        choice = choose_micro_batch(
            _memory_of(config, base, data, env, strategy),
            env.packs_of_rank,
            config.recompute,
            compiles=config.trainer.compile,
            is_tried=is_tried,
        )
    if is_first_rank():
        log.info("micro-batch: %s", choice)
    data.take_together(choice.size)
    env = env.with_micro_batch(choice.size)
    return replace(env, tries_micro_batch=is_tried and choice.size > 1)


def _memory_of(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
    strategy: StrategyConfig,
) -> Callable[[int], Memory]:
    """Return a function from packs at once to the memory that a GPU has for them and they take."""
    build = base.shapes_builder(config, env)
    footprint = build and measure_footprint(build(), config.optimizer.name, config.quantization)

    def memory_of(packs: int) -> Memory:
        return gather_memory(
            env,
            strategy,
            config.trainer.num_nodes,
            footprint,
            widths_of(base.architecture),
            _what_is_kept(config, base, packs * data.sequence_len, env),
        )

    return memory_of


def _what_is_kept(config: TrainConfig, base: Base, tokens: int, env: Environment) -> Kept:
    """Return what changes the activations of a micro-batch of `tokens` on one device."""
    adapter, trainer = config.adapter, config.trainer
    is_pair = base.architecture.is_encoder_decoder
    has_liger = trainer.kernels == "auto" and find_spec("liger_kernel") is not None
    return Kept(
        tokens=tokens * (2 if is_pair else 1),
        width=FP32 if env.precision == "fp32" else HALF,
        residual=base.dtype.itemsize,
        fuses_norm_and_gate=has_liger or trainer.compile,
        trains_base=saves_whole_model(adapter),
        drops=isinstance(adapter, LoraConfig) and adapter.dropout > 0,
        fuses_adapters=config.quantization.method != "int8"
        and not (isinstance(adapter, LoraConfig) and adapter.use_dora),
        keeps_scores=is_pair or base.backend == "eager",
    )
