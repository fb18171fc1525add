"""The sweeps over all model families run again when what they depend on changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import tested_versions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = ("constraints.txt", "conf/model/llama.yaml", "app/model/base.py", "app/train.py")
    for name in (*files, "benchmarks/gpu/fake.cpp", "tests/test_sweep.py", "tests/test_other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "tests/test_sweep.py").write_text(f"@{tested_versions.MARKER}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("constraints.txt", True),
        ("conf/model/llama.yaml", True),
        ("tests/test_sweep.py", True),
        ("app/train.py", False),
        ("tests/test_other.py", False),
    ],
)
def test_only_what_the_sweeps_depend_on_counts(root: Path, name: str, counts: bool) -> None:
    before = tested_versions.digest(root)
    (root / name).write_text((root / name).read_text() + "changed")
    assert (tested_versions.digest(root) != before) == counts


def test_the_sweeps_have_to_run_until_they_are_recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested_versions, "ROOT", root)
    monkeypatch.setattr(tested_versions, "RECORD", root / "tests" / "tested_versions.txt")
    monkeypatch.setattr(tested_versions, "digest", lambda: "a digest")
    assert tested_versions.main([]) == 1
    assert tested_versions.main(["record"]) == 0
    assert tested_versions.main([]) == 0
