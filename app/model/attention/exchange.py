"""Context parallelism: ranks that hold slices of a row see whole documents in attention.

Ulysses (arXiv 2309.14509): outside attention a rank holds some tokens and all heads, inside it all
tokens and some heads, and attention sees whole documents, whatever its kernel. Where ranks cannot
share the heads, or have too few key heads for that, they gather keys and values instead, and a rank
attends with the queries of its own tokens: chunks of the row in zigzag order, so that all ranks
compute about as many scores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from app.model.attention.attend import (
    MaskRule,
    Parts,
    attend_in_blocks,
    cast_to_one_dtype,
    repeat_heads,
    window_rule,
)
from app.model.attention.backends import gather_reason, key_repeats
from app.model.attention.documents import RowPiece, RowSlices
from app.model.attention.inputs import attention_inputs
from app.model.attention.mixer_search import probe_ids
from app.model.attention.probes import EDITS, MAX_ULPS, MIN_SHARE, distances, rounding
from app.model.layers import eval_mode
from common.errors import UserError
from data_modules import SequenceSlice, deal_columns

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


class _Part(torch.autograd.Function):
    """Return the keys or values that a piece of a row sees, and all of them for the next piece.

    The gradients are added in place: slices would each allocate one of all tokens.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, piece: RowPiece) -> tuple[Tensor, Tensor]:
        tokens = slice(piece.first, piece.columns.stop)
        ctx.place = slice(piece.row, piece.row + 1), ..., tokens, slice(None)
        ctx.shape = whole.shape
        ctx.set_materialize_grads(False)
        return whole[ctx.place], whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        own, others = gradients
        if own is None:
            return others, None
        whole = own.new_zeros(ctx.shape) if others is None else others
        whole[ctx.place].add_(own)  # not +=, which copies the sum onto itself
        return whole, None


def gather_tokens(own: Tensor, ranks: dist.ProcessGroup, dim: int) -> Tensor:
    """Return the tokens of whole rows along `dim`; the backward pass adds the gradients of all."""
    return _in_order(_AllToAll.apply(own.expand(ranks.size(), *own.shape), ranks), dim)


