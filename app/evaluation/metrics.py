"""Metrics that compare a model's answer with a reference.

`METRICS` lists their names. Each is from 0 to 1; a custom metric can be any finite number. ROUGE,
BLEU and chrF come from rouge-score and sacrebleu (the extra `eval`).

Scripts that write no space between words (Chinese, Japanese, Thai, Khmer, ...) are split into
characters, as sacrebleu's tokenizers `zh` and `char` and MLQA's F1 do.
"""

from __future__ import annotations

import importlib.util
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.evaluation.numbers import last_number
from common.errors import UserError, nearest
from common.installation import install_extra

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
"""metric -> package that computes it, from the extra `eval`"""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf"  # Thai, Lao,
    # Tibetan, Burmese, Khmer, Tai scripts
    "\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf"  # Yi, Javanese, Burmese, Tai Viet
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"  # Chinese and Japanese
)
_CHARACTER = re.compile(f"[{_UNSPACED}]")
_WIDE = re.compile(f"[{_UNSPACED}\u3000-\u303f\uff00-\uffef][\u0300-\u036f]*")


class Answer(NamedTuple):
    """A model's answer, without its stop token."""

    text: str
    is_finished: bool
    """whether a stop token was generated within `max_new_tokens`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Scores one answer, or all answers to a data set."""

    name: str
    score_row: Callable[[Answer, str], float]
    """(answer, reference) -> score"""
    score_all: Callable[[Sequence[str], Sequence[str]], float] | None = None
    """(answers, references) -> corpus score, None if that is the mean over rows"""

    def score(self, answer: Answer, reference: str, where: str) -> float:
        """Return the score of an answer; raise UserError, naming `where`, if it is not finite."""
        value: Any = self.score_row(answer, reference)
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise UserError(
                f"evaluation.metric: {self.name} returned {value!r} for the answer to {where}; "
                "return a finite number"
            )
        return float(value)

    def total(
        self, scores: Sequence[float], answers: Sequence[str], references: Sequence[str]
    ) -> float:
        """Return the score of all answers to a data set, which must not be empty."""
        if self.score_all is None:
            return sum(scores) / len(scores)
        return self.score_all(answers, references)


def build_metrics(config: EvaluationConfig) -> list[Metric]:
    """Return the metrics that `config` names in the order of METRICS, a custom metric last."""
    names = {*config.metrics, *(["exact_match"] if config.exact_match else [])}
    metrics = [_build(name) for name in METRICS if name in names]
    return metrics if config.metric is None else [*metrics, _load_metric(config.metric)]


def check_metrics(config: EvaluationConfig) -> list[str]:
    """List the problems of the configured metrics, without running a custom metric's code."""
    missing = {PACKAGES[name] for name in config.metrics if name in PACKAGES}
    problems = [
        f"evaluation.metrics=[{', '.join(config.metrics)}]: {package} is not installed; type "
        f"{install_extra('eval')}"
        for package in sorted(missing)
        if importlib.util.find_spec(package) is None
    ]
    if config.metric is None:
        return problems
    file, _, function = config.metric.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        return [*problems, f"evaluation.metric={config.metric}: expected FILE.py:function"]
    if function in METRICS:
        problems.append(
            f"evaluation.metric={config.metric}: {function} is the name of a built-in metric; "
            "rename the function"
        )
    if not Path(file).expanduser().is_file():
        problems.append(f"evaluation.metric={config.metric}: there is no file {file}")
    if not config.allow_code:
        problems.append(
            f"evaluation.metric={config.metric} is code that runs with your permissions; read it, "
            "then type evaluation.allow_code=true"
        )
    return problems


def _load_metric(path: str) -> Metric:
    """Run the file of `FILE.py:function` and return the function as a metric.

    Raises UserError if the file cannot be run or has no such function.
    """
    file, _, function = path.rpartition(":")
    spec = importlib.util.spec_from_file_location("evaluation_metric", Path(file).expanduser())
    if spec is None or spec.loader is None:
        raise UserError(f"evaluation.metric={path}: expected FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"evaluation.metric={path}: {file}: {type(error).__name__}: {error}"
        ) from error
    metric = vars(module).get(function)
    if not callable(metric):
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise UserError(
            f"evaluation.metric={path}: {file} has no function {function}"
            f"{nearest(function, functions)}"
        )

    def score_row(answer: Answer, reference: str) -> float:
        try:
            value: float = metric(answer.text, reference)
            return value
        except Exception as error:
            raise UserError(
                f"evaluation.metric={path}: {type(error).__name__}: {error}, for the answer "
                f"{answer.text[:80]!r}"
            ) from error

    return Metric(name=function, score_row=score_row)


