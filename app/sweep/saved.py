"""The words of a sweep in its folder, from which it is resumed: saved, and read back.

The folder may be somebody else's: links in it are refused, and words that grant something count
only if they are typed again (`app.config.received`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from app.config.conf_files import LimitedLoader, read_conf_file
from app.config.schema import as_typed, default_of
from app.config.verbs import GRANTING
from app.run import NEVER
from app.run.folder import expand_home, refuse_special_entries
from app.sweep.parameters import Parameter, parse_parameters
from common.errors import UserError
from common.files import write_atomically
from common.redaction import REDACTED, redacted

SWEEP_FILE = "sweep.yaml"
"""file in a sweep's folder with its overrides"""
RESUME = re.compile(r"\+*resume=(?P<value>.+)")
KEEPS = "a resumed sweep keeps its overrides"
NO_OVERRIDES = f"{KEEPS}; use resume=FOLDER without others"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The parameters of a sweep, and where they come from."""

    parameters: list[Parameter]
    folder: Path | None = None
    """folder of the sweep that is resumed; None for a new one"""
    typed: frozenset[str] = frozenset()
    """keys that were typed next to `resume=`"""


def save_words(folder: Path, overrides: Sequence[str]) -> None:
    """Save the overrides of a new sweep, without secrets."""
    write_atomically(folder / SWEEP_FILE, yaml.safe_dump({"words": redacted(overrides)}))


def load_words(overrides: Sequence[str]) -> Words:
    """Return the parameters of a new sweep, or those of the one in `resume=FOLDER`."""
    found = [match["value"] for item in overrides if (match := RESUME.fullmatch(item)) is not None]
    if not found or found[0] == NEVER:
        return Words(parameters=parse_parameters(overrides))
    value = found[0]
    folder = expand_home("resume", value)
    file = folder / SWEEP_FILE
    if folder.is_dir():
        refuse_special_entries(folder)
    if not file.is_file():
        raise UserError(
            f"resume={value}: expected the folder of a sweep, with {SWEEP_FILE}; {NO_OVERRIDES}"
        )
    saved = _read_words(file)
    typed = parse_parameters(item for item in overrides if RESUME.fullmatch(item) is None)
    parameters = _take_typed(parse_parameters(saved), typed, value)
    keys = frozenset(parameter.key for parameter in typed)
    return Words(parameters=parameters, folder=folder, typed=keys)


def _read_words(file: Path) -> list[str]:
    saved = read_conf_file(file, package="", loader=LimitedLoader).values.get("words")
    if not (isinstance(saved, list) and saved and all(isinstance(item, str) for item in saved)):
        raise UserError(
            f"{file}: words: expected a list of overrides; copy the sweep's folder again"
        )
    return saved


def _take_typed(
    saved: Sequence[Parameter], typed: Sequence[Parameter], resume: str
) -> list[Parameter]:
    """Return the saved parameters with what a folder cannot give taken from `typed`.

    That is secrets, which are not saved, and settings that grant something.
    """
    of_saved = {parameter.key: parameter for parameter in saved}
    with_secrets = {
        parameter.key: parameter
        for parameter in saved
        if any(REDACTED in value for value in parameter.values)
    }
    given = {parameter.key: parameter for parameter in typed}
    problems = [
        f"{key}: {NO_OVERRIDES}" + (f" than {', '.join(with_secrets)}" if with_secrets else "")
        for key in given.keys() - with_secrets.keys() - GRANTING.keys()
    ]
    for key, parameter in with_secrets.items():
        values = ",".join(parameter.values)
        if key not in given:
            problems.append(
                f"resume={resume}: a secret in {key} was not saved; add it again next to "
                f"resume={resume}: {key}={values}"
            )
        elif redacted(given[key].values) != list(parameter.values):
            problems.append(
                f"{key}: expected the value with which the sweep was started, including its "
                f"secrets: {key}={values}"
            )
    for key in (given.keys() & GRANTING.keys()) - with_secrets.keys():
        known = of_saved.get(key, given[key])
        (without,) = parse_parameters([f"{key}={as_typed(default_of(GRANTING[key].field))}"])
        is_free = GRANTING[key].facts.grants == "write" and not given[key].varies
        if not is_free and given[key].values not in (known.values, without.values):
            problems.append(f"{key}: {KEEPS}; type the saved value, {key}={','.join(known.values)}")
    if problems:
        raise UserError(problems)
    added = [parameter for key, parameter in given.items() if key not in of_saved]
    return [given.get(parameter.key, parameter) for parameter in saved] + added
