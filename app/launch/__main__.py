"""Launch: start a run on SLURM, Kubernetes, SkyPilot or Ray.

`python -m app.launch launcher=slurm hardware=2x8xh100 +experiment=llama70b`. The run is planned and
checked, its job file is written into a folder and submitted by the scheduler's own program. The
same command resumes the run after a preemption.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.config import LaunchConfig, load_run_config, run_verb
from app.config.load import paths_in
from app.config.overrides import EXPERIMENT, FILE_ALONE, YAML_SUFFIXES
from app.config.verbs import LauncherConfig, LaunchSettings, TrainConfig
from app.launch.schedulers import (
    NOT_UPLOADED,
    SCHEDULERS,
    SHARED,
    Scheduler,
    Submission,
    missing_program,
    submit,
    watch,
)
from app.plan import make_plan
from app.preflight import check_compatibility, check_files
from app.process.environment import configure_libraries, run_program
from app.process.launch import quote_words
from app.run import AUTO, compare_existing
from app.run.folder import CONFIG_FILE, OUTPUTS, into_folder
from app.run.job import Job, check_names, job_name
from app.run.remote import is_store_url, url_of
from common.errors import UserError
from common.facts import leaves_of
from common.files import write_atomically
from common.installation import ROOT, is_checkout, python_command, verb_command
from common.redaction import redacted
from common.text import duration, printable
from common.untrusted import read_json_object

_SAMPLES = ROOT / "data_modules" / "samples"
"""data that comes with this program"""
_NOT_OF_RUN = ("launch.", "launcher", "hardware", "plan.tokens=", "plan.write=")
_DECIDED = ("trainer.num_nodes=", "trainer.devices=", "output.dir=", "output_dir=")
"""overrides that the job file states itself"""
_LAUNCHED = "launched"
"""folder of a launched run under outputs/NAME: the same each time, so that the run resumes"""
JOB_FILE = "job.json"
_EVALUATION_FILES = re.compile(
    r"evaluation\.(task_dir|harness_dir|metric|tasks\[\d+\]\.(few_shot_)?path)"
)
"""settings of files that `paths_in` does not list: they stay as typed"""
_OF_SLURM = ("partition", "account", "minutes", "gpus")
"""settings of the launcher that only SLURM's jobs have"""


def launch(config: LaunchConfig, words: Sequence[str]) -> None:
    """Write the job of a run, submit it, and watch it, as `launch` says; print how to go on.

    `words`: the overrides of the command line.
    """
    name = config.output.name or "train"
    scheduler = SCHEDULERS.get(config.launcher.name)
    if scheduler is None:
        raise UserError(
            f"launcher=local: `{verb_command('train')}` starts a run on this machine; type "
            f"launcher={' or '.join(SCHEDULERS)}"
        )
    here = Path(config.output.dir or OUTPUTS / name / _LAUNCHED).expanduser()
    folder = str(here.absolute())
    url = url_of(here)
    if not scheduler.shares_folder or url is not None:
        here = OUTPUTS / name / _LAUNCHED
        folder = url or config.output.dir or f"{SHARED}/runs/{name}"
    problems = list(_check_launch(config, scheduler, words, folder))
    if problems:
        raise UserError(problems)
    job = _build_job(config, words, folder, here.absolute(), job_name(name))
    if scheduler.shares_folder:
        _check_here(config, folder)
        if config.launch.image is not None:  # whose container mounts it
            _make_cache(config.data.cache_dir)
    with into_folder(here):
        here.mkdir(parents=True, exist_ok=True)
    submission = Submission(scheduler=scheduler, job=job, file=here / scheduler.file)
    write_atomically(submission.file, text := scheduler.write(job))
    print(printable(f"\n{text}", keep="\n"))
    if config.launch.submit:
        earlier, _ = read_json_object(here / JOB_FILE)
        is_same = earlier.get("launcher") == config.launcher.name
        submission = replace(submission, id=submit(submission, earlier["id"] if is_same else None))
        record = {"launcher": config.launcher.name, "id": submission.id, "folder": folder}
        write_atomically(here / JOB_FILE, json.dumps(record) + "\n")
        print(f"submitted: {submission.id}")
    for line in _next_steps(submission, words):
        print(line)
    print(f"run: {printable(folder)}", flush=True)
    if config.launch.submit and config.launch.watch:
        code, said = watch(submission, here / "job.log")
        print(f"job {submission.id}: {printable(said)}")
        sys.exit(code)


