"""LoRA on fused experts equals LoRA on each expert's own matrices; stock peft loads the files."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import load_adapter, probe_logits, save_adapter, verify_adapter
from app.model.adapter.settings import LoraConfig
from app.model.adapter.targets import find_targets
from app.model.adapter.wrap import trainable_weights
from app.model.base import ModelConfig, load_base, read_shapes, weight_files
from app.model.description import describe_files, describe_model
from app.model.experts import RoutingTrace, expert_modules, use_grouped_experts
from app.model.quantization import QuantizationConfig, storage_of, stored_4bit
from app.preflight.base_model import inspect_base
from app.preflight.files import check_saved_adapter
from common.errors import UserError
from tests.parity.every_family import tiny_config

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
    "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DEEPSEEK = LATENT | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": ROUTED | {"head_dim": 8},
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": LATENT | {"head_dim": 8},
    "granitemoe": {"num_local_experts": 4},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
        "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "bos_token_id": 1,
    },
}  # fmt: skip


SHAPES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_text"]
"""usual, transposed with biases, beside dense layers and shared experts, beside a dense MLP"""


def tiny_mixture(kind: str, **numbers: Any) -> Any:
    """A random mixture of two layers, in fp32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | MIXTURES[kind] | numbers))
    model = AutoModelForCausalLM.from_config(config).eval()
    for _, buffer in model.named_buffers():
        if buffer.shape == (4,):  # biases of the router, nonzero in trained models
            buffer.copy_(torch.linspace(-0.2, 0.2, 4))
    use_grouped_experts(model)
    return model


def adapt(model: Any, **settings: Any) -> Any:
    config = LoraConfig(r=2, alpha=6, **settings)
    adapted = apply_adapter(model, config, half_precision=False)
    torch.manual_seed(1)
    for weight in trainable_weights(adapted):
        weight.parameter.data.normal_(std=0.2)
    return adapted


def row() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {"input_ids": torch.randint(3, 64, (1, 24))}


assert_near = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)


def check_logits(model: Any, expected: torch.Tensor, bound: float = 1e-4) -> None:
    assert_near(probe_logits(model, row()), expected, atol=bound, rtol=bound)


def loss_of(model: Any) -> torch.Tensor:
    ids = row()["input_ids"]
    logits = model(ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits, ids[0, 1:])


def unfused_forward(experts: Any, layers: Any) -> Any:
    """A plain reference: each expert computed separately, with its own W, A and B."""

    def linear(x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(experts, name)[expert]
        weight = weight.T if experts.is_transposed else weight
        a, b, scale = layers[name]
        output = x @ weight.T + scale * (x @ a[expert].T) @ b[expert].T
        bias = experts._parameters.get(f"{name}_bias")
        return output if bias is None else output + bias[expert]

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = []
        for x, ids, shares in zip(hidden, chosen, weights, strict=True):
            parts = []
            for expert, share in zip(ids.tolist(), shares, strict=True):
                inner = experts._apply_gate(linear(x[None], "gate_up_proj", expert))
                parts.append(share * linear(inner, "down_proj", expert)[0])
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)

    return forward


@pytest.mark.parametrize("kind", SHAPES)
def test_lora_on_fused_experts_equals_lora_on_each_expert(kind: str) -> None:
    adapted = adapt(tiny_mixture(kind))
    loss = loss_of(adapted)
    loss.backward()
    ours = {one.name: one.parameter.grad.clone() for one in trainable_weights(adapted)}
    adapted.zero_grad()

    reference = adapted.get_base_model()
    own: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, experts in list(expert_modules(reference)):
        plain = name.removesuffix(".base_layer.base_layer")
        outer = reference.get_submodule(plain)
        layers = {}
        for wrapper in (outer, outer.base_layer):
            a = wrapper.lora_A.default.weight.detach().view(4, 2, -1).clone().requires_grad_()
            b = wrapper.lora_B.default.weight.detach()
            b = b.view(len(b), 2, 4).permute(2, 0, 1).clone().requires_grad_()
            layers[wrapper.parameter_name] = a, b, 3.0
            own[f"{plain}.{wrapper.parameter_name}"] = a, b
        outer.forward = unfused_forward(experts, layers)
    plain_loss = loss_of(adapted)
    plain_loss.backward()
    assert loss.item() == pytest.approx(plain_loss.item(), abs=1e-5)
    assert len(own) == sum(".experts." in n and "shared" not in n for n in ours) / 2
    for name, (a, b) in own.items():
        assert a.grad is not None and b.grad is not None
        assert_near(ours[f"{name}.lora_A.weight"], a.grad.flatten(0, 1))
        assert_near(ours[f"{name}.lora_B.weight"], b.grad.permute(1, 2, 0).flatten(1))
    for one in trainable_weights(adapted):
        if "experts" not in one.name or "shared" in one.name:
            assert_near(ours[one.name], one.parameter.grad)


