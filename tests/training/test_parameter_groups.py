"""Learning rates by the names of weights: what they multiply, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest

from app.model.adapter import AdapterConfig, FullConfig, LoraConfig, trainable_weights
from app.process.logs import LOG_FILE
from app.training.optimizers import (
    AdamWConfig,
    LrPattern,
    MuonConfig,
    OptimizerConfig,
    build_optimizer,
    check_every_weight_is_in_one_group,
)
from common.errors import UserError
from tests.conftest import TrainRun
from tests.tiny import TINY_BASE, small_run, tiny_llama

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


def test_names_are_those_of_the_base_whatever_is_put_around_it() -> None:
    base = tiny_llama()
    assert [w.name for w in trainable_weights(base)] == [
        name for name, _ in base.named_parameters()
    ]
    model = peft.get_peft_model(
        tiny_llama(tie_word_embeddings=False),
        peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            layers_to_transform=[0],
            use_dora=True,
            trainable_token_indices=[3],
            modules_to_save=["lm_head"],
        ),
    )
    prefix = "model.layers.0.self_attn.q_proj"
    assert [weight.name for weight in trainable_weights(model)] == [
        "model.embed_tokens.trainable_tokens_delta",
        *(f"{prefix}.{part}.weight" for part in ("lora_A", "lora_B", "lora_magnitude_vector")),
        "lm_head.weight",
    ]


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
        ("model.embed_tokens", "type {pattern: 'model.embed_tokens.*'}, since full names"),
        ("*.embd_tokens.weight", "the nearest are model.embed_tokens.weight, "),
        ("*.layers.9.mlp.up_proj.weight", "the nearest are model.layers.*.mlp.up_proj.weight, "),
        ("", "the nearest are "),
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


def test_groups_with_missing_repeated_or_unknown_weights_are_refused() -> None:
    model = tiny_llama()
    weights = trainable_weights(model)
    every = [weight.parameter for weight in weights]
    for params, problem in (
        (every[1:], "model.embed_tokens (weight) is in 0 parameter groups"),
        ([*every, every[0]], "model.embed_tokens (weight) is in 2 parameter groups"),
        ([*every, *tiny_llama().parameters()], "weights that are not trainable"),
        ([], "the parameter group x is empty"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            check_every_weight_is_in_one_group(weights, [{"name": "x", "params": params}])


def test_a_run_applies_patterns_and_logs_their_groups(train_run: TrainRun) -> None:
    patterns = "[{pattern: *.layers.0.*, ratio: 0.5}, {pattern: *.layers.1.*, ratio: 2}]"
    words = small_run(
        f"model.path={TINY_BASE}", "trainer.max_steps=1", "data.val_set_size=0", "optimizer.lr=1e-3"
    )
    folder = train_run(*words, f"optimizer.lr_by_pattern={patterns}")
    lines = (folder / LOG_FILE).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if "parameter groups of AdamW" in line)
    rows = [line.split() for line in lines[start:] if line.lstrip().startswith("matrices")][:3]
    assert [(row[-2], row[-1]) for row in rows] == [("1e-3", "0"), ("5e-4", "0"), ("2e-3", "0")]
    assert [row[1:2] for row in rows[1:]] == [["*.layers.0.*"], ["*.layers.1.*"]]
