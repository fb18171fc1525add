"""Distillation: the distribution of a teacher over the next token is what is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from app.model.chunks import rows_per_chunk
from app.model.contexts import eval_mode
from app.model.head import cross_entropy_, head_hidden, head_logits, head_loss
from app.training.objective.forward import head_inputs, rows_of_positions
from app.training.objective.objective import Losses, Objective
from app.training.objective.settings import DistillConfig
from data_modules import Batch

_IMPOSSIBLE = -1e5
"""logit of a token of probability 0 that a product with 0 leaves 0, at any temperature"""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model to learn from, whose weights are not loaded yet."""

    load: Callable[[torch.device], tuple[Any, str]]
    """loads it to a device; returns it, frozen, and its attention backend"""
    num_tokens: int
    """rows of its head"""
    identity: str = ""
    """everything besides the tokens that determines what it says"""


class Distill(Objective):
    """T^2 KL + sft_weight times the cross-entropy of each trained token, times its weight.

    KL of the softmax of logits / T: teacher from student (forward, equation 4 of arXiv 1503.02531
    up to a constant), or student from teacher (reverse, as in arXiv 2306.08543). T^2 keeps the size
    of the gradients (section 2.1 of arXiv 1503.02531). Over the tokens that both models have; with
    `teacher_logits=cached` the teacher's are its `teacher_top_k` likeliest, which then sum to 1.
    """

    figures: tuple[str, ...] = ("kl", "cross_entropy")
    is_likelihood = False

    def __init__(self, config: DistillConfig, source: Teacher) -> None:
        """`source` is loaded when it is first needed."""
        self.config, self.source = config, source
        self.teacher: Any = None
        self.backend = ""

    def reference(self, model: Any, batch: Batch, backend: str) -> Tensor:
        """Return the teacher's hidden states of the trained columns [positions, width].

        With `teacher_logits=cached` its likeliest tokens [positions, 2, k], those that are stored
        with the batch if there are any.
        """
        if self.config.teacher_logits == "live":
            return self._hidden(batch)[0]
        columns = slice(None) if batch.decoder is not None else batch.trained_columns
        is_trained = (batch.labels[:, columns] >= 0).flatten()
        stored = batch.reference
        if stored is None:  # nothing to learn, or rows that no run has trained on
            empty = torch.zeros(1, 2, 1, device=is_trained.device)
            stored = self.likeliest(batch) if any(batch.document_lengths) else empty
        # By an index instead of the mask, for which the host would wait.
        return stored[(is_trained.cumsum(0) - 1).clamp_min(0)]

    def likeliest(self, batch: Batch) -> Tensor:
        """Return the teacher's likeliest tokens and their log-probabilities at each label.

        float32 [labels, 2, k]: ids, which float32 has up to 2^24, and log-probabilities.
        """
        hidden, is_trained = self._hidden(batch)
        rows, found = hidden[is_trained], []
        for chunk in rows.split(rows_per_chunk(self.source.num_tokens, rows.device.type)):
            log_probs = head_logits(self.teacher, chunk).log_softmax(1)
            best = log_probs.topk(min(self.config.teacher_top_k, log_probs.shape[1]))
            found.append(torch.stack([best.indices.float(), best.values], dim=1))
        return torch.cat(found)

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return hidden states of the teacher [positions, width], and which are trained on."""
        if self.teacher is None:
            self.teacher, self.backend = self.source.load(batch.input_ids.device)
        head = head_inputs(self.teacher, batch, self.backend)
        with eval_mode(self.teacher):
            hidden = head_hidden(self.teacher, head.inputs, head.labels)
        return hidden, (head.labels >= 0).flatten()

    def _logits(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Return the teacher's logits of rows of `reference`, of at most `num_tokens` if stored."""
        if self.config.teacher_logits == "live":
            return head_logits(self.teacher, rows)
        ids, log_probs = rows[:, 0].long(), rows[:, 1]
        shared = min(num_tokens, self.source.num_tokens)
        # One token more, for those that only the teacher has.
        logits = rows.new_full((len(rows), shared + 1), _IMPOSSIBLE)
        return logits.scatter_(1, ids.clamp_max(shared), log_probs)[:, :shared]

    def losses(self, model: Any, batch: Batch, backend: str, reference: Tensor | None) -> Losses:
        """Return the losses of the trained columns of a micro-batch; `reference`: as above."""
        assert reference is not None
        head = head_inputs(model, batch, backend)
        divergence = Divergence(self.config, self._logits, reference)
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
        self, config: DistillConfig, logits_of: Callable[[Tensor, int], Tensor], hidden: Tensor
    ) -> None:
        """`logits_of`: returns the teacher's logits of some rows of `hidden`, fp32.

        It takes the student's number of tokens, too.
        """
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
        teacher = pad(self.logits_of(rows, logits.shape[1]), (0, 0, 0, len(logits) - len(rows)))
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
