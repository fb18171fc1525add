"""Saved adapters and models equal the trained ones; damaged files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from app.model import save as saving
from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
from app.model.adapter.apply import apply_adapter, has_modified_base
from app.model.adapter.saved import (
    check_adapter_file,
    load_adapter,
    probe_logits,
    save_adapter,
    verify_adapter,
)
from app.model.adapter.settings import ADAPTER_FILE
from app.model.architecture import load_architecture
from app.model.base import ModelConfig, load_base
from app.model.save import save_model
from common.errors import TrainingFault
from tests.tiny import MODELS, move, probe_of, tiny_llama

BF16, FP32 = torch.bfloat16, torch.float32
ADAPTERS: dict[str, AdapterConfig] = {
    "lora": LoraConfig(r=4, dropout=0.0),
    "rslora": LoraConfig(r=4, dropout=0.0, use_rslora=True),
    "dora": LoraConfig(r=4, dropout=0.0, use_dora=True),
    "ranks": LoraConfig(
        r=4, dropout=0.0, rank_pattern={"up_proj": 7}, alpha_pattern={"down_proj": 5.0}
    ),
    "whole": LoraConfig(r=4, dropout=0.0, modules_to_save=["lm_head", "norm"]),
    "tokens": LoraConfig(r=4, dropout=0.0),
    "ia3": Ia3Config(),
}
Tensors = dict[str, torch.Tensor]


def adapted(kind: str, *, half: bool = False, base_dtype: torch.dtype = FP32) -> Any:
    """An untied Llama with an adapter whose weights have changed, as in training."""
    model = tiny_llama(tie_word_embeddings=False).to(base_dtype)
    ids = [5, 9] if kind == "tokens" else []
    return move(apply_adapter(model, ADAPTERS[kind], half_precision=half, token_ids=ids))


def base(dtype: torch.dtype = FP32) -> Any:
    return tiny_llama(tie_word_embeddings=False).to(dtype)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    change(tensors)
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def in_eval(model: Any) -> torch.Tensor:
    return probe_logits(model, probe_of(model))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [*((kind, (False, BF16)) for kind in ADAPTERS), ("lora", (False, FP32)), ("ia3", (True, BF16))],
)
def test_every_adapter_is_saved_verified_and_loaded_exactly(
    kind: str, precision: tuple[bool, torch.dtype], tmp_path: Path
) -> None:
    half, base_dtype = precision
    model = adapted(kind, half=half, base_dtype=base_dtype)
    kept = {name: p.requires_grad for name, p in model.named_parameters()}
    expected = in_eval(model)
    save_adapter(model, tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    model.train()
    assert verify_adapter(model, tmp_path, probe_of(model)) == 0.0
    assert {name: p.requires_grad for name, p in model.named_parameters()} == kept
    assert model.training and model.active_adapters == list(model.peft_config) == ["default"]
    assert torch.equal(in_eval(model), expected)
    loaded = load_adapter(base(base_dtype), tmp_path)
    assert torch.equal(in_eval(loaded), expected)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert not torch.equal(in_eval(base(base_dtype)), expected)


@pytest.mark.parametrize(
    ("kind", "half"), [("dora", False), ("whole", False), ("tokens", True), ("ia3", False)]
)
def test_a_continued_adapter_has_the_same_trainable_parameters(
    kind: str, half: bool, tmp_path: Path
) -> None:
    model = adapted(kind, half=half, base_dtype=BF16)
    save_adapter(model, tmp_path)
    loaded = load_adapter(base(BF16), tmp_path, trainable=True, half_precision=half)
    assert loaded.training
    assert torch.equal(in_eval(loaded), in_eval(model))
    before = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert {n: p.dtype for n, p in loaded.named_parameters() if p.requires_grad} == before
    assert set(before.values()) == {BF16 if half else FP32}


EXTRA = "base_model.model.model.layers.9.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "dropped": (lambda kept: kept.pop(max(kept)), r"\b1 of \d+ adapter tensors are missing"),
    "added": (lambda kept: kept.update({EXTRA: torch.ones(4, 32)}), "1 are unknown"),
    "empty": (lambda kept: kept.update({max(kept): torch.ones(0)}), "is empty"),
    "longer": (
        lambda kept: kept.update({max(kept): torch.cat([kept[max(kept)]] * 2)}),
        "has shape .* this base needs",
    ),
    "NaN": (lambda kept: kept[max(kept)].view(-1)[0].fill_(torch.nan), "holds NaN or infinity"),
    "zeros": (
        lambda kept: [each.zero_() for each in kept.values()],
        "is zero: nothing was learned",
    ),
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [*(("lora", damage) for damage in DAMAGES), ("ia3", "zeros"), ("tokens", "dropped")],
)
def test_a_damaged_file_of_any_kind_is_refused(kind: str, damage: str, tmp_path: Path) -> None:
    model, (change, message) = adapted(kind), DAMAGES[damage]
    save_adapter(model, tmp_path)
    check_adapter_file(model, tmp_path)
    rewrite(tmp_path, change)
    expected = in_eval(model)
    with pytest.raises(ValueError, match=message):
        check_adapter_file(model, tmp_path)
    with pytest.raises(ValueError, match=message):
        verify_adapter(model, tmp_path, probe_of(model))
    assert torch.equal(in_eval(model), expected)
    for trainable in (False, True):
        with pytest.raises(ValueError, match=message):
            load_adapter(base(), tmp_path, trainable=trainable)


def test_an_adapter_of_another_base_or_of_other_values_is_refused(tmp_path: Path) -> None:
    def scale(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] *= 1.1

    model = adapted("lora")
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="this base needs"):
        load_adapter(tiny_llama(intermediate_size=40), tmp_path)
    with pytest.raises(ValueError, match="are unknown"):
        load_adapter(tiny_llama(num_hidden_layers=1), tmp_path)
    rewrite(tmp_path, scale)
    check_adapter_file(model, tmp_path)
    with pytest.raises(ValueError, match="its logits differ by"):
        verify_adapter(model, tmp_path, probe_of(model))


@pytest.mark.parametrize(
    ("kind", "part", "value"),
    [("lora", "lora_B", 0.0), ("lora", "lora_A", 0.0), ("ia3", "ia3_l", 1.0)],
)
def test_an_adapter_without_effect_is_refused(
    kind: str, part: str, value: float, tmp_path: Path
) -> None:
    def keep(tensors: Tensors, num_kept: int) -> None:
        names = [name for name in tensors if part in name]
        for name in names[num_kept:]:
            tensors[name].fill_(value)

    save_adapter(adapted(kind), tmp_path)
    rewrite(tmp_path, lambda tensors: keep(tensors, 1))
    load_adapter(base(), tmp_path)
    rewrite(tmp_path, lambda tensors: keep(tensors, 0))
    with pytest.raises(ValueError, match=f"every {part} is .*: nothing was learned"):
        load_adapter(base(), tmp_path)


def test_another_tools_adapter_on_another_base_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_adapter(adapted("lora"), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": "someone/else"}
    file.write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        load_adapter(base(), tmp_path)
    assert "was trained on someone/else and is loaded onto" in caplog.text


CONVERTED = [
    LoraConfig(r=4, alpha=6.0, dropout=0.0, init="olora", rank_pattern={"up_proj": 7},
               alpha_pattern={"up_proj": 5.0, "q_proj": 3.0}),
    LoraConfig(r=4, dropout=0.0, init="pissa", use_rslora=True, rank_pattern={"down_proj": 2},
               alpha_pattern={"down_proj": 5.0}, modules_to_save=["lm_head"]),
]  # fmt: skip


def saved(model: Any, config: AdapterConfig, make: Callable[[], Any], folder: Path) -> Any:
    """Save and verify a model trained on the base of `make`; return the reopened model."""
    probe = {name: ids[0].tolist() for name, ids in probe_of(model).items()}
    written, kept = save_model(
        model, config, make().config, folder, probe, base={"path": "b"}, reload_base=make
    )
    assert written == folder / "adapter"
    return kept


@pytest.mark.parametrize("config", CONVERTED, ids=range(len(CONVERTED)))
def test_an_adapter_with_a_modified_base_is_saved_for_the_original_base(
    config: LoraConfig, tmp_path: Path
) -> None:
    model = apply_adapter(base(), config, half_precision=False)
    assert has_modified_base(model)
    start = in_eval(model)
    assert torch.allclose(start, in_eval(base()), atol=1e-4)
    move(model)
    expected = in_eval(model)
    assert not torch.allclose(expected, start, atol=0.1)
    kept = saved(model, config, base, tmp_path)
    assert kept is not model
    # The saved adapter is a plain LoRA, for stock peft and for evaluation.
    plain = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    for reopened in (kept, plain, load_adapter(base(), tmp_path / "adapter")):
        assert torch.allclose(in_eval(reopened), expected, atol=2e-4)
    with kept.disable_adapter():
        assert torch.equal(in_eval(kept), in_eval(base()))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["init_lora_weights"] is True
    assert written["r"] == 8
    origin = json.loads((tmp_path / "adapter" / "base.json").read_text())
    assert origin == {"path": "b", "adapter_config": json.dumps(written)}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_wrong_converted_file_is_refused(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoraConfig(r=4, dropout=0.0, init="pissa")
    model = move(apply_adapter(base(dtype), config, half_precision=False))
    write = saving.save_converted

    def write_badly(model: Any, folder: Path) -> None:
        write(model, folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        name = next(name for name in tensors if "lora_B" in name)
        tensors[name] = tensors[name].roll(1, 0)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(saving, "save_converted", write_badly)
    with pytest.raises(TrainingFault, match="rounding explains"):
        saved(model, config, lambda: base(dtype), tmp_path)


@pytest.mark.parametrize(("init", "half", "dtype"), [("olora", False, FP32), ("pissa", True, BF16)])
def test_an_adapter_with_its_initial_weights_is_refused(
    init: str, half: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = LoraConfig(r=4, dropout=0.0, init=init)
    model = apply_adapter(base(dtype), config, half_precision=half)
    with pytest.raises(TrainingFault, match="nothing was learned"):
        saved(model, config, lambda: base(dtype), tmp_path)


@pytest.mark.parametrize(
    ("name", "method", "num_new"),
    [*((name, "full", 3) for name in MODELS), ("tied", "freeze", 3), ("untied", "freeze", 0)],
)
def test_a_whole_model_is_saved_unchanged(
    name: str, method: str, num_new: int, tmp_path: Path
) -> None:
    config = FullConfig() if method == "full" else FreezeConfig(layers="top 1")
    MODELS[name]().to(BF16).save_pretrained(tmp_path / "base")
    typed = ModelConfig(path=str(tmp_path / "base"))
    dtype = FP32 if isinstance(config, FullConfig) else BF16
    new_ids = range(64, 64 + num_new)
    model = apply_adapter(
        load_base(typed, "sdpa", dtype, new_ids=new_ids), config, half_precision=False
    )
    move(model)
    kept = {n: p.dtype for n, p in model.named_parameters()}
    assert set(kept.values()) == {FP32} | ({BF16} if dtype is BF16 else set())
    architecture = load_architecture(typed)
    probe = {n: ids[0].tolist() for n, ids in probe_of(model).items()}
    # Weights of two dtypes exist only under autocast, in which a run ends, too.
    with torch.autocast("cpu", BF16, enabled=len(set(kept.values())) > 1):
        written, same = save_model(
            model, config, architecture, tmp_path, probe, base={}, reload_base=lambda: None
        )
    assert same is model
    assert {n: p.dtype for n, p in model.named_parameters()} == kept
    auto = AutoModelForSeq2SeqLM if architecture.is_encoder_decoder else AutoModelForCausalLM
    reopened = auto.from_pretrained(written)
    assert reopened.dtype is BF16
    assert reopened.config.vocab_size == 64 + num_new
    for parameter_name, parameter in reopened.named_parameters():
        assert torch.equal(parameter, model.get_parameter(parameter_name).to(BF16))
    head, embedding = (
        m().weight for m in (reopened.get_output_embeddings, reopened.get_input_embeddings)
    )
    assert (head is embedding) == (name != "untied")
