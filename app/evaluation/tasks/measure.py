"""Ask a model the questions of tasks, and measure what it makes of them."""

from __future__ import annotations

import math
import resource
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import EvaluationConfig, answer_batches
from app.evaluation.likelihood import (
    Likelihood,
    Request,
    encode_pair,
    first_token,
    rolling_requests,
    score,
)
from app.evaluation.row_runner import RowRunner
from app.evaluation.tasks.questions import Question, Task
from data_modules import Prompt, redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.strategy.mixin import StrategyMixin

MIN_CONTEXT = 16
"""tokens of a question that are left beside the longest answer"""
PROGRAM_SECONDS, PROGRAM_MEMORY_BYTES, PROGRAM_FILE_BYTES = 10, 1 << 30, 1 << 20
"""limits of a process that runs a program which a model has written"""
METRICS_OF = {
    "multiple_choice": ("accuracy", "accuracy_norm", "loss"),
    "likelihood": ("accuracy", "loss", "perplexity"),
    "perplexity": ("loss", "perplexity", "bits_per_byte"),
    "code": ("passed",),
}
"""kind of a task: what `totals` returns of it, where that is not its own name alone"""


class TaskRunner:
    """Ask several models the same tasks, and keep what they answer."""

    def __init__(
        self,
        config: EvaluationConfig,
        tasks: Sequence[Task],
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: set[int],
        max_len: int,
    ) -> None:
        self._config, self._tokenizer, self._stop_ids = config, tokenizer, stop_ids
        self._max_len = max_len
        self.tasks = {task.name: task for task in tasks}
        self.questions = {task.name: task.questions() for task in tasks}
        self.results: dict[str, dict[str, list[dict[str, Any]]]] = {}
        """variant -> task -> a result a question: answer, metrics, logprob, tokens, bytes"""

    def measure(
        self, variant: str, model: Any, runner: RowRunner, sharding: StrategyMixin | None = None
    ) -> dict[str, float]:
        """Ask a model all tasks; return `{variant}/<metric>/<task>`, and of each group of a task.

        `sharding`: the strategy where each rank holds a part of the weights; all do the same then.
        """
        found: dict[str, float] = {}
        self.results[variant] = {}
        for name, task in self.tasks.items():
            questions = self.questions[name]
            content = [
                task.form.kind,
                self._max_len,
                [task.form.stops, self._config.max_new_tokens],
                [asdict(question.asked) for question in questions],
            ]

            def work(chosen: list[int], task: Task = task) -> Iterator[list[tuple[int, Any]]]:
                asked = [self.questions[task.name][number] for number in chosen]
                if task.form.kind in ("multiple_choice", "likelihood", "perplexity"):
                    return self._likelihoods(task, asked, model, sharding)
                return self._answers(task, asked, model, sharding)

            results = runner.run(f"{variant}-{name}", content, len(questions), work)
            self.results[variant][name] = results
            found |= {
                f"{variant}/{key}": value for key, value in self._totals(task, results).items()
            }
        return found

    def prediction_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of predictions.jsonl."""
        for name, questions in self.questions.items():
            for number in range(len(questions)):
                yield self._line(name, number)

    def group_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the same lines under the name of each group that they are in."""
        for name, task in self.tasks.items():
            groups = self._groups(task)
            del groups[name]
            for group, numbers in groups.items():
                for number in numbers:
                    yield {**self._line(name, number), "data_set": group}

    def _line(self, name: str, number: int) -> dict[str, Any]:
        question = self.questions[name][number]
        found = {
            variant: results[name][number]
            for variant, results in self.results.items()
            if name in results
        }
        metrics: dict[str, dict[str, float]] = defaultdict(dict)
        for variant, result in found.items():
            for metric, value in result["metrics"].items():
                metrics[metric][variant] = value
        asked = question.asked
        return {
            "data_set": name,
            **({"group": asked.group} if asked.group else {}),
            "source": redact(str(question.origin)),
            "prompt": asked.contexts[0],
            "reference": asked.reference,
            **{variant: result["answer"] for variant, result in found.items()},
            "finished": {variant: result["finished"] for variant, result in found.items()},
            **tokens_of(found),
            "metrics": metrics,
        }

    def metric_names(self, variant: str) -> list[str]:
        """Return the names of what `measure` returns."""
        return [
            f"{variant}/{metric}/{name}"
            for task in self.tasks.values()
            for name in self._groups(task)
            for metric in METRICS_OF.get(task.form.kind, (task.form.kind,))
        ]

    def _groups(self, task: Task) -> dict[str, list[int]]:
        """Return the numbers of the questions of a task, and of each of its groups, by name."""
        questions = self.questions[task.name]
        groups: dict[str, list[int]] = {task.name: list(range(len(questions)))}
        categories = task.form.categories or {}
        for number, question in enumerate(questions):
            if group := question.asked.group:
                for name in (categories.get(group), group):
                    if name is not None:
                        groups.setdefault(f"{task.name}/{name}", []).append(number)
        return groups

    def _totals(self, task: Task, results: Sequence[dict[str, Any]]) -> dict[str, float]:
        return {
            f"{metric}/{name}": value
            for name, numbers in self._groups(task).items()
            for metric, value in totals(task.form.kind, [results[n] for n in numbers]).items()
        }

    def _likelihoods(
        self, task: Task, questions: Sequence[Question], model: Any, sharding: StrategyMixin | None
    ) -> Iterator[list[tuple[int, Any]]]:
        requests: list[Request] = []
        places: list[range] = []
        is_encoder_decoder = model.config.is_encoder_decoder
        for question in questions:
            start = len(requests)
            if task.form.kind == "perplexity":
                requests += self._rolling(question)
            else:
                pairs = (
                    encode_pair(self._tokenizer, *pair, is_encoder_decoder=is_encoder_decoder)
                    for pair in question.pairs
                )
                requests += pairs
            places.append(range(start, len(requests)))
        owner = [number for number, place in enumerate(places) for _ in place]
        found: dict[int, Likelihood] = {}
        left = [len(place) for place in places]
        batches = score(
            model,
            requests,
            max_len=self._max_len,
            batch_tokens=self._config.batch_tokens,
            gathered=(lambda: sharding.gathered(model)) if sharding is not None else nullcontext,
            device=None if sharding is None else sharding.root_device,
        )
        for batch in batches:
            finished = []
            for number, likelihood in batch:
                found[number] = likelihood
                left[owner[number]] -= 1
                if not left[owner[number]]:
                    finished.append(owner[number])
            yield [
                (number, result_of(task, questions[number], [found[n] for n in places[number]]))
                for number in finished
            ]

    def _rolling(self, question: Question) -> list[Request]:
        ids = self._tokenizer.encode(question.asked.continuations[0])
        return rolling_requests(ids, first_token(self._tokenizer), self._max_len)

    def _answers(
        self, task: Task, questions: Sequence[Question], model: Any, sharding: StrategyMixin | None
    ) -> Iterator[list[tuple[int, Any]]]:
        form = task.form
        most = min(form.max_new_tokens or self._config.max_new_tokens, self._max_len - MIN_CONTEXT)
        config = replace(self._config, max_new_tokens=most)
        prompts = []
        for question in questions:
            ids = self._tokenizer.encode(question.asked.contexts[0])[-(self._max_len - most) :]
            prompts.append(Prompt(ids, question.asked.reference, question.origin))
        stops = form.stops
        for batch in answer_batches(
            model, self._tokenizer, prompts, self._stop_ids, config, sharding, stops
        ):
            yield [
                (number, answered(task, questions[number], answer.text, answer.is_finished))
                for number, answer in batch
            ]


