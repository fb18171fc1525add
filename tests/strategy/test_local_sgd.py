"""Local SGD trains as plain loops with explicit averages, on nodes with one rank and with two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from app.process.launch import free_port
from app.strategy.mixin import local
from app.strategy.settings import LocalSgdConfig
from app.training.checkpoint.state import model_state, optimizer_state, trainable_parameters
from tests.ranks import on_ranks
from tests.strategy.fsdp_training import (
    CLIP,
    ROWS,
    build_sharded_model,
    compute_loss,
    make_batch,
    make_optimizer,
    model_builder,
)

pytestmark = pytest.mark.slow

NODES, STEPS, MICRO_BATCHES = 2, 5, 2
PLAIN = LocalSgdConfig(replicas=NODES, sync_every_steps=3, synchronous_steps=1)
OUTER = LocalSgdConfig(
    replicas=NODES, sync_every_steps=2, synchronous_steps=0, outer_lr=0.7, outer_momentum=0.9
)


def train_on_rank(config: LocalSgdConfig, kind: str) -> dict[str, Any]:
    """Take the steps of a rank as the trainer does; return its figures and tensors."""
    strategy, model = build_sharded_model(config, model_builder(kind))
    trainer = SimpleNamespace(global_step=0)
    strategy._lightning_module = SimpleNamespace(trainer=trainer, total_steps=STEPS)
    weights, optimizer = trainable_parameters(model), make_optimizer(model)
    optimizer.param_groups[0]["name"] = "all"
    share = strategy.num_data_ranks * config.sites
    place = strategy.num_data_ranks * (config.site - 1) + strategy.data_rank
    strategy._step_weight = 1.0  # of equally many tokens on every site
    found: dict[str, Any] = {"norms": [], "validations": [], "kept": []}
    for step in range(STEPS):
        ids, loss_weights = make_batch(step)
        parts = torch.arange(ROWS).view(MICRO_BATCHES, share, -1)[:, place]
        for number, part in enumerate(parts):
            waits = number < MICRO_BATCHES - 1
            with strategy.accumulating() if waits else nullcontext():
                (compute_loss(model, ids[part], loss_weights[part]) * share).backward()
        found["norms"].append(strategy.clip(optimizer, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        strategy.end_step(step + 1, is_last=step + 1 == STEPS)
        trainer.global_step = step + 1
        strategy.load_averaged_weights()
        with torch.no_grad():
            found["validations"].append(compute_loss(model.eval(), ids, loss_weights).item())
        model.train()
        strategy.load_local_weights()
        tensors = model_state(model, strategy) | optimizer_state(model, optimizer, strategy)[0]
        whole = {
            name: t.clone() if isinstance(t, Tensor) else t.gather() for name, t in tensors.items()
        }
        found["kept"].append(whole)
        found["differ"] = strategy._weights_differ
    found["weights"] = {name: strategy.full_tensor(w).clone() for name, w in weights.items()}
    dist.barrier()
    return found


def train_by_hand(config: LocalSgdConfig, kind: str, num_ranks: int) -> dict[str, Any]:
    """Take the same steps in one process, with one model per node."""
    models = [model_builder(kind)() for _ in range(NODES)]
    optimizers = [make_optimizer(model) for model in models]
    weights = [trainable_parameters(model) for model in models]
    names = list(weights[0])
    anchor = [weights[0][name].detach().clone().requires_grad_() for name in names]
    outer = torch.optim.SGD(
        anchor, config.outer_lr, config.outer_momentum, nesterov=config.outer_momentum > 0
    )
    found: dict[str, Any] = {"norms": [], "validations": [], "kept": []}
    for step in range(STEPS):
        ids, loss_weights = make_batch(step)
        parts = torch.arange(ROWS).view(MICRO_BATCHES, NODES, num_ranks // NODES, -1)
        for node, model in enumerate(models):
            part = parts[:, node].flatten()
            (compute_loss(model, ids[part], loss_weights[part]) * NODES).backward()
        if step < config.synchronous_steps:
            for name in names:
                mean = torch.stack([own[name].grad for own in weights]).mean(0)
                for own in weights:
                    own[name].grad = mean.clone()
        norms = [torch.nn.utils.clip_grad_norm_(list(own.values()), CLIP) for own in weights]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        meets = (done - config.synchronous_steps) % config.sync_every_steps == 0
        mean_of = {name: mean_weight([own[name] for own in weights]) for name in names}
        if done <= config.synchronous_steps:
            for name, start in zip(names, anchor, strict=True):
                start.data.copy_(mean_of[name])
        elif meets or done == STEPS:
            for name, start in zip(names, anchor, strict=True):
                start.grad = start.detach() - mean_of[name]
            outer.step()
            mean_of = {
                name: start.detach().clone() for name, start in zip(names, anchor, strict=True)
            }
            for own in weights:
                for name in names:
                    own[name].data.copy_(mean_of[name])
        kept = dict(mean_of)
        for key in ("exp_avg", "exp_avg_sq"):
            for name in names:
                states = [o.state[w[name]][key] for o, w in zip(optimizers, weights, strict=True)]
                kept[f"{key}/{name}"] = mean_weight(states)
        held = [weight.detach().clone() for weight in weights[0].values()]
        for name in names:
            weights[0][name].data.copy_(mean_of[name])
        with torch.no_grad():
            found["validations"].append(compute_loss(models[0].eval(), ids, loss_weights).item())
        models[0].train()
        for name, own in zip(names, held, strict=True):
            weights[0][name].data.copy_(own)
        found["norms"].append([norm.item() for norm in norms])
        found["kept"].append(kept)
    found["weights"] = {name: weight.detach() for name, weight in weights[0].items()}
    return found


def test_sites_train_as_nodes_on_the_same_rows() -> None:
    address = f"127.0.0.1:{free_port()}"
    configs = [replace(OUTER, replicas=1, sites=2, site=n, site_address=address) for n in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        sites = pool.map(lambda config: on_ranks(1, train_on_rank, config, "lora")[0], configs)
        first, second = (site["weights"] for site in sites)
    expected = on_ranks(2, train_on_rank, OUTER, "lora")[0]["weights"]
    for name, weight in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, atol=1e-6, rtol=1e-6)


def mean_weight(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).mean(0)


@pytest.mark.parametrize(("num_ranks", "config", "kind"), [(2, PLAIN, "full"), (4, OUTER, "lora")])
def test_nodes_train_as_plain_loops(num_ranks: int, config: LocalSgdConfig, kind: str) -> None:
    answers = on_ranks(num_ranks, train_on_rank, config, kind)
    alone = train_by_hand(config, kind, num_ranks)
    for rank, answer in enumerate(answers):
        node = rank // (num_ranks // NODES)
        norms = [of_nodes[node] for of_nodes in alone["norms"]]
        assert answer["norms"] == pytest.approx(norms, rel=1e-4)
        assert answer["validations"] == pytest.approx(alone["validations"], abs=1e-5)
        assert not answer["differ"]  # the last step synchronises
        for weight, value in alone["weights"].items():
            torch.testing.assert_close(answer["weights"][weight], value, atol=1e-4, rtol=1e-4)
            assert torch.equal(answer["weights"][weight], answers[0]["weights"][weight])
        for step, kept in enumerate(alone["kept"]):
            for name, value in kept.items():
                found = answer["kept"][step][name]
                torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-4, msg=f"{step} {name}")
                assert torch.equal(found, answers[0]["kept"][step][name])


def state_between_averages(config: LocalSgdConfig) -> dict[str, Any]:
    """Take a synchronous and an independent step; return this rank's local state."""
    strategy, _, optimizer = after_first_step(config)
    strategy._lightning_module.trainer.global_step = 1
    strategy.clip(optimizer, CLIP)
    return {name: value.clone() for name, value in strategy.local_state(optimizer).items()}


