"""Quantize a frozen base: to four or eight bits by bitsandbytes, or to FP8.

Embeddings and head are never quantized, nor are the layers that transformers excludes for an
architecture (`wo` of T5).
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.model.layers import find_bypassed_linears, replaced
from common.errors import UserError
from common.facts import setting
from common.text import percent

if TYPE_CHECKING:
    import torch
    import transformers
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


_SCALES = "absmax"
"""name of a 4-bit layer's parameter for the scales of its blocks, if a strategy shards them"""


_QUANTIZED_LAYERS = ("Linear4bit", "Linear8bitLt", "Fp8Linear")
"""class names of quantized layers"""
_MAX_UNQUANTIZED = 0.1
"""largest share of unquantized weights in a mixture of experts; a base with more is refused, since
it would need far more memory than the requested quantization"""


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    method: str = setting("none", choices=("none", "nf4", "int8", "fp8"))
    """none, nf4 (QLoRA, 4 bits a weight, arXiv 2305.14314), int8 (LLM.int8(), 2208.07339; keeps
    each layer's input for the backward also under recompute) or fp8 (e4m3, whose products are
    computed in FP8 too: for GPUs of compute capability 8.9 or newer; of ten decoder layers or more,
    the last one stays as it is)"""
    double_quant: bool = True
    """nf4: quantize the scales as well (0.4 bits a weight less)"""


def quantization_settings(
    config: QuantizationConfig, dtype: torch.dtype, model_type: str | None = None
) -> transformers.BitsAndBytesConfig | None:
    """Return the `quantization_config` for `from_pretrained`; None if it is not bitsandbytes'.

    `dtype`: of the weights that are not quantized. `model_type`: linear modules whose weight its
    layers read without calling the module are not quantized.
    """
    import transformers

    if config.method in ("none", "fp8"):
        return None
    bypassed = find_bypassed_linears(model_type)
    # A list replaces transformers' default, which contains the head.
    skipped = [*bypassed, "lm_head"] if bypassed else None
    if config.method == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=skipped,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Stored in the dtype of the other weights, so that a strategy can shard both in one tensor.
        bnb_4bit_quant_storage=dtype,
    )


