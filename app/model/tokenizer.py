"""Load and check a base's tokenizer; added tokens and their embedding rows; stop tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import AdapterConfig, LoraConfig
from app.model.architecture import is_classifier
from app.model.tokenizer_file import (
    SET_TOKENIZER_PATH,
    TOKENIZER_FILE,
    check_tokenizer_file,
    follow_file,
    is_verified,
    letters_error,
)
from common.errors import UserError
from common.untrusted import collect_later, read_json_object, reading, short_message
from data_modules import padding_id

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from app.model.base import ModelConfig
    from data_modules import DataConfig

log = logging.getLogger(__name__)

_PROBES = ["Say 1 word: Ωmega,\n\tor two.", *(letter * 300 + "!" for letter in "aA1 .\n")]
"""texts that a tokenizer is checked with; the long ones make bad regular expressions slow"""
_CONFIG = "tokenizer_config.json"
_T5, _LLAMA = "spiece.model", "tokenizer.model"
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def build_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, and make `config.added_tokens` special tokens of it.

    UserError if it cannot be read or has no EOS token.
    """
    path, tokenizer = _path(config), _load(config)
    _log_unknown_class(Path(path) / _CONFIG)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {path} has no eos_token, so answers would never end: "
            f"{_eos_fix(path, tokenizer)}"
        )
    if tokenizer.pad_token_id is None:
        # Safe for the loss: it is masked by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
        log.info("tokenizer: no pad token, padding with %r", tokenizer.eos_token)
    if added := config.added_tokens:
        known = tokenizer.get_vocab()
        tokenizer.add_tokens(added, special_tokens=True)
        if new := [token for token in added if token not in known]:
            log.info("tokenizer: added %s", ", ".join(new))
        if existing := [token for token in added if token in known]:
            log.info("tokenizer: %s existed already, and keeps its row", ", ".join(existing))
    return tokenizer


