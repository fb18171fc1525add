"""The state of a model, its optimizer, schedule, loop and random generators, restored bit for bit.

Weights and optimizer states are saved by the weights' names in the base model, never under an
index, so that any number of ranks and any strategy can read them. Numbers are saved as JSON, where
Python writes floats without loss of precision. The expected names, shapes and dtypes of optimizer
states come from the optimizer itself: an instance of the same class and options steps a weight on
the `meta` device. Values are checked while they are read, so that every file is read once.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from app.model.adapter import initial_weights, trainable_weights
from app.strategy.ddp import Ddp
from app.strategy.disk_states import AdamWOnDisk, DiskTensor
from app.strategy.mixin import REPLICATED, ShardedTensor, State, StateTensor
from app.training.algorithms import MuonWithAdamW
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.checkpoint.documents import (
    MAX_LISTED,
    MODEL,
    OPTIMIZER,
    TRAINING,
    Json,
    format_names,
    format_value,
    local_state_name,
    printable_key,
    random_state_name,
    read_random_state,
    unusable_checkpoint,
)
from common.errors import UserError
from data_modules import Batch

if TYPE_CHECKING:
    from app.training.module import FinetuneModule

_SEED_STRIDE = 1_000_003
"""difference between the seeds of two steps; larger than any number of ranks"""
OTHER_RUN = (
    "resume with the settings of the run that saved the checkpoint (its config.yaml), or start a "
    "new run with resume=never and another output.dir"
)
_GROUP_KEYS = ("train_mode", "k", "weight_sum", "lr_max")
"""counters of schedule-free AdamW in a parameter group; everything else in a group comes from the
settings and the schedule, also in a resumed run"""
_META_OPTIONS = {"fused": False, "foreach": False, "capturable": False, "train_mode": True}
"""options of a group that let an optimizer step a weight on `meta`"""
STEP = "step"
_NON_NEGATIVE = (
    *(STEP, "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"),
    *("state2", "qmap2", "absmax1", "absmax2"),  # AdamW8bit's, also for weights with fp32 moments
)
"""states that are never negative: step counts, second moments and scales of quantized moments"""


class StateError(UserError):
    """A saved state does not fit this run; each problem belongs to a tensor or key."""

    def __init__(self, problems_by_name: Iterable[tuple[str, str]]) -> None:
        self.problems_by_name = list(problems_by_name)
        super().__init__(
            f"resume: {printable_key(name)} {problem}" for name, problem in self.problems_by_name
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


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: State = REPLICATED
) -> tuple[dict[str, StateTensor], Json]:
    """Return an optimizer's tensors by names such as `exp_avg/WEIGHT NAME`, and the rest as JSON.

    The tensors are not copied.
    """
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
        "class": _kind_of(optimizer).__name__,
        "groups": [
            {"name": group["name"]} | {key: group[key] for key in _GROUP_KEYS if key in group}
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
    strategy: State = REPLICATED,
    *,
    step: float = inf,
) -> None:
    """Restore `optimizer_state` into a new optimizer, which keeps its settings.

    `step`: step of the checkpoint. UserError if the state belongs to another optimizer, is
    incomplete, has unexpected parts, or is not finite.
    """
    # Not with load_state_dict: it matches weights by index, and casts to their dtype.
    _check_same_optimizer(optimizer, document)
    _check_states(model, optimizer, tensors, document, strategy)
    for group, saved in zip(optimizer.param_groups, document["groups"], strict=True):
        group.update({key: saved[key] for key in _GROUP_KEYS if key in saved and key in group})
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
    for name, weight in weights.items():  # in the model's order, since ranks may have to cooperate
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
) -> Tensor | DiskTensor:
    """Allocate a tensor like `value` on the device where the optimizer keeps it."""
    if isinstance(part, AdamWOnDisk) and key != STEP:
        return part.reserve(weight)
    if type(part).__name__ == "AdamW8bit":
        # Imported here, because bitsandbytes takes seconds to import.
        from app.training.eight_bit import MOMENTS

        if key in MOMENTS:  # paged if the optimizer would page it
            buffer: Tensor = part.get_state_buffer(weight, dtype=value.dtype)
            return buffer
    if key == STEP:  # fused kernels read the step on the weights' device, others on the host
        is_on_host = not (group.get("fused") or group.get("capturable"))
    else:
        is_on_host = key in on_host
    return torch.empty_like(value, device=torch.device("cpu") if is_on_host else weight.device)


def _parts_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)


def _kind_of(optimizer: torch.optim.Optimizer) -> type:
    """Return an optimizer's class; where its states are is no part of a checkpoint."""
    return torch.optim.AdamW if isinstance(optimizer, AdamWOnDisk) else type(optimizer)


