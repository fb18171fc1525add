"""Generate files from the settings' fields: `python -m tools.settings docs|schema`.

`docs` writes docs/settings.md; `schema` conf/experiment/schema.json, by which editors complete
experiments.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

from app.config.conf_files import SCHEMA
from app.config.dispatch import default_text, sections
from app.config.schema import Setting, element_of, list_settings
from app.config.verbs import PARTS, VERBS
from common.facts import Facts, describe_values, is_optional
from common.installation import ROOT
from data_modules import DatasetConfig
from data_modules.settings import CACHE_VARIABLE

DOCS = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

Made from the settings' fields by `make settings`; a test keeps it current. The same in a terminal:
`python -m app.train --help all`, or `--help trainer` for one group. `KEY=VALUE` on the command line
or `KEY: VALUE` in an experiment sets them. Where only some options of a group have a setting, the
heading names them.

The last column says whether a setting may change on resume: `yes`; `no`; `rounding`: yes, with the
same results except for the last digits; `contents`: the value may change, but not what it stands
for (the contents of files, the number of ranks); `lr`, `schedule`, `epochs`, `data` or `precision`:
only with that word in `resume_allow=[...]`; `typed again`: a run's value is never used, so type it
at each start; `-`: it concerns a single start of a run and is never compared.
"""
ON_RESUME = {
    "fixed": "no",
    "free": "yes",
    "content": "contents",
    "per_start": "-",
    None: "-",
}
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
REFERENCE = {"type": "string", "pattern": r"^\$\{.+\}$"}
"""`${key.of.another.setting}`, allowed for any value"""


def docs() -> str:
    """Return docs/settings.md: the settings of training, then those of other verbs."""
    lines, known = [HEAD], set[str]()
    for verb, top in VERBS.items():
        new = [one for one in list_settings(top, PARTS) if one.key not in known]
        known |= {one.key for one in new}
        lines += [f"## python -m app.{verb}", ""]
        for title, members in sections(new):
            lines += [f"### {title}", "", *_table(members), ""]
    return "\n".join(lines)


def _table(settings: Sequence[Setting]) -> list[str]:
    rows = [
        (
            f"`{one.typed_key}`",
            default_text(one),
            describe_values(one.facts, one.hint),
            one.doc,
            "typed again"
            if one.facts.grants == "code"
            else ON_RESUME.get(one.resume, str(one.resume)),
        )
        for one in settings
    ]
    head = ["| setting | default | values | meaning | resume |", "|---|---|---|---|---|"]
    return head + [
        f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in row)} |"
        for row in rows
    ]


def schema() -> dict[str, Any]:
    """Return the JSON schema of an experiment; a group has the settings of all its options."""
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", **_object("an experiment")}
    whole["properties"]["defaults"] = {"type": "array", "description": "options of groups"}
    for one in list_settings(VERBS["train"], PARTS):
        *path, name = one.typed_key.split(".")
        node = whole
        for part in path:
            node = node["properties"][part.removesuffix("[]")]
            node = node["items"] if part.endswith("[]") else node
        described = _describe(one)
        if (other := node["properties"].get(name)) is not None:  # of another option
            described = {"anyOf": [other, described]}
        node["properties"][name] = described
    return whole


def schema_text() -> str:
    """Return conf/experiment/schema.json, with one setting a line."""
    return f"{_lines(schema(), '')}\n"


def _lines(node: dict[str, Any], indent: str) -> str:
    if "properties" not in node:
        return json.dumps(node)
    inner = f"{indent} "
    parts = [
        f"{inner}{json.dumps(key)}: {_lines(part, inner)}"
        for key, part in node["properties"].items()
    ]
    others = {key: value for key, value in node.items() if key != "properties"}
    return f'{json.dumps(others)[:-1]}, "properties": {{\n' + ",\n".join(parts) + f"\n{indent}}}}}"


def _object(description: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": {},
        "additionalProperties": False,
    }


def _describe(one: Setting) -> dict[str, Any]:
    if one.is_part:
        return _object(one.doc)
    (element,) = typing.get_args(element_of(one.hint)) if one.is_list else (None,)
    if element is DatasetConfig:  # a path may stand for a data set, and for a list of one
        items = _object(one.doc) | {"type": ["object", "string"]}
        return {"type": ["array", "string"], "description": one.doc, "items": items}
    if dataclasses.is_dataclass(element):
        return {"type": "array", "description": one.doc, "items": _object(one.doc)}
    if one.is_list:
        items = {"anyOf": _alternatives(element, one.facts)}
        alternatives: list[dict[str, Any]] = [{"type": "array", "items": items}]
    else:
        alternatives = _alternatives(element_of(one.hint), one.facts)
    if is_optional(one.hint):
        alternatives.append({"type": "null"})
    return {"description": one.doc, "anyOf": [*alternatives, REFERENCE]}


def _alternatives(hint: Any, facts: Facts) -> list[dict[str, Any]]:
    """Return the schemas of the values allowed by a type and its facts."""
    if facts.choices and not facts.bounds:
        return [{"enum": list(facts.choices)}]
    if isinstance(hint, types.UnionType):
        return [found for part in typing.get_args(hint) for found in _alternatives(part, facts)]
    if hint is str and facts.choices:
        return [{"enum": list(facts.choices)}]
    if typing.get_origin(hint) is dict:
        return [{"type": "object"}]
    limits = {BOUNDS[name]: bound for name, bound in facts.bounds.items()}
    return [{"type": TYPES[hint], **limits} if hint in TYPES else {}]


def main(words: Sequence[str]) -> None:
    os.environ.pop(CACHE_VARIABLE, None)  # a default that depends on the machine
    if "docs" in words:
        DOCS.write_text(docs(), encoding="utf-8")
        print(f"{DOCS.relative_to(ROOT)} is written")
    if "schema" in words:
        SCHEMA.write_text(schema_text(), encoding="utf-8")
        print(f"{SCHEMA.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main(sys.argv[1:])
