"""The page that `--help` prints: made from conf/ and the dataclasses, without Hydra or torch."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config import schema
from app.config.conf_files import choices_of, groups, read_conf_file

MOST_USED = {
    "train": (
        "model.path",
        "data.datasets",
        "data.sequence_len",
        "data.val_set_size",
        "data.on_long",
        "data.chat_template",
        "adapter.r",
        "adapter.alpha",
        "adapter.dropout",
        "adapter.target_modules",
        "optimizer.lr",
        "optimizer.weight_decay",
        "schedule.warmup_ratio",
        "trainer.micro_batch_size",
        "trainer.gradient_accumulation_steps",
        "trainer.global_batch_size",
        "trainer.num_epochs",
        "trainer.max_steps",
        "trainer.precision",
        "trainer.devices",
        "trainer.accelerator",
        "trainer.validate_every_steps",
        "trainer.checkpoint.every_steps",
        "trainer.checkpoint.keep_last",
        "trainer.checkpoint.asynchronous",
        "evaluation.exact_match",
        "output.name",
        "output.dir",
        "resume",
        "resume_allow",
        "supervise.max_restarts",
        "seed",
    ),
    "preview": (
        "model.path",
        "model.tokenizer_path",
        "data.datasets",
        "data.sequence_len",
        "data.on_long",
        "data.chat_template",
        "data.train_on_inputs",
        "trainer.micro_batch_size",
        "trainer.gradient_accumulation_steps",
        "trainer.global_batch_size",
        "trainer.devices",
        "preview.max_rows",
        "preview.rows",
        "preview.packs",
        "preview.tokens",
        "output.dir",
        "seed",
    ),
    "evaluate": (
        "run",
        "model.path",
        "adapter_path",
        "data.datasets",
        "data.test_datasets",
        "evaluation.max_rows",
        "evaluation.max_new_tokens",
        "trainer.accelerator",
        "output.dir",
    ),
}
DATA_PARTS = ("data", "packing")
"""parts of which all settings are listed, where a verb learns from data"""
WHAT = {
    "train": "fine-tune a language model; leaves a verified adapter in outputs/",
    "preview": "what a run would learn from: rows, loss mask, packs, audit; needs a tokenizer only",
    "evaluate": "loss per data set and exact match on held-out rows, base against tuned",
}
USAGE = {
    "train": (
        ("python -m app.train", "the same as +experiment=quickstart"),
        ("python -m app.train +experiment=NAME [GROUP=OPTION] [KEY=VALUE] ...", ""),
        ("python -m app.train model.path=DIR 'data.datasets=[{path: FILE}]' ...", ""),
        ("python -m app.train resume=FOLDER", "go on with a run, by its own settings"),
        ("python -m app.train -m KEY=A,B ...", "every combination, a process each, one table"),
        ("python -m app.train ... --cfg job", "print the settings that this would use"),
    ),
    "preview": (
        ("python -m app.preview", "the same as +experiment=quickstart"),
        ("python -m app.preview +experiment=NAME [GROUP=OPTION] [KEY=VALUE] ...", ""),
        ("python -m app.preview model.path=TOKENIZER_DIR 'data.datasets=[{path: FILE}]'", ""),
    ),
    "evaluate": (
        ("python -m app.evaluate", "the newest finished run under outputs/"),
        ("python -m app.evaluate run=FOLDER", ""),
        ("python -m app.evaluate model.path=DIR adapter_path=DIR data=NAME", ""),
    ),
}
ENDING = """\
A value with spaces or commas goes into quotes: model.path="'my models/tiny'".
Files: settings in conf/, results of the experiments in conf/experiment/README.md.
Exit codes: 0 done, 2 wrong input, 3 the environment (disk, memory, package), 4 training went bad,
130/143 stopped by a signal. LOFT_TRACEBACK=1 shows where an error happened."""


def help_page(verb: str, top: type, parts: dict[str, dict[str, type]], conf: Path) -> str:
    """Return the page of a verb; `parts`: group -> option -> schema, as the door knows them."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    primary = read_conf_file(conf / f"{verb}.yaml", package="")
    defaults = dict(choices_of(primary))
    options = groups(conf)
    lines = [f"loft {verb}: {WHAT[verb]}", "", "usage"]
    lines += [f"  {command:<44}  {meaning}".rstrip() for command, meaning in USAGE[verb]]
    if verb in ("train", "preview"):
        lines += ["", "whole runs: +experiment=NAME"]
        runs = {
            name: _first_comment(conf / "experiment" / f"{name}.yaml")
            for name in options["experiment"]
        }
        lines += _two_columns(runs, width)
    lines += ["", "groups: GROUP=OPTION (* is taken when nothing is typed)"]
    lines += _two_columns(
        {
            group: ", ".join(f"{name}*" if name == defaults[group] else name for name in names)
            for group, names in options.items()
            if group in defaults and len(names) > 1
        },
        width,
    )
    lines += ["", "most used settings: KEY=VALUE (value when nothing is typed)"]
    lines += _two_columns(
        {key: _describe(key, top, parts, defaults) for key in MOST_USED[verb]}, width
    )
    lines += [
        "",
        "each data set: 'data.datasets=[{KEY: VALUE, ...}, ...]', also data.test_datasets",
    ]
    lines += _two_columns(_keys_of_a_dataset(top), width)
    if verb in ("train", "preview"):
        lines += ["", "all else that can be said of the data: KEY=VALUE"]
        rest = [key for key in _leaves(top, DATA_PARTS) if key not in MOST_USED[verb]]
        lines += _two_columns({key: _describe(key, top, parts, defaults) for key in rest}, width)
    return "\n".join([*lines, "", *ENDING.splitlines()])


