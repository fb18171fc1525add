"""The tokenizer of a base model: added tokens and their embedding rows, template, stop tokens."""

from __future__ import annotations

import logging
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import AdapterConfig, LoraConfig
from app.process.errors import UserError
from app.process.untrusted import brief, read_json_object, reading

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from app.model.base import ModelConfig
    from data_modules import DataConfig

log = logging.getLogger(__name__)

ANOTHER = "set model.tokenizer_path to a folder with tokenizer.json and tokenizer_config.json"
PROBES = ["Say 1 word: Ωmega,\n\tor two.", *(letter * 300 + "!" for letter in "aA1 .\n")]
"""texts that a tokenizer is tried with, and long ones that make bad regular expressions slow"""
LETTERS = string.ascii_letters + string.digits + "éßñΩяمअ中あ한"
"""what a text is made of; a tokenizer without tokens for some of them has one for the unknown"""
MARKS = " ▁"
"""what tokenizers put before a text"""
_CONFIG = "tokenizer_config.json"
_T5, _LLAMA = "spiece.model", "tokenizer.model"
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


def build_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with `config.added_tokens` beside its own.

    UserError if it cannot be read or cannot end an answer.
    """
    path, tokenizer = _path(config), _load(config)
    _note_unknown_class(Path(path) / _CONFIG)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {path} has no eos_token, so no answer could ever end: "
            f"{_how_to_end(path, tokenizer)}"
        )
    if tokenizer.pad_token_id is None:
        # Only fills unused positions: the loss mask goes by position, never by token id.
        tokenizer.pad_token = tokenizer.eos_token
        log.info("tokenizer: no pad token, %r fills unused positions", tokenizer.eos_token)
    if config.added_tokens:
        _add(tokenizer, config.added_tokens)
    return tokenizer


def new_token_ids(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> list[int]:
    """Return the ids of `config.added_tokens` that are new to the base.

    They are new to the tokenizer, or have no row among the `vocab_size` of the base's embedding.
    UserError when rows would be needed for other tokens as well.
    """
    end = tokenizer.eos_token
    if tokenizer.eos_token_id >= vocab_size and end not in config.added_tokens:
        raise UserError(
            f"the tokenizer in {_path(config)}: its eos_token {end!r} has id "
            f"{tokenizer.eos_token_id:,}, the model's embedding has {vocab_size:,} rows; "
            f"{_how_to_end(_path(config), tokenizer)}, or type 'model.added_tokens=[{end}]'"
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


def _add(tokenizer: PreTrainedTokenizerBase, added: list[str]) -> None:
    """Make each of `added` a special token; an existing one keeps its id."""
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(added, special_tokens=True)
    if new := [token for token in added if token not in known]:
        log.info("tokenizer: added %s", ", ".join(new))
    if there := [token for token in added if token in known]:
        log.info("tokenizer: %s existed already, and keeps its row", ", ".join(there))


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


def _note_unknown_class(file: Path) -> None:
    """Say so where transformers falls back to tokenizer.json as it stands, as it does silently."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    named = read_json_object(file)[0].get("tokenizer_class")
    if not named or not (file.parent / "tokenizer.json").is_file():
        return
    if not any(map(tokenizer_class_from_name, (named, named.removesuffix("Fast")))):
        log.info(
            "tokenizer: %s: tokenizer_class=%r is not known here, tokens are cut as tokenizer.json "
            "says",
            file,
            named,
        )


