"""Speed-up of packing for tiny hybrids, compared with the same documents one at a time.

A row of 1,024 tokens with lengths as in instruction data (lognormal, median 60), forward and
backward in fp32 on one core; both through the same modules, in CPU seconds.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figure import Figure

TOKENS, REPEATS, WIDTH = 1024, 7, 256
FAMILIES = {
    "qwen3_5_text": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16},
    "mamba2": {"num_heads": 8, "head_dim": 64, "state_size": 32, "n_groups": 1},
}


def measure() -> list[Figure]:
    """Measure each family; the figure is the smallest speed-up."""
    import torch

    torch.set_num_threads(1)
    gains = []
    for family, numbers in FAMILIES.items():
        packed, alone = seconds_of(family, numbers)
        gains.append(alone / packed)
        print(f"{family}: packed {packed:.2f} s, one at a time {alone:.2f} s: {gains[-1]:.2f} x")
    return [Figure(figure="hybrids/speedup", value=min(gains), bar=1.5, better="higher")]


def seconds_of(family: str, numbers: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of a pack, and of its documents one at a time."""
    import torch

    from app.model.attention import attention_implementation
    from app.model.attention.inputs import attention_inputs
    from app.model.attention.probes import check_isolation

    drawn = np.random.default_rng(0).lognormal(np.log(60), 0.8, 200).astype(int).clip(8, 512)
    lengths = drawn[: int(np.searchsorted(drawn.cumsum(), TOKENS, side="right"))].tolist()
    model = build(family, numbers, attention_implementation("sdpa"))
    check_isolation(model, "sdpa")
    model.train()
    ids = torch.randint(3, 1000, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)

    def run_packed() -> None:
        inputs = attention_inputs(model, "sdpa", [lengths], ids)
        model(
            input_ids=ids, position_ids=positions, use_cache=False, **inputs
        ).logits.sum().backward()

    def run_alone() -> None:
        for document in ids.split(lengths, dim=1):
            model(input_ids=document, use_cache=False).logits.sum().backward()

    seconds: list[list[float]] = [[], []]
    for _ in range(REPEATS + 1):  # the first of each is a warm-up
        for run, taken in zip((run_packed, run_alone), seconds, strict=True):
            began = time.process_time()
            run()
            taken.append(time.process_time() - began)
    return median(seconds[0][1:]), median(seconds[1][1:])


def build(family: str, numbers: dict[str, Any], implementation: str) -> Any:
    """Build a random model of four layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 4,
    }
    if family == "mamba2":
        implementation = "eager"  # it has no attention
    else:
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    config = AutoConfig.for_model(family, **shape, **numbers)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=implementation
    )
