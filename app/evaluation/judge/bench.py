"""Collect the answers of base and tuned model to multi-turn questions, and have them judged.

By an LLM at an endpoint, or by a reward model: a number for each answer, and the best of several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import EvaluationConfig, answer_prompts
from app.evaluation.judge.endpoint import Endpoint
from app.evaluation.judge.grading import (
    VERDICTS_FILE,
    Answers,
    Judgement,
    JudgeRequest,
    Verdict,
    judge_answers,
    judge_requests,
)
from app.evaluation.judge.questions import QUESTIONS_FILE, Question, conversation, read_questions
from app.evaluation.judge.settings import JudgeConfig, read_key
from app.evaluation.row_runner import RowRunner
from common.errors import Origin
from common.files import write_atomically
from data_modules import Prompt, Turn

if TYPE_CHECKING:
    from app.assembly.base import Base
    from data_modules import ChatTemplate

_ANSWERS_FILE = "judge_answers.jsonl"
Rate = Callable[[Sequence[Sequence[Turn]]], list[float]]
"""returns the rewards of conversations, each of their last answer"""
Samples = Mapping[str, Sequence[Mapping[str, Sequence[str]]]]
"""variant -> samples -> question id -> the answer to each turn"""
_MEASURE = "reward"
"""name of the metrics of rewards"""


class Bench:
    """Generates answers of several models to the same questions, and has them judged at the end."""

    def __init__(self, config: JudgeConfig, batch_size: int, seed: int = 0) -> None:
        """`seed`: of the sampled answers."""
        self.config, self._batch_size, self._seed = config, batch_size, seed
        self._key = None if config.reward_model else read_key(config)
        references = None if config.references is None else Path(config.references)
        self.questions = read_questions(
            Path(str(config.questions)), references, config.max_questions
        )
        self.answers: dict[str, dict[str, list[str]]] = {}
        self.samples: dict[str, list[dict[str, list[str]]]] = {}
        """variant -> further answers as in `answers`, sampled"""

    @property
    def name(self) -> str:
        """Name of the questions: that of their file, or of the folder of a question.jsonl."""
        path = Path(str(self.config.questions))
        return path.absolute().parent.name if path.name == QUESTIONS_FILE else path.stem

    def answer(
        self,
        variant: str,
        model: Any,
        base: Base,
        template: ChatTemplate,
        stop_ids: set[int],
        runner: RowRunner,
    ) -> None:
        """Generate the answer to each turn of each question; empty if the context is too short.

        `runner` saves the answers, in case the evaluation is killed before all are judged.
        """

        def work(temperature: float = 0.0) -> dict[str, list[str]]:
            return self._answers(model, base, template, stop_ids, temperature)

        content = [
            [[question.id, *question.turns] for question in self.questions],
            [self.config.max_new_tokens, sorted(stop_ids), base.spec.context_len, template.hash],
        ]
        self.answers[variant] = runner.run_once(f"{variant}-judge", content, work)
        if self.config.best_of > 1:
            sampled = [*content, self.config.best_of, self.config.temperature, self._seed]
            self.samples[variant] = runner.run_once(
                f"{variant}-judge-samples", sampled, partial(self._sample, work)
            )

    def _sample(self, work: Callable[[float], dict[str, list[str]]]) -> list[dict[str, list[str]]]:
        import torch

        torch.manual_seed(self._seed)
        return [work(self.config.temperature) for _ in range(self.config.best_of)]

    def _answers(
        self,
        model: Any,
        base: Base,
        template: ChatTemplate,
        stop_ids: set[int],
        temperature: float,
    ) -> dict[str, list[str]]:
        context_len = base.spec.context_len
        answers: dict[str, list[str]] = {question.id: [] for question in self.questions}
        longest = max(len(question.turns) for question in self.questions)
        for turn in range(longest):
            questions = [question for question in self.questions if turn < len(question.turns)]
            prompts = {
                one.id: template.prompt_ids(
                    [*conversation(one, answers[one.id]), Turn("user", one.turns[turn])]
                )
                for one in questions
            }
            max_new_tokens = self.config.max_new_tokens
            if context_len is not None and not template.is_encoder_decoder:
                # The remaining turns share the context that is left.
                fitting = [len(ids) for ids in prompts.values() if len(ids) < context_len]
                left = context_len - max(fitting, default=0)
                max_new_tokens = max(1, min(max_new_tokens, left // (longest - turn)))
                prompts = {
                    id: ids
                    for id, ids in prompts.items()
                    if len(ids) + max_new_tokens <= context_len
                }
            origin = Origin(str(self.config.questions), 0)
            rows = [Prompt(ids, "", origin) for ids in prompts.values()]
            config = EvaluationConfig(max_new_tokens=max_new_tokens, batch_size=self._batch_size)
            generated = answer_prompts(
                model, base.tokenizer, rows, stop_ids, config, temperature=temperature
            )
            texts = dict(zip(prompts, (answer.text for answer in generated), strict=True))
            for question in questions:
                answers[question.id].append(texts.get(question.id, ""))
        return answers

    def judge(self, folder: Path, cache: Path, rate: Rate | None = None) -> Judgement:
        """Write all answers to `folder`, and request a verdict on each, or rate it by `rate`."""
        lines = [
            {
                "question_id": question.id,
                "category": question.category,
                "turns": question.turns,
                "reference": question.reference,
                **{variant: answers[question.id] for variant, answers in self.answers.items()},
            }
            for question in self.questions
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomically(folder / _ANSWERS_FILE, text)
        if rate is not None:
            return judge_by_reward(
                self.questions, self.answers, self.samples, rate, self.config, folder
            )
        endpoint = Endpoint(self.config, self._key, cache)
        return judge_answers(self.questions, self.answers, endpoint, self.config, folder)


def judge_by_reward(
    questions: Sequence[Question],
    answers: Answers,
    samples: Samples,
    rate: Rate,
    config: JudgeConfig,
    folder: Path,
) -> Judgement:
    """Rate all answers and samples; write the verdicts to `folder`/verdicts.jsonl.

    Of two answers that are compared, the one with the higher reward wins. The reward of a sample is
    the mean over its turns.
    """
    requests = list(judge_requests(questions, answers, config))
    rated = {
        (variant, number, question.id, turn): conversation(question, texts[question.id][: turn + 1])
        for variant, own in answers.items()
        for number, texts in enumerate([own, *samples.get(variant, ())])
        for question in questions
        for turn in range(len(question.turns))
    }
    rewards = dict(zip(rated, rate(list(rated.values())), strict=True))

    def score(request: JudgeRequest) -> float:
        own = {
            variant: rewards[variant, 0, request.question.id, request.turn] for variant in answers
        }
        if not request.is_pairwise:
            return own[request.variant]
        return (1 + (own["tuned"] > own["base"]) - (own["tuned"] < own["base"])) / 2

    judged = Judgement([Verdict(each, score(each), "") for each in requests], len(requests))
    judged.measure = _MEASURE
    lines = [verdict.line() for verdict in judged.verdicts]
    for variant, own in samples.items():
        by_question = {
            question.id: [
                fmean(
                    rewards[variant, number, question.id, turn]
                    for turn in range(len(question.turns))
                )
                for number in range(1, len(own) + 1)
            ]
            for question in questions
        }
        lines += [
            json.dumps(
                {"question_id": id, "grading": "samples", "model": variant, "scores": scores}
            )
            + "\n"
            for id, scores in by_question.items()
        ]
        judged.further |= {
            f"{variant}/{_MEASURE}_of_first": fmean(scores[0] for scores in by_question.values()),
            f"{variant}/{_MEASURE}_of_best": fmean(max(scores) for scores in by_question.values()),
        }
    write_atomically(folder / VERDICTS_FILE, "".join(lines))
    return judged
