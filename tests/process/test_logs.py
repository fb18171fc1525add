"""What is said goes into the run's log, and a message that cannot be written stops nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from app.process.logs import LOG_FILE, RunLog


def test_a_malformed_message_of_a_library_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, library = RunLog(), logging.Logger("library")
    library.addHandler(handler)
    library.warning("deprecated", FutureWarning)
    library.warning("still here")
    handler.write_into(tmp_path)
    assert "still here" in (tmp_path / LOG_FILE).read_text()
    assert "Logging error" in capsys.readouterr().err
