"""What the documents of a checkpoint must hold: checked key by key before anything is restored.

Hashes find damage. What is as it was written may still be unusable, or made so on purpose: then the
key is named, with its value and what was expected. Needs no torch, and changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    from app.training.checkpoint.checkpoint import Checkpoint

MODEL, OPTIMIZER, TRAINING = "model", "optimizer", "training"
"""files of a checkpoint"""
MAX_LISTED = 5
"""problems of one checkpoint that are listed"""
MAX_NAMES = 20
"""that are listed in one message"""
MAX_SHOWN = 60
"""characters of a value in a message"""
MAX_COUNT = 2**53
"""above any number of steps, tokens or ranks; JSON readers differ beyond"""
WORD = 2**32
"""a Mersenne Twister's state is 624 numbers below this"""
TWISTER = 624


@dataclass(frozen=True, slots=True)
class Kind:
    """Values of one kind."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list whose elements are alike."""

    element: Any
    length: int | None = None


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with any keys, whose values are alike."""

    value: Any


@dataclass(frozen=True, slots=True)
class Keys:
    """An object with these keys."""

    needed: Mapping[str, Any]
    optional: Mapping[str, Any]
    has_others: bool = False
    """whether more keys are no problem"""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


COUNT = Kind("a whole number from 0 on", _is_count)
POSITIVE_COUNT = Kind("a whole number from 1 on", lambda value: _is_count(value) and value > 0)
STEP = Kind(
    "a whole number from -1 on", lambda value: _is_count(value) or (type(value), value) == (int, -1)
)
NUMBER = Kind("a finite number", _is_number)
AMOUNT = Kind("a finite number from 0 on", lambda value: _is_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: _is_number(value) and value > 0)
TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NOTHING = Kind("{}", lambda value: value == {})
IDENTITY = Kind(
    "32 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
)
NUM_32_BITS = Kind(
    f"a whole number below {WORD}", lambda value: type(value) is int and 0 <= value < WORD
)
POSITION = Kind(
    f"a whole number up to {TWISTER}", lambda value: type(value) is int and 0 <= value <= TWISTER
)

DETAILS = Keys(
    {"num_ranks": POSITIVE_COUNT, "num_data_ranks": POSITIVE_COUNT, "total_steps": POSITIVE_COUNT},
    {"run": Keys({"id": IDENTITY, "plan": IDENTITY}, {})},
)
SCALER = Keys(
    {
        "scale": POSITIVE,
        "growth_factor": POSITIVE,
        "backoff_factor": POSITIVE,
        "growth_interval": POSITIVE_COUNT,
        "_growth_tracker": COUNT,
    },
    {},
)
GROUP = Keys(
    {"name": TEXT},
    {"train_mode": FLAG, "k": COUNT, "weight_sum": AMOUNT, "lr_max": NUMBER},
    has_others=True,  # what earlier versions kept besides
)
DOCUMENT_OF_TRAINING = Keys(
    {
        "step": COUNT,
        "optimizer": Keys(
            {
                "class": TEXT,
                "groups": ListOf(GROUP),
                "numbers": MapOf(MapOf(NUMBER)),
                "on_host": ListOf(TEXT),
            },
            {"without_state": ListOf(TEXT)},
        ),
        "curves": Keys(
            {
                "dataset_names": ListOf(TEXT),
                "latest": MapOf(NUMBER),
                "latest_step": STEP,
                "validations": ListOf(MapOf(NUMBER)),
                "validated_step": STEP,
                "trained_tokens": ListOf(AMOUNT),
                "num_tokens": COUNT,
                "train_seconds": AMOUNT,
                "skipped_steps": COUNT,
            },
            {},
        ),
        "lightning": Keys({"callbacks": NOTHING}, {"MixedPrecision": SCALER}),
    },
    {"owes_validation": FLAG},
)


def random_state_of(rank: int) -> str:
    """Name the file that holds the random generators of a rank; every rank writes its own."""
    return f"random-rank-{rank}"


def check_documents(checkpoint: Checkpoint) -> None:
    """Check all of a checkpoint that can be read without its tensors; UserError names each key."""
    problems = [
        f"manifest.json: {problem}"
        for problem in _differences(checkpoint.details, DETAILS, "details")
    ]
    if not problems:
        problems = [f"manifest.json: {problem}" for problem in _ill_counted(checkpoint)]
    if problems := problems or list(_other_files(checkpoint)):
        raise unusable(checkpoint.folder, problems)
    read_training(checkpoint)
    for rank in range(checkpoint.details["num_ranks"]):
        read_random_state(checkpoint, rank)


def read_training(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what Lightning, the optimizer and the curves go on from; UserError names each key."""
    training = _read(checkpoint, TRAINING)
    problems = list(_differences(training, DOCUMENT_OF_TRAINING, ""))
    problems = problems or list(_disagreements(training, checkpoint))
    if problems:
        raise unusable(checkpoint.folder, [f"{TRAINING}.json: {problem}" for problem in problems])
    return training


