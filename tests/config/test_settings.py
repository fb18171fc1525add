"""Every setting states its facts at its field, and what is made from them is complete."""

from __future__ import annotations

import dataclasses
import typing
from itertools import chain
from typing import Any

import pytest

from app.config import conf_files
from app.config.schema import list_settings
from app.config.verbs import PARTS, VERBS
from app.preflight import check_devices
from app.preflight.couplings.devices import MAX_CPU_RANKS
from app.training.trainer import TrainerConfig
from common.facts import (
    check_values,
    default_of,
    describe_values,
    facts_of,
    hints_of,
    setting,
    takes,
)
from tools import settings as tool

SETTINGS = {verb: list_settings(top, PARTS) for verb, top in VERBS.items()}


@dataclasses.dataclass(kw_only=True)
class Values:
    """A setting of each kind."""

    share: float = setting(0.5, ge=0, lt=1, note="0.5 is usual")
    steps: int | None = setting(None, ge=1)
    rate: float | None = setting(None, gt=0, le=10)
    devices: int | str = setting("auto", choices=("auto",), ge=1)
    mode: str = setting("a", choices=("a", "b", "c"))
    roles: list[str] = setting(default_factory=list, choices=("a", "b"))
    stage: int = setting(3, choices=(1, 2, 3))
    text: str = "any"


@dataclasses.dataclass(kw_only=True)
class Whole:
    """Settings at every depth."""

    part: Values
    parts: list[Values]


NAN, INF = float("nan"), float("inf")
FITS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("share", "0 or more, below 1", [0, 0.99], [1, -0.1, NAN, INF]),
    ("steps", "1 or more, or null", [None, 1], [0, True]),
    ("rate", "above 0, at most 10, or null", [None, 10], [0, 10.1]),
    ("devices", "auto, or a number: 1 or more", ["auto", 8], ["two", 0, 1.5, True]),
    ("mode", "a, b or c", ["c"], ["d"]),
    ("roles", "a or b", [[], ["a", "b"]], [["c"]]),
    ("stage", "1, 2 or 3", [2], [4]),
    ("text", "", ["x"], []),
]


@pytest.mark.parametrize(("name", "words", "good", "bad"), FITS, ids=[row[0] for row in FITS])
def test_a_field_tells_which_values_it_takes(
    name: str, words: str, good: list[Any], bad: list[Any]
) -> None:
    (field,) = (field for field in dataclasses.fields(Values) if field.name == name)
    facts, hint = facts_of(field), hints_of(Values)[name]
    assert describe_values(facts, hint) == words
    assert [value for value in good if not takes(facts, hint, value)] == []
    assert [value for value in bad if takes(facts, hint, value)] == []


def test_values_are_checked_at_every_depth() -> None:
    whole = Whole(part=Values(share=2.0), parts=[Values(), Values(mode="d")])
    assert check_values(whole, "top") == [
        "top.part.share=2.0: expected 0 or more, below 1 (0.5 is usual)",
        "top.parts[1].mode=d: expected a, b or c",
    ]
    assert check_values(whole, skip=("part", "parts")) == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_is_documented_and_its_default_is_one_of_its_values(verb: str) -> None:
    assert [one.key for one in SETTINGS[verb] if not one.doc] == []
    for one in SETTINGS[verb]:
        if (default := default_of(one.field)) is not dataclasses.MISSING:
            assert takes(one.facts, one.hint, default), one.key


def test_every_setting_says_whether_a_resumed_run_may_change_it() -> None:
    rules = {one.key: one.resume for one in SETTINGS["train"]}
    assert [key for key, rule in rules.items() if rule is None and key != "trainer"] == []
    # One of each: the field's own rule, that of its part, and both in one part.
    expected = {
        "adapter.r": "fixed",
        "data.limits.rows": "free",
        "data.val_set_size": "data",
        "data.datasets": "fixed",
        "data.datasets[].path": "content",
        "data.datasets[].weight": "data",
        "model.trust_remote_code": "per_start",
        "optimizer.lr": "lr",
        "optimizer.momentum": "fixed",
        "output.dir": "per_start",
        "schedule.shape": "schedule",
        "strategy.name": "content",
        "strategy.stage": "rounding",
        "trainer.checkpoint.asynchronous": "free",
        "trainer.max_steps": "epochs",
    }
    assert {key: rules[key] for key in expected} == expected


def test_no_name_of_another_tool_means_two_settings() -> None:
    for verb, settings in SETTINGS.items():
        owners: dict[str, set[str]] = {}
        for one in settings:
            for alias in one.facts.aliases:
                owners.setdefault(alias.partition("=")[0], set()).add(one.key)
        assert all(len(of) == 1 for of in owners.values()), verb


def test_docs_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tool.CACHE_VARIABLE, raising=False)
    assert tool.docs() == tool.DOCS.read_text(encoding="utf-8"), "type `make settings`"
    assert tool.schema_text() == tool.SCHEMA.read_text(encoding="utf-8"), "type `make schema`"


def test_the_json_schema_has_every_key_of_every_experiment() -> None:
    """jsonschema, which would check the values too, is no dependency."""
    for file in sorted((conf_files.CONF / "experiment").glob("*.yaml")):
        unknown = unknown_keys(conf_files.read_conf_file(file, package="").values, tool.schema())
        assert unknown == [], file


def test_the_json_schema_has_bounds_and_choices() -> None:
    groups = tool.schema()["properties"]
    rank = groups["adapter"]["properties"]["r"]["anyOf"][0]
    assert rank == {"type": "integer", "minimum": 1}
    precision = groups["trainer"]["properties"]["precision"]["anyOf"][0]
    assert precision["enum"] == ["auto", "fp32", "bf16", "bf16-pure", "fp16", "fp8"]


def unknown_keys(values: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    known = schema.get("properties")
    if known is None:
        return []
    inner = [(known.get(name), part) for name, part in values.items()]
    deeper = [unknown_keys(part, of) for of, part in inner if of and isinstance(part, dict)]
    return [name for name in values if name not in known] + [*chain.from_iterable(deeper)]


WHOLE_NUMBERS = [
    one
    for settings in SETTINGS.values()
    for one in settings
    if int in (one.hint, *typing.get_args(one.hint)) and one.facts.bounds
]


def test_every_whole_number_has_an_upper_bound() -> None:
    """1e20 steps, or a billion packs a step, would end in a MemoryError minutes later."""
    assert len({one.key for one in WHOLE_NUMBERS}) > 60
    assert [one.key for one in WHOLE_NUMBERS if takes(one.facts, one.hint, 10**20)] == []
    (problem,) = check_values(Values(steps=10**10), "trainer")
    assert (
        problem
        == "trainer.steps=10000000000: expected 1 or more, or null, and at most 1,000,000,000"
    )


def test_ranks_without_a_gpu_are_as_many_as_processes_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert check_devices(TrainerConfig(devices=MAX_CPU_RANKS), None) == []
    (problem,) = check_devices(TrainerConfig(devices=1000), None)
    assert problem.endswith("this machine has 2 cores; type trainer.devices=2 or fewer")
