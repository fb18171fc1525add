"""Settings of tasks, and the questions made from the rows of a task's file.

A question is a prompt with its few-shot examples, its choices and the right answer. Needs no torch;
DataError and UserError name file, line and what to type.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.tasks.forms import BY_KIND, FORMS, Asked, Form
from app.process.errors import UserError, nearest
from data_modules import Origin, printable, read_rows, setting

if TYPE_CHECKING:
    from app.evaluation.generation import EvaluationConfig

SAMPLES = Path(__file__).parent / "samples"
"""small files that ship with loft, in the published formats"""
CHECKED_ROWS = 20
"""rows of each task file that are checked before a model is loaded"""
KINDS = ("multiple_choice", "exact_match", "numeric", "likelihood", "perplexity", "code")


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """One task."""

    name: str = setting()
    """name of the task in metrics; gsm8k, mmlu, arc, openbookqa, hellaswag, winogrande, boolq,
    lambada, math and humaneval select the published form of that benchmark"""
    path: str | None = setting(None)
    """file with the rows of the task (json, jsonl, csv, parquet; .gz or .zst); null = the published
    file name of the benchmark, in evaluation.task_dir"""
    form: str | None = setting(None)
    """benchmark whose published form the rows and prompts have, if `name` is a different word; null
    = `name`, if that is a benchmark"""
    kind: str | None = setting(None, choices=KINDS)
    """how the task is scored: multiple_choice (the likeliest choice), exact_match or numeric (of a
    generated answer), likelihood (of a continuation), perplexity (of a text), code (the generated
    program is run); null = as its form says"""
    columns: dict[str, str] = setting(default_factory=dict)
    """field: column that holds it, if the names differ; fields are question, choices and answer,
    context and continuation, or text; dots reach nested fields"""
    few_shot: int | None = setting(None, ge=0, le=100)
    """number of few-shot examples before each question; null = as its form says"""
    few_shot_path: str | None = setting(None)
    """file with the few-shot examples; null = the file of its form, or the first rows of `path`,
    which are then left out of the evaluation"""
    max_rows: int | None = setting(None, ge=1)
    """maximum number of rows to evaluate, the first ones; null = all"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of a model, with the examples before it, and what is right."""

    asked: Asked
    """contexts have the examples before them"""
    origin: Origin

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return (context, continuation) of each choice; none where the model answers itself."""
        asked = self.asked
        return [
            (context, asked.delimiter + end)
            for context, end in itertools.product(asked.contexts, asked.continuations)
        ]

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the texts that tell the choices apart."""
        asked = self.asked
        return asked.continuations if len(asked.contexts) == 1 else asked.contexts


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task with its form and its files."""

    name: str
    form: Form
    path: str
    few_shot: int
    few_shot_path: str | None
    columns: dict[str, str]
    max_rows: int | None
    is_sample: bool
    """whether it is a sample of our own, in which a score means nothing"""

    def questions(self) -> list[Question]:
        """Read all questions; UserError or DataError in words where a row cannot be asked."""
        rows = self._read(self.path)
        if self.few_shot_path is None:
            examples, rows = rows[: self.few_shot], rows[self.few_shot :]
        else:
            examples = self._read(self.few_shot_path)
        asked = rows[: self.max_rows]
        if not asked:
            raise UserError(
                f"{self.path}: no row is left to ask of task {self.name} beside its "
                f"{self.few_shot} examples; give evaluation.tasks a few_shot_path, or few_shot: 0"
            )
        before = self._examples(examples)
        return [
            Question(
                asked=replace(
                    one,
                    contexts=tuple(before(one.group) + context for context in one.contexts),
                ),
                origin=origin,
            )
            for one, origin in asked
        ]

    def check(self) -> None:
        """Read the first rows; UserError or DataError where one cannot be asked."""
        self._read(self.path, CHECKED_ROWS)
        if self.few_shot and self.few_shot_path is not None:
            self._read(self.few_shot_path, CHECKED_ROWS)

    def _examples(self, rows: Sequence[tuple[Asked, Origin]]) -> Any:
        """Return a function from a group to the text before its questions."""
        by_group: dict[str, list[Asked]] = defaultdict(list)
        has_groups = self.few_shot_path is not None
        for one, _ in rows:
            by_group[one.group if has_groups else ""].append(one)

        def before(group: str) -> str:
            chosen = by_group[group if has_groups else ""][: self.few_shot]
            if len(chosen) < self.few_shot:
                raise UserError(
                    f"{self.few_shot_path or self.path}: task {self.name} asks for "
                    f"{self.few_shot} examples{f' of {group}' if group else ''}, and there are "
                    f"{len(chosen)}; type few_shot: {len(chosen)}"
                )
            shots = "".join(f"{_with_answer(one)}\n\n" for one in chosen)
            return self.form.describe(group) + shots

        return before

    def _read(self, path: str, max_rows: int | None = None) -> list[tuple[Asked, Origin]]:
        found = []
        for values, origin in read_rows(path, max_rows):
            row = {field: _value_at(values, column) for field, column in self.columns.items()}
            row = values | row
            missing = [field for field in self.form.fields if row.get(field) is None]
            if missing:
                raise UserError(self._missing(missing[0], values, origin))
            try:
                found.append((self.form.read(row), origin))
            except (ValueError, TypeError, KeyError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"{origin}: task {self.name}: {why}") from error
        return found

    def _missing(self, field: str, values: dict[str, Any], origin: Origin) -> str:
        column = self.columns.get(field, field)
        what = "reference" if field in ("answer", "solution", "answerKey") else "column"
        there = ", ".join(printable(str(name))[:40] for name in list(values)[:12])
        return (
            f"{origin}: task {self.name} has no {what} '{column}'{nearest(column, values)} "
            f"(it reads {', '.join(self.form.fields)}; the row has {there}); type columns: "
            f"{{{field}: COLUMN}} in evaluation.tasks"
        )


def _with_answer(one: Asked) -> str:
    context = one.contexts[one.right if len(one.contexts) > 1 else 0]
    return f"{context}{one.delimiter}{one.reference}"


def _value_at(values: dict[str, Any], column: str) -> Any:
    """Return the value of a column, or of a field in it: `choices.text`."""
    found: Any = values
    for step in [column] if column in values else column.split("."):
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def build_tasks(config: EvaluationConfig) -> list[Task]:
    """Return the tasks of a configuration; UserError lists all that is wrong with their names."""
    tasks, problems = [], []
    for index, one in enumerate(config.tasks):
        key = f"evaluation.tasks[{index}]"
        try:
            tasks.append(_build(one, key, config))
        except UserError as error:
            problems += error.problems
        if one.name in [before.name for before in config.tasks[:index]]:
            problems.append(f"{key}.name={one.name}: another task has this name; give another")
    if problems:
        raise UserError(problems)
    return tasks


def _build(config: TaskConfig, key: str, evaluation: EvaluationConfig) -> Task:
    if "/" in config.name or not config.name.strip():
        raise UserError(f"{key}.name={config.name!r}: it is part of metrics' names; give a word")
    named = config.form or config.name
    form = FORMS.get(named)
    if form is None and config.form is None and config.kind in BY_KIND:
        form = BY_KIND[config.kind]
    if form is None:
        where = "form" if config.form else "name"
        raise UserError(
            f"{key}.{where}={named}: not a known task{nearest(named, FORMS)}; there are "
            f"{', '.join(FORMS)}; a task of your own needs a kind: {', '.join(BY_KIND)}"
        )
    if config.kind not in (None, form.kind):
        raise UserError(
            f"{key}.kind={config.kind}: {named} is {form.kind}; leave kind out, or give the task "
            "another name"
        )
    if form.kind == "code" and not evaluation.allow_code:
        raise UserError(
            f"{key}: {config.name} runs programs that the model has written, in a process with "
            "limits but as you; type evaluation.allow_code=true to let it"
        )
    if config.path is None and not form.file:
        raise UserError(f"{key}.path: type the file of {config.name}'s rows")
    folder = SAMPLES if evaluation.task_dir is None else Path(evaluation.task_dir).expanduser()
    few_shot = form.few_shot if config.few_shot is None else config.few_shot
    few_shot_path = config.few_shot_path
    if few_shot_path is None and config.path is None and form.few_shot_file:
        few_shot_path = str(folder / form.few_shot_file)
    path = config.path or str(folder / form.file)
    is_sample = config.path is None and evaluation.task_dir is None
    if is_sample and not Path(path).is_file() and Path(path.removesuffix(".gz")).is_file():
        path = path.removesuffix(".gz")
    return Task(
        name=config.name,
        form=form,
        path=path,
        few_shot=few_shot,
        few_shot_path=few_shot_path,
        columns=dict(config.columns),
        max_rows=config.max_rows,
        is_sample=is_sample,
    )


def check_tasks(config: EvaluationConfig) -> list[str]:
    """List what is wrong with the tasks and with their first rows."""
    try:
        tasks = build_tasks(config)
    except UserError as error:
        return error.problems
    return [problem for task in tasks for problem in _problems_of(task)]


def _problems_of(task: Task) -> Iterator[str]:
    try:
        task.check()
    except ValueError as error:
        yield from getattr(error, "problems", [str(error)])
