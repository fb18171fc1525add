"""The settings of a run that is there: written, read back, and taken over by what follows it.

What follows is an evaluation of it, or the same training resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config import conf_files
from app.config.overrides import Given, read_words
from app.config.schema import default_of
from app.config.validation import Settings, check_file
from app.config.values import first_line, parse_override, takes_value
from app.config.verbs import PARTS, PER_START, TRUST_KEYS, EvaluateConfig, TrainConfig
from app.model.adapter import Ia3Config, LoraConfig
from app.process.errors import ROOT, UserError
from app.process.files import write_whole
from app.process.untrusted import reading
from app.run import find_run_to_resume
from app.run.output import CONFIG_FILE, find_run
from data_modules import REDACTED, TEMPLATE_NAMES, redacted, redacted_keys

TAKEN_FROM_TRAINER = ("precision", "micro_batch_size")
"""what an evaluation takes over from its run's trainer; the rest is of training or of a machine"""


def save_config(config: Any, path: Path) -> None:
    """Write settings as plain YAML, which `load_run_config` reads back, without secrets."""
    settings = redacted(dataclasses.asdict(config))
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_whole(path, text)


def load_run_config(folder: Path) -> TrainConfig:
    """Read a run's config.yaml back through the same schemas; UserError with file and key.

    Whatever it says of trust is left at its default: the folder may be of somebody else.
    """
    return _without_trust(_read_config(folder))


def take_settings(run: Path, typed: AbstractSet[str], parts: Iterable[str]) -> dict[str, Any]:
    """Return a run's settings of `parts`, for another start of it that gets the `typed` ones.

    UserError where it needs one that is never taken from a run: trust, or a secret left out of it.
    """
    config = _read_config(run)
    of_run = dataclasses.asdict(config)
    settings = {name: of_run[name] for name in parts if name in of_run and name not in typed}
    problems = _check_trust(run, config, settings.keys(), typed)
    problems += _check_secrets(run, config, settings, typed)
    if problems:
        raise UserError(problems)
    trusted_by_none = dataclasses.asdict(_without_trust(config))
    return {name: trusted_by_none[name] for name in settings}


def _without_trust(config: TrainConfig) -> TrainConfig:
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
    return [
        f"{run / CONFIG_FILE}: {key}={str(value).lower()} lets Python files that come with the "
        f"model run, and is never taken from a run's own files; read those of {where}, then type "
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
        f"never hold one; type it again: '{key}={_spelled(getattr(*_place(config, key)))}'"
        for key in sorted(left_out - typed)
    ]


def _spelled(value: Any) -> str:
    """Spell a setting as it is typed; of data sets only what differs from the defaults."""
    if dataclasses.is_dataclass(value):
        given = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != default_of(field)
        }
        return _spelled(given)
    if isinstance(value, list):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_spelled(part)}' for name, part in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_config(folder: Path) -> TrainConfig:
    with reading(conf_files.shown(folder / CONFIG_FILE), "copy the run's folder again"):
        return _read_settings(folder)


def _read_settings(folder: Path) -> TrainConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = conf_files.read_conf_file(folder / CONFIG_FILE, package="")
    parts = {
        group: options[name]
        for group, options in PARTS.items()
        if (name := _name_of(file.values.get(group))) in options
    }
    settings = Settings(TrainConfig, parts, {}, PARTS, takes_value)
    problems = check_file(file, settings)
    problems += [
        f"{conf_files.shown(file.path)} {group}.name: expected one of {', '.join(options)}"
        for group, options in PARTS.items()
        if group not in parts
    ]
    if problems:
        raise UserError(problems)
    node = OmegaConf.structured(TrainConfig)
    try:
        for group, schema in parts.items():
            node[group] = OmegaConf.structured(schema)
        config = OmegaConf.to_object(OmegaConf.merge(node, file.values))
    except OmegaConfBaseException as error:
        raise UserError(f"{conf_files.shown(file.path)}: {first_line(error)}") from error
    assert isinstance(config, TrainConfig)
    resolve_paths(config)
    return config


