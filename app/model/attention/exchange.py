"""Context parallelism: ranks that hold slices of a row see whole documents in attention.

Ulysses (arXiv 2309.14509): outside attention a rank holds some tokens and all heads, inside it all
tokens and some heads, and attention sees whole documents, whatever its kernel. Where ranks cannot
share the heads, or have too few key heads for that, they gather keys and values instead, and a rank
attends with the queries of its own tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from app.model.attention.attend import (
    MaskRule,
    attend_in_blocks,
    cast_to_one_dtype,
    window_rule,
)
from app.model.attention.backends import gather_reason, key_repeats
from app.model.attention.documents import RowSlices
from app.model.attention.inputs import attention_inputs
from app.model.attention.mixer_search import probe_ids
from app.model.attention.probes import EDITS, MAX_ULPS, MIN_SHARE, distances, rounding
from app.model.contexts import eval_mode
from common.errors import UserError
from data_modules import SequenceSlice

log = logging.getLogger(__name__)

Attend = Callable[..., tuple[Tensor, Any]]
_PROBE_TOKENS = 4
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


def gather_tokens(own: Tensor, ranks: dist.ProcessGroup, dim: int) -> Tensor:
    """Return the tokens of all ranks along `dim`; the backward pass adds the gradients of all."""
    by_rank: Tensor = _AllToAll.apply(own.expand(ranks.size(), *own.shape), ranks)
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def exchanging(attend: Attend) -> Attend:
    """Give an attention function the argument `exchange`: the row's slices and their ranks.

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
        exchange: RowSlices | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if exchange is None:
            return attend(module, query, key, value, attention_mask, *args, **options)
        ranks = exchange.ranks
        if options.get("position_bias") is not None:
            raise UserError(
                f"strategy.context_parallel_size={ranks.size()} gives each rank a share of the "
                f"heads, and the position_bias of {type(module).__name__} is one of all heads: "
                "type strategy.context_parallel_size=1"
            )
        reason, sinks = (
            gather_reason(query.shape[1], key.shape[1], ranks.size()),
            options.get("s_aux"),
        )
        if reason and sinks is not None and query.device.type != "cpu":
            raise UserError(
                f"strategy.context_parallel_size={ranks.size()}: {reason}, and attention with "
                "sinks to gathered keys runs on CPUs only: type strategy.context_parallel_size=1"
            )
        parts = cast_to_one_dtype(query, key, value)
        if reason:
            return _attend_to_gathered(
                partial(attend, module), parts, attention_mask, exchange, options
            ), None
        parts = _heads_of_all_tokens(parts, ranks)
        if sinks is not None:
            options["s_aux"] = sinks.chunk(ranks.size())[ranks.rank()]
        output, weights = attend(module, *parts, attention_mask, *args, **options)
        return _tokens_of_all_heads(output, ranks), weights

    return run


def _attend_to_gathered(
    attend: Attend,
    parts: tuple[Tensor, Tensor, Tensor],
    mask: MaskRule | None,
    slices: RowSlices,
    options: dict[str, Any],
) -> Tensor:
    """Attend with own queries to the keys of all ranks; [rows, own tokens, heads, dim]."""
    query, key, value = parts
    ranks, tokens = slices.ranks, query.shape[2]
    start = ranks.rank() * tokens
    own = torch.cat([key, value], -1)
    whole = gather_tokens(own, ranks, 2).split([key.shape[-1], value.shape[-1]], -1)
    counts = [
        slices.continued[row].end - start if row in slices.continued else 0
        for row in range(len(query))
    ]
    if min(counts) < tokens:
        # Not the own `key` and `value`: all ranks must wait for each other in the backward pass.
        inside = (part[:, :, start : start + tokens] for part in whole)
        begun, _ = attend(query, *inside, mask, **options | slices.own)
    size = options.get("sliding_window") or ranks.size() * tokens
    rule, outputs = mask or slices.rules.setdefault(size, window_rule(size)), []
    for row, count in enumerate(counts):
        pieces = []
        if count:
            _, first, end = slices.continued[row]
            keys, values = (part[row, None, :, first:end] for part in whole)
            output = attend_in_blocks(
                query[row, None, :, :count],
                keys,
                values,
                rule,
                dropout=options.get("dropout", 0.0),
                scaling=options.get("scaling"),
                sinks=options.get("s_aux"),
            )
            pieces.append(output.transpose(1, 2))
        if count < tokens:
            pieces.append(begun[row, None, count:])
        outputs.append(torch.cat(pieces, 1))
    return torch.cat(outputs)


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


def _describe_exchange(config: PretrainedConfig, size: int) -> str:
    """Return how `size` ranks attend to whole documents, and why."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    reason = gather_reason(heads, getattr(text, "num_key_value_heads", None) or heads, size)
    if reason is None:
        return f"{size} ranks exchange heads for tokens in attention"
    return f"each rank gathers the keys and values of whole rows: {reason}"


def check_exchange(
    model: PreTrainedModel, backend: str, device: torch.device, ranks: dist.ProcessGroup
) -> None:
    """Raise UserError on all ranks if the slices of a row give other logits than the whole row.

    Of two documents the first crosses the bound of two ranks. Whole rows have been probed before:
    slices that see another document, or not all of their own, differ from them.
    """
    size, rank = ranks.size(), ranks.rank()
    log.info("context parallelism: %s", _describe_exchange(model.config, size))
    tokens, first = size * _PROBE_TOKENS, size * _PROBE_TOKENS // 2 + 1
    lengths = [[first, tokens - first]]
    own = SequenceSlice(rank * _PROBE_TOKENS, (rank + 1) * _PROBE_TOKENS, ranks)
    columns = slice(own.start, own.stop)
    positions = torch.tensor([[*range(first), *range(tokens - first)]], device=device)
    excess = []
    for shift in EDITS:  # rounding may send a token to another expert, but hardly twice
        ids = probe_ids(model, shift, shift + tokens, device)
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