@pytest.mark.parametrize("kind", SHAPES)
def test_stock_peft_loads_what_is_saved(kind: str, tmp_path: Path) -> None:
    model = tiny_mixture(kind)
    base = copy.deepcopy(model)
    buffers = {name: buffer.clone() for name, buffer in base.named_buffers()}
    adapted = adapt(model, rank_pattern={"experts.down_proj": 4, "o_proj": 3})
    names = [one.name for one in trainable_weights(adapted)]
    assert len(set(names)) == len(names)
    for name, module in base.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            assert f"{name}.lora_A.weight" in names or name.endswith("shared_expert_gate"), name
    expected = probe_logits(adapted, row())
    save_adapter(adapted, tmp_path)
    assert verify_adapter(adapted, tmp_path, row()) < 1e-5
    ours = load_adapter(copy.deepcopy(base), tmp_path)
    check_logits(ours, expected, 1e-5)
    for name, buffer in ours.get_base_model().named_buffers():
        name = name.replace(".base_layer", "")
        torch.testing.assert_close(buffer, buffers[name], atol=0, rtol=0)

    stock = tiny_mixture(kind)
    for _, module in expert_modules(stock):
        module.config._experts_implementation = "eager"
    check_stock(stock, tmp_path, expected)


def check_stock(base: Any, folder: Path, expected: torch.Tensor) -> None:
    """Stock peft gives these logits with the adapter beside the weights, and merged into them."""
    stock = peft.PeftModel.from_pretrained(base, folder)
    check_logits(stock, expected)
    check_logits(stock.merge_and_unload(), expected)


@pytest.mark.parametrize("kind", MIXTURES)
def test_file_headers_describe_the_same_experts_as_the_model(kind: str, tmp_path: Path) -> None:
    model = tiny_mixture(kind)
    model.save_pretrained(tmp_path)
    tensors = read_shapes(weight_files(tmp_path))
    from_files = describe_files("", model.config.to_dict(), tensors)
    known = describe_model(model)
    assert from_files.experts == known.experts
    assert not [name for name in from_files.linear or {} if ".experts." in name]
    assert set(known.linear or {}) <= set(from_files.linear or {})
    config = LoraConfig(r=2)
    assert set(find_targets(config, from_files).experts) == set(known.experts) != set()


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path) -> None:
    model = tiny_mixture("qwen3_moe")
    save_adapter(adapt(model), tmp_path / "adapter")
    other = tiny_mixture("qwen3_moe", moe_intermediate_size=40)
    other.save_pretrained(tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"))
    base, _ = inspect_base(config)
    (problem,) = check_saved_adapter("adapter_path", tmp_path / "adapter", base, config)
    assert "fits none of the experts' weights" in problem
    with pytest.raises(ValueError, match="this base needs"):
        load_adapter(other, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dropout": 0.1}, "has no dropout for fused experts; type adapter.dropout=0"),
        ({"use_dora": True}, "has no DoRA for fused experts; type adapter.use_dora=false"),
        ({"init": "pissa"}, "type adapter.init=default"),
    ],
)
def test_frozen_experts_are_logged_or_refused(settings: dict[str, Any], reason: str) -> None:
    modules = describe_model(tiny_mixture("qwen3_moe"))
    found = find_targets(LoraConfig(r=2, **settings), modules)
    assert not found.problems and not found.experts
    assert reason in found.frozen_experts
    requested = find_targets(LoraConfig(**({"r": 2} | settings | {"experts": "lora"})), modules)
    assert reason in requested.problems[0]


def test_experts_of_other_classes_run_in_peft(tmp_path: Path) -> None:
    """They have no grouped products; Llama 4's router is a linear module with two outputs."""
    model = random_family()
    adapted = adapt(model, experts="lora")
    names = [one.name for one in trainable_weights(adapted)]
    assert not any(".router.lora" in name for name in names)
    loss_of(adapted).backward()
    assert all(one.parameter.grad.any() for one in trainable_weights(adapted))
    save_adapter(adapted, tmp_path)
    assert verify_adapter(adapted, tmp_path, row()) < 1e-5
    check_stock(random_family(), tmp_path, probe_logits(adapted, row()))


