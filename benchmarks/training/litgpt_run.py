"""litgpt's own fit of finetune_lora and finetune_full. `python litgpt_run.py TASK.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import torch
from clock import Clock
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data.base import get_sft_collate_fn
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file
from task import SEQUENCE_LEN, Task, read_rows
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

MICRO_BATCH = 1
"""litgpt's default: no padding"""


def main(task: Task) -> None:
    """Train and report."""
    clock = Clock(task.warm_up)

    class Watch:
        tokens = 0

        def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
            if "loss" in metrics:
                clock.step()
                clock.losses.append(metrics["loss"])
                clock.tokens.append(int(metrics["tokens"]) - self.tokens)
                self.tokens = int(metrics["tokens"])

    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[task.precision]
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision, loggers=[Watch()])
    fabric.seed_everything(0)
    model = fabric.setup_module(build_model(task))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.lr, fused=True)
    train_rows, check_rows = fabric.setup_dataloaders(*loaders(Path(task.folder)))
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "model": model,
            "optimizer": fabric.setup_optimizers(optimizer),
            "scheduler": ConstantLR(optimizer, factor=1.0),
        }
        state = {"state": parts | {"iter_num": 0, "step_count": 0}, "resume": False}
        import_module(f"litgpt.finetune.{task.adapter}").fit(
            fabric=fabric,
            **(parts if task.adapter == "lora" else state),
            train_dataloader=train_rows,
            val_dataloader=check_rows,
            devices=1,
            checkpoint_dir=Path(task.folder, "base"),
            out_dir=Path(folder),
            train=TrainArgs(
                save_interval=None,
                log_interval=task.rows_per_step // MICRO_BATCH,
                global_batch_size=task.rows_per_step // MICRO_BATCH * MICRO_BATCH,
                micro_batch_size=MICRO_BATCH,
                epochs=1,
                max_steps=task.steps,
                max_seq_length=SEQUENCE_LEN,
            ),
            eval=EvalArgs(interval=task.steps + 1, max_iters=1),
            data=None,
        )
    clock.report()


def build_model(task: Task) -> Any:
    """Build litgpt's GPT with the weights of the base and, for lora, adapters on all linears."""
    base = Path(task.folder, "base")
    shape = json.loads((base / "config.json").read_text())
    settings = {
        "name": "base",
        "block_size": shape["max_position_embeddings"],
        "vocab_size": shape["vocab_size"],
        "padded_vocab_size": shape["vocab_size"],
        "n_layer": shape["num_hidden_layers"],
        "n_head": shape["num_attention_heads"],
        "n_query_groups": shape["num_key_value_heads"],
        "n_embd": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "norm_eps": shape["rms_norm_eps"],
        "rope_base": int(shape["rope_parameters"]["rope_theta"]),
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
    }
    if task.adapter == "full":
        from litgpt.model import GPT, Config

        model = GPT(Config(**settings))
    else:
        from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

        places = {f"lora_{place}": True for place in ("query", "key", "value", "projection", "mlp")}
        model = GPT(Config(**settings, **places, lora_r=16, lora_alpha=32, lora_dropout=0.0))
        mark_only_lora_as_trainable(model)
    weights: dict[str, Any] = {}
    copy_weights_hf_llama(model.config, {}, weights, load_file(base / "model.safetensors"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("lora_" in name for name in missing), (missing, unexpected)
    return model


def loaders(folder: Path) -> tuple[DataLoader, DataLoader]:
    """Return the rows in random order, and one for litgpt's check before the first step."""
    rows = [
        {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(ids),
            "token_counts": {"raw": len(ids), "raw_plus_prompt_template": len(ids)},
        }
        for ids in read_rows(folder)
    ]
    collate = get_sft_collate_fn(SEQUENCE_LEN)
    return (
        DataLoader(rows, batch_size=MICRO_BATCH, shuffle=True, collate_fn=collate),
        DataLoader(rows[:1], collate_fn=collate),
    )


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
