"""TRL's SFTTrainer, packed (`bfd`) or padded (its default).

`python trl_run.py TASK.json packed`
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
from clock import Clock
from task import SEQUENCE_LEN, TOKENS_A_STEP, Task, read_rows
from trainer_watch import Watch, arguments_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main(task: Task, packed: bool) -> None:
    """Train and report."""
    base = f"{task.folder}/base"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = datasets.Dataset.from_list([{"input_ids": ids} for ids in read_rows(Path(task.folder))])
    clock = Clock(task.warm_up)

    packs = TOKENS_A_STEP // SEQUENCE_LEN
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_length=SEQUENCE_LEN,
            packing=packed,
            # Without flash attention, documents are only isolated in micro-batches of one pack.
            per_device_train_batch_size=1 if packed else task.rows_per_step,
            gradient_accumulation_steps=packs if packed else 1,
            **arguments_of(task),
            gradient_checkpointing=False,
        )
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=lora if task.adapter == "lora" else None,
            callbacks=[Watch(clock)],
        )
        collate = trainer.data_collator

        def counted(features: list[dict[str, Any]]) -> Any:
            clock.tokens.append(sum(len(feature["input_ids"]) for feature in features))
            return collate(features)

        trainer.data_collator = counted
        trainer.train()
    clock.report(packs if packed else 1)


if __name__ == "__main__":
    main(Task.read(sys.argv[1]), sys.argv[2] == "packed")
