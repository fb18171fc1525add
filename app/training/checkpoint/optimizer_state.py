"""An optimizer's state as tensors by name and JSON, checked and restored bit for bit.

A state goes by the name of its weight, never by an index, so that another number of ranks or
another strategy finds it. What a state must be is learned from the optimizer itself: a twin of the
same class and options steps a weight on `meta`, and its state has the expected names, shapes and
dtypes. Values are checked as they are read, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from app.process.errors import UserError
from app.strategy.mixin import REPLICATED, ShardedTensor, StateTensor, StrategyMixin
from app.training.algorithms import MuonWithAdamW
from app.training.checkpoint.documents import MAX_LISTED
from app.training.checkpoint.schema import Json, listed, printable, shown
from app.training.checkpoint.state import (
    OTHER_RUN,
    StateError,
    check_finite_values,
    describe_tensor,
    trainable_parameters,
    value_range,
)

GROUP_KEYS = ("train_mode", "k", "weight_sum", "lr_max")
"""what schedule-free AdamW counts in a parameter group; everything else in a group comes from the
settings and the schedule, also after a resume"""
META_OPTIONS = {"fused": False, "foreach": False, "capturable": False, "train_mode": True}
"""options of a group with which an optimizer can step a weight on `meta`"""
STEP = "step"
NON_NEGATIVE = (
    *(STEP, "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"),
    *("state2", "qmap2", "absmax1", "absmax2"),  # AdamW8bit's, also of weights kept in fp32
)
"""step counts, second moments, and the scales of quantized moments"""


def optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: StrategyMixin = REPLICATED,
) -> tuple[dict[str, StateTensor], Json]:
    """Return an optimizer's tensors as `exp_avg/WEIGHT NAME`, not copied, and the rest as JSON."""
    tensors: dict[str, StateTensor] = {}
    numbers: dict[str, dict[str, Json]] = {}
    on_host = set()
    parts = _parts_of(optimizer)
    weights = trainable_parameters(model)
    for name, weight in weights.items():
        for part in parts:
            for key, value in strategy.optimizer_state_of(part, weight).items():
                if isinstance(value, (Tensor, ShardedTensor)):
                    tensors[f"{key}/{name}"] = value
                    # AdamW's step, or a paged moment.
                    if isinstance(value, Tensor) and value.device != weight.device:
                        on_host.add(key)
                else:
                    numbers.setdefault(name, {})[key] = value
    has_state = {*numbers, *(name.partition("/")[2] for name in tensors)}
    return tensors, {
        "class": type(optimizer).__name__,
        "groups": [
            {"name": group["name"]} | {key: group[key] for key in GROUP_KEYS if key in group}
            for group in optimizer.param_groups
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
    strategy: StrategyMixin = REPLICATED,
    *,
    step: float = inf,
) -> None:
    """Restore what `optimizer_state` returned into a new optimizer, whose settings stay.

    `step`: the checkpoint's. UserError if the state is of another optimizer, is incomplete, has
    unexpected parts, or is not finite.
    """
    # Not by load_state_dict: it goes by index, and casts to the weights' dtype.
    _check_same_optimizer(optimizer, document)
    _check_states(model, optimizer, tensors, document, strategy)
    for group, saved in zip(optimizer.param_groups, document["groups"], strict=True):
        group.update({key: saved[key] for key in GROUP_KEYS if key in saved and key in group})
    owner = {
        weight: (part, group)
        for part in _parts_of(optimizer)
        for group, weights in zip(part.param_groups, strategy.weights_by_group(part), strict=True)
        for weight in weights
    }
    weights = trainable_parameters(model)
    for name, numbers in document["numbers"].items():
        weight = weights[name]
        for key, number in numbers.items():
            _check_values(f"optimizer.numbers.{name}.{key}", key, number, step)
        owner[weight][0].state[weight].update(numbers)
    states = _by_weight(tensors)
    for name, weight in weights.items():  # in the model's order: ranks may have to do it together
        if name in states:
            for key, value in states[name].items():
                _check_values(f"{key}/{name}", key, value, step)
            part, group = owner[weight]
            allocate = partial(_allocate, part, group, weight, document["on_host"])
            strategy.restore_optimizer_state(part, weight, states[name], allocate)


def _allocate(
    part: Any,
    group: Mapping[str, Any],
    weight: torch.nn.Parameter,
    on_host: Iterable[str],
    key: str,
    value: Tensor,
) -> Tensor:
    """Make an empty tensor like `value` on the device where the optimizer keeps it."""
    if type(part).__name__ == "AdamW8bit":
        # Imported where it is used: bitsandbytes takes seconds.
        from app.training.eight_bit import MOMENTS

        if key in MOMENTS:  # paged where the optimizer would page it
            buffer: Tensor = part.get_state_buffer(weight, dtype=value.dtype)
            return buffer
    if key == STEP:  # fused kernels read the step on the weights' device, all others on the host
        is_on_host = not (group.get("fused") or group.get("capturable"))
    else:
        is_on_host = key in on_host
    return torch.empty_like(value, device=torch.device("cpu") if is_on_host else weight.device)


def _parts_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)


