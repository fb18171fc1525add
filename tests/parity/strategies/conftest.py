"""The runs that these tests share."""

from __future__ import annotations

import pytest

from tests.parity.strategies.layouts import Runs
from tests.reliability.shell import Shell


@pytest.fixture(scope="session")
def runs(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the runs of this session, each trained once."""
    return Runs(shell, tmp_path_factory.mktemp("runs"))
