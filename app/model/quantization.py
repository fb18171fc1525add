"""How a frozen base is kept in four or eight bits: what of the model's rooms knows bitsandbytes.

Embeddings and the head stay in the weights' own dtype, tied or not, and so does what transformers
leaves out for an architecture (T5's `wo`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    import transformers
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

METHODS = ("none", "nf4", "int8")


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    method: str = "none"
    """none, nf4 (QLoRA, 4 bits a weight, arXiv 2305.14314) or int8 (LLM.int8(), 2208.07339; keeps
    each layer's input for the backward also under recompute)"""
    double_quant: bool = True
    """nf4: quantize the scales as well (0.4 bits a weight less)"""


def quantization_settings(
    config: QuantizationConfig, dtype: torch.dtype
) -> transformers.BitsAndBytesConfig | None:
    """Return what the loader is told; `dtype` is that of the weights that stay as they are."""
    import transformers

    if config.method == "none":
        return None
    if config.method == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Stored in the type of the other weights, so that a strategy can shard both in one tensor.
        bnb_4bit_quant_storage=dtype,
    )


def stored_settings(architecture: transformers.PretrainedConfig) -> Mapping[str, Any] | None:
    """Return what config.json says of how the files are quantized; None where they are not."""
    stored: Mapping[str, Any] | None = architecture.to_dict().get("quantization_config")
    return stored


def stored_method(stored: Mapping[str, Any]) -> str:
    """Name a config.json's `quantization_config`: nf4, fp4, int8, or another tool's, as gptq."""
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    return "int8" if stored.get("load_in_8bit") else str(stored.get("quant_method"))


def find_stored_problem(
    stored: Mapping[str, Any],
    config: QuantizationConfig,
    path: str | None,
    *,
    trains_base: bool = False,
) -> str | None:
    """Say why weights that `path` holds quantized already cannot be taken; None where they can.

    `trains_base`: whether some of them are to be trained, rather than an adapter beside them.
    """
    method = stored_method(stored)
    if method not in ("nf4", "fp4", "int8"):
        return (
            f"model.path={path}: its weights are quantized by {method} (config.json), which is not "
            "trained on here; type model.path=THE_UNQUANTIZED_BASE quantization=nf4"
        )
    if config.method not in ("none", method):
        return (
            f"quantization={config.method}, but model.path={path} holds its weights in {method} "
            "already (config.json); type quantization=none to take them as they are, or the "
            "unquantized base"
        )
    if trains_base:
        return (
            f"model.path={path} holds its weights in {method} (config.json), where they cannot be "
            "trained; type adapter=lora, or the unquantized base"
        )
    return None


@contextlib.contextmanager
def quantizable_layers(model_type: str) -> Iterator[None]:
    """Have Falcon made of torch's linear layers while it is loaded; its own compute the same.

    transformers quantizes `nn.Linear` alone and no class derived from it (5.23), so it would leave
    every layer of Falcon as it is.
    """
    if model_type != "falcon":
        yield
        return
    import torch
    from transformers.models.falcon import modeling_falcon

    own = modeling_falcon.FalconLinear
    modeling_falcon.FalconLinear = torch.nn.Linear
    try:
        yield
    finally:
        modeling_falcon.FalconLinear = own


def prepare_quantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Freeze a quantized base and make it fit to be trained on, computing in `dtype`.

    ValueError where the loader found nothing to quantize, a warning where it was little.
    """
    import bitsandbytes

    _check_share(model)
    # Of what peft.prepare_model_for_kbit_training does, freezing alone. Norms and head in fp32
    # would double the head and could not be sharded with the rest; norms compute in fp32 anyway.
    # Inputs that require a gradient would make the backward go through the whole depth, below the
    # lowest adapter; only reentrant checkpointing needs them.
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # Files that are quantized already name a dtype of their own.
            module.compute_dtype = dtype
            if module.weight.quant_state is not None:  # else it is on `meta`
                module.weight.quant_state.dtype = dtype
            # After a forward in eval mode the weights would be repacked for inference on the CPU,
            # and every gradient after that would be lost without a word (bitsandbytes 0.50).
            module.support_avx512bf16_for_cpu = False
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.register_forward_pre_hook(_keep_scales)


def quantize_on_meta(
    model: PreTrainedModel, config: QuantizationConfig, dtype: torch.dtype
) -> None:
    """Give a model on `meta` the layers that the loader would have made of it."""
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization_settings(config, dtype))
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)


def take_states(module: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """Return how each 4-bit weight in `module` is kept, by name, for `give_states`; {} on `meta`.

    The weights become plain parameters of packed numbers, which a strategy can share out; a layer
    finds their scales in itself then, on `device`.
    """
    import torch

    states = {}
    for name, layer in _layers_of_4_bits(module):
        weight = layer.weight
        if weight.quant_state is None:
            continue
        layer.quant_state = weight.quant_state
        layer.weight = torch.nn.Parameter(weight.data, requires_grad=False)
        packed = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in layer.quant_state.as_dict(packed=True).items()
        }
        states[name] = tuple(layer.weight.shape), layer.weight.dtype, packed
        layer.quant_state.to(device)
    return states


def give_states(module: torch.nn.Module, states: Mapping[str, Any], device: torch.device) -> None:
    """Let the layers in `module` keep their 4-bit weights, still on `meta`, as `states` says."""
    import torch
    from bitsandbytes.functional import QuantState

    for name, (shape, dtype, packed) in states.items():
        layer = module.get_submodule(name)
        empty = torch.empty(shape, dtype=dtype, device="meta")
        layer.weight = torch.nn.Parameter(empty, requires_grad=False)
        layer.quant_state = QuantState.from_dict(dict(packed), device=device)
        layer.quant_state.dtype = layer.compute_dtype


def _layers_of_4_bits(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose weights are of four bits, with their names in `module`."""
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if weight is not None and type(weight).__name__ == "Params4bit":
            yield name, layer


