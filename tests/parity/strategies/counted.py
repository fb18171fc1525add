"""The ordinary command as all ranks of a host, with a note after each optimizer step.

A note is the time, and the bytes that have left this host over the link until then. The first rank
forks the others: what torchrun does with hosts, `tests/end_to_end/test_two_hosts.py` shows.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

from app.process.launch import PARENT_VARIABLE
from app.training.module import FinetuneModule
from tests.hosts import INTERFACE

NOTES = "LOFT_TEST_NOTES"
"""names the file, in a folder that both hosts see; the first rank of a host writes it"""
SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")


def main() -> None:
    os.environ.pop(PARENT_VARIABLE, None)  # as under torchrun, no rank is this program's child
    if is_first_of_ranks():
        count_steps(Path(os.environ[NOTES]))
    runpy.run_module("app.train", run_name="__main__", alter_sys=True)


def is_first_of_ranks() -> bool:
    """Become the ranks of this host, in a process each; tell whether this is the first of them."""
    first, number = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    for local in range(1, number):
        if os.fork() == 0:
            os.environ |= {"LOCAL_RANK": str(local), "RANK": str(first + local)}
            return False
    return True


def count_steps(file: Path) -> None:
    take_step = FinetuneModule.optimizer_step

    def take_and_note(self: Any, *args: Any, **options: Any) -> None:
        take_step(self, *args, **options)
        with file.open("a") as notes:
            note = {"seconds": time.monotonic(), "sent": int(SENT.read_text())}
            notes.write(json.dumps(note) + "\n")

    FinetuneModule.optimizer_step = take_and_note  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
