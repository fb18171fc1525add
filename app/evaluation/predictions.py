"""What each model answered to the held-out prompts: measured, and kept to be read.

Decides what a right answer is. `predictions.jsonl` has a line a prompt, so that base and tuned
stand side by side and every score can be traced to the row of the user's file that it comes from.
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
    """Ask several models the same prompts, by data set, and keep their answers."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, Sequence[Prompt]],
        stop_ids: set[int],
        config: EvaluationConfig,
    ) -> None:
        self._tokenizer, self._stop_ids, self._config = tokenizer, stop_ids, config
        self._prompts = {name: list(asked) for name, asked in prompts.items() if asked}
        self._answers: dict[str, dict[str, list[Answer]]] = {}

    def ask(
        self, who: str, model: PreTrainedModel, spread: StrategyMixin | None = None
    ) -> dict[str, float]:
        """Answer every prompt; return `{who}/exact_match/<data set>`, the share answered right.

        `spread` is given where each rank holds a part of the weights: all answer the same together.
        """
        self._answers[who] = {
            name: answer_prompts(
                model, self._tokenizer, asked, self._stop_ids, self._config, spread
            )
            for name, asked in self._prompts.items()
        }
        return {
            f"{who}/exact_match/{name}": sum(map(is_exact_match, answers, self._prompts[name]))
            / len(answers)
            for name, answers in self._answers[who].items()
        }

    def write(self, folder: Path) -> None:
        """Write `predictions.jsonl`, a line a prompt; nothing where no model was asked."""
        if not self._answers:
            return
        lines = [
            json.dumps(self._line(name, number), ensure_ascii=False) + "\n"
            for name, asked in self._prompts.items()
            for number in range(len(asked))
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
    """Tell whether an answer ends, and equals the reference but for space around it."""
    return answer.is_finished and answer.text.strip() == prompt.answer.strip()
