"""Counts of one micro-batch on the device, extrapolated from a few layers to the whole model.

Every number but the peak is a sum over layers and what is around them, and the peak is reached at
the same place whatever the depth: two depths give every other one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch

    from tools.simulate.counting import Counted

ROOT = Path(__file__).resolve().parents[2]
Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A configuration and a depth of the model."""

    name: str
    model: str
    """a file of conf/model that has an architecture"""
    num_layers: int
    words: Sequence[str]
    """overrides of app.train; of `plain`: the names of plain.Plain's fields that are true"""
    lengths: Sequence[int]
    """tokens of each document"""
    system: str = "ours"
    """ours, or plain"""
    batch: int = 0
    """index of the counted micro-batch"""
    is_later: bool = False
    """whether gradients of an earlier micro-batch are there, to which its own are added"""


def architecture_of(model: str) -> dict[str, Any]:
    """Return the config.json of conf/model/MODEL.yaml."""
    file = ROOT / "conf" / "model" / f"{model}.yaml"
    numbers: dict[str, Any] = yaml.safe_load(file.read_text())["architecture"]
    return numbers


def trace(job: Job) -> Numbers:
    """Count a micro-batch of `job`; the fake device must be installed."""
    from benchmarks.fake_device import ours, plain

    architecture = architecture_of(job.model)
    if job.system == "plain":
        shallow = architecture | {"num_hidden_layers": job.num_layers}
        return summarize(plain.count(job.words, shallow, job.lengths))
    with tempfile.TemporaryDirectory() as folder:
        run = ours.open_run(job.words, architecture, job.num_layers, job.lengths, Path(folder))
        return summarize(run.count(job.batch, is_later=job.is_later))


def summarize(counted: Counted) -> Numbers:
    """Return the counts of a micro-batch by name; those of the optimizer step are `step/...`."""
    from benchmarks.fake_device.rates import GPUS
    from tools.simulate.counting import CLASSES

    tally = counted.tally
    found: Numbers = dict.fromkeys((f"bytes/{kind}" for kind in CLASSES), 0.0)
    found |= dict.fromkeys(("launches", "product_flops", "attention_flops", "step/launches"), 0.0)
    found |= {f"{step}seconds/{gpu}": 0.0 for gpu in GPUS for step in ("", "step/")}
    for kernel, times in tally.kernels.items():
        step = "step/" if kernel.phase == "step" else ""
        found[f"{step}launches"] += times
        for gpu, rates in GPUS.items():
            found[f"{step}seconds/{gpu}"] += times * rates.seconds(kernel)
        if step:
            continue
        flops = "attention_flops" if kernel.kind == "attention" else "product_flops"
        found[flops] += times * kernel.flops
        if kernel.kind in CLASSES:
            found[f"bytes/{kernel.kind}"] += times * kernel.num_bytes
    weights = list(counted.model.parameters())
    held = [vars(module).get("columns") for module in counted.model.modules()]
    states = [value for state in counted.optimizer.state.values() for value in state.values()]
    return found | {
        "tokens": counted.num_tokens,
        "ideal_flops": ideal_flops(counted),
        "syncs": sum(times for name, times in tally.syncs.items() if not _is_in_step(name)),
        "step/syncs": sum(times for name, times in tally.syncs.items() if _is_in_step(name)),
        "to_host": sum(tally.to_host.values()),
        "pageable": sum(tally.pageable.values()),
        "peak_bytes": tally.peak_bytes,
        "weights_bytes": _bytes_of(weights + [one for one in held if one is not None]),
        "gradients_bytes": _bytes_of([one for one in weights if one.requires_grad]),
        "states_bytes": _bytes_of([one for one in states if hasattr(one, "element_size")]),
    }


def _is_in_step(name: str) -> bool:
    return name.startswith("step: ")


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ideal_flops(counted: Counted) -> float:
    """Return the FLOPs of the required matrix products, without attention and recomputation.

    Two FLOPs a weight and token forward, two for the gradient of the input, two for the weight's
    own where it trains; the head only where a token is trained on.
    """
    from app.model.experts import expert_modules

    head = counted.model.get_output_embeddings()
    total = 0.0
    chosen = getattr(counted.model.config.get_text_config(), "num_experts_per_tok", 0)
    for _, experts in expert_modules(counted.model):
        for weight in experts.parameters(recurse=False):
            if weight.ndim == 3:
                passes = 3 if weight.requires_grad else 2
                a_token = chosen * weight.shape[1] * weight.shape[2]
                total += 2.0 * passes * counted.num_tokens * a_token
    for module in counted.model.modules():
        if "in_features" not in vars(module) or "weight" not in module._parameters:
            continue
        passes = 3 if module.weight.requires_grad else 2
        tokens = counted.num_trained if module is head else counted.num_tokens
        total += 2.0 * passes * tokens * module.in_features * module.out_features
    return total


def extrapolate(
    shallow: Mapping[str, float], deep: Mapping[str, float], num_layers: int
) -> Numbers:
    """Extrapolate the counts of two depths to a model of `num_layers`."""
    least = shallow["num_layers"]
    share = (num_layers - least) / (deep["num_layers"] - least)
    return {name: first + share * (deep[name] - first) for name, first in shallow.items()}
