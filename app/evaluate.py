"""Evaluate: loss per data set and exact match on held-out rows, base against tuned.

`python -m app.evaluate run=FOLDER`, or `model.path=... adapter_path=... data=...`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import EvaluateConfig, run_verb, save_config
from app.output import decide_run_dir
from app.quiet import is_offline, quiet_libraries

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Compare a tuned model with its base as `config` says; return what metrics.json holds."""
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model, config.data))

    # Imported here and not above: --help and a config error must not wait for torch.
    from app.evaluation.comparison import named, say_comparison
    from app.evaluation.generation import exact_match
    from app.model.adapter import AdapterConfig
    from app.model.attention import attention_implementation, choose_backend
    from app.model.build import load_architecture, load_base, load_tuned, weight_dtype
    from app.model.tokenizer import build_tokenizer
    from app.training.loss import losses_by_dataset, validate
    from app.training.trainer import autocast_dtype, resolve_placement
    from data_modules import FinetuneDataModule

    placement = resolve_placement(config.trainer)
    precision = placement.precision
    dtype = weight_dtype(precision, AdapterConfig())
    backend = choose_backend(config.attention, placement.accelerator, precision)
    implementation = attention_implementation(backend)

    tokenizer = build_tokenizer(config.model)
    datamodule = FinetuneDataModule(
        config.data,
        config.packing,
        tokenizer,
        context_len=load_architecture(config.model).max_position_embeddings,
        micro_batch_size=config.trainer.micro_batch_size,
        accumulation_steps=1,
        num_epochs=1,
        max_steps=None,
        seed=config.seed,
    )
    datamodule.setup("validate")
    names, prompts = datamodule.dataset_names, datamodule.prompts(config.evaluation.max_rows)

    def measure(model: PreTrainedModel) -> dict[str, float]:
        model.to(placement.torch_device)
        measured: dict[str, float] = {}
        if datamodule.val_examples:
            batches, half = datamodule.val_dataloader(), autocast_dtype(precision)
            sums = validate(model, batches, backend, len(names), half=half)
            measured |= losses_by_dataset(sums.cpu(), names, "val")
        if config.evaluation.exact_match:
            measured |= exact_match(model, tokenizer, prompts, config.evaluation)
        return measured

    # One model in memory at a time: first the base, then what was made of it.
    metrics: dict[str, float] = {}
    tuned = Path(config.tuned_path) if config.tuned_path else None
    if not config.model.from_scratch:
        metrics |= named("base", measure(load_base(config.model, implementation, dtype)))
    if tuned is not None:
        metrics |= named("tuned", measure(load_tuned(config.model, tuned, implementation, dtype)))
    save_config(config, folder / "config.yaml")
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    say_comparison(metrics, names)
    print(f"run: {folder}")
    return metrics


if __name__ == "__main__":
    sys.exit(run_verb("evaluate", evaluate))
