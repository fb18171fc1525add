"""Text that YAML or Hydra would read as something else stays as written, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import load_config
from common.errors import UserError

CONVERTED = ["on", "true", "1e5", "010", "1_000", "1.50"]
KEPT = ["2024", "1.5", "1:30", "2020-01-01", "y", "'on'"]


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


@pytest.mark.parametrize("text", [*CONVERTED, "+5", "2024"])
def test_typed_text_is_kept(text: str) -> None:
    assert load_config("train", [f"output.name={text}"]).output.name == text


@pytest.mark.parametrize("text", ["true", "1e5", "1.50"])
def test_typed_text_inside_a_list_is_refused_with_its_quotes(text: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("train", [f"data.datasets=[{{path: a.jsonl, name: {text}}}]"])
    quoted = str(refused.value).rpartition("write ")[2]
    config = load_config("train", [f"data.datasets=[{{path: a.jsonl, {quoted}}}]"])
    assert config.data.datasets[0].name == text


def test_a_value_that_is_to_be_filled_in_is_not_the_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\noutput:\n  name: ???\n")
    for word in ("seed=???", f"+experiment={file}"):
        with pytest.raises(UserError, match=r"\?\?\? stands for a value to fill in"):
            load_config("train", [word])


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
