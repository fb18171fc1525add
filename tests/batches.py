"""Data modules of runs, and their micro-batches one after the other."""

from __future__ import annotations

from itertools import chain

from transformers import AutoTokenizer

from app.config import TrainConfig
from data_modules import Batch, BatchSpec, DataSpec, FinetuneDataModule, ModelSpec
from tests.tiny import TINY_BASE


def datamodule_of(config: TrainConfig, **batching: int) -> FinetuneDataModule:
    """Build and set up the data module of a run on the shipped base."""
    module = FinetuneDataModule(
        DataSpec(
            config=config.data,
            packing=config.packing,
            tokenizer=AutoTokenizer.from_pretrained(TINY_BASE),
            model=ModelSpec(context_len=1024),
            batching=BatchSpec(**batching),
            seed=config.seed,
        )
    )
    module.setup("fit")
    return module


def micro_batches(module: FinetuneDataModule) -> list[Batch]:
    """Return this rank's micro-batches of all steps."""
    return list(chain.from_iterable(module.train_dataloader()))
