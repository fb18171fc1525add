"""Init: write a commented experiment for a model and data of one's own: `loft init NAME`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from app.process.environment import keep_streams
from app.process.errors import DONE, UserError
from app.process.reporting import report
from data_modules import printable

USAGE = """\
loft init [NAME] [model=FOLDER_OR_HUB_ID] [data=FILE_OR_HUB_ID[,...]] [output=FILE.yaml]

writes NAME.yaml (my_run.yaml), a commented experiment; what is not given is asked on a terminal
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
# look:    python -m app.preview +experiment={file}
# train:   python -m app.train +experiment={file}
# change:  any setting, here or behind the command: python -m app.train --help
defaults:
  # a part is one word: lora, ia3, freeze, full
  - override /adapter: lora
  - _self_

model:
  path: {model}
adapter:
  r: 16          # rank: more learns more, and takes more memory
  alpha: 32      # scale, often twice the rank
data:
  datasets:      # json, jsonl, csv, parquet, txt, folders, hub ids; each has its own loss
{datasets}
    # format: alpaca               # guessed from the columns where it is not given
    # columns: {{instruction: question, output: answer}}   # your names of its columns
  sequence_len: null     # tokens of a row; null = the model's, and 2048 at most
  val_set_size: 0.05     # share of the rows that is held out
optimizer:
  lr: null       # null = the default of the adapter
trainer:
  num_epochs: 1
  gradient_accumulation_steps: 8
evaluation:
  exact_match: false     # true: answer held-out rows before and after, and compare letter by letter
"""


def init(words: list[str], ask: Callable[[str], str] | None) -> Path:
    """Write the experiment that `words` describe; `ask` answers what they leave open.

    UserError where nobody can be asked, a word is not known, or the file is there already.
    """
    given = dict(word.partition("=")[::2] for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    known = {"model": "", "data": "", "output": ""}
    if unknown := [key for key in given if key not in known] + names[1:]:
        raise UserError(f"init: {unknown[0]} is not known; {USAGE.splitlines()[0]}")
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
    """Return text as YAML has it in a line, quoted where it must be."""
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
    print(f"written: {shown}; look at what it would learn from, then train:")
    print(f"  python -m app.preview +experiment={shown}")
    print(f"  python -m app.train +experiment={shown}")
    return DONE


if __name__ == "__main__":
    keep_streams()
    sys.exit(run(sys.argv[1:]))
