"""The settings of an existing run: written, and taken over by an evaluation of it or its resume."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config.conf_files import ConfFile
from app.config.schema import default_of
from app.config.verbs import (
    ON_A_RUN,
    PARTS,
    PER_START,
    TRUST_KEYS,
    VERBS,
    TrainConfig,
    TunedConfig,
)
from app.process.errors import UserError
from app.process.files import write_whole
from app.run import find_run, find_run_to_resume
from app.run.folder import CONFIG_FILE
from data_modules import (
    REDACTED,
    DataConfig,
    facts_of,
    hints_of,
    redact,
    redacted,
    redacted_keys,
)

log = logging.getLogger(__name__)
TAKEN_FROM_TRAINER = ("precision", "micro_batch_size")
"""what an evaluation takes over from its run's trainer; the rest is of training or of a machine"""


def save_config(config: TrainConfig | TunedConfig, path: Path) -> None:
    """Write settings as plain YAML, which `load_run_config` reads back, without secrets."""
    settings = redacted(dataclasses.asdict(config))
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_whole(path, text)


def write_experiment(config: TrainConfig, path: Path, header: str) -> None:
    """Write settings as an experiment of one's own: what differs from the defaults.

    `header`: comment lines below the first one.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        value = getattr(config, field.name)
        if field.name in PARTS:
            values[field.name] = dataclasses.asdict(value)
        elif field.name not in PER_START and (given := _given(value, default_of(field))):
            values[field.name] = given
    defaults = [{f"override /{group}": getattr(config, group).name} for group in PARTS]
    settings = redacted({"defaults": [*defaults, "_self_"], **values})
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_whole(path, f"# @package _global_\n{header}\n{text}")


def changed_settings(config: Any) -> list[tuple[str, str, str]]:
    """List the settings that differ from their defaults, without secrets: key, value, default.

    An option of a group is `adapter=full`; where a run lies and how it is watched is left out.
    """
    changed: list[tuple[str, str, str]] = []

    def compare(prefix: str, part: Any) -> None:
        for field in dataclasses.fields(part):
            value, default = getattr(part, field.name), default_of(field)
            key = f"{prefix}{facts_of(field).typed or field.name}"
            if key in PER_START or key == "run":
                continue
            if dataclasses.is_dataclass(value):
                option, first = getattr(value, "name", None), next(iter(PARTS.get(key, ())), None)
                if first is not None and option != first:
                    changed.append((key, str(option), first))
                compare(f"{key}.", value)
            elif value != default and not (field.name == "name" and prefix[:-1] in PARTS):
                changed.append((key, redact(_as_typed(value)), _as_typed(default)))

    compare("", config)
    return changed


def _given(value: Any, default: Any) -> Any:
    """Return what of a part differs from its default; nothing of what does not."""
    if not dataclasses.is_dataclass(value):
        plain = [dataclasses.asdict(one) for one in value] if _holds_parts(value) else value
        return plain if value != default else None
    fields = {field.name: default_of(field) for field in dataclasses.fields(value)}
    given = {name: _given(getattr(value, name), before) for name, before in fields.items()}
    return {name: part for name, part in given.items() if getattr(value, name) != fields[name]}


def _holds_parts(value: Any) -> bool:
    return isinstance(value, list) and all(map(dataclasses.is_dataclass, value))


def find_run_of(verb: str, typed: Mapping[str, Any]) -> Path | None:
    """Return the run whose settings a command means: one resumed, evaluated,
    merged or talked to by its folder.

    None where the model was typed, or no run is to be resumed. What is
    wrong with the words is found when they are checked.
    """
    if verb in ON_A_RUN:
        has_model = typed.get("model") is not None or typed.get("model.path") is not None
        if typed.get("run") is None and has_model:
            return None
        named = None if typed.get("run") is None else str(typed["run"])
        takes_unfinished = typed.get("merge.checkpoint") == "newest"
        return find_run(named, verb=verb, takes_unfinished=takes_unfinished)
    if verb != "train" or not isinstance(typed.get("resume"), str):
        return None
    names_parts = any(key.partition(".")[0] in ("model", "data") for key in typed)
    name = typed.get("output.name", "train" if names_parts else None)
    return find_run_to_resume(typed["resume"], typed.get("output.dir"), name)


def as_experiment(run: Path, config: TrainConfig, verb: str, typed: AbstractSet[str]) -> ConfFile:
    """Return a run's settings as an experiment would give them, for Hydra to compose.

    Without the groups and settings that were typed: what was typed wins. UserError where one of
    them is never taken from a run: trust, or a secret that was left out of its file.
    """
    own = PER_START if verb == "train" else {"run", "output"}
    of_run = dataclasses.asdict(without_trust(config))
    _leave_cache(of_run["data"], typed)
    values = {
        field.name: of_run[field.name]
        for field in dataclasses.fields(VERBS[verb])
        if field.name in of_run and field.name not in own and field.name not in typed
    }
    problems = _check_trust(run, config, values.keys(), typed)
    problems += _check_secrets(run, config, values, typed)
    if problems:
        raise UserError(problems)
    defaults = [
        {f"override /{group}": getattr(config, group).name} for group in PARTS if group in values
    ]
    if verb == "train":
        values["output"] = {"name": config.output.name, "dir": str(run)}
    else:
        values["output"] = {"name": f"{config.output.name or 'run'}-{verb}"}
    if verb != "train":
        for part in {"trainer", "evaluation"} & values.keys():
            known = {field.name for field in dataclasses.fields(hints_of(VERBS[verb])[part])}
            taken = known & set(TAKEN_FROM_TRAINER) if part == "trainer" else known
            of_part = values[part].items()
            values[part] = {name: one for name, one in of_part if name in taken and one != "auto"}
    return ConfFile(run / CONFIG_FILE, "", [*defaults, "_self_"], values, {})


def _leave_cache(data: dict[str, Any], typed: AbstractSet[str]) -> None:
    """Put the default in the place of a run's cache folder, which would be written to."""
    default, named = DataConfig().cache_dir, data["cache_dir"]
    data["cache_dir"] = default
    if named != default and not {"data", "data.cache_dir"} & typed:
        log.warning("data.cache_dir=%s of the run is not taken over; type it to use it", named)


