"""The GPU's sheet: every part trains, by a small shape on whatever is here, and all is written."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

import benchmarks.gpu.__main__ as bench
from app.training import compilation as compiling
from benchmarks.gpu import ours, plain
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.task import (
    Part,
    Task,
    batches_of,
    flops_per_token,
)

pytestmark = pytest.mark.slow

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SMALL = Task(shape=SHAPE, device="cpu", sequence_len=128, tokens_per_step=512, steps=2)
COMPILED = {name: part for name, part in bench.PARTS.items() if part.is_compiled}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
HYBRID = {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,  # at least the rank of the adapter
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
SMALL_SHAPES = {
    "mixture": SHAPE | MIXTURE | {"moe_intermediate_size": 32, "head_dim": 16},
    "hybrid": SHAPE | HYBRID | {"head_dim": 16},
}
QUICK = {
    name: replace(part, shape=SMALL_SHAPES.get(name))
    for name, part in bench.PARTS.items()
    if not part.is_compiled
}
PLAIN = ("lora", "full")
PATIENT = 3600.0
"""seconds: beside other work, parts that compile have taken the sheet's own budget"""


def measured(folder: Path, capsys: pytest.CaptureFixture[str], **how: Any) -> tuple[str, list[Any]]:
    """Measure; returns the sheet, and what was printed as JSON."""
    bench.measure(
        how.pop("task", SMALL),
        how.pop("parts", QUICK),
        how.pop("device", "H200 (80GB)"),
        folder,
        budget_seconds=how.pop("budget_seconds", PATIENT),
        **how,
    )
    printed = capsys.readouterr().out.splitlines()
    (sheet,) = folder.iterdir()
    assert sheet.name.endswith("-80gb.md")
    return sheet.read_text(), [json.loads(line) for line in printed if line.startswith("{")]


@pytest.mark.versions
def test_every_part_trains_and_stands_in_the_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet, found = measured(tmp_path, capsys, rounds=2)
    results = {(one["part"], one["system"]): one for one in found if "part" in one}
    figures = {one["figure"]: one for one in found if "figure" in one}
    assert {part for part, _ in results} == set(QUICK)
    assert {part for part, system in results if system == "plain"} == set(PLAIN)
    for (part, system), one in results.items():
        assert one["rounds"] == (2 if QUICK[part].first_round == 0 else 1)
        assert one["tokens_per_second"] > 0
        assert one["kinds"]["products"] > 0
        row = next(line for line in sheet.splitlines() if f"| {part} | {system} |" in line)
        assert row.count("|") == len(sheet.splitlines()[4].split("|")) - 1
    assert results["qlora", "ours"]["kinds"]["dequantizing"] > 0
    lora = results["lora", "ours"]["tokens_per_second"]
    assert figures["gpu/lora/tokens_per_second"]["value"] == pytest.approx(lora, rel=1e-4)
    assert figures["gpu/lora/tokens_per_second"]["bar"] == 14_000
    assert "| gpu/lora/tokens_per_second |" in sheet and "Left out" not in sheet


@pytest.mark.versions
def test_the_compiled_parts_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As graphs of layers and their gradients; of real kernels there is a test of its own."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    sheet, found = measured(tmp_path, capsys, parts=COMPILED, rounds=2)
    assert "Left out" not in sheet
    assert {one["part"] for one in found if "part" in one} == set(COMPILED)
    assert "gpu/lora/tokens_per_second" in sheet


def quick_train(task: Task, part: Part, recompute: str, batches: Any, clock: Clock) -> str:
    """Count the tokens of a training that does nothing else."""
    logging.getLogger("app.model.kernels").warning("kernels: Liger's for 2 norms, proven equal")
    clock.start()
    micro_batches = len(batches) // (part.warm_up + task.steps + 1)
    for number, batch in enumerate(batches, start=1):
        clock.micro_batch_done(batch.num_tokens)
        if number % micro_batches == 0:
            clock.step_done()
    return "sdpa"


def test_a_part_that_fails_is_named_and_layers_are_recomputed_where_memory_does_not_suffice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def broken(*_: Any) -> str:
        raise ValueError("no such kernel\nand more")

    def needing(task: Task, part: Part, recompute: str, *rest: Any) -> str:
        tried.append(recompute)
        if recompute == "none":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return quick_train(task, part, recompute, *rest)

    monkeypatch.setattr(plain, "train", broken)
    monkeypatch.setattr(ours, "train", needing)
    sheet, found = measured(tmp_path, capsys, parts={"lora": Part()}, rounds=2)
    assert "- lora, plain: ValueError: no such kernel\n" in sheet
    assert "| lora (recompute=selective: memory) | ours |" in sheet
    assert [one["system"] for one in found if "part" in one] == ["ours"]
    assert tried == ["none", "selective", "selective"]


def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main() == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs an NVIDIA GPU" in said


@pytest.mark.parametrize(
    ("adapter", "gigaflops", "tokens_at_peak"), [("lora", 33.5, 29_529), ("full", 48.2, 20_497)]
)
def test_flops_of_llama_8b_are_those_of_the_formula(
    adapter: str, gigaflops: float, tokens_at_peak: float
) -> None:
    shape = yaml.safe_load((bench.ROOT / "conf/model/llama8b.yaml").read_text())["architecture"]
    task = Task(shape=shape, device="cpu", steps=1)
    part = Part(adapter=adapter)
    flops = flops_per_token(task, part, batches_of(task, part))
    assert flops / 1e9 == pytest.approx(gigaflops, rel=2e-3)
    assert bench.PEAK_TFLOPS["H200"] * 1e12 / flops == pytest.approx(tokens_at_peak, rel=1e-3)


@pytest.mark.gpu
def test_every_part_trains_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
    task = Task(shape=shape, device="cuda", sequence_len=512, tokens_per_step=2048, steps=2)
    parts = bench.PARTS
    sheet, found = measured(tmp_path, capsys, task=task, parts=parts, rounds=2)
    assert "Left out" not in sheet
    for one in found:
        if "part" in one:
            assert one["peak_gib"] > 0
            assert one["kinds"]["attention"] > 0
            assert one["kinds"]["products"] > 0
            step = 1000 * task.tokens_per_step / one["tokens_per_second"]
            assert sum(one["spans"].values()) == pytest.approx(step, rel=0.2)
