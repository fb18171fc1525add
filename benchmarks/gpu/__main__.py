"""`make bench-gpu`: an 8B model on one GPU, LoRA, QLoRA, full and FP8, compared with a plain loop.

Random weights of Llama 3.1 8B's shape, and of a hybrid and half the layers of a mixture, made on
the device: no files and no network. Every part is trained from the start, ours by the rooms of
`app.train`; the parts take turns in rounds, as many as the budget allows; what still runs at its
end is stopped. Bars are those of the GPU that is here; one without bars has only the ratios between
parts. Exit code 1 when a bar is missed, 3 where there is no GPU.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fake_device.trace import architecture_of
from benchmarks.figure import Figure, print_figures
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.sheet import PEAK_TFLOPS, Result, of_device, write_sheet
from benchmarks.gpu.task import Part, Task, batches_of, flops_per_token, lora_of, recomputes

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = 450.0
"""seconds from the first line on, so that everything ends within eight minutes"""
AGAIN_SECONDS = 5.0
"""seconds between two attempts to stop a part beyond the budget: a library may catch the first"""
ROUNDS = 3
NO_MEMORY = "not enough memory"
NO_LIGER = (
    "liger-kernel is not installed, and the bars are meant with it: ours trains with the model's "
    "own norms and gates; type .venv/bin/pip install -c constraints.txt -e '.[gpu]'"
)
PARTS = {
    "lora": Part(),
    "llama8b as shipped": Part(experiment="llama8b"),
    "lora, compiled": Part(is_compiled=True, warm_up=2, seconds=90),
    "lora, real lengths": Part(is_skewed=True),
    "qlora": Part(quantization="nf4"),
    "full": Part(adapter="full", packs=1),
    "lora, fp8": Part(quantization="fp8", first_round=1),
    "full, fp8": Part(adapter="full", packs=1, trains_in_fp8=True, first_round=1),
    "lora, compiled, real lengths": Part(
        is_compiled=True, is_skewed=True, warm_up=2, first_round=1, seconds=60
    ),
    "full, compiled": Part(
        adapter="full", packs=1, is_compiled=True, warm_up=2, first_round=1, seconds=90
    ),
    "full, 8-bit states": Part(adapter="full", packs=1, optimizer="adamw8bit", first_round=1),
    "hybrid": Part(shape=architecture_of("qwen3_5_9b"), is_skewed=True, first_round=1),
    "mixture": Part(
        shape=architecture_of("qwen3_30b_a3b") | {"num_hidden_layers": 24}, first_round=1
    ),
}
"""in order of importance: the last ones are left out first"""
SYSTEMS = {"lora": ("ours", "plain"), "full": ("ours", "plain")}
"""systems that train a part; ours alone if not listed"""
BARS = {
    "H200": {"lora": 14_000.0, "llama8b as shipped": 12_500.0, "full": 9_500.0},
    "H100": {"lora": 12_500.0, "llama8b as shipped": 12_500.0, "full": 9_500.0},
}
"""tokens per second on one GPU, by a part of its name"""
AIMS = {
    "H200": {"gpu/lora/tokens_per_second": 17_700.0, "gpu/full/tokens_per_second": 11_800.0},
    "H100": {"gpu/lora/tokens_per_second": 16_000.0},
}
RATIOS = {
    "qlora_against_lora": ("qlora", "lora", 0.97),
    "lora_fp8_against_lora": ("lora, fp8", "lora", 1.0),
    "full_fp8_against_full": ("full, fp8", "full", 1.0),
    "real_lengths_against_full_sequences": ("lora, real lengths", "lora", 0.97),
    "compiled_real_lengths_against_full_sequences": (
        "lora, compiled, real lengths",
        "lora, compiled",
        0.97,
    ),
}
"""pairs of parts that differ in one thing, and the bar of their ratio"""
ABOUT = (
    "Random weights of Llama 3.1 8B's shape and random tokens, all of them trained; LoRA of rank "
    "16 on all linear layers with dropout {dropout:g}, as we ship it, under autocast, its weights "
    "and their AdamW states in fp32; full in bf16 throughout, with bf16 AdamW states unless 8 bits "
    "are said. `as shipped` has the adapter and the recompute of conf/experiment. Sequences of "
    "4,096 tokens; micro-batches of 8,192 tokens (full: 4,096), 32,768 an optimizer step. Real "
    "lengths are lognormal, median 150, packed by multipack. `plain` is a loop of transformers and "
    "peft with their own attention, loss and norms and the same dropout, on full sequences. "
    "`hybrid` has the shape of Qwen3.5 9B, `mixture` of half the layers of Qwen3 30B A3B. The "
    "figure of a method is that of its faster part, compiled or not. MFU counts nothing twice that "
    "is recomputed, against the GPU's dense bf16 peak by its datasheet. {bars} Medians of rounds "
    "in which the parts take turns; kernels' times are those of one profiled step, and what ours "
    "spends in the head holds the loss and its gradient."
)


@dataclass(slots=True)
class Runs:
    """The rounds of one system with one part."""

    problem: str = ""
    """reason that there are no more rounds"""
    note: str = ""
    recompute: str = ""
    """mode that fits; empty until one has"""
    attention: str = ""
    kernels: str = ""
    speeds: list[float] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    flops: float | None = None
    """of a token; None if they are not counted"""
    took: float = 0.0

    def line(self) -> str:
        """Print the result of the newest round."""
        if self.problem:
            return f"left out, {self.problem}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.speeds[-1]:,.0f} tokens a second{note}, {self.took:.0f} s in all"


def main() -> int:
    """Measure everything on this machine's GPU, and write the sheet."""
    from app.process.environment import configure_libraries

    configure_libraries(offline=True)
    import torch

    if not torch.cuda.is_available():
        print(
            "error: make bench-gpu needs an NVIDIA GPU (it is meant for one H100 or H200); torch "
            "finds none here",
            file=sys.stderr,
        )
        return 3
    import yaml  # type: ignore[import-untyped]

    if find_spec("liger_kernel") is None:
        print(f"note: {NO_LIGER}")
    logging.getLogger("app.training").setLevel(logging.WARNING)
    shape = yaml.safe_load((ROOT / "conf" / "model" / "llama8b.yaml").read_text())["architecture"]
    return measure(
        Task(shape=shape, device="cuda"),
        PARTS,
        torch.cuda.get_device_name(),
        ROOT / "benchmarks" / "results",
        started=STARTED,
    )


