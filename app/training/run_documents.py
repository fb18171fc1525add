"""The documents in the folder of a run or a sweep: their shapes, and how they are read back.

The folder may be somebody else's, or edited: a document of another shape is refused with its file
and key. Imports no torch.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.training.checkpoint.documents import (
    ANYTHING,
    COUNT,
    POSITIVE_COUNT,
    RUN,
    TEXT,
    Keys,
    Kind,
    ListOf,
    MapOf,
    differences,
    format_value,
    or_null,
)
from common.errors import UserError
from common.untrusted import parse_json, read_json_object, read_text

CSV_FILE = "metrics.csv"
AGAIN = "copy the folder again, or restore the file"


OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_FIGURE = Kind(
    "a number", lambda value: type(value) is float or (type(value) is int and abs(value) < 1e300)
)
"""larger integers cannot be formatted as the floats that figures are"""
NULLABLE_TEXT, NULLABLE_COUNT = or_null(TEXT), or_null(COUNT)
_BASE = ("path", "revision", "fingerprint", "weights")
_DATASET = {"name": TEXT, "path": TEXT, "sha256": NULLABLE_TEXT, "rows": NULLABLE_COUNT}
_COUNTS = dict.fromkeys(("train_rows", "validation_rows", "tokens", "trained_tokens"), COUNT)
_NUMBERS = dict.fromkeys(("r", "alpha"), or_null(_FIGURE))
_BATCH = ("packs", "micro_batch_size", "gradient_accumulation_steps", "num_ranks")
_REQUIRED = {
    "versions": MapOf(TEXT),
    "base": Keys(dict.fromkeys(_BASE, NULLABLE_TEXT), allows_others=True),
    "data": ListOf(Keys(_DATASET, _COUNTS, allows_others=True)),
    "total_steps": COUNT,
}
_OPTIONAL = {
    "command": ListOf(TEXT),
    "started": TEXT,
    "python": TEXT,
    "hardware": or_null(OBJECT),
    "git": or_null(OBJECT),
    "seed": COUNT,
    "precision": TEXT,
    "strategy": TEXT,
    "tokenizer_sha256": TEXT,
    "template_sha256": NULLABLE_TEXT,
    "tokens_sha256": TEXT,
    "earlier": ListOf(Keys({}, {"plan": TEXT, "until_step": COUNT}, allows_others=True)),
    "result": Keys({}, {"last": NULLABLE_COUNT}, allows_others=True),
}
MANIFEST = Keys(
    _REQUIRED | {"command": ListOf(TEXT), "started": TEXT, "run": RUN},
    _OPTIONAL | {"global_batch": Keys(dict.fromkeys(_BATCH, POSITIVE_COUNT))},
    allows_others=True,
)
"""manifest.json of a run that is resumed"""
SHOWN_MANIFEST = Keys(
    {},
    {
        **_REQUIRED,
        **_OPTIONAL,
        "run": RUN,
        "base": OBJECT,
        "data": ListOf(Keys({}, _DATASET | _COUNTS, allows_others=True)),
        "global_batch": Keys({}, dict.fromkeys(_BATCH, POSITIVE_COUNT), allows_others=True),
    },
    allows_others=True,
)
"""manifest.json as a page or a card shows it, whatever version has written it"""
_MODEL = Keys({}, {"path": NULLABLE_TEXT, "revision": NULLABLE_TEXT}, allows_others=True)
_ADAPTER = Keys({}, {"name": TEXT, **_NUMBERS}, allows_others=True)
SHOWN_CONFIG = Keys({}, {"model": _MODEL, "adapter": _ADAPTER}, allows_others=True)
"""what a page or a card shows of config.yaml"""
METRICS = MapOf(or_null(_FIGURE))
"""metrics.json"""
_MIXED = ("rows", "tokens", "rows_seen", "epochs", "share_of_rows", "share_of_tokens")
MIXTURE = ListOf(Keys({}, dict.fromkeys(_MIXED, or_null(_FIGURE)), allows_others=True))
"""mixture.json"""
VERDICT = Keys(
    {
        "verdict": TEXT,
        "changes": ListOf(Keys({"measure": TEXT, "name": TEXT}, allows_others=True)),
        "table": ListOf(ListOf(TEXT)),
    },
    {},
    allows_others=True,
)
"""verdict.json: base and tuned compared row by row"""


@dataclass(frozen=True, slots=True)
class MeasureSpec:
    """How the values of a measure are shown and compared."""

    heading: str
    number_format: str = ".1%"
    is_lower_better: bool = False
    max_difference: float = math.inf
    """largest possible difference of two values"""
    scale: float = 1.0
    """difference that evaluation.max_regression counts as 1"""


MEASURES = {
    "val/loss": MeasureSpec("loss", ".4f", is_lower_better=True),
    "val/perplexity": MeasureSpec("perplexity", ".4g", is_lower_better=True),
    "val/accuracy": MeasureSpec("accuracy", max_difference=1.0),
    "val/accuracy_low": MeasureSpec("accuracy, at least"),
    "val/accuracy_high": MeasureSpec("accuracy, at most"),
    "val/f1": MeasureSpec("F1", max_difference=1.0),
    "val/auc": MeasureSpec("AUC", ".3f", max_difference=1.0),
    **{
        name: MeasureSpec(heading, max_difference=1.0)
        for name, heading in {
            "exact_match": "exact match",
            "numeric": "numeric match",
            "f1": "F1",
            "rouge1": "ROUGE-1",
            "rouge2": "ROUGE-2",
            "rougeL": "ROUGE-L",
            "bleu": "BLEU",
            "chrf": "chrF",
            "accuracy": "accuracy",
            "accuracy_norm": "by length",
            "passed": "passed",
        }.items()
    },
    "loss": MeasureSpec("loss", ".4f", is_lower_better=True),
    "perplexity": MeasureSpec("perplexity", ".4g", is_lower_better=True),
    "bits_per_byte": MeasureSpec("bits per byte", ".4f", is_lower_better=True),
    "judge": MeasureSpec("judge's score", ".2f", max_difference=9.0, scale=10),
    "reward": MeasureSpec("reward", ".3f"),
}
OTHER = MeasureSpec("", ".4f")
"""spec of a measure that is not in `MEASURES`: higher is better, and its name is its heading"""


def measure_of(metric: str) -> tuple[str, str]:
    """Return the measure of a metric in metrics.json, and its data set or task.

    `val/loss/orders` is `val/loss` of `orders`; the name of one that is not in `MEASURES` is whole.
    """
    found = (name for name in MEASURES if metric == name or metric.startswith(f"{name}/"))
    measure = next(found, metric)
    return measure, metric[len(measure) + 1 :]


_LOWER_IS_BETTER = (
    *("loss", "perplexity", "bits_per_byte", "cross_entropy", "kl", "absolute_error"),
)
"""metrics of which lower values are better; for all others, higher values are"""


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric of validations are better, such as `val/loss/a`."""
    return metric.split("/")[1] in _LOWER_IS_BETTER