def stored_quantization(architecture: transformers.PretrainedConfig) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of config.json; None if the files are not quantized."""
    stored: Mapping[str, Any] | None = architecture.to_dict().get("quantization_config")
    return stored


def stored_method(stored: Mapping[str, Any]) -> str:
    """Return the method of a `quantization_config`: nf4, fp4, int8, or another, such as gptq."""
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    return "int8" if stored.get("load_in_8bit") else str(stored.get("quant_method"))


def find_quantization_conflict(
    stored: Mapping[str, Any],
    config: QuantizationConfig,
    path: str | None,
    *,
    trains_base: bool = False,
) -> str | None:
    """Return why weights that are stored quantized cannot be used; None if they can.

    `trains_base`: whether base weights are trained, instead of an adapter.
    """
    method = stored_method(stored)
    if method not in ("nf4", "fp4", "int8"):
        return (
            f"model.path={path}: its weights are quantized by {method} (config.json), which is not "
            "supported in training; type model.path=THE_UNQUANTIZED_BASE quantization=nf4"
        )
    if config.method not in ("none", method):
        return (
            f"quantization={config.method}, but the weights of model.path={path} are stored in "
            f"{method} already (config.json); type quantization=none to use them as they are, or "
            "model.path=THE_UNQUANTIZED_BASE"
        )
    if trains_base:
        return (
            f"the weights of model.path={path} are stored in {method} (config.json), which cannot "
            "be trained; type adapter=lora, or model.path=THE_UNQUANTIZED_BASE"
        )
    return None


def quantizable_layers(model_type: str) -> AbstractContextManager[None]:
    """Build Falcon from torch's linear layers while it is loaded.

    transformers (5.23) quantizes `nn.Linear` but no derived class, so that every layer of Falcon
    would stay unquantized. `FalconLinear` computes the same as `nn.Linear`.
    """
    if model_type != "falcon":
        return nullcontext()
    import torch
    from transformers.models.falcon import modeling_falcon

    return replaced([(modeling_falcon, "FalconLinear", torch.nn.Linear)])


def quantize_on_device(device: torch.device | None) -> AbstractContextManager[None]:
    """Quantize weights that are read to host memory on `device`, and copy the 4-bit result back.

    Quantizing 70B parameters on a CPU would take over an hour. Patches a public function of
    bitsandbytes, which has no option for this.
    """
    if device is None or device.type == "cpu":
        return nullcontext()
    from bitsandbytes import functional

    own = functional.quantize_4bit

    def quantize(weight: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        packed, state = own(weight.to(device), *args, **kwargs)
        state.to(weight.device)
        return packed.to(weight.device), state

    return replaced([(functional, "quantize_4bit", quantize)])


def prepare_quantized(
    model: PreTrainedModel,
    config: QuantizationConfig,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Freeze a quantized base and prepare it for training, computing in `dtype`.

    To FP8 it is quantized here, on `device`. UserError if nothing was quantized, or the
    experts of a mixture were not.
    """
    if config.method == "fp8":
        from app.model.fp8 import quantize_to_fp8

        quantize_to_fp8(model, dtype, device)
        return
    import bitsandbytes

    _check_share(model)
    # Of peft.prepare_model_for_kbit_training, only the freezing. Its fp32 norms and head would
    # double the head's memory and could not be sharded with the other weights; norms compute in
    # fp32 anyway. Its inputs that require gradients, needed only by reentrant checkpointing, would
    # extend the backward pass below the lowest adapter.
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # Weights that were stored quantized have the compute dtype of their files.
            module.compute_dtype = dtype
            if module.weight.quant_state is not None:  # None on the meta device
                module.weight.quant_state.dtype = dtype
            # A forward in eval mode on the CPU would repack the weights for inference, after which
            # gradients are silently lost (bitsandbytes 0.50).
            module.support_avx512bf16_for_cpu = False
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.register_forward_pre_hook(_discard_weight_without_scales)


def quantize_experts(
    model: PreTrainedModel, config: QuantizationConfig, device: torch.device | None = None
) -> None:
    """Quantize the fused experts of a mixture to nf4, which transformers' loader does not.

    In blocks of 64 weights, like linear layers; each weight is quantized on `device` and copied
    back to its own device.
    """
    if config.method != "nf4":
        return
    from bitsandbytes.nn import Params4bit

    from app.model.experts import pack_experts

    def pack(weight: torch.nn.Parameter) -> torch.nn.Parameter:
        packed = Params4bit(
            weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=config.double_quant,
            quant_storage=weight.dtype,
        )
        if weight.device.type == "meta":
            return packed
        return packed.to(device or weight.device).to(weight.device)

    pack_experts(model, pack, stored_4bit)


def quantize_on_meta(
    model: PreTrainedModel, config: QuantizationConfig, dtype: torch.dtype
) -> None:
    """Replace the layers of a model on `meta` as the loader of weights would."""
    if config.method == "fp8":
        prepare_quantized(model, config, dtype)
        return
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(
        quantization_settings(config, dtype, model.config.model_type)
    )
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    quantize_experts(model, config)


def quantized_layers(
    model: PreTrainedModel, config: QuantizationConfig, dtype: torch.dtype
) -> dict[str, bool]:
    """Return the names of the weights that loading this model, here on `meta`, would quantize.

    The value is True for weights that are quantized transposed: GPT-2 stores matrices as [in, out].
    """
    from app.model.experts import packed_shapes

    with quantizable_layers(model.config.model_type):
        quantized = copy.deepcopy(model)
        quantize_on_meta(quantized, config, dtype)
    experts = {
        f"{name}.{weight}": False
        for name, module in quantized.named_modules()
        for weight in packed_shapes(module)
    }
    return experts | {
        f"{name}.weight": type(model.get_submodule(name)).__name__ == "Conv1D"
        for name, module in quantized.named_modules()
        if module.__class__.__name__ in _QUANTIZED_LAYERS
    }


