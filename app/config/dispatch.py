"""Run a verb from its command line to its exit code, after every check that needs no torch.

Verbs that have a few settings and compose no model are parsed without Hydra: `key=value`, and the
key of a list may be repeated.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from app.config.conf_files import CONF, list_groups
from app.config.load import Config, check_paths, compose, load_config, load_run_config
from app.config.overrides import safety_error
from app.config.schema import docs_of, list_settings
from app.config.validation import print_note
from app.config.verbs import (
    PARTS,
    VERBS,
    EvaluateConfig,
    LaunchConfig,
    PlanConfig,
    PreviewConfig,
    TrainConfig,
    TunedConfig,
    may_be_key,
)
from app.evaluation.metrics import check_metrics
from app.evaluation.tasks.measure import check_harness
from app.evaluation.tasks.questions import check_tasks
from app.preflight import check_compatibility, check_files, check_gpus, requested_devices
from app.process.faults import check_workers, parse_faults
from app.process.launch import check_launch, is_child, read_launch
from app.process.logs import set_verbose
from app.process.reporting import report
from app.run import NEVER, ExistingRun, compare_existing
from app.run.find import check_selected
from app.run.folder import check_output, discard_unused
from app.run.ranks import check_nodes, check_supervise
from app.run.remote import check_store
from app.strategy.rendezvous import check_network
from common.errors import DONE, UserError, nearest
from common.facts import default_of, facts_of, hints_of
from common.installation import shadowing_files, verb_command
from common.redaction import redact
from common.text import printable

_DEFAULT_EXPERIMENT = "quickstart"
T = TypeVar("T")
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def run_verb(
    verb: str,
    function: Callable[..., object],
    *,
    sweep: Callable[[list[str]], int] | None = None,
    words: Sequence[str] | None = None,
) -> int:
    """Run a verb from its command line; return the exit code and print at most one error.

    `function` receives the verb's settings, and the existing run if they resume one.
    """
    typed = list(sys.argv[1:] if words is None else words)
    return run_guarded(verb, lambda: _dispatch(verb, function, sweep, typed))


def run_guarded(verb: str, work: Callable[[], int]) -> int:
    """Return the exit code of a verb's work; print at most one error. Every verb passes here."""
    try:
        try:
            os.getcwd()
        except FileNotFoundError as error:
            where = os.environ.get("PWD", "the current folder")
            raise FileNotFoundError(
                f"{where} no longer exists: it was moved or deleted; change to another folder (cd)"
            ) from error
        if not is_child() and (files := shadowing_files()):
            print_note(
                f"{' and '.join(files)} in this folder: not of this program, but what "
                f"`python -m app.{verb}` runs here; type {verb_command(verb)}"
            )
        return work()
    except BaseException as error:  # noqa: BLE001  last guard, also against panics of Rust libraries
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
    set_verbose("--verbose" in words)
    words = [word for word in words if word not in ("-m", "--multirun", "--verbose")]
    shows_settings, words = _pop_cfg_flag(words)
    if verb in ("train", "preview", "plan") and _is_quickstart(verb, words):
        given = "no model and no data given" if words else "no settings given"
        words = [f"+experiment={_DEFAULT_EXPERIMENT}", *words]
        print_note(f"{given}: +experiment={_DEFAULT_EXPERIMENT} (--help shows more)")
    if is_sweep:
        if sweep is None:
            raise UserError(f"-m: {verb} cannot be swept; only train can")
        if shows_settings:
            raise UserError("--cfg job prints the settings of one run: remove -m and value lists")
        return sweep(words)
    prefixes = ("sweep.", *(() if verb == "launch" else ("launcher=", "launcher.")))
    if sweep_words := [word for word in words if word.lstrip("+").startswith(prefixes)]:
        raise UserError(f"{sweep_words[0]}: sweep settings have no effect in a single run; add -m")
    if shows_settings:
        settings = dataclasses.asdict(compose(verb, words))
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        print(printable(redact(text), keep="\n"), end="")
        return DONE
    config = load_config(verb, words)
    existing = None if is_child() else check_before_start(config, words)
    if existing is None:
        function(config)
    else:
        function(config, existing)
    return DONE


