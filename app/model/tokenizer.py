"""The tokenizer of a base model, with the two tokens that training and generation need."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from app.model.build import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def build_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; ValueError if it cannot be read or cannot end an answer."""
    from transformers import AutoTokenizer

    path = config.tokenizer_path or config.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the tokenizer in {path} cannot be read: {what}; set model.tokenizer_path to a folder "
            "with tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {path} has no eos_token, so no answer could ever end: "
            'add "eos_token" to its tokenizer_config.json'
        )
    if tokenizer.pad_token_id is None:
        # Only fills unused positions: what is learned is decided by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
        log.info("tokenizer: no pad token, %r fills unused positions", tokenizer.eos_token)
    return tokenizer
