"""What tokenizer.json says, and a tokenizer that encodes as it says.

transformers rebuilds parts of a tokenizer from its class, chosen by tokenizer_class and model_type,
whatever tokenizer.json has in their place. The file is what the base was trained with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.tokenizer_checks import TOKENIZER_FILE, remember_verified
from common.errors import UserError
from common.untrusted import read_json_object, short_message

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_PROBE = (
    "In 1234567890 x 12,345.67 = 007  steps\tand\t\ttabs \n\nnew\r\nlines   \n  end. e\u0301 "
    "\xe9 \ufb01 \u2460 \xbd \uff21 \u212b \u1e9b\u0323 \xc5 na\xefve It's they'LL !!! ... ?!"
    " -- == (){}[]<> #$%&*@ </s> `\"' \u2026 \u2014 \u201cq\u201d \u03a9\u03bc\u03ad\u03b3"
    "\u03b1 \u043c\u0438\u0440 \u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663 \u05e9\u05dc"
    "\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093 \u30ab\u30bf \ud55c\uae00 \U0001f600"
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea \xa0\u2003\u200b\ufeff ca"
    "melCase HTTPServer snake_case a1b2 iOS17 \u2581x\x00\x7f"
)
"""a text whose ids show how a tokenizer normalizes and splits"""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_MADE_ANEW = (
    "added_tokens_decoder",
    "add_prefix_space",
    "backend",
    "fix_mistral_regex",
    "merges",
    "merges_file",
    "split_special_tokens",
    "tokenizer_file",
    "tokenizer_object",
    "vocab",
    "vocab_file",
)
"""arguments of a tokenizer's class that tokenizer.json stands for"""
_SIDES = ("padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces")


def follow_file(tokenizer: PreTrainedTokenizerBase, file: Path) -> PreTrainedTokenizerBase:
    """Return `tokenizer` if it encodes as `file`, a tokenizer.json, else one made of the file.

    Special tokens, chat template and the other settings stay. UserError if no tokenizer of
    transformers encodes as the file.
    """
    import tokenizers
    from transformers import TokenizersBackend

    if type(tokenizer).__module__.startswith("transformers_modules."):
        return tokenizer  # code that model.trust_remote_code trusts
    own = tokenizers.Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    declared = set(_declared_texts(file.parent))
    if not (changed := _difference(tokenizer, own, declared)):
        remember_verified(file)
        return tokenizer
    log.info(
        "tokenizer: %s of transformers changes the %s of %s; using the file's own",
        type(tokenizer).__name__,
        changed,
        file.name,
    )
    by_file: PreTrainedTokenizerBase = TokenizersBackend(
        tokenizer_object=own, **_settings(tokenizer, own, declared)
    )
    if remaining := _difference(by_file, own, declared):
        raise UserError(
            f"{file}: the installed transformers changes its {remaining}, so texts would get other "
            "tokens than the model was trained with; set model.tokenizer_path to a folder with a "
            "tokenizer.json that it keeps"
        )
    return by_file


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save `tokenizer` into `folder`; warn if AutoTokenizer gives others different tokens there."""
    import tokenizers
    import transformers

    tokenizer.save_pretrained(folder)
    file = folder / TOKENIZER_FILE
    # Only model_type in a config.json can change the class that a saved tokenizer names.
    if not (file.is_file() and (folder / "config.json").is_file()):
        return
    try:
        opened = transformers.AutoTokenizer.from_pretrained(folder)
        own, declared = tokenizers.Tokenizer.from_file(str(file)), set(_declared_texts(folder))
        changed = _difference(opened, own, declared)
        kind = f"{type(opened).__name__}, which changes the {changed} of {TOKENIZER_FILE}"
    except Exception as error:  # noqa: BLE001  classes raise any type for a foreign file
        changed, kind = "class", f"a class that fails: {short_message(error)}"
    if changed:
        log.warning(
            "%s: AutoTokenizer of transformers %s loads this tokenizer as %s; for the tokens of "
            "training, load it with PreTrainedTokenizerFast.from_pretrained",
            folder,
            transformers.__version__,
            kind,
        )


def _difference(
    tokenizer: PreTrainedTokenizerBase, own: tokenizers.Tokenizer, declared: set[str]
) -> str:
    """Name what `tokenizer` does not take from the file's `own` tokenizer; "" if nothing.

    `declared`: texts of tokens that other files of the folder may add.
    """
    if not tokenizer.is_fast:
        return "tokens"
    backend: Any = tokenizer.backend_tokenizer
    for part in _PARTS:
        if repr(getattr(backend, part)) != repr(getattr(own, part)):
            return part
    added, own_added = (each.get_added_tokens_decoder() for each in (backend, own))
    if backend.encode_special_tokens or any(
        repr(added.get(index)) != repr(token) for index, token in own_added.items()
    ):
        return "added_tokens"
    new = {str(token) for index, token in added.items() if index not in own_added}
    known = own.get_vocab_size() + sum(own.token_to_id(text) is None for text in new)
    if not new <= declared or backend.get_vocab_size() != known:
        return "vocabulary"
    probe = _PROBE + "".join(f"{token.content} x {token.content}" for token in own_added.values())
    for text in filter(None, new):
        probe = probe.replace(text, "")
    if backend.encode(probe, add_special_tokens=False).ids != (
        own.encode(probe, add_special_tokens=False).ids
    ):
        return "model"
    return "" if backend.encode(probe).ids == own.encode(probe).ids else "post_processor"


def _settings(
    tokenizer: PreTrainedTokenizerBase, own: tokenizers.Tokenizer, declared: set[str]
) -> dict[str, Any]:
    """Return the arguments of a tokenizer that is `tokenizer` but for what tokenizer.json says."""
    made_anew = {*_MADE_ANEW, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES, "extra_special_tokens"}
    settings = {key: value for key, value in tokenizer.init_kwargs.items() if key not in made_anew}
    settings |= {key: getattr(tokenizer, key) for key in _SIDES}

    def is_kept(token: str) -> bool:  # classes of transformers add tokens of their own
        return token in declared or own.token_to_id(token) is not None

    special = tokenizer.special_tokens_map
    settings |= {key: token for key, token in special.items() if is_kept(token)}
    if extra := list(filter(is_kept, map(str, tokenizer.extra_special_tokens))):
        settings["extra_special_tokens"] = extra
    if tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template
    return settings


def _declared_texts(folder: Path) -> Iterator[str]:
    """Yield all texts in the folder's files that may add tokens to those of tokenizer.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        content, _ = read_json_object(folder / name) if (folder / name).is_file() else ({}, None)
        pending: list[Any] = [content]
        while pending:
            match pending.pop():
                case str(text):
                    yield text
                case dict(items):
                    pending += [*items, *items.values()]
                case list(items):
                    pending += items
