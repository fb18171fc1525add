"""The YAML files of conf/: the options of each group, and the values of a file with the line of
each key. Never composes files; Hydra does.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config.overrides import YAML_SUFFIXES, python_keys
from app.config.verbs import OPTION_ALIASES, TYPED_KEYS
from app.planning.hardware import custom_hardware_advice
from app.run.folder import expand_home
from common.errors import UserError, nearest
from common.facts import as_typed
from common.installation import ROOT
from common.untrusted import limits, over_limit, read_text, reading

CONF = ROOT / "conf"
SCHEMA = CONF / "experiment" / "schema.json"
"""the JSON schema by which editors complete experiments"""

_FLOAT = r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"
_BASE_60 = r"[-+]?[\d_]+(:[0-5]?\d)+(\.[\d_]*)?$"
_MAX_OPTION_LENGTH = 200
"""longest option in a defaults list, in characters; an option is a file name"""

_MAX_OPTIONS = 200
"""longest defaults list; there are fewer groups"""


class PlainLoader(yaml.CSafeLoader):
    """Read YAML as this program writes it."""


class HydraLoader(PlainLoader):
    """Read YAML as Hydra does: 1e-3 is a number, a date and 1:30 are text."""


HydraLoader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _letter in "-+0123456789":
    HydraLoader.yaml_implicit_resolvers[_letter].insert(
        0, ("tag:yaml.org,2002:str", re.compile(_BASE_60))
    )
HydraLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+.0123456789")
)


_SAFE_DEPTH = 1000
"""nesting at which the loaders, which have no limit, cannot overflow the stack"""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfFile:
    """One YAML file: its values without the defaults list, and the line of each key."""

    path: Path
    package: str
    defaults: list[Any]
    values: dict[str, Any]
    lines: dict[str, int]
    choices: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    """(group, option) of each choice in the defaults list"""

    def full_key(self, local: str) -> str:
        """Return the full key of a key in this file: the file's package goes before it."""
        return f"{self.package}.{local}" if self.package else local

    def sets(self, key: str) -> bool:
        return any(self.full_key(local) == key for local in self.lines)

    def where(self, key: str) -> str:
        """Return the position of full key `key` in this file: `conf/experiment/x.yaml:12`."""
        return f"{display_path(self.path)}:{self._line_of(key)}"

    def text_of(self, key: str) -> str:
        """Return the line of full key `key`."""
        lines = self.path.read_text(encoding="utf-8-sig").splitlines()
        return lines[self._line_of(key) - 1]

    def _line_of(self, key: str) -> int:
        local = key.removeprefix(self.full_key(""))
        while local and local not in self.lines:
            local = local.rpartition("." if not local.endswith("]") else "[")[0]
        return self.lines.get(local, 1)


def display_path(path: Path) -> str:
    """Return a path as a user would type it: relative to the current folder or the repository."""
    path = path.resolve()
    for base in (Path.cwd(), ROOT):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return os.path.relpath(path)


def list_groups(conf: Path) -> dict[str, list[str]]:
    """Return the groups of `conf` with their sorted options."""
    found: dict[str, list[str]] = {}
    for file in sorted(conf.glob("*/*.yaml")):
        found.setdefault(file.parent.name, []).append(file.stem)
    return found


def find_option(conf: Path, group: str, option: Any) -> Path:
    """Return the file of `group=option`; UserError lists the existing options.

    An experiment may also be the path of a user's own file.
    """
    option = option if isinstance(option, str) else as_typed(option)
    options = sorted(file.stem for file in (conf / group).glob("*.yaml"))
    if option in options:
        return conf / group / f"{option}.yaml"
    if group == "experiment" and option.endswith(YAML_SUFFIXES):
        file = expand_home("experiment", option)
        if not file.exists():
            raise UserError(f"experiment={option}: no such file in {Path.cwd()}")
        return file
    alias = OPTION_ALIASES.get(group, {}).get(option.lower())
    hint = f"; type {group}={alias}" if alias else nearest(option, options)
    if group == "model":
        hint = _hint_for_model(option, options)
        raise UserError(f"model={option}: no such option{hint}; --help model lists {len(options)}")
    if group == "trainer" and (conf / "objective" / f"{option}.yaml").is_file():
        hint = f"; type objective={option}"
    if group == "data" and not hint:
        hint = f"; for a file type 'data.datasets=[{{path: {option}}}]'"
    if group == "hardware":
        hint += f"; or {custom_hardware_advice()}"
    if group == "experiment" and not hint:
        hint = "; to use your own file type +experiment=PATH.yaml"
    raise UserError(f"{group}={option}: no such option; expected one of {', '.join(options)}{hint}")


def _hint_for_model(option: str, options: list[str]) -> str:
    """Return a hint: shipped models with a similar name, and how to type any other model."""

    def normalize(name: str) -> str:
        return re.sub(r"[^a-z0-9]|meta|instruct|chat|base|hf", "", name.lower())

    if "/" not in option and (hint := nearest(option, options)):
        return hint
    by_name: dict[str, str] = {normalize(name): name for name in options}
    wanted = normalize(option.rpartition("/")[2])
    near = [by_name[name] for name in difflib.get_close_matches(wanted, by_name, n=2, cutoff=0.75)]
    guess = f"; did you mean {' or '.join(near)}?" if near else ""
    is_path = "/" in option or not near
    return f"; for a folder or hub id type model.path={option}{guess}" if is_path else guess


