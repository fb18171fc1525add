"""Evaluate: loss per data set, metrics of answers, and tasks, base vs tuned.

`python -m app.evaluate run=FOLDER`, or `model.path=... adapter_path=... data=...`, or
`model.path=... evaluation=mmlu evaluation.task_dir=FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from app.config import EvaluateConfig, run_verb, save_config
from app.model.hub import is_offline
from app.preflight import requested_devices
from app.process.environment import keep_streams, quiet_libraries
from app.process.errors import UserError
from app.process.files import write_whole
from app.process.launch import is_child, is_first_rank, live_with_parent
from app.process.signals import end_process, install_signal_handlers
from app.run.folder import CONFIG_FILE, METRICS_FILE, decide_run_dir
from app.run.ranks import run_shares
from data_modules import printable


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Compare a tuned model with its base as `config` says; return what metrics.json holds.

    What is measured is kept in the folder meanwhile: the same command with its output.dir goes on.
    """
    folder = decide_run_dir(config.output)
    quiet_libraries(offline=is_offline(config.model, config.data))

    # Imported here and not above: --help and a config error must not wait for torch.
    from app.assembly import (
        adapter_of,
        build_datamodule,
        build_evaluator,
        open_base,
        place_as_trained,
    )
    from app.evaluation.comparison import print_comparison, print_samples
    from app.evaluation.progress import Progress
    from app.evaluation.ranks import build_shares, sum_over_ranks
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
    identity = [base.description, describe_tuned(config), env.precision, repr(base.quantization)]
    with Progress() as progress:
        shares = build_shares(folder, identity, progress.show, on_gpu=env.accelerator == "gpu")
        evaluator = build_evaluator(
            config, base, data, shares=shares, sum_over_ranks=sum_over_ranks(shares)
        )
        if not evaluator.asks and not len(data.val_examples):
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
    if not is_first_rank():
        return metrics
    evaluator.write(folder)
    write_whole(folder / METRICS_FILE, json.dumps(metrics, indent=2) + "\n")
    save_config(config, folder / CONFIG_FILE)
    shares.clear()
    print_samples(evaluator)
    print_comparison(metrics, data.dataset_names)
    print(f"run: {printable(str(folder))}")
    return metrics


def describe_tuned(config: EvaluateConfig) -> list[Any]:
    """Return what tells a tuned model from another one, or from itself before a change."""
    if config.tuned_path is None:
        return []
    files = sorted(file for file in Path(config.tuned_path).glob("*") if file.is_file())
    return [
        str(config.tuned_path),
        *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files),
    ]


def start(config: EvaluateConfig) -> None:
    """Evaluate in this process, or start the ranks of this machine, each with a share."""
    devices = requested_devices(config)
    if is_child() or devices.num_ranks == 1:
        evaluate(config)
        return
    folder = decide_run_dir(config.output)
    if code := run_shares("evaluate", folder, devices, sys.argv[1:]):
        print(f"measured so far: output.dir={folder} goes on from there", file=sys.stderr)
        sys.exit(code)


def nothing_to_measure(config: EvaluateConfig) -> str:
    """Return why there is neither a loss nor an answer to measure, and what to type."""
    if config.evaluation.asks_prompts:
        return (
            "nothing to measure: there are no validation rows, and no row has an answer to compare "
            "with; type data.test_datasets=[{path: FILE}] with rows that end in an answer"
        )
    tests = "data.test_datasets" if config.data.test_datasets else "held-out rows"
    return (
        "nothing to measure: there are no validation rows to take a loss of, and "
        f"evaluation.exact_match=false; type evaluation.exact_match=true to compare answers with "
        f"those of {tests}, data.datasets=[{{path: FILE}}] data.val_set_size=0.05 for a loss, or "
        "evaluation=mmlu (arc, gsm8k, ...) for a task"
    )


if __name__ == "__main__":
    live_with_parent()
    keep_streams()
    install_signal_handlers()
    end_process(run_verb("evaluate", start))
