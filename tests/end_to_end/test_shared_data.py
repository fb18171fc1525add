"""Every real data set of the shared samples loads with a short config and can be trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SHARED, TrainRun
from tests.runs import metrics_of

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


def test_all_shared_data_sets_are_listed() -> None:
    if not SHARED.is_dir():
        pytest.skip("../shared/data is absent")
    existing = {
        str(file.relative_to(SHARED))
        for folder in ("instruct", "chat", "text")
        for file in (SHARED / folder).iterdir()
    }
    assert existing == set(SETS)


def test_all_data_sets_are_trained_on(stories: Path, train_run: TrainRun) -> None:
    entries = ", ".join(f"{{path: '{SHARED / file}'{SETS[file]}}}" for file in SETS)
    folder = train_run(
        *(f"model.path={stories}", f"data.datasets=[{entries}]", "data.val_set_size=4"),
        *("data.on_long=truncate_right", "data.mixture.weights=tokens", "packing=multipack"),
        *("trainer.max_steps=8", "trainer.gradient_accumulation_steps=1"),
        *("data.sequence_len=256", "trainer.validate_every_steps=8", "evaluation.show_answers=0"),
    )
    audit = (folder / "audit.txt").read_text()
    assert all(Path(file).stem in audit for file in SETS)
    metrics = metrics_of(folder)
    assert metrics["tuned/val/loss"] < metrics["base/val/loss"] < 30
