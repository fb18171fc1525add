"""Twenty optimizer steps through the ordinary command equal a plain PyTorch + transformers loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_modules import Batch, DataConfig, DatasetConfig, FinetuneDataModule, PackingConfig
from tests.conftest import ROOT, TrainRun, read_column

TINY = ROOT / "data_modules" / "samples" / "tiny_base"
LISTS = ROOT / "data_modules" / "samples" / "lists.json"
STEPS, SEQUENCE_LEN, MICRO, ACCUMULATION = 20, 256, 2, 2
LR = {"lora": 2e-4, "full": 2e-5}  # the defaults: at larger ones rounding itself grows past 1e-6


def words(adapter: str, packing: str) -> list[str]:
    """What is typed for the run under test."""
    return [
        f"model.path={TINY}",
        f"data.datasets=[{{path: {LISTS}, format: alpaca}}]",
        f"data.sequence_len={SEQUENCE_LEN}",
        f"adapter={adapter}",
        *(["adapter.dropout=0"] if adapter == "lora" else []),
        f"packing={packing}",
        f"optimizer.lr={LR[adapter]}",
        "optimizer.weight_decay=0.1",
        f"trainer.max_steps={STEPS}",
        f"trainer.micro_batch_size={MICRO}",
        f"trainer.gradient_accumulation_steps={ACCUMULATION}",
        "trainer.precision=fp32",
        "schedule.warmup_steps=5",
    ]


def global_steps(packing: str) -> list[list[Batch]]:
    """The micro-batches of every global step, as the data path serves them."""
    datamodule = FinetuneDataModule(
        DataConfig(
            datasets=[DatasetConfig(path=str(LISTS), format="alpaca")], sequence_len=SEQUENCE_LEN
        ),
        PackingConfig(method=packing),
        AutoTokenizer.from_pretrained(TINY),
        context_len=1024,
        micro_batch_size=MICRO,
        accumulation_steps=ACCUMULATION,
        num_epochs=1,
        max_steps=STEPS,
        seed=42,
    )
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    return [batches[i : i + ACCUMULATION] for i in range(0, len(batches), ACCUMULATION)]


def model_inputs(batch: Batch, packing: str) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """(what transformers is given, shifted labels): padded rows at once, packed documents alone."""
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
    """Mean loss of each step of a loop that knows nothing of packs."""
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if adapter == "lora":
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
        model = get_peft_model(model, lora)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR[adapter])
    losses = []
    for step, batches in enumerate(global_steps(packing)):
        count = sum(int((batch.labels != -100).sum()) for batch in batches)
        total = 0.0
        for inputs, labels in (pair for batch in batches for pair in model_inputs(batch, packing)):
            logits = model(**inputs).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += loss.item() / count
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        factor = (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 15))
        for group in optimizer.param_groups:
            group["lr"] = LR[adapter] * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("packing", ["multipack", "none"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_twenty_steps_equal_a_plain_loop(adapter: str, packing: str, train_run: TrainRun) -> None:
    folder: Path = train_run(*words(adapter, packing))
    ours = list(read_column(folder, "train/loss").values())
    plain = plain_losses(adapter, packing)
    assert len(ours) == STEPS
    assert ours == pytest.approx(plain, rel=1e-6)
