"""Build the model of a plan: a base with its adapter, without reading weights.

From config.json alone if the matrices of the model family are known without torch; else from the
model on the meta device, which takes seconds to import.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from app.model.patterns import by_key
from app.model.quantization import QuantizationConfig
from app.planning.layer_kind import kind_of_layer, widths_of
from app.planning.planned_model import PlannedModel, Weight, Weights, dtype_bytes
from app.preflight.shapes import modules_of_architecture
from app.strategy.tensor_plan import BY_COLUMNS, BY_ROWS
from common.errors import UserError

OLDER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "encoder_layers"),
    "num_attention_heads": ("n_head", "num_heads", "encoder_attention_heads"),
    "head_dim": ("d_kv",),
}
"""names of the same keys in older config.json files"""
DEFAULT_VALUES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
    "bart": {"dropout": 0.1},
    "falcon": {"multi_query": True},
}
"""default values of keys that a plan reads and that config.json may omit, by model type"""
PAIRS = ("t5", "bart")
"""encoder-decoder model types"""
LEARNED_POSITIONS = {"gpt2": (1, "n_positions", 0), "bart": (2, "max_position_embeddings", 2)}
"""model type -> number of learned position tables, the key of their length, and additional rows"""
TIED = ("gemma", "gemma2", "gemma3_text", "gpt2", "bloom", "falcon", "t5", "bart")
"""model types whose head is tied to the embedding unless config.json says otherwise"""
SPLIT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"), BY_ROWS),
    **dict.fromkeys(("o_proj", "down_proj", "dense", "fc2"), BY_COLUMNS),
}
"""style in which tensor parallelism splits matrices, by the ends of their names, as in
transformers' plans"""
SHARED_EXPERTS = re.compile(r"^(?!.*\bexperts\.\d).*\bgate_proj\.(base_layer\.)?weight$")
"""gate matrices of a layer with experts that do not belong to a single expert"""


class _ConfigJson:
    """A config.json with the attributes of a transformers config that `widths_of` reads."""

    def __init__(self, config_json: Mapping[str, Any]) -> None:
        self._values = {**DEFAULT_VALUES.get(str(config_json.get("model_type")), {}), **config_json}
        self.is_encoder_decoder = config_json.get("model_type") in PAIRS

    def get_text_config(self) -> _ConfigJson:
        return self

    def __getattr__(self, name: str) -> Any:
        for key in (name, *OLDER_NAMES.get(name, ())):
            if key in self._values:
                return self._values[key]
        raise AttributeError(name)


def build_planned_model(
    config: ModelConfig, config_json: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel:
    """Return the model that a run would build; UserError if the adapter does not match it."""
    planned = model_from_config_json(
        config.path or "model.architecture", config_json, adapter, precision
    )
    return planned or model_from_meta(config, config_json, adapter, precision)


def model_from_config_json(
    name: str, config_json: Mapping[str, Any], adapter: AdapterConfig, precision: str
) -> PlannedModel | None:
    """Return the model from its config.json alone; None if the model family needs torch.

    Biases and norms are left out: less than 0.1 % of the weights.
    """
    base = modules_of_architecture(name, config_json)
    widths = widths_of(_ConfigJson(config_json))
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
    is_tied = bool(config_json.get("tie_word_embeddings", config_json.get("model_type") in TIED))
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
    if (positions := LEARNED_POSITIONS.get(str(config_json.get("model_type")))) is not None:
        num_tables, length_key, additional = positions
        rows = num_tables * (config_json[length_key] + additional)
        is_full = isinstance(adapter, FullConfig)
        num_bytes = dtype_bytes(precision, trains=is_full)
        rest["positions.weight"] = Weight((rows, widths.hidden), num_bytes, is_full)
    embedding = base.embeddings[0]
    embedding_shape = (widths.vocabulary, widths.hidden)
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
        embedding=weights_of(embedding, embedding_shape, embedding),
        head=head,
        rest=rest,
        widths=widths,
        plan=_split_plan(next(iter(layers.values()))),
        is_pair=config_json.get("model_type") in PAIRS,
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
    # transformers ties every T5; FLAN-T5's files have a separate head, which is untied on loading.
    is_tied = is_tied and config_json.get("tie_word_embeddings") is not False
    try:
        plan: Mapping[str, str] = layer_plan(model)
    except UserError:  # the model cannot be split, which the couplings report
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
