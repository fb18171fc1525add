"""The weights of a base with its adapter, and the widths of its layers, before anything is read.

By the numbers of config.json where its family's matrices are known without torch; else from the
model on the meta device, which takes seconds to import.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
    Targets,
    find_targets,
)
from app.model.base import ModelConfig
from app.model.layer_kind import Widths, kind_of_layer, widths_of
from app.model.patterns import by_key
from app.model.quantization import QuantizationConfig
from app.preflight.shapes import modules_of_architecture
from app.process.errors import UserError
from app.strategy.settings import StrategyConfig, tensor_parallel_size
from app.strategy.tensor_plan import BY_COLUMNS, BY_ROWS
from app.training.memory import ModelSize, Part, Sharing, add_up_weights, num_shares

OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "encoder_layers"),
    "num_attention_heads": ("n_head", "num_heads", "encoder_attention_heads"),
    "head_dim": ("d_kv",),
}
"""names of numbers in older config.json files"""
DEFAULT_NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "bart": {"dropout": 0.1},
    "falcon": {"multi_query": True},
}
"""what a model type has where config.json leaves it out, as far as a plan asks"""
PAIRS = ("t5", "bart")
LEARNED_POSITIONS = {"gpt2": (1, "n_positions", 0), "bart": (2, "max_position_embeddings", 2)}
"""model type -> tables of learned positions, the key of their length, and rows beyond it"""
TIED = ("gemma", "gemma2", "gemma3_text", "gpt2", "bloom", "falcon", "t5", "bart")
"""model types whose head is the embedding where config.json does not say"""
SPLIT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"), BY_ROWS),
    **dict.fromkeys(("o_proj", "down_proj", "dense", "fc2"), BY_COLUMNS),
}
"""how tensor parallelism splits matrices, by the ends of their names; as transformers' plans"""
SHARED_EXPERTS = re.compile(r"^(?!.*\bexperts\.\d).*\bgate_proj\.(base_layer\.)?weight$")
"""the gates of a layer with experts that are not one expert's own"""


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


class _Numbers:
    """The numbers of a config.json, as `widths_of` asks a transformers config for them."""

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self._numbers = {**DEFAULT_NUMBERS.get(str(numbers.get("model_type")), {}), **numbers}
        self.is_encoder_decoder = numbers.get("model_type") in PAIRS

    def get_text_config(self) -> _Numbers:
        return self

    def __getattr__(self, name: str) -> Any:
        for each in (name, *OTHER_NAMES.get(name, ())):
            if each in self._numbers:
                return self._numbers[each]
        raise AttributeError(name)


def build_planned_model(
    config: ModelConfig, numbers: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel:
    """Return the model that a run would build; UserError where the adapter does not fit it."""
    planned = model_of_numbers(config.path or "model.architecture", numbers, adapter, precision)
    return planned or model_on_meta(config, numbers, adapter, precision)


def dtype_bytes(precision: str, *, trains: bool) -> int:
    """Return the bytes of a weight's number: under autocast trained ones are fp32."""
    if precision == "bf16-pure":
        return 2
    return 4 if trains or precision == "fp32" else 2


def model_of_numbers(
    name: str, numbers: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel | None:
    """Return the model by its config.json alone; None where its family needs torch.

    Biases and norms are left out: less than a thousandth of the weights.
    """
    base = modules_of_architecture(name, numbers)
    widths = widths_of(_Numbers(numbers))
    if base.linear is None or not base.layers or not base.embeddings or widths is None:
        return None
    if base.head is None or base.experts:
        return None
    found = find_targets(adapter, base)
    if found.problems:
        raise UserError(found.problems)
    weights_of = _weights_by(adapter, found, precision)
    layers: dict[str, dict[str, Weight]] = {layer: {} for layer in base.layers}
    rest: dict[str, Weight] = {}
    is_tied = bool(numbers.get("tie_word_embeddings", numbers.get("model_type") in TIED))
    head: dict[str, Weight] = {}
    for module, shape in base.linear.items():
        layer = _layer_of(module, layers)
        if layer is not None:
            local = module[len(layer) + 1 :]
            layers[layer] |= weights_of(module, shape, local)
        elif module == base.head:
            head = {} if is_tied else weights_of(module, shape, module)
        else:
            rest |= weights_of(module, shape, module)
    if (positions := LEARNED_POSITIONS.get(str(numbers.get("model_type")))) is not None:
        tables, name_of_length, more = positions
        rows = tables * (numbers[name_of_length] + more)
        is_full = isinstance(adapter, FullConfig)
        num_bytes = dtype_bytes(precision, trains=is_full)
        rest["positions.weight"] = Weight((rows, widths.hidden), num_bytes, is_full)
    table = base.embeddings[0]
    width = (widths.vocabulary, widths.hidden)
    kinds = Counter(_signature(weights) for weights in layers.values())
    of_kind = {_signature(weights): weights for weights in layers.values()}
    training = [
        number
        for number, weights in enumerate(layers.values())
        if any(weight.requires_grad for weight in weights.values())
    ]
    return PlannedModel(
        name=name,
        layers=tuple((of_kind[kind], count) for kind, count in kinds.items()),
        trained_layers=len(layers) - min(training, default=len(layers)),
        embedding=weights_of(table, width, table),
        head=head,
        rest=rest,
        widths=widths,
        plan=_split_plan(next(iter(layers.values()))),
        is_pair=numbers.get("model_type") in PAIRS,
    )


def _weights_by(
    adapter: AdapterConfig, found: Targets, precision: str
) -> Callable[[str, tuple[int, ...], str], dict[str, Weight]]:
    """Return what tells the weights of a module: (name, shape, name in its layer) -> by name."""
    is_full = isinstance(adapter, FullConfig)
    frozen, trained = (dtype_bytes(precision, trains=flag) for flag in (is_full, True))
    ranks = _ranks(adapter, found.matrices)
    whole = tuple(f"{each}." for each in found.whole)
    matrices, vector_inputs = set(found.matrices), set(found.scaled_inputs)

    def weights_of(module: str, shape: tuple[int, ...], local: str) -> dict[str, Weight]:
        is_whole = is_full or f"{module}.".startswith(whole)
        if is_whole and isinstance(adapter, FreezeConfig):
            return {f"{local}.weight": Weight(shape, trained, True)}
        weights = {f"{local}.weight": Weight(shape, frozen, is_full)}
        if is_whole and not is_full:  # modules_to_save: a copy that trains, beside the base's
            weights[f"{local}.modules_to_save.weight"] = Weight(shape, trained, True)
        if (rank := ranks.get(module)) is not None:
            rows, columns = shape
            weights[f"{local}.lora_A.weight"] = Weight((rank, columns), trained, True)
            weights[f"{local}.lora_B.weight"] = Weight((rows, rank), trained, True)
            if isinstance(adapter, LoraConfig) and adapter.use_dora:
                weights[f"{local}.lora_magnitude.weight"] = Weight((rows,), trained, True)
        elif isinstance(adapter, Ia3Config) and module in matrices:
            vector = (1, shape[1]) if module in vector_inputs else (shape[0], 1)
            weights[f"{local}.ia3_l"] = Weight(vector, trained, True)
        return weights

    return weights_of


def _layer_of(module: str, layers: Mapping[str, object]) -> str | None:
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in names if name in layers), None)


