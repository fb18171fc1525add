"""Metrics that compare a model's answer with a reference, or a classifier's with its classes.

Each of `ANSWER_METRICS` is from 0 to 1; a custom metric can be any finite number. ROUGE, BLEU and
chrF come from rouge-score and sacrebleu (the extra `eval`).

Scripts that write no space between words (Chinese, Japanese, Thai, Khmer, ...) are split into
characters, as sacrebleu's tokenizers `zh` and `char` and MLQA's F1 do. Numbers are read as people
and models of many languages write them, and no unit is converted: 50 % is 50.
"""

from __future__ import annotations

import importlib.util
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import UserError, nearest
from common.installation import install_extra

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from app.evaluation.generation import EvaluationConfig

    Floats = npt.NDArray[np.float64]
    Counts = npt.NDArray[np.int64]

ANSWER_METRICS = ("exact_match", "numeric", "f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf")
_PACKAGES = {
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
CONFUSION_FILE = "confusion.csv"
MAX_SHOWN_CLASSES = 10
"""classes up to which the table of confused classes is printed"""
_PLAIN = str.maketrans(
    dict(zip("\uff0b\uff0c\uff0e\uff05\uff0f\uff3b\uff3d", "+,.%/[]", strict=True))
    | dict.fromkeys("\u2212\uff0d\ufe63\u2010\u2011\u2012\u2013", "-")  # minus signs and dashes
    | {"\u066b": ".", "\u2044": "/"}  # the Arabic decimal sign, the slash of fractions
)
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LATEX_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!;: ])(?=\d{3})")
_LATEX_FRACTION = re.compile(
    r"\\[cdt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))"
)
_LIST = re.compile(r"\[[^\[\]\n]*\]|\(\s*[-+\d.]+(?:,[-+\d.]+)+\s*\)")
_POWER = re.compile(r"(?<=\d)\*\*(?=\d)")
_VULGAR_AFTER_DIGIT = re.compile("(?<=\\d)(?=[¼-¾⅐-⅞])")
_DATE = re.compile(r"(?<!\d)\d+(?:/\d+){2,}")
_UNIT_EXPONENT = re.compile(r"(?<!\d)\^(?:\{[-+]?\d+\}|[-+]?\d+)")
_COMMAS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}")
_NUMBER = re.compile(
    rf"""
    (?: (?<![^\W_]) (?<![)\]}}%°]) (?P<sign>[-+]) (?=[$€£¥₹₽]?[\d.]) )?
    (?: [$€£¥₹₽] (?P<late_sign>[-+])? )?
    (?P<value>
        (?:{_COMMAS.pattern}) (?:\.\d+)? (?![\d,]\d|\d)         # 1,234.5 and India's 1,00,000
      | [1-9]\d{{0,2}} (?:[ \u00a0\u202f\u2009]\d{{3}})+ (?!\d) (?:[.,]\d+)?
      | [1-9]\d{{0,2}} (?:['’\u066c_]\d{{3}})+ (?!\d) (?:[.,]\d+)?
      | [1-9]\d{{0,2}} (?:\.\d{{3}})+ ,\d+ (?![\d,]\d|\d)       # 1.234,5
      | [1-9]\d{{0,2}} (?:\.\d{{3}}){{2,}} (?![\d.]\d|\d)       # 1.234.567
      | (?<!,) (?: 0,\d+ | \d+,(?:\d{{1,2}}|\d{{4,}}) ) (?![\d,]\d|\d)  # 1,5: a decimal comma
      | \d+ (?:\.\d+)?
      | (?<!\d) \.\d+
    )
    (?: \s{{1,2}} (?P<mixed>\d+/[1-9]\d*) (?![\d/]) | (?P<over>\s?/\s?-?[1-9]\d*) (?![\d/.]) )?
    (?: [eE] (?P<exponent>[-+]?\d+) (?![^\W_]) )?
    (?: \s*(?:×|x|\*|·|\\times|\\cdot)\s*10\^ (?P<ten>\{{[-+]?\d+\}}|[-+]?\d+) )?
    (?: \^ (?P<power>\{{[-+]?\d+\}}|[-+]?\d+) )?
    """,
    re.VERBOSE,
)
_MAX_DIGITS, _MAX_EXPONENT = 300, 300


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
    """Return the metrics that `config` names, in a fixed order, a custom metric last."""
    names = {*config.metrics, *(["exact_match"] if config.exact_match else [])}
    metrics = [_build(name) for name in ANSWER_METRICS if name in names]
    return metrics if config.metric is None else [*metrics, _load_metric(config.metric)]


def check_metrics(config: EvaluationConfig) -> list[str]:
    """List the problems of the configured metrics, without running a custom metric's code."""
    missing = {_PACKAGES[name] for name in config.metrics if name in _PACKAGES}
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
    if function in ANSWER_METRICS:
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
    """Run the file of `FILE.py:function`; return the function as a metric, or raise UserError."""
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
    # Each character of a script without spaces, and its wide punctuation, is a word.
    spaced = partial(_WIDE.sub, r" \g<0> ") if name == "bleu" else str
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
    return "".join(
        character
        for character in text
        if unicodedata.category(character)[0] != "P"
        and not (character.isascii() and unicodedata.category(character)[0] == "S")
    )


