"""The YAML files that settings come from: the options of each group under conf/, and one file read
as plain values with the line of every key. Composing them is Hydra's work.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config.overrides import keys_in_python
from app.config.verbs import OPTIONS_ELSEWHERE, TYPED_KEYS
from app.planning.hardware import custom_hardware_advice
from app.process.errors import ROOT, UserError, nearest
from app.process.untrusted import limits, over_limit, read_text, reading
from app.run.folder import expand_home

CONF = ROOT / "conf"
YAML_SUFFIXES = (".yaml", ".yml")
FLOAT = r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"
MAX_WORD = 200
"""characters of an option in a defaults list, which is the name of a file"""


class HydraLoader(yaml.SafeLoader):
    """YAML as Hydra reads it: 1e-3 is a number, a date is text."""


HydraLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
HydraLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(FLOAT), list("-+.0123456789")
)


@dataclasses.dataclass(frozen=True, slots=True)
class ConfFile:
    """One YAML file: its values without the defaults list, and the line of every key."""

    path: Path
    package: str
    defaults: list[Any]
    values: dict[str, Any]
    lines: dict[str, int]
    choices: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    """group and option of each choice in its defaults list"""

    def full(self, local: str) -> str:
        """Return the full key of one in this file, whose keys may lie below a package."""
        return f"{self.package}.{local}" if self.package else local

    def sets(self, key: str) -> bool:
        """Tell whether full key `key` stands in this file."""
        return any(self.full(local) == key for local in self.lines)

    def where(self, key: str) -> str:
        """Return `conf/experiment/x.yaml:12`, the place of full key `key` in this file."""
        local = key.removeprefix(self.full(""))
        while local and local not in self.lines:
            local = local.rpartition("." if not local.endswith("]") else "[")[0]
        return f"{shown(self.path)}:{self.lines.get(local, 1)}"


def shown(path: Path) -> str:
    """Return a path as a person would type it: relative to here where it lies below."""
    path = path.resolve()
    for base in (Path.cwd(), ROOT):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return os.path.relpath(path)


def groups(conf: Path) -> dict[str, list[str]]:
    """Return the groups of `conf` with their options, sorted."""
    found: dict[str, list[str]] = {}
    for file in sorted(conf.glob("*/*.yaml")):
        found.setdefault(file.parent.name, []).append(file.stem)
    return found


def find_option(conf: Path, group: str, option: Any) -> Path:
    """Return the file of `group=option`; UserError with the options there are.

    An experiment may also be a file of one's own, named by its path.
    """
    options = sorted(file.stem for file in (conf / group).glob("*.yaml"))
    if isinstance(option, str) and option in options:
        return conf / group / f"{option}.yaml"
    if group == "experiment" and str(option).endswith(YAML_SUFFIXES):
        file = expand_home("experiment", str(option))
        if not file.exists():
            raise UserError(f"experiment={option}: no such file, looked for from {Path.cwd()}")
        return file
    ours = OPTIONS_ELSEWHERE.get(group, {}).get(str(option).lower())
    hint = f"; type {group}={ours}" if ours else nearest(str(option), options)
    if group == "model":
        hint = _hint_for_model(str(option), options)
        raise UserError(f"model={option}: no such option{hint}; --help model lists {len(options)}")
    if group == "data" and not hint:
        hint = f"; for a file type 'data.datasets=[{{path: {option}}}]'"
    if group == "hardware":
        hint += f"; or {custom_hardware_advice()}"
    if group == "experiment" and not hint:
        hint = "; a file of your own: +experiment=PATH.yaml"
    raise UserError(f"{group}={option}: no such option; there are {', '.join(options)}{hint}")


def _hint_for_model(option: str, options: list[str]) -> str:
    """Word which shipped models have a name like `option`, and how another one is typed."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]|meta|instruct|chat|base|hf", "", name.lower())

    if "/" not in option and (hint := nearest(option, options)):
        return hint
    by_name: dict[str, str] = {plain(name): name for name in options}
    near = difflib.get_close_matches(plain(option.rpartition("/")[2]), by_name, n=2, cutoff=0.75)
    named = " or ".join(by_name[one] for one in near)
    meant = f"; did you mean {named}?" if near else ""
    is_path = "/" in option or not near
    return f"; for a folder or hub id type model.path={option}{meant}" if is_path else meant


