"""What is wrong with composed settings: each problem in words, with its file and line, or its word.
Asked only where something was refused: settings that are right are composed without it.

Only names, types and choices are checked here; numbers and what does not go together in
preflight/couplings.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from app.config import schema
from app.config.conf_files import ConfFile
from app.config.overrides import Given, refuse
from app.process.errors import nearest
from app.process.launch import is_child, is_first_rank
from data_modules import expected, facts_of, hints_of, printable, redact, takes

COMMAND_LINE = "command line:"
ELSEWHERE = {
    "push_to_hub": "afterwards type python -m app.push run=FOLDER repo=NAME",
    "hub_model_id": "afterwards type python -m app.push run=FOLDER repo=NAME",
    "tf32": "leave it out: half precision is trainer.precision=bf16",
    "wandb_project": "type logger=wandb, and export WANDB_PROJECT=NAME",
    "method": "training is supervised fine-tuning; leave it out",
    "run_name": "type output.name=NAME",
    "local_rank": "leave it out: torchrun and srun set it",
}
"""settings of other tools that have no counterpart of one name, and what to do"""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The names that exist: the verb's schema, with the schema of each part that was chosen."""

    verb: type
    parts: dict[str, type]
    """group -> schema of the option that was chosen for it"""
    options: dict[str, str]
    """group -> that option's name"""
    other_options: dict[str, dict[str, type]]
    """group -> option -> schema, for parts whose settings depend on the option"""
    replaced: frozenset[str] = frozenset()
    """groups whose option the command line chose: an experiment's settings for another option of
    the group are then left out instead of refused"""

    def walk(self, values: dict[str, Any]) -> Iterator[schema.Leaf | schema.Unknown]:
        """Yield each leaf and each unknown key of `values`."""
        hints = hints_of(self.verb) | self.parts
        for name, value in values.items():
            if name in hints:
                yield from schema.walk(value, hints[name], name, self.verb, name)
            else:
                yield schema.Unknown(name, None, value)

    def all_settings(self) -> list[schema.Setting]:
        """List the settings of the verb, its parts' by their chosen options."""
        chosen = {group: {self.options.get(group, ""): part} for group, part in self.parts.items()}
        return schema.list_settings(self.verb, chosen)

    def problem_of(self, found: schema.Leaf | schema.Unknown) -> str | None:
        """Word what is wrong with one key or value, without its place; None if nothing is."""
        if isinstance(found, schema.Leaf):
            refusal = refuse(found.key, found.value)
            if refusal is not None or _is_reference(found.value):
                return refusal
            if takes_value(found):
                return self._problem_of_choice(found)
            expected = schema.describe_type(hints_of(found.owner)[found.field])
            value = found.value[0] if found.key.endswith("]") else found.value
            return f"{found.key}={_brief(value)}: expected {expected}"
        if (refusal := refuse(found.key, found.value)) is not None:
            return refusal
        group = found.key.partition(".")[0]
        if (option := self.option_with(found.key)) is not None:
            here = self.options.get(group)
            return f"{found.key}: a setting of {group}={option}, but here {group}={here}"
        if (advice := ELSEWHERE.get(found.key.rpartition(".")[2].lower())) is not None:
            return f"unknown key {found.key}={_brief(found.value)}; {advice}"
        siblings = list(hints_of(found.owner or self.verb))
        guess = schema.suggest(found.key, siblings, self.all_settings())
        guess = guess or f"; there are {', '.join(siblings)}"
        return f"unknown key {found.key}={_brief(found.value)}{guess}"

    def option_with(self, key: str) -> str | None:
        """Return the option of `key`'s group that has this setting; the chosen one has not."""
        group, _, rest = key.partition(".")
        for option, other in self.other_options.get(group, {}).items():
            if rest in hints_of(other):
                return option
        return None

    def _problem_of_choice(self, leaf: schema.Leaf) -> str | None:
        group, _, name = leaf.key.partition(".")
        if name == "name" and group in self.parts:
            if self.options.get(group, leaf.value) == leaf.value:
                return None
            return (
                f"{leaf.key}={leaf.value}: expected {self.options[group]}; type "
                f"{group}={leaf.value} to choose another one"
            )
        field = next(one for one in dataclasses.fields(leaf.owner) if one.name == leaf.field)
        facts, hint = facts_of(field), hints_of(leaf.owner)[leaf.field]
        if facts.bounds or takes(facts, hint, leaf.value):
            return None  # numbers are checked with what they are coupled to, in preflight/couplings
        value = leaf.value[0] if leaf.key.endswith("]") else leaf.value
        words = [str(choice) for choice in facts.choices]
        guess = nearest(str(value), words)
        return f"{leaf.key}={_brief(value)}: expected {expected(facts, hint)}{guess}"


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _brief(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclasses.dataclass(frozen=True)
class Sources:
    """All that settings were composed of: files in composing order, then the words typed."""

    read_files: Callable[[], Sequence[ConfFile]]
    """called when a file is first asked for"""
    given: Sequence[Given] = ()

    @functools.cached_property
    def files(self) -> Sequence[ConfFile]:
        return self.read_files()

    def source_of(self, key: str) -> ConfFile | None:
        """Return the file that set full key `key` last; None for the command line."""
        if any(_sets(one, key) for one in self.given):
            return None
        for file in reversed(self.files):
            if file.sets(key):
                return file
        of_its_group = [file for file in self.files if file.package == key.partition(".")[0]]
        return (of_its_group or self.files)[-1]

    def where(self, key: str) -> str:
        """Return `conf/experiment/x.yaml:12`, or that the command line set `key`."""
        source = self.source_of(key)
        return COMMAND_LINE if source is None else source.where(key)


def _sets(given: Given, key: str) -> bool:
    """Tell whether an override sets full key `key`, itself or within its value."""
    rest = key.removeprefix(given.key)
    if rest == key or rest[:1] not in ("", ".", "["):
        return given.key.startswith(f"{key}.")
    value = given.value
    for step in _steps(rest):
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True


def _steps(key: str) -> list[str | int]:
    """Split a full key into names, and numbers of list elements."""
    parts = filter(None, key.replace("[", ".[").split("."))
    return [int(part[1:-1]) if part.startswith("[") else part for part in parts]


def find_problems(
    values: dict[str, Any], settings: Settings, sources: Sources
) -> tuple[dict[str, Any], list[str]]:
    """List every wrong key and value with its place; returns the values as they are meant, too.

    A bare word typed for a list of text is a list of it alone. What an experiment says of an
    option that the command line replaced is left out, with a note.
    """
    values = copy.deepcopy(values)
    problems: dict[str, None] = {}
    left_out: dict[str, list[str]] = {}
    for found in list(settings.walk(values)):
        if _is_word_for_list(found, sources):
            _replace(values, found.key, [found.value])
        elif (whole := _whole_number(found)) is not None:
            _replace(values, found.key, whole)
        elif (replaced_in := _file_replaced_by_option(found, settings, sources)) is not None:
            left_out.setdefault(replaced_in.path.stem, []).append(found.key)
            _replace(values, found.key)
        elif (problem := settings.problem_of(found)) is not None:
            problems[f"{sources.where(found.key)} {problem}"] = None
    if not problems and refuse("", values) is not None:
        # Where any key may stand (model.architecture), no single one is walked.
        for file in sources.files:
            for key in map(file.full, file.lines):
                if (refusal := refuse(key, None)) is not None:
                    problems[f"{file.where(key)} {refusal}"] = None
    if not problems and left_out:
        chosen = ", ".join(f"{g}={settings.options[g]}" for g in sorted(settings.replaced))
        for name, keys in left_out.items():
            print_note(f"note: {name}'s {', '.join(keys)} do not apply to {chosen}")
    return values, list(problems)


def _whole_number(found: schema.Leaf | schema.Unknown) -> int | None:
    """Return the number where 1e9 was typed for a whole one."""
    if not (isinstance(found, schema.Leaf) and isinstance(found.value, float)):
        return None
    hint = schema.element_of(hints_of(found.owner)[found.field])
    # Small ones come from a search between 1.0 and 8.0, whose next proposal is no whole number.
    is_whole = found.value.is_integer() and abs(found.value) >= 1000
    return int(found.value) if hint is int and is_whole else None


def _is_word_for_list(found: schema.Leaf | schema.Unknown, sources: Sources) -> bool:
    """Tell whether a bare word was typed where a list of text is expected."""
    if not (isinstance(found, schema.Leaf) and isinstance(found.value, str) and found.value):
        return False
    hint = schema.element_of(hints_of(found.owner)[found.field])
    is_reference = found.value.startswith("${")
    return hint == list[str] and not is_reference and sources.source_of(found.key) is None


def _file_replaced_by_option(
    found: schema.Leaf | schema.Unknown, settings: Settings, sources: Sources
) -> ConfFile | None:
    """Return the experiment that has this setting of an option which the command line replaced."""
    group = found.key.partition(".")[0]
    if not isinstance(found, schema.Unknown) or group not in settings.replaced:
        return None
    file = sources.source_of(found.key)
    is_of_experiment = file is not None and not file.package
    return file if is_of_experiment and settings.option_with(found.key) is not None else None


def _replace(values: dict[str, Any], key: str, value: Any = None) -> None:
    """Set a full key of nested values, or remove it where `value` is None."""
    *path, name = _steps(key)
    part: Any = values
    for step in path:
        part = part[step]
    if value is None:
        del part[name]
    else:
        part[name] = value


@functools.cache
def _node_of(schema: type) -> Any:
    """Return one node of a schema, to try values on."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def takes_value(leaf: schema.Leaf) -> bool:
    """Tell whether a value can become what its field is declared as."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        _node_of(leaf.owner)[leaf.field] = leaf.value
    except OmegaConfBaseException:
        return False
    return True


def print_note(note: str) -> None:
    """Print a note on stderr, once for all ranks and for the process that starts them."""
    if is_first_rank() and not is_child():
        print(printable(redact(note)), file=sys.stderr)
