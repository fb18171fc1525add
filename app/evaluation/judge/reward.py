"""A reward model as the judge: a number for each answer, and the best of several samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from app.evaluation.judge.grading import (
    VERDICTS_FILE,
    Answers,
    Judgement,
    JudgeRequest,
    Verdict,
    judge_requests,
)
from app.evaluation.judge.questions import Question, conversation
from app.evaluation.judge.settings import JudgeConfig
from common.files import write_atomically
from data_modules import Turn

Rate = Callable[[Sequence[Sequence[Turn]]], list[float]]
"""returns the rewards of conversations, each of their last answer"""
Samples = Mapping[str, Sequence[Mapping[str, Sequence[str]]]]
"""variant -> samples -> question id -> the answer to each turn"""
MEASURE = "reward"
"""name of the metrics of rewards"""


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
    judged.measure = MEASURE
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
            f"{variant}/{MEASURE}_of_first": fmean(scores[0] for scores in by_question.values()),
            f"{variant}/{MEASURE}_of_best": fmean(max(scores) for scores in by_question.values()),
        }
    write_atomically(folder / VERDICTS_FILE, "".join(lines))
    return judged
