"""The training of the ranks in `test_sharded`, and the same training in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from app.model.accumulation import accumulated_linear
from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
from app.model.attention.inputs import attention_inputs
from app.model.base import ModelConfig
from app.model.experts import expert_modules
from app.model.head import head_loss, run_probe
from app.model.kernels import Fused, fuse_layers
from app.model.layers import decoder_layers
from app.model.residuals import fuse_sums
from app.strategy import tensor_parallel
from app.strategy.loading import Broadcaster, peak_host_bytes
from app.strategy.mixin import ShardedTensor, local
from app.strategy.settings import FsdpConfig
from app.training.checkpoint.state import trainable_parameters
from app.training.module import StepSkipped, propagate_nonfinite, skip_nonfinite_step
from common.errors import UserError
from tests.model.test_kernels import install_references
from tests.ranks import connect
from tests.tiny import TINY_BASE, built

ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}
ADAPTERS: dict[str, AdapterConfig] = {
    "lora": LoraConfig(r=1, alpha=4, dropout=0.0, init="gaussian"),  # few weights
    "dora": LoraConfig(r=4, dropout=0.0, use_dora=True),
    "ia3": Ia3Config(),
    "experts": LoraConfig(r=2, alpha=4, dropout=0.0, experts="lora"),
    "full": FullConfig(),
    "head": FreezeConfig(layers="none", modules=["lm_head"]),
    "top layer": FreezeConfig(layers="top 1"),
}
STEPS, ROWS, TOKENS, CLIP = 4, 8, 16, 0.5


def model_builder(
    kind: str = "lora",
    precision: str = "fp32",
    recompute: str = "none",
    backend: str = "sdpa",
    busy_experts: int | None = None,
    **numbers: Any,
) -> Any:
    """Return a function that builds a small model, as a run passes it to its module.

    `busy_experts`: the first experts of a layer, which get the tokens of the others, too.
    """

    def choose_busy(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights = inputs
        return hidden, chosen % busy_experts, weights

    def build(**where: Any) -> Any:
        base = ModelConfig(from_scratch=True, architecture=ARCHITECTURE | numbers)
        how = {"adapter": ADAPTERS[kind], "recompute": recompute, "backend": backend}
        model = built(base, precision=precision, seed=7, **how, **where)
        for _, experts in expert_modules(model) if busy_experts else ():
            experts.register_forward_pre_hook(choose_busy)
        return model

    return build


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return token ids and loss weights [rows, tokens] of a step; weights differ between rows."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 96, (ROWS, TOKENS), generator=random)
    weights = (torch.rand(ROWS, TOKENS, generator=random) < 0.6).float()
    return ids, weights / weights.sum()


def compute_loss(model: Any, ids: Tensor, weights: Tensor) -> Tensor:
    backend = "eager" if model.config._attn_implementation == "eager" else "sdpa"
    lengths = [[TOKENS // 2, TOKENS // 2]] * len(ids)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS // 2).repeat(len(ids), 2),
        "use_cache": False,
    } | attention_inputs(model, backend, lengths, ids)
    total, _ = head_loss(model, inputs, ids.roll(-1, 1), weights)
    return total


def make_optimizer(model: Any) -> torch.optim.AdamW:
    """Return an AdamW whose large eps keeps rounding errors from causing steps."""
    weights = list(trainable_parameters(model).values())
    return torch.optim.AdamW(weights, lr=1e-2, eps=1e-4, fused=True)


def train(
    model: Any,
    strategy: Any = None,
    *,
    accumulation: int = 2,
    steps: int = STEPS,
    clip: float = CLIP,
    autocast: bool = False,
    bad_step: int | None = None,
    begins: int = 0,
    optimizer: Any = None,
) -> dict[str, Any]:
    """Take steps as FinetuneModule does.

    Returns losses, norms, and the full gradients of the first step and full final weights.
    """
    share, place = (1, 0) if strategy is None else (strategy.num_data_ranks, strategy.data_rank)
    weights = trainable_parameters(model)
    optimizer = optimizer or make_optimizer(model)
    whole = (lambda tensor: tensor.detach()) if strategy is None else strategy.full_tensor
    found: dict[str, Any] = {"losses": [], "norms": [], "validations": []}
    for step in range(begins, steps):
        ids, loss_weights = make_batch(step)
        parts = torch.arange(ROWS).view(accumulation, share, -1)[:, place]
        total = torch.zeros(())
        for number, part in enumerate(parts):
            is_last = number == accumulation - 1
            quiet = strategy is not None and not is_last
            with (
                strategy.accumulating() if quiet else nullcontext(),
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            ):
                loss = compute_loss(model, ids[part], loss_weights[part])
                if step == bad_step and place == 0:
                    loss = loss * float("nan")
                scaled = propagate_nonfinite(loss) * share
                scaled.backward() if strategy is None else strategy.run_backward(scaled)
            total += loss.detach()
        if strategy is not None:
            total = strategy.reduce(total, reduce_op="sum") * share / strategy.world_size
        if strategy is None:
            norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), clip)
        else:
            norm = strategy.clip(optimizer, clip)
        if step == begins:
            found["gradients"] = {
                name: gradient(strategy, weight).clone() for name, weight in weights.items()
            }
        skip_nonfinite_step(optimizer, norm, is_scaled=False)
        with suppress(StepSkipped):
            optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(total.item())
        found["norms"].append(norm.item())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.eval()
            found["validations"].append(compute_loss(model, ids, loss_weights).item())
            model.train()
        assert trainable_parameters(model).keys() == weights.keys()
        assert all(trainable_parameters(model)[name] is weights[name] for name in weights)
    found["weights"] = {name: whole(weight).clone() for name, weight in weights.items()}
    return found


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all tensors, as a share of their norm."""
    assert found.keys() == wanted.keys()
    norm = torch.nn.utils.get_total_norm
    apart = norm([found[name] - value for name, value in wanted.items()])
    return float(apart / norm(list(wanted.values())))


