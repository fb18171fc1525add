"""`make bench-peers`: tokens per CPU second and peak memory, systems alternating in rounds.

One thread, or as many as OMP_NUM_THREADS says (then a second is one of the wall). HF is the Trainer
with group_by_length, TRL's packing is `bfd`. A round runs each system once in a process of its own
(TRL without packing in two of the rounds); the figures are medians of the rounds. Losses are means
over the measured steps: the systems see other rows in those steps, so they agree only roughly.
group_by_length sorts the rows of GROUP steps at a time, longest first, and short rows take less
time a token: HF is measured over a whole group, long rows and short.

`dpo` compares with TRL's DPOTrainer, a step in one padded micro-batch and in micro-batches of two
pairs; a token counts once, although both systems also pass it through the base.

HF and TRL are always in the run. `with=torchtune,litgpt` adds those, `with=all` every one of ASKED;
the first such run installs each into an environment of its own (1 to 4 GB). They pack as they do by
themselves; litgpt takes one row at a time, its default and here its fastest. In lora_bf16 HF, TRL,
litgpt and ours autocast, torchtune has all in bf16, LLaMA-Factory the base.
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
from benchmarks.training.task import Task, write_files, write_pairs

HERE = Path(__file__).resolve().parent
ROUNDS, WARM_UP, ROWS = 4, 3, 2000
GROUP = 23
"""steps that group_by_length sorts together: a quarter of the rows, at 21 rows per step"""
STEPS = {"loft": 12, "hf": WARM_UP + GROUP, "trl_packed": 6, "trl_padded": 5} | dict.fromkeys(
    ("torchtune", "litgpt", "llamafactory", "axolotl"), 12
)
"""steps, the first WARM_UP of which are not measured; fewer for the slowest systems"""
ROUNDS_OF = {"trl_padded": (2, 4)}
"""rounds of systems that take a third of the time and are far from their bar; others run in all"""
SETTINGS = {"lora_fp32": ("lora", "fp32"), "lora_bf16": ("lora", "bf16"), "full": ("full", "fp32")}
DPO = "dpo"
"""a further one of SETTINGS, with systems of its own: LoRA in fp32"""
DPO_PAIRS, DPO_LR = 1500, 5e-6
BARS = {"lora_fp32": 1.15, "lora_bf16": 1.15, "full": 1.05}
PEERS = {
    "hf": ("trl", "hf_run.py"),
    "trl_packed": ("trl", "trl_run.py", "packed"),
    "trl_padded": ("trl", "trl_run.py", "padded"),
}
"""environment in benchmarks/peers.py, script, and its arguments"""
DPO_PEERS = {
    "trl_dpo": ("trl", "trl_dpo_run.py", "0"),
    "trl_dpo_pairs": ("trl", "trl_dpo_run.py", "2"),
}
ASKED = {
    name: (name, f"{name}_run.py") for name in ("torchtune", "litgpt", "llamafactory", "axolotl")
}
"""further PEERS, which run if `with=` names them"""
LEFT_OUT = {("axolotl", "lora_bf16"): "its bf16 asks for a GPU"}
"""settings that a peer cannot run, and why"""
Result = dict[str, float]
Peers = dict[str, tuple[str, ...]]


def main(words: list[str]) -> int:
    """Measure the named settings (all if none is named); return 1 if a bar is missed."""
    chosen = [word for word in words if not word.startswith("with=")]
    peers = PEERS | asked_peers([word for word in words if word not in chosen])
    figures: list[Figure] = []
    for environment, *_ in (DPO_PEERS if chosen == [DPO] else peers).values():
        peer_python(environment)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), ROWS)
        write_pairs(Path(folder), DPO_PAIRS)
        for name in chosen or [*SETTINGS, DPO]:
            figures += (
                compare_dpo(Path(folder)) if name == DPO else compare(name, Path(folder), peers)
            )
    print_figures(figures)
    return 0 if all(figure.ok for figure in figures) else 1


def asked_peers(words: list[str]) -> Peers:
    """Return the peers of `with=NAME,NAME`; `with=all` is all of ASKED. Raises SystemExit."""
    names = [name for word in words for name in word.removeprefix("with=").split(",")]
    if "all" in names:
        return ASKED
    if unknown := [name for name in names if name not in ASKED]:
        raise SystemExit(
            f"with={','.join(unknown)}: the peers to ask for are all, {', '.join(ASKED)}"
        )
    return {name: ASKED[name] for name in names}


def compare(name: str, folder: Path, peers: Peers) -> list[Figure]:
    """Compare ours with the peers at supervised fine-tuning."""
    adapter, precision = SETTINGS[name]
    for peer in [peer for peer in peers if (peer, name) in LEFT_OUT]:
        print(f"{name} {peer}: left out, {LEFT_OUT[peer, name]}")
    peers = {peer: how for peer, how in peers.items() if (peer, name) not in LEFT_OUT}
    tasks = {
        system: Task(
            folder=str(folder),
            adapter=adapter,
            precision=precision,
            steps=STEPS[system],
            warm_up=WARM_UP,
        )
        for system in ("loft", *peers)
    }
    middle = run_rounds(name, tasks)
    ours, speed = middle["loft"], {s: one["tokens_per_second"] for s, one in middle.items()}
    fastest = max(peers, key=lambda peer: speed[peer])
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


def compare_dpo(folder: Path) -> list[Figure]:
    """Compare ours with TRL's DPOTrainer: its faster way for speed, its smaller for memory."""
    task = Task(
        folder=str(folder), adapter="lora", precision="fp32", steps=9, warm_up=WARM_UP, lr=DPO_LR
    )
    middle = run_rounds(DPO, dict.fromkeys(("loft_dpo", *DPO_PEERS), task))
    ours, theirs = middle["loft_dpo"], [middle[peer] for peer in DPO_PEERS]
    speed = ours["tokens_per_second"] / max(one["tokens_per_second"] for one in theirs)
    memory = ours["peak_gb"] / min(one["peak_gb"] for one in theirs)
    return [
        Figure(figure="peers/dpo/speed_against_trl", value=speed, bar=2.5, better="higher"),
        Figure(figure="peers/dpo/memory_against_trl", value=memory, bar=0.6),
    ]


