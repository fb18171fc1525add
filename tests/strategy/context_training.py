"""A step of two or four ranks that hold slices of a row, and the same step in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from app.evaluation.evaluator import ShownBatches
from app.model.adapter import AdapterConfig, FullConfig, LoraConfig
from app.model.attention.exchange import check_exchange, exchanging
from app.model.attention.probes import check_isolation
from app.model.base import ModelConfig
from app.strategy.mixin import Placement
from app.training.objective.objective import DatasetSums, Sft, balance_loss, batch_loss, validate
from common.errors import UserError
from data_modules import Batch, collator
from data_modules.collator import Collator
from tests.families import FAMILIES
from tests.strategy.pipeline_training import make_documents
from tests.tiny import built

TOKENS = 256
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ODD_HEADS, ODD_KEY_HEADS = 9, 3
"""heads that neither two nor four ranks share"""
ODD_SIZES = {
    "hidden_size": ODD_HEADS * HEAD_DIM,
    "num_attention_heads": ODD_HEADS,
    "num_key_value_heads": ODD_KEY_HEADS,
}
ODD = LLAMA | ODD_SIZES
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": 512,
    "initializer_range": 0.1,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0 + i for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 64,
}
PHI3 = LLAMA | {
    "model_type": "phi3",
    "rope_parameters": ROPE,
    "original_max_position_embeddings": 64,
}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text",
    "head_dim": HEAD_DIM,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": HEAD_DIM,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = LLAMA | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    kind: LLAMA
    | FAMILIES[kind]
    | {"model_type": kind, "num_hidden_layers": 2, "head_dim": HEAD_DIM, "mamba_d_head": 16}
    for kind in ("qwen3_5_text", "lfm2", "granitemoehybrid")
}
"""a delta rule, a convolution and Mamba 2, each beside attention"""
LORA = LoraConfig(r=4, dropout=0.0)
CASES: dict[str, tuple[dict[str, Any], AdapterConfig, str]] = {
    "llama": (LLAMA, FullConfig(), "none"),
    "long rows": (LLAMA | {"max_position_embeddings": 8 * TOKENS}, FullConfig(), "none"),
    "padded rows": (LLAMA, FullConfig(), "none"),
    "lora, recompute": (LLAMA, LORA, "full"),
    "window": (LLAMA | {"model_type": "mistral", "sliding_window": 24}, FullConfig(), "none"),
    "gpt2": (GPT2, FullConfig(), "none"),
    "longrope": (PHI3, FullConfig(), "none"),
    "gemma3": (GEMMA3, FullConfig(), "none"),
    "sinks, window": (LLAMA | GPT_OSS, FullConfig(), "none"),
    "latent": (LATENT, FullConfig(), "none"),
    "delta rule": (HYBRIDS["qwen3_5_text"], FullConfig(), "none"),
    "convolution": (HYBRIDS["lfm2"], FullConfig(), "none"),
    "mamba 2": (HYBRIDS["granitemoehybrid"], FullConfig(), "none"),
    "odd heads": (ODD, FullConfig(), "none"),
    "odd heads, recompute": (ODD, LORA, "selective"),
    "odd heads, sinks, window": (ODD | GPT_OSS, FullConfig(), "selective"),
    "odd heads, gemma3": (GEMMA3 | ODD_SIZES, LORA, "full"),
}


WITH_EXPERTS = ("sinks, window", "latent", "mamba 2", "odd heads, sinks, window")
"""cases whose experts PyTorch does not compute in fp64"""


class Slices(Placement):
    """Ranks that all hold slices of the same rows."""

    def __init__(self) -> None:
        self.world_size, self.global_rank = dist.get_world_size(), dist.get_rank()
        self.context_size = self.world_size
        self.root_device = torch.device("cpu")


def make_batch(case: str) -> Batch:
    """Return a row of documents up to half as long as a slice of it, or longer than one."""
    lengths = [5, 61, 17, 33, 90, 30, 11]
    if case == "long rows":
        lengths = [8 * length for length in lengths]
    return batch_of(lengths, packed="padded rows" not in case)


def batch_of(lengths: Sequence[int], *, packed: bool = True) -> Batch:
    """Return documents of these lengths in one row, or in a row each."""
    documents = make_documents(lengths, np.random.default_rng(0))
    for document in documents:
        document.weights[:] /= 1 + document.dataset
    rows = [documents] if packed else [[each] for each in documents]
    batch = Collator(0, packed=packed, row_multiple=64)(rows, 1.0)
    batch.step_weight = batch.own_weight
    return batch


def model_of(numbers: dict[str, Any], adapter: AdapterConfig, recompute: str) -> Any:
    base = ModelConfig(from_scratch=True, architecture=numbers)
    model = built(base, adapter=adapter, recompute=recompute)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.02)
    return model


def step(model: Any, batch: Batch) -> dict[str, Any]:
    """Return loss, gradients, sums and saved bytes of a pass over `batch`."""
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    given = (*model.parameters(), batch.input_ids)
    own = {each.untyped_storage().data_ptr() for each in given}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    sums = DatasetSums(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = batch_loss(Sft(), model, batch, "sdpa", sums) / batch.step_weight
    loss.backward()
    gradients = {name: each.grad for name, each in weights.items() if each.grad is not None}
    model.zero_grad()
    return {
        "loss": loss.detach(),
        "gradients": gradients,
        "sums": sums.take(),
        "saved": sum(saved.values()),
    }


def compare(case: str) -> dict[str, float]:
    """Return how far a step of slices is from one of whole rows, and what it saved."""
    slices, model, batch = Slices(), model_of(*CASES[case]), make_batch(case)
    assert slices.context_ranks is not None
    check_isolation(model, "sdpa", slices.root_device)
    check_exchange(model, "sdpa", slices.root_device, slices.context_ranks)
    model.train()
    whole = step(model, batch)
    part = summed_step(model, slices.shard_batch(batch))
    expected = torch.cat([grad.flatten() for grad in whole["gradients"].values()])
    found = torch.cat([part["gradients"][name].flatten() for name in whole["gradients"]])
    figures: dict[str, float] = {
        "loss": abs(part["loss"] / whole["loss"] - 1).item(),
        "sums": (part["sums"] - whole["sums"]).abs().max().item() / whole["sums"].max().item(),
        "gradients": distance(part["gradients"], whole["gradients"]),
        "norm": ((found - expected).norm() / expected.norm()).item(),
        "whole": whole["saved"],
        "saved": part["saved"] / max(1, whole["saved"]),
        "exact": 0.0,
        "rounding": 0.0,
    }
    if case not in WITH_EXPERTS:
        exact = step(model.double(), batch)["gradients"]
        exact_part = summed_step(model, slices.shard_batch(batch))["gradients"]
        figures["exact"] = distance(exact_part, exact)
        figures["rounding"] = distance(whole["gradients"], exact)
    return figures


def summed_step(model: Any, part: Batch) -> dict[str, Any]:
    """Return loss, gradients and sums of all ranks, and the bytes that this one saved."""
    figures = step(model, part)
    for tensor in (figures["loss"], figures["sums"], *figures["gradients"].values()):
        dist.all_reduce(tensor)
    return figures


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of one number, relative to the largest of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name] - each).abs().max() / each.abs().max().clamp(1e-9)).item()
        for name, each in expected.items()
    )


def compare_all(cases: list[str]) -> dict[str, dict[str, float]]:
    """Compare the cases, on a rank of those that hold slices of the same rows, in many chunks."""
    collator.MIN_CHUNK = 16
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    return {case: compare(case) for case in cases}


def refused_and_balanced() -> tuple[list[str], list[list[float]], list[float]]:
    """Return why two faults of attention are refused, and losses of slices and of whole rows.

    The faults: no exchange, and one that ignores documents. The losses are those of an evaluation,
    by data set and in all, and the routers'.
    """
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    slices, model = Slices(), model_of(*CASES["llama"])
    assert slices.context_ranks is not None
    losses = [evaluated(model, None, None), evaluated(model, slices, summed)]
    kind = model.config._attn_implementation
    refusals = []
    for faulty in (lambda *args, exchange=None, **rest: attend(*args), exchanging(attend)):
        AttentionInterface.register(kind, faulty)
        with pytest.raises(UserError) as caught:
            check_exchange(model, "sdpa", slices.root_device, slices.context_ranks)
        refusals.append(str(caught.value))
    batch = make_batch("llama")
    logits = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(3))
    part = slices.shard_batch(batch)
    assert part.sequence is not None
    own = balance_loss([part.sequence.take(logits.unsqueeze(0))[0]], part, 2)
    return refusals, losses, [balance_loss([logits], batch, 2).item(), summed(own).item()]


def evaluated(
    model: Any, sharding: Slices | None, sum_over_ranks: Callable[[Tensor], Tensor] | None
) -> list[float]:
    """Return the losses of an evaluation by data set, and in all."""
    batches = ShownBatches([make_batch("llama")], "losses", 7, lambda *_: None, sharding)
    losses = validate(
        Sft(), model, batches, "sdpa", ["a", "b"], None, sum_over_ranks, is_packed=True
    )
    return list(losses.values())


def summed(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
    """Attend causally to all keys, whatever document they belong to."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return output.transpose(1, 2), None
