"""Classes, numbers and rewards of whole texts: a head of its own on their last tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    logsigmoid,
)

from app.model.attention.documents import to_device
from app.training.objective.objective import (
    Losses,
    Objective,
    causal_inputs,
    labels_of_units,
    losses_of_units,
    wins,
)
from app.training.objective.settings import ClassifyConfig, RewardConfig
from data_modules import Batch


def _outputs_of_documents(model: Any, batch: Batch, backend: str) -> Tensor:
    """Return the head's outputs at the last token of each document, fp32 [documents, outputs]."""
    # On the host, where the lengths are: nothing waits for the device.
    ends = [
        (row, end - 1)
        for row, lengths in enumerate(batch.document_lengths)
        for end in itertools.accumulate(lengths)
    ]
    columns = sorted({column for _, column in ends}) or [0]
    places = [(row, columns.index(column)) for row, column in ends]
    device = batch.input_ids.device
    rows, kept = to_device(torch.tensor([*places, (0, 0)]), device).unbind(1)
    inputs = causal_inputs(model, batch, backend)
    inputs["logits_to_keep"] = to_device(torch.tensor(columns), device)
    logits = model(**inputs).logits.float()
    # The last one is no document: without it, an empty micro-batch would have no graph.
    found: Tensor = logits[rows, kept]
    return found[:-1] + 0 * found[-1:].sum()


class Classify(Objective):
    """Cross-entropy of a text's class, times the weight of the class; or squared error of a number.

    As torch.nn.functional.cross_entropy and mse_loss of the logits of single texts. Of several
    classes for a text the mean over classes of binary_cross_entropy_with_logits.
    """

    is_likelihood = False

    def __init__(
        self, config: ClassifyConfig, labels: Sequence[str], *, is_multi_label: bool = False
    ) -> None:
        self.is_multi_label = is_multi_label
        self.classes = labels if len(labels) > 1 else ()
        self.class_weights = config.class_weights
        self.figures: tuple[str, ...] = ("absolute_error",)
        if self.classes:
            kinds = [f"{kind}_{name}" for name in labels for kind in ("recall", "precision")]
            self.figures = ("accuracy", *kinds)

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        outputs = _outputs_of_documents(model, batch, backend)
        labels, weights = labels_of_units(batch, outputs)
        if not self.classes:
            differences = outputs[:, 0] - labels
            losses, figures = differences.square(), [differences.detach().abs()]
        else:
            scale = outputs.new_tensor(self.class_weights or [1.0] * len(self.classes))
            numbers, own = torch.arange(len(self.classes), device=labels.device), labels.long()
            if self.is_multi_label:
                of = (own[:, None] >> numbers) & 1 > 0
                binary = binary_cross_entropy_with_logits(outputs, of.float(), reduction="none")
                losses, guessed = (binary * scale).mean(1), outputs > 0
            else:
                losses = cross_entropy(outputs, own, reduction="none") * scale[own]
                of, guessed = own[:, None] == numbers, outputs.argmax(1)[:, None] == numbers
            figures = _figures(of, guessed)
        said = outputs.detach() if self.classes else None
        return losses_of_units(losses, weights, batch, figures, outputs=said)


class Reward(Objective):
    """-log sigmoid(r_chosen - r_rejected - margin) + centering (r_chosen + r_rejected)^2.

    Bradley and Terry's model as in equation 2 of arXiv 2203.02155, the margin of a row as in
    equation 2 of arXiv 2307.09288, centering as in arXiv 2312.09244.
    """

    figures: tuple[str, ...] = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    is_likelihood = False

    def __init__(self, config: RewardConfig) -> None:
        self.centering = config.centering

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        outputs = _outputs_of_documents(model, batch, backend)
        chosen, rejected = outputs[:, 0].view(-1, 2).unbind(1)
        labels, weights = labels_of_units(batch, outputs)
        margins = chosen - rejected
        losses = -logsigmoid(margins - labels.nan_to_num())
        losses = losses + self.centering * (chosen + rejected).square()
        figures = [each.detach() for each in (margins, chosen, rejected)]
        figures.insert(0, wins(figures[0]))
        return losses_of_units(losses, weights, batch, figures)


def _figures(of: Tensor, guessed: Tensor) -> list[Tensor]:
    """Return accuracy, and by class recall (of its texts) and precision (of its guesses).

    Both are bool [texts, classes]; a text is right if all of its classes are.
    """
    figures = [(of == guessed).all(1).float()]
    for each, guess in zip(of.unbind(1), guessed.unbind(1), strict=True):
        is_right = (each & guess).float()
        figures += [torch.where(those, is_right, torch.nan) for those in (each, guess)]
    return figures
