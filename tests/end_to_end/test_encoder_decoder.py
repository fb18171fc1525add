"""Encoder-decoder models are trained, saved, reopened and evaluated by the same commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from tests.conftest import SHARED, TrainRun, read_column
from tests.reliability.shell import Shell
from tests.tiny import (
    NAMES,
    TINY_BASE,
    save_with_tokenizer,
    small_run,
    tiny_bart,
    tiny_t5,
    train_into,
)

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {"t5": tiny_t5, "bart": tiny_bart}
PACKING = {"t5": "multipack", "bart": "none"}
ADAPTERS = {"t5": "lora", "bart": "full"}


@pytest.fixture(scope="module", params=list(TINY))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(TINY[kind](vocab_size=768), tmp_path_factory.mktemp(kind) / "base")


@pytest.fixture(scope="module")
def words(kind: str, base: Path) -> list[str]:
    return [
        f"model.path={base}",
        f"packing={PACKING[kind]}",
        "data.sequence_len=128",
        "trainer.micro_batch_size=2",
        "evaluation.exact_match=true",
        "evaluation.max_rows=3",
        "evaluation.max_new_tokens=8",
    ]


@pytest.fixture(scope="module")
def run(kind: str, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / kind
    return train_into(folder, *words, f"adapter={ADAPTERS[kind]}", "recompute=full")


def test_every_data_set_has_its_curves_and_answers(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    for name in NAMES:
        assert metrics[f"val/loss/{name}"] > 0 and metrics[f"base/val/loss/{name}"] > 0
        for who in ("base", "tuned"):
            assert 0 <= metrics[f"{who}/exact_match/{name}"] <= 1
        assert len(read_column(run, f"train/loss/{name}")) > 0
    assert metrics["tuned/val/loss"] < metrics["base/val/loss"]


def test_a_preview_shows_both_sides(words: list[str], tmp_path: Path) -> None:
    from app.config import load_config
    from app.preview import preview

    chosen = [word for word in small_run(*words) if not word.startswith("evaluation")]
    folder = preview(load_config("preview", [*chosen, f"output.dir={tmp_path / 'preview'}"]))
    assert (folder / "preview.html").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["t5"], indirect=True, scope="module")
def test_two_ranks_train_as_one(
    words: list[str], train_run: TrainRun, shell: Shell, tmp_path: Path
) -> None:
    folder = tmp_path / "ranks"
    words = [*words, "adapter=lora", "adapter.dropout=0", "logger=csv"]
    split = [
        "trainer.gradient_accumulation_steps=1",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
    ]
    shell.train_into(folder, *small_run(*words, *split))
    alone = train_run(*small_run(*words))
    for column in ("train/loss", "train/grad_norm", "val/loss"):
        expected = read_column(alone, column)
        assert len(expected) > 1
        assert read_column(folder, column) == pytest.approx(expected, rel=1e-6)


SIX = {
    "Name the colour of the sky.": "blue",
    "Name the colour of grass.": "green",
    "Count to three.": "1 2 3",
    "Say the opposite of up.": "down",
    "Which is the biggest of 4 7 2?": "7",
    "Sort 9 3 5.": "3 5 9",
}
ARCHITECTURES = {
    "t5": "{model_type: t5, vocab_size: 768, d_model: 64, d_kv: 16, d_ff: 128, num_layers: 2,"
    " num_heads: 4, dropout_rate: 0.0, decoder_start_token_id: 0, eos_token_id: 2,"
    " pad_token_id: 0}"
}


@pytest.mark.parametrize("kind", ["t5"], indirect=True, scope="module")
def test_one_made_from_its_numbers_learns_six_rows_by_heart(
    kind: str, train_run: TrainRun, tmp_path: Path
) -> None:
    rows = [{"instruction": question, "input": "", "output": SIX[question]} for question in SIX]
    (tmp_path / "six.json").write_text(json.dumps(rows))
    folder = train_run(
        "model.from_scratch=true",
        f"model.architecture={ARCHITECTURES[kind]}",
        f"model.tokenizer_path={TINY_BASE}",
        "adapter=full",
        f"data.datasets=[{{path: {tmp_path / 'six.json'}, name: six}}]",
        f"data.test_datasets=[{{path: {tmp_path / 'six.json'}, name: asked}}]",
        "data.val_set_size=0",
        "data.sequence_len=64",
        f"packing={PACKING[kind]}",
        f"trainer.micro_batch_size={2 if PACKING[kind] == 'multipack' else 6}",
        "trainer.gradient_accumulation_steps=1",
        "trainer.max_steps=120",
        "trainer.precision=fp32",
        "optimizer.lr=3e-3",
        "evaluation.exact_match=true",
    )
    assert json.loads((folder / "metrics.json").read_text())["tuned/exact_match/asked"] == 1.0


@pytest.mark.parametrize("kind", ["bart"], indirect=True, scope="module")
def test_a_base_without_decoder_start_token_is_refused(
    kind: str, train_run: TrainRun, tmp_path: Path
) -> None:
    model = TINY[kind](vocab_size=768)
    base = save_with_tokenizer(model, tmp_path / "base")
    numbers = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(numbers | {"decoder_start_token_id": None}))
    chosen = small_run(f"model.path={base}", f"packing={PACKING[kind]}", "data.sequence_len=128")
    (base / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no decoder_start_token_id.*config\.json"):
        train_run(*chosen)
    start = json.dumps({"decoder_start_token_id": model.config.decoder_start_token_id})
    (base / "generation_config.json").write_text(start)
    train_run(*chosen)


def test_the_t5_tokenizer_ends_sources_and_targets(train_run: TrainRun, tmp_path: Path) -> None:
    tokenizer = SHARED / "tokenizers" / "t5"
    if not tokenizer.is_dir():
        pytest.skip("../shared/data is absent")
    base = tmp_path / "base"
    tiny_t5(vocab_size=32128, eos_token_id=1).save_pretrained(base)
    folder = train_run(
        *small_run(
            f"model.path={base}",
            f"model.tokenizer_path={tokenizer}",
            "data.sequence_len=128",
            "evaluation.exact_match=true",
            "evaluation.max_rows=2",
            "evaluation.max_new_tokens=4",
        )
    )
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["tuned/val/loss"] < metrics["base/val/loss"]