def measure(
    task: Task,
    parts: dict[str, Part],
    device_name: str,
    folder: Path,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    rounds: int = ROUNDS,
    started: float | None = None,
) -> int:
    """Train every part in turn, print the figures, write the sheet; 1 when a bar is missed.

    `started`: when the budget began, by the monotonic clock; now when not given.
    """
    ends = (time.monotonic() if started is None else started) + budget_seconds
    runs: dict[tuple[str, str], Runs] = {}
    for name, part, system in turns(parts, rounds):
        found = runs.setdefault((name, system), Runs())
        began = time.monotonic()
        if found.problem:
            continue
        if (left := ends - began) >= (found.took or part.seconds):
            try:
                with stopped_after(left):
                    found.problem = run(task, part, system, found)
            except OutOfTime as error:
                found.problem = str(error)
        elif not found.speeds:
            found.problem = f"it takes about {part.seconds:.0f} s, and {left:.0f} s were left"
        else:
            continue
        found.took = time.monotonic() - began
        print(f"{name}, {system}: {found.line()}", flush=True)
    peak = of_device(PEAK_TFLOPS, device_name)
    results = [result_of(*key, found, peak) for key, found in runs.items() if found.speeds]
    bars = of_device(BARS, device_name)
    figures = figures_of(results, bars or {})
    about = ABOUT.format(
        dropout=lora_of(Part()).dropout,
        bars="The bars are those of this GPU." if bars else "This GPU has no bars but of ratios.",
    )
    if find_spec("liger_kernel") is None:
        about += f" Note: {NO_LIGER}."
    left_out = [f"{', '.join(key)}: {one.problem}" for key, one in runs.items() if one.problem]
    aims = of_device(AIMS, device_name) or {}
    path = write_sheet(folder, device_name, about, results, figures, aims, left_out)
    print(path.read_text())
    for result in results:
        print(json.dumps(asdict(result)))
    print_figures(figures)
    print(f"written: {path}")
    return 0 if figures and all(figure.ok for figure in figures) else 1