def after_first_step(config: LocalSgdConfig) -> tuple[Any, Any, Any]:
    strategy, model = build_sharded_model(config, model_builder("full"))
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(global_step=0))
    optimizer = make_optimizer(model)
    ids, loss_weights = make_batch(0)
    compute_loss(model, ids, loss_weights).backward()
    strategy.clip(optimizer, CLIP)
    optimizer.step()
    return strategy, model, optimizer


def continue_training(config: LocalSgdConfig, own: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Restore `own` between two averages; return whether nothing changed, and this rank's state."""
    strategy, model, optimizer = after_first_step(config)
    before = [local(weight.detach()).clone() for weight in model.parameters()]
    strategy._lightning_module.trainer.global_step = 2
    strategy.restore_local_state(optimizer, own)
    after = [local(weight.detach()) for weight in model.parameters()]
    return all(map(torch.equal, before, after)), strategy.local_state(optimizer)


def restore_states() -> list[bool]:
    """Return for each state whether it was left out; the last is this rank's own."""
    saved = state_between_averages(PLAIN)
    of_topk = {"unsent/lm_head.weight": torch.zeros(9)}
    states = [
        (PLAIN, of_topk),
        (replace(PLAIN, replicas=4), saved),
        (PLAIN, {} if dist.get_rank() == 0 else saved),  # the file of one rank is missing
    ]
    left_out = []
    for config, state in states:
        starts_from_mean, kept = continue_training(config, state)
        left_out.append(starts_from_mean and not kept)
    moved = {name: value + 1 for name, value in saved.items()}
    starts_from_mean, kept = continue_training(PLAIN, moved)
    assert kept.keys() == moved.keys() and not starts_from_mean
    left_out.append(any(not torch.equal(kept[name], moved[name]) for name in moved))
    dist.barrier()
    return left_out


def test_state_of_other_ranks_or_strategies_is_not_restored() -> None:
    """State of top-k, of groups of another size, and with the file of one rank missing."""
    assert on_ranks(4, restore_states) == [[True, True, True, False]] * 4
