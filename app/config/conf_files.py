"""The YAML files of settings: those of conf/ with the line of each key, and those of runs.

Never composes files; Hydra does. Settings of a run are saved, compared with the defaults, and
inherited by later commands. Those that run code, name a place to write to or a host to contact
(`grants` at their fields) are never taken from a folder, which may be somebody else's: a run's or
a trial's config.yaml, or the words of a sweep. They count only if they are typed again.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config import verbs
from app.config.overrides import YAML_SUFFIXES, python_keys
from app.planning.hardware import custom_hardware_advice
from app.run import find_run, find_run_to_resume
from app.run.find import FINAL
from app.run.folder import CONFIG_FILE, NAME_PATTERN, expand_home, verb_line
from common.errors import UserError, nearest
from common.facts import Grant, as_typed, default_of, facts_of, hints_of, is_settings, leaves_of
from common.files import write_atomically
from common.installation import ROOT
from common.redaction import REDACTED, redact, redacted, redacted_keys
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
    problems: list[str] = dataclasses.field(default_factory=list)
    """of an experiment or a sweep that lacks its first line: said beside those of its keys"""

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
    alias = verbs.OPTION_ALIASES.get(group, {}).get(option.lower())
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

    `is_global`: an experiment or a sweep, which has full keys.
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
        values = python_keys("", values) if is_global else values
        problems = []
        if is_global and not text.startswith("# @package _global_"):
            problems = [f"{display_path(path)}:1: the first line must be `# @package _global_`"]
        return ConfFile(path, package, defaults, values, lines, choices, problems)


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
    typed_keys = verbs.TYPED_KEYS if is_global else {}
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


_INHERITED_FROM_TRAINER = ("precision", "micro_batch_size")
"""settings of the run's trainer that an evaluation inherits"""
log = logging.getLogger(__name__)
URL = re.compile(r"[A-Za-z][\w+.-]*:/|[^/]+:\d{1,5}$")
"""a URL, or HOST:PORT"""


def save_config(config: verbs.TrainConfig | verbs.TunedConfig, path: Path) -> None:
    """Save settings as plain YAML without secrets; `load_run_config` loads it."""
    verb = next(verb for verb, schema in verbs.VERBS.items() if type(config) is schema)
    settings = redacted(dataclasses.asdict(config))
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_atomically(path, verb_line(verb) + text)


