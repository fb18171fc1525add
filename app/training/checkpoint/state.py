"""The state of a model, its schedule, its loop and its random generators, restored bit for bit.

Weights are saved by their names in the base model, so that any number of ranks and any strategy can
read them. Numbers are saved as JSON, where Python writes floats without loss of precision.
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
from app.strategy.state import REPLICATED, State, StateTensor
from app.training.checkpoint.schema import Json, printable
from common.errors import UserError

OTHER_RUN = (
    "resume with the settings of the run that saved the checkpoint (its config.yaml), or start a "
    "new run with resume=never and another output.dir"
)


class StateError(UserError):
    """A saved state does not fit this run; each problem belongs to a tensor or key."""

    def __init__(self, problems_by_name: Iterable[tuple[str, str]]) -> None:
        self.problems_by_name = list(problems_by_name)
        super().__init__(
            f"resume: {printable(name)} {problem}" for name, problem in self.problems_by_name
        )


def trainable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by their names in the base; a tied weight appears once."""
    weights = trainable_weights(model)
    by_name = {weight.name: weight.parameter for weight in weights}
    if len(by_name) < len(weights):
        raise ValueError(
            "two trainable parameters share a name; a checkpoint could hold only one of them"
        )
    return by_name


def model_state(model: torch.nn.Module, strategy: State = REPLICATED) -> dict[str, StateTensor]:
    """Return the tensors that a checkpoint holds of a model, without copying them.

    These are the trainable parameters, and the start weights that PiSSA and OLoRA subtracted from
    the base.
    """
    weights = trainable_parameters(model)
    trained = {name: strategy.weight_state(weight) for name, weight in weights.items()}
    return trained | initial_weights(model)


@torch.no_grad()
def restore_model(
    model: torch.nn.Module, saved: Mapping[str, Tensor], strategy: State = REPLICATED
) -> None:
    """Copy `model_state` into a newly built model.

    UserError if different weights are trainable, a saved one is not finite, or the base differs.
    """
    starts = initial_weights(model)
    weights = trainable_parameters(model)
    own = {name: strategy.weight_state(weight) for name, weight in weights.items()}
    _check_same_weights(own | starts, saved)
    for name, start in starts.items():
        check_finite_values(name, saved[name])
        if not torch.equal(start, saved[name].to(start.device)):
            raise UserError(
                f"resume: {name}, which adapter.init computes from the base, differs from that of "
                "the resumed run, and so does the base that remains; resume on the machine of that "
                "run with the same number of threads (OMP_NUM_THREADS)"
            )
    for name, weight in weights.items():
        check_finite_values(name, saved[name])
        strategy.restore_weight(weight, saved[name])


def _check_same_weights(ours: Mapping[str, StateTensor], saved: Mapping[str, Tensor]) -> None:
    problems = []
    for problem, names in (
        ("is missing in the checkpoint", sorted(ours.keys() - saved.keys())),
        ("is in the checkpoint, but not trained in this run", sorted(saved.keys() - ours.keys())),
    ):
        if names:
            more = f", and so are {len(names) - 1:,} more" if len(names) > 1 else ""
            problems.append((names[0], f"{problem}{more}"))
    for name in sorted(ours.keys() & saved.keys()):
        expected, found = describe_tensor(ours[name]), describe_tensor(saved[name])
        if expected != found:
            problems.append((name, f"is {found} in the checkpoint, but {expected} in this run"))
    if problems:
        raise StateError((name, f"{problem}; {OTHER_RUN}") for name, problem in problems)


def describe_tensor(value: Any) -> str:
    """Return dtype and shape of a tensor, or the type of a number."""
    if isinstance(value, (int, float)):
        return "a whole number" if isinstance(value, int) else "a number"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def check_finite_values(name: str, value: Any) -> None:
    """Raise StateError if a tensor or number is not finite; called just before it is used."""
    smallest, largest = value_range(value)
    if not (isfinite(smallest) and isfinite(largest)):
        found = smallest if not isfinite(smallest) else largest
        raise StateError([(name, f"has non-finite values ({found})")])


def value_range(value: Any) -> tuple[float, float]:
    """Return the smallest and largest value of a tensor; (0, 0) if it is empty or not floating.

    Both are NaN if any value is. No temporary tensor is allocated.
    """
    if not isinstance(value, Tensor):
        return float(value), float(value)
    if not value.numel() or not value.is_floating_point():
        return 0.0, 0.0
    smallest, largest = value.aminmax()
    return float(smallest), float(largest)


def loop_state_after(fit_loop: Any, step: int) -> dict[str, Any]:
    """Return the state of a new `fit_loop` as if it had done `step` optimizer steps.

    Lightning's batches, which are our steps, are counted from the resume on, like in the loader,
    which starts at `step`; only their total, which schedules validations, covers the whole run. The
    keys are those of Lightning 2.6's loops, which have no public way to start at a step.
    """
    state = copy.deepcopy(fit_loop.state_dict())
    batches = state["epoch_loop.batch_progress"]["total"]
    batches.update(dict.fromkeys(batches, step))
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    steps.update(dict.fromkeys(steps, step))
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    for epochs in (state["epoch_progress"]["total"], state["epoch_progress"]["current"]):
        epochs.update(ready=1, started=1)  # Lightning sees a run as one epoch
    return state


def restore_schedule(schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Advance a new schedule to optimizer step `step`.

    The learning rate is a pure function of the step, which is all that a checkpoint saves of it.
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
    """Raise StateError if torch's generators cannot load their parts of a random state."""
    devices = {"torch": torch.device("cpu")} | ({"cuda": device} if device.type == "cuda" else {})
    for key, generator_device in devices.items():
        if key not in state:
            continue
        generator = torch.Generator(generator_device)
        saved, size = _as_tensor(state[key]), len(generator.get_state())
        try:
            generator.set_state(saved)
        except RuntimeError as error:
            wrong_size = f"has {len(saved):,} bytes; expected {size:,}"
            refused = f"is not a valid state of its generator ({error})"
            raise StateError([(key, wrong_size if len(saved) != size else refused)]) from None


def restore_random_state(state: Json, device: torch.device) -> None:
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
