"""The door: what a person types and what the YAML files say becomes one typed object, or an error.

Hydra composes; here every key and value is checked first, against the dataclasses, so that all
problems are named together with the place they come from. After this no room knows OmegaConf.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.config import conf_files
from app.config.conf_files import ConfFile
from app.config.overrides import Given, read_words
from app.config.run_config import (
    fill_from_run,
    fill_to_resume,
    load_run_config,
    options_of,
    resolve_paths,
    run_with_settings,
)
from app.config.schema import hints_of
from app.config.validation import Settings, check_file, check_given, put_word_in_list
from app.config.values import first_line, parse_override, takes_value
from app.config.verbs import (
    ALTERNATIVES,
    CHOICES,
    PARTS,
    VERBS,
    EvaluateConfig,
    PreviewConfig,
    TrainConfig,
)
from app.preflight import check_compatibility, check_files, num_ranks
from app.process.errors import DONE, UserError
from app.process.faults import check_workers, parse_faults
from app.process.launch import check_launch, is_child, is_first_rank
from app.process.reporting import report
from app.run import NEVER, check_resume
from app.run.folder import UNSET, check_output, expand_home
from app.run.ranks import check_supervise
from data_modules import printable, redact

DEFAULT_EXPERIMENT = "quickstart"


def load_config(verb: str, words: Sequence[str], conf: Path = conf_files.CONF) -> Any:
    """Compose and check the settings of a verb; UserError lists every problem that was found."""
    composed = compose(verb, words, conf)
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        config: Any = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is missing; it has no default") from error
    except OmegaConfBaseException as error:
        where = f"{error.full_key or 'settings'} (of {' '.join(words)})"
        raise UserError(f"{where}: {first_line(error)}") from error
    resolve_paths(config)
    problems = _check_required(config, conf_files.groups(conf))
    goes_on = isinstance(config, TrainConfig) and config.resume != NEVER
    problems += check_output(config.output, resumes=goes_on)
    if not config.data.cache_dir.strip():
        problems.append(f"data.cache_dir is empty; {UNSET}")
    if problems:
        raise UserError(problems)
    return config


def compose(verb: str, words: Sequence[str], conf: Path = conf_files.CONF) -> Any:
    """Return the DictConfig of a verb, after checking every key and value that was given."""
    run = run_with_settings(words, conf) if verb == "train" else None
    of_run = [] if run is None else options_of(run, words)
    given, files, settings = check_words(verb, [*of_run, *words], conf)
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_schemas()
    experiment = next((one.value for one in given if one.key == "experiment"), None)
    overrides = [one.override for one in given if one.key != "experiment"]
    typed = {one.key for one in given}
    reset = _reset_alternatives(typed, verb)
    overrides += [f"++{key}={'null' if value is None else value}" for key, value in reset.items()]
    if experiment is not None:
        overrides.append(f"+experiment={_fit_experiment(files[-1], settings)}")
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            composed: Any = hydra_compose(verb, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        place = "" if experiment is None else f"{conf_files.shown(files[-1].path)}: "
        raise UserError(f"{place}{first_line(error)}") from error
    name = composed["output"]["name"] or _default_name(verb, experiment)
    OmegaConf.update(composed, "output.name", name)
    if (typed_folder := composed["output"]["dir"]) is not None and typed_folder.strip():
        expanded = str(expand_home("output.dir", typed_folder))
        OmegaConf.update(composed, "output.dir", expanded)
    if verb == "evaluate" and (composed["run"] is not None or not composed["model"]["path"]):
        return fill_from_run(composed, given)
    if verb == "train":
        composed = fill_to_resume(composed, given[len(of_run) :], reset, run)
    if "trainer.num_epochs" in typed and composed["trainer"]["max_steps"] is not None:
        say(
            f"note: trainer.max_steps={composed['trainer']['max_steps']} wins over "
            "trainer.num_epochs; type trainer.max_steps=null to train whole epochs"
        )
    return composed


def _default_name(verb: str, experiment: str | None) -> str:
    """Name a run after its experiment, else after its verb; previews stay apart from runs."""
    if experiment is None:
        return verb
    return f"{experiment}-preview" if verb == "preview" else experiment


def _reset_alternatives(typed: set[str], verb: str) -> dict[str, Any]:
    """Where one of two ways to say a thing was typed, take the other one back to its default.

    An experiment's schedule.warmup_steps would else win over a typed schedule.warmup_ratio.
    """
    reset = {}
    for pair in ALTERNATIVES:
        for one, other in (pair, pair[::-1]):
            group, _, name = other.partition(".")
            if one in typed and other not in typed:
                schema = hints_of(VERBS[verb])[group]
                field = next(f for f in dataclasses.fields(schema) if f.name == name)
                reset[other] = field.default
    return reset


def check_words(
    verb: str, words: Sequence[str], conf: Path = conf_files.CONF
) -> tuple[list[Given], list[ConfFile], Settings]:
    """Read and check all overrides and all files that they choose; UserError with every problem."""
    groups = conf_files.groups(conf)
    given, problems = read_words(words, groups, conf_files.ADDED_GROUPS, parse_override)
    if any(one.key == "sweep" for one in given):
        raise UserError("sweep=NAME lists several runs: add -m to try each of them")
    try:
        files = conf_files.used_files(
            conf, verb, [(g.key, g.value) for g in given if g.key in groups]
        )
    except UserError as error:
        raise UserError(problems + error.problems) from error
    replaced = frozenset(one.key for one in given if one.key in PARTS)
    settings = _settings_in_use(verb, files, replaced)
    given = [one if one.key in groups else put_word_in_list(one, settings) for one in given]
    for file in files:
        problems += check_file(file, settings)
    for one in given:
        if one.key not in groups:
            problems += check_given(one, settings)
    if problems:
        raise UserError(problems)
    return given, files, settings


def _fit_experiment(file: ConfFile, settings: Settings) -> str:
    """Return the experiment's name for Hydra, without what the command line's options replace.

    `+experiment=quickstart adapter=full` would else fail on the experiment's adapter.r, and Hydra
    would read keys as they are written, not as Python has them.
    """
    left_out = settings.left_out(file)
    if not left_out and not file.is_respelled:
        return file.path.stem
    from hydra.core.config_store import ConfigStore

    values = copy.deepcopy(file.values)
    for key in left_out:
        group, _, name = key.partition(".")
        del values[group][name]
    if left_out:
        chosen = ", ".join(f"{g}={settings.options[g]}" for g in sorted(settings.replaced))
        say(f"note: {file.path.stem}'s {', '.join(left_out)} do not apply to {chosen}")
    node = {"defaults": file.defaults, **values}
    fitted = f"{file.path.stem}--fitted"
    ConfigStore.instance().store(group="experiment", name=fitted, node=node, package="_global_")
    return fitted


def _settings_in_use(verb: str, files: list[ConfFile], replaced: frozenset[str]) -> Settings:
    parts, options = {}, {}
    for file in files:
        name = file.schema_name()
        if file.package in PARTS and name in PARTS[file.package]:
            parts[file.package] = PARTS[file.package][name]
            options[file.package] = file.path.stem
    return Settings(VERBS[verb], parts, options, PARTS, takes_value, CHOICES, replaced)


@functools.cache
def _register_schemas() -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for verb, schema in VERBS.items():
        store.store(group="schema", name=verb, node=schema)
    for group, options in PARTS.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


def _check_required(
    config: TrainConfig | EvaluateConfig, groups: dict[str, list[str]]
) -> list[str]:
    problems = []
    run = config.run if isinstance(config, EvaluateConfig) else None
    if isinstance(config, PreviewConfig):
        if config.resume != NEVER:
            problems.append(f"resume={config.resume}: a preview trains nothing; leave it out")
        if config.model.path is None and config.model.tokenizer_path is None:
            problems.append(
                f"no tokenizer: type model=NAME ({', '.join(groups['model'])}), or "
                "model.path=FOLDER_OR_HUB_ID (its weights are not needed); "
                "+experiment=quickstart is a whole run"
            )
    elif config.model.path is None and not config.model.from_scratch and run is None:
        problems.append(
            f"no model: type model=NAME ({', '.join(groups['model'])}), or "
            "model.path=FOLDER_OR_HUB_ID; +experiment=quickstart is a whole run"
        )
    tests_only = isinstance(config, EvaluateConfig) and config.data.test_datasets
    if not config.data.datasets and not tests_only:
        problems.append(
            f"no data: type data=NAME ({', '.join(groups['data'])}), or "
            "'data.datasets=[{path: FILE, format: alpaca}]'; +experiment=quickstart is a whole run"
        )
    return problems


def run_verb(
    verb: str,
    function: Callable[[Any], object],
    *,
    sweep: Callable[[list[str]], int] | None = None,
    words: Sequence[str] | None = None,
) -> int:
    """Run a verb from its command line; returns the exit code, prints at most one error."""
    typed = list(sys.argv[1:] if words is None else words)
    try:
        return _dispatch(verb, function, sweep, typed)
    except BaseException as error:  # noqa: BLE001  last guard, also of what Rust calls a panic
        return report(error)


def _dispatch(
    verb: str,
    function: Callable[[Any], object],
    sweep: Callable[[list[str]], int] | None,
    words: list[str],
) -> int:
    if "--help" in words or "-h" in words:
        from app.config.help import help_page

        print(help_page(verb, VERBS[verb], PARTS, conf_files.CONF))
        return DONE
    is_sweep = bool({"-m", "--multirun"} & set(words))
    words = [word for word in words if word not in ("-m", "--multirun")]
    shows_settings, words = _take_cfg(words)
    if verb in ("train", "preview") and not words:
        words = [f"+experiment={DEFAULT_EXPERIMENT}"]
        say(f"no settings typed: +experiment={DEFAULT_EXPERIMENT} (--help shows more)")
    if is_sweep:
        if sweep is None:
            raise UserError(f"-m: {verb} runs once; sweeps are for train")
        if shows_settings:
            raise UserError("--cfg job shows one run: leave -m and the lists of values out")
        return sweep(words)
    if shows_settings:
        _print_composed(verb, words)
        return DONE
    config = load_config(verb, words)
    if not is_child():
        check_before_start(config)
    function(config)
    return DONE


def say(note: str) -> None:
    """Print a note on stderr, once for all ranks and for the process that starts them."""
    if is_first_rank() and not is_child():
        print(printable(redact(note)), file=sys.stderr)


def check_before_start(config: Any) -> None:
    """Run every check that needs no torch; UserError lists all problems of all rooms.

    A preview may be of a run for another machine, and needs no weights.
    """
    if isinstance(config, PreviewConfig):
        problems = check_launch(None)
        problems += check_compatibility(config, on_this_machine=False)
        problems += check_files(config, needs_weights=False)
    else:
        problems, is_done = _check_resume(config)
        if not is_done:  # a run that is done needs neither its data nor its model
            problems += check_launch(num_ranks(config))
            problems += check_compatibility(config)
            problems += check_files(config)
    if problems:
        raise UserError(problems)


def _check_resume(config: TrainConfig | EvaluateConfig) -> tuple[list[str], bool]:
    """List what is wrong with resume and faults; says whether the run is done already."""
    if not isinstance(config, TrainConfig):
        return [], False
    faults, problems = parse_faults(config.faults)
    problems += check_workers(faults, config.data.num_workers)
    problems += check_supervise(config)
    found, is_done = check_resume(config, load_run_config)
    return problems + found, is_done and not problems


def _take_cfg(words: list[str]) -> tuple[bool, list[str]]:
    """Take `--cfg job` out of the words; says whether it was there."""
    if "--cfg" not in words:
        return False, words
    position = words.index("--cfg")
    what = words[position + 1 : position + 2]
    if what != ["job"]:
        raise UserError(f"--cfg {''.join(what)}: expected --cfg job, which prints the settings")
    return True, words[:position] + words[position + 2 :]


def _print_composed(verb: str, words: list[str]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    composed = compose(verb, words)
    try:
        print(printable(redact(OmegaConf.to_yaml(composed, resolve=True)), keep="\n"), end="")
    except OmegaConfBaseException as error:
        raise UserError(first_line(error)) from error
