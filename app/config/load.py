"""Turn the command line and the YAML files into one typed object, or into an error.

Hydra composes plain values, OmegaConf converts them to the types of the settings. Only if either
fails, `validation` lists every problem with its place. No other room sees OmegaConf.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from app.config.conf_files import (
    CONF,
    ConfFile,
    PlainLoader,
    display_path,
    experiment_from_run,
    find_option,
    find_source_run,
    list_groups,
    read_conf_file,
)
from app.config.overrides import (
    Override,
    check_words,
    keys_in,
    parse_overrides,
    refuse_unknown,
    safety_error,
    words_of_mapping,
)
from app.config.schema import is_section
from app.config.validation import KnownSettings, Sources, describe_shape, find_problems, print_note
from app.config.verbs import (
    ALTERNATIVES,
    PARTS,
    VERBS,
    EvaluateConfig,
    TrainConfig,
    TunedConfig,
    only_in,
)
from app.model.base import ModelConfig
from app.run import NEVER, find_run_to_resume
from app.run.folder import CONFIG_FILE, NO_URL, VERB_LINE, expand_home, is_training_run
from app.run.remote import run_folder
from app.strategy.deepspeed_config import read_deepspeed_file
from app.strategy.settings import ZeroConfig
from common.errors import MAX_PROBLEMS, UserError
from common.facts import facts_of, hints_of, leaves_of
from common.installation import ROOT, verb_command
from common.untrusted import reading
from data_modules import TEMPLATE_NAMES

Config = TrainConfig | TunedConfig
"""the settings of a verb; PreviewConfig and PlanConfig are TrainConfigs"""
EXPERIMENT_NODE = "typed-experiment"
"""name in Hydra's ConfigStore of the experiment that this module has read"""
_MAX_NAME_LENGTH = 72
_MAX_FIRST_LINE = 200
"""number of characters in which the first line of a saved file ends"""
_FEW_KEYS = 64
"""number of an experiment's keys up to which each unknown one is explained"""
_MIN_ITEM = len("a: 1,")
_NUMBERS = (bool, int, float)
"""what YAML and Hydra make of some texts"""
_TRAINING = ("train", "launch")
"""verbs whose run may have a URL as its folder"""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def load_config(verb: str, words: Sequence[str] | Mapping[str, Any], conf: Path = CONF) -> Config:
    """Compose the settings of a verb, and make existing paths absolute; UserError as `compose`.

    `words`: overrides as on the command line, e.g. `["+experiment=quickstart", "seed=1"]`, or a
    mapping, `{"experiment": "quickstart", "trainer": {"max_steps": 20}, "optimizer.lr": 2e-3}`.
    """
    if isinstance(words, Mapping):
        words = words_of_mapping(words, hints_of(VERBS[verb]))
    config = compose(verb, words, conf)
    if isinstance(config, TrainConfig | EvaluateConfig) and config.objective.name == "reward":
        config.model.labels = config.model.labels or ["reward"]  # the name of its one output
    _resolve_paths(config)
    return config


def settings_of(group: str, option: str) -> Any:
    """Return the settings of `group=option`, as defined by its file."""
    file = read_conf_file(find_option(CONF, group, option), package=group)
    schema = PARTS[group][option] if group in PARTS else hints_of(VERBS["plan"])[group]
    return schema(**file.values)


