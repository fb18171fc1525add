"""A `python` executable whose commands are forks of a process that has imported everything.

Tests and tested programs can use it wherever they start an interpreter: supervised ranks, torchrun,
sweeps, shells, other namespaces. A small proxy process represents each command: it has the
command's arguments and parent, forwards signals, and ends with the command's exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from app.process.launch import PARENT_VARIABLE, RANK_VARIABLES
from common.installation import ROOT

WARM_VARIABLE = "LOFT_WARM_PYTHON"
"""variable with the file of the interpreter that all processes of a test session share"""
RECORD_VARIABLE = "LOFT_RECORD"
"""variable with the folder in which commands record what they do"""
SESSIONS = "sessions"
"""file in that folder: the session of each command"""
FIRST_AWAY = 256
NAMESPACES = ("net", "uts", "mnt")

PROGRAM = """#!{python} -IS
import sys
words = [word for word in sys.argv[1:] if not word.endswith("/app/process/child.py")]
if next((word for word in words if word != "-u"), "") not in ("-m", "-c"):
    import os
    os.execv({python!r}, [{python!r}, *words])
import json, os, signal, socket
def is_passed(number):
    try:
        return number < 3 or os.get_inheritable(number)
    except OSError:  # of the folder that was listed
        return False
parent = os.environ.get({parent!r})
if parent == str(os.getppid()):
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
inherited = [int(name) for name in os.listdir("/proc/self/fd")]
inherited = [number for number in inherited if number < 256 and is_passed(number)]
warm = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
def pass_on(number, _):
    try:
        warm.send(bytes([number]))
    except OSError:  # the command has ended
        pass
ignored = []
for number in map(signal.Signals, (1, 2, 6, 10, 12, 15)):
    if signal.getsignal(number) == signal.SIG_IGN:
        ignored.append(number)
    else:
        signal.signal(number, pass_on)
warm.connect({address!r})
command = dict(words=words, folder=os.getcwd(), environment=dict(os.environ), pid=os.getpid(),
               is_child=parent == str(os.getppid()), ignored=ignored, descriptors=inherited)
socket.send_fds(warm, [json.dumps(command).encode()], inherited)
for number in inherited:
    os.close(number)
try:
    code = warm.recv(16)
except ConnectionResetError:  # a signal that the command did not live to receive
    code = warm.recv(16)
code = int(code or -9)
if code < 0:
    if code != -9:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def start_warm() -> str:
    """Start the warm process; return the file of its interpreter, written once it is ready.

    It ends with this process; the kernel ends it with the thread that started it.
    """
    maker = os.getpid()
    folder = tempfile.mkdtemp(prefix="loft")  # a short name, since it is part of a socket's path
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.reliability.warm", f"{folder}/python"],
        cwd=ROOT,
        # Prints stacks if a command takes too long.
        env=kept | {PARENT_VARIABLE: str(maker), "PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        if os.getpid() == maker:  # not a fork
            server.kill()
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return f"{folder}/python"


def write_python(file: Path, address: str) -> None:
    """Write the executable that connects to the warm process at `address`."""
    text = PROGRAM.format(python=sys.executable, address=address, parent=PARENT_VARIABLE)
    unfinished = file.with_name("unfinished")
    unfinished.write_text(text)
    unfinished.chmod(0o755)
    unfinished.rename(file)


def become_command(
    command: Mapping[str, Any],
    descriptors: list[int],
    run_module: Callable[[str, list[str]], NoReturn],
) -> NoReturn:
    """Turn this fork into the process that `command` would have started."""
    os.setsid()
    if record := command["environment"].get(RECORD_VARIABLE):
        with (Path(record) / SESSIONS).open("a") as sessions:
            sessions.write(f"{os.getpid()}\n")
    take_descriptors(descriptors, command["descriptors"])
    _enter(command["pid"])
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    if command["is_child"]:
        os.environ[PARENT_VARIABLE] = str(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in command["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    words = [word for word in command["words"] if word != "-u"]
    is_flushed = len(words) < len(command["words"]) or "PYTHONUNBUFFERED" in os.environ
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if is_flushed else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.orig_argv = [sys.executable, *command["words"]]
    if words[0] == "-m":
        run_module(words[1], words[2:])
    sys.argv = ["-c", *words[2:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(words[1], "<string>", "exec"), vars(main))  # noqa: S102  the test's own
    sys.exit(0)


def take_descriptors(descriptors: Sequence[int], wanted: Sequence[int]) -> None:
    """Give each of `descriptors` its wanted number, and close all others."""
    # First move all of them to unused numbers, so that none is overwritten.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_AWAY) for descriptor in descriptors]
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number)
    for number in range(3, 2 * FIRST_AWAY):
        if number not in wanted:
            with contextlib.suppress(OSError):
                os.close(number)


def _enter(pid: int) -> None:
    """Enter the network, host name and mount namespaces of a process."""
    for kind in NAMESPACES:
        own, other = (f"/proc/{who}/ns/{kind}" for who in ("self", pid))
        if os.readlink(own) != os.readlink(other):
            with open(other) as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {other}")
