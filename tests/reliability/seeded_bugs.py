"""Bugs that lose or spoil a run, injected one at a time, and the test that catches each.

`make seeded-bugs` copies the tree to a temporary folder, where the named tests must pass, injects
each bug there and expects its test to fail; it counts how many `make test` alone catches. It ends
with 1 if a bug is not caught or its source text no longer exists; test_seeded_bugs.py checks the
latter. The bugs are listed in seeded_bugs.txt: below each file, a paragraph per bug.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

PARTS = (
    *("app", "benchmarks", "common", "conf", "data_modules", "docs", "tests", "tools"),
    *("pyproject.toml", "Makefile"),
)
"""files and folders of the tree that the tests need"""
PASSED, FAILED, NOTHING_SELECTED = 0, 1, 5
"""pytest's exit codes"""
UNKNOWN_NAME = 2
"""exit code if no bug's name contains a given word"""
TABLE = Path(__file__).with_suffix(".txt")
"""below each file, per bug: its name, `- ` right, `+ ` wrong lines, the pytest id of its test"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """A plausible mistake: a text that occurs once in a file, and its wrong replacement."""

    name: str
    file: str
    right: str
    wrong: str
    test: str
    """pytest id of a test that fails with the bug"""


def _read_bugs() -> Iterator[Bug]:
    file = ""
    for paragraph in TABLE.read_text(encoding="utf-8").split("\n\n"):
        name, *change = paragraph.splitlines()
        if not change:
            file = name
            continue
        *change, test = change
        right, wrong = ("\n".join(line[2:] for line in change if line[0] == s) for s in "-+")
        yield Bug(name=name, file=file, right=right, wrong=wrong, test=test)


BUGS = list(_read_bugs())


def inject(bug: Bug, root: Path) -> str:
    """Inject `bug` into the tree at `root`; return the former text of the file."""
    file = root / bug.file
    text = file.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name}: its text occurs {text.count(bug.right)} times in {bug.file}")
    file.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")
    return text


def run_tests(root: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run `tests` of the tree at `root` against its own code."""
    # Bytecode is matched by size and second; a file may change twice within a second.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *options, *tests]
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def main(words: Sequence[str]) -> int:
    """Inject the bugs whose names contain one of `words`, all bugs without words."""
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    if not bugs:
        wanted = f"no bug's name contains {' or '.join(map(repr, words))}; their names:"
        print(wanted, *(f"  {bug.name}" for bug in BUGS), sep="\n", file=sys.stderr)
        return UNKNOWN_NAME
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        for part in PARTS:
            if (ROOT / part).is_dir():
                unneeded = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / part, root / part, ignore=unneeded)
            else:
                shutil.copy(ROOT / part, root)
        before = run_tests(root, sorted({bug.test for bug in bugs}))
        if before.returncode != PASSED:
            print(before.stdout, before.stderr, "without a bug the tests must pass", sep="\n")
            return 1
        caught = {bug.name: find_catcher(bug, root) for bug in bugs}
    everyday = list(caught.values()).count("make test")
    missed = [name for name, catcher in caught.items() if catcher is None]
    print(f"{everyday} of {len(bugs)} bugs caught by make test, {len(bugs) - len(missed)} by all")
    return 1 if missed else 0


def find_catcher(bug: Bug, root: Path) -> str | None:
    """Print and return which command's tests catch the bug, None if none do."""
    began = time.monotonic()
    text = inject(bug, root)
    catcher, done = "make test", run_tests(root, [bug.test], "-m", "not slow")
    if done.returncode == NOTHING_SELECTED:
        catcher, done = "make test-all", run_tests(root, [bug.test])
    (root / bug.file).write_text(text, encoding="utf-8")
    # Other exit codes mean that no test ran, or not to its end.
    result = {PASSED: "NOT CAUGHT", FAILED: f"caught by {catcher}"}
    outcome = result.get(done.returncode, "NO TEST RAN")
    print(f"{outcome}: {bug.name} ({time.monotonic() - began:.0f} s)\n  {bug.test}", flush=True)
    if outcome == "NO TEST RAN":
        print(done.stdout, done.stderr, sep="\n")
    return catcher if done.returncode == FAILED else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
