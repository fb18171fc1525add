"""Families of models: equal to plain transformers, or refused in one sentence that is true.

The advice of a refusal is typed, and what it leads to is equal.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.model.attention import AttentionConfig, attention_implementation, choose_backend
from app.model.base import ModelConfig, load_architecture, load_base
from app.preflight.base_model import BaseModel
from app.preflight.files import check_packing_of_base
from app.strategy.ddp import OneDevice
from app.training.module import FinetuneModule
from app.training.objective import DatasetSums, batch_loss
from data_modules import Example, Origin, PackingConfig
from data_modules.collator import Collator
from tests.families import tiny_family

LENGTHS = [5, 9, 3, 30, 20]
EQUAL = ["bert", "diffllama", "gemma2", "gpt2", "mixtral", "nemotron", "qwen3", "stablelm"]
REFUSED = [
    *("bamba", "bloom", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba"),
    *("mamba2", "nemotron_h", "openai-gpt", "qwen3_5_text", "qwen3_next", "roberta", "trocr"),
]
Step = tuple[float, dict[str, Tensor]]


def documents() -> list[Example]:
    random = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        weights = np.ones(length, np.float32)
        weights[: length // 3 + 1] = 0
        ids = random.integers(3, 64, length).astype(np.int32)
        made.append(Example(ids, weights, 0, Origin("rows.jsonl", len(made) + 1)))
    return made


def weight_of(rows: list[Example]) -> float:
    return float(sum(row.weights.sum() for row in rows))


def plain_step(folder: Path) -> Step:
    """Loss and gradients of plain transformers, a document at a time."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).train()
    rows, total = documents(), 0.0
    for row in rows:
        ids = torch.from_numpy(row.input_ids.astype(np.int64))
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        loss = (losses * torch.from_numpy(row.weights[1:])).sum() / weight_of(rows)
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def our_step(folder: Path, packing: str = "multipack", attention: str = "auto") -> Step:
    """Loss and gradients of a run's first step on the CPU; raises what the run would raise."""
    config, base = AttentionConfig(backend=attention), ModelConfig(path=str(folder))
    numbers = json.loads((folder / "config.json").read_text())
    known = BaseModel(str(folder), numbers)
    if problems := check_packing_of_base(PackingConfig(method=packing), config, known):
        raise ValueError(problems[0])
    backend = choose_backend(config, load_architecture(base), "cpu", "fp32").backend
    module = module_of(load_base(base, attention_implementation(backend), torch.float32), backend)
    module.is_packed = packing != "none"
    module.on_fit_start()
    rows, sums = documents(), DatasetSums(1)
    packs = [rows] if module.is_packed else [[row] for row in rows]
    batch = Collator(0, module.is_packed, row_multiple=64)(packs, weight_of(rows))
    loss = batch_loss(module.model, batch, backend, sums) / batch.step_weight
    loss.backward()
    return loss.item(), gradients_of(module.model)


def module_of(model: Any, backend: str) -> FinetuneModule:
    """Make what Lightning's trainer would call, with what it asks of a trainer."""
    built: Any = {"build": None, "build_optimizer": None, "schedule": None}
    metrics: Any = SimpleNamespace(dataset_names=["rows"])
    module = FinetuneModule(
        **built, backend=backend, total_steps=1, is_packed=True, metrics=metrics
    )
    module.model = model.train()
    plugin = SimpleNamespace(forward_context=nullcontext)
    trainer: Any = SimpleNamespace(strategy=OneDevice("cpu"), precision_plugin=plugin, world_size=1)
    module._trainer = trainer
    return module


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    found = ((name, weight.grad) for name, weight in model.named_parameters())
    return {name: grad for name, grad in found if grad is not None and grad.any()}


def check_equal(ours: Step, plain: Step) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert ours[1].keys() == plain[1].keys()
    scale = torch.stack([grad.norm() for grad in plain[1].values()]).norm()
    for name, grad in plain[1].items():
        assert (ours[1][name] - grad).norm() <= 1e-5 * (grad.norm() + 0.1 * scale), name


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a random base of the family that the test names."""
    tiny_family(request.param).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("saved", EQUAL, indirect=True)
def test_packs_and_padded_rows_give_what_plain_transformers_give(saved: Path) -> None:
    plain = plain_step(saved)
    for packing in ("multipack", "none"):
        check_equal(our_step(saved, packing), plain)


@pytest.mark.parametrize("saved", REFUSED, indirect=True)
def test_what_a_refusal_says_is_typed_and_runs(saved: Path) -> None:
    with pytest.raises(ValueError, match=r": type [^:]+$") as error:
        our_step(saved)
    said = str(error.value).rpartition("type ")[2]
    assert re.fullmatch(r"packing=none|attention=eager, or packing=none", said)
    plain = plain_step(saved)
    for typed in said.split(", or "):
        key, _, value = typed.partition("=")
        check_equal(our_step(saved, **{key: value}), plain)


@pytest.mark.parametrize("packing", ["none", "multipack"])
@pytest.mark.parametrize("family", ["bert", "electra"])
def test_a_model_that_sees_what_comes_is_refused(family: str, packing: str, tmp_path: Path) -> None:
    tiny_family(family, is_decoder=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{family} models let a token see those after it"):
        our_step(tmp_path, packing)
