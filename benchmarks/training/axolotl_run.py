"""axolotl with sample_packing. `python axolotl_run.py TASK.json`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.train import setup_model_and_trainer
from axolotl.utils.dict import DictDefault
from clock import Clock
from task import SEQUENCE_LEN, TOKENS_A_STEP, Task, read_rows
from trainer_watch import Watch

PACKS = TOKENS_A_STEP // SEQUENCE_LEN


def main(task: Task) -> None:
    """Train and report."""
    clock = Clock(task.warm_up)

    with tempfile.TemporaryDirectory() as folder:
        config = load_cfg(DictDefault(settings(task, folder)))
        trainer = setup_model_and_trainer(config, load_datasets(cfg=config))[0]
        train_one = trainer.training_step

        # Workers may collate, so tokens are counted in the training step.
        def counted(model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            clock.tokens.append(int((inputs["labels"] != -100).sum()))
            return train_one(model, inputs, *rest)

        trainer.training_step = counted
        trainer.add_callback(Watch(clock))
        trainer.train()
    clock.report(PACKS)


def settings(task: Task, folder: str) -> dict[str, Any]:
    """Return axolotl's config, and write the rows in its format."""
    rows = Path(folder, "rows.jsonl")
    with rows.open("w") as file:
        for ids in read_rows(Path(task.folder)):
            row = {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}
            file.write(json.dumps(row) + "\n")
    lora = {
        "adapter": "lora",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_linear": True,
        # Its fused kernels are for a GPU, and must be turned off explicitly.
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
    }
    return {
        "base_model": f"{task.folder}/base",
        **(lora if task.adapter == "lora" else {}),
        "datasets": [{"path": str(rows), "ds_type": "json", "type": None}],
        "dataset_prepared_path": f"{folder}/prepared",
        "dataset_num_proc": 1,
        "output_dir": f"{folder}/out",
        "sequence_len": SEQUENCE_LEN,
        "sample_packing": True,
        "pad_to_sequence_len": False,
        "sdp_attention": True,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": PACKS,
        "max_steps": task.steps,
        "optimizer": "adamw_torch_fused",
        "learning_rate": task.lr,
        "lr_scheduler": "constant",
        "bf16": task.precision == "bf16",
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
    }


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
