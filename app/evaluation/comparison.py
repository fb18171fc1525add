"""Compare a tuned model with its base, and print the metrics of both by data set and task."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.evaluator import Evaluator, without_failing
from app.evaluation.metrics import METRICS
from app.evaluation.significance import VARIANTS
from app.model.adapter import AdapterConfig, continued_from, saves_whole_model
from app.process.logs import show
from app.training.run_documents import MEASURES
from common.files import write_atomically
from common.text import formatted, printable

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel

MAX_SAMPLE_LENGTH = 160
"""characters of a sample text that are shown in the terminal"""
OF_ROWS = ("val/loss", "val/perplexity", "val/accuracy", "val/f1", "val/auc")
SHOWN = {name: MEASURES[name] for name in (*OF_ROWS, *METRICS)}
"""metrics in the table of data sets; those of a judge and of tasks have their own tables"""
TASK_MEASURES = {
    "accuracy": ("accuracy", ".1%"),
    "accuracy_norm": ("accuracy by length", ".1%"),
    "passed": ("passed", ".1%"),
    "loss": ("loss per token", ".4f"),
    "perplexity": ("perplexity", ".4g"),
    "bits_per_byte": ("bits per byte", ".4f"),
}
"""metric in the table of tasks -> its heading and number format"""

log = logging.getLogger(__name__)


def compare_trained(
    evaluator: Evaluator,
    model: Any,
    adapter: AdapterConfig,
    validations: Sequence[dict[str, float]],
    load_base: Callable[[], PreTrainedModel] | None,
    *,
    base_rows: Tensor | None = None,
    tuned: dict[str, float] | None = None,
    is_as_trained: bool,
) -> dict[str, float]:
    """Compare a model that was just trained with its base, reusing the validations of the run.

    `validations`: validation losses of the run, the first from before its first step.
    `base_rows`: the row losses of the first validation, as in `Evaluator.row_losses`; None if this
    process did not measure them, because the run was resumed. `tuned`: the losses of `model`, None
    to measure them. `is_as_trained`: `model` is the trained object itself, not one reloaded from
    its saved weights. `load_base`: None for a model that was trained from scratch.
    """
    is_whole = saves_whole_model(adapter)
    metrics: dict[str, float] = {}
    if validations:
        if base_rows is not None and base_rows.shape[1] == len(evaluator.data.val_examples):
            evaluator.row_losses["base"] = base_rows
        if tuned is None:
            tuned = evaluator.measure_losses("tuned", model)
        if is_whole or (is_as_trained and not continued_from(adapter)):
            base = validations[0]
        else:  # the first validation did not measure the base of `model`
            with model.disable_adapter():
                base = evaluator.measure_losses("base", model)
        metrics |= evaluator.prefixed("base", base) | evaluator.prefixed("tuned", tuned)
    if not evaluator.measures_answers:
        return metrics
    with without_failing() if evaluator.only_shows_answers else nullcontext():
        metrics |= evaluator.measure_answers("tuned", model)
        if not is_whole:
            with model.disable_adapter():
                metrics |= evaluator.measure_answers("base", model)
        elif evaluator.sharding is not None:
            log.info(
                "evaluation: answers of the base are not measured: it would not fit into memory "
                "next to the sharded model"
            )
        elif load_base is not None:
            metrics |= evaluator.measure_answers("base", load_base().to(model.device))
    return metrics


def comparison_table(metrics: dict[str, float], dataset_names: list[str]) -> Table:
    """Return a table of the metrics of each measured data set; a missing value is `-`.

    Data sets that exist only as held-out files come after `dataset_names`.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="base vs tuned", title_justify="left")
    table.add_column("data set")
    answered = [
        name
        for measure in SHOWN
        if not measure.startswith("val/")
        for variant in VARIANTS
        for name in _names_after(f"{variant}/{measure}/", metrics)
    ]
    held_out = [
        name
        for name in dataset_names
        if any(f"{variant}/val/loss/{name}" in metrics for variant in VARIANTS)
    ]
    names = list(dict.fromkeys([*held_out, *answered]))
    shown = {
        measure: spec
        for measure, spec in SHOWN.items()
        if any(f"{variant}/{measure}/{name}" in metrics for variant in VARIANTS for name in names)
    }
    for spec in shown.values():
        table.add_column(f"{spec.heading}: base", justify="right")
        table.add_column("tuned", justify="right")
    for name in names:
        cells = [
            "-" if value is None else formatted(value, spec.number_format)
            for measure, spec in shown.items()
            for value in (metrics.get(f"{variant}/{measure}/{name}") for variant in VARIANTS)
        ]
        table.add_row(escape(name), *cells)
    return table


