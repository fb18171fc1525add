"""Twenty encoder-decoder steps equal a plain transformers loop, padded and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from data_modules import Batch
from tests.conftest import TrainRun, read_column
from tests.parity.plain import STEPS, PlainTraining, global_steps, words
from tests.tiny import save_with_tokenizer, tiny_bart, tiny_t5

pytestmark = pytest.mark.slow

SEQUENCE_LEN = 128
MICRO = {"multipack": 1, "none": 2}
START = {"t5": 0, "bart": 2}
IGNORED = -100
MAKERS: dict[str, Any] = {"t5": tiny_t5, "bart": tiny_bart}


def model_inputs(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Return the inputs and unshifted labels of padded rows, or of each packed document."""
    assert batch.decoder is not None
    if all(len(lengths) == 1 for lengths in batch.document_lengths):
        real = torch.zeros_like(batch.input_ids)
        for row, (length,) in enumerate(batch.document_lengths):
            real[row, :length] = 1
        padded = {"input_ids": batch.input_ids, "attention_mask": real}
        return [padded | {"labels": batch.labels}]
    sources = batch.input_ids[0].split([*batch.document_lengths[0]])
    targets = batch.labels[0].split([*batch.decoder.document_lengths[0]])
    return [
        {"input_ids": source.unsqueeze(0), "labels": target.unsqueeze(0)}
        for source, target in zip(sources, targets, strict=True)
    ]


def plain_losses(kind: str, base: Path, packing: str, adapter: str) -> list[float]:
    """Return the mean loss of each step, with shift, mask and mean by transformers."""
    torch.manual_seed(42)
    model = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)
    training = PlainTraining(model, adapter)
    losses = []
    for batches in global_steps(base, packing, SEQUENCE_LEN, MICRO[packing], START[kind]):
        given = [inputs for batch in batches for inputs in model_inputs(batch)]
        counts = [int((inputs["labels"] != IGNORED).sum()) for inputs in given]
        total = 0.0
        for inputs, count in zip(given, counts, strict=True):
            loss = training.model(**inputs).loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
        training.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("kind", "packing", "adapter"),
    [("t5", "multipack", "lora"), ("t5", "none", "full"), ("bart", "none", "lora")],
)
def test_twenty_steps_equal_a_plain_loop(
    kind: str, packing: str, adapter: str, train_run: TrainRun, tmp_path: Path
) -> None:
    base = save_with_tokenizer(MAKERS[kind](vocab_size=768), tmp_path / "base")
    folder = train_run(*words(base, adapter, packing, SEQUENCE_LEN, MICRO[packing]))
    ours = list(read_column(folder, "train/loss").values())
    assert len(ours) == STEPS
    assert ours == pytest.approx(plain_losses(kind, base, packing, adapter), rel=1e-6)
