"""The YAML files under conf/: which options a group has, which files a command composes, and on
which line of which file each key stands. Reads them as plain YAML; composing them is Hydra's work.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config.overrides import spell_keys
from app.config.verbs import TYPED_KEYS
from app.process.errors import ROOT, UserError, nearest
from app.process.untrusted import limits, over_limit, read_text, reading

CONF = ROOT / "conf"
ADDED_GROUPS = ("experiment", "sweep")
"""groups outside the defaults list: Hydra wants a plus sign before them, a person need not"""

MAX_WORD = 200
"""characters of an option in a defaults list, which is the name of a file"""


@dataclasses.dataclass(frozen=True, slots=True)
class ConfFile:
    """One YAML file: its values without the defaults list, and the line of every key."""

    path: Path
    package: str
    defaults: list[Any]
    values: dict[str, Any]
    lines: dict[str, int]
    is_respelled: bool = False
    """whether keys were written in words that Python keeps for itself; in `values` they are not"""

    def where(self, key: str) -> str:
        """Return `conf/experiment/x.yaml:12`, the place of full key `key` in this file."""
        local = key.removeprefix(f"{self.package}.") if self.package else key
        while local and local not in self.lines:
            local = local.rpartition("." if not local.endswith("]") else "[")[0]
        return f"{shown(self.path)}:{self.lines.get(local, 1)}"

    def schema_name(self) -> str | None:
        """Return `lora` of `- /schema/adapter/lora@_here_`, where there is one."""
        for entry in self.defaults:
            if isinstance(entry, str) and entry.startswith("/schema/"):
                return entry.removeprefix("/schema/").partition("@")[0].rpartition("/")[2]
        return None


def shown(path: Path) -> str:
    """Return a path as a person would type it: relative to here where it lies below."""
    path = path.resolve()
    for base in (Path.cwd(), ROOT):
        if path.is_relative_to(base):
            return str(path.relative_to(base))
    return os.path.relpath(path)


WORDS_ELSEWHERE = {
    "adapter=qlora": "adapter=lora quantization=nf4",
    "adapter=dora": "adapter=lora adapter.use_dora=true",
    "adapter=rslora": "adapter=lora adapter.use_rslora=true",
    "adapter=pissa": "adapter=lora adapter.init=pissa",
    "adapter=none": "adapter=full",
    "quantization=4bit": "quantization=nf4",
    "quantization=8bit": "quantization=int8",
    "recompute=true": "recompute=full",
    "recompute=block": "recompute=full",
    "recompute=cpu_offload": "recompute=offload",
    "optimizer=adamw_torch": "optimizer=adamw",
    "optimizer=adamw_torch_fused": "optimizer=adamw",
    "optimizer=adamw_8bit": "optimizer=adamw8bit",
    "optimizer=adamw_bnb_8bit": "optimizer=adamw8bit",
    "optimizer=paged_adamw_8bit": "optimizer=paged_adamw8bit",
    "optimizer=schedule_free_adamw": "optimizer=schedule_free schedule=constant",
    "optimizer=adamw_schedule_free": "optimizer=schedule_free schedule=constant",
    "schedule=constant_with_warmup": "schedule=constant",
    "schedule=cosine_with_min_lr": "schedule=cosine schedule.min_lr_ratio=0.1",
    "schedule=cosine_with_restarts": "schedule=cosine",
    "schedule=warmup_stable_decay": "schedule=wsd",
    "strategy=dp": "strategy=ddp",
    "strategy=ddp_spawn": "strategy=ddp",
    "strategy=powersgd": "strategy=ddp_compressed strategy.compression=powersgd",
    "strategy=deepspeed": "strategy=zero2",
    "strategy=deepspeed_stage_1": "strategy=zero1",
    "strategy=deepspeed_stage_2": "strategy=zero2",
    "strategy=deepspeed_stage_3": "strategy=zero3",
    "strategy=deepspeed_stage_2_offload": "strategy=zero2_offload",
    "strategy=deepspeed_stage_3_offload": "strategy=zero3_offload",
    "strategy=deepspeed_stage_3_offload_nvme": "strategy=zero3_offload",
    "strategy=zero_infinity": "strategy=zero3_offload",
    "strategy=zero++": "strategy=zeropp",
    "strategy=fsdp2": "strategy=fsdp",
    "strategy=full_shard": "strategy=fsdp",
    "strategy=shard_grad_op": "strategy=fsdp_grad_op",
    "strategy=hybrid_shard": "strategy=fsdp_hybrid",
    "strategy=hsdp": "strategy=fsdp_hybrid",
    "strategy=fsdp_cpu_offload": "strategy=fsdp_offload",
    "strategy=tensor_parallel": "strategy=tp",
    "strategy=model_parallel": "strategy=fsdp_tp",
    "strategy=2d": "strategy=fsdp_tp",
    "strategy=pp": "strategy=fsdp",
    "strategy=pipeline": "strategy=fsdp",
    "strategy=pipeline_parallel": "strategy=fsdp",
}
"""what other tools call an option, and what it is here"""
NO_PIPELINE = ("pp", "pipeline", "pipeline_parallel")
"""strategies for which something else is named, because there is none of them yet"""


def groups(conf: Path) -> dict[str, list[str]]:
    """Return the groups of `conf` with their options, sorted."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(conf.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def find_option(conf: Path, group: str, option: Any) -> Path:
    """Return the file of `group=option`; UserError with the options there are."""
    options = groups(conf)[group]
    if isinstance(option, str) and option in options:
        return conf / group / f"{option}.yaml"
    said = WORDS_ELSEWHERE.get(f"{group}={option}".lower())
    hint = f"; type {said}" if said else nearest(str(option), options)
    if group == "strategy" and str(option).lower() in NO_PIPELINE:
        hint = f"; there is no pipeline parallelism yet{hint}"
    if group == "model" and not hint:
        hint = f"; for a folder or hub id type model.path={option}"
    if group == "data" and not hint:
        hint = f"; for a file type 'data.datasets=[{{path: {option}}}]'"
    raise UserError(f"{group}={option}: no such option; there are {', '.join(options)}{hint}")