def read_conf_file(
    path: Path, package: str, *, is_global: bool = False, loader: Any = HydraLoader
) -> ConfFile:
    """Read one file; UserError with file:line if it is not a YAML mapping or exceeds the limits.

    `is_global`: an experiment or a sweep: begins with `# @package _global_`, and has full keys.
    """
    with reading(display_path(path), "correct it, or write it again"):
        text, problem = read_text(path, "yaml_mib")
        if problem is not None:
            raise UserError(problem)
        try:
            # Parsing does not recurse, as composing does.
            depth, most = 0, min(limits().yaml_depth + 1, _SAFE_DEPTH)
            for event in yaml.parse(text, Loader=PlainLoader):
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > most:
                    raise RecursionError
            stream = loader(text)
            root = stream.get_single_node()
            if root is not None and not isinstance(root, yaml.MappingNode):
                raise UserError(f"{display_path(path)}:1: expected `key: value` lines")
            lines = _lines_of(root, path, is_global)
            values = stream.construct_document(root) if root is not None else {}
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise UserError(
                f"{display_path(path)}:{line}: not valid YAML: {error.problem}"
            ) from error
        except RecursionError as error:
            raise UserError(over_limit(path, "nested too deep", "yaml_depth")) from error
        if invalid := [key for key in values if not isinstance(key, str)]:
            raise UserError(f"{display_path(path)}: {invalid[0]!r} is not the name of a setting")
        defaults = values.pop("defaults", None) or []
        if (choices := _choices_in(defaults)) is None:
            raise UserError(
                f"{display_path(path)}:{lines['defaults']}: defaults={as_typed(defaults)[:80]}: "
                "expected a list of `override /GROUP: OPTION` and _self_"
            )
        if is_global and not text.startswith("# @package _global_"):
            raise UserError(f"{display_path(path)}:1: the first line must be `# @package _global_`")
        values = python_keys("", values) if is_global else values
        return ConfFile(path, package, defaults, values, lines, choices)


def _choices_in(defaults: Any) -> list[tuple[str, Any]] | None:
    """Return (group, option) of each `model: tiny` or `override /model: tiny` in a defaults list.

    Return None if `defaults` is not a list of such entries and plain words.
    """
    if not isinstance(defaults, list) or len(defaults) > _MAX_OPTIONS:
        return None
    found: list[tuple[str, Any]] = []
    for entry in defaults:
        is_choice = isinstance(entry, dict) and len(entry) == 1
        pairs = list(entry.items()) if is_choice else [(entry, None)]
        words = [word for pair in pairs for word in pair if word is not None]
        if not words or not all(
            isinstance(word, str)
            and 0 < len(word) <= _MAX_OPTION_LENGTH
            and word.isprintable()
            and "$" not in word
            for word in words
        ):
            return None
        if is_choice:
            group, option = pairs[0]
            found.append((str(group).removeprefix("override ").strip().removeprefix("/"), option))
    return found


def _lines_of(root: Any, path: Path, is_global: bool) -> dict[str, int]:
    """Return the line of each key; UserError if one is set twice or the limits are exceeded.

    Each use of a YAML alias counts as all the nodes that it expands to.
    """
    most, num_nodes, num_parts = limits(), 0, 0
    typed_keys = TYPED_KEYS if is_global else {}
    lines: dict[str, int] = {}
    waiting = [("", root, 0)] if root is not None else []
    while waiting:
        key, node, depth = waiting.pop()
        line = node.start_mark.line + 1
        parts: list[tuple[str, Any, int]] = []
        num_nodes += 1
        num_parts += is_global and not isinstance(node, yaml.ScalarNode)
        if isinstance(node, yaml.MappingNode):
            num_nodes += len(node.value)
            for name, value in node.value:
                if not isinstance(name, yaml.ScalarNode):
                    raise UserError(
                        f"{display_path(path)}:{line}: a key must be a name, not a list or mapping"
                    )
                full = f"{key}.{name.value}" if key else str(name.value)
                full, line = typed_keys.get(full, full), name.start_mark.line + 1
                if full in lines:
                    first = lines[full]
                    raise UserError(
                        f"{display_path(path)}:{line}: {full} is set twice, first on line {first}"
                    )
                lines[full] = line
                parts.append((full, value, depth + 1))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[f"{key}[{index}]"] = value.start_mark.line + 1
                parts.append((f"{key}[{index}]", value, depth + 1))
        if num_nodes > most.yaml_nodes:
            raise UserError(over_limit(path, "too many values, aliases expanded", "yaml_nodes"))
        if num_parts > most.yaml_parts:
            raise UserError(over_limit(path, "too many lists and mappings", "yaml_parts"))
        if depth > most.yaml_depth:
            raise UserError(over_limit(path, "nested too deep", "yaml_depth"))
        waiting += reversed(parts)
    return lines