def _signature(weights: Weights) -> tuple[tuple[str, tuple[int, ...], int, bool], ...]:
    return tuple(
        (name, weight.shape, weight.num_bytes, weight.requires_grad)
        for name, weight in weights.items()
    )


def _split_plan(layer: Weights) -> dict[str, str]:
    paths = {name.removesuffix(".weight") for name in layer if ".lora_" not in name}
    ends = {path: path.rpartition(".")[2] for path in paths}
    return {path: SPLIT[end] for path, end in ends.items() if end in SPLIT}


def _ranks(adapter: AdapterConfig, matrices: list[str]) -> dict[str, int]:
    if not isinstance(adapter, LoraConfig):
        return {}
    ranks = dict.fromkeys(matrices, adapter.r)
    for pattern, rank in reversed(adapter.rank_pattern.items()):  # the first one wins, as in peft
        ranks |= dict.fromkeys(by_key(pattern, matrices), rank)
    return ranks


def model_on_meta(
    config: ModelConfig, numbers: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel:
    """Return the model by building its modules without numbers."""
    from app.model.build import build_model
    from app.model.recompute import RecomputeConfig

    model = build_model(
        replace(config, path=None, from_scratch=True, architecture=dict(numbers)),
        QuantizationConfig(),
        "eager",  # which every model has
        adapter,
        RecomputeConfig(),
        precision,
        on_meta=True,
    )
    planned = model_of_modules(config.path or "model.architecture", model, numbers)
    if planned is None:
        raise UserError(
            f"{config.path}: its config.json does not say how wide its layers are; a plan knows "
            "hidden_size, num_hidden_layers and num_attention_heads by these names"
        )
    return planned


def model_of_modules(name: str, model: Any, numbers: Mapping[str, Any]) -> PlannedModel | None:
    """Return a model that is built, on meta and not quantized, as a plan has it; None where its
    config does not say how wide its layers are. `numbers`: of its config.json.
    """
    from app.model.layers import decoder_layers
    from app.strategy.tensor_plan import layer_plan

    if widths_of(model.config) is None:
        return None
    names = decoder_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(weight) for end in (embedding, head) for weight in end.parameters()}

    def weights_of(named: Any) -> dict[str, Weight]:
        return {
            name: Weight(tuple(weight.shape), weight.element_size(), weight.requires_grad)
            for name, weight in named
        }

    layers = [weights_of(model.get_submodule(name).named_parameters()) for name in names]
    kinds = Counter(map(_signature, layers))
    of_kind = {_signature(weights): weights for weights in layers}
    most = layers.index(of_kind[kinds.most_common(1)[0][0]])
    shared = sum(w.shape[0] for name, w in layers[most].items() if SHARED_EXPERTS.search(name))
    if not any("experts." in name for name in layers[most]):
        shared = 0
    widths = widths_of(model.config, kind_of_layer(model.get_submodule(names[most]), shared))
    assert widths is not None
    inside = tuple(f"{name}." for name in names)
    training = [
        number
        for number, weights in enumerate(layers)
        if any(weight.requires_grad for weight in weights.values())
    ]
    is_tied = {id(w) for w in embedding.parameters()} == {id(w) for w in head.parameters()}
    # transformers ties every T5; FLAN-T5's files have a head of their own, which loading unties.
    is_tied = is_tied and numbers.get("tie_word_embeddings") is not False
    try:
        plan: Mapping[str, str] = layer_plan(model)
    except UserError:  # no ranks can split it, and the couplings say so
        plan = {}
    return PlannedModel(
        name=name,
        layers=tuple((of_kind[kind], count) for kind, count in kinds.items()),
        trained_layers=len(layers) - min(training, default=len(layers)),
        embedding=weights_of(embedding.named_parameters()),
        head={} if is_tied else weights_of(head.named_parameters()),
        rest=weights_of(
            (name, weight)
            for name, weight in model.named_parameters()
            if id(weight) not in ends and not name.startswith(inside)
        ),
        widths=widths,
        plan=plan,
        is_pair=bool(model.config.is_encoder_decoder),
    )
