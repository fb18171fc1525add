"""Run models on the questions of tasks, and score their likelihoods, answers and programs.

Tasks of lm-evaluation-harness are run by that library, by name or from a folder of task files: it
builds prompts and computes metrics; likelihoods and answers are computed here as for other tasks,
on all ranks, and saved. Nothing is downloaded if the task files name local data.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import resource
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import EvaluationConfig, answer_batches, first_stop
from app.evaluation.likelihood import (
    Likelihood,
    Request,
    encode_after_first,
    encode_pair,
    encode_text,
    first_token,
    rolling_requests,
    score_groups,
)
from app.evaluation.row_runner import RowRunner
from app.evaluation.tasks.questions import Question, Task, hide_needles
from app.model.hub import is_offline_by_setting, reach_hub
from common.errors import Origin, UserError, nearest
from common.installation import install_extra
from common.redaction import redact
from data_modules import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.strategy.mixin import Placement

_MIN_CONTEXT = 16
"""minimum number of prompt tokens kept when a prompt and its longest answer exceed the context"""
_PROGRAM_SECONDS, _PROGRAM_MEMORY_BYTES, _PROGRAM_FILE_BYTES = 10, 1 << 30, 1 << 20
"""limits of a process that runs a generated program"""
_METRICS_OF = {
    "multiple_choice": ("accuracy", "accuracy_norm", "loss"),
    "likelihood": ("accuracy", "loss", "perplexity"),
    "perplexity": ("loss", "perplexity", "bits_per_byte"),
    "code": ("passed",),
}
"""kind of a task -> names of its metrics; a kind that is not listed has one metric of its name"""
_MAX_LISTED = 30
"""largest number of tasks that a message lists by name"""
_METRIC_NAMES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
"""metric of the harness -> its name in metrics.json, if that differs"""


class TaskRunner:
    """Runs the same tasks with several models, and keeps the result of each question."""

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
        self.questions = {task.name: self._read_questions(task) for task in tasks}
        self.results: dict[str, dict[str, list[dict[str, Any]]]] = {}
        """variant -> task -> result of each question: answer, metrics, logprob, tokens, bytes"""

    def _read_questions(self, task: Task) -> list[Question]:
        questions = task.questions()
        if not questions[0].item.needle:
            return questions
        return hide_needles(
            task, questions, self._max_len, lambda text: len(self._tokenizer.encode(text))
        )

    def measure(
        self, variant: str, model: Any, runner: RowRunner, sharding: Placement | None = None
    ) -> dict[str, float]:
        """Run all tasks; return `{variant}/<metric>/<task>`, also for each group of a task.

        `sharding`: the strategy that shards the weights, None if each rank holds the whole model;
        with one, all ranks run the same questions.
        """
        metrics: dict[str, float] = {}
        self.results[variant] = {}
        for name, task in self.tasks.items():
            questions = self.questions[name]
            content = [
                task.form.kind,
                self._max_len,
                [task.form.stop_texts, self._config.max_new_tokens],
                [asdict(question.item) for question in questions],
            ]

            def work(numbers: list[int], task: Task = task) -> Iterator[list[tuple[int, Any]]]:
                chosen = [self.questions[task.name][number] for number in numbers]
                if task.form.kind in ("multiple_choice", "likelihood", "perplexity"):
                    return self._run_likelihoods(task, chosen, model, sharding)
                return self._run_generation(task, chosen, model, sharding)

            results = runner.run(f"{variant}-{name}", content, len(questions), work)
            self.results[variant][name] = results
            for group, numbers in self._groups(task).items():
                of_group = aggregate(task.form.kind, [results[number] for number in numbers])
                metrics |= {
                    f"{variant}/{metric}/{group}": value for metric, value in of_group.items()
                }
        return metrics

    def prediction_lines(self) -> Iterator[dict[str, Any]]:
        for name, questions in self.questions.items():
            for number in range(len(questions)):
                yield self._line(name, number)

    def group_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the same lines with the name of a group as data set, once for each group."""
        for name, task in self.tasks.items():
            groups = self._groups(task)
            del groups[name]
            for group, numbers in groups.items():
                for number in numbers:
                    yield {**self._line(name, number), "data_set": group}

    def _line(self, name: str, number: int) -> dict[str, Any]:
        question = self.questions[name][number]
        results = {
            variant: by_task[name][number]
            for variant, by_task in self.results.items()
            if name in by_task
        }
        metrics: dict[str, dict[str, float]] = defaultdict(dict)
        for variant, result in results.items():
            for metric, value in result["metrics"].items():
                metrics[metric][variant] = value
        item = question.item
        # The number of tokens that the loss is averaged over is the same for every model.
        num_tokens = next((r["tokens"] for r in results.values() if "tokens" in r), None)
        return {
            "data_set": name,
            **({"group": item.group} if item.group else {}),
            "source": redact(str(question.origin)),
            "prompt": item.contexts[0],
            "reference": item.reference,
            **{variant: result["answer"] for variant, result in results.items()},
            "finished": {variant: result["finished"] for variant, result in results.items()},
            **({} if num_tokens is None else {"tokens": num_tokens}),
            "metrics": metrics,
        }

    def metric_names(self, variant: str) -> list[str]:
        return [
            f"{variant}/{metric}/{name}"
            for task in self.tasks.values()
            for name in self._groups(task)
            for metric in _METRICS_OF.get(task.form.kind, (task.form.kind,))
        ]

    def _groups(self, task: Task) -> dict[str, list[int]]:
        """Return the indices of the questions of a task and of each of its groups, by name."""
        questions = self.questions[task.name]
        groups: dict[str, list[int]] = {task.name: list(range(len(questions)))}
        categories = task.form.categories or {}
        for number, question in enumerate(questions):
            if group := question.item.group:
                for name in (categories.get(group), group):
                    if name is not None:
                        groups.setdefault(f"{task.name}/{name}", []).append(number)
        return groups

    def _run_likelihoods(
        self, task: Task, questions: Sequence[Question], model: Any, sharding: Placement | None
    ) -> Iterator[list[tuple[int, Any]]]:
        is_encoder_decoder = model.config.is_encoder_decoder
        groups = []
        for question in questions:
            if task.form.kind == "perplexity":
                ids = encode_after_first(self._tokenizer, question.item.continuations[0])
                own = rolling_requests(ids, first_token(self._tokenizer), self._max_len)
            else:
                own = [
                    encode_pair(self._tokenizer, *pair, is_encoder_decoder=is_encoder_decoder)
                    for pair in question.pairs
                ]
            groups.append(own)
        for batch in score_groups(
            model,
            groups,
            max_len=self._max_len,
            batch_tokens=self._config.batch_tokens,
            gathered=(lambda: sharding.gathered(model))
            if sharding is not None
            else contextlib.nullcontext,
            device=None if sharding is None else sharding.root_device,
        ):
            yield [
                (n, score_likelihoods(task, questions[n], likelihoods)) for n, likelihoods in batch
            ]

    def _run_generation(
        self, task: Task, questions: Sequence[Question], model: Any, sharding: Placement | None
    ) -> Iterator[list[tuple[int, Any]]]:
        max_new_tokens = min(
            task.form.max_new_tokens or self._config.max_new_tokens, self._max_len - _MIN_CONTEXT
        )
        max_prompt = self._max_len - max_new_tokens
        config = replace(self._config, max_new_tokens=max_new_tokens)
        prompts = []
        for question in questions:
            ids = encode_text(
                self._tokenizer,
                question.item.contexts[0],
                is_encoder_decoder=model.config.is_encoder_decoder,
            )
            prompts.append(Prompt(ids[-max_prompt:], question.item.reference, question.origin))
        stop_texts = task.form.stop_texts
        is_program = task.form.kind == "code" and not model.config.is_encoder_decoder
        for batch in answer_batches(
            *(model, self._tokenizer, prompts, self._stop_ids, config, sharding, stop_texts),
            continues_text=is_program,
        ):
            yield [
                (number, score_answer(task, questions[number], answer.text, answer.is_finished))
                for number, answer in batch
            ]


