"""Settings as a tree of names: which exist, what they mean, what a misspelt one was meant to be.

Works on dataclasses and plain values alone; knows neither Hydra nor any setting by name, except
for the words that other tools use for ours.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from app.process.errors import nearest

OTHER_WORDS = {
    "base_model": "model.path",
    "model_name_or_path": "model.path",
    "learning_rate": "optimizer.lr",
    "optim": "optimizer",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "embedding_lr": "optimizer.lr_by_pattern",
    "embedding_learning_rate": "optimizer.lr_by_pattern",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "rank": "adapter.r",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.target_modules",
    "batch_size": "trainer.micro_batch_size",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "accumulate_grad_batches": "trainer.gradient_accumulation_steps",
    "epochs": "trainer.num_epochs",
    "max_epochs": "trainer.num_epochs",
    "num_train_epochs": "trainer.num_epochs",
    "gradient_clip_val": "trainer.max_grad_norm",
    "cutoff_len": "data.sequence_len",
    "max_length": "data.sequence_len",
    "max_seq_length": "data.sequence_len",
    "output_dir": "output.dir",
    "lr_scheduler_type": "schedule",
    "val_check_interval": "trainer.validate_every_steps",
    "async": "trainer.checkpoint.asynchronous",
    "save_steps": "trainer.checkpoint.every_steps",
    "save_total_limit": "trainer.checkpoint.keep_last",
    "resume_from_checkpoint": "resume",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One given value: its full key, and the dataclass and field that it is for."""

    key: str
    owner: type
    field: str
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """A key that no setting has, with the schema in which it was looked for (None: no place)."""

    key: str
    owner: type | None
    value: Any


def hints_of(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, in order."""
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def docs_of(schema: type) -> dict[str, str]:
    """Return the string that stands under each field of a dataclass, bases included."""
    docs: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for above, below in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[above.target.id] = " ".join(str(below.value.value).split())
    return docs


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default; dataclasses.MISSING where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def element_of(hint: Any) -> Any:
    """Return X of list[X] and of X | None; other hints as they are."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        return inner[0] if len(inner) == 1 else hint
    return hint


def walk(value: Any, hint: Any, key: str, owner: type, field: str) -> Iterator[Leaf | Unknown]:
    """Go through a given value beside its type: every leaf, and every key that does not exist."""
    hint = element_of(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = hints_of(hint)
        for name, part in value.items():
            if name in hints:
                yield from walk(part, hints[name], f"{key}.{name}", hint, name)
            else:
                yield Unknown(f"{key}.{name}", hint, part)
    elif typing.get_origin(hint) is list and isinstance(value, list):
        (inner,) = typing.get_args(hint)
        for index, part in enumerate(value):
            if isinstance(element_of(inner), type) and isinstance(part, dict):
                yield from walk(part, inner, f"{key}[{index}]", owner, field)
            else:
                yield Leaf(f"{key}[{index}]", owner, field, [part])
        if not value:
            yield Leaf(key, owner, field, value)
    else:
        yield Leaf(key, owner, field, value)


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """List every full key of a schema; elements of lists as `data.datasets[].path`."""
    for name, hint in hints_of(schema).items():
        inner = element_of(hint)
        element = typing.get_args(inner)[0] if typing.get_origin(inner) is list else None
        yield f"{prefix}{name}"
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from keys_of(inner, f"{prefix}{name}.")
        elif isinstance(element, type) and dataclasses.is_dataclass(element):
            yield from keys_of(element, f"{prefix}{name}[].")


def suggest(key: str, siblings: list[str], all_keys: list[str]) -> str:
    """Word a guess at what a misspelt full key was meant to be: `; did you mean X?`, or nothing."""
    parent, _, leaf = key.rpartition(".")
    if leaf in OTHER_WORDS:
        return f"; did you mean {OTHER_WORDS[leaf]}?"
    here = nearest(leaf, siblings)
    if here:
        return here.replace(
            "did you mean ", f"did you mean {parent}." if parent else "did you mean "
        )
    elsewhere = [known for known in all_keys if known.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return nearest(key, [known for known in all_keys if not key.startswith(f"{known}.")])


def describe_type(hint: Any) -> str:
    """Say in words what a setting takes."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    optional = type(None) in typing.get_args(hint)
    inner = element_of(hint)
    if inner in words:
        text = words[inner]
    elif typing.get_origin(inner) is list:
        element = element_of(typing.get_args(inner)[0])
        is_schema = isinstance(element, type) and dataclasses.is_dataclass(element)
        names = ", ".join(hints_of(element)) if is_schema else describe_type(element)
        text = f"a list of {{{names}}}" if is_schema else f"a list of {names}"
    elif typing.get_origin(inner) is dict:
        text = "{name: value, ...}"
    elif isinstance(inner, type) and dataclasses.is_dataclass(inner):
        text = f"{{{', '.join(hints_of(inner))}}}"
    else:
        text = str(inner)
    return f"{text} or null" if optional else text
