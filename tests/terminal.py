"""Run a command in a pseudo-terminal of a given width: its final screen, and pressed keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from dataclasses import dataclass

from tests.conftest import ROOT
from tests.processes import LONGEST, user_environment

CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?\d+[hl]|\x1b\[[\d;]*m")
CTRL_C = b"\x03"


@dataclass(frozen=True)
class Screen:
    """Content of a terminal after a command has ended."""

    code: int
    lines: list[str]
    """all lines, including those that scrolled away, without overwritten text"""
    first_seconds: float
    """seconds until the first output"""


def type_in_terminal(
    python: str, columns: int, module: str, *words: str, press: bytes = b"", after: str = ""
) -> Screen:
    """Run `PYTHON -m MODULE`; send `press` once the output matches the pattern `after`."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        environment = {**user_environment(), "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        time.sleep(0.1)  # until the size is set
        os.execve(python, [python, "-m", module, *words], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    shown, first, began = b"", 0.0, time.monotonic()
    while time.monotonic() - began < LONGEST:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the child has closed its side
            break
        first = first or time.monotonic() - began
        shown += part
        if press and re.search(after.encode(), shown):
            os.write(terminal, press)
            press = b""
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Screen(code, _rows(shown.decode("utf-8", "replace"), columns), first)


def _rows(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal shows for `text`, after wrapping and cursor movements."""
    rows, row, column = [""], 0, 0
    position = 0
    while position < len(text):
        found = CONTROL.match(text, position)
        if found is not None:
            position = found.end()
            count, letter = int(found[1] or 1), found[2]
            if letter == "A":
                row = max(0, row - count)
            elif letter == "K" and found[1] == "2":
                rows[row] = ""
            continue
        letter, position = text[position], position + 1
        if letter == "\r":
            column = 0
        elif letter == "\n" or column == columns:
            row += 1
            rows += [""] * (row + 1 - len(rows))
            column = 0
        if letter >= " ":
            rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
            column += 1
    return [each.rstrip() for each in rows]
