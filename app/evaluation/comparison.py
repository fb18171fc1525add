"""Compare a tuned model with its base, and print the metrics of both by data set and task."""

from __future__ import annotations

import csv
import io
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
from app.process.logs import show, text_table
from app.training.run_documents import MEASURES
from common.files import write_atomically
from common.text import formatted, printable

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel

_MAX_SAMPLE_LENGTH = 160
"""characters of a sample text that are shown in the terminal"""
_OF_ROWS = ("val/loss", "val/perplexity", "val/accuracy", "val/f1", "val/auc")
_SHOWN = {name: MEASURES[name] for name in (*_OF_ROWS, *METRICS)}
"""metrics in the table of data sets; those of a judge and of tasks have their own tables"""
_TASK_MEASURES = {
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
    measured = _names_of("val/loss", metrics)
    held_out = [name for name in dataset_names if name in measured]
    answered = [name for measure in METRICS for name in _names_of(measure, metrics)]
    names = list(dict.fromkeys([*held_out, *answered]))
    shown = {
        measure: spec
        for measure, spec in _SHOWN.items()
        if set(names) & set(_names_of(measure, metrics))
    }
    headings = [h for spec in shown.values() for h in (f"{spec.heading}: base", "tuned")]
    cells = [["data set", *headings], *([name] for name in names)]
    for row in cells[1:]:
        for measure, spec in shown.items():
            ends = [
                _cells_of(f"{measure}{end}/{row[0]}", spec.number_format, metrics)
                for end in ("", "_low", "_high")
            ]
            row += [
                value if low == "-" else f"{value} ({low} to {high})"
                for value, low, high in zip(*ends, strict=True)
            ]
    return text_table(cells, "base vs tuned")


def task_table(metrics: dict[str, float]) -> Table:
    """Return a table with a row for each metric of each task, or of each group of a task."""
    found = [(name, key) for key in _TASK_MEASURES for name in _names_of(key, metrics)]
    order = list(dict.fromkeys(name for name, _ in found))
    rows = []
    for name, measure in sorted(found, key=lambda pair: order.index(pair[0])):
        heading, number_format = _TASK_MEASURES[measure]
        rows.append([name, heading, *_cells_of(f"{measure}/{name}", number_format, metrics)])
    return text_table([["task", "measure", *VARIANTS], *rows], "tasks", ("measure",))


def _names_of(measure: str, metrics: dict[str, float]) -> list[str]:
    """Return the data sets and tasks of which base or tuned have this measure."""
    prefixes = [f"{variant}/{measure}/" for variant in VARIANTS]
    found = (name.removeprefix(p) for p in prefixes for name in metrics if name.startswith(p))
    return list(dict.fromkeys(found))


def _cells_of(metric: str, number_format: str, metrics: dict[str, float]) -> list[str]:
    values = [metrics.get(f"{variant}/{metric}") for variant in VARIANTS]
    return ["-" if value is None else formatted(value, number_format) for value in values]


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
    from app.evaluation.metrics import CONFUSION_FILE, MAX_SHOWN_CLASSES, confusion_cells

    if (counts := evaluator.confusion()) is None:
        return
    cells = confusion_cells(counts, evaluator.objective.classes)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(cells)
    write_atomically(folder / CONFUSION_FILE, text.getvalue())
    if len(cells[0]) <= MAX_SHOWN_CLASSES + 1:
        print()
        show(text_table(cells, "confusion: class by guess"))


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
                if len(text) > _MAX_SAMPLE_LENGTH:
                    text = f"...{text[3 - _MAX_SAMPLE_LENGTH :]}"
                is_cut = not line.get("finished", {}).get(name, True)
                shown.append(f"  {name}: {printable(text)}{' [cut off]' * is_cut}")
        show("\n".join(shown))
