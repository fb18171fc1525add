"""A language-model head that computes the loss in chunks.

The logits of a whole batch, the largest tensor of a training step, are never in memory at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from app.model import cpu as onednn
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.layers import eval_mode
from app.model.recompute import FUSED_CHUNKS, TRAINED_CHUNKS, rows_per_chunk

LossKernel = Callable[..., None]
"""`app.model.loss_kernel.cross_entropy_`"""
ChunkLoss = Callable[..., tuple[Tensor, "Tensor | None"]]
"""what is computed of chunks, in order, in place of the cross-entropy: as `cross_entropy_`"""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    kernel: LossKernel | None = None,
    shard: VocabularyShard | None = None,
    chunk_loss: ChunkLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of loss times weight, and each position's loss in nats, fp32 and detached.

    hidden [positions, width], weight [vocabulary, width], bias [vocabulary]; labels [positions] are
    the next tokens, -100 if masked (loss 0); loss_weights [positions].
    `softcap` bounds the logits to softcap * tanh(logits / softcap), as in Gemma 2. Under autocast
    matrix products use its dtype, everything else fp32. `kernel` computes losses and gradients of a
    chunk in one pass, if there is no bias. `shard`: `weight` holds only this rank's rows of the
    vocabulary; the loss is over all rows, and the gradient of `hidden` is this rank's summand.
    `chunk_loss` replaces the cross-entropy, and is not computed by `kernel` or over shards.
    """
    num_positions = len(labels)
    hidden, labels, loss_weights = _aligned(hidden, labels, loss_weights)
    options = softcap, kernel, shard, chunk_loss
    with torch.autocast(hidden.device.type, enabled=False):
        total, losses = _LinearCrossEntropy.apply(
            hidden, weight.to(hidden.dtype), bias, labels, loss_weights, *options
        )
    return total, losses[:num_positions]


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    kernel: LossKernel | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the log-probability of each label in nats, fp32 and differentiable; 0 if masked.

    For losses that need all of them before a position's weight is known. Arguments and memory as
    `linear_cross_entropy`, whose sum it equals; the matrix products are computed twice.
    """
    hidden, padded = _aligned(hidden, labels)
    with torch.autocast(hidden.device.type, enabled=False):
        log_probs: Tensor = _LinearLogProbs.apply(
            hidden, weight, bias, padded, softcap, kernel, shard
        )
    return log_probs[: len(labels)]


def _aligned(hidden: Tensor, *by_position: Tensor) -> tuple[Tensor, ...]:
    """Return `hidden` in autocast's dtype, all padded to the rows that oneDNN computes at once.

    `by_position`: labels, padded with -100, and weights, padded with 0.
    """
    device, missing = hidden.device.type, -len(hidden) % onednn.ROWS
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if device != "cpu" or not missing:
        return hidden, *by_position
    pad = torch.nn.functional.pad
    hidden = pad(hidden, (0, 0, 0, missing))
    values = (0 if each.is_floating_point() else -100 for each in by_position)
    padded = (
        pad(each, (0, missing), value=value)
        for each, value in zip(by_position, values, strict=True)
    )
    return hidden, *padded


class VocabularyShard(Protocol):
    """The rows of the vocabulary in a rank's head, and reductions over the ranks that share it."""

    first_row: int

    def largest_(self, tensor: Tensor) -> None:
        """All-reduce `tensor` in place by the maximum."""

    def sum_(self, tensor: Tensor) -> None:
        """All-reduce `tensor` in place by the sum."""


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of losses; gradients are computed in the forward pass, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_weights: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        arguments = hidden, weight, bias, labels, loss_weights, *options
        losses, ctx.grads = _losses_by_chunk(*arguments, needs_grad=ctx.needs_input_grad[:3])
        ctx.mark_non_differentiable(losses)
        return (losses * loss_weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients by the gradient of the sum."""
        scaled = (None if grad is None else grad * outer[0] for grad in ctx.grads)
        return (*scaled, *[None] * 6)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities; the logits are computed again in the backward pass, a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *options: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.options = options
        none = torch.zeros_like(labels, dtype=torch.float32)
        arguments = hidden, weight.to(hidden.dtype), bias, labels, none, *options
        losses, _ = _losses_by_chunk(*arguments, needs_grad=(False, False, False))
        return -losses

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Weight each position by the gradient of its log-probability."""
        hidden, weight, bias, labels = ctx.saved_tensors
        arguments = hidden, weight.to(hidden.dtype), bias, labels, -outer[0], *ctx.options
        with torch.no_grad():
            _, grads = _losses_by_chunk(*arguments, needs_grad=ctx.needs_input_grad[:3])
        return grads[0], _cast(grads[1], weight), grads[2], None, None, None, None


Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""gradients of hidden, weight and bias; None for those that need none"""


def _losses_by_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    loss_weights: Tensor,
    softcap: float | None,
    kernel: LossKernel | None,
    shard: VocabularyShard | None,
    chunk_loss: ChunkLoss | None = None,
    *,
    needs_grad: tuple[bool, bool, bool],
) -> tuple[Tensor, Grads]:
    """Return the losses [positions], and the gradients of their sum weighted by `loss_weights`."""
    hidden_needs_grad, weight_needs_grad, bias_needs_grad = needs_grad
    writes_grad = any(needs_grad)
    losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if hidden_needs_grad else None
    # Sums over chunks are in fp32: half precision would lose small terms.
    grad_weight = torch.zeros_like(weight) if weight_needs_grad and not len(labels) else None
    grad_bias = None
    if bias_needs_grad and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=torch.float32)
    linear = onednn.linear if writes_grad else torch.nn.functional.linear
    size = rows_per_chunk(len(weight), hidden.device.type)
    if shard is not None or bias is not None or chunk_loss is not None:
        kernel = None  # it needs whole rows of logits, and does not support a bias
    if kernel is not None:
        size *= TRAINED_CHUNKS if weight_needs_grad else FUSED_CHUNKS
    chunk_loss = chunk_loss or partial(cross_entropy_, shard=shard)
    for start in range(0, len(labels), size):
        chunk = slice(start, start + size)
        rows = hidden[chunk]
        if kernel is not None:
            logits = rows @ weight.T
            kernel(logits, labels[chunk], losses[chunk], softcap, writes_gradient=writes_grad)
            scale = loss_weights[chunk].float().unsqueeze(1)
            if grad_hidden is not None:
                torch.mul(logits @ weight, scale, out=grad_hidden[chunk])
            if weight_needs_grad:
                grad_weight = _add(grad_weight, logits.T @ (rows * scale).to(rows.dtype))
            del logits  # otherwise it would stay in memory together with the next chunk's
            continue
        products = linear(rows, weight).float()
        logits, slope = _logits_of(products, bias, softcap, needs_slope=writes_grad)
        of_chunk = logits, labels[chunk], loss_weights[chunk]
        losses[chunk], grad = chunk_loss(*of_chunk, needs_grad=writes_grad)
        if grad is None:
            continue
        if slope is not None:
            grad *= slope
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        grad = grad.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[chunk] = linear(grad, weight.T)
        if weight_needs_grad:
            grad_weight = _add(grad_weight, grad.T @ rows)
        del products, logits, slope, grad, of_chunk
    return losses, (grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias))


def _logits_of(
    logits: Tensor, bias: Tensor | None, softcap: float | None, *, needs_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Add bias and softcap in place; return the logits and the derivative of the softcap."""
    if bias is not None:
        logits += bias
    if softcap is None:
        return logits, None
    bounded = logits.div_(softcap).tanh_()
    slope = 1 - bounded.square() if needs_slope else None
    return bounded.mul_(softcap), slope


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    *,
    needs_grad: bool,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of a chunk, and the weighted gradients of its logits, fp32.

    The gradients overwrite the logits.
    """
    is_trained_on = labels >= 0
    target = labels.clamp(min=0).unsqueeze(1)
    highest = logits.amax(1, keepdim=True)
    if shard is not None:
        shard.largest_(highest)
        target = target - shard.first_row
        is_local = (target >= 0) & (target < logits.shape[1])
        target = target.clamp(0, logits.shape[1] - 1)
    own = logits.gather(1, target)
    exponentials = logits.sub_(highest).exp_()
    sums = exponentials.sum(1, keepdim=True)
    if shard is not None:
        shard.sum_(both := torch.stack([own * is_local, sums]))
        own, sums = both.unbind()
    losses = (sums.log() + highest - own).squeeze(1) * is_trained_on
    if not needs_grad:
        return losses, None
    scale = (loss_weights * is_trained_on).float().unsqueeze(1)
    label_scale = scale if shard is None else scale * is_local
    return losses, exponentials.mul_(scale / sums).scatter_add_(1, target, -label_scale)


def _cast(grad: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return None if grad is None or weight is None else grad.to(weight.dtype)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a chunk's summand in fp32; the first one keeps its dtype."""
    return part if total is None else total.float().add_(part)


log = logging.getLogger(__name__)

_LOGITS_SCALES = {"logits_scaling": -1, "logit_scale": 1}
"""config.json keys of a scale of the logits: Granite divides by it (-1), Cohere multiplies (1)"""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""config.json keys of the softcap of the logits, of Gemma, RecurrentGemma and xLSTM"""
_PROBE_TOKENS = 8
_TOLERANCE, _ROUNDING_STEPS = 1e-2, 100
"""largest relative difference of the two losses, absolute and in eps of the logits' dtype; the
smaller of both counts"""


@dataclass(slots=True)
class _Targets:
    """What a head computes in place of logits in the next forward pass.

    `labels` and `loss_weights` [rows, positions]; None: the result is no loss. `columns`
    [positions]: indices of the tokens whose logits were requested, None for all. `compute` takes
    the arguments of `linear_log_probs`; of its two results the first is part of the graph.
    """

    labels: Tensor
    compute: Callable[..., tuple[Tensor, Tensor]]
    loss_weights: Tensor | None = None
    columns: Tensor | None = None

    def select(self, outputs: Tensor) -> Tensor:
        """Select the requested positions if `outputs` has all: [rows, positions, ...]."""
        if self.columns is None or outputs.shape[1] == self.labels.shape[1]:
            return outputs
        return outputs[:, self.columns]


class LossHead(torch.nn.Linear):
    """A model's head that computes the loss instead of logits if `targets` were set.

    The class of the existing head is changed, and its parameters keep their names, so that
    sharding, tying and saving are not affected. The loss is computed inside the forward, when a
    strategy has gathered the head's weights.
    """

    targets: _Targets | None = None
    computed: tuple[Tensor, Tensor] | None = None
    softcap: float | None = None
    scale: float = 1.0
    kernel: LossKernel | None = None
    shard: VocabularyShard | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, or an empty tensor if the loss was computed instead."""
        if self.targets is None:
            return super().forward(hidden)
        targets, self.targets = self.targets, None
        hidden = targets.select(hidden)
        rows = (hidden if self.scale == 1.0 else hidden * self.scale).flatten(0, 1)
        self.computed = targets.compute(
            rows,
            self.weight,
            targets.labels.flatten(),
            bias=self.bias,
            softcap=self.softcap,
            kernel=self.kernel,
            shard=self.shard,
        )
        total = self.computed[0].sum()
        # Empty, but part of the graph between loss and head: strategies hook a forward's output to
        # gather weights for its backward pass and reduce gradients after it.
        return total * hidden.new_empty(*hidden.shape[:2], 0)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states [positions, width] that are scaled already, fp32."""
        products = torch.nn.functional.linear(rows.to(self.weight.dtype), self.weight).float()
        return _logits_of(products, self.bias, self.softcap, needs_slope=False)[0]

    def pop_loss(self) -> tuple[Tensor, Tensor]:
        """Return and clear what the last forward computed, the results of `_Targets.compute`."""
        if self.computed is None:
            raise RuntimeError("the model's forward did not call its head")
        computed, self.computed = self.computed, None
        return computed


def fuse_head(model: Any) -> None:
    """Turn a model's head into a `LossHead` if it is one linear layer without a later bias."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "final_logits_bias" in model._buffers:
        return
    numbers = model.config.get_text_config().to_dict()
    head.__class__ = LossHead
    head.softcap = next((cap for name in _SOFTCAPS if (cap := numbers.get(name))), None)
    for name, power in _LOGITS_SCALES.items():
        head.scale *= (numbers.get(name) or 1.0) ** power


def _head_results(model: Any, inputs: dict[str, Any], targets: _Targets) -> tuple[Tensor, Tensor]:
    """Run a model that has a `LossHead`; return the results of `targets.compute`."""
    head = model.get_output_embeddings()
    head.targets = targets
    empty = model(**inputs).logits
    first, second = head.pop_loss()
    return first + empty.sum(), second


def head_loss(
    model: Any,
    inputs: dict[str, Any],
    labels: Tensor,
    loss_weights: Tensor,
    chunk_loss: ChunkLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of loss times weight, and the losses [positions] in nats, fp32 and detached.

    `inputs`: arguments of the forward pass, whose logits are [rows, positions, vocabulary]; labels
    (-100 if masked) and loss_weights are [rows, positions]. `chunk_loss` replaces the
    cross-entropy.
    """
    weights = loss_weights.flatten()
    compute = partial(linear_cross_entropy, loss_weights=weights, chunk_loss=chunk_loss)
    targets = _Targets(labels, compute, loss_weights, inputs.get("logits_to_keep"))
    if isinstance(model.get_output_embeddings(), LossHead):
        return _head_results(model, inputs, targets)
    logits = targets.select(model(**inputs).logits)
    if chunk_loss is None:
        losses = token_losses(logits, labels).flatten()
        return (losses * weights).sum(), losses.detach()
    rows = logits.flatten(0, 1).float()
    with torch.no_grad():
        losses, slope = chunk_loss(
            rows.clone(), labels.flatten(), weights, needs_grad=rows.requires_grad
        )
    total = (losses * weights).sum()
    if slope is not None:  # a summand of 0, whose gradient is the slope
        total = total + ((rows - rows.detach()) * slope).sum()
    return total, losses


def head_log_probs(model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Return the log-probability of each label in nats, fp32 [rows, positions]; 0 if it is -100.

    Differentiable, so that a loss may weigh each by what it learns of others, as that of a
    preference pair does. Arguments as `head_loss`.
    """

    def compute(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        log_probs = linear_log_probs(*arguments, **options)
        return log_probs, log_probs.detach()

    targets = _Targets(labels, compute, columns=inputs.get("logits_to_keep"))
    if isinstance(model.get_output_embeddings(), LossHead):
        return _head_results(model, inputs, targets)[0].view_as(labels)
    return -token_losses(targets.select(model(**inputs).logits), labels)


def head_hidden(model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    """Return what `head_logits` needs of the positions of `labels`: [positions, width]."""

    def compute(hidden: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return hidden, hidden

    targets = _Targets(labels, compute, columns=inputs.get("logits_to_keep"))
    if isinstance(model.get_output_embeddings(), LossHead):
        return _head_results(model, inputs, targets)[1]
    return targets.select(model(**inputs).logits).flatten(0, 1)


def head_logits(model: Any, rows: Tensor) -> Tensor:
    """Return the logits of some rows of `head_hidden`, fp32 [positions, vocabulary]."""
    head = model.get_output_embeddings()
    return head.logits(rows) if isinstance(head, LossHead) else rows.float()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each position in nats, fp32; 0 if the label is -100.

    logits [rows, positions, vocabulary]; labels [rows, positions] are the next tokens.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view_as(labels)


def check_head_loss(model: Any, backend: str, device: torch.device | None = None) -> None:
    """Compare the chunked loss with the loss of the model's logits, on eight tokens.

    Runs on `device`, or the model's device. If they differ, because the model modifies its logits
    in a way that is not supported, the head is restored to return logits, and this is logged.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead):
        return
    inputs = _probe(model, backend, device or model.device)
    labels = inputs["input_ids"].flip(1)
    with eval_mode(model):
        logits = model(**inputs).logits
        plain = token_losses(logits, labels).flatten()
        _, own = head_loss(model, inputs, labels, torch.ones_like(labels, dtype=torch.float32))
    difference = (plain - own).abs().max().item()
    tolerance = min(_TOLERANCE, _ROUNDING_STEPS * torch.finfo(logits.dtype).eps)
    if not difference <= tolerance * max(1.0, plain.max().item()):
        head.__class__ = _without_loss(type(head))
        log.info("loss: from full logits (the chunked loss differs by %.2g)", difference)


def run_probe(model: Any, backend: str, device: torch.device) -> None:
    """Run a model on eight tokens in evaluation mode, for callers that observe its layers."""
    with eval_mode(model):
        model(**_probe(model, backend, device))


def _probe(model: Any, backend: str, device: torch.device) -> dict[str, Any]:
    lengths = [[_PROBE_TOKENS]]
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device).unsqueeze(0)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if not model.config.is_encoder_decoder:
        return inputs | attention_inputs(model, backend, lengths, ids)
    inputs["decoder_input_ids"] = ids
    return inputs | pair_inputs(model, backend, lengths, lengths, ids, ids)


def _without_loss(kind: Any) -> Any:
    """Replace `LossHead` by `nn.Linear` in a head's class, which FSDP2 may have derived from it."""
    if kind is LossHead:
        return torch.nn.Linear
    bases = (_without_loss(base) if issubclass(base, LossHead) else base for base in kind.__bases__)
    return type(kind.__name__, tuple(bases), dict(vars(kind)))
