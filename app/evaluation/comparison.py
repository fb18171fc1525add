"""Compare a tuned model with its base, and print the metrics of both by data set and task."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.evaluator import Evaluator, without_failing
from app.evaluation.significance import CONFIDENCE, VARIANTS, Change, verdict_line
from app.model.adapter import AdapterConfig, continued_from, saves_whole_model
from app.process.logs import show, text_table
from app.training.run_documents import MEASURES, OTHER, measure_of
from common.files import write_atomically
from common.text import formatted, percent, printable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_MAX_SAMPLE_LENGTH = 160
"""characters of a sample text that are shown in the terminal"""
_VERDICT_FILE = "verdict.json"
HEADINGS = ("data set", "measure", "base", "tuned", "change", "interval", "verdict")
_ENDS = ("val/accuracy_low", "val/accuracy_high")
_PREFIXES = tuple(f"{variant}/" for variant in VARIANTS)
_OF_ROWS = ("val/loss", "val/perplexity", "val/accuracy", "val/f1", "val/auc")
_FURTHER = ("val/", "judge", "reward")
"""beginnings of measures that the terminal shows only if they are of `_OF_ROWS` or were compared:
a judge has a table of its own"""

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


def comparison_rows(
    metrics: Mapping[str, float], changes: Sequence[Change]
) -> list[tuple[str, list[str]]]:
    """Return the measure of each metric of base and tuned, and its row of a table, as `HEADINGS`.

    Rows of a data set or task stand together; a single data set has no row of all of them.
    """
    measured = (name.partition("/")[2] for name in metrics if name.startswith(_PREFIXES))
    compared = {f"{change.measure}/{change.name}": change for change in changes}
    names = {name: measure_of(name) for name in measured}
    names |= {name: (change.measure, change.name) for name, change in compared.items()}
    order = list(dict.fromkeys(of for _, of in names.values()))
    is_single = sum(measure == "val/loss" and of != "" for measure, of in names.values()) == 1
    return [
        (measure, _row(name, measure, of, metrics, compared.get(name)))
        for name, (measure, of) in sorted(names.items(), key=lambda item: order.index(item[1][1]))
        if measure not in _ENDS and (of or not is_single or not measure.startswith("val/"))
    ]


def _row(
    name: str, measure: str, of: str, metrics: Mapping[str, float], change: Change | None
) -> list[str]:
    """Return the row of a metric of base and tuned, of data set or task `of`; empty for all."""
    spec = MEASURES.get(measure, OTHER)
    signed = f"+{spec.number_format}"
    cells, values = [of or "all", spec.heading or measure], []
    for variant in VARIANTS:
        value, low, high = (
            metrics.get(f"{variant}/{name.replace(measure, measure + end, 1)}")
            for end in ("", "_low", "_high")
        )
        if value is None and change is not None:  # a judge's grades of all questions
            value = change.base if variant == "base" else change.tuned
        text = "-" if value is None else formatted(value, spec.number_format)
        if low is not None and high is not None:
            ends = (formatted(end, spec.number_format) for end in (low, high))
            text += f" ({' to '.join(ends)})"
        cells.append(text)
        values.append(value)
    base, tuned = values
    if change is not None:
        ends = (formatted(end, signed) for end in (change.low, change.high))
        cells += [formatted(change.difference, signed), " to ".join(ends), change.verdict]
    elif base is None or tuned is None:
        cells += ["-", "-", "-"]
    else:
        cells += [formatted(tuned - base, signed), "-", "-"]
    return list(map(printable, cells))


def report_comparison(
    metrics: Mapping[str, float],
    changes: Sequence[Change],
    groups: Sequence[Change],
    folder: Path,
) -> None:
    """Print base and tuned with the verdict, and write them to `verdict.json`; or say why not.

    `groups`: changes of groups of tasks, which are not part of the verdict.
    """
    rows = comparison_rows(metrics, [*changes, *groups])
    if not rows:
        show("\nbase and tuned are not compared: no rows were held out (data.val_set_size)")
        return
    verdict = verdict_line(changes) if changes else ""
    listed = [asdict(change) | {"verdict": change.verdict} for change in changes]
    headings = HEADINGS if changes else HEADINGS[:-2]
    table = [list(headings), *(row[: len(headings)] for _, row in rows)]
    content = {"verdict": verdict, "changes": listed, "table": table}
    write_atomically(folder / _VERDICT_FILE, json.dumps(content, indent=2) + "\n")
    shown = [
        row[: len(headings)]
        for measure, row in rows
        if measure in _OF_ROWS or not measure.startswith(_FURTHER) or row[-1] != "-"
    ]
    title = "base vs tuned"
    if changes:
        title += f": simultaneous {percent(CONFIDENCE, 0)} intervals of the changes"
    print()
    show(text_table([headings, *shown], title, ("measure", "verdict")))
    if groups:
        differing = sum(change.is_significant or change.is_broken for change in groups)
        show(f"groups of tasks: {differing} of {len(groups)} differ")
    if changes:
        show(f"verdict: {printable(verdict)}")


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
