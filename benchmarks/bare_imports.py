"""The time in which Python imports the heavy libraries: what start-up times are compared with.

A ratio to it says the same on a fast machine, a slow one and a busy one, where seconds do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

BARE_IMPORTS = """
import os, time
import torch, lightning, transformers, peft
print(time.time(), flush=True)
os._exit(0)
"""


def seconds_to_import() -> float:
    """Return the seconds from the start of a new process until the libraries are imported."""
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", BARE_IMPORTS],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1]) - started