def run_rounds(name: str, tasks: dict[str, Task]) -> dict[str, Result]:
    """Run every system ROUNDS times, alternating; return and print the medians of each."""
    rounds: dict[str, list[Result]] = {system: [] for system in tasks}
    for number in range(1, ROUNDS + 1):
        for system, results in rounds.items():
            if number not in ROUNDS_OF.get(system, (number,)):
                continue
            task = tasks[system]
            result = run(system, task.write(Path(task.folder) / f"{system}.json"))
            results.append(result)
            speed = f"{result['tokens_per_second']:,.0f} tokens a second"
            print(f"{name} round {number} of {ROUNDS}, {system}: {speed}", flush=True)
    middle = {
        system: {key: median(one[key] for one in results) for key in results[0]}
        for system, results in rounds.items()
    }
    for system, one in middle.items():
        print(
            f"{name} {system}: {one['tokens_per_second']:,.0f} tokens a second, "
            f"{one['tokens_per_step']:,.0f} a step, peak {one['peak_gb']:.2f} GB, "
            f"loss {one['loss']:.3f}"
        )
    return middle


def run(system: str, task: Path) -> Result:
    """Run one system in a separate process."""
    if system.startswith("loft"):
        command = [sys.executable, "-m", f"benchmarks.training.{system}_run", str(task)]
    else:
        environment, script, *words = (PEERS | ASKED | DPO_PEERS)[system]
        command = [str(peer_python(environment)), str(HERE / script), str(task), *words]
    variables = {"OMP_NUM_THREADS": "1"} | os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode != 0:
        raise SystemExit(f"{system} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
