"""Init: write a commented experiment for your own model and data: `loft init NAME`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from app.process.environment import protect_streams
from app.process.errors import DONE, UserError
from app.process.installation import verb_command
from app.process.reporting import report
from data_modules import printable

USAGE = """\
loft init [NAME] [model=FOLDER_OR_HUB_ID] [data=FILE_OR_HUB_ID[,...]] [output=FILE.yaml]

writes NAME.yaml (my_run.yaml), a commented experiment; prompts for missing values on a terminal
"""
QUESTIONS = {
    "model": ("base model: a folder or a hub id", "Qwen/Qwen2.5-0.5B-Instruct"),
    "data": ("training data: a file, a folder or a hub id; several with commas", "data.jsonl"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,71}")
TEMPLATE = """\
# @package _global_
# What:    {name}
#
# preview: python -m app.preview +experiment={file}
# train:   python -m app.train +experiment={file}
# change:  any setting, here or on the command line: python -m app.train --help
defaults:
  # lora, ia3, freeze or full
  - override /adapter: lora
  - _self_

model:
  path: {model}
adapter:
  r: 16          # rank: a higher one has more parameters and takes more memory
  alpha: 32      # scale, often twice the rank
data:
  datasets:      # json, jsonl, csv, parquet, txt, folders, hub ids; each gets its own loss
{datasets}
    # format: alpaca               # default: detected from the columns
    # columns: {{instruction: question, output: answer}}   # format column: your column
  sequence_len: null     # tokens per row; null = the model's context, at most 2048
  val_set_size: 0.05     # fraction of rows held out for validation
optimizer:
  lr: null       # null = the default of the adapter
trainer:
  num_epochs: 1
  gradient_accumulation_steps: 8
evaluation:
  exact_match: false     # true: compare answers to held-out rows before and after training
"""


def init(words: list[str], ask: Callable[[str], str] | None) -> Path:
    """Write the experiment that `words` describe; `ask` prompts for missing values.

    UserError if a value is missing and `ask` is None, a word is unknown, or the file exists.
    """
    given = dict(word.partition("=")[::2] for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    known = {"model": "", "data": "", "output": ""}
    if unknown := [key for key in given if key not in known] + names[1:]:
        raise UserError(f"init: unknown argument {unknown[0]}; usage: {USAGE.splitlines()[0]}")
    name = names[0] if names else "my_run"
    if not NAME.fullmatch(name):
        raise UserError(f"init {name}: expected a name of letters, digits, '.', '-' and '_'")
    for key, (question, example) in QUESTIONS.items():
        if given.get(key):
            continue
        if ask is None:
            raise UserError(f"init: {key} is missing; type {key}={example} ({question})")
        given[key] = ask(f"{question} [{example}]: ").strip() or example
    file = Path(given.get("output") or f"{name}.yaml")
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"init output={file}: expected a name that ends in .yaml")
    paths = [path.strip() for path in given["data"].split(",") if path.strip()]
    text = TEMPLATE.format(
        name=name,
        file=file,
        model=_scalar(given["model"]),
        datasets="\n".join(f"  - path: {_scalar(path)}" for path in paths),
    )
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UserError(f"{file} exists; type another name, or output=FILE.yaml") from error
    return file


def _scalar(text: str) -> str:
    """Return text as a one-line YAML scalar, quoted if necessary."""
    return str(yaml.safe_dump(text, width=10_000)).removesuffix("\n").removesuffix("\n...")


def run(words: list[str]) -> int:
    """Run the verb; return its exit code."""
    if {"--help", "-h"} & set(words):
        print(USAGE, end="")
        return DONE
    try:
        file = init(words, input if sys.stdin.isatty() else None)
    except (UserError, OSError, EOFError, KeyboardInterrupt) as error:
        return report(error)
    shown = printable(str(file))
    print(f"written: {shown}; next, preview its data and train:")
    print(f"  {verb_command('preview')} +experiment={shown}")
    print(f"  {verb_command('train')} +experiment={shown}")
    return DONE


if __name__ == "__main__":
    protect_streams()
    sys.exit(run(sys.argv[1:]))
