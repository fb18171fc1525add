"""Rotary embeddings whose factors depend on the number of tokens: one choice for a whole run.

transformers chooses the factors of longrope (short or long ones) and of dynamic NTK by the largest
position of a batch: a document's logits would depend on its neighbours, and factors would change in
the middle of an answer. Like servers, we choose once, by the longest sequence to expect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from app.model.config_values import SCALED
from common.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from app.model.base import ModelConfig

_TYPES = ("longrope", "dynamic")
"""rope types whose factors depend on the number of tokens"""
SCALINGS: dict[str, dict[str, float]] = {
    "yarn": {},
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {},
}
"""rope types for sequences beyond the base's context -> their parameters besides the factor: YaRN
(arXiv 2309.00071), position interpolation (2306.15595), that of Llama 3.1, and NTK, whose theta is
that of the longest sequence"""
DEFAULT_SCALING = "yarn"
_SCALES = ("short_mscale", "long_mscale")
"""scales of PhiMoE, which its layers choose by the number of tokens, too"""


def extend_context(architecture: PretrainedConfig, context_len: int, scaling: str) -> None:
    """Give a base's config a longer context by scaling its rope; transformers computes the factors.

    Of layers that differ, only those of full attention are scaled. UserError if the base has no
    rope, one that is scaled already, or that context anyway.
    """
    config = architecture.get_text_config()
    original = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    what, kind = f"model.context_len={context_len}", parameters.get("rope_type")
    if architecture.is_encoder_decoder or kind is None or original is None:
        raise UserError(
            f"{what}: {architecture.model_type} models have no rotary embedding that can be "
            "scaled; leave it out, or take another base"
        )
    if context_len <= original:
        raise UserError(
            f"{what}: the base has a context of {original} tokens; leave it out, or type more"
        )
    if kind != "default":
        raise UserError(scaled_error(context_len, kind, parameters, original))
    parameters |= {"rope_type": scaling, "factor": context_len / original, **SCALINGS[scaling]}
    if scaling == "dynamic":
        return  # transformers and vLLM read the base's own context there, and multiply
    parameters["original_max_position_embeddings"] = original
    config.max_position_embeddings = context_len


def scaled_error(context_len: int, kind: str, rope: Mapping[str, Any], original: int) -> str:
    """Return why a base whose rope has a type other than `default` is not scaled again."""
    return (
        f"model.context_len={context_len}: the base's rope is scaled already ({kind}, factor "
        f"{rope.get('factor', 'by feature')}, to {original} tokens); leave it out, or take a base "
        "without rope scaling"
    )


def rope_scaling(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return type and parameters of a config.json's rope, `default` if it is not scaled."""
    for name in SCALED:
        rope = config.get(name)
        if isinstance(rope, dict):
            rope = rope.get("full_attention") or rope
            kind = rope.get("rope_type", rope.get("type"))
            if kind not in (None, "default", "mrope"):  # positions by axis scale nothing
                return str(kind), rope
    return "default", {}


def dynamic_factor(config: Mapping[str, Any]) -> float:
    """Return by how much dynamic NTK extends `max_position_embeddings`; 1 for other ropes."""
    kind, rope = rope_scaling(config)
    factor = rope.get("factor") if kind == "dynamic" else None
    return factor if isinstance(factor, (int, float)) else 1.0


def fix_rope_factors(model: PreTrainedModel, num_tokens: int | None) -> None:
    """Choose the factors of all later passes for `num_tokens`; None for the model's context."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        types = vars(module).get("rope_type")
        if types is None:
            continue
        _fix_scale(module, num_tokens)
        for layer, rope_type in types.items() if isinstance(types, dict) else [("", types)]:
            if rope_type not in _TYPES:
                continue
            name, options = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
            inverse = getattr(module, f"{name}inv_freq")
            if rope_type == "longrope":
                _check_num_factors(module.config, layer, inverse.numel())
            factors, scale = ROPE_INIT_FUNCTIONS[rope_type](
                module.config,
                inverse.device,
                seq_len=_num_tokens(module.config, num_tokens),
                **options,
            )
            setattr(module, f"{name}inv_freq", factors.to(inverse))
            setattr(module, f"{name}attention_scaling", scale)
            # transformers does not choose again for this type.
            module.rope_type = types | {layer: "default"} if layer else "default"
            types = module.rope_type


def _check_num_factors(config: Any, layer: str, expected: int) -> None:
    # transformers only warns, and a single factor would apply to all.
    parameters = config.rope_parameters[layer] if layer else config.rope_parameters
    for key in ("short_factor", "long_factor"):
        if len(parameters[key]) != expected:
            raise UserError(
                f"{config.name_or_path or 'model.architecture'}: config.json: rope_parameters."
                f"{key} has {len(parameters[key])} numbers; expected {expected}, one for each pair "
                "of features; download config.json again"
            )


def _fix_scale(module: Any, num_tokens: int | None) -> None:
    parameters = getattr(module.config, "rope_parameters", None) or {}
    if _SCALES[0] in parameters:
        original = parameters["original_max_position_embeddings"]
        is_long = _num_tokens(module.config, num_tokens) > original
        module.config = copy.deepcopy(module.config)
        module.config.rope_parameters |= dict.fromkeys(_SCALES, parameters[_SCALES[is_long]])


def describe_context(model: ModelConfig, architecture: PretrainedConfig) -> str | None:
    """Return how `model.context_len` extends the context; None without."""
    if model.context_len is None:
        return None
    config = architecture.get_text_config()
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == (model.rope_scaling or DEFAULT_SCALING):
            own = config.max_position_embeddings
            return (
                f"context: {parameters.get('original_max_position_embeddings', own):,} -> "
                f"{model.context_len:,} tokens ({parameters['rope_type']}, factor "
                f"{parameters['factor']:g})"
            )
    return None


def describe_rope_factors(architecture: PretrainedConfig, num_tokens: int | None) -> str | None:
    """Return which factors of longrope all documents get; None for other models."""
    config = architecture.get_text_config()
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") == "longrope":
            tokens = _num_tokens(config, num_tokens)
            original = parameters["original_max_position_embeddings"]
            kind = "long" if tokens > original else "short"
            return (
                f"rope: {kind} factors for all documents: sequences have up to {tokens:,} tokens, "
                f"and the original context has {original:,} (model.rope_len)"
            )
    return None


def _num_tokens(config: Any, num_tokens: int | None) -> int:
    context = round(config.max_position_embeddings * dynamic_factor(vars(config)))
    return min(num_tokens or context, context)


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (part for part in parameters.values() if isinstance(part, dict))
