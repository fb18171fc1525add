"""Schemas of JSON documents, and those of a checkpoint, which are checked before a restore.

Hashes detect damage. An undamaged file may still be unusable, for example if it was crafted: the
error then names the key, its value and what was expected. Imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    from app.training.checkpoint.checkpoint import Checkpoint

Json = Any
"""a value that can be written as JSON"""
_MAX_NAMES = 20
"""most names listed in one message"""
_MAX_VALUE_CHARS = 60
"""most characters of a value in a message"""
_MAX_COUNT = 2**53
"""exceeds any number of steps, tokens or ranks; JSON readers disagree on larger integers"""


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that `accepts` returns true for; error messages call them `description`."""

    description: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose elements have one schema; of a fixed length if `length` is given."""

    element: Any
    length: int | None = None


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with arbitrary keys, whose values have one schema."""

    value: Any


@dataclass(frozen=True, slots=True)
class Keys:
    required: Mapping[str, Any]
    optional: Mapping[str, Any] = field(default_factory=dict)
    allows_others: bool = False
    """whether unknown keys are allowed"""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


COUNT = Kind("a whole number of at least 0", _is_count)
POSITIVE_COUNT = Kind("a whole number of at least 1", lambda value: _is_count(value) and value > 0)
_STEP = Kind(
    "a whole number of at least -1",
    lambda value: _is_count(value) or (type(value), value) == (int, -1),
)
NUMBER = Kind("a finite number", _is_number)
AMOUNT = Kind("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: _is_number(value) and value > 0)
TEXT = Kind("a string", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NOTHING = Kind("{}", lambda value: value == {})
_IDENTITY = Kind(
    "32 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
)


ANYTHING = Kind("anything", lambda _: True)
RUN = Keys({"id": _IDENTITY, "plan": _IDENTITY}, allows_others=True)
"""id and plan of a run, in its manifest and its checkpoints"""


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.description}, or null", lambda value: value is None or kind.accepts(value))


def differences(value: Any, expected: Any, key: str) -> Iterator[str]:
    """Yield each difference between a value and its schema, with its full key."""
    if isinstance(expected, Kind):
        if not expected.accepts(value):
            yield f"{key} is {format_value(value)}; expected {expected.description}"
    elif isinstance(expected, ListOf):
        if not isinstance(value, list) or len(value) != (expected.length or len(value)):
            wanted = "a list" if expected.length is None else f"a list of {expected.length}"
            yield f"{key or 'the document'} is {format_value(value)}; expected {wanted}"
            return
        for index, element in enumerate(value):
            yield from differences(element, expected.element, f"{key}[{index}]")
    elif not isinstance(value, dict):
        yield f"{key or 'the document'} is {format_value(value)}; expected an object"
    elif isinstance(expected, MapOf):
        for name, element in value.items():
            yield from differences(element, expected.value, _join_key(key, name))
    else:
        known = {**expected.required, **expected.optional}
        for name in expected.required:
            if name not in value:
                yield f"{_join_key(key, name)} is missing"
        for name, element in value.items():
            if name in known:
                yield from differences(element, known[name], _join_key(key, name))
            elif not expected.allows_others:
                yield f"{_join_key(key, name)} is not a known key"


def _join_key(parent: str, name: str) -> str:
    name = printable_key(name)
    return f"{parent}.{name}" if parent else name


def format_value(value: Any) -> str:
    """Format a value from a file for a message: short, on one line, in ASCII."""
    text = json.dumps(value) if not isinstance(value, (list, dict)) or len(value) < 9 else ""
    if text and len(text) <= _MAX_VALUE_CHARS:
        return text
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    return f"{text[:_MAX_VALUE_CHARS]}..."


def printable_key(name: str) -> str:
    return name if re.fullmatch(r"[\w./\[\]-]{1,200}", name, re.ASCII) else format_value(name)


def format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(map(printable_key, names[:_MAX_NAMES])) + more


MODEL, OPTIMIZER, TRAINING = "model", "optimizer", "training"
"""names of a checkpoint's files"""
MAX_LISTED = 5
"""most problems listed of one checkpoint"""
TWISTER_LENGTH, TWISTER_RANGE = 624, 2**32
"""the state of a Mersenne Twister: so many integers below this"""


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(base64.b64decode(value, validate=True))
    except (ValueError, binascii.Error):
        return False


def _is_python_state(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and value[0] == 3
        and not list(differences(value[1], ListOf(_UINT32, TWISTER_LENGTH + 1), ""))
        and _POSITION.accepts(value[1][-1])
        and (value[2] is None or _is_number(value[2]))
    )


def _is_numpy_state(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 5
        and value[0] == "MT19937"
        and not list(differences(value[1], ListOf(_UINT32, TWISTER_LENGTH), ""))
        and _POSITION.accepts(value[2])
        and type(value[3]) is int
        and value[3] in (0, 1)
        and _is_number(value[4])
    )


_UINT32 = Kind(
    f"a whole number below {TWISTER_RANGE}",
    lambda value: type(value) is int and 0 <= value < TWISTER_RANGE,
)
_POSITION = Kind(
    f"a whole number up to {TWISTER_LENGTH}",
    lambda value: type(value) is int and 0 <= value <= TWISTER_LENGTH,
)
_BYTES = Kind("base64", _is_base64)
_RANDOM_STATE = Keys(
    {
        "python": Kind("the value of random.getstate()", _is_python_state),
        "numpy": Kind("the value of numpy.random.get_state()", _is_numpy_state),
        "torch": _BYTES,
    },
    {"cuda": _BYTES},
)
_DETAILS = Keys(
    {**dict.fromkeys(("num_ranks", "num_data_ranks", "total_steps"), POSITIVE_COUNT), "run": RUN}
)
_SCALER = Keys(
    {
        "scale": POSITIVE,
        "growth_factor": POSITIVE,
        "backoff_factor": POSITIVE,
        "growth_interval": POSITIVE_COUNT,
        "_growth_tracker": COUNT,
    }
)
GROUP = Keys(
    {"name": TEXT}, {"train_mode": FLAG, "k": COUNT, "weight_sum": AMOUNT, "lr_max": NUMBER}
)
_TRAINING_STATE = Keys(
    {
        "step": COUNT,
        "optimizer": Keys(
            {
                "class": TEXT,
                "groups": ListOf(GROUP),
                "numbers": MapOf(MapOf(NUMBER)),
                "on_host": ListOf(TEXT),
                "without_state": ListOf(TEXT),
            }
        ),
        "curves": Keys(
            {
                "dataset_names": ListOf(TEXT),
                "latest": MapOf(NUMBER),
                "latest_step": _STEP,
                "validations": ListOf(MapOf(NUMBER)),
                "validated_step": _STEP,
                "trained_tokens": ListOf(AMOUNT),
                "num_tokens": COUNT,
                "train_seconds": AMOUNT,
                "skipped_steps": COUNT,
                "row_losses": ListOf(ListOf(ListOf(AMOUNT)), 2),
                "monitored": ListOf(NUMBER),
                "best": ListOf(NUMBER),
                "num_worse": COUNT,
            }
        ),
        "lightning": Keys({"callbacks": NOTHING}, {"MixedPrecision": _SCALER}),
        "owes_validation": FLAG,
    },
    {"joined_gates": MapOf(FLAG)},
)


def random_state_name(rank: int) -> str:
    """Return the name of the file with the random state of `rank`; every rank writes one."""
    return f"random-rank-{rank}"


def local_state_name(rank: int) -> str:
    """Return the name of the file with the tensors that only `rank` holds, if it has any."""
    return f"local-rank-{rank}"


def check_documents(checkpoint: Checkpoint) -> None:
    """Check everything in a checkpoint except its tensors; UserError names each wrong key."""
    problems = [
        f"manifest.json: {problem}"
        for problem in differences(checkpoint.details, _DETAILS, "details")
    ]
    if not problems:
        problems = [f"manifest.json: {problem}" for problem in _count_problems(checkpoint)]
    if problems := problems or list(_file_problems(checkpoint)):
        raise unusable_checkpoint(checkpoint.folder, problems)
    read_training(checkpoint)
    for rank in range(checkpoint.details["num_ranks"]):
        read_random_state(checkpoint, rank)


def read_training(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state of Lightning, optimizer and metrics; UserError names each wrong key."""
    training = _read(checkpoint, TRAINING, _TRAINING_STATE)
    if problems := [f"{TRAINING}.json: {one}" for one in _disagreements(training, checkpoint)]:
        raise unusable_checkpoint(checkpoint.folder, problems)
    return training


def read_random_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return the random state of a rank; UserError names each wrong key."""
    return _read(checkpoint, random_state_name(rank), _RANDOM_STATE)


def unusable_checkpoint(folder: Path, problems: Iterable[str]) -> UserError:
    """Return the error for an undamaged checkpoint that cannot be resumed from, with the fix."""
    problems = list(problems)
    listed = [f"{folder}: {problem}" for problem in problems[:MAX_LISTED]]
    if (more := len(problems) - MAX_LISTED) > 0:
        listed[-1] += f"; and {more:,} more"
    fix = _fix(folder)
    return UserError([*listed[:-1], listed[-1] if fix in listed[-1] else f"{listed[-1]}; {fix}"])


def _fix(folder: Path) -> str:
    new_run = "start a new run with resume=never and another output.dir"
    number = re.fullmatch(r"step-(\d+)", folder.name)
    steps = [
        int(match[1])
        for other in folder.parent.iterdir()
        if (match := re.fullmatch(r"step-(\d+)", other.name)) and other != folder
    ]
    earlier = [step for step in steps if number is not None and step < int(number[1])]
    if not earlier:
        return new_run
    typed = shlex.quote(str(folder.parent / f"step-{max(earlier)}"))
    return f"type resume={typed} to resume from an earlier checkpoint, or {new_run}"


def _read(checkpoint: Checkpoint, name: str, schema: Keys) -> dict[str, Any]:
    try:
        document: dict[str, Any] = checkpoint.document(name)
        problems = [f": {problem}" for problem in differences(document, schema, "")]
    except KeyError:
        problems = [" is missing"]
    except OSError as error:
        problems = [f": {error.strerror}"]
    except ValueError as error:
        problems = [f": {error}"]
    if problems:
        raise unusable_checkpoint(checkpoint.folder, [f"{name}.json{one}" for one in problems])
    return document


def _file_problems(checkpoint: Checkpoint) -> Iterator[str]:
    files, num_ranks = set(checkpoint.manifest["files"]), checkpoint.details["num_ranks"]
    if num_ranks > len(files):  # each rank writes its random state
        yield f"manifest.json: details.num_ranks is {num_ranks}, but there are {len(files)} files"
        return
    ranks = range(num_ranks)
    needed = {f"{name}.safetensors" for name in (MODEL, OPTIMIZER)} | {f"{TRAINING}.json"}
    needed |= {f"{random_state_name(rank)}.json" for rank in ranks}
    # A rank that has no tensor to write writes no file.
    shares = {f"{name}-rank-{rank}.safetensors" for name in (MODEL, OPTIMIZER) for rank in ranks}
    shares |= {f"{local_state_name(rank)}.safetensors" for rank in ranks}
    for name in sorted(needed - files):
        yield f"manifest.json: files lacks {name}"
    for name in sorted(files - needed - shares):
        yield f"manifest.json: files has {name}, which does not belong to {num_ranks} ranks"


def _count_problems(checkpoint: Checkpoint) -> Iterator[str]:
    details = checkpoint.details
    if details["num_ranks"] % details["num_data_ranks"]:
        yield (
            f"details.num_data_ranks is {details['num_data_ranks']}, which does not divide "
            f"details.num_ranks, {details['num_ranks']}"
        )
    if checkpoint.step > details["total_steps"]:
        yield f"details.total_steps is {details['total_steps']}, but step is {checkpoint.step}"


def _disagreements(training: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    """Yield counts in the training state that contradict each other or the checkpoint."""
    step, curves = checkpoint.step, training["curves"]
    for key, value in (("step", training["step"]), ("curves.latest_step", curves["latest_step"])):
        if value != step:
            yield f"{key} is {value}; expected {step}, the step of the checkpoint"
    counts = {f"curves.{key}": curves[key] for key in ("validated_step", "skipped_steps")}
    groups = enumerate(training["optimizer"]["groups"])
    counts |= {f"optimizer.groups[{n}].k": group["k"] for n, group in groups if "k" in group}
    for key, value in counts.items():
        if value > step:
            yield f"{key} is {value}; expected at most {step}, the step of the checkpoint"
    names, counted = curves["dataset_names"], curves["trained_tokens"]
    if len(names) != len(counted):
        yield (
            f"curves.trained_tokens has {len(counted)} numbers; expected {len(names)}, one for "
            "each data set"
        )
    for index, sums in enumerate(curves["row_losses"]):
        if sums and (len(sums) != 2 or len(sums[0]) != len(sums[1])):
            lengths = ", ".join(str(len(numbers)) for numbers in sums)
            yield (
                f"curves.row_losses[{index}] has lists of {lengths} numbers; expected two lists of "
                "the same length"
            )
    if (curves["validated_step"] >= 0) != bool(curves["validations"]):
        yield (
            f"curves.validated_step is {curves['validated_step']}, but curves.validations has "
            f"{len(curves['validations'])} elements"
        )
    elif curves["validations"] and curves["validated_step"] == step:
        monitored = next(iter(curves["monitored"]), None)
        if monitored != checkpoint.metric:
            yield (
                f"curves.validations ends with the loss {format_value(monitored)}; expected "
                f"{format_value(checkpoint.metric)}, the metric of manifest.json"
            )
