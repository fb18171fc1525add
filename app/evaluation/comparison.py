"""Base vs tuned, data set by data set: how both are measured, and the closing table.

Decides what a right answer is. `predictions.jsonl` has one line per prompt with the answers of base
and tuned side by side, and the row of the user's file that the prompt comes from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import Answer, EvaluationConfig, answer_prompts
from app.evaluation.significance import Change, RowScores, compare_rows
from app.model.adapter import AdapterConfig, continued_from, saves_whole_model
from app.process.files import write_whole
from data_modules import redact

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.strategy.mixin import StrategyMixin
    from data_modules import FinetuneDataModule, Prompt


PREDICTIONS_FILE = "predictions.jsonl"

log = logging.getLogger(__name__)

WHO = ("base", "tuned")
MEASURES = {
    # name in metrics.json: heading, format
    "val/loss": ("loss", "{:.4f}"),
    "exact_match": ("exact match", "{:.1%}"),
}


class Predictions:
    """Answer the same prompts, by data set, with several models, and keep their answers."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, Sequence[Prompt]],
        stop_ids: set[int],
        config: EvaluationConfig,
    ) -> None:
        self._tokenizer, self._stop_ids, self._config = tokenizer, stop_ids, config
        self._prompts = {name: list(rows) for name, rows in prompts.items() if rows}
        self._answers: dict[str, dict[str, list[Answer]]] = {}

    def answer(
        self, who: str, model: PreTrainedModel, shards: StrategyMixin | None = None
    ) -> dict[str, float]:
        """Answer every prompt; return `{who}/exact_match/<data set>`, the share answered right.

        `shards`: the strategy where each rank holds a part of the weights; all answer together.
        """
        self._answers[who] = {
            name: answer_prompts(model, self._tokenizer, rows, self._stop_ids, self._config, shards)
            for name, rows in self._prompts.items()
        }
        return {
            f"{who}/exact_match/{name}": sum(map(is_exact_match, answers, self._prompts[name]))
            / len(answers)
            for name, answers in self._answers[who].items()
        }

    def scores(self, who: str) -> dict[str, RowScores]:
        """Return whether each answer of a model is an exact match, by data set."""
        return {
            name: RowScores(
                scores=list(map(float, map(is_exact_match, answers, self._prompts[name])))
            )
            for name, answers in self._answers.get(who, {}).items()
        }

    def write(self, folder: Path) -> None:
        """Write `predictions.jsonl`, one line per prompt; nothing where no model has answered."""
        if not self._answers:
            return
        lines = [
            json.dumps(self._line(name, number), ensure_ascii=False) + "\n"
            for name, rows in self._prompts.items()
            for number in range(len(rows))
        ]
        write_whole(folder / PREDICTIONS_FILE, "".join(lines))

    def _line(self, dataset: str, number: int) -> dict[str, str | bool]:
        prompt = self._prompts[dataset][number]
        line: dict[str, str | bool] = {
            "dataset": dataset,
            "source": redact(str(prompt.origin)),
            "prompt": self._tokenizer.decode(prompt.input_ids),
            "reference": prompt.answer,
        }
        for who, answers in self._answers.items():
            answer = answers[dataset][number]
            line |= {
                f"{who}/answer": answer.text,
                f"{who}/finished": answer.is_finished,
                f"{who}/exact_match": is_exact_match(answer, prompt),
            }
        return line


def is_exact_match(answer: Answer, prompt: Prompt) -> bool:
    """Tell whether an answer is finished and equals the reference up to surrounding whitespace."""
    return answer.is_finished and answer.text.strip() == prompt.answer.strip()