def _name_of(part: Any) -> str:
    name = part.get("name") if isinstance(part, dict) else None
    return name if isinstance(name, str) else ""


def resolve_paths(config: Any) -> None:
    """Make paths that exist absolute, so that a run can be evaluated from another folder.

    Expands `~`, and lets relative paths of the shipped YAML files work from any folder. What does
    not exist stays as it was typed: a hub id, a template's name, or a mistake to be named.
    """

    def resolve(path: str | None) -> str | None:
        if not path or "\0" in path:
            return path
        for candidate in (Path(path).expanduser(), ROOT / path):
            if candidate.exists():
                return os.path.abspath(candidate)
        return str(Path(path).expanduser()) if path.startswith("~") else path

    config.model.path = resolve(config.model.path)
    config.model.tokenizer_path = resolve(config.model.tokenizer_path)
    if config.data.chat_template not in TEMPLATE_NAMES:
        config.data.chat_template = resolve(config.data.chat_template)
    for dataset in (*config.data.datasets, *config.data.test_datasets):
        dataset.path = resolve(dataset.path) or dataset.path
    if isinstance(config, EvaluateConfig):
        config.adapter_path = resolve(config.adapter_path)
    elif isinstance(config.adapter, (LoraConfig, Ia3Config)):
        config.adapter.path = resolve(config.adapter.path)


def run_with_settings(words: Sequence[str], conf: Path) -> Path | None:
    """Return the run whose own settings are meant: one is resumed, and no experiment was typed.

    What is wrong with the words is found when they are checked.
    """
    given, _ = read_words(words, conf_files.groups(conf), conf_files.ADDED_GROUPS, parse_override)
    typed = {one.key: one.value for one in given}
    if "experiment" in typed or not isinstance(typed.get("resume"), str):
        return None
    says_what = any(key.partition(".")[0] in ("model", "data") for key in typed)
    name = typed.get("output.name", "train" if says_what else None)
    return find_run_to_resume(typed["resume"], typed.get("output.dir"), name)


def options_of(run: Path, words: Sequence[str]) -> list[str]:
    """Word the options that a run had, where the command line chooses none."""
    settings = load_run_config(run)
    typed = {word.partition("=")[0] for word in words}
    return [f"{group}={getattr(settings, group).name}" for group in PARTS if group not in typed]


def fill_to_resume(
    composed: Any, given: list[Given], reset: dict[str, Any], run: Path | None
) -> Any:
    """Name the folder of the run that is resumed; of `run`, take the settings as well.

    What was typed wins.
    """
    from omegaconf import OmegaConf

    output = composed["output"]
    found = run or find_run_to_resume(composed["resume"], output["dir"], output["name"])
    if found is None:
        return composed
    if run is not None:
        typed = {one.key for one in given}
        parts = [name for name in composed if name not in PER_START]
        shared = take_settings(run, typed, parts)
        shared |= {"output": {"name": load_run_config(run).output.name}}
        composed = OmegaConf.merge(composed, shared)
        for key, value in reset.items():
            OmegaConf.update(composed, key, value)
        for one in given:
            if "." in one.key:
                OmegaConf.update(composed, one.key, one.value)
    OmegaConf.update(composed, "output.dir", str(found))
    return composed


def fill_from_run(composed: Any, given: list[Given]) -> Any:
    """Take model, data and the rest from a finished run's settings, where nothing was typed."""
    from omegaconf import OmegaConf

    run = find_run(composed["run"])
    parts = [name for name in composed if name not in ("run", "output")]
    shared = take_settings(run, {one.key for one in given}, parts)
    if "trainer" in shared:
        shared["trainer"] = {name: shared["trainer"][name] for name in TAKEN_FROM_TRAINER}
    filled = OmegaConf.merge(composed, shared, {"run": str(run)})
    for one in given:
        if "." in one.key:
            OmegaConf.update(filled, one.key, one.value)
    return filled
