"""loft: fine-tune large language models with Lightning, composed by Hydra.

From Python: `from app import load_config, train`; nothing is imported before they are asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load_config", "train"]


def __getattr__(name: str) -> Any:
    if name == "load_config":
        from app.config import load_config

        return load_config
    if name == "train":
        from app.train import train

        globals()["train"] = train  # not the module, which the import has put there
        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
