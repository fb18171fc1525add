"""Init: write a commented experiment for your own model and data: `loft init NAME`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from app.config.conf_files import CONF, SCHEMA, list_groups
from app.config.dispatch import default_text, run_guarded
from app.config.verbs import SETTINGS
from app.process.environment import protect_streams
from app.process.launch import quote_words
from common.errors import DONE, UserError
from common.installation import verb_command
from common.text import printable

_USAGE = """\
loft init [NAME] [model=MODEL] [data=DATA[,DATA...]] [output=FILE.yaml]

writes NAME.yaml (my_run.yaml), a commented experiment; prompts for missing values on a terminal
MODEL: a folder, a hub id, or a name that `python -m app.train --help model` lists
DATA:  a file, a folder, a hub id, or a name that `python -m app.train --help data` lists
"""
_QUESTIONS = {
    "model": ("base model: a folder, a hub id or a listed name", "Qwen/Qwen2.5-0.5B-Instruct"),
    "data": ("training data: a file, a folder or a hub id; several with commas", "data.jsonl"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,71}")
TEMPLATE = """\
# @package _global_
{schema}# What:    {name}
#
# preview: python -m app.preview {word}
# train:   python -m app.train {word}
# change:  any setting, here or on the command line: python -m app.train --help
defaults:
{options}  # lora, ia3, freeze or full
  - override /adapter: lora
  - _self_

{own}# Often changed, here with the defaults: remove the `# ` of a group and of its settings.
{others}"""
_DATASETS = """\
data:
  datasets:  # json, jsonl, csv, parquet, txt, folders, hub ids; each gets its own loss
{datasets}
    # format: alpaca  # default: detected from the columns
    # columns: {{instruction: question, output: answer}}  # format column: your column
  # val_datasets: [FILE]  # your own validation rows; else a share of those above (val_set_size)
"""
_OFTEN_CHANGED = (
    "data.sequence_len",
    "data.val_set_size",
    "adapter.r",
    "adapter.alpha",
    "optimizer.lr",
    "trainer.num_epochs",
    "trainer.gradient_accumulation_steps",
    "evaluation.exact_match",
)
"""settings that the file lists, with default and meaning from their fields"""


def init(words: list[str], ask: Callable[[str], str] | None) -> Path:
    """Write the experiment that `words` describe; `ask` prompts for missing values.

    UserError if a value is missing and `ask` is None, a word is unknown, or the file exists.
    """
    given = dict(word.partition("=")[::2] for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    known = {"model": "", "data": "", "output": ""}
    if unknown := [key for key in given if key not in known] + names[1:]:
        raise UserError(f"init: unknown argument {unknown[0]}; usage: {_USAGE.splitlines()[0]}")
    name = names[0] if names else "my_run"
    if not NAME.fullmatch(name):
        raise UserError(f"init {name}: expected a name of letters, digits, '.', '-' and '_'")
    for key, (question, example) in _QUESTIONS.items():
        if given.get(key):
            continue
        if ask is None:
            raise UserError(f"init: {key} is missing; type {key}={example} ({question})")
        given[key] = ask(f"{question} [{example}]: ").strip() or example
    file = Path(given.get("output") or f"{name}.yaml")
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"init output={file}: expected a name that ends in .yaml")
    paths = [path.strip() for path in given["data"].split(",") if path.strip()]
    if not paths:
        raise UserError(f"init data={given['data']}: no file is named")
    text = _text(name, file, given["model"], paths)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UserError(f"{file} exists; type another name, or output=FILE.yaml") from error
    return file


def _text(name: str, file: Path, model: str, data: list[str]) -> str:
    if len(data) > 1 and (named := [each for each in data if _is_option("data", each)]):
        raise UserError(f"init data={','.join(data)}: type {named[0]} alone, or your own data only")
    options, own = [], []
    groups = list(dict.fromkeys(key.partition(".")[0] for key in _OFTEN_CHANGED))
    if _is_option("model", model):
        options.append(f"  - override /model: {model}\n")
    else:
        own.append(f"model:\n  path: {_scalar(model)}\n")
    if _is_option("data", data[0]):
        options.append(f"  - override /data: {data[0]}\n")
    else:
        datasets = "\n".join(f"  - path: {_scalar(path)}" for path in data)
        own += [_DATASETS.format(datasets=datasets), *_often_changed("data", "  # ")]
        groups.remove("data")
    others = [
        line for group in groups for line in (f"# {group}:\n", *_often_changed(group, "#   "))
    ]
    return TEMPLATE.format(
        schema=_schema_line(file),
        name=name,
        word=quote_words(f"+experiment={file}"),
        options="".join(options),
        own="".join([*own, "\n"] if own else []),
        others="".join(others),
    )


def _often_changed(group: str, start: str) -> list[str]:
    settings = {each.key: each for each in SETTINGS}
    chosen = [settings[key] for key in _OFTEN_CHANGED if key.startswith(f"{group}.")]
    return [
        f"{start}# {each.doc}\n{start}{each.field.name}: {default_text(each)}\n" for each in chosen
    ]


def _is_option(group: str, name: str) -> bool:
    return name in list_groups(CONF)[group] and not Path(name).exists()


def _schema_line(file: Path) -> str:
    """Return the comment by which editors find the JSON schema; empty if they cannot."""
    path = os.path.relpath(SCHEMA, file.absolute().parent)
    is_found = SCHEMA.is_file() and len(path.split()) == 1  # the comment's path ends at a space
    return f"# yaml-language-server: $schema={path}\n" if is_found else ""


def _scalar(text: str) -> str:
    return str(yaml.safe_dump(text, width=10_000)).removesuffix("\n").removesuffix("\n...")


def run(words: list[str]) -> int:
    return run_guarded("init", lambda: _run(words))


def _run(words: list[str]) -> int:
    if {"--help", "-h"} & set(words):
        print(_USAGE, end="")
        return DONE
    file = init(words, input if sys.stdin.isatty() else None)
    print(f"written: {printable(str(file))}; next, preview its data and train:")
    for verb in ("preview", "train"):
        print(f"  {verb_command(verb)} {quote_words(f'+experiment={file}')}")
    return DONE


if __name__ == "__main__":
    protect_streams()
    sys.exit(run(sys.argv[1:]))
