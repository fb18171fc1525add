"""The one door to lm-evaluation-harness: its tasks, by name or from a folder, asked of our models.

The library makes prompts and metrics; likelihoods and answers are computed as those of our own
tasks, by all ranks, and kept. Nothing is downloaded where its task files name local data.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import EvaluationConfig, answer_batches
from app.evaluation.likelihood import Request, encode_pair, first_token, rolling_requests, score
from app.evaluation.row_runner import RowRunner
from app.model.hub import is_offline_by_setting, reach_hub
from app.process.errors import UserError, nearest
from data_modules import Origin, Prompt, redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NAMED = 30
"""tasks that a message names"""
NAMES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
"""metrics of the harness that have a name of ours"""


def check_harness(config: EvaluationConfig) -> list[str]:
    """List what is wrong with the settings of harness tasks; their names are checked later."""
    if not config.harness:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        return [
            f"evaluation.harness=[{', '.join(config.harness)}]: lm-eval is not installed; type "
            "pip install -e '.[harness]'"
        ]
    if config.harness_dir is None:
        return []
    folder = Path(config.harness_dir).expanduser()
    if not folder.is_dir():
        return [f"evaluation.harness_dir={config.harness_dir}: there is no such folder"]
    if not config.allow_code:  # by !function in a YAML, or in a template that is no sandbox's
        return [
            f"evaluation.harness_dir={config.harness_dir}: tasks of lm-evaluation-harness can run "
            "code as you; read them, then type evaluation.allow_code=true"
        ]
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """Tasks of lm-evaluation-harness that are to be asked."""

    config: EvaluationConfig
    tokenizer: PreTrainedTokenizerBase
    stop_ids: set[int]
    max_len: int

    def load_tasks(self) -> Any:
        """Return the library's tasks, after their rows were read once.

        UserError where a name is none of them, OSError where the rows of one cannot be read.
        """
        from lm_eval.tasks import TaskManager

        folder = self.config.harness_dir
        manager = TaskManager(
            include_path=None if folder is None else str(Path(folder).expanduser()),
            include_defaults=folder is None,
        )
        known = [str(name) for name in manager.all_tasks]
        problems = [
            f"evaluation.harness: unknown task {name}{nearest(name, known)}; {_list(known)}"
            for name in self.config.harness
            if name not in known
        ]
        if problems:
            raise UserError(problems)
        if folder is None:
            _read_cache_alone_without_network()
        for name in self.config.harness:
            _check_rows(manager, name)
        return manager

    def measure(
        self, variant: str, model: Any, runner: RowRunner
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Ask a model all tasks; return `{variant}/<metric>/<task>`, and a line a question."""
        import lm_eval

        language_model = _language_model(self, variant, model, runner)
        with contextlib.redirect_stdout(sys.stderr):
            found = lm_eval.simple_evaluate(
                model=language_model,
                tasks=list(self.config.harness),
                task_manager=self.load_tasks(),
                bootstrap_iters=0,
                confirm_run_unsafe_code=self.config.allow_code,
            )
        metrics = {
            f"{variant}/{_name_of(key)}/{task}": float(value)
            for task, values in found["results"].items()
            for key, value in values.items()
            if isinstance(value, (int, float)) and "," in key and "_stderr" not in key
        }
        higher = found["higher_is_better"]
        lines = [
            _line(task, variant, one, higher.get(task, {}))
            for task, some in found["samples"].items()
            for one in some
        ]
        return metrics, lines


def _list(known: Sequence[str]) -> str:
    """Return the names of tasks for a message: of a folder all, of the library's some."""
    if len(known) <= MAX_NAMED:
        return f"there are {', '.join(known)}"
    return f"lm-evaluation-harness has {len(known):,} (lm-eval ls tasks lists them)"


def _read_cache_alone_without_network() -> None:
    """Keep the hub's libraries from retrying without a network: tasks in its cache still run."""
    if is_offline_by_setting() or reach_hub()[1] is None:
        return
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def _check_rows(manager: Any, name: str) -> None:
    """Read the rows of a task; OSError says what to type where that fails."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            manager.load([name])
    except OSError as error:
        raise OSError(
            f"evaluation.harness=[{name}]: its rows cannot be read ({redact(str(error))}); type "
            "evaluation.harness_dir=FOLDER with task files that name rows of this machine, or "
            "evaluation=arc (gsm8k, mmlu, ...), which reads its published file: "
            "evaluation.task_dir=FOLDER"
        ) from error


def _name_of(key: str) -> str:
    """Return a metric's name of ours for that of the harness: `acc,none`."""
    metric, _, choice = key.partition(",")
    name = NAMES.get(metric, metric)
    return name if choice == "none" else f"{name}.{choice}"