def class_metrics(
    outputs: Floats, labels: Counts, names: Sequence[str], *, is_multi_label: bool = False
) -> dict[str, float]:
    """Return `f1` and `auc`, each the mean over classes, and `f1_NAME` of each class.

    The AUC of a class ranks its rows against all others by its probability; a class that no row
    has, or all have, has no AUC, and one that is never guessed either has no F1.

    Args:
        outputs: logits [classes, rows].
        labels: class of each row, or with `is_multi_label` its classes as bits [rows].
        names: names of the classes.
    """
    import numpy as np

    numbers, scores = np.arange(len(names))[:, None], outputs
    if is_multi_label:
        of, guessed = (labels >> numbers) & 1 > 0, outputs > 0
    else:
        of, guessed = labels == numbers, outputs.argmax(0) == numbers
        scores = np.exp(outputs - outputs.max(0))
        scores /= scores.sum(0)
    right, total = (of & guessed).sum(1), of.sum(1) + guessed.sum(1)
    metrics = {
        f"f1_{name}": float(2 * right[index] / total[index])
        for index, name in enumerate(names)
        if total[index]
    }
    if metrics:
        metrics["f1"] = float(np.mean(list(metrics.values())))
    areas = [
        area_under_curve(score, own)
        for score, own in zip(scores, of, strict=True)
        if own.any() and not own.all()
    ]
    return metrics | ({"auc": float(np.mean(areas))} if areas else {})


def area_under_curve(scores: Floats, is_positive: npt.NDArray[np.bool_]) -> float:
    """Return the share of pairs of a positive and a negative row that `scores` rank rightly.

    A tie counts as half a pair (Mann and Whitney's U).
    """
    import numpy as np

    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num_positive = int(is_positive.sum())
    above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * (len(scores) - num_positive)))


def confusion(outputs: Floats, labels: Counts) -> Counts:
    """Return the number of rows of each class that were taken for each class [true, guessed]."""
    import numpy as np

    counts = np.zeros((len(outputs), len(outputs)), np.int64)
    np.add.at(counts, (labels, outputs.argmax(0)), 1)
    return counts


def confusion_cells(counts: Counts, names: Sequence[str]) -> list[list[str]]:
    """Return `confusion` as a table: a row for each class, a column for each guess."""
    rows = zip(names, counts.tolist(), strict=True)
    return [["class", *names], *([name, *map(str, row)] for name, row in rows)]


def last_number(text: str) -> float | None:
    """Return the first number after the last `####` that has one, else the last of the text.

    `####` is GSM8K's mark of the final answer. A whole number is an int, however large.
    """
    plain = _plain(text)
    for end in reversed(plain.split("####")[1:]):
        if match := _NUMBER.search(end):
            return _value(match)
    matches = list(_NUMBER.finditer(plain))
    return _value(matches[-1]) if matches else None


def _plain(text: str) -> str:
    """Return the text with one spelling for each sign, separator, fraction and exponent."""
    text = text.translate(_PLAIN)
    text = _SUPERSCRIPT.sub(lambda raised: "^" + raised[0].translate(_RAISED), text)
    if not text.isascii():
        text = "".join(map(_plain_character, _VULGAR_AFTER_DIGIT.sub(" ", text)))
    text = _LATEX_SEPARATOR.sub(",", text)
    text = _POWER.sub("^", text)
    text = _LATEX_FRACTION.sub(lambda found: f"{found[1] or found[2]}/{found[3] or found[4]}", text)
    text = _DATE.sub(lambda date: date[0].replace("/", "; "), text)
    text = _LIST.sub(_spaced_list, text)
    return _UNIT_EXPONENT.sub("", text)


def _plain_character(character: str) -> str:
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    parts = unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return parts if "/" in parts and unicodedata.category(character) == "No" else character


def _spaced_list(found: re.Match[str]) -> str:
    """Return a list with a space after its commas, so that none reads as a separator."""
    is_one_number = found[0].startswith("(") and _COMMAS.fullmatch(found[0].strip("() "))
    return found[0] if is_one_number else found[0].replace(",", ", ")


def _value(match: re.Match[str]) -> float:
    digits = _decimal(match["value"])
    if len(digits) > _MAX_DIGITS:
        return float(digits)
    value = Fraction(digits)
    if match["mixed"]:
        value += Fraction(match["mixed"])
    if match["over"] and value.denominator == 1:
        value /= int(re.sub(r"[/\s]", "", match["over"]))
    exponents = [match[name] for name in ("exponent", "ten") if match[name]]
    tens = sum(int(exponent.strip("{}")[:9]) for exponent in exponents)
    power = int((match["power"] or "1").strip("{}")[:9])
    if max(abs(tens), abs(power)) > _MAX_EXPONENT or (value == 0 and power < 0):
        return math.inf if max(tens, power) > 0 else 0.0
    value = value**power * Fraction(10) ** tens
    if "-" in (match["sign"], match["late_sign"]):
        value = -value
    try:
        return int(value) if value.denominator == 1 else float(value)
    except OverflowError:
        return math.inf


def _decimal(text: str) -> str:
    digits = re.sub(r"[^\d.,]", "", text)
    whole, _, rest = digits.rpartition("." if digits.rfind(".") > digits.rfind(",") else ",")
    is_grouped = _COMMAS.fullmatch(digits) or (digits.count(".") > 1 and "," not in digits)
    if is_grouped or not (whole or rest != digits):
        return re.sub(r"\D", "", digits)
    return f"{re.sub(r'[^0-9]', '', whole) or 0}.{rest}"
