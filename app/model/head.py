"""A head that computes the loss in chunks instead of returning logits, the largest tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from app.model.activation_memory import FUSED_CHUNKS, TRAINED_CHUNKS, rows_per_chunk
from app.model.attention import attention_inputs, pair_inputs
from app.model.cpu import fp32 as onednn

LossKernel = Callable[..., None]
"""`loss_kernel.cross_entropy_`"""


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
) -> tuple[Tensor, Tensor]:
    """Return the sum of loss times weight, and each position's loss in nats, fp32 and detached.

    hidden [positions, width], weight [vocabulary, width], bias [vocabulary]; labels [positions] are
    the next tokens, -100 where masked (loss 0); loss_weights [positions].
    `softcap` bounds the logits to softcap * tanh(logits / softcap), as Gemma 2 does. Under autocast
    the products are taken in its dtype, all else in fp32. `kernel` computes losses and gradients of
    a chunk without bias at once. `shard`: `weight` holds a rank's rows of the vocabulary alone; the
    loss is that of all rows, and the gradient of `hidden` this rank's part of the sum.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    num_positions = len(labels)
    if device == "cpu" and (missing := -num_positions % onednn.ROWS):
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        labels = torch.nn.functional.pad(labels, (0, missing), value=-100)
        loss_weights = torch.nn.functional.pad(loss_weights, (0, missing))
    arguments = (
        hidden.to(dtype),
        weight.to(dtype),
        bias,
        labels,
        loss_weights,
        softcap,
        kernel,
        shard,
    )
    with torch.autocast(device, enabled=False):
        total, losses = _LinearCrossEntropy.apply(*arguments)
    return total, losses[:num_positions]


class VocabularyShard(Protocol):
    """The rows of the vocabulary that a rank's head holds, and the ranks that hold the others."""

    first_row: int

    def largest_(self, tensor: Tensor) -> None:
        """Put the ranks' largest values in its place."""

    def sum_(self, tensor: Tensor) -> None:
        """Put the ranks' sums in its place."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses and gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_weights: Tensor,
        softcap: float | None,
        kernel: LossKernel | None,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        needs_grad = any(ctx.needs_input_grad[:3])
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # Sums over chunks are in fp32: half precision would lose small terms.
        grad_weight = torch.zeros_like(weight) if of_weight and not len(labels) else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        linear = onednn.linear if needs_grad else torch.nn.functional.linear
        size = rows_per_chunk(len(weight), hidden.device.type)
        if shard is not None or bias is not None:
            kernel = None  # it sees a whole row of logits, and no bias
        if kernel is not None:
            size *= TRAINED_CHUNKS if of_weight else FUSED_CHUNKS
        for start in range(0, len(labels), size):
            chunk = slice(start, start + size)
            rows = hidden[chunk]
            if kernel is not None:
                logits = rows @ weight.T
                kernel(logits, labels[chunk], losses[chunk], softcap, writes_gradient=needs_grad)
                scale = loss_weights[chunk].float().unsqueeze(1)
                if grad_hidden is not None:
                    torch.mul(logits @ weight, scale, out=grad_hidden[chunk])
                if of_weight:
                    grad_weight = _add(grad_weight, logits.T @ (rows * scale).to(rows.dtype))
                del logits  # else it would be in memory beside the next chunk's
                continue
            products = linear(rows, weight).float()
            logits, slope = _logits_of(products, bias, softcap, needs_slope=needs_grad)
            losses[chunk], grad = _cross_entropy(
                logits, labels[chunk], loss_weights[chunk], shard, needs_grad=needs_grad
            )
            if grad is None:
                continue
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = linear(grad, weight.T)
            if of_weight:
                grad_weight = _add(grad_weight, grad.T @ rows)
            del products, logits, slope, grad
        ctx.grads = (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(losses)
        return (losses * loss_weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Scale by the gradient of the sum."""
        scaled = (None if grad is None else grad * outer[0] for grad in ctx.grads)
        return (*scaled, None, None, None, None, None)


