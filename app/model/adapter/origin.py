"""Which base an adapter was made on, kept beside it; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

ORIGIN_FILE = "base.json"
"""in an adapter's folder: path, revision and fingerprints of its base"""


def write_origin(folder: Path, base: Mapping[str, str | None]) -> None:
    """Write which base the adapter in `folder` was made on."""
    (folder / ORIGIN_FILE).write_text(json.dumps(dict(base), indent=2) + "\n", encoding="utf-8")
