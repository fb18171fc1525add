"""Settings that are never taken from a folder: the folder may be somebody else's.

Which these are stands at their fields (`grants`): settings that run code, name a place to write to
or a host to contact. One rule for whatever is read back: the config.yaml of a run or a trial, and
the words of a sweep. They count only if they are typed again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import shlex
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.facts import Grant, as_typed, default_of, facts_of, leaves_of
from common.redaction import redact

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig

log = logging.getLogger(__name__)
URL = re.compile(r"[A-Za-z][\w+.-]*:/|[^/]+:\d{1,5}$")
"""a URL, or HOST:PORT"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Granting:
    """A setting read from a folder that grants something, with its value."""

    grants: Grant
    key: str
    """the key to type: for a setting of a list's element, that of the list"""
    value: str
    """the value to type"""
    default: Any
    """dataclasses.MISSING if it is required"""
    at: str
    """its own key and value"""
    names: str = ""
    """the code that would run"""

    def problem(self) -> str:
        """Say why it must be typed, and what."""
        override = shlex.quote(f"{self.key}={self.value}")
        if self.grants == "host":
            return (
                f"{self.at} contacts a host that the folder names, and is never taken from it; if "
                f"you trust that host, type {override}"
            )
        return (
            f"{self.at} runs {self.names}, and is never taken from a folder; read it, then type "
            f"{override} (or {self.key}={as_typed(self.default)} to continue without)"
        )


def not_taken(
    config: TrainConfig, typed: AbstractSet[str], *, skip: Collection[str] = ()
) -> list[Granting]:
    """List the settings of a config read from a folder that grant something and were not typed.

    The parts and settings of the top level that `skip` names are not looked at.
    """
    model, code = config.model, config.evaluation.metric or "that of its tasks"
    revision = "" if model.revision is None else f" (revision {model.revision})"
    names = {
        "model.trust_remote_code": f"Python files that come with the model {model.path}{revision}",
        "evaluation.allow_code": f"code of the evaluation ({code})",
    }
    found = []
    for at, _, field, value in leaves_of(config, skip=skip):
        grants, default, key = facts_of(field).grants, default_of(field), at.partition("[")[0]
        is_harmless = value == default or (grants == "host" and not URL.match(str(value)))
        if grants in (None, "nothing") or is_harmless or is_typed(key, typed):
            continue
        whole = functools.reduce(getattr, key.split("."), config)
        found.append(
            Granting(
                grants=grants,
                key=key,
                value=redact(as_typed(whole)),
                default=default,
                at=f"{at}={redact(as_typed(value))}",
                names=names.get(key, "the code that it names"),
            )
        )
    return found


def is_typed(key: str, typed: AbstractSet[str]) -> bool:
    """Whether a setting or a group that contains it was typed."""
    names = key.split(".")
    return any(".".join(names[: end + 1]) in typed for end in range(len(names)))


def settle(found: Iterable[Granting], place: Path) -> tuple[list[Granting], list[str]]:
    """Return the settings of `place` to reset to their defaults, and what must be typed.

    A place to write to falls back to its default, with a warning; what else a result may depend on
    must be typed.
    """
    reset, problems = [], []
    for each in found:
        if each.grants != "write":
            problems.append(f"{place}: {each.problem()}")
            continue
        reset.append(each)
        log.warning(
            "%s: %s is not inherited: a folder never decides where to write; type it to use it",
            *(place, each.at),
        )
    return reset, list(dict.fromkeys(problems))


def reset_to_default(config: TrainConfig, granting: Granting) -> None:
    """Set a setting to its default."""
    *parts, name = granting.key.split(".")
    setattr(functools.reduce(getattr, parts, config), name, granting.default)
