"""The parts of `app.train` that train a base, for benchmarks without its start and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any


def build_data(
    base: Path,
    datasets: Sequence[Any],
    sequence_len: int,
    *,
    seed: int = 0,
    cache_dir: Path | None = None,
    **batching: Any,
) -> Any:
    """Return the rows of `datasets` in packs, without validation rows; not set up yet."""
    from transformers import AutoTokenizer

    from data_modules import (
        BatchSpec,
        DataConfig,
        DataSpec,
        FinetuneDataModule,
        ModelSpec,
        PackingConfig,
    )

    config = DataConfig(datasets=list(datasets), sequence_len=sequence_len, val_set_size=0)
    if cache_dir is not None:
        config.cache_dir = str(cache_dir)
    return FinetuneDataModule(
        DataSpec(
            config=config,
            packing=PackingConfig(),
            tokenizer=AutoTokenizer.from_pretrained(base),
            model=ModelSpec(context_len=sequence_len),
            batching=BatchSpec(**batching),
            seed=seed,
        )
    )


def builder(base: Path, adapter: Any, precision: str = "fp32") -> Callable[..., Any]:
    """Return what builds the model."""
    from app.model.base import ModelConfig
    from app.model.build import build_model
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig

    parts = (QuantizationConfig(), "sdpa", adapter, RecomputeConfig(), precision)
    return partial(build_model, ModelConfig(path=str(base)), *parts)


def fit(
    build: Callable[..., Any],
    adapter: Any,
    data: Any,
    config: Any,
    folder: Path,
    *,
    env: Any,
    strategy: Any,
    steps: int,
    lr: float,
    callbacks: Sequence[Any],
    loggers: Sequence[Any] = (),
    losses: Sequence[Any] = (),
    **module: Any,
) -> None:
    """Train at a constant learning rate; `losses`: further loggers, of metrics alone."""

    from app.training.metrics import Metrics
    from app.training.module import FinetuneModule
    from app.training.objective.objective import Sft
    from app.training.optimizers import AdamWConfig, ScheduleConfig, build_optimizer
    from app.training.trainer import build_lightning_trainer

    trained = FinetuneModule(
        build,
        backend="sdpa",
        objective=Sft(),
        build_optimizer=partial(
            build_optimizer, config=AdamWConfig(), adapter=adapter, lr=lr, fused=True
        ),
        schedule=ScheduleConfig(shape="constant", warmup_steps=0),
        total_steps=steps,
        is_packed=True,
        metrics=Metrics(data.dataset_names, [*loggers, *losses], config.log_every_steps),
        **module,
    )
    trainer = build_lightning_trainer(
        config,
        env=env,
        strategy=strategy,
        total_steps=steps,
        loggers=list(loggers),
        callbacks=list(callbacks),
        folder=folder,
    )
    trainer.fit(trained, datamodule=data)
