"""Evaluate: loss per data set and exact match on held-out rows, base vs tuned.

`python -m app.evaluate run=FOLDER`, or `model.path=... adapter_path=... data=...`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.config import EvaluateConfig, changed_settings, run_verb, save_config
from app.model.hub import is_offline
from app.process.environment import keep_streams, quiet_libraries
from app.process.errors import UserError
from app.process.files import write_whole
from app.process.logs import say_loading
from app.process.signals import end_process, install_signal_handlers
from app.report.run_page import write_page
from app.run.folder import CONFIG_FILE, METRICS_FILE, decide_run_dir
from data_modules import printable


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Compare a tuned model with its base as `config` says; return what metrics.json holds."""
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model, config.data))

    say_loading()
    # Imported here and not above: --help and a config error must not wait for torch.
    from app.assembly import (
        adapter_of,
        build_datamodule,
        build_evaluator,
        open_base,
        trained_datasets,
    )
    from app.evaluation.comparison import print_comparison
    from app.evaluation.significance import check_regression, figures_of, print_changes
    from app.evaluation.tuned import place_as_trained
    from app.training.trainer import resolve_single_device
    from data_modules import BatchSpec

    env = resolve_single_device(config.trainer.accelerator, config.trainer.precision)
    adapter = adapter_of(config)
    base = open_base(config, env, adapter)
    batching = BatchSpec(
        micro_batch_size=config.trainer.micro_batch_size, row_multiple=env.row_multiple
    )
    data = build_datamodule(config, base.tokenizer, base.spec, batching)
    data.setup("validate")
    evaluator = build_evaluator(config, base, data)
    if not evaluator.prompts and not len(data.val_examples):
        raise UserError(nothing_to_measure(config))

    def measure(who: str, model: Any) -> dict[str, float]:
        placed = place_as_trained(model, adapter, env)
        with env.autocast():
            return evaluator.measure(who, placed)

    # One model in memory at a time.
    metrics: dict[str, float] = {}
    if not config.model.from_scratch:
        metrics |= measure("base", base.load())
    if config.tuned_path:
        metrics |= measure("tuned", base.load_tuned(Path(config.tuned_path)))
    changes = evaluator.changes(trained_datasets(config))
    metrics |= figures_of(changes)
    save_config(config, folder / CONFIG_FILE)
    evaluator.predictions.write(folder)
    write_whole(folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
    print_comparison(metrics, data.dataset_names)
    print_changes(changes)
    write_page(folder, changed_settings(config))
    print(f"run: {printable(str(folder))}")
    check_regression(changes, config.evaluation.max_regression)
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
