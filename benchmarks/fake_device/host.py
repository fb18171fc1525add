"""The host's time to launch a micro-batch, which limits a GPU with little work per kernel.

Layers are so small that computing them takes little, and run on the CPU by the paths of a GPU:
grouped adapters, kernels by stand-ins that are called without an operator's overhead, attention by
boundaries. In fp32, whose products start faster on a CPU: the casts of autocast are not in it.
A process of its own, for what it replaces stays replaced.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import CustomOpDef

MODES = ("none", "full", "selective")
NUM_LAYERS, TOKENS, REPEATS = 32, 32, 7
Milliseconds = dict[str, float]
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}


def measure() -> Milliseconds:
    """Return the CPU time of a micro-batch, forward and backward, by system and recompute."""
    torch.set_num_threads(1)
    runs = {f"plain/{mode}": plain(mode) for mode in ("none", "full")}
    runs |= {f"ours/{mode}": ours(mode) for mode in MODES}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    gc.disable()
    gc.freeze()  # keep garbage collection from scanning models and libraries
    for _ in range(REPEATS):  # alternating, so that other load on the machine is the same for all
        for name, run in runs.items():
            gc.collect()
            began = time.process_time()
            run()
            taken[name].append(time.process_time() - began)
    return {name: 1e3 * min(seconds) for name, seconds in taken.items()}


def ours(mode: str) -> Callable[[], None]:
    """Build our model as for a GPU; return a function that runs a micro-batch."""
    from app.model import kernels
    from app.model.adapter import LoraConfig, fused, group_adapters
    from app.model.head import run_probe
    from app.training.objective.objective import DatasetSums, Sft, batch_loss
    from benchmarks.gpu.ours import build
    from benchmarks.gpu.task import Part, Task, batches_of
    from tools.simulate.kernels import install_kernels

    install_kernels()
    call_directly()
    install_attention()
    task = Task(shape=SHAPE, device="cpu", sequence_len=TOKENS, tokens_per_step=TOKENS)
    part, cpu = Part(packs=1), torch.device("cpu")
    model: Any = build(task, part, LoraConfig(dropout=0.0), mode, "varlen", "fp32").float()
    fused.lora_comes_first = lambda _: True
    run = partial(run_probe, model, "varlen", cpu)
    with (
        patch.object(kernels, "_is_on_gpu", lambda _: True),
        patch.object(kernels, "_are_close", lambda *_: True),
    ):
        kernels.fuse_layers(model, device=cpu, run=run)
        group_adapters(model, run)
    batch, sums = batches_of(task, part)[0], DatasetSums(1)

    def micro_batch() -> None:
        batch_loss(Sft(), model, batch, "varlen", sums).backward()

    return micro_batch


def plain(mode: str) -> Callable[[], None]:
    """Build a plain transformers + peft model; return a function that runs a micro-batch."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu.task import RANK

    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE), dtype=torch.float32
    )
    if mode == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    model = peft.get_peft_model(model, lora).train()
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)

    def micro_batch() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return micro_batch


def call_directly() -> None:
    """Call the stand-ins as plain functions: Triton has no overhead of PyTorch's operators."""
    from tools.simulate import kernels

    for operator in vars(kernels).values():
        if isinstance(operator, CustomOpDef):
            setattr(torch.ops.standin, operator._name, operator._init_fn)


def install_attention() -> None:
    """Replace PyTorch's varlen attention on the CPU by one that returns shapes without data."""
    from torch.nn.attention import varlen

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        sums = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        return torch.zeros_like(query), sums, torch.empty(0, dtype=torch.uint64)

    def attend_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Any:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(attend_backward)


if __name__ == "__main__":
    print(json.dumps(measure()))
