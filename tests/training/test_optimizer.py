"""Which weights move, how fast, by which optimizer and by which patterns of names."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from app.model.adapter import AdapterConfig, FullConfig, Ia3Config, LoraConfig, trainable_weights
from app.training.algorithms import MuonWithAdamW
from app.training.optimizers import (
    AdamWConfig,
    LrPattern,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
)
from common.errors import UserError
from tests.tiny import tiny_llama
from tests.training.test_every_optimizer import adapted, optimizer_of, take_step


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
