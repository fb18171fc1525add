"""The model of a plan: shapes of its weights, without values, and the widths of its layers.

It is a base with its adapter: from config.json alone if the matrices of the model family are known
without torch; else from the modules on the meta device, which take seconds to import. The structure
of layers, as far as it affects activation memory, is detected from a layer's modules or, before a
layer is built, taken from the family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
    Targets,
    find_targets,
)
from app.model.architecture import HEAD
from app.model.base import ModelConfig
from app.model.description import INPUT_EMBEDDING, describe_config
from app.model.families import PLAIN, Family, LayerKind, family_of
from app.model.layers import by_key
from app.model.quantization import QuantizationConfig
from app.strategy.settings import BY_COLUMNS, BY_ROWS
from common.errors import UserError

_Getter = Callable[[str], Any]
"""returns the value of a key of config.json, None if it has none"""

_DROPOUTS = ("resid_pdrop", "hidden_dropout", "dropout")
"""names in config.json of the dropout on the outputs of attention and feed-forward"""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
"""names in config.json of the feed-forward's activation function"""
_JOINED = ("qkv_proj",)
"""names of a joint matrix for queries, keys and values whose output is not copied for the values"""
_UNGATED = ("fc1", "fc_in", "c_fc", "dense_h_to_4h")
"""names of the first matrix of an ungated feed-forward"""


def _kind_of_type(get: _Getter) -> LayerKind:
    kind = family_of(get("model_type")).layer
    if get("model_type") != "falcon" or get("new_decoder_architecture"):
        return kind
    return replace(kind, num_norms=1 if get("parallel_attn") else 2)


