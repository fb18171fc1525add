"""Which weights move, how fast and by which optimizer; every optimizer equals its library's own."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest.mock import Mock

import bitsandbytes
import peft
import pytest
import schedulefree
import torch
import transformers.optimization

from app.config.verbs import PARTS
from app.model.adapter import AdapterConfig, FullConfig, Ia3Config, LoraConfig, trainable_weights
from app.strategy.mixin import Step, clips_in_step
from app.training import eight_bit
from app.training.algorithms import MuonWithAdamW, use_averaged_weights, use_training_weights
from app.training.eight_bit import AdamW8bit
from app.training.optimizers import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LrPattern,
    MuonConfig,
    OptimizerConfig,
    PagedAdamW8bitConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
)
from common.errors import UserError
from tests.tiny import tiny_llama

CONFIGS = [schema() for schema in PARTS["optimizer"].values()]
every_optimizer = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def wide_llama(**numbers: Any) -> Any:
    """Return a tiny Llama whose matrices have at least 4096 elements, the minimum for 8 bits."""
    return tiny_llama(vocab_size=96, hidden_size=64, intermediate_size=128, **numbers)


def optimizer_of(
    model: Any, config: OptimizerConfig, *, adapter: AdapterConfig | None = None, lr: float = 1e-2
) -> Any:
    return build_optimizer(model, config, adapter or FullConfig(), lr=lr, fused=True)


def take_step(model: Any, *optimizers: Any, seed: int) -> None:
    """One step with random gradients, the same for the same seed."""
    give_gradients(model, seed)
    for optimizer in optimizers:
        use_training_weights(optimizer)
        optimizer.step()


def give_gradients(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_every_option_is_tried_here() -> None:
    assert [config.name for config in CONFIGS] == list(PARTS["optimizer"])
    assert {*PLAIN, "paged_adamw8bit"} == {*PARTS["optimizer"]}


# Parity with the libraries' own loops.


WARMUP = 4
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}
PLAIN = ("adamw", "adamw8bit", "adafactor", "muon", "schedule_free")


def of_library(name: str, matrices: Any, vectors: Any, vocabulary: Any) -> list[Any]:
    """Return the library's own optimizers of an option."""
    groups = [
        {"params": [*vocabulary, *matrices], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if name == "adamw":
        return [torch.optim.AdamW(groups, fused=True, **ADAM)]
    if name == "adamw8bit":
        eight, full = bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.AdamW
        return [
            eight(matrices, weight_decay=0.1, **ADAM),
            full(vocabulary, weight_decay=0.1, **ADAM),
            eight(vectors, weight_decay=0.0, **ADAM),
        ]
    if name == "adafactor":
        how: dict[str, Any] = {"lr": 1e-2, "scale_parameter": False, "relative_step": False}
        return [transformers.optimization.Adafactor(groups, **how)]
    if name == "muon":
        how = {"weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        others = [*vectors, *vocabulary]
        adamw = torch.optim.AdamW(others, weight_decay=0.0, fused=True, **ADAM)
        return [torch.optim.Muon(matrices, lr=2e-2, **how), adamw]
    return [schedulefree.AdamWScheduleFree(groups, warmup_steps=WARMUP, **ADAM)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_ten_steps_are_those_of_the_library(name: str) -> None:
    config = PARTS["optimizer"][name](weight_decay=0.1)
    if isinstance(config, AdamWConfig):
        config.beta1, config.beta2, config.eps = 0.8, 0.95, 1e-6
    model, plain_model = (wide_llama(tie_word_embeddings=False) for _ in range(2))
    ours = optimizer_of(model, config)
    # Schedule-free AdamW has a warm-up of its own, which the schedule takes the place of.
    is_averaging = name == "schedule_free"
    schedule = build_schedule(
        ours, ScheduleConfig(shape="constant", warmup_steps=WARMUP if is_averaging else 0), 10
    )
    parts: dict[str, list[Any]] = {"matrices": [], "vectors": [], "vocabulary": []}
    for key, parameter in plain_model.named_parameters():
        kind = "vectors" if "norm" in key else "matrices"
        if "embed_tokens" in key or ("lm_head" in key and name == "muon"):
            kind = "vocabulary"
        parts[kind].append(parameter)
    theirs = of_library(name, **parts)
    for seed in range(10):
        take_step(model, ours, seed=seed)
        schedule.step()
        take_step(plain_model, *theirs, seed=seed)
    for optimizer in (ours, *theirs):
        use_averaged_weights(optimizer)
    before, expected = weights(wide_llama(tie_word_embeddings=False)), weights(plain_model)
    for key, weight in weights(model).items():
        assert torch.allclose(weight, expected[key], rtol=1e-6, atol=1e-7), key
        assert not torch.equal(weight, before[key]), key


def adapted(config: peft.PeftConfig, **llama: Any) -> Any:
    return peft.get_peft_model(tiny_llama(**llama), config)


# What is kept in how many bits.


@pytest.mark.slow
@pytest.mark.parametrize("schema", [AdamW8bitConfig, PagedAdamW8bitConfig])
def test_large_matrices_have_moments_of_8_bits_and_what_looks_tokens_up_of_32(
    schema: type[AdamW8bitConfig],
) -> None:
    model = wide_llama(tie_word_embeddings=False)
    optimizer = optimizer_of(model, schema())
    assert type(optimizer) is AdamW8bit and not optimizer.is_paged  # on the CPU
    take_step(model, optimizer, seed=0)
    for name, parameter in model.named_parameters():
        is_small = parameter.numel() < 4096
        expected = torch.float32 if is_small or "embed_tokens" in name else torch.uint8
        for moment in ("state1", "state2"):
            assert optimizer.state[parameter][moment].dtype == expected, name
    kept = {o["name"]: o["optim_bits"] for o in optimizer.param_groups}
    assert kept == {"matrices": 8, "matrices, fp32 moments": 32, "no decay": 8}
    tokens = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4])
    adapted = peft.get_peft_model(wide_llama(), tokens)
    optimizer = optimizer_of(adapted, schema(), adapter=LoraConfig())
    kept = {o["name"]: o["optim_bits"] for o in optimizer.param_groups}
    assert kept == {"matrices": 8, "no decay, fp32 moments": 32}


@pytest.mark.slow
def test_adafactor_learns_at_the_rate_it_is_given() -> None:
    # LoRA's B starts at zero: a rate by the weight's own size would hardly move it.
    lora = peft.get_peft_model(wide_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    optimizer = optimizer_of(lora, AdafactorConfig(), adapter=LoraConfig(), lr=1e-3)
    take_step(lora, optimizer, seed=0)
    (b, _) = (p for name, p in lora.named_parameters() if "lora_B" in name)
    assert b.square().mean().sqrt().item() == pytest.approx(1e-3, rel=0.05)


@pytest.mark.slow
def test_settings_that_no_parity_has_reach_their_libraries() -> None:
    model = wide_llama()
    config = AdafactorConfig(beta2_decay=-0.5, clip_threshold=2.0)
    for group in optimizer_of(model, config).param_groups:
        assert (group["decay_rate"], group["clip_threshold"]) == (-0.5, 2.0)
    muon, adamw = optimizer_of(model, MuonConfig(momentum=0.8, beta1=0.8)).parts
    assert {group["momentum"] for group in muon.param_groups} == {0.8}
    assert {group["betas"] for group in adamw.param_groups} == {(0.8, 0.999)}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["right", "wrong", "missing"])
def test_steps_of_8_bits_are_by_the_kernel_if_it_is_equal_and_clips(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def step(weight: Any, grad: Any, state: Any, group: Any, divisor: Any) -> None:
        update = bitsandbytes.functional.optimizer_update_8bit_blockwise
        divided = grad / divisor * (1.1 if way == "wrong" else 1.0)
        moments = (state[f"{name}{number}"] for name in ("qmap", "absmax") for number in (1, 2))
        update(
            *("adam", divided, weight.detach(), state["state1"], state["state2"]),
            *(*group["betas"], 0.0, 0.0, group["eps"], state["step"], group["lr"], *moments),
            weight_decay=group["weight_decay"],
        )

    module = types.ModuleType("app.training.eight_bit_kernel")
    if way != "missing":
        module.step = step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(eight_bit, "_is_on_gpu", lambda device: True)
    models = [wide_llama() for _ in range(2)]
    with caplog.at_level("WARNING"):
        optimizer = optimizer_of(models[0], AdamW8bitConfig(weight_decay=0.1))
    assert clips_in_step(optimizer) is (way == "right")
    reasons = {"right": "", "wrong": "(it differs)", "missing": "has no attribute 'step'"}
    assert reasons[way] in caplog.text and ("8-bit steps" in caplog.text) is (way != "right")
    monkeypatch.setattr(eight_bit, "_is_on_gpu", lambda device: False)
    for model, own in zip(models, (optimizer, None), strict=True):
        each = own or optimizer_of(model, AdamW8bitConfig(weight_decay=0.1))
        for seed in range(3):
            give_gradients(model, seed)
            Step.clip(Mock(), each, 0.5)
            each.step()
    plain = weights(models[1])
    for name, found in weights(models[0]).items():
        assert torch.allclose(found, plain[name], rtol=1e-5, atol=1e-7), name


# On a GPU.


@pytest.mark.slow
@pytest.mark.gpu
@every_optimizer
def test_a_gpu_steps_as_the_cpu_does_and_waits_for_nothing(config: OptimizerConfig) -> None:
    models = {device: wide_llama().to(device) for device in ("cpu", "cuda")}
    for device, model in models.items():
        optimizer = optimizer_of(model, config)
        take_step(model, optimizer, seed=0)
        # bitsandbytes waits for the device after every parameter, by itself.
        is_watched = device == "cuda" and config.name != "paged_adamw8bit"
        for seed in range(1, 4):
            use_training_weights(optimizer)
            give_gradients(model, seed)
            try:
                torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        use_averaged_weights(optimizer)
    on_cpu, on_gpu = weights(models["cpu"]), weights(models["cuda"])
    # A moment of 8 bits next to the middle of two codes may fall to either side; Muon's products
    # are in bf16.
    tolerance = 1e-2 if "8bit" in config.name or config.name == "muon" else 1e-4
    for name, expected in on_cpu.items():
        assert torch.allclose(on_gpu[name].cpu(), expected, rtol=tolerance, atol=tolerance), name


@pytest.mark.slow
@pytest.mark.gpu
def test_the_kernel_of_8_bits_is_equal_on_a_gpu() -> None:
    optimizer = optimizer_of(wide_llama().cuda(), AdamW8bitConfig())
    assert clips_in_step(optimizer)
    assert optimizer.kernel.__name__ == "app.training.eight_bit_kernel"  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.gpu
def test_large_moments_are_paged_on_a_gpu() -> None:
    model = tiny_llama(hidden_size=256, intermediate_size=1024).cuda()
    optimizer = optimizer_of(model, PagedAdamW8bitConfig())
    assert optimizer.is_paged
    take_step(model, optimizer, seed=0)
    moments = optimizer.state[model.model.layers[0].mlp.up_proj.weight]["state1"]
    assert moments.is_paged and moments.dtype == torch.uint8


def ids_of(groups: list[dict[str, Any]]) -> list[int]:
    return [id(parameter) for group in groups for parameter in group["params"]]


def named_groups(optimizer: Any) -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in optimizer.param_groups}


def names_in(model: Any, group: dict[str, Any]) -> set[str]:
    ids = set(ids_of([group]))
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_the_vectors_of_ia3_do_not_decay_though_they_are_kept_as_matrices() -> None:
    model = adapted(
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.ndim for parameter in trained} == {2}
    optimizer = optimizer_of(model, AdamWConfig(weight_decay=0.1), adapter=Ia3Config())
    (group,) = optimizer.param_groups
    assert (group["name"], group["weight_decay"], group["lr"]) == ("no decay", 0.0, 1e-2)
    assert len(group["params"]) == len(trained) == 4


def test_magnitudes_and_token_rows_do_not_decay_and_matrices_saved_whole_do() -> None:
    model = adapted(
        peft.LoraConfig(
            r=1,  # whose A and B look like vectors and are none
            target_modules=["q_proj"],
            use_dora=True,
            trainable_token_indices=[3, 4],
            modules_to_save=["o_proj"],
        )
    )
    groups = named_groups(optimizer_of(model, AdamWConfig(weight_decay=0.1), adapter=LoraConfig()))
    assert groups.keys() == {"matrices", "no decay"}
    assert groups["matrices"]["weight_decay"] == 0.1 and groups["no decay"]["weight_decay"] == 0
    kinds = {
        name: {part for part in KIND_WORDS for each in names_in(model, group) if part in each}
        for name, group in groups.items()
    }
    assert kinds["matrices"] == {"lora_A", "lora_B", "modules_to_save"}
    assert kinds["no decay"] == {"lora_magnitude_vector", "trainable_tokens_delta"}


KIND_WORDS = (
    "lora_A",
    "lora_B",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "modules_to_save",
    "trainable_tokens_delta",
)


@pytest.mark.parametrize(("own_decay", "b_decay"), [(None, 0.1), (0.0, 0.0), (0.3, 0.3)])
def test_lora_plus_moves_every_b_faster_and_nothing_else(
    own_decay: float | None, b_decay: float
) -> None:
    model = adapted(
        peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "embed_tokens"],
            use_dora=True,
            modules_to_save=["o_proj"],
        ),
        tie_word_embeddings=False,
    )
    adapter = LoraConfig(lora_plus_ratio=16.0, lora_plus_weight_decay=own_decay)
    optimizer = optimizer_of(model, AdamWConfig(weight_decay=0.1), adapter=adapter, lr=1e-3)
    groups = named_groups(optimizer)
    expected = {"matrices": (1e-3, 0.1), "lora B": (16e-3, b_decay), "no decay": (1e-3, 0.0)}
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == expected
    assert all("lora_B" in name for name in names_in(model, groups["lora B"]))
    assert len(groups["lora B"]["params"]) == 2
    others = names_in(model, groups["matrices"]) | names_in(model, groups["no decay"])
    assert not any("lora_B" in name for name in others)
    # In LoRA of an embedding A starts at zero and B does not: the paper's argument is not theirs.
    assert sum("lora_embedding_" in name for name in others) == 2


