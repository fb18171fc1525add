"""Schedule-free AdamW: what trains are its training weights, what is measured their average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.model.adapter import FullConfig
from app.training.algorithms import use_averaged_weights, use_training_weights
from app.training.module import FinetuneModule
from app.training.optimizers import AdamWConfig, MuonConfig, ScheduleFreeConfig, build_optimizer
from tests.conftest import TrainRun, read_column
from tests.tiny import random_ids, small_run, tiny_llama

WORDS = ["optimizer=schedule_free", "schedule=constant", "optimizer.lr=3e-3", "adapter.dropout=0"]
Seen = dict[str, Any]


def trained(module: FinetuneModule) -> dict[str, torch.Tensor]:
    named = module.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Records the mode of the optimizer in every step, and the weights of each validation."""
    found: Seen = {"training": [], "validation": [], "validated": [], "newest": []}
    training_step, validation_step = FinetuneModule.training_step, FinetuneModule.validation_step
    optimizer_step = FinetuneModule.optimizer_step

    def optimizer_of(module: FinetuneModule) -> Any:
        return module.optimizers(use_pl_optimizer=False)

    def look_at_training(module: FinetuneModule, *args: Any) -> Any:
        found["training"].append(optimizer_of(module).param_groups[0]["train_mode"])
        return training_step(module, *args)

    def look_at_validation(module: FinetuneModule, *args: Any) -> Any:
        found["validation"].append(optimizer_of(module).param_groups[0]["train_mode"])
        found["validated"] = trained(module)
        return validation_step(module, *args)

    def look_at_step(module: FinetuneModule, *args: Any) -> None:
        optimizer_step(module, *args)
        state, named = optimizer_of(module).state, module.model.named_parameters()
        newest = {name: state[p]["z"].clone() for name, p in named if p.requires_grad}
        found["newest"].append(newest)

    monkeypatch.setattr(FinetuneModule, "training_step", look_at_training)
    monkeypatch.setattr(FinetuneModule, "validation_step", look_at_validation)
    monkeypatch.setattr(FinetuneModule, "optimizer_step", look_at_step)
    return found


def test_the_average_is_validated_and_saved_while_training_uses_its_own_weights(
    train_run: TrainRun, seen: Seen
) -> None:
    words = [*WORDS, "trainer.max_steps=6", "schedule.warmup_steps=0"]
    folder = train_run(*small_run("trainer.validate_every_steps=2"), *words)
    assert len(seen["training"]) == 6 and all(seen["training"])
    assert len(seen["validation"]) > 3 and not any(seen["validation"])
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    in_memory = {name.replace(".default", ""): w for name, w in seen["validated"].items()}
    assert saved.keys() == in_memory.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, in_memory[name]), name
    # At a constant rate it is the plain mean of the newest weights after each step.
    assert len(seen["newest"]) == 6
    for name, weight in seen["validated"].items():
        mean = torch.stack([newest[name] for newest in seen["newest"]]).mean(dim=0)
        assert torch.allclose(weight, mean, rtol=1e-4, atol=1e-6), name
        assert not torch.allclose(weight, seen["newest"][-1][name], rtol=1e-2, atol=1e-4), name
    # A validation does not change the training.
    once = train_run(*small_run("trainer.validate_every_steps=6"), *words)
    losses = [list(read_column(run, "train/loss").values()) for run in (folder, once)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_average_is_saved_also_where_nothing_is_validated(
    train_run: TrainRun, seen: Seen
) -> None:
    words = small_run("data.val_set_size=0", "trainer.max_steps=2")
    folder = train_run(*words, *WORDS, "schedule.warmup_steps=0")
    assert not seen["validation"] and len(seen["newest"]) == 2
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name, weight in saved.items():
        key = name.replace(".weight", ".default.weight")
        mean = torch.stack([newest[key] for newest in seen["newest"]]).mean(dim=0)
        assert torch.allclose(weight, mean, rtol=1e-4, atol=1e-6), name


def test_weights_go_back_and_forth_and_other_optimizers_are_left_alone() -> None:
    for config in (ScheduleFreeConfig(), AdamWConfig(), MuonConfig()):
        model, ids = tiny_llama(), random_ids()
        optimizer = build_optimizer(model, config, FullConfig(), lr=1e-2, fused=False)
        for _ in range(3):
            use_training_weights(optimizer)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model.model.layers[0].mlp.up_proj.weight
        training = weight.detach().clone()
        use_averaged_weights(optimizer)
        averaged = weight.detach().clone()
        use_averaged_weights(optimizer)
        assert torch.equal(weight, averaged)
        assert torch.equal(training, averaged) is (config.name != "schedule_free")
        use_training_weights(optimizer)
        assert torch.allclose(weight, training, rtol=1e-5, atol=1e-6)
