"""LLaMA-Factory's `run_exp` with neat_packing. `python llamafactory_run.py TASK.json`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
from clock import Clock
from task import SEQUENCE_LEN, TOKENS_A_STEP, Task, read_rows
from trainer_watch import Watch, arguments_of
from transformers import AutoTokenizer

# LLaMA-Factory imports it for audio; pip has no CPU build of it.
sys.modules["torchaudio"] = ModuleType("torchaudio")
from llamafactory.data.processor.supervised import PackedSupervisedDatasetProcessor  # noqa: E402
from llamafactory.train import tuner  # noqa: E402
from llamafactory.train.sft import workflow  # noqa: E402

del sys.modules["torchaudio"]


CUTOFF = SEQUENCE_LEN + 7
"""fits every row; a pack is one token longer, and positions are right only in multiples of 8"""


def main(task: Task) -> None:
    """Train and report."""
    clock = Clock(task.warm_up)
    packs = TOKENS_A_STEP // SEQUENCE_LEN

    class Counted(workflow.SFTDataCollatorWith4DAttentionMask):
        def __call__(self, features: list[dict[str, Any]]) -> Any:
            kept = [id for feature in features for id in feature["attention_mask"] if id]
            clock.tokens.append(len(kept))
            return super().__call__(features)

    workflow.SFTDataCollatorWith4DAttentionMask = Counted
    with tempfile.TemporaryDirectory() as folder:
        save_packs(task, f"{folder}/packs")
        settings = {
            "model_name_or_path": f"{task.folder}/base",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": task.adapter,
            "dataset": "rows",
            "tokenized_path": f"{folder}/packs",
            "template": "empty",
            "cutoff_len": CUTOFF,
            "neat_packing": True,
            "flash_attn": "sdpa",
            "disable_gradient_checkpointing": True,
            "output_dir": f"{folder}/out",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": packs,
            **arguments_of(task),
        }
        lora = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target": "all"}
        tuner.run_exp(settings | (lora if task.adapter == "lora" else {}), [Watch(clock)])
    clock.report(packs)


def save_packs(task: Task, path: str) -> None:
    """Pack the rows as LLaMA-Factory does, without its templates: the rows are tokenized."""

    class Packing(PackedSupervisedDatasetProcessor):
        def _encode_data_example(self, prompt: Any, **_: Any) -> tuple[list[int], list[int]]:
            return list(prompt[0]), list(prompt[0])

    rows = read_rows(Path(task.folder))
    columns = {
        f"_{name}": [None] * len(rows) for name in ("system", "tools", "images", "videos", "audios")
    }
    examples = {"_prompt": [[ids] for ids in rows], "_response": [[None]] * len(rows), **columns}
    packing = Packing(
        template=None,
        tokenizer=AutoTokenizer.from_pretrained(f"{task.folder}/base"),
        processor=None,
        data_args=SimpleNamespace(neat_packing=True, cutoff_len=CUTOFF),
    )
    packed = datasets.Dataset.from_dict(packing.preprocess_dataset(examples))
    datasets.DatasetDict({"train": packed}).save_to_disk(path)


if __name__ == "__main__":
    main(Task.read(sys.argv[1]))
