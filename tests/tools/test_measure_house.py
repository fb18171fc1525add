from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.reliability.shell import Shell
from tools.measure_house import AIMS, LONG_FUNCTIONS, MOST, measure_sizes, measure_steps

REACHED = (
    "functions of load_config of the quickstart",
    "files of load_config of the quickstart",
)
"""the aims that the tree reaches, and is held to"""


def test_the_house_does_not_grow() -> None:
    figures = measure_sizes()
    assert {name: figures[name] for name in MOST if figures[name] > MOST[name]} == {}


@pytest.mark.slow
def test_the_house_is_measured_and_keeps_the_aims_that_it_reaches(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shell.python)
    figures = measure_sizes() | measure_steps(tmp_path)
    assert AIMS.keys() <= figures.keys()
    not_counted = {name for name, number in figures.items() if number <= 0}
    assert not_counted <= {LONG_FUNCTIONS}
    assert {name: figures[name] for name in REACHED if figures[name] > AIMS[name]} == {}