def test_muon_alone_where_all_that_trains_is_matrices_and_adamw_alone_where_none_is() -> None:
    model = tiny_llama().requires_grad_(False)
    model.model.layers[1].self_attn.requires_grad_(True)
    optimizer = optimizer_of(model, MuonConfig())
    assert type(optimizer) is torch.optim.Muon and len(ids_of(optimizer.param_groups)) == 4
    model = tiny_llama().requires_grad_(False)
    model.model.norm.requires_grad_(True)
    optimizer = optimizer_of(model, MuonConfig())
    assert type(optimizer) is torch.optim.AdamW and len(ids_of(optimizer.param_groups)) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_and_adamw_embeddings_head_and_vectors(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    optimizer = optimizer_of(model, MuonConfig(weight_decay=0.1, matrix_lr_ratio=3.0))
    assert isinstance(optimizer, MuonWithAdamW)
    muon, adamw = optimizer.parts
    under_muon, under_adamw = ids_of(muon.param_groups), ids_of(adamw.param_groups)
    for name, parameter in model.named_parameters():
        is_matrix = name.endswith("_proj.weight")
        assert (id(parameter) in under_muon) is is_matrix, name
        assert (id(parameter) in under_adamw) is not is_matrix, name
    assert (id(model.lm_head.weight) in under_adamw) and len(under_adamw) == (6 if tied else 7)
    assert {(g["lr"], g["weight_decay"]) for g in muon.param_groups} == {(0.03, 0.1)}
    assert {(g["lr"], g["weight_decay"]) for g in adamw.param_groups} == {(0.01, 0.0)}


def test_a_head_of_its_own_is_vocabulary_also_where_an_adapter_keeps_it_whole() -> None:
    model = adapted(
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        tie_word_embeddings=False,
    )
    _, adamw = optimizer_of(model, MuonConfig(), adapter=LoraConfig()).parts
    (head,) = (name for group in adamw.param_groups for name in names_in(model, group))
    assert head.endswith("lm_head.modules_to_save.default.weight")
    model = adapted(
        peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]), tie_word_embeddings=False
    )
    assert type(optimizer_of(model, MuonConfig(), adapter=LoraConfig())) is torch.optim.Muon


