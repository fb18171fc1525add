"""What of a step is in memory at once: layers that are recomputed, and chunks of long tensors.

Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.facts import setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("none", "full", "selective", "offload")
BY_SPEED = ("none", "selective", "full", "offload")
"""modes by speed with equal micro-batches; offload is full recompute plus copies to the host"""
WHOLE_LAYERS = ("full", "offload")
"""modes that compute layers twice"""
LOGITS_PER_CHUNK = 2**25
"""logits in memory at once: 128 MiB in fp32, enough for products at full speed"""
CPU_LOGITS, CPU_ROWS = 2**21, 256
"""logits per chunk that fit in a CPU's cache, and the smallest chunk with fast matrix products"""
_GPU_ROWS = 1024
"""smallest chunk on a GPU, in positions: with fewer, reading the weight dominates the time"""
_GPU_TILE = 128
"""rows of a matrix product's tile on a GPU"""
FUSED_CHUNKS, TRAINED_CHUNKS = 2, 4
"""factors on the chunk length: with the fused loss kernel, which needs no fp32 logits; and with a
trainable head, whose whole gradient is updated once per chunk"""

FEED_FORWARD_TOKENS = 2**14
"""tokens for which a recomputed layer has its feed-forward's activations in memory at once"""


@dataclass(kw_only=True, slots=True)
class RecomputeConfig:
    mode: str = setting("auto", choices=("auto", *MODES))
    """auto: the fastest mode whose estimated memory fits the GPU, none on a CPU; none: save all
    activations; selective: save layer inputs, attention outputs and narrow matrix products; full:
    save only layer inputs (slowest); offload: as full, with the inputs in host memory"""
    every: int = setting(1, ge=1, note="2 recomputes every other layer")
    """recompute every n-th layer only; the others save all activations (more memory, faster)"""
    num_layers: int | None = setting(None, ge=1, aliases=("recompute_num_layers",))
    """recompute the first N layers only (more memory, faster); null: all of them, with auto as many
    as memory asks for"""

    def recomputes(self, number: int) -> bool:
        """Return whether a layer is recomputed; they are counted from 0."""
        return number % self.every == 0 and (self.num_layers is None or number < self.num_layers)


def apply_recompute(model: PreTrainedModel, config: RecomputeConfig) -> None:
    """Enable non-reentrant checkpointing for the layers of encoder and decoder that `config` names.

    `auto` means none here: on a GPU the caller has resolved it before.
    """
    if config.mode in ("none", "auto"):
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    from app.model import activation_checkpointing
    from app.model.attention.mixers import recompute_on_same_documents

    # Reentrant checkpointing loses the gradients of adapters whose layer input requires none.
    # Non-reentrant checkpointing does not need input gradients, with which the backward pass would
    # continue below the lowest trained layer.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    run_layer: Callable[..., Any] = activation_checkpointing.run_recomputed
    if config.mode == "offload":
        run_layer = activation_checkpointing.OffloadedInputs().run_layer
    elif config.mode == "selective":
        run_layer = activation_checkpointing.SelectiveLayers().run_layer
    run_layer = recompute_on_same_documents(run_layer)
    num_layers = 0
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = run_layer
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = config.recomputes(num_layers)
            num_layers += 1
            for inner in module.modules():
                if inner is not module and "gradient_checkpointing" in vars(inner):
                    inner.gradient_checkpointing = False


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return the number of positions whose logits are in memory at the same time."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        from app.model.cpu import ROWS

        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % ROWS or rows
    rows = max(rows, _GPU_ROWS)
    return rows - rows % _GPU_TILE
