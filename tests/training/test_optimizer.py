"""Which weights move, how fast, and along which schedule."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from app.model.adapter import FullConfig, Ia3Config, LoraConfig
from app.training.algorithms import MuonWithAdamW
from app.training.optimizers import (
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    base_lr,
    build_optimizer,
    build_schedule,
)
from tests.tiny import random_ids, tiny_llama
from tests.training.test_every_optimizer import adapted, optimizer_of, take_step, weights


def ids_of(groups: list[dict[str, Any]]) -> list[int]:
    return [id(parameter) for group in groups for parameter in group["params"]]


def test_vectors_never_decay() -> None:
    model = tiny_llama(attention_bias=True)
    groups = optimizer_of(model, AdamWConfig(weight_decay=0.1)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    seen = set()
    for name, parameter in model.named_parameters():
        is_vector = "norm" in name or "bias" in name
        assert decay[id(parameter)] == (0.0 if is_vector else 0.1), name
        seen.add(is_vector)
    assert seen == {True, False}


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
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert (
        len(ids_of(optimizer.param_groups)) == len(set(ids_of(optimizer.param_groups))) == trained
    )


def test_a_step_of_lora_plus_moves_b_by_the_ratio_times_as_much() -> None:
    moved = {}
    for ratio in (None, 8.0):
        model = adapted(peft.LoraConfig(r=2, target_modules=["q_proj"]))
        before = weights(model)
        adapter = LoraConfig(lora_plus_ratio=ratio)
        take_step(model, optimizer_of(model, AdamWConfig(), adapter=adapter, lr=1e-3), seed=0)
        moved[ratio] = {
            name: (after - before[name]).abs().max().item()
            for name, after in weights(model).items()
            if "lora_" in name
        }
    for name, plain in moved[None].items():
        expected = plain * (8.0 if "lora_B" in name else 1.0)
        assert moved[8.0][name] == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize(
    ("config", "ratio"), [(AdamWConfig(), None), (AdamWConfig(), 16.0), (MuonConfig(), None)]
)
def test_the_learning_rate_of_the_curves_is_the_base_one(
    config: OptimizerConfig, ratio: float | None
) -> None:
    adapter = LoraConfig(lora_plus_ratio=ratio)
    model = adapted(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = optimizer_of(model, config, adapter=adapter, lr=1e-3)
    schedule = build_schedule(
        optimizer, ScheduleConfig(shape="linear", warmup_steps=0), total_steps=4
    )
    for step in range(4):
        assert base_lr(optimizer) == pytest.approx(1e-3 * (1 - step / 4))
        take_step(model, optimizer, seed=step)
        schedule.step()


def test_muon_alone_where_all_that_trains_is_matrices_and_adamw_alone_where_none_is() -> None:
    model = tiny_llama().requires_grad_(False)
    model.model.layers[1].self_attn.requires_grad_(True)
    optimizer = optimizer_of(model, MuonConfig())
    assert type(optimizer) is torch.optim.Muon and len(ids_of(optimizer.param_groups)) == 4
    model = tiny_llama().requires_grad_(False)
    model.model.norm.requires_grad_(True)
    optimizer = optimizer_of(model, MuonConfig())
    assert type(optimizer) is torch.optim.AdamW and len(ids_of(optimizer.param_groups)) == 1


def test_fused_and_plain_adamw_step_alike() -> None:
    models = {fused: tiny_llama() for fused in (True, False)}
    for fused, model in models.items():
        config = AdamWConfig(weight_decay=0.1)
        optimizer = build_optimizer(model, config, FullConfig(), lr=1e-2, fused=fused)
        assert all(group["fused"] is (fused or None) for group in optimizer.param_groups)
        assert all(group["foreach"] is None for group in optimizer.param_groups)
        for seed in range(3):
            take_step(model, optimizer, seed=seed)
    fused_weights, plain = (weights(models[fused]) for fused in (True, False))
    for name, expected in plain.items():
        assert torch.allclose(fused_weights[name], expected, rtol=1e-5, atol=1e-6), name


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


def test_matrices_as_large_as_a_table_of_positions_are_not_vocabulary() -> None:
    shape: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, max_position_embeddings=32, eos_token_id=2, **shape
    )
    model = GPTNeoForCausalLM(config)
    muon, _ = optimizer_of(model, MuonConfig()).parts
    q_proj = model.transformer.h[0].attn.attention.q_proj
    assert model.transformer.wpe.weight.shape == q_proj.weight.shape
    under_muon = {name for group in muon.param_groups for name in names_in(model, group)}
    assert under_muon == {n for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n}


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


def test_muon_moves_every_weight_and_runs_the_closure_with_gradients() -> None:
    model, ids = tiny_llama(), random_ids()
    optimizer = optimizer_of(model, MuonConfig())
    before = weights(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    for name, after in weights(model).items():
        assert not torch.equal(after, before[name]), name


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
    before = weights(model)
    take_step(model, optimizer, seed=9)  # the rate is zero now, in both
    assert all(torch.equal(after, before[name]) for name, after in weights(model).items())