def score_likelihoods(
    task: Task, question: Question, likelihoods: Sequence[Likelihood]
) -> dict[str, Any]:
    """Return the result of a question from the likelihoods of its choices, or of a text."""
    kind, item = task.form.kind, question.item
    answer, num_bytes = None, 0
    if kind == "perplexity":
        metrics = {}
        logprob = math.fsum(likelihood.logprob for likelihood in likelihoods)
        num_tokens = sum(likelihood.num_tokens for likelihood in likelihoods)
        num_bytes = len(item.reference.encode())
    elif kind == "likelihood":
        ((logprob, num_tokens, is_greedy),) = likelihoods
        metrics = {"accuracy": float(is_greedy)}
        num_bytes = len(item.reference.encode())
    else:
        choices = range(len(likelihoods))
        lengths = [
            len(item.continuations[n if len(item.continuations) > 1 else 0]) for n in choices
        ]
        best = max(choices, key=lambda n: likelihoods[n].logprob)
        best_by_length = max(choices, key=lambda n: likelihoods[n].logprob / max(1, lengths[n]))
        answer = question.choices[best]
        metrics = {
            "accuracy": float(best == item.correct),
            "accuracy_norm": float(best_by_length == item.correct),
        }
        logprob, num_tokens, _ = likelihoods[item.correct]
    return {
        "answer": answer,
        "finished": True,
        "metrics": {**metrics, "loss": -logprob / max(1, num_tokens)},
        "logprob": logprob,
        "tokens": num_tokens,
        "bytes": num_bytes,
    }