def _check_launch(
    config: LaunchConfig, scheduler: Scheduler, words: Sequence[str], folder: str
) -> Iterator[str]:
    launcher, name = config.launcher, config.launcher.name
    yield from check_names(launcher)
    defaults = LauncherConfig()
    for key in _OF_SLURM if name != "slurm" else ("gpus",):
        if getattr(launcher, key) != getattr(defaults, key):
            fix = "hardware=8xh100" if key == "gpus" else "launcher=slurm, or leave it out"
            yield f"launcher.{key}={getattr(launcher, key)} has no effect here; type {fix}"
    for key, takers in (("kind", ("kubernetes",)), ("min_nodes", ("slurm", "ray"))):
        value = getattr(config.launch, key)
        if name not in takers and value != getattr(LaunchSettings(), key):
            typed = " or ".join(f"launcher={taker}" for taker in takers)
            yield f"launch.{key}={value} has no effect here; type {typed}, or leave it out"
    if name == "kubernetes" and config.launch.image is None:
        yield "launcher=kubernetes: pods need an image with this program: type launch.image=NAME"
    if name == "sky" and config.launch.image is None and not is_checkout():
        yield "launcher=sky: start it in the checkout, which is uploaded, or type launch.image=NAME"
    if config.launch.submit and (program := missing_program(scheduler)) is not None:
        yield (
            f"launcher={name}: the program {program} was not found: {scheduler.install}; "
            "launch.submit=false writes the job file without it"
        )
    if "\n" in f"{folder}{Path.cwd()}":
        yield f"output.dir={folder!r}: the name has a line break, which job files cannot hold"
    if redacted(list(words)) != list(words):
        yield (
            "the overrides contain a secret, which would be written to the job file: leave it out, "
            "and put it into the environment of the cluster's jobs"
        )
    if scheduler.shares_folder:
        return
    if not folder.startswith("/") and not is_store_url(folder):
        yield (
            f"output.dir={folder}: with launcher={name} it is a folder of the machines that train: "
            f"type one on their shared volume, as output.dir={SHARED}/runs/mine"
        )
    typed = _typed_text(words)
    for key, path in _local_paths(config, words):
        if not reaches(path, scheduler):
            yield (
                f"{key}={path}: exists only on this machine, not where launcher={name} trains: "
                f"{_upload_hint(key, path, folder)}"
            )
        elif _is_typed_absolute(path, typed):
            yield (
                f"{key}={path}: the current folder is uploaded to another path on the cluster; "
                f"type {os.path.relpath(Path(path).expanduser().resolve())} instead"
            )