def kind_of_layer(layer: Any, shared_experts: int) -> LayerKind:
    """Detect the structure of a layer from its modules; assumes two norms if it finds none.

    Uses the same class and module names as `app.model.kernels`, which replaces modules by kernels.
    """
    modules = dict(layer.named_modules())
    names = {name.rpartition(".")[2] for name in modules}
    norms = [child for child in layer.children() if "Norm" in type(child).__name__]
    head_norms = [
        module
        for name, module in modules.items()
        if name.rpartition(".")[2] in ("q_norm", "k_norm", "qk_norm")
    ]
    return LayerKind(
        num_norms=len(norms) or 2,
        norms_heads=bool(head_norms),
        has_plain_head_norms=any(not list(module.parameters()) for module in head_norms),
        norms_values="v_norm" in names,
        norms_routed=any(name.endswith("router.norm") for name in modules),
        has_rms_norms=any("RMSNorm" in type(module).__name__ for module in modules.values()),
        has_gate=names.issuperset(("gate_proj", "up_proj", "down_proj")),
        is_gated=names.isdisjoint(_UNGATED),
        joins_heads=not names.isdisjoint(_JOINED),
        shared_experts=shared_experts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """The dimensions of a model's layers that determine its activation memory."""

    layers: int
    """number of layers; of both stacks for an encoder-decoder"""
    hidden: int
    """features of the residual stream"""
    query: int
    """features of the queries of all heads"""
    key_value: int
    """features of the keys of all heads, and of the values"""
    feed_forward: int
    """features inside the feed-forward, summed over all experts of a token"""
    heads: int
    """number of query heads"""
    vocabulary: int
    """rows of the embedding"""
    routed_copies: int = 0
    """copies of a token's input that its experts need"""
    routed_features: int = 0
    """the part of `feed_forward` that belongs to routed experts"""
    latent: int = 0
    """features of the latent vectors of queries, keys and values (multi-head latent attention), and
    of the attention output without padding"""
    has_dropout: bool = False
    """whether the outputs of attention and feed-forward have dropout: each saves a mask"""
    caps_scores: bool = False
    """whether attention scores have a softcap"""
    layer_inputs: int = 0
    """features of an embedding table that each layer reads in addition to the residual stream"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    widest_head: int = 0
    """largest head dimension of any layer"""
    model_type: str = ""
    """`model_type` of config.json"""
    kind: LayerKind = PLAIN.layer
    """structure of the layers"""

    @property
    def family(self) -> Family:
        return family_of(self.model_type)

    @property
    def is_compared(self) -> bool:
        """Return whether estimates for these layers were compared with a simulated step."""
        return self.family.is_verified and not self.layer_inputs

    @property
    def key_heads(self) -> int:
        return max(1, self.key_value * self.heads // self.query)

    @property
    def inputs(self) -> int:
        """Input features of all matrices of a layer."""
        return 5 * self.hidden + self.query + self.feed_forward

    @property
    def outputs(self) -> int:
        """Output features of all matrices of a layer."""
        return self.query + 2 * self.key_value + 2 * self.hidden + 2 * self.feed_forward


def widths_of(get: _Getter, kind: LayerKind | None = None) -> Widths | None:
    """Return the dimensions of a model's layers; None if its config lacks the basic ones.

    `get`: reads config.json, as `BaseDescription.get` or a `config_getter`. `kind`: structure of
    the layers, if it was detected from built layers.
    """

    def find(*names: str) -> int:
        found = map(get, names)
        return next((int(number) for number in found if isinstance(number, (int, float))), 0)

    hidden, layers = find("hidden_size"), find("num_hidden_layers")
    heads = find("num_attention_heads")
    if not (hidden and layers and heads):
        return None
    head_dim = find("head_dim") or hidden // heads
    experts = find("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    names = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "ffn_hidden_size")
    # GPT-2's n_inner may be null, which means four times the hidden size.
    dense = find(*names, "n_inner") or 4 * hidden
    of_type = _kind_of_type(get)
    kind = kind or of_type
    shared = find("shared_expert_intermediate_size") or kind.shared_experts
    functions = (each for each in map(get, _ACTIVATIONS) if isinstance(each, str))
    function = next(functions, of_type.activation)
    model_type = get("model_type")
    if family_of(model_type).computes_all_experts:
        experts = find("num_local_experts")
    routed = experts * (find("moe_intermediate_size") or dense)
    shares_all = get("multi_query") and not get("new_decoder_architecture")
    query, latent = heads * head_dim, 0
    key_value = head_dim if shares_all else (find("num_key_value_heads") or heads) * head_dim
    if rotated := find("qk_rope_head_dim"):  # flash attention pads values to the keys' head size
        query = key_value = heads * (find("qk_nope_head_dim") + rotated)
        latent = 2 * (find("q_lora_rank") + find("kv_lora_rank")) + rotated
        latent += heads * find("v_head_dim")
    if get("is_encoder_decoder"):
        layers += find("num_decoder_layers", "decoder_layers")
    return Widths(
        layers=layers,
        hidden=hidden,
        query=query,
        key_value=key_value,
        feed_forward=routed + shared if experts else dense,
        heads=heads,
        vocabulary=find("vocab_size"),
        routed_copies=2 * experts,
        routed_features=routed,
        latent=latent,
        has_dropout=any(map(get, _DROPOUTS)),
        caps_scores=bool(find("attn_logit_softcapping")),
        layer_inputs=find("hidden_size_per_layer_input"),
        norms_heads=kind.norms_heads,
        widest_head=max(head_dim, find("global_head_dim")),
        model_type=model_type,
        kind=replace(kind, activation="" if kind.is_gated and not kind.has_gate else function),
    )


def config_getter(architecture: Any) -> _Getter:
    """Return a function that reads the language model's values of a transformers config.

    If each layer has its own value (Gemma 4), it returns their mean.
    """
    text = architecture.get_text_config()

    def get(name: str) -> Any:
        try:
            return getattr(text, name, None)
        except RuntimeError:  # raised by transformers for values that differ between layers
            numbers = [getattr(layer, name) for layer in text.per_layer_config]
            return sum(numbers) / len(numbers)

    return get


_SPLIT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"), BY_ROWS),
    **dict.fromkeys(("o_proj", "down_proj", "dense", "fc2"), BY_COLUMNS),
}
"""style in which tensor parallelism splits matrices, by the ends of their names, as in
transformers' plans"""
EXPERTS = ".experts."
"""part of the names of weights of routed experts"""
_SHARED_EXPERTS = re.compile(r"^(?!.*\bexperts\.\d).*\bgate_proj\.(base_layer\.)?weight$")
"""gate matrices of a layer with experts that do not belong to a single expert"""

_RECURRENT = ("linear_attn.", "mamba.", "conv.")
"""beginnings of the names of a layer's weights if it has a recurrence or a convolution instead of
attention"""


class Weight(NamedTuple):
    shape: tuple[int, ...]
    num_bytes: int
    """bytes per element"""
    requires_grad: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)