def read_conf_file(path: Path, package: str) -> ConfFile:
    """Read one file; UserError with file:line where it is no YAML mapping, or beyond the limits."""
    with reading(shown(path), "mend it, or write it anew"):
        return _read_conf_file(path, package)


def _read_conf_file(path: Path, package: str) -> ConfFile:
    text, problem = read_text(path, "yaml_mib")
    if problem is not None:
        raise UserError(problem)
    lines: dict[str, int] = {}
    is_experiment = path.parent.name == "experiment"
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError(f"{shown(path)}:1: expected `key: value` lines")
        _check_limits(root, path)
        for written, line in _key_lines(root, ""):
            key = TYPED_KEYS.get(written, written) if is_experiment else written
            if key in lines:
                raise UserError(f"{shown(path)}:{line}: {key} is set twice, first on {lines[key]}")
            lines[key] = line
        values = yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UserError(f"{shown(path)}:{line}: not valid YAML: {error.problem}") from error
    except RecursionError as error:
        raise UserError(over_limit(path, "nested too deep", "yaml_depth")) from error
    if odd := [key for key in values if not isinstance(key, str)]:
        raise UserError(f"{shown(path)}: {odd[0]!r} is not the name of a setting")
    defaults = values.pop("defaults", None) or []
    if not isinstance(defaults, list) or not all(map(_is_default, defaults)):
        raise UserError(
            f"{shown(path)}:{lines['defaults']}: defaults={str(defaults)[:80]}: expected a list of "
            "`override /GROUP: OPTION` and _self_"
        )
    if path.parent.name in ADDED_GROUPS and not text.startswith("# @package _global_"):
        raise UserError(f"{shown(path)}:1: the first line must be `# @package _global_`")
    spelled = spell_keys("", values) if is_experiment else values
    return ConfFile(path, package, defaults, spelled, lines, is_respelled=spelled != values)


def _is_default(entry: Any) -> bool:
    """Tell whether an entry of a defaults list is a word, or one `group: option`."""
    if isinstance(entry, dict):
        words = [word for pair in entry.items() for word in pair if word is not None]
        return len(entry) == 1 and all(map(_is_word, words))
    return _is_word(entry)


def _is_word(entry: Any) -> bool:
    return isinstance(entry, str) and 0 < len(entry) <= MAX_WORD and entry.isprintable()


def _check_limits(root: Any, path: Path) -> None:
    """Refuse a document beyond the limits, each alias counted with all that it stands for."""
    most, seen = limits(), 0
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if (seen := seen + 1) > most.yaml_nodes:
            raise UserError(over_limit(path, "too many values, by its aliases", "yaml_nodes"))
        if depth > most.yaml_depth:
            raise UserError(over_limit(path, "nested too deep", "yaml_depth"))
        if isinstance(node, yaml.MappingNode):
            waiting += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(part, depth + 1) for part in node.value]


def _key_lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = f"{prefix}.{name.value}" if prefix else str(name.value)
            yield key, name.start_mark.line + 1
            yield from _key_lines(value, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{prefix}[{index}]", value.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}[{index}]")


def choices_of(file: ConfFile) -> Iterator[tuple[str, Any]]:
    """Yield (group, option) of each `model: tiny` or `override /model: tiny` in a defaults list."""
    for entry in file.defaults:
        if isinstance(entry, dict):
            for group, option in entry.items():
                yield str(group).removeprefix("override ").strip().removeprefix("/"), option


def used_files(conf: Path, verb: str, chosen: list[tuple[str, Any]]) -> list[ConfFile]:
    """Read the files that a command composes: primary, one option a group, experiments.

    `chosen`: (group, option) of the command line, which win over an experiment's choices.
    """
    primary = read_conf_file(conf / f"{verb}.yaml", package="")
    experiments: list[ConfFile] = []
    choices, problems = dict(choices_of(primary)), []
    known = {*choices, *ADDED_GROUPS}
    problems = [
        f"{group}={option}: {verb} has no {group}; it has {', '.join(choices)}"
        for group, option in chosen
        if group not in known
    ]
    chosen = [(group, option) for group, option in chosen if group in known]
    for group, option in chosen:
        if group in ADDED_GROUPS:
            try:
                experiments.append(read_conf_file(find_option(conf, group, option), package=""))
            except UserError as error:
                problems += error.problems
    places: dict[str, str] = {}
    for file in experiments:
        for group, option in choices_of(file):
            place = f"{shown(file.path)}:{file.lines.get('defaults', 1)}: "
            if group in choices:
                choices[group], places[group] = option, place
            else:
                problems.append(
                    f"{place}defaults: {verb} has no {group}; it has {', '.join(choices)}"
                )
    typed_groups = {group for group, _ in chosen}
    choices |= {group: option for group, option in chosen if group not in ADDED_GROUPS}
    files = [primary]
    for group, option in choices.items():
        if option is None and (group, option) not in chosen:
            continue
        try:
            files.append(read_conf_file(find_option(conf, group, option), package=group))
        except UserError as error:
            place = "" if group in typed_groups else places.get(group, "")
            problems += [place + problem for problem in error.problems]
    if problems:
        raise UserError(problems)
    return [*files, *experiments]
