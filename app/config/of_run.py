"""The settings of a run that is there: written, read back, and taken over by what follows it.

What follows is an evaluation of it, or the same training resumed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config import conf_files
from app.config.nodes import first_line, parse_override, takes_value
from app.config.overrides import Given, read_words
from app.config.settings_check import Settings, check_file
from app.config.verbs import CHOICES, PARTS, EvaluateConfig, TrainConfig
from app.errors import ROOT, UserError
from app.model.adapter import Ia3Config, LoraConfig
from app.output import CONFIG_FILE, find_run, write_whole
from app.resume import find_run_to_resume
from app.untrusted import reading
from data_modules import TEMPLATE_NAMES

TAKEN_FROM_TRAINER = ("precision", "micro_batch_size")
"""what an evaluation takes over from its run's trainer; the rest is of training or of a machine"""


def save_config(config: Any, path: Path) -> None:
    """Write settings as plain YAML, which `load_run_config` reads back."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)
    write_whole(path, text)


def load_run_config(folder: Path) -> TrainConfig:
    """Read a run's config.yaml back through the same schemas; UserError with file and key."""
    with reading(conf_files.shown(folder / CONFIG_FILE), "copy the run's folder again"):
        return _load_run_config(folder)


def _load_run_config(folder: Path) -> TrainConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = conf_files.read_conf_file(folder / CONFIG_FILE, package="")
    parts = {
        group: options[name]
        for group, options in PARTS.items()
        if (name := _name_of(file.values.get(group))) in options
    }
    settings = Settings(TrainConfig, parts, {}, PARTS, takes_value, CHOICES)
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
        of_a_start = {"resume", "resume_allow", "faults", "output", "supervise"}
        typed = {one.key for one in given} | of_a_start
        of_run = dataclasses.asdict(load_run_config(run))
        shared = {name: of_run[name] for name in composed if name in of_run and name not in typed}
        shared |= {"output": {"name": of_run["output"]["name"]}}
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
    typed = {one.key for one in given} | {"run", "output"}
    of_run = dataclasses.asdict(load_run_config(run))
    shared = {name: of_run[name] for name in composed if name in of_run and name not in typed}
    if "trainer" in shared:
        shared["trainer"] = {name: shared["trainer"][name] for name in TAKEN_FROM_TRAINER}
    filled = OmegaConf.merge(composed, shared, {"run": str(run)})
    for one in given:
        if "." in one.key:
            OmegaConf.update(filled, one.key, one.value)
    return filled
