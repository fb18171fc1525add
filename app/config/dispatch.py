"""Run a verb from its command line to its exit code, after every check that needs no torch.

Verbs that have a few settings and compose no model are parsed without Hydra: `key=value`, and the
key of a list may be repeated. The pages of `--help` are generated from conf/ and the settings'
fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from app.config import verbs
from app.config.conf_files import CONF, list_groups, read_conf_file
from app.config.load import Config, check_paths, compose, load_config, load_run_config
from app.config.overrides import safety_error
from app.config.schema import Setting, docs_of, list_settings
from app.config.validation import print_note
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
from app.run.folder import check_output, discard_unused, verb_line
from app.run.ranks import check_nodes, check_supervise
from app.run.remote import check_store
from app.strategy.rendezvous import check_network
from common.errors import DONE, UserError, nearest
from common.facts import default_of, describe_values, facts_of, hints_of
from common.installation import is_checkout, shadowing_files, verb_command
from common.redaction import redact
from common.text import printable

_DEFAULT_EXPERIMENT = "quickstart"
_T = TypeVar("_T")
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
        topic = next((word for word in words if word[0] != "-" and "=" not in word), None)
        print(_help_page(verb) if topic is None else _topic_page(topic, verbs.all_settings(verb)))
        return DONE
    if "--version" in words:
        print(f"loft {version()}")
        return DONE
    is_sweep = bool({"-m", "--multirun"} & set(words))
    set_verbose("--verbose" in words)
    words = [word for word in words if word not in ("-m", "--multirun", "--verbose")]
    if shows_settings := "--cfg" in words:
        position = words.index("--cfg")
        if (argument := words[position + 1 : position + 2]) != ["job"]:
            typed = f"--cfg {''.join(argument)}"
            raise UserError(f"{typed}: expected --cfg job, which prints the settings")
        del words[position : position + 2]
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
        text = verb_line(verb) + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
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
        key in names or key.startswith("model.") or not verbs.may_be_key(verb, key) for key in keys
    )


def version() -> str:
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
    is_preview = isinstance(config, verbs.PreviewConfig)
    training = config if isinstance(config, verbs.TrainConfig) and not is_preview else None
    resumes = isinstance(config, verbs.TrainConfig) and config.resume != NEVER
    resumes = resumes or isinstance(config, verbs.LaunchConfig)
    problems = _check_required(config) + check_output(config.output, resumes=resumes)
    problems += check_paths(config)
    if isinstance(config, verbs.TunedConfig):
        problems += check_selected(config.checkpoint, config.run, config.adapter_path)
    if problems:
        raise UserError(problems)
    if isinstance(config, verbs.PlanConfig):
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
    if isinstance(config, (verbs.TrainConfig, verbs.EvaluateConfig)):
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
    if isinstance(config, verbs.EvaluateConfig):
        return check_launch(requested_devices(config).num_ranks)
    if isinstance(config, verbs.PreviewConfig) or not isinstance(config, verbs.TrainConfig):
        return check_launch(None)
    devices = requested_devices(config)
    problems = check_launch(devices.num_ranks, devices.ranks_per_node)
    if config.trainer.nodes > 1:
        problems += check_nodes(config, words)
    if read_launch().is_one_of_several:
        problems += check_network(config.trainer.nodes)
    return problems


def _check_required(config: Config) -> list[str]:
    """List what has no default and was not given: a model, data."""
    problems = []
    missing = ""
    run = config.run if isinstance(config, verbs.TunedConfig) else None
    if isinstance(config, verbs.PreviewConfig):
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
    of_data = (verbs.TrainConfig, verbs.EvaluateConfig)
    if isinstance(config, verbs.PlanConfig) or not isinstance(config, of_data):
        return problems
    is_evaluated_otherwise = isinstance(config, verbs.EvaluateConfig) and (
        config.data.val_datasets
        or config.data.test_datasets
        or config.evaluation.tasks
        or config.evaluation.harness
        or config.evaluation.judge.questions
    )
    if not config.data.datasets and not is_evaluated_otherwise:
        is_training = isinstance(config, verbs.TrainConfig)
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
    verb: str,
    schema: type[_T],
    function: Callable[[_T], object],
    words: Sequence[str] | None = None,
) -> int:
    """Run a verb from its command line; return the exit code and print at most one error."""
    typed = list(sys.argv[1:] if words is None else words)

    def work() -> int:
        if {"--help", "-h"} & set(typed):
            rows = {each.typed_key: describe(each) for each in list_settings(schema)}
            usage = f"usage: {verb_command(verb)} SETTING=VALUE ..."
            about = inspect.cleandoc(str(schema.__doc__))
            print("\n".join([usage, "", about, "", *two_columns(rows, page_width())]))
        else:
            function(read_plain(schema, typed))
        return DONE

    return run_guarded(verb, work)


def read_plain(schema: type[_T], words: Sequence[str]) -> _T:
    """Convert typed words to the fields of `schema`: str, bool, int, or a list of str.

    UserError lists every problem.
    """
    untyped: Any = schema  # type[_T] is not hashable to mypy
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


_USAGE = {
    "train": (
        ("python -m app.train", "the same as +experiment=quickstart"),
        ("python -m app.train +experiment=NAME [GROUP=OPTION] [KEY=VALUE] ...", ""),
        ("python -m app.train model.path=DIR 'data.datasets=[{path: FILE}]' ...", ""),
        ("python -m app.train resume=FOLDER", "resume a run with its own settings"),
        ("python -m app.train -m KEY=A,B ...", "sweep: one process per combination, one table"),
        ("python -m app.train ... --cfg job", "print the composed settings"),
    ),
    "preview": (
        ("python -m app.preview", "the same as +experiment=quickstart"),
        ("python -m app.preview +experiment=NAME [GROUP=OPTION] [KEY=VALUE] ...", ""),
        ("python -m app.preview model.path=TOKENIZER_DIR 'data.datasets=[{path: FILE}]'", ""),
    ),
    "launch": (
        ("python -m app.launch launcher=slurm hardware=2x8xh100 +experiment=NAME", "two nodes"),
        ("python -m app.launch launcher=kubernetes launch.image=NAME hardware=8xh100 ...", ""),
        ("python -m app.launch ... launch.submit=false", "only write the job file, and print it"),
    ),
    "plan": (
        ("python -m app.plan +experiment=llama70b hardware=8xa100_80gb", ""),
        ("python -m app.plan +experiment=NAME hardware=2x8xh100 plan.tokens=50000000", "two nodes"),
        ("python -m app.plan model=NAME hardware=rtx4090 plan.write=FILE.yaml", ""),
    ),
    "evaluate": (
        ("python -m app.evaluate", "the newest finished run under outputs/"),
        ("python -m app.evaluate run=FOLDER", ""),
        ("python -m app.evaluate model.path=DIR adapter_path=DIR data=NAME", ""),
        ("python -m app.evaluate run=FOLDER evaluation=mmlu evaluation.task_dir=DIR", ""),
    ),
    "merge": (
        ("python -m app.merge", "the newest finished run under outputs/"),
        ("python -m app.merge run=FOLDER merge.dtype=bf16", ""),
        ("python -m app.merge model.path=DIR adapter_path=DIR output.dir=DIR", ""),
    ),
    "chat": (
        ("python -m app.chat", "the newest finished run under outputs/"),
        ("python -m app.chat run=FOLDER", ""),
        ("python -m app.chat model.path=DIR [adapter_path=DIR]", ""),
    ),
    "serve": (
        ("python -m app.serve", "the newest finished run under outputs/"),
        ("python -m app.serve run=FOLDER serve.port=0", ""),
        ("python -m app.serve model.path=DIR [adapter_path=DIR]", ""),
        ("LOFT_SERVE_KEY=... python -m app.serve serve.host=0.0.0.0", "for other machines"),
        ("python -m app.serve run=FOLDER serve.engine=vllm", "print the line that starts vLLM"),
    ),
}
_MAX_OPTIONS = 40
"""most options of a group that the first page lists"""
_RESULTS = "conf/experiment/README.md"
_ENDING = """\
A value with spaces or commas goes into quotes: model.path="'my models/tiny'".
Files: {files}.
Exit codes: 0 done, 2 invalid input, 3 environment (disk, memory, package), 4 training failed,
130/143 stopped by a signal. LOFT_TRACEBACK=1 prints tracebacks, --verbose more details."""


def _help_page(verb: str) -> str:
    """Return the first page of a verb's help."""
    settings, options, width = verbs.all_settings(verb), list_groups(CONF), page_width()
    defaults = dict(read_conf_file(CONF / f"{verb}.yaml", package="").choices)
    lines = [f"loft {verb}: {verbs.ALL_VERBS[verb].what}", "", "usage"]
    for command, meaning in _USAGE[verb]:
        typed = command.replace(f"python -m app.{verb}", verb_command(verb))
        lines.append(f"  {typed:<44}  {meaning}".rstrip())
    if verb in ("train", "preview", "plan", "launch"):
        lines += ["", "complete runs: +experiment=NAME"]
        runs = {name: _what(CONF / "experiment" / f"{name}.yaml") for name in options["experiment"]}
        lines += two_columns(runs, width)
    if verb == "train":
        sweeps = {name: _what(CONF / "sweep" / f"{name}.yaml") for name in options["sweep"]}
        lines += ["", "sweeps: -m +experiment=NAME +sweep=NAME", *two_columns(sweeps, width)]
    lines += ["", "groups: GROUP=OPTION (* is the default)"]
    lines += two_columns(
        {
            group: _names(names, defaults[group])
            if len(names) <= _MAX_OPTIONS
            else f"{len(names)} options, listed by --help {group}"
            for group, names in options.items()
            if group in defaults and len(names) > 1
        },
        width,
    )
    lines += ["", "most used settings: KEY=VALUE (default)"]
    shown = [setting for setting in settings if _is_shown(setting, verb)]
    lines += two_columns({setting.typed_key: describe(setting) for setting in shown}, width)
    element = "data.datasets[]."
    of_datasets = {
        setting.key.removeprefix(element): describe(setting)
        for setting in settings
        if setting.key.startswith(element)
    }
    if of_datasets:
        heading = (
            "each data set: 'data.datasets=[{KEY: VALUE, ...}, ...]', also data.val_datasets, "
            "data.test_datasets"
        )
        lines += ["", heading, *two_columns(of_datasets, width)]
    groups = ", ".join(each.key for each in settings if each.is_part and "." not in each.key)
    lines += ["", *textwrap.wrap(f"all settings: --help all, or --help and one of {groups}", width)]
    files = f"settings in {CONF}"
    if is_checkout():
        files = f"settings in {CONF.name}/, measured results of the experiments in {_RESULTS}"
    return "\n".join([*lines, "", *_ENDING.format(files=files).splitlines()])


