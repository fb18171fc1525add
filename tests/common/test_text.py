"""Numbers are written in one style everywhere; errors are quoted in one line with their file."""

from __future__ import annotations

from common.text import counted, duration, percent, reason_of, unreadable


def test_numbers_have_their_units() -> None:
    assert (percent(0.1234), percent(1, 0), percent(0.5, 2)) == ("12.3 %", "100 %", "50.00 %")
    assert (percent(0.015, 0, sign="+"), percent(-0.3, sign="+")) == ("+2 %", "-30.0 %")
    assert [counted(number, "row") for number in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
    times = [duration(seconds) for seconds in (9.5, 46, 119, 384, 9000)]
    assert times == ["9.5 s", "46 s", "119 s", "6.4 min", "2.5 h"]


def test_the_reason_of_an_error_is_one_line_with_the_file() -> None:
    missing = FileNotFoundError(2, "No such file", "/x/ptxas")
    assert reason_of(missing) == "No such file: /x/ptxas"
    assert unreadable("/x/ptxas", missing) == "/x/ptxas: cannot be read: No such file"
    assert reason_of(RuntimeError("\nCUDA Setup failed: x\nmore")) == "CUDA Setup failed: x"
    assert reason_of(RuntimeError(" \n")) == "RuntimeError"