def _leaves(top: type, names: Sequence[str]) -> list[str]:
    """Return the full keys of all settings of some parts, without the keys of list elements."""
    keys = [
        key
        for name in names
        for key in schema.keys_of(schema.hints_of(top)[name], f"{name}.")
        if "[]" not in key
    ]
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def _keys_of_a_dataset(top: type) -> dict[str, str]:
    """Return the keys of one element of data.datasets, and what they mean."""
    hint = schema.hints_of(schema.hints_of(top)["data"])["datasets"]
    (element,) = typing.get_args(hint)
    return {
        field.name: _meaning(schema.docs_of(element)[field.name], schema.default_of(field))
        for field in dataclasses.fields(element)
    }


def _first_comment(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# What:"):
            return line.removeprefix("# What:").strip()
    return ""


def _describe(
    key: str, top: type, parts: dict[str, dict[str, type]], defaults: dict[str, Any]
) -> str:
    """Return `(default) meaning` of a setting."""
    owner: Any = top
    *path, leaf = key.split(".")
    for name in path:
        hint = schema.hints_of(owner)[name]
        owner = parts[name][defaults[name]] if name in parts else hint
    field = next(field for field in dataclasses.fields(owner) if field.name == leaf)
    return _meaning(schema.docs_of(owner).get(leaf, ""), schema.default_of(field))


def _meaning(text: str, default: Any) -> str:
    """Return `(default) text`; without a default it must be given."""
    if default is dataclasses.MISSING:
        return f"(must be given) {text}"
    words = {"None": "null", "True": "true", "False": "false", "[]": "none", "{}": "none"}
    shown = ", ".join(default) if default and isinstance(default, list) else default
    return f"({words.get(str(shown), shown)}) {text}"


def _two_columns(rows: dict[str, str], width: int) -> list[str]:
    left = max(map(len, rows)) + 4
    lines = []
    for name, text in rows.items():
        wrapped = textwrap.wrap(text, max(width - left, 30)) or [""]
        lines.append(f"  {name:<{left - 2}}{wrapped[0]}".rstrip())
        lines += [" " * left + line for line in wrapped[1:]]
    return lines
