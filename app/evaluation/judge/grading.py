"""Have the answers of base and tuned judged, keep every verdict, and sum them up.

Single: each answer is graded from 1 to 10. Pairwise: base and tuned are compared twice with their
places swapped, and a model wins where it is better in both; a judge that changes its mind with the
order has seen a tie.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from app.evaluation.judge.endpoint import Endpoint, JudgeError, Message, Reply
from app.evaluation.judge.prompts import (
    LOWEST,
    REMINDER,
    choosing_messages,
    grading_messages,
    read_choice,
    read_grade,
)
from app.evaluation.judge.questions import Question
from app.evaluation.judge.settings import JudgeConfig
from app.evaluation.significance import RowScores
from app.process.errors import UserError
from data_modules import printable

VERDICTS_FILE = "verdicts.jsonl"
MAX_FAILED = 3
"""failed requests in a row, each after all its retries, after which no more are sent"""
EMPTY = "an empty answer: the lowest grade, without asking"
REPORTS = 10
"""progress lines of one judging"""
Answers = Mapping[str, Mapping[str, Sequence[str]]]
"""base and tuned -> question -> the answer to each of its turns"""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """One request to a judge: about whom and which turn, from 0."""

    question: Question
    turn: int
    variant: str
    """base or tuned; of a comparison the one that stands first"""
    is_pairwise: bool
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a request: `score` 1 to 10, or 1, 0.5 or 0 for tuned against base."""

    request: JudgeRequest
    score: float | None
    text: str
    """the judge's own words, or why there is no verdict"""
    read_tokens: int = 0
    written_tokens: int = 0
    is_cached: bool = False

    def line(self) -> str:
        """Return its line of verdicts.jsonl."""
        request = self.request
        row = {
            "question_id": request.question.id,
            "category": request.question.category,
            "turn": request.turn + 1,
            "grading": "pairwise" if request.is_pairwise else "single",
            "first" if request.is_pairwise else "model": request.variant,
            "score": self.score,
            "judge": self.text,
            "read_tokens": self.read_tokens,
            "written_tokens": self.written_tokens,
            "cached": self.is_cached,
        }
        return json.dumps(row, ensure_ascii=False) + "\n"