def read_conf_file(
    path: Path, package: str, *, is_global: bool = False, loader: type = HydraLoader
) -> ConfFile:
    """Read one file; UserError with file:line where it is no YAML mapping, or beyond the limits.

    `is_global`: an experiment or a sweep, whose first line says so and whose keys are full ones.
    """
    with reading(shown(path), "correct it, or write it anew"):
        text, problem = read_text(path, "yaml_mib")
        if problem is not None:
            raise UserError(problem)
        stream = loader(text)
        try:
            root = stream.get_single_node()
            if root is not None and not isinstance(root, yaml.MappingNode):
                raise UserError(f"{shown(path)}:1: expected `key: value` lines")
            lines = _lines_of(root, path, TYPED_KEYS if is_global else {})
            values = stream.construct_document(root) if root is not None else {}
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise UserError(f"{shown(path)}:{line}: not valid YAML: {error.problem}") from error
        except RecursionError as error:
            raise UserError(over_limit(path, "nested too deep", "yaml_depth")) from error
        if odd := [key for key in values if not isinstance(key, str)]:
            raise UserError(f"{shown(path)}: {odd[0]!r} is not the name of a setting")
        defaults = values.pop("defaults", None) or []
        if (choices := _choices_in(defaults)) is None:
            raise UserError(
                f"{shown(path)}:{lines['defaults']}: defaults={str(defaults)[:80]}: expected a "
                "list of `override /GROUP: OPTION` and _self_"
            )
        if is_global and not text.startswith("# @package _global_"):
            raise UserError(f"{shown(path)}:1: the first line must be `# @package _global_`")
        values = keys_in_python("", values) if is_global else values
        return ConfFile(path, package, defaults, values, lines, choices)


def _choices_in(defaults: Any) -> list[tuple[str, Any]] | None:
    """Return (group, option) of each `model: tiny` or `override /model: tiny` in a defaults list.

    None where it is no list of these and of words.
    """
    if not isinstance(defaults, list):
        return None
    found: list[tuple[str, Any]] = []
    for entry in defaults:
        is_choice = isinstance(entry, dict) and len(entry) == 1
        pairs = list(entry.items()) if is_choice else [(entry, None)]
        words = [word for pair in pairs for word in pair if word is not None]
        if not words or not all(
            isinstance(word, str)
            and 0 < len(word) <= MAX_WORD
            and word.isprintable()
            and "$" not in word
            for word in words
        ):
            return None
        if is_choice:
            group, option = pairs[0]
            found.append((str(group).removeprefix("override ").strip().removeprefix("/"), option))
    return found


def _lines_of(root: Any, path: Path, typed_keys: dict[str, str]) -> dict[str, int]:
    """Return the line of every key; UserError where one is set twice, or beyond the limits.

    Each alias counts with all that it stands for.
    """
    most, seen = limits(), 0
    lines: dict[str, int] = {}
    waiting = [("", root, 0)] if root is not None else []
    while waiting:
        key, node, depth = waiting.pop()
        line = node.start_mark.line + 1
        parts: list[tuple[str, Any, int]] = []
        seen += 1
        if isinstance(node, yaml.MappingNode):
            seen += len(node.value)
            for name, value in node.value:
                if not isinstance(name, yaml.ScalarNode):
                    raise UserError(f"{shown(path)}:{line}: a list or mapping is not a key")
                full = f"{key}.{name.value}" if key else str(name.value)
                full, line = typed_keys.get(full, full), name.start_mark.line + 1
                if full in lines:
                    raise UserError(
                        f"{shown(path)}:{line}: {full} is set twice, first on {lines[full]}"
                    )
                lines[full] = line
                parts.append((full, value, depth + 1))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[f"{key}[{index}]"] = value.start_mark.line + 1
                parts.append((f"{key}[{index}]", value, depth + 1))
        if seen > most.yaml_nodes:
            raise UserError(over_limit(path, "too many values, by its aliases", "yaml_nodes"))
        if depth > most.yaml_depth:
            raise UserError(over_limit(path, "nested too deep", "yaml_depth"))
        waiting += reversed(parts)
    return lines
