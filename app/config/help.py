"""The pages of `--help`, generated from conf/ and the settings' fields, without torch."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from app.config.conf_files import CONF, list_groups, read_conf_file
from app.config.schema import Setting, list_settings
from app.config.verbs import ALL_VERBS, only_in
from common.errors import UserError, nearest
from common.facts import default_of, describe_values
from common.installation import is_checkout, verb_command

Parts = Mapping[str, Mapping[str, type]]

USAGE = {
    "train": (
        ("python -m app.train", "the same as +experiment=quickstart"),
        ("python -m app.train +experiment=NAME [GROUP=OPTION] [KEY=VALUE] ...", ""),
        ("python -m app.train model.path=DIR 'data.datasets=[{path: FILE}]' ...", ""),
        ("python -m app.train resume=FOLDER", "resume a run with its own settings"),
        ("python -m app.train -m KEY=A,B ...", "sweep: one process per combination, one table"),
        ("python -m app.train ... --cfg job", "print the composed settings"),
    ),
    "preview": (
        ("python -m app.preview", "the same as +experiment=quickstart"),
        ("python -m app.preview +experiment=NAME [GROUP=OPTION] [KEY=VALUE] ...", ""),
        ("python -m app.preview model.path=TOKENIZER_DIR 'data.datasets=[{path: FILE}]'", ""),
    ),
    "launch": (
        ("python -m app.launch launcher=slurm hardware=2x8xh100 +experiment=NAME", "two nodes"),
        ("python -m app.launch launcher=kubernetes launch.image=NAME hardware=8xh100 ...", ""),
        ("python -m app.launch ... launch.submit=false", "only write the job file, and print it"),
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
_MAX_OPTIONS = 40
"""most options of a group that the first page lists"""
_RESULTS = "conf/experiment/README.md"
_ENDING = """\
A value with spaces or commas goes into quotes: model.path="'my models/tiny'".
Files: {files}.
Exit codes: 0 done, 2 invalid input, 3 environment (disk, memory, package), 4 training failed,
130/143 stopped by a signal. LOFT_TRACEBACK=1 prints tracebacks, --verbose more details."""


def help_page(verb: str, top: type, parts: Parts, conf: Path, topic: str | None = None) -> str:
    """Return the help of a verb: its first page, or every setting of `topic`.

    `parts`: group -> option -> schema. `topic`: `all`, a group, or a setting's full key.
    """
    settings = list_settings(top, parts)
    if topic is not None:
        return _topic_page(topic, settings)
    width = page_width()
    primary = read_conf_file(conf / f"{verb}.yaml", package="")
    defaults = dict(primary.choices)
    options = list_groups(conf)
    lines = [f"loft {verb}: {ALL_VERBS[verb].what}", "", "usage"]
    for command, meaning in USAGE[verb]:
        typed = command.replace(f"python -m app.{verb}", verb_command(verb))
        lines.append(f"  {typed:<44}  {meaning}".rstrip())
    if verb in ("train", "preview", "plan", "launch"):
        lines += ["", "complete runs: +experiment=NAME"]
        runs = {name: _what(conf / "experiment" / f"{name}.yaml") for name in options["experiment"]}
        lines += two_columns(runs, width)
    if verb == "train":
        sweeps = {name: _what(conf / "sweep" / f"{name}.yaml") for name in options["sweep"]}
        lines += ["", "sweeps: -m +experiment=NAME +sweep=NAME", *two_columns(sweeps, width)]
    lines += ["", "groups: GROUP=OPTION (* is the default)"]
    lines += two_columns(
        {
            group: _names(names, defaults[group])
            if len(names) <= _MAX_OPTIONS
            else f"{len(names)} options, listed by --help {group}"
            for group, names in options.items()
            if group in defaults and len(names) > 1
        },
        width,
    )
    lines += ["", "most used settings: KEY=VALUE (default)"]
    shown = [setting for setting in settings if _is_shown(setting, verb)]
    lines += two_columns({setting.typed_key: describe(setting) for setting in shown}, width)
    element = "data.datasets[]."
    of_datasets = {
        setting.key.removeprefix(element): describe(setting)
        for setting in settings
        if setting.key.startswith(element)
    }
    if of_datasets:
        heading = (
            "each data set: 'data.datasets=[{KEY: VALUE, ...}, ...]', also data.val_datasets, "
            "data.test_datasets"
        )
        lines += ["", heading, *two_columns(of_datasets, width)]
    groups = ", ".join(each.key for each in settings if each.is_part and "." not in each.key)
    lines += ["", *textwrap.wrap(f"all settings: --help all, or --help and one of {groups}", width)]
    files = f"settings in {conf}"
    if is_checkout():
        files = f"settings in {conf.name}/, measured results of the experiments in {_RESULTS}"
    return "\n".join([*lines, "", *_ENDING.format(files=files).splitlines()])


def _names(options: Sequence[str], default: str | None) -> str:
    return ", ".join(f"{name}*" if name == default else name for name in options)


def _topic_page(topic: str, settings: Sequence[Setting]) -> str:
    found = [
        setting
        for setting in settings
        if topic in ("all", setting.key, setting.typed_key)
        or setting.key.startswith((f"{topic}.", f"{topic}["))
    ]
    if not found:
        if hint := only_in(topic):
            raise UserError(f"--help {topic}: not a setting of this verb{hint}")
        known = [setting.typed_key for setting in settings]
        raise UserError(
            f"--help {topic}: no such setting; type --help, --help all, --help GROUP or --help KEY"
            f"{nearest(topic, known)}"
        )
    lines: list[str] = []
    if topic in (options := list_groups(CONF)):
        lines += ["", *two_columns({f"{topic}=": _names(options[topic], None)}, page_width())]
    for title, members in sections(found):
        rows = {setting.typed_key: describe(setting) for setting in members}
        if len(title) > page_width():
            title = "\n".join(textwrap.wrap(title.replace("|", " | "), page_width()))
        lines += ["", title, *two_columns(rows, page_width())]
    return "\n".join(lines[1:])


def sections(settings: Sequence[Setting]) -> list[tuple[str, list[Setting]]]:
    """Group settings under titles: their group, or the options of the group that have them."""
    found: dict[str, list[Setting]] = {}
    docs = {setting.key: setting.doc for setting in settings if setting.is_part}
    for setting in settings:
        if setting.is_part:
            continue
        group = setting.key.partition(".")[0] if "." in setting.key else ""
        title = f"{group}: {docs[group]}" if group in docs else group or "the run"
        if setting.options:
            title = f"{group}={'|'.join(setting.options)}"
        found.setdefault(title, []).append(setting)
    return list(found.items())


def _is_shown(setting: Setting, verb: str) -> bool:
    """Return whether the first page of help lists a setting; never one of list elements."""
    shown = setting.facts.shown
    return "[]" not in setting.key and (verb in shown if isinstance(shown, tuple) else shown)


def describe(setting: Setting) -> str:
    """Return `(default; values) docstring` of a setting."""
    facts = filter(None, [default_text(setting), _values_text(setting)])
    return f"({'; '.join(facts)}) {setting.doc}"


def default_text(setting: Setting) -> str:
    """Return a setting's default as a user types it, or `required`."""
    default = default_of(setting.field)
    if default is dataclasses.MISSING:
        return "required"
    words = {"None": "null", "True": "true", "False": "false", "[]": "none", "{}": "none"}
    shown = ", ".join(map(str, default)) if default and isinstance(default, list) else default
    return words.get(str(shown), str(shown))


