"""`make bench-gpu`: an 8B model on one GPU, LoRA, QLoRA and full, beside a plain loop.

Random weights of Llama 3.1 8B's shape, made on the device: no files and no network. Every part is
trained from the start, ours by the rooms of `app.train`; the parts take turns in rounds, as many as
the budget allows. Exit code 1 when a bar is missed, 3 where there is no GPU.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.figure import Figure, print_figures
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.sheet import PEAK_TFLOPS, Result, write_sheet
from benchmarks.gpu.task import Part, Task, batches_of, flops_per_token

ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = 450.0
"""from the first line on, so that all of it ends within eight minutes"""
ROUNDS = 3
NO_MEMORY = "not enough memory"
PARTS = {
    "lora": Part(),
    "lora, compiled": Part(is_compiled=True, warm_up=2, seconds=90),
    "lora, real lengths": Part(is_skewed=True),
    "qlora": Part(is_quantized=True),
    "full": Part(adapter="full", packs=1),
    "lora, compiled, real lengths": Part(
        is_compiled=True, is_skewed=True, warm_up=2, first_round=1, seconds=60
    ),
    "full, compiled": Part(
        adapter="full", packs=1, is_compiled=True, warm_up=2, first_round=1, seconds=90
    ),
    "full, 8-bit states": Part(adapter="full", packs=1, optimizer="adamw8bit", first_round=1),
}
"""in the order of their worth: later ones are the first to be left out"""
SYSTEMS = {"lora": ("ours", "plain"), "full": ("ours", "plain")}
"""who trains a part; ours alone where it is not said"""
BARS = {"lora": 14_000.0, "full": 9_500.0}
"""tokens a second on one H200"""
AIMS = {"gpu/lora/tokens_per_second": 17_700.0, "gpu/full/tokens_per_second": 11_800.0}
RATIOS = {
    "qlora_against_lora": ("qlora", "lora"),
    "real_lengths_against_full_sequences": ("lora, real lengths", "lora"),
    "compiled_real_lengths_against_full_sequences": (
        "lora, compiled, real lengths",
        "lora, compiled",
    ),
}
"""parts that are set beside each other, in all else alike"""
ABOUT = (
    "Random weights of Llama 3.1 8B's shape and random tokens, all of them trained; LoRA of rank "
    "16 on all linear layers without dropout, under autocast, its weights and their AdamW states "
    "in fp32; full in bf16 throughout, with bf16 AdamW states unless 8 bits are said. Sequences of "
    "4,096 tokens; micro-batches of 8,192 tokens (full: 4,096), 32,768 an optimizer step. Real "
    "lengths are lognormal, median 150, packed by multipack. `plain` is a loop of transformers and "
    "peft with their own attention and loss, on full sequences. The figure of a method is that of "
    "its faster part, compiled or not. MFU counts nothing twice that is recomputed, against 989 "
    "TFLOPS (dense bf16 of an H100 or H200 by its datasheet). The bars are those of one H200. "
    "Medians of rounds in which the parts take turns; kernels are those of one profiled step, and "
    "what ours spends in the head holds the loss and its gradient."
)


@dataclass(slots=True)
class Runs:
    """The rounds of one system in one part."""

    problem: str = ""
    """why there are no more rounds"""
    note: str = ""
    attention: str = ""
    speeds: list[float] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    flops: float = 0.0
    took: float = 0.0

    def line(self) -> str:
        """Say how the newest round went."""
        if self.problem:
            return f"left out, {self.problem}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.speeds[-1]:,.0f} tokens a second{note}, {self.took:.0f} s in all"


def main() -> int:
    """Measure everything on the GPU that is here, and write the sheet."""
    import torch

    if not torch.cuda.is_available():
        print(
            "error: make bench-gpu needs an NVIDIA GPU of about 120 GiB (one H200 or the like); "
            "torch finds none here",
            file=sys.stderr,
        )
        return 3
    import yaml  # type: ignore[import-untyped]

    from app.process.environment import quiet_libraries

    quiet_libraries(offline=True)
    logging.getLogger("app.training").setLevel(logging.WARNING)
    shape = yaml.safe_load((ROOT / "conf" / "model" / "llama8b.yaml").read_text())["architecture"]
    return measure(
        Task(shape=shape, device="cuda"),
        PARTS,
        torch.cuda.get_device_name(),
        ROOT / "benchmarks" / "results",
    )


def measure(
    task: Task,
    parts: dict[str, Part],
    device_name: str,
    folder: Path,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    rounds: int = ROUNDS,
) -> int:
    """Train every part in turn, print the figures, write the sheet; 1 when a bar is missed."""
    ends = time.monotonic() + budget_seconds
    runs: dict[tuple[str, str], Runs] = {}
    for name, part, system in turns(parts, rounds):
        found = runs.setdefault((name, system), Runs())
        started = time.monotonic()
        if found.problem:
            continue
        if (left := ends - started) >= (found.took or part.seconds):
            found.problem = run(task, part, system, found)
        elif not found.speeds:
            found.problem = f"it takes about {part.seconds:.0f} s, and {left:.0f} s were left"
        else:
            continue
        found.took = time.monotonic() - started
        print(f"{name}, {system}: {found.line()}", flush=True)
    results = [result_of(*key, found) for key, found in runs.items() if found.speeds]
    figures = figures_of(results)
    left_out = [f"{', '.join(key)}: {one.problem}" for key, one in runs.items() if one.problem]
    path = write_sheet(folder, device_name, ABOUT, results, figures, AIMS, left_out)
    print(path.read_text())
    for result in results:
        print(json.dumps(asdict(result)))
    print_figures(figures)
    print(f"written: {path}")
    return 0 if figures and all(figure.ok for figure in figures) else 1


def turns(parts: dict[str, Part], rounds: int) -> Iterator[tuple[str, Part, str]]:
    """Yield who trains next: every part in every round from its first one on."""
    for number in range(rounds):
        for name, part in parts.items():
            if part.first_round <= number:
                for system in SYSTEMS.get(name, ("ours",)):
                    yield name, part, system


def run(task: Task, part: Part, system: str, found: Runs) -> str:
    """Train a part once; return why it could not be done, empty where it could.

    Where memory does not suffice, everything is recomputed in the backward pass, which is noted.
    """
    needs_bitsandbytes = part.is_quantized or part.optimizer == "adamw8bit"
    if needs_bitsandbytes and find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    for recompute in ("full",) if found.note else ("none", "full"):
        clock = Clock(task.device, part.warm_up, task.steps)
        problem = attempt(task, part, system, recompute, clock, found)
        free_memory(task)
        if not problem:
            found.note = "" if recompute == "none" else "recompute=full: memory"
            found.speeds.append(clock.tokens / clock.seconds)
            found.clocks.append(clock)
        if problem != NO_MEMORY:
            return problem
    return NO_MEMORY


def attempt(task: Task, part: Part, system: str, recompute: str, clock: Clock, found: Runs) -> str:
    """Train; return what went wrong, empty where nothing did."""
    import torch

    from benchmarks.gpu import ours, plain

    batches = batches_of(task, part)
    found.flops = flops_per_token(task, part, batches)
    try:
        train = {"ours": ours.train, "plain": plain.train}[system]
        with redirect_stdout(io.StringIO()):  # what trains is the same in every round
            found.attention = train(task, part, recompute, batches, clock)
    except torch.OutOfMemoryError:
        return NO_MEMORY
    except Exception as error:  # noqa: BLE001  the minutes of the other parts must not be lost
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return ""


def free_memory(task: Task) -> None:
    """Give back what the last training held, so that the next one's peak is its own."""
    gc.collect()
    if task.device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def result_of(name: str, system: str, found: Runs) -> Result:
    """Bring the rounds of one system in one part together."""
    speed = median(found.speeds)
    peaks = [clock.peak_gib for clock in found.clocks if clock.peak_gib is not None]
    return Result(
        part=name,
        system=system,
        note=found.note,
        attention=found.attention,
        tokens_per_second=speed,
        mfu=speed * found.flops / (PEAK_TFLOPS * 1e12),
        peak_gib=max(peaks) if peaks else None,
        spans=medians([clock.milliseconds_a_step() for clock in found.clocks]),
        kinds=medians([clock.kinds for clock in found.clocks]),
        rounds=len(found.speeds),
    )


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number over the rounds."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def figures_of(results: Sequence[Result]) -> list[Figure]:
    """Set the speeds beside their bars, and the parts beside each other."""
    ours = {result.part: result.tokens_per_second for result in results if result.system == "ours"}
    plain = {result.part: result.tokens_per_second for result in results if result.system != "ours"}
    values: dict[str, tuple[float, float]] = {}
    for name, bar in BARS.items():
        ways = [ours[part] for part in (name, f"{name}, compiled") if part in ours]
        if ways:
            values[f"{name}/tokens_per_second"] = max(ways), bar
        if ways and name in plain:
            values[f"{name}/speed_against_plain"] = max(ways) / plain[name], 1.0
    for figure, (part, other) in RATIOS.items():
        if part in ours and other in ours:
            values[figure] = ours[part] / ours[other], 0.97
    return [
        Figure(figure=f"gpu/{name}", value=value, bar=bar, better="higher")
        for name, (value, bar) in values.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
