"""A model as a plan has it: weights without numbers, and the widths of its layers.

`model_size` builds it, by a config.json or by modules on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from app.model.layer_kind import Widths
from app.model.quantization import QuantizationConfig
from app.strategy.settings import StrategyConfig, tensor_parallel_size
from app.training.memory import ModelSize, Part, Sharing, add_up_weights, num_shares


class Weight:
    """A weight without numbers: what `add_up_weights` asks of a parameter."""

    __slots__ = ("num_bytes", "requires_grad", "shape")

    def __init__(self, shape: tuple[int, ...], num_bytes: int, requires_grad: bool) -> None:
        self.shape, self.num_bytes, self.requires_grad = shape, num_bytes, requires_grad

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return how many numbers it has."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of a number."""
        return self.num_bytes


Weights = Mapping[str, Weight]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A base with its adapter, by its weights; none of them is read."""

    name: str
    layers: tuple[tuple[Weights, int], ...]
    """weights of a layer by their names in it, and how many layers are alike"""
    trained_layers: int
    """from the lowest layer that trains to the last one"""
    embedding: Weights
    head: Weights
    """nothing where it is the embedding's"""
    rest: Weights
    widths: Widths
    plan: Mapping[str, str]
    """how tensor parallelism splits a layer"""
    is_pair: bool
    """encoder and decoder"""

    @property
    def num_layers(self) -> int:
        """All layers."""
        return sum(count for _, count in self.layers)

    def count(self, *, trained: bool) -> int:
        """Count the weights that train, or those that do not."""
        of_layers = sum(_count(weights, trained) * times for weights, times in self.layers)
        ends = (self.embedding, self.head, self.rest)
        return of_layers + sum(_count(weights, trained) for weights in ends)

    @property
    def num_weights(self) -> int:
        """All weights of the base and its adapter."""
        return self.count(trained=True) + self.count(trained=False)

    def multiplied(self, *, trained: bool) -> float:
        """Count the weights of the layers' matrices that a token is multiplied with."""
        return sum(
            weight.numel() * self._share(weight) * times
            for weights, times in self.layers
            for weight in weights.values()
            if weight.ndim >= 2 and weight.requires_grad == trained
        )

    def _share(self, weight: Weight) -> float:
        """Return the share of a weight that a token goes to: of fused experts, its own."""
        if weight.ndim < 3 or not self.widths.routed_copies:
            return 1.0
        return min(1.0, self.widths.routed_copies / 2 / weight.shape[0])

    def _layer_weights(self, part: str) -> Iterator[tuple[Weight, int]]:
        """Yield the layers' weights with `part` in their name, and how many layers have them."""
        for weights, times in self.layers:
            for name, weight in weights.items():
                if part in name:
                    yield weight, times

    @property
    def adapter_ranks(self) -> float:
        """Return the ranks of a layer's LoRA matrices together, the mean of the layers."""
        ranks = sum(weight.shape[0] * times for weight, times in self._layer_weights(".lora_A."))
        return ranks / self.num_layers

    @property
    def adapts_experts(self) -> bool:
        """Return whether LoRA's matrices are beside those of experts."""
        return any(
            "experts." in name and ".lora_A." in name
            for weights, _ in self.layers
            for name in weights
        )

    @property
    def is_dora(self) -> bool:
        """Return whether LoRA's matrices have magnitudes beside them."""
        return any(self._layer_weights(".lora_magnitude"))

    def scaled_features(self, *, of_inputs: bool) -> float:
        """Return how many features of a layer IA3 scales, of inputs or of outputs of matrices; the
        mean of the layers.
        """
        side = 0 if of_inputs else 1  # the one that peft gives a length of 1
        vectors = self._layer_weights(".ia3_l")
        features = sum(
            weight.numel() * times for weight, times in vectors if weight.shape[side] == 1
        )
        return features / self.num_layers

    @property
    def largest_matrix(self) -> int:
        """Weights of the largest matrix of a layer that does not train; experts not counted."""
        frozen = (
            weight.numel()
            for weight, _ in self._layer_weights("")
            if weight.ndim == 2 and not weight.requires_grad
        )
        return max(frozen, default=0)

    @property
    def trains_embedding(self) -> bool:
        """Return whether the embedding gets gradients."""
        return any(weight.requires_grad for weight in self.embedding.values())

    @property
    def head_weights(self) -> int:
        """Weights of the head's matrix, whosever it is."""
        return next(
            weight.numel()
            for weight in (self.head or self.embedding).values()
            if len(weight.shape) == 2
        )

    @property
    def trains_head(self) -> bool:
        """Return whether the head's own matrix gets gradients."""
        return any(weight.requires_grad for weight in (self.head or self.embedding).values())


def _count(weights: Weights, trained: bool) -> int:
    return sum(each.numel() for each in weights.values() if each.requires_grad == trained)


def size_for(
    model: PlannedModel,
    precision: str,
    quantization: QuantizationConfig,
    strategy: StrategyConfig,
    *,
    num_ranks: int,
    num_nodes: int,
) -> ModelSize:
    """Return what `estimate_memory` asks of a model, for one rank of those of `strategy`."""
    tensor_size = tensor_parallel_size(strategy, num_ranks // num_nodes)
    shares, _, _ = num_shares(strategy, num_ranks, num_nodes)
    ends = frozenset(id(w) for end in (model.embedding, model.head) for w in end.values())
    sharing = Sharing(precision, quantization, shares, tensor_size, ends)
    plan = model.plan if tensor_size > 1 else {}
    layers = sum(
        (add_up_weights(weights, sharing, plan) * times for weights, times in model.layers), Part()
    )
    is_fp32 = any(weight.element_size() == 4 for weight in model.embedding.values())
    # As `can_split_head` has it: a bias would be a second weight.
    splits_head = len(model.head) == 1 and model.widths.vocabulary % tensor_size == 0
    head = add_up_weights(model.head, sharing, {}) if model.head else Part()
    return ModelSize(
        layer=layers * (1 / model.num_layers),
        num_layers=model.num_layers,
        embedding=add_up_weights(model.embedding, sharing, {}),
        head=head * (1 / tensor_size) if splits_head else head,
        rest=add_up_weights(model.rest, sharing, {}) if model.rest else Part(),
        width=model.widths.hidden,
        inner_width=model.widths.feed_forward,
        vocab_size=model.widths.vocabulary,
        hidden_bytes=4 if is_fp32 else 2,
    )


def dtype_bytes(precision: str, *, trains: bool) -> int:
    """Return the bytes of a weight's number: under autocast trained ones are fp32."""
    if precision == "bf16-pure":
        return 2
    return 4 if trains or precision == "fp32" else 2