def _values_text(setting: Setting) -> str:
    """Return the values that a setting accepts; empty if default and docstring name all choices."""
    facts, text = setting.facts, f"{default_text(setting)} {setting.doc}"
    if all(re.search(rf"\b{re.escape(str(word))}\b", text) for word in facts.choices):
        facts = dataclasses.replace(facts, choices=())
    return describe_values(facts, None)


def page_width() -> int:
    """Return the characters of a line of help: those of the terminal, at most 120."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _what(path: Path) -> str:
    """Return what a file's header says after `# What:`, with its indented further lines."""
    found = re.search(r"^# What:(.*(?:\n#  .*)*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return " ".join(found[1].replace("#", " ").split()) if found else ""


def two_columns(rows: dict[str, str], width: int) -> list[str]:
    """Lay out names and their texts, wrapped, as lines of `width` characters."""
    left = min(max(map(len, rows)) + 4, width // 3)
    lines = []
    for name, text in rows.items():
        indent = max(len(name) + 4, left)  # a long name shortens the first line of its text
        wrap = partial(textwrap.wrap, break_on_hyphens=False)
        first, *others = wrap(text, width, initial_indent=" " * indent) or [""]
        lines.append(f"  {name:<{indent - 2}}{first.lstrip()}".rstrip())
        lines += [" " * left + line for line in wrap(" ".join(others), max(width - left, 30))]
    return lines
