"""Which strategy `auto` takes, and whether what it takes can hold the model."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch

from app.assembly import resolve_strategy
from app.config import load_config
from app.model.adapter import LoraConfig, report_trainable
from app.model.base import ModelConfig
from app.model.build import build_model
from app.model.quantization import QuantizationConfig, storage_of
from app.model.recompute import RecomputeConfig
from app.preflight import check_compatibility
from app.process.errors import UserError
from app.strategy.build import STATES_SHARE, STORED, Facts, choose_strategy
from app.strategy.settings import FsdpConfig
from app.training.model_states import gather_facts, measure_footprint
from app.training.optimizers import AdamWConfig
from app.training.trainer import Environment, TrainerConfig
from tests.tiny import TINY_BASE, probe, tiny_llama

# GiB of weights, and of gradients and states beside them; by arithmetic.
LORA_8B = {"weights_gib": 15.1, "states_gib": 0.5}
FULL_8B = {"weights_gib": 29.9, "states_gib": 89.7}
LORA_70B = {"weights_gib": 132.0, "states_gib": 2.3}
QLORA_70B = {"weights_gib": 37.6, "states_gib": 2.3}
PURE_70B = {"weights_gib": 131.4, "states_gib": 394.3}
PURE_405B = {"weights_gib": 756.0, "states_gib": 2268.0}
NODE = {"num_ranks": 8, "device_gib": 80.0, "has_deepspeed": True}
FOUR_NODES = NODE | {"num_ranks": 32, "num_nodes": 4}

TABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"num_ranks": 1}, "single", "1 process"),
    ({"num_ranks": 1, "device_gib": 24.0, **LORA_70B}, "single", "1 process"),
    ({"num_ranks": 4}, "ddp", "4 processes on a CPU"),
    (
        {**NODE, **LORA_8B},
        "ddp",
        "each GPU holds all: weights, gradients and optimizer states take",
    ),
    ({**NODE, **LORA_70B}, "fsdp", "no GPU holds all, and the 8 of a node do: weights"),
    ({**NODE, **FULL_8B}, "fsdp_grad_op", "a GPU holds the weights, but not their"),
    ({**NODE, **QLORA_70B, "device_gib": 40.0, "quantization": "nf4"}, "fsdp", "no GPU holds all"),
    (
        {"num_ranks": 2, "device_gib": 24.0, **QLORA_70B, "quantization": "nf4"},
        "fsdp",
        "nothing shards more",
    ),
    ({**NODE, **LORA_70B, "quantization": "int8"}, "zero2", "int8 cannot be sharded"),
    (
        {**NODE, **LORA_70B, "quantization": "int8", "has_deepspeed": False},
        "ddp",
        "int8 cannot be sharded",
    ),
    ({**NODE, **LORA_70B, "quantization": STORED}, "ddp", "the base's files are quantized"),
    ({**FOUR_NODES, **LORA_8B}, "ddp", "each GPU holds all"),
    ({**FOUR_NODES, **LORA_70B}, "fsdp_hybrid", "a node's 8 GPUs hold all, and the links between"),
    ({**FOUR_NODES, **LORA_70B, "has_fast_links": True}, "fsdp", "of 4 nodes with fast links"),
    ({**FOUR_NODES, **PURE_70B}, "zero3_hpz", "no node holds all, though each holds the weights"),
    ({**FOUR_NODES, **PURE_70B, "has_deepspeed": False}, "fsdp", "it takes all 32 GPUs"),
    ({**NODE, **PURE_405B}, "fsdp_offload", "not even all 8 GPUs hold it"),
]


@pytest.mark.parametrize(("facts", "name", "said"), TABLE)
def test_the_rules_of_thumb(facts: dict[str, Any], name: str, said: str) -> None:
    choice = choose_strategy(Facts(**facts))
    assert choice.name == name
    assert said in choice.reason
    assert str(choice) == f"{name} ({choice.reason})"


def held_gib(name: str, facts: Facts) -> float:
    """Return what one GPU keeps under a strategy."""
    kept, per_node = facts.weights_gib + facts.states_gib, facts.num_ranks // facts.num_nodes
    return {
        "single": kept,
        "ddp": kept,
        "fsdp_grad_op": facts.weights_gib + facts.states_gib / facts.num_ranks,
        "fsdp_hybrid": kept / per_node,
        "zero3_hpz": facts.weights_gib / per_node + kept / facts.num_ranks,
        "fsdp": kept / facts.num_ranks,
    }[name]


def test_what_is_chosen_holds_the_model_wherever_anything_does() -> None:
    sizes = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    places = ((2, 1), (8, 1), (16, 2), (32, 4))
    chosen = set()
    for weights, states, (ranks, nodes), fast in itertools.product(
        sizes, sizes, places, (False, True)
    ):
        facts = Facts(
            num_ranks=ranks,
            num_nodes=nodes,
            device_gib=80.0,
            weights_gib=weights,
            states_gib=states,
            has_fast_links=fast,
            has_deepspeed=True,
        )
        name = choose_strategy(facts).name
        chosen.add(name)
        if held_gib("fsdp", facts) <= STATES_SHARE * 80.0:
            assert held_gib(name, facts) <= STATES_SHARE * 80.0, facts
        else:
            assert name == "fsdp_offload", facts
    assert chosen == {"ddp", "fsdp", "fsdp_grad_op", "fsdp_hybrid", "zero3_hpz", "fsdp_offload"}


def place(accelerator: str = "gpu", num_ranks: int = 8) -> Environment:
    return Environment(
        accelerator=accelerator,
        devices=num_ranks,
        num_ranks=num_ranks,
        num_data_ranks=num_ranks,
        precision="bf16",
        accumulation=1,
    )


def resolve(monkeypatch: pytest.MonkeyPatch, facts: Facts, *words: str) -> Any:
    monkeypatch.setattr("app.assembly.gather_facts", lambda *_: facts)
    monkeypatch.setattr("app.preflight.couplings.devices.count_gpus", lambda: facts.num_ranks)
    config = load_config("train", ["+experiment=quickstart", *words])
    base: Any = SimpleNamespace(shapes_builder=lambda *_: None)
    return resolve_strategy(config, base, place())


def test_what_is_chosen_has_the_settings_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.preflight.couplings.table.is_installed", lambda module: True)
    for name, facts in {name: facts for facts, name, _ in TABLE}.items():
        words = ["trainer.accelerator=cpu"] if "device_gib" not in facts else []
        words += [f"trainer.devices={facts['num_ranks'] // facts.get('num_nodes', 1)}"]
        words += [f"trainer.num_nodes={facts.get('num_nodes', 1)}"]
        words += [f"quantization={facts.get('quantization', 'none')}"]
        chosen = resolve(monkeypatch, Facts(**facts), *words)
        assert (
            chosen == load_config("train", ["+experiment=quickstart", f"strategy={name}"]).strategy
        )
    typed = resolve(monkeypatch, Facts(**NODE, **LORA_70B), "strategy=fsdp_tp")
    assert typed == FsdpConfig(name="fsdp_tp", tensor_parallel_size=2)


def test_a_choice_that_clashes_with_what_was_typed_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["trainer.devices=8", "optimizer=muon"]
    config = load_config("train", ["+experiment=quickstart", *words])
    assert check_compatibility(config, num_gpus=8) == []
    with pytest.raises(UserError) as caught:
        resolve(monkeypatch, Facts(**NODE, **LORA_70B), *words)
    said = str(caught.value)
    assert said.startswith("strategy=auto is fsdp (no GPU holds all")
    assert "; but optimizer=muon does not step shards" in said


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_footprint_is_what_a_step_leaves(optimizer: str) -> None:
    model = tiny_llama()
    model.get_input_embeddings().requires_grad_(False)
    with torch.device("meta"):
        found = measure_footprint(tiny_llama().requires_grad_(True), optimizer)
    everything = measure_footprint(model, optimizer)
    assert found.weights_gib == everything.weights_gib
    assert found.states_gib > everything.states_gib
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    step = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[optimizer](trained)
    model(**probe()).logits.sum().backward()
    step.step()
    kept = [weight.grad for weight in trained]
    kept += [value for state in step.state.values() for value in state.values()]
    states = sum(each.numel() * each.element_size() for each in kept) / 2**30
    assert everything.states_gib == pytest.approx(states, rel=0.1)
    weights = sum(each.numel() * each.element_size() for each in model.parameters()) / 2**30
    assert everything.weights_gib == pytest.approx(weights)


@pytest.mark.parametrize("method", ["none", "nf4"])
def test_the_footprint_of_shapes_is_that_of_the_model(method: str) -> None:
    how = {"backend": "eager", "adapter": LoraConfig(), "recompute": RecomputeConfig()}
    build = partial(build_model, ModelConfig(path=str(TINY_BASE)), **how, precision="bf16")
    quantization = QuantizationConfig(method=method)
    shapes = build(quantization=QuantizationConfig(), on_meta=True)
    assert all(weight.is_meta for weight in shapes.parameters())
    found = measure_footprint(shapes, "adamw", quantization)
    real = report_trainable(build(quantization=quantization))
    assert found.weights_gib * 2**30 == pytest.approx(real.num_bytes, rel=0.01)
    # In fp32: a gradient and two moments.
    assert found.states_gib * 2**30 == real.num_trainable * 3 * 4


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_quantized_weight_takes_what_bitsandbytes_keeps_of_it(double_quant: bool) -> None:
    layer = bitsandbytes.nn.Linear4bit(
        1024, 1024, bias=False, compress_statistics=double_quant, quant_type="nf4"
    ).to("cpu")
    plain = torch.nn.Linear(1024, 1024, bias=False, device="meta", dtype=torch.bfloat16)
    plain.requires_grad_(False)
    plain.get_input_embeddings = plain.get_output_embeddings = lambda: torch.nn.Linear(1, 1)
    config = QuantizationConfig(method="nf4", double_quant=double_quant)
    found = measure_footprint(plain, "adamw", config)
    assert found.weights_gib * 2**30 == pytest.approx(storage_of(layer.weight).num_bytes, rel=0.01)


def test_only_gpus_that_could_share_a_model_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        raise AssertionError("nothing has to be counted")

    nothing = (TrainerConfig(), AdamWConfig(), QuantizationConfig(), build)
    assert gather_facts(place("cpu", 4), *nothing) == Facts(num_ranks=4)
    assert gather_facts(place("gpu", 1), *nothing) == Facts(num_ranks=1)
    assert gather_facts(place("gpu", 2), *nothing[:3], None).quantization == STORED
    sizes = {0: 80 * 2**30, 1: 40 * 2**30}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: type("Gpu", (), {"total_memory": sizes[index]}),
    )
    model = tiny_llama().requires_grad_(False)
    facts = gather_facts(place("gpu", 2), *nothing[:3], lambda: model)
    assert facts.device_gib == 40.0, "the smallest counts"
    assert facts.weights_gib * 2**28 == sum(weight.numel() for weight in model.parameters())
    assert facts.states_gib == 0
    assert choose_strategy(facts).name == "ddp"
