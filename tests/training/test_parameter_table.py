"""The tables at the start of a run list the trainable parameters, by names of the base."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
)

from app.model.adapter import AdapterConfig, FullConfig, LoraConfig, report_trainable
from app.training import prepare
from app.training.optimizers import (
    AdamWConfig,
    OptimizerConfig,
    build_optimizer,
)
from tests.tiny import tiny_llama, tiny_t5

Q_PROJ = "model.layers.*.self_attn.q_proj"


def adapted(config: peft.PeftConfig, **llama: Any) -> Any:
    return peft.get_peft_model(tiny_llama(**llama), config)


def optimizer_of(
    model: Any, adapter: AdapterConfig, config: OptimizerConfig | None = None
) -> torch.optim.Optimizer:
    return build_optimizer(model, config or AdamWConfig(), adapter, lr=1e-3, fused=False)


def patterns_of(
    model: Any, adapter: AdapterConfig, config: OptimizerConfig | None = None
) -> list[prepare.TrainedPattern]:
    patterns = prepare.trained_patterns(model, optimizer_of(model, adapter, config))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(pattern.num_weights for pattern in patterns) == trainable
    return patterns


def test_rates_and_decays_of_their_own_are_rows_of_their_own() -> None:
    model = adapted(peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    adapter = LoraConfig(lora_plus_ratio=16, lora_plus_weight_decay=0.0)
    patterns = patterns_of(model, adapter, AdamWConfig(weight_decay=0.1))
    got = [(*p.kinds, *p.settings[1:]) for p in patterns]
    expected = [("lora A", "1e-3", "0.1"), ("lora B", "0.016", "0"), ("magnitude", "1e-3", "0")]
    assert got == expected
    table = prepare.trainable_table(patterns)
    assert [str(column.header) for column in table.columns][-2:] == ["lr", "decay"]
    assert list(table.columns[-2].cells) == ["1e-3", "0.016", "1e-3"]


def test_rows_beyond_the_largest_are_summed_up_in_the_last_one() -> None:
    patterns = patterns_of(tiny_t5(vocab_size=64), FullConfig(), AdamWConfig(weight_decay=0.1))
    table = prepare.trainable_table(patterns)
    names, _, modules, weights, *_ = ([*column.cells] for column in table.columns)
    assert names[-1] == "4 smaller ones"  # norms in and behind the layers of both sides
    counts = [int(str(cell).replace(",", "")) for cell in weights]
    assert sum(counts) == sum(pattern.num_weights for pattern in patterns)
    assert sum(map(int, modules)) == sum(len(pattern.modules) for pattern in patterns)


def test_the_printed_tables_name_each_module_and_fit_80_columns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = adapted(peft.LoraConfig(r=4, target_modules="all-linear"))
    with caplog.at_level(logging.DEBUG, logger="app"):
        prepare.print_parameter_table(model, optimizer_of(model, LoraConfig(lora_plus_ratio=16)))
    lines = [line for message in caplog.messages for line in message.splitlines()]
    groups = caplog.text.partition("groups of AdamW")[2].splitlines()
    assert {("matrices", "14"), ("lora", "B")} <= {tuple(line.split()[:2]) for line in groups}
    (row,) = (line for line in lines if Q_PROJ in line and "lora B" in line)
    assert row.split() == f"{Q_PROJ} lora B 2 32x4 256 6.9 % float32 0.016 0".split()
    report = report_trainable(model)
    assert lines[-2:] == [
        f"trainable params: {report.num_trainable:,} / {report.num_total:,} "
        f"({100 * report.num_trainable / report.num_total:.2f} %), fp32, decay 0",
        f"model weights: fp32, {4 * report.num_total / 2**20:.1f} MiB",
    ]
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(prepare.trainable_table(patterns_of(model, LoraConfig())))
    heading, attention, mlp = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, (heading, attention, mlp))) <= 80
    assert attention.startswith("self_attn: q_proj, k_proj, v_proj, o_proj  lora A, B ")
    assert mlp.startswith("mlp: gate_proj, up_proj, down_proj ")


def test_weights_of_four_bits_are_counted_and_not_their_packs(tmp_path: Path) -> None:
    plain = tiny_llama(tie_word_embeddings=False)
    plain.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    shapes = {name: parameter.numel() for name, parameter in plain.named_parameters()}
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    report = report_trainable(lora)
    assert report.num_trainable == 2 * (4 * 32 + 32 * 4)
    assert report.num_total == sum(shapes.values()) + report.num_trainable
    assert report.dtypes["nf4"] == sum(n for name, n in shapes.items() if "_proj" in name)
