"""Metrics equal reference libraries and definitions, numbers are read as they are written."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest

from app.evaluation.generation import EvaluationConfig
from app.evaluation.metrics import (
    Answer,
    Metric,
    area_under_curve,
    build_metrics,
    check_metrics,
    class_metrics,
    confusion,
    confusion_cells,
    is_exact_match,
    is_numeric_match,
    last_number,
    word_f1,
)
from common.errors import UserError


def answer(text: str, *, is_finished: bool = True) -> Answer:
    return Answer(text, is_finished)


def metric(name: str) -> Metric:
    (one,) = build_metrics(EvaluationConfig(metrics=[name]))
    return one


def test_an_exact_match_must_be_finished() -> None:
    assert is_exact_match(answer(" yes\n"), "yes")
    assert not is_exact_match(answer("yes", is_finished=False), "yes")
    assert not is_exact_match(answer("Yes"), "yes")


def test_f1_counts_words_as_squad_does() -> None:
    assert word_f1(answer("The cat sat."), "a cat sat") == 1.0
    assert word_f1(answer("cat dog"), "cat") == pytest.approx(2 / 3)
    assert word_f1(answer(""), "cat") == 0.0
    assert word_f1(answer("the"), "") == 1.0  # no words on either side


def test_rouge() -> None:
    pytest.importorskip("rouge_score")
    # By hand, Lin 2004: 3 of 4 words, 2 of 3 pairs, 3 in order.
    for name, expected in (("rouge1", 3 / 4), ("rouge2", 2 / 3), ("rougeL", 3 / 4)):
        found = metric(name).score_row(answer("the small cat ran"), "the small cat slept")
        assert found == pytest.approx(expected)


def test_bleu_and_chrf_of_a_data_set_equal_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    answers = ["the cat sat on the mat today", "a dog barked"]
    references = ["the cat sat on the mat yesterday", "the dog barked loudly"]
    for name, whole in (("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)):
        one = metric(name)
        scores = [one.score(answer(a), r, "") for a, r in zip(answers, references, strict=True)]
        expected = whole(answers, [references]).score / 100
        assert one.total(scores, answers, references) == pytest.approx(expected)
        assert all(0 <= score <= 1 for score in scores)
        assert one.score(answer(""), "a reference", "") == 0.0


SCRIPTS = {  # an answer, and a wrong one
    "latin": ("Paris is the capital.", "Rome is the capital."),
    "accents": ("Tiếng Việt", "Tiếng Anh"),
    "arabic": ("القاهرة عاصمة مصر", "باريس عاصمة فرنسا"),
    "devanagari": ("नई दिल्ली भारत की राजधानी है।", "मुंबई भारत में है।"),
    "thai": ("กรุงเทพมหานคร", "เชียงใหม่"),
    "chinese": ("巴黎是法国的首都。", "柏林是德国的首都。"),
    "rare_han": ("𠮷野家", "松屋"),
    "japanese": ("とうきょうはにほんのしゅとです。", "きょうとはふるいまちです。"),
    "korean": ("서울은 대한민국의 수도이다.", "부산은 항구이다."),
    "emoji": ("👨‍👩‍👧 👍🏽", "👎"),
    "sign": ("!", "?"),
}


@pytest.mark.parametrize("name", ["f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf"])
def test_an_exact_answer_scores_1_in_every_script(name: str) -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    one = metric(name)
    for script, (right, wrong) in SCRIPTS.items():
        for text, is_right in ((right, True), (wrong, False)):
            score = one.score(answer(text), right, "")
            assert 0 <= score <= 1
            is_whole = one.total([score], [text], [right]) == 1
            assert (score == 1) == is_whole == is_right, script
    for script in ("chinese", "japanese", "thai") * (name not in ("rouge2", "chrf")):
        right = SCRIPTS[script][0]  # characters in common count
        assert 0.2 < one.score(answer(right[: len(right) * 2 // 3]), right, "") < 1, script


def test_bleu_of_chinese_equals_sacrebleus_own_tokenizer() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    answers = ["我爱北京天安门,2024年OK!", SCRIPTS["chinese"][0]]
    references = ["我爱上海外滩，2024年OK！", SCRIPTS["chinese"][1]]
    expected = sacrebleu.corpus_bleu(answers, [references], tokenize="zh").score / 100
    assert metric("bleu").total([0, 0], answers, references) == pytest.approx(expected)


CUSTOM = "def half(answer, reference):\n    return len(answer) / (2 * len(reference))\n"


def custom_metric(tmp_path: Path, code: str, function: str = "half") -> EvaluationConfig:
    file = tmp_path / "mine.py"
    file.write_text(code)
    return EvaluationConfig(metric=f"{file}:{function}", allow_code=True)


def test_a_custom_metric_is_a_function_of_answer_and_reference(tmp_path: Path) -> None:
    config = custom_metric(tmp_path, CUSTOM)
    assert check_metrics(config) == []
    (one,) = build_metrics(config)
    assert (one.name, one.score(answer("ab"), "abcd", "")) == ("half", 0.25)


@pytest.mark.parametrize(
    ("code", "function", "words"),
    [
        (CUSTOM, "hafl", "has no function hafl; did you mean half?"),
        ("def half(answer, reference): return 'much'", "half", "returned 'much'"),
        ("def half(answer, reference): return float('nan')", "half", "returned nan"),
        ("def half(answer, reference): return 1 / 0", "half", "ZeroDivisionError"),
        ("import not_there_at_all", "half", "ModuleNotFoundError"),
    ],
)
def test_errors_of_a_custom_metric_name_their_cause(
    code: str, function: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="evaluation") as refused:
        build_metrics(custom_metric(tmp_path, code, function))[0].score(answer("a"), "b", "rows:3")
    assert words in str(refused.value)


def test_a_custom_metric_needs_allow_code(tmp_path: Path) -> None:
    config = custom_metric(tmp_path, "raise SystemExit('it ran')")
    config.allow_code = False
    (problem,) = check_metrics(config)
    assert "is code that runs with your permissions" in problem


def test_the_auc_is_the_share_of_rightly_ranked_pairs() -> None:
    rng = np.random.default_rng(0)
    scores, is_positive = rng.integers(0, 6, 40) / 5, rng.random(40) < 0.3
    ranked = [
        (p > n) + 0.5 * (p == n)
        for p, n in itertools.product(scores[is_positive], scores[~is_positive])
    ]
    assert area_under_curve(scores, is_positive) == pytest.approx(np.mean(ranked))


def test_f1_and_auc_are_means_over_the_classes_that_occur() -> None:
    names = ["a", "b", "c", "never"]
    labels = np.array([0, 0, 0, 1, 1, 2])
    guesses = np.array([0, 0, 1, 1, 2, 1])
    outputs = np.random.default_rng(0).random((4, 6))
    outputs[guesses, range(6)] += 2.0
    found = class_metrics(outputs, labels, names)
    # a: precision 1, recall 2/3; b: precision 1/3, recall 1/2; c: none of its rows is found.
    assert found == pytest.approx(
        {"f1_a": 0.8, "f1_b": 0.4, "f1_c": 0.0, "f1": 0.4, "auc": found["auc"]}
    )
    shares = np.exp(outputs) / np.exp(outputs).sum(0)
    areas = [area_under_curve(shares[index], labels == index) for index in range(3)]
    assert found["auc"] == pytest.approx(np.mean(areas))
    counts = confusion(outputs, labels)
    assert counts.tolist() == [[2, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert confusion_cells(counts, names)[:2] == [["class", *names], ["a", "2", "1", "0", "0"]]


def test_the_classes_of_rows_with_several_are_measured_each_alone() -> None:
    outputs = np.array([[1.0, -1.0, 2.0, -2.0], [3.0, 1.0, -1.0, -2.0]])
    found = class_metrics(outputs, np.array([1, 3, 1, 0]), ["a", "b"], is_multi_label=True)
    # a is in rows 0 to 2 and guessed in 0 and 2; b is in row 1 and guessed in 0 and 1.
    expected = {"f1_a": 4 / 5, "f1_b": 2 / 3, "f1": (4 / 5 + 2 / 3) / 2}
    assert found == pytest.approx(expected | {"auc": (3 / 3 + 2 / 3) / 2})
    assert class_metrics(-abs(outputs), np.zeros(4, int), ["a", "b"], is_multi_label=True) == {}
    of_one = class_metrics(np.array([[2.0, 2.0], [0.0, 0.0]]), np.array([0, 0]), ["a", "b"])
    assert of_one == {"f1_a": 1.0, "f1": 1.0}  # without an AUC


FORMS: dict[str, list[tuple[str, float | None]]] = {
    "plain": [("She has 18 left.", 18), ("costs $.5", 0.5), ("5.", 5), ("no number", None)],
    "marked": [("3 x 4 = 12\n#### 1,234", 1234), ("#### -7.50 dollars, 2 days", -7.5),
        ("#### 12 apples of 40", 12), ("#### none, but 5 before: ####", 5),
        ("#### 5\n#### 6", 6)],
    "thousands": [("12 apples and 2,000.25", 2000.25), ("12,345,678.9", 12345678.9),
        ("1,000, then", 1000), ("1,000.", 1000), ("1 234 567", 1234567), ("1\u00a0234", 1234),
        ("1\u202f234", 1234), ("1'234.5", 1234.5), ("1\u2019234", 1234), ("1_000", 1000),
        ("9{,}500", 9500), (r"9\,500", 9500), (r"1,\!000", 1000), ("1,00,000", 100000),
        ("1.234,56", 1234.56), ("1.234.567", 1234567), (r"\boxed{1,234}", 1234),
        ("(1,234)", 1234), ("9007199254740993", 9007199254740993)],
    "decimals": [("0.1", 0.1), ("3,5", 3.5), ("0,125", 0.125), ("1 000,5", 1000.5)],
    "lists": [("[1,5,8]", 8), ("[1,-2]", -2), ("[1,234]", 234), ("(1,2)", 2), ("1,2,3", 3),
        ("1,-2", -2), ("2,3 and 4", 4)],
    "ranges": [("10-20", 20), ("10\u201320", 20), ("10 - 20", 20), ("$10-$20", 20),
        ("10%-20%", 20), ("5 to -3", -3), ("covid-19", 19)],
    "signs": [("-7", -7), ("\u22127", -7), ("\u20137", -7), ("\uff0d7", -7), ("+7", 7),
        ("-$5", -5), ("$-5", -5), ("=-3", -3), ("answer:-3", -3), ("is:**-5**", -5)],
    "units": [("50%", 50), ("\u20ac5", 5), ("12 m^2", 12), ("12 m\u00b2", 12),
        ("$1,234.50.", 1234.5)],
    "fractions": [("3/4", 0.75), ("1 3/4", 1.75), (r"\frac{3}{4}", 0.75), (r"-\frac{1}{2}", -0.5),
        (r"\dfrac34", 0.75), ("\u00bd", 0.5), ("2\u00bd", 2.5), ("-\u00bd", -0.5),
        ("12/05/2020", 2020), ("16/4=<<16/4=4>>4", 4), ("1/0", 0)],
    "exponents": [("1e5", 100000), ("2.5E-3", 0.0025), ("-1.5e3", -1500), ("1.1e3", 1100),
        ("2\u00d710^5", 200000), ("2\u00d710\u2075", 200000), (r"2 \times 10^{-3}", 0.002),
        ("2^10", 1024), ("2**10", 1024), ("1e999999999999", math.inf)],
    "digits": [("\u0663\u0664", 34), ("\u0967\u0968", 12),
        ("\uff11\uff0c\uff12\uff13\uff14", 1234), ("\u0661\u066c\u0662\u0663\u0664", 1234),
        ("3\u066b5", 3.5)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [pytest.param(*form, id=f"{kind}-{form[0]}") for kind in FORMS for form in FORMS[kind]],
)
def test_a_number_is_read_as_written(text: str, number: float | None) -> None:
    assert last_number(text) == number
    assert last_number(f"The answer is {text}") == number
    if number is not None:
        assert is_numeric_match(Answer(text, is_finished=True), text)
        assert not is_numeric_match(Answer(str(number - 1), is_finished=True), text) or (
            math.isinf(number)
        )
    else:
        assert not is_numeric_match(Answer("seven", is_finished=True), text)


@pytest.mark.parametrize(
    "piece",
    ["1,000", "1 ", "[(", "9", "1,", "1^", "1.000", "1/2/", "-", "\u00bd", r"\frac1", "(1,"],
)
def test_a_long_answer_is_read_in_time(piece: str) -> None:
    started = time.perf_counter()
    last_number(piece * 4000)
    assert time.perf_counter() - started < 2
