"""What the ranks of `test_deepspeed` do, by Lightning's own trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.strategy.build import build_strategy
from app.strategy.settings import ZeroConfig
from app.training.nonfinite import skip_nonfinite_step

SPREADS_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""else DeepSpeed keeps weights this small whole on every rank"""
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.05
BAD_STEP = 1


class Small(torch.nn.Module):
    """Sizes that no number of ranks divides, a frozen weight between those that train, a buffer."""

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
    """Make the same model each time; nothing of it where `on_meta`."""
    with torch.device("meta" if on_meta else "cpu"):
        torch.manual_seed(3)
        return Small()


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups, of which one decays."""
    matrices, vectors = [], []
    for weight in model.parameters():
        if weight.requires_grad:
            (matrices if weight.ndim > 1 else vectors).append(weight)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, fused=True)


def rows_of(step: int, rank: int, micro_batch: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(4, 5, generator=random)


def loss_of(model: torch.nn.Module, rows: Tensor, *, is_bad: bool = False) -> Tensor:
    loss = model(rows).square().mean()
    return loss * float("nan") if is_bad else loss


class Module(L.LightningModule):
    """Trains as FinetuneModule does, and asks its strategy the same."""

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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step, micro_batch = divmod(batch_idx, MICRO_BATCHES)
        rows = rows_of(step, self.global_rank, micro_batch).to(self.device)
        return loss_of(
            self.model, rows, is_bad=step == BAD_STEP and self.bad_rank == self.global_rank
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
        """Gather all that a checkpoint keeps."""
        strategy: Any = self.trainer.strategy
        optimizer = self.optimizers(use_pl_optimizer=False)
        found: dict[str, Tensor] = {}
        for name, weight in self.named().items():
            found[name] = _whole(strategy.weight_state(weight))
            for key, state in strategy.optimizer_state_of(optimizer, weight).items():
                found[f"{key}/{name}"] = _whole(state)
        return found

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.kept = self.gathered()
        frozen = {n: strategy.full_tensor(w) for n, w in self.model.named_parameters()}
        assert {name: w.shape for name, w in frozen.items()} == SHAPES
        # What is given back is what was taken, also numbers that differ from what is there.
        optimizer = self.optimizers(use_pl_optimizer=False)
        given = {key: torch.randn_like(value) for key, value in self.kept.items() if value.ndim}
        given["exp_avg/last.weight"][0, :2] = torch.tensor([-0.0, 0.0])
        for tensor in given.values():
            torch.distributed.broadcast(tensor, 0)
        for name, weight in self.named().items():
            strategy.restore_weight(weight, given[name])
            states = {k.split("/")[0]: v for k, v in given.items() if k.endswith(f"/{name}")}
            strategy.restore_optimizer_state(
                optimizer, weight, states, lambda _, v: torch.empty_like(v)
            )
        again = self.gathered()
        for key, value in given.items():
            assert torch.equal(again[key].view(torch.uint8), value.view(torch.uint8)), key


SHAPES = {name: weight.shape for name, weight in build(on_meta=True).named_parameters()}


def _whole(kept: Any) -> Tensor:
    return kept.clone() if isinstance(kept, Tensor) else kept.gather()


def train(
    config: ZeroConfig, bad_rank: int | None = None, accelerator: str = "cpu"
) -> dict[str, Any]:
    """Train under a strategy; returns what was kept, the norms, and where weights were built."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    module = Module(bad_rank)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=num_ranks,
        strategy=build_strategy(config, accelerator=accelerator, num_ranks=num_ranks),
        max_steps=STEPS,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, [0] * (STEPS * MICRO_BATCHES))
    kept = {name: value.cpu() for name, value in module.kept.items()}
    return {"kept": kept, "norms": module.norms, "built": module.built}


def train_all(configs: list[ZeroConfig]) -> list[list[dict[str, Any]]]:
    """Train one after the other: all soundly, then all past a step that is bad on one rank."""
    found, environment = [], dict(os.environ)
    for bad_rank in (None, 0):
        found.append([])
        for config in configs:
            os.environ |= environment  # Lightning takes out what it has read
            found[-1].append(train(config, bad_rank))
    return found


def train_alone(num_ranks: int, *, has_bad_step: bool = False) -> dict[str, Any]:
    """Take the same steps in one process that holds everything."""
    model = build()
    optimizer = adamw(model)
    norms = []
    for step in range(STEPS):
        for rank in range(num_ranks):
            for number in range(MICRO_BATCHES):
                is_bad = has_bad_step and step == BAD_STEP and rank == 0
                loss = loss_of(model, rows_of(step, rank, number), is_bad=is_bad)
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