def read_random_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return the random generators of a rank; UserError names each key that is no such state."""
    name = random_state_of(rank)
    state = _read(checkpoint, name)
    if problems := list(_differences(state, RANDOM, "")):
        raise unusable(checkpoint.folder, [f"{name}.json: {problem}" for problem in problems])
    return state


def unusable(folder: Path, problems: Iterable[str]) -> UserError:
    """Word why a checkpoint that is as it was written cannot be gone on from, and the way out."""
    listed = list(problems)
    more = len(listed) - MAX_LISTED
    listed = [f"{folder}: {problem}" for problem in listed[:MAX_LISTED]]
    if more > 0:
        listed[-1] += f"; and {more:,} more"
    return UserError([*listed[:-1], f"{listed[-1]}; {way_out(folder)}"])


def way_out(folder: Path) -> str:
    """Say what to type where a checkpoint cannot be gone on from."""
    anew = "start anew with resume=never and another output.dir"
    number = re.fullmatch(r"step-(\d+)", folder.name)
    steps = [
        int(match[1])
        for other in folder.parent.iterdir()
        if (match := re.fullmatch(r"step-(\d+)", other.name)) and other != folder
    ]
    earlier = [step for step in steps if number is not None and step < int(number[1])]
    if not earlier:
        return anew
    typed = shlex.quote(str(folder.parent / f"step-{max(earlier)}"))
    return f"type resume={typed} to go on from an earlier checkpoint, or {anew}"


def shown(value: Any) -> str:
    """Return a value of a file as a message may show it: short, on one line, in ASCII."""
    text = json.dumps(value) if not isinstance(value, (list, dict)) or len(value) < 9 else ""
    if not text or len(text) > MAX_SHOWN:
        if isinstance(value, (list, dict)):
            what = "a list" if isinstance(value, list) else "an object"
            return f"{what} of {len(value):,}"
        return f"{text[:MAX_SHOWN]}..."
    return text


def printable(name: str) -> str:
    """Return a name out of a file as it is, or as a message may show it."""
    return name if re.fullmatch(r"[\w./\[\]-]{1,200}", name, re.ASCII) else shown(name)


def listed(names: Sequence[str]) -> str:
    """Return names out of a file as a message may show them."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(printable, names[:MAX_NAMES])) + more