Weights = Mapping[str, Weight]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A base with its adapter, described by the shapes of its weights."""

    name: str
    layers: tuple[tuple[Weights, int], ...]
    """layers in their order: the weights by their names in the layer, and the number of such layers
    that follow each other"""
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
    has_head: bool = True
    """whether logits are computed: false for the layers of a pipeline's earlier stages, and with a
    head for classes or a reward"""

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def reached(self) -> float:
        """Share of the layers that have a backward pass."""
        return self.trained_layers / max(1, self.num_layers)

    def part(self, bounds: Sequence[tuple[int, int]]) -> PlannedModel:
        """Return the layers [first, stop) of `bounds`, with the ends before and behind them.

        The last stage has its own copy of an embedding that is tied to the head.
        """
        each = [weights for weights, count in self.layers for _ in range(count)]
        lowest = self.num_layers - self.trained_layers
        numbers = [number for first, stop in bounds for number in range(first, stop)]
        is_first, is_last = numbers[0] == 0, numbers[-1] == self.num_layers - 1
        return replace(
            self,
            layers=_count_kinds(each[number] for number in numbers),
            trained_layers=sum(number >= lowest for number in numbers),
            embedding=self.embedding if is_first else {},
            head=self.head or self.embedding if is_last else {},
            rest=self.rest if is_first else {},
            widths=replace(self.widths, layers=len(numbers)),
            has_head=is_last,
        )

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

    @property
    def recurrent_share(self) -> float:
        """Share of the layers that have a recurrence or a convolution instead of attention."""
        found = (times for weights, times in self.layers if any(map(_is_recurrent, weights)))
        return sum(found) / self.num_layers

    @property
    def recurrent_weights(self) -> float:
        """Number of elements of the matrices of recurrences that a token is multiplied with."""
        mixers = [
            ({n: w for n, w in each.items() if _is_recurrent(n)}, t) for each, t in self.layers
        ]
        only = replace(self, layers=tuple(mixers))
        return only.multiplied(trained=False) + only.multiplied(trained=True)

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
    def has_lora(self) -> bool:
        return any(self._layer_weights(".lora_A."))

    @property
    def adapts_experts(self) -> bool:
        return any(
            "experts." in name and ".lora_A." in name
            for weights, _ in self.layers
            for name in weights
        )

    @property
    def expert_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(
            times for weights, times in self.layers if any(EXPERTS in name for name in weights)
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
        return any(weight.requires_grad for weight in self.embedding.values())

    @property
    def head_weights(self) -> int:
        """Number of elements of the head's matrix, tied or not."""
        if not self.has_head:
            return 0
        return next(
            weight.numel()
            for weight in (self.head or self.embedding).values()
            if len(weight.shape) == 2
        )

    @property
    def trains_head(self) -> bool:
        return any(weight.requires_grad for weight in (self.head or self.embedding).values())


def _is_recurrent(name: str) -> bool:
    return name.startswith(_RECURRENT)


def _count(weights: Weights, trained: bool) -> int:
    return sum(each.numel() for each in weights.values() if each.requires_grad == trained)


def dtype_bytes(precision: str, *, trains: bool) -> int:
    """Return the bytes per element of a weight: trainable weights are fp32 under autocast."""
    if precision == "bf16-pure":
        return 2
    return 4 if trains or precision == "fp32" else 2


