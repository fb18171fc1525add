"""Have base and tuned model answer multi-turn questions, and their answers judged and averaged.

The judge is an LLM at an endpoint, or a reward model: a number for each answer, and the best of
several. Every verdict is saved. Single: each answer is graded from 1 to 10. Pairwise: base and
tuned are compared twice, with their order swapped; a model wins if it is preferred both times, and
a preference that changes with the order counts as a tie.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from app.evaluation.generation import EvaluationConfig, answer_prompts
from app.evaluation.judge.endpoint import Endpoint, JudgeError, JudgeReply
from app.evaluation.judge.questions import (
    LOWEST,
    QUESTIONS_FILE,
    REMINDER,
    JudgeConfig,
    JudgeQuestion,
    Message,
    choosing_messages,
    conversation,
    grading_messages,
    read_choice,
    read_grade,
    read_judge_key,
    read_questions,
)
from app.evaluation.row_runner import RowRunner
from app.evaluation.significance import VARIANTS, RowScores
from app.process.logs import show, text_table
from common.errors import Origin, UserError
from common.files import open_no_follow, write_atomically
from common.text import counted, formatted, printable
from data_modules import Prompt, Turn

if TYPE_CHECKING:
    from app.assembly.base import Base
    from data_modules import ChatTemplate

VERDICTS_FILE = "verdicts.jsonl"
_MAX_FAILED = 3
"""consecutive failed requests, each after all its retries, after which judging stops"""
MAX_UNREADABLE = 5
"""consecutive replies without a verdict after which judging stops, if there was none before"""
_EMPTY = JudgeReply("empty answer: lowest grade, without a request", is_cached=True)
_NO_REPLY = JudgeReply("")
_NUM_PROGRESS_LINES = 10
"""lines of progress that are logged"""
Answers = Mapping[str, Mapping[str, Sequence[str]]]
"""variant -> question id -> the answer to each turn"""
log = logging.getLogger(__name__)
_ANSWERS_FILE = "judge_answers.jsonl"
Rate = Callable[[Sequence[Sequence[Turn]]], list[float]]
"""returns the rewards of conversations, each of their last answer"""
Samples = Mapping[str, Sequence[Mapping[str, Sequence[str]]]]
"""variant -> samples -> question id -> the answer to each turn"""
_MEASURE = "reward"
"""name of the metrics of rewards"""


@dataclass(frozen=True, slots=True)
class _JudgeRequest:
    question: JudgeQuestion
    turn: int
    """the turn that is judged, from 0"""
    variant: str
    """base or tuned: the model that is graded, or the first one of a comparison"""
    is_pairwise: bool
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Verdict:
    request: _JudgeRequest
    score: float | None
    """grade from 1 to 10, or reward; of a comparison 1 if tuned is better, 0 if base is, 0.5 for a
    tie; None if the reply could not be parsed"""
    reply: JudgeReply = _NO_REPLY
    """the first reply, with the tokens of all that were requested"""

    def line(self) -> str:
        request, reply = self.request, self.reply
        row = {
            "question_id": request.question.id,
            "category": request.question.category,
            "turn": request.turn + 1,
            "grading": "pairwise" if request.is_pairwise else "single",
            "first" if request.is_pairwise else "model": request.variant,
            "score": self.score,
            "judge": reply.text,
            "read_tokens": reply.read_tokens,
            "written_tokens": reply.written_tokens,
            "cached": reply.is_cached,
        }
        return json.dumps(row, ensure_ascii=False) + "\n"


@dataclass(slots=True)
class Judgement:
    """All verdicts, and the failure that ended judging early, if any."""

    verdicts: list[Verdict] = field(default_factory=list)
    num_requests: int = 0
    failure: Exception | None = None
    """why judging ended before all requests were sent"""
    measure: str = "judge"
    """what its metrics are named after: judge (grades), or reward"""
    further: dict[str, float] = field(default_factory=dict)
    """metrics of answers that are sampled besides"""

    @property
    def is_graded(self) -> bool:
        """Whether its scores are grades from 1 to 10, not rewards."""
        return self.measure == "judge"

    def grade(self, verdict: Verdict) -> str:
        """Return the score of a verdict in words; empty if it has none."""
        if verdict.score is None:
            return ""
        return f"{verdict.score:g} of 10" if self.is_graded else f"reward {verdict.score:.3f}"

    def scores(self, variant: str) -> dict[str, dict[str, float]]:
        """Return category -> question id -> mean grade, for questions with a grade in each turn."""
        return self._by_question(self._graded(variant))

    def _graded(self, variant: str) -> list[Verdict]:
        graded = (each for each in self.verdicts if not each.request.is_pairwise)
        return [each for each in graded if each.request.variant == variant]

    def wins(self) -> dict[str, dict[str, float]]:
        """Return category -> question id -> share of turns that tuned wins; a tie counts 0.5."""
        return self._by_question(
            Verdict(first.request, first.score if first.score == second.score else 0.5)
            for first, second in self._in_both_orders()
            if None not in (first.score, second.score)
        )

    def num_inconsistent(self) -> int:
        """Return the number of comparisons whose winner changed when the order was swapped."""
        pairs = self._in_both_orders()
        return sum({first.score, second.score} == {0.0, 1.0} for first, second in pairs)

    def _in_both_orders(self) -> list[list[Verdict]]:
        by_turn: dict[tuple[str, int], list[Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            if verdict.request.is_pairwise:
                by_turn[verdict.request.question.id, verdict.request.turn].append(verdict)
        return [pair for pair in by_turn.values() if len(pair) == 2]

    def _by_question(self, verdicts: Iterable[Verdict]) -> dict[str, dict[str, float]]:
        by_question: dict[JudgeQuestion, list[float | None]] = defaultdict(list)
        for verdict in verdicts:
            by_question[verdict.request.question].append(verdict.score)
        means: dict[str, dict[str, float]] = defaultdict(dict)
        for question, scores in by_question.items():
            known = [score for score in scores if score is not None]
            if len(known) == len(question.turns):
                means[question.category][question.id] = fmean(known)
        return dict(means)

    def metrics(self) -> dict[str, float]:
        """Return the mean grades by their names in metrics.json: overall, by category and turn."""
        metrics: dict[str, float] = {}
        for variant in VARIANTS:
            key = f"{variant}/{self.measure}"
            metrics |= _means(key, self.scores(variant))
            by_turn: dict[int, list[float]] = defaultdict(list)
            for verdict in self._graded(variant):
                if verdict.score is not None:
                    by_turn[verdict.request.turn].append(verdict.score)
            for turn, graded in sorted(by_turn.items()):
                metrics[f"{key}/turn_{turn + 1}"] = fmean(graded)
        return metrics | _means(f"tuned/{self.measure}_wins", self.wins()) | self.further

    def row_scores(self, name: str) -> dict[str, dict[str, dict[str, RowScores]]]:
        """Return the grades of the questions that both models have, for a comparison by row."""
        flat = {
            variant: {
                id: score for rows in self.scores(variant).values() for id, score in rows.items()
            }
            for variant in VARIANTS
        }
        shared = [id for id in flat["base"] if id in flat["tuned"]]
        return {
            variant: {self.measure: {name: RowScores(scores=[rows[id] for id in shared])}}
            for variant, rows in flat.items()
        }

    def state(self) -> str:
        """Describe how many verdicts could be parsed, of how many requests."""
        parsed = sum(verdict.score is not None for verdict in self.verdicts)
        return f"{parsed:,} of {self.num_requests:,} verdicts"

    def cost(self, config: JudgeConfig) -> str:
        """Describe how many tokens were read and written, and their price."""
        paid = [verdict.reply for verdict in self.verdicts if not verdict.reply.is_cached]
        read = sum(reply.read_tokens for reply in paid)
        written = sum(reply.written_tokens for reply in paid)
        text = f"{counted(len(paid), 'verdict')} for {read:,} tokens read and {written:,} written"
        if config.input_price is not None or config.output_price is not None:
            dollars = read * (config.input_price or 0) + written * (config.output_price or 0)
            text += f", ${dollars / 1e6:,.4f}"
        num_cached = len(self.verdicts) - len(paid)
        return text + f"; {num_cached:,} from the cache" * (num_cached > 0)


def judge_answers(
    questions: Sequence[JudgeQuestion],
    answers: Answers,
    endpoint: Endpoint,
    config: JudgeConfig,
    folder: Path,
) -> Judgement:
    """Request a verdict on every answer; write each to `folder`/verdicts.jsonl as it arrives.

    Does not raise if judging fails: the failure is returned with the verdicts received so far.
    """
    requests = list(_judge_requests(questions, answers, config))
    judged = Judgement(num_requests=len(requests))
    num_failed = 0
    pending: set[Future[Verdict]] = set()
    unsent = iter(requests)
    pool = ThreadPoolExecutor(config.num_parallel)
    with open_no_follow(folder / VERDICTS_FILE, "w", encoding="utf-8") as file:
        try:
            while True:
                while judged.failure is None and len(pending) < config.num_parallel:
                    if (request := next(unsent, None)) is None:
                        break
                    pending.add(pool.submit(_verdict, endpoint, request))
                if not pending:
                    # Verdicts arrive in any order; tables and pages must not depend on it.
                    judged.verdicts.sort(key=lambda verdict: requests.index(verdict.request))
                    return judged
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        verdict = future.result()
                    except JudgeError as error:
                        num_failed += 1
                        if num_failed >= _MAX_FAILED or len(requests) < _MAX_FAILED:
                            judged.failure = judged.failure or error
                        else:
                            log.warning("%s", error)
                    except (UserError, OSError) as error:  # the next request would fail, too
                        judged.failure = judged.failure or error
                    else:
                        num_failed = 0
                        judged.verdicts.append(verdict)
                        judged.failure = judged.failure or _never_readable(judged, config)
                        file.write(verdict.line())
                        file.flush()
                        _log_progress(len(judged.verdicts), len(requests))
        finally:
            endpoint.stop()
            pool.shutdown(wait=False)


def _never_readable(judged: Judgement, config: JudgeConfig) -> JudgeError | None:
    """Return why to stop: the latest replies have no verdict, after few or none that had one."""
    latest = [verdict for verdict in judged.verdicts if verdict.request.messages]
    unread = list(itertools.takewhile(lambda verdict: verdict.score is None, reversed(latest)))
    is_first = len(unread) == len(latest)
    if len(unread) < (MAX_UNREADABLE if is_first else 4 * MAX_UNREADABLE):
        return None
    return JudgeError(
        f"judge {config.model} at {config.url}: {len(unread)} replies in a row had no readable "
        "verdict, so no more are requested: its replies should end with a line `Verdict: N`; does "
        f"this model follow instructions? The last: {printable(unread[0].reply.text[:120])}"
    )


def check_judgement(judged: Judgement, config: JudgeConfig) -> None:
    """Warn about missing verdicts; raise what ended judging, or JudgeError without any verdict."""
    unparsed = [verdict for verdict in judged.verdicts if verdict.score is None]
    if unparsed:
        log.warning(
            "judge: %d of %d verdicts could not be parsed and are ignored; the first: %s",
            len(unparsed),
            len(judged.verdicts),
            printable(unparsed[0].reply.text[:120]),
        )
    num_missing = judged.num_requests - len(judged.verdicts)
    if judged.failure is not None:
        num_saved = len(judged.verdicts) - len(unparsed)
        raise type(judged.failure)(
            f"{judged.failure}\n{num_saved} of {judged.num_requests} verdicts are "
            "saved: type the command again without output.dir, and only the others are requested"
        ) from judged.failure
    if num_missing:
        log.warning("judge: %d of %d verdicts are missing", num_missing, judged.num_requests)
    if len(unparsed) + num_missing == judged.num_requests:
        raise JudgeError(
            f"judge {config.model} at {config.url} returned no readable verdict: its replies "
            "should end with a line `Verdict: N`; does this model follow instructions?"
        )


def judge_table(judged: Judgement) -> list[list[str]]:
    """Return a table as text: a heading row, a row for each category, and the overall means."""
    what = "1 to 10" if judged.is_graded else judged.measure
    columns = {f"{variant}: {what}": judged.scores(variant) for variant in VARIANTS}
    columns["tuned wins"] = judged.wins()
    columns = {heading: scores for heading, scores in columns.items() if scores}
    names = list(dict.fromkeys(name for scores in columns.values() for name in scores))

    def cells(chosen: Sequence[str]) -> Iterator[str]:
        for heading, scores in columns.items():
            found = [score for name in chosen for score in scores.get(name, {}).values()]
            spec = ".1%" if heading == "tuned wins" else ".2f"
            yield formatted(fmean(found), spec) if found else "-"

    rows = [[name, *cells([name])] for name in names]
    return [["category", *columns], *rows, ["all", *cells(names)]]


def print_judgement(judged: Judgement, config: JudgeConfig, page: str) -> None:
    """Print the table of grades, the cost, and the path of the page with all verdicts."""
    show(text_table(judge_table(judged), f"judged by {printable(config.name)}"))
    if judged.is_graded:
        show(f"judge: {judged.state()}; {judged.cost(config)}")
    for name, value in judged.further.items():
        show(f"judge: {name} = {value:.3f}, of {config.best_of} sampled answers")
    if num_inconsistent := judged.num_inconsistent():
        show(
            f"judge: {counted(num_inconsistent, 'comparison')} changed when the order was swapped, "
            "counted as a tie each"
        )
    show(f"judge: {printable(page)}")


def _judge_requests(
    questions: Sequence[JudgeQuestion], answers: Answers, config: JudgeConfig
) -> Iterator[_JudgeRequest]:
    """Yield a request for each verdict; one to grade an empty answer has no messages."""
    for question in questions:
        texts = {variant: by_question[question.id] for variant, by_question in answers.items()}
        for turn in range(len(question.turns)):
            if "single" in config.grading:
                for variant, own in texts.items():
                    has_answer = bool(own[turn].strip())
                    messages = grading_messages(question, turn, own) if has_answer else []
                    yield _JudgeRequest(question, turn, variant, False, messages)
            if "pairwise" in config.grading and len(texts) == 2:
                for first, second in (VARIANTS, VARIANTS[::-1]):
                    messages = choosing_messages(question, turn, texts[first], texts[second])
                    yield _JudgeRequest(question, turn, first, True, messages)


def _verdict(endpoint: Endpoint, request: _JudgeRequest) -> Verdict:
    if not request.messages:
        return Verdict(request, float(LOWEST), _EMPTY)
    reply = endpoint.complete(request.messages)
    replies = [reply]
    score = _score(request, reply.text)
    if score is None:
        again = [
            *request.messages,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": REMINDER},
        ]
        replies.append(endpoint.complete(again))
        score = _score(request, replies[-1].text)
        if score is None:  # the next evaluation requests both again
            endpoint.forget(request.messages)
            endpoint.forget(again)
    paid = [each for each in replies if not each.is_cached]
    tokens = (sum(each.read_tokens for each in paid), sum(each.written_tokens for each in paid))
    return Verdict(request, score, JudgeReply(reply.text, *tokens, is_cached=not paid))


def _score(request: _JudgeRequest, text: str) -> float | None:
    if not request.is_pairwise:
        return read_grade(text)
    choice = read_choice(text)
    if choice in (None, "tie"):
        return None if choice is None else 0.5
    tuned_number = "1" if request.variant == "tuned" else "2"
    return float(choice == tuned_number)


def _means(key: str, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    if not scores:
        return {}
    by_category = {f"{key}/{name}": fmean(rows.values()) for name, rows in scores.items()}
    return {key: fmean(score for rows in scores.values() for score in rows.values())} | by_category


def _log_progress(num_done: int, total: int) -> None:
    if num_done * _NUM_PROGRESS_LINES // total > (num_done - 1) * _NUM_PROGRESS_LINES // total:
        log.info("judge: %d of %d verdicts", num_done, total)


class Bench:
    """Generates answers of several models to the same questions, and has them judged at the end."""

    def __init__(self, config: JudgeConfig, batch_size: int, seed: int = 0) -> None:
        """`seed`: of the sampled answers."""
        self.config, self._batch_size, self._seed = config, batch_size, seed
        self._key = None if config.reward_model else read_judge_key(config)
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
        self, model: Any, base: Base, template: ChatTemplate, stop_ids: set[int], temperature: float
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
    questions: Sequence[JudgeQuestion],
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
    requests = list(_judge_requests(questions, answers, config))
    rated = {
        (variant, number, question.id, turn): conversation(question, texts[question.id][: turn + 1])
        for variant, own in answers.items()
        for number, texts in enumerate([own, *samples.get(variant, ())])
        for question in questions
        for turn in range(len(question.turns))
    }
    rewards = dict(zip(rated, rate(list(rated.values())), strict=True))

    def score(request: _JudgeRequest) -> float:
        own = {
            variant: rewards[variant, 0, request.question.id, request.turn] for variant in answers
        }
        if not request.is_pairwise:
            return own[request.variant]
        return (1 + (own["tuned"] > own["base"]) - (own["tuned"] < own["base"])) / 2

    judged = Judgement([Verdict(each, score(each)) for each in requests], len(requests))
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
