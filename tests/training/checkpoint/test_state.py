"""The state of a training as tensors by name and JSON: what comes back is every bit of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config.verbs import PARTS
from app.model.adapter import FullConfig, LoraConfig, apply_adapter
from app.training.algorithms import use_averaged_weights, use_training_weights
from app.training.checkpoint.checkpoint import read_tensors, write_tensors
from app.training.checkpoint.documents import unusable_checkpoint
from app.training.checkpoint.state import (
    model_state,
    optimizer_state,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
    restore_schedule,
)
from app.training.optimizers import (
    AdamWConfig,
    MuonConfig,
    ScheduleConfig,
    build_optimizer,
    build_schedule,
)
from common.errors import UserError
from tests.tiny import random_ids, tiny_llama

OPTIMIZERS = [schema() for schema in PARTS["optimizer"].values()]
every_optimizer = pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: config.name)
WIDE = {"intermediate_size": 160}
LORA = LoraConfig(r=32, dropout=0.0, target_modules=["gate_proj", "up_proj", "down_proj"])
"""matrices of more than 4096 numbers, which are kept in 8 bits"""


class Training:
    """A model, its optimizer and its schedule, of steps on random rows."""

    def __init__(self, config: Any, adapter: Any, *, seed: int = 0, dtype: Any = torch.float32):
        model = tiny_llama(seed=seed, **WIDE).to(dtype)
        self.model = apply_adapter(model, adapter, half_precision=dtype != torch.float32)
        self.model.train()
        self.optimizer = build_optimizer(self.model, config, adapter, lr=1e-2, fused=True)
        self.schedule = build_schedule(self.optimizer, ScheduleConfig(warmup_steps=2), 8)

    def take_steps(self, seeds: range) -> None:
        for seed in seeds:
            use_training_weights(self.optimizer)
            ids = random_ids(2).roll(seed, 1)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, folder: Path) -> None:
        tensors, document = optimizer_state(self.model, self.optimizer)
        write_tensors(folder / "model", model_state(self.model))
        write_tensors(folder / "optimizer", tensors)
        (folder / "document").write_text(json.dumps(document))

    def restore(self, folder: Path, step: int) -> None:
        restore_model(self.model, read_tensors(folder / "model"))
        document = json.loads((folder / "document").read_text())
        restore_optimizer(self.model, self.optimizer, read_tensors(folder / "optimizer"), document)
        restore_schedule(self.schedule, step)


def check_same(one: Training, other: Training) -> None:
    states = [model_state(each.model) for each in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    (tensors, document), (others, other_document) = (
        optimizer_state(each.model, each.optimizer) for each in (one, other)
    )
    assert tensors.keys() == others.keys() and tensors
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]) and tensor.dtype == others[name].dtype, name
    assert document == other_document
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (one, other)]
    assert rates[0] == rates[1]


@every_optimizer
@pytest.mark.parametrize(
    ("adapter", "dtype"),
    [
        pytest.param(LORA, torch.float32, id="lora-fp32"),
        pytest.param(FullConfig(), torch.bfloat16, id="full-bf16"),
    ],
)
def test_a_restored_training_goes_on_as_the_one_that_never_stopped(
    tmp_path: Path, config: Any, adapter: Any, dtype: torch.dtype
) -> None:
    whole = Training(config, adapter, dtype=dtype)
    whole.take_steps(range(3))
    whole.save(tmp_path)
    resumed = Training(config, adapter, seed=0, dtype=dtype)
    with torch.no_grad():
        for weight in resumed.model.parameters():
            if weight.requires_grad:
                weight.add_(1.0)
    resumed.restore(tmp_path, 3)
    check_same(whole, resumed)
    for training in (whole, resumed):
        training.take_steps(range(3, 6))
        use_averaged_weights(training.optimizer)
    check_same(whole, resumed)


def test_names_are_the_base_s_own_and_tied_weights_come_once(tmp_path: Path) -> None:
    training = Training(AdamWConfig(), FullConfig())
    training.take_steps(range(1))
    names = set(model_state(training.model))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    tensors, _ = optimizer_state(training.model, training.optimizer)
    assert set(tensors) == {
        f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in names
    }
    adapted = Training(AdamWConfig(), LoraConfig(r=4))
    names = set(model_state(adapted.model))
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert all(".lora_" in name for name in names)


def test_every_generator_goes_on_where_it_was() -> None:
    def draw() -> list[float]:
        drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        return [*drawn, float(torch.rand(())), float(torch.randn(()))]

    draw()  # a gauss that is kept for the next call is state, too
    state = json.loads(json.dumps(random_state(torch.device("cpu"))))
    expected = draw()
    draw()
    restore_random_state(state, torch.device("cpu"))
    assert draw() == expected


def test_another_model_s_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    saved = model_state(Training(AdamWConfig(), LoraConfig(r=4)).model)
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight is float32 \[4, 32\] in"):
        restore_model(Training(AdamWConfig(), LoraConfig(r=8)).model, saved)
    with pytest.raises(UserError, match=r"model.embed_tokens.weight is missing .* more"):
        restore_model(Training(AdamWConfig(), FullConfig()).model, saved)
    one = LoraConfig(r=4, target_modules=["q_proj"])
    with pytest.raises(UserError, match="but not trained in this run") as caught:
        restore_model(Training(AdamWConfig(), one).model, saved)
    (tmp_path / "step-2").mkdir()
    message = str(unusable_checkpoint(tmp_path / "step-2", caught.value.problems))
    assert message.count("start a new run with resume=never") == 1


def test_another_optimizer_s_state_is_refused() -> None:
    training = Training(MuonConfig(), FullConfig())
    training.take_steps(range(1))
    tensors, document = optimizer_state(training.model, training.optimizer)
    other = Training(AdamWConfig(), FullConfig())
    with pytest.raises(UserError, match=r"optimizer is MuonWithAdamW .* this run is AdamW"):
        restore_optimizer(other.model, other.optimizer, tensors, document)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_base_that_gave_its_start_away_is_the_same_again_or_refused(init: str) -> None:
    config = LoraConfig(r=4, init=init)
    training = Training(AdamWConfig(), config)
    saved = model_state(training.model)
    assert any(name.endswith("lora_A_at_start") for name in saved)
    again = Training(AdamWConfig(), config)
    restore_model(again.model, saved)
    weights = dict(training.model.named_parameters())
    for name, weight in again.model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    other = {name: tensor.clone() for name, tensor in saved.items()}
    next(t for name, t in other.items() if name.endswith("at_start")).mul_(-1)
    with pytest.raises(UserError, match="differs from that of the resumed run"):
        restore_model(again.model, other)


@every_optimizer
def test_settings_and_kernels_are_those_of_the_new_build(tmp_path: Path, config: Any) -> None:
    whole = Training(config, FullConfig())
    whole.take_steps(range(2))
    whole.save(tmp_path)
    document = json.loads((tmp_path / "document").read_text())
    other = Training(config, FullConfig())
    for group, saved in zip(other.optimizer.param_groups, document["groups"], strict=True):
        if "fused" in group:
            group["fused"] = False
        if "betas" in group:
            group["betas"] = (0.5, 0.75)
        group["newer_torch"] = True
        # As checkpoints had it, and another torch would have it.
        saved |= {"fused": True, "foreach": True, "betas": [0.9, 0.999], "older_torch": 1}
    (tmp_path / "document").write_text(json.dumps(document))
    built = [dict(group) for group in other.optimizer.param_groups]
    other.restore(tmp_path, 2)
    counted = {"lr", "train_mode", "k", "weight_sum", "lr_max"}
    for group, before in zip(other.optimizer.param_groups, built, strict=True):
        assert group.keys() == before.keys()
        assert all(group[key] is before[key] for key in group.keys() - counted)


@pytest.mark.parametrize("fused", [True, False])
def test_a_count_of_steps_is_put_where_its_kernel_reads_it(tmp_path: Path, fused: bool) -> None:
    whole = Training(AdamWConfig(), FullConfig())
    whole.take_steps(range(1))
    tensors, document = optimizer_state(whole.model, whole.optimizer)
    # As a GPU leaves it to the other kernel.
    document["on_host"] = ["step"] if fused else []
    model = whole.model.to("meta")
    model.tie_weights()  # which the move has undone
    optimizer = build_optimizer(model, AdamWConfig(), FullConfig(), lr=1e-2, fused=False)
    for group in optimizer.param_groups:
        group["fused"] = fused
    restore_optimizer(model, optimizer, tensors, document)
    for state in optimizer.state.values():
        assert state["step"].device.type == ("meta" if fused else "cpu")
        assert state["exp_avg"].device.type == "meta"


def step_with_equal_gradients(model: Any, optimizer: Any) -> None:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()


def resume_on_gpu(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    """Take a step with the first model and optimizer, and go on with the second."""
    (model, optimizer), (other, restored) = first, second
    step_with_equal_gradients(model, optimizer)
    tensors, document = optimizer_state(model, optimizer)
    restore_model(other, model_state(model))
    restore_optimizer(other, restored, tensors, json.loads(json.dumps(document)))


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_the_other_kernel_of_a_gpu_goes_on_with_the_same_moments(fused: bool) -> None:
    def build(fused: bool) -> tuple[Any, Any]:
        model = tiny_llama().cuda()
        return model, build_optimizer(model, AdamWConfig(), FullConfig(), lr=1e-2, fused=fused)

    first, second = build(not fused), build(fused)
    resume_on_gpu(first, second)
    for model, optimizer in (first, second):
        step_with_equal_gradients(model, optimizer)
    for weight, expected in zip(second[0].parameters(), first[0].parameters(), strict=True):
        torch.testing.assert_close(weight, expected)
    assert {int(state["step"]) for state in second[1].state.values()} == {2}


@pytest.mark.gpu
def test_moments_that_are_paged_are_paged_again() -> None:
    config = PARTS["optimizer"]["paged_adamw8bit"]()

    def build() -> tuple[Any, Any]:
        model = tiny_llama(hidden_size=256, intermediate_size=512).cuda()  # pages from 1e5 numbers
        return model, build_optimizer(model, config, FullConfig(), lr=1e-2, fused=True)

    first, second = build(), build()
    resume_on_gpu(first, second)
    paged = [
        sum(getattr(state["state1"], "is_paged", False) for state in optimizer.state.values())
        for _, optimizer in (first, second)
    ]
    assert paged[0] == paged[1] > 0
    for model, optimizer in (first, second):
        step_with_equal_gradients(model, optimizer)
    for weight, expected in zip(second[0].parameters(), first[0].parameters(), strict=True):
        assert torch.equal(weight, expected)
