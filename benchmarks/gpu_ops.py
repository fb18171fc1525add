"""The work of an 8B model on a GPU, counted on a fake device; the time is modelled.

Only what the program requests is counted: kernels, FLOPs, bytes, memory, synchronizations. The time
follows from the rates in `fake_device/rates.py`, without the host's time to launch kernels:
`fake_device/host.py` measures that on the CPU, compared with a plain transformers + peft step.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.fake_device.rates import GPUS
from benchmarks.fake_device.trace import Job, Numbers, architecture_of, extrapolate
from benchmarks.figure import Figure
from benchmarks.training.task import MEDIAN_TOKENS, SPREAD
from tools.simulate.device import MEMORY_GIB, find_obstacle

SEQUENCE_LEN = 4096
STEP_TOKENS = 8 * SEQUENCE_LEN
"""tokens of an optimizer step of full tuning on one GPU, as in `make bench-gpu`"""
DEPTHS = (2, 4)
"""numbers of layers that are traced; the whole model is extrapolated from both"""
PROCESSES = 2
FULL_PACKS = [SEQUENCE_LEN] * 4
USABLE_GIB = MEMORY_GIB - 3
"""GiB of an 80 GB card that are usable after driver context, cuBLAS and fragmentation (assumed)"""
WIDTH = 320
"""width of the table, which is stored as Markdown and not read in a terminal"""
BARS = {
    "lora": 16_500.0,
    "lora, real lengths": 17_900.0,
    "lora fp8": 21_000.0,
    "lora fp8, real lengths": 25_000.0,
    "full": 10_800.0,
    "full on eight": 12_000.0,
    "full fp8 on eight": 13_500.0,
    "llama8b": 12_500.0,
    "dpo": 10_500.0,
    "mixture gpt_oss_20b": 11_000.0,
}
"""modelled tokens per second on an H100"""
HOST_BAR = 1.25
"""host time relative to a plain step, which launches twice as many kernels"""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; the fastest one of a method that fits in memory gives its figure."""

    method: str
    words: Sequence[str]
    is_real: bool = False
    """real lengths, lognormal, instead of full packs"""
    system: str = "ours"
    model: str = "llama8b"
    depths: tuple[int, int] = DEPTHS
    num_gpus: int = 1
    """with several, weights and states are sharded: all of it fits, and messages are left out"""
    label: str = ""
    recomputed: float = 1.0
    """share of the layers, which stands in for `recomputed` in `words`"""

    @property
    def is_later(self) -> bool:
        """Whether gradients add up, and each micro-batch has its share of an optimizer step."""
        return self.method == "full"

    @property
    def kind(self) -> str:
        """The method and its documents, which have one figure."""
        return f"{self.method}, real lengths" if self.is_real else self.method

    @property
    def name(self) -> str:
        recomputes = [
            word.replace("=", " ") for word in self.words if word.split("=")[0] == "recompute"
        ]
        labels = [self.label] if self.label else []
        return ", ".join([self.kind, *recomputes, *labels, self.system])


def words_of(method: str) -> list[str]:
    """Return the overrides of a method: 8,192 tokens a micro-batch, full tuning in bf16 4,096."""
    words = ["model=llama8b", f"data.sequence_len={SEQUENCE_LEN}", "trainer.max_steps=1"]
    words.append("trainer.gradient_accumulation_steps=1")
    lora = ["trainer.precision=bf16", "trainer.micro_batch_size=2", "adapter.dropout=0"]
    of_methods = {
        "lora": lora,
        "qlora": [*lora, "quantization=nf4"],
        "lora fp8": [*lora, "quantization=fp8"],
        "full": ["adapter=full", "trainer.precision=bf16-pure", "trainer.micro_batch_size=1"],
        "full fp8": ["adapter=full", "trainer.precision=fp8"],
    }
    return words + of_methods[method]