@dataclass(slots=True)
class Judgement:
    """All verdicts so far, and why there are no more."""

    verdicts: list[Verdict] = field(default_factory=list)
    num_requests: int = 0
    failure: Exception | None = None
    """what ended the judging before its end"""

    def scores(self, variant: str) -> dict[str, dict[str, float]]:
        """Return a model's mean grade of each question that was graded whole, by category."""
        return self._by_question(
            verdict
            for verdict in self.verdicts
            if verdict.request.variant == variant and not verdict.request.is_pairwise
        )

    def wins(self) -> dict[str, dict[str, float]]:
        """Return the share of each question's turns that tuned wins, a tie for a half."""
        by_turn: dict[tuple[str, int], list[Verdict]] = defaultdict(list)
        for verdict in self._comparisons():
            by_turn[verdict.request.question.id, verdict.request.turn].append(verdict)
        both = (pair for pair in by_turn.values() if len(pair) == 2)
        return self._by_question(
            Verdict(one.request, _agreed(one.score, other.score), "") for one, other in both
        )

    def num_undecided(self) -> int:
        """Count the comparisons whose winner changed with the places."""
        by_turn: dict[tuple[str, int], set[float | None]] = defaultdict(set)
        for verdict in self._comparisons():
            by_turn[verdict.request.question.id, verdict.request.turn].add(verdict.score)
        return sum(scores == {0.0, 1.0} for scores in by_turn.values())

    def _comparisons(self) -> Iterator[Verdict]:
        return (verdict for verdict in self.verdicts if verdict.request.is_pairwise)

    def _by_question(self, verdicts: Iterable[Verdict]) -> dict[str, dict[str, float]]:
        by_question: dict[Question, list[float | None]] = defaultdict(list)
        for verdict in verdicts:
            by_question[verdict.request.question].append(verdict.score)
        means: dict[str, dict[str, float]] = defaultdict(dict)
        for question, scores in by_question.items():
            known = [score for score in scores if score is not None]
            if len(known) == len(question.turns):
                means[question.category][question.id] = fmean(known)
        return dict(means)

    def metrics(self) -> dict[str, float]:
        """Return the means by their names in metrics.json: overall, by category and by turn."""
        found: dict[str, float] = {}
        for variant in ("base", "tuned"):
            found |= _means(f"{variant}/judge", self.scores(variant))
            for turn in sorted({verdict.request.turn for verdict in self.verdicts}):
                graded = [
                    verdict.score
                    for verdict in self.verdicts
                    if (verdict.request.variant, verdict.request.turn) == (variant, turn)
                    and not verdict.request.is_pairwise
                    and verdict.score is not None
                ]
                if graded:
                    found[f"{variant}/judge/turn_{turn + 1}"] = fmean(graded)
        return found | _means("tuned/judge_wins", self.wins())

    def row_scores(self, name: str) -> dict[str, dict[str, dict[str, RowScores]]]:
        """Return the grades of the questions that both models have, to be compared by row."""
        flat = {
            variant: {
                id: score for rows in self.scores(variant).values() for id, score in rows.items()
            }
            for variant in ("base", "tuned")
        }
        shared = [id for id in flat["base"] if id in flat["tuned"]]
        return {
            variant: {"judge": {name: RowScores(scores=[rows[id] for id in shared])}}
            for variant, rows in flat.items()
        }

    def state(self) -> str:
        """Say how many verdicts there are, of how many."""
        read = sum(verdict.score is not None for verdict in self.verdicts)
        return f"{read:,} of {self.num_requests:,} verdicts"

    def cost(self, config: JudgeConfig) -> str:
        """Say how many tokens were read and written, and what they cost."""
        paid = [verdict for verdict in self.verdicts if not verdict.is_cached]
        read = sum(verdict.read_tokens for verdict in paid)
        written = sum(verdict.written_tokens for verdict in paid)
        words = f"{len(paid):,} verdicts for {read:,} tokens read and {written:,} written"
        if config.input_price is not None or config.output_price is not None:
            dollars = read * (config.input_price or 0) + written * (config.output_price or 0)
            words += f", ${dollars / 1e6:,.4f}"
        cached = len(self.verdicts) - len(paid)
        return words + f"; {cached:,} from the disk" * (cached > 0)


def judge_answers(
    questions: Sequence[Question],
    answers: Answers,
    endpoint: Endpoint,
    config: JudgeConfig,
    folder: Path,
) -> Judgement:
    """Ask for every verdict; each is added to `folder`/verdicts.jsonl when it comes.

    What ends it early is in `failure`, beside the verdicts that there are.
    """
    requests = list(_requests(questions, answers, config))
    judged = Judgement(num_requests=len(requests))
    failed_in_a_row = 0
    waiting: set[Future[Verdict]] = set()
    rest = iter(requests)
    pool = ThreadPoolExecutor(config.num_parallel)
    with (folder / VERDICTS_FILE).open("w", encoding="utf-8") as file:
        try:
            while True:
                while judged.failure is None and len(waiting) < config.num_parallel:
                    if (request := next(rest, None)) is None:
                        break
                    waiting.add(pool.submit(_verdict, endpoint, request))
                if not waiting:
                    return judged
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        verdict = future.result()
                    except JudgeError as error:
                        failed_in_a_row += 1
                        if failed_in_a_row >= MAX_FAILED or len(requests) < MAX_FAILED:
                            judged.failure = judged.failure or error
                        else:
                            log.warning("%s", error)
                    except UserError as error:  # the next request would be refused, too
                        judged.failure = judged.failure or error
                    else:
                        failed_in_a_row = 0
                        judged.verdicts.append(verdict)
                        file.write(verdict.line())
                        file.flush()
                        _report(len(judged.verdicts), len(requests))
        finally:
            endpoint.stop()
            pool.shutdown(wait=False)


def check_judgement(judged: Judgement, config: JudgeConfig) -> None:
    """Say what is missing; raise the failure that ended it, or JudgeError without any verdict."""
    unread = [verdict for verdict in judged.verdicts if verdict.score is None]
    if unread:
        log.warning(
            "judge: %d of %d verdicts could not be read, and count for nothing; the first: %s",
            len(unread),
            len(judged.verdicts),
            printable(unread[0].text[:120]),
        )
    missing = judged.num_requests - len(judged.verdicts)
    if judged.failure is not None:
        kept = f"{len(judged.verdicts)} of {judged.num_requests} verdicts are kept"
        raise type(judged.failure)(
            f"{judged.failure}\n{kept}: type the command again without "
            "output.dir: what the judge has said is not asked again"
        ) from judged.failure
    if missing:
        log.warning("judge: %d of %d verdicts are missing", missing, judged.num_requests)
    if len(unread) + missing == judged.num_requests:
        raise JudgeError(
            f"judge {config.model} at {config.url} gave no verdict that could be read: it should "
            "end with a line `Verdict: N`; is it a model that follows instructions?"
        )