def new_token_ids(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> list[int]:
    """Return the ids of `config.added_tokens` that are new to the base.

    A token is new if the base's tokenizer lacks it, or if its id is not below `vocab_size`, the
    number of rows in the base's embedding. UserError if other tokens would need new rows too.
    """
    end = tokenizer.eos_token
    if tokenizer.eos_token_id >= vocab_size and end not in config.added_tokens:
        raise UserError(
            f"the tokenizer in {_path(config)}: its eos_token {end!r} has id "
            f"{tokenizer.eos_token_id:,}, the model's embedding has {vocab_size:,} rows; "
            f"{_eos_fix(_path(config), tokenizer)}, or type 'model.added_tokens=[{end}]'"
        )
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


def _path(config: ModelConfig) -> str:
    return str(config.tokenizer_path or config.path)


def _load(config: ModelConfig) -> PreTrainedTokenizerBase:
    path = _path(config)
    with reading(f"the tokenizer in {path} cannot be read", SET_TOKENIZER_PATH):
        try:
            tokenizer = _read(path, config)
            _check_usable(tokenizer, path)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust panics are no Exception
            _raise_file_error(Path(path), error)
            raise
    return tokenizer


def _log_unknown_class(file: Path) -> None:
    """Log if transformers ignores an unknown tokenizer_class, which it does without a warning."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = read_json_object(file)[0].get("tokenizer_class")
    if not name or not (file.parent / "tokenizer.json").is_file():
        return
    if not any(map(tokenizer_class_from_name, (name, name.removesuffix("Fast")))):
        log.info(
            "tokenizer: %s: tokenizer_class=%r is unknown to transformers; using tokenizer.json "
            "alone",
            file,
            name,
        )


def _check_usable(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Encode and decode probe texts: some broken files raise errors only in use."""
    for probe in _PROBES:
        ids = tokenizer(probe)["input_ids"]
        text = tokenizer.decode(ids)
        if not isinstance(text, str) or not all(type(i) is int and i >= 0 for i in ids):
            raise UserError(
                f"the tokenizer in {path}: its token ids are not integers from 0 up; "
                f"{SET_TOKENIZER_PATH}"
            )
    if tokenizer.is_fast and (
        problem := letters_error(tokenizer.backend_tokenizer, Path(path) / TOKENIZER_FILE)
    ):
        raise UserError(problem)
    templates = tokenizer.chat_template or ""
    values = templates.values() if isinstance(templates, dict) else [templates]
    if invalid := [value for value in values if not isinstance(value, str)]:
        raise UserError(
            f"{Path(path) / _CONFIG}: chat_template={invalid[0]!r:.80}: expected a text, or a list "
            "of name and template; remove the key, or download the file again"
        )
    for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        if token_id is not None and type(token_id) is not int:
            raise UserError(
                f"the tokenizer in {path}: the id of a special token is {token_id!r}; "
                f"{SET_TOKENIZER_PATH}"
            )


def _raise_file_error(folder: Path, error: BaseException) -> None:
    """Raise an error that names the broken file, if the library's error does not."""
    from tokenizers import Tokenizer

    if folder.is_dir() and str(error).startswith("Couldn't instantiate the backend"):
        raise UserError(
            f"the tokenizer in {folder} cannot be read: it has no tokenizer.json, and no other "
            f"supported tokenizer file; {SET_TOKENIZER_PATH}"
        ) from error
    if (file := folder / "tokenizer.json").is_file():
        with reading(f"{file} cannot be read", SET_TOKENIZER_PATH):
            Tokenizer.from_file(str(file))
        if (folder / _CONFIG).is_file() and not isinstance(error, (UserError, OSError)):
            raise UserError(
                f"{folder / _CONFIG} cannot be read: {short_message(error)}; {SET_TOKENIZER_PATH}"
            ) from error


def _read(path: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    import transformers

    folder, only_file = Path(path), ""
    if not any((folder / name).is_file() for name in (TOKENIZER_FILE, _CONFIG)):
        only_file = next((name for name in (_T5, _LLAMA) if (folder / name).is_file()), "")
    if only_file == _LLAMA:
        # AutoTokenizer would guess a different class, and silently return different tokens.
        raise UserError(
            f"the tokenizer in {path} cannot be read: {_LLAMA} alone does not determine the tokens "
            f"of a text; {SET_TOKENIZER_PATH}"
        )
    if only_file == _T5 and not (folder / "config.json").is_file():
        log.info("tokenizer: only %s in %s, loaded as a T5 tokenizer", only_file, path)
        return transformers.T5Tokenizer.from_pretrained(path)
    # The revision is that of the base, if the base is on the hub.
    is_pinned = path == config.path or Path(str(config.path)).is_dir()
    revision = config.revision if is_pinned else None
    file = _find_file(path, revision)
    if file is not None and (problems := check_tokenizer_file(file)):
        raise UserError("\n".join(problems))
    with collect_later():
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=config.trust_remote_code
        )
        return tokenizer if file is None or is_verified(file) else follow_file(tokenizer, file)


def _find_file(path: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    if Path(path).is_dir():
        file = Path(path) / TOKENIZER_FILE
        return file if file.is_file() else None
    found = cached_file(
        path, TOKENIZER_FILE, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return Path(found) if found else None


def _eos_fix(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what to write into tokenizer_config.json to declare an EOS token, for messages."""
    known = tokenizer.get_vocab()
    end = next((text for text in _ENDS if text in known), "")
    entry = f'"eos_token": "{end}"' if end else '"eos_token"'
    if Path(path).is_dir() and not (Path(path) / _CONFIG).is_file():
        written = f"{{{entry}}}" if end else "an eos_token"
        return f"write a {_CONFIG} with {written} into that folder"
    return f"add {entry} to its {_CONFIG}"


def num_rows(architecture: PretrainedConfig, new_ids: Sequence[int] = ()) -> int:
    """Return the number of embedding rows, with one for each of `new_ids`."""
    rows: int = architecture.get_text_config().vocab_size
    return max([rows, *(index + 1 for index in new_ids)])


def resize_embeddings(model: PreTrainedModel, new_ids: Sequence[int]) -> None:
    """Initialize rows for the tokens `new_ids` in embedding and head to the mean of earlier rows.

    Rows are added if the ids do not fit; a base often has more rows than its tokenizer has tokens.
    The mean is over the rows before the lowest new id. Deterministic.
    """
    if not new_ids:
        return
    if is_classifier(model):
        raise UserError(
            f"model.labels: {len(new_ids)} tokens need new rows in the embedding, which is not "
            "built yet beside a head of its own; type model.added_tokens=[] and "
            "data.chat_template=plain, or train with objective=sft first"
        )
    rows = model.get_input_embeddings().num_embeddings
    needed = max(new_ids) + 1
    if needed > rows:
        # Not mean_resizing: it samples from a fitted distribution.
        model.resize_token_embeddings(needed, mean_resizing=False)
    appended = list(range(rows, needed))
    for weight, ids in _initialized_rows(model, new_ids, appended):
        _initialize_by_mean(weight.data, ids)


def _initialized_rows(
    model: PreTrainedModel, new_ids: Iterable[int], appended: list[int]
) -> list[tuple[torch.Tensor, list[int]]]:
    """Return embedding, untied head and the head's biases, each with its rows to initialize."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids = sorted({*new_ids, *appended})
    weights = [(embedding.weight, ids)]
    if head.weight is not embedding.weight:
        weights.append((head.weight, ids))
    # The bias is not trained with new rows, so existing rows keep the base's bias.
    if head.bias is not None:
        weights.append((head.bias, appended))
    if "final_logits_bias" in model._buffers:  # BART's bias of the head, shape [1, rows]
        weights.append((model.final_logits_bias, appended))
    return weights


@dataclass(frozen=True, slots=True)
class AddedRows:
    """The rows that `resize_embeddings` initializes in one weight."""

    num_rows: int
    """number of rows after resizing"""
    ids: list[int]
    """indices of the initialized rows"""

    def grow(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of `weight` [rows, ...], or a bias [1, rows], with these rows."""
        rows = _rows_of(weight)
        grown = rows.new_zeros(self.num_rows, *rows.shape[1:])
        grown[: len(rows)] = rows
        _initialize_by_mean(grown, self.ids)
        return grown if rows is weight else grown.unsqueeze(0)


def added_rows(
    model: PreTrainedModel, new_ids: Sequence[int], shapes: Mapping[str | None, tuple[int, ...]]
) -> dict[str, AddedRows]:
    """Return the rows that `resize_embeddings` initialized in embedding and head, by weight name.

    `model`: the base after resizing; `shapes`: of the weights in the base's files, by weight name.
    """
    embedding, weights = model.get_input_embeddings(), model.state_dict(keep_vars=True)
    names = {id(weight): name for name, weight in reversed(weights.items())}
    rows = shapes[names[id(embedding.weight)]][0]
    appended = list(range(rows, embedding.num_embeddings))
    if not new_ids and not appended:
        return {}
    return {
        names[id(weight)]: AddedRows(rows + len(appended), ids)
        for weight, ids in _initialized_rows(model, new_ids, appended)
    }


def _initialize_by_mean(weight: torch.Tensor, ids: list[int]) -> None:
    """Set the rows `ids` to the mean of the rows before the first of them, in place."""
    import torch

    weight = _rows_of(weight)
    if ids:
        weight[ids] = weight[: ids[0]].mean(dim=0, dtype=torch.float32).to(weight.dtype)


def _rows_of(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [rows, ...] itself, or a view [rows] of a bias [1, rows]."""
    return weight[0] if weight.ndim == 2 and len(weight) == 1 else weight


def trained_token_ids(
    tokenizer: PreTrainedTokenizerBase, added: Sequence[str], adapter: AdapterConfig
) -> list[int]:
    """Return the ids of tokens with trained rows: `added` and the adapter's `trainable_tokens`.

    UserError if one of `trainable_tokens` is not in the tokenizer's vocabulary.
    """
    trainable = adapter.trainable_tokens if isinstance(adapter, LoraConfig) else []
    known = tokenizer.get_vocab()
    unknown = [token for token in trainable if token not in known]
    if unknown:
        raise UserError(
            f"adapter.trainable_tokens: {', '.join(map(repr, unknown))} is not a token of this "
            f"tokenizer; type 'model.added_tokens=[{','.join(unknown)}]' to add it"
        )
    return sorted({known[token] for token in (*added, *trainable)})


def check_same_vocabulary(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str
) -> None:
    """Raise UserError unless `other`, the tokenizer of the setting `name`, has the same tokens."""
    known = other.get_vocab()
    own = tokenizer.get_vocab()
    if differing := sorted(token for token, index in own.items() if known.get(token) != index):
        first = differing[0]
        there = f"id {known[first]:,}" if first in known else "no token"
        raise UserError(
            f"{name}: its vocabulary is not that of the base: {len(differing):,} of {len(own):,} "
            f"tokens differ, the first is {first!r}, id {own[first]:,} of the base and {there} of "
            "the teacher; type a teacher of the base's family"
        )


def with_chat_template(
    data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> DataConfig:
    """Return `data` with the chat template of `model` if neither it nor the tokenizer has one."""
    if data.chat_template is not None or tokenizer.chat_template or model.chat_template is None:
        return data
    return replace(data, chat_template=model.chat_template)


def set_ends(model: Any, stop_ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the stop tokens of training to a model; to a classifier, the padding it rates no text at.

    transformers' own class rates a text at its last token that is not padding.
    """
    if is_classifier(model):
        model.config.pad_token_id = padding_id(tokenizer)
    else:
        add_stop_tokens(model, stop_ids)


def add_stop_tokens(model: Any, stop_ids: Iterable[int]) -> None:
    """Append the stop token ids of training to those in the model's generation config."""
    generation = model.generation_config
    if generation is None:
        return
    existing = generation.eos_token_id
    ids = [] if existing is None else [existing] if isinstance(existing, int) else list(existing)
    ids += sorted(set(stop_ids) - set(ids))
    generation.eos_token_id = ids[0] if len(ids) == 1 else ids


def save_stop_tokens(model: Any, folder: Path) -> None:
    """Write a generation config with the model's stop tokens into an adapter's folder."""
    from transformers import GenerationConfig

    generation = model.generation_config
    if generation is not None:
        GenerationConfig(
            eos_token_id=generation.eos_token_id,
            pad_token_id=generation.pad_token_id,
            bos_token_id=generation.bos_token_id,
        ).save_pretrained(folder)


def saved_stop_ids(folder: Path, num_tokens: int) -> set[int]:
    """Return the stop token ids in the generation config of a folder; none if it has none.

    UserError for an id that is not below `num_tokens`.
    """
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return set()
    saved = GenerationConfig.from_pretrained(folder).eos_token_id
    ids = [] if saved is None else saved if isinstance(saved, list) else [saved]
    if invalid := [each for each in ids if type(each) is not int or not 0 <= each < num_tokens]:
        raise UserError(
            f"{folder / 'generation_config.json'}: eos_token_id: {invalid[0]!r:.80} is not one of "
            f"the base's {num_tokens:,} token ids; write the id that ends an answer, or train again"
        )
    return set(ids)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[str]) -> set[int]:
    """Return the ids that end an answer: EOS and `stop_tokens`.

    UserError if one of `stop_tokens` is not in the tokenizer's vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    unknown = [token for token in stop_tokens if token not in vocabulary]
    if unknown:
        known = [token for token in stop_tokens if token in vocabulary]
        raise UserError(
            f"model.stop_tokens: the tokenizer in {tokenizer.name_or_path} has no token "
            f"{', '.join(unknown)}; type 'model.stop_tokens=[{', '.join(known)}]'"
        )
    return {vocabulary[token] for token in stop_tokens} | {tokenizer.eos_token_id}