def is_exact_match(answer: Answer, reference: str) -> bool:
    """Return whether an answer is finished and equals the reference, surrounding space aside."""
    return answer.is_finished and answer.text.strip() == reference.strip()


def is_numeric_match(answer: Answer, reference: str) -> bool:
    expected = last_number(reference)
    return expected is not None and last_number(answer.text) == expected


def _words_of(text: str) -> list[str]:
    """Return the words that SQuAD compares: lower case, without articles and punctuation.

    In scripts without spaces each character is a word, as in MLQA (Lewis et al. 2020).
    """
    return _split_words(_ARTICLES.sub(" ", _without_punctuation(text.lower())))


def word_f1(answer: Answer, reference: str) -> float:
    """Return the F1 score of the words of an answer (SQuAD, Rajpurkar et al. 2016)."""
    words, expected = _words_of(answer.text), _words_of(reference)
    if not words and not expected:
        return float(_signs_of(answer.text) == _signs_of(reference))
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


def _signs_of(text: str) -> str:
    """Return what is left to compare of a text without words: its punctuation and symbols."""
    return "".join(_ARTICLES.sub(" ", text.lower()).split())


def _build(name: str) -> Metric:
    if name.startswith("rouge"):
        return _rouge(name)
    if name in ("bleu", "chrf"):
        return _of_sacrebleu(name)
    by_name = {"exact_match": is_exact_match, "numeric": is_numeric_match, "f1": word_f1}
    return Metric(name=name, score_row=by_name[name])


class _RougeWords:
    """The tokenizer of rouge-score, with its stemmer, for words of any script."""

    def __init__(self) -> None:
        from rouge_score.tokenizers import DefaultTokenizer

        self._ascii = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """Return the stems of English words, and other words as they are."""
        return [
            stem
            for word in _split_words(text)
            for stem in (self._ascii.tokenize(word) if word.isascii() else [word])
        ]


def _rouge(name: str) -> Metric:
    from rouge_score.rouge_scorer import RougeScorer

    tokenizer = _RougeWords()
    scorer = RougeScorer([name], tokenizer=tokenizer)
    shortest = 2 if name == "rouge2" else 1

    def score_row(answer: Answer, reference: str) -> float:
        found, expected = tokenizer.tokenize(answer.text), tokenizer.tokenize(reference)
        if max(len(found), len(expected)) < shortest:  # nothing to count on either side
            is_same = found == expected
            return float(
                is_same and (bool(found) or _signs_of(answer.text) == _signs_of(reference))
            )
        value: float = scorer.score(reference, answer.text)[name].fmeasure
        return value

    return Metric(name=name, score_row=score_row)


def _of_sacrebleu(name: str) -> Metric:
    from sacrebleu.metrics import BLEU, CHRF

    # With the effective order, answers of fewer than four words have a score.
    library = BLEU(effective_order=True) if name == "bleu" else CHRF()
    spaced = _space_characters if name == "bleu" else str
    return Metric(
        name=name,
        score_row=lambda answer, reference: _share(
            library.sentence_score(spaced(answer.text), [spaced(reference)])
        ),
        score_all=lambda answers, references: _share(
            library.corpus_score(list(map(spaced, answers)), [list(map(spaced, references))])
        ),
    )


def _share(result: Any) -> float:
    """Return a score of sacrebleu from 0 to 1, without the last digits of its logarithms."""
    return min(1.0, round(float(result.score) / 100, 12))


def _split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; an emoji is a word."""
    found: list[str] = []
    is_open = is_word = False  # whether a mark, or also a letter, continues the last word
    for character in unicodedata.normalize("NFC", text.lower()):
        kind = unicodedata.category(character)
        is_mark = kind[0] == "M" or (kind in ("Cf", "Sk") and not character.isascii())
        is_letter = kind[0] in "LN" or kind == "Co"
        if is_open and (is_mark or (is_word and is_letter and not _CHARACTER.match(character))):
            found[-1] += character
        elif is_letter or kind in ("So", "Cn", "Mn", "Mc"):
            found.append(character)
            is_open, is_word = True, kind != "So" and not _CHARACTER.match(character)
        else:
            is_open = False
    return found


def _without_punctuation(text: str) -> str:
    """Return a text without the punctuation of any script, and without ASCII symbols."""
    return "".join(
        character
        for character in text
        if unicodedata.category(character)[0] != "P"
        and not (character.isascii() and unicodedata.category(character)[0] == "S")
    )


def _space_characters(text: str) -> str:
    """Put spaces around each character of a script without spaces, and its wide punctuation."""
    return _WIDE.sub(r" \g<0> ", text)
