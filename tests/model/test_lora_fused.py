"""Fused LoRA equals peft's own layers, in outputs and gradients; other cases run in peft."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from app.model import adapter
from app.model.adapter import fused as fused_layers
from app.model.adapter.fused import FusedLoraLinear, lora_4bit_class
from app.model.recompute import RecomputeConfig, apply_recompute
from benchmarks.gpu.model import quantize
from tests.tiny import TINY, move, probe_of, tiny_llama


def pair(model: Any, **settings: Any) -> tuple[Any, Any]:
    """Two copies of a model with a nonzero adapter: peft's layers, and fused ones."""
    fused: Any = adapter.apply_adapter(
        model, adapter.LoraConfig(**({"r": 4} | settings)), half_precision=False
    )
    move(fused, seed=9)
    plain = copy.deepcopy(fused)
    adapter.unfuse_adapters(plain)
    return plain.train(), fused.train()


def inputs_of(model: Any) -> dict[str, Tensor]:
    return {name: ids.to(model.device) for name, ids in probe_of(model).items()}


def outcome(model: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of the trainable parameters."""
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype is not None):
        logits = model(**inputs_of(model)).logits
    logits.float().square().mean().backward()
    return logits, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative norm of a difference; both must have the same gradients."""
    assert one.keys() == other.keys()
    return max(((one[n] - other[n]).norm() / other[n].norm()).item() for n in one)


def _step_of(output: Tensor) -> Any:
    """The autograd node that computed the rows of which `output` is a view."""
    return output.grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def num_fused(model: Any) -> int:
    kinds = (FusedLoraLinear, lora_4bit_class())
    return sum(isinstance(module, kinds) for module in model.modules())


def check_against_peft(plain: Any, fused: Any, bound: float = 1e-5) -> None:
    (expected, truths), (logits, grads) = outcome(plain), outcome(fused)
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert distance(grads, truths) < bound


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["llama", "t5", "4 bits"])
def test_values_and_gradients_equal_peft(
    kind: str, dropout: float, request: pytest.FixtureRequest
) -> None:
    if kind == "4 bits":
        request.getfixturevalue("on_a_gpu")
    plain, fused = pair(in_4_bits() if kind == "4 bits" else TINY[kind](), dropout=dropout)
    assert num_fused(fused) == sum(".lora_A." in name for name, _ in fused.named_parameters())
    assert num_fused(plain) == 0
    check_against_peft(plain, fused)


@pytest.mark.parametrize(
    ("name", "positions", "dropout", "is_added"),
    [
        *((name, 64, 0.0, True) for name in ("q_proj", "gate_proj", "down_proj")),
        ("q_proj", 65, 0.0, False),  # no full tiles
        ("down_proj", 64, 0.3, False),
    ],
)
def test_the_adapter_is_merged_into_a_matrix_smaller_than_its_input(
    name: str, positions: int, dropout: float, is_added: bool
) -> None:
    plain, fused = pair(tiny_llama(), dropout=dropout, alpha=12.0)
    found = []
    for model in (plain, fused):
        layer = model.base_model.model.model.layers[0]
        linear = getattr(layer.self_attn if name == "q_proj" else layer.mlp, name)
        torch.manual_seed(2)
        hidden = torch.randn(1, positions, linear.in_features, requires_grad=True)
        output = linear(hidden)
        output.square().sum().backward()
        a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
        found.append({"output": output, "input": hidden.grad, "a": a.grad, "b": b.grad})
    assert _step_of(output).is_merged is is_added
    assert distance(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("together", [False, True])
def test_autocast_gradients_are_as_exact_as_those_of_peft(together: bool) -> None:
    plain, fused = pair(tiny_llama(), dropout=0.0)
    _, truths = outcome(plain)
    if together:
        grouped(fused)
    for model in (plain, fused):
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    (_, theirs), (_, ours) = outcome(plain, torch.bfloat16), outcome(fused, torch.bfloat16)
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    assert distance(ours, truths) < 1.1 * distance(theirs, truths)


def test_disabled_merged_and_second_adapters_compute_what_peft_does() -> None:
    plain, fused = pair(tiny_llama(), dropout=0.0)
    with plain.disable_adapter(), fused.disable_adapter():
        assert torch.equal(outcome_of(fused), outcome_of(plain))
    for model in (plain, fused):
        model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, use_dora=True))
    magnitudes = [p for name, p in plain.named_parameters() if "magnitude" in name]
    assert magnitudes
    for magnitude in magnitudes:
        magnitude.data *= 2
    for model in (plain, fused):
        model.load_state_dict(plain.state_dict())
        model.set_adapter("other")
    assert torch.equal(outcome_of(fused), outcome_of(plain))
    for model in (plain, fused):
        model.set_adapter("default")
        model.merge_adapter()
    assert torch.equal(outcome_of(fused), outcome_of(plain))


