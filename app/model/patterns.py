"""Match patterns against the module and parameter names of a model.

- `by_ending`: `q_proj` or `self_attn.q_proj` matches names that end in these parts (in lists);
- `by_expression`: a regular expression over the full name (a string instead of a list), as in peft;
- `by_key`: a regular expression over the end of the name (rank_pattern, alpha_pattern), as in peft;
- `by_wildcard`: the full name with * for any text (lr_by_pattern).

Python's `re` may take forever for a pattern such as (a+)+$ and cannot be interrupted. Therefore
`check_patterns` first runs each expression on the names of the model in a process with limited
time. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial

from common.errors import nearest
from common.limited import LimitError, ProcessLimits, run_limited
from common.untrusted import LIMITS_VARIABLE, limits

Rule = Callable[[str, Iterable[str]], list[str]]
"""(pattern, names) -> the names that the pattern matches"""
_PLAIN = re.compile(r"[\w.-]*")
"""matches patterns without special characters, which are always fast"""
_MAX_EXCLUSIONS = 8
"""largest number of prefixes that a pattern of `pattern_without` excludes, to keep it readable"""


def by_ending(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that are `pattern`, or end in it after a dot."""
    return [name for name in names if name == pattern or name.endswith(f".{pattern}")]


def by_expression(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that the regular expression `pattern` matches in full."""
    return list(filter(re.compile(pattern).fullmatch, names))


def by_key(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that peft matches by a key of rank_pattern or alpha_pattern."""
    return list(filter(re.compile(expression_of_key(pattern)).match, names))


def by_wildcard(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that `pattern` matches in full; * stands for any text."""
    return [name for name in names if fnmatchcase(name, pattern)]


def by_ending_or_expression(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that end in `pattern`; if there are none, those that it matches in full."""
    names = list(names)
    return by_ending(pattern, names) or by_expression(pattern, names)


def expression_of_key(pattern: str) -> str:
    """Return the regular expression that peft uses for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({pattern})$"


def match(
    patterns: Sequence[str], names: Iterable[str], rule: Rule, *, key: str, what: str, where: str
) -> tuple[list[str], list[str]]:
    """Return the names that any of `patterns` matches, in order, and a problem per unused pattern.

    `key`: setting of the patterns, `what`: kind of the names ("linear module"), `where`: owner of
    the names; all for the text of problems.
    """
    names = list(names)
    matches = {pattern: rule(pattern, names) for pattern in patterns}
    matched = {name for matches_of_pattern in matches.values() for name in matches_of_pattern}
    problems = []
    for pattern in [each for each in matches if not matches[each]]:
        known = last_parts(names)
        hint = nearest(pattern, known)
        if rule is by_expression and by_ending(pattern, names):
            hint = f" by its full name; type {key}=[{pattern}]"
        problems.append(
            f"{key}: {pattern} matches no {what}{hint} ({where} has {', '.join(known)})"
        )
    return [name for name in names if name in matched], problems


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of `modules` or inside one of them."""
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the distinct last parts of names, sorted, without layer numbers."""
    last = {name.rpartition(".")[2] for name in names} - {""}
    return sorted(part for part in last if not part.isdigit())


def shortest(names: Sequence[str], candidates: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return `candidates` if, as endings, they match exactly `names` among `every`; else `names`.

    Other programs read an adapter's config too, and some expect short names.
    """
    short, every = sorted(set(candidates)), list(every)
    matched = {name for pattern in short for name in by_ending(pattern, every)}
    return short if matched == set(names) else sorted(names)


def pattern_without(included: Sequence[str], excluded: Sequence[str]) -> str | None:
    """Return a regular expression over full names that matches `included` but not `excluded`.

    None if it would have to exclude more than _MAX_EXCLUSIONS prefixes.
    """
    included_prefixes = {
        ".".join(name.split(".")[:end]) for name in included for end in range(name.count(".") + 2)
    }
    exclusions: dict[str, None] = {}
    for name in excluded:
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        # The shortest prefix that no included name has.
        shortest_prefix = next((each for each in prefixes if each not in included_prefixes), name)
        exact = re.escape(shortest_prefix)
        in_any_layer = re.sub(r"\d+", r"\\d+", exact)
        is_included = any(re.match(rf"{in_any_layer}\b", other) for other in included)
        exclusions[exact if is_included else in_any_layer] = None
    if len(exclusions) > _MAX_EXCLUSIONS:
        return None
    return rf"(?!({'|'.join(exclusions)})\b).*\.({'|'.join(last_parts(included))})"


def check_patterns(patterns: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """Return a problem for each label with an invalid regular expression, and the first slow one.

    LOFT_LIMITS=regex_seconds limits the time of a label's expressions on `names`.
    """
    problems: list[str] = []
    names, seconds = list(names), limits().regex_seconds
    for label, expressions in patterns.items():
        if all(map(_PLAIN.fullmatch, expressions)):
            continue
        work = partial(_try_expressions, expressions, names)
        try:
            problem = run_limited(work, ProcessLimits(seconds=seconds))
        except LimitError:
            return [
                *problems,
                f"{label} is a regular expression that takes more than {seconds} s or 1 GiB on the "
                "names of the model; write it without nested repeats, or as a list of names "
                f"({LIMITS_VARIABLE}=regex_seconds=NUMBER changes it)",
            ]
        if problem:
            problems.append(f"{label} is not a valid regular expression ({problem})")
    return problems


def _try_expressions(expressions: Sequence[str], names: Sequence[str]) -> str:
    """Match names by expressions; return why one of these is invalid, or nothing."""
    try:
        for expression in map(re.compile, expressions):
            for name in names:
                expression.match(name)
                expression.fullmatch(name)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""
