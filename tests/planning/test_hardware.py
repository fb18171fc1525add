"""Hardware by name, several GPUs and nodes, custom hardware, and this machine's."""

from __future__ import annotations

from dataclasses import fields

import pytest

from app.config import load_config, settings_of
from app.config.conf_files import CONF, list_groups
from app.planning.hardware import (
    HardwareConfig,
    check_hardware,
    detect_card,
    known_card,
)
from app.process.gpus import Gpu, Machine
from common.errors import DeviceError
from tests.in_process import refused

CARDS = [name for name in list_groups(CONF)["hardware"] if name != "auto"]


def test_each_card_has_all_specifications_and_a_source() -> None:
    known = {one.name for one in fields(HardwareConfig)}
    for card in CARDS:
        config: HardwareConfig = settings_of("hardware", card)
        config.gpus_per_node, config.num_nodes = 8, 2
        assert config.name == card and check_hardware(config) == []
        for line in (CONF / "hardware" / f"{card}.yaml").read_text().splitlines()[2:]:
            key, _, source = line.partition(":")
            assert key in known and "  # " in source, line


def test_nodes_and_price_from_the_command_line() -> None:
    words = ["+experiment=llama8b", "hardware=2x8xh100", "hardware.price_per_hour=2.5"]
    hardware = load_config("plan", words).hardware  # type: ignore[union-attr]
    assert (hardware.name, hardware.num_nodes, hardware.gpus_per_node) == ("h100", 2, 8)
    assert hardware.price_per_hour == 2.5 and hardware.memory_gib > 70


def test_an_unknown_card_is_refused_with_advice() -> None:
    said = refused("+experiment=llama8b", "hardware=8xa100", verb="plan")
    for word in ("hardware=a100", "did you mean a100_40gb?", "h200", "hardware.memory_gib="):
        assert word in said


def test_custom_hardware() -> None:
    words = ["hardware=a100_40gb", "hardware.name=mine", "hardware.memory_gib=31"]
    hardware = load_config("plan", ["+experiment=llama8b", *words]).hardware  # type: ignore[union-attr]
    assert (hardware.name, hardware.memory_gib) == ("mine", 31)
    empty = HardwareConfig(name="mine", memory_gib=31.0, gpus_per_node=2)
    assert "hardware.half_tflops" in check_hardware(empty)[0]
    assert "hardware.link_gb_per_second" in check_hardware(empty)[0]


def test_card_names_from_the_driver() -> None:
    h100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=79.2, capability=(9, 0))
    assert detect_card(Machine(gpus=(h100, h100))) == ("h100", 79.2, 2)
    assert known_card("NVIDIA A100-SXM4-40GB", 39.4) == "a100_40gb"
    assert known_card("NVIDIA A100-SXM4-80GB", 79.3) == "a100_80gb"
    assert known_card("Tesla V100-SXM2-16GB", 15.8) is None
    assert known_card("NVIDIA GH200 480GB", 94.5) is None
    assert known_card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5) is None
    with pytest.raises(DeviceError, match="hardware=8xh100"):
        detect_card(Machine())
    odd = Gpu(name="NVIDIA T1000", memory_gib=4.0, capability=(7, 5))
    with pytest.raises(DeviceError, match=r"T1000 are unknown.*hardware.memory_gib"):
        detect_card(Machine(gpus=(odd,)))
