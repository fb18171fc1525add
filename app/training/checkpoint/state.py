"""The state of a training as tensors by name and JSON, and back: bit for bit.

A weight goes by the base's name for it, and an optimizer's state by the weight it belongs to, never
by an index, so that other numbers of ranks, and other strategies, find it. Numbers go as JSON:
Python writes a float with as many digits as tell it from every other one.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.model.adapter import start_weights, trained_weights
from app.process.errors import UserError
from app.strategy.mixin import EVERYTHING_HERE, ShardedTensor, StateTensor, StrategyMixin
from app.training.algorithms import MuonWithAdamW
from app.training.checkpoint.documents import (
    MAX_LISTED,
    listed,
    printable,
)
from app.training.checkpoint.expected import bad_values, described, differences, expected_states


def progress_after(fit_loop: Any, step: int, accumulation: int) -> dict[str, Any]:
    """Return a state for `fit_loop`, a new one, as if `step` steps were done.

    Batches are counted from here on, as the loader does which begins at `step`; only their total,
    by which Lightning validates, is the whole run's.
    """
    state = copy.deepcopy(fit_loop.state_dict())
    num_batches = step * accumulation
    batches = state["epoch_loop.batch_progress"]["total"]
    batches.update(dict.fromkeys(batches, num_batches))
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    steps.update(dict.fromkeys(steps, step))
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    for epochs in (state["epoch_progress"]["total"], state["epoch_progress"]["current"]):
        epochs.update(ready=1, started=1)  # in the middle of the one epoch that a run is to it
    return state


Json = Any
"""what JSON can hold"""

COUNTED = ("train_mode", "k", "weight_sum", "lr_max")
"""what schedule-free AdamW counts in a parameter group; the rest of a group is what the settings
and the schedule say, and which kernel moves the weights, also after a resume"""
OTHER_RUN = (
    "go on with the settings that the checkpoint was made with (the run's config.yaml), or start "
    "anew with resume=never and another output.dir"
)


class StateError(UserError):
    """What is to be restored does not fit: `named` says of each tensor or key what is wrong."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        self.named = list(named)
        super().__init__(f"resume: {printable(name)} {what}" for name, what in self.named)


