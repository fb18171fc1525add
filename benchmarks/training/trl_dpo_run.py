"""TRL's DPOTrainer, whose reference is the base without its adapter.

`python trl_dpo_run.py TASK.json PAIRS`: micro-batches of PAIRS pairs; 0: a step is one micro-batch.
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
from task import SEQUENCE_LEN, Task, read_pairs
from trainer_watch import Watch, arguments_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def main(task: Task, pairs: int) -> None:
    """Train and report."""
    base = f"{task.folder}/base"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    clock = Clock(task.warm_up)

    each = round(task.pairs_per_step / pairs) if pairs else 1
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            max_length=SEQUENCE_LEN,
            per_device_train_batch_size=pairs or task.pairs_per_step,
            gradient_accumulation_steps=each,
            **arguments_of(task),
            gradient_checkpointing=False,
        )
        trainer = DPOTrainer(
            model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(read_pairs(Path(task.folder))),
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            callbacks=[Watch(clock)],
        )
        collate = trainer.data_collator

        def counted(pairs: list[dict[str, Any]]) -> Any:
            prompts = sum(2 * len(pair["prompt_ids"]) for pair in pairs)
            answers = sum(len(pair["chosen_ids"]) + len(pair["rejected_ids"]) for pair in pairs)
            clock.tokens.append(prompts + answers)
            return collate(pairs)

        trainer.data_collator = counted
        trainer.train()
    clock.report(each)


if __name__ == "__main__":
    main(Task.read(sys.argv[1]), int(sys.argv[2]))