def _by_weight(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    by_weight: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        by_weight.setdefault(name, {})[key] = value
    return by_weight


def _check_same_optimizer(optimizer: torch.optim.Optimizer, document: Json) -> None:
    saved, saved_groups = document["class"], [group["name"] for group in document["groups"]]
    own, groups = _kind_of(optimizer).__name__, [group["name"] for group in optimizer.param_groups]
    if (own, groups) != (saved, saved_groups):
        raise UserError(
            f"resume: the checkpoint's optimizer is {printable_key(saved)} with the groups "
            f"{format_names(saved_groups)}, that of this run is {own} with {', '.join(groups)}; "
            f"{OTHER_RUN}"
        )


def _check_states(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    document: Json,
    strategy: State,
) -> None:
    saved_tensors, numbers = _by_weight(tensors), document["numbers"]
    without_state = set(document["without_state"])
    expected: dict[Any, Mapping[str, Any]] = {}
    groups = zip(optimizer.param_groups, document["groups"], strict=True)
    problems = [
        (f"optimizer.groups[{index}].{key}", "is missing")
        for index, (group, saved) in enumerate(groups)
        for key in _GROUP_KEYS
        if key in group and key not in saved
    ]
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
        problems = [*problems[:MAX_LISTED], (f"{more:,} other states", "do not fit either")]
    if problems:
        raise StateError(problems)


def _expected_state(
    part: torch.optim.Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the state of a weight of `group` after one step: tensors on `meta`, and numbers."""
    weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    weight.grad = torch.empty_like(weight)
    options = {key: value for key, value in _META_OPTIONS.items() if key in group}
    build: Any = _kind_of(part)
    twin = build([{**group, **options, "params": [weight]}])
    if build.__name__ == "AdamW8bit":  # its kernels have no `meta` implementation
        twin.init_state(twin.param_groups[0], weight, 0, 0)
    else:
        twin.step()
    return dict(twin.state[weight])


def _differences(
    expected: Mapping[str, Any], saved: Mapping[str, Any], name: str
) -> Iterator[tuple[str, str]]:
    for key in expected.keys() - saved.keys():
        yield f"{key}/{name}", "is missing"
    for key in saved.keys() - expected.keys():
        keys = ", ".join(sorted(expected)) or "nothing"
        yield f"{key}/{name}", f"is not a state of this optimizer, which has {keys}"
    for key in expected.keys() & saved.keys():
        wanted, found = describe_tensor(expected[key]), describe_tensor(saved[key])
        if wanted != found:
            yield f"{key}/{name}", f"is {found}; expected {wanted}"


def _check_values(name: str, key: str, value: Any, step: float) -> None:
    """Check a state's values just before they are used, so that a file is read once."""
    check_finite_values(name, value)
    smallest, largest = value_range(value)
    if smallest < 0 and key in _NON_NEGATIVE:
        raise StateError([(name, f"holds {smallest}; expected no number below 0")])
    if key == STEP and not (largest <= step and isfinite(largest) and largest == int(largest)):
        wanted = f"expected a whole number up to {step}, the step of the checkpoint"
        raise StateError([(name, f"is {format_value(largest)}; {wanted}")])


class Resume:
    """Restore one checkpoint into a module, in the order in which Lightning builds its parts.

    Lightning loads the model before the optimizer exists, and random states must be restored after
    everything that draws random numbers: the optimizer is therefore restored when the fit starts,
    and the rest at the first batch.
    """

    def __init__(
        self, module: FinetuneModule, source: Checkpoint, state: Mapping[str, Any]
    ) -> None:
        self.module, self.source, self.state = module, source, state
        self._random_state: Json = None

    def restore_model(self, state_dict: Mapping[str, Any]) -> None:
        """Copy `state_dict` into the model; UserError unless it fits completely."""
        with self._naming_file(MODEL):
            restore_model(self.module.model, state_dict, self.module.strategy)

    def restore_optimizer(self) -> None:
        """Restore optimizer and schedule; UserError if they or the random state do not fit."""
        module, source = self.module, self.source
        with self._naming_file(OPTIMIZER):
            restore_optimizer(
                module.model,
                module.optimizer,
                source.tensors(OPTIMIZER),
                self.state["optimizer"],
                module.strategy,
                step=source.step,
            )
        restore_schedule(module.lr_schedulers(), source.step)
        if (rank := self._rank_of_random_state()) is not None:  # before a step is taken
            with self._naming_file(random_state_name(rank)):
                self._random_state = read_random_state(source, rank)
                check_random_state(self._random_state, module.strategy.root_device)

    def restore_at_first_batch(self, batches: Sequence[Batch]) -> None:
        """Check that `batches` are the next step's, and restore the last step's random state."""
        module, source = self.module, self.source
        step, first_step = module.trainer.global_step, module.trainer.datamodule.first_step
        if not step == first_step == source.step:
            raise RuntimeError(
                f"{source.folder} was saved after step {source.step}; the trainer resumes at step "
                f"{step}, the data at step {first_step}"
            )
        if module.trainer.world_size > 2 and isinstance(module.strategy, Ddp):
            # DDP rebuilds its buckets after the first step of a process, in the order in which
            # gradients became ready. A parameter's position in its bucket decides the order in
            # which the ranks' gradients are added, which changes the last bits with three or more
            # ranks: a backward pass, whose gradients are discarded, makes them those of the save.
            module.strategy.run_micro_batches(batches[:1], module.micro_batch_loss)
            module.reset_step()
        module.strategy.restore_local_state(module.optimizer, self._local_state())
        if self._random_state is not None:
            restore_random_state(self._random_state, module.strategy.root_device)
        else:  # this run has more ranks with tokens of their own than the checkpoint
            torch.manual_seed(torch.initial_seed() + _SEED_STRIDE * source.step)

    def _local_state(self) -> dict[str, Tensor]:
        """Return the tensors that only this rank held; none if the number of ranks has changed."""
        module, details = self.module, self.source.details
        name = local_state_name(module.trainer.global_rank)
        ranks = module.trainer.world_size, module.strategy.num_data_ranks
        is_same = ranks == (details["num_ranks"], details["num_data_ranks"])
        if not is_same or name not in self.source.names():
            return {}
        state = self.source.tensors(name)
        with self._naming_file(name):
            for key, value in state.items():
                check_finite_values(key, value)
        return state

    @contextmanager
    def _naming_file(self, name: str) -> Iterator[None]:
        """Turn a StateError into a UserError that names the checkpoint's file and the fix."""
        try:
            yield
        except StateError as error:
            raise unusable_checkpoint(
                self.source.folder,
                [
                    f"{_file_of(self.source, name, key)}: {printable_key(key)} {problem}"
                    for key, problem in error.problems_by_name
                ],
            ) from error

    def _rank_of_random_state(self) -> int | None:
        """Return the saved rank whose random state this rank continues; None for a new one.

        Ranks that see the same tokens must use the same dropout masks, others must not.
        """
        strategy, details = self.module.strategy, self.source.details
        saved: int = details["num_data_ranks"]
        group = details["num_ranks"] // saved
        place = strategy.random_rank - strategy.data_rank * strategy.context_size
        is_new = strategy.data_rank >= saved or place >= group
        return None if is_new else strategy.data_rank * group + place


def check_same_step(trainer: Any, resume: Resume | None) -> None:
    """Raise UserError if ranks, which each look for checkpoints, resume at different steps."""
    strategy, step = trainer.strategy, 0 if resume is None else resume.source.step
    # On the strategy's device: the module's device is where its weights were last moved to.
    steps = strategy.all_gather(torch.tensor(step, device=strategy.root_device))
    if trainer.world_size > 1 and len(set(steps.tolist())) > 1:
        found = ", ".join(map(str, steps.tolist()))
        raise UserError(
            f"the ranks resume at different steps ({found}), because they do not all see the same "
            "checkpoints; name one with resume=FOLDER/checkpoints/step-N"
        )


def _file_of(source: Checkpoint, name: str, key: str) -> str:
    if f"{name}.json" in source.manifest["files"]:
        return f"{name}.json"
    return f"{TRAINING}.json" if key.startswith("optimizer.") else source.file_of(name, key)