def weights_that_train(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return what trains, by the base's names; a tied weight comes once."""
    weights = trained_weights(model)
    by_name = {weight.name: weight.parameter for weight in weights}
    if len(by_name) < len(weights):
        raise ValueError("two weights that train have one name, a checkpoint would hold only one")
    return by_name


def model_state(
    model: torch.nn.Module, spread: StrategyMixin = EVERYTHING_HERE
) -> dict[str, StateTensor]:
    """Return what a checkpoint keeps of a model, not copied: what trains, and what PiSSA and OLoRA
    took out of its base to start from."""
    trained = {
        name: spread.kept_weight(weight) for name, weight in weights_that_train(model).items()
    }
    return trained | start_weights(model)


@torch.no_grad()
def restore_model(
    model: torch.nn.Module, saved: Mapping[str, Tensor], spread: StrategyMixin = EVERYTHING_HERE
) -> None:
    """Copy `model_state` into a model that was built anew.

    UserError where the model trains other weights, one that was saved is not finite, or its base is
    not as it was.
    """
    starts = start_weights(model)
    weights = weights_that_train(model)
    kept = {name: spread.kept_weight(weight) for name, weight in weights.items()}
    _check_same_weights(kept | starts, saved)
    for name, start in starts.items():
        _check_values(name, "", saved[name])
        if not torch.equal(start, saved[name].to(start.device)):
            raise UserError(
                f"resume: {name}, which adapter.init takes out of the base, came out another one "
                "than in the run that is resumed, and so did the base that trains; resume on the "
                "machine and with the number of threads (OMP_NUM_THREADS) of that run"
            )
    for name, weight in weights.items():
        _check_values(name, "", saved[name])
        spread.restore_weight(weight, saved[name])


def _check_same_weights(ours: Mapping[str, StateTensor], saved: Mapping[str, Tensor]) -> None:
    problems = []
    for what, names in (
        ("is missing in the checkpoint", sorted(ours.keys() - saved.keys())),
        (
            "is in the checkpoint, and this run does not train it",
            sorted(saved.keys() - ours.keys()),
        ),
    ):
        if names:
            problems.append((names[0], f"{what}{_and_more(names)}"))
    for name in sorted(ours.keys() & saved.keys()):
        here, there = described(ours[name]), described(saved[name])
        if here != there:
            problems.append((name, f"is {there} in the checkpoint, and {here} in this run"))
    if problems:
        raise StateError((name, f"{problem}; {OTHER_RUN}") for name, problem in problems)


def _check_values(name: str, key: str, value: Any, step: float = inf) -> None:
    """Look at a tensor's numbers just before they are used, so that a file is read once."""
    if (problem := bad_values(key, value, step)) is not None:
        raise StateError([(name, problem)])


def _and_more(names: list[str]) -> str:
    return f", and so are {len(names) - 1:,} more" if len(names) > 1 else ""


def optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    spread: StrategyMixin = EVERYTHING_HERE,
) -> tuple[dict[str, StateTensor], Json]:
    """Return an optimizer's tensors as `exp_avg/NAME OF THE WEIGHT`, not copied, and the rest."""
    tensors: dict[str, StateTensor] = {}
    numbers: dict[str, dict[str, Json]] = {}
    on_host = set()
    parts = _parts_of(optimizer)
    weights = weights_that_train(model)
    for name, weight in weights.items():
        for part in parts:
            for key, value in spread.kept_states(part, weight).items():
                if isinstance(value, (Tensor, ShardedTensor)):
                    tensors[f"{key}/{name}"] = value
                    # A count of AdamW's, or a paged moment.
                    if isinstance(value, Tensor) and value.device != weight.device:
                        on_host.add(key)
                else:
                    numbers.setdefault(name, {})[key] = value
    groups = [
        {key: group[key] for key in COUNTED if key in group} for group in optimizer.param_groups
    ]
    has_state = {*numbers, *(name.partition("/")[2] for name in tensors)}
    return tensors, {
        "class": type(optimizer).__name__,
        "groups": [
            {"name": group["name"]} | kept
            for group, kept in zip(optimizer.param_groups, groups, strict=True)
        ],
        "numbers": numbers,
        "on_host": sorted(on_host),
        "without_state": [name for name in weights if name not in has_state],
    }


def restore_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    document: Json,
    spread: StrategyMixin = EVERYTHING_HERE,
    *,
    step: float = inf,
) -> None:
    """Give a new optimizer the state that `optimizer_state` returned.

    Settings and kernels stay those of its build. `step`: of the checkpoint. UserError where it is
    another optimizer's state, lacks a part or has one too many, or is not finite.
    """
    # Not by load_state_dict: it goes by index, rounds to the weights' dtype, and some keep a table.
    _check_same_optimizer(optimizer, document)
    _check_states(model, optimizer, tensors, document, spread)
    for group, saved in zip(optimizer.param_groups, document["groups"], strict=True):
        group.update({key: saved[key] for key in COUNTED if key in saved and key in group})
    home = {
        weight: (part, group)
        for part in _parts_of(optimizer)
        for group, weights in zip(part.param_groups, spread.weights_by_group(part), strict=True)
        for weight in weights
    }
    weights = weights_that_train(model)
    for name, numbers in document["numbers"].items():
        weight = weights[name]
        for key, number in numbers.items():
            _check_values(f"optimizer.numbers.{name}.{key}", key, number, step)
        home[weight][0].state[weight].update(numbers)
    by_weight = _by_weight(tensors)
    for name, weight in weights.items():  # in the model's order: ranks may have to do it together
        if name in by_weight:
            for key, value in by_weight[name].items():
                _check_values(f"{key}/{name}", key, value, step)
            part, group = home[weight]
            room = partial(_room, part, group, weight, document["on_host"])
            spread.restore_states(part, weight, by_weight[name], room)


