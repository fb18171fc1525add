"""Trade time for memory: which activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.activation_memory import Kept, Widths, estimate_activations
from app.model.attention import keep_documents
from data_modules import setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("none", "full", "selective", "offload")
BY_SPEED = ("none", "selective", "full", "offload")
"""what `auto` tries, fastest first: offload computes what full does, and copies besides"""
USABLE_SHARE, CONTEXT_GIB = 0.92, 1.5
"""of a device's memory, the rest being lost between blocks; and what CUDA and NCCL take of it"""


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    mode: str = setting("auto", choices=("auto", *MODES))
    """auto: none where memory allows on a GPU by arithmetic, else the fastest that fits; on a CPU
    none; none: keep all activations; full: only each layer's input (slowest); selective: also
    attention and narrow matrix products; offload: as full, inputs in host memory"""
    every: int = setting(1, ge=1, note="2 recomputes every other layer")
    """every n-th layer recomputes, the others keep all (more memory, faster)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What `auto` decides by; sizes are of one device."""

    device_gib: float
    resident_gib: float
    """weights, gradients and optimizer states, and what a strategy gathers at a time"""
    loss_gib: float
    """of the head: its chunks, and the gradients that it keeps"""
    widths: Widths | None
    """None where the model's config does not say them"""
    kept: Kept

    @property
    def room_gib(self) -> float:
        """Return what is left for activations."""
        usable = USABLE_SHARE * self.device_gib - CONTEXT_GIB
        return usable - self.resident_gib - self.loss_gib


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """A mode, and why it was chosen."""

    mode: str
    reason: str

    def __str__(self) -> str:
        return f"{self.mode} ({self.reason})"


def choose_recompute(memory: Memory, *, every: int = 1, compiles: bool = False) -> RecomputeChoice:
    """Choose the fastest mode whose activations fit, by arithmetic; the leanest where none does.

    Compiled layers cannot recompute selectively.
    """
    widths = memory.widths
    if widths is None:
        return RecomputeChoice("full", "the model's config does not say how wide its layers are")
    room = memory.room_gib
    needs = {
        mode: estimate_activations(widths, memory.kept, mode, every) / 2**30
        for mode in BY_SPEED
        if not (compiles and mode == "selective")
    }
    beside = (
        f"beside {memory.resident_gib:.1f} of weights and states on a GPU of "
        f"{memory.device_gib:.0f} GiB, {memory.kept.tokens:,} tokens a micro-batch, by arithmetic"
    )
    chosen = next((mode for mode, need in needs.items() if need <= room), None)
    if chosen == "none":
        return RecomputeChoice("none", f"all activations fit: {needs['none']:.1f} GiB {beside}")
    if chosen is None:
        leanest = f"even its {needs['offload']:.1f} GiB may not fit"
        return RecomputeChoice("offload", f"{leanest} {beside}")
    said = f"{needs[chosen]:.1f} GiB of activations instead of {needs['none']:.1f}"
    return RecomputeChoice(chosen, f"{said} {beside}")


def apply_recompute(model: PreTrainedModel, config: RecomputeConfig) -> None:
    """Enable non-reentrant checkpointing for every n-th layer of encoder and decoder.

    `auto` is resolved before, where it can be another mode than none.
    """
    if config.mode in ("none", "auto"):
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Reentrant checkpointing loses the gradients of adapters whose layer input is frozen. Only it
    # needs gradients at the first layer's input, with which the backward pass would go below the
    # lowest trained layer.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    run_layer = keep_documents(_build_checkpoint(config.mode))
    num_layers = 0
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = run_layer
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = num_layers % config.every == 0
            num_layers += 1
            for inner in module.modules():
                if inner is not module and "gradient_checkpointing" in vars(inner):
                    inner.gradient_checkpointing = False


def _build_checkpoint(mode: str) -> Callable[..., Any]:
    """Return a function that runs a layer on its arguments and returns its output."""
    from torch.utils.checkpoint import checkpoint

    from app.model.activation_checkpointing import HostInputs, keep_expensive

    if mode == "offload":
        return HostInputs().run_layer
    if mode == "selective":
        return partial(checkpoint, use_reentrant=False, context_fn=keep_expensive)
    return partial(checkpoint, use_reentrant=False)
