"""Is it more than noise: base vs tuned on the same rows, with paired bootstrap intervals.

Both models have answered the same rows, so that what is resampled is the difference of each row.
Decides what counts as better, as worse and as forgotten; never how a row is scored. Rows are
resampled with a fixed seed and in an order of their own: the same rows give the same interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from app.process.errors import TrainingFault
from data_modules import printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.table import Table

    Floats = npt.NDArray[np.float64]

NUM_RESAMPLES, SEED = 10_000, 0
CONFIDENCE = 0.95
"""probability that all intervals of a table hold at once"""
MAX_UNITS = 10_000
"""rows that are resampled one by one; more are joined at random into as many groups"""
MIN_CHANGED = 6
"""fewest rows with different scores for a verdict of better or worse: a 5 % sign test has none with
fewer, either, though all resamples may have one sign"""
SMALLEST = 1e-4
"""smallest difference that means anything: batch sizes and precision change the digits below"""
CELLS = 2**20
"""random numbers that are drawn at a time"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSpec:
    """What a row's score is, and how it is shown."""

    heading: str
    form: str
    is_lower_better: bool = False
    scale: float = 1.0
    """what evaluation.max_regression counts as 1"""
    largest: float = math.inf
    """largest difference that is possible"""


MEASURES = {
    "val/loss": MeasureSpec(heading="loss", form="{:.4f}", is_lower_better=True),
    "val/perplexity": MeasureSpec(heading="perplexity", form="{:.4g}", is_lower_better=True),
    "exact_match": MeasureSpec(heading="exact match", form="{:.1%}", largest=1.0),
    **{
        name: MeasureSpec(heading=heading, form="{:.1%}", largest=1.0)
        for name, heading in {
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
    "loss": MeasureSpec(heading="loss", form="{:.4f}", is_lower_better=True),
    "judge": MeasureSpec(heading="judge's score", form="{:.2f}", scale=10, largest=9.0),
}
OTHER = MeasureSpec(heading="", form="{:.4f}")
"""a measure that is not listed: more is better, under its own name"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScores:
    """What a model scored on each row of a data set or task, in the order of the rows.

    `scores` [rows]; `weights` [rows], such as the trained tokens of each row whose loss per token
    is scored, None where each row counts the same.
    """

    scores: Sequence[float] | Floats
    weights: Sequence[float] | Floats | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Base vs tuned by one measure on one data set or task."""

    measure: str
    name: str
    """of the data set or task"""
    base: float
    tuned: float
    low: float
    """`low` to `high`: the interval of tuned - base"""
    high: float
    num_rows: int
    num_changed: int
    """rows whose scores differ"""
    is_trained: bool | None = None
    """whether the tuned model was trained on such data; None where nobody knows"""

    @property
    def spec(self) -> MeasureSpec:
        return MEASURES.get(self.measure, OTHER)

    @property
    def difference(self) -> float:
        return self.tuned - self.base

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero, by rows and digits enough to say so."""
        return self.excludes_zero and self.num_changed >= MIN_CHANGED

    @property
    def excludes_zero(self) -> bool:
        return max(self.low, -self.high) > SMALLEST / 2

    @property
    def is_broken(self) -> bool:
        """Whether the tuned model gives no number where its base does."""
        return math.isfinite(self.base) and not math.isfinite(self.tuned)

    @property
    def is_better(self) -> bool:
        return self.is_significant and (self.difference < 0) == self.spec.is_lower_better

    @property
    def is_worse(self) -> bool:
        return self.is_broken or (self.is_significant and not self.is_better)

    @property
    def regression(self) -> float:
        """The least regression that the interval leaves open; 0 where it holds zero."""
        if self.is_broken:
            return math.inf
        if not self.is_worse:
            return 0.0
        return (self.low if self.spec.is_lower_better else -self.high) / self.spec.scale

    @property
    def verdict(self) -> str:
        """The verdict of this line."""
        if not (self.is_significant or self.is_broken):
            return "too few differ" if self.excludes_zero else "no difference"
        if self.is_better:
            return "better"
        return "worse" if self.is_trained is not False else "forgotten"

    def figures(self) -> dict[str, float]:
        """Return its figures by their names in metrics.json."""
        key = f"change/{self.measure}/{self.name}"
        return {key: self.difference, f"{key}/low": self.low, f"{key}/high": self.high}


def compare_rows(
    base: Mapping[str, Mapping[str, RowScores]],
    tuned: Mapping[str, Mapping[str, RowScores]],
    trained: Collection[str] | None = None,
) -> list[Change]:
    """Compare what both models scored on the same rows: measure -> data set or task -> scores.

    `trained`: the data sets that the tuned model was trained on, None where nobody knows. What one
    of the models has no scores of is left out. The intervals hold all at once with `CONFIDENCE`:
    of many that each hold with 95 %, a few would exclude zero by chance. ValueError where the
    models have scored different rows.
    """
    pairs = [
        (measure, name, scores, tuned[measure][name])
        for measure, by_name in base.items()
        for name, scores in by_name.items()
        if name in tuned.get(measure, {}) and len(scores.scores)
    ]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(pairs))
    return [
        _compare(
            measure, name, one, other, confidence, None if trained is None else name in trained
        )
        for measure, name, one, other in pairs
    ]


def scores_in_lines(
    lines: Iterable[Mapping[str, Any]], variant: str
) -> dict[str, dict[str, RowScores]]:
    """Return a model's scores in the lines of predictions.jsonl, by metric and data set or task.

    The loss of a row counts by its tokens. A metric is left out where a row has none of `variant`.
    """
    found: dict[tuple[str, str], list[tuple[float | None, float]]] = defaultdict(list)
    for line in lines:
        for metric, values in line["metrics"].items():
            weight = float(line.get("tokens", 1)) if metric == "loss" else 1.0
            found[metric, line["data_set"]].append((values.get(variant), weight))
    scores: dict[str, dict[str, RowScores]] = defaultdict(dict)
    for (metric, name), rows in found.items():
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

    one, other = (np.asarray(scores.scores, np.float64) for scores in (base, tuned))
    if one.shape != other.shape:
        raise ValueError(f"{measure} of {name}: {len(one)} rows of the base, {len(other)} tuned")
    weights = np.ones_like(one) if base.weights is None else np.asarray(base.weights, np.float64)
    low, high = paired_bootstrap(other - one, weights, confidence)
    largest = MEASURES.get(measure, OTHER).largest
    return Change(
        measure=measure,
        name=name,
        base=float(np.average(one, weights=weights)),
        tuned=float(np.average(other, weights=weights)),
        low=max(low, -largest),
        high=min(high, largest),
        num_rows=len(one),
        num_changed=int(np.count_nonzero(one != other)),
        is_trained=is_trained,
    )


def paired_bootstrap(
    differences: Floats, weights: Floats, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return the percentile interval of the weighted mean of `differences` [rows].

    Rows are drawn with replacement together with their weights, so that the mean of a resample is a
    ratio of sums (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13). Resamples
    of few rows vary too little: their deviations are widened as Student's t is wider than the
    normal distribution (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, 4.3).
    """
    import numpy as np

    order = np.lexsort((weights, differences))
    sums = np.stack([(differences * weights)[order], weights[order]])
    draw = np.random.default_rng(SEED)
    if sums.shape[1] > MAX_UNITS:
        groups = draw.permutation(np.arange(sums.shape[1]) % MAX_UNITS)
        sums = np.stack([np.bincount(groups, row, MAX_UNITS) for row in sums])
    num_units = sums.shape[1]
    at_once = max(1, CELLS // num_units)
    means = []
    for start in range(0, NUM_RESAMPLES, at_once):
        size = (min(at_once, NUM_RESAMPLES - start), num_units)
        drawn = draw.integers(0, num_units, size, dtype=np.int32)
        top, bottom = (row[drawn].sum(axis=1) for row in sums)
        means.append(top / bottom)
    tail, free = (1 - confidence) / 2, max(1, len(differences) - 1)
    normal = NormalDist().inv_cdf(1 - tail)
    student = normal + (normal**3 + normal) / (4 * free)
    wider = student / normal * math.sqrt(1 + 1 / free)
    mean = sums[0].sum() / sums[1].sum()
    low, high = mean + wider * (np.quantile(np.concatenate(means), [tail, 1 - tail]) - mean)
    return float(low), float(high)


def change_metrics(changes: Iterable[Change]) -> dict[str, float]:
    """Return the figures of all lines by their names in metrics.json."""
    return {name: value for change in changes for name, value in change.figures().items()}


def verdict_line(changes: Sequence[Change]) -> str:
    """Say in one line what became better and worse, and what of it was forgotten."""
    better = _named(change for change in changes if change.is_better)
    forgotten = _named(c for c in changes if c.is_worse and c.is_trained is False)
    worse = _named(c for c in changes if c.is_worse and c.is_trained is not False)
    parts = [
        f"{words} {names}"
        for words, names in (
            ("better on", better),
            ("worse on", worse),
            ("forgot", f"{forgotten}, not trained on" if forgotten else ""),
        )
        if names
    ]
    return "; ".join(parts) or "no difference"


def _named(changes: Iterable[Change]) -> str:
    by_name: dict[str, list[str]] = {}
    for change in changes:
        by_name.setdefault(change.name, []).append(change.spec.heading or change.measure)
    return ", ".join(f"{name} ({', '.join(measures)})" for name, measures in by_name.items())


def changes_table(changes: Sequence[Change], title: str = "from base to tuned") -> Table:
    """Table of all lines: both figures, their difference, its interval and a verdict each."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{title}: {CONFIDENCE:.0%} that all intervals hold", title_justify="left")
    for heading in ("data set", "measure"):
        table.add_column(heading)
    for heading in ("rows", "change", "interval"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for change in changes:
        form = change.spec.form
        signed = form.replace(":", ":+")
        table.add_row(
            escape(change.name),
            escape(change.spec.heading or change.measure),
            f"{change.num_rows:,}",
            signed.format(change.difference),
            f"{signed.format(change.low)} to {signed.format(change.high)}",
            change.verdict,
        )
    return table


def print_changes(changes: Sequence[Change], groups: Sequence[Change] = ()) -> None:
    """Print the table and the verdict; nothing where nothing was compared.

    Of `groups` of tasks those that differ are printed, the others counted.
    """
    if not changes:
        return
    from rich.console import Console

    Console(highlight=False).print(changes_table(changes))
    if groups:
        real = [change for change in groups if change.is_significant or change.is_broken]
        if real:
            Console(highlight=False).print(changes_table(real, "groups of tasks that differ"))
        print(f"groups of tasks: {len(real)} of {len(groups)} differ; metrics.json has all")
    print(f"verdict: {printable(verdict_line(changes))}")


def check_regression(changes: Iterable[Change], most: float | None) -> None:
    """TrainingFault where a line is worse by more than `most`, beyond what chance explains."""
    if most is None:
        return
    problems = [
        f"{change.name}: {change.spec.heading or change.measure} "
        f"{change.spec.form.format(change.base)} -> {change.spec.form.format(change.tuned)}, worse "
        f"by at least {change.spec.form.format(change.regression * change.spec.scale)}"
        for change in changes
        if change.regression > most
    ]
    if problems:
        listed = "\n".join(map(printable, problems))
        raise TrainingFault(
            f"the tuned model is worse than its base by more than "
            f"evaluation.max_regression={most:g}\n{listed}"
        )
