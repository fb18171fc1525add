"""A verb from its command line to its exit code: help, a sweep, the settings alone, or the run."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

import yaml  # type: ignore[import-untyped]

from app.config.conf_files import CONF, groups
from app.config.load import Config, check_empty, compose, load_config, load_run_config
from app.config.validation import print_note
from app.config.verbs import (
    PARTS,
    VERBS,
    EvaluateConfig,
    PlanConfig,
    PreviewConfig,
    TrainConfig,
    TunedConfig,
)
from app.evaluation.metrics import check_metrics
from app.evaluation.tasks.harness import check_harness
from app.evaluation.tasks.questions import check_tasks
from app.preflight import check_compatibility, check_files, check_gpus, requested_devices
from app.process.errors import DONE, UserError
from app.process.faults import check_workers, parse_faults
from app.process.launch import check_launch, is_child
from app.process.logs import be_verbose
from app.process.reporting import report
from app.run import NEVER, ExistingRun, compare_existing
from app.run.folder import NO_URL, UNSET, check_output, discard_unused
from app.run.ranks import check_nodes, check_supervise
from app.strategy.rendezvous import check_network
from data_modules import printable, redact

DEFAULT_EXPERIMENT = "quickstart"


def run_verb(
    verb: str,
    function: Callable[..., object],
    *,
    sweep: Callable[[list[str]], int] | None = None,
    words: Sequence[str] | None = None,
) -> int:
    """Run a verb from its command line; returns the exit code, prints at most one error.

    `function` gets the verb's settings, and the run that they resume where there is one.
    """
    typed = list(sys.argv[1:] if words is None else words)
    try:
        _check_current_folder()
        return _dispatch(verb, function, sweep, typed)
    except BaseException as error:  # noqa: BLE001  last guard, also of what Rust calls a panic
        code = report(error)
        discard_unused()
        return code


def _dispatch(
    verb: str,
    function: Callable[..., object],
    sweep: Callable[[list[str]], int] | None,
    words: list[str],
) -> int:
    if "--help" in words or "-h" in words:
        from app.config.help import help_page

        topic = next((word for word in words if word[0] != "-" and "=" not in word), None)
        print(help_page(verb, VERBS[verb], PARTS, CONF, topic))
        return DONE
    if "--version" in words:
        print(f"loft {version()}")
        return DONE
    is_sweep = bool({"-m", "--multirun"} & set(words))
    be_verbose("--verbose" in words)
    words = [word for word in words if word not in ("-m", "--multirun", "--verbose")]
    shows_settings, words = _take_cfg(words)
    if verb in ("train", "preview", "plan") and not words:
        words = [f"+experiment={DEFAULT_EXPERIMENT}"]
        print_note(f"no settings typed: +experiment={DEFAULT_EXPERIMENT} (--help shows more)")
    if is_sweep:
        if sweep is None:
            raise UserError(f"-m: {verb} runs once; sweeps are for train")
        if shows_settings:
            raise UserError("--cfg job shows one run: leave -m and the lists of values out")
        return sweep(words)
    of_a_sweep = ("sweep.", "launcher=", "launcher.")
    if of_sweep := [word for word in words if word.lstrip("+").startswith(of_a_sweep)]:
        raise UserError(f"{of_sweep[0]}: a sweep's settings mean nothing in one run; add -m")
    if shows_settings:
        _print_settings(verb, words)
        return DONE
    config = load_config(verb, words)
    existing = None if is_child() else check_before_start(config, words)
    if existing is None:
        function(config)
    else:
        function(config, existing)
    return DONE


def version() -> str:
    """Return the version of this program, as it was installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("loft")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        where = os.environ.get("PWD", "the current folder")
        raise FileNotFoundError(
            f"{where} does not exist any more: it was moved or deleted; go to another folder (cd)"
        ) from error


def check_before_start(config: Config, words: Sequence[str] | None = None) -> ExistingRun | None:
    """Run every check that needs no torch; UserError lists all problems of all rooms.

    `words`: of the command line; None for the trials of a sweep.
    Returns the run that is resumed, None for a new one. A preview may be of a run for another
    machine, and needs no weights.
    """
    resumes = isinstance(config, TrainConfig) and config.resume != NEVER
    problems = _check_required(config) + check_output(config.output, resumes=resumes)
    problems += _check_cache_dir(config) + check_empty(config)
    if problems:
        raise UserError(problems)
    if isinstance(config, PlanConfig):
        return None  # it checks against its hardware, and reads neither weights nor data
    existing = None
    if isinstance(config, TrainConfig) and not isinstance(config, PreviewConfig):
        problems = _check_faults(config) + check_supervise(config)
        existing = compare_existing(config, load_run_config) if resumes else None
        problems += [] if existing is None else existing.problems
    if existing is not None and existing.is_done and not problems:
        return existing  # it needs neither its data nor its model
    problems += _check_launch(config, words) + _check_parts(config)
    if problems:
        raise UserError(problems)
    if _runs_here(config):
        check_gpus(config)
    return existing