def _try(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Encode and decode as a run does: some broken files show only when used."""
    for probe in PROBES:
        ids = tokenizer(probe)["input_ids"]
        text = tokenizer.decode(ids)
        if not isinstance(text, str) or not all(type(i) is int and i >= 0 for i in ids):
            raise UserError(
                f"the tokenizer in {path}: its ids are not numbers from 0 up; {ANOTHER}"
            )
    _check_letters(tokenizer, path)
    templates = tokenizer.chat_template or ""
    listed = templates.values() if isinstance(templates, dict) else [templates]
    if odd := [one for one in listed if not isinstance(one, str)]:
        raise UserError(
            f"{Path(path) / _CONFIG}: chat_template={odd[0]!r:.80}: expected a text, or a list of "
            "name and template; remove the key, or download the file again"
        )
    for token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        if token is not None and type(token) is not int:
            raise UserError(f"the tokenizer in {path}: a special id is {token!r}; {ANOTHER}")


def _check_letters(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer that drops letters before it looks for tokens, or makes others of them.

    Case and accents may go, as in BERT's.
    """
    if not tokenizer.is_fast:
        return
    backend: Any = tokenizer.backend_tokenizer
    lost = []
    for letter in LETTERS:
        text = backend.normalizer.normalize_str(letter) if backend.normalizer else letter
        is_kept = letter.casefold() in text.casefold() if letter.isascii() else text.strip(MARKS)
        if is_kept and letter.isascii() and backend.pre_tokenizer:  # bytes of others are renamed
            pieces = backend.pre_tokenizer.pre_tokenize_str(text)
            is_kept = letter.casefold() in "".join(piece for piece, _ in pieces).casefold()
        if not is_kept:
            lost.append(letter)
    if lost:
        raise UserError(
            f"{Path(path) / 'tokenizer.json'}: its normalizer or pre_tokenizer drops or changes "
            f"{len(lost)} of {len(LETTERS)} letters and digits, {' '.join(lost[:5])} among them, "
            f"of every text; download it again, or {ANOTHER}"
        )


def _blame_file(folder: Path, error: BaseException) -> None:
    """Raise an error that names the broken file, where the library's does not."""
    from tokenizers import Tokenizer

    if problem := _no_backend(folder, error):
        raise UserError(problem) from error
    if (file := folder / "tokenizer.json").is_file():
        with reading(f"{file} cannot be read", ANOTHER):
            Tokenizer.from_file(str(file))
        if (folder / _CONFIG).is_file() and not isinstance(error, (UserError, OSError)):
            raise UserError(f"{folder / _CONFIG} cannot be read: {brief(error)}; {ANOTHER}") from (
                error
            )


def _no_backend(folder: Path, error: BaseException) -> str | None:
    """Return a short message for a folder without a tokenizer."""
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
        # AutoTokenizer takes it for another kind, and silently gives other tokens.
        raise UserError(
            f"the tokenizer in {path} cannot be read: {_LLAMA} alone does not say how a text is "
            f"cut into tokens; {ANOTHER}"
        )
    if bare == _T5 and not (Path(path) / "config.json").is_file():
        log.info("tokenizer: only %s in %s, read as one of T5", bare, path)
        return transformers.T5Tokenizer.from_pretrained(path)
    # It is that of the base, where the hub has one.
    is_pinned = path == config.path or Path(str(config.path)).is_dir()
    revision = config.revision if is_pinned else None
    tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
        path,
        revision=revision,
        trust_remote_code=config.trust_remote_code,
    )
    return tokenizer


def _bare_model(path: str) -> str:
    """Return a folder's SentencePiece file where no other file says what it is, else ""."""
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


def num_rows(architecture: PretrainedConfig, new_ids: Sequence[int] = ()) -> int:
    """Return the number of embedding rows, with one for each of `new_ids`."""
    rows: int = architecture.get_text_config().vocab_size
    return max([rows, *(index + 1 for index in new_ids)])


def resize_embeddings(model: PreTrainedModel, new_ids: Sequence[int]) -> None:
    """Give the tokens `new_ids` rows in embedding and head, initialized to the mean of the others.

    A base often has more rows than its tokenizer has tokens: these are used first, and the mean is
    of the rows before them. Deterministic.
    """
    if not new_ids:
        return
    rows = model.get_input_embeddings().num_embeddings
    needed = max(new_ids) + 1
    if needed > rows:
        # Without mean_resizing, which draws from a fitted distribution at random.
        model.resize_token_embeddings(needed, mean_resizing=False)
    made = list(range(rows, needed))
    ids = sorted({*new_ids, *made})
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    _start_as_the_mean(embedding.weight.data, ids)
    if head.weight is not embedding.weight:
        _start_as_the_mean(head.weight.data, ids)
    # A bias is not trained with its row: that of an existing row stays the base's.
    if head.bias is not None:
        _start_as_the_mean(head.bias.data, made)
    if "final_logits_bias" in model._buffers:  # BART's bias of the head, shape [1, rows]
        _start_as_the_mean(model.final_logits_bias[0], made)


