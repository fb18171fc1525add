"""Thousands of keys, and deep nesting: refused before anything is parsed that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from app.config.load import compose
from app.config.overrides import MAX_TYPED
from app.config.verbs import VERBS, all_settings, may_be_key
from app.process.reporting import format_problems
from app.sweep.parameters import parse_parameters
from common.errors import MAX_PROBLEMS, UserError

WORDS = {
    "typed": [f"k{i}=1" for i in range(3000)],
    "of a group": [f"trainer.k{i}=1" for i in range(3000)],
    "under a mapping": [f"model.architecture.k{i}=1" for i in range(3000)],
    "in a word": [f"data.datasets=[{{{','.join(f'k{i}: 1' for i in range(2000))}}}]"],
    "items": [f"data.datasets=[{','.join(f'f{i}' for i in range(9000))}]"],
    "open braces": [f"data.chat_template_kwargs={'{a:' * 300}"],
    "lists": [f"data.datasets={'[' * 300}1{']' * 300}"],
    "references": [f"model.path={'${' * 300}a{'}' * 300}"],
    "dots": [f"trainer{'.a' * 3000}=1"],
}
EXPERIMENTS = {
    "keys of a group": "trainer:\n" + "".join(f"  k{i}: 1\n" for i in range(20_000)),
    "defaults": "defaults:\n" + "".join(f"- override /data: o{i}\n" for i in range(5000)),
    "nested": f"trainer: {'{a: ' * 300}1{'}' * 300}\n",
    "nested in a large file": f"a: {'[' * 100_000}\n",
    "nested behind others": "a: [" + "{b: 1}, " * 3000 + "[" * 300 + "]" * 301 + "\n",
    "mappings": "model:\n  architecture:\n" + "".join(f"    k{i}: {{a: 1}}\n" for i in range(9000)),
    "lists": f"data: {{chat_template_kwargs: {{a: [{'[1], ' * 9000}]}}}}\n",
    "aliases": f"model: {{architecture: {{x: &x {{a: 1}}, y: [{'*x, ' * 9000}]}}}}\n",
}


def refusal(function: Callable[[Sequence[str]], object], words: Sequence[str]) -> str:
    """Return the one message of a refusal, which took less than two seconds of this process."""
    started = time.process_time()
    with pytest.raises(UserError) as error:
        function(words)
    assert time.process_time() - started < 2
    message = format_problems(error.value.problems)
    assert len(message) < 5000
    return message


@pytest.mark.parametrize("name", WORDS)
def test_many_typed_keys_are_refused_at_once(name: str) -> None:
    typed = refusal(lambda words: compose("train", words), WORDS[name])
    swept = (
        refusal(parse_parameters, WORDS[name]) if name not in ("references", "in a word") else typed
    )
    for message in (typed, swept):
        named = "unknown key" in message and f"... and {2000 - MAX_PROBLEMS}" in message
        counted = "unknown key" in message and "... and 2980 more" in message
        assert named or counted or "limit" in message


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_many_keys_of_an_experiment_are_refused_at_once(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package _global_\n{EXPERIMENTS[name]}")
    message = refusal(lambda words: compose("train", words), [f"experiment={file}"])
    assert "mine.yaml" in message
    assert "limit" in message or "defaults=" in message or "... and 19980 more" in message


def test_every_setting_of_every_verb_is_known_and_fits_the_limit() -> None:
    for verb in VERBS:
        settings = all_settings(verb)
        assert len(settings) < MAX_TYPED
        for each in settings:
            key = each.key.replace("[]", "[3]")
            assert may_be_key(verb, key) and may_be_key(verb, each.typed_key)
            is_open = "dict[" in str(each.hint) or "Any" in str(each.hint)
            assert is_open or not may_be_key(verb, f"{key}.x1")
