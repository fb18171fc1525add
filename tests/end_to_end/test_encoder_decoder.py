"""Encoder-decoder models are trained, saved, reopened and evaluated by the same commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from tests.conftest import SHARED, TrainRun
from tests.processes import TWO_RANKS
from tests.reliability.shell import Shell
from tests.runs import check_close, losses_of, metrics_of
from tests.tiny import TINY_BASE, save_with_tokenizer, small_run, tiny_bart, tiny_t5

pytestmark = pytest.mark.slow


def test_two_ranks_train_as_one(train_run: TrainRun, shell: Shell, tmp_path: Path) -> None:
    base = save_with_tokenizer(tiny_t5(vocab_size=768), tmp_path / "base")
    words = [f"model.path={base}", "packing=multipack", "adapter.dropout=0", "logger=csv"]
    words += ["data.sequence_len=128", "trainer.micro_batch_size=2"]
    split = ["trainer.gradient_accumulation_steps=1", *TWO_RANKS]
    shell.train_into(tmp_path / "ranks", *small_run(*words, *split))
    alone = train_run(*small_run(*words))
    assert len(losses_of(alone)) == 4
    columns = ("train/loss", "train/grad_norm", "val/loss")
    check_close(tmp_path / "ranks", alone, columns, rel=1e-6)


SIX = {
    "Name the colour of the sky.": "blue",
    "Name the colour of grass.": "green",
    "Count to three.": "1 2 3",
    "Say the opposite of up.": "down",
    "Which is the biggest of 4 7 2?": "7",
    "Sort 9 3 5.": "3 5 9",
}
ARCHITECTURE = (
    "{model_type: t5, vocab_size: 768, d_model: 64, d_kv: 16, d_ff: 128, num_layers: 2,"
    " num_heads: 4, dropout_rate: 0.0, decoder_start_token_id: 0, eos_token_id: 2,"
    " pad_token_id: 0}"
)


def test_one_made_from_its_numbers_learns_six_rows_by_heart(
    train_run: TrainRun, tmp_path: Path
) -> None:
    rows = [{"instruction": question, "input": "", "output": SIX[question]} for question in SIX]
    (tmp_path / "six.json").write_text(json.dumps(rows))
    folder = train_run(
        "model.from_scratch=true",
        f"model.architecture={ARCHITECTURE}",
        f"model.tokenizer_path={TINY_BASE}",
        "adapter=full",
        f"data.datasets=[{{path: {tmp_path / 'six.json'}, name: six}}]",
        f"data.test_datasets=[{{path: {tmp_path / 'six.json'}, name: asked}}]",
        "data.val_set_size=0",
        "data.sequence_len=64",
        "packing=multipack",
        "trainer.micro_batch_size=2",
        "trainer.gradient_accumulation_steps=1",
        "trainer.max_steps=120",
        "trainer.precision=fp32",
        "optimizer.lr=3e-3",
        "evaluation.exact_match=true",
    )
    assert metrics_of(folder)["tuned/exact_match/asked"] == 1.0


def test_a_base_without_decoder_start_token_is_refused(train_run: TrainRun, tmp_path: Path) -> None:
    model = tiny_bart(vocab_size=768)
    base = save_with_tokenizer(model, tmp_path / "base")
    numbers = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(numbers | {"decoder_start_token_id": None}))
    (base / "generation_config.json").write_text("{}")
    chosen = small_run(f"model.path={base}", "packing=none", "data.sequence_len=128")
    with pytest.raises(UserError, match=r"no decoder_start_token_id.*config\.json"):
        train_run(*chosen)
    start = json.dumps({"decoder_start_token_id": model.config.decoder_start_token_id})
    (base / "generation_config.json").write_text(start)
    train_run(*chosen, "trainer.max_steps=1")


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
    metrics = metrics_of(folder)
    assert metrics["tuned/val/loss"] < metrics["base/val/loss"]
