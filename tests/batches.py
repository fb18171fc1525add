"""Data modules of runs, and their micro-batches one after the other."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from app.config import TrainConfig
from data_modules import (
    Batch,
    BatchSpec,
    DataConfig,
    DataSpec,
    FinetuneDataModule,
    ModelSpec,
    PackingConfig,
)
from tests.tiny import TINY_BASE


def datamodule_of(config: TrainConfig, **batching: int) -> FinetuneDataModule:
    """Build and set up the data module of a run on the shipped base."""
    return open_data(config.data, packing=config.packing, seed=config.seed, **batching)


def open_data(
    config: DataConfig,
    base: Path = TINY_BASE,
    *,
    packing: PackingConfig | None = None,
    seed: int = 42,
    rank: int = 0,
    decoder_start: int | None = None,
    **batching: Any,
) -> FinetuneDataModule:
    """Build and set up a data module with the tokenizer of `base`; `batching` as for BatchSpec."""
    spec = BatchSpec(**batching)
    module = FinetuneDataModule(
        DataSpec(
            config=config,
            packing=packing or PackingConfig(),
            tokenizer=AutoTokenizer.from_pretrained(base),
            model=ModelSpec(context_len=1024, decoder_start_token_id=decoder_start),
            batching=spec,
            seed=seed,
        )
    )
    if spec.num_ranks > 1:
        ranks = {"num_replicas": spec.num_ranks, "rank": rank}
        module.trainer = SimpleNamespace(
            world_size=spec.num_ranks, distributed_sampler_kwargs=ranks
        )
    module.setup("fit")
    return module


def micro_batches(module: FinetuneDataModule) -> list[Batch]:
    """Return this rank's micro-batches of all steps."""
    return list(chain.from_iterable(module.train_dataloader()))