def without_trust(config: TrainConfig) -> TrainConfig:
    """Return a run's settings with trust at its default: the folder may be somebody else's."""
    config = copy.deepcopy(config)
    for key in TRUST_KEYS:
        part, name = _place(config, key)
        default = next(field.default for field in dataclasses.fields(part) if field.name == name)
        setattr(part, name, default)
    return config


def _place(config: TrainConfig, key: str) -> tuple[Any, str]:
    """Return the part of a config that has setting `key`, and its name in there."""
    *groups, name = key.split(".")
    return functools.reduce(getattr, groups, config), name


def _check_trust(
    run: Path, config: TrainConfig, parts: AbstractSet[str], typed: AbstractSet[str]
) -> list[str]:
    """List the trust that a run's file asks for and nobody has typed."""
    before = {key: getattr(*_place(config, key)) for key in TRUST_KEYS}
    model = config.model
    where = model.path if model.revision is None else f"{model.path} (revision {model.revision})"
    of_model = ("Python files that come with the model run", f"those of {where}")
    of_metric = ("code of an evaluation run", f"{config.evaluation.metric or 'its tasks'}")
    files = {"evaluation.allow_code": of_metric}
    return [
        f"{run / CONFIG_FILE}: {key}={str(value).lower()} lets {files.get(key, of_model)[0]}, "
        f"and is never taken from a run's own files; read {files.get(key, of_model)[1]}, then type "
        f"{key}={str(value).lower()} (or {key}=false to go on without them)"
        for key, value in before.items()
        if value and key not in typed and key.partition(".")[0] in parts
    ]


def _check_secrets(
    run: Path, config: TrainConfig, settings: dict[str, Any], typed: AbstractSet[str]
) -> list[str]:
    """List the settings whose secrets were left out of a run's file and that nobody has typed."""
    left_out = {key.partition("[")[0] for key in redacted_keys(settings)}
    return [
        f"{run / CONFIG_FILE}: a secret was left out of {key} ({REDACTED} stands there), for files "
        f"never hold one; type it again: '{key}={_as_typed(getattr(*_place(config, key)))}'"
        for key in sorted(left_out - typed)
    ]


def _as_typed(value: Any) -> str:
    """Return a setting as it is typed; of data sets only what differs from the defaults."""
    if dataclasses.is_dataclass(value):
        given = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != default_of(field)
        }
        return _as_typed(given)
    if isinstance(value, list):
        return f"[{', '.join(map(_as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_as_typed(part)}' for name, part in value.items())}}}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