def judge_table(judged: Judgement) -> list[list[str]]:
    """Return the grades and wins of every category as text, the headings first, all of it last."""
    columns = {f"{variant}: 1 to 10": judged.scores(variant) for variant in ("base", "tuned")}
    columns["tuned wins"] = judged.wins()
    columns = {heading: scores for heading, scores in columns.items() if scores}
    names = list(dict.fromkeys(name for scores in columns.values() for name in scores))

    def cells(chosen: Sequence[str]) -> Iterator[str]:
        for heading, scores in columns.items():
            found = [score for name in chosen for score in scores.get(name, {}).values()]
            form = "{:.1%}" if heading == "tuned wins" else "{:.2f}"
            yield form.format(fmean(found)) if found else "-"

    rows = [[name, *cells([name])] for name in names]
    return [["category", *columns], *rows, ["all", *cells(names)]]


def print_judgement(judged: Judgement, config: JudgeConfig, page: str) -> None:
    """Print the table of a judge's grades, what it cost, and where its words are."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headings, *rows = judge_table(judged)
    table = Table(title=f"judged by {printable(str(config.model))}", title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
    print(f"judge: {judged.state()}; {judged.cost(config)}")
    if undecided := judged.num_undecided():
        print(f"judge: {undecided} comparisons changed with the places, and count as ties")
    print(f"judge: {printable(page)}")


def _requests(
    questions: Sequence[Question], answers: Answers, config: JudgeConfig
) -> Iterator[JudgeRequest]:
    for question in questions:
        given = {variant: of_model[question.id] for variant, of_model in answers.items()}
        for turn in range(len(question.turns)):
            if "single" in config.grading:
                for variant, texts in given.items():
                    has_answer = bool(texts[turn].strip())
                    messages = grading_messages(question, turn, texts) if has_answer else []
                    yield JudgeRequest(question, turn, variant, False, messages)
            if "pairwise" in config.grading and len(given) == 2:
                for variant, other in (("base", "tuned"), ("tuned", "base")):
                    messages = choosing_messages(question, turn, given[variant], given[other])
                    yield JudgeRequest(question, turn, variant, True, messages)


def _verdict(endpoint: Endpoint, request: JudgeRequest) -> Verdict:
    """Ask once, and once more where the words hold no verdict."""
    if not request.messages:
        return Verdict(request, float(LOWEST), EMPTY, is_cached=True)
    reply = endpoint.ask(request.messages)
    replies = [reply]
    score = _score(request, reply.text)
    if score is None:
        again = [
            *request.messages,
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": REMINDER},
        ]
        replies.append(endpoint.ask(again))
        score = _score(request, replies[-1].text)
        if score is None:  # the next evaluation asks again
            endpoint.forget(request.messages)
            endpoint.forget(again)
    paid: list[Reply] = [one for one in replies if not one.is_cached]
    return Verdict(
        request,
        score,
        reply.text,
        sum(one.read_tokens for one in paid),
        sum(one.written_tokens for one in paid),
        is_cached=not paid,
    )


def _score(request: JudgeRequest, text: str) -> float | None:
    if not request.is_pairwise:
        return read_grade(text)
    choice = read_choice(text)
    if choice in (None, "tie"):
        return None if choice is None else 0.5
    tuned_place = "1" if request.variant == "tuned" else "2"
    return float(choice == tuned_place)


def _agreed(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    return one if one == other else 0.5


def _means(key: str, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    if not scores:
        return {}
    by_category = {f"{key}/{name}": fmean(rows.values()) for name, rows in scores.items()}
    return {key: fmean(score for rows in scores.values() for score in rows.values())} | by_category


def _report(count: int, total: int) -> None:
    if count * REPORTS // total > (count - 1) * REPORTS // total:
        log.info("judge: %d of %d verdicts", count, total)
