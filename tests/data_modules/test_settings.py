"""Invalid settings and rows are reported before torch or a tokenizer is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_modules.audit.findings import AuditConfig
from data_modules.settings import DataConfig, DatasetConfig, MixtureConfig, check_datasets
from data_modules.source import ReadLimits
from data_modules.tokens.datasets import dataset_names
from tests.data_modules.conftest import alpaca, write_jsonl

NAN = float("nan")


def test_names_are_derived_from_paths_and_unique() -> None:
    paths = ["a/x.json", "b/x.jsonl.gz", "owner/set", "sample:lists.json", "data/v1.5", "in/*.csv"]
    paths += ["data/train-*.parquet", "data/gsm8k-*.jsonl.gz", "data/sets*/*.json"]
    paths.append("https://user:word@host/data/d.jsonl.gz?token=secret")
    configs = [DatasetConfig(path=path) for path in paths]
    configs.append(DatasetConfig(path="y.json", name="mine"))
    names = ["x", "x-2", "set", "lists", "v1.5", "in", "data", "gsm8k", "sets", "d", "mine"]
    assert dataset_names(configs) == names


def problems(*datasets: DatasetConfig, **settings: Any) -> list[str]:
    return check_datasets(DataConfig(datasets=list(datasets), **settings))


def test_check_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    good = write_jsonl(tmp_path / "d.jsonl", alpaca("one"))
    hub = DatasetConfig(path="no_such_owner/no_such_set")
    assert problems(good, hub, DatasetConfig(path="sample:lists.json"), num_proc=128) == []
    assert "data.datasets is empty; give" in problems()[0]
    found = problems(test_datasets=[DatasetConfig(path=str(tmp_path / "t.json"))])
    assert len(found) == 1 and "t.json: no such file" in found[0]
    for settings, message in (
        ({"audit": AuditConfig(ngram=1)}, "audit.ngram=1: expected 2 or more (13 is usual)"),
        ({"mixture": MixtureConfig(weights="token")}, "mixture.weights=token: expected epochs, r"),
        ({"roles_to_train": []}, "roles_to_train=[]: no part of a conversation would be trained"),
        (
            {"num_proc": 129},
            "num_proc=129 starts that many processes on 16 cores; give at most 128",
        ),
        # Each row would be refused too.
        ({"max_row_bytes": 0}, "max_row_bytes=0: expected "),
        ({"limits": ReadLimits(columns=0)}, "limits.columns=0: expected "),
    ):
        (problem,) = problems(good, **settings)
        assert problem.startswith(f"data.{message}")
    for given, message in (
        ({"weight": 0.0}, "weight=0.0: expected above 0"),
        ({"weight": NAN}, "weight=nan: expected above 0"),
        ({"format": "alpacca"}, "format: unknown format 'alpacca'; did you mean 'alpaca'?"),
        (
            {"format": "alpaca", "columns": {"outptu": "a"}},
            "columns.outptu: format 'alpaca' has no",
        ),
    ):
        (problem,) = problems(DatasetConfig(path=good.path, **given))
        assert problem.startswith(f"data.datasets[0].{message}")
    (problem,) = problems(DatasetConfig(path=good.path, columns={"output": "a"}))
    assert "missing 'a'; found ['instruction', 'output']" in problem


def test_data_sets_share_one_budget_equally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_modules.settings.CHECKED_BYTES", 5000)
    good = write_jsonl(tmp_path / "good.jsonl", alpaca(*["one" * 20] * 90))
    late = write_jsonl(tmp_path / "late.jsonl", [*alpaca(*["one" * 20] * 40), {"x": 1}])
    early = write_jsonl(tmp_path / "early.jsonl", [*alpaca(*["one" * 20] * 9), {"x": 1}])
    assert 2000 < Path(late.path).stat().st_size < 4000
    assert problems(late, good, good, good, good) == []
    assert [p.split("/")[-1][:12] for p in problems(good, good, good, early)] == ["early.jsonl:"]
    # What a short file leaves of its part goes to the files after it.
    assert "late.jsonl:41 missing" in problems(early, late)[-1]


def test_validation_rows_are_a_share_or_a_whole_number(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "d.jsonl", alpaca("one"))
    for size in (0.0, 0.999, 1, 200.0):
        assert problems(good, val_set_size=size) == []
    for size in (1.0, 1.5, -1, NAN, True):
        (problem,) = problems(good, val_set_size=size)
        assert problem.startswith(f"data.val_set_size={size}")


def test_check_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", alpaca("one")).path
    code = (
        "import sys, data_modules as d\n"
        f"assert d.check_datasets(d.DataConfig(datasets=[d.DatasetConfig(path={path!r})])) == []\n"
        "d.PackingConfig(), d.TEMPLATE_NAMES\n"
        "heavy = {'torch', 'lightning', 'transformers', 'datasets', 'numpy', 'pyarrow', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
