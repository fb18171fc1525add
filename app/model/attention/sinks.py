"""Attention sinks, as gpt-oss has them: a learned logit per head that takes a share of the softmax.

The kernels have no sinks, but return the log-sum-exp of the scores, to which a sink is added
afterwards. Their backward pass computes the probabilities from the log-sum-exp, and the sum of
probabilities times gradients from the output: given both with the sink, its gradients are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.model.activation_checkpointing import attend_once

Kernel = Callable[..., Any]
_STATE = ("rng_state", "unused")
"""further outputs of the GPU's forward operator that its backward operator takes"""


class _SinkAttention(torch.autograd.Function):
    """Attention by a kernel's forward and backward operators, with a logit per head in `sinks`.

    query, key, value, and the output: [rows, heads, tokens, head_dim], or [tokens, heads, head_dim]
    if they are packed; the log-sum-exp: [rows, heads, tokens], or [heads, tokens].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        kernels: tuple[Kernel, Kernel],
        options: dict[str, Any],
    ) -> Tensor:
        attended, without_sink, *state = attend_once(kernels[0], query, key, value, **options)
        log_sum = torch.logaddexp(without_sink, sinks.to(without_sink).unsqueeze(-1))
        share = _by_token((without_sink - log_sum).exp(), query).unsqueeze(-1)
        # Computed in fp32 and rounded once; not in place, as recompute may have saved the tensor.
        output = torch.mul(attended, share, out=torch.empty_like(attended))
        ctx.save_for_backward(query, key, value, sinks, output, log_sum, *state[: len(_STATE)])
        ctx.backward_kernel, ctx.options = kernels[1], options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum, *rest = ctx.saved_tensors
        state = dict(zip(_STATE, rest, strict=False))  # empty on a CPU
        gradient = gradients[0].contiguous()  # the operators read no expanded gradient
        grads = ctx.backward_kernel(
            gradient, query, key, value, output, log_sum, **state, **ctx.options
        )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            probs = (sinks.to(log_sum).unsqueeze(-1) - log_sum).exp()
            of_output = _by_token((gradient.to(log_sum) * output).sum(-1), query)
            of_sinks = -(probs * of_output).movedim(-2, 0).flatten(1).sum(1).to(sinks)
        return *grads, of_sinks, None, None


def _by_token(values: Tensor, query: Tensor) -> Tensor:
    """Exchange heads and tokens if they are packed."""
    return values.T if query.ndim == 3 else values


def attend_to_rows(
    parts: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    *,
    is_causal: bool,
) -> Tensor:
    """Attend on a CPU; query, key, value, and the output: [rows, heads, tokens, head_dim].

    Key and value may have fewer heads (GQA), and values a smaller head_dim. sinks [heads]; mask
    bool, or added to the scores.
    """
    aten = torch.ops.aten
    query, key, value = parts
    value_dim = value.shape[-1]
    if value_dim != query.shape[-1]:  # the kernel has one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - value_dim))
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    kernels = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    options = {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": mask, "scale": scaling}
    output: Tensor = _SinkAttention.apply(query, key, value, sinks, kernels, options)
    return output[..., :value_dim]


def attend_to_documents(
    parts: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Attend on a GPU inside each document; all [tokens, heads, head_dim], as `varlen_attn` does.

    Key and value may have fewer heads (GQA). sinks [heads].
    """
    aten = torch.ops.aten
    options = {
        **dict.fromkeys(("cum_seq_q", "cum_seq_k"), boundaries),
        **dict.fromkeys(("max_q", "max_k"), longest),
        **dict(zip(("window_size_left", "window_size_right"), window_size, strict=True)),
        "is_causal": window_size == (-1, 0),
        "dropout_p": 0.0,
        "scale": scaling,
    }
    kernels = (
        partial(aten._flash_attention_forward, return_debug_mask=False),
        aten._flash_attention_backward,
    )
    output: Tensor = _SinkAttention.apply(*parts, sinks, kernels, options)
    return output