def _is_quickstart(verb: str, words: Sequence[str]) -> bool:
    """Return whether words are settings that name neither a model nor data, nor a run."""
    keys = [word.lstrip("+").partition("=")[0] for word in words if "=" in word]
    names = ("experiment", "model", "data", "data.datasets", "resume")
    return len(keys) == len(words) and not any(
        key in names or key.startswith("model.") or not may_be_key(verb, key) for key in keys
    )


def version() -> str:
    """Return the installed version of loft."""
    import importlib.metadata

    try:
        return importlib.metadata.version("loft")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def check_before_start(config: Config, words: Sequence[str] | None = None) -> ExistingRun | None:
    """Run every check that needs no torch, and return the run that is resumed (None: a new run).

    UserError lists the problems of all rooms together. `words`: the command line; None for a trial
    of a sweep. A preview needs no weights, and may be of a run for another machine.
    """
    is_preview = isinstance(config, PreviewConfig)
    training = config if isinstance(config, TrainConfig) and not is_preview else None
    resumes = isinstance(config, TrainConfig) and config.resume != NEVER
    resumes = resumes or isinstance(config, LaunchConfig)
    problems = _check_required(config) + check_output(config.output, resumes=resumes)
    problems += check_paths(config)
    if isinstance(config, TunedConfig):
        problems += check_selected(config.checkpoint, config.run, config.adapter_path)
    if problems:
        raise UserError(problems)
    if isinstance(config, PlanConfig):
        return None  # a plan is checked against its hardware, and reads neither weights nor data
    existing = None
    if training is not None:
        if training.faults:
            faults, problems = parse_faults(training.faults)
            problems += check_workers(faults, training.data.num_workers)
        if training.supervise.max_restarts or training.supervise.requeue:
            problems += check_supervise(training)
        problems += check_store(training)
        existing = compare_existing(training, load_run_config) if resumes else None
        problems += [] if existing is None else existing.problems
    if existing is not None and existing.is_done and not problems:
        return existing  # a finished run needs neither its data nor its model
    is_cluster_job = training is not None and training.launcher.name != "local"
    runs_here = not is_preview and not is_cluster_job
    if not is_cluster_job:
        problems += _check_launch(config, words)
    problems += check_compatibility(config, on_this_machine=runs_here)
    if isinstance(config, (TrainConfig, EvaluateConfig)):
        evaluation = config.evaluation
        if evaluation.metrics or evaluation.metric is not None:
            problems += check_metrics(evaluation)
        if evaluation.tasks:
            problems += check_tasks(evaluation)
        if evaluation.harness:
            problems += check_harness(evaluation)
    # Last, because bad rows are many, and only the first problems are printed.
    resumes = existing is not None and bool(existing.manifest)
    problems += check_files(config, needs_weights=not is_preview, resumes=resumes)
    if problems:
        raise UserError(problems)
    if runs_here:
        check_gpus(config)
    return existing


def _check_launch(config: Config, words: Sequence[str] | None) -> list[str]:
    """List problems of how this process was launched, and of the nodes of a training run."""
    if isinstance(config, EvaluateConfig):
        return check_launch(requested_devices(config).num_ranks)
    if isinstance(config, PreviewConfig) or not isinstance(config, TrainConfig):
        return check_launch(None)
    devices = requested_devices(config)
    problems = check_launch(devices.num_ranks, devices.ranks_per_node)
    if config.trainer.nodes > 1:
        problems += check_nodes(config, words)
    if read_launch().is_one_of_several:
        problems += check_network(config.trainer.nodes)
    return problems


def _pop_cfg_flag(words: list[str]) -> tuple[bool, list[str]]:
    """Return whether `--cfg job` is among the words, and the other words."""
    if "--cfg" not in words:
        return False, words
    position = words.index("--cfg")
    argument = words[position + 1 : position + 2]
    if argument != ["job"]:
        raise UserError(f"--cfg {''.join(argument)}: expected --cfg job, which prints the settings")
    return True, words[:position] + words[position + 2 :]