TRIALS = ListOf(
    Keys(
        {
            "number": COUNT,
            "overrides": ListOf(Kind("KEY=VALUE", lambda v: isinstance(v, str) and "=" in v)),
            "folder": TEXT,
            "exit_code": COUNT,
            "seconds": _FIGURE,
            "objective": or_null(_FIGURE),
            "error": NULLABLE_TEXT,
        },
        {"stopped_at": NULLABLE_COUNT, "metric": TEXT},
    )
)
"""sweep.json"""

STATUS = Keys(
    {"state": TEXT, "step": COUNT, "written": _FIGURE, "host": TEXT, "pid": COUNT},
    {
        **dict.fromkeys(("steps", "exit_code"), NULLABLE_COUNT),
        **dict.fromkeys(("checkpoint", "message", "late"), NULLABLE_TEXT),
        **dict.fromkeys(("epoch", "loss", "val_loss", "hours_left"), or_null(_FIGURE)),
        **dict.fromkeys(("tokens_per_second", "seconds_per_step"), or_null(_FIGURE)),
    },
    allows_others=True,
)
"""status.json"""
RESULT = Keys({"stamp": TEXT, "row": COUNT, "result": ANYTHING})
"""a line of what a killed evaluation has measured"""


def find_problem(file: Path, shape: Any) -> tuple[Any, str | None]:
    """Return the content of a JSON file, and why it is not of this shape; None if it is."""
    try:
        text, problem = read_text(file, "json_mib")
    except OSError as error:
        return None, f"{file} cannot be read: {error.strerror}"
    content: Any = None
    if problem is None:
        content, problem = parse_json(text, file)
    if problem is None:
        wrong = next(differences(content, shape, ""), None)
        problem = None if wrong is None else f"{file}: {wrong}"
    return content, problem


def read_document(file: Path, shape: Any) -> Any:
    """Return the content of a JSON file of this shape; UserError with file and key."""
    content, problem = find_problem(file, shape)
    if problem is not None:
        raise UserError(f"{problem}; {AGAIN}")
    return content


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no such file; UserError if damaged."""
    if not file.is_file():
        return {}
    content, problem = read_json_object(file)
    if problem is not None:
        raise UserError(f"{problem}; {AGAIN}")
    return content


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file's lines, without lines that hold none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n"):  # splitlines also splits at U+2028, inside texts
        content, _ = parse_json(line, file)
        if isinstance(content, dict):
            yield content


def read_curves(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of each row of metrics.csv; UserError for a row that has another form.

    A last row without its line end is left out: the run may have been killed while writing it.
    """
    if not file.is_file():
        return
    text, problem = read_text(file, "json_mib")
    if problem is not None:
        raise UserError(f"{problem}; {AGAIN}")
    rows = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    try:
        header = next(rows, [])
        if header and (len(set(header)) < len(header) or "step" not in header):
            raise ValueError(f"the columns are {format_value(header)}; expected step and others")
        for row in rows:
            yield _numbers_of(header, row)
    except (csv.Error, ValueError) as error:
        raise UserError(f"{file}:{rows.line_num}: {error}; {AGAIN}") from error


def _numbers_of(header: list[str], row: list[str]) -> tuple[int, dict[str, float]]:
    if len(row) > len(header):
        raise ValueError(f"{len(row)} values for {len(header)} columns")
    cells = dict(zip(header, row, strict=False))
    step = cells.pop("step", "")
    if not re.fullmatch(r"\d{1,15}", step, re.ASCII):
        raise ValueError(f"step is {format_value(step)}; expected {COUNT.description}")
    numbers = {}
    for name, cell in cells.items():
        if not cell:
            continue
        try:
            numbers[name] = float(cell)
        except ValueError:
            raise ValueError(f"{name} is {format_value(cell)}; expected a number") from None
    return int(step), numbers
