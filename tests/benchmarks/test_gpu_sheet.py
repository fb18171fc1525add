"""The GPU's sheet: every part trains, by a small shape on whatever is here, and all is written."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

import benchmarks.gpu.__main__ as bench
from app.config import load_config
from app.model.adapter import LoraConfig
from app.model.base import ModelConfig, load_base
from app.model.quantization import QuantizationConfig
from app.training import compilation as compiling
from app.training.trainer import Environment
from benchmarks.gpu import ours, plain
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.model import quantize
from benchmarks.gpu.task import (
    Part,
    Task,
    batches_of,
    flops_per_token,
    lora_of,
    recomputes,
)
from tests.tiny import random_ids, tiny_llama

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
        spans = {"between", "forward", "backward", "optimizer"}
        assert one["spans"].keys() == spans | ({"layers", "head and loss"} & one["spans"].keys())
        assert all(span >= 0 for span in one["spans"].values())
        # The marks lie side by side: together they are the time of a step, of another step than the
        # speed's, which other work on this machine may have made many times as long.
        step = 1000 * SMALL.tokens_per_step / one["tokens_per_second"]
        assert step / 30 < sum(one["spans"].values()) < 30 * step
        assert one["kinds"]["products"] > 0
        row = next(line for line in sheet.splitlines() if f"| {part} | {system} |" in line)
        assert row.count("|") == len(sheet.splitlines()[4].split("|")) - 1
    assert results["qlora", "ours"]["kinds"]["dequantizing"] > 0
    assert figures.keys() == {
        "gpu/lora/tokens_per_second",
        "gpu/lora/speed_against_plain",
        "gpu/llama8b_as_shipped/tokens_per_second",
        "gpu/full/tokens_per_second",
        "gpu/full/speed_against_plain",
        "gpu/qlora_against_lora",
        "gpu/lora_fp8_against_lora",
        "gpu/full_fp8_against_full",
        "gpu/real_lengths_against_full_sequences",
    }
    lora = results["lora", "ours"]["tokens_per_second"]
    assert figures["gpu/lora/tokens_per_second"]["value"] == pytest.approx(lora, rel=1e-4)
    assert figures["gpu/lora/tokens_per_second"]["bar"] == 14_000
    assert "| gpu/lora/tokens_per_second |" in sheet
    assert "torch 2" in sheet
    assert "Left out" not in sheet


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


def test_what_does_not_fit_the_budget_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet, found = measured(tmp_path, capsys, budget_seconds=20, rounds=1)
    assert found == []
    assert "- lora, ours: it takes about 25 s, and 20 s were left" in sheet


def test_what_still_runs_when_the_budget_ends_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: Any) -> str:
        with contextlib.suppress(Exception):  # as a library that goes on without what failed
            time.sleep(60)
        time.sleep(60)
        return "sdpa"

    monkeypatch.setattr(ours, "train", endless)
    monkeypatch.setattr(bench, "AGAIN_SECONDS", 0.5)
    began = time.monotonic()
    parts = {"lora": Part(seconds=1), "qlora": Part(seconds=1)}
    sheet, found = measured(tmp_path, capsys, parts=parts, budget_seconds=2, rounds=3)
    assert time.monotonic() - began < 50
    assert "- lora, ours: stopped where the budget ended" in sheet
    assert "- qlora, ours: it takes about 1 s, and -" in sheet
    assert not any("part" in one for one in found)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_round_of_the_parts_fits_the_budget_on_paper() -> None:
    first = [part.seconds for _, part, _ in bench.turns(bench.PARTS, 1)]
    assert sum(first) < bench.BUDGET_SECONDS
    # After the budget come a stop, the sheet, and the end of the process.
    assert bench.BUDGET_SECONDS + 3 * bench.AGAIN_SECONDS < 8 * 60


@pytest.mark.parametrize(
    ("device", "lora"),
    [("NVIDIA H200", 14_000), ("NVIDIA H100 80GB HBM3", 12_500), ("NVIDIA L4", None)],
)
def test_bars_are_those_of_the_device(
    device: str,
    lora: float | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain, "train", quick_train)
    monkeypatch.setattr(ours, "train", quick_train)
    bench.measure(SMALL, {"lora": Part()}, device, tmp_path, rounds=1)
    found = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    figures = {one["figure"]: one for one in found if "figure" in one}
    assert "gpu/lora/speed_against_plain" in figures
    bar = figures.get("gpu/lora/tokens_per_second", {}).get("bar")
    assert bar == lora
    assert all((one["mfu"] is None) == (lora is None) for one in found if "part" in one)
    (sheet,) = tmp_path.iterdir()
    said = "bars are those of this GPU" if lora else "This GPU has no bars but of ratios"
    assert said in sheet.read_text()


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


def test_the_kernels_that_ours_used_stand_in_the_sheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "train", quick_train)
    parts = {"qlora": Part(), "lora, compiled": Part(is_compiled=True)}
    sheet, _ = measured(tmp_path, capsys, parts=parts, rounds=1)
    assert "| qlora | ours | sdpa | Liger's for 2 norms |" in sheet
    assert "| lora, compiled | ours | sdpa | the compiler's |" in sheet
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "run", lambda *_: "nothing")
    (tmp_path / "bare").mkdir()
    sheet, _ = measured(tmp_path / "bare", capsys, parts=parts, rounds=1)
    assert "liger-kernel is not installed, and the bars are meant with it" in sheet


def test_lora_is_measured_with_the_dropout_and_the_experiment_that_are_shipped() -> None:
    shipped = load_config("train", ["+experiment=llama8b"])
    assert lora_of(Part()).dropout == LoraConfig().dropout
    assert lora_of(Part(experiment="llama8b")) == shipped.adapter
    assert recomputes(Part(experiment="llama8b"), "ours")[0] == shipped.recompute.mode
    assert recomputes(Part(), "ours") == ("none", "selective", "full")
    assert recomputes(Part(), "plain") == ("none", "full")


def test_a_part_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> str:
        raise ValueError("no such kernel\nand more")

    monkeypatch.setattr(plain, "train", broken)
    sheet, found = measured(tmp_path, capsys, parts={"lora": Part()}, rounds=2)
    assert "- lora, plain: ValueError: no such kernel\n" in sheet
    assert [one["system"] for one in found if "part" in one] == ["ours"]


@pytest.mark.parametrize(
    ("too_large", "rounds"),
    [(("none",), ["none", "selective", "selective"]),
     (("none", "selective"), ["none", "selective", "full", "full"])],
)  # fmt: skip
@pytest.mark.versions
def test_where_memory_does_not_suffice_layers_are_recomputed_and_noted(
    too_large: tuple[str, ...],
    rounds: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, tried = ours.train, []

    def needing(task: Task, part: Part, recompute: str, *rest: Any) -> str:
        tried.append(recompute)
        if recompute in too_large:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(task, part, recompute, *rest)

    monkeypatch.setattr(ours, "train", needing)
    parts = {"lora, real lengths": QUICK["lora, real lengths"]}
    sheet, _ = measured(tmp_path, capsys, parts=parts, rounds=2)
    assert f"| lora, real lengths (recompute={rounds[-1]}: memory) | ours |" in sheet
    assert tried == rounds


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


def test_short_documents_attend_to_less() -> None:
    full, skewed = Part(), Part(is_skewed=True)
    task = Task(shape=SHAPE, device="cpu", steps=1)
    flops = [flops_per_token(task, part, batches_of(task, part)) for part in (full, skewed)]
    assert flops[1] < flops[0]


@pytest.mark.parametrize("part", [Part(), Part(is_skewed=True), Part(packs=1)])
def test_batches_hold_the_tokens_of_a_step_in_full_packs(part: Part) -> None:
    task = Task(shape=SHAPE, device="cpu", tokens_per_step=32_768, steps=1)
    batches = batches_of(task, part)
    micro_batches = 8 // part.packs
    assert len(batches) == micro_batches * (part.warm_up + task.steps + 1)
    tokens = sum(batch.num_tokens for batch in batches)
    assert tokens >= 0.99 * len(batches) * part.packs * task.sequence_len
    for first in range(0, len(batches), micro_batches):
        step = batches[first : first + micro_batches]
        labels = sum(int((batch.labels >= 0).sum()) for batch in step)
        assert {batch.step_weight for batch in step} == {labels}
    lengths = {n for batch in batches for row in batch.document_lengths for n in row}
    assert lengths == {4096} if not part.is_skewed else len(lengths) > 100


def test_a_base_quantized_in_place_is_the_one_that_the_loader_makes(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=False).to(torch.bfloat16).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    loaded = load_base(config, "sdpa", torch.bfloat16, QuantizationConfig(method="nf4"))
    made = load_base(config, "sdpa", torch.bfloat16)
    quantize(made, torch.bfloat16)
    ids = random_ids()
    assert torch.equal(made(ids).logits, loaded(ids).logits)
    assert {n: p.dtype for n, p in made.named_parameters()} == {
        n: p.dtype for n, p in loaded.named_parameters()
    }
    assert not any(weight.requires_grad for weight in made.parameters())


def test_a_clock_counts_measured_steps_alone() -> None:
    clock = Clock("cpu", warm_up=1, steps=2)
    clock.start()
    for _ in range(4):
        for _ in range(2):
            clock.mark("between")
            clock.mark("forward")
            clock.micro_batch_done(100)
        clock.step_done()
    assert clock.tokens == 400
    assert clock.seconds > 0
    assert len(clock.marks) == 1 + 2 * 4
    assert clock.profiler is None
    assert clock.kinds.keys() >= {"attention", "products", "other"}


@pytest.mark.parametrize(("gib", "mode"), [(79, "none"), (1, "offload")])
def test_what_is_shipped_recomputes_what_the_run_would(
    gib: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(experiment="llama8b")
    assert recomputes(part, "ours")[0] == "auto"
    gpu = SimpleNamespace(name="Some Card", total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    env = Environment(
        accelerator="gpu",
        devices=1,
        num_ranks=1,
        num_data_ranks=1,
        precision="bf16",
        accumulation=1,
    )
    assert ours.resolve_recompute(SMALL, part, LoraConfig(), env) == mode


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
