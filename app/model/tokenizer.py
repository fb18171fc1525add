"""The tokenizer of a base model, with the two tokens that training and generation need."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.base import ModelConfig
from app.process.errors import UserError
from app.process.untrusted import brief, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ANOTHER = "set model.tokenizer_path to a folder with tokenizer.json and tokenizer_config.json"
PROBES = ["Say 1 word: Ωmega,\n\tor two.", *(letter * 300 + "!" for letter in "aA1 .\n")]
"""texts of several kinds that a tokenizer is tried with, and those over which expressions go on"""
_CONFIG = "tokenizer_config.json"
_T5, _LLAMA = "spiece.model", "tokenizer.model"
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def build_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with `config.added_tokens` beside its own.

    ValueError if it cannot be read or cannot end an answer.
    """
    path, tokenizer = _path(config), _load(config)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {path} has no eos_token, so no answer could ever end: "
            f"{_how_to_end(path, tokenizer)}"
        )
    if tokenizer.pad_token_id is None:
        # Only fills unused positions: what is learned is decided by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
        log.info("tokenizer: no pad token, %r fills unused positions", tokenizer.eos_token)
    if config.added_tokens:
        _add(tokenizer, config.added_tokens)
    return tokenizer


def new_token_ids(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> list[int]:
    """Return the ids of `config.added_tokens` that the base never learned.

    These are new to the tokenizer, or have no row among the `vocab_size` of the base's embedding.
    ValueError when rows would be needed for other tokens as well.
    """
    if not config.added_tokens:
        return []
    ids, known = tokenizer.get_vocab(), _load(config).get_vocab()
    new = {ids[t] for t in config.added_tokens if t not in known or ids[t] >= vocab_size}
    last = max(new, default=0)
    without = sorted(t for t, index in ids.items() if vocab_size <= index < last)
    if without := [token for token in without if token not in config.added_tokens]:
        raise UserError(
            f"the tokenizer in {_path(config)} has {without[0]!r} with id {ids[without[0]]:,}, the "
            f"model's embedding has {vocab_size:,} rows; name it in model.added_tokens too, or set "
            "model.tokenizer_path to the tokenizer that the model was made with"
        )
    return sorted(new)


def _add(tokenizer: PreTrainedTokenizerBase, added: list[str]) -> None:
    """Make each of `added` one special token; one that is there keeps its id."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(added, special_tokens=True)
    if new := [token for token in added if token not in known]:
        log.info("tokenizer: added %s", ", ".join(new))
    if there := [token for token in added if token in known]:
        log.info("tokenizer: %s was there already, and keeps its row", ", ".join(there))


def _path(config: ModelConfig) -> str:
    return str(config.tokenizer_path or config.path)


def _load(config: ModelConfig) -> PreTrainedTokenizerBase:
    path = _path(config)
    with reading(f"the tokenizer in {path} cannot be read", ANOTHER):
        try:
            tokenizer = _read(path, config)
            _try(tokenizer, path)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic in Rust
            _blame_file(Path(path), error)
            raise
    return tokenizer


def _try(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Use a tokenizer as a run does: its files may fit together only where they are not read."""
    for probe in PROBES:
        ids = tokenizer(probe)["input_ids"]
        text = tokenizer.decode(ids)
        if not isinstance(text, str) or not all(type(i) is int and i >= 0 for i in ids):
            raise UserError(
                f"the tokenizer in {path}: its ids are not numbers from 0 up; {ANOTHER}"
            )
    for token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        if token is not None and type(token) is not int:
            raise UserError(f"the tokenizer in {path}: a special id is {token!r}; {ANOTHER}")


def _blame_file(folder: Path, error: BaseException) -> None:
    """Name the one file that is to blame, where the library's words leave that open."""
    from tokenizers import Tokenizer

    if said := _no_backend(folder, error):
        raise UserError(said) from error
    if (file := folder / "tokenizer.json").is_file():
        with reading(f"{file} cannot be read", ANOTHER):
            Tokenizer.from_file(str(file))
        if (folder / _CONFIG).is_file() and not isinstance(error, (UserError, OSError)):
            raise UserError(f"{folder / _CONFIG} cannot be read: {brief(error)}; {ANOTHER}") from (
                error
            )


def _no_backend(folder: Path, error: BaseException) -> str | None:
    """Word that a folder has no tokenizer, which transformers says at length."""
    if not folder.is_dir() or not str(error).startswith("Couldn't instantiate the backend"):
        return None
    return (
        f"the tokenizer in {folder} cannot be read: it has no tokenizer.json, and no other file "
        f"that is known here; {ANOTHER}"
    )


def _read(path: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    import transformers

    bare = _bare_model(path)
    if bare == _LLAMA:
        # AutoTokenizer takes it for another kind, and spells other tokens without a word.
        raise UserError(
            f"the tokenizer in {path} cannot be read: {_LLAMA} alone does not say how a text is "
            f"cut into tokens; {ANOTHER}"
        )
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


def _how_to_end(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    known = tokenizer.get_vocab()
    end = next((text for text in _ENDS if text in known), "")
    entry = f'"eos_token": "{end}"' if end else '"eos_token"'
    if Path(path).is_dir() and not (Path(path) / _CONFIG).is_file():
        written = f"{{{entry}}}" if end else "an eos_token"
        return f"write a {_CONFIG} with {written} into that folder"
    return f"add {entry} to its {_CONFIG}"
