"""Metrics of an answer beside its reference; each is a number from 0 to 1, except one's own.

Decides what a right answer is. `METRICS` has the names; ROUGE, BLEU and chrF are those of
rouge-score and sacrebleu (`pip install -e '.[eval]'`).
"""

from __future__ import annotations

import importlib.util
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.process.errors import UserError, nearest

if TYPE_CHECKING:
    from app.evaluation.generation import EvaluationConfig

METRICS = ("exact_match", "numeric", "f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf")
PACKAGES = {
    "rouge1": "rouge_score",
    "rouge2": "rouge_score",
    "rougeL": "rouge_score",
    "bleu": "sacrebleu",
    "chrf": "sacrebleu",
}
"""metric -> the package of extra `eval` that computes it"""
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answer(NamedTuple):
    """The answer of a model: its text up to the stop token."""

    text: str
    is_finished: bool
    """whether a stop token came within `max_new_tokens`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric by name: of one answer, and of all answers to a data set."""

    name: str
    of_row: Callable[[Answer, str], float]
    """(answer, reference) -> score"""
    of_all: Callable[[Sequence[str], Sequence[str]], float] | None = None
    """(answers, references) -> score, where that is not the mean over rows"""

    def score(self, answer: Answer, reference: str, where: str) -> float:
        """Return the score of an answer; UserError where it is no finite number (`where`)."""
        value: Any = self.of_row(answer, reference)
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise UserError(
                f"evaluation.metric: {self.name} returned {value!r} for the answer to {where}; "
                "return a finite number"
            )
        return float(value)

    def total(
        self, scores: Sequence[float], answers: Sequence[str], references: Sequence[str]
    ) -> float:
        """Return the score of all answers to a data set; there must be one."""
        if self.of_all is None:
            return sum(scores) / len(scores)
        return self.of_all(answers, references)


def build_metrics(config: EvaluationConfig) -> list[Metric]:
    """Return the metrics that `config` names, in the order of METRICS, one's own last."""
    names = {*config.metrics, *(["exact_match"] if config.exact_match else [])}
    found = [_build(name) for name in METRICS if name in names]
    return found if config.metric is None else [*found, load_metric(config.metric)]


def check_metrics(config: EvaluationConfig) -> list[str]:
    """List what is wrong with the metrics of a configuration; runs no code of anybody."""
    missing = {PACKAGES[name] for name in config.metrics if name in PACKAGES}
    problems = [
        f"evaluation.metrics=[{', '.join(config.metrics)}]: {package} is not installed; type "
        "pip install -e '.[eval]'"
        for package in sorted(missing)
        if importlib.util.find_spec(package) is None
    ]
    if config.metric is None:
        return problems
    file, _, function = config.metric.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        return [*problems, f"evaluation.metric={config.metric}: expected FILE.py:function"]
    if function in METRICS:
        problems.append(f"evaluation.metric={config.metric}: {function} is the name of a metric")
    if not Path(file).expanduser().is_file():
        problems.append(f"evaluation.metric={config.metric}: there is no file {file}")
    if not config.allow_code:
        problems.append(
            f"evaluation.metric={config.metric} is code, which runs as you do; read it, then type "
            "evaluation.allow_code=true"
        )
    return problems


def load_metric(named: str) -> Metric:
    """Run FILE.py and return its function as a metric; UserError where that fails."""
    file, _, function = named.rpartition(":")
    spec = importlib.util.spec_from_file_location("evaluation_metric", Path(file).expanduser())
    if spec is None or spec.loader is None:
        raise UserError(f"evaluation.metric={named}: expected FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"evaluation.metric={named}: {file}: {type(error).__name__}: {error}"
        ) from error
    found = vars(module).get(function)
    if not callable(found):
        guess = nearest(function, [name for name, one in vars(module).items() if callable(one)])
        raise UserError(f"evaluation.metric={named}: {file} has no function {function}{guess}")

    def of_row(answer: Answer, reference: str) -> float:
        try:
            value: float = found(answer.text, reference)
            return value
        except Exception as error:
            raise UserError(
                f"evaluation.metric={named}: {type(error).__name__}: {error}, for the answer "
                f"{answer.text[:80]!r}"
            ) from error

    return Metric(name=function, of_row=of_row)


def is_exact_match(answer: Answer, reference: str) -> bool:
    """Tell whether an answer is finished and equals the reference up to surrounding whitespace."""
    return answer.is_finished and answer.text.strip() == reference.strip()


def last_number(text: str) -> float | None:
    """Return the number after `####` (GSM8K's form), else the last number in a text."""
    _, marked, end = text.rpartition("####")
    found = NUMBER.findall(end if marked and NUMBER.search(end) else text)
    return float(found[-1].replace(",", "")) if found else None


def is_numeric_match(answer: Answer, reference: str) -> bool:
    """Tell whether the last numbers of answer and reference are equal."""
    expected = last_number(reference)
    return expected is not None and last_number(answer.text) == expected


def words_of(text: str) -> list[str]:
    """Return words as SQuAD compares them: in lower case, without articles and punctuation."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def word_f1(answer: Answer, reference: str) -> float:
    """Return the harmonic mean of precision and recall of words (Rajpurkar et al. 2016)."""
    words, expected = words_of(answer.text), words_of(reference)
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def _build(name: str) -> Metric:
    if name.startswith("rouge"):
        return _rouge(name)
    if name == "bleu":
        return _bleu()
    if name == "chrf":
        return _chrf()
    by_name = {"exact_match": is_exact_match, "numeric": is_numeric_match, "f1": word_f1}
    return Metric(name=name, of_row=by_name[name])


def _rouge(name: str) -> Metric:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([name], use_stemmer=True)
    return Metric(
        name=name,
        of_row=lambda answer, reference: scorer.score(reference, answer.text)[name].fmeasure,
    )


def _bleu() -> Metric:
    from sacrebleu.metrics import BLEU

    of_row, of_all = BLEU(effective_order=True), BLEU()
    return Metric(
        name="bleu",
        of_row=lambda answer, reference: (
            of_row.sentence_score(answer.text, [reference]).score / 100
        ),
        of_all=lambda answers, references: of_all.corpus_score(answers, [references]).score / 100,
    )


def _chrf() -> Metric:
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    return Metric(
        name="chrf",
        of_row=lambda answer, reference: chrf.sentence_score(answer.text, [reference]).score / 100,
        of_all=lambda answers, references: chrf.corpus_score(answers, [references]).score / 100,
    )
