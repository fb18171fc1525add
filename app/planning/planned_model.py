"""The model of a plan: shapes of its weights, without values, and the widths of its layers.

`model_size` builds it, from a config.json or from modules on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from app.planning.layer_kind import Widths


class Weight(NamedTuple):
    """Shape and dtype size of a weight."""

    shape: tuple[int, ...]
    num_bytes: int
    """bytes per element"""
    requires_grad: bool

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


Weights = Mapping[str, Weight]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A base with its adapter, described by the shapes of its weights."""

    name: str
    layers: tuple[tuple[Weights, int], ...]
    """kinds of layers: the weights by their names in the layer, and the number of such layers"""
    trained_layers: int
    """number of layers from the lowest trainable one to the last"""
    embedding: Weights
    head: Weights
    """empty if the head is tied to the embedding"""
    rest: Weights
    widths: Widths
    plan: Mapping[str, str]
    """tensor parallel plan of a layer: the style in which each module is split"""
    is_pair: bool
    """whether the model is an encoder-decoder"""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    def count(self, *, trained: bool) -> int:
        """Count the elements of trainable (or frozen) weights."""
        of_layers = sum(_count(weights, trained) * times for weights, times in self.layers)
        ends = (self.embedding, self.head, self.rest)
        return of_layers + sum(_count(weights, trained) for weights in ends)

    @property
    def num_weights(self) -> int:
        """Number of elements of all weights of the base and its adapter."""
        return self.count(trained=True) + self.count(trained=False)

    def multiplied(self, *, trained: bool) -> float:
        """Count the elements of the layers' matrices that each token is multiplied with."""
        return sum(
            weight.numel() * self._active_share(weight) * times
            for weights, times in self.layers
            for weight in weights.values()
            if weight.ndim >= 2 and weight.requires_grad == trained
        )

    def _active_share(self, weight: Weight) -> float:
        """Return the share of a weight that a token uses: less than 1 for fused experts."""
        if weight.ndim < 3 or not self.widths.routed_copies:
            return 1.0
        return min(1.0, self.widths.routed_copies / 2 / weight.shape[0])

    def _layer_weights(self, part: str) -> Iterator[tuple[Weight, int]]:
        """Yield weights with `part` in their name, with the number of layers that have them."""
        for weights, times in self.layers:
            for name, weight in weights.items():
                if part in name:
                    yield weight, times

    @property
    def adapter_ranks(self) -> float:
        """The sum of the ranks of a layer's LoRA matrices, averaged over the layers."""
        ranks = sum(weight.shape[0] * times for weight, times in self._layer_weights(".lora_A."))
        return ranks / self.num_layers

    @property
    def adapts_experts(self) -> bool:
        """Whether experts have LoRA matrices."""
        return any(
            "experts." in name and ".lora_A." in name
            for weights, _ in self.layers
            for name in weights
        )

    @property
    def is_dora(self) -> bool:
        """Whether LoRA matrices have a magnitude vector."""
        return any(self._layer_weights(".lora_magnitude"))

    def scaled_features(self, *, of_inputs: bool) -> float:
        """Return the number of input (or output) features of matrices that IA3 scales in a layer.

        Averaged over the layers.
        """
        side = 0 if of_inputs else 1  # the dimension in which peft's vector has length 1
        vectors = self._layer_weights(".ia3_l")
        features = sum(
            weight.numel() * times for weight, times in vectors if weight.shape[side] == 1
        )
        return features / self.num_layers

    @property
    def largest_matrix(self) -> int:
        """Number of elements of the largest frozen matrix of a layer, without fused experts."""
        frozen = (
            weight.numel()
            for weight, _ in self._layer_weights("")
            if weight.ndim == 2 and not weight.requires_grad
        )
        return max(frozen, default=0)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding gets gradients."""
        return any(weight.requires_grad for weight in self.embedding.values())

    @property
    def head_weights(self) -> int:
        """Number of elements of the head's matrix, tied or not."""
        return next(
            weight.numel()
            for weight in (self.head or self.embedding).values()
            if len(weight.shape) == 2
        )

    @property
    def trains_head(self) -> bool:
        """Whether the head's matrix gets gradients."""
        return any(weight.requires_grad for weight in (self.head or self.embedding).values())


def _count(weights: Weights, trained: bool) -> int:
    return sum(each.numel() for each in weights.values() if each.requires_grad == trained)


def dtype_bytes(precision: str, *, trains: bool) -> int:
    """Return the bytes per element of a weight: trainable weights are fp32 under autocast."""
    if precision == "bf16-pure":
        return 2
    return 4 if trains or precision == "fp32" else 2
