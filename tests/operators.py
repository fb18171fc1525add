"""Watch the operators that PyTorch runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts the operators that run in its context, by name.

    `note` is called with each operator, its arguments, named arguments and result.
    """

    def __init__(self, note: Callable[..., object] = lambda *_: None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.name()] += 1
        self._note(func, args, kwargs or {}, result)
        return result
