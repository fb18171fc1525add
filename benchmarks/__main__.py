"""Run all benchmarks, or the named one; exit code 1 if a bar is missed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.figure import Figure, print_figures

NOT_BENCHMARKS = {"__init__", "__main__", "bare_imports", "figure", "parts", "peers"}


def main(names: list[str]) -> int:
    """Run the benchmarks `names`; all if empty."""
    known = sorted({file.stem for file in Path(__file__).parent.glob("*.py")} - NOT_BENCHMARKS)
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"error: no benchmark {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for name in names or known:
        figures += import_module(f"benchmarks.{name}").measure()
    print_figures(figures)
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
