"""The tokenizer of a base model, with the two tokens that training and generation need."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.build import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_TOLD = 300
_CONFIG = "tokenizer_config.json"
_T5, _LLAMA = "spiece.model", "tokenizer.model"
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def build_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; ValueError if it cannot be read or cannot end an answer."""
    path = str(config.tokenizer_path or config.path)
    try:
        tokenizer = _load(path, config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the tokenizer in {path} cannot be read: {_told(path, error)}; set "
            "model.tokenizer_path to a folder with tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {path} has no eos_token, so no answer could ever end: "
            f"{_how_to_end(path, tokenizer)}"
        )
    if tokenizer.pad_token_id is None:
        # Only fills unused positions: what is learned is decided by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
        log.info("tokenizer: no pad token, %r fills unused positions", tokenizer.eos_token)
    return tokenizer


def _load(path: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    import transformers

    bare = _bare_model(path)
    if bare == _LLAMA:
        # AutoTokenizer takes it for another kind, and spells other tokens without a word.
        raise ValueError(f"{_LLAMA} alone does not say how a text is cut into tokens")
    if bare == _T5 and not (Path(path) / "config.json").is_file():
        log.info("tokenizer: only %s in %s, read as one of T5", bare, path)
        return transformers.T5Tokenizer.from_pretrained(path)
    tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
        path, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    return tokenizer


def _bare_model(path: str) -> str:
    """Return the SentencePiece file of a folder where nothing says what it is, "" elsewhere."""
    folder = Path(path)
    if any((folder / name).is_file() for name in ("tokenizer.json", _CONFIG)):
        return ""
    return next((name for name in (_T5, _LLAMA) if (folder / name).is_file()), "")


def _told(path: str, error: Exception) -> str:
    """Return what is wrong, in one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    if said.startswith("Couldn't instantiate the backend tokenizer") and Path(path).is_dir():
        return "it has no tokenizer.json, and no other file that is known here"
    return said[:MAX_TOLD]


def _how_to_end(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    known = tokenizer.get_vocab()
    end = next((text for text in _ENDS if text in known), "")
    entry = f'"eos_token": "{end}"' if end else '"eos_token"'
    if Path(path).is_dir() and not (Path(path) / _CONFIG).is_file():
        written = f"{{{entry}}}" if end else "an eos_token"
        return f"write a {_CONFIG} with {written} into that folder"
    return f"add {entry} to its {_CONFIG}"
