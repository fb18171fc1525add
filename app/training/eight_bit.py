"""AdamW with moments of 8 bits, by bitsandbytes, which takes seconds to import."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import bitsandbytes
import torch

log = logging.getLogger(__name__)

MOMENTS = ("state1", "state2")
"""bitsandbytes' names of the moments in a weight's state; only these may be paged"""


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """bitsandbytes' AdamW of 8 bits, with `optim_bits` set per parameter group.

    bitsandbytes' own GlobalOptimManager sets it in a process-wide table by parameter address.
    """

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
    return AdamW8bit(split, betas=betas, eps=eps, is_paged=is_paged)
