"""The number that an answer gives, as people and models of many languages write it.

Reads text only; never converts a unit: 50 % is 50.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

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
    """Return the value of a match of `_NUMBER`: an int if it is whole."""
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
    """Return digits with at most one point from digits with separators."""
    digits = re.sub(r"[^\d.,]", "", text)
    whole, _, rest = digits.rpartition("." if digits.rfind(".") > digits.rfind(",") else ",")
    is_grouped = _COMMAS.fullmatch(digits) or (digits.count(".") > 1 and "," not in digits)
    if is_grouped or not (whole or rest != digits):
        return re.sub(r"\D", "", digits)
    return f"{re.sub(r'[^0-9]', '', whole) or 0}.{rest}"
