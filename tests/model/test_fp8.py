"""Products in FP8: values and gradients, which layers compute so, frozen and trained ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.model import fp8, quantization
from app.model.adapter import hold_transposed
from app.model.recompute import RecomputeConfig, apply_recompute
from common.errors import UserError
from tests.model.test_experts import tiny_mixture
from tests.model.test_lora_fused import distance, grouped, num_fused, outcome, pair
from tests.tiny import tiny_gpt2, tiny_llama


def _emulated(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows @ weight.T of values rounded to e4m3 by row, in fp64."""
    return _rounded(rows) @ _rounded(weight).T


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    scales = rows.double().abs().amax(1, keepdim=True) / 448
    return (rows.double() / scales).to(torch.float8_e4m3fn).double() * scales


def test_a_product_is_that_of_the_rounded_values() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(40, 64), torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    found = fp8.linear(rows, fp8.quantize_weight(weight), bias := torch.randn(48))
    expected = _emulated(rows, weight) + bias
    assert (found - expected).abs().max() / expected.abs().max() < 1e-3
    # Rounding to four significant bits, not more.
    exact = rows @ weight.T + bias
    assert 0.001 < (found - exact).norm() / exact.norm() < 0.06


def test_the_gradient_is_that_of_the_rounded_weight_and_gradient() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    quantized = fp8.Fp8Linear(layer, fp8.quantize_weight(layer.weight.data), torch.float32)
    x = torch.randn(3, 5, 64, requires_grad=True)
    outer = torch.randn(3, 5, 48)
    (found,) = torch.autograd.grad(quantized(x), x, outer)
    (exact,) = torch.autograd.grad(layer(x), x, outer)
    assert torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), 0) > 0.998
    matrix = fp8.matrix_of(quantized.weight, quantized.scales)
    scaled, values = outer.flatten(0, 1) * matrix.scales, matrix.values.double()
    expected = (_rounded(scaled) @ values).unflatten(0, (3, 5))
    assert (found - expected).abs().max() / expected.abs().max() < 1e-3


