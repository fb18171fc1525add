"""Models planned from config.json have the same sizes as those planned from modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.config import conf_files, load_config, settings_of
from app.model.build import build_model
from app.model.families import LayerKind, family_of
from app.planning import planned_model
from app.planning.activations import LayerExecution
from app.planning.flops import estimate_flops
from app.planning.memory import estimate_gpu_memory
from app.planning.planned import plan_run
from app.planning.states import WeightBytes, size_for
from app.strategy.settings import DdpConfig

WAYS = (
    ("adapter=lora", "adapter.use_dora=true", "adapter.rank_pattern={down_proj: 4}"),
    ("adapter=full",),
    ("adapter=ia3",),
    ("adapter=lora", "quantization=nf4", "strategy=fsdp"),
    ("adapter=lora", "strategy=fsdp_tp"),
)
SMALL = {"num_hidden_layers": 3}
DEPTHS = {"n_layer", "num_decoder_layers", "num_hidden_layers", "num_layers"}
LAYERS = 8
"""enough layers for every kind of layer to occur"""


def sizes_of(config: Any, model: planned_model.PlannedModel) -> Any:
    strategy = config.strategy if config.strategy.name != "auto" else DdpConfig()
    ranks = {"num_ranks": 8, "num_nodes": 1}
    return size_for(model, "bf16", config.quantization, strategy, **ranks)


def compare(config: Any, numbers: dict[str, Any]) -> None:
    name = config.model.path
    of_numbers = planned_model.model_from_config_json(name, numbers, config.adapter, "bf16")
    assert of_numbers is not None
    on_meta = planned_model.model_from_meta(config.model, numbers, config.adapter, "bf16")
    for attribute in ("widths", "num_layers", "trained_layers", "trains_head", "is_pair"):
        assert getattr(of_numbers, attribute) == getattr(on_meta, attribute), attribute
    for trained in (True, False):
        here, there = (each.count(trained=trained) for each in (of_numbers, on_meta))
        assert here == pytest.approx(there, rel=2e-3)
    ours, theirs = sizes_of(config, of_numbers), sizes_of(config, on_meta)
    for part in ("layer", "embedding", "head", "whole"):
        for field in WeightBytes.__slots__:
            here, there = (getattr(getattr(size, part), field) for size in (ours, theirs))
            assert here == pytest.approx(there, rel=5e-3), (part, field)


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_config_json_and_modules_agree(words: tuple[str, ...]) -> None:
    config = load_config("train", ["model=llama8b", "data=dolly", *words])
    compare(config, config.model.architecture | SMALL)


def test_a_tied_head_is_counted_once() -> None:
    config = load_config("train", ["model=llama3b", "data=dolly"])
    compare(config, config.model.architecture | SMALL)


@pytest.mark.parametrize(("base", "adapter"), [("llama3b", "lora"), ("llama8b", "full")])
def test_a_head_for_classes_stands_in_place_of_that_of_the_vocabulary(
    base: str, adapter: str
) -> None:
    words = [f"model={base}", "data=classes", "objective=classify", "strategy=single"]
    config = load_config("train", [*words, f"adapter={adapter}", "model.labels=[a,b,c]"])
    numbers = config.model.architecture | SMALL
    planned = planned_model.build_planned_model(config.model, numbers, config.adapter, "bf16")
    built = build_model(
        replace(config.model, path=None, from_scratch=True, architecture=numbers),
        *(config.quantization, "sdpa", config.adapter, config.recompute, "bf16"),
        on_meta=True,
    )
    norms = sum(weight.numel() for name, weight in built.named_parameters() if "norm" in name)
    for trains in (True, False):
        weights = [each for each in built.parameters() if each.requires_grad == trains]
        left_out = norms if trains == (adapter == "full") else 0
        expected = sum(each.numel() for each in weights) - left_out
        assert planned.count(trained=trains) == expected
    card = settings_of("hardware", "h100")
    run, _ = plan_run(config, card, numbers, model=planned, strategies={})
    assert estimate_gpu_memory(run).loss == 0
    head = 2 * planned.widths.vocabulary * planned.widths.hidden
    sft = replace(run, model=replace(planned, head={}, has_head=True))
    trained = 3 if adapter == "full" else 2
    added = estimate_flops(sft).total - estimate_flops(run).total
    assert added == pytest.approx(trained * head)


def test_a_token_meets_some_of_the_experts() -> None:
    config = load_config("train", ["model=qwen3_30b_a3b", "data=dolly", "quantization=nf4"])
    numbers = config.model.architecture | SMALL
    model = planned_model.model_from_meta(config.model, numbers, config.adapter, "bf16")
    assert planned_model.model_from_config_json("moe", numbers, config.adapter, "bf16") is None
    # Of 128 experts a token goes to 8: 30 B weights, and some 3 B active.
    share = model.multiplied(trained=False) / model.count(trained=False)
    assert 0.04 < share < 0.2


FOUND = {
    "qwen3_30b_a3b": LayerKind(norms_heads=True, has_gate=False),
    "glm4_9b": LayerKind(num_norms=4, has_gate=False),
    "gemma4_26b_a4b": LayerKind(
        num_norms=7,
        norms_heads=True,
        norms_values=True,
        norms_routed=True,
        activation="gelu_pytorch_tanh",
        shared_experts=2112,
    ),
    "llama4_scout": LayerKind(norms_heads=True, has_plain_head_norms=True, shared_experts=8192),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_kind_of_a_layer_is_found_in_its_modules(name: str) -> None:
    config = load_config("train", [f"model={name}", "data=dolly"])
    numbers = config.model.architecture | {"num_hidden_layers": 2}
    found = planned_model.model_from_meta(config.model, numbers, config.adapter, "bf16").widths.kind
    expected = FOUND[name]
    assert found == replace(expected, activation=expected.activation if expected.has_gate else "")


def test_shared_experts_are_found() -> None:
    config = load_config("train", ["model=glm4_5_air", "data=dolly"])
    numbers = config.model.architecture | {"num_hidden_layers": 3}
    widths = planned_model.model_from_meta(config.model, numbers, config.adapter, "bf16").widths
    shared = numbers["n_shared_experts"] * numbers["moe_intermediate_size"]
    routed = numbers["num_experts_per_tok"] * numbers["moe_intermediate_size"]
    assert (widths.kind.shared_experts, widths.feed_forward) == (shared, routed + shared)


def test_the_activation_in_config_json_decides_the_gate_kernel() -> None:
    config = load_config("train", ["model=llama3b", "data=dolly"])
    numbers = config.model.architecture | SMALL
    execution = LayerExecution(tokens=1, fuses_norm_and_gate=True)
    for activation, has_kernel in (("silu", True), ("gelu", False)):
        of_type = numbers | {"hidden_act": activation}
        model = planned_model.model_from_config_json("llama", of_type, config.adapter, "bf16")
        assert model is not None
        assert execution.fuses_gate(model.widths) is has_kernel


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", conf_files.list_groups(conf_files.CONF)["model"])
def test_every_known_family_agrees(name: str) -> None:
    config = load_config("train", [f"model={name}", "data=dolly"])
    numbers = config.model.architecture
    if family_of(numbers.get("model_type")).matrices is None:
        pytest.skip("only its modules say")
    compare(config, numbers | {key: min(LAYERS, numbers[key]) for key in DEPTHS & numbers.keys()})
