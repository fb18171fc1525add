"""Run app.train as all ranks of a host, and record time and sent bytes after each optimizer step.

The first rank forks the others. tests/end_to_end/test_two_hosts.py tests hosts under torchrun.
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
"""environment variable with the path of the record, written by the first rank of a host"""
SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")


def main() -> None:
    os.environ.pop(PARENT_VARIABLE, None)  # as under torchrun, no rank is our child
    if is_first_of_ranks():
        count_steps(Path(os.environ[NOTES]))
    runpy.run_module("app.train", run_name="__main__", alter_sys=True)


def is_first_of_ranks() -> bool:
    """Fork the ranks of this host; return whether this process is the first of them."""
    first, number = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    for local in range(1, number):
        if os.fork() == 0:
            os.environ |= {"LOCAL_RANK": str(local), "RANK": str(first + local)}
            return False
    return True


def count_steps(file: Path) -> None:
    take_step = FinetuneModule.optimizer_step

    def take_and_record(self: Any, *args: Any, **options: Any) -> None:
        take_step(self, *args, **options)
        with file.open("a") as notes:
            note = {"seconds": time.monotonic(), "sent": int(SENT.read_text())}
            notes.write(json.dumps(note) + "\n")

    FinetuneModule.optimizer_step = take_and_record  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