def quantize_dequantize(
    weight: torch.Tensor, config: QuantizationConfig, *, is_transposed: bool = False
) -> torch.Tensor:
    """Return a weight, [out, in] or of experts, rounded to its quantized values; same dtype."""
    import torch

    if is_transposed:
        return quantize_dequantize(weight.T.contiguous(), config).T.contiguous()
    if config.method == "fp8":
        from app.model import fp8

        return fp8.dequantize(fp8.quantize_weight(weight), weight.dtype)
    from bitsandbytes import functional

    if config.method == "int8":
        packed, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return (packed * (scales.unsqueeze(1) / 127)).to(weight.dtype)
    options = {"compress_statistics": config.double_quant, "quant_type": config.method}
    return functional.dequantize_4bit(*functional.quantize_4bit(weight, **options))


def stored_4bit(layer: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a 4-bit layer's packed weight, and a function from it to the matrix [out, in]."""
    from bitsandbytes.functional import dequantize_4bit

    # If a strategy shards the packed values, the quantization state is in the layer instead.
    weight = layer.weight
    state = vars(weight).get("quant_state") or layer.quant_state
    return weight, lambda packed: dequantize_4bit(packed.view(-1, 1), state)


def detach_quant_states(module: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """Turn 4-bit weights in `module` into plain parameters; return their quantization states.

    Packed values and their scales become parameters that a strategy can shard; the nested scales,
    one per 16,384 weights, stay in the layer on `device` (see `bind_scales`). The states, by layer
    name, are passed to `attach_quant_states` on other ranks; weights on `meta` have none.
    """
    import torch

    states = {}
    for name, layer in module.named_modules():
        weight: Any = layer._parameters.get("weight")
        if type(weight).__name__ != "Params4bit" or weight.quant_state is None:
            continue
        layer.quant_state = weight.quant_state
        layer.weight = torch.nn.Parameter(weight.data, requires_grad=False)
        scales = layer.quant_state.absmax
        layer.register_parameter(_SCALES, torch.nn.Parameter(scales, requires_grad=False))
        layer.quant_state.absmax = scales.new_empty(0)
        packed = {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in layer.quant_state.as_dict(packed=True).items()
        }
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in (layer.weight, scales)]
        states[name] = shapes, packed
        layer.quant_state.to(device)
    return states


def attach_quant_states(
    module: torch.nn.Module, states: Mapping[str, Any], device: torch.device
) -> None:
    """Give the layers in `module` 4-bit weights on `meta` with the given quantization states."""
    import torch
    from bitsandbytes.functional import QuantState

    for name, (shapes, packed) in states.items():
        layer = module.get_submodule(name)
        for parameter, (shape, dtype) in zip(("weight", _SCALES), shapes, strict=True):
            empty = torch.empty(shape, dtype=dtype, device="meta")
            layer.register_parameter(parameter, torch.nn.Parameter(empty, requires_grad=False))
        layer.quant_state = QuantState.from_dict(dict(packed), device=device)
        layer.quant_state.dtype = layer.compute_dtype


def bind_scales(module: torch.nn.Module) -> None:
    """Make the 4-bit layers in `module` use the scales that its forward has gathered.

    Call it after `module` was sharded. The backward pass gathers them into the same memory.
    """
    layers: list[Any] = [layer for layer in module.modules() if _SCALES in layer._parameters]

    def bind(*_: Any) -> None:
        for layer in layers:
            layer.quant_state.absmax = layer._parameters[_SCALES]

    if layers:
        module.register_forward_pre_hook(bind)


def _check_share(model: PreTrainedModel) -> None:
    """UserError if none of the matrices, or too few of a mixture's, are quantized.

    Embedding and head do not count.
    """
    from bitsandbytes.nn import Int8Params, Params4bit

    excluded = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    quantized = matrices = 0
    for parameter in model.parameters():
        if parameter.ndim >= 2 and id(parameter) not in excluded:
            num_weights = storage_of(parameter).num_weights
            matrices += num_weights
            quantized += num_weights * isinstance(parameter, (Int8Params, Params4bit))
    kind = model.config.model_type
    if not quantized:
        raise UserError(f"no layer of a {kind} model can be quantized; type quantization=none")
    experts = [p for p in model.parameters() if p.ndim == 3 and not isinstance(p, Params4bit)]
    unquantized = sum(weight.numel() for weight in experts)
    if unquantized > _MAX_UNQUANTIZED * matrices:
        method = model.config.quantization_config.quantization_method()
        instead = "quantization=none" if "4bit" in method else "quantization=nf4"
        raise UserError(
            f"quantization would leave {percent(unquantized / matrices, 0)} of the weights of this "
            f"{kind} model unquantized: the experts of a layer are one tensor; type {instead}"
        )


def _discard_weight_without_scales(module: Any, _: Any) -> None:
    """Keep an int8 layer's scales after peft's DoRA has read its weight on the CPU (peft 0.21).

    DoRA moves the weight to its own device; that copy has no scales, and the layer would adopt it.
    """
    if module.weight.SCB is None:
        module.weight.CB = None


def quantize_tokens_independently(model: Any) -> AbstractContextManager[None]:
    """Make int8 rounding of a token independent of its batch, for probes that compare tokens.

    LLM.int8() separates outlier columns for all tokens of a batch at once, so that a token's
    rounding depends on the other tokens.
    """
    return replaced((layer.state, "threshold", 0.0) for layer in int8_layers(model))


def int8_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers of LLM.int8(), which on a CPU do not round activations in training."""
    if (bitsandbytes := sys.modules.get("bitsandbytes")) is None:  # then none was made
        return []
    kind = bitsandbytes.nn.Linear8bitLt
    return [module for module in model.modules() if isinstance(module, kind)]


def cast_unquantized(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast all unquantized weights to `dtype`, which transformers ignores for quantized files."""
    from bitsandbytes.nn import Int8Params, Params4bit

    for parameter in model.parameters():
        if not isinstance(parameter, (Int8Params, Params4bit)):
            parameter.data = parameter.data.to(dtype)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a parameter is stored."""

    num_weights: int
    dtype: str
    """name of a torch dtype, or nf4, fp4, int8, fp8"""
    num_bytes: int
    """including the scales of quantized weights"""


def storage_of(parameter: torch.nn.Parameter) -> Storage:
    """Return how a parameter is stored; a 4-bit one packs several weights into an element."""
    import torch

    num_bytes = parameter.numel() * parameter.element_size()
    dtype = str(parameter.dtype).removeprefix("torch.")
    if type(parameter) is torch.nn.Parameter:
        is_fp8 = parameter.dtype == torch.uint8
        return Storage(parameter.numel(), "fp8" if is_fp8 else dtype, num_bytes)
    import bitsandbytes

    if isinstance(parameter, bitsandbytes.nn.Params4bit):
        state = parameter.quant_state
        if state is None:  # not packed yet on the meta device
            return Storage(parameter.numel(), parameter.quant_type, parameter.numel() // 2)
        scales = [state.absmax, state.state2.absmax] if state.nested else [state.absmax]
        num_bytes += sum(scale.numel() * scale.element_size() for scale in scales)
        return Storage(math.prod(state.shape), state.quant_type, num_bytes)
    if isinstance(parameter, bitsandbytes.nn.Int8Params):
        num_bytes += 4 * parameter.shape[0]  # one fp32 scale per row
    return Storage(parameter.numel(), dtype, num_bytes)