@dataclass(frozen=True, slots=True)
class AddedRows:
    """The rows that a weight of a base gets for tokens without a trained one."""

    num_rows: int
    ids: list[int]

    def grow(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of `weight` [rows, ...], or a bias [1, rows], with these rows."""
        is_flat = weight.ndim == 2 and len(weight) == 1
        rows = weight.T if is_flat else weight
        grown = rows.new_zeros(self.num_rows, *rows.shape[1:])
        grown[: len(rows)] = rows
        _start_as_the_mean(grown, self.ids)
        return grown.T if is_flat else grown


def added_rows(
    model: PreTrainedModel, new_ids: Sequence[int], shapes: Mapping[str | None, tuple[int, ...]]
) -> dict[str, AddedRows]:
    """Return, by the weight's name, what `resize_embeddings` has made of embedding and head.

    `model` is the base after it, `shapes` are those of its files by the same names.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(weight): name for name, weight in model.named_parameters()}
    rows = shapes[names[id(embedding.weight)]][0]
    made = list(range(rows, embedding.num_embeddings))
    ids = sorted({*new_ids, *made})
    if not ids:
        return {}
    found = {names[id(each.weight)]: ids for each in (embedding, head)}
    if head.bias is not None:
        found[names[id(head.bias)]] = made
    if "final_logits_bias" in model._buffers:
        found["final_logits_bias"] = made
    return {name: AddedRows(rows + len(made), ids) for name, ids in found.items()}


def _start_as_the_mean(weight: torch.Tensor, ids: list[int]) -> None:
    """Set the rows `ids` to the mean of the rows before the first of them, in place."""
    import torch

    if ids:
        weight[ids] = weight[: ids[0]].mean(dim=0, dtype=torch.float32).to(weight.dtype)


def trained_token_ids(
    tokenizer: PreTrainedTokenizerBase, added: Sequence[str], adapter: AdapterConfig
) -> list[int]:
    """Return the ids whose rows train with an adapter: `added` and its `trainable_tokens`.

    UserError for a name that is not one token.
    """
    named = adapter.trainable_tokens if isinstance(adapter, LoraConfig) else []
    known = tokenizer.get_vocab()
    unknown = [token for token in named if token not in known]
    if unknown:
        raise UserError(
            f"adapter.trainable_tokens: {', '.join(map(repr, unknown))} is not a token of this "
            f"tokenizer; type 'model.added_tokens=[{','.join(unknown)}]' to add it"
        )
    return sorted({known[token] for token in (*added, *named)})


def with_chat_template(
    data: DataConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> DataConfig:
    """Return `data` with the template of `model` where neither it nor the tokenizer has one."""
    if data.chat_template is not None or tokenizer.chat_template or model.chat_template is None:
        return data
    return replace(data, chat_template=model.chat_template)


def add_stop_tokens(model: Any, stop_ids: Iterable[int]) -> None:
    """Add the stop token ids of training to the model's generation config, after the base's."""
    own = model.generation_config
    if own is None:
        return
    known = own.eos_token_id
    ids = [] if known is None else [known] if isinstance(known, int) else list(known)
    ids += sorted(set(stop_ids) - set(ids))
    own.eos_token_id = ids[0] if len(ids) == 1 else ids


def save_stop_tokens(model: Any, folder: Path) -> None:
    """Write a generation config with the stop tokens beside an adapter."""
    from transformers import GenerationConfig

    own = model.generation_config
    if own is not None:
        GenerationConfig(
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            bos_token_id=own.bos_token_id,
        ).save_pretrained(folder)


def saved_stop_ids(folder: Path, num_tokens: int) -> set[int]:
    """Return the stop tokens in the generation config of a folder; none where it has none.

    UserError for what is not one of `num_tokens` ids.
    """
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return set()
    own = GenerationConfig.from_pretrained(folder).eos_token_id
    ids = [] if own is None else own if isinstance(own, list) else [own]
    if odd := [one for one in ids if type(one) is not int or not 0 <= one < num_tokens]:
        raise UserError(
            f"{folder / 'generation_config.json'}: eos_token_id: {odd[0]!r:.80} is not one of the "
            f"base's {num_tokens:,} token ids; write the id that ends answers, or train again"
        )
    return set(ids)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[str]) -> set[int]:
    """Return the ids that end an answer: EOS and `stop_tokens`.

    UserError for one that is not a token of the tokenizer.
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