def compose(verb: str, words: Sequence[str], conf: Path = CONF) -> Config:
    """Return the typed settings of a verb; UserError lists every wrong key and value."""
    known = list_groups(conf)
    if len(words) > MAX_PROBLEMS:
        check_words(verb, words, known)
    overrides, problems = parse_overrides(words, known)
    for each in overrides:
        if len(each.typed) > _FEW_KEYS * _MIN_ITEM:
            refuse_unknown(verb, keys_in(each.value, each.key), lambda _: "command line:")
    typed = {override.key: override.value for override in overrides}
    if "sweep" in typed:
        raise UserError("sweep=NAME defines several runs: add -m to run each of them")
    run = experiment = None
    for_hydra = [each.for_hydra for each in overrides if each.key != "experiment"]
    try:
        experiment = _check_options(verb, overrides, typed, known, conf)
        problems += [] if experiment is None else experiment.problems
        if experiment is None and (run := find_source_run(verb, typed, load_run_config)):
            saved = load_run_config(run)
            experiment = experiment_from_run(run / CONFIG_FILE, saved, verb, typed.keys())
        for_hydra += [] if experiment is None else [f"+experiment={EXPERIMENT_NODE}"]
        values, options = _compose_values(verb, for_hydra, experiment, conf)
    except UserError as error:
        raise _explain(verb, experiment, problems, error) from error
    for key, alternative in (*ALTERNATIVES, *(pair[::-1] for pair in ALTERNATIVES)):
        # Otherwise an experiment's schedule.warmup_steps would win over a typed warmup_ratio.
        group, _, name = alternative.partition(".")
        if key in typed and alternative not in typed and isinstance(values.get(group), dict):
            values[group].pop(name, None)
    sources = Sources(lambda: _files_in_use(verb, for_hydra, experiment, conf), overrides)
    try:
        replaced = typed.keys() & PARTS.keys()
        config = _build(VERBS[verb], values, options, sources, problems, replaced=replaced)
    except UserError as error:
        raise _explain(verb, experiment, [], error) from error
    if config.model.architecture or "model.revision" in typed:
        _check_base(config.model, typed, experiment, is_new_run=run is None and verb == "train")
    strategy = config.strategy if isinstance(config, TrainConfig) else None
    if isinstance(strategy, ZeroConfig) and isinstance(strategy.config, str):
        strategy.config = read_deepspeed_file(strategy.config)
    stem = "" if experiment is None else experiment.path.stem
    name = _NOT_IN_NAMES.sub("-", stem).strip("-._")[:_MAX_NAME_LENGTH] or verb
    # Keeps previews and plans out of the folder of the experiment's runs.
    keeps_out = experiment is not None and verb in ("preview", "plan")
    config.output.name = config.output.name or (f"{name}-{verb}" if keeps_out else name)
    if (folder := config.output.dir) and folder.strip():
        config.output.dir = str(run_folder("output.dir", folder, takes_url=verb in _TRAINING))
    if isinstance(config, TunedConfig):
        config.run = config.run if run is None else str(run)
        return config
    if run is None and verb == "train" and config.resume != NEVER:
        run = find_run_to_resume(config.resume, config.output.dir, config.output.name)
    config.output.dir = config.output.dir if run is None else str(run)
    if "trainer.num_epochs" in typed and config.trainer.max_steps is not None:
        print_note(
            f"note: trainer.max_steps={config.trainer.max_steps} takes precedence over "
            "trainer.num_epochs; type trainer.max_steps=null to train whole epochs"
        )
    return config


def _check_base(
    model: ModelConfig, typed: Mapping[str, Any], experiment: ConfFile | None, *, is_new_run: bool
) -> None:
    """Refuse what is given for a base that is a folder, and describes it in vain.

    That is a typed commit (an experiment's may be of the hub id that the folder is a copy of), and
    in a new run a description beside config.json; a plan or a preview may be of a smaller base.
    """
    if model.path is None or not (folder := Path(model.path)).is_dir():
        return
    if typed.get("model.revision"):  # an empty one is refused as such
        raise UserError(f"model.revision has no effect: {folder} is not a hub id; leave it out")
    key, file = "model.architecture", folder / "config.json"
    is_given = any(each.startswith(key) for each in typed) or (experiment and experiment.sets(key))
    if is_new_run and model.architecture and is_given and not model.from_scratch and file.is_file():
        raise UserError(
            f"{key} has no effect: {file} describes the model; leave it out, or type "
            "model.from_scratch=true model.path=null for random weights"
        )


