"""Run a program that a model has written, with its checks, in a process with limits.

The limits keep an accident from harming the machine: time, memory, file sizes, an empty folder and
environment. They do not stop malicious code: the process runs as the user, with the network.
"""

from __future__ import annotations

import resource
import secrets
import subprocess
import sys
import tempfile

SECONDS, MEMORY_BYTES, FILE_BYTES = 10, 1 << 30, 1 << 20


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Return whether a program runs to its end within the limits, without an error.

    A random word, written behind its last line, proves it: a program that exits early writes none.
    """
    word = secrets.token_hex(8)
    program += f"\n__import__('os').write(1, b'{word}')\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-S", "-"],
                input=program.encode("utf-8", "replace"),
                cwd=folder,
                env={},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                preexec_fn=_limit,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0 and ended.stdout.endswith(word.encode())


def _limit() -> None:
    for what, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
