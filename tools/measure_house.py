"""Measure the code: sizes, imports, and how many functions and files a step of a run passes.

    python -m tools.measure_house                                       # a table, a JSON line
    cd OTHER; PYTHONPATH=. python HERE/tools/measure_house.py           # of another checkout

A function counts once, however often it is called; lambdas and comprehensions belong to the
function that they are in.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path.cwd()
ROOMS = ("app", "common", "data_modules")
LONG_FUNCTION = 60
_LINES_OF_A_PACKAGE = 100
"""a package's `__init__` with as many is a module"""
ROW = '{"instruction": "Say one.", "input": "", "output": "one"}\n'
WORDS = (
    *("model=tiny", "trainer.max_steps=2", "trainer.checkpoint.every_steps=1"),
    *("trainer.accelerator=cpu", "trainer.devices=1", "logger=csv"),
)
LONG_FUNCTIONS = f"functions over {LONG_FUNCTION} lines"
AIMS = {
    "modules": 125,
    "lines that are not blank": 28_000,
    LONG_FUNCTIONS: 0,
    "functions of load_config of the quickstart": 25,
    "files of load_config of the quickstart": 6,
    "functions of its checks before the start": 90,
    "files of its checks before the start": 20,
    "files of a row to its batch": 18,
}
MOST = {
    "modules": 210,
    "lines that are not blank": 66_420,
    LONG_FUNCTIONS: 0,
    "modules with one importer": 37,
}
"""what no change may exceed: lower these after a cut, raise them only for a capability"""


def measure_sizes() -> dict[str, int]:
    """Count modules, lines, long functions, modules with one importer, and imports of train.py."""
    modules: dict[str, ast.Module] = {}
    packages = set()
    lines = long_functions = 0
    for file in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = ast.parse(text)
        if file.name == "__init__.py" and len(text.splitlines()) < _LINES_OF_A_PACKAGE:
            packages.add(name)
        lines += sum(bool(line.strip()) for line in text.splitlines())
        long_functions += sum(
            node.end_lineno - node.lineno + 1 > LONG_FUNCTION
            for node in ast.walk(modules[name])
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
        )
    importers = Counter(one for name in modules for one in _imports_of(name, modules))
    train = modules["app.train"]
    return {
        "modules": len(modules.keys() - packages),
        "lines that are not blank": lines,
        LONG_FUNCTIONS: long_functions,
        "modules with one importer": sum(
            importers[name] == 1 for name in modules.keys() - packages
        ),
        "imports in app/train.py": sum(
            isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(train)
        ),
    }


def _imports_of(name: str, modules: dict[str, ast.Module]) -> set[str]:
    """Return the modules of the tree that module `name` imports, at its top or in a function."""
    found: set[str] = set()
    for node in ast.walk(modules[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & modules.keys()) or {node.module}
    return (found & modules.keys()) - {name}


def functions_of(step: Callable[[], object]) -> set[tuple[str, str, int]]:
    """Run `step`; return file, name and line of every function of ours that ran."""
    seen: set[tuple[str, str, int]] = set()
    prefixes = tuple(f"{ROOT / room}{os.sep}" for room in ROOMS)

    def note(frame: FrameType, *_: Any) -> None:  # of calls alone, since it returns no tracer
        code = frame.f_code
        is_named = not code.co_name.startswith("<")
        if is_named and code.co_filename.startswith(prefixes):
            seen.add((code.co_filename, code.co_name, code.co_firstlineno))

    sys.settrace(note)
    try:
        step()
    finally:
        sys.settrace(None)
    return seen


def measure_steps(folder: Path) -> dict[str, int]:
    """Count the functions and files of four steps of a run, whose files go into `folder`."""
    from app.config import check_before_start, load_config

    def load(*words: str) -> None:
        loaded.append(load_config("train", words))

    loaded: list[Any] = []
    rows = folder / "rows.jsonl"
    rows.write_text(ROW * 40)
    words = [*WORDS, f"data.datasets=[{{path: {rows}}}]", f"data.cache_dir={folder / 'cache'}"]
    words.append(f"output.dir={folder / 'run'}")
    command = [sys.executable, "-m", "app.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    (folder / "run" / "metrics.json").unlink()  # as if the run had been stopped

    found = {"load_config of the quickstart": functions_of(lambda: load("+experiment=quickstart"))}
    found["its checks before the start"] = functions_of(lambda: check_before_start(loaded[0]))
    started_anew = functions_of(lambda: load(*words[:-1]))
    started_anew |= functions_of(lambda: check_before_start(loaded[1]))
    resumed = functions_of(lambda: load(f"resume={folder / 'run'}"))
    resumed |= functions_of(lambda: check_before_start(loaded[2]))
    found["what finding and comparing a run adds"] = resumed - started_anew
    loaded[1].data.cache_dir = str(folder / "other-cache")
    found["a row to its batch"] = _functions_of_a_row(loaded[1])
    counts = {}
    for step, functions in found.items():
        counts[f"functions of {step}"] = len(functions)
        counts[f"files of {step}"] = len({file for file, _, _ in functions})
    return counts


def _functions_of_a_row(config: Any) -> set[tuple[str, str, int]]:
    from transformers import AutoTokenizer

    from data_modules import BatchSpec, DataSpec, FinetuneDataModule, ModelSpec

    config.data.num_workers = 0
    datamodule = FinetuneDataModule(
        DataSpec(
            config=config.data,
            packing=config.packing,
            tokenizer=AutoTokenizer.from_pretrained(config.model.path),
            model=ModelSpec(context_len=None),
            batching=BatchSpec(max_steps=1),
            seed=0,
        )
    )

    def first_batch() -> None:
        datamodule.setup("fit")
        next(iter(datamodule.train_dataloader()))

    return functions_of(first_batch)


def main() -> int:
    """Print the figures as a table, and as one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {**measure_sizes(), **measure_steps(Path(folder))}
    for name, number in figures.items():
        aim = f"  (aim: at most {AIMS[name]:,})" if name in AIMS else ""
        print(f"{number:>7,}  {name}{aim}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