def _line(
    task: str, variant: str, sample: dict[str, Any], is_better_higher: Mapping[str, bool]
) -> dict[str, Any]:
    """Return a line of predictions.jsonl, with what is better the higher it is.

    The library's perplexity of a row is a log-likelihood, and is left out.
    """
    scores = {
        _name_of(f"{name},{sample.get('filter', 'none')}"): {variant: float(sample[name])}
        for name in sample.get("metrics", [])
        if isinstance(sample.get(name), (bool, int, float))
        and is_better_higher.get(name, True)
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
    """Return a model as the harness wants it; the class needs the library."""
    from lm_eval.api.model import LM

    tokenizer, config, max_len = harness.tokenizer, harness.config, harness.max_len
    is_encoder_decoder = model.config.is_encoder_decoder

    def likelihoods(key: str, groups: Sequence[Sequence[Request]]) -> list[list[Any]]:
        work = _summing(harness, model, groups)
        return runner.run(key, [list(group) for group in groups], len(groups), work)

    def answers(key: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        found: dict[int, str] = {}
        for how in {repr(settings): settings for _, settings in asked}.values():
            stops = how.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            most = int(how.get("max_gen_toks") or config.max_new_tokens)
            numbers = [n for n, (_, settings) in enumerate(asked) if settings == how]
            prompts = [
                Prompt(tokenizer.encode(asked[n][0])[-(max_len - most) :], "", Origin(key, n + 1))
                for n in numbers
            ]
            work = _answering(harness, model, prompts, most, stops)
            content = [most, stops, [prompt.input_ids for prompt in prompts]]
            texts = runner.run(f"{key}-{len(found)}", content, len(prompts), work)
            found.update(zip(numbers, texts, strict=True))
        return [found[number] for number in range(len(asked))]

    class LanguageModel(LM):
        """Answers the library's requests."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            groups = [
                [encode_pair(tokenizer, *pair, is_encoder_decoder=is_encoder_decoder)]
                for pair in pairs
            ]
            found = likelihoods(f"{variant}-harness-{_tasks_of(requests)}", groups)
            return [(logprob, is_greedy) for logprob, is_greedy in found]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            first = first_token(tokenizer)
            groups = [
                rolling_requests(tokenizer.encode(request.args[0]), first, max_len)
                for request in requests
            ]
            found = likelihoods(f"{variant}-harness-texts-{_tasks_of(requests)}", groups)
            return [logprob for logprob, _ in found]

        def generate_until(self, requests: list[Any]) -> list[str]:
            key = f"{variant}-harness-answers-{_tasks_of(requests)}"
            return answers(key, [request.args for request in requests])

    return LanguageModel()


def _summing(
    harness: Harness, model: Any, groups: Sequence[Sequence[Request]]
) -> Callable[[list[int]], Iterator[list[tuple[int, Any]]]]:
    """Return what yields (group, [logprob, is_greedy]) of the requests of each group together."""

    def work(chosen: list[int]) -> Iterator[list[tuple[int, Any]]]:
        requests = [request for number in chosen for request in groups[number]]
        owner = [index for index, number in enumerate(chosen) for _ in groups[number]]
        left = [len(groups[number]) for number in chosen]
        sums: list[list[Any]] = [[0.0, True] for _ in chosen]
        of_batch = harness.config.batch_tokens
        for batch in score(model, requests, max_len=harness.max_len, batch_tokens=of_batch):
            finished = []
            for number, found in batch:
                index = owner[number]
                sums[index][0] += found.logprob
                sums[index][1] &= found.is_greedy
                left[index] -= 1
                if not left[index]:
                    finished.append((index, sums[index]))
            yield finished

    return work


def _tasks_of(requests: Sequence[Any]) -> str:
    return "-".join(dict.fromkeys(str(request.task_name) for request in requests))[:80]


def _answering(
    harness: Harness, model: Any, prompts: Sequence[Prompt], most: int, stops: Sequence[str]
) -> Callable[[list[int]], Iterator[list[tuple[int, Any]]]]:
    config = replace(harness.config, max_new_tokens=most)

    def work(chosen: list[int]) -> Iterator[list[tuple[int, Any]]]:
        asked = [prompts[number] for number in chosen]
        for batch in answer_batches(
            model, harness.tokenizer, asked, harness.stop_ids, config, None, stops
        ):
            yield [(number, _cut(answer.text, stops)) for number, answer in batch]

    return work


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
