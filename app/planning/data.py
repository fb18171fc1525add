"""How many tokens a run trains on, by its data where they are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.base import ModelConfig
from app.model.hub import newest_cached_file
from app.process.untrusted import reading
from data_modules import estimate_epoch

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig

BYTES_OF_TOKEN = 4
"""of English text, about: OpenAI's rule of thumb, where the tokenizer is not on this machine"""


def estimate_tokens(config: TrainConfig, sequence_len: int) -> tuple[int, str]:
    """Estimate the tokens of all epochs, and say by what; DataError where the data do not tell."""
    file = find_tokenizer(config.model)
    epoch = estimate_epoch(
        config.data,
        sequence_len=sequence_len,
        tokenizer=str(config.model.tokenizer_path or config.model.path),
        count_tokens=count_bytes if file is None else _count_by(file),
    )
    epochs = config.trainer.num_epochs
    guessed = "" if file else f" at {BYTES_OF_TOKEN} bytes a token: its tokenizer is not here"
    times = f"{epochs} x " if epochs > 1 else ""
    return epoch.tokens * epochs, f"an estimate by {times}{epoch.how}{guessed}"


def find_tokenizer(model: ModelConfig) -> Path | None:
    """Return the base's tokenizer.json where this machine has it."""
    path = model.tokenizer_path or model.path
    if path is None:
        return None
    file = Path(path) / "tokenizer.json"
    return file if file.is_file() else newest_cached_file(path, file.name)


def count_bytes(texts: Sequence[str]) -> list[int]:
    """Return about how many tokens texts have, by their bytes."""
    return [-(-len(text.encode(errors="replace")) // BYTES_OF_TOKEN) for text in texts]


def _count_by(file: Path) -> Callable[[Sequence[str]], list[int]]:
    from tokenizers import Tokenizer

    def count(texts: Sequence[str]) -> list[int]:
        with reading(file, "download it again, or type plan.tokens=N"):
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(one) for one in encoded]

    return count
