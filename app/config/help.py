"""The pages that `--help` prints: made from conf/ and the settings' fields, without torch."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.config.conf_files import CONF, groups, read_conf_file
from app.config.schema import Setting, default_of, list_settings
from app.process.errors import UserError, nearest
from data_modules import describe_values

Parts = Mapping[str, Mapping[str, type]]

WHAT = {
    "train": "fine-tune a language model; leaves a verified adapter in outputs/",
    "preview": "what a run would learn from: rows, loss mask, packs, audit; needs a tokenizer only",
    "plan": "will it fit, how fast, what to change; needs no weights, no GPU and no network",
    "evaluate": "loss per data set, metrics of answers, tasks (MMLU, GSM8K, ...); base vs tuned",
    "merge": "adapter into base, checked against the adapter: a Hugging Face folder, and GGUF",
    "chat": "talk to a base with its adapter in the terminal",
    "serve": "OpenAI's chat API and a page for the browser, answered as an evaluation measures",
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
    "plan": (
        ("python -m app.plan +experiment=llama70b hardware=8xa100_80gb", ""),
        ("python -m app.plan +experiment=NAME hardware=2x8xh100 plan.tokens=50000000", "two nodes"),
        ("python -m app.plan model=NAME hardware=rtx4090 plan.write=FILE.yaml", ""),
    ),
    "evaluate": (
        ("python -m app.evaluate", "the newest finished run under outputs/"),
        ("python -m app.evaluate run=FOLDER", ""),
        ("python -m app.evaluate model.path=DIR adapter_path=DIR data=NAME", ""),
        ("python -m app.evaluate run=FOLDER evaluation=mmlu evaluation.task_dir=DIR", ""),
    ),
    "merge": (
        ("python -m app.merge", "the newest finished run under outputs/"),
        ("python -m app.merge run=FOLDER merge.dtype=bf16", ""),
        ("python -m app.merge model.path=DIR adapter_path=DIR output.dir=DIR", ""),
    ),
    "chat": (
        ("python -m app.chat", "the newest finished run under outputs/"),
        ("python -m app.chat run=FOLDER", ""),
        ("python -m app.chat model.path=DIR [adapter_path=DIR]", ""),
    ),
    "serve": (
        ("python -m app.serve", "the newest finished run under outputs/"),
        ("python -m app.serve run=FOLDER serve.port=0", ""),
        ("python -m app.serve model.path=DIR [adapter_path=DIR]", ""),
        ("LOFT_SERVE_KEY=... python -m app.serve serve.host=0.0.0.0", "for other machines"),
        ("python -m app.serve run=FOLDER serve.engine=vllm", "print the line that starts vLLM"),
    ),
}
MOST_OPTIONS = 40
"""of a group, on the first page"""
ENDING = """\
A value with spaces or commas goes into quotes: model.path="'my models/tiny'".
Files: settings in conf/, results of the experiments in conf/experiment/README.md.
Exit codes: 0 done, 2 wrong input, 3 the environment (disk, memory, package), 4 training went bad,
130/143 stopped by a signal. LOFT_TRACEBACK=1 shows where an error happened, --verbose details."""


def help_page(verb: str, top: type, parts: Parts, conf: Path, topic: str | None = None) -> str:
    """Return the page of a verb: the first one, or every setting of `topic`.

    `parts`: group -> option -> schema. `topic`: `all`, a group, or a setting's full key.
    """
    settings = list_settings(top, parts)
    if topic is not None:
        return _topic_page(topic, settings)
    width = _width()
    primary = read_conf_file(conf / f"{verb}.yaml", package="")
    defaults = dict(primary.choices)
    options = groups(conf)
    lines = [f"loft {verb}: {WHAT[verb]}", "", "usage"]
    lines += [f"  {command:<44}  {meaning}".rstrip() for command, meaning in USAGE[verb]]
    if verb in ("train", "preview", "plan"):
        lines += ["", "whole runs: +experiment=NAME"]
        runs = {
            name: _first_comment(conf / "experiment" / f"{name}.yaml")
            for name in options["experiment"]
        }
        lines += _two_columns(runs, width)
    lines += ["", "groups: GROUP=OPTION (* is the default)"]
    lines += _two_columns(
        {
            group: _names(names, defaults[group])
            if len(names) <= MOST_OPTIONS
            else f"{len(names)} names, which --help {group} lists"
            for group, names in options.items()
            if group in defaults and len(names) > 1
        },
        width,
    )
    lines += ["", "most used settings: KEY=VALUE (default)"]
    shown = [one for one in settings if is_shown(one, verb)]
    lines += _two_columns({one.typed_key: describe(one) for one in shown}, width)
    element = "data.datasets[]."
    of_datasets = {
        one.key.removeprefix(element): describe(one)
        for one in settings
        if one.key.startswith(element)
    }
    if of_datasets:
        each = "each data set: 'data.datasets=[{KEY: VALUE, ...}, ...]', also data.test_datasets"
        lines += ["", each, *_two_columns(of_datasets, width)]
    names = ", ".join(one.key for one in settings if one.is_part and "." not in one.key)
    lines += ["", *textwrap.wrap(f"every setting: --help all, or --help and one of {names}", width)]
    return "\n".join([*lines, "", *ENDING.splitlines()])


def _names(options: Sequence[str], default: str | None) -> str:
    return ", ".join(f"{name}*" if name == default else name for name in options)


def _topic_page(topic: str, settings: Sequence[Setting]) -> str:
    found = [
        one
        for one in settings
        if topic in ("all", one.key, one.typed_key)
        or one.key.startswith((f"{topic}.", f"{topic}["))
    ]
    if not found:
        known = [one.typed_key for one in settings]
        raise UserError(
            f"--help {topic}: no such setting; type --help, --help all, --help GROUP or --help KEY"
            f"{nearest(topic, known)}"
        )
    lines: list[str] = []
    if topic in (options := groups(CONF)):
        lines += ["", *_two_columns({f"{topic}=": _names(options[topic], None)}, _width())]
    for title, members in sections(found):
        rows = {one.typed_key: describe(one) for one in members}
        lines += ["", title, *_two_columns(rows, _width())]
    return "\n".join(lines[1:])


def sections(settings: Sequence[Setting]) -> list[tuple[str, list[Setting]]]:
    """Return settings under the title of their group, and of the options that have them."""
    found: dict[str, list[Setting]] = {}
    about = {one.key: one.doc for one in settings if one.is_part}
    for one in settings:
        if one.is_part:
            continue
        group = one.key.partition(".")[0] if "." in one.key else ""
        title = f"{group}: {about[group]}" if group in about else group or "the run"
        if one.options:
            title = f"{group}={'|'.join(one.options)}"
        found.setdefault(title, []).append(one)
    return list(found.items())


def is_shown(one: Setting, verb: str) -> bool:
    """Return whether the first page of a verb's help has a setting; those of elements never."""
    shown = one.facts.shown
    return "[]" not in one.key and (verb in shown if isinstance(shown, tuple) else shown)


