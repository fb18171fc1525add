"""The words of a sweep in Hydra's grammar: one value, several, or a range to search in."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config import conf_files
from app.config.overrides import WORD, quote_value
from app.process.errors import UserError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SWEEPS = re.compile(r"(choice|range|interval|shuffle|sort|tag|int|float)\(")
"""beginnings of values that are never meant as text"""
LOG_SCALE_FROM = 100
"""high/low of an interval from which it is searched on a log scale without being asked"""
MOST_VALUES = 1000
"""of one key: each is checked before the first trial"""
EDGE = 0.05
"""share of an interval on either side in which the best value is at its edge"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """All numbers between two; `is_log`: equal ratios are equally likely."""

    low: float
    high: float
    is_int: bool
    is_log: bool

    def is_edge(self, value: float) -> bool:
        """Return whether a number lies in the outer twentieth of either side."""
        bend = math.log if self.is_log else float
        share = (bend(value) - bend(self.low)) / (bend(self.high) - bend(self.low))
        return not EDGE < share < 1 - EDGE

    def __str__(self) -> str:
        scale = ", log scale" if self.is_log else ""
        return f"{self.low:g} to {self.high:g}{', whole numbers' if self.is_int else ''}{scale}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """A key of a sweep, and the values that its trials may have."""

    key: str
    values: tuple[str, ...]
    """in Hydra's spelling; the two ends of an interval"""
    interval: Interval | None = None
    is_of_file: bool = False
    """whether a `sweep=NAME` file says it"""

    @property
    def varies(self) -> bool:
        """Whether trials differ in it."""
        return len(self.values) > 1

    def __str__(self) -> str:
        return str(self.interval) if self.interval else ", ".join(self.values)


def read_words(words: Iterable[str], conf: Path = conf_files.CONF) -> list[Swept]:
    """Parse the words of a sweep, those of `sweep=NAME` files first; UserError with problems.

    A key that is typed twice has the later word's values.
    """
    from_files: list[str] = []
    typed: list[str] = []
    for word in words:
        match = WORD.fullmatch(word)
        if match is not None and match["key"] == "sweep":
            from_files += _words_of_file(conf_files.find_option(conf, "sweep", match["value"]))
        else:
            typed.append(word)
    parsed: dict[str, Swept] = {}
    problems = []
    for words_of, is_of_file in ((from_files, True), (typed, False)):
        for word in words_of:
            try:
                one = dataclasses.replace(_parse(word), is_of_file=is_of_file)
            except UserError as error:
                problems += error.problems
            else:
                parsed[one.key] = one
    if problems:
        raise UserError(problems)
    return list(parsed.values())


def _words_of_file(path: Path) -> list[str]:
    file = conf_files.read_conf_file(path, package="", is_global=True)
    params = file.values.get("hydra", {}).get("sweeper", {}).get("params")
    if not set(file.values) <= {"hydra", "sweep"} or not isinstance(params, dict):
        raise UserError(
            f"{conf_files.display_path(path)}:2 expected `hydra: {{sweeper: {{params: ...}}}}`, "
            "and settings of the sweep under `sweep:`"
        )
    settings = {f"sweep.{name}": value for name, value in file.values.get("sweep", {}).items()}
    return [f"{key}={value}" for key, value in (settings | params).items()]


def _parse(word: str) -> Swept:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    match = WORD.fullmatch(word)
    if match is None or match["prefix"] == "~":
        raise UserError(f"{word}: expected key=value, or key=a,b for several values")
    key, value = match["key"], match["value"]
    quoted = (
        quote_value(value) if value[:1] in "[{" else ",".join(map(quote_value, value.split(",")))
    )
    parser = OverridesParser.create()
    for spelling in (value,) if SWEEPS.match(value) else (value, quoted):
        try:
            override = parser.parse_override(f"key={spelling}")
            if not override.is_sweep_override():
                return Swept(key=key, values=(str(override.get_value_element_as_str()),))
            if override.is_discrete_sweep():  # fails on a choice() inside a list
                values = _listed(word, override)
                return Swept(key=key, values=tuple(dict.fromkeys(values)))
        except (HydraException, OmegaConfBaseException):
            continue
        return _interval(word, key, override)
    if value.replace(" ", "").endswith("()"):
        raise UserError(f"{word}: nothing is listed; type values, as {key}=choice(8,16)")
    raise UserError(f"{key}={value}: this value cannot be read; type \"{key}='...'\" around it")


def _listed(word: str, override: Override) -> tuple[str, ...]:
    """Return the values of a list, choice() or range(); UserError for a range without an end."""
    from hydra.core.override_parser.types import RangeSweep

    value: Any = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop or 0, value.step
        numbers = (stop - start) / step if step and math.isfinite(step) else math.inf
        if not 0 < numbers <= MOST_VALUES:
            raise UserError(
                f"{word}: expected a range(START, END, STEP) of 1 to {MOST_VALUES:,} values, END "
                "not among them; 'interval(LOW, HIGH)' with sweep.search=optuna lists none"
            )
    elif word.count(",") >= MOST_VALUES:
        raise UserError(f"{word[:80]}...: more than {MOST_VALUES:,} values")
    return tuple(str(one) for one in override.sweep_string_iterator())


def _interval(word: str, key: str, override: Override) -> Swept:
    value: Any = override.value()
    if not override.is_interval_sweep():
        raise UserError(f"{word}: expected a list, choice(), range() or interval()")
    low, high = value.start, value.end
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{word}: an interval goes from a lower to a higher number, both finite")
    is_log = "log" in value.tags
    if is_log and low <= 0:
        raise UserError(f"{word}: a log scale begins above 0")
    interval = Interval(
        low=low,
        high=high,
        is_int=isinstance(low, int) and isinstance(high, int),
        is_log=is_log or 0 < low * LOG_SCALE_FROM <= high,
    )
    return Swept(key=key, values=(repr(low), repr(high)), interval=interval)


def as_words(values: dict[str, str]) -> list[str]:
    """Return `key=value` for each key."""
    return [f"{key}={value}" for key, value in values.items()]


def varied(swept: Sequence[Swept]) -> list[Swept]:
    """Return those in which trials differ."""
    return [one for one in swept if one.varies]
