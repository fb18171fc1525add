"""The training of the ranks in `test_deepspeed`, by Lightning's own trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from app.assembly.training import build_strategy
from app.model.head import run_probe
from app.model.kernels import Fused, fuse_layers
from app.strategy.settings import StrategyConfig, ZeroConfig
from app.training.module import skip_nonfinite_step
from tests.model.test_kernels import install_references
from tests.tiny import random_ids, tiny_llama

SHARD_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""without this, DeepSpeed would not shard weights as small as those of the tests"""
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.05
BAD_STEP = 1


class Small(torch.nn.Module):
    """Has sizes not divisible by the number of ranks, a frozen weight in between, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.last = torch.nn.Linear(7, 3, bias=False)
        self.register_buffer("shift", torch.randn(7))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.frozen(self.first(rows).tanh()) + self.shift
        return self.last(hidden)


def build(on_meta: bool = False, **_: Any) -> Small:
    """Build the same model each time; its shapes only if `on_meta`."""
    with torch.device("meta" if on_meta else "cpu"):
        torch.manual_seed(3)
        return Small()


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return an optimizer with two groups, one of them with weight decay."""
    matrices, vectors = [], []
    for weight in model.parameters():
        if weight.requires_grad:
            (matrices if weight.ndim > 1 else vectors).append(weight)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, fused=True)


