"""The chunked loss compared with the plain one: memory, time and difference.

A vocabulary of Llama 3's size with a frozen head, forward and backward, each round in a separate
process, alternating; memory is the peak of a process above its inputs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median

from benchmarks.figure import Figure

VOCABULARY, WIDTH, POSITIONS, ROUNDS = 128_256, 512, 4096, 3


def measure() -> list[Figure]:
    """Measure memory and time relative to the plain loss, and the difference of the results."""
    rounds: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    for _ in range(ROUNDS):
        for name, found in rounds.items():
            found.append(one_round(name))
    middle = {
        name: {key: median(one[key] for one in found) for key in found[0]}
        for name, found in rounds.items()
    }
    for name, one in middle.items():
        print(f"{name}: {one['bytes'] / 1e6:,.0f} MB above its inputs, {one['seconds']:.1f} s")
    plain, ours = middle["plain"], middle["ours"]
    apart = abs(ours["loss"] - plain["loss"]) / plain["loss"]
    return [
        Figure(figure="loss/memory", value=ours["bytes"] / plain["bytes"], bar=0.1),
        Figure(figure="loss/time", value=ours["seconds"] / plain["seconds"], bar=1.0),
        Figure(figure="loss/difference", value=apart, bar=1e-6),
    ]


def one_round(name: str) -> dict[str, float]:
    """Run `name` in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", name], capture_output=True, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(name: str) -> dict[str, float]:
    """Compute the loss and the gradient of the hidden states once."""
    import resource
    import time

    import psutil
    import torch

    from app.model.head import linear_cross_entropy

    torch.manual_seed(0)
    weight = torch.empty(VOCABULARY, WIDTH).normal_(std=0.05)
    hidden = torch.randn(POSITIONS, WIDTH, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (POSITIONS,))
    weights = torch.ones(POSITIONS)
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    if name == "ours":
        loss, _ = linear_cross_entropy(hidden, weight, labels, weights)
    else:
        logits = hidden @ weight.T
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": float(peak - before), "seconds": seconds, "loss": loss.item()}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