def gradient(strategy: Any, weight: Any) -> Tensor:
    """Return the full gradient of a weight."""
    if strategy is None:
        return weight.grad
    return strategy._full(weight.grad, strategy._splits.get(weight))


def build_sharded_model(
    config: FsdpConfig, build: Any, precision: str = "32-true"
) -> tuple[Any, Any]:
    """Return a strategy with connected ranks, and the model that it has sharded."""
    strategy = connect(config, precision)
    model = strategy.build_model(build)
    if strategy.fuses_adapters:
        with torch.autocast("cpu", torch.bfloat16, enabled="mixed" in precision):
            fuse_layers(model, strategy.gathered)
    if strategy.accumulates_in_products:  # as `fuse_layers` does on a GPU
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.forward = partial(_accumulated, module)
    return strategy, model


def _accumulated(module: torch.nn.Linear, hidden: Tensor) -> Tensor:
    return accumulated_linear(hidden, module.weight, module.bias)


# Functions that each rank calls; `on_ranks` returns the results of all ranks.


def answer_all(questions: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the result of each function with its arguments."""
    return [function(*args) for function, *args in questions]


def train_cases(cases: list[tuple[FsdpConfig, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Train each case."""
    results = []
    for config, made, how in cases:
        precision = "bf16-mixed" if how.get("autocast") else "32-true"
        strategy, model = build_sharded_model(config, model_builder(**made), precision)
        results.append(train(model, strategy, **how))
    return results


def train_with_kernels(config: FsdpConfig, made: dict[str, Any]) -> dict[str, Any]:
    """Train with references of a GPU's kernels; `kernels` counts them by class."""
    with pytest.MonkeyPatch.context() as patch:
        install_references(patch)
        strategy, model = build_sharded_model(config, model_builder(**made))
        run = partial(run_probe, model, "sdpa", strategy.root_device)
        fuse_layers(model, strategy.gathered, run=run)
        fuse_sums(model, strategy.gathered, run, joins_layers=False)
        forwards = (vars(module).get("forward") for module in model.modules())
        kinds = Counter(type(each).__name__ for each in forwards if isinstance(each, Fused))
        return train(model, strategy) | {"kernels": kinds}


def has_gradients_by_micro_batch(config: FsdpConfig, kind: str) -> tuple[bool, bool]:
    """Return whether shards have gradients after the first and after the last micro-batch."""
    strategy, model = build_sharded_model(config, model_builder(kind))
    weights = list(trainable_parameters(model).values())
    ids, loss_weights = make_batch(0)
    with strategy.accumulating():
        compute_loss(model, ids, loss_weights).backward()
    first = all(weight.grad is not None for weight in weights)
    compute_loss(model, ids, loss_weights).backward()
    return first, all(weight.grad is not None for weight in weights)


def gathers_by_micro_batch(config: FsdpConfig) -> tuple[list[int], list[str]]:
    """Return the gathers of weights in each of three micro-batches, and what is gathered after."""
    strategy, model = build_sharded_model(config, model_builder("full"))
    ids, loss_weights = make_batch(0)
    gathers = [0, 0, 0]
    gather = _fsdp_param_group.foreach_all_gather
    for index in range(3):

        def count(*args: Any, index: int = index) -> Any:
            gathers[index] += 1
            return gather(*args)

        with (
            patch.object(_fsdp_param_group, "foreach_all_gather", count),
            strategy.accumulating() if index < 2 else nullcontext(),
        ):
            compute_loss(model, ids, loss_weights).backward()
    kept = [n for n, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    return gathers, kept


def bytes_of_shards(config: FsdpConfig, numbers: dict[str, Any]) -> int:
    """Return the bytes of the weights of this rank."""
    _, model = build_sharded_model(config, model_builder("full", **numbers))
    return sum(local(weight).nbytes for weight in model.parameters())


def exchanged_by_experts(config: FsdpConfig, recompute: str) -> tuple[int, int]:
    """Return the messages between experts in a micro-batch, and their bytes from this rank."""
    build = model_builder("full", recompute=recompute, **MIXTURE)
    strategy, model = build_sharded_model(config, build)
    sizes, send = [], tensor_parallel._send

    def count(rows: Tensor, *args: Any) -> Tensor:
        sizes.append(rows.nbytes)
        return send(rows, *args)

    ids, loss_weights = make_batch(strategy.data_rank)
    with patch.object(tensor_parallel, "_send", count):
        compute_loss(model, ids, loss_weights).backward()
    return len(sizes), sum(sizes)


def unsharded_weights_after_forward(config: FsdpConfig) -> list[str]:
    """Return the names of weights that are unsharded after an evaluation."""
    _, model = build_sharded_model(config, model_builder("full"))
    with torch.no_grad():
        compute_loss(model, *make_batch(0))
    return [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]


def dtypes_in_layers(config: FsdpConfig, kind: str) -> list[Any]:
    """Return the dtypes of a layer's weights while it runs, of its shards, and of gradients."""
    _, model = build_sharded_model(config, model_builder(kind, precision="bf16"), "bf16-mixed")
    names = decoder_layers(model)
    layer, running = model.get_submodule(names[-1]), set()
    layer.mlp.register_forward_pre_hook(
        lambda *_: running.update(weight.dtype for weight in layer.parameters())
    )
    with torch.autocast("cpu", torch.bfloat16):
        compute_loss(model, *make_batch(0)).backward()
    trained = list(trainable_parameters(model).values())
    kept = {weight.dtype for weight in trained}, {weight.grad.dtype for weight in trained}
    return [sorted(map(str, dtypes)) for dtypes in (running, *kept)]


def shards_of_scales() -> list[tuple[bool, float]]:
    """Return for each 4-bit layer whether its scales are sharded, and this rank's share of them."""
    _, model = build_sharded_model(FsdpConfig(), build_quantized)
    scales: list[Any] = [m.absmax for m in model.modules() if "absmax" in m._parameters]
    return [
        (isinstance(s, DTensor), s.to_local().numel() / s.numel() if s.numel() else 0.0)
        for s in scales
    ]


def _gather_all(parts: dict[str, Any]) -> dict[str, Tensor]:
    wholes = {}
    for key, part in parts.items():
        wholes[key] = part.gather() if isinstance(part, ShardedTensor) else part.clone()
        assert wholes[key].shape == part.shape and wholes[key].dtype == part.dtype
    return wholes


def measure_loading_memory(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return how a rank has built a model, and by how many bytes its peak memory has grown."""
    built = []
    build = model_builder("lora", **numbers)

    def noted(**where: Any) -> Any:
        model = build(**where)
        built.append({weight.device.type for weight in model.parameters()})
        return model

    strategy = connect(FsdpConfig())
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_host_bytes()
    model = strategy.build_model(noted)
    return {
        "built": built,
        "grown": peak_host_bytes() - before,
        "whole": sum(weight.numel() for weight in model.parameters()) * 4,
        "kept": sum(weight.to_local().numel() for weight in model.parameters()) * 4,
    }


def replicated_weights_after_unequal_gradients(config: FsdpConfig) -> dict[str, Tensor]:
    """Return replicated weights after a step in which each rank has slightly other gradients."""
    strategy, model = build_sharded_model(
        config, model_builder("full", model_type="qwen3", head_dim=8)
    )
    optimizer, weights = make_optimizer(model), trainable_parameters(model)
    compute_loss(model, *make_batch(0)).backward()
    for weight in weights.values():
        weight.grad *= 1 + strategy.global_rank / 100
    strategy.clip(optimizer, CLIP)
    optimizer.step()
    return {name: weight for name, weight in weights.items() if weight not in strategy._splits}


def errors_of_different_models() -> list[str]:
    """Return the errors of this rank if rank 1 has other layers, more, fewer, or tied ones."""
    connect(FsdpConfig())
    messages = []
    for widths in (([2], [3]), ([2], [2, 4]), ([2, 4], [2]), ([3, 3], [3, 3])):
        own = widths[dist.get_rank()]
        model = torch.nn.ModuleList([torch.nn.Linear(n, 2, bias=False) for n in own])
        if own == [3, 3] and dist.get_rank() == 1:
            model[1].weight = model[0].weight
        try:
            Broadcaster(torch.device("cpu"), 2, 2).check_same(model)
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def devices_of_scales() -> set[str]:
    """Return the devices of the scales of 4-bit layers; `meta` stands for a GPU."""
    connect(FsdpConfig())
    model = build_quantized(on_meta=dist.get_rank() > 0)
    Broadcaster(torch.device("meta"), 2, 2).broadcast_quantization(model)
    states = [module.quant_state for module in model.modules() if "quant_state" in vars(module)]
    found = set()
    for state in states:
        for part in (state, state.state2):
            tensors = (value for value in vars(part).values() if isinstance(value, Tensor))
            found |= {tensor.device.type for tensor in tensors}
    return found


def quantized_losses() -> list[float]:
    """Return the losses of a few steps on the shipped base in four bits."""
    strategy, model = build_sharded_model(FsdpConfig(), build_quantized)
    return train(model, strategy)["losses"]


def build_quantized(**where: Any) -> Any:
    adapter = LoraConfig(r=4, dropout=0.0)
    return built(TINY_BASE, "nf4", adapter=adapter, recompute="auto", seed=7, **where)


def refusals(cases: list[tuple[FsdpConfig, dict[str, Any]]]) -> list[str]:
    """Return the error message of each case."""
    messages = []
    for config, made in cases:
        try:
            build_sharded_model(config, model_builder(**made))
        except UserError as error:
            messages.append(str(error))
    return messages