def _check_options(
    verb: str,
    overrides: Sequence[Override],
    typed: Mapping[str, Any],
    known: Mapping[str, Sequence[str]],
    conf: Path,
) -> ConfFile | None:
    """Check that every chosen option exists; return the experiment if one was typed.

    `typed`: all that was typed, which a run's config.yaml as an experiment depends on.
    """
    groups = [part.name for part in dataclasses.fields(VERBS[verb]) if part.name in known]
    experiment: ConfFile | None = None
    problems = []
    chosen: list[tuple[ConfFile | None, str, Any]] = [
        (None, each.key, each.value if isinstance(each.value, str) else each.typed)
        for each in overrides
        if each.key in known
    ]
    for chosen_in, group, option in chosen:
        is_experiment = group == "experiment" and chosen_in is None
        try:
            if is_experiment and experiment is not None:
                raise UserError(f"experiment={option}: only one experiment can be typed")
            if not is_experiment and group not in groups:
                words = [
                    each.typed for each in overrides if chosen_in is None and each.key == group
                ]
                text = words[0] if words else option
                hint = only_in(group) or f"; it has {', '.join(groups)}"
                raise UserError(f"{group}={text}: {verb} has no group {group}{hint}")
            if option is None and chosen_in is not None:
                continue
            file = find_option(conf, group, option)
            is_saved = False  # what a run saved, or `--cfg job` printed, under any name
            if is_experiment and file.is_file():
                with file.open(encoding="utf-8-sig", errors="replace") as stream:
                    is_saved = VERB_LINE.match(stream.readline(_MAX_FIRST_LINE)) is not None
            if is_saved:
                if not is_training_run(file):
                    raise UserError(
                        f"{display_path(file)}:1: settings of another verb than train; an "
                        f"experiment is what `{verb_command('train')} ... --cfg job` prints, or "
                        "the config.yaml of a training run"
                    )
                experiment = experiment_from_run(file, _load_saved(file), verb, typed.keys())
                experiment.values["output"].pop("dir", None)  # a new run
            elif is_experiment:
                experiment = read_conf_file(file, package="", is_global=True)
                if "hydra" in experiment.values:
                    raise UserError(f"{experiment.where('hydra')} unknown key hydra")
                if len(experiment.lines) > _FEW_KEYS:
                    refuse_unknown(verb, keys_in(experiment.values), experiment.where)
                chosen += [(experiment, *choice) for choice in experiment.choices]
        except UserError as error:
            place = "" if chosen_in is None else f"{chosen_in.where('defaults')}: "
            problems += [place + problem for problem in error.problems]
    if problems:
        raise UserError(problems)
    return experiment


def _explain(
    verb: str, experiment: ConfFile | None, problems: list[str], error: UserError
) -> UserError:
    """Return the error to raise: values of a wrong shape explain all others of their group."""
    shapes: list[str] = []
    if experiment is not None:
        shapes = check_sections(experiment, experiment.values, hints_of(VERBS[verb]))
    return UserError(problems + (shapes or error.problems))


def check_sections(
    file: ConfFile, values: Mapping[str, Any], hints: Mapping[str, Any], above: str = ""
) -> list[str]:
    """List what stands in an experiment in place of the settings of a group or section."""
    problems = []
    for name, value in values.items():
        key, hint = f"{above}{name}", hints.get(name)
        parts: list[type] = [] if above else list(PARTS.get(name, {}).values())
        sections = parts or ([hint] if is_section(hint) else [])
        if isinstance(value, dict):
            inner = {each: kind for part in sections for each, kind in hints_of(part).items()}
            problems += check_sections(file, value, inner, f"{key}.")
        elif sections and not str(value).startswith("${"):
            problems.append(f"{file.where(key)} {describe_shape(key, value, sections[0])}")
        elif "." in name and name.partition(".")[0] in hints:
            group, _, inner_key = name.partition(".")
            problems.append(f"{file.where(key)} {key}: write `{group}: {{{inner_key}: ...}}`")
    return problems


