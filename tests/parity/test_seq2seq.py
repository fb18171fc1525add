"""Twenty steps of an encoder-decoder model equal a plain transformers loop, padded and packed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from data_modules import Batch, DataConfig, DatasetConfig, FinetuneDataModule, PackingConfig
from tests.conftest import TrainRun, read_column
from tests.tiny import SAMPLES, save_with_tokenizer, tiny_bart, tiny_t5

LISTS = SAMPLES / "lists.json"
STEPS, SEQUENCE_LEN, ACCUMULATION = 20, 128, 2
MICRO = {"multipack": 1, "none": 2}
START = {"t5": 0, "bart": 2}
LR = {"lora": 2e-4, "full": 2e-5}
IGNORED = -100
CASES = [("t5", "multipack"), ("t5", "none"), ("bart", "none")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """Kind of model, folder of the base, packing."""
    kind, packing = request.param
    make: Any = {"t5": tiny_t5, "bart": tiny_bart}[kind]
    base = save_with_tokenizer(make(vocab_size=768), tmp_path_factory.mktemp("base") / kind)
    return kind, base, packing


def words(base: Path, packing: str, adapter: str) -> list[str]:
    """What is typed for the run under test."""
    return [
        f"model.path={base}",
        f"data.datasets=[{{path: {LISTS}, format: alpaca}}]",
        f"data.sequence_len={SEQUENCE_LEN}",
        f"adapter={adapter}",
        *(["adapter.dropout=0"] if adapter == "lora" else []),
        f"packing={packing}",
        f"optimizer.lr={LR[adapter]}",
        "optimizer.weight_decay=0.1",
        f"trainer.max_steps={STEPS}",
        f"trainer.micro_batch_size={MICRO[packing]}",
        f"trainer.gradient_accumulation_steps={ACCUMULATION}",
        "trainer.precision=fp32",
        "schedule.warmup_steps=5",
    ]


def global_steps(kind: str, base: Path, packing: str) -> list[list[Batch]]:
    """The micro-batches of every global step, as the data path serves them."""
    datamodule = FinetuneDataModule(
        DataConfig(
            datasets=[DatasetConfig(path=str(LISTS), format="alpaca")], sequence_len=SEQUENCE_LEN
        ),
        PackingConfig(method=packing),
        AutoTokenizer.from_pretrained(base),
        context_len=None,
        micro_batch_size=MICRO[packing],
        accumulation_steps=ACCUMULATION,
        num_epochs=1,
        max_steps=STEPS,
        seed=42,
        decoder_start_token_id=START[kind],
    )
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    return [batches[i : i + ACCUMULATION] for i in range(0, len(batches), ACCUMULATION)]


def model_inputs(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """What transformers is given: padded rows at once, packed documents alone, labels as such."""
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
    """Mean loss of each step of a loop that lets transformers shift, mask and average."""
    torch.manual_seed(42)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)
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
    for step, batches in enumerate(global_steps(kind, base, packing)):
        given = [inputs for batch in batches for inputs in model_inputs(batch)]
        counts = [int((inputs["labels"] != IGNORED).sum()) for inputs in given]
        total = 0.0
        for inputs, count in zip(given, counts, strict=True):
            loss = model(**inputs).loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        factor = (step + 1) / 5 if step < 5 else 0.5 * (1 + math.cos(math.pi * (step - 5) / 15))
        for group in optimizer.param_groups:
            group["lr"] = LR[adapter] * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_twenty_steps_equal_a_plain_loop(
    adapter: str, case: tuple[str, Path, str], train_run: TrainRun
) -> None:
    kind, base, packing = case
    folder = train_run(*words(base, packing, adapter))
    ours = list(read_column(folder, "train/loss").values())
    assert len(ours) == STEPS
    assert ours == pytest.approx(plain_losses(kind, base, packing, adapter), rel=1e-6)
