"""What a pattern means among the names of a model: the one place where names are matched.

- `by_ending`: `q_proj` and `self_attn.q_proj` mean the names that end in these parts (lists);
- `by_expression`: a regular expression over whole names (a text in place of a list), as in peft;
- `by_key`: a regular expression over the end of a name (rank_pattern, alpha_pattern), as in peft.

Python's `re` may never return from a pattern such as (a+)+$ and cannot be interrupted. So
`check_patterns` tries each expression first in a process with a time limit, on the very names that
it will be matched with. Needs no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from app.process.errors import nearest
from app.process.untrusted import LIMITS_VARIABLE, limits

Rule = Callable[[str, Iterable[str]], list[str]]
"""pattern, names -> those of the names that the pattern means"""
PLAIN = re.compile(r"[\w.-]*")
"""a name, with which matching is always fast"""
MAX_PLACES = 8
"""most places that `pattern_without` leaves out: nobody types more"""
MAX_BYTES = 1 << 30
"""memory of the process in which expressions are tried"""
TRIAL = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MAX_BYTES}, {MAX_BYTES}))
given = json.load(sys.stdin)
for label, expressions in given["patterns"]:
    problem = ""
    try:
        for expression in map(re.compile, expressions):
            for name in given["names"]:
                expression.match(name)
                expression.fullmatch(name)
    except (re.error, OverflowError, RecursionError) as error:
        problem = str(error)
    print(json.dumps([label, problem]), flush=True)
"""


def by_ending(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that are `pattern`, or end in it after a dot."""
    return [name for name in names if name == pattern or name.endswith(f".{pattern}")]


def by_expression(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that the regular expression `pattern` matches as a whole."""
    return list(filter(re.compile(pattern).fullmatch, names))


def by_key(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that peft means by a key of rank_pattern or alpha_pattern."""
    return list(filter(re.compile(expression_of_key(pattern)).match, names))


def by_ending_or_expression(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that end in `pattern`; where none does, those that it matches."""
    names = list(names)
    return by_ending(pattern, names) or by_expression(pattern, names)


def expression_of_key(pattern: str) -> str:
    """Return the expression that peft matches for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({pattern})$"


def match(
    patterns: Sequence[str], names: Iterable[str], rule: Rule, *, key: str, what: str, where: str
) -> tuple[list[str], list[str]]:
    """Return the names that any of `patterns` means, in order, and a problem for each without one.

    Problems name the setting `key`, `what` was looked for, as "linear module", and `where`.
    """
    names = list(names)
    found = {pattern: rule(pattern, names) for pattern in patterns}
    matched = {name for names_of_one in found.values() for name in names_of_one}
    problems = []
    for pattern in [pattern for pattern, names_of_one in found.items() if not names_of_one]:
        known = last_parts(names)
        hint = nearest(pattern, known)
        if rule is by_expression and by_ending(pattern, names):
            hint = f" by its full name; type {key}=[{pattern}]"
        problems.append(
            f"{key}: {pattern} matches no {what}{hint} ({where} has {', '.join(known)})"
        )
    return [name for name in names if name in matched], problems


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of `modules` or lies in one of them."""
    return f"{name}.".startswith(tuple(f"{module}." for module in modules))


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the last parts of names, each once and sorted, without numbers of layers."""
    last = {name.rpartition(".")[2] for name in names} - {""}
    return sorted(part for part in last if not part.isdigit())


def shortest(names: Sequence[str], candidates: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return `candidates` where these endings mean exactly `names` among `every`, else `names`.

    Other programs read an adapter's file too, and understand short names best.
    """
    short, every = sorted(set(candidates)), list(every)
    meant = {name for pattern in short for name in by_ending(pattern, every)}
    return short if meant == set(names) else sorted(names)


def pattern_without(kept: Sequence[str], left_out: Sequence[str]) -> str | None:
    """Return a regular expression over full names that means `kept` and not `left_out`.

    None where it would have to name more than MAX_PLACES places of a model.
    """
    around = {
        ".".join(name.split(".")[:end]) for name in kept for end in range(name.count(".") + 2)
    }
    places: dict[str, None] = {}
    for name in left_out:
        parts = name.split(".")
        own = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        place = re.escape(next((prefix for prefix in own if prefix not in around), name))
        anywhere = re.sub(r"\d+", r"\\d+", place)  # in every layer, where none of them is kept
        is_kept = any(re.match(rf"{anywhere}\b", other) for other in kept)
        places[place if is_kept else anywhere] = None
    if len(places) > MAX_PLACES:
        return None
    return rf"(?!({'|'.join(places)})\b).*\.({'|'.join(last_parts(kept))})"


def check_patterns(patterns: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """List the labels of `patterns` whose regular expressions are invalid, or too slow on `names`.

    LOFT_LIMITS=regex_seconds limits the time of all of them together.
    """
    trials = [
        (label, list(expressions))
        for label, expressions in patterns.items()
        if not all(map(PLAIN.fullmatch, expressions))
    ]
    if not trials:
        return []
    given = json.dumps({"patterns": trials, "names": list(names)})
    seconds = limits().regex_seconds
    command = [sys.executable, "-I", "-S", "-c", TRIAL]
    try:
        done = subprocess.run(
            command, input=given.encode(), capture_output=True, timeout=seconds, check=False
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
    answers = [json.loads(line) for line in printed.splitlines()]
    problems = [
        f"{label} is not a regular expression ({problem})" for label, problem in answers if problem
    ]
    if len(answers) < len(trials):
        problems.append(
            f"{trials[len(answers)][0]} is a regular expression that takes more than {seconds} s "
            "or 1 GiB over the model's names; write it without repeats within repeats, or as a "
            f"list of names ({LIMITS_VARIABLE}=regex_seconds=NUMBER sets another limit)"
        )
    return problems
