"""Text that YAML or Hydra would read as something else stays as written, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import load_config
from app.config.schema import Leaf, element_of
from app.config.validation import Settings, is_converted_text
from app.config.verbs import PARTS, VERBS
from common.errors import UserError

CONVERTED = ["on", "off", "Yes", "no", "true", "1e5", "0x10", "010", "1_000", "1.50", ".5"]
KEPT = ["2024", "1.5", "1:30", "1:30.5", "2020-01-01", "y", "'on'", '"1e5"', "v1", "007a"]


@pytest.mark.parametrize("text", CONVERTED)
def test_an_experiments_text_that_would_change_is_refused_with_its_quotes(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "# @package _global_\ndata:\n  datasets:\n    - path: a.jsonl\n"
        f"      name: {text}  # a name\noutput: {{name: {text}}}\n"
    )
    with pytest.raises(UserError) as refused:
        load_config("train", [f"+experiment={file}"])
    first, second = refused.value.problems
    assert f"mine.yaml:5 data.datasets[0].name={text}: expected text" in first
    assert f"mine.yaml:6 output.name={text}: expected text" in second
    assert all(problem.endswith(f"write name: '{text}'") for problem in (first, second))


@pytest.mark.parametrize("text", KEPT)
def test_text_that_stays_as_written_is_kept(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package _global_\noutput:\n  name: {text}\n")
    assert load_config("train", [f"+experiment={file}"]).output.name == text.strip("'\"")


@pytest.mark.parametrize("text", [*CONVERTED, "+5", "-0", "2024", "1.5"])
def test_typed_text_is_kept(text: str) -> None:
    assert load_config("train", [f"output.name={text}"]).output.name == text


@pytest.mark.parametrize("text", ["true", "1e5", "1_000", "1.50", ".5", "+5"])
def test_typed_text_inside_a_list_is_refused_with_its_quotes(text: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("train", [f"data.datasets=[{{path: a.jsonl, name: {text}}}]"])
    quoted = str(refused.value).rpartition("write ")[2]
    config = load_config("train", [f"data.datasets=[{{path: a.jsonl, {quoted}}}]"])
    assert config.data.datasets[0].name == text


@pytest.mark.parametrize("key", ["seed", "output.name", "trainer.max_steps", "data.chat_template"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_value_that_is_to_be_filled_in_is_not_the_default(
    key: str, is_typed: bool, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    lines = f"{key}: ???".replace(".", ":\n  ")
    file.write_text(f"# @package _global_\n{lines}\n")
    words = [f"{key}=???"] if is_typed else [f"+experiment={file}"]
    with pytest.raises(UserError, match=r"\?\?\? stands for a value to fill in"):
        load_config("train", words)


def test_a_time_is_no_number(tmp_path: Path) -> None:
    """YAML 1.1 reads 1:30 as 90."""
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\nseed: 1:30\nmodel: {stop_tokens: [1]}\n")
    with pytest.raises(UserError) as refused:
        load_config("train", [f"+experiment={file}"])
    seed, token = refused.value.problems
    assert seed.endswith("mine.yaml:2 seed=1:30: expected a whole number")
    assert token.endswith(
        "model.stop_tokens[0]=1: expected text, but without quotes this is 1; write '1'"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_rule_holds_for_every_setting_that_is_text(verb: str) -> None:
    texts = []
    for setting in Settings(VERBS[verb], {}, {}, PARTS).all_settings():
        is_list = element_of(setting.hint) == list[str]
        if (is_list or element_of(setting.hint) is str) and not setting.facts.choices:
            texts.append(setting.key)
            for value in (True, 1e5):
                leaf = Leaf(
                    setting.key, setting.owner, setting.field.name, [value] if is_list else value
                )
                assert is_converted_text(leaf), setting.key
    assert "output.name" in texts and len(texts) > 3