def describe(one: Setting) -> str:
    """Return `(default; values) meaning` of a setting; the values where the meaning has not all."""
    return f"({'; '.join(filter(None, [default_text(one), values_text(one)]))}) {one.doc}"


def default_text(one: Setting) -> str:
    """Return a setting's default as it is typed; without one it is required."""
    default = default_of(one.field)
    if default is dataclasses.MISSING:
        return "required"
    words = {"None": "null", "True": "true", "False": "false", "[]": "none", "{}": "none"}
    shown = ", ".join(default) if default and isinstance(default, list) else default
    return words.get(str(shown), str(shown))


def values_text(one: Setting) -> str:
    """Return the values that a setting takes; empty where its default and meaning have them."""
    facts, text = one.facts, f"{default_text(one)} {one.doc}"
    if all(re.search(rf"\b{re.escape(str(word))}\b", text) for word in facts.choices):
        facts = dataclasses.replace(facts, choices=())
    return describe_values(facts, None)


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _first_comment(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# What:"):
            return line.removeprefix("# What:").strip()
    return ""


def _two_columns(rows: dict[str, str], width: int) -> list[str]:
    left = min(max(map(len, rows)) + 4, width // 3)
    lines = []
    for name, text in rows.items():
        beside = max(len(name) + 4, left)  # a long name takes from the first line of its text
        first, *others = textwrap.wrap(
            text, width, initial_indent=" " * beside, break_on_hyphens=False
        ) or [""]
        lines.append(f"  {name:<{beside - 2}}{first.lstrip()}".rstrip())
        lines += [
            " " * left + line for line in textwrap.wrap(" ".join(others), max(width - left, 30))
        ]
    return lines