def build_planned_model(
    config: ModelConfig, config_json: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel:
    """Return the model that a run would build; UserError if the adapter does not match it."""
    planned = model_from_config_json(
        config.path or "model.architecture", config_json, adapter, precision
    ) or model_from_meta(replace(config, labels=[]), config_json, adapter, precision)
    if not config.labels:
        return planned
    shape = (len(config.labels), planned.widths.hidden)
    trained = Weight(shape, dtype_bytes(precision, trains=True), True)
    head = {f"{HEAD}.weight": trained}
    if not isinstance(adapter, FullConfig):  # modules_to_save: a copy beside the head
        frozen = Weight(shape, dtype_bytes(precision, trains=False), False)
        head = {f"{HEAD}.weight": frozen, f"{HEAD}.modules_to_save.weight": trained}
    return replace(planned, head=head, has_head=False)


def model_from_config_json(
    name: str, config_json: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel | None:
    """Return the model from its config.json alone; None if the model family needs torch.

    Biases and norms are left out: less than 0.1 % of the weights.
    """
    base = describe_config(name, config_json)
    widths = widths_of(base.get)
    if base.linear is None or not base.layers or not base.embeddings or widths is None:
        return None
    if base.head is None or base.experts:
        return None
    found = find_targets(adapter, base)
    if found.problems:
        raise UserError(found.problems)
    weights_of = _weights_function(adapter, found, precision)
    layers: dict[str, dict[str, Weight]] = {layer: {} for layer in base.layers}
    rest: dict[str, Weight] = {}
    head: dict[str, Weight] = {}
    for module, shape in base.linear.items():
        layer = _layer_of(module, layers)
        if layer is not None:
            local = module[len(layer) + 1 :]
            layers[layer] |= weights_of(module, shape, local)
        elif module == base.head:
            head = {} if base.is_tied else weights_of(module, shape, module)
        else:
            rest |= weights_of(module, shape, module)
    for table, shape in base.tables.items():  # of learned positions
        if _layer_of(table, layers) is None and not INPUT_EMBEDDING.search(table):
            rest |= weights_of(table, shape, table)
    embedding = base.embeddings[0]
    return PlannedModel(
        name=name,
        layers=_count_kinds(layers.values()),
        trained_layers=_count_trained(layers.values()),
        embedding=weights_of(embedding, base.tables[embedding], embedding),
        head=head,
        rest=rest,
        widths=widths,
        plan=_split_plan(next(iter(layers.values()))),
        is_pair=base.is_pair,
    )


def _weights_function(
    adapter: AdapterConfig, found: Targets, precision: str
) -> Callable[[str, tuple[int, ...], str], dict[str, Weight]]:
    """Return a function from a module's name, shape and name in its layer to its weights.

    The weights include those of the module's adapter, by their names in the layer.
    """
    is_full = isinstance(adapter, FullConfig)
    frozen, trained = (dtype_bytes(precision, trains=flag) for flag in (is_full, True))
    ranks = _ranks(adapter, found.matrices)
    full_modules = tuple(f"{name}." for name in found.full_modules)
    matrices, vector_inputs = set(found.matrices), set(found.scaled_inputs)

    def weights_of(module: str, shape: tuple[int, ...], local: str) -> dict[str, Weight]:
        is_whole = is_full or f"{module}.".startswith(full_modules)
        if is_whole and isinstance(adapter, FreezeConfig):
            return {f"{local}.weight": Weight(shape, trained, True)}
        weights = {f"{local}.weight": Weight(shape, frozen, is_full)}
        if is_whole and not is_full:  # modules_to_save: a trainable copy next to the base's weight
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


def _count_kinds(layers: Iterable[Weights]) -> tuple[tuple[Weights, int], ...]:
    """Return the layers in their order, and how many of each follow each other."""
    return tuple((weights, sum(1 for _ in same)) for weights, same in groupby(layers))


def _count_trained(layers: Collection[Weights]) -> int:
    trains = (any(weight.requires_grad for weight in weights.values()) for weights in layers)
    return len(layers) - next((number for number, flag in enumerate(trains) if flag), len(layers))


def _split_plan(layer: Weights) -> dict[str, str]:
    paths = {name.removesuffix(".weight") for name in layer if ".lora_" not in name}
    ends = {path: path.rpartition(".")[2] for path in paths}
    return {path: _SPLIT[end] for path, end in ends.items() if end in _SPLIT}


def _ranks(adapter: AdapterConfig, matrices: list[str]) -> dict[str, int]:
    if not isinstance(adapter, LoraConfig):
        return {}
    ranks = dict.fromkeys(matrices, adapter.r)
    for pattern, rank in reversed(adapter.rank_pattern.items()):  # the first match wins, as in peft
        ranks |= dict.fromkeys(by_key(pattern, matrices), rank)
    return ranks


def model_from_meta(
    config: ModelConfig, config_json: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel:
    """Return the model by building its modules on the meta device."""
    from app.model.build import build_model
    from app.model.recompute import RecomputeConfig

    model = build_model(
        replace(config, path=None, from_scratch=True, architecture=dict(config_json)),
        QuantizationConfig(),
        "eager",  # supported by every model
        adapter,
        RecomputeConfig(),
        precision,
        on_meta=True,
    )
    planned = model_from_modules(config.path or "model.architecture", model, config_json)
    if planned is None:
        raise UserError(
            f"{config.path}: its config.json does not give the sizes of its layers; a plan reads "
            "hidden_size, num_hidden_layers and num_attention_heads"
        )
    return planned


def model_from_modules(
    name: str, model: Any, config_json: Mapping[str, Any]
) -> PlannedModel | None:
    """Return the planned model of a model on the meta device, which must not be quantized.

    None if its config does not give the sizes of its layers.
    """
    from app.model.layers import decoder_layers
    from app.strategy.settings import layer_plan

    get = config_getter(model.config)
    if widths_of(get) is None:
        return None
    names = decoder_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(weight) for end in (embedding, head) for weight in end.parameters()}

    def weights_of(named: Any) -> Weights:
        return {
            name: Weight(tuple(weight.shape), weight.element_size(), weight.requires_grad)
            for name, weight in named
        }

    layers = [weights_of(model.get_submodule(name).named_parameters()) for name in names]
    kinds = _count_kinds(layers)
    most = max(range(len(layers)), key=lambda number: layers.count(layers[number]))
    shared = sum(w.shape[0] for name, w in layers[most].items() if _SHARED_EXPERTS.search(name))
    if not any("experts." in name for name in layers[most]):
        shared = 0
    widths = widths_of(get, kind_of_layer(model.get_submodule(names[most]), shared))
    assert widths is not None
    inside = tuple(f"{name}." for name in names)
    is_tied = {id(w) for w in embedding.parameters()} == {id(w) for w in head.parameters()}
    # transformers ties every T5; FLAN-T5's files have a separate head, which is untied on loading.
    is_tied = is_tied and config_json.get("tie_word_embeddings") is not False
    try:
        plan: Mapping[str, str] = layer_plan(model)
    except UserError:  # the model cannot be split, which the couplings report
        plan = {}
    return PlannedModel(
        name=name,
        layers=kinds,
        trained_layers=_count_trained(layers),
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
