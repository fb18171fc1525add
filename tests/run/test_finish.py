"""What the end of a run recommends."""

import re
from pathlib import Path

import pytest

from app.assembly.finish import print_next
from app.config import load_config
from app.run import Run
from tests.tiny import small_run


@pytest.mark.parametrize(
    ("words", "verbs"),
    [
        (("logger=csv",), ["evaluate", "chat", "merge"]),
        (("logger=csv", "adapter=full"), ["evaluate", "chat"]),
        (("logger=tensorboard", "adapter=full"), ["evaluate", "chat"]),
    ],
)
def test_a_whole_model_is_not_recommended_for_merging(
    words: tuple[str, ...], verbs: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = Run(typed_config=load_config("train", small_run(*words)), folder=tmp_path)
    print_next(run, tmp_path / "model")
    assert re.findall(r"app\.(\w+) run=", capsys.readouterr().out) == verbs