def _read(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = checkpoint.document(name)
    except KeyError:
        raise unusable(checkpoint.folder, [f"{name}.json is missing"]) from None
    except OSError as error:
        raise unusable(checkpoint.folder, [f"{name}.json: {error.strerror}"]) from None
    except ValueError as error:
        raise unusable(checkpoint.folder, [f"{name}.json: {error}"]) from None
    return document


def _differences(value: Any, expected: Any, key: str) -> Iterator[str]:
    """Say where a value is not as expected, by full keys."""
    if isinstance(expected, Kind):
        if not expected.holds(value):
            yield f"{key} is {shown(value)}; expected {expected.words}"
    elif isinstance(expected, ListOf):
        wants = "a list" if expected.length is None else f"a list of {expected.length}"
        if not isinstance(value, list) or len(value) != (expected.length or len(value)):
            yield f"{key or 'the document'} is {shown(value)}; expected {wants}"
            return
        for index, element in enumerate(value):
            yield from _differences(element, expected.element, f"{key}[{index}]")
    elif not isinstance(value, dict):
        yield f"{key or 'the document'} is {shown(value)}; expected an object"
    elif isinstance(expected, MapOf):
        for name, element in value.items():
            yield from _differences(element, expected.value, _below(key, name))
    else:
        yield from _differences_of_keys(value, expected, key)


def _differences_of_keys(value: Mapping[str, Any], expected: Keys, key: str) -> Iterator[str]:
    known = {**expected.needed, **expected.optional}
    for name in expected.needed:
        if name not in value:
            yield f"{_below(key, name)} is missing"
    for name, element in value.items():
        if name in known:
            yield from _differences(element, known[name], _below(key, name))
        elif not expected.has_others:
            yield f"{_below(key, name)} is not a known key"


def _other_files(checkpoint: Checkpoint) -> Iterator[str]:
    """Say which files a checkpoint of so many ranks lacks, or should not have."""
    files, num_ranks = set(checkpoint.manifest["files"]), checkpoint.details["num_ranks"]
    if num_ranks > len(files):  # each rank has a file of its own
        yield f"manifest.json: details.num_ranks is {num_ranks}, and there are {len(files)} files"
        return
    ranks = range(num_ranks)
    needed = {f"{name}.safetensors" for name in (MODEL, OPTIMIZER)} | {f"{TRAINING}.json"}
    needed |= {f"{random_state_of(rank)}.json" for rank in ranks}
    # A rank that has no tensor to write writes no file.
    shares = {f"{name}-rank-{rank}.safetensors" for name in (MODEL, OPTIMIZER) for rank in ranks}
    for name in sorted(needed - files):
        yield f"manifest.json: files lacks {name}"
    for name in sorted(files - needed - shares):
        yield f"manifest.json: files has {name}, which no checkpoint of {num_ranks} ranks has"


def _below(key: str, name: str) -> str:
    name = printable(name)
    return f"{key}.{name}" if key else name


def _ill_counted(checkpoint: Checkpoint) -> Iterator[str]:
    """Say which numbers of a manifest cannot be true together."""
    details = checkpoint.details
    if details["num_ranks"] % details["num_data_ranks"]:
        yield (
            f"details.num_data_ranks is {details['num_data_ranks']}, which does not divide "
            f"details.num_ranks, {details['num_ranks']}"
        )
    if checkpoint.step > details["total_steps"]:
        yield f"details.total_steps is {details['total_steps']}, and step is {checkpoint.step}"


def _disagreements(training: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    """Say which counts of a training cannot be true together."""
    step, curves = checkpoint.step, training["curves"]
    for key, value in (("step", training["step"]), ("curves.latest_step", curves["latest_step"])):
        if value != step:
            yield f"{key} is {value}; expected {step}, the step of the checkpoint"
    counts = {
        "curves.validated_step": curves["validated_step"],
        "curves.skipped_steps": curves["skipped_steps"],
        **{
            f"optimizer.groups[{index}].k": group["k"]
            for index, group in enumerate(training["optimizer"]["groups"])
            if "k" in group
        },
    }
    for key, value in counts.items():
        if value > step:
            yield f"{key} is {value}; expected at most {step}, the step of the checkpoint"
    names, counted = curves["dataset_names"], curves["trained_tokens"]
    if len(names) != len(counted):
        yield (
            f"curves.trained_tokens has {len(counted)} numbers; expected {len(names)}, one for "
            "each data set"
        )
    if (curves["validated_step"] >= 0) != bool(curves["validations"]):
        yield (
            f"curves.validated_step is {curves['validated_step']}, and curves.validations has "
            f"{len(curves['validations'])} elements"
        )
    elif curves["validations"] and curves["validated_step"] == step:
        loss = curves["validations"][-1].get("val/loss")
        if loss != checkpoint.metric:
            yield (
                f"curves.validations ends with the loss {shown(loss)}; expected "
                f"{shown(checkpoint.metric)}, the metric of manifest.json"
            )


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
        and not list(_differences(value[1], ListOf(NUM_32_BITS, TWISTER + 1), ""))
        and POSITION.holds(value[1][-1])
        and (value[2] is None or _is_number(value[2]))
    )


def _is_numpy_state(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 5
        and value[0] == "MT19937"
        and not list(_differences(value[1], ListOf(NUM_32_BITS, TWISTER), ""))
        and POSITION.holds(value[2])
        and type(value[3]) is int
        and value[3] in (0, 1)
        and _is_number(value[4])
    )


BYTES = Kind("bytes in base64", _is_base64)
RANDOM = Keys(
    {
        "python": Kind("what random.getstate() returns", _is_python_state),
        "numpy": Kind("what numpy.random.get_state() returns", _is_numpy_state),
        "torch": BYTES,
    },
    {"cuda": BYTES},
)
