"""What the documents of a checkpoint must hold, checked before anything is restored.

Hashes find damage. A file that is as it was written may still be unusable, or be made so on
purpose: then the key is named, with its value and what was expected. Needs no torch.
"""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError
from app.training.checkpoint.schema import (
    AMOUNT,
    COUNT,
    FLAG,
    IDENTITY,
    NOTHING,
    NUMBER,
    POSITIVE,
    POSITIVE_COUNT,
    STEP,
    TEXT,
    Keys,
    Kind,
    ListOf,
    MapOf,
    differences,
    is_number,
    shown,
)

if TYPE_CHECKING:
    from app.training.checkpoint.checkpoint import Checkpoint

MODEL, OPTIMIZER, TRAINING = "model", "optimizer", "training"
"""files of a checkpoint"""
MAX_LISTED = 5
"""problems of one checkpoint that are listed"""
WORD = 2**32
"""a Mersenne Twister's state is 624 numbers below this"""
TWISTER = 624


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
        and not list(differences(value[1], ListOf(NUM_32_BITS, TWISTER + 1), ""))
        and POSITION.holds(value[1][-1])
        and (value[2] is None or is_number(value[2]))
    )


def _is_numpy_state(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 5
        and value[0] == "MT19937"
        and not list(differences(value[1], ListOf(NUM_32_BITS, TWISTER), ""))
        and POSITION.holds(value[2])
        and type(value[3]) is int
        and value[3] in (0, 1)
        and is_number(value[4])
    )


NUM_32_BITS = Kind(
    f"a whole number below {WORD}", lambda value: type(value) is int and 0 <= value < WORD
)
POSITION = Kind(
    f"a whole number up to {TWISTER}", lambda value: type(value) is int and 0 <= value <= TWISTER
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
    has_others=True,  # earlier versions saved more
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
            {
                "row_losses": ListOf(ListOf(ListOf(AMOUNT)), 2),
                "monitored": ListOf(NUMBER),
                "best": ListOf(NUMBER),
                "num_worse": COUNT,
            },
        ),
        "lightning": Keys({"callbacks": NOTHING}, {"MixedPrecision": SCALER}),
    },
    {"owes_validation": FLAG},
)


def random_state_of(rank: int) -> str:
    """Return the name of a rank's random state; every rank writes its own."""
    return f"random-rank-{rank}"


def local_state_of(rank: int) -> str:
    """Return the name of the tensors that one rank alone holds; a rank without any has no file."""
    return f"local-rank-{rank}"


def check_documents(checkpoint: Checkpoint) -> None:
    """Check all of a checkpoint but its tensors; UserError names each key."""
    problems = [
        f"manifest.json: {problem}"
        for problem in differences(checkpoint.details, DETAILS, "details")
    ]
    if not problems:
        problems = [f"manifest.json: {problem}" for problem in _count_problems(checkpoint)]
    if problems := problems or list(_file_problems(checkpoint)):
        raise unusable(checkpoint.folder, problems)
    read_training(checkpoint)
    for rank in range(checkpoint.details["num_ranks"]):
        read_random_state(checkpoint, rank)


def read_training(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state of Lightning, optimizer and metrics; UserError names each wrong key."""
    training = _read(checkpoint, TRAINING)
    problems = list(differences(training, DOCUMENT_OF_TRAINING, ""))
    problems = problems or list(_disagreements(training, checkpoint))
    if problems:
        raise unusable(checkpoint.folder, [f"{TRAINING}.json: {problem}" for problem in problems])
    return training


def read_random_state(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return the random state of a rank; UserError names each wrong key."""
    name = random_state_of(rank)
    state = _read(checkpoint, name)
    if problems := list(differences(state, RANDOM, "")):
        raise unusable(checkpoint.folder, [f"{name}.json: {problem}" for problem in problems])
    return state


def unusable(folder: Path, problems: Iterable[str]) -> UserError:
    """Build the error for an intact checkpoint that cannot be resumed from, with the fix."""
    problems = list(problems)
    listed = [f"{folder}: {problem}" for problem in problems[:MAX_LISTED]]
    if (more := len(problems) - MAX_LISTED) > 0:
        listed[-1] += f"; and {more:,} more"
    fix = _fix(folder)
    return UserError([*listed[:-1], listed[-1] if fix in listed[-1] else f"{listed[-1]}; {fix}"])


def _fix(folder: Path) -> str:
    """Return what to type instead of resuming from the checkpoint in `folder`."""
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
    return f"type resume={typed} to resume from an earlier checkpoint, or {anew}"


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


def _file_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the files that a checkpoint of so many ranks lacks, or should not have."""
    files, num_ranks = set(checkpoint.manifest["files"]), checkpoint.details["num_ranks"]
    if num_ranks > len(files):  # each rank has a file of its own
        yield f"manifest.json: details.num_ranks is {num_ranks}, and there are {len(files)} files"
        return
    ranks = range(num_ranks)
    needed = {f"{name}.safetensors" for name in (MODEL, OPTIMIZER)} | {f"{TRAINING}.json"}
    needed |= {f"{random_state_of(rank)}.json" for rank in ranks}
    # A rank that has no tensor to write writes no file.
    shares = {f"{name}-rank-{rank}.safetensors" for name in (MODEL, OPTIMIZER) for rank in ranks}
    shares |= {f"{local_state_of(rank)}.safetensors" for rank in ranks}
    for name in sorted(needed - files):
        yield f"manifest.json: files lacks {name}"
    for name in sorted(files - needed - shares):
        yield f"manifest.json: files has {name}, which no checkpoint of {num_ranks} ranks has"


def _count_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the numbers of a manifest that contradict each other."""
    details = checkpoint.details
    if details["num_ranks"] % details["num_data_ranks"]:
        yield (
            f"details.num_data_ranks is {details['num_data_ranks']}, which does not divide "
            f"details.num_ranks, {details['num_ranks']}"
        )
    if checkpoint.step > details["total_steps"]:
        yield f"details.total_steps is {details['total_steps']}, and step is {checkpoint.step}"


def _disagreements(training: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the counts of a training that contradict each other or the checkpoint."""
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
    for index, one in enumerate(curves.get("row_losses", [])):
        if one and (len(one) != 2 or len(one[0]) != len(one[1])):
            yield (
                f"curves.row_losses[{index}] has lists of {', '.join(str(len(of)) for of in one)} "
                "numbers; expected two of one length"
            )
    if (curves["validated_step"] >= 0) != bool(curves["validations"]):
        yield (
            f"curves.validated_step is {curves['validated_step']}, and curves.validations has "
            f"{len(curves['validations'])} elements"
        )
    elif curves["validations"] and curves["validated_step"] == step:
        loss = curves["validations"][-1].get("val/loss")
        # A checkpoint of an earlier version was ranked by its loss.
        monitored = next(iter(curves.get("monitored", [loss])), None)
        if monitored != checkpoint.metric:
            yield (
                f"curves.validations ends with the loss {shown(monitored)}; expected "
                f"{shown(checkpoint.metric)}, the metric of manifest.json"
            )
