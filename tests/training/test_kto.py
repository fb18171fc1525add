"""objective=kto equals plain PyTorch on full logits, however a step is packed and split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.assembly.base import build_objective
from app.training.objective.objective import DatasetSums, batch_loss, losses_by_dataset
from app.training.objective.pairs import base_log_probs
from app.training.objective.settings import KtoConfig
from common.errors import Origin
from data_modules import Example
from data_modules.collator import Collator
from data_modules.format import KTO, RowError, convert_row, with_other_answers
from data_modules.types import Conversation, Document, Row
from tests.conftest import read_column
from tests.reliability.shell import Shell
from tests.tiny import SAMPLES
from tests.training.test_dpo import (
    SPLITS,
    adapted_model,  # noqa: F401
    answer_log_prob,
    assert_same_gradients,
    assert_same_step,
    batches,
    gradients,
    make_pairs,
    start_anew,
)

BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.5, 0.5
VERDICTS = [1.0, 0.0, 0.0, 1.0]
CPU = torch.device("cpu")


def make_rows() -> list[Example]:
    """Return answers with verdicts, each with another answer to the same prompt."""
    return [replace(one, label=label) for one, label in zip(make_pairs(), VERDICTS, strict=True)]


def gains(model: Any, rows: list[Example], side: int) -> torch.Tensor:
    """Return the log-probability of each row's own (0) or other (1) answer, minus the base's."""
    answers = [row.documents()[side] for row in rows]
    with torch.no_grad(), model.disable_adapter():
        before = torch.stack([answer_log_prob(model, answer) for answer in answers])
    return torch.stack([answer_log_prob(model, answer) for answer in answers]) - before


@pytest.mark.parametrize(("packed", "sizes"), SPLITS, ids=str)
@pytest.mark.parametrize("drifts", [True, False])
def test_loss_and_gradients_are_those_of_the_formula(
    model: Any, packed: bool, sizes: list[int], drifts: bool
) -> None:
    rows = make_rows()
    with torch.no_grad():
        if drifts:  # the other direction makes the answers of other rows likelier
            for name, weight in model.named_parameters():
                weight.data *= -0.3 if "lora_B" in name else 1
        kl = gains(model, rows, 1).mean().clamp(min=0)
        assert (kl > 0) == drifts
    own, label = gains(model, rows, 0), torch.tensor(VERDICTS)
    wanted = DESIRABLE * (1 - torch.sigmoid(BETA * (own - kl)))
    unwanted = UNDESIRABLE * (1 - torch.sigmoid(BETA * (kl - own)))
    weights = torch.tensor([float(row.weights.max()) for row in rows])
    expected = (weights * torch.where(label > 0, wanted, unwanted)).sum()
    by_name = gradients(model, expected)
    objective = build_objective(
        KtoConfig(beta=BETA, desirable_weight=DESIRABLE, undesirable_weight=UNDESIRABLE)
    )
    step, sums = batches(rows, sizes, packed=packed, has_verdicts=True), DatasetSums(2)
    objective.begin(model, step, "sdpa", CPU)
    found = [batch_loss(objective, model, batch, "sdpa", sums) for batch in step]
    assert sum(loss.item() for loss in found) == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(gradients(model, torch.stack(found).sum()), by_name)
    metrics = losses_by_dataset(sums.take(), ["a", "b"], "val", objective.figures)
    assert metrics["val/kl"] == pytest.approx(BETA * kl.item(), rel=1e-5, abs=1e-6)
    num_tokens = torch.tensor([float((row.documents()[0].weights > 0).sum()) for row in rows])
    for name, is_of in (("desirable", label > 0), ("undesirable", label == 0)):
        mean = np.average(BETA * own.detach()[is_of], weights=weights[is_of])
        assert metrics[f"val/{name}_reward"] == pytest.approx(mean, rel=1e-5)
        mean = np.average((own.detach() / num_tokens)[is_of], weights=weights[is_of])
        assert metrics[f"val/{name}_log_ratio"] == pytest.approx(mean, rel=1e-5)
    good = torch.where(label > 0, own > kl, own < kl).double()
    assert metrics["val/accuracy"] == pytest.approx(np.average(good, weights=weights))


def test_a_new_adapter_has_the_loss_that_the_first_step_is_checked_for(model: Any) -> None:
    start_anew(model)
    objective, sums = build_objective(KtoConfig()), DatasetSums(2)
    (batch,) = batches(make_rows(), [4], packed=True, has_verdicts=True)
    objective.begin(model, [batch], "sdpa", CPU)
    batch_loss(objective, model, batch, "sdpa", sums)
    found = losses_by_dataset(sums.take(), ["a", "b"], "train", objective.figures)
    assert found["train/accuracy"] == 0.5
    assert KtoConfig().first_loss == 0.5 == pytest.approx(found["train/loss"], rel=1e-6)
    assert KtoConfig(desirable_weight=2.0).first_loss is None


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_stored_reference_is_that_of_the_base(model: Any, packed: bool) -> None:
    rows, steps = make_rows(), []
    stored = torch.cat(
        [
            base_log_probs(model, batch, "sdpa")
            for batch in batches(rows, [1, 3], packed=not packed, has_verdicts=True)
        ]
    )
    known = [replace(row, reference=one.numpy()) for row, one in zip(rows, stored, strict=True)]
    for source, own in (("base", rows), ("cached", known)):
        objective = build_objective(KtoConfig(beta=BETA, reference=source))
        step = batches(own, [3, 1], packed=packed, has_verdicts=True)
        if source == "cached":
            step.append(Collator(0, True, has_verdicts=True)([[]], 1.0))
        objective.begin(model, step, "sdpa", CPU)
        steps.append((objective, step))
    assert_same_step(model, *steps)
    with pytest.raises(RuntimeError, match="nothing is stored"):
        objective.begin(model, batches(rows, [4], packed=packed, has_verdicts=True), "sdpa", CPU)


ROWS: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "q", "output": "a", "label": True},
    "texts": {"prompt": "q", "completion": "a", "label": 1},
    "turns": {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
        "label": "false",
    },
    "messages": {
        "messages": [
            {"role": "user", "content": "p"},
            {"role": "assistant", "content": "earlier"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
        ],
        "kto_tag": 0,
    },
}


def test_a_row_is_an_answer_with_its_verdict() -> None:
    for name, values in ROWS.items():
        (item,) = convert_row(Row(values, Origin("k.json", 1)), KTO, {})
        assert not isinstance(item, tuple) and item.label == float(name in ("alpaca", "texts"))
        if isinstance(item, Document):
            assert [segment.weight for segment in item.segments] == [0.0, 1.0]
        elif isinstance(item, Conversation):
            earlier = [turn.weight for turn in item.turns[:-1] if turn.role == "assistant"]
            assert item.turns[-1].content == "a" and earlier == [0.0] * (name == "messages")
    for values, said in (
        ({"instruction": "q", "output": "a", "label": "good"}, "label is 'good'; write true"),
        ({"instruction": "q", "label": True}, "no prompt with an answer beside the verdict"),
        ({"messages": [{"role": "user", "content": "q"}], "label": True}, "not with an answer"),
    ):
        with pytest.raises(RowError, match=said):
            convert_row(Row(values, Origin("k.json", 1)), KTO, {})


def test_each_prompt_gets_the_answer_of_the_next_row_of_its_kind() -> None:
    rows = [ROWS["alpaca"] | {"output": text} for text in "abc"] + [ROWS["texts"]]
    items = {
        number: convert_row(Row(row, Origin("k.json", number)), KTO, {})
        for number, row in enumerate(rows)
    }
    paired = with_other_answers(items)
    answers = [both[1].turns[-1].content for both in paired.values() if hasattr(both[1], "turns")]
    assert answers == ["b", "c", "a"]
    assert paired[3][1] == paired[3][0]  # no other row of raw text
    assert [both[0] for both in paired.values()] == [own for (own,) in items.values()]


def kto_file(folder: Path) -> Path:
    """Write pairs of the sample as answers with verdicts."""
    pairs = json.loads((SAMPLES / "pairs.json").read_text())[:80]
    rows = [
        {"instruction": pair["instruction"], "input": pair["input"], "output": pair[name]}
        | {"label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    file = folder / "kto.json"
    file.write_text(json.dumps(rows))
    return file


RUN = ["objective=kto", f"model.path={SAMPLES / 'tiny_base'}", "trainer.accelerator=cpu",
       "logger=csv", "data.sequence_len=256", "data.val_set_size=20", "adapter.dropout=0",
       "adapter.r=16", "adapter.alpha=32", "optimizer.lr=2e-3",
       "trainer.precision=fp32"]  # fmt: skip
STEP = ["trainer.micro_batch_size=4", "trainer.gradient_accumulation_steps=1"]


@pytest.mark.slow
def test_in_bf16_the_drift_is_measured_as_a_step_computes(shell: Shell, tmp_path: Path) -> None:
    data = f"data.datasets=[{{path: {kto_file(tmp_path)}}}]"
    words = ["trainer.precision=bf16", "recompute=full", "trainer.max_steps=1"]
    shell.train_into(tmp_path / "run", *RUN, data, *STEP, *words)
    for column, expected in {"kl": 0.0, "loss": 0.5, "desirable_reward": 0.0}.items():
        assert read_column(tmp_path / "run", f"train/{column}")[1] == expected, column


@pytest.mark.slow
def test_a_step_is_the_same_however_it_is_split(shell: Shell, tmp_path: Path) -> None:
    data = f"data.datasets=[{{path: {kto_file(tmp_path)}}}]"
    whole = tmp_path / "whole"
    shell.train_into(whole, *RUN, data, *STEP, "trainer.max_steps=3")
    losses = read_column(whole, "val/loss")
    assert losses[0] == pytest.approx(0.5, abs=1e-6) != losses[3]
    splits = {
        "fsdp": ["trainer.micro_batch_size=2", "trainer.devices=2", "strategy=fsdp"],
        "cached": [
            *("objective.reference=cached", "trainer.micro_batch_size=1"),
            "trainer.gradient_accumulation_steps=4",
        ],
    }
    for name, words in splits.items():
        shell.train_into(tmp_path / name, *RUN, data, *STEP, *words, "trainer.max_steps=3")
        for figure in ("loss", "kl", "accuracy", "desirable_reward"):
            for phase in ("train", "val"):
                ours = read_column(tmp_path / name, f"{phase}/{figure}")
                expected = read_column(whole, f"{phase}/{figure}")
                if figure == "accuracy":  # at step 0 rounding decides: both are equal
                    ours.pop(0, None), expected.pop(0, None)
                assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6), (name, figure)
