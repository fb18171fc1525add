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
_CONSTRAINTS = "constraints.txt"
SCRIPT_VARIABLE = "LOFT_SCRIPT"
"""variable with the path of the console script that started this process or its parent"""
ROOT = Path(__file__).resolve().parents[1]
"""the checkout, or the folder into which pip installed the packages"""
CHILD = str(ROOT / "app" / "process" / "child.py")
"""starts a module of this program without importing from the working folder"""
PACKAGES = ("app", "common", "data_modules")


def is_checkout() -> bool:
    """Return whether this program runs from a checkout, not from an installed wheel."""
    return (ROOT / _CONSTRAINTS).is_file()


def install_extra(extra: str) -> str:
    """Return the command that installs an extra: by its name, or by its packages for a wheel."""
    if is_checkout():
        return f"pip install -e '.[{extra}]'"
    return f"pip install {shlex.join(_packages_of(extra))}"


def pip_install() -> str:
    """Return `pip install`, with the checkout's tested versions if there is one."""
    return f"pip install -c {_CONSTRAINTS}" if is_checkout() else "pip install"


def verb_command(verb: str) -> str:
    """Return the command of a verb as this process was started: by the script or by Python."""
    script = os.environ.get(SCRIPT_VARIABLE)
    if script and Path(script).is_file():
        return f"{_typed(script, Path(script).name)} {verb}"
    return f"{python_command()} {module_words(f'app.{verb}')}"


def child_command(module: str) -> list[str]:
    """Return the command of a process that this one starts: it runs this program's `module`."""
    return [sys.executable, CHILD, "-m", module]


def typed_words() -> list[str]:
    """Return the words after Python that started this process, as a person types them."""
    return [word for word in sys.orig_argv[1:] if word != CHILD]


def module_words(module: str) -> str:
    """Return what to type after Python, or torchrun, for a module of this program."""
    return f"{shlex.quote(CHILD)} -m {module}" if shadowing_files() else f"-m {module}"


def shadowing_files() -> list[str]:
    """List what `python -m app.VERB` would import from the working folder in place of this."""
    names = [name for package in PACKAGES for name in (f"{package}.py", f"{package}/__init__.py")]
    with contextlib.suppress(OSError):  # no current folder any more
        if not Path.cwd().samefile(ROOT):
            return [name for name in names if os.path.isfile(name)]
    return []


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
