"""LoRA: targets in every architecture, initial weights, token rows, continuing, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import T5ForConditionalGeneration

from app.model.adapter import LoraConfig, apply_adapter, find_targets, probe_logits, save_adapter
from app.model.description import describe_model
from app.model.recompute import RecomputeConfig, apply_recompute
from tests.families import on_meta, tiny_family
from tests.tiny import TINY, move, probe, probe_of, tiny_llama, tiny_t5

BF16, FP32 = torch.bfloat16, torch.float32
LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapt(model: Any, *, half: bool = False, token_ids: Any = (), **settings: Any) -> Any:
    config = LoraConfig(**({"r": 4, "dropout": 0.0} | settings))
    return apply_adapter(model, config, half_precision=half, token_ids=token_ids)


def adapted_names(model: Any) -> list[str]:
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    return [n.removeprefix("base_model.model.").split(".lora_A")[0] for n in names]


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flan_t5(folder: Path) -> T5ForConditionalGeneration:
    """A T5 with an untied head, although its class lists it as tied."""
    model = tiny_t5()
    torch.manual_seed(5)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    read = T5ForConditionalGeneration.from_pretrained(folder).eval()
    assert read.lm_head.weight is not read.shared.weight
    return read


# Targets.


@pytest.mark.parametrize(
    ("kind", "numbers", "expected"),
    [
        ("llama", {"tie_word_embeddings": False}, LLAMA),
        ("phi3", {}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt2", {}, {"c_attn", "c_proj", "c_fc"}),
        (
            "falcon",
            {"tie_word_embeddings": False},
            {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
        ),
        ("t5", {}, {"q", "k", "v", "o", "wi", "wo"}),
    ],
)
def test_all_linear_targets_every_matrix_but_the_head(
    kind: str, numbers: dict[str, Any], expected: set[str]
) -> None:
    model = on_meta(kind, **numbers)
    chosen = find_targets(LoraConfig(), describe_model(model)).matrices
    assert {name.rpartition(".")[2] for name in chosen} == expected
    assert "lm_head" not in chosen
    plain = [
        name
        for name, module in model.named_modules()
        if hasattr(module, "weight") and module.weight.ndim == 2 and "embed" not in name
    ]
    rest = {name.rpartition(".")[2] for name in plain} - expected
    assert rest <= {"lm_head", "wte", "wpe", "shared", "word_embeddings", "relative_attention_bias"}


@pytest.mark.parametrize("kind", TINY)
def test_a_new_adapter_changes_no_logit_of_any_architecture(kind: str) -> None:
    model = TINY[kind]()
    row = probe_of(model)
    plain = probe_logits(copy.deepcopy(model), row)
    adapted = adapt(model)
    assert torch.allclose(probe_logits(adapted, row), plain, atol=1e-6)
    assert trained(adapted) and all("lora_" in name for name in trained(adapted))
    assert adapted.peft_config["default"].fan_in_fan_out == (kind == "gpt2")
    pair = kind in ("t5", "bart")
    assert adapted.peft_config["default"].task_type == ("SEQ_2_SEQ_LM" if pair else "CAUSAL_LM")
    move(adapted)
    assert not torch.allclose(probe_logits(adapted, row), plain, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "layers"), [*((kind, "top 1") for kind in TINY), ("llama", "all")]
)
def test_stock_peft_loads_a_saved_adapter_onto_the_same_modules(
    kind: str, layers: str, tmp_path: Path
) -> None:
    settings = {"rank_pattern": {r".*\.1\..*": 2}, "use_rslora": True, "layers": layers}
    model = move(adapt(TINY[kind](), **settings))
    save_adapter(model, tmp_path)
    read = peft.PeftModel.from_pretrained(TINY[kind](), str(tmp_path)).eval()
    assert adapted_names(read) == adapted_names(model)
    row = probe_of(read)
    # Our order of additions differs, and rounding grows with matrices of this size.
    read, model = read.double(), model.double()
    theirs, ours = probe_logits(read, row), probe_logits(model, row)
    assert torch.allclose(theirs, ours, rtol=1e-9, atol=1e-9)


def test_layer_numbers_tell_encoder_and_decoder_apart() -> None:
    names = adapted_names(adapt(tiny_t5(), layers="top 1"))
    assert names
    assert all(name.startswith("decoder.block.1.") for name in names)
    names = adapted_names(adapt(tiny_t5(), layers=[0], target_modules=["q", "v"]))
    assert len(names) == 2
    assert all(name.startswith("encoder.block.0.") for name in names)
    model = adapt(tiny_llama(num_hidden_layers=11), layers=[1], target_modules=["q_proj"])
    assert adapted_names(model) == ["model.layers.1.self_attn.q_proj"], "nor is layer 1 layer 10"


def test_settings_reach_peft() -> None:
    pattern: Any = {"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"mlp.down_proj": 16.0}}
    layer = adapt(tiny_llama(), **pattern).base_model.model.model.layers[0].mlp.down_proj
    assert layer.lora_A["default"].weight.shape == (8, 48)
    assert layer.scaling["default"] == 16 / 8
    model = adapt(tiny_llama(), r=6, alpha=18.0, dropout=0.25, use_rslora=True, use_dora=True)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (6, 32)
    assert layer.scaling["default"] == pytest.approx(18 / 6**0.5)
    assert layer.lora_dropout["default"].p == 0.25
    magnitudes = [name for name in trained(model) if "magnitude" in name]
    assert len(magnitudes) == 2 * len(LLAMA)
    layer = adapt(tiny_llama(), r=6, alpha=18.0).base_model.model.model.layers[1].mlp.up_proj
    assert layer.scaling["default"] == pytest.approx(18 / 6)
    config = adapt(tiny_llama(), init="gaussian").peft_config["default"]
    assert config.init_lora_weights == "gaussian"


# Initial weights.


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_residual_and_adapter_sum_to_the_weight(kind: str, init: str) -> None:
    base = TINY[kind]()
    if (kind, init) == ("gpt2", "olora"):
        with pytest.raises(ValueError, match=r"is a Conv1D, .*type adapter\.init=pissa"):
            adapt(base, init=init)
        return
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = adapt(base, init=init, alpha=6.0)
    for name in adapted_names(model):
        layer = model.get_submodule(f"base_model.model.{name}")
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        update = (6.0 / 4) * b @ a
        residual = layer.base_layer.weight
        original = before[f"{name}.weight"]
        whole = residual + (update.T if kind == "gpt2" else update)
        assert torch.allclose(whole, original, atol=1e-5)
        if init == "pissa":  # the best approximation of this rank is what was taken out
            u, s, vt = torch.linalg.svd(original.T if kind == "gpt2" else original)
            best = u[:, :4] @ torch.diag(s[:4]) @ vt[:4]
            assert torch.allclose(update, best, atol=1e-4)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"init": "pissa"}, {"init": "olora"}])
def test_init_on_a_bf16_base_is_rounded_once(settings: dict[str, Any]) -> None:
    base = tiny_llama().to(BF16)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = adapt(base, alpha=4.0, **settings)
    for name in adapted_names(model):
        layer = model.get_submodule(f"base_model.model.{name}")
        original = before[f"{name}.weight"].float()
        if "use_dora" in settings:
            magnitude = layer.lora_magnitude_vector["default"].weight
            assert magnitude.dtype == FP32
            assert torch.allclose(magnitude, original.norm(dim=1), rtol=1e-6)
        else:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            whole = layer.base_layer.weight.float() + layer.scaling["default"] * b @ a
            # Only the residual is stored in bf16, and it is smaller than the weight.
            assert (whole - original).abs().max() <= 2**-8 * original.abs().max()


# Token rows, and modules trained in full.


@pytest.mark.parametrize("kind", [*TINY, "untied", "flan_t5"])
def test_token_rows_train_in_embedding_and_head(kind: str, tmp_path: Path) -> None:
    if kind == "untied":
        base = tiny_llama(tie_word_embeddings=False)
    else:
        base = flan_t5(tmp_path) if kind == "flan_t5" else TINY[kind]()
    by_hand, row = copy.deepcopy(base), probe_of(base)
    plain = probe_logits(copy.deepcopy(base), row)
    ids = [5, int(row["input_ids"][0, 2]), 63]
    model = adapt(base, token_ids=ids)
    deltas = {n: p for n, p in model.named_parameters() if "trainable_tokens_delta" in n}
    assert len(deltas) == (2 if kind in ("untied", "flan_t5") else 1)
    assert all(p.requires_grad and p.shape == (3, 32) for p in deltas.values())
    assert torch.allclose(probe_logits(model, row), plain, atol=1e-5)

    torch.manual_seed(4)
    with torch.no_grad():
        for name, delta in deltas.items():
            delta += torch.randn_like(delta)
            is_head = "lm_head" in name
            module = by_hand.get_output_embeddings() if is_head else by_hand.get_input_embeddings()
            module.weight[ids] = delta
    moved = probe_logits(model, row)
    assert torch.allclose(moved, probe_logits(by_hand, row), atol=1e-5)
    assert not torch.allclose(moved, plain, atol=1e-2)
    merged = model.merge_and_unload().eval()
    assert torch.allclose(probe_logits(merged, row), moved, atol=1e-5)


def test_token_rows_that_cannot_train_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token 64 has no row: .* 64 rows; .*added_tok"):
        adapt(tiny_llama(), token_ids=[64])
    phi = tiny_family("phi")
    with pytest.raises(ValueError, match=r"has a bias.*to_save=\[model.embed_tokens,lm_head\]"):
        adapt(copy.deepcopy(phi), token_ids=[3])
    model = adapt(phi, token_ids=[3], modules_to_save=["embed_tokens", "lm_head"])
    assert {n.split(".modules_to_save")[0].rpartition(".")[2] for n in trained(model)} >= {
        "embed_tokens",
        "lm_head",
    }
    assert not [name for name in trained(model) if "trainable_tokens" in name]


def test_modules_to_save_match_exactly_and_get_no_matrices() -> None:
    model = adapt(tiny_llama(tie_word_embeddings=False), modules_to_save=["lm_head", "o_proj"])
    whole = {n for n in trained(model) if "modules_to_save" in n}
    assert len(whole) == 3
    assert not [name for name in adapted_names(model) if name.endswith("o_proj")]
    # Names match only after a dot: the norms inside the layers stay frozen.
    model = adapt(tiny_llama(), modules_to_save=["norm"])
    whole = {n for n in trained(model) if "modules_to_save" in n}
    assert whole == {"base_model.model.model.norm.modules_to_save.default.weight"}


# Continuing a saved adapter.


def test_a_continued_adapter_trains_the_saved_weights_in_fp32(tmp_path: Path) -> None:
    model = move(adapt(tiny_llama(), layers="top 1", token_ids=()))
    save_adapter(model, tmp_path)
    base = tiny_llama().to(BF16)
    apply_recompute(base, RecomputeConfig(mode="full"))
    again = adapt(base, path=str(tmp_path))
    assert trained(again).keys() == trained(model).keys()
    assert all(torch.equal(p, trained(model)[name]) for name, p in trained(again).items())
    assert {p.dtype for p in trained(again).values()} == {FP32}
    assert not base.get_input_embeddings()(probe()["input_ids"]).requires_grad
    half = adapt(tiny_llama().to(BF16), half=True, path=str(tmp_path))
    assert {p.dtype for p in trained(half).values()} == {BF16}


def test_continuing_with_new_tokens_needs_an_adapter_with_their_rows(tmp_path: Path) -> None:
    for name, ids in (("without", []), ("with", [5, 63])):
        model = move(adapt(tiny_llama(), token_ids=ids))
        save_adapter(model, tmp_path / name)
    with pytest.raises(ValueError, match=r"does not train the rows of tokens \[5\]"):
        adapt(tiny_llama(), path=str(tmp_path / "without"), token_ids=[5])
    again = adapt(tiny_llama(), path=str(tmp_path / "with"), token_ids=[5])
    assert [name for name in trained(again) if "trainable_tokens" in name]


# Dtypes, recompute and dropout.


@pytest.mark.parametrize(
    ("half", "expected", "settings"),
    [
        (False, FP32, {"use_dora": True}),
        (False, FP32, {"modules_to_save": ["lm_head"]}),
        (True, BF16, {"init": "pissa"}),
    ],
)
def test_trainable_parameters_are_fp32_unless_half_precision(
    half: bool, expected: torch.dtype, settings: dict[str, Any]
) -> None:
    base = tiny_llama(tie_word_embeddings=False).to(BF16)
    ids = [] if "modules_to_save" in settings else [3, 4]
    model = adapt(base, half=half, token_ids=ids, **settings)
    assert {p.dtype for p in trained(model).values()} == {expected}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {BF16}
    with torch.autocast("cpu", BF16, enabled=not half):
        loss = model.train()(input_ids=probe()["input_ids"]).logits.float().sum()
    loss.backward()
    assert all(p.grad is not None for p in trained(model).values())