def _names(options: Sequence[str], default: str | None) -> str:
    return ", ".join(f"{name}*" if name == default else name for name in options)


def _topic_page(topic: str, settings: Sequence[Setting]) -> str:
    """Return every setting of `topic`: `all`, a group, or a setting's full key."""
    found = [
        setting
        for setting in settings
        if topic in ("all", setting.key, setting.typed_key)
        or setting.key.startswith((f"{topic}.", f"{topic}["))
    ]
    if not found:
        if hint := verbs.only_in(topic):
            raise UserError(f"--help {topic}: not a setting of this verb{hint}")
        known = [setting.typed_key for setting in settings]
        raise UserError(
            f"--help {topic}: no such setting; type --help, --help all, --help GROUP or --help KEY"
            f"{nearest(topic, known)}"
        )
    lines: list[str] = []
    if topic in (options := list_groups(CONF)):
        lines += ["", *two_columns({f"{topic}=": _names(options[topic], None)}, page_width())]
    for title, members in sections(found):
        rows = {setting.typed_key: describe(setting) for setting in members}
        if len(title) > page_width():
            title = "\n".join(textwrap.wrap(title.replace("|", " | "), page_width()))
        lines += ["", title, *two_columns(rows, page_width())]
    return "\n".join(lines[1:])