def test_a_schedule_moves_both_parts_of_muon() -> None:
    model = tiny_llama()
    optimizer = optimizer_of(model, MuonConfig(matrix_lr_ratio=2.0))
    config = ScheduleConfig(shape="linear", warmup_steps=0)
    schedule = build_schedule(optimizer, config, total_steps=4)
    for step in range(4):
        factor = 1 - step / 4
        muon, adamw = optimizer.parts
        assert [g["lr"] for g in muon.param_groups] == pytest.approx([0.02 * factor])
        assert [g["lr"] for g in adamw.param_groups] == pytest.approx([0.01 * factor] * 2)
        take_step(model, optimizer, seed=step)
        schedule.step()


A_AND_B = ("q_proj.lora_A.weight", "q_proj.lora_B.weight")


def build(
    model: Any,
    patterns: dict[str, float],
    *,
    config: OptimizerConfig | None = None,
    adapter: AdapterConfig | None = None,
) -> Any:
    config = config or AdamWConfig(weight_decay=0.1)
    config.lr_by_pattern = [LrPattern(pattern=p, ratio=r) for p, r in patterns.items()]
    return build_optimizer(model, config, adapter or FullConfig(), lr=1e-3, fused=False)


def rates_of(model: Any, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Return the learning rate ratio and the decay by the names of weights in the base."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        weight.name: (
            round(group_of[id(weight.parameter)]["lr"] / 1e-3, 9),
            group_of[id(weight.parameter)]["weight_decay"],
        )
        for weight in trainable_weights(model)
    }