def score_answer(task: Task, question: Question, text: str, is_finished: bool) -> dict[str, Any]:
    """Return the result of a question from a generated answer, cut at the first stop text."""
    form, item = task.form, question.item
    if (end := first_stop(text, form.stop_texts)) is not None:
        text, is_finished = text[:end], True
    if form.kind == "code":
        is_correct = program_passes(f"{item.contexts[0]}{text}\n{item.program}")
        metric = "passed"
    else:
        expected = form.extract(item.reference)
        is_correct = expected is not None and form.extract(text) == expected
        metric = form.kind
    return {"answer": text, "finished": is_finished, "metrics": {metric: float(is_correct)}}


def aggregate(kind: str, results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a task from the results of its questions.

    A loss is the mean over tokens, every other metric the mean over questions.
    """
    metrics = {
        metric: math.fsum(result["metrics"][metric] for result in results) / len(results)
        for metric in results[0]["metrics"]
        if metric != "loss"
    }
    if "logprob" not in results[0]:
        return metrics
    logprob = math.fsum(result["logprob"] for result in results)
    num_tokens = sum(result["tokens"] for result in results)
    metrics["loss"] = -logprob / max(1, num_tokens)
    if kind == "likelihood":  # per continuation instead of per token, as lm-evaluation-harness does
        metrics["perplexity"] = math.exp(min(700.0, -logprob / len(results)))
    if kind == "perplexity":
        metrics["perplexity"] = math.exp(min(700.0, metrics["loss"]))
        num_bytes = sum(result["bytes"] for result in results)
        metrics["bits_per_byte"] = -logprob / max(1, num_bytes) / math.log(2)
    return metrics


def program_passes(program: str, seconds: float = _PROGRAM_SECONDS) -> bool:
    """Run a generated program in a process with limits; return whether it ends without an error.

    The limits on time, memory, files and environment prevent accidents. They do not stop malicious
    code: the process runs with the user's permissions and has network access. The program must
    print a random word that is appended to it, so that one which exits early does not pass.
    """
    word = secrets.token_hex(8)
    program += f"\n__import__('os').write(1, b'{word}')\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                [sys.executable, "-I", "-S", "-"],
                input=program.encode("utf-8", "replace"),
                cwd=folder,
                env={},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                preexec_fn=_set_limits,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return process.returncode == 0 and process.stdout.endswith(word.encode())


def _set_limits() -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, _PROGRAM_SECONDS),
        (resource.RLIMIT_AS, _PROGRAM_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _PROGRAM_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def check_harness(config: EvaluationConfig) -> list[str]:
    """List the problems of the settings of harness tasks; task names are checked on loading."""
    if not config.harness:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        return [
            f"evaluation.harness=[{', '.join(config.harness)}]: lm-eval is not installed; type "
            f"{install_extra('harness')}"
        ]
    if config.harness_dir is None:
        return []
    folder = Path(config.harness_dir).expanduser()
    if not folder.is_dir():
        return [f"evaluation.harness_dir={config.harness_dir}: there is no such folder"]
    if not config.allow_code:  # !function in a YAML file, or an unsandboxed template
        return [
            f"evaluation.harness_dir={config.harness_dir}: tasks of lm-evaluation-harness can run "
            "code with your permissions; read them, then type evaluation.allow_code=true"
        ]
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    config: EvaluationConfig
    tokenizer: PreTrainedTokenizerBase
    stop_ids: set[int]
    max_len: int

    def load_tasks(self) -> Any:
        """Load the rows of all tasks once, and return the library's task manager.

        Raises UserError for an unknown task, OSError if the rows of a task cannot be read.
        """
        from lm_eval.tasks import TaskManager

        folder = self.config.harness_dir
        manager = TaskManager(
            include_path=None if folder is None else str(Path(folder).expanduser()),
            include_defaults=folder is None,
        )
        known = [str(name) for name in manager.all_tasks]
        available = f"available are {', '.join(known)}"
        if len(known) > _MAX_LISTED:
            available = f"lm-evaluation-harness has {len(known):,} (lm-eval ls tasks lists them)"
        problems = [
            f"evaluation.harness: unknown task {name}{nearest(name, known)}; {available}"
            for name in self.config.harness
            if name not in known
        ]
        if problems:
            raise UserError(problems)
        if folder is None and not is_offline_by_setting() and reach_hub()[1] is not None:
            from huggingface_hub import constants

            # Without a network its client would retry; cached tasks still run.
            constants.HF_HUB_OFFLINE = True
        for name in self.config.harness:
            _check_rows(manager, name)
        return manager

    def measure(
        self, variant: str, model: Any, runner: RowRunner
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run all tasks; return `{variant}/<metric>/<task>`, and the lines of predictions.jsonl."""
        import lm_eval

        language_model = _language_model(self, variant, model, runner)
        with contextlib.redirect_stdout(sys.stderr):
            output = lm_eval.simple_evaluate(
                model=language_model,
                tasks=list(self.config.harness),
                task_manager=self.load_tasks(),
                bootstrap_iters=0,
                confirm_run_unsafe_code=self.config.allow_code,
            )
        metrics = {
            f"{variant}/{_metric_name(key)}/{task}": float(value)
            for task, values in output["results"].items()
            for key, value in values.items()
            if isinstance(value, (int, float)) and "," in key and "_stderr" not in key
        }
        higher_is_better = output["higher_is_better"]
        lines = [
            _line(task, variant, sample, higher_is_better.get(task, {}))
            for task, samples in output["samples"].items()
            for sample in samples
        ]
        return metrics, lines


def _check_rows(manager: Any, name: str) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            manager.load([name])
    except OSError as error:
        raise OSError(
            f"evaluation.harness=[{name}]: its rows cannot be read ({redact(str(error))}); type "
            "evaluation.harness_dir=FOLDER with task files that name local rows, or evaluation=arc "
            "(gsm8k, mmlu, ...) evaluation.task_dir=FOLDER with the published file of the benchmark"
        ) from error


def _metric_name(key: str) -> str:
    """Return the name in metrics.json of the harness's `<metric>,<filter>`, such as `acc,none`."""
    metric, _, filter_name = key.partition(",")
    name = _METRIC_NAMES.get(metric, metric)
    return name if filter_name == "none" else f"{name}.{filter_name}"


def _line(
    task: str, variant: str, sample: dict[str, Any], higher_is_better: Mapping[str, bool]
) -> dict[str, Any]:
    """Return a line of predictions.jsonl, with the metrics for which higher is better.

    The library's perplexity of a row is left out, since it is a log-likelihood.
    """
    scores = {
        _metric_name(f"{name},{sample.get('filter', 'none')}"): {variant: float(sample[name])}
        for name in sample.get("metrics", [])
        if isinstance(sample.get(name), (bool, int, float))
        and higher_is_better.get(name, True)
        and name != "perplexity"
    }
    return {
        "data_set": task,
        "source": f"{task}:{sample['doc_id'] + 1}",
        "prompt": str(sample["arguments"][0][0]),
        "reference": str(sample["target"]),
        variant: str(sample["filtered_resps"][0]),
        "finished": {variant: True},
        "metrics": scores,
    }


def _language_model(harness: Harness, variant: str, model: Any, runner: RowRunner) -> Any:
    """Wrap a model in a subclass of the library's `LM`, which can only be defined in here."""
    from lm_eval.api.model import LM

    tokenizer, is_encoder_decoder = harness.tokenizer, model.config.is_encoder_decoder

    def key_of(kind: str, requests: Sequence[Any]) -> str:
        names = "-".join(dict.fromkeys(str(request.task_name) for request in requests))
        return f"{variant}-harness{kind}-{names[:80]}"

    class LanguageModel(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            groups = [
                [encode_pair(tokenizer, *request.args, is_encoder_decoder=is_encoder_decoder)]
                for request in requests
            ]
            found = _likelihoods(harness, model, runner, key_of("", requests), groups)
            return [(logprob, is_greedy) for logprob, is_greedy in found]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            texts, first = [request.args[0] for request in requests], first_token(tokenizer)
            groups = [
                rolling_requests(encode_after_first(tokenizer, text), first, harness.max_len)
                for text in texts
            ]
            found = _likelihoods(harness, model, runner, key_of("-texts", requests), groups)
            return [logprob for logprob, _ in found]

        def generate_until(self, requests: list[Any]) -> list[str]:
            pairs = [request.args for request in requests]
            return _answers(harness, model, runner, key_of("-answers", requests), pairs)

    return LanguageModel()


def _likelihoods(
    harness: Harness, model: Any, runner: RowRunner, key: str, groups: Sequence[list[Request]]
) -> list[list[Any]]:
    """Return [sum of log-probabilities, whether all are greedy] of each group of requests."""
    options = {"max_len": harness.max_len, "batch_tokens": harness.config.batch_tokens}

    def work(numbers: list[int]) -> Iterator[list[tuple[int, Any]]]:
        for batch in score_groups(model, [groups[number] for number in numbers], **options):
            yield [
                (n, [sum(one.logprob for one in found), all(one.is_greedy for one in found)])
                for n, found in batch
            ]

    return runner.run(key, groups, len(groups), work)


def _answers(
    harness: Harness,
    model: Any,
    runner: RowRunner,
    key: str,
    requests: Sequence[tuple[str, dict[str, Any]]],
) -> list[str]:
    """Answer (prompt, generation settings); requests with equal settings run together."""
    texts: dict[int, str] = {}
    for settings in {repr(settings): settings for _, settings in requests}.values():
        stops = settings.get("until") or []
        stops = list(filter(None, [stops] if isinstance(stops, str) else stops))
        longest = int(settings.get("max_gen_toks") or harness.config.max_new_tokens)
        max_new_tokens = min(longest, harness.max_len - _MIN_CONTEXT)
        max_prompt = harness.max_len - max_new_tokens
        numbers = [n for n, (_, own) in enumerate(requests) if own == settings]
        encode = partial(
            encode_text, harness.tokenizer, is_encoder_decoder=model.config.is_encoder_decoder
        )
        prompts = [
            Prompt(encode(requests[n][0])[-max_prompt:], "", Origin(key, n + 1)) for n in numbers
        ]
        config = replace(harness.config, max_new_tokens=max_new_tokens)
        work = partial(_answer_batches, harness, model, prompts, config, stops)
        content = [max_new_tokens, stops, [prompt.input_ids for prompt in prompts]]
        generated = runner.run(f"{key}-{len(texts)}", content, len(prompts), work)
        texts.update(zip(numbers, generated, strict=True))
    return [texts[number] for number in range(len(requests))]


def _answer_batches(
    harness: Harness,
    model: Any,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    stops: Sequence[str],
    numbers: list[int],
) -> Iterator[list[tuple[int, Any]]]:
    """Yield batches of (index into `numbers`, answer up to the first stop text)."""
    chosen = [prompts[number] for number in numbers]
    tokenizer, stop_ids = harness.tokenizer, harness.stop_ids
    for batch in answer_batches(model, tokenizer, chosen, stop_ids, config, None, stops):
        yield [(n, found.text[: first_stop(found.text, stops)]) for n, found in batch]