def _experiment_files(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield key and path of each experiment that is a file."""
    for word in words:
        key, _, value = FILE_ALONE.sub(EXPERIMENT, word).partition("=")
        if key.lstrip("+") == "experiment" and value.endswith(YAML_SUFFIXES):
            yield key, value


def _local_paths(config: TrainConfig, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield key and path of each file, folder or glob that the run reads on this machine."""
    yield from _experiment_files(words)
    named = [(key, getattr(part, name)) for key, part, name in paths_in(config)]
    evaluation = leaves_of(config.evaluation, "evaluation")
    named += [(key, value) for key, _, _, value in evaluation if _EVALUATION_FILES.fullmatch(key)]
    for key, path in named:
        file = str(path or "").rpartition(":")[0] if key == "evaluation.metric" else str(path or "")
        place = os.path.expanduser(file)
        if file and (os.path.exists(place) or any(glob.iglob(place, recursive=True))):
            yield key, file


def _typed_text(words: Sequence[str]) -> str:
    """Return the overrides, and the text of the experiments that they name."""
    files = [Path(path).expanduser() for _, path in _experiment_files(words)]
    return "\n".join(
        [*words, *(file.read_text(errors="replace") for file in files if file.is_file())]
    )


def _is_typed_absolute(path: str, typed: str) -> bool:
    """Return whether a path of the current folder is typed as an absolute path, or from ~."""
    path = os.path.expanduser(path)
    if Path(path).resolve().is_relative_to(_SAMPLES):
        return False
    home = Path.home()
    from_home = f"~/{Path(path).relative_to(home)}" if Path(path).is_relative_to(home) else path
    names = "|".join(map(re.escape, (path, from_home)))
    return Path(path).is_absolute() and re.search(rf"({names})(?![\w./-])", typed) is not None


def _outside(config: TrainConfig, words: Sequence[str]) -> list[str]:
    """Return the files and folders outside of the current folder that the run reads or caches."""
    here, found = Path.cwd().resolve(), set()
    read = [Path(path).expanduser().absolute() for _, path in _local_paths(config, words)]
    # Of the pattern of a glob, the folder.
    existing = [next(each for each in (one, *one.parents) if each.exists()) for one in read]
    for place in (*existing, Path(config.data.cache_dir).expanduser().absolute()):
        for one in (place, place.resolve()):
            if not one.is_relative_to(here) and not one.is_relative_to(_SAMPLES):
                found.add(str(one))
    return sorted(found - {here.root})


def _upload_hint(key: str, path: str, folder: str) -> str:
    if not key.startswith("data."):
        return f"copy it to the volume ({SHARED}/..., output.dir too), or type a name of the hub"
    if not is_store_url(folder):
        return (
            f"copy it to the volume ({SHARED}/...), or type a URL (https://, s3://, gs://), a name "
            "of the hub, or output.dir=s3://BUCKET/PATH, after which this says how to upload it"
        )
    there, scheme = f"{folder}-data/", folder.partition(":")[0]
    source, target = json.dumps(path), json.dumps(there)
    code = f'import fsspec; fsspec.filesystem("{scheme}").put({source}, {target}, recursive=True)'
    return (
        f"type {python_command()} -c {shlex.quote(code)} to upload it, and "
        f"{there}{Path(path).name} in its place"
    )


def reaches(path: str, scheduler: Scheduler) -> bool:
    """Return whether the machines of a scheduler see a path of this machine."""
    resolved, here = Path(path).expanduser().resolve(), Path.cwd().resolve()
    if resolved.is_relative_to(_SAMPLES):
        return True
    if not scheduler.uploads or not resolved.is_relative_to(here):
        return False
    return not set(NOT_UPLOADED) & set(resolved.relative_to(here).parts)


def _check_here(config: LaunchConfig, folder: str) -> None:
    """Check the files of a run and the run in its folder, which the machines of the cluster see."""
    problems = check_files(config, needs_weights=True)
    if (Path(folder) / CONFIG_FILE).exists():
        resumed = replace(config, resume=AUTO, output=replace(config.output, dir=folder))
        existing = compare_existing(resumed, load_run_config)
        problems += [] if existing is None else existing.problems
    if problems:
        raise UserError(problems)


def _make_cache(folder: str) -> None:
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"data.cache_dir={folder}: {error.strerror}; the job's container mounts this folder: "
            "type data.cache_dir=FOLDER on a shared disk, where you may write"
        ) from error


