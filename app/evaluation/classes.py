"""How well a classifier tells its classes apart: F1, AUC, and which classes it confuses.

Every row counts once, whatever its weight in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Counts = npt.NDArray[np.int64]

CONFUSION_FILE = "confusion.csv"
MAX_SHOWN_CLASSES = 10
"""classes up to which the table of confused classes is printed"""


def class_metrics(
    outputs: Floats, labels: Counts, names: Sequence[str], *, is_multi_label: bool = False
) -> dict[str, float]:
    """Return `f1` and `auc`, each the mean over classes, and `f1_NAME` of each class.

    The AUC of a class ranks its rows against all others by its probability; a class that no row
    has, or all have, has no AUC, and one that is never guessed either has no F1.

    Args:
        outputs: logits [classes, rows].
        labels: class of each row, or with `is_multi_label` its classes as bits [rows].
        names: names of the classes.
    """
    import numpy as np

    numbers, scores = np.arange(len(names))[:, None], outputs
    if is_multi_label:
        of, guessed = (labels >> numbers) & 1 > 0, outputs > 0
    else:
        of, guessed = labels == numbers, outputs.argmax(0) == numbers
        scores = np.exp(outputs - outputs.max(0))
        scores /= scores.sum(0)
    right, total = (of & guessed).sum(1), of.sum(1) + guessed.sum(1)
    metrics = {
        f"f1_{name}": float(2 * right[index] / total[index])
        for index, name in enumerate(names)
        if total[index]
    }
    if metrics:
        metrics["f1"] = float(np.mean(list(metrics.values())))
    areas = [
        area_under_curve(score, own)
        for score, own in zip(scores, of, strict=True)
        if own.any() and not own.all()
    ]
    return metrics | ({"auc": float(np.mean(areas))} if areas else {})


def area_under_curve(scores: Floats, is_positive: npt.NDArray[np.bool_]) -> float:
    """Return the share of pairs of a positive and a negative row that `scores` rank rightly.

    A tie counts as half a pair (Mann and Whitney's U).
    """
    import numpy as np

    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num_positive = int(is_positive.sum())
    above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * (len(scores) - num_positive)))


def confusion(outputs: Floats, labels: Counts) -> Counts:
    """Return the number of rows of each class that were taken for each class [true, guessed]."""
    import numpy as np

    counts = np.zeros((len(outputs), len(outputs)), np.int64)
    np.add.at(counts, (labels, outputs.argmax(0)), 1)
    return counts


def confusion_cells(counts: Counts, names: Sequence[str]) -> list[list[str]]:
    """Return `confusion` as a table: a row for each class, a column for each guess."""
    rows = zip(names, counts.tolist(), strict=True)
    return [["class", *names], *([name, *map(str, row)] for name, row in rows)]
