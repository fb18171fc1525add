"""How a base speaks, as its config tells: the template it was made with, and where answers end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from app.model.base import ModelConfig
    from data_modules import DataConfig


def with_chat_template(
    data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> DataConfig:
    """Return `data` with the template of `model` where neither it nor the tokenizer has one."""
    if data.chat_template is not None or tokenizer.chat_template or model.chat_template is None:
        return data
    return replace(data, chat_template=model.chat_template)


def keep_stop_tokens(model: Any, stop_ids: Iterable[int]) -> None:
    """Add the ids that answers were trained to end with to the model's generation config.

    Those of its base stay: whoever loads the model stops at any of them.
    """
    own = model.generation_config
    if own is None:
        return
    known = own.eos_token_id
    ids = [] if known is None else [known] if isinstance(known, int) else list(known)
    ids += sorted(set(stop_ids) - set(ids))
    own.eos_token_id = ids[0] if len(ids) == 1 else ids


def save_stop_tokens(model: Any, folder: Path) -> None:
    """Write the ids that end answers beside an adapter, which has no generation config else."""
    from transformers import GenerationConfig

    own = model.generation_config
    if own is not None:
        GenerationConfig(
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            bos_token_id=own.bos_token_id,
        ).save_pretrained(folder)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[str]) -> set[int]:
    """Return the ids that end an answer: the EOS and `stop_tokens`.

    UserError for one that the tokenizer does not have as one token.
    """
    known = tokenizer.get_vocab()
    unknown = [token for token in stop_tokens if token not in known]
    if unknown:
        left = [token for token in stop_tokens if token in known]
        raise UserError(
            f"model.stop_tokens: the tokenizer in {tokenizer.name_or_path} has no token "
            f"{', '.join(unknown)}; type 'model.stop_tokens=[{', '.join(left)}]'"
        )
    return {known[token] for token in stop_tokens} | {tokenizer.eos_token_id}
