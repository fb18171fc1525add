"""The Hugging Face Trainer with group_by_length, as people run it. `python hf_run.py TASK.json`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from clock import Clock
from task import Task, read_rows, steps_sorted_together
from trainer_watch import Watch, arguments_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    set_seed,
)

ACCUMULATION = 3
"""micro-batches per step; faster here than one large batch, with a third of its memory"""


def main(task: Task) -> None:
    """Train and report."""
    set_seed(0)
    base = f"{task.folder}/base"
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if task.adapter == "lora":
        import peft

        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = peft.get_peft_model(model, lora)
    rows = [{"input_ids": ids, "labels": ids} for ids in read_rows(Path(task.folder))]
    tokenizer = AutoTokenizer.from_pretrained(base)
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=None)
    rows_per_step = task.rows_per_step // ACCUMULATION * ACCUMULATION
    if task.steps - task.warm_up != (group := steps_sorted_together(len(rows), rows_per_step)):
        raise SystemExit(f"{task.steps - task.warm_up} steps measured, {group} sorted together")
    clock = Clock(task.warm_up)

    def counted(features: list[dict[str, Any]]) -> Any:
        clock.tokens.append(sum(len(feature["input_ids"]) for feature in features))
        return collate(features)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=rows_per_step // ACCUMULATION,
            gradient_accumulation_steps=ACCUMULATION,
            train_sampling_strategy="group_by_length",
            **arguments_of(task),
        )
        Trainer(
            model, arguments, data_collator=counted, train_dataset=rows, callbacks=[Watch(clock)]
        ).train()
    clock.report(ACCUMULATION)


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
