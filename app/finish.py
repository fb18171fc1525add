"""The end of a run: what was trained is saved, reopened and checked, and compared with its base."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import TrainConfig
from app.process.collectives import run_on_rank0
from app.process.files import write_whole
from app.run.output import METRICS_FILE
from data_modules import printable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from app.training.module import FinetuneModule
    from data_modules import FinetuneDataModule, Prompt

log = logging.getLogger(__name__)

Measure = Callable[[Any], dict[str, float]]
"""takes a model, returns figures by name"""


def finish(
    config: TrainConfig,
    module: FinetuneModule,
    datamodule: FinetuneDataModule,
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    architecture: PretrainedConfig,
    precision: str,
    new_ids: list[int],
    prompts: dict[str, list[Prompt]],
    stop_ids: set[int],
    base: Mapping[str, str | None],
) -> float | None:
    """Save a trained module, measure it and say where all is; return the validation loss.

    None on ranks above 0. They are not needed, unless each holds a part of the weights: then all
    ranks come here and do everything together, but the first one alone writes.
    """
    from app.evaluation.comparison import print_comparison
    from app.evaluation.predictions import Predictions
    from app.model.adapter import saves_whole_model
    from app.model.attention import attention_implementation
    from app.model.base import load_base
    from app.model.build import weight_dtype
    from app.model.chat import keep_stop_tokens, save_stop_tokens
    from app.model.save import save_model
    from app.training.objective import validate

    trainer, strategy, backend = module.trainer, module.strategy, module.backend
    device, names = trainer.strategy.root_device, datamodule.dataset_names
    shards = strategy if strategy.shards_weights else None
    if shards is None:
        if not trainer.is_global_zero:
            return None
        module.model.to(device)
    reload_base = partial(
        load_base,
        config.model,
        attention_implementation(backend),
        weight_dtype(precision, config.adapter),
        config.quantization,
        new_ids,
    )

    def measure(model: Any) -> dict[str, float]:
        if shards is None:
            return validate(model, datamodule.whole_val_dataloader(), backend, names)
        share = datamodule.val_dataloader()
        return validate(model, share, backend, names, device, module.sum_over_ranks)

    predictions = Predictions(tokenizer, prompts, stop_ids, config.evaluation)

    def ask(who: str, model: Any) -> dict[str, float]:
        return predictions.ask(who, model, shards)

    keep_stop_tokens(module.model, stop_ids)
    with trainer.precision_plugin.forward_context():
        saved, model = save_model(
            module.model,
            config.adapter,
            architecture,
            folder,
            datamodule.probe(),
            base=base,
            reload_base=reload_base,
            shards=shards,
        )
        metrics = compare(
            model,
            config,
            measure,
            ask,
            module.curves.validations,
            reload_base if shards is None else None,
            is_as_trained=model is module.model,
        )
    metrics |= module.curves.summary()

    def write() -> None:
        tokenizer.save_pretrained(saved)
        predictions.write(folder)
        if not saves_whole_model(config.adapter):
            save_stop_tokens(model, saved)
        write_whole(folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
        print_comparison(metrics, names)
        say_where(folder, saved)

    if shards is None:
        write()
    else:
        run_on_rank0(write)
    return metrics.get("val/loss") if trainer.is_global_zero else None


def compare(
    model: Any,
    config: TrainConfig,
    measure: Measure,
    ask: Callable[[str, Any], dict[str, float]],
    validations: list[dict[str, float]],
    reload_base: Callable[[], PreTrainedModel] | None,
    *,
    is_as_trained: bool,
) -> dict[str, float]:
    """Compare what was saved with its base, as `app.evaluate` does on the run's folder.

    `measure` takes a model's validation losses, `ask` has it answer as base or tuned;
    `validations` are those of the training, the first before its first step. `reload_base` is None
    where there is no room for the base beside the model. `is_as_trained`: the model is the one that
    was trained, not one that was read again.
    """
    from app.evaluation.comparison import adapter_switched_off, named
    from app.model.adapter import continued_from, saves_whole_model

    is_whole = saves_whole_model(config.adapter)
    metrics: dict[str, float] = {}
    if validations:
        # Saving rounds a full model to its base's dtype: its last validation was another model's.
        tuned = validations[-1] if is_as_trained and not is_whole else measure(model)
        if is_whole or (is_as_trained and not continued_from(config.adapter)):
            base = validations[0]
        else:  # the run did not start as its base
            with adapter_switched_off(model):
                base = measure(model)
        metrics |= named("base", base) | named("tuned", tuned)
    if config.evaluation.exact_match:
        metrics |= ask("tuned", model)
        if not is_whole:
            with adapter_switched_off(model):
                metrics |= ask("base", model)
        elif reload_base is None:
            log.info(
                "evaluation: the base's exact match is left out, for want of room beside a "
                "model that is spread over ranks"
            )
        elif not config.model.from_scratch:
            metrics |= ask("base", reload_base().to(model.device))
    return metrics


def say_where(folder: Path, saved: Path) -> None:
    """Print where everything is, and what a person may want to type next."""
    shown = printable(str(folder))
    print(f"\n{shown}/{saved.name}: reopened after saving and compared with the model in memory")
    print(f"{shown}/: metrics.csv, metrics.json, config.yaml, manifest.json")
    # Commands that work as they stand, also after `make train` where no environment is active.
    python = "python" if "VIRTUAL_ENV" in os.environ else os.path.relpath(sys.executable)
    print("next:")
    print(f"  {python} -m app.evaluate run={shlex.quote(shown)}")
    logs = shlex.quote(printable(str(folder.parent)))
    print(f"  {python} -m tensorboard.main --logdir {logs}")
    print(f"run: {shown}")
