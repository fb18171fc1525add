"""Memory in large pages for a training on a CPU, whose operators allocate and free it all the time.

Small pages cost it some percent of its time, since each has to be found and filled by the kernel.
glibc asks for large ones, and keeps what is freed, only if it was told so when its process began.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLES = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        f"glibc.malloc.mmap_threshold={2**25}",
        f"glibc.malloc.trim_threshold={2**30}",
        f"glibc.malloc.top_pad={2**26}",
    )
)
"""bytes; 2**25 is the most that glibc takes from what it keeps, larger blocks come and go"""
DEVICES = Path("/dev")
BY_REQUEST = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""says whether Linux gives large pages always, to who asks (`[madvise]`), or never"""


def large_pages() -> dict[str, str]:
    """Return the variables with which a process is to begin; none where they would change nothing.

    Whoever has set GLIBC_TUNABLES keeps what it says, and where a GPU computes it does not matter.
    """
    if VARIABLE in os.environ or any(DEVICES.glob("nvidia[0-9]*")) or not _asks_are_heard():
        return {}
    return {VARIABLE: TUNABLES}


def take_large_pages(program: str) -> None:
    """Begin `program` again, in this very process, if it began without large pages.

    It is a module's name: what was not typed as `python -m program ...` goes on as it is, since
    something else runs it, such as a debugger.
    """
    variables, words = large_pages(), sys.orig_argv[1:]
    options = list(itertools.takewhile(lambda word: word.startswith("-") and word != "-m", words))
    if not variables or words[len(options) :][:2] != ["-m", program]:
        return
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, **variables})


def _asks_are_heard() -> bool:
    if not BY_REQUEST.is_file() or "[madvise]" not in BY_REQUEST.read_text():
        return False
    # Large pages came with glibc 2.35; other libraries have other settings.
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
