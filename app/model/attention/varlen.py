"""attention=varlen: PyTorch's variable-length kernel, for NVIDIA GPUs in half precision.

The kernel is FlashAttention 2, or FlashAttention 4 if that is installed, supports the GPU, and
computes the same on it. Documents of equal lengths, such as packs of one long document each, form
a batch without boundaries: PyTorch selects its kernel, on Hopper cuDNN's, which took about half of
FlashAttention 2's time there (benchmarks/results).
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from app.model.activation_checkpointing import attend_once
from app.model.attention.attend import MaskRule, attend_to_documents, cast_to_one_dtype
from common.errors import UserError
from common.text import reason_of

log = logging.getLogger(__name__)

FLASH4_CAPABILITIES = (9, 10)
"""major compute capabilities for which PyTorch has FlashAttention 4: Hopper and Blackwell"""
_PROBE_BOUNDARIES = (0, 100, 300, 301)
"""start of each document of the comparison, and end of the last"""
_PROBE_KEY_HEADS = 2
"""heads of keys and of values"""
TOLERANCE = 2.0**-5
"""largest norm of the difference of two results in half precision, as a share of their norm"""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """`torch.nn.attention.varlen.varlen_attn`, called as the installed PyTorch requires.

    Its parameters differ: PyTorch 2.10 has `is_causal`, 2.11 has `window_size` instead, and
    `scale`, and 2.12 adds `enable_gqa`.
    """

    function: Callable[..., Tensor]
    takes_window: bool
    takes_scale: bool
    takes_gqa: bool

    @classmethod
    def of(cls, function: Callable[..., Tensor]) -> VarlenKernel:
        """Wrap a version of `varlen_attn`, by its signature."""
        names = inspect.signature(function).parameters
        return cls(function, "window_size" in names, "scale" in names, "enable_gqa" in names)

    @classmethod
    def installed(cls) -> VarlenKernel:
        from torch.nn.attention.varlen import varlen_attn

        return cls.of(varlen_attn)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        boundaries: Tensor,
        longest: int,
        *,
        is_causal: bool,
        window: int | None,
        scaling: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend inside each document; query, key, value [tokens, heads, head_dim].

        boundaries int32 [documents + 1]: start of each document, and end of the last; longest: most
        tokens of a document; window: most tokens that a token sees, itself included; sinks [heads].
        Key and value may have fewer heads (GQA).
        """
        options: dict[str, Any] = {}
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1 and self.takes_gqa:
            options["enable_gqa"] = True
        elif repeats > 1:
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        if self.takes_scale:
            options["scale"] = scaling
        elif scaling is not None:
            factor = scaling * math.sqrt(query.shape[-1])
            query = query if math.isclose(factor, 1.0) else query * factor
        window_size = (-1 if window is None else window - 1, 0) if is_causal else (-1, -1)
        if sinks is not None:
            parts, scaling = (query, key, value), options.get("scale")
            return attend_to_documents(parts, sinks, boundaries, longest, scaling, window_size)
        if not self.takes_window:
            if window is not None:
                raise UserError(
                    "attention=varlen has no sliding window before PyTorch 2.11: "
                    "type attention=sdpa"
                )
            options["is_causal"] = is_causal
        else:
            options["window_size"] = window_size
        # The kernel knows that queries and keys have the same lengths if it gets one tensor twice.
        arguments = (query, key, value, boundaries, boundaries, longest, longest)
        output: Tensor = attend_once(self.function, *arguments, **options)
        return output