def _by_weight(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    by_weight: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        by_weight.setdefault(name, {})[key] = value
    return by_weight


def _check_states(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    document: Json,
    spread: StrategyMixin,
) -> None:
    """Compare what was saved with what the optimizer keeps, by names, shapes and dtypes alone."""
    by_weight, numbers = _by_weight(tensors), document["numbers"]
    without = set(document.get("without_state", ()))
    asked: dict[Any, Mapping[str, Any]] = {}
    problems = list(_uncounted(optimizer, document["groups"]))
    weights = weights_that_train(model)
    names = {weight: name for name, weight in weights.items()}
    for part in _parts_of(optimizer):
        for group, members in zip(part.param_groups, spread.weights_by_group(part), strict=True):
            for weight in members:
                name = names[weight]
                saved = by_weight.pop(name, {}) | numbers.get(name, {})
                if not saved and name in without:
                    continue
                shape, dtype = spread.kept_weight(weight).shape, spread.stepped_dtype(weight)
                kind = id(group), shape, dtype
                if kind not in asked:
                    asked[kind] = expected_states(part, group, shape, dtype)
                problems += differences(asked[kind], saved, name)
    problems += [
        (f"{key}/{name}", "is of no weight that this run trains")
        for name, states in [*by_weight.items(), *_of_others(numbers, weights).items()]
        for key in states
    ]
    if problems:
        more = len(problems) - MAX_LISTED
        raise StateError([*problems[:MAX_LISTED], *_and_others(more)])


def _of_others(numbers: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: states for name, states in numbers.items() if name not in weights}


def _and_others(more: int) -> list[tuple[str, str]]:
    return [(f"{more:,} other states", "are wrong, too")] if more > 0 else []


def _uncounted(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Say what an optimizer counts in its groups, and was not saved."""
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key in COUNTED:
            if key in group and key not in saved:
                yield f"optimizer.groups[{index}].{key}", "is missing"


def _room(
    part: Any,
    group: Mapping[str, Any],
    weight: torch.nn.Parameter,
    on_host: Iterable[str],
    key: str,
    value: Tensor,
) -> Tensor:
    if type(part).__name__ == "AdamW8bit":
        # Imported where it is used: bitsandbytes takes seconds.
        from app.training.eight_bit import MOMENTS

        if key in MOMENTS:  # paged where the optimizer would page it
            room: Tensor = part.get_state_buffer(weight, dtype=value.dtype)
            return room
    if key == "step":  # a kernel reads its count where the weights are, any other on the host
        is_on_host = not (group.get("fused") or group.get("capturable"))
    else:
        is_on_host = key in on_host
    return torch.empty_like(value, device=torch.device("cpu") if is_on_host else weight.device)


def _parts_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)


def _check_same_optimizer(optimizer: torch.optim.Optimizer, document: Json) -> None:
    there = [document["class"], *(group["name"] for group in document["groups"])]
    here = [type(optimizer).__name__, *(group["name"] for group in optimizer.param_groups)]
    if here != there:
        raise UserError(
            f"resume: the checkpoint's optimizer is {printable(there[0])} with the groups "
            f"{listed(there[1:])}, this run's {here[0]} with {', '.join(here[1:])}; {OTHER_RUN}"
        )


def restore_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Move a new schedule to where `step` optimizer steps have brought it.

    It is a pure function of the step: only that is kept, and the rate follows.
    """
    factors = [factor(step) for factor in schedule.lr_lambdas]
    rates = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
    schedule.load_state_dict(
        schedule.state_dict() | {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    )
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def random_state(device: torch.device) -> Json:
    """Return the state of every random generator of this rank."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": _as_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _as_text(torch.cuda.get_rng_state(device))
    return state


def check_random_state(state: Json, device: torch.device) -> None:
    """Try the parts of a random state that only torch can read; StateError where it cannot."""
    devices = {"torch": torch.device("cpu")} | ({"cuda": device} if device.type == "cuda" else {})
    for key, place in devices.items():
        if key not in state:
            continue
        generator = torch.Generator(place)
        saved, size = _as_tensor(state[key]), len(generator.get_state())
        try:
            generator.set_state(saved)
        except RuntimeError as error:
            seen = f"is of {len(saved):,} bytes; expected {size:,}"
            reason = seen if len(saved) != size else f"is not a state of its generator ({error})"
            raise StateError([(key, reason)]) from None


def restore_random_state(state: Json, device: torch.device) -> None:
    """Put this rank's random generators back to `random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_as_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_as_tensor(state["cuda"]), device)


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _as_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
