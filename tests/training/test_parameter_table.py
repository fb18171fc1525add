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
    T5Config,
    T5ForConditionalGeneration,
)

from app.model.adapter import AdapterConfig, FullConfig, LoraConfig, report_trainable
from app.model.adapter.wrap import TrainableReport
from app.training.optimizers import (
    AdamWConfig,
    LrPattern,
    MuonConfig,
    OptimizerConfig,
    build_optimizer,
)
from app.training.prepare import (
    MAX_BRIEF_ROWS,
    MAX_ROWS,
    TrainedPattern,
    describe_parameters,
    print_parameter_table,
    shared_settings,
    trainable_table,
    trained_patterns,
)
from tests.tiny import tiny_llama

Q_PROJ = "model.layers.*.self_attn.q_proj"


def adapted(config: peft.PeftConfig, **llama: Any) -> Any:
    return peft.get_peft_model(tiny_llama(**llama), config)


def optimizer_of(
    model: Any, adapter: AdapterConfig, config: OptimizerConfig | None = None
) -> torch.optim.Optimizer:
    return build_optimizer(model, config or AdamWConfig(), adapter, lr=1e-3, fused=False)


def patterns_of(
    model: Any, adapter: AdapterConfig, config: OptimizerConfig | None = None
) -> list[TrainedPattern]:
    patterns = trained_patterns(model, optimizer_of(model, adapter, config))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(pattern.num_weights for pattern in patterns) == trainable
    return patterns


def many_layers() -> Any:
    """An encoder-decoder: more kinds of modules than the table has rows."""
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, is_gated_act=True
    )
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config)


def test_rates_and_decays_of_their_own_are_rows_of_their_own() -> None:
    model = adapted(peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    adapter = LoraConfig(lora_plus_ratio=16, lora_plus_weight_decay=0.0)
    patterns = patterns_of(model, adapter, AdamWConfig(weight_decay=0.1))
    got = [(*p.kinds, p.lr, p.weight_decay) for p in patterns]
    assert got == [("lora A", 1e-3, 0.1), ("lora B", 16e-3, 0.0), ("magnitude", 1e-3, 0.0)]
    table = trainable_table(patterns)
    assert [str(column.header) for column in table.columns][-2:] == ["lr", "decay"]
    assert list(table.columns[-2].cells) == ["1e-3", "0.016", "1e-3"]
    assert str(table.title) == "trainable parameters, dtype float32"


def test_more_patterns_than_rows_are_summed_up_in_the_last_row() -> None:
    patterns = patterns_of(many_layers(), FullConfig())
    assert len(patterns) > MAX_ROWS
    table = trainable_table(patterns)
    assert table.row_count == MAX_ROWS
    shown, weights = list(table.columns[0].cells), list(table.columns[4].cells)
    assert shown[-1] == f"{len(patterns) - MAX_ROWS + 1} smaller ones"
    order = [pattern.pattern for pattern in patterns]
    places = [order.index(name) for name in shown[:-1]]
    assert places == sorted(places)
    counts = [int(cell.replace(",", "")) for cell in weights]
    assert sum(counts) == sum(pattern.num_weights for pattern in patterns)
    left_out = [p.num_weights for p in patterns if p.pattern not in shown]
    assert max(left_out) <= min(counts[:-1])
    brief = trainable_table(patterns, is_brief=True)
    numbers = sum(int(cell.replace(",", "")) for cell in brief.columns[3].cells)
    assert (brief.row_count, numbers) == (MAX_BRIEF_ROWS, sum(counts))


def test_the_groups_are_listed_with_their_settings_and_sum_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_llama(attention_bias=True)
    config = MuonConfig(weight_decay=0.1, matrix_lr_ratio=3.0)
    config.lr_by_pattern = [LrPattern(pattern="*.layers.0.*", ratio=0.5)]
    with caplog.at_level(logging.DEBUG, logger="app"):
        print_parameter_table(model, optimizer_of(model, FullConfig(), config))
    lines = caplog.text.splitlines()
    start = lines.index(next(line for line in lines if "groups of MuonWithAdamW" in line))
    rows = [line.rsplit(maxsplit=6) for line in lines[start + 4 :] if line.count("%") == 1][:-1]
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    in_layer = [p for p in model.model.layers[0].parameters() if p.ndim == 1]
    expected = [
        ("muon matrices", 7, layer, "3e-3", "0.1"),
        ("muon matrices, *.layers.0.*", 7, layer, "1.5e-3", "0.1"),
        ("matrices", 1, 64 * 32, "1e-3", "0"),
        ("no decay", len(vectors) - len(in_layer), None, "1e-3", "0"),
        ("no decay, *.layers.0.*", len(in_layer), None, "5e-4", "0"),
    ]
    counted = [int(row[2].replace(",", "")) for row in rows]
    for row, weights, (name, tensors, count, lr, decay) in zip(
        rows, counted, expected, strict=True
    ):
        assert (row[0].strip(), row[1], row[5], row[6]) == (name, str(tensors), lr, decay)
        assert count is None or weights == count
    assert sum(counted) == report_trainable(model).num_trainable


def test_a_log_file_gets_unwrapped_lines(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted(peft.LoraConfig(r=4, target_modules="all-linear"))
    with caplog.at_level(logging.DEBUG, logger="app"):
        print_parameter_table(model, optimizer_of(model, LoraConfig(lora_plus_ratio=16)))
    lines = [line for message in caplog.messages for line in message.splitlines()]
    (row,) = (line for line in lines if Q_PROJ in line and "lora B" in line)
    assert row.split() == [Q_PROJ, "lora", "B", "2", "32x4", "256", "6.9", "%", "0.016"]
    report = report_trainable(model)
    assert report.num_bytes == 4 * report.num_total
    assert lines[-2:] == [
        f"trainable params: {report.num_trainable:,} / {report.num_total:,} "
        f"({100 * report.num_trainable / report.num_total:.2f} %), fp32, decay 0",
        f"model weights: fp32, {report.num_bytes / 2**20:.1f} MiB",
    ]
    lines = describe_parameters(TrainableReport(512, 2**30, {"bfloat16": 7, "nf4": 2000}, 2**31))
    assert lines[1] == "model weights: 7 bf16, 2,000 nf4, 2.0 GiB"


def test_the_short_table_has_a_row_a_parent_and_fits_80_columns() -> None:
    model = adapted(peft.LoraConfig(r=4, target_modules="all-linear"))
    patterns = patterns_of(model, LoraConfig())
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(table := trainable_table(patterns, is_brief=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    heading, attention, mlp = (line.split("  ") for line in lines)
    assert heading[0] == "module"
    assert attention[0] == "self_attn: q_proj, k_proj, v_proj, o_proj"
    assert mlp[0] == "mlp: gate_proj, up_proj, down_proj"
    assert list(table.columns[1].cells) == ["lora A, B"] * 2
    counts = [int(cell.replace(",", "")) for cell in table.columns[3].cells]
    assert sum(counts) == sum(pattern.num_weights for pattern in patterns)
    assert shared_settings(patterns)["lr"] == "1e-3"


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
