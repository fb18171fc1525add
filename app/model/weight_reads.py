"""Find layers that read a module's weight directly instead of calling the module.

The adapter of such a module would silently have no effect, and its packed 4-bit weight would be
read as plain values. These modules are found by a search in transformers' source code. Imports
torch only where it is needed.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Any

from app.model.config_values import read_source
from app.model.contexts import replaced

if TYPE_CHECKING:
    import torch

_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")
_PRODUCT = re.compile(r"\bself\.(\w+)\.weight @|@ self\.(\w+)\.weight\b")
_CALL = re.compile(r"\bself\.(\w+)\(")
_LINEAR = re.compile(r"\bself\.(\w+) = nn\.Linear\(")


@cache
def find_bypassed_linears(model_type: str | None) -> tuple[str, ...]:
    """Return the names of linear modules whose weights a model type's layers use directly.

    Empty for a model type that transformers does not have.
    """
    name = (model_type or "").replace("-", "_")
    for folder in (name, name.removesuffix("_text")):
        if source := read_source(f"models/{folder}/modeling_{folder}.py"):
            products = {name for pair in _PRODUCT.findall(source) for name in pair if name}
            never_called = set(_READ.findall(source)) - set(_CALL.findall(source))
            return tuple(sorted((never_called | products) & set(_LINEAR.findall(source))))
    return ()


def disable_bypassing_kernels(model: torch.nn.Module) -> None:
    """Make layers with training-only fused kernels run their unfused path if a kernel would bypass
    an adapter or read a packed weight.

    Mamba's fused kernels, for example, read the weights of several modules. The layer then calls
    these modules one by one, as it does in evaluation.
    """
    for module in model.modules():
        for method, names in _reads_in_training(module.__class__):
            children = [vars(module)["_modules"].get(name) for name in names]
            if not all(child is None or _is_plain(child) for child in children):
                setattr(module, method, UnfusedMethod(module, getattr(module, method)))


class UnfusedMethod:
    """Runs a layer's method in evaluation mode, while its child modules stay in training mode."""

    def __init__(self, module: Any, plain: Any) -> None:
        self._module, self._plain = module, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with replaced([(self._module, "training", False)]):
            return self._plain(*args, **kwargs)


@cache
def find_bypassed_children(kind: type) -> tuple[str, ...]:
    """Return the names of child modules whose weights the code of layer class `kind` reads."""
    return tuple(sorted(set(_READ.findall(_source_of(kind)))))


@cache
def _reads_in_training(kind: type) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return, by method of a class, the modules whose weights it reads if `self.training`."""
    source = _source_of(kind)
    if "self.training" not in source or not _READ.search(source):
        return ()
    found: dict[str, set[str]] = {}
    for method in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.If) and "self.training" in ast.unparse(node.test):
                names = _READ.findall("\n".join(map(ast.unparse, node.body)))
                found.setdefault(method.name, set()).update(names)
    return tuple((method, tuple(sorted(names))) for method, names in found.items() if names)


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was created at run time
        return ""


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module is not wrapped and its weight is a plain parameter."""
    import torch

    is_wrapped = type(module).__module__.partition(".")[0] not in ("torch", "transformers")
    weight = module._parameters.get("weight")  # an Identity has none
    return not is_wrapped and (weight is None or type(weight) is torch.nn.Parameter)