def make_batch(step: int, rank: int, micro_batch: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(4, 5, generator=random)


def compute_loss(model: torch.nn.Module, rows: Tensor, *, is_bad: bool = False) -> Tensor:
    loss = model(rows).square().mean()
    return loss * float("nan") if is_bad else loss


class Module(L.LightningModule):
    """Trains as FinetuneModule does, with the same calls of the strategy."""

    def __init__(self, bad_rank: int | None) -> None:
        super().__init__()
        self.bad_rank = bad_rank
        self.model: Any = None
        self.built: list[str] = []
        self.norms: list[float] = []
        self.kept: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            strategy: Any = self.trainer.strategy
            self.model = strategy.build_model(build)
            self.built = sorted({weight.device.type for weight in self.model.parameters()})

    def configure_optimizers(self) -> Any:
        return adamw(self.model)

    def training_step(self, batch: Any, step: int) -> Tensor:
        rows = [make_batch(step, self.global_rank, number) for number in range(MICRO_BATCHES)]
        is_bad = step == BAD_STEP and self.bad_rank == self.global_rank
        strategy: Any = self.trainer.strategy
        return strategy.run_micro_batches(
            rows, lambda part: compute_loss(self.model, part, is_bad=is_bad) / MICRO_BATCHES
        )

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        norm = self.trainer.strategy.clip(optimizer, gradient_clip_val)
        skip_nonfinite_step(optimizer, norm, is_scaled=False)
        self.norms.append(norm.item())

    def named(self) -> dict[str, Any]:
        return {name: w for name, w in self.model.named_parameters() if w.requires_grad}

    def gathered(self) -> dict[str, Tensor]:
        """Gather all weights and states of a checkpoint."""
        strategy: Any = self.trainer.strategy
        optimizer = self.optimizers(use_pl_optimizer=False)
        tensors: dict[str, Tensor] = {}
        for name, weight in self.named().items():
            tensors[name] = _full_tensor(strategy.weight_state(weight))
            for key, state in strategy.optimizer_state_of(optimizer, weight).items():
                tensors[f"{key}/{name}"] = _full_tensor(state)
        return tensors

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.kept = self.gathered()
        frozen = {n: strategy.full_tensor(w) for n, w in self.model.named_parameters()}
        assert {name: w.shape for name, w in frozen.items()} == SHAPES
        # Restoring other values and gathering them again returns the same bits.
        optimizer = self.optimizers(use_pl_optimizer=False)
        restored = {key: torch.randn_like(value) for key, value in self.kept.items() if value.ndim}
        restored["exp_avg/last.weight"][0, :2] = torch.tensor([-0.0, 0.0])
        for tensor in restored.values():
            torch.distributed.broadcast(tensor, 0)
        for name, weight in self.named().items():
            strategy.restore_weight(weight, restored[name])
            states = {k.split("/")[0]: v for k, v in restored.items() if k.endswith(f"/{name}")}
            strategy.restore_optimizer_state(
                optimizer, weight, states, lambda _, v: torch.empty_like(v)
            )
        gathered = self.gathered()
        for key, value in restored.items():
            assert torch.equal(gathered[key].view(torch.uint8), value.view(torch.uint8)), key


class LlamaModule(Module):
    """Trains a Llama, by kernels if it is told to."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__(None)
        self.is_fused, self.fused = is_fused, 0

    def configure_model(self) -> None:
        if self.model is None:
            strategy: Any = self.trainer.strategy
            self.model = strategy.build_model(_build_llama)

    def on_train_start(self) -> None:
        if self.is_fused:
            strategy: Any = self.trainer.strategy
            fuse_layers(self.model, strategy.gathered, run=self.run_once)
        forwards = [vars(each).get("forward") for each in self.model.modules()]
        self.fused = sum(isinstance(each, Fused) for each in forwards)

    def run_once(self) -> None:
        run_probe(self.model, "sdpa", self.device)

    def training_step(self, batch: Any, step: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        rows = random_ids(4, 16).roll(step, 1)[2 * self.global_rank :]
        return strategy.run_micro_batches(
            rows[:2].split(1),
            lambda ids: self.model(input_ids=ids, labels=ids, use_cache=False).loss / 2,
        )

    def on_train_end(self) -> None:
        self.kept = self.gathered()


def _build_llama(on_meta: bool = False, **_: Any) -> Any:
    with torch.device("meta" if on_meta else "cpu"):
        return tiny_llama().train()


SHAPES = {name: weight.shape for name, weight in build(on_meta=True).named_parameters()}


def _full_tensor(state: Any) -> Tensor:
    return state.clone() if isinstance(state, Tensor) else state.gather()


def trainer_of(
    config: StrategyConfig, accelerator: str = "cpu", *, max_steps: int = 1, **options: Any
) -> L.Trainer:
    """Return a trainer that only trains, with a strategy of our own."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = build_strategy(
        config, accelerator=accelerator, num_ranks=num_ranks, accumulation=MICRO_BATCHES
    )
    return L.Trainer(
        accelerator=accelerator,
        devices=num_ranks,
        strategy=strategy,
        max_steps=max_steps,
        **{"gradient_clip_val": 1.0, **options},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def train(
    config: ZeroConfig,
    bad_rank: int | None = None,
    accelerator: str = "cpu",
    module: Module | None = None,
) -> dict[str, Any]:
    """Train under a strategy; return the final tensors, the norms, and where weights were built."""
    module = module or Module(bad_rank)
    trainer = trainer_of(config, accelerator, max_steps=STEPS, gradient_clip_val=CLIP)
    trainer.fit(module, [0] * STEPS)
    kept = {name: value.cpu() for name, value in module.kept.items()}
    return {"kept": kept, "norms": module.norms, "built": module.built}


def train_with_kernels(config: ZeroConfig) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Train a Llama with and without kernels; return their number, and both results."""
    environment, results = dict(os.environ), []
    for is_fused in (False, True):
        os.environ |= environment
        module = LlamaModule(is_fused=is_fused)
        with pytest.MonkeyPatch.context() as patch:
            install_references(patch)
            results.append(train(config, module=module))
    return module.fused, *results


def train_all(configs: list[ZeroConfig]) -> list[list[dict[str, Any]]]:
    """Train with each config, first normally, then with a NaN loss on one rank in one step."""
    results, environment = [], dict(os.environ)
    for bad_rank in (None, 0):
        results.append([])
        for config in configs:
            os.environ |= environment  # Lightning removes variables that it has read
            results[-1].append(train(config, bad_rank))
    return results


def train_in_one_process(num_ranks: int, *, has_bad_step: bool = False) -> dict[str, Any]:
    """Take the same steps in one process without sharding."""
    model = build()
    optimizer = adamw(model)
    norms = []
    for step in range(STEPS):
        for rank in range(num_ranks):
            for number in range(MICRO_BATCHES):
                is_bad = has_bad_step and step == BAD_STEP and rank == 0
                loss = compute_loss(model, make_batch(step, rank, number), is_bad=is_bad)
                (loss / num_ranks / MICRO_BATCHES).backward()
        weights = [w for w in model.parameters() if w.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
        skip_nonfinite_step(optimizer, norm, is_scaled=False)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
    kept = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            kept[name] = weight.detach()
            kept |= {f"{key}/{name}": value for key, value in optimizer.state[weight].items()}
    return {"kept": kept, "norms": norms}
