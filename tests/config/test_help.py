"""`--help` shows the most used settings, `--help all` every one, `--help GROUP` its own."""

from __future__ import annotations

import re

import pytest

from app.config.schema import list_settings
from app.config.verbs import PARTS, VERBS, VERBS_ON_A_RUN
from tests.in_process import refused, run_command


def keys_on(page: str) -> list[str]:
    """Return the words that stand in the left column."""
    return re.findall(r"^  (\S+) +\(", page, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_page_names_groups_defaults_and_meanings(verb: str) -> None:
    result = run_command("--help", verb=verb)
    page = result.stdout
    assert result.code == 0 and len(page.splitlines()) < 160
    assert max(map(len, page.splitlines())) <= 120
    for fragment in ("usage", f"python -m app.{verb}", "Exit codes", "--help all", "output.dir"):
        assert fragment in page
    has_data = verb not in VERBS_ON_A_RUN or verb == "evaluate"
    assert ("path      (required) a file (json, jsonl" in page) == has_data
    first = [one.typed_key for one in list_settings(VERBS[verb]) if one.facts.shown is True]
    assert set(first) <= set(keys_on(page))
    assert "schema" not in page


def test_help_names_the_verb_that_has_a_setting() -> None:
    for topic in ("hardware", "hardware.memory_gib"):
        assert "only launch and plan have it" in refused("--help", topic)


@pytest.mark.parametrize("verb", VERBS)
def test_help_all_has_every_setting_with_its_meaning(verb: str) -> None:
    page = run_command("--help", "all", verb=verb).stdout
    settings = [one for one in list_settings(VERBS[verb], PARTS) if not one.is_part]
    assert sorted(keys_on(page)) == sorted(one.typed_key for one in settings)
    words = " ".join(page.split())
    assert all(one.doc in words for one in settings)
    assert max(map(len, page.splitlines())) <= 120


def test_help_of_a_group_or_of_one_setting() -> None:
    assert set(keys_on(run_command("--help", "trainer").stdout)) == {
        one.typed_key
        for one in list_settings(VERBS["train"])
        if one.key.startswith("trainer.") and not one.is_part
    }
    assert "optimizer=muon\n  optimizer.momentum " in run_command("--help", "optimizer").stdout
    assert keys_on(run_command("+experiment=quickstart", "seed", "--help").stdout) == ["seed"]
    assert "did you mean trainer?" in refused("--help", "trainr")
