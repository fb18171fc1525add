"""Regular expressions that people type or files bring: tried for a limited time before they count.

Python's `re` may go on for ever over a pattern such as (a+)+$, and cannot be stopped from inside.
So each is tried first in a process that can be ended, on the very names that it will be matched
with; the same work in this process then takes as long as it took there. Needs no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from app.process.untrusted import LIMITS_VARIABLE, limits

PLAIN = re.compile(r"[\w.-]*")
"""a name, over which nothing can take long"""
MAX_BYTES = 1 << 30
"""memory of the process that tries them"""
TRIAL = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MAX_BYTES}, {MAX_BYTES}))
asked = json.load(sys.stdin)
for label, expressions in asked["patterns"]:
    problem = ""
    try:
        for expression in map(re.compile, expressions):
            for name in asked["names"]:
                expression.match(name)
                expression.fullmatch(name)
    except (re.error, OverflowError, RecursionError) as error:
        problem = str(error)
    print(json.dumps([label, problem]), flush=True)
"""


def ending(pattern: str) -> str:
    """Return the expression by which peft looks for a key of rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({pattern})$"


def check_patterns(patterns: Mapping[str, Sequence[str]], names: Iterable[str]) -> list[str]:
    """List what is wrong with regular expressions, by label, when they are matched with `names`.

    One that is none, or takes longer than LOFT_LIMITS=regex_seconds allows for all of them.
    """
    trials = [
        (label, list(expressions))
        for label, expressions in patterns.items()
        if not all(map(PLAIN.fullmatch, expressions))
    ]
    if not trials:
        return []
    asked = json.dumps({"patterns": trials, "names": list(names)})
    seconds = limits().regex_seconds
    command = [sys.executable, "-I", "-S", "-c", TRIAL]
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=seconds, check=False
        )
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    answers = [json.loads(line) for line in said.splitlines()]
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
