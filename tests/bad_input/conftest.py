"""What these tests share: a cache of their own, and the tokenizer that ships with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import TINY_BASE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def shipped() -> Any:
    """Return the tokenizer that ships with the project."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(TINY_BASE)


@pytest.fixture
def base(shipped: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return it with its own template, whatever a test before has chosen."""
    monkeypatch.setattr(shipped, "chat_template", shipped.chat_template)
    return shipped
