"""`make bench-peers`: tokens a CPU second and peak memory, every system in turn, round by round.

One thread, or as many as OMP_NUM_THREADS says (then a second is one of the wall). HF is the Trainer
with group_by_length, TRL's packing is `bfd`. A round runs each system once in a process of its own;
the figures are medians of the rounds. Losses are means over the measured steps: the systems see
other rows in those steps, so they agree only roughly.
group_by_length sorts 50 micro-batches at a time, longest first: HF is measured over as many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.figure import Figure, print_figures
from benchmarks.peers import peer_python
from benchmarks.training.task import Task, write_files

HERE = Path(__file__).resolve().parent
ROUNDS, WARM_UP, ROWS = 5, 3, 2000
STEPS = {"loft": 12, "hf": 20, "trl_packed": 8, "trl_padded": 7}
"""of which the first WARM_UP are not measured; fewer of what takes longest"""
SETTINGS = {"lora_fp32": ("lora", "fp32"), "lora_bf16": ("lora", "bf16"), "full": ("full", "fp32")}
BARS = {"lora_fp32": 1.15, "lora_bf16": 1.15, "full": 1.05}
PEERS = ("hf", "trl_packed", "trl_padded")
Result = dict[str, float]


def main(chosen: list[str]) -> int:
    """Measure the settings that are named (all when none is); 1 when a bar is missed."""
    python = peer_python("trl")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), ROWS)
        for name in chosen or SETTINGS:
            figures += compare(name, Path(folder), python)
    print_figures(figures)
    return 0 if all(figure.ok for figure in figures) else 1


def compare(name: str, folder: Path, python: Path) -> list[Figure]:
    """Run every system ROUNDS times, alternating, and set ours beside the peers."""
    adapter, precision = SETTINGS[name]
    rounds: dict[str, list[Result]] = {system: [] for system in ("loft", *PEERS)}
    for _ in range(ROUNDS):
        for system, results in rounds.items():
            task = Task(
                folder=str(folder),
                adapter=adapter,
                precision=precision,
                steps=STEPS[system],
                warm_up=WARM_UP,
            )
            results.append(run(system, task.write(folder / f"{system}.json"), python))
    middle = {
        system: {key: median(one[key] for one in results) for key in results[0]}
        for system, results in rounds.items()
    }
    for system, one in middle.items():
        print(
            f"{name} {system}: {one['tokens_per_second']:,.0f} tokens a second, "
            f"{one['tokens_a_step']:,.0f} a step, peak {one['peak_gb']:.2f} GB, "
            f"loss {one['loss']:.3f}"
        )
    ours, speed = middle["loft"], {s: one["tokens_per_second"] for s, one in middle.items()}
    fastest = max(PEERS, key=lambda peer: speed[peer])
    ratios = {
        f"{name}/speed_against_fastest": (speed["loft"] / speed[fastest], BARS[name]),
        f"{name}/speed_against_trl_packed": (speed["loft"] / speed["trl_packed"], 2.0),
        f"{name}/speed_against_trl_padded": (speed["loft"] / speed["trl_padded"], 3.0),
    }
    return [
        *(
            Figure(figure=f"peers/{figure}", value=value, bar=bar, better="higher")
            for figure, (value, bar) in ratios.items()
        ),
        Figure(figure=f"peers/{name}/peak_gb", value=ours["peak_gb"], bar=1.25),
        Figure(
            figure=f"peers/{name}/memory_against_fastest",
            value=ours["peak_gb"] / middle[fastest]["peak_gb"],
            bar=1.0,
        ),
    ]


def run(system: str, task: Path, python: Path) -> Result:
    """Run one system in a process of its own."""
    ours = [sys.executable, "-m", "benchmarks.training.loft_run", str(task)]
    commands = {
        "loft": ours,
        "hf": [str(python), str(HERE / "hf_run.py"), str(task)],
        "trl_packed": [str(python), str(HERE / "trl_run.py"), str(task), "packed"],
        "trl_padded": [str(python), str(HERE / "trl_run.py"), str(task), "padded"],
    }
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        commands[system], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise SystemExit(f"{system} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
