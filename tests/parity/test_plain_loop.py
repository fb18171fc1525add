"""Six optimizer steps of app.train equal a plain PyTorch + transformers loop without packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from data_modules import Batch
from tests.conftest import TrainRun, read_column
from tests.parity.plain import STEPS, PlainTraining, global_steps, words
from tests.tiny import TINY_BASE, save_with_tokenizer, tiny_bart, tiny_t5

pytestmark = pytest.mark.slow

SEQUENCE_LEN, IGNORED = 128, -100
START = {"t5": 0, "bart": 2}
"""first token of each decoder"""
MAKERS: dict[str, Callable[..., Any]] = {"t5": tiny_t5, "bart": tiny_bart}
CASES = [
    ("llama", "multipack", "lora", 2),
    ("t5", "multipack", "lora", 1),
    ("bart", "none", "full", 2),
]
"""base, packing, adapter, packs in a micro-batch"""


def documents_of(batch: Batch) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yield (inputs, labels) of padded rows, or of each packed document."""
    targets = batch.document_lengths if batch.decoder is None else batch.decoder.document_lengths
    if all(len(lengths) == 1 for lengths in batch.document_lengths):
        real = torch.zeros_like(batch.input_ids)
        for row, (length,) in enumerate(batch.document_lengths):
            real[row, :length] = 1
        yield {"input_ids": batch.input_ids, "attention_mask": real}, batch.labels
        return
    for row, lengths in enumerate(batch.document_lengths):
        documents = batch.input_ids[row, : sum(lengths)].split([*lengths])
        labels = batch.labels[row, : sum(targets[row])].split([*targets[row]])
        for document, label in zip(documents, labels, strict=True):
            yield {"input_ids": document.unsqueeze(0)}, label.unsqueeze(0)


def summed_loss(model: Any, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens; an encoder-decoder's mask and mean are those of transformers."""
    if model.config.is_encoder_decoder:
        loss: torch.Tensor = model(**inputs, labels=labels).loss
        return loss * (labels != IGNORED).sum()
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def plain_losses(kind: str, base: Path, packing: str, adapter: str, micro: int) -> list[float]:
    """Return the mean loss of each step."""
    torch.manual_seed(42)
    auto = AutoModelForSeq2SeqLM if kind in MAKERS else AutoModelForCausalLM
    training = PlainTraining(auto.from_pretrained(base, dtype=torch.float32), adapter)
    losses = []
    for batches in global_steps(base, packing, SEQUENCE_LEN, micro, START.get(kind)):
        count = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
        total = 0.0
        for inputs, labels in (pair for batch in batches for pair in documents_of(batch)):
            loss = summed_loss(training.model, inputs, labels) / count
            loss.backward()
            total += loss.item()
        training.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("kind", "packing", "adapter", "micro"), CASES)
def test_steps_equal_a_plain_loop(
    kind: str, packing: str, adapter: str, micro: int, train_run: TrainRun, tmp_path: Path
) -> None:
    base = TINY_BASE
    if kind in MAKERS:
        base = save_with_tokenizer(MAKERS[kind](vocab_size=768), tmp_path / "base")
    folder = train_run(*words(base, adapter, packing, SEQUENCE_LEN, micro))
    ours = list(read_column(folder, "train/loss").values())
    assert len(ours) == STEPS
    assert ours == pytest.approx(plain_losses(kind, base, packing, adapter, micro), rel=1e-6)
