"""loft: fine-tune large language models with Lightning, composed by Hydra.

From Python: `from app import load_config, train`; both are imported on first use.
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

        globals()["train"] = train  # the import has set this name to the module
        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
