"""Distillation: the distribution of a teacher over the next token is what is learned.

What the base or a teacher says of all rows may also be computed once, and stored with the data's
tokens.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from app.model.head import cross_entropy_, head_hidden, head_logits, head_loss
from app.model.layers import eval_mode
from app.model.recompute import rows_per_chunk
from app.process.heartbeat import refresh_liveness
from app.training.objective.objective import Losses, Objective, head_inputs, rows_of_positions
from app.training.objective.pairs import base_log_probs
from app.training.objective.settings import DistillConfig
from common.errors import UserError
from data_modules import Batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from app.assembly.base import Base
    from app.strategy.mixin import Placement
    from app.training.module import FinetuneModule
    from app.training.objective.settings import ObjectiveConfig
    from data_modules import FinetuneDataModule

_IMPOSSIBLE = -1e5
"""logit of a token of probability 0 that a product with 0 leaves 0, at any temperature"""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model to learn from, whose weights are not loaded yet."""

    load: Callable[[torch.device, Placement | None], tuple[Any, str]]
    """loads it by a placement, or to a device; returns it, frozen, and its attention backend"""
    num_tokens: int
    """rows of its head"""
    identity: str = ""
    """everything besides the tokens that determines what it says"""
    placement: Placement | None = None
    """the strategy, which may shard it over its ranks"""


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
        with self._head_gathered():
            for chunk in rows.split(rows_per_chunk(self.source.num_tokens, rows.device.type)):
                log_probs = head_logits(self.teacher, chunk).log_softmax(1)
                best = log_probs.topk(min(self.config.teacher_top_k, log_probs.shape[1]))
                found.append(torch.stack([best.indices.float(), best.values], dim=1))
        return torch.cat(found)

    def release(self) -> None:
        """Free the memory of the teacher."""
        if self.source.placement is not None:
            self.source.placement.release(self.teacher)
        self.teacher = None

    def _head_gathered(self) -> AbstractContextManager[None]:
        """Gather the teacher's head, if sharded: ranks compute different numbers of chunks."""
        if self.teacher is None or self.source.placement is None:
            return nullcontext()
        return self.source.placement.gathered(self.teacher.get_output_embeddings())

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return hidden states of the teacher [positions, width], and which are trained on."""
        if self.teacher is None:
            source = self.source
            self.teacher, self.backend = source.load(batch.input_ids.device, source.placement)
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
        with self._head_gathered():
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


def open_references(
    config: ObjectiveConfig, data: FinetuneDataModule, base: Base, precision: str
) -> Callable[[FinetuneModule], None] | None:
    """Give each row its stored log-probabilities; return what computes and stores missing ones.

    None if the objective does not use stored ones. Raises UserError if a resumed run finds none of
    its base, which its weights may no longer be; a teacher is asked again.
    """
    if isinstance(config, DistillConfig) and config.teacher_logits == "cached":
        assert base.teacher is not None
        identity = f"{config.teacher_top_k} of {base.teacher.identity}"
        data.read_references(identity, by_token=True)
        return store_references
    if config.reference_source != "cached":
        return None
    is_found = data.read_references(_identity_of(base, precision))
    if not is_found and data.first_step:
        raise UserError(
            "objective.reference=cached: the log-probabilities of the base, which the run computed "
            f"before its first step, are gone from data.cache_dir={data.cache_dir}, or settings "
            "that determine them have changed, or the run began with an older version of loft; if "
            "the run used another folder, type data.cache_dir=FOLDER again (a resumed run does not "
            "remember it); else put the folder back, or type resume=never to start again"
        )
    return store_references


def _identity_of(base: Base, precision: str) -> str:
    """Return a hash of everything besides the tokens that determines log-probabilities.

    Not of where files are whose content is known: a resumed run may find them elsewhere.
    """
    files, path = dict(base.description), base.config.path
    if files["weights"] is not None:
        files["path"] = path = None
    config = replace(
        base.config,
        path=path,
        tokenizer_path=None,
        chat_template=None,
        stop_tokens=[],
        wrap_class=None,
        stream=None,
    )
    parts = [sorted(files.items()), config, base.quantization, base.dtype, base.backend, precision]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def store_references(module: FinetuneModule) -> None:
    """Compute what the base or teacher says of all rows and store it, unless every rank has it.

    All ranks call this, before the first step of a run; each computes a share of the rows.
    """
    strategy, data = module.strategy, module.trainer.datamodule
    teacher = module.objective if isinstance(module.objective, Distill) else None
    key = "objective.reference=cached" if teacher is None else "objective.teacher_logits=cached"
    device = strategy.root_device
    is_found: Any = torch.tensor(data.train_examples.has_stored, device=device).int()
    if module.trainer.strategy.all_gather(is_found).min().item():
        log.info("%s: found in the cache", key)
        return
    sum_over_ranks = module.sum_over_ranks if strategy.num_data_ranks > 1 else None
    began, rows = time.monotonic(), data.referenced_examples()
    loader, order = data.ordered_loader(rows, strategy.num_data_ranks, strategy.data_rank)

    def compute(batch: Batch) -> Tensor:
        part = strategy.shard_batch(batch).to(device)
        if teacher is not None:
            # Much more than a number a pair: on the host, unless ranks add up their shares.
            return teacher.likeliest(part).to(device if sum_over_ranks else "cpu")
        found: Tensor = strategy.run_forward(base_log_probs, module.model, part, module.backend)
        return found

    counts = [1] * len(rows) if teacher is None else rows.trained.tolist()
    values = measure_references(loader, order, counts, compute, sum_over_ranks)
    data.store_references(values)
    what = "pairs" if teacher is None else "rows"
    seconds = time.monotonic() - began
    log.info("%s: computed for %s %s in %.1f s, now cached", key, f"{len(rows):,}", what, seconds)
    if teacher is not None:
        teacher.release()
        held = np.exp(values[:, 1]).sum(1)
        log.info(
            "%s: the %d likeliest tokens hold %.2f %% of the teacher's probability (of the worst "
            "hundredth of positions at most %.2f %%); more with objective.teacher_top_k",
            *(key, values.shape[2], 100 * held.mean(), 100 * np.quantile(held, 0.01)),
        )


@torch.no_grad()
def measure_references(
    batches: Iterable[Batch],
    order: Sequence[int],
    counts: Sequence[int],
    compute: Callable[[Batch], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> npt.NDArray[Any]:
    """Return `compute` of all rows, [pairs, 2] or [trained tokens, ...].

    `order`: indices of the rows in `batches`; `counts`: number of values of each row.
    """
    found = []
    for batch in batches:
        found.append(compute(batch))
        refresh_liveness()
    computed = torch.cat(found)
    values = computed.new_zeros(sum(counts), *computed.shape[1:])
    starts = np.cumsum(counts) - counts
    places = [np.arange(starts[row], starts[row] + counts[row]) for row in order]
    values[torch.from_numpy(np.concatenate([*places, starts[:0]])).to(values.device)] = computed
    whole = values if sum_over_ranks is None else sum_over_ranks(values)
    return whole.cpu().numpy()
