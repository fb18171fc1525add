"""Evaluate: loss per data set and exact match on held-out rows, base against tuned.

`python -m app.evaluate run=FOLDER`, or `model.path=... adapter_path=... data=...`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import EvaluateConfig, load_run_config, run_verb, save_config
from app.model.hub import is_offline
from app.process.environment import quiet_libraries
from app.process.errors import UserError
from app.process.files import write_whole
from app.process.signals import end_process, install_signal_handlers
from app.process.stdio import keep_streams
from app.run.output import decide_run_dir
from data_modules import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Compare a tuned model with its base as `config` says; return what metrics.json holds."""
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model, config.data))

    # Imported here and not above: --help and a config error must not wait for torch.
    from app.evaluation.comparison import named, print_comparison
    from app.evaluation.predictions import Predictions
    from app.model.adapter import (
        AdapterConfig,
        FreezeConfig,
        FullConfig,
        LoraConfig,
        apply_adapter,
        is_adapter,
    )
    from app.model.attention import attention_implementation, choose_backend
    from app.model.base import context_len, decoder_start_token_id, load_architecture, load_base
    from app.model.build import load_tuned, weight_dtype
    from app.model.tokenizer import (
        build_tokenizer,
        new_token_ids,
        num_rows,
        stop_token_ids,
        with_chat_template,
    )
    from app.training.objective import validate
    from app.training.trainer import place_on_one_device
    from data_modules import FinetuneDataModule

    placement = place_on_one_device(config.trainer.accelerator, config.trainer.precision)
    architecture = load_architecture(config.model)
    attention = choose_backend(
        config.attention, architecture, placement.accelerator, placement.precision
    )
    backend = attention.backend
    log.info("device: %s, attention %s", placement, attention)
    tokenizer = build_tokenizer(config.model)
    new_ids = new_token_ids(config.model, tokenizer, num_rows(architecture))
    datamodule = FinetuneDataModule(
        with_chat_template(config.data, config.model, tokenizer),
        config.packing,
        tokenizer,
        context_len=context_len(architecture),
        vocab_size=num_rows(architecture, new_ids),
        decoder_start_token_id=decoder_start_token_id(architecture),
        micro_batch_size=config.trainer.micro_batch_size,
        accumulation_steps=1,
        num_epochs=1,
        max_steps=None,
        seed=config.seed,
        row_multiple=placement.row_multiple,
    )
    datamodule.setup("validate")
    names, has_validation = datamodule.dataset_names, len(datamodule.val_examples) > 0
    asks = config.evaluation.exact_match
    prompts = datamodule.prompts(config.evaluation.max_rows) if asks else {}
    if not has_validation and not prompts:
        raise UserError(nothing_to_measure(config))
    stops = datamodule.stop_token_ids | stop_token_ids(tokenizer, config.model.stop_tokens)
    predictions = Predictions(tokenizer, prompts, stops, config.evaluation)

    def measure(who: str, model: PreTrainedModel) -> dict[str, float]:
        model.to(placement.torch_device)
        measured: dict[str, float] = {}
        with placement.autocast():
            if has_validation:
                losses = validate(model, datamodule.whole_val_dataloader(), backend, names)
                measured |= named(who, losses)
            if prompts:
                measured |= predictions.ask(who, model)
        return measured

    # One model in memory at a time, in the dtypes of its training: the base, then what it became.
    tuned = Path(config.tuned_path) if config.tuned_path else None
    kind: AdapterConfig = LoraConfig() if tuned is None or is_adapter(tuned) else FullConfig()
    if config.run is not None and config.adapter_path is None:
        kind = load_run_config(Path(config.run)).adapter
    dtype = weight_dtype(placement.precision, kind)

    def in_its_dtypes(model: PreTrainedModel) -> PreTrainedModel:
        if not isinstance(kind, FreezeConfig):
            return model
        return apply_adapter(model, kind, half_precision=placement.precision == "bf16-pure")

    implementation = attention_implementation(backend)
    metrics: dict[str, float] = {}
    how = (implementation, dtype, config.quantization, new_ids)
    if not config.model.from_scratch:
        metrics |= measure("base", in_its_dtypes(load_base(config.model, *how)))
    if tuned is not None:
        model = load_tuned(config.model, tuned, *how)
        metrics |= measure("tuned", in_its_dtypes(model))
    save_config(config, folder / "config.yaml")
    predictions.write(folder)
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    print_comparison(metrics, names)
    print(f"run: {printable(str(folder))}")
    return metrics


def nothing_to_measure(config: EvaluateConfig) -> str:
    """Return why there is neither a loss nor an answer to measure, and what to type."""
    if config.evaluation.exact_match:
        return (
            "nothing to measure: there are no validation rows, and no row has an answer to compare "
            "with; type data.test_datasets=[{path: FILE}] with rows that end in an answer"
        )
    tests = "data.test_datasets" if config.data.test_datasets else "held-out rows"
    return (
        "nothing to measure: there are no validation rows to take a loss of, and "
        f"evaluation.exact_match=false; type evaluation.exact_match=true to compare answers with "
        f"those of {tests}, or data.datasets=[{{path: FILE}}] data.val_set_size=0.05 for a loss"
    )


if __name__ == "__main__":
    keep_streams()
    install_signal_handlers()
    end_process(run_verb("evaluate", evaluate))