def _check_required(config: Config) -> list[str]:
    """List what has no default and was not given: a model, data."""
    problems = []
    missing = ""
    run = config.run if isinstance(config, TunedConfig) else None
    if isinstance(config, PreviewConfig):
        if config.resume != NEVER:
            problems.append(f"resume={config.resume}: a preview trains nothing; leave it out")
        if config.model.path is None and config.model.tokenizer_path is None:
            missing = "no tokenizer: type model.path=FOLDER_OR_HUB_ID (its weights are not needed)"
    elif config.model.path is None and not config.model.from_scratch and run is None:
        missing = "no model: type model.path=FOLDER_OR_HUB_ID"
    if missing:
        problems.append(
            f"{missing}, or model=NAME (--help model lists {len(list_groups(CONF)['model'])}); "
            "+experiment=quickstart is a complete example"
        )
    if isinstance(config, PlanConfig) or not isinstance(config, (TrainConfig, EvaluateConfig)):
        return problems
    is_evaluated_otherwise = isinstance(config, EvaluateConfig) and (
        config.data.val_datasets
        or config.data.test_datasets
        or config.evaluation.tasks
        or config.evaluation.harness
        or config.evaluation.judge.questions
    )
    if not config.data.datasets and not is_evaluated_otherwise:
        is_training = isinstance(config, TrainConfig)
        problems.append(
            f"no data: type data=NAME ({', '.join(list_groups(CONF)['data'])}), or "
            "'data.datasets=[{path: FILE, format: alpaca}]'; "
            + (
                "+experiment=quickstart is a complete example"
                if is_training
                else "evaluation=mmlu (arc, gsm8k, ...) runs a task and needs no other data"
            )
        )
    return problems


def run_plain_verb(
    verb: str, schema: type[T], function: Callable[[T], object], words: Sequence[str] | None = None
) -> int:
    """Run a verb from its command line; return the exit code and print at most one error."""
    typed = list(sys.argv[1:] if words is None else words)

    def work() -> int:
        if {"--help", "-h"} & set(typed):
            print(_help_of(verb, schema))
        else:
            function(read_plain(schema, typed))
        return DONE

    return run_guarded(verb, work)


def read_plain(schema: type[T], words: Sequence[str]) -> T:
    """Convert typed words to the fields of `schema`: str, bool, int, or a list of str.

    UserError lists every problem.
    """
    untyped: Any = schema  # type[T] is not hashable to mypy
    fields = {facts_of(field).typed or field.name: field for field in dataclasses.fields(untyped)}
    hints, values, problems = hints_of(untyped), dict[str, Any](), []
    for word in words:
        key, equals, value = word.partition("=")
        field = fields.get(key)
        if not equals or field is None:
            hint = nearest(key, fields) or f"; expected {', '.join(f'{name}=' for name in fields)}"
            problems.append(f"{word}: unknown setting{hint}")
        elif (refusal := safety_error(key, value)) is not None:
            problems.append(refusal)
        elif not value.strip():
            problems.append(f"{key} is empty; is it a variable that is not set?")
        elif (is_truth := hints[field.name] in (bool, bool | None)) and value.lower() not in _TRUTH:
            problems.append(f"{key}={value}: expected true or false")
        elif is_truth:
            values[field.name] = _TRUTH[value.lower()]
        elif hints[field.name] is int and not value.isdecimal():
            problems.append(f"{key}={value}: expected a whole number")
        elif hints[field.name] is int:
            values[field.name] = int(value)
        elif hints[field.name] == list[str]:
            values[field.name] = [*values.get(field.name, []), value]
        elif field.name in values:
            problems.append(f"{key} is given twice: {values[field.name]} and {value}")
        else:
            values[field.name] = value
    missing = [
        key
        for key, field in fields.items()
        if default_of(field) is dataclasses.MISSING and field.name not in values
    ]
    if not problems:
        docs = docs_of(untyped)
        problems = [f"{key}=... is missing: {docs[fields[key].name]}" for key in missing]
    if problems:
        raise UserError(problems)
    return schema(**values)


def _help_of(verb: str, schema: type) -> str:
    """Return the help page of a verb."""
    from app.config.help import describe, page_width, two_columns

    about = inspect.cleandoc(str(schema.__doc__))
    rows = {each.typed_key: describe(each) for each in list_settings(schema)}
    usage = f"usage: {verb_command(verb)} SETTING=VALUE ..."
    return "\n".join([usage, "", about, "", *two_columns(rows, page_width())])