def random_family() -> Any:
    torch.manual_seed(0)
    config = tiny_config("llama4_text")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return model


def test_dora_that_stock_peft_could_not_load_is_refused(tmp_path: Path) -> None:
    """It treats matrices of dense layers as experts; the suggested setting works."""
    kind, dora = "deepseek_v3", {"r": 2, "use_dora": True}
    with pytest.raises(UserError, match=f"treats down_proj, gate_proj, up_proj of {kind}"):
        apply_adapter(tiny_mixture(kind), LoraConfig(**dora), half_precision=False)
    config = LoraConfig(**dora, target_modules=["o_proj"])
    adapted = apply_adapter(tiny_mixture(kind), config, half_precision=False)
    save_adapter(adapted, tmp_path)
    check_stock(tiny_mixture(kind), tmp_path, probe_logits(adapted, row()))


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_4_bit_experts_equal_their_dequantized_weights(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16} if kind != "deepseek_v3" else {"hidden_size": 64}
    tiny_mixture(kind, **sizes).save_pretrained(tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"))
    nf4 = QuantizationConfig(method="nf4")
    quantized = load_base(config, "eager", torch.float32, nf4)
    weights = [storage_of(each) for each in quantized.parameters()]
    packed = sum(one.num_weights for one in weights if one.dtype == "nf4")
    assert packed > 0.8 * sum(one.num_weights for one in weights)

    on_meta = load_base(config, "eager", torch.float32, nf4, on_meta=True)
    plain = load_base(config, "eager", torch.float32)
    assert describe_model(on_meta).experts == describe_model(quantized).experts
    assert describe_model(quantized).experts == describe_model(plain).experts
    modules = dict(quantized.named_modules())
    for name, weight in plain.named_parameters():
        owner, _, own = name.rpartition(".")
        layer = modules[owner]._modules.get(f"{own}_4bit")
        if own == "weight":
            layer = modules[owner]
        if layer is not None and type(layer.weight).__name__ == "Params4bit":
            stored, read = stored_4bit(layer)
            assert not torch.equal(weight, read(stored))
            weight.data.copy_(read(stored))
    check_logits(quantized, probe_logits(plain, row()))
    ours, theirs = adapt(quantized), adapt(plain)
    for model in (ours, theirs):
        loss_of(model.train()).backward()
    for one, other in zip(trainable_weights(ours), trainable_weights(theirs), strict=True):
        assert one.name == other.name
        assert_near(one.parameter.grad, other.parameter.grad, atol=1e-4, rtol=1e-3)
    save_adapter(ours, tmp_path / "adapter")
    assert verify_adapter(ours, tmp_path / "adapter", row()) < 1e-5
    reopened = load_adapter(load_base(config, "eager", torch.float32, nf4), tmp_path / "adapter")
    check_logits(reopened, probe_logits(ours, row()), 1e-5)


def test_experts_that_would_stay_unquantized_are_refused(tmp_path: Path) -> None:
    tiny_mixture("qwen3_moe").save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    said = r"7\d % of the weights of this qwen3_moe.*type quantization=nf4"
    with pytest.raises(UserError, match=said):
        load_base(config, "eager", torch.float32, QuantizationConfig(method="int8"))


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "switch_transformers"])
def test_routers_choose_the_same_experts_as_before(kind: str) -> None:
    """Under any name of the routers; a second run without changes chooses the same."""
    if kind == "switch_transformers":
        model = AutoModelForSeq2SeqLM.from_config(tiny_config(kind)).eval()
        inputs = {"input_ids": row()["input_ids"], "labels": row()["input_ids"]}
    else:
        model, inputs = tiny_mixture(kind), row()

    def run(experts: RoutingTrace) -> torch.Tensor:
        with torch.no_grad(), experts:
            return model(**inputs, use_cache=False).logits

    first, again, kept = RoutingTrace(), RoutingTrace(), RoutingTrace()
    logits = run(first)
    assert torch.equal(run(again), logits) and again.count_changed(first)[0] == 0
    for name, weight in model.named_parameters():
        if "gate.weight" in name or "router" in name:
            weight.data = -weight.data
    run(again := RoutingTrace())
    changed, of_all = again.count_changed(first)
    assert 0 < changed <= of_all
    run(kept := RoutingTrace(replay=first))
    assert kept.count_changed(first)[0] == 0
