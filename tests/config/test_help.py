"""`--help` tells every setting of the data, down to the keys of one data set."""

from __future__ import annotations

import dataclasses
import re

import pytest

from app.config import schema
from app.config.verbs import VERBS
from data_modules import DatasetConfig
from tests.door import ask


def keys_on(page: str) -> set[str]:
    """Return the words that stand in the left column."""
    return {found[1] for line in page.splitlines() if (found := re.match(r"  (\S+) +\(", line))}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_keys_of_a_data_set_are_told(verb: str) -> None:
    page = ask("--help", verb=verb).printed
    part = page[page.index("each data set: 'data.datasets=[{KEY: VALUE") :]
    assert {field.name for field in dataclasses.fields(DatasetConfig)} <= keys_on(part)
    assert "path      (must be given) a file (json, jsonl" in part
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("verb", ["train", "preview"])
def test_every_setting_of_the_data_is_told(verb: str) -> None:
    page = ask("--help", verb=verb).printed
    keys = [key for key in schema.keys_of(VERBS[verb]) if key.startswith(("data.", "packing."))]
    for key in keys:
        if "[]" not in key and key not in ("data.mixture", "data.audit", "data.limits"):
            assert key in keys_on(page), key
    assert "(assistant) whose turns are learned" in page
    assert len(re.findall(r"^  data\.on_long ", page, re.MULTILINE)) == 1, "no key stands twice"
