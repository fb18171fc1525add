"""Evaluate base and tuned model on the same rows: losses, metrics of answers, and tasks.

Scores are kept by row, so that both models can be compared row by row. `predictions.jsonl` has a
line for each prompt: where the row comes from, the answers of both models, and their metrics.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation import significance
from app.evaluation.generation import EvaluationConfig, answer_batches
from app.evaluation.metrics import (
    CONFUSION_FILE,
    MAX_SHOWN_CLASSES,
    Answer,
    Metric,
    build_metrics,
    class_metrics,
    confusion,
    confusion_cells,
)
from app.evaluation.row_runner import RowRunner
from app.evaluation.tasks.measure import Harness, TaskRunner
from app.evaluation.tasks.questions import Task
from app.model.adapter import AdapterConfig, continued_from, saves_whole_model
from app.process.logs import show, text_table
from common.files import write_atomically
from common.redaction import redact
from common.text import printable, reason_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.assembly.base import Base
    from app.strategy.mixin import Placement
    from app.training.objective.objective import Objective
    from data_modules import FinetuneDataModule, Prompt

PREDICTIONS_FILE = "predictions.jsonl"
_SHOWN_SECONDS = 20.0
"""time for the answers of a model that are only shown"""
_MAX_SHOWN_TOKENS = 2048
"""longest prompt that is answered only to be shown"""
_MAX_SAMPLE_LENGTH = 160
"""characters of a sample text that are shown in the terminal"""
log = logging.getLogger(__name__)


class Predictions:
    """Answers of several models to the prompts of each data set, and their scores."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, Sequence[Prompt]],
        stop_ids: set[int],
        config: EvaluationConfig,
        seconds: float = math.inf,
        context_len: int | None = None,
    ) -> None:
        """`seconds`: after this time, answers of a data set are cut off."""
        self._seconds, self._context_len = seconds, context_len
        self._tokenizer, self._stop_ids, self._config = tokenizer, stop_ids, config
        self._prompts = {name: list(rows) for name, rows in prompts.items() if rows}
        self._metrics = build_metrics(config) if self._prompts else []
        self.is_measured = bool(self._metrics)
        self._answers: dict[str, dict[str, list[Answer]]] = {}
        self._scores: dict[tuple[str, str, str], list[float]] = {}
        """(variant, metric, data set) -> score of each row"""

    def answer(
        self,
        variant: str,
        model: PreTrainedModel,
        sharding: Placement | None = None,
        runner: RowRunner | None = None,
    ) -> dict[str, float]:
        """Answer every prompt; return `{variant}/<metric>/<data set>` for every metric.

        `sharding`: the strategy that shards the weights, None if each rank holds the whole model.
        """

        def work(numbers: list[int], prompts: list[Prompt]) -> Iterator[list[tuple[int, Any]]]:
            chosen = [prompts[number] for number in numbers]
            yield from answer_batches(
                *(model, self._tokenizer, chosen, self._stop_ids, self._config, sharding),
                seconds=self._seconds,
                context_len=self._context_len,
            )

        found: dict[str, list[Answer]] = {}
        for name, prompts in self._prompts.items():
            content = [self._config.max_new_tokens, [prompt.input_ids for prompt in prompts]]
            key = f"{variant}-answers-{name}"
            answers = (runner or RowRunner()).run(
                key, content, len(prompts), partial(work, prompts=prompts)
            )
            found[name] = [Answer(*answer) for answer in answers]
        self._answers[variant] = found
        for name, answers in found.items():
            if num_empty := sum(not answer.text.strip() for answer in answers):
                log.warning(
                    "%s: %d of %d answers of %s are empty", name, num_empty, len(answers), variant
                )
        return {
            f"{variant}/{metric.name}/{name}": self._measure(variant, metric, name)
            for metric in self._metrics
            for name in self._prompts
        }

    def metric_names(self, variant: str) -> list[str]:
        return [
            f"{variant}/{metric.name}/{name}" for metric in self._metrics for name in self._prompts
        ]

    def _measure(self, variant: str, metric: Metric, name: str) -> float:
        rows = list(zip(self._answers[variant][name], self._prompts[name], strict=True))
        self._scores[variant, metric.name, name] = [
            metric.score(answer, prompt.answer, str(prompt.origin)) for answer, prompt in rows
        ]
        return metric.total(
            self._scores[variant, metric.name, name],
            [answer.text for answer, _ in rows],
            [prompt.answer for _, prompt in rows],
        )

    def prediction_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of predictions.jsonl, none if no model has answered."""
        if self._answers:
            for name, rows in self._prompts.items():
                yield from (self._line(name, number) for number in range(len(rows)))

    def _line(self, dataset: str, number: int) -> dict[str, Any]:
        prompt = self._prompts[dataset][number]
        answers = {
            variant: by_dataset[dataset][number] for variant, by_dataset in self._answers.items()
        }
        return {
            "data_set": dataset,
            "source": redact(str(prompt.origin)),
            "prompt": self._tokenizer.decode(prompt.input_ids),
            "reference": prompt.answer,
            **{variant: answer.text for variant, answer in answers.items()},
            "finished": {variant: answer.is_finished for variant, answer in answers.items()},
            "metrics": {
                metric.name: {
                    variant: self._scores[variant, metric.name, dataset][number]
                    for variant in answers
                }
                for metric in self._metrics
            },
        }


@dataclass(frozen=True, slots=True)
class ShownBatches:
    """Batches whose iteration is shown as an estimated number of rows."""

    batches: Any
    key: str
    num_rows: int
    show: Callable[[str, int, int], None]
    sharding: Placement | None = None
    """the strategy that gives each rank its part of a batch, None for whole batches"""

    def __iter__(self) -> Iterator[Any]:
        for done, batch in enumerate(self.batches):
            self.show(self.key, self.num_rows * done // len(self.batches), self.num_rows)
            yield batch if self.sharding is None else self.sharding.shard_batch(batch)
        self.show(self.key, self.num_rows, self.num_rows)


class Evaluator:
    """Evaluates models on the same held-out rows: loss per data set, metrics of answers, tasks.

    `sharding`: the strategy that shards the weights, None if each rank holds the whole model.
    `sum_over_ranks` is needed if several ranks evaluate together, each a share of the rows.
    `num_shown`: number of held-out prompts that are answered if `config` measures no answers.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        base: Base,
        data: FinetuneDataModule,
        tasks: Sequence[Task],
        objective: Objective,
        *,
        runner: RowRunner | None = None,
        sharding: Placement | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        num_shown: int = 0,
    ) -> None:
        stop_ids = base.stop_ids | data.stop_token_ids
        tokenizer, max_len = base.tokenizer, base.spec.context_len or data.sequence_len
        self.data, self.backend, self.stop_ids = data, base.backend, stop_ids
        self.objective = objective
        self.sharding, self.sum_over_ranks = sharding, sum_over_ranks
        is_measured = config.answers_prompts
        # Sharded weights answer slowly, and ranks would not agree on a limit of time.
        num_shown = num_shown if sharding is None else 0
        prompts = data.prompts(config.max_rows) if is_measured else _choose_prompts(data, num_shown)
        self.prompts = {name: rows for name, rows in prompts.items() if rows}
        seconds = math.inf if is_measured else _SHOWN_SECONDS / max(1, len(self.prompts))
        # An encoder's positions are not those of its decoder.
        is_pair = base.spec.decoder_start_token_id is not None
        context_len = None if is_pair else base.spec.context_len
        self.predictions = Predictions(
            tokenizer, self.prompts, stop_ids, config, seconds, context_len
        )
        self.row_losses: dict[str, Tensor] = {}
        """variant -> weighted loss and weight of every validation row [2, rows]"""
        self.row_outputs: dict[str, Tensor] = {}
        """variant -> logits of a classifier of every validation row [classes, rows]"""
        self.runner = runner or RowRunner()
        self.tasks = TaskRunner(config, tasks, tokenizer, stop_ids, max_len)
        self.harness = None
        self.harness_lines: dict[tuple[str, str], dict[str, Any]] = {}
        """(task, source of the row) -> line of predictions.jsonl"""
        if config.harness:
            self.harness = Harness(
                config=config, tokenizer=tokenizer, stop_ids=stop_ids, max_len=max_len
            )
            self.harness.load_tasks()  # reports unknown tasks before a model is loaded

    @property
    def measures_answers(self) -> bool:
        """Whether anything besides the validation loss is measured."""
        return bool(self.prompts or self.tasks.tasks or self.harness)

    @property
    def only_shows_answers(self) -> bool:
        """Whether answers are for a reader, and nothing is measured by them."""
        return not (self.predictions.is_measured or self.tasks.tasks or self.harness)

    def measure_references(self, base: Any) -> None:
        """Give each validation pair the log-probabilities of `base`.

        Those that a run stored are not read: they have the rounding of training's kernels.
        """
        from app.training.objective.distill import measure_references
        from app.training.objective.pairs import base_log_probs

        examples, ranks = self.data.val_examples, self.runner.num_ranks
        if not len(examples):
            return
        loader, order = self.data.ordered_loader(examples, ranks, self.runner.rank)
        examples.references = measure_references(
            loader,
            order,
            [1] * len(examples),
            lambda batch: base_log_probs(base, batch.to(base.device), self.backend),
            self.sum_over_ranks if ranks > 1 else None,
        )

    def measure_losses(self, variant: str, model: Any) -> dict[str, float]:
        """Return the exact validation loss of every data set, empty without validation rows."""
        from app.training.objective.objective import RowSums, validate

        names, num_rows = self.data.dataset_names, len(self.data.val_examples)
        if not num_rows:
            return {}
        sums, is_packed = RowSums(keeps_outputs=True), self.data.is_packed
        sum_over_ranks: Callable[[Tensor], Tensor] | None = self.sum_over_ranks
        if self.sharding is None:
            batches: Any = self.data.whole_val_dataloader(self.runner.num_ranks, self.runner.rank)
            device, sum_over_ranks = None, sum_over_ranks if self.runner.num_ranks > 1 else None
        else:
            batches, device = self.data.val_dataloader(), self.sharding.root_device
        key = f"{variant}-losses"
        batches = ShownBatches(batches, key, num_rows, self.runner.show, self.sharding)
        losses = validate(
            *(self.objective, model, batches, self.backend, names, device, sum_over_ranks),
            is_packed=is_packed,
            rows=sums,
        )
        rows = sums.take(self.data.val_order, num_rows)
        self._keep_rows(variant, (rows if sum_over_ranks is None else sum_over_ranks(rows)).cpu())
        return losses

    def _keep_rows(self, variant: str, rows: Tensor) -> None:
        self.row_losses[variant] = rows[:2]
        if len(rows) > 2:
            self.row_outputs[variant] = rows[2:]

    def _class_metrics(self, variant: str) -> dict[str, float]:
        if variant not in self.row_outputs:
            return {}
        examples, objective = self.data.val_examples, self.objective

        def measure(outputs: Any, labels: Any) -> dict[str, float]:
            several = objective.is_multi_label
            return class_metrics(outputs, labels, objective.classes, is_multi_label=several)

        labels, outputs = examples.row_labels.astype(int), self.row_outputs[variant].numpy()
        found = measure(outputs, labels)
        metrics = {f"val/{name}": value for name, value in found.items()}
        for number, dataset in enumerate(self.data.dataset_names):
            if (own := examples.datasets == number).any():
                found = measure(outputs[:, own], labels[own])
                metrics |= {f"val/{name}/{dataset}": value for name, value in found.items()}
        return metrics

    def prefixed(self, variant: str, losses: dict[str, float]) -> dict[str, float]:
        """Return losses as metrics of a variant, with perplexities and intervals of accuracies."""
        losses = losses | self._accuracy_intervals(variant, losses)
        return _prefix_metrics(variant, losses, has_perplexity=self.objective.is_likelihood)

    def _accuracy_intervals(self, variant: str, losses: dict[str, float]) -> dict[str, float]:
        if variant not in self.row_losses or "val/accuracy" not in losses:
            return {}
        weights, datasets = self.row_losses[variant][1].numpy(), self.data.val_examples.datasets
        of = {f"/{name}": datasets == n for n, name in enumerate(self.data.dataset_names)}
        intervals: dict[str, float] = {}
        for name, own in ({"": datasets >= 0} | of).items():
            if (share := losses.get(f"val/accuracy{name}")) is not None:
                low, high = significance.wilson_interval(share, weights[own])
                intervals |= {f"val/accuracy_low{name}": low, f"val/accuracy_high{name}": high}
        return intervals

    def measure_answers(self, variant: str, model: Any) -> dict[str, float]:
        """Return the metrics of answers and tasks, prefixed with `variant`."""
        metrics = self.tasks.measure(variant, model, self.runner, self.sharding)
        if self.prompts:
            metrics = self.predictions.answer(variant, model, self.sharding, self.runner) | metrics
        if self.harness is not None:
            of_harness, lines = self.harness.measure(variant, model, self.runner)
            metrics |= of_harness
            for line in lines:
                key = (line["data_set"], line["source"])
                self.harness_lines[key] = _merge_lines(self.harness_lines.get(key), line)
        return metrics

    def metric_names(self, variant: str) -> list[str]:
        return [*self.predictions.metric_names(variant), *self.tasks.metric_names(variant)]

    def prediction_lines(self) -> Iterator[dict[str, Any]]:
        yield from self.predictions.prediction_lines()
        yield from self.tasks.prediction_lines()
        yield from self.harness_lines.values()

    def measure(self, variant: str, model: Any) -> dict[str, float]:
        """Return all metrics of a model, prefixed with `variant`: base or tuned."""
        import torch

        def work() -> list[Any]:
            losses = self.measure_losses(variant, model)
            kept = [self.row_losses[variant], self.row_outputs.get(variant)] if losses else []
            return [losses, [row for part in kept if part is not None for row in part.tolist()]]

        examples = self.data.val_examples
        columns = (examples.digests, examples.label_weights, examples.datasets)
        digests = [hashlib.sha256(column.tobytes()).hexdigest() for column in columns]
        content = [self.data.dataset_names, self.data.is_packed, digests]
        losses, rows = self.runner.run_once(f"{variant}-losses", content, work)
        if losses:
            self._keep_rows(variant, torch.tensor(rows, dtype=torch.double))
        losses = losses | self._class_metrics(variant)
        return self.prefixed(variant, losses) | self.measure_answers(variant, model)

    def confusion(self) -> Any:
        """Return the rows of each class by the class that the last measured model took them for.

        int64 [true, guessed], None unless a text has one class.
        """
        if not self.row_outputs or self.objective.is_multi_label:
            return None
        labels = self.data.val_examples.row_labels.astype(int)
        return confusion(list(self.row_outputs.values())[-1].numpy(), labels)

    def changes(
        self,
        trained: Collection[str] | None,
        others: Mapping[str, Mapping[str, Mapping[str, significance.RowScores]]] | None = None,
    ) -> list[significance.Change]:
        """Compare base and tuned row by row, on everything that both were measured on.

        `trained`: the data sets that the tuned model was trained on, None if unknown.
        `others`: further scores, variant -> measure -> data set or task -> scores of its rows.
        """
        lines = list(self.prediction_lines())
        base, tuned = (
            {
                "val/loss": self._loss_scores(variant),
                **significance.scores_in_lines(lines, variant),
                **(others or {}).get(variant, {}),
            }
            for variant in significance.VARIANTS
        )
        return significance.compare_rows(base, tuned, trained)

    def group_changes(self) -> list[significance.Change]:
        """Compare base and tuned on each group of a task, such as MMLU's subjects and categories.

        The intervals are simultaneous among the groups, independently of those of `changes`.
        """
        lines = list(self.tasks.group_lines())
        base, tuned = (
            significance.scores_in_lines(lines, variant) for variant in significance.VARIANTS
        )
        return significance.compare_rows(base, tuned)

    def _loss_scores(self, variant: str) -> dict[str, significance.RowScores]:
        if variant not in self.row_losses:
            return {}
        losses, weights = self.row_losses[variant].numpy()
        scores = {}
        for number, name in enumerate(self.data.dataset_names):
            # A row without a token to train on has no loss.
            rows = (self.data.val_examples.datasets == number) & (weights > 0)
            scores[name] = significance.RowScores(
                scores=losses[rows] / weights[rows], weights=weights[rows]
            )
        return scores

    def write_predictions(self, folder: Path, name: str = PREDICTIONS_FILE) -> None:
        """Write the lines of predictions.jsonl, unless no prompt was answered."""
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in self.prediction_lines()]
        if lines:
            write_atomically(folder / name, "".join(lines))