class OutOfTime(Exception):
    """The budget is used up before a part has ended."""


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the running part after `seconds`."""

    def stop(*_: Any) -> None:
        raise OutOfTime("stopped where the budget ended")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def turns(parts: dict[str, Part], rounds: int) -> Iterator[tuple[str, Part, str]]:
    """Yield the next system and part: every part in every round from its first one on."""
    for number in range(rounds):
        for name, part in parts.items():
            if part.first_round <= number:
                for system in SYSTEMS.get(name, ("ours",)):
                    yield name, part, system


def run(task: Task, part: Part, system: str, found: Runs) -> str:
    """Train a part once; return why it failed, or an empty string.

    Where memory does not suffice, layers are recomputed in the backward pass, which is noted.
    """
    needs_bitsandbytes = part.quantization == "nf4" or part.optimizer == "adamw8bit"
    if needs_bitsandbytes and find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    modes = recomputes(part, system)
    # A mode that did not fit in the first round is not tried again.
    for recompute in modes[modes.index(found.recompute) :] if found.recompute else modes:
        clock = Clock(task.device, part.warm_up, task.steps)
        problem = attempt(task, part, system, recompute, clock, found)
        free_memory(task)
        if not problem:
            found.recompute = recompute
            found.note = "" if recompute == modes[0] else f"recompute={recompute}: memory"
            found.speeds.append(clock.tokens / clock.seconds)
            found.clocks.append(clock)
        if problem != NO_MEMORY:
            return problem
    return NO_MEMORY


def attempt(task: Task, part: Part, system: str, recompute: str, clock: Clock, found: Runs) -> str:
    """Train; return the error, or an empty string."""
    import torch

    from benchmarks.gpu import ours, plain

    if part.shape is not None:
        task = replace(task, shape=part.shape)
    batches = batches_of(task, part)
    found.flops = None if part.shape else flops_per_token(task, part, batches)
    said = Said()
    logging.getLogger("app.model").addHandler(said)
    try:
        train = {"ours": ours.train, "plain": plain.train}[system]
        with redirect_stdout(io.StringIO()):  # the trainable weights are the same in every round
            found.attention = train(task, part, recompute, batches, clock)
    except torch.OutOfMemoryError:
        return NO_MEMORY
    except OutOfTime:
        raise
    except Exception as error:  # noqa: BLE001  the minutes of the other parts must not be lost
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
    finally:
        logging.getLogger("app.model").removeHandler(said)
    is_left_to_compiler = part.is_compiled and system == "ours"
    found.kernels = "the compiler's" if is_left_to_compiler else said.kernels
    return ""


class Said(logging.Handler):
    """Capture the log line about the kernels that replace the model's own."""

    kernels = "the model's own"

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line on kernels."""
        before, found, after = record.getMessage().partition("kernels: ")
        if found and not before:
            self.kernels = after.partition(", proven equal")[0]


def free_memory(task: Task) -> None:
    """Free the memory of the last run, so that the next one's peak is its own."""
    gc.collect()
    if task.device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def result_of(name: str, system: str, found: Runs, peak_tflops: float | None) -> Result:
    """Combine the rounds of one system with one part."""
    speed = median(found.speeds)
    peaks = [clock.peak_gib for clock in found.clocks if clock.peak_gib is not None]
    return Result(
        part=name,
        system=system,
        note=found.note,
        attention=found.attention,
        kernels=found.kernels,
        tokens_per_second=speed,
        mfu=speed * found.flops / (peak_tflops * 1e12) if peak_tflops and found.flops else None,
        peak_gib=max(peaks) if peaks else None,
        spans=medians([clock.milliseconds_per_step() for clock in found.clocks]),
        kinds=medians([clock.kinds for clock in found.clocks]),
        rounds=len(found.speeds),
    )


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number over the rounds."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def figures_of(results: Sequence[Result], bars: dict[str, float]) -> list[Figure]:
    """Compare speeds with the bars of their parts, and parts with each other."""
    ours = {result.part: result.tokens_per_second for result in results if result.system == "ours"}
    plain = {result.part: result.tokens_per_second for result in results if result.system != "ours"}
    values: dict[str, tuple[float, float]] = {}
    for name in (*SYSTEMS, *(name for name in bars if name not in SYSTEMS)):
        ways = [ours[part] for part in (name, f"{name}, compiled") if part in ours]
        if ways and name in bars:
            values[f"{name.replace(' ', '_')}/tokens_per_second"] = max(ways), bars[name]
        if ways and name in plain:
            values[f"{name}/speed_against_plain"] = max(ways) / plain[name], 1.0
    for figure, (part, other, bar) in RATIOS.items():
        if part in ours and other in ours:
            values[figure] = ours[part] / ours[other], bar
    return [
        Figure(figure=f"gpu/{name}", value=value, bar=bar, better="higher")
        for name, (value, bar) in values.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
