"""Build the data module of a verb; for a training run also prepare, audit and plan its data."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from app.config import EvaluateConfig, TrainConfig
from app.model.tokenizer import with_chat_template
from app.process.launch import is_first_rank
from app.strategy.settings import pipeline_parallel_size
from data_modules import BatchSpec, DataSpec, FinetuneDataModule, ModelSpec, with_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.assembly.base import Base
    from app.run import Run
    from app.training.trainer import Environment

log = logging.getLogger(__name__)


def build_datamodule(
    config: TrainConfig | EvaluateConfig,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    batching: BatchSpec,
    *,
    first_rows: int | None = None,
) -> FinetuneDataModule:
    """Build the data module of a verb; the caller calls its `setup`."""
    data = with_format(config.data, config.objective.row_format)
    data = with_chat_template(data, config.model, tokenizer)
    return FinetuneDataModule(
        DataSpec(
            config=data,
            packing=config.packing,
            tokenizer=tokenizer,
            model=spec,
            batching=batching,
            seed=config.seed,
            first_rows=first_rows,
        )
    )


def batch_spec(config: TrainConfig, env: Environment) -> BatchSpec:
    """Return how rows become the steps of a training run under its strategy."""
    trainer = config.trainer
    return BatchSpec(
        micro_batch_size=env.micro_batch_size,
        accumulation_steps=env.accumulation,
        num_ranks=env.num_data_ranks,
        num_epochs=trainer.num_epochs,
        max_steps=trainer.max_steps,
        row_multiple=env.row_multiple,
        row_slices=env.context_size,
        # Compiled layers need batches of one size, as do messages between pipeline stages.
        pad_packs=trainer.compile or pipeline_parallel_size(config.strategy) > 1,
    )


def build_data(config: TrainConfig, base: Base, env: Environment, run: Run) -> FinetuneDataModule:
    """Prepare, audit and plan the data of all steps of a training run, before weights are read."""
    data = build_datamodule(config, base.tokenizer, base.spec, batch_spec(config, env))
    data.first_step = run.step
    data.setup("fit")
    if config.evaluation.exact_match:
        data.prompts(config.evaluation.max_rows)  # warns about prompts that are too long
    if is_first_rank():
        for line in data.summary():
            log.info("%s", line)
        for line in (*data.report.lines(), *data.audit.notes()):
            log.debug("data: %s", line)
        data.audit.check()
    return data
