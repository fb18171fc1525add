"""loft: fine-tune large language models with Lightning, composed by Hydra.

From Python: `from app import load_config, train`; both are imported on first use.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

for _name in ("common", "data_modules"):
    _found, _own = find_spec(_name), Path(__file__).parents[1] / _name / "__init__.py"
    if _found is not None and _found.origin is not None and _own.samefile(_found.origin):
        continue
    where = "nowhere" if _found is None else _found.origin
    shadowed = (
        f"loft needs {_own}, but Python finds the package {_name} {where} first: type "
        "loft VERB in place of python -m app.VERB, or change to another folder"
    )
    modules = [word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv]
    # While Python looks for the module to run, its place in argv is held by "-m".
    is_verb = sys.argv[:1] == ["-m"] and __name__ in modules
    if not is_verb and Path(*sys.argv[:1]).name != "loft":
        raise ImportError(shadowed)
    print(f"error: {shadowed}", file=sys.stderr)
    sys.exit(2)

__all__ = ["load_config", "train"]


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from app.config import load_config

        return load_config
    if name == "train":
        from app.python import train

        globals()["train"] = train  # the import has set this name to the module of the verb
        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
