"""The first step of a run on a saved base, compared with plain transformers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.model.architecture import load_architecture, model_class
from app.model.attention import (
    AttentionConfig,
    attention_implementation,
    choose_backend,
    packing_error,
)
from app.model.base import ModelConfig, load_base
from app.model.kernels import unfuse_layers
from app.strategy.ddp import SingleDevice
from app.training.module import FinetuneModule
from app.training.objective.objective import DatasetSums, Sft, batch_loss, validate
from common.errors import Origin
from data_modules import Batch, Example
from data_modules.collator import Collator

LENGTHS = [5, 9, 3, 30, 20]
TARGETS = [3, 7, 4, 12, 9]
Step = tuple[float, dict[str, Tensor]]


def documents(*, pairs: bool = False) -> list[Example]:
    random = np.random.default_rng(0)
    made = []
    for length, num_targets in zip(LENGTHS, TARGETS, strict=True):
        weights = np.ones(length, np.float32)
        weights[: length // 3 + 1] = 0
        ids = random.integers(3, 64, length).astype(np.int32)
        origin = Origin("rows.jsonl", len(made) + 1)
        if pairs:
            targets = random.integers(3, 64, num_targets).astype(np.int32)
            made.append(Example(ids, np.ones(num_targets, np.float32), 0, origin, targets))
        else:
            made.append(Example(ids, weights, 0, origin))
    return made


def weight_of(rows: list[Example]) -> float:
    return float(sum(row.weights.sum() for row in rows))


def plain_step(folder: Path) -> Step:
    """Return loss and gradients of plain transformers, one document at a time."""
    architecture = load_architecture(ModelConfig(path=str(folder)))
    model = model_class(architecture).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    model.train()
    rows, total = documents(pairs=architecture.is_encoder_decoder), 0.0
    for row in rows:
        losses, weights = plain_losses(model, row)
        loss = (losses * weights).sum() / weight_of(rows)
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def plain_losses(model: Any, row: Example) -> tuple[Tensor, Tensor]:
    """Return loss and weight of each label of one document."""
    ids, weights = torch.from_numpy(row.input_ids.astype(np.int64)), torch.from_numpy(row.weights)
    inputs = {"input_ids": ids.unsqueeze(0), "use_cache": False}
    if row.target_ids is None:
        logits = model(**inputs).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"), weights[1:]
    targets = torch.from_numpy(row.target_ids.astype(np.int64))
    start = torch.tensor([model.config.decoder_start_token_id])
    shifted = torch.cat([start, targets[:-1]]).unsqueeze(0)
    logits = model(**inputs, decoder_input_ids=shifted).logits[0]
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none"), weights


def our_step(folder: Path, packing: str = "multipack", attention: str = "auto") -> Step:
    """Return loss and gradients of a run's first step on the CPU; raises the run's errors."""
    module = open_module(folder, packing, attention)
    batch, sums = batch_of(module), DatasetSums(1)
    loss = batch_loss(Sft(), module.model, batch, module.backend, sums) / batch.step_weight
    loss.backward()
    return loss.item(), gradients_of(module.model)


def open_module(folder: Path, packing: str = "multipack", attention: str = "auto") -> Any:
    """Open a base as a run does, up to its first batch."""
    config, base = AttentionConfig(backend=attention), ModelConfig(path=str(folder))
    architecture = load_architecture(base)
    backend = choose_backend(config, architecture, "cpu", "fp32").backend
    module = module_of(load_base(base, attention_implementation(backend), torch.float32), backend)
    is_packable = packing_error(architecture.to_dict(), backend) is None
    module.is_packed = packing != "none" and is_packable
    module.on_fit_start()
    return module


def module_of(model: Any, backend: str) -> FinetuneModule:
    """Build a FinetuneModule with a fake Lightning trainer."""
    built: Any = {"build": None, "build_optimizer": None, "schedule": None}
    metrics: Any = SimpleNamespace(dataset_names=["rows"])
    module = FinetuneModule(
        **built, backend=backend, objective=Sft(), total_steps=1, is_packed=True, metrics=metrics
    )
    module.model = model.train()
    plugin = SimpleNamespace(forward_context=nullcontext)
    trainer: Any = SimpleNamespace(
        strategy=SingleDevice("cpu"), precision_plugin=plugin, world_size=1
    )
    module._trainer = trainer
    return module


def batch_of(module: Any) -> Batch:
    """Return all documents as one batch, packed or in padded rows."""
    config = module.model.config
    rows = documents(pairs=config.is_encoder_decoder)
    packs = [rows] if module.is_packed else [[row] for row in rows]
    start = config.decoder_start_token_id if config.is_encoder_decoder else None
    multiple = 64 if start is None else 1
    return Collator(0, module.is_packed, start, row_multiple=multiple)(packs, weight_of(rows))


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    found = ((name, weight.grad) for name, weight in model.named_parameters())
    return {name: grad for name, grad in found if grad is not None and grad.any()}


def check_equal(ours: Step, plain: Step) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert ours[1].keys() == plain[1].keys()
    scale = torch.stack([grad.norm() for grad in plain[1].values()]).norm()
    for name, grad in plain[1].items():
        assert (ours[1][name] - grad).norm() <= 1e-5 * (grad.norm() + 0.1 * scale), name


def check_two_steps(folder: Path) -> None:
    """Check that two steps lower the loss, and that the reopened model evaluates to the same."""
    module = open_module(folder)
    model, batch = module.model, batch_of(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = evaluate(module)
    for _ in range(2):
        loss = batch_loss(Sft(), model, batch, module.backend, DatasetSums(1)) / batch.step_weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unfuse_layers(model)
    after = evaluate(module)
    assert np.isfinite(after) and after < before, (before, after)
    saved = folder / "saved"
    model.save_pretrained(saved)
    opened = open_module(saved)
    unfuse_layers(opened.model)
    assert evaluate(opened) == pytest.approx(after, rel=1e-5)


def evaluate(module: Any) -> float:
    found = validate(
        Sft(),
        module.model,
        [batch_of(module)],
        module.backend,
        ["rows"],
        is_packed=module.is_packed,
    )
    module.model.train()
    return found["val/loss"]