def attend_by_boundaries(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: Tensor | None = None,
    *,
    kernel: VarlenKernel,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Attend inside each document; without boundaries, every row is one document.

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads (GQA). cu_seq_lens_q
    int32 [documents + 1] counts through all rows. s_aux [heads]: attention sinks. Returns
    [rows, tokens, heads, head_dim]. Raises UserError for variants and masks that the kernel does
    not compute.
    """
    _check_variant(dropout, unsupported)
    rows, _, tokens, head_dim = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
        max_length_q = tokens
    _check_mask(module, attention_mask, sliding_window, max_length_q)
    value_dim = value.shape[-1]
    if value_dim != head_dim:  # in latent attention, values have a smaller head dimension
        value = torch.nn.functional.pad(value, (0, head_dim - value_dim))
    parts = cast_to_one_dtype(query, key, value)
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in parts)
    # As in transformers: a layer without the attribute is causal.
    is_causal = getattr(module, "is_causal", True)
    has_window = is_causal and sliding_window is not None and sliding_window < max_length_q
    num_documents = len(cu_seq_lens_q) - 1
    has_equal_lengths = num_documents * max_length_q == rows * tokens
    is_plain = is_causal and not has_window and s_aux is None
    # A compiled layer keeps one kernel: a second one would be a second graph.
    if has_equal_lengths and is_plain and not torch.compiler.is_compiling():
        output = _attend_to_batch(query, key, value, num_documents, scaling)
    else:
        window = sliding_window if has_window else None
        how: Any = {"is_causal": is_causal, "window": window, "scaling": scaling, "sinks": s_aux}
        output = kernel(query, key, value, cu_seq_lens_q, max_length_q, **how)
    return output[..., :value_dim].unflatten(0, (rows, tokens)), None


def _attend_to_batch(
    query: Tensor, key: Tensor, value: Tensor, num_documents: int, scaling: float | None
) -> Tensor:
    """Attend inside each of `num_documents` of equal lengths, causally.

    query, key, value, and the output: [tokens of all documents, heads, head_dim].
    """
    batch = (part.unflatten(0, (num_documents, -1)).transpose(1, 2) for part in (query, key, value))
    output: Tensor = attend_once(
        torch.nn.functional.scaled_dot_product_attention,
        *batch,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _check_variant(dropout: float, options: dict[str, Any]) -> None:
    """Raise UserError for dropout, and for variants of attention that a model passes as options."""
    if dropout:
        raise UserError(
            "attention=varlen has no attention dropout, which this model's config has: "
            "type attention=sdpa"
        )
    for variant in ("softcap", "position_bias"):
        if options.get(variant) is not None:
            raise UserError(
                f"attention=varlen cannot compute this model's {variant}: type attention=eager"
            )


def _check_mask(
    module: torch.nn.Module, mask: MaskRule | Tensor | None, window: int | None, longest: int
) -> None:
    """Raise UserError for a mask other than the layer's own sliding window."""
    if mask is None:
        return
    if isinstance(mask, MaskRule) and (mask.size == window or mask.size >= longest):
        return
    raise UserError(
        "attention=varlen supports only sliding windows that layers pass as an argument, and "
        f"{type(module).__name__} has another kind of mask: type attention=sdpa"
    )


def activate_flash4(
    head_dims: Sequence[int],
    query_heads_per_key: int,
    device: torch.device,
    *,
    has_sinks: bool = False,
) -> None:
    """Make FlashAttention 4, which is installed, PyTorch's kernel if its results are equal.

    Holds for the process, until `restore_flash2`. Logs the outcome on GPUs that it supports.
    """
    if torch.cuda.get_device_capability(device)[0] not in FLASH4_CAPABILITIES:
        return
    try:
        from torch.nn.attention import activate_flash_attention_impl  # PyTorch 2.11

        run = partial(_run_kernel, head_dims, query_heads_per_key, device, has_sinks=has_sinks)
        expected = run()
        activate_flash_attention_impl("FA4")
        results = run()
        pairs = zip(results, expected, strict=True)
        is_equal = all(bool((a - b).norm() <= TOLERANCE * b.norm()) for a, b in pairs)
        reason = "" if is_equal else "its results differ"
    except Exception as error:  # noqa: BLE001  kernel compilers may raise anything
        reason = reason_of(error)
    if reason:
        restore_flash2()
        log.warning("attention: varlen runs FlashAttention 2 instead of 4 (%s)", reason)
    else:
        log.info("attention: varlen runs FlashAttention 4, proven equal")


def restore_flash2() -> None:
    """Make PyTorch's built-in FlashAttention 2 its kernel again."""
    try:
        from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
    except ImportError:  # the only kernel before PyTorch 2.11
        return
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def _run_kernel(
    head_dims: Sequence[int], query_heads_per_key: int, device: torch.device, *, has_sinks: bool
) -> list[Tensor]:
    """Return the kernel's outputs and gradients for random documents, with and without a window."""
    kernel, results = VarlenKernel.installed(), []
    generator = torch.Generator(device).manual_seed(0)
    boundaries = torch.tensor(_PROBE_BOUNDARIES, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(_PROBE_BOUNDARIES))
    num_heads = query_heads_per_key * _PROBE_KEY_HEADS
    sinks = torch.linspace(-1, 1, num_heads, device=device) if has_sinks else None
    for head_dim in sorted(set(head_dims)):
        for window in (None, longest // 4):
            query, key, value = (
                torch.randn(
                    _PROBE_BOUNDARIES[-1], heads, head_dim, generator=generator, device=device
                )
                .bfloat16()
                .requires_grad_()
                for heads in (num_heads, _PROBE_KEY_HEADS, _PROBE_KEY_HEADS)
            )
            with torch.enable_grad():
                how: Any = {"is_causal": True, "window": window, "scaling": None, "sinks": sinks}
                output = kernel(query, key, value, boundaries, longest, **how)
                grad_output = torch.linspace(-1, 1, output.numel(), device=device).to(output)
                grads = torch.autograd.grad(
                    output, (query, key, value), grad_output.view_as(output)
                )
            results += [tensor.detach().float() for tensor in (output, *grads)]
    return results
