"""The common task: a small Llama with random weights, and rows of skewed lengths.

Written once, as files that every system can read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
MEDIAN_PROMPT, MEDIAN_ANSWER = 60, 100
LONGEST_PROMPT, LONGEST_ANSWER = 120, 380
"""tokens of the prompts and answers of pairs: SEQUENCE_LEN holds both documents of any of them"""
SPECIAL = ("<pad>", "<unk>", "<eos>", "<user>", "<assistant>")
"""the first words of the vocabulary"""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<user> ' + message['content'] + ' <assistant> ' }}"
    "{% else %}{{ message['content'] + ' <eos>' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of one system, as sent to its process."""

    folder: str
    """folder of base/, rows.jsonl and pairs.jsonl"""
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

    @property
    def pairs_per_step(self) -> int:
        """The number of pairs whose two documents have about TOKENS_A_STEP tokens."""
        return round(TOKENS_A_STEP / mean_pair_tokens(Path(self.folder)))

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
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | shape)))
    model.save_pretrained(folder / "base")
    names = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), SHAPE["vocab_size"]))]
    words = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder / "base")
    random = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as file:
        for length in _lengths(random, MEDIAN_TOKENS, SEQUENCE_LEN, num_rows):
            ids = _words(random, length)
            file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def write_pairs(folder: Path, num_pairs: int) -> None:
    """Write `num_pairs` prompts with a chosen and a rejected answer, as text of chats."""
    random = np.random.default_rng(1)
    lengths = [
        _lengths(random, MEDIAN_PROMPT, LONGEST_PROMPT, num_pairs),
        _lengths(random, MEDIAN_ANSWER, LONGEST_ANSWER, num_pairs),
        _lengths(random, MEDIAN_ANSWER, LONGEST_ANSWER, num_pairs),
    ]
    with (folder / "pairs.jsonl").open("w") as file:
        for each in zip(*lengths, strict=True):
            prompt, *answers = (" ".join(f"w{id}" for id in _words(random, n)) for n in each)
            row: dict[str, Any] = {"prompt": [{"role": "user", "content": prompt}]}
            for name, answer in zip(("chosen", "rejected"), answers, strict=True):
                row[name] = [{"role": "assistant", "content": answer}]
            file.write(json.dumps(row) + "\n")


def _lengths(random: np.random.Generator, median: int, longest: int, number: int) -> list[int]:
    """Draw skewed lengths."""
    lengths = np.exp(random.normal(np.log(median), SPREAD, number)).astype(int)
    drawn: list[int] = lengths.clip(8, longest).tolist()
    return drawn


def _words(random: np.random.Generator, length: int) -> list[int]:
    """Draw token ids, frequent and rare ones as in text."""
    shares = 1.0 / np.arange(1, SHAPE["vocab_size"] - 9)
    ids: list[int] = (random.choice(len(shares), length, p=shares / shares.sum()) + 10).tolist()
    return ids


def read_rows(folder: Path) -> list[list[int]]:
    """Return the token ids of all rows."""
    return [json.loads(line)["input_ids"] for line in (folder / "rows.jsonl").open()]


def mean_tokens(folder: Path) -> float:
    """Return the mean length of a row."""
    rows = read_rows(folder)
    return sum(map(len, rows)) / len(rows)


def read_pairs(folder: Path) -> list[dict[str, Any]]:
    """Return all pairs: prompt, chosen and rejected, each a list of messages."""
    return [json.loads(line) for line in (folder / "pairs.jsonl").open()]


def mean_pair_tokens(folder: Path) -> float:
    """Return the mean length of a pair's two documents together."""
    pairs = read_pairs(folder)
    words = sum(
        len(pair[answer][0]["content"].split()) + len(pair["prompt"][0]["content"].split()) + 3
        for pair in pairs
        for answer in ("chosen", "rejected")
    )
    return words / len(pairs)


def steps_sorted_together(num_rows: int, rows_per_step: int) -> int:
    """Steps whose rows `group_by_length` sorts together, longest first.

    Source: `get_length_grouped_indices` of transformers.
    """
    return min(num_rows // (rows_per_step * 4), 50)
