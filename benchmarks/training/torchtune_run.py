"""torchtune's own single-device recipes, packed. `python torchtune_run.py TASK.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torchtune
from clock import Clock
from omegaconf import OmegaConf
from task import SEQUENCE_LEN, Task, read_rows
from torch.optim.lr_scheduler import ConstantLR
from torchtune.datasets import PackedDataset

RECIPES = Path(torchtune.__file__).parent.parent / "recipes"
IGNORED = -100
PACKS = 5
"""packs per step: packed in order they are 80 % full, so these hold about 4096 tokens"""


def main(task: Task) -> None:
    """Train and report."""
    clock = Clock(task.warm_up)

    class Recipe(recipe_of(task.adapter)):
        tokens = 0

        def _setup_lr_scheduler(self, *_: Any, **__: Any) -> Any:
            return ConstantLR(self._optimizer, factor=1.0)

        def _loss_step(self, batch: dict[str, Any]) -> Any:
            self.tokens += int((batch["tokens"] != 0).sum())
            return super()._loss_step(batch)

        def save_checkpoint(self, *_: Any, **__: Any) -> None:
            """Keep nothing."""

        def log_dict(self, logs: dict[str, Any], step: int) -> None:
            clock.step()
            clock.losses.append(float(logs["loss"]))
            clock.tokens.append(self.tokens)
            self.tokens = 0

    with tempfile.TemporaryDirectory() as folder:
        defaults = OmegaConf.load(
            RECIPES / "configs" / "llama3_2" / f"1B_{task.adapter}_single_device.yaml"
        )
        settings = OmegaConf.merge(defaults, changes(task, folder))
        recipe = Recipe(settings)
        recipe.setup(settings)
        recipe._metric_logger = recipe
        recipe.train()
    clock.report()


def changes(task: Task, folder: str) -> dict[str, Any]:
    """Return the differences from the recipe's shipped config."""
    base = json.loads(Path(task.folder, "base", "config.json").read_text())
    lora = {
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": 16,
        "lora_alpha": 32,
    }
    shape = {
        "vocab_size": base["vocab_size"],
        "num_layers": base["num_hidden_layers"],
        "num_heads": base["num_attention_heads"],
        "num_kv_heads": base["num_key_value_heads"],
        "embed_dim": base["hidden_size"],
        "intermediate_dim": base["intermediate_size"],
        "max_seq_len": base["max_position_embeddings"],
        "norm_eps": base["rms_norm_eps"],
        "rope_base": int(base["rope_parameters"]["rope_theta"]),
    }
    is_lora = task.adapter == "lora"
    return {
        "output_dir": folder,
        "model": {
            "_component_": f"torchtune.models.llama3.{'lora_llama3' if is_lora else 'llama3'}",
            **shape,
            **(lora if is_lora else {}),
        },
        "tokenizer": {"_component_": "builtins.dict"},
        "checkpointer": {"checkpoint_dir": f"{task.folder}/base", "model_type": "LLAMA3"},
        "dataset": {
            "_component_": "torchtune_run.packed_rows",
            "folder": task.folder,
            "packed": True,
        },
        "seed": 0,
        "batch_size": 1,
        "gradient_accumulation_steps": PACKS,
        "max_steps_per_epoch": task.steps,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": task.lr, "fused": True},
        "optimizer_in_bwd": False,
        "device": "cpu",
        "dtype": task.precision,
    }


def packed_rows(tokenizer: Any, folder: str, packed: bool) -> PackedDataset:
    """Pack the rows in order; the first token of a row is not a label."""
    rows = [{"tokens": ids, "labels": [IGNORED, *ids[1:]]} for ids in read_rows(Path(folder))]
    return PackedDataset(rows, max_seq_len=SEQUENCE_LEN)


def recipe_of(adapter: str) -> Any:
    """Load a recipe from its file: torchtune installs them outside its package."""
    name = f"{adapter}_finetune_single_device"
    spec = spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = {"lora": "LoRA", "full": "Full"}[adapter]
    return getattr(module, f"{kind}FinetuneRecipeSingleDevice")


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
