"""Settings of tasks, and the questions made from the rows of a task's file.

A question is a prompt with its few-shot examples, its choices and the right answer. Needs no torch;
DataError and UserError name file, line and what to type.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.tasks.forms import BY_KIND, FORMS, Form, TaskItem
from common.errors import Origin, UserError, nearest
from common.facts import setting
from common.text import printable
from data_modules import read_rows

if TYPE_CHECKING:
    from app.evaluation.generation import EvaluationConfig

SAMPLES = Path(__file__).parent / "samples"
"""small files that ship with loft, in the published formats"""
_CHECKED_ROWS = 20
"""rows of each task file that are checked before a model is loaded"""
_KINDS = ("multiple_choice", "exact_match", "numeric", "likelihood", "perplexity", "code")


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    name: str = setting(grants="nothing")
    """name of the task in metrics; gsm8k, mmlu, arc, openbookqa, hellaswag, winogrande, boolq,
    lambada, math and humaneval select the published form of that benchmark; needle finds a sentence
    in a long text"""
    path: str | None = setting(None, grants="nothing")
    """file with the rows of the task (json, jsonl, csv, parquet; .gz or .zst); null = the published
    file name of the benchmark, in evaluation.task_dir"""
    form: str | None = setting(None, grants="nothing")
    """benchmark whose published form the rows and prompts have, if `name` is a different word; null
    = `name`, if that is a benchmark"""
    kind: str | None = setting(None, choices=_KINDS)
    """how the task is scored: multiple_choice (the likeliest choice), exact_match or numeric (of a
    generated answer), likelihood (of a continuation), perplexity (of a text), code (the generated
    program is run); null = as its form says"""
    columns: dict[str, str] = setting(default_factory=dict, grants="nothing")
    """field: column that holds it, if the names differ; fields are question, choices and answer,
    context and continuation, or text; dots reach nested fields"""
    few_shot: int | None = setting(None, ge=0, le=100)
    """number of few-shot examples before each question; null = as its form says"""
    few_shot_path: str | None = setting(None, grants="nothing")
    """file with the few-shot examples; null = the file of its form, or the first rows of `path`,
    which are then left out of the evaluation"""
    max_rows: int | None = setting(None, ge=1)
    """maximum number of rows to evaluate, the first ones; null = all"""
    lengths: list[int] = setting(default_factory=list, ge=128)
    """needle: tokens of the texts that hide each row's sentence, with question and answer; [] = a
    quarter, half and all of the context"""
    depths: list[float] = setting(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0], ge=0, le=1)
    """needle: places of the sentence in these texts, from 0, their start, to 1, their end"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt with its few-shot examples, and the correct answer."""

    item: TaskItem
    """the row; its contexts start with the few-shot examples"""
    origin: Origin

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return (context, continuation) of each choice, empty if the model generates an answer."""
        item = self.item
        return [
            (context, item.delimiter + continuation)
            for context, continuation in itertools.product(item.contexts, item.continuations)
        ]

    @property
    def choices(self) -> tuple[str, ...]:
        item = self.item
        return item.continuations if len(item.contexts) == 1 else item.contexts


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    config: TaskConfig
    form: Form
    path: str
    few_shot: int
    few_shot_path: str | None
    is_sample: bool
    """whether the rows are those that ship with loft, whose scores mean nothing"""

    @property
    def name(self) -> str:
        return self.config.name

    def questions(self) -> list[Question]:
        """Read all questions; raise UserError or DataError if a row is invalid."""
        rows = self._read(self.path)
        if self.few_shot_path is None:
            examples, rows = rows[: self.few_shot], rows[self.few_shot :]
        else:
            examples = self._read(self.few_shot_path)
        evaluated = rows[: self.config.max_rows]
        if not evaluated:
            raise UserError(
                f"{self.path}: task {self.name} uses all rows as its {self.few_shot} few-shot "
                "examples, so none is left to evaluate; give evaluation.tasks a few_shot_path, or "
                "few_shot: 0"
            )
        preamble = self._build_preamble(examples)
        return [
            Question(
                item=replace(
                    item,
                    contexts=tuple(preamble(item.group) + context for context in item.contexts),
                ),
                origin=origin,
            )
            for item, origin in evaluated
        ]

    def check(self) -> None:
        """Read the first rows; raise UserError or DataError if one is invalid."""
        self._read(self.path, _CHECKED_ROWS)
        if self.few_shot and self.few_shot_path is not None:
            self._read(self.few_shot_path, _CHECKED_ROWS)

    def _build_preamble(self, rows: Sequence[tuple[TaskItem, Origin]]) -> Callable[[str], str]:
        by_group: dict[str, list[TaskItem]] = defaultdict(list)
        has_groups = self.few_shot_path is not None
        for item, _ in rows:
            by_group[item.group if has_groups else ""].append(item)

        def preamble(group: str) -> str:
            examples = by_group[group if has_groups else ""][: self.few_shot]
            if len(examples) < self.few_shot:
                raise UserError(
                    f"{self.few_shot_path or self.path}: task {self.name} needs {self.few_shot} "
                    f"few-shot examples{f' of {group}' if group else ''}, but there are "
                    f"{len(examples)}; type few_shot: {len(examples)}"
                )
            shots = "".join(f"{_with_answer(item)}\n\n" for item in examples)
            return self.form.describe_group(group) + shots

        return preamble

    def _read(self, path: str, max_rows: int | None = None) -> list[tuple[TaskItem, Origin]]:
        items = []
        for values, origin in read_rows(path, max_rows):
            columns = self.config.columns.items()
            row = values | {field: _value_at(values, column) for field, column in columns}
            missing = [field for field in self.form.fields if row.get(field) is None]
            if missing:
                raise UserError(self._describe_missing(missing[0], values, origin))
            try:
                items.append((self.form.parse(row), origin))
            except (ValueError, TypeError, KeyError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"{origin}: task {self.name}: {why}") from error
        return items

    def _describe_missing(self, field: str, values: dict[str, Any], origin: Origin) -> str:
        column = self.config.columns.get(field, field)
        what = "reference" if field in ("answer", "solution", "answerKey") else "column"
        existing = ", ".join(printable(str(name))[:40] for name in list(values)[:12])
        return (
            f"{origin}: task {self.name} has no {what} '{column}'{nearest(column, values)} "
            f"(it reads {', '.join(self.form.fields)}; the row has {existing}); type columns: "
            f"{{{field}: COLUMN}} in evaluation.tasks"
        )


def hide_needles(
    task: Task, questions: Sequence[Question], max_len: int, count_tokens: Callable[[str], int]
) -> list[Question]:
    """Return each question at each depth of texts of each length, of sentences that repeat.

    `max_len`: tokens of the model's context. UserError if a text cannot be that long.
    """
    if too_long := [length for length in task.config.lengths if length > max_len]:
        raise UserError(
            f"{task.path}: task {task.name}: a text of {too_long[0]} tokens exceeds the context of "
            f"{max_len}; type lengths: [{max_len}] in evaluation.tasks"
        )
    lengths = task.config.lengths or [max_len // 4, max_len // 2, max_len]
    hidden = []
    for number, question in enumerate(questions):
        item, others = question.item, [*questions[number + 1 :], *questions[:number]]
        sentences = re.split(r"(?<=[.!?])\s+", item.haystack)
        if not item.haystack:
            sentences = [other.item.needle for other in others]
        if not sentences:
            raise UserError(
                f"{question.origin}: task {task.name} hides needles among those of other rows, and "
                "there is none; add rows, or a column haystack with a text"
            )
        for length in lengths:
            num_tokens = length - (task.form.max_new_tokens or 0)
            count = _count_that_fit(item, sentences, num_tokens, count_tokens)
            for depth in task.config.depths:
                text = _with_needle(item, sentences, count, depth) + item.contexts[0]
                placed = replace(item, contexts=(text,), group=f"{length} at {depth:g}")
                hidden.append(replace(question, item=placed))
    return hidden


def _count_that_fit(
    item: TaskItem, sentences: Sequence[str], num_tokens: int, count_tokens: Callable[[str], int]
) -> int:
    def total(count: int) -> int:
        return count_tokens(_with_needle(item, sentences, count, 0.5) + item.contexts[0])

    rounds = num_tokens // max(1, count_tokens(" ".join(sentences))) + 2
    counts = range(1, rounds * len(sentences))
    return bisect.bisect_right(counts, num_tokens, key=total)


def _with_needle(item: TaskItem, sentences: Sequence[str], count: int, depth: float) -> str:
    text = list(itertools.islice(itertools.cycle(sentences), count))
    text.insert(round(depth * count), item.needle)
    return " ".join(text)


def _with_answer(item: TaskItem) -> str:
    context = item.contexts[item.correct if len(item.contexts) > 1 else 0]
    return f"{context}{item.delimiter}{item.reference}"


def _value_at(values: dict[str, Any], column: str) -> Any:
    value: Any = values
    for key in [column] if column in values else column.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def build_tasks(config: EvaluationConfig) -> list[Task]:
    """Return the configured tasks; raise UserError with all problems of their settings."""
    tasks, problems = [], []
    for index, task in enumerate(config.tasks):
        key = f"evaluation.tasks[{index}]"
        try:
            tasks.append(_build(task, key, config))
        except UserError as error:
            problems += error.problems
        if task.name in [other.name for other in config.tasks[:index]]:
            problems.append(f"{key}.name={task.name}: another task has this name; give another")
    if problems:
        raise UserError(problems)
    return tasks


def _build(config: TaskConfig, key: str, evaluation: EvaluationConfig) -> Task:
    if "/" in config.name or not config.name.strip():
        raise UserError(
            f"{key}.name={config.name!r}: expected a word without /, since it becomes part of "
            "metric names"
        )
    form_name = config.form or config.name
    form = FORMS.get(form_name)
    if form is None and config.form is None and config.kind in BY_KIND:
        form = BY_KIND[config.kind]
    if form is None:
        where = "form" if config.form else "name"
        raise UserError(
            f"{key}.{where}={form_name}: not a known task{nearest(form_name, FORMS)}; known are "
            f"{', '.join(FORMS)}; a custom task needs a kind: {', '.join(BY_KIND)}"
        )
    if config.kind not in (None, form.kind):
        raise UserError(
            f"{key}.kind={config.kind}: {form_name} is {form.kind}; leave kind out, or give the "
            "task another name"
        )
    if form.kind == "code" and not evaluation.allow_code:
        raise UserError(
            f"{key}: {config.name} runs programs that the model writes, in a process with limits "
            "but with your permissions; type evaluation.allow_code=true to allow it"
        )
    if config.path is None and not form.file:
        raise UserError(f"{key}.path: type the file with the rows of {config.name}")
    if config.lengths and "needle" not in form.fields:
        raise UserError(
            f"{key}.lengths={config.lengths} has no effect: {form_name} hides no needles; leave it "
            "out, or give form: needle"
        )
    if not config.depths:
        raise UserError(f"{key}.depths=[]: type depths: [0, 0.5, 1], or leave it out")
    folder = SAMPLES if evaluation.task_dir is None else Path(evaluation.task_dir).expanduser()
    few_shot = form.few_shot if config.few_shot is None else config.few_shot
    path, few_shot_path = config.path or str(folder / form.file), config.few_shot_path
    if few_shot_path is not None and not few_shot:
        raise UserError(
            f"{key}.few_shot_path={few_shot_path} has no effect with few_shot: 0; type few_shot: "
            "N, too, or leave it out"
        )
    if few_shot_path is None and config.path is None and form.few_shot_file:
        few_shot_path = str(folder / form.few_shot_file)
    is_sample = config.path is None and evaluation.task_dir is None
    if is_sample and not Path(path).is_file() and Path(path.removesuffix(".gz")).is_file():
        path = path.removesuffix(".gz")
    return Task(
        config=config,
        form=form,
        path=path,
        few_shot=few_shot,
        few_shot_path=few_shot_path,
        is_sample=is_sample,
    )


def check_tasks(config: EvaluationConfig) -> list[str]:
    """List the problems of the configured tasks and of their first rows."""
    try:
        tasks = build_tasks(config)
    except UserError as error:
        return error.problems
    problems: list[str] = []
    for task in tasks:
        try:
            task.check()
        except ValueError as error:
            problems += getattr(error, "problems", [str(error)])
    return problems