class Evaluator:
    """Measure models on the same held-out rows: loss per data set, and exact match if configured.

    `shards` and `sum_over_ranks` are given where each rank holds a part of the weights: then all
    ranks measure together, each its share of the validation rows.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        data: FinetuneDataModule,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: set[int],
        backend: str,
        *,
        shards: StrategyMixin | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.data, self.backend, self.stop_ids = data, backend, stop_ids
        self.shards, self.sum_over_ranks = shards, sum_over_ranks
        self.prompts = data.prompts(config.max_rows) if config.exact_match else {}
        self.predictions = Predictions(tokenizer, self.prompts, stop_ids, config)
        self.row_losses: dict[str, Tensor] = {}
        """of base and tuned: weighted losses and weights of every validation row [2, rows]"""

    def losses(self, who: str, model: Any) -> dict[str, float]:
        """Return the exact validation loss of every data set; nothing without validation rows."""
        from app.training.objective import DocumentSums, validate

        names, num_rows = self.data.dataset_names, len(self.data.val_examples)
        if not num_rows:
            return {}
        documents, is_packed = DocumentSums(), self.data.is_packed
        if self.shards is None or self.sum_over_ranks is None:
            rows = self.data.whole_val_dataloader()
            losses = validate(
                model, rows, self.backend, names, is_packed=is_packed, documents=documents
            )
            total = documents.take(self.data.val_order, num_rows)
        else:
            losses = validate(
                model,
                self.data.val_dataloader(),
                self.backend,
                names,
                self.shards.root_device,
                self.sum_over_ranks,
                is_packed=is_packed,
                documents=documents,
            )
            total = self.sum_over_ranks(documents.take(self.data.val_order, num_rows))
        self.row_losses[who] = total.cpu()
        return losses

    def answers(self, who: str, model: Any) -> dict[str, float]:
        """Return the exact match of every data set, named by `who`; nothing without prompts."""
        return self.predictions.answer(who, model, self.shards) if self.prompts else {}

    def measure(self, who: str, model: Any) -> dict[str, float]:
        """Return all figures of a model, named by `who`: base or tuned."""
        return named(who, self.losses(who, model)) | self.answers(who, model)

    def changes(
        self,
        trained: Collection[str] | None,
        others: Mapping[str, Mapping[str, Mapping[str, RowScores]]] | None = None,
    ) -> list[Change]:
        """Compare base and tuned row by row, where both were measured.

        `trained`: the data sets that the tuned model was trained on, None where nobody knows.
        `others`: what else was scored, base and tuned -> measure -> data set or task -> rows.
        """
        base, tuned = (
            {
                "val/loss": self._loss_scores(who),
                "exact_match": self.predictions.scores(who),
                **(others or {}).get(who, {}),
            }
            for who in WHO
        )
        return compare_rows(base, tuned, trained)

    def _loss_scores(self, who: str) -> dict[str, RowScores]:
        if who not in self.row_losses:
            return {}
        losses, weights = self.row_losses[who].numpy()
        scores = {}
        for number, name in enumerate(self.data.dataset_names):
            # A row without a trained token has no loss.
            of_name = (self.data.val_examples.datasets == number) & (weights > 0)
            scores[name] = RowScores(
                scores=losses[of_name] / weights[of_name], weights=weights[of_name]
            )
        return scores


def compare_trained(
    evaluator: Evaluator,
    model: Any,
    adapter: AdapterConfig,
    validations: Sequence[dict[str, float]],
    load_base: Callable[[], PreTrainedModel] | None,
    *,
    row_losses: Sequence[Tensor | None] = (None, None),
    is_as_trained: bool,
) -> dict[str, float]:
    """Compare a model that was just trained with its base, reusing what training has measured.

    `validations` are those of the training, the first before its first step; `row_losses` are the
    first and the last one's as `Evaluator.row_losses`, None where this start of the run has not
    measured it. `is_as_trained`: `model` is the one that was trained, not one that was loaded
    again. `load_base` is None for a model that was trained from scratch.
    """
    is_whole = saves_whole_model(adapter)
    metrics: dict[str, float] = {}
    if validations:
        evaluator.row_losses = {
            who: rows for who, rows in zip(WHO, row_losses, strict=True) if rows is not None
        }
        # Saving rounds a full model to its base's dtype: its last validation was before that.
        if is_as_trained and not is_whole:
            tuned = validations[-1]
        else:
            tuned = evaluator.losses("tuned", model)
        if is_whole or (is_as_trained and not continued_from(adapter)):
            base = validations[0]
        else:  # the run did not start as its base
            with adapter_switched_off(model):
                base = evaluator.losses("base", model)
        metrics |= named("base", base) | named("tuned", tuned)
    if not evaluator.prompts:
        return metrics
    metrics |= evaluator.answers("tuned", model)
    if not is_whole:
        with adapter_switched_off(model):
            metrics |= evaluator.answers("base", model)
    elif evaluator.shards is not None:
        log.info("evaluation: no exact match of the base: no memory for it beside a sharded model")
    elif load_base is not None:
        metrics |= evaluator.answers("base", load_base().to(model.device))
    return metrics


def named(who: str, metrics: dict[str, float]) -> dict[str, float]:
    """Name a model's figures `base/...` or `tuned/...`; the tuned one's losses keep theirs too."""
    own_names = {name: value for name, value in metrics.items() if name.startswith("val/")}
    return {f"{who}/{name}": value for name, value in metrics.items()} | (
        own_names if who == "tuned" else {}
    )


def comparison_table(metrics: dict[str, float], dataset_names: list[str]) -> Table:
    """Table of every measure that `metrics` holds for a data set; `-` where one is missing.

    Held-out files with names of their own come after `dataset_names`.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="base vs tuned", title_justify="left")
    table.add_column("data set")
    answered = [name for who in WHO for name in _names_after(f"{who}/exact_match/", metrics)]
    names = list(dict.fromkeys([*dataset_names, *answered]))
    shown = {
        measure: heading_and_format
        for measure, heading_and_format in MEASURES.items()
        if any(f"{who}/{measure}/{name}" in metrics for who in WHO for name in names)
    }
    for heading, _ in shown.values():
        table.add_column(f"{heading}: base", justify="right")
        table.add_column("tuned", justify="right")
    for name in names:
        cells = [
            "-" if value is None else form.format(value)
            for measure, (_, form) in shown.items()
            for value in (metrics.get(f"{who}/{measure}/{name}") for who in WHO)
        ]
        table.add_row(escape(name), *cells)
    return table


def _names_after(prefix: str, metrics: dict[str, float]) -> list[str]:
    return [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]


def print_comparison(metrics: dict[str, float], dataset_names: list[str]) -> None:
    """Print the table of `metrics`; nothing where it is empty."""
    from rich.console import Console

    print()
    if (table := comparison_table(metrics, dataset_names)).row_count:
        Console(highlight=False).print(table)


@contextmanager
def adapter_switched_off(model: Any) -> Iterator[Any]:
    """The base under an adapter: the same model while its adapter is disabled."""
    with model.disable_adapter():
        yield model
