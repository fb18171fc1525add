"""Twenty optimizer steps of app.train equal a plain PyTorch + transformers loop."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_modules import Batch
from tests.conftest import TrainRun, read_column
from tests.parity.plain import STEPS, PlainTraining, global_steps, words
from tests.tiny import TINY_BASE

pytestmark = pytest.mark.slow

SEQUENCE_LEN, MICRO = 128, 2


def model_inputs(batch: Batch, packing: str) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return (inputs, shifted labels) of padded rows, or of each packed document."""
    if packing == "none":
        real = torch.zeros_like(batch.input_ids)
        for row, (length,) in enumerate(batch.document_lengths):
            real[row, :length] = 1
        return [({"input_ids": batch.input_ids, "attention_mask": real}, batch.labels)]
    found, start = [], 0
    for length in batch.document_lengths[0]:
        document = slice(start, start + length)
        found.append(({"input_ids": batch.input_ids[:, document]}, batch.labels[:, document]))
        start += length
    return found


def plain_losses(adapter: str, packing: str) -> list[float]:
    """Return the mean loss of each step of a loop without packing."""
    torch.manual_seed(42)
    base = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)
    training = PlainTraining(base, adapter)
    losses = []
    for batches in global_steps(TINY_BASE, packing, SEQUENCE_LEN, MICRO):
        count = sum(int((batch.labels != -100).sum()) for batch in batches)
        total = 0.0
        for inputs, labels in (pair for batch in batches for pair in model_inputs(batch, packing)):
            logits = training.model(**inputs).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += loss.item() / count
        training.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("adapter", "packing"), [("lora", "multipack"), ("full", "none")])
def test_twenty_steps_equal_a_plain_loop(adapter: str, packing: str, train_run: TrainRun) -> None:
    folder = train_run(*words(TINY_BASE, adapter, packing, SEQUENCE_LEN, MICRO))
    ours = list(read_column(folder, "train/loss").values())
    plain = plain_losses(adapter, packing)
    assert len(ours) == STEPS
    assert ours == pytest.approx(plain, rel=1e-6)
