"""The common task: a small Llama with random weights, and rows of skewed lengths.

Written once, as files that every system can read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MEDIAN_TOKENS, SPREAD, SEQUENCE_LEN, TOKENS_A_STEP = 150, 0.8, 1024, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of one system, as sent to its process."""

    folder: str
    """folder of base/ and rows.jsonl"""
    adapter: str
    """lora or full"""
    precision: str
    """fp32 or bf16 (autocast)"""
    steps: int
    warm_up: int
    """warm-up steps, not measured"""
    lr: float = 2e-4

    @property
    def rows_per_step(self) -> int:
        """The number of rows with about TOKENS_A_STEP tokens."""
        return round(TOKENS_A_STEP / mean_tokens(Path(self.folder)))

    def write(self, path: Path) -> Path:
        """Write the task for a script to read."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> Task:
        """Read a task written by `write`."""
        return cls(**json.loads(Path(path).read_text()))


def write_files(folder: Path, num_rows: int, **shape: int) -> None:
    """Write the base, SHAPE with `shape` in it, and `num_rows` rows; every token is trained."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | shape)))
    model.save_pretrained(folder / "base")
    words = {f"w{number}": number for number in range(SHAPE["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
        pad_token="w0",
        unk_token="w1",
        eos_token="w2",
    )
    tokenizer.save_pretrained(folder / "base")
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(MEDIAN_TOKENS), SPREAD, num_rows)).astype(int)
    lengths = lengths.clip(8, SEQUENCE_LEN)
    shares = 1.0 / np.arange(1, SHAPE["vocab_size"] - 9)
    with (folder / "rows.jsonl").open("w") as file:
        for length in lengths.tolist():
            ids = random.choice(len(shares), length, p=shares / shares.sum()) + 10
            file.write(json.dumps({"input_ids": ids.tolist(), "labels": ids.tolist()}) + "\n")


def read_rows(folder: Path) -> list[list[int]]:
    """Return the token ids of all rows."""
    return [json.loads(line)["input_ids"] for line in (folder / "rows.jsonl").open()]


def mean_tokens(folder: Path) -> float:
    """Return the mean length of a row."""
    rows = read_rows(folder)
    return sum(map(len, rows)) / len(rows)


def steps_sorted_together(num_rows: int, rows_per_step: int) -> int:
    """Steps whose rows `group_by_length` sorts together, longest first.

    Source: `get_length_grouped_indices` of transformers.
    """
    return min(num_rows // (rows_per_step * 4), 50)