def _check_share(model: PreTrainedModel) -> None:
    """Compare what is quantized with all matrices, embedding and head aside."""
    from bitsandbytes.nn import Int8Params, Params4bit

    aside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    quantized = matrices = 0
    for parameter in model.parameters():
        if parameter.ndim >= 2 and id(parameter) not in aside:
            num_weights = storage_of(parameter).num_weights
            matrices += num_weights
            quantized += num_weights * isinstance(parameter, (Int8Params, Params4bit))
    kind = model.config.model_type
    if not quantized:
        raise UserError(f"no layer of a {kind} model can be quantized; type quantization=none")
    if quantized < matrices / 2:
        log.warning(
            "quantization: %.0f %% of the weights alone (the loader reaches no others of a %s "
            "model, as experts that are one tensor); expect to need memory for the rest",
            100 * quantized / matrices,
            kind,
        )


def _keep_scales(module: Any, _: Any) -> None:
    """Keep an int8 layer's scales after peft's DoRA has read its weight on the CPU (peft 0.21).

    It moves the weight to where it is; the copy looks new, has no scales, and the layer would take
    those for its own.
    """
    if module.weight.SCB is None:
        module.weight.CB = None


@contextlib.contextmanager
def tokens_quantized_alone(model: Any) -> Iterator[None]:
    """Round each token's activations by themselves while a probe compares tokens of one batch.

    LLM.int8() takes columns with outliers apart for all tokens of a batch at once: by its rounding,
    though by nothing else, a token depends on what it shares a batch with.
    """
    layers = []
    if stored_settings(model.config):
        from bitsandbytes.nn import Linear8bitLt

        layers = [module for module in model.modules() if isinstance(module, Linear8bitLt)]
    thresholds = [layer.state.threshold for layer in layers]
    for layer in layers:
        layer.state.threshold = 0.0
    try:
        yield
    finally:
        for layer, threshold in zip(layers, thresholds, strict=True):
            layer.state.threshold = threshold


def cast_unquantized(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give `dtype` to all weights that are not quantized.

    transformers ignores the dtype that it is asked for where the files are quantized already.
    """
    from bitsandbytes.nn import Int8Params, Params4bit

    for parameter in model.parameters():
        if not isinstance(parameter, (Int8Params, Params4bit)):
            parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a parameter is kept."""

    num_weights: int
    dtype: str
    """a torch dtype's name, or nf4, fp4, int8"""
    num_bytes: int
    """with the scales of quantized weights"""


def storage_of(parameter: torch.nn.Parameter) -> Storage:
    """Say how a parameter is kept; one of four bits packs several weights in an element."""
    import torch

    num_bytes = parameter.numel() * parameter.element_size()
    dtype = str(parameter.dtype).removeprefix("torch.")
    if type(parameter) is torch.nn.Parameter:
        return Storage(parameter.numel(), dtype, num_bytes)
    import bitsandbytes

    if isinstance(parameter, bitsandbytes.nn.Params4bit):
        state = parameter.quant_state
        if state is None:  # on `meta`, where it is not packed
            return Storage(parameter.numel(), parameter.quant_type, parameter.numel() // 2)
        scales = [state.absmax, state.state2.absmax] if state.nested else [state.absmax]
        num_bytes += sum(scale.numel() * scale.element_size() for scale in scales)
        return Storage(math.prod(state.shape), state.quant_type, num_bytes)
    if isinstance(parameter, bitsandbytes.nn.Int8Params):
        num_bytes += 4 * parameter.shape[0]  # an fp32 scale a row
    return Storage(parameter.numel(), dtype, num_bytes)
