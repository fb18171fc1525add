"""A run's manifest, its run id, and the changes since its start that permit resuming or not.

A run's folder may be moved or copied as a whole. A checkpoint that was copied into it from another
run is refused, even where it would fit.

Settings are compared key by key before torch is imported, each by the resume rule of its field.
What the settings do not determine (rows, tokens, base weights) is compared by fingerprints in the
manifest. The order of the data depends on the packs per optimizer step, so these must match.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.hub import COMMIT
from app.process.gpus import read_machine
from app.strategy.settings import DdpConfig, LocalSgdConfig, StrategyConfig, ZeroConfig
from app.training.checkpoint.checkpoint import Checkpoint
from app.training.run_documents import MANIFEST, find_problem
from common.errors import UserError
from common.facts import ResumeRule, as_typed, facts_of
from common.files import write_atomically
from common.installation import typed_words
from common.redaction import redacted
from common.text import counted, shortened

if TYPE_CHECKING:
    from app.config import TrainConfig
    from app.training.trainer import TrainerConfig

_LIBRARIES = (
    "torch",
    "lightning",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "hydra-core",
    "safetensors",
)
MANIFEST_FILE = "manifest.json"
STARTED_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
STARTED = time.strftime(STARTED_FORMAT)
"""start time of the command: the verb imports this module first"""
_ALLOWED_BY = "checkpoint"
"""the word in resume_allow that permits resuming from another run's checkpoint"""
ALLOWED = {
    "lr": "the learning rate",
    "schedule": "the learning-rate schedule",
    "epochs": "the length of the run, and with it the learning-rate schedule",
    "data": "the training data; the run continues at the same step of the new plan",
    "precision": "the numerical precision",
    "checkpoint": "the named checkpoint may belong to another run",
}
"""values of resume_allow, with what each permits to change"""

_LISTS_OF_DATASETS = ("data.datasets", "data.val_datasets")
SHA256 = re.compile(r"[0-9a-f]{64}")
_FINGERPRINTS: dict[str, tuple[str, ResumeRule, str]] = {
    "tokenizer_sha256": ("the tokenizer (sha256)", "fixed", "restore the tokenizer"),
    "template_sha256": ("the chat template (sha256)", "data", "restore the template"),
    "tokens_sha256": (
        "what is learned from the same rows (sha256 of the tokens)",
        "data",
        "use the version of this program that started the run",
    ),
}
"""key in the manifest -> its name in messages, the resume rule, and how to undo a change"""
_STREAMED = ("trainer.micro_batch_size", "data.num_workers")
"""settings that, with the number of ranks, determine the order of streamed data"""


def save_manifest(folder: Path, **facts: Any) -> None:
    """Write manifest.json: `facts`, and the command, versions, machine and git state."""
    machine = read_machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = ", ".join(f"{gpu.name} ({gpu.memory_gib:.1f} GiB)" for gpu in machine.gpus)
    manifest = {
        "command": [sys.executable, *typed_words()],
        "started": STARTED,
        "versions": installed_versions(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "hardware": {
            "gpus": gpus or None,
            "driver": machine.driver,
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory / 2**30, 1),
            "system": platform.platform(),
        },
        "git": git_state(),
    } | facts
    write_atomically(folder / MANIFEST_FILE, json.dumps(redacted(manifest), indent=2) + "\n")


def read_run_manifest(folder: Path) -> dict[str, Any]:
    """Read a run's manifest; UserError, with the key, if it is damaged or of another shape."""
    file = folder / MANIFEST_FILE
    content, problem = find_problem(file, MANIFEST)
    if problem is not None:
        raise UserError(
            f"{problem}; {file} cannot be read, which records what the run was made from; restore "
            "it, or leave resume out and type another output.dir"
        )
    manifest: dict[str, Any] = content
    return manifest


def record_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Add to a run's manifest whose weights are its result, and at which step it ended."""
    manifest = read_run_manifest(folder) | {"result": dict(result)}
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=2) + "\n")


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Return the versions of the libraries that results depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in _LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return None
    return {"commit": commit, "changed": bool(changed)}


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return result.stdout.strip()


