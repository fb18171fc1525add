"""Products in FP8 (e4m3) with one scale per row: of a frozen base, or of trained layers.

A frozen matrix is quantized once, with one scale per output feature; activations are quantized per
token. For the gradient of the input, the weight's scales are multiplied into the incoming gradient
before that is quantized per token. A trained matrix stays in its dtype and is quantized in every
pass, as torchao's row-wise recipe does it: both operands of each of the three products along the
dimension that is summed over. Adapters, head, embeddings, norms and routers stay in their dtype,
and the last decoder layer of a frozen base: its rounding cost more loss than that of all others in
a model of 30 layers (docs/choosing.md).
The formats, and scaling by the largest magnitude: arXiv 2209.05433.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from app.model.layers import find_bypassed_linears, is_inside, num_layers_in_fp8, repeated_layers
from common.errors import UserError
from common.text import percent, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""largest finite value of e4m3"""
SMALLEST = 1e-30
"""magnitude below which a token or a row of weights counts as zeros"""
_MULTIPLE = 16
"""FP8 kernels need widths that are multiples of it"""
_MAX_UNQUANTIZED = 0.1
"""largest share of weights in layers that stays unquantized"""
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
"""names of routers, whose rounding would send tokens to other experts"""


class Matrix(NamedTuple):
    """A quantized matrix [features, width], or its transpose for the gradient of an input."""

    values: Tensor
    """e4m3 [features, width]"""
    scales: Tensor
    """fp32 [features]"""
    is_transposed: bool = False
    columns: Tensor | None = None  # of its layer, in e4m3

    @property
    def T(self) -> Matrix:
        return self._replace(is_transposed=not self.is_transposed)