def _logits_of(
    logits: Tensor, bias: Tensor | None, softcap: float | None, *, needs_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Add the bias and apply the softcap, in place; return the logits and the slope of its tanh."""
    if bias is not None:
        logits += bias
    if softcap is None:
        return logits, None
    bounded = logits.div_(softcap).tanh_()
    slope = 1 - bounded.square() if needs_slope else None
    return bounded.mul_(softcap), slope


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    shard: VocabularyShard | None,
    *,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of a chunk, and its logits (fp32) turned into their gradients."""
    is_trained_on = labels >= 0
    target = labels.clamp(min=0).unsqueeze(1)
    highest = logits.amax(1, keepdim=True)
    if shard is not None:
        shard.largest_(highest)
        target = target - shard.first_row
        is_here = (target >= 0) & (target < logits.shape[1])
        target = target.clamp(0, logits.shape[1] - 1)
    own = logits.gather(1, target)
    exponentials = logits.sub_(highest).exp_()
    sums = exponentials.sum(1, keepdim=True)
    if shard is not None:
        shard.sum_(both := torch.stack([own * is_here, sums]))
        own, sums = both.unbind()
    losses = (sums.log() + highest - own).squeeze(1) * is_trained_on
    if not needs_grad:
        return losses, None
    scale = (loss_weights * is_trained_on).float().unsqueeze(1)
    here = scale if shard is None else scale * is_here
    return losses, exponentials.mul_(scale / sums).scatter_add_(1, target, -here)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a chunk's part in fp32; a single one stays as it is."""
    return part if total is None else total.float().add_(part)


log = logging.getLogger(__name__)

LOGITS_SCALES = {"logits_scaling": -1, "logit_scale": 1}
"""config values that scale the logits: Granite divides by its own, Cohere multiplies"""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""names in configs of the softcap of the logits: Gemma, RecurrentGemma, xLSTM"""
PROBE_TOKENS = 8
TOLERANCE, ROUNDING_STEPS = 1e-2, 100
"""largest relative difference of the two losses, and the same in eps of the logits' dtype"""


@dataclass(slots=True)
class Targets:
    """Labels and loss weights [rows, positions] of the next forward pass.

    `columns` [positions]: the tokens of a row whose logits were requested, None for all.
    """

    labels: Tensor
    loss_weights: Tensor
    columns: Tensor | None = None

    def cut(self, outputs: Tensor) -> Tensor:
        """Select the requested positions, where the model returns all: [rows, positions, ...]."""
        if self.columns is None or outputs.shape[1] == self.labels.shape[1]:
            return outputs
        return outputs[:, self.columns]


class LossHead(torch.nn.Linear):
    """A model's own head, which computes the loss instead of logits where `targets` were set.

    The same module with the same parameter names, so that sharding, tying and saving are not
    affected. The loss is computed inside its forward, where a strategy has gathered its weights.
    """

    targets: Targets | None = None
    found: tuple[Tensor, Tensor] | None = None
    softcap: float | None = None
    scale: float = 1.0
    kernel: LossKernel | None = None
    shard: VocabularyShard | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits, or an empty tensor where the loss is computed."""
        if self.targets is None:
            return super().forward(hidden)
        targets, self.targets = self.targets, None
        hidden = targets.cut(hidden)
        self.found = linear_cross_entropy(
            (hidden if self.scale == 1.0 else hidden * self.scale).flatten(0, 1),
            self.weight,
            targets.labels.flatten(),
            targets.loss_weights.flatten(),
            bias=self.bias,
            softcap=self.softcap,
            kernel=self.kernel,
            shard=self.shard,
        )
        # Empty, but part of the graph between loss and head: strategies hook a forward's output to
        # gather weights for its backward pass and reduce gradients after it.
        return self.found[0] * hidden.new_empty(*hidden.shape[:2], 0)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the sum of loss times weight, and the losses, of the last forward."""
        if self.found is None:
            raise RuntimeError("the model's forward did not reach its head")
        found, self.found = self.found, None
        return found


def fuse_head(model: Any) -> None:
    """Replace a model's head by a `LossHead` where it is one linear layer and nothing is added."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "final_logits_bias" in model._buffers:
        return
    numbers = model.config.get_text_config().to_dict()
    head.__class__ = LossHead
    head.softcap = next((cap for name in SOFTCAPS if (cap := numbers.get(name))), None)
    for name, power in LOGITS_SCALES.items():
        head.scale *= (numbers.get(name) or 1.0) ** power


def head_loss(
    model: Any, inputs: dict[str, Any], labels: Tensor, loss_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sum of loss times weight, and the losses [positions] in nats, fp32 and detached.

    `inputs`: arguments of the forward pass, whose logits are [rows, positions, vocabulary]; labels
    (-100 where masked) and loss_weights are [rows, positions].
    """
    head = model.get_output_embeddings()
    targets = Targets(labels, loss_weights, inputs.get("logits_to_keep"))
    if isinstance(head, LossHead):
        head.targets = targets
        empty = model(**inputs).logits
        total, losses = head.take()
        return total + empty.sum(), losses
    losses = token_losses(targets.cut(model(**inputs).logits), labels)
    return (losses * loss_weights).sum(), losses.detach().flatten()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each position in nats, fp32; 0 where the label is -100.

    logits [rows, positions, vocabulary]; labels [rows, positions] are the next tokens.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view_as(labels)


@torch.no_grad()
def check_head_loss(model: Any, backend: str, device: torch.device | None = None) -> None:
    """Compare the head's own loss with that of the model's logits, on eight tokens.

    Runs on `device`, or the model's. Where they differ, since this model changes its logits in an
    unknown way, the head returns logits again, which is logged.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead):
        return
    was_training = model.training
    model.eval()
    inputs = _probe(model, backend, device or model.device)
    labels = inputs["input_ids"].flip(1)
    logits = model(**inputs).logits
    plain = token_losses(logits, labels).flatten()
    _, own = head_loss(model, inputs, labels, torch.ones_like(labels, dtype=torch.float32))
    model.train(was_training)
    difference = (plain - own).abs().max().item()
    tolerance = min(TOLERANCE, ROUNDING_STEPS * torch.finfo(logits.dtype).eps)
    if not difference <= tolerance * max(1.0, plain.max().item()):
        head.__class__ = _without_loss(type(head))
        log.info("loss: from full logits (the chunked loss differs by %.2g)", difference)


@torch.no_grad()
def run_probe(model: Any, backend: str, device: torch.device) -> None:
    """Run a model on eight tokens, as it is evaluated, for those who look at its layers."""
    was_training = model.training
    model.eval()
    model(**_probe(model, backend, device))
    model.train(was_training)


def _probe(model: Any, backend: str, device: torch.device) -> dict[str, Any]:
    lengths = [[PROBE_TOKENS]]
    ids = torch.arange(1, PROBE_TOKENS + 1, device=device).unsqueeze(0)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if not model.config.is_encoder_decoder:
        return inputs | attention_inputs(model, backend, lengths, ids)
    inputs["decoder_input_ids"] = ids
    return inputs | pair_inputs(model, backend, lengths, lengths, ids, ids)


def _without_loss(kind: Any) -> Any:
    """Return a head's class with `nn.Linear` for `LossHead`; FSDP2 derives classes of its own."""
    if kind is LossHead:
        return torch.nn.Linear
    bases = (_without_loss(base) if issubclass(base, LossHead) else base for base in kind.__bases__)
    return type(kind.__name__, tuple(bases), dict(vars(kind)))
