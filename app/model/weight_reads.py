"""Weights that a model's layers read themselves instead of calling the module that holds them.

Such a module's adapter would be left out in silence, and its 4-bit weight be read as numbers. Which
these are is read in transformers' source. Needs no torch at its top.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")
PRODUCT = re.compile(r"\bself\.(\w+)\.weight @|@ self\.(\w+)\.weight\b")
CALL = re.compile(r"\bself\.(\w+)\(")
LINEAR = re.compile(r"\bself\.(\w+) = nn\.Linear\(")


@cache
def find_bypassed_linears(model_type: str | None) -> tuple[str, ...]:
    """Return the linear modules that a model type's layers never call, or multiply by themselves.

    Empty for a type that transformers has not.
    """
    found = importlib.util.find_spec("transformers")
    if not model_type or found is None or found.origin is None:
        return ()
    name = model_type.replace("-", "_")
    for folder in (name, name.removesuffix("_text")):
        path = Path(found.origin).parent / "models" / folder / f"modeling_{folder}.py"
        if path.is_file():
            source = path.read_text(encoding="utf-8")
            products = {one for pair in PRODUCT.findall(source) for one in pair if one}
            never_called = set(READ.findall(source)) - set(CALL.findall(source))
            return tuple(sorted((never_called | products) & set(LINEAR.findall(source))))
    return ()


def disable_bypassing_kernels(model: torch.nn.Module) -> None:
    """Let layers with a kernel for training alone call the modules whose weights it would read.

    Only where one of these is no plain module: it has an adapter, or its weight is packed. Mamba's
    fused kernels are such; the layer then runs its parts, as in evaluation.
    """
    for module in model.modules():
        for method, names in _read_in_training(module.__class__):
            held = [vars(module)["_modules"].get(name) for name in names]
            if not all(one is None or _is_plain(one) for one in held):
                setattr(module, method, UnfusedMethod(module, getattr(module, method)))


class UnfusedMethod:
    """A method of a layer as in evaluation; the modules inside stay in training."""

    def __init__(self, module: Any, plain: Any) -> None:
        self._module, self._plain = module, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        was_training, self._module.training = self._module.training, False
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._module.training = was_training


@cache
def find_bypassed_children(kind: type) -> tuple[str, ...]:
    """Return the children of a layer of class `kind` whose weights its own code reads."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was made while the program runs
        return ()
    return tuple(sorted(set(READ.findall(source))))


@cache
def _read_in_training(kind: type) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return by method of a class the modules whose weights it reads where `self.training`."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was made while the program runs
        return ()
    if "self.training" not in source or not READ.search(source):
        return ()
    found: dict[str, set[str]] = {}
    for method in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.If) and "self.training" in ast.unparse(node.test):
                names = READ.findall("\n".join(map(ast.unparse, node.body)))
                found.setdefault(method.name, set()).update(names)
    return tuple((method, tuple(sorted(names))) for method, names in found.items() if names)


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module computes with its weight as it is."""
    import torch

    is_wrapped = type(module).__module__.partition(".")[0] not in ("torch", "transformers")
    weight = module._parameters.get("weight")  # an Identity has none
    return not is_wrapped and (weight is None or type(weight) is torch.nn.Parameter)