class Fp8Linear(torch.nn.Linear):
    """A frozen linear layer whose weight is e4m3 with one scale per output feature.

    Both are stored as bits in integers, which neither a conversion of the model to another dtype
    nor a broadcast between ranks changes.
    """

    weight: torch.nn.Parameter
    """uint8 [features, width]"""
    scales: torch.nn.Parameter
    """int32 [features]"""
    columns: Tensor | None = None
    """if held: uint8 [width, features], followed by those of other layers that read its input"""

    def __init__(self, layer: torch.nn.Linear, matrix: Matrix, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bits = matrix.values.view(torch.uint8), matrix.scales.view(torch.int32)
        self.weight, self.scales = (torch.nn.Parameter(b, requires_grad=False) for b in bits)
        self.bias = layer.bias
        self.compute_dtype = dtype
        """dtype of an adapter on this layer, by the name under which peft reads it"""

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias for x [..., width], in autocast's dtype or else in that of x."""
        rows = _rows_of(input)
        output: Tensor = _Fp8Product.apply(rows, self.weight, self.scales, self.bias, self.columns)
        return output.unflatten(0, input.shape[:-1])


def _rows_of(input: Tensor) -> Tensor:
    """Return x [..., width] as [tokens, width], in autocast's dtype if that is enabled."""
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return input.flatten(0, -2)


def matrix_of(weight: Tensor, scales: Tensor, columns: Tensor | None = None) -> Matrix:
    """Return the matrix of an `Fp8Linear`'s two parameters, and its columns if it holds them."""
    columns = None if columns is None else columns.view(_E4M3)
    return Matrix(weight.view(_E4M3), scales.view(torch.float32), columns=columns)


class _Fp8Product(torch.autograd.Function):
    """rows W^T + bias of a frozen W and bias."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scales: Tensor, *others: Any) -> Tensor:
        bias, ctx.columns = others
        ctx.save_for_backward(weight, scales)
        return linear(rows, matrix_of(weight, scales), bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales = ctx.saved_tensors
        return linear(outer[0], matrix_of(weight, scales, ctx.columns).T), *[None] * 4


class Fp8TrainedLinear(torch.nn.Linear):
    """A linear layer whose three products are in FP8 in training; evaluation is as before.

    The class of an existing layer is changed, and its parameters stay, so that sharding and saving
    are not affected.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias for x [..., width], in autocast's dtype or else in that of x."""
        if not self.training:
            return super().forward(input)
        output: Tensor = _TrainedProduct.apply(_rows_of(input), self.weight, self.bias)
        return output.unflatten(0, input.shape[:-1])


class _TrainedProduct(torch.autograd.Function):
    """rows W^T + bias of a trained W and bias."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(quantize_rows(rows), Matrix(*quantize_rows(weight)), bias, rows.dtype)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weight and bias that are needed."""
        (rows, weight), grad = ctx.saved_tensors, outer[0]
        rows_need_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        multiply = partial(product, bias=None, dtype=grad.dtype)
        grad_rows = grad_weight = None
        if rows_need_grad:
            grad_rows = multiply(quantize_rows(grad), Matrix(*_quantize_columns(weight)))
        if weight_needs_grad:
            grad_weight = multiply(_quantize_columns(grad), Matrix(*_quantize_columns(rows)))
        return grad_rows, grad_weight, grad.sum(0) if bias_needs_grad else None


class Rows(NamedTuple):
    """Quantized activations [tokens, width]."""

    values: Tensor
    """e4m3 [tokens, width]; not quantized inside `without_rounding`"""
    scales: Tensor
    """fp32 [tokens]"""


class _Rounding:
    is_on = True


def is_rounding() -> bool:
    """Return whether products are in FP8 here: false inside `without_rounding`."""
    return _Rounding.is_on


@contextmanager
def without_rounding() -> Iterator[None]:
    """Compute the products of all FP8 layers in the dtype of their inputs, to compare with them.

    The weights of a frozen base stay as they were rounded when it was loaded.
    """
    _Rounding.is_on = False
    try:
        yield
    finally:
        _Rounding.is_on = True


def linear(rows: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return rows @ matrix.T + bias in the dtype of `rows` [tokens, width]."""
    if matrix.is_transposed:
        return input_gradient([rows], [matrix.T])
    return product(quantize_rows(rows), matrix, bias, rows.dtype)


def input_gradient(
    grads: Sequence[Tensor], matrices: Sequence[Matrix], quantized: Rows | None = None
) -> Tensor:
    """Return the sum of grad @ matrix over pairs, in one product; grads [tokens, features].

    The gradients of a token share a scale: what that rounds away of small ones is small in the sum.
    quantized: the gradients times the scales of features, side by side, if a kernel has made them.
    """
    if quantized is None:
        quantized = quantize_rows(*grads, factors=[matrix.scales for matrix in matrices])
    columns = matrices[0].columns
    if columns is None or columns.shape[1] != quantized.values.shape[1]:
        columns = transpose([matrix.values for matrix in matrices])
    scales = matrices[0].scales.new_ones(len(columns))
    return product(quantized, Matrix(columns, scales), None, grads[0].dtype)


def transpose(values: Sequence[Tensor]) -> Tensor:
    """Return the transposes of [features, width] side by side, as Hopper's kernels want them."""
    sizes = [len(each) for each in values]
    columns = values[0].new_empty(values[0].shape[1], sum(sizes))
    for part, each in zip(columns.split(sizes, dim=1), values, strict=True):
        part.copy_(each.T)
    return columns


def release_columns(model: torch.nn.Module) -> None:
    """Undo `hold_transposed`."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.columns = None


def product(rows: Rows, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return rows @ matrix.T + bias in `dtype`.

    A GPU computes it in bf16: FP8 kernels with a scale per row have no other output.
    """
    if rows.values.dtype != _E4M3:  # inside `without_rounding`
        return torch.nn.functional.linear(rows.values.to(dtype), dequantize(matrix, dtype), bias)
    on_cpu = rows.values.device.type == "cpu"
    output = scaled_mm(
        rows.values,
        matrix.values.T,
        rows.scales.unsqueeze(1),
        ScalingType.RowWise,
        matrix.scales.unsqueeze(0),
        ScalingType.RowWise,
        output_dtype=dtype if on_cpu else torch.bfloat16,
    ).to(dtype)
    return output if bias is None else output.add_(bias.to(dtype))


def quantize_rows(*parts: Tensor, factors: Sequence[Tensor] = ()) -> Rows:
    """Quantize the rows of `parts` [n, width], side by side; by one kernel on a GPU.

    factors: one [width] for each part, by which it is multiplied first. Rows with an inf or nan
    become nan.
    """
    device = parts[0].device
    if not _Rounding.is_on:
        return Rows(_side_by_side(parts, factors), torch.ones(len(parts[0]), device=device))
    if (kernels := _proven_kernels(device)) is not None:
        return Rows(*kernels.quantize_rows(parts, factors, largest=LARGEST, smallest=SMALLEST))
    return _quantize_rows(_side_by_side(parts, factors))


def _side_by_side(parts: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    if factors:
        parts = [part * each.to(part.dtype) for part, each in zip(parts, factors, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


@cache
def _proven_kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels that quantize on a GPU; None, with a warning, if their results differ."""
    if device.type != "cuda":
        return None
    rows = torch.linspace(-3, 5, 40 * 160, device=device).view(40, 160).bfloat16()
    parts = rows.split([64, 96], 1)
    factors = torch.linspace(0.1, 2, 160, device=device).split([64, 96])
    bounds = {"largest": LARGEST, "smallest": SMALLEST}
    try:
        from app.model import fp8_kernel

        pairs = (
            (fp8_kernel.quantize_rows(parts, factors, **bounds), _side_by_side(parts, factors)),
            (fp8_kernel.quantize_columns(rows, 48, **bounds), _filled_columns(rows)),
        )
        dequantized = (
            [dequantize(Matrix(*each), torch.float32) for each in (found, _quantize_rows(values))]
            for found, values in pairs
        )
        # Values next to the middle of two may be rounded to either.
        are_equal = [(one - two).norm() < 0.005 * two.norm() for one, two in dequantized]
        reason = "" if all(are_equal) else "they differ"
    except Exception as error:  # noqa: BLE001  kernel compilers raise any type
        reason = reason_of(error)
    if reason:
        log.warning("fp8: quantized by PyTorch's operators, not by kernels of its own (%s)", reason)
        return None
    return fp8_kernel


def _quantize_rows(rows: Tensor) -> Rows:
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)
    # In the dtype of the rows, so that no fp32 copy of them is made. Rounded up in bf16, the
    # largest value stays below 464, which still rounds to 448.
    scale = LARGEST / largest.clamp_min(SMALLEST)
    return Rows((rows * scale).to(_E4M3), 1 / scale.squeeze(1).float())


def _quantize_columns(tensor: Tensor) -> Rows:
    """Quantize the transpose of `tensor` [n, width] by row; n is filled up with zeros."""
    if not _Rounding.is_on or (kernels := _proven_kernels(tensor.device)) is None:
        return quantize_rows(_filled_columns(tensor))
    length = len(tensor) + -len(tensor) % _MULTIPLE
    return Rows(*kernels.quantize_columns(tensor, length, largest=LARGEST, smallest=SMALLEST))


def _filled_columns(tensor: Tensor) -> Tensor:
    missing = -len(tensor) % _MULTIPLE
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).T.contiguous()


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return (matrix.values.float() * matrix.scales.unsqueeze(1)).to(dtype)


def quantize_weight(weight: Tensor) -> Matrix:
    """Quantize a weight [features, width] with one scale per feature, rounded from fp32."""
    return Matrix(*_quantize_rows(weight.float()))


def quantize_to_fp8(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Replace the linear layers of a base by quantized ones, and freeze the base.

    Layers stay as they are if a width is no multiple of 16, if they are routers, the head or in the
    last decoder layer, or if the model reads their weight without calling them. Each is quantized
    on `device`, and moved back to its own. `dtype`: of adapters. UserError if nothing, or too
    little of the layers, can be quantized.
    """
    model.requires_grad_(False)
    decoder_layers = repeated_layers(model)
    kept = decoder_layers[num_layers_in_fp8(len(decoder_layers)) :]
    for name, layer in _find_layers(model).items():
        if is_inside(name, kept):
            continue
        parent, _, child = name.rpartition(".")
        weight = layer.weight.data
        on_device = weight.to(weight.device if device is None or weight.is_meta else device)
        quantized = Fp8Linear(layer, quantize_weight(on_device), dtype)
        setattr(model.get_submodule(parent), child, quantized.to(weight.device))
    _check_share(model, kept)


def _find_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that can compute in FP8, by name."""
    bypassed = set(find_bypassed_linears(model.config.model_type))
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear
        and layer is not head
        and name.rpartition(".")[2] not in bypassed
        and not _ROUTER.search(name)
        and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
    }


def train_in_fp8(model: PreTrainedModel) -> None:
    """Make the linear layers of the inner decoder layers train with products in FP8.

    The first and the last decoder layer, whose rounding changes the result most, stay as they are.
    UserError if that leaves nothing.
    """
    inner = repeated_layers(model)[1:-1]
    layers = {name: each for name, each in _find_layers(model).items() if is_inside(name, inner)}
    if not layers:
        raise UserError(
            f"trainer.precision=fp8: this {model.config.model_type} model has no linear layer "
            f"between its first and its last decoder layer whose widths are multiples of "
            f"{_MULTIPLE}; type trainer.precision=bf16"
        )
    for layer in layers.values():
        layer.__class__ = Fp8TrainedLinear
    log.info("fp8: products of %d linear layers; first and last decoder layer in bf16", len(layers))


def restore_trained_layers(model: torch.nn.Module) -> None:
    """Undo `train_in_fp8`."""
    for module in model.modules():
        if type(module) is Fp8TrainedLinear:
            module.__class__ = torch.nn.Linear


def _check_share(model: PreTrainedModel, kept: Sequence[str]) -> None:
    """Raise UserError if too little is quantized of the layers that are not `kept` on purpose."""
    ends = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim >= 2 and id(weight) not in ends and not is_inside(name, kept)
    ]
    total = sum(weight.numel() for weight in matrices)
    quantized = sum(weight.numel() for weight in matrices if weight.dtype == torch.uint8)
    kind = model.config.model_type
    if not quantized:
        raise UserError(
            f"no layer of this {kind} model can be quantized to FP8 (its linear layers need widths "
            f"that are multiples of {_MULTIPLE}); type quantization=none"
        )
    if total - quantized > _MAX_UNQUANTIZED * total:
        raise UserError(
            f"quantization=fp8 would leave {percent(1 - quantized / total, 0)} of the weights of "
            f"this {kind} model unquantized; type quantization=nf4, or quantization=none"
        )
