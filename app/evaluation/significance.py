"""Statistical significance of base vs tuned on the same rows, by paired bootstrap intervals.

Both models are scored on the same rows, so the differences of rows are resampled. Decides what
counts as better, worse and forgotten, and prints it; never how a row is scored. The seed is fixed
and rows are sorted before they are resampled: the same rows give the same interval in any order.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from app.process.logs import show, text_table
from app.training.run_documents import MEASURES, OTHER, MeasureSpec, measure_of
from common.errors import TrainingFault
from common.files import write_atomically
from common.text import formatted, percent, printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

VARIANTS = ("base", "tuned")
"""the compared models, as named in metrics.json and predictions.jsonl"""
NUM_RESAMPLES, SEED = 10_000, 0
_CONFIDENCE = 0.95
"""probability that all intervals of a table are right at the same time"""
MAX_UNITS = 10_000
"""maximum number of units to resample; more rows are joined at random into this many groups"""
MIN_CHANGED = 6
"""minimum number of rows with different scores for a verdict of better or worse: with fewer, a sign
test at the 5 % level never rejects, even if all resamples have the same sign"""
_TOO_FEW_ROWS = "too few rows"
MIN_DIFFERENCE = 1e-4
"""smallest meaningful difference: batch size and precision change the digits below"""
_MAX_DRAWS = 2**20
"""random numbers that are drawn at a time, to bound memory"""
_VERDICT_FILE = "verdict.json"
_HEADINGS = ("data set", "measure", "base", "tuned", "change", "interval", "verdict")
_ENDS = ("val/accuracy_low", "val/accuracy_high")
_OF_ROWS = ("val/loss", "val/perplexity", "val/accuracy", "val/f1", "val/auc")
_FURTHER = ("val/", "judge", "reward")
"""beginnings of measures that the terminal shows only if they are of `_OF_ROWS` or were compared:
a judge has a table of its own"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScores:
    """The scores of one model on the rows of a data set or task, in the order of the rows."""

    scores: Sequence[float] | Floats
    """[rows]"""
    weights: Sequence[float] | Floats | None = None
    """[rows], such as the number of tokens of each row if scores are losses per token; None = rows
    count equally"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The change from base to tuned of one measure on one data set or task."""

    measure: str
    name: str
    """name of the data set or task"""
    base: float
    tuned: float
    low: float
    """lower end of the confidence interval of tuned - base"""
    high: float
    """upper end of the confidence interval of tuned - base"""
    num_rows: int
    num_changed: int
    """number of rows whose scores differ"""
    is_trained: bool | None = None
    """whether the tuned model was trained on this data set, None if unknown"""

    @property
    def spec(self) -> MeasureSpec:
        return MEASURES.get(self.measure, OTHER)

    @property
    def heading(self) -> str:
        return self.spec.heading or self.measure

    @property
    def difference(self) -> float:
        return self.tuned - self.base

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero, for which enough rows must differ."""
        return max(self.low, -self.high) > MIN_DIFFERENCE / 2

    @property
    def is_broken(self) -> bool:
        """Whether the tuned model's value is not finite, while the base's is."""
        return math.isfinite(self.base) and not math.isfinite(self.tuned)

    @property
    def is_better(self) -> bool:
        return self.is_significant and (self.difference < 0) == self.spec.is_lower_better

    @property
    def is_worse(self) -> bool:
        return self.is_broken or (self.is_significant and not self.is_better)

    @property
    def regression(self) -> float:
        """The smallest regression within the interval; 0 if it contains zero."""
        if self.is_broken:
            return math.inf
        if not self.is_worse:
            return 0.0
        return (self.low if self.spec.is_lower_better else -self.high) / self.spec.scale

    @property
    def verdict(self) -> str:
        if not (self.is_significant or self.is_broken):
            if self.num_rows < MIN_CHANGED:
                return _TOO_FEW_ROWS
            reaches_zero = self.num_changed and 0.0 in (self.low, self.high)
            return "too few differ" if reaches_zero else "no difference"
        if self.is_better:
            return "better"
        return "worse" if self.is_trained is not False else "forgotten"

    def metrics(self) -> dict[str, float]:
        """Return the difference and its interval by their names in metrics.json."""
        key = f"change/{self.measure}/{self.name}"
        return {key: self.difference, f"{key}/low": self.low, f"{key}/high": self.high}


def compare_rows(
    base: Mapping[str, Mapping[str, RowScores]],
    tuned: Mapping[str, Mapping[str, RowScores]],
    trained: Collection[str] | None = None,
) -> list[Change]:
    """Compare the scores of both models on the same rows: measure -> data set or task -> scores.

    `trained`: the data sets that the tuned model was trained on, None if unknown. Measures that
    only one model has are left out. The intervals are simultaneous with `_CONFIDENCE` (Bonferroni):
    of many separate 95 % intervals, a few would exclude zero by chance. Raises ValueError if the
    models were scored on different rows.
    """
    pairs = [
        (measure, name, scores, tuned[measure][name])
        for measure, by_name in base.items()
        for name, scores in by_name.items()
        if name in tuned.get(measure, {}) and len(scores.scores)
    ]
    confidence = 1 - (1 - _CONFIDENCE) / max(1, len(pairs))
    return [
        _compare(
            measure,
            name,
            base_scores,
            tuned_scores,
            confidence,
            None if trained is None else name in trained,
        )
        for measure, name, base_scores, tuned_scores in pairs
    ]


def scores_in_lines(
    lines: Iterable[Mapping[str, Any]], variant: str
) -> dict[str, dict[str, RowScores]]:
    """Return the scores of `variant` in predictions.jsonl: metric -> data set or task -> scores.

    Losses are weighted by the number of tokens. A metric is left out if a row of the data set has
    no score of `variant`.
    """
    by_metric: dict[tuple[str, str], list[tuple[float | None, float]]] = defaultdict(list)
    for line in lines:
        for metric, values in line["metrics"].items():
            weight = float(line.get("tokens", 1)) if metric == "loss" else 1.0
            by_metric[metric, line["data_set"]].append((values.get(variant), weight))
    scores: dict[str, dict[str, RowScores]] = defaultdict(dict)
    for (metric, name), rows in by_metric.items():
        own = [score for score, _ in rows if score is not None]
        if len(own) == len(rows):
            scores[metric][name] = RowScores(scores=own, weights=[weight for _, weight in rows])
    return dict(scores)


def _compare(
    measure: str,
    name: str,
    base: RowScores,
    tuned: RowScores,
    confidence: float,
    is_trained: bool | None,
) -> Change:
    import numpy as np

    before, after = (np.asarray(scores.scores, np.float64) for scores in (base, tuned))
    if before.shape != after.shape:
        raise ValueError(
            f"{measure} of {name}: {len(before)} rows of the base, but {len(after)} of the tuned "
            "model"
        )
    weights = np.ones_like(before) if base.weights is None else np.asarray(base.weights, np.float64)
    low, high = paired_bootstrap(after - before, weights, confidence)
    num_changed = int(np.count_nonzero(before != after))
    if num_changed < MIN_CHANGED:
        low, high = min(low, 0.0), max(high, 0.0)
    limit = MEASURES.get(measure, OTHER).max_difference
    return Change(
        measure=measure,
        name=name,
        base=float(np.average(before, weights=weights)),
        tuned=float(np.average(after, weights=weights)),
        low=max(low, -limit),
        high=min(high, limit),
        num_rows=len(before),
        num_changed=num_changed,
        is_trained=is_trained,
    )


def paired_bootstrap(
    differences: Floats, weights: Floats, confidence: float = _CONFIDENCE
) -> tuple[float, float]:
    """Return the percentile interval of the weighted mean of `differences` [rows].

    Rows are drawn with replacement together with their weights, so that the mean of a resample is a
    ratio of sums (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13). Resamples
    of few rows vary too little, so the interval is widened by the ratio of Student's t to the
    normal distribution (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, 4.3).
    """
    import numpy as np

    order = np.lexsort((weights, differences))
    sums = np.stack([(differences * weights)[order], weights[order]])
    generator = np.random.default_rng(SEED)
    if sums.shape[1] > MAX_UNITS:
        groups = generator.permutation(np.arange(sums.shape[1]) % MAX_UNITS)
        sums = np.stack([np.bincount(groups, row, MAX_UNITS) for row in sums])
    num_units = sums.shape[1]
    batch_size = max(1, _MAX_DRAWS // num_units)
    means = []
    for start in range(0, NUM_RESAMPLES, batch_size):
        size = (min(batch_size, NUM_RESAMPLES - start), num_units)
        drawn = generator.integers(0, num_units, size, dtype=np.int32)
        numerator, denominator = (row[drawn].sum(axis=1) for row in sums)
        means.append(numerator / denominator)
    tail, degrees_of_freedom = (1 - confidence) / 2, max(1, len(differences) - 1)
    normal = NormalDist().inv_cdf(1 - tail)
    student = normal + (normal**3 + normal) / (4 * degrees_of_freedom)
    widening = student / normal * math.sqrt(1 + 1 / degrees_of_freedom)
    mean = sums[0].sum() / sums[1].sum()
    low, high = mean + widening * (np.quantile(np.concatenate(means), [tail, 1 - tail]) - mean)
    return float(low), float(high)


def wilson_interval(share: float, weights: Floats) -> tuple[float, float]:
    """Return Wilson's score interval of a share of rows (J. Am. Stat. Assoc. 22, 1927).

    Rows of different `weights` count as (sum of weights)^2 / sum of squares (Kish's effective
    size).
    """
    normal = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    ratio = normal**2 * float((weights**2).sum() / weights.sum() ** 2)
    center = (share + ratio / 2) / (1 + ratio)
    half = math.sqrt(ratio * (share * (1 - share) + ratio / 4)) / (1 + ratio)
    return center - half, center + half


def change_metrics(changes: Iterable[Change]) -> dict[str, float]:
    """Return the metrics of all changes by their names in metrics.json."""
    return {name: value for change in changes for name, value in change.metrics().items()}


def verdict_line(changes: Sequence[Change]) -> str:
    """Summarize in one line what became better, what became worse, and what was forgotten."""
    better = _list_names(change for change in changes if change.is_better)
    forgotten = _list_names(c for c in changes if c.is_worse and c.is_trained is False)
    worse = _list_names(c for c in changes if c.is_worse and c.is_trained is not False)
    parts = [
        f"{words} {names}"
        for words, names in (
            ("better on", better),
            ("worse on", worse),
            ("forgot", f"{forgotten}, not trained on" if forgotten else ""),
        )
        if names
    ]
    if parts:
        return "; ".join(parts)
    if changes and all(change.num_rows < MIN_CHANGED for change in changes):
        most = max(change.num_rows for change in changes)
        return f"{_TOO_FEW_ROWS} to tell ({most}; at least {MIN_CHANGED} are compared)"
    return "no difference"


def _list_names(changes: Iterable[Change]) -> str:
    by_name: dict[str, list[str]] = {}
    for change in changes:
        by_name.setdefault(change.name, []).append(change.heading)
    return ", ".join(f"{name} ({', '.join(measures)})" for name, measures in by_name.items())


def check_regression(changes: Iterable[Change], max_regression: float | None) -> None:
    """Raise TrainingFault if a change is significantly worse by more than `max_regression`."""
    if max_regression is None:
        return
    problems = []
    for change in changes:
        if change.regression > max_regression:
            spec = change.spec.number_format
            problems.append(
                f"{change.name}: {change.heading} {formatted(change.base, spec)} -> "
                f"{formatted(change.tuned, spec)}, worse by at least "
                f"{formatted(change.regression * change.spec.scale, spec)}"
            )
    if problems:
        listed = "\n".join(map(printable, problems))
        raise TrainingFault(
            f"the tuned model is worse than its base by more than "
            f"evaluation.max_regression={max_regression:g}\n{listed}"
        )


def report_comparison(
    metrics: Mapping[str, float], changes: Sequence[Change], groups: Sequence[Change], folder: Path
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
    headings = _HEADINGS if changes else _HEADINGS[:-2]
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
        title += f": simultaneous {percent(_CONFIDENCE, 0)} intervals of the changes"
    print()
    show(text_table([headings, *shown], title, ("measure", "verdict")))
    if groups:
        differing = sum(change.is_significant or change.is_broken for change in groups)
        show(f"groups of tasks: {differing} of {len(groups)} differ")
    if changes:
        show(f"verdict: {printable(verdict)}")


def comparison_rows(
    metrics: Mapping[str, float], changes: Sequence[Change]
) -> list[tuple[str, list[str]]]:
    """Return the measure of each metric of base and tuned, and its row of a table, as `_HEADINGS`.

    Rows of a data set or task stand together; a single data set has no row of all of them.
    """
    measured = (name.partition("/")[2] for name in metrics if name.startswith(("base/", "tuned/")))
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
