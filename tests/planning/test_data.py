"""The number of tokens of a run from its local data, and its time and cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.plan import plan_lines, training_tokens
from app.planning.planned import count_bytes, estimate_tokens
from common.text import duration
from tests.planning.test_plan import plan_of

BASE = "model.architecture={model_type: llama, hidden_size: 64, intermediate_size: 128, "
BASE += "num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512}"


def test_time_and_cost_from_local_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(500 * (json.dumps({"instruction": "count", "output": "one two"}) + "\n"))
    words = (BASE, "model.path=null", f"data.datasets=[{{path: {file}}}]", "hardware=h100")
    words += ("hardware.price_per_hour=2", "trainer.num_epochs=3", f"data.cache_dir={tmp_path}")
    facts, _ = plan_of(tmp_path / "out", *words)
    reason = "an estimate by 3 x all 500 rows at 4 bytes a token: its tokenizer is not here"
    assert facts["tokens_by"] == reason
    hours = facts["tokens"] / facts["tokens_per_second"] / 3600
    assert (facts["hours"], facts["cost"]) == pytest.approx((hours, 2 * hours))
    takes = f"{duration(3600 * hours)}, cost {2 * hours:,.2f} ({reason})"
    line = f"about {facts['tokens']:,} tokens take {takes}"
    assert line in capsys.readouterr().out.splitlines()
    typed, _ = plan_of(tmp_path / "typed", *words, "plan.tokens=1000")
    assert (typed["tokens"], typed["tokens_by"]) == (1000, "")
    file.unlink()
    facts, _ = plan_of(tmp_path / "without", *words)
    assert facts["hours"] is None and str(file) in facts["tokens_by"]
    assert any(line.startswith("time to finish: type plan.tokens=N") for line in plan_lines(facts))


def test_tokens_are_counted_by_the_bases_tokenizer() -> None:
    """Tokenizing gave 139,604 tokens for the 95 % of the rows that are trained on."""
    config: Any = load_config("plan", ["+experiment=quickstart", "hardware=h100"])
    config = replace(config, data=replace(config.data, cache_dir="no such cache"))
    tokens, by = estimate_tokens(config, 1024)
    assert tokens == pytest.approx(139_604 * config.trainer.num_epochs, rel=0.08)
    assert "bytes a token" not in by
    run: Any = type("Run", (), {"tokens_per_step": 7})
    assert training_tokens(config, run) == (config.trainer.max_steps * 7, "")


def test_tokens_of_unusual_texts() -> None:
    rows = ["four", "", "\ud800", "é" * 6]
    assert count_bytes(rows) == [1, 0, 1, 3]
