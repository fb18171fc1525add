"""Every real data set of the shared samples loads with a short config and can be trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import load_config
from app.preview import preview
from tests.conftest import SHARED, TrainRun, read_column

pytestmark = pytest.mark.slow

SETS = {
    "instruct/gsm8k_alpaca.json": "",
    "instruct/dolly_hhrlhf.jsonl": "",
    "instruct/self_instruct_seed_tasks.jsonl": (
        ", format: alpaca, columns: {input: instances.0.input, output: instances.0.output}"
    ),
    "instruct/identity.json": "",
    "instruct/gpteacher_roleplay.json": "",
    "chat/sharegpt_dummy_conversation.json": "",
    "chat/glaive_toolcall_en.json": "",
    "chat/oasst_trees.jsonl": "",
    "text/tiny_shakespeare.txt": "",
    "text/wikitext2_valid.txt": "",
    "text/c4_demo.jsonl": "",
}


def words(stories: Path, *files: str) -> list[str]:
    """Return the overrides for these files."""
    entries = ", ".join(f"{{path: '{SHARED / file}'{SETS[file]}}}" for file in files)
    return [
        f"model.path={stories}",
        f"data.datasets=[{entries}]",
        "data.val_set_size=4",
        "data.on_long=truncate_right",
        "trainer.max_steps=2",
        "trainer.gradient_accumulation_steps=1",
    ]


def test_all_shared_data_sets_are_listed() -> None:
    if not SHARED.is_dir():
        pytest.skip("../shared/data is absent")
    existing = {
        str(file.relative_to(SHARED))
        for folder in ("instruct", "chat", "text")
        for file in (SHARED / folder).iterdir()
    }
    assert existing == set(SETS)


def test_all_data_sets_are_previewed(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    preview(load_config("preview", [*words(stories, *SETS), f"output.dir={tmp_path}"]))
    page = (tmp_path / "preview.html").read_text()
    assert all(Path(file).stem in page for file in SETS)


def test_all_data_sets_are_trained_on(stories: Path, train_run: TrainRun) -> None:
    folder = train_run(*words(stories, *SETS), "data.mixture.weights=tokens", "packing=multipack")
    assert (folder / "audit.txt").read_text().count("\n") > len(SETS)
    losses = read_column(folder, "train/loss")
    assert len(losses) == 2 and all(0 < loss < 30 for loss in losses.values())
