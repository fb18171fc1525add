"""Context parallelism: ranks that hold slices of a row trade tokens for heads around attention.

Ulysses (arXiv 2309.14509): outside attention a rank holds some tokens and all heads, inside it all
tokens and some heads. Attention then sees whole documents, whatever its kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.model.attention.attend import cast_to_one_dtype
from app.model.attention.backends import key_repeats
from app.model.attention.inputs import attention_inputs
from app.model.attention.probes import EDITS, MAX_ULPS, MIN_SHARE, distances, rounding
from app.model.eval_mode import eval_mode
from common.errors import UserError
from data_modules import SequenceSlice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[..., tuple[Tensor, Any]]
BY_HEAD = ("s_aux", "position_bias")
"""arguments of attention that hold values of all heads"""
PROBE_TOKENS = 4
"""tokens of each rank in the probe"""


class _AllToAll(torch.autograd.Function):
    """Send part i of [ranks, ...] to rank i; the backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return _all_to_all(parts, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.ranks), None


def _all_to_all(parts: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=ranks)
    return received


def exchanging(attend: Attend) -> Attend:
    """Give an attention function the argument `exchange`: the ranks that hold the row's slices.

    Without it the function is called as it is.
    """

    @wraps(attend)
    def run(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        exchange: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if exchange is None:
            return attend(module, query, key, value, attention_mask, *args, **options)
        for name in BY_HEAD:
            if options.get(name) is not None:
                raise UserError(
                    f"strategy.context_parallel_size={exchange.size()} gives each rank a share of "
                    f"the heads, and the {name} of {type(module).__name__} is one of all heads: "
                    "type strategy.context_parallel_size=1"
                )
        parts = cast_to_one_dtype(query, key, value)
        parts = _heads_of_all_tokens(parts, exchange)
        output, weights = attend(module, *parts, attention_mask, *args, **options)
        return _tokens_of_all_heads(output, exchange), weights

    return run


def _heads_of_all_tokens(
    parts: tuple[Tensor, Tensor, Tensor], ranks: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Exchange [rows, heads, own tokens, dim] for [rows, own heads, all tokens, dim], at once."""
    size, (query, key, value) = ranks.size(), parts
    if (repeats := key_repeats(query.shape[1], key.shape[1], size)) > 1:
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    rows, _, tokens, _ = query.shape
    sent, widths = [], []
    for part in (query, key, value):
        by_rank = part.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4)
        widths.append(by_rank.shape[3:])
        sent.append(by_rank.flatten(3))
    received = _AllToAll.apply(torch.cat(sent, -1), ranks)  # rank k's tokens of our heads
    whole = received.transpose(0, 1).reshape(rows, size * tokens, -1)
    split = whole.split([heads * dim for heads, dim in widths], -1)
    return tuple(
        part.unflatten(-1, width).transpose(1, 2) for part, width in zip(split, widths, strict=True)
    )


def _tokens_of_all_heads(output: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Exchange [rows, all tokens, own heads, dim] for [rows, own tokens, all heads, dim]."""
    by_rank = output.unflatten(1, (ranks.size(), -1)).transpose(0, 1)
    received: Tensor = _AllToAll.apply(by_rank, ranks)  # rank k's heads of our tokens
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def check_exchange(
    model: PreTrainedModel, backend: str, device: torch.device, ranks: dist.ProcessGroup
) -> None:
    """Raise UserError on all ranks if the slices of a row give other logits than the whole row.

    Of two documents the first crosses the bound of two ranks. Whole rows have been probed before:
    slices that see another document, or not all of their own, differ from them.
    """
    size, rank = ranks.size(), ranks.rank()
    tokens, first = size * PROBE_TOKENS, size * PROBE_TOKENS // 2 + 1
    lengths = [[first, tokens - first]]
    own = SequenceSlice(rank * PROBE_TOKENS, (rank + 1) * PROBE_TOKENS, ranks)
    columns = slice(own.start, own.stop)
    positions = torch.tensor([[*range(first), *range(tokens - first)]], device=device)
    vocab_size = model.config.get_text_config().vocab_size
    excess = []
    for shift in EDITS:  # rounding may send a token to another expert, but hardly twice
        ids = (torch.arange(tokens, device=device).unsqueeze(0) + shift) % vocab_size
        whole = attention_inputs(model, backend, lengths, ids)
        part = attention_inputs(model, backend, lengths, ids[:, columns], own)
        with eval_mode(model):
            expected = model(input_ids=ids, position_ids=positions, use_cache=False, **whole)
            found = model(
                input_ids=ids[:, columns],
                position_ids=positions[:, columns],
                use_cache=False,
                **part,
            )
        logits = expected.logits[0]
        difference = distances(found.logits[0], logits[columns]).max()
        excess.append(difference / rounding(model, logits, MAX_ULPS, MIN_SHARE))
    worst = torch.stack(excess).min()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst > 1:
        raise UserError(
            f"strategy.context_parallel_size={size}: slices of a row give other logits than the "
            f"whole row ({worst:.2g} times the rounding error), so some layers of "
            f"{model.config.model_type} models do not exchange tokens: "
            "type strategy.context_parallel_size=1"
        )
