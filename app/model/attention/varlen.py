"""Attention by PyTorch's own variable-length kernel, for NVIDIA GPUs in half precision.

The kernel is FlashAttention 2, or 4 where that is installed, for this GPU, and proven equal.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from app.model.attention.attend import MaskRule, cast_to_one_dtype
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FLASH4_CAPABILITIES = (9, 10)
"""compute capabilities that PyTorch gives FlashAttention 4: Hopper and Blackwell"""
PROBE_ENDS = (0, 100, 300, 301)
PROBE_HEADS = (4, 2)
"""of queries, and of keys"""
TOLERANCE = 2.0**-5
"""largest difference of two results in half precision, over a tensor's norm"""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """`torch.nn.attention.varlen.varlen_attn` in the signature of the installed PyTorch.

    2.10 takes `is_causal` only; 2.11 takes `window_size` instead, and `scale`; 2.12 takes fewer key
    heads with `enable_gqa`.
    """

    function: Callable[..., torch.Tensor]
    takes_window: bool
    takes_scale: bool
    takes_shared_heads: bool

    @classmethod
    def of(cls, function: Callable[..., torch.Tensor]) -> VarlenKernel:
        """Read the signature of a `varlen_attn`."""
        names = inspect.signature(function).parameters
        return cls(function, "window_size" in names, "scale" in names, "enable_gqa" in names)

    @classmethod
    def installed(cls) -> VarlenKernel:
        """Return the kernel of the installed PyTorch."""
        from torch.nn.attention.varlen import varlen_attn

        return cls.of(varlen_attn)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: torch.Tensor,
        longest: int,
        *,
        is_causal: bool,
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attend inside each document; query, key, value [tokens, heads, head_dim].

        ends int32 [documents + 1]: start of each document, and end of the last; window: tokens that
        one sees, itself included. There may be fewer key heads than query heads.
        """
        from app.model.activation_checkpointing import attend_once

        options: dict[str, Any] = {}
        shared = query.shape[1] // key.shape[1]
        if shared > 1 and self.takes_shared_heads:
            options["enable_gqa"] = True
        elif shared > 1:
            key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        if self.takes_scale:
            options["scale"] = scaling
        elif scaling is not None:
            factor = scaling * math.sqrt(query.shape[-1])
            query = query if math.isclose(factor, 1.0) else query * factor
        if not self.takes_window:
            if window is not None:
                raise UserError(
                    "attention=varlen has no sliding window before PyTorch 2.11: "
                    "type attention=sdpa"
                )
            options["is_causal"] = is_causal
        elif is_causal:
            options["window_size"] = (-1 if window is None else window - 1, 0)
        # The same tensor twice tells the kernel that queries and keys have the same lengths.
        given = (query, key, value, ends, ends, longest, longest)
        output: torch.Tensor = attend_once(self.function, *given, **options)
        return output


def attend_by_boundaries(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    *,
    kernel: VarlenKernel,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside each document; without boundaries, every row is one.

    query [rows, heads, tokens, head_dim], key and value with fewer heads where they are shared;
    cu_seq_lens_q int32 [documents + 1] counts through all rows. Returns
    [rows, tokens, heads, head_dim]. UserError for variants and masks that the kernel does not
    compute.
    """
    import torch

    if dropout:
        raise UserError(
            "attention=varlen has no attention dropout, which this model's config has: "
            "type attention=sdpa"
        )
    for variant in ("softcap", "s_aux", "position_bias"):
        if unsupported.get(variant) is not None:
            raise UserError(
                f"attention=varlen cannot compute this model's {variant}: type attention=eager"
            )
    rows, _, tokens, width = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
        max_length_q = tokens
    _check_mask(module, attention_mask, sliding_window, max_length_q)
    own_width = value.shape[-1]
    if own_width != width:  # latent attention has narrower values
        value = torch.nn.functional.pad(value, (0, width - own_width))
    parts = cast_to_one_dtype(query, key, value)
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in parts)
    # As in transformers: a layer without the attribute is causal.
    is_causal = getattr(module, "is_causal", True)
    reaches = is_causal and sliding_window is not None and sliding_window < max_length_q
    output = kernel(
        query,
        key,
        value,
        cu_seq_lens_q,
        max_length_q,
        is_causal=is_causal,
        window=sliding_window if reaches else None,
        scaling=scaling,
    )
    return output[..., :own_width].unflatten(0, (rows, tokens)), None


def _check_mask(
    module: torch.nn.Module, mask: MaskRule | torch.Tensor | None, window: int | None, longest: int
) -> None:
    """Raise UserError for a mask that is not the layer's own sliding window."""
    if mask is None:
        return
    if isinstance(mask, MaskRule) and (mask.size == window or mask.size >= longest):
        return
    raise UserError(
        f"attention=varlen takes sliding windows only from a layer's argument, and "
        f"{type(module).__name__} has a mask of another kind: type attention=sdpa"
    )


def take_flash4(widths: Sequence[int], device: torch.device) -> None:
    """Let PyTorch's kernel be FlashAttention 4, which is installed, where it is proven equal.

    Logs one line on GPUs that it is for. widths: of the heads. It holds for the process, until
    `restore_flash2`.
    """
    import torch

    if torch.cuda.get_device_capability(device)[0] not in FLASH4_CAPABILITIES:
        return
    try:
        from torch.nn.attention import activate_flash_attention_impl  # PyTorch 2.11

        own = _probe_kernel(widths, device)
        activate_flash_attention_impl("FA4")
        pairs = zip(_probe_kernel(widths, device), own, strict=True)
        is_equal = all(bool((a - b).norm() <= TOLERANCE * b.norm()) for a, b in pairs)
        reason = "" if is_equal else "it differs"
    except Exception as error:  # noqa: BLE001  compilers of kernels raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason:
        restore_flash2()
        log.warning("attention: varlen by FlashAttention 2, not 4 (%s)", reason)
    else:
        log.info("attention: varlen by FlashAttention 4, proven equal")


def restore_flash2() -> None:
    """Let PyTorch's kernel be its own again."""
    try:
        from torch.nn.attention import (
            current_flash_attention_impl,
            restore_flash_attention_impl,
        )
    except ImportError:  # before PyTorch 2.11 it is the only one
        return
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def _probe_kernel(widths: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return outputs and gradients in fp32 of random documents: causal, and with a window."""
    import torch

    kernel, found = VarlenKernel.installed(), []
    random = torch.Generator(device).manual_seed(0)
    ends = torch.tensor(PROBE_ENDS, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(PROBE_ENDS))
    for width in sorted(set(widths)):
        for window in (None, longest // 4):
            heads, shared = PROBE_HEADS
            query, key, value = (
                torch.randn(PROBE_ENDS[-1], number, width, generator=random, device=device)
                .bfloat16()
                .requires_grad_()
                for number in (heads, shared, shared)
            )
            with torch.enable_grad():
                output = kernel(
                    query, key, value, ends, longest, is_causal=True, window=window, scaling=None
                )
                outer = torch.linspace(-1, 1, output.numel(), device=device).to(output)
                grads = torch.autograd.grad(output, (query, key, value), outer.view_as(output))
            found += [one.detach().float() for one in (output, *grads)]
    return found
