"""The state of a model, its schedule, its loop and its random generators, restored bit for bit.

Weights go by the base's names for them, so that another number of ranks or another strategy finds
them. Numbers go as JSON: Python writes a float with all the digits that it takes.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.model.adapter import initial_weights, trainable_weights
from app.process.errors import UserError
from app.strategy.mixin import REPLICATED, StateTensor, StrategyMixin
from app.training.checkpoint.schema import Json, printable

OTHER_RUN = (
    "resume with the settings that the checkpoint was made with (the run's config.yaml), or start "
    "anew with resume=never and another output.dir"
)


class StateError(UserError):
    """A saved state does not fit this run: `named` has each tensor or key and what is wrong."""

    def __init__(self, named: Iterable[tuple[str, str]]) -> None:
        self.named = list(named)
        super().__init__(f"resume: {printable(name)} {what}" for name, what in self.named)


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by the base's names; a tied weight comes once."""
    weights = trainable_weights(model)
    by_name = {weight.name: weight.parameter for weight in weights}
    if len(by_name) < len(weights):
        raise ValueError("two trainable parameters have one name, a checkpoint would hold only one")
    return by_name


def model_state(
    model: torch.nn.Module, strategy: StrategyMixin = REPLICATED
) -> dict[str, StateTensor]:
    """Return what a checkpoint holds of a model, not copied.

    That is the trainable parameters, and the start weights that PiSSA and OLoRA took out of the
    base.
    """
    weights = trainable_parameters(model)
    trained = {name: strategy.weight_state(weight) for name, weight in weights.items()}
    return trained | initial_weights(model)


@torch.no_grad()
def restore_model(
    model: torch.nn.Module, saved: Mapping[str, Tensor], strategy: StrategyMixin = REPLICATED
) -> None:
    """Copy `model_state` into a model that was built anew.

    UserError if other weights are trainable, a saved one is not finite, or the base differs.
    """
    starts = initial_weights(model)
    weights = trainable_parameters(model)
    own = {name: strategy.weight_state(weight) for name, weight in weights.items()}
    _check_same_weights(own | starts, saved)
    for name, start in starts.items():
        check_finite_values(name, saved[name])
        if not torch.equal(start, saved[name].to(start.device)):
            raise UserError(
                f"resume: {name}, which adapter.init takes out of the base, came out another one "
                "than in the run that is resumed, and so did the base that trains; resume on the "
                "machine and with the number of threads (OMP_NUM_THREADS) of that run"
            )
    for name, weight in weights.items():
        check_finite_values(name, saved[name])
        strategy.restore_weight(weight, saved[name])


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
            more = f", and so are {len(names) - 1:,} more" if len(names) > 1 else ""
            problems.append((names[0], f"{what}{more}"))
    for name in sorted(ours.keys() & saved.keys()):
        here, there = describe_tensor(ours[name]), describe_tensor(saved[name])
        if here != there:
            problems.append((name, f"is {there} in the checkpoint, and {here} in this run"))
    if problems:
        raise StateError((name, f"{problem}; {OTHER_RUN}") for name, problem in problems)


def describe_tensor(value: Any) -> str:
    """Return dtype and shape of a tensor, or the kind of a number."""
    if isinstance(value, (int, float)):
        return "a whole number" if isinstance(value, int) else "a number"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def check_finite_values(name: str, value: Any) -> None:
    """Raise StateError if a tensor or number is not finite; called just before it is used."""
    least, largest = value_range(value)
    if not (isfinite(least) and isfinite(largest)):
        found = least if not isfinite(least) else largest
        raise StateError([(name, f"holds numbers that are not finite ({found})")])


def value_range(value: Any) -> tuple[float, float]:
    """Return the least and the largest of a tensor's values; (0, 0) if it is empty or not floating.

    Both are NaN if one is, and neither needs memory.
    """
    if not isinstance(value, Tensor):
        return float(value), float(value)
    if not value.numel() or not value.is_floating_point():
        return 0.0, 0.0
    least, largest = value.aminmax()
    return float(least), float(largest)


def loop_state_after(fit_loop: Any, step: int, accumulation: int) -> dict[str, Any]:
    """Return the state of `fit_loop`, a new one, as if `step` optimizer steps were done.

    Batches are counted from here on, as the loader does which starts at `step`; only their total,
    by which Lightning validates, is the whole run's. Keys are those of Lightning 2.6's loops, which
    have no public way to start at a step.
    """
    state = copy.deepcopy(fit_loop.state_dict())
    num_batches = step * accumulation
    batches = state["epoch_loop.batch_progress"]["total"]
    batches.update(dict.fromkeys(batches, num_batches))
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    steps.update(dict.fromkeys(steps, step))
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    for epochs in (state["epoch_progress"]["total"], state["epoch_progress"]["current"]):
        epochs.update(ready=1, started=1)  # Lightning sees a run as one epoch
    return state


def restore_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Move a new schedule to where `step` optimizer steps have brought it.

    It is a pure function of the step: only that is saved, and the rate follows.
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
    """Try the parts of a random state that only torch can read; StateError if it cannot."""
    devices = {"torch": torch.device("cpu")} | ({"cuda": device} if device.type == "cuda" else {})
    for key, place in devices.items():
        if key not in state:
            continue
        generator = torch.Generator(place)
        saved, size = _as_tensor(state[key]), len(generator.get_state())
        try:
            generator.set_state(saved)
        except RuntimeError as error:
            wrong_size = f"is of {len(saved):,} bytes; expected {size:,}"
            refused = f"is not a state of its generator ({error})"
            raise StateError([(key, wrong_size if len(saved) != size else refused)]) from None


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
