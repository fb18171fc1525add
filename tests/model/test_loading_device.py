"""Weights go straight to their device, and are quantized and decomposed there; `meta` is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from app.model.adapter import LoraConfig
from app.strategy.ddp import Ddp, SingleDevice
from app.strategy.deepspeed import Zero
from app.strategy.settings import ZeroConfig
from tests.tiny import TINY_BASE, built

DEVICE = torch.device("meta")


build = partial(built, TINY_BASE)


@pytest.fixture
def device_maps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where files were asked to be read to."""
    asked: list[Any] = []
    own = AutoModelForCausalLM.from_pretrained

    def read(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.pop("device_map", None))
        return own(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    return asked


def test_files_are_read_to_the_device(device_maps: list[Any]) -> None:
    build(device=DEVICE)
    build(device=DEVICE, on_host=True)
    build(device=torch.device("cpu"))
    build()
    SingleDevice(DEVICE).build_model(build)
    SingleDevice("cpu").build_model(build)
    # Without a device map, transformers would read a quantized one to a GPU if there is one.
    build(method="nf4", device=torch.device("cpu"))
    by_strategy = [{"": DEVICE}, None]
    host = {"": torch.device("cpu")}
    assert device_maps == [{"": DEVICE}, {"": "cpu"}, None, None, *by_strategy, host]


@pytest.mark.parametrize(
    "strategy",
    [SingleDevice(DEVICE), Ddp(), Zero(ZeroConfig(stage=1))],
    ids=["single", "ddp", "zero1"],
)
def test_a_start_is_drawn_on_the_cpu(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a seed gives the same start on every device and under every strategy."""
    monkeypatch.setattr(type(strategy), "root_device", DEVICE)
    with strategy.tensor_init_context():
        assert torch.empty(1).device.type == "cpu"


def test_four_bits_are_made_on_the_device_and_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()
    own = bitsandbytes.functional.quantize_4bit

    def quantize(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        devices.add(weight.device.type)
        return own(torch.zeros(weight.shape, dtype=weight.dtype), *args, **kwargs)

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", quantize)
    model = build(method="nf4", device=DEVICE, on_host=True)
    assert devices == {"meta"}
    assert bitsandbytes.functional.quantize_4bit is quantize
    packed = [m.weight for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(packed) == 28
    for weight in packed:
        assert weight.device.type == weight.quant_state.absmax.device.type == "cpu"
    devices.clear()
    build(method="nf4", device=torch.device("cpu"), on_host=True)
    assert devices == {"cpu"}


def test_what_is_taken_is_the_same_by_way_of_a_device() -> None:
    here, by_way = (
        build(adapter=LoraConfig(init="pissa"), **how)
        for how in ({}, {"device": torch.device("cpu"), "on_host": True})
    )
    assert isinstance(by_way, peft.PeftModel)
    for (name, one), other in zip(here.named_parameters(), by_way.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["none", "nf4"])
def test_a_gpu_holds_what_it_has_read(method: str) -> None:
    device = torch.device("cuda:0")
    model = build(method=method, device=device)
    assert {weight.device for weight in model.parameters()} == {device}
    back = build(method=method, device=device, on_host=True)
    assert {weight.device.type for weight in back.parameters()} == {"cpu"}
    for one, other in zip(model.parameters(), back.parameters(), strict=True):
        # As bytes: packed weights that are read as numbers may be NaN.
        packed, expected = (weight.detach().cpu().view(torch.uint8) for weight in (one, other))
        assert torch.equal(packed, expected)


@pytest.mark.gpu
def test_a_gpu_takes_a_start_as_a_cpu_does() -> None:
    adapter = LoraConfig(init="pissa")
    here, there = build(adapter=adapter), build(adapter=adapter, device=torch.device("cuda:0"))
    for one, other in zip(here.modules(), there.modules(), strict=True):
        if isinstance(one, peft.tuners.lora.LoraLayer):
            whole = [
                layer.get_base_layer().weight.cpu()
                + layer.scaling["default"]
                * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).cpu()
                for layer in (one, other)
            ]
            torch.testing.assert_close(*whole, atol=1e-4, rtol=1e-4)