def sections(settings: Sequence[Setting]) -> list[tuple[str, list[Setting]]]:
    """Group settings under titles: their group, or the options of the group that have them."""
    found: dict[str, list[Setting]] = {}
    docs = {setting.key: setting.doc for setting in settings if setting.is_part}
    for setting in settings:
        if setting.is_part:
            continue
        group = setting.key.partition(".")[0] if "." in setting.key else ""
        title = f"{group}: {docs[group]}" if group in docs else group or "the run"
        if setting.options:
            title = f"{group}={'|'.join(setting.options)}"
        found.setdefault(title, []).append(setting)
    return list(found.items())


def _is_shown(setting: Setting, verb: str) -> bool:
    """Return whether the first page of help lists a setting; never one of list elements."""
    shown = setting.facts.shown
    return "[]" not in setting.key and (verb in shown if isinstance(shown, tuple) else shown)


def describe(setting: Setting) -> str:
    """Return `(default; values) docstring` of a setting, without choices that those two name."""
    facts, default = setting.facts, default_text(setting)
    named = f"{default} {setting.doc}"
    if all(re.search(rf"\b{re.escape(str(word))}\b", named) for word in facts.choices):
        facts = dataclasses.replace(facts, choices=())
    values = describe_values(facts, None)
    return f"({'; '.join(filter(None, [default, values]))}) {setting.doc}"


def default_text(setting: Setting) -> str:
    """Return a setting's default as a user types it, or `required`."""
    default = default_of(setting.field)
    if default is dataclasses.MISSING:
        return "required"
    words = {"None": "null", "True": "true", "False": "false", "[]": "none", "{}": "none"}
    shown = ", ".join(map(str, default)) if default and isinstance(default, list) else default
    return words.get(str(shown), str(shown))


def page_width() -> int:
    """Return the characters of a line of help: those of the terminal, at most 120."""
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _what(path: Path) -> str:
    """Return what a file's header says after `# What:`, with its indented further lines."""
    found = re.search(r"^# What:(.*(?:\n#  .*)*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return " ".join(found[1].replace("#", " ").split()) if found else ""


def two_columns(rows: dict[str, str], width: int) -> list[str]:
    """Lay out names and their texts, wrapped, as lines of `width` characters."""
    left = min(max(map(len, rows)) + 4, width // 3)
    lines = []
    for name, text in rows.items():
        indent = max(len(name) + 4, left)  # a long name shortens the first line of its text
        wrap = partial(textwrap.wrap, break_on_hyphens=False)
        first, *others = wrap(text, width, initial_indent=" " * indent) or [""]
        lines.append(f"  {name:<{indent - 2}}{first.lstrip()}".rstrip())
        lines += [" " * left + line for line in wrap(" ".join(others), max(width - left, 30))]
    return lines