def _by_weight(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    by_weight: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        by_weight.setdefault(name, {})[key] = value
    return by_weight


def _check_same_optimizer(optimizer: torch.optim.Optimizer, document: Json) -> None:
    there = [document["class"], *(group["name"] for group in document["groups"])]
    here = [type(optimizer).__name__, *(group["name"] for group in optimizer.param_groups)]
    if here != there:
        raise UserError(
            f"resume: the checkpoint's optimizer is {printable(there[0])} with the groups "
            f"{listed(there[1:])}, this run's {here[0]} with {', '.join(here[1:])}; {OTHER_RUN}"
        )


def _check_states(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    document: Json,
    strategy: StrategyMixin,
) -> None:
    """Compare names, shapes and dtypes with the optimizer's; StateError where they differ."""
    saved_tensors, numbers = _by_weight(tensors), document["numbers"]
    without_state = set(document.get("without_state", ()))
    expected: dict[Any, Mapping[str, Any]] = {}
    problems = list(_missing_group_keys(optimizer, document["groups"]))
    weights = trainable_parameters(model)
    names = {weight: name for name, weight in weights.items()}
    for part in _parts_of(optimizer):
        for group, members in zip(part.param_groups, strategy.weights_by_group(part), strict=True):
            for weight in members:
                name = names[weight]
                saved = saved_tensors.pop(name, {}) | numbers.get(name, {})
                if not saved and name in without_state:
                    continue
                shape, dtype = strategy.weight_state(weight).shape, strategy.optimizer_dtype(weight)
                kind = id(group), shape, dtype
                if kind not in expected:
                    expected[kind] = _expected_state(part, group, shape, dtype)
                problems += _differences(expected[kind], saved, name)
    unknown = {name: states for name, states in numbers.items() if name not in weights}
    problems += [
        (f"{key}/{name}", "belongs to no trainable parameter of this run")
        for name, states in [*saved_tensors.items(), *unknown.items()]
        for key in states
    ]
    if (more := len(problems) - MAX_LISTED) > 0:
        problems = [*problems[:MAX_LISTED], (f"{more:,} other states", "are wrong, too")]
    if problems:
        raise StateError(problems)


def _missing_group_keys(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key in GROUP_KEYS:
            if key in group and key not in saved:
                yield f"optimizer.groups[{index}].{key}", "is missing"


def _expected_state(
    part: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the state of a weight of `group` after one step: tensors on `meta`, numbers."""
    weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    weight.grad = torch.empty_like(weight)
    options = {key: value for key, value in META_OPTIONS.items() if key in group}
    build: Any = type(part)
    twin = build([{**group, **options, "params": [weight]}])
    if build.__name__ == "AdamW8bit":  # its kernels have no `meta` implementation
        twin.init_state(twin.param_groups[0], weight, 0, 0)
    else:
        twin.step()
    return dict(twin.state[weight])


def _differences(
    expected: Mapping[str, Any], saved: Mapping[str, Any], name: str
) -> Iterator[tuple[str, str]]:
    """Yield the tensors of weight `name` that are not as expected, each with what is wrong."""
    for key in expected.keys() - saved.keys():
        yield f"{key}/{name}", "is missing"
    for key in saved.keys() - expected.keys():
        keys = ", ".join(sorted(expected)) or "nothing"
        yield f"{key}/{name}", f"is not a state of the optimizer, which keeps {keys}"
    for key in expected.keys() & saved.keys():
        wanted, found = describe_tensor(expected[key]), describe_tensor(saved[key])
        if wanted != found:
            yield f"{key}/{name}", f"is {found}; expected {wanted}"


def _check_values(name: str, key: str, value: Any, step: float) -> None:
    """Check a state's values just before they are used, so that a file is read once."""
    check_finite_values(name, value)
    least, largest = value_range(value)
    if least < 0 and key in NON_NEGATIVE:
        raise StateError([(name, f"holds {least}; expected no number below 0")])
    if key == STEP and not (largest <= step and isfinite(largest) and largest == int(largest)):
        wanted = f"expected a whole number up to {step}, the checkpoint's step"
        raise StateError([(name, f"is {shown(largest)}; {wanted}")])