def task_table(metrics: dict[str, float]) -> Table:
    """Return a table with a row for each metric of each task, or of each group of a task."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="tasks", title_justify="left")
    table.add_column("task")
    table.add_column("measure")
    table.add_column("base", justify="right")
    table.add_column("tuned", justify="right")
    found = [
        (name, measure)
        for measure in TASK_MEASURES
        for variant in VARIANTS
        for name in _names_after(f"{variant}/{measure}/", metrics)
    ]
    order = list(dict.fromkeys(name for name, _ in found))
    for name, measure in sorted(dict.fromkeys(found), key=lambda pair: order.index(pair[0])):
        heading, number_format = TASK_MEASURES[measure]
        values = [metrics.get(f"{variant}/{measure}/{name}") for variant in VARIANTS]
        cells = ["-" if value is None else formatted(value, number_format) for value in values]
        table.add_row(escape(name), heading, *cells)
    return table


def _names_after(prefix: str, metrics: dict[str, float]) -> list[str]:
    return [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]


def print_comparison(metrics: dict[str, float], dataset_names: list[str]) -> None:
    """Print the tables of `metrics` that have a row, or why nothing is compared."""
    if not any(name.startswith(VARIANTS) for name in metrics):
        show("\nbase and tuned are not compared: no rows were held out (data.val_set_size)")
        return
    tables = [comparison_table(metrics, dataset_names), task_table(metrics)]
    for table in tables:
        if table.row_count:
            print()
            show(table)


def report_confusion(evaluator: Evaluator, folder: Path) -> None:
    """Write which classes a classifier confuses to a file; print it unless there are many."""
    from app.evaluation.classes import (
        CONFUSION_FILE,
        MAX_SHOWN_CLASSES,
        confusion_csv,
        confusion_table,
    )

    counts, names = evaluator.confusion(), evaluator.objective.classes
    if counts is None:
        return
    write_atomically(folder / CONFUSION_FILE, confusion_csv(counts, names))
    if len(names) <= MAX_SHOWN_CLASSES:
        print()
        show(confusion_table(counts, names))


def print_samples(evaluator: Evaluator, count: int = 3) -> None:
    """Print `count` lines of predictions.jsonl, taken from the data sets and tasks in turn.

    Each text is shortened to one line.
    """
    by_dataset: dict[str, list[dict[str, Any]]] = {}
    for line in evaluator.prediction_lines():
        if len(lines := by_dataset.setdefault(line["data_set"], [])) < count:
            lines.append(line)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_dataset.values()))
    for line in itertools.islice(filter(None, in_turn), count):
        shown = [f"\n{printable(line['data_set'])} ({printable(line['source'])})"]
        for name in ("prompt", "reference", *VARIANTS):
            if line.get(name) is not None:
                text = " ".join(str(line[name]).split())
                if len(text) > MAX_SAMPLE_LENGTH:
                    text = f"...{text[3 - MAX_SAMPLE_LENGTH :]}"
                is_cut = not line.get("finished", {}).get(name, True)
                shown.append(f"  {name}: {printable(text)}{' [cut off]' * is_cut}")
        show("\n".join(shown))
