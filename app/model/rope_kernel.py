"""Rotate queries and keys by their positions in one Triton kernel, into new tensors.

Imported only on a GPU, because Triton comes only with PyTorch for CUDA. Liger's kernel overwrites
its inputs, which selective recompute may have saved, and so needs copies of them first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source, target, cosine, sine, stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
    ROTATED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    # The heads of one token; those of the target lie side by side.
    heads, angles = tl.arange(0, HEADS[1])[:, None], tl.arange(0, HALF)[None, :]
    are_there = (heads < HEADS[0]) & (angles < ROTATED // 2)
    given, own = source + heads * stride + angles, target + heads * WIDTH + angles
    left = tl.load(given, mask=are_there, other=0.0).to(tl.float32)
    right = tl.load(given + ROTATED // 2, mask=are_there, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(own, (left * cosine - right * sine).to(kind), mask=are_there)
    tl.store(own + ROTATED // 2, (right * cosine + left * sine).to(kind), mask=are_there)
    if WIDTH > ROTATED:
        others = ROTATED + tl.arange(0, REST)[None, :]
        are_there = (heads < HEADS[0]) & (others < WIDTH)
        values = tl.load(source + heads * stride + others, mask=are_there, other=0.0)
        tl.store(target + heads * WIDTH + others, values, mask=are_there)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    query, key, cosine, sine, new_query, new_key, of_query, of_key, of_angles, num_tokens, sign,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    ROTATED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row, token, angles = place // num_tokens, place % num_tokens, tl.arange(0, HALF)[None, :]
    at = row * of_angles[0] + token * of_angles[1] + angles
    cosine = tl.load(cosine + at, mask=angles < ROTATED // 2, other=0.0).to(tl.float32)
    sine = sign * tl.load(sine + at, mask=angles < ROTATED // 2, other=0.0).to(tl.float32)
    query += row * of_query[0] + token * of_query[2]
    key += row * of_key[0] + token * of_key[2]
    new_query += place * QUERIES[0] * WIDTH
    new_key += place * KEYS[0] * WIDTH
    _rotate(query, new_query, cosine, sine, of_query[1], QUERIES, WIDTH, ROTATED, HALF, REST)
    _rotate(key, new_key, cosine, sine, of_key[1], KEYS, WIDTH, ROTATED, HALF, REST)


def turn(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, sign: float
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [rows, heads, tokens, width], rotated by the angles times `sign`.

    cosine, sine: [rows or 1, tokens, rotated features], both halves of which are the same. Memory
    of the results is in the order [rows, tokens, heads, width].
    """
    query, key = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key))
    cosine, sine = cosine.contiguous(), sine.contiguous()
    rows, _, tokens, width = query.shape
    rotated = cosine.shape[-1]
    shapes = ((rows, tokens, each.shape[1], width) for each in (query, key))
    results = [torch.empty(shape, dtype=query.dtype, device=query.device) for shape in shapes]
    heads = ((each.shape[1], triton.next_power_of_2(each.shape[1])) for each in (query, key))
    _kernel[(rows * tokens,)](
        query, key, cosine, sine, *results, query.stride()[:3], key.stride()[:3],
        (cosine.stride(0) if len(cosine) > 1 else 0, cosine.stride(1)), tokens, sign, *heads,
        WIDTH=width, ROTATED=rotated, HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(max(1, width - rotated)),
    )  # fmt: skip
    new_query, new_key = (each.transpose(1, 2) for each in results)
    return new_query, new_key


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        return turn(query, key, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (query, key), (cosine, sine) = outer, ctx.saved_tensors
        return *turn(query, key, cosine, sine, -1.0), None, None


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Return what transformers' `apply_rotary_pos_emb` does for these shapes."""
    rotated: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cosine, sine)
    return rotated