def test_the_first_pattern_that_fits_a_whole_name_decides() -> None:
    model = tiny_llama(attention_bias=True)
    patterns = {"*.embed_tokens.*": 0.1, "*.layers.1.*_proj.bias": 4.0, "model.layers.1.*": 0.5}
    for name, (ratio, decay) in rates_of(model, build(model, patterns)).items():
        expected = 0.1 if "embed_tokens" in name else 1.0
        if "layers.1." in name:
            expected = 4.0 if name.endswith("bias") else 0.5
        assert ratio == expected, name
        assert decay == (0.0 if "norm" in name or "bias" in name else 0.1), name


def test_ratios_multiply_those_of_lora_plus_and_of_muon() -> None:
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapter = LoraConfig(lora_plus_ratio=16.0, lora_plus_weight_decay=0.0)
    optimizer = build(model, {"*.layers.0.*": 0.5}, adapter=adapter)
    a, b = A_AND_B
    assert rates_of(model, optimizer) == {
        f"model.layers.0.self_attn.{a}": (0.5, 0.1),
        f"model.layers.0.self_attn.{b}": (8.0, 0.0),
        f"model.layers.1.self_attn.{a}": (1.0, 0.1),
        f"model.layers.1.self_attn.{b}": (16.0, 0.0),
    }
    assert [group["name"] for group in optimizer.param_groups] == [
        "matrices",
        "matrices, *.layers.0.*",
        "lora B",
        "lora B, *.layers.0.*",
    ]
    model = tiny_llama()
    config = MuonConfig(weight_decay=0.1, matrix_lr_ratio=3.0)
    rates = rates_of(model, build(model, {"*.layers.0.*": 0.5}, config=config))
    assert rates["model.layers.0.mlp.up_proj.weight"] == (1.5, 0.1)
    assert rates["model.layers.1.mlp.up_proj.weight"] == (3.0, 0.1)
    assert rates["model.layers.0.input_layernorm.weight"] == (0.5, 0.0)
    assert rates["model.embed_tokens.weight"] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("layers.0.*", "type {pattern: '*.layers.0.*'}, since full names are compared"),
        ("embed_tokens", "type {pattern: '*.embed_tokens.*'}, since full names are compared"),
        ("*.embd_tokens.weight", "the nearest are model.embed_tokens.weight, "),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_the_nearest_names(
    pattern: str, advice: str
) -> None:
    with pytest.raises(UserError) as caught:
        build(tiny_llama(), {pattern: 0.1, "*.norm.*": 0.5})
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"optimizer.lr_by_pattern: {pattern} matches no trainable parameter; {advice}"
    )


def test_a_pattern_shadowed_by_an_earlier_one_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        build(tiny_llama(), {"*.layers.*": 0.5, "*.layers.0.*": 0.1, "nothing": 2.0})
    first, second = caught.value.problems
    assert "*.layers.0.* an earlier pattern matches the same weights" in first
    assert "nothing matches no trainable parameter" in second
