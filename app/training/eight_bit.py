"""AdamW with moments of 8 bits, by bitsandbytes, which takes seconds to import."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import bitsandbytes
import torch
from torch import Tensor

from common.text import reason_of

log = logging.getLogger(__name__)

MOMENTS = ("state1", "state2")
"""bitsandbytes' names of the moments in a weight's state; only these may be paged"""


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """bitsandbytes' AdamW of 8 bits, with `optim_bits` set per parameter group.

    bitsandbytes' own GlobalOptimManager sets it in a process-wide table by parameter address. On a
    GPU moments of 8 bits are updated by a kernel of our own: bitsandbytes' waits for the device
    after every weight, and a step took four times as long as its bytes (H100, 2026-11-27).
    """

    grad_scale: Tensor | None = None
    """divisor of the next step's gradients, by the name that PyTorch's fused optimizers read"""

    kernel: Any = None
    """module whose `step` replaces bitsandbytes' kernel; None if it does not run on the device"""

    @property
    def clips_in_step(self) -> bool:
        """Whether the next step divides gradients by `grad_scale`."""
        return self.kernel is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all weights that have a gradient."""
        if self.kernel is None:
            loss: float | None = super().step(closure)
            return loss
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for gindex, group in enumerate(self.param_groups):
            for pindex, weight in enumerate(group["params"]):
                if weight.grad is not None:
                    if not self.state[weight]:
                        self.init_state(group, weight, gindex, pindex)
                    self.update_step(group, weight, gindex, pindex)
        return loss

    def update_step(
        self, group: dict[str, Any], p: torch.nn.Parameter, gindex: int, pindex: int
    ) -> None:
        """Update a weight and its moments; bitsandbytes' kernel does it for moments of 32 bits."""
        state = self.state[p]
        if self.kernel is not None and state["state1"].dtype == torch.uint8:
            p.data, grad = p.data.contiguous(), p.grad.contiguous()
            state["step"] += 1
            self.kernel.step(p, grad, state, group, self.grad_scale)
            return
        if self.grad_scale is not None:
            p.grad /= self.grad_scale
        super().update_step(group, p, gindex, pindex)

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group["optim_bits"]
        return config


def build_adamw8bit(
    groups: list[dict[str, Any]],
    embeddings: Collection[int],
    *,
    betas: tuple[float, float],
    eps: float,
    is_paged: bool,
) -> torch.optim.Optimizer:
    """Build AdamW over parameter groups, with moments quantized to 8 bits in blocks of 256.

    `embeddings`: ids of parameters whose moments stay in fp32 (arXiv 2110.02861): gradients of an
    embedding's rows differ as much as the frequencies of their tokens, and a block that holds large
    and small moments rounds the small ones to zero. Parameters below 4096 elements keep fp32, too.
    """
    if is_paged and groups[0]["params"][0].device.type == "cpu":
        log.info("optimizer: on the CPU paged_adamw8bit is adamw8bit, there is nowhere to page to")
        is_paged = False
    split = []
    for group in groups:
        for bits, name in ((8, group["name"]), (32, f"{group['name']}, fp32 moments")):
            params = [p for p in group["params"] if (id(p) in embeddings) == (bits == 32)]
            if params:
                split.append(group | {"name": name, "params": params, "optim_bits": bits})
    optimizer = AdamW8bit(split, betas=betas, eps=eps, is_paged=is_paged)
    if not is_paged:  # paged moments are in host memory, where Triton does not reach them
        optimizer.kernel = _proven_kernel(groups[0]["params"][0].device)
    return optimizer


def _proven_kernel(device: torch.device) -> ModuleType | None:
    """Return the kernel of a step on a GPU; None, with a warning, if its results differ."""
    if not _is_on_gpu(device):
        return None
    try:
        from app.training import eight_bit_kernel

        reason = "" if _is_equal_step(eight_bit_kernel, device) else "it differs"
    except Exception as error:  # noqa: BLE001  kernel compilers raise any type
        reason = reason_of(error)
    if reason:
        log.warning("optimizer: 8-bit steps by bitsandbytes, not by one kernel (%s)", reason)
        return None
    return eight_bit_kernel


def _is_equal_step(kernel: ModuleType, device: torch.device) -> bool:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 5000, device=device))
    plain = bitsandbytes.optim.AdamW8bit([weight], lr=1e-3, weight_decay=0.1)
    (group,) = plain.param_groups
    plain.init_state(group, weight, 0, 0)
    state = plain.state[weight]
    divisor = torch.full((), 2.0, device=device)
    for number in range(1, 4):
        weight.grad = torch.sin(weight.detach() * 1000 * number) ** 5
        own = {name: each.clone() for name, each in state.items() if isinstance(each, Tensor)}
        updated = weight.detach().clone()
        kernel.step(updated, weight.grad * divisor, own | {"step": number}, group, divisor)
        plain.step()
        # Values next to the middle of two codes may be rounded to either.
        steps = [(own[name].int() - state[name].int()).abs() for name in MOMENTS]
        are_close = [each.max() <= 1 and each.float().mean() < 0.01 for each in steps]
        pairs = [(own[name], state[name]) for name in ("absmax1", "absmax2")]
        are_close += [(a - b).abs().max() <= 1e-5 * b.max() for a, b in pairs]
        if not all([*are_close, (updated - weight).abs().max() <= 1e-6]):
            return False
    return True


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