CASES = [
    *(
        Case(method, [*words_of(method), f"recompute={mode}"], is_real)
        for method in ("lora", "lora fp8", "qlora", "full")
        for mode in ("none", "full")
        for is_real in (False, True)
    ),
    *(
        Case(
            method,
            [*words_of(method), "recompute=none", "trainer.micro_batch_size=3"],
            label="3 packs",
        )
        for method in ("lora", "qlora")
    ),
    Case("full", [*words_of("full"), "recompute=selective"]),
    Case(
        "full",
        [*words_of("full"), "recompute=selective", "recompute.num_layers={recomputed}"],
        depths=(16, 32),  # of which 11 and 22 are recomputed, as many as recompute=auto chooses
        recomputed=11 / 16,
        label="22 of 32 layers",
    ),
    Case(
        "full",
        [*words_of("full"), "recompute=none", "optimizer=adamw8bit"],
        label="8-bit states",
    ),
    *(
        Case(
            f"{method} on eight",
            [*words_of(method), "recompute=none", "trainer.micro_batch_size=2"],
            depths=(4, 6),  # the first and the last layer stay in bf16
            num_gpus=8,
        )
        for method in ("full", "full fp8")
    ),
    Case("llama8b", ["+experiment=llama8b", "trainer.max_steps=1"]),
    *(
        Case(
            f"mixture {model}",
            [*words_of("lora"), f"model={model}", "adapter.r=8", "recompute=full"],
            model=model,
        )
        for model in ("qwen3_30b_a3b", "gpt_oss_20b")
    ),
    # Pairs that fill a pack each; the products of the base's own pass come on top of the ideal, and
    # with kto those of the other answers' two passes.
    *(
        Case(name, [*words_of("lora"), f"objective={name}", f"recompute={mode}"])
        for name in ("dpo", "kto")
        for mode in ("none", "full")
    ),
    Case(
        "hybrid",
        [*words_of("lora"), "model=qwen3_5_9b", "recompute=full"],
        is_real=True,
        model="qwen3_5_9b",
        depths=(4, 8),  # three layers of a delta rule, then one of attention
    ),
    *(
        Case(method, [*words, *how], system="plain")
        for method, words in (("lora", ["lora"]), ("qlora", ["lora", "nf4"]), ("full", []))
        for how in ([], ["recompute"])
    ),
]


def real_lengths() -> list[int]:
    """Draw documents for several packs, with the lengths of the bench-peers task."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(MEDIAN_TOKENS), SPREAD, 400))
    return [int(length) for length in drawn.astype(int).clip(8, SEQUENCE_LEN)]


def measure() -> list[Figure]:
    """Trace all cases, print the counts, and compare the figures with their bars."""
    if obstacle := find_obstacle():
        print(f"gpu_ops: skipped: {obstacle}")
        return []
    found = trace_all(CASES)
    print_table(found)
    for name, numbers in found.items():
        print(json.dumps({"case": name} | numbers))
    return figures_of(found) + host_figures(measure_host())


def measure_host() -> Mapping[str, float]:
    """Return the host's milliseconds of a micro-batch of 32 layers, by system and recompute."""
    (line,) = run_process("benchmarks.fake_device.host", "")
    print(json.dumps({"case": "host, milliseconds"} | line))
    return line


def host_figures(milliseconds: Mapping[str, float]) -> list[Figure]:
    """Compare each recompute mode with a plain step: none with none, the others with full."""
    return [
        Figure(
            figure=f"gpu_ops/host_{mode}_against_plain",
            value=milliseconds[f"ours/{mode}"] / milliseconds[f"plain/{beside}"],
            bar=HOST_BAR,
        )
        for mode, beside in (("none", "none"), ("full", "full"), ("selective", "full"))
    ]