def tokens_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return the tokens that the loss of a row is a mean over, the same for every model."""
    counts = [result["tokens"] for result in found.values() if "tokens" in result]
    return {"tokens": counts[0]} if counts else {}


def result_of(task: Task, question: Question, found: Sequence[Likelihood]) -> dict[str, Any]:
    """Return what a model makes of a question by the likelihoods of its choices, or of a text."""
    kind, asked = task.form.kind, question.asked
    if kind == "perplexity":
        logprob = math.fsum(one.logprob for one in found)
        tokens = sum(one.num_tokens for one in found)
        return _scored(None, {}, logprob, tokens, len(asked.reference.encode()))
    if kind == "likelihood":
        (one,) = found
        metrics = {"accuracy": float(one.is_greedy)}
        return _scored(None, metrics, one.logprob, one.num_tokens, len(asked.reference.encode()))
    best = max(range(len(found)), key=lambda n: found[n].logprob)
    ends = [
        asked.continuations[n if len(asked.continuations) > 1 else 0] for n in range(len(found))
    ]
    by_length = max(range(len(found)), key=lambda n: found[n].logprob / max(1, len(ends[n])))
    metrics = {
        "accuracy": float(best == asked.right),
        "accuracy_norm": float(by_length == asked.right),
    }
    right = found[asked.right]
    return _scored(question.choices[best], metrics, right.logprob, right.num_tokens, 0)


def _scored(
    answer: str | None, metrics: dict[str, float], logprob: float, tokens: int, num_bytes: int
) -> dict[str, Any]:
    loss = -logprob / max(1, tokens)
    return {
        "answer": answer,
        "finished": True,
        "metrics": {**metrics, "loss": loss},
        "logprob": logprob,
        "tokens": tokens,
        "bytes": num_bytes,
    }


def answered(task: Task, question: Question, text: str, is_finished: bool) -> dict[str, Any]:
    """Return how right an answer is, cut off where a stop text begins."""
    form, asked = task.form, question.asked
    ends = [place for stop in form.stops if (place := text.find(stop)) >= 0]
    if ends:
        text, is_finished = text[: min(ends)], True
    if form.kind == "code":
        is_right = passes(f"{asked.contexts[0]}{text}\n{asked.program}")
        metric = "passed"
    else:
        expected = form.extract(asked.reference)
        is_right = expected is not None and form.extract(text) == expected
        metric = form.kind
    return {"answer": text, "finished": is_finished, "metrics": {metric: float(is_right)}}


def totals(kind: str, results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of all questions: means over rows, and losses over tokens."""
    runner = {
        metric: math.fsum(one["metrics"][metric] for one in results) / len(results)
        for metric in results[0]["metrics"]
        if metric != "loss"
    }
    if "logprob" not in results[0]:
        return runner
    logprob = math.fsum(one["logprob"] for one in results)
    tokens = sum(one["tokens"] for one in results)
    runner["loss"] = -logprob / max(1, tokens)
    if kind == "likelihood":  # of a whole continuation, as lm-evaluation-harness has it
        runner["perplexity"] = math.exp(min(700.0, -logprob / len(results)))
    if kind == "perplexity":
        runner["perplexity"] = math.exp(min(700.0, runner["loss"]))
        num_bytes = sum(one["bytes"] for one in results)
        runner["bits_per_byte"] = -logprob / max(1, num_bytes) / math.log(2)
    return runner


def passes(program: str, seconds: int = PROGRAM_SECONDS) -> bool:
    """Return whether a program runs to its end within the limits, without an error.

    A random word, written behind its last line, proves it: a program that exits early writes none.
    """
    word = secrets.token_hex(8)
    program += f"\n__import__('os').write(1, b'{word}')\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-S", "-"],
                input=program.encode("utf-8", "replace"),
                cwd=folder,
                env={},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                preexec_fn=_limit,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0 and ended.stdout.endswith(word.encode())


def _limit() -> None:
    for what, most in (
        (resource.RLIMIT_CPU, PROGRAM_SECONDS),
        (resource.RLIMIT_AS, PROGRAM_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, PROGRAM_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
