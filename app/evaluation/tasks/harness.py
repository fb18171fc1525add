"""Run tasks of lm-evaluation-harness, by name or from a folder of task files.

The library builds prompts and computes metrics; likelihoods and answers are computed here as for
other tasks, on all ranks, and saved. Nothing is downloaded if the task files name local data.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import EvaluationConfig, answer_batches, first_stop
from app.evaluation.likelihood import (
    Request,
    encode_pair,
    first_token,
    rolling_requests,
    score_groups,
)
from app.evaluation.row_runner import RowRunner
from app.model.hub import is_offline_by_setting, reach_hub
from common.errors import Origin, UserError, nearest
from common.installation import install_extra
from common.redaction import redact
from data_modules import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_LISTED = 30
"""largest number of tasks that a message lists by name"""
_METRIC_NAMES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
"""metric of the harness -> its name in metrics.json, if that differs"""


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
    """Read the rows of a task; raise OSError with what to type if that fails."""
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

    tokenizer, max_len = harness.tokenizer, harness.max_len
    is_encoder_decoder = model.config.is_encoder_decoder

    class LanguageModel(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            groups = [
                [encode_pair(tokenizer, *pair, is_encoder_decoder=is_encoder_decoder)]
                for pair in pairs
            ]
            key = f"{variant}-harness-{_task_names(requests)}"
            results = _likelihoods(harness, model, runner, key, groups)
            return [(logprob, is_greedy) for logprob, is_greedy in results]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            first = first_token(tokenizer)
            groups = [
                rolling_requests(tokenizer.encode(request.args[0]), first, max_len)
                for request in requests
            ]
            key = f"{variant}-harness-texts-{_task_names(requests)}"
            return [logprob for logprob, _ in _likelihoods(harness, model, runner, key, groups)]

        def generate_until(self, requests: list[Any]) -> list[str]:
            key = f"{variant}-harness-answers-{_task_names(requests)}"
            return _answers(harness, model, runner, key, [request.args for request in requests])

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
        max_new_tokens = int(settings.get("max_gen_toks") or harness.config.max_new_tokens)
        max_prompt = harness.max_len - max_new_tokens
        numbers = [n for n, (_, own) in enumerate(requests) if own == settings]
        prompts = [
            Prompt(harness.tokenizer.encode(requests[n][0])[-max_prompt:], "", Origin(key, n + 1))
            for n in numbers
        ]
        config = replace(harness.config, max_new_tokens=max_new_tokens)
        work = partial(_generate, harness, model, prompts, config, stops)
        content = [max_new_tokens, stops, [prompt.input_ids for prompt in prompts]]
        generated = runner.run(f"{key}-{len(texts)}", content, len(prompts), work)
        texts.update(zip(numbers, generated, strict=True))
    return [texts[number] for number in range(len(requests))]


def _generate(
    harness: Harness,
    model: Any,
    prompts: Sequence[Prompt],
    config: EvaluationConfig,
    stops: Sequence[str],
    numbers: list[int],
) -> Iterator[list[tuple[int, Any]]]:
    """Yield batches of (index into `numbers`, answer up to the first stop text)."""
    chosen = [prompts[number] for number in numbers]
    for batch in answer_batches(
        model, harness.tokenizer, chosen, harness.stop_ids, config, None, stops
    ):
        yield [(n, found.text[: first_stop(found.text, stops)]) for n, found in batch]


def _task_names(requests: Sequence[Any]) -> str:
    return "-".join(dict.fromkeys(str(request.task_name) for request in requests))[:80]