def _compose_values(
    verb: str, overrides: list[str], experiment: ConfFile | None, conf: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that Hydra composes, and the option it used of each group.

    Hydra receives the experiment as this module has read it: checked against the limits, with the
    keys as Python spells them.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if experiment is not None:
            node = {"defaults": experiment.defaults, **experiment.values}
            ConfigStore.instance().store(EXPERIMENT_NODE, node, "experiment", "_global_")
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            composed = compose(verb, overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        if isinstance(error, (yaml.YAMLError, ValueError)):
            for file in sorted(conf.glob("**/*.yaml")):
                read_conf_file(file, package="")  # raises for an invalid file, with its line
        message = first_line(error)
        if experiment is not None:
            entries = [each for each in experiment.defaults if isinstance(each, dict)]
            for group, option in (pair for each in entries for pair in each.items()):
                if not group.startswith("override /"):
                    fix = f"`{group}: {option}`: write `override /{group.strip('/')}: {option}`"
                    raise UserError(f"{experiment.where('defaults')} defaults: {fix}") from error
            name = experiment.path.stem
            message = f"{display_path(experiment.path)}: {message.replace(EXPERIMENT_NODE, name)}"
        raise UserError(message) from error
    options = {group: option for group, option in composed.hydra.runtime.choices.items() if option}
    values: dict[str, Any] = OmegaConf.to_container(composed, resolve=False)  # type: ignore[assignment]
    del values["hydra"]
    return values, options


def _files_in_use(
    verb: str, overrides: list[str], experiment: ConfFile | None, conf: Path
) -> list[ConfFile]:
    """Read the files that Hydra composed, in its order, with the line of each key."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(verb, overrides, RunMode.RUN).defaults
    files = []
    for default in defaults:
        path = conf / f"{default.config_path}.yaml"
        if experiment is not None and default.config_path == f"experiment/{EXPERIMENT_NODE}":
            files.append(experiment)
        elif path.is_file():
            files.append(read_conf_file(path, package=default.package or ""))
    return files


def _build(
    schema: type,
    values: dict[str, Any],
    options: Mapping[str, str],
    sources: Sources,
    problems: list[str],
    replaced: AbstractSet[str] = frozenset(),
) -> Config:
    """Convert composed values to typed settings; UserError lists every problem, `problems` first.

    `options`: group -> chosen option; a group without one is identified by its `name`.
    `replaced`: groups whose option the command line chose, overriding an experiment's choice.
    A data set given as a bare path is {path: PATH}.
    """
    if isinstance(data := values.get("data"), dict):
        bare = {}
        for key in ("datasets", "val_datasets", "test_datasets"):
            given = data.get(key)
            entries = [given] if isinstance(given, str) and not given.startswith("${") else given
            if isinstance(entries, list):
                bare[key] = [
                    {"path": entry} if isinstance(entry, str) else entry for entry in entries
                ]
        values = {**values, "data": {**data, **bare}}
    names, parts = {}, {}
    for group in PARTS.keys() & {field.name for field in dataclasses.fields(schema)}:
        part = values.get(group)
        named = part.get("name") if isinstance(part, dict) else None
        name = options[group] if options.get(group) in PARTS[group] else named
        if isinstance(name, str) and name in PARTS[group]:
            names[group], parts[group] = name, PARTS[group][name]
        else:
            place, words = sources.where(f"{group}.name"), ", ".join(PARTS[group])
            problems = [*problems, f"{place} {group}.name: expected one of {words}"]
    if not problems:
        with contextlib.suppress(UserError):
            return _give_types(schema, parts, values, names, sources)
    settings = KnownSettings(schema, parts, names, PARTS, frozenset(replaced))
    values, found = find_problems(values, settings, sources)
    if problems or found:
        raise UserError([*problems, *found])
    return _give_types(schema, parts, values, names, sources)


def _give_types(
    schema: type,
    parts: Mapping[str, type],
    values: Mapping[str, Any],
    names: Mapping[str, str],
    sources: Sources,
) -> Config:
    """Return settings as typed objects; UserError with the first problem.

    `names`: the required `name` of each of the `parts`. Bounds of numbers are checked later, by
    `check_before_start`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if (refusal := safety_error("", values)) is not None:
        raise UserError(refusal)
    node = OmegaConf.structured(schema)
    try:
        for group, part in parts.items():
            node[group] = OmegaConf.structured(part)
        node.merge_with(values)
        config: Any = OmegaConf.to_object(node)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is missing; it has no default") from error
    except OmegaConfBaseException as error:
        key = error.full_key or "settings"
        raise UserError(f"{sources.where(key)} {key}: {first_line(error)}") from error
    unchecked: list[tuple[Any, Any]] = [(config, values)]
    while unchecked:
        part, composed = unchecked.pop()
        for field in dataclasses.fields(part):
            value, facts = getattr(part, field.name), field.metadata.get("facts")
            given = composed.get(field.name) if isinstance(composed, dict) else None
            elements = value if isinstance(value, list) else [value]
            given_each = given if isinstance(given, list) else repeat(given)
            pairs = list(zip(elements, given_each, strict=False))
            unchecked += [pair for pair in pairs if dataclasses.is_dataclass(pair[0])]
            choices = facts.choices if facts else ()
            is_converted = any(type(one) in _NUMBERS and type(text) is str for text, one in pairs)
            if is_converted and not choices:
                raise UserError(f"{field.name}={given}: expected text")
            invalid = [each for each in elements if choices and each not in (None, *choices)]
            takes_numbers = facts and (facts.ge is not None or facts.gt is not None)
            if invalid and not takes_numbers:
                raise UserError(f"{field.name}={invalid[0]}: expected one of {choices}")
    for group, name in names.items():
        if (named := getattr(config, group).name) != name:
            raise UserError(f"{group}.name={named}: expected {name}")
    return config


def load_run_config(folder: Path) -> TrainConfig:
    """Load a run's config.yaml through the same schemas; UserError with file and key.

    Cached until the file changes. For comparing and showing it: a command inherits settings by
    `experiment_from_run` alone, since the folder may be somebody else's.
    """
    return _load_saved(folder / CONFIG_FILE)


def _load_saved(file: Path) -> TrainConfig:
    mtime_ns = file.stat().st_mtime_ns if file.is_file() else 0
    config = copy.deepcopy(_read_run_once(file.absolute(), mtime_ns))
    _resolve_paths(config)
    return config


@functools.lru_cache(maxsize=4)
def _read_run_once(path: Path, mtime_ns: int) -> TrainConfig:
    with reading(display_path(path), "copy the run's folder again"):
        file = read_conf_file(path, package="", loader=PlainLoader)
        config = _build(TrainConfig, file.values, {}, Sources(lambda: [file]), [])
        assert isinstance(config, TrainConfig)
        return config


def _resolve_paths(config: Config) -> None:
    """Make existing paths absolute, so that a run can be evaluated from another folder.

    Expands `~`, and lets relative paths of the shipped YAML files work from any folder. A path that
    does not exist stays as typed: it is a hub id, a template's name, or an error reported later.
    """
    for _, part, name in paths_in(config):
        path = getattr(part, name)
        if not path or "\0" in path:
            continue
        if path.startswith("~"):
            path = str(expand_home(name, path))
            setattr(part, name, path)
        existing = [each for each in (path, str(ROOT / path)) if os.path.exists(each)]
        if existing:
            setattr(part, name, os.path.abspath(existing[0]))


def check_paths(config: Config) -> list[str]:
    """List paths (and a revision) that are empty, not null, and a cache folder that is a URL."""
    places = [*paths_in(config), ("model.revision", config.model, "revision")]
    problems = []
    if isinstance(config, (TrainConfig, EvaluateConfig)):
        places.append(("data.cache_dir", config.data, "cache_dir"))
        if "://" in config.data.cache_dir:
            problems.append(f"data.cache_dir={config.data.cache_dir}: {NO_URL}")
    return problems + [
        f"{key} is empty; is it a variable that is not set? type its value, or leave it out"
        for key, part, name in places
        if (value := getattr(part, name)) is not None and not value.strip()
    ]


def paths_in(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Yield full key, owner and field of each path, but for the names of shipped templates."""
    for key, part, field, value in leaves_of(config):
        is_shipped = field.name == "chat_template" and value in TEMPLATE_NAMES
        if facts_of(field).is_path and not is_shipped:
            yield key, part, field.name


def first_line(error: Exception) -> str:
    """Return the readable part of an error of Hydra or OmegaConf."""
    return str(error).strip().splitlines()[0]
