"""How this program was installed and started, for the commands in its messages.

Only the standard library is imported, so that `make install` can run `gpus`, which imports this.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

PROGRAM = "loft"
CONSTRAINTS = "constraints.txt"
SCRIPT_VARIABLE = "LOFT_SCRIPT"
"""variable with the path of the console script that started this process or its parent"""
ROOT = Path(__file__).parents[2]
"""the checkout, or the folder into which pip installed the packages"""


def is_checkout() -> bool:
    """Return whether this program runs from a checkout, not from an installed wheel."""
    return (ROOT / CONSTRAINTS).is_file()


def install_extra(extra: str) -> str:
    """Return the command that installs an extra: by its name, or by its packages for a wheel."""
    if is_checkout():
        return f"pip install -e '.[{extra}]'"
    return f"pip install {shlex.join(_packages_of(extra))}"


def pip_install() -> str:
    """Return `pip install`, with the checkout's tested versions if there is one."""
    return f"pip install -c {CONSTRAINTS}" if is_checkout() else "pip install"


def verb_command(verb: str) -> str:
    """Return the command of a verb as this process was started: by the script or by Python."""
    script = os.environ.get(SCRIPT_VARIABLE)
    if script and Path(script).is_file():
        return f"{_typed(script, Path(script).name)} {verb}"
    return f"{python_command()} -m app.{verb}"


def python_command() -> str:
    """Return what to type for this Python: `python` if that is found first, else its path."""
    executable = sys.executable or "python"  # empty if Python is embedded
    return _typed(executable, "python", Path(executable).name)


def record_script(script: str) -> None:
    """Record the console script that started this process, for it and the ranks that it starts."""
    os.environ[SCRIPT_VARIABLE] = os.path.abspath(script)


def _packages_of(extra: str) -> Iterator[str]:
    for requirement in requires(PROGRAM) or []:
        package, _, marker = requirement.partition(";")
        if marker.partition("extra ==")[2].strip(" '\"") == extra:
            yield package.strip()


def _typed(file: str, *names: str) -> str:
    """Return the first of `names` by which a shell finds the file, else its path."""
    path = Path(file)
    with contextlib.suppress(OSError, ValueError):  # no current folder any more, or not in it
        for name in names:
            found = shutil.which(name)
            # Both comparisons: the python of an environment is a link to that of the system.
            if found and Path(found).parent.samefile(path.parent) and path.samefile(found):
                return name
        return shlex.quote(str(path.relative_to(Path.cwd())))
    return shlex.quote(file)