def test_each_token_is_rounded_by_itself_and_zeros_inf_and_nan_stay() -> None:
    rows = torch.randn(4, 32)
    rows[1], rows[2, 3], rows[3, 0] = 0, float("inf"), float("nan")
    values, scales = fp8.quantize_rows(rows)
    back = values.float() * scales.unsqueeze(1)
    assert torch.equal(back[1], torch.zeros(32))
    assert not back[2].isfinite().any() and not back[3].isfinite().any()
    alone, scale = fp8.quantize_rows(rows[:1])
    assert torch.equal(alone.view(torch.uint8), values[:1].view(torch.uint8))
    assert torch.equal(scale, scales[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_value_never_overflows(dtype: torch.dtype) -> None:
    peaks = torch.linspace(0.1, 7, 20_000).to(dtype).unsqueeze(1)
    values, scales = fp8.quantize_rows(peaks)
    back = values.float() * scales.unsqueeze(1)
    assert ((back - peaks.float()).abs() <= 0.01 * peaks.float()).all()


def test_a_conversion_of_the_model_leaves_quantized_weights() -> None:
    layer = torch.nn.Linear(32, 16)
    quantized = fp8.Fp8Linear(layer, fp8.quantize_weight(layer.weight.data), torch.float32)
    before, scales = quantized.weight.clone(), quantized.scales.clone()
    quantized.to(torch.bfloat16)
    assert quantized.bias.dtype == torch.bfloat16
    assert torch.equal(quantized.weight, before) and torch.equal(quantized.scales, scales)


def _base(**numbers: Any) -> Any:
    model = tiny_llama(hidden_size=64, intermediate_size=128, **numbers)
    fp8.quantize_to_fp8(model, torch.float32)
    return model


def test_layers_are_quantized_but_not_head_routers_and_odd_widths() -> None:
    base = _base()
    quantized = {n for n, m in base.named_modules() if isinstance(m, fp8.Fp8Linear)}
    assert len(quantized) == 14 and not any("lm_head" in name for name in quantized)
    routed = tiny_llama(hidden_size=64, intermediate_size=128)
    routed.model.layers[0].mlp.gate = torch.nn.Linear(64, 16)
    fp8.quantize_to_fp8(routed, torch.float32)
    assert type(routed.model.layers[0].mlp.gate) is torch.nn.Linear
    mixture = tiny_mixture("mixtral", hidden_size=64, intermediate_size=64)
    with pytest.raises(UserError, match="% of the weights of this mixtral model unquantized"):
        fp8.quantize_to_fp8(mixture, torch.float32)
    with pytest.raises(UserError, match="multiples of 16"):
        fp8.quantize_to_fp8(tiny_gpt2(), torch.float32)


@pytest.mark.parametrize(("num_layers", "num_quantized"), [(9, 9), (10, 9)])
def test_the_last_of_ten_layers_is_not_quantized(num_layers: int, num_quantized: int) -> None:
    base = _base(num_hidden_layers=num_layers)
    layers = [
        any(isinstance(each, fp8.Fp8Linear) for each in layer.modules())
        for layer in base.model.layers
    ]
    assert layers == [True] * num_quantized + [False] * (num_layers - num_quantized)
    assert not any(weight.requires_grad for weight in base.parameters())


def test_a_base_on_meta_has_the_same_tensors() -> None:
    found, config = _base(), quantization.QuantizationConfig(method="fp8")
    with torch.device("meta"):
        empty = tiny_llama(hidden_size=64, intermediate_size=128)
        quantization.quantize_on_meta(empty, config, torch.float32)
    shapes = [{n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (found, empty)]
    assert shapes[0] == shapes[1]
    assert quantization.storage_of(found.model.layers[0].mlp.up_proj.weight).dtype == "fp8"
    names = quantization.quantized_layers(
        tiny_llama(hidden_size=64, intermediate_size=128), config, torch.float32
    )
    assert len(names) == 14


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_fused_adapter_gives_what_peft_gives(mode: str) -> None:
    base = _base()
    apply_recompute(base, RecomputeConfig(mode=mode))
    plain, fused = pair(base)
    assert num_fused(fused) == 14
    (expected, truths), (logits, grads) = outcome(plain), outcome(fused)
    # The same sums in another order, of which a few round to another value of four bits.
    assert (logits - expected).norm() < 2e-3 * expected.norm()
    assert distance(grads, truths) < 0.02
    with fp8.without_rounding():
        exact = outcome(plain)[1]
    single = grads
    assert grouped(fused) == 4
    logits, grads = outcome(fused)
    assert (logits - expected).norm() < 2e-3 * expected.norm()
    # Gradients of a group share a scale per token, which is as exact.
    assert distance(grads, single) < 0.1 and distance(grads, exact) < 1.02 * distance(single, exact)
    with fp8.without_rounding():
        assert distance(outcome(fused)[1], exact) < 1e-4


def test_held_copies_are_used_change_no_bit_and_are_not_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = pair(_base())[1]
    plain = fused.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    x = torch.randn(3, 64, requires_grad=True)
    for is_grouped in (False, True):
        if is_grouped:
            grouped(fused)
        expected = outcome(fused), torch.autograd.grad(plain(x).sum(), x)
        names = list(fused.state_dict())
        hold_transposed(fused)
        with monkeypatch.context() as patch:
            if not is_grouped:  # otherwise the copy is that of q, k and v
                patch.setattr(fp8, "transpose", None)
            alone = torch.autograd.grad(plain(x).sum(), x)
            patch.setattr(fp8, "transpose", None)
            torch.testing.assert_close((outcome(fused), alone), expected, rtol=0, atol=0)
        assert list(fused.state_dict()) == names
        held = [each.columns for each in fused.modules() if isinstance(each, fp8.Fp8Linear)]
        # q, k and v, o, gate and up, and down of two layers
        assert sum(each is not None for each in held) == (8 if is_grouped else 14)
        fp8.release_columns(fused)
        assert plain.columns is None


@pytest.mark.parametrize("num_tokens", [32, 19])
def test_the_products_of_a_trained_layer_are_those_of_the_rounded_values(num_tokens: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    layer.weight.data *= torch.logspace(-2, 2, 48)[:, None]
    x, outer = torch.randn(2, num_tokens, 64, requires_grad=True), torch.randn(2, num_tokens, 48)

    def outcome_of(layer: torch.nn.Module) -> list[torch.Tensor]:
        output = layer(x)
        return [output, *torch.autograd.grad(output, [x, layer.weight, layer.bias], outer)]

    exact = outcome_of(layer)
    layer.__class__ = fp8.Fp8TrainedLinear
    found = outcome_of(layer)
    rows, grads, weight = x.detach().flatten(0, 1), outer.flatten(0, 1), layer.weight.detach()
    expected = [
        (_emulated(rows, weight) + layer.bias).view_as(outer),
        _emulated(grads, weight.T).view_as(x),
        _emulated(grads.T, rows.T),
        grads.sum(0),
    ]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-3 * other.abs().max()
    assert all(
        0.02 < (a - b).norm() / b.norm() < 0.06 for a, b in zip(found[:3], exact, strict=False)
    )
    with fp8.without_rounding():
        assert all(map(torch.allclose, outcome_of(layer), exact))


def test_inner_layers_train_in_fp8_and_evaluate_as_before() -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    ids = torch.arange(24).unsqueeze(0)
    exact, names = model(ids).logits, list(model.state_dict())
    fp8.train_in_fp8(model)
    layers = [name for name, each in model.named_modules() if type(each) is fp8.Fp8TrainedLinear]
    assert len(layers) == 14 and {name.split(".")[2] for name in layers} == {"1", "2"}
    assert 1e-3 < (model.train()(ids).logits - exact).norm() / exact.norm() < 0.5
    assert torch.equal(model.eval()(ids).logits, exact)
    fp8.restore_trained_layers(model)
    assert torch.equal(model.train()(ids).logits, exact) and list(model.state_dict()) == names
    with pytest.raises(UserError, match="no linear layer between its first and its last"):
        fp8.train_in_fp8(tiny_llama(hidden_size=64, intermediate_size=128))


@pytest.mark.gpu
def test_the_kernels_quantize_as_pytorch_does_and_products_run() -> None:
    from app.model import fp8_kernel

    torch.manual_seed(0)
    layer = torch.nn.Linear(4096, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    quantized = fp8.Fp8Linear(layer, fp8.quantize_weight(layer.weight.data), torch.bfloat16)
    outer = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    assert fp8._proven_kernels(rows.device) is fp8_kernel
    assert (quantized(rows) - layer(rows)).norm() < 0.06 * layer(rows).norm()
    grads = [torch.autograd.grad(each(rows), rows, outer)[0] for each in (quantized, layer)]
    matrix = fp8.matrix_of(quantized.weight, quantized.scales)
    grads[0] += fp8.input_gradient([outer, -outer, outer], [matrix] * 3) - grads[1]
    assert torch.nn.functional.cosine_similarity(*map(torch.flatten, grads), 0) > 0.998


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [512, 500])
def test_a_trained_layer_on_a_gpu(num_tokens: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4096, 1024, device="cuda")
    rows = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outer = torch.randn(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    results = []
    for kind in (fp8.Fp8TrainedLinear, torch.nn.Linear):
        layer.__class__ = kind
        with torch.autocast("cuda", torch.bfloat16):
            output = layer(rows)
        results.append([output, *torch.autograd.grad(output, [rows, layer.weight], outer)])
    for found, exact in zip(*results, strict=True):
        assert found.dtype == exact.dtype and 0.01 < (found - exact).norm() / exact.norm() < 0.06
