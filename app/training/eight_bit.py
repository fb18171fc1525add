"""AdamW with moments of 8 bits: the door of bitsandbytes' optimizers."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import bitsandbytes
import torch

log = logging.getLogger(__name__)

MOMENTS = ("state1", "state2")
"""bitsandbytes' names of them in a weight's state; they may be paged, the rest never is"""


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """Bitsandbytes' AdamW of 8 bits, in which a group may keep its moments in fp32.

    Its own way to say so is a table of the whole process by the parameters' addresses.
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return what holds for one parameter of a group."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        config["optim_bits"] = group["optim_bits"]
        return config


def build_adamw8bit(
    groups: list[dict[str, Any]],
    looked_up: Collection[int],
    *,
    betas: tuple[float, float],
    eps: float,
    is_paged: bool,
) -> torch.optim.Optimizer:
    """Build AdamW over parameter groups, with moments in blocks of 256 numbers of 8 bits.

    `looked_up`: ids of parameters whose moments stay in fp32, as in arXiv 2110.02861: rows of an
    embedding have gradients as unlike as their tokens are frequent, and a block that holds large
    and small moments loses the small ones. Parameters below 4096 numbers keep fp32, too.
    """
    if is_paged and groups[0]["params"][0].device.type == "cpu":
        log.info("optimizer: on the CPU paged_adamw8bit is adamw8bit, there is nowhere to page to")
        is_paged = False
    split = []
    for group in groups:
        for bits, name in ((8, group["name"]), (32, f"{group['name']}, fp32 moments")):
            params = [p for p in group["params"] if (id(p) in looked_up) == (bits == 32)]
            if params:
                split.append(group | {"name": name, "params": params, "optim_bits": bits})
    return AdamW8bit(split, betas=betas, eps=eps, is_paged=is_paged)
