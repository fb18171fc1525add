"""The answers of each model to the held-out prompts: scored, and written to a file.

Decides what a right answer is. `predictions.jsonl` has one line per prompt with the answers of base
and tuned side by side, and the row of the user's file that the prompt comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.evaluation.generation import Answer, EvaluationConfig, answer_prompts
from app.process.files import write_whole
from data_modules import redact

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from app.strategy.mixin import StrategyMixin
    from data_modules import Prompt

PREDICTIONS_FILE = "predictions.jsonl"


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
