"""An adapter is what its settings say, and what is on disk is it or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.adapter import (
    FullConfig,
    LoraConfig,
    apply_adapter,
    check_adapter_file,
    load_adapter,
    probe_logits,
    report_trainable,
    save_adapter,
    verify_adapter,
)
from tests.tiny import probe, tiny_llama

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
FILE = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]


def adapted(config: LoraConfig | None = None, *, half: bool = False, **numbers: Any) -> Any:
    dtype = torch.bfloat16 if half else torch.float32
    model = tiny_llama(**numbers).to(dtype)
    return apply_adapter(model, config or LoraConfig(r=4), half_precision=half)


def learn_something(model: Any) -> None:
    """Move every lora_B away from zero, as an optimizer would."""
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


@pytest.fixture
def trained() -> Any:
    model = adapted()
    learn_something(model)
    return model


@pytest.fixture
def saved(trained: Any, tmp_path: Path) -> Path:
    save_adapter(trained, tmp_path / "adapter")
    return tmp_path / "adapter"


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def adapted_modules(model: Any) -> set[str]:
    return {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


def test_all_linear_means_every_linear_layer_but_the_head() -> None:
    modules = adapted_modules(adapted())
    assert {name.rpartition(".")[2] for name in modules} == LINEAR
    assert len(modules) == 2 * len(LINEAR)


def test_a_list_adapts_what_it_names_and_nothing_else() -> None:
    modules = adapted_modules(adapted(LoraConfig(target_modules=["q_proj", "v_proj"])))
    assert {name.rpartition(".")[2] for name in modules} == {"q_proj", "v_proj"}


def test_a_string_is_an_expression_over_full_names() -> None:
    modules = adapted_modules(adapted(LoraConfig(target_modules=r".*layers\.1\..*q_proj")))
    assert [name for name in modules if "layers.1." in name and name.endswith("q_proj")]
    assert len(modules) == 1


def test_full_leaves_every_weight_trainable() -> None:
    model = apply_adapter(tiny_llama(), FullConfig(), half_precision=False)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_lora_freezes_the_base() -> None:
    trainable = [name for name, p in adapted().named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)


def test_a_new_adapter_changes_no_logit() -> None:
    plain = probe_logits(tiny_llama(), probe())
    assert torch.equal(probe_logits(adapted(), probe()), plain)


def test_numbers_of_the_settings_reach_peft() -> None:
    config = LoraConfig(r=6, alpha=18.0, dropout=0.25)
    model = adapted(config)
    lora = model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (6, 18.0, 0.25)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (6, 32)
    assert layer.scaling["default"] == pytest.approx(18 / 6)
    assert layer.lora_dropout["default"].p == 0.25


def test_nothing_is_dropped_unless_it_is_asked_for() -> None:
    assert LoraConfig().dropout == 0.0
    layer = adapted(LoraConfig()).base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.lora_dropout["default"], torch.nn.Identity)


def test_dora_learns_magnitudes() -> None:
    assert not [name for name, _ in adapted().named_parameters() if "magnitude" in name]
    model = adapted(LoraConfig(r=4, use_dora=True))
    magnitudes = [p for name, p in model.named_parameters() if "magnitude" in name]
    assert len(magnitudes) == 2 * len(LINEAR)
    assert all(parameter.requires_grad for parameter in magnitudes)


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    model = adapted(LoraConfig(r=4, alpha=8.0, use_rslora=True))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert layer.scaling["default"] == pytest.approx(8 / 2)


@pytest.mark.parametrize(
    ("half_precision", "expected"), [(False, torch.float32), (True, torch.bfloat16)]
)
def test_the_adapter_on_a_bf16_base_is_fp32_unless_all_is_bf16(
    half_precision: bool, expected: torch.dtype
) -> None:
    base = tiny_llama().to(torch.bfloat16)
    model = apply_adapter(base, LoraConfig(r=4), half_precision=half_precision)
    dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, expected)}


def test_what_trains_is_counted_with_its_dtypes() -> None:
    base = tiny_llama().to(torch.bfloat16)
    num_base = sum(p.numel() for p in base.parameters())
    config = LoraConfig(r=4, target_modules=["q_proj"])
    report = report_trainable(apply_adapter(base, config, half_precision=False))
    num_adapter = 2 * (4 * 32 + 32 * 4)  # two layers, A and B of a 32 x 32 matrix
    assert report.num_trainable == num_adapter
    assert report.num_total == num_base + num_adapter
    assert report.dtypes == {"bfloat16": num_base, "float32": num_adapter}


def test_a_model_in_which_nothing_trains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adapter\.target_modules"):
        report_trainable(tiny_llama().requires_grad_(False))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("half", [False, True])
def test_saved_verified_and_loaded_gives_the_same_logits(
    options: dict[str, bool], half: bool, tmp_path: Path
) -> None:
    model = adapted(LoraConfig(r=4, **options), half=half)
    learn_something(model)
    in_memory = probe_logits(model, probe())
    save_adapter(model, tmp_path)
    assert verify_adapter(model, tmp_path, probe()) == 0.0
    dtype = torch.bfloat16 if half else torch.float32
    loaded = load_adapter(tiny_llama().to(dtype), tmp_path)
    assert torch.equal(probe_logits(loaded, probe()), in_memory)
    assert not torch.equal(probe_logits(tiny_llama().to(dtype), probe()), in_memory)
    assert not loaded.training


def test_an_fp32_adapter_on_a_bf16_base_is_not_rounded_when_it_is_read(tmp_path: Path) -> None:
    base = tiny_llama().to(torch.bfloat16)
    model = apply_adapter(base, LoraConfig(r=4), half_precision=False)
    learn_something(model)
    save_adapter(model, tmp_path)
    in_memory = probe_logits(model, probe())
    assert verify_adapter(model, tmp_path, probe()) == 0.0
    loaded = load_adapter(tiny_llama().to(torch.bfloat16), tmp_path)
    assert {p.dtype for name, p in loaded.named_parameters() if "lora_" in name} == {torch.float32}
    assert torch.equal(probe_logits(loaded, probe()), in_memory)


def test_verifying_leaves_the_model_as_it_was(trained: Any, saved: Path) -> None:
    before = {name: parameter.requires_grad for name, parameter in trained.named_parameters()}
    trained.train()
    verify_adapter(trained, saved, probe())
    assert list(trained.peft_config) == ["default"]
    assert trained.active_adapters == ["default"]
    assert {name: p.requires_grad for name, p in trained.named_parameters()} == before
    assert trained.training


def test_the_file_is_pefts_own_and_holds_no_more_than_the_adapter(saved: Path) -> None:
    assert json.loads((saved / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert not list(saved.glob("*.bin"))
    names = load_file(saved / FILE).keys()
    assert len(names) == 2 * 2 * len(LINEAR)
    assert all("lora_A" in name or "lora_B" in name for name in names)
    plain = peft.PeftModel.from_pretrained(tiny_llama(), str(saved))
    assert list(plain.peft_config) == ["default"]


def drop_one(tensors: Tensors) -> None:
    del tensors[min(tensors)]


def drop_all(tensors: Tensors) -> None:
    tensors.clear()
    tensors["something.else"] = torch.ones(1)


def add_one(tensors: Tensors) -> None:
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(4, 32)


def cut_one(tensors: Tensors) -> None:
    name = min(tensors)
    tensors[name] = tensors[name][:, :-1].contiguous()


def poison_one(tensors: Tensors) -> None:
    tensors[max(tensors)][0, 0] = float("nan")


def overflow_one(tensors: Tensors) -> None:
    tensors[max(tensors)][0, 0] = float("inf")


DAMAGES = [
    (drop_one, "1 of 28 adapter tensors are missing"),
    (drop_all, "28 of 28 adapter tensors are missing"),
    (add_one, r"1 are unknown \['base_model.model.model.layers.9"),
    (cut_one, "has shape .* this base needs"),
    (poison_one, "holds NaN or infinity"),
    (overflow_one, "holds NaN or infinity"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_adapter_file_is_refused_by_whoever_reads_it(
    damage: Callable[[Tensors], None], said: str, trained: Any, saved: Path
) -> None:
    rewrite(saved, damage)
    with pytest.raises(ValueError, match=said):
        check_adapter_file(trained, saved)
    with pytest.raises(ValueError, match=said):
        verify_adapter(trained, saved, probe())
    with pytest.raises(ValueError, match=said):
        load_adapter(tiny_llama(), saved)


def test_an_adapter_of_another_base_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match="this base needs"):
        load_adapter(tiny_llama(intermediate_size=40), saved)
    with pytest.raises(ValueError, match="are unknown"):
        load_adapter(tiny_llama(num_hidden_layers=1), saved)


def test_an_adapter_that_learned_nothing_is_refused_after_training(tmp_path: Path) -> None:
    model = adapted()
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="every lora_B is zero"):
        check_adapter_file(model, tmp_path)
    with pytest.raises(ValueError, match="every lora_B is zero"):
        verify_adapter(model, tmp_path, probe())


def test_a_file_of_other_values_is_refused(trained: Any, saved: Path) -> None:
    def scale(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] *= 1.1

    rewrite(saved, scale)
    check_adapter_file(trained, saved)
    with pytest.raises(ValueError, match="its logits differ by"):
        verify_adapter(trained, saved, probe())