def _check_cache_dir(config: Config) -> list[str]:
    if not isinstance(config, (TrainConfig, EvaluateConfig)):
        return []
    cache_dir = config.data.cache_dir
    if not cache_dir.strip():
        return [f"data.cache_dir is empty; {UNSET}"]
    return [f"data.cache_dir={cache_dir}: {NO_URL}"] if "://" in cache_dir else []


def _check_faults(config: TrainConfig) -> list[str]:
    if not config.faults:
        return []
    faults, problems = parse_faults(config.faults)
    return problems + check_workers(faults, config.data.num_workers)


def _check_launch(config: Config, words: Sequence[str] | None) -> list[str]:
    """List what is wrong with how this process was started, and with the nodes of a training."""
    if isinstance(config, PreviewConfig):
        return check_launch(None)
    if isinstance(config, EvaluateConfig):
        return check_launch(requested_devices(config).num_ranks)
    if not isinstance(config, TrainConfig):
        return check_launch(None)
    if not _runs_here(config):
        return []
    devices = requested_devices(config)
    return [
        *check_launch(devices.num_ranks, devices.ranks_per_node),
        *check_nodes(config, words),
        *check_network(config.trainer.num_nodes),
    ]


def _check_parts(config: Config) -> list[str]:
    """List what does not go together, and what is wrong with the files and measurements typed."""
    problems = check_compatibility(config, on_this_machine=_runs_here(config))
    problems += check_files(config, needs_weights=not isinstance(config, PreviewConfig))
    if isinstance(config, (TrainConfig, EvaluateConfig)):
        for check in (check_metrics, check_tasks, check_harness):
            problems += check(config.evaluation)
    return problems


def _runs_here(config: Config) -> bool:
    """Return whether it runs on this machine: not in a job, nor as the preview of a run."""
    if isinstance(config, TrainConfig):
        return not isinstance(config, PreviewConfig) and config.launcher.name == "local"
    return True


def _take_cfg(words: list[str]) -> tuple[bool, list[str]]:
    """Take `--cfg job` out of the words; says whether it was there."""
    if "--cfg" not in words:
        return False, words
    position = words.index("--cfg")
    what = words[position + 1 : position + 2]
    if what != ["job"]:
        raise UserError(f"--cfg {''.join(what)}: expected --cfg job, which prints the settings")
    return True, words[:position] + words[position + 2 :]


def _print_settings(verb: str, words: list[str]) -> None:
    """Print the settings that a command would use, as YAML."""
    settings = dataclasses.asdict(compose(verb, words))
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    print(printable(redact(text), keep="\n"), end="")


def _models() -> str:
    """Return how to type a model by name: too many for a message, as groups go."""
    return f"model=NAME (--help model lists {len(groups(CONF)['model'])})"


def _check_required(config: Config) -> list[str]:
    """List what has no default and was not given: a model, data."""
    problems = []
    run = config.run if isinstance(config, TunedConfig) else None
    if isinstance(config, PreviewConfig):
        if config.resume != NEVER:
            problems.append(f"resume={config.resume}: a preview trains nothing; leave it out")
        if config.model.path is None and config.model.tokenizer_path is None:
            problems.append(
                "no tokenizer: type model.path=FOLDER_OR_HUB_ID (its weights are not needed), or "
                f"{_models()}; +experiment=quickstart is a whole run"
            )
    elif config.model.path is None and not config.model.from_scratch and run is None:
        problems.append(
            f"no model: type model.path=FOLDER_OR_HUB_ID, or {_models()}; "
            "+experiment=quickstart is a whole run"
        )
    if isinstance(config, PlanConfig) or not isinstance(config, (TrainConfig, EvaluateConfig)):
        return problems
    needs_none = isinstance(config, EvaluateConfig) and (
        config.data.test_datasets
        or config.evaluation.tasks
        or config.evaluation.harness
        or config.evaluation.judge.questions
    )
    if not config.data.datasets and not needs_none:
        is_training = isinstance(config, TrainConfig)
        problems.append(
            f"no data: type data=NAME ({', '.join(groups(CONF)['data'])}), or "
            "'data.datasets=[{path: FILE, format: alpaca}]'; "
            + (
                "+experiment=quickstart is a whole run"
                if is_training
                else "evaluation=mmlu (arc, gsm8k, ...) asks a task and needs no other data"
            )
        )
    return problems