def write_experiment(config: verbs.TrainConfig, path: Path, header: str) -> None:
    """Write an experiment file with the settings that differ from the defaults.

    `header`: comment lines that follow the first line.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(verbs.TrainConfig):
        value = getattr(config, field.name)
        if field.name in verbs.PARTS:
            values[field.name] = dataclasses.asdict(value)
        elif field.name not in verbs.PER_START and (given := _nondefault(value, default_of(field))):
            values[field.name] = given
    defaults = [{f"override /{group}": getattr(config, group).name} for group in verbs.PARTS]
    settings = redacted({"defaults": [*defaults, "_self_"], **values})
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_atomically(path, f"# @package _global_\n{header}\n{text}")


def changed_settings(config: verbs.TrainConfig | verbs.TunedConfig) -> list[tuple[str, str, str]]:
    """List (key, value, default) of the settings that differ from their defaults, without secrets.

    An option of a group is listed as `adapter=full`. Settings of a single start of a run (its
    folder, supervision) are left out. Files are listed by their names: pages and cards are passed
    on, and folders of this machine are nobody else's business.
    """
    changed: list[tuple[str, str, str]] = []

    def compare(prefix: str, part: Any) -> None:
        for field in dataclasses.fields(part):
            value, default = getattr(part, field.name), default_of(field)
            key = f"{prefix}{facts_of(field).typed or field.name}"
            if key in verbs.PER_START or key == "run":
                continue
            if is_settings(value):
                option, first = (
                    getattr(value, "name", None),
                    next(iter(verbs.PARTS.get(key, ())), None),
                )
                if first is not None and option != first:
                    changed.append((key, str(option), first))
                compare(f"{key}.", value)
            elif value != default and not (field.name == "name" and prefix[:-1] in verbs.PARTS):
                changed.append((key, redact(as_typed(_file_names(value))), as_typed(default)))

    compare("", config)
    return changed


def _file_names(value: Any) -> Any:
    """Return a value with each absolute path in it replaced by the name of its file or folder."""
    if isinstance(value, str):
        return Path(value).name if value.startswith(("/", "~")) else value
    if isinstance(value, dict):
        return {name: _file_names(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_file_names, value))
    if not is_settings(value):
        return value
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **_file_names(parts))


def _nondefault(value: Any, default: Any) -> Any:
    """Return a value as plain data, of a dataclass only the fields that differ from the default."""
    if dataclasses.is_dataclass(value):
        defaults = {field.name: default_of(field) for field in dataclasses.fields(value)}
        return {
            name: _nondefault(getattr(value, name), field_default)
            for name, field_default in defaults.items()
            if getattr(value, name) != field_default
        }
    if value == default:
        return None
    if isinstance(value, list) and all(map(dataclasses.is_dataclass, value)):
        return [dataclasses.asdict(element) for element in value]
    return value


def find_source_run(
    verb: str, typed: Mapping[str, Any], read_config: Callable[[Path], verbs.TrainConfig]
) -> Path | None:
    """Return the run whose settings a command inherits: the one it resumes, evaluates or merges.

    None if a model was typed instead, or no run is resumed. Invalid values are reported later.
    `read_config` reads the config.yaml in a run's folder.
    """
    if verb in verbs.VERBS_ON_A_RUN:
        has_model = typed.get("model") is not None or typed.get("model.path") is not None
        if typed.get("run") is None and has_model:
            return None
        named = None if typed.get("run") is None else str(typed["run"])
        takes_unfinished = typed.get("checkpoint", FINAL) != FINAL
        return find_run(
            named,
            verb=verb,
            takes_unfinished=takes_unfinished,
            typed_again=lambda run: words_to_type(read_config(run)),
        )
    if verb != "train" or not isinstance(typed.get("resume"), str):
        return None
    names_model_or_data = any(key.partition(".")[0] in ("model", "data") for key in typed)
    name = typed.get("output.name", "train" if names_model_or_data else None)
    return find_run_to_resume(typed["resume"], typed.get("output.dir"), name)


def _taken_by(verb: str, typed: AbstractSet[str]) -> list[str]:
    """Return the parts and settings that a verb takes from a run, if these keys were typed."""
    not_inherited = (verbs.PER_START if verb == "train" else {"run", "output"}) | typed
    return [f.name for f in dataclasses.fields(verbs.VERBS[verb]) if f.name not in not_inherited]


def words_to_type(config: verbs.TrainConfig, verb: str = "train") -> list[str]:
    """Return what a verb never takes from the folder of a run with this config, as overrides."""
    taken = _taken_by(verb, frozenset())
    skip = {field.name for field in dataclasses.fields(config)}.difference(taken)
    found = not_taken(config, frozenset(), skip=skip)
    return list(dict.fromkeys(f"{each.key}={each.value}" for each in found))


def experiment_from_run(
    file: Path, config: verbs.TrainConfig, verb: str, typed: AbstractSet[str]
) -> ConfFile:
    """Return saved settings as an experiment, for Hydra to compose under what was typed.

    `file`: the config.yaml of a run, or a copy of one.

    UserError if a setting that is never inherited must be typed: one that grants something, or one
    whose secret was removed when the run was saved.
    """
    taken = _taken_by(verb, typed)
    skip = {field.name for field in dataclasses.fields(config)}.difference(taken)
    resets, problems = settle(not_taken(config, typed, skip=skip), file)
    for granting in resets:
        reset_to_default(config, granting)
    run_values = dataclasses.asdict(config)
    values = {name: run_values[name] for name in taken if name in run_values}
    problems += _check_secrets(file, config, values, typed)
    if problems:
        raise UserError(problems)
    defaults = [
        {f"override /{group}": getattr(config, group).name}
        for group in verbs.PARTS
        if group in values
    ]
    if verb == "train":
        values["output"] = run_values["output"] | {"dir": str(file.parent)}
    else:
        # outputs/NAME/TIME, or the folder that a person has named.
        run = file.parent
        is_named = file.name == CONFIG_FILE and run.parent.name != config.output.name
        named = run.name if is_named else config.output.name
        is_name = NAME_PATTERN.fullmatch(f"{named}-{verb}")
        values["output"] = {"name": f"{named if is_name else config.output.name or 'run'}-{verb}"}
        for part in {"trainer", "evaluation"} & values.keys():
            known = {field.name for field in dataclasses.fields(hints_of(verbs.VERBS[verb])[part])}
            inherited = known & set(_INHERITED_FROM_TRAINER) if part == "trainer" else known
            values[part] = {
                name: value
                for name, value in values[part].items()
                if name in inherited and value != "auto"
            }
    return ConfFile(file, "", [*defaults, "_self_"], values, {})


def _check_secrets(
    file: Path, config: verbs.TrainConfig, settings: dict[str, Any], typed: AbstractSet[str]
) -> list[str]:
    """List the settings whose secrets were removed from a run's file and that were not typed."""
    without_secret = {key.partition("[")[0] for key in redacted_keys(settings)}
    return [
        f"{file}: the secret in {key} was replaced by {REDACTED}, because files never "
        "hold secrets; type it again: "
        f"'{key}={as_typed(functools.reduce(getattr, key.split('.'), config))}'"
        for key in sorted(without_secret - typed)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Granting:
    """A setting read from a folder that grants something, with its value."""

    grants: Grant
    key: str
    """the key to type: for a setting of a list's element, that of the list"""
    value: str
    """the value to type"""
    default: Any
    """dataclasses.MISSING if it is required"""
    at: str
    """its own key and value"""
    names: str = ""
    """the code that would run"""

    def problem(self) -> str:
        """Say why it must be typed, and what."""
        override = shlex.quote(f"{self.key}={self.value}")
        if self.grants == "host":
            return (
                f"{self.at} contacts a host that the folder names, and is never taken from it; if "
                f"you trust that host, type {override}"
            )
        return (
            f"{self.at} runs {self.names}, and is never taken from a folder; read it, then type "
            f"{override} (or {self.key}={as_typed(self.default)} to continue without)"
        )


def not_taken(
    config: verbs.TrainConfig, typed: AbstractSet[str], *, skip: Collection[str] = ()
) -> list[Granting]:
    """List the settings of a config read from a folder that grant something and were not typed.

    The parts and settings of the top level that `skip` names are not looked at.
    """
    model, code = config.model, config.evaluation.metric or "that of its tasks"
    revision = "" if model.revision is None else f" (revision {model.revision})"
    names = {
        "model.trust_remote_code": f"Python files that come with the model {model.path}{revision}",
        "evaluation.allow_code": f"code of the evaluation ({code})",
    }
    found = []
    for at, _, field, value in leaves_of(config, skip=skip):
        grants, default, key = facts_of(field).grants, default_of(field), at.partition("[")[0]
        is_harmless = value == default or (grants == "host" and not URL.match(str(value)))
        if grants in (None, "nothing") or is_harmless or is_typed(key, typed):
            continue
        whole = functools.reduce(getattr, key.split("."), config)
        found.append(
            Granting(
                grants=grants,
                key=key,
                value=redact(as_typed(whole)),
                default=default,
                at=f"{at}={redact(as_typed(value))}",
                names=names.get(key, "the code that it names"),
            )
        )
    return found


def is_typed(key: str, typed: AbstractSet[str]) -> bool:
    """Whether a setting or a group that contains it was typed."""
    names = key.split(".")
    return any(".".join(names[: end + 1]) in typed for end in range(len(names)))


def settle(found: Iterable[Granting], place: Path) -> tuple[list[Granting], list[str]]:
    """Return the settings of `place` to reset to their defaults, and what must be typed.

    A place to write to falls back to its default, with a warning; what else a result may depend on
    must be typed.
    """
    reset, problems = [], []
    for each in found:
        if each.grants != "write":
            problems.append(f"{place}: {each.problem()}")
            continue
        reset.append(each)
        log.warning(
            "%s: %s is not inherited: a folder never decides where to write; type it to use it",
            *(place, each.at),
        )
    return reset, list(dict.fromkeys(problems))


def reset_to_default(config: verbs.TrainConfig, granting: Granting) -> None:
    *parts, name = granting.key.split(".")
    setattr(functools.reduce(getattr, parts, config), name, granting.default)
