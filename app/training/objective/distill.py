"""Distillation: the distribution of a teacher over the next token is what is learned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from app.model.eval_mode import eval_mode
from app.model.head import cross_entropy_, head_hidden, head_logits, head_loss
from app.training.objective.forward import head_inputs, rows_of_positions
from app.training.objective.objective import Losses, Objective
from app.training.objective.settings import DistillConfig
from data_modules import Batch

LoadTeacher = Callable[[torch.device], tuple[Any, str]]
"""loads the teacher to a device; returns it, frozen, and its attention backend"""


class Distill(Objective):
    """T^2 KL + sft_weight times the cross-entropy of each trained token, times its weight.

    KL of the softmax of logits / T: teacher from student (forward, equation 4 of arXiv 1503.02531
    up to a constant), or student from teacher (reverse, as in arXiv 2306.08543). T^2 keeps the size
    of the gradients (section 2.1 of arXiv 1503.02531). Over the tokens that both models have.
    """

    figures: tuple[str, ...] = ("kl", "cross_entropy")
    is_likelihood = False
    first_loss: float | None = None

    def __init__(self, config: DistillConfig, load: LoadTeacher) -> None:
        """`load` is called when the teacher is first needed."""
        self.config, self.load = config, load
        self.teacher: Any = None
        self.backend = ""

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor:
        """Return the teacher's hidden states of the trained positions [positions, width]."""
        if self.teacher is None:
            self.teacher, self.backend = self.load(batch.input_ids.device)
        head = head_inputs(self.teacher, batch, self.backend)
        with eval_mode(self.teacher):
            return head_hidden(self.teacher, head.inputs, head.labels)

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        """Return the losses of the trained columns of a micro-batch; `reference`: as above."""
        assert reference is not None
        head = head_inputs(model, batch, backend)
        divergence = Divergence(self.config, partial(head_logits, self.teacher), reference)
        total, losses = head_loss(model, head.inputs, head.labels, head.weights, divergence)
        return Losses(
            total,
            losses,
            head.weights.flatten(),
            head.dataset_ids.flatten(),
            rows_of_positions(batch, head),
            figures=[torch.cat(each) for each in (divergence.kls, divergence.entropies)],
        )


class Divergence:
    """The loss of a chunk of logits, and what it consists of."""

    def __init__(
        self, config: DistillConfig, logits_of: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> None:
        """`logits_of`: returns the teacher's logits of some rows of `hidden`, fp32."""
        self.config, self.logits_of, self.hidden = config, logits_of, hidden
        self.kls: list[Tensor] = []
        """KL by chunk [positions], without the factor T^2"""
        self.entropies: list[Tensor] = []
        """cross-entropies by chunk [positions]"""

    def __call__(
        self, logits: Tensor, labels: Tensor, loss_weights: Tensor, *, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the losses of the next chunk, and the weighted gradients of its logits, fp32.

        The gradients overwrite the logits, of which the last ones may be padding.
        """
        temperature, sft_weight = self.config.temperature, self.config.sft_weight
        rows, self.hidden = self.hidden[: len(logits)], self.hidden[len(logits) :]
        teacher = pad(self.logits_of(rows), (0, 0, 0, len(logits) - len(rows)))
        shared = min(logits.shape[1], teacher.shape[1])
        log_student = (logits[:, :shared] / temperature).log_softmax(1)
        log_teacher = (teacher[:, :shared] / temperature).log_softmax(1)
        del teacher
        log_ratio = log_student - log_teacher
        if self.config.direction == "forward":
            of_teacher = log_teacher.exp_()
            kl = -(of_teacher * log_ratio).sum(1)
            slope = log_student.exp_().sub_(of_teacher)
        else:
            of_student = log_student.exp_()
            kl = (of_student * log_ratio).sum(1)
            slope = of_student.mul_(log_ratio.sub_(kl.unsqueeze(1)))
        entropies, grad = cross_entropy_(
            logits, labels, loss_weights * sft_weight, needs_grad=needs_grad
        )
        self.kls.append(kl[: len(rows)])
        self.entropies.append(entropies[: len(rows)])
        if grad is not None:
            grad[:, :shared] += slope.mul_((loss_weights * temperature).unsqueeze(1))
        return temperature**2 * kl + sft_weight * entropies, grad