@torch.no_grad()
def outcome_of(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=torch.arange(20).unsqueeze(0), use_cache=False).logits
    return logits


def test_a_model_may_modify_a_layers_output_in_place() -> None:
    plain, fused = pair(tiny_llama(), dropout=0.0)
    hidden = torch.randn(2, 5, 32)
    grads = []
    for model in (plain, fused):
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        output = layer(hidden)
        output += 1
        output.square().sum().backward()
        grads.append(layer.lora_A["default"].weight.grad)
    assert torch.allclose(*grads, rtol=1e-4)


def in_4_bits(dtype: torch.dtype = torch.float32, **numbers: Any) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
    model = tiny_llama(**(shape | numbers)).to(dtype)
    quantize(model, dtype)
    return model


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the GPU's code path on the CPU."""
    monkeypatch.setattr(fused_layers, "_is_faster_in_4_bits", lambda layer, x: layer.training)
    monkeypatch.setattr("app.model.adapter.fused.lora_comes_first", lambda x: True)


@pytest.mark.parametrize("kind", ["plain", "dora", "nf4"])
def test_casts_that_are_left_out_change_no_bit(kind: str) -> None:
    """DoRA, which computes norms in the dtype of its input, keeps them."""
    base = in_4_bits(torch.bfloat16) if kind == "nf4" else tiny_llama().bfloat16()
    plain, _ = pair(base, use_dora=kind == "dora")
    expected = outcome(plain, torch.bfloat16)
    adapter.skip_redundant_casts(plain)
    torch.testing.assert_close(outcome(plain, torch.bfloat16), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("on_a_gpu")
def test_autocast_gradients_on_a_4_bit_base_are_as_exact_as_those_of_peft() -> None:
    plain, fused = pair(in_4_bits(torch.bfloat16))
    exact, _ = pair(in_4_bits())
    for mine, theirs in zip(exact.parameters(), plain.parameters(), strict=True):
        if mine.requires_grad:
            mine.data = theirs.data.clone()
    _, truths = outcome(exact)
    for model in (plain, fused):
        adapter.skip_redundant_casts(model)
    (_, theirs_grads), (_, ours) = outcome(plain, torch.bfloat16), outcome(fused, torch.bfloat16)
    assert all(grad.dtype == torch.float32 for grad in ours.values())
    assert distance(ours, truths) < 1.1 * distance(theirs_grads, truths)


def test_a_4_bit_base_runs_in_peft_on_a_cpu_and_in_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, fused = pair(in_4_bits())
    (expected, truths), (logits, grads) = outcome(plain), outcome(fused)
    assert torch.equal(logits, expected)
    assert all(torch.equal(grads[name], truths[name]) for name in truths)
    monkeypatch.setattr(fused_layers, "_is_faster_in_4_bits", lambda layer, x: layer.training)
    assert torch.equal(outcome_of(fused.eval()), outcome_of(plain.eval()))


def with_biases() -> Any:
    model = tiny_llama(attention_bias=True)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize(
    ("path", "tokens", "dtype", "make"),
    [
        ("cpu", 64, None, with_biases),
        ("cpu", 64, torch.bfloat16, in_4_bits),
        ("gpu", 64, torch.bfloat16, with_biases),
        ("gpu", 64, torch.bfloat16, in_4_bits),
    ],
)
def test_without_the_adapter_w_x_rounds_as_while_b_is_zero_and_nothing_else_is_computed(
    path: str, tokens: int, dtype: torch.dtype | None, make: Any, request: pytest.FixtureRequest
) -> None:
    if path == "gpu":
        request.getfixturevalue("on_a_gpu")
    _, fused = pair(make(), dropout=0.0)
    matrices = [(n, w) for n, w in fused.named_parameters() if w.requires_grad]
    for name, weight in matrices:
        weight.data *= "lora_A" in name
    ids = torch.arange(tokens).unsqueeze(0) % 60
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        expected = fused(input_ids=ids, use_cache=False).logits
        for _, weight in matrices:
            weight.data.fill_(torch.nan)
        with adapter.adapter_disabled(fused):
            assert torch.equal(fused(input_ids=ids, use_cache=False).logits, expected)


def grouped(model: Any) -> int:
    return adapter.group_adapters(model, lambda: model.base_model.model(**inputs_of(model)))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("make", "mode"), [(with_biases, "full"), (in_4_bits, "none"), (in_4_bits, "selective")]
)
def test_layers_with_one_input_are_grouped_and_give_the_same_results(make: Any, mode: str) -> None:
    base = make()
    apply_recompute(base, RecomputeConfig(mode=mode))
    plain, fused = pair(base, rank_pattern={"k_proj": 2}, alpha_pattern={"k_proj": 16.0})
    assert grouped(fused) == 4  # q, k, v and gate, up of two layers
    check_against_peft(plain, fused)
    layer = fused.base_model.model.model.layers[1]
    members = [getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    assert members[0].group.layers == members
    assert layer.self_attn.o_proj.group is None
    assert not any(member.group._outputs for member in members)
    adapter.ungroup_adapters(fused)
    assert all(member.group is None for member in members)


@pytest.mark.parametrize(
    ("architecture", "settings", "count"),
    [
        ("t5", {}, 6),  # two encoder and two decoder layers; in cross-attention k and v only
        ("llama", {"dropout": 0.1}, 0),
        ("llama", {"alpha_pattern": {"k_proj": 3.0}}, 4),  # q and v are still grouped
        ("llama", {"use_dora": True}, 0),
    ],
)
def test_only_compatible_layers_are_grouped(
    architecture: str, settings: dict[str, Any], count: int
) -> None:
    plain, fused = pair(TINY[architecture](), **settings)
    assert grouped(fused) == count
    check_against_peft(plain, fused, 3e-5)


def test_a_grouped_layer_with_another_input_computes_alone() -> None:
    plain, fused = pair(tiny_llama())
    grouped(fused)
    found = []
    for model in (plain, fused):
        attention = model.base_model.model.model.layers[0].self_attn
        x, other = torch.randn(2, 1, 5, 32, generator=torch.Generator().manual_seed(0)).unbind()
        found.append([attention.q_proj(x), attention.k_proj(other), attention.v_proj(x)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_a_gpu")
def test_outputs_of_a_group_that_an_error_left_are_released() -> None:
    _, fused = pair(tiny_llama())
    grouped(fused)
    attention = fused.base_model.model.model.layers[0].self_attn

    def run_out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    attention.k_proj.register_forward_pre_hook(run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fused(**inputs_of(fused))
    assert attention.q_proj.group._outputs
    adapter.drop_pending_outputs(fused)
    assert not attention.q_proj.group._outputs


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize("make", [with_biases, in_4_bits], ids=["whole", "4 bits"])
def test_on_a_gpu_the_fused_step_equals_peft(make: Any, mode: str) -> None:
    base = make()
    apply_recompute(base, RecomputeConfig(mode=mode))
    plain, fused = (model.to("cuda") for model in pair(base, rank_pattern={"k_proj": 2}))
    assert num_fused(fused) == 14
    (expected, truths) = outcome(plain)
    for number in (0, 4):
        if number:
            assert grouped(fused) == number
        logits, grads = outcome(fused)
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
        assert distance(grads, truths) < 1e-4