def identity_of(before: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's id, and a hash of its step plan.

    `before`: the manifest of the run that is resumed, empty for a new run.
    """
    plan = [
        facts["seed"],
        [facts["base"][name] for name in ("fingerprint", "weights")],
        [[dataset["sha256"], dataset["rows"]] for dataset in facts["data"]],
        facts.get("tokens_sha256"),
        facts["global_batch"]["packs"],
        facts["total_steps"],
    ]
    return {
        "id": before["run"]["id"] if before else secrets.token_hex(16),
        "plan": hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:32],
    }


def check_run_id(
    checkpoint: Checkpoint,
    run: Path,
    before: Mapping[str, Any],
    *,
    is_typed: bool,
    allow: Sequence[str],
) -> str | None:
    """Raise UserError for a checkpoint that was not saved by the run in folder `run`.

    Returns a note to print if resume_allow waives the check. `before`: the manifest of the run in
    `run`. `is_typed`: whether `resume=` names this checkpoint.
    """
    ours, theirs = before["run"], checkpoint.details["run"]
    plans = [ours["plan"], *(process.get("plan") for process in before.get("earlier", []))]
    if theirs["id"] != ours["id"]:
        why = f"was saved by another run ({_short(theirs)}, this one is {_short(ours)})"
    elif theirs["plan"] not in plans:
        why = "was saved by a copy of this run that was trained on other data or for other steps"
    else:
        return None
    if is_typed and _ALLOWED_BY in allow:
        return f"{checkpoint.folder} {why}, as resume_allow=[{_ALLOWED_BY}] allows"
    words = ",".join([*allow, _ALLOWED_BY])
    raise UserError(
        f"{checkpoint.folder} {why}; move it out of {run} to resume from the run's own, or type "
        f"resume={checkpoint.folder} 'resume_allow=[{words}]' to resume this run from it"
    )


def _short(run: Mapping[str, Any]) -> str:
    return str(run["id"])[:8]


@dataclasses.dataclass(frozen=True, slots=True)
class RunChange:
    """One difference between the resumed run and the current settings or data."""

    what: str
    """a setting's full key, or a description"""
    before: Any
    now: Any
    rule: ResumeRule
    undo: str
    """instruction to the user that undoes the change"""

    def __str__(self) -> str:
        return f"{self.what} was {_shortened(self.before)} and is {_shortened(self.now)}"


def compare_settings(before: TrainConfig, now: TrainConfig) -> list[RunChange]:
    """List the settings that differ between two training configs."""
    old = {key: value for key, value, _ in _leaves(before, "", None)}
    changes = []
    for key, value, rule in _leaves(now, "", None):
        if key not in old:
            continue  # belongs to another option or data set, which is reported as a change itself
        if old[key] != value and rule != "per_start":
            group, _, name = key.partition(".")
            typed = group if name == "name" else key  # `adapter` for the option `adapter.name`
            undo = _how_to_undo(typed, old[key])
            changes.append(RunChange(typed, old[key], value, rule or "fixed", undo))
    # Other differences between strategies only change rounding.
    if (was := _lossy_communication(before.strategy)) != (
        new := _lossy_communication(now.strategy)
    ):
        undo = f"type strategy={before.strategy.name}"
        changes.append(RunChange("lossy communication", was, new, "precision", undo))
    return changes


def is_more_patient(change: RunChange) -> bool:
    """Whether a change lets a run that stopped early train further."""
    if change.what != "trainer.early_stopping_patience" or change.before is None:
        return False
    return change.now is None or change.now > change.before


def compare_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[RunChange]:
    """List the differences between the facts of two manifests.

    Only keys present in both are compared: the base early, the rows once they have been read.
    """
    now = redacted(now)  # as manifests are saved
    both = before.keys() & now.keys()
    changes = []
    if "base" in both:
        changes += _compare_base(before["base"], now["base"])
    if "data" in both:
        changes += _compare_data(before["data"], now["data"])
    for name, (what, rule, undo) in _FINGERPRINTS.items():
        # Other rows or another template change the tokens as well; report only the cause.
        is_implied = name == "tokens_sha256" and changes
        if name in both and before[name] != now[name] and not is_implied:
            changes.append(RunChange(what, before[name], now[name], rule, undo))
    if "precision" in both and before["precision"] != now["precision"]:
        was, new = before["precision"], now["precision"]
        # All other precisions keep trainable parameters in fp32.
        rule = "fixed" if "bf16-pure" in (was, new) else "precision"
        changes.append(RunChange("the precision", was, new, rule, f"type trainer.precision={was}"))
    if "strategy" in both and before["strategy"] != now["strategy"]:
        was, new = before["strategy"], now["strategy"]
        changes.append(RunChange("the strategy", was, new, "rounding", f"type strategy={was}"))
    if "versions" in both:
        for name, version in now["versions"].items():
            if (was := before["versions"].get(name)) not in (None, version):
                changes.append(RunChange(name, was, version, "rounding", f"install {name}=={was}"))
    return changes


def check_changes(
    changes: Sequence[RunChange], allow: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the problems that forbid resuming, and the notes to print."""
    problems, notes = [], []
    for change in changes:
        if change.rule == "fixed":
            problems.append(
                f"{change}: that is another run; {change.undo} to continue this one, or "
                "leave resume out and type another output.dir"
            )
        elif change.rule in ALLOWED and change.rule not in allow:
            words = ",".join([*allow, change.rule])
            problems.append(
                f"{change} ({ALLOWED[change.rule]}); type 'resume_allow=[{words}]' to resume with "
                f"this change, or {change.undo}"
            )
        elif change.rule == "rounding":
            notes.append(f"{change} (the last digits may differ)")
        elif change.rule != "content":
            notes.append(str(change))
    return problems, notes


def _lossy_communication(strategy: StrategyConfig) -> str:
    if isinstance(strategy, DdpConfig) and strategy.compression != "none":
        return f"gradient compression ({strategy.compression})"
    if isinstance(strategy, LocalSgdConfig):
        return f"the averaging of weights every {strategy.sync_every_steps} steps"
    if isinstance(strategy, ZeroConfig):
        parts = ("weights", "gradients")
        quantized = [part for part in parts if getattr(strategy, f"quantized_{part}")]
        if quantized:
            return f"quantized {' and '.join(quantized)}"
    return "none"


def _compare_base(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[RunChange]:
    """Compare base models by their files, or by path and revision if one of them is on the hub."""
    undo = f"type model.path={before['path']} with the files that it had"
    named = before["weights"] is None or now["weights"] is None
    # A branch, or no revision, is compared again once the hub has resolved it to a commit.
    commits = [COMMIT.fullmatch(base["revision"] or "") is not None for base in (before, now)]
    is_resolved_later = commits[0] != commits[1]
    for name, what in (
        ("fingerprint", "the base model (sha256 of its config and the shapes of its weights)"),
        ("weights", "the base model's weights (sha256)"),
    ):
        if not named and before[name] != now[name]:
            return [RunChange(what, before[name], now[name], "fixed", undo)]
    return [
        RunChange(key, before[name], now[name], "fixed", _how_to_undo(key, before[name]))
        for name, key in (("path", "model.path"), ("revision", "model.revision"))
        if named and before[name] != now[name] and not (name == "revision" and is_resolved_later)
    ]


def _compare_data(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> list[RunChange]:
    changes = []
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        key = new.get("key", f"data.datasets[{index}]")
        what, undo = f"{key} {new['name']}", "restore the rows"
        is_known = old["sha256"] and new["sha256"]
        if is_known and old["sha256"] != new["sha256"]:
            rows = f"{what}: sha256 of its rows ({old['rows']:,} -> {new['rows']:,} rows)"
            changes.append(RunChange(rows, old["sha256"], new["sha256"], "data", undo))
        elif not is_known and old["path"] != new["path"]:
            changes.append(RunChange(f"{what}: path", old["path"], new["path"], "data", undo))
    return changes


def _how_to_undo(key: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, (str, int, float)) for part in value):
        return f"type '{key}=[{','.join(map(str, value))}]'"
    if "[" in key or isinstance(value, (list, dict)) or key in _LISTS_OF_DATASETS:
        return f"restore {key} from the run's config.yaml"
    return f"type {key}={as_typed(value)}"


def _leaves(
    value: Any, key: str, rule: ResumeRule | None
) -> Iterator[tuple[str, Any, ResumeRule | None]]:
    """Yield full key, value and resume rule of every setting; fields inherit their section's rule.

    Data sets are yielded one by one, other lists as a whole.
    """
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            inner = f"{key}.{field.name}" if key else field.name
            yield from _leaves(getattr(value, field.name), inner, facts_of(field).resume or rule)
    elif key in _LISTS_OF_DATASETS:
        yield key, f"{len(value)} data sets", rule
        for index, dataset in enumerate(value):
            yield from _leaves(dataset, f"{key}[{index}]", rule)
    else:
        yield key, value, rule


def _shortened(value: Any) -> str:
    text = as_typed(value)
    if SHA256.fullmatch(text):
        return text[:12]
    return shortened(text)


def describe_global_batch(
    trainer: TrainerConfig, num_ranks: int, before: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the packs per optimizer step over all ranks, and their factors.

    `before`: the global batch of the resumed run, which `auto` reuses.
    """
    size = trainer.least_micro_batch
    packs = size * trainer.accumulation(num_ranks)
    if before is not None and trainer.has_auto_batch:
        of_rank, rest = divmod(before["packs"], num_ranks)
        packs = of_rank if rest == 0 and of_rank % size == 0 else packs
    if before is not None and trainer.micro_batch_size == "auto":
        previous = before["micro_batch_size"]
        size = previous if packs % previous == 0 else size
    return global_batch_of(size, packs // size, num_ranks)


def global_batch_of(size: int, accumulation: int, num_ranks: int) -> dict[str, int]:
    """Return the packs per optimizer step over all ranks, and their factors, for the manifest."""
    return {
        "packs": size * accumulation * num_ranks,
        "micro_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "num_ranks": num_ranks,
    }


def compare_global_batch(
    before: Mapping[str, int], now: Mapping[str, int], trainer: TrainerConfig
) -> tuple[list[str], list[str]]:
    """Return the problems that forbid resuming with this batch, and the notes to print."""
    if before == now:
        return [], []
    if before["packs"] == now["packs"]:
        return [], [
            f"a global step is {_factors(now)} and was {_factors(before)}: the same order of data "
            "(the last digits and the dropout masks may differ)"
        ]
    return [
        f"the run took {before['packs']} packs per step ({_factors(before)}) and would now take "
        f"{now['packs']} ({_factors(now)}): the order of its data depends on it; type "
        f"{_batch_override(before, now, trainer)}"
    ], []


def check_stream(
    changes: Sequence[RunChange], before: Mapping[str, int], now: Mapping[str, int]
) -> list[str]:
    """List the problems of changes that would reorder streamed data."""
    problems = [
        f"{change}, and the order of data.streaming=true depends on it; {change.undo}"
        for change in changes
        if change.what in _STREAMED
    ]
    if before["num_ranks"] != now["num_ranks"]:
        problems.append(
            f"the run had {counted(before['num_ranks'], 'rank')} and would now have "
            f"{now['num_ranks']}, and the order of data.streaming=true depends on it; type "
            f"trainer.devices={before['num_ranks']}"
        )
    return problems


def _factors(batch: Mapping[str, int]) -> str:
    return (
        f"micro_batch_size {batch['micro_batch_size']} x accumulation "
        f"{batch['gradient_accumulation_steps']} x {counted(batch['num_ranks'], 'rank')}"
    )


def _batch_override(
    before: Mapping[str, int], now: Mapping[str, int], trainer: TrainerConfig
) -> str:
    if trainer.global_batch_size is not None:
        return f"trainer.global_batch_size={before['packs']}"
    accumulation, rest = divmod(before["packs"], now["micro_batch_size"] * now["num_ranks"])
    if rest == 0:
        return f"trainer.gradient_accumulation_steps={accumulation}"
    if before["packs"] % now["num_ranks"] == 0:
        accumulation = before["packs"] // now["num_ranks"]
        return f"trainer.micro_batch_size=1 trainer.gradient_accumulation_steps={accumulation}"
    return f"trainer.devices={before['num_ranks']} (or another divisor of {before['packs']})"
