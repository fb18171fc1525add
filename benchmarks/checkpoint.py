"""The cost of checkpoints: time of a save, stall of the training, memory.

Full tuning of a Llama with AdamW by the ordinary command, each run in a separate process. Steps
take about half a second on one core and every sixth one saves, so that there are many saves for a
median. The share of the time is that of one save per fifty steps of half a second, whatever a step
takes here. The stall is measured with a state as large as a LoRA of rank 16 for 8B weights: with a
small state the same milliseconds would be a larger share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from app.process.environment import host_bytes
from benchmarks.figure import Figure

SECONDS_BETWEEN_SAVES = 50 * 0.5
EVERY = 6
"""steps between saves"""
WAYS = {"at once": "false", "beside training": "true"}
"""kind of save -> `trainer.checkpoint.async`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model and the size of its step."""

    shape: dict[str, int]
    """overrides of the task that bench-peers uses"""
    tokens: int
    """of a step"""
    steps: int


SIZES = {
    "small": Size(shape={}, tokens=1024, steps=36),
    "large": Size(shape={"hidden_size": 768, "intermediate_size": 2048}, tokens=192, steps=36),
}


def measure() -> list[Figure]:
    """Measure the share of time spent in saves, the stall of a step during one, and the memory."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            for way in WAYS:
                found[size, way] = one = one_run(Path(folder), size, way)
                print(f"{one['bytes'] / 1e6:.0f} MB {way}: {in_words(one)}", flush=True)
    at_once, beside = ([found[size, way] for size in SIZES] for way in WAYS)
    share = median(at_once[0]["saves"]) / SECONDS_BETWEEN_SAVES
    stall = median(beside[1]["saves"]) / median(at_once[1]["saves"])
    memory = max(one["peak"] / one["bytes"] for one in at_once)
    return [
        Figure(figure="checkpoint/wall_share", value=share, bar=0.035),
        Figure(figure="checkpoint/async_stall_share", value=stall, bar=0.05),
        Figure(figure="checkpoint/peak_memory_of_a_save", value=memory, bar=0.1),
    ]


def in_words(one: dict[str, Any]) -> str:
    """Print how long saves block the training."""
    saves = [seconds * 1e3 for seconds in one["saves"]]
    on_a_core, step, step_after = (
        median(one[name]) * 1e3 for name in ("computed", "steps", "steps_after")
    )
    return (
        f"{len(saves)} saves hold training up for {median(saves):.1f} ms each ({saves[0]:.1f} the "
        f"first, {max(saves):.1f} at most), {on_a_core:.1f} of them on a core; a step takes "
        f"{step:.0f} ms, {step_after:.0f} right after a save"
    )


def one_run(folder: Path, size: str, way: str) -> dict[str, Any]:
    """Train in a separate process."""
    from benchmarks.training.task import write_files

    task, note = folder / size, folder / "note.json"
    if not task.exists():
        task.mkdir()
        write_files(task, num_rows=800, **SIZES[size].shape)
    command = [sys.executable, "-m", "benchmarks.checkpoint", str(task), size, WAYS[way], str(note)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the training ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(note.read_text())
    return found


def run(folder: Path, size: Size, asynchronous: str) -> dict[str, Any]:
    """Train, and record the time of each step and save, and the memory that a save adds."""
    from app.config import load_config
    from app.train import train
    from app.training.checkpoint.checkpoint import file_bytes
    from app.training.checkpoint.saving import CheckpointSaver
    from app.training.module import FinetuneModule

    noted: dict[str, Any] = dict.fromkeys(("peak", "bytes"), 0)
    noted |= {name: [] for name in ("steps", "steps_after", "saves", "computed")}
    begin_step, save = CheckpointSaver.on_train_batch_start, CheckpointSaver.save
    end_step = CheckpointSaver.on_train_batch_end
    began = 0.0

    def begin_timed(self: CheckpointSaver, *args: Any) -> None:
        nonlocal began
        began = time.perf_counter()
        begin_step(self, *args)

    def end_timed(self: CheckpointSaver, trainer: Any, *args: Any) -> None:
        is_after = trainer.global_step % EVERY == 1
        noted["steps_after" if is_after else "steps"].append(time.perf_counter() - began)
        end_step(self, trainer, *args)

    def save_timed(self: CheckpointSaver, trainer: Any, module: FinetuneModule) -> None:
        noted["bytes"] = sum(map(file_bytes, module.checkpoint_tensors()))
        before = forget_peak()
        started, computed = time.perf_counter(), time.thread_time()
        save(self, trainer, module)
        noted["saves"].append(time.perf_counter() - started)
        noted["computed"].append(time.thread_time() - computed)
        noted["peak"] = max(noted["peak"], host_bytes("VmHWM") - before)

    CheckpointSaver.on_train_batch_start = begin_timed  # type: ignore[method-assign]
    CheckpointSaver.on_train_batch_end = end_timed  # type: ignore[method-assign]
    CheckpointSaver.save = save_timed  # type: ignore[method-assign]
    words = [
        f"model.path={folder / 'base'}",
        f"data.datasets=[{{path: {folder / 'rows.jsonl'}, format: pretokenized, name: rows}}]",
        f"data.sequence_len={size.tokens}",
        "data.val_set_size=0",
        f"data.cache_dir={folder / 'cache'}",
        "adapter=full",
        f"trainer.max_steps={size.steps}",
        "trainer.gradient_accumulation_steps=1",
        "trainer.precision=fp32",
        "trainer.accelerator=cpu",
        f"trainer.checkpoint.every_steps={EVERY}",
        f"trainer.checkpoint.async={asynchronous}",
        "evaluation.exact_match=false",
        "logger=csv",
        f"output.dir={folder / f'run-{time.time_ns()}'}",
    ]
    train(load_config("train", words))
    return noted


def forget_peak() -> int:
    """Reset the peak memory of this process to its current memory; return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return host_bytes("VmRSS")


if __name__ == "__main__":
    task, size, asynchronous, note = sys.argv[1:]
    Path(note).write_text(json.dumps(run(Path(task), SIZES[size], asynchronous)))