def trace_all(cases: Sequence[Case]) -> dict[str, Numbers]:
    """Return the counts of each case, by name, extrapolated to the model's depth."""
    jobs = [
        Job(
            name=case.name,
            model=case.model,
            num_layers=depth,
            words=[
                word.replace("{recomputed}", f"{case.recomputed * depth:.0f}")
                for word in case.words
            ],
            lengths=lengths_of(case),
            system=case.system,
            is_later=case.is_later,
        )
        for case in cases
        for depth in case.depths
    ]
    shares = [jobs[number::PROCESSES] for number in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        lines = [line for share in pool.map(trace_jobs, shares) for line in share]
    found: dict[str, Numbers] = {}
    for case in cases:
        own = [line for line in lines if line["name"] == case.name]
        if problems := [line["error"] for line in own if "error" in line]:
            print(f"{case.name}: left out: {problems[0]}")
            continue
        shallow, deep = (
            {key: value for key, value in line.items() if key != "name"} for line in own
        )
        num_layers = architecture_of(case.model)["num_hidden_layers"]
        found[case.name] = extrapolate(shallow, deep, num_layers)
        if case.is_later:
            share = found[case.name]["tokens"] / STEP_TOKENS
            for gpu in GPUS:
                seconds = share * found[case.name][f"step/seconds/{gpu}"]
                found[case.name][f"seconds/{gpu}"] += seconds
    return found


def lengths_of(case: Case) -> list[int]:
    """Return the document lengths of a case; for a plain step, the rows of its micro-batch."""
    if case.system == "plain":
        return FULL_PACKS[: 1 if case.method == "full" else 2]
    if case.method in ("dpo", "kto"):
        return [SEQUENCE_LEN // 2] * 8
    return real_lengths() if case.is_real else FULL_PACKS


def trace_jobs(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Trace in a separate process with the fake GPU; returns the counts of each job."""
    return run_process("benchmarks.fake_device", json.dumps([asdict(job) for job in jobs]))


def run_process(module: str, given: str) -> list[dict[str, Any]]:
    """Run a Python module with the given standard input, and return the JSON objects it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module], input=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module}: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def speed(numbers: Numbers, gpu: str = "h100") -> float:
    """Return the modelled tokens per second of a micro-batch, forward and backward.

    With full tuning on one GPU its share of the optimizer step is part of it.
    """
    return numbers["tokens"] / numbers[f"seconds/{gpu}"]


def needed_gib(numbers: Numbers) -> float:
    """Return the peak memory of a step: weights, gradients, optimizer states, activations."""
    names = ("weights_bytes", "gradients_bytes", "states_bytes", "peak_bytes")
    return sum(numbers[name] for name in names) / 2**30


def figures_of(found: Mapping[str, Numbers]) -> list[Figure]:
    """Compare a figure with its bar."""
    traced = [case for case in CASES if case.name in found]
    speeds = {
        (case.kind, case.system): speed(found[case.name])
        for case in sorted(traced, key=lambda case: speed(found[case.name]))
        if case.num_gpus > 1 or needed_gib(found[case.name]) <= USABLE_GIB
    }  # the last one kept is the fastest that fits
    ours = {kind: value for (kind, system), value in speeds.items() if system == "ours"}
    plain = {kind: value for (kind, system), value in speeds.items() if system == "plain"}
    figures = [
        Figure(
            figure=f"gpu_ops/{kind.replace(',', '').replace(' ', '_')}_tokens_per_second",
            value=ours.get(kind, 0.0),
            bar=bar,
            better="higher",
        )
        for kind, bar in BARS.items()
    ]
    if {"lora", "qlora"} <= ours.keys():
        share = ours["qlora"] / ours["lora"]
        figures.append(
            Figure(figure="gpu_ops/qlora_against_lora", value=share, bar=0.97, better="higher")
        )
    for method in sorted(plain.keys() & ours.keys()):
        figures.append(
            Figure(
                figure=f"gpu_ops/{method}_against_plain",
                value=ours[method] / plain[method],
                bar=1.0,
                better="higher",
            )
        )
    lora = found.get(CASES[0].name)
    if lora is not None:
        peak = lora["peak_bytes"] / 2**30
        figures.append(Figure(figure="gpu_ops/lora_activations_gib", value=peak, bar=46.0))
    own = [found[case.name] for case in CASES if case.system == "ours" and case.name in found]
    for name, what in (("syncs", "host_syncs"), ("pageable", "pageable_copies")):
        most = max((numbers[name] for numbers in own), default=math.inf)
        figures.append(Figure(figure=f"gpu_ops/{what}_a_micro_batch", value=most, bar=0.0))
    return figures


def print_table(found: Mapping[str, Numbers]) -> None:
    """Print a row per case, and the source of the modelled rates."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    kinds = [name for name in next(iter(found.values())) if name.startswith("bytes/")]
    print("one micro-batch; KB a token of what is neither product nor attention, by class")
    table = Table(box=box.MARKDOWN)
    columns = ["case", "launches", "products / ideal"]
    columns += [kind.removeprefix("bytes/") for kind in kinds]
    columns += ["activations GiB", "all GiB", "syncs", "pageable"]
    columns += [f"{unit} {gpu}" for gpu in GPUS for unit in ("ms", "tokens/s")]
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for name, one in found.items():
        cells = [f"{one['launches']:,.0f}", f"{one['product_flops'] / one['ideal_flops']:.3f}"]
        cells += [f"{one[kind] / one['tokens'] / 1e3:,.0f}" for kind in kinds]
        cells += [f"{one['peak_bytes'] / 2**30:.1f}", f"{needed_gib(one):.1f}"]
        cells += [f"{one['syncs']:.0f}", f"{one['pageable']:.0f}"]
        for gpu in GPUS:
            cells += [f"{1e3 * one[f'seconds/{gpu}']:,.0f}", f"{speed(one, gpu):,.0f}"]
        table.add_row(name, *cells)
    Console(width=WIDTH).print(table)
    for gpu in GPUS.values():
        print(f"modelled {gpu.name}: {gpu.source}")
