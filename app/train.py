"""Train: config in, verified adapter out. `python -m app.train +experiment=quickstart`."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import TrainConfig, run_verb, save_config
from app.launch import is_first_rank
from app.manifest import save_manifest
from app.output import decide_run_dir
from app.preflight import describe_base
from app.quiet import is_offline, quiet_libraries
from app.sweep import run_sweep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Measure = Callable[[Any], dict[str, float]]
"""takes a model, returns figures by name"""


def train(config: TrainConfig) -> float | None:
    """Fine-tune as `config` says; return the final validation loss, None on ranks above 0."""
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model, config.data))

    # Imported here and not above: --help and a config error must not wait for torch.
    import lightning as L

    from app.evaluation.comparison import say_comparison
    from app.evaluation.generation import exact_match
    from app.model.attention import attention_implementation, choose_backend
    from app.model.base import context_len, decoder_start_token_id, load_architecture, load_base
    from app.model.build import build_model, weight_dtype
    from app.model.chat import stop_token_ids, with_chat_template
    from app.model.save import save_model
    from app.model.tokenizer import build_tokenizer, new_token_ids
    from app.model.tokens import num_rows, trained_token_ids
    from app.strategy.build import build_strategy
    from app.training.callbacks.progress import ProgressBar
    from app.training.curves import Curves
    from app.training.learning_rate import resolve_lr
    from app.training.logger import build_loggers
    from app.training.loss import validate
    from app.training.module import FinetuneModule
    from app.training.optimizer import build_optimizer
    from app.training.trainer import build_trainer, resolve_placement
    from data_modules import FinetuneDataModule

    # Where it runs, and what follows from that.
    placement = resolve_placement(config.trainer)
    precision = placement.precision
    architecture = load_architecture(config.model)
    attention = choose_backend(config.attention, architecture, placement.accelerator, precision)
    backend = attention.backend
    lr = resolve_lr(
        config.optimizer,
        config.adapter,
        config.trainer.micro_batch_size * placement.accumulation * placement.num_ranks,
        from_scratch=config.model.from_scratch,
    )
    L.seed_everything(config.seed, verbose=False)

    # What it learns from: the whole plan of the run is known before a weight is read.
    tokenizer = build_tokenizer(config.model)
    new_ids = new_token_ids(config.model, tokenizer, num_rows(architecture))
    token_ids = trained_token_ids(tokenizer, config.model.added_tokens, config.adapter)
    stop_ids = stop_token_ids(tokenizer, config.model.stop_tokens)
    datamodule = FinetuneDataModule(
        with_chat_template(config.data, config.model, tokenizer),
        config.packing,
        tokenizer,
        context_len=context_len(architecture),
        vocab_size=num_rows(architecture, new_ids),
        decoder_start_token_id=decoder_start_token_id(architecture),
        micro_batch_size=config.trainer.micro_batch_size,
        accumulation_steps=placement.accumulation,
        num_ranks=placement.num_ranks,
        num_epochs=config.trainer.num_epochs,
        max_steps=config.trainer.max_steps,
        seed=config.seed,
        row_multiple=placement.row_multiple,
        pad_packs=config.trainer.compile,  # one size of batch is compiled for, not each that comes
    )
    datamodule.setup("fit")
    prompts = datamodule.prompts(config.evaluation.max_rows)
    if is_first_rank():
        for line in (*datamodule.report.lines(), *datamodule.audit.lines()):
            log.info("data: %s", line)
        datamodule.audit.check()
    log.info("plan: %s; %s", datamodule.plan.line(), lr.sentence)
    if lr.warning is not None and is_first_rank():
        log.warning(lr.warning)
    log.info("device: %s, attention %s", placement, attention)

    # How it learns.
    loggers = build_loggers(config.logger, folder, datamodule.dataset_names)
    curves = Curves(datamodule.dataset_names, loggers, config.trainer.log_every_steps)
    module = FinetuneModule(
        partial(
            build_model,
            config.model,
            config.quantization,
            backend,
            config.adapter,
            config.recompute,
            precision,
            new_ids=new_ids,
            token_ids=token_ids,
        ),
        backend=backend,
        build_optimizer=partial(
            build_optimizer,
            config=config.optimizer,
            adapter=config.adapter,
            lr=lr.value,
            # Lightning clips nothing itself, yet refuses fused optimizers beside a loss scaler.
            fused=precision != "fp16",
        ),
        schedule=config.schedule,
        total_steps=datamodule.total_steps,
        is_packed=config.packing.method != "none",
        curves=curves,
        uses_fused_kernels=config.trainer.kernels == "auto" and not config.trainer.compile,
    )
    watched: list[L.Callback] = []
    if config.trainer.compile:
        # Imported where it is asked for: the compiler is large.
        from app.training.callbacks.compilation import Compilation

        watched.append(Compilation())
    trainer = build_trainer(
        config.trainer,
        placement=placement,
        strategy=build_strategy(config.strategy, placement.num_ranks),
        total_steps=datamodule.total_steps,
        loggers=loggers,
        callbacks=[ProgressBar(curves), *watched],
        folder=folder,
    )
    base = describe_base(config.model)
    if trainer.is_global_zero:
        save_config(config, folder / "config.yaml")
        datamodule.write_reports(folder)
        save_manifest(
            folder,
            seed=config.seed,
            base=base,
            data=[asdict(dataset) for dataset in datamodule.report.datasets],
            test_data=[asdict(dataset) for dataset in datamodule.report.test_datasets],
            template_sha256=datamodule.template_hash,
        )
    trainer.fit(module, datamodule=datamodule)
    if not trainer.is_global_zero:
        return None

    # What is left of it: saved, reopened and checked, compared with its base.
    trained = module.model.to(trainer.strategy.root_device)
    implementation, dtype = (
        attention_implementation(backend),
        weight_dtype(precision, config.adapter),
    )
    reload_base = partial(
        load_base, config.model, implementation, dtype, config.quantization, new_ids
    )
    names, stops = datamodule.dataset_names, datamodule.stop_token_ids | stop_ids
    with placement.autocast():
        saved, model = save_model(
            trained,
            config.adapter,
            architecture,
            folder,
            datamodule.probe(),
            base=base,
            reload_base=reload_base,
        )
        metrics = compare(
            model,
            config,
            lambda model: validate(model, datamodule.whole_val_dataloader(), backend, names),
            lambda model: exact_match(model, tokenizer, prompts, stops, config.evaluation),
            curves.validations,
            reload_base,
            is_as_trained=model is trained,
        )
    tokenizer.save_pretrained(saved)
    metrics |= curves.summary()
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    say_comparison(metrics, datamodule.dataset_names)
    say_where(folder, saved)
    return metrics.get("val/loss")


def compare(
    model: Any,
    config: TrainConfig,
    measure: Measure,
    ask: Measure,
    validations: list[dict[str, float]],
    reload_base: Callable[[], PreTrainedModel],
    *,
    is_as_trained: bool,
) -> dict[str, float]:
    """Compare what was saved with its base, as `app.evaluate` does on the run's folder.

    `measure` takes a model's validation losses, `ask` its answers; `validations` are those of the
    training, the first before its first step. `is_as_trained`: the model is the one that was
    trained, not one that was read again.
    """
    from app.evaluation.comparison import adapter_switched_off, named
    from app.model.adapter import goes_on, saves_whole_model

    is_whole = saves_whole_model(config.adapter)
    metrics: dict[str, float] = {}
    if validations:
        # Saving rounds a full model to its base's dtype: its last validation was another model's.
        tuned = validations[-1] if is_as_trained and not is_whole else measure(model)
        if is_whole or (is_as_trained and not goes_on(config.adapter)):
            base = validations[0]
        else:  # the run did not start as its base
            with adapter_switched_off(model):
                base = measure(model)
        metrics |= named("base", base) | named("tuned", tuned)
    if config.evaluation.exact_match:
        metrics |= named("tuned", ask(model))
        if not is_whole:
            with adapter_switched_off(model):
                metrics |= named("base", ask(model))
        elif not config.model.from_scratch:
            metrics |= named("base", ask(reload_base().to(model.device)))
    return metrics


def say_where(folder: Path, saved: Path) -> None:
    """Print where everything is, and what a person may want to type next."""
    print(f"\n{saved}: reopened after saving and compared with the model in memory")
    print(f"{folder}/: metrics.csv, metrics.json, config.yaml, manifest.json")
    # Commands that work as they stand, also after `make train` where no environment is active.
    python = "python" if "VIRTUAL_ENV" in os.environ else os.path.relpath(sys.executable)
    print("next:")
    print(f"  {python} -m app.evaluate run={shlex.quote(str(folder))}")
    print(f"  {python} -m tensorboard.main --logdir {shlex.quote(str(folder.parent))}")
    print(f"run: {folder}")


if __name__ == "__main__":
    sys.exit(run_verb("train", train, sweep=run_sweep))