def _in_order(by_rank: Tensor, dim: int) -> Tensor:
    """Return whole rows of the tokens that each rank was dealt; `dim`: that of a rank's tokens."""
    size, tokens = len(by_rank), by_rank.shape[dim + 1]
    starts = [chunk.start for chunks in deal_columns(size * tokens, size) for chunk in chunks]
    parts = [part for own in by_rank.unbind() for part in own.chunk(len(starts) // size, dim)]
    return torch.cat([parts[starts.index(start)] for start in sorted(starts)], dim)


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
        sinks = options.get("s_aux")
        reason = gather_reason(query.shape[1], key.shape[1], ranks.size())
        if reason and sinks is not None and query.device.type != "cpu":
            raise UserError(
                f"strategy.context_parallel_size={ranks.size()}: {reason}, and attention with "
                "sinks to gathered keys runs on CPUs only: type strategy.context_parallel_size=1"
            )
        parts = cast_to_one_dtype(query, key, value)
        if reason:
            own = partial(attend, module)
            return _attend_to_gathered(own, parts, attention_mask, exchange, options), None
        parts = _heads_of_all_tokens(parts, ranks)
        if sinks is not None:
            options["s_aux"] = sinks.chunk(ranks.size())[ranks.rank()]
        output, weights = attend(module, *parts, attention_mask, *args, **options)
        return _tokens_of_all_heads(output, ranks), weights

    return run


def _attend_to_gathered(
    attend: Attend, parts: Parts, mask: MaskRule | None, slices: RowSlices, options: dict[str, Any]
) -> Tensor:
    """Attend with own queries to the keys of all ranks; [rows, own tokens, heads, dim]."""
    query, key, value = parts
    widths = [key.shape[-1], value.shape[-1]]
    # Not the own `key` and `value`: all ranks must wait for each other in the backward pass.
    whole = gather_tokens(torch.cat([key, value], -1), slices.ranks, 2)
    pieces, size = slices.pieces, options.get("sliding_window") or whole.shape[2]
    rule = mask or slices.rules.setdefault(size, window_rule(size))
    counts = [len(piece.columns) for piece in pieces]
    # The rows one after another: [1, heads, rows x tokens, dim].
    queries = query.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(counts, 2)
    outputs: dict[int, Tensor] = {}
    if begun := {number: piece for number, piece in enumerate(pieces) if piece.begun}:
        together = torch.cat([queries[number] for number in begun], 2)
        own = []
        for piece in begun.values():
            part, whole = _Part.apply(whole, piece)
            own.append(part)
        keys, values = torch.cat(own, 2).split(widths, -1)
        output, _ = attend(together, keys, values, mask, **options | slices.begun)
        of_pieces = output.split([counts[number] for number in begun], 1)
        outputs.update(zip(begun, of_pieces, strict=True))
    keys, values = repeat_heads(query, *whole.split(widths, -1))  # once, not for each piece
    for number, piece in enumerate(pieces):
        if piece.begun:
            continue
        (key, keys), (value, values) = (_Part.apply(part, piece) for part in (keys, values))
        output = attend_in_blocks(
            queries[number],
            key,
            value,
            rule,
            dropout=options.get("dropout", 0.0),
            scaling=options.get("scaling"),
            sinks=options.get("s_aux"),
        )
        outputs[number] = output.transpose(1, 2)
    joined = torch.cat([outputs[number] for number in range(len(pieces))], 1)
    return joined.unflatten(1, (len(query), -1)).squeeze(0)


def _heads_of_all_tokens(parts: Parts, ranks: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange [rows, heads, own tokens, dim] for [rows, own heads, all tokens, dim], at once."""
    size, (query, key, value) = ranks.size(), parts
    if (repeats := key_repeats(query.shape[1], key.shape[1], size)) > 1:
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    sent, widths = [], []
    for part in (query, key, value):
        by_rank = part.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4)
        widths.append(by_rank.shape[3:])
        sent.append(by_rank.flatten(3))
    received = _AllToAll.apply(torch.cat(sent, -1), ranks)  # rank k's tokens of our heads
    split = _in_order(received, 1).split([heads * dim for heads, dim in widths], -1)
    return tuple(
        part.unflatten(-1, width).transpose(1, 2) for part, width in zip(split, widths, strict=True)
    )


def _tokens_of_all_heads(output: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Exchange [rows, all tokens, own heads, dim] for [rows, own tokens, all heads, dim]."""
    size = ranks.size()
    dealt = [chunk for chunks in deal_columns(output.shape[1], size) for chunk in chunks]
    by_rank = SequenceSlice(dealt).take(output).unflatten(1, (size, -1)).transpose(0, 1)
    received: Tensor = _AllToAll.apply(by_rank, ranks)  # rank k's heads of our tokens
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def check_exchange(
    model: PreTrainedModel, backend: str, device: torch.device, ranks: dist.ProcessGroup
) -> None:
    """Raise UserError on all ranks if slices of a row mix documents, or differ from the whole row.

    Of two documents the first crosses the bound of two ranks, and all ranks hold tokens of both. An
    edit of the first, on the first rank, may change no logit of the second on any of them. Costs
    six forward passes of a few tokens.
    """
    text, size = model.config.get_text_config(), ranks.size()
    heads = text.num_attention_heads
    how = f"{size} ranks exchange heads for tokens in attention"
    if reason := gather_reason(heads, getattr(text, "num_key_value_heads", None) or heads, size):
        how = f"each rank gathers the keys and values of whole rows: {reason}"
    log.info("context parallelism: %s", how)
    excess = []
    for shift in EDITS:  # rounding may send a token to another expert, but hardly twice
        leak, difference, limit = _effects_on_slices(model, backend, device, ranks, shift)
        excess.append(torch.stack([leak, difference]) / limit)
    worst = torch.stack(excess).amin(0)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    leak, difference = worst.tolist()
    faults = {
        "an edit of a document on one rank changes the logits of another document": leak,
        "slices of a row give other logits than the whole row": difference,
    }
    # Not if weights are NaN, which is not a fault of slices.
    if found := [
        f"{fault} ({by:.2g} times the rounding error)" for fault, by in faults.items() if by > 1
    ]:
        raise UserError(
            f"strategy.context_parallel_size={size}: {', and '.join(found)}, so some "
            f"layers of {model.config.model_type} models do not exchange tokens as they should: "
            "type strategy.context_parallel_size=1"
        )


def _effects_on_slices(
    model: PreTrainedModel, backend: str, device: torch.device, ranks: dist.ProcessGroup, shift: int
) -> tuple[Tensor, Tensor, float]:
    """Return the change of the second document's logits by an edit of the first on the first rank.

    And the difference of the slice's logits to those of the whole row, and the rounding error.
    """
    tokens = ranks.size() * _PROBE_TOKENS
    first = tokens // 2 + 1
    own, lengths = SequenceSlice.of_rank(tokens, ranks), [[first, tokens - first]]
    positions = torch.tensor([[*range(first), *range(tokens - first)]], device=device)
    row = probe_ids(model, shift, shift + tokens, device)
    edited = torch.cat([probe_ids(model, 2 * shift, 2 * shift + 1, device), row[:, 1:]], 1)

    def logits(ids: Tensor, places: Tensor, sequence: SequenceSlice | None) -> Tensor:
        inputs = attention_inputs(model, backend, lengths, ids, sequence)
        with eval_mode(model):
            output = model(input_ids=ids, position_ids=places, use_cache=False, **inputs)
        return cast(Tensor, output.logits[0])

    expected = logits(row, positions, None)
    found, changed = (logits(own.take(ids), own.take(positions), own) for ids in (row, edited))
    is_second = own.take((torch.arange(tokens, device=device) >= first).unsqueeze(0))[0]
    leak = distances(found, changed)[is_second].max()
    difference = distances(found, own.take(expected.unsqueeze(0))[0]).max()
    return leak, difference, rounding(model, expected, MAX_ULPS, MIN_SHARE)
