"""Run a module as `python -m` does, but import nothing from the working folder.

`python .../process/child.py -m MODULE [ARGUMENT ...]`: where the working folder has an app.py or
app/ of the user's own, `python -m app.train` runs that.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the module that is named after `-m`; what stands before it (`-u`) is for Python."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if sys.path[0] == folder:  # unless PYTHONSAFEPATH is set
        del sys.path[0]
    root = os.path.dirname(os.path.dirname(folder))
    if root not in sys.path:  # a checkout that is not installed
        sys.path.insert(0, root)
    import runpy

    del sys.argv[: sys.argv.index("-m") + 1]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
