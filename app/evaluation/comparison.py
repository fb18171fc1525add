"""Base vs tuned, data set by data set: how both are measured, and the closing table.

Decides what a right answer is. `predictions.jsonl` has one line per prompt with the answers of base
and tuned side by side, and the row of the user's file that the prompt comes from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import Answer, EvaluationConfig, answer_prompts
from app.model.adapter import AdapterConfig, continued_from, saves_whole_model
from app.process.files import write_whole
from app.process.progress import track
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

    def losses(self, model: Any) -> dict[str, float]:
        """Return the exact validation loss of every data set; nothing without validation rows."""
        from app.training.objective import validate

        names = self.data.dataset_names
        if not len(self.data.val_examples):
            return {}
        is_packed = self.data.is_packed
        if self.shards is None:
            rows = self.data.whole_val_dataloader()
            counted = track(rows, "validation loss", len(rows))
            return validate(model, counted, self.backend, names, is_packed=is_packed)
        share, device = self.data.val_dataloader(), self.shards.root_device
        return validate(
            model, share, self.backend, names, device, self.sum_over_ranks, is_packed=is_packed
        )

    def answers(self, who: str, model: Any) -> dict[str, float]:
        """Return the exact match of every data set, named by `who`; nothing without prompts."""
        return self.predictions.answer(who, model, self.shards) if self.prompts else {}

    def measure(self, who: str, model: Any) -> dict[str, float]:
        """Return all figures of a model, named by `who`: base or tuned."""
        return named(who, self.losses(model)) | self.answers(who, model)


def compare_trained(
    evaluator: Evaluator,
    model: Any,
    adapter: AdapterConfig,
    validations: Sequence[dict[str, float]],
    load_base: Callable[[], PreTrainedModel] | None,
    *,
    is_as_trained: bool,
) -> dict[str, float]:
    """Compare a model that was just trained with its base, reusing what training has measured.

    `validations` are those of the training, the first before its first step. `is_as_trained`:
    `model` is the one that was trained, not one that was loaded again. `load_base` is None for a
    model that was trained from scratch.
    """
    is_whole = saves_whole_model(adapter)
    metrics: dict[str, float] = {}
    if validations:
        # Saving rounds a full model to its base's dtype: its last validation was before that.
        tuned = validations[-1] if is_as_trained and not is_whole else evaluator.losses(model)
        if is_whole or (is_as_trained and not continued_from(adapter)):
            base = validations[0]
        else:  # the run did not start as its base
            with adapter_switched_off(model):
                base = evaluator.losses(model)
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
    """Print the table of `metrics`, or why there is none."""
    from rich.console import Console

    print()
    if not any(name.startswith(WHO) for name in metrics):
        print("base and tuned are not compared: no rows were held out (data.val_set_size)")
        return
    Console(highlight=False).print(comparison_table(metrics, dataset_names))


@contextmanager
def adapter_switched_off(model: Any) -> Iterator[Any]:
    """The base under an adapter: the same model while its adapter is disabled."""
    with model.disable_adapter():
        yield model
