"""Numbers are read as they are written, in every notation of the table."""

from __future__ import annotations

import math
import time

import pytest

from app.evaluation.metrics import Answer, is_numeric_match, last_number

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


@pytest.mark.parametrize(
    "piece",
    ["1,000", "1 ", "[(", "9", "1,", "1^", "1.000", "1/2/", "-", "\u00bd", r"\frac1", "(1,"],
)
def test_a_long_answer_is_read_in_time(piece: str) -> None:
    started = time.perf_counter()
    last_number(piece * 4000)
    assert time.perf_counter() - started < 2
