"""Trade time for memory: which activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.model.attention import recompute_on_same_documents
from data_modules import setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("none", "full", "selective", "offload")
BY_SPEED = ("none", "selective", "full", "offload")
"""what `auto` tries, fastest first: offload computes what full does, and copies besides"""


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    mode: str = setting("auto", choices=("auto", *MODES))
    """auto: none where memory allows on a GPU by arithmetic, else the fastest that fits; on a CPU
    none; none: keep all activations; full: only each layer's input (slowest); selective: also
    attention and narrow matrix products; offload: as full, inputs in host memory"""
    every: int = setting(1, ge=1, note="2 recomputes every other layer")
    """every n-th layer recomputes, the others keep all (more memory, faster)"""


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
    run_layer = recompute_on_same_documents(_build_checkpoint(config.mode))
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
    from app.model.activation_checkpointing import SelectiveLayers
    from app.model.recomputed_layer import OffloadedInputs, run_recomputed

    if mode == "offload":
        return OffloadedInputs().run_layer
    return SelectiveLayers().run_layer if mode == "selective" else run_recomputed
