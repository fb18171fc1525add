"""Train: config in, verified adapter out. `python -m app.train +experiment=quickstart`."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from app.config import TrainConfig, run_verb, save_config
from app.manifest import save_manifest
from app.output import decide_run_dir
from app.quiet import is_offline, quiet_libraries
from app.sweep import run_sweep

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> float | None:
    """Fine-tune as `config` says; return the final validation loss, None on ranks above 0."""
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model, config.data))

    # Imported here and not above: --help and a config error must not wait for torch.
    import lightning as L

    from app.evaluation.comparison import named, say_comparison
    from app.evaluation.generation import exact_match
    from app.model.adapter import DEFAULT_LR
    from app.model.attention import choose_backend
    from app.model.build import build_model, load_architecture, save_model
    from app.model.tokenizer import build_tokenizer
    from app.strategy.build import build_strategy
    from app.training.callbacks.progress import ProgressBar
    from app.training.curves import Curves
    from app.training.logger import build_loggers
    from app.training.module import FinetuneModule
    from app.training.trainer import build_trainer, resolve_placement
    from data_modules import FinetuneDataModule

    # Where it runs, and what follows from that.
    placement = resolve_placement(config.trainer)
    precision = placement.precision
    backend = choose_backend(config.attention, placement.accelerator, precision)
    lr = config.optimizer.lr or DEFAULT_LR[config.adapter.name]
    L.seed_everything(config.seed, verbose=False)

    # What it learns from: the whole plan of the run is known before a weight is read.
    tokenizer = build_tokenizer(config.model)
    architecture = load_architecture(config.model)
    datamodule = FinetuneDataModule(
        config.data,
        config.packing,
        tokenizer,
        context_len=architecture.max_position_embeddings,
        micro_batch_size=config.trainer.micro_batch_size,
        accumulation_steps=placement.accumulation,
        num_ranks=placement.num_ranks,
        num_epochs=config.trainer.num_epochs,
        max_steps=config.trainer.max_steps,
        seed=config.seed,
    )
    datamodule.setup("fit")
    for line in datamodule.report.lines():
        log.info("data: %s", line)
    log.info("plan: %s; lr %g", datamodule.plan.line(), lr)
    log.info("device: %s, attention %s", placement, backend)

    # How it learns.
    loggers = build_loggers(config.logger, folder, datamodule.dataset_names)
    curves = Curves(datamodule.dataset_names, loggers, config.trainer.log_every_steps)
    module = FinetuneModule(
        partial(build_model, config.model, backend, config.adapter, config.recompute, precision),
        backend=backend,
        optimizer=config.optimizer,
        schedule=config.schedule,
        lr=lr,
        # Lightning clips nothing itself here, yet refuses fused optimizers beside a loss scaler.
        fused_optimizer=precision != "fp16",
        total_steps=datamodule.total_steps,
        curves=curves,
    )
    trainer = build_trainer(
        config.trainer,
        placement=placement,
        strategy=build_strategy(config.strategy, placement.num_ranks),
        total_steps=datamodule.total_steps,
        loggers=loggers,
        callbacks=[ProgressBar(curves)],
        folder=folder,
    )
    if trainer.is_global_zero:
        save_config(config, folder / "config.yaml")
        save_manifest(
            folder,
            seed=config.seed,
            data=[asdict(dataset) for dataset in datamodule.report.datasets],
            template_sha256=datamodule.template_hash,
        )
    trainer.fit(module, datamodule=datamodule)
    if not trainer.is_global_zero:
        return None

    # What is left of it: saved, reopened and checked, compared with its base.
    model = module.model.to(trainer.strategy.root_device)
    probe_ids = datamodule.train_examples[0].input_ids[:64].tolist()
    saved = save_model(model, config.adapter, architecture, folder, probe_ids)
    tokenizer.save_pretrained(saved)
    metrics = curves.summary()
    if curves.validations:
        metrics |= named("base", curves.validations[0]) | named("tuned", curves.validations[-1])
    if config.evaluation.exact_match:
        prompts = datamodule.prompts(config.evaluation.max_rows)
        metrics |= named("tuned", exact_match(model, tokenizer, prompts, config.evaluation))
        with untrained(model, config) as base:
            metrics |= named("base", exact_match(base, tokenizer, prompts, config.evaluation))
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    say_comparison(metrics, datamodule.dataset_names)
    say_where(folder, saved)
    return metrics.get("val/loss")


def untrained(model: Any, config: TrainConfig) -> AbstractContextManager[Any]:
    """Where the model is found as it was before: under its adapter, or built again."""
    from app.evaluation.comparison import adapter_switched_off
    from app.model.build import load_base

    if config.adapter.name != "full":
        return adapter_switched_off(model)
    return nullcontext(load_base(config.model, "sdpa", model.dtype).to(model.device))


def say_where(folder: Path, saved: Path) -> None:
    """Print where everything is, and what a person may want to type next."""
    print(f"\n{saved}: reopened after saving and compared with the model in memory")
    print(f"{folder}/: metrics.csv, metrics.json, config.yaml, manifest.json")
    print("next:")
    print(f"  python -m app.evaluate run={folder}")
    print(f"  tensorboard --logdir {folder.parent}")
    print(f"run: {folder}")


if __name__ == "__main__":
    sys.exit(run_verb("train", train, sweep=run_sweep))
