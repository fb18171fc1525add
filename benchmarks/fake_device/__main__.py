"""Trace jobs, given as JSON on the standard input, and print a line of counts for each.

Runs as a separate process, because the fake GPU stays registered. A failed job prints its `error`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback

from tools.simulate.device import start


def main() -> None:
    """Trace; exit code 3 with the reason if there can be no fake device."""
    jobs = json.load(sys.stdin)
    start()
    from benchmarks.fake_device.trace import Job, trace

    logging.getLogger().setLevel(logging.ERROR)
    for job in jobs:
        try:
            found: dict[str, object] = dict(trace(Job(**job)))
        except Exception as error:  # noqa: BLE001  the other jobs must not be lost
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
        print(json.dumps({"name": job["name"], "num_layers": job["num_layers"], **found}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