def _choose_prompts(data: FinetuneDataModule, count: int) -> dict[str, list[Prompt]]:
    """Return about `count` short held-out prompts, of each data set in turn; maybe none."""
    found: dict[str, list[Prompt]] = {}
    if count:
        with _without_failing():
            prompts = data.prompts(math.ceil(count / len(data.dataset_names)))
            for name in list(prompts)[:count]:
                found[name] = [p for p in prompts[name] if len(p.input_ids) <= _MAX_SHOWN_TOKENS]
    return found


@contextmanager
def _without_failing() -> Iterator[None]:
    """Report that prompts could not be answered, if they are only shown: a run does not need it."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001  whatever it is, the run itself is complete
        log.warning("answers are not shown: %s", printable(reason_of(problem)))


def _merge_lines(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    if first is None:
        return second
    names = {*first["metrics"], *second["metrics"]}
    return {
        **first,
        **second,
        "finished": first["finished"] | second["finished"],
        "metrics": {
            name: first["metrics"].get(name, {}) | second["metrics"].get(name, {}) for name in names
        },
    }


def _prefix_metrics(
    variant: str, metrics: dict[str, float], *, has_perplexity: bool = True
) -> dict[str, float]:
    """Prefix metric names with `base/` or `tuned/`, and add the perplexity of each loss.

    The losses of the tuned model are also kept under their own names.
    """
    prefixed = {f"{variant}/{name}": value for name, value in metrics.items()}
    for name, loss in metrics.items():
        if has_perplexity and name.startswith("val/loss"):
            perplexity = math.exp(min(loss, 700.0))  # larger numbers overflow
            prefixed[f"{variant}/{name.replace('loss', 'perplexity', 1)}"] = perplexity
    if variant == "tuned":
        prefixed |= {name: value for name, value in metrics.items() if name.startswith("val/")}
    return prefixed


def compare_trained(
    evaluator: Evaluator,
    model: Any,
    adapter: AdapterConfig,
    validations: Sequence[dict[str, float]],
    load_base: Callable[[], PreTrainedModel] | None,
    *,
    base_rows: Tensor | None = None,
    tuned: dict[str, float] | None = None,
    is_as_trained: bool,
) -> dict[str, float]:
    """Compare a model that was just trained with its base, reusing the validations of the run.

    `validations`: validation losses of the run, the first from before its first step.
    `base_rows`: the row losses of the first validation, as in `Evaluator.row_losses`; None if this
    process did not measure them, because the run was resumed. `tuned`: the losses of `model`, None
    to measure them. `is_as_trained`: `model` is the trained object itself, not one reloaded from
    its saved weights. `load_base`: None for a model that was trained from scratch.
    """
    is_whole = saves_whole_model(adapter)
    metrics: dict[str, float] = {}
    if validations:
        if base_rows is not None and base_rows.shape[1] == len(evaluator.data.val_examples):
            evaluator.row_losses["base"] = base_rows
        if tuned is None:
            tuned = evaluator.measure_losses("tuned", model)
        if is_whole or (is_as_trained and not continued_from(adapter)):
            base = validations[0]
        else:  # the first validation did not measure the base of `model`
            with model.disable_adapter():
                base = evaluator.measure_losses("base", model)
        metrics |= evaluator.prefixed("base", base) | evaluator.prefixed("tuned", tuned)
    if not evaluator.measures_answers:
        return metrics
    with _without_failing() if evaluator.only_shows_answers else nullcontext():
        metrics |= evaluator.measure_answers("tuned", model)
        if not is_whole:
            with model.disable_adapter():
                metrics |= evaluator.measure_answers("base", model)
        elif evaluator.sharding is not None:
            log.info(
                "evaluation: answers of the base are not measured: it would not fit into memory "
                "next to the sharded model"
            )
        elif load_base is not None:
            metrics |= evaluator.measure_answers("base", load_base().to(model.device))
    return metrics


def report_confusion(evaluator: Evaluator, folder: Path) -> None:
    """Write which classes a classifier confuses to a file; print it unless there are many."""
    if (counts := evaluator.confusion()) is None:
        return
    cells = confusion_cells(counts, evaluator.objective.classes)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(cells)
    write_atomically(folder / CONFUSION_FILE, text.getvalue())
    if len(cells[0]) <= MAX_SHOWN_CLASSES + 1:
        print()
        show(text_table(cells, "confusion: class by guess"))


def print_samples(evaluator: Evaluator, count: int = 3) -> None:
    """Print `count` lines of predictions.jsonl, shortened, from data sets and tasks in turn."""
    by_dataset: dict[str, list[dict[str, Any]]] = {}
    for line in evaluator.prediction_lines():
        if len(lines := by_dataset.setdefault(line["data_set"], [])) < count:
            lines.append(line)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_dataset.values()))
    for line in itertools.islice(filter(None, in_turn), count):
        shown = [f"\n{printable(line['data_set'])} ({printable(line['source'])})"]
        for name in ("prompt", "reference", *significance.VARIANTS):
            if line.get(name) is not None:
                text = " ".join(str(line[name]).split())
                if len(text) > _MAX_SAMPLE_LENGTH:
                    text = f"...{text[3 - _MAX_SAMPLE_LENGTH :]}"
                is_cut = not line.get("finished", {}).get(name, True)
                shown.append(f"  {name}: {printable(text)}{' [cut off]' * is_cut}")
        show("\n".join(shown))
