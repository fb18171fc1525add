"""Documents of a run's or a sweep's folder in every wrong shape, read by everything that does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from app.config import load_run_config
from app.evaluation.row_runner import PARTIAL, RowRunner
from app.merge import _read_facts
from app.report.model_card import render_run_card
from app.report.run_page import read_run_files, refuse_damaged, render_run
from app.run.manifest import compare_facts, read_run_manifest
from app.sweep.parameters import load_words
from app.sweep.trials import Trial, load_results, read_curve, read_final
from common.errors import UserError
from tests.report.test_run_page import write_run

WRONG = [None, True, -1, 10**400, "x", [3], [{}], {"a": [1]}]
DOCUMENTS = ["", "null", "3", '"x"', "[]", "[3]", "[[]]", "{}", "x", "{", "\x00", "[" * 99]
DOCUMENTS += ["1" * 5000]
TABLES = [
    "a,b\n1,2\n", "step,step\n1,2\n", "step,val/loss\nx,2\n", "step,val/loss\n1,2,3\n",
    "step,val/loss\n1,y\n2,1\n", "step,val/loss\n-1,2\n", "step\n" + "9" * 5000 + "\n",
    "step,val/loss\n,\n", f'step,val/loss\n1,"{"x" * 200_000}"\n', "step,val/loss\n\x00,1\n",
    '{"step": 1}\n', "step,val/loss\n1.5,2\n",
]  # fmt: skip
HASH = "0" * 32
MANIFEST: dict[str, Any] = {
    "command": ["python"], "started": "2026-11-23T07:00:00+0000", "python": "3.11",
    "versions": {"torch": "2.13"}, "hardware": {"cores": 2},
    "git": {"commit": "a", "changed": False},
    "seed": 1, "precision": "fp32", "strategy": "single", "total_steps": 20,
    "base": {"path": "a", "revision": None, "fingerprint": "b", "weights": "c"},
    "data": [{"name": "d", "path": "e", "sha256": "f", "rows": 3, "train_rows": 2,
              "validation_rows": 1, "tokens": 9, "trained_tokens": 8}],
    "global_batch": {"packs": 1, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
                     "num_ranks": 1},
    "run": {"id": HASH, "plan": HASH},
    "earlier": [{"plan": HASH, "until_step": 2}], "result": {"last": 20, "from": "best"},
    "tokenizer_sha256": "a", "template_sha256": "b", "tokens_sha256": "c",
}  # fmt: skip
METRICS = {"val/loss": 1.5, "tuned/val/loss": 1.5, "base/val/loss": 2.0}
TRIAL = Trial(
    number=0, overrides=["seed=1"], folder="a", exit_code=0, seconds=1.5, objective=2.0, error=None
)


def mutations(value: Any, kinds: Sequence[Any] = WRONG) -> Iterator[Any]:
    """Yield copies of a document, each with one part removed or of another of `kinds`.

    Of neighbours one becomes of every second kind, the next of the others.
    """
    yield from kinds
    if not isinstance(value, (dict, list)):
        return
    parts = list(value.items() if isinstance(value, dict) else enumerate(value))
    for index, (name, part) in enumerate(parts):
        copy = value.copy()
        del copy[name]
        yield copy
        for wrong in mutations(part, WRONG[index % 2 :: 2]):
            copy = value.copy()
            copy[name] = wrong
            yield copy


def read_pages(folder: Path) -> None:
    run = read_run_files(folder)
    refuse_damaged(run)
    render_run(run)
    render_run_card(folder, run, [])


def read_resumed(folder: Path) -> None:
    manifest = read_run_manifest(folder)
    compare_facts(manifest, MANIFEST)
    assert manifest["run"]["id"]


def read_sweep(folder: Path) -> None:
    load_words([f"resume={folder}"])


def read_merged(folder: Path) -> None:
    _read_facts(str(folder))


def read_partial(folder: Path) -> None:
    (folder / PARTIAL).mkdir(exist_ok=True)
    content = json.loads((folder / "rows").read_text())
    (folder / PARTIAL / "tuned-0.jsonl").write_text(f"{json.dumps(content)}\n")
    RowRunner(folder=folder)._read_saved("tuned", "x")


def read_losses(folder: Path) -> None:
    read_curve(folder, "val/loss")


def read_final_loss(folder: Path) -> None:
    read_final(folder, "val/loss")


READERS: dict[str, tuple[str, Any, list[Callable[[Path], object]]]] = {
    "manifest": ("manifest.json", MANIFEST, [read_resumed, read_pages, read_merged]),
    "metrics": ("metrics.json", METRICS, [read_final_loss, read_pages, read_merged]),
    "trials": ("sweep.json", [asdict(TRIAL)], [load_results]),
    "mixture": ("mixture.json", [{"name": "a", "rows": 1}], [read_pages]),
    "audit": (
        "audit.json",
        {"datasets": [{"name": "a", "rows": 1}], "warnings": ["b"]},
        [read_pages],
    ),
}


def read_or_refuse(reader: Callable[[Path], object], folder: Path, file: str) -> bool:
    """Read a document; return whether it was refused, in one sentence that names the file."""
    try:
        reader(folder)
    except UserError as error:
        assert file in str(error) and len(str(error)) < 1500, str(error)
        return True
    return False


@pytest.mark.parametrize("name", READERS)
def test_a_json_document_of_any_shape_is_read_or_refused_with_its_file(
    name: str, tmp_path: Path
) -> None:
    file, valid, readers = READERS[name]
    folder = write_run(tmp_path / "run", steps=4)
    texts = [json.dumps(each) for each in mutations(valid)] + DOCUMENTS
    for reader in readers:
        (folder / file).write_text(json.dumps(valid))
        assert not read_or_refuse(reader, folder, file)
        refused = 0
        for text in dict.fromkeys(texts):
            (folder / file).write_text(text)
            refused += read_or_refuse(reader, folder, file)
        assert refused > len(DOCUMENTS) // 2


@pytest.mark.parametrize("reader", [read_losses, read_pages])
def test_rows_of_any_form_are_read_or_refused_with_their_line(
    reader: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    for text in TABLES:
        (folder / "metrics.csv").write_text(text)
        assert read_or_refuse(reader, folder, "metrics.csv:"), text[:60]
    (folder / "metrics.csv").write_text("step,val/loss\n1,nan\n2,\n3,0.5\n4,0.")  # cut off
    assert not read_or_refuse(reader, folder, "metrics.csv")


@pytest.mark.parametrize("name", ["config.yaml", "sweep.yaml"])
def test_a_yaml_document_of_any_shape_is_read_or_refused_with_its_file(
    name: str, tmp_path: Path
) -> None:
    texts = [each for each in DOCUMENTS if each] + [
        json.dumps({key: wrong}) for key in ("model", "words", "trainer", "data") for wrong in WRONG
    ]
    for text in texts:
        (tmp_path / name).write_text(text)
        reader = (
            load_run_config if name == "config.yaml" else (lambda f: load_words([f"resume={f}"]))
        )
        is_refused = read_or_refuse(reader, tmp_path, name)
        assert is_refused or name == "config.yaml"


def test_a_saved_row_of_another_shape_is_refused_with_its_line(tmp_path: Path) -> None:
    for content in mutations({"stamp": "x", "row": 1, "result": 3}):
        (tmp_path / "rows").write_text(json.dumps(content))
        read_or_refuse(read_partial, tmp_path, "tuned-0.jsonl:1")