def _build_job(
    config: LaunchConfig, words: Sequence[str], folder: str, here: Path, name: str
) -> Job:
    """Return the job of a run that was planned for its hardware; UserError if it does not fit.

    `here`: folder of the job's files on this machine.
    """
    trainer, card = config.trainer, None
    planned = replace(config, launcher=LauncherConfig())
    if trainer.accelerator == "cpu":  # plans are for GPUs
        if problems := check_compatibility(planned, on_this_machine=False):
            raise UserError(problems)
        devices = trainer.devices if isinstance(trainer.devices, int) else 1
        nodes = trainer.nodes
    else:
        facts, _, hardware = make_plan(planned)
        _check_fits(config, facts)
        card, nodes, devices = hardware.name, hardware.num_nodes, hardware.gpus_per_node
        for line in _plan_lines(facts, config.launcher):
            print(line)
    if (fewest := config.launch.min_nodes) is not None:
        if fewest > nodes:
            raise UserError(f"launch.min_nodes={fewest}: the job has {nodes}; type at most as many")
        changing = replace(planned, trainer=replace(trainer, num_nodes="auto"))
        if problems := check_compatibility(changing, on_this_machine=False):
            raise UserError([f"launch.min_nodes={fewest}: {problem}" for problem in problems])
    left_out = (*_NOT_OF_RUN, *_DECIDED, "-")
    typed = [word for word in words if not word.lstrip("+").startswith(left_out)]
    if not any(word.lstrip("+").startswith("resume=") for word in typed):
        typed.append("resume=auto")
    return Job(
        name=name,
        folder=folder,
        log=str(here / "slurm-%j.txt"),
        words=typed,
        nodes=nodes,
        ranks_per_node=devices,
        card=card,
        launcher=config.launcher,
        image=config.launch.image,
        mounts=_outside(config, words),
        volume=config.launch.volume,
        kind=config.launch.kind,
        min_nodes=fewest,
    )


def _check_fits(config: LaunchConfig, facts: dict[str, Any]) -> None:
    """Raise UserError, with what would fit, if the plan says that the run does not."""
    if config.plan.enforce != "error" or (facts["fits"] and facts["fits_host"]):
        return
    where = "a GPU" if not facts["fits"] else "a machine's memory"
    change = f"; try {facts['to_fit'][0]}" if facts["to_fit"] else ""
    raise UserError(
        f"the run does not fit {where} of {facts['hardware']}: it needs "
        f"{facts['gpu_total_gib']:.1f} of {facts['gpu_usable_gib']:.1f} GiB a GPU{change}; "
        f"{verb_command('plan')} shows more, plan.enforce=off starts it anyway"
    )


def _plan_lines(facts: dict[str, Any], launcher: LauncherConfig) -> Iterator[str]:
    yield (
        f"{facts['hardware']}: {facts['gpu_total_gib']:.1f} of {facts['gpu_usable_gib']:.1f} GiB a "
        f"GPU, {facts['tokens_per_second']:,.0f} tokens/s (estimates)"
    )
    if (hours := facts["hours"]) is not None:
        cost = "" if facts["cost"] is None else f", price {facts['cost']:,.2f}"
        jobs = -(-hours * 60 // launcher.minutes)
        is_requeued = launcher.name == "slurm" and jobs > 1
        limit = f"; {jobs:.0f} times {launcher.minutes} minutes" if is_requeued else ""
        yield f"{duration(3600 * hours)}{cost}{limit}"


def _next_steps(submission: Submission, words: Sequence[str]) -> Iterator[str]:
    scheduler = submission.scheduler
    if submission.id is None:
        yield f"  {submission.show(scheduler.submit)}   # submits it"
        return
    yield f"  {submission.show(scheduler.log)}   # its log"
    yield f"  {submission.show(scheduler.state)}   # whether it runs"
    if scheduler.shares_folder or is_store_url(submission.job.folder):
        word = quote_words(f"run={submission.job.folder}")
        yield f"  {verb_command('status')} {word}   # its progress"
    yield f"  {submission.show(scheduler.stop)}   # stops it"
    yield "  the same command again   # resumes it from its newest checkpoint"


if __name__ == "__main__":
    configure_libraries(offline=False)
    run_program(lambda: run_verb("launch", lambda config: launch(config, sys.argv[1:])))
