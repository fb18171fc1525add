"""What tokenizer.json says, and a tokenizer that encodes as it says.

transformers rebuilds parts of a tokenizer from its class, chosen by tokenizer_class and model_type,
whatever tokenizer.json has in their place. The file is what the base was trained with.

Refused is a file that draws its tokens at random, or takes texts without end: normalizers and
decoders may expand a text, regular expressions may take forever to match it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import mmap
import os
import re
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.files import write_atomically
from common.text import shortened
from common.untrusted import (
    LimitError,
    ProcessLimits,
    read_json_object,
    reading,
    run_limited,
    short_message,
)

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
    *("added_tokens_decoder", "add_prefix_space", "backend", "fix_mistral_regex", "merges"),
    *("merges_file", "split_special_tokens", "tokenizer_file", "tokenizer_object"),
    *("vocab", "vocab_file"),
)
"""arguments of a tokenizer's class that tokenizer.json stands for"""
_SIDES = ("padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces")
TOKENIZER_FILE = "tokenizer.json"
_MAX_STEP_CHARACTERS = 2_000_000
"""characters that one step of a normalizer may have to write for the probe text"""
_MAX_EXPANSION = 50
"""largest ratio of a text's length after and before a normalizer or decoder"""
_MAX_ADDED = 100
"""characters that a normalizer or decoder may make of one letter"""
_MAX_SECONDS = 1.5
"""time for the probe text, and for all regular expressions: both take milliseconds"""
_TEXT = (
    "The quick brown fox, 1234567890.\n\tdef f(x): return {'a': [x, \"b\"]}  # \u00e9\u4f60\u597d "
)
_READ = (".json", ".jinja", ".model", ".txt")
"""suffixes of the files that a tokenizer is read from"""
_MAX_READ = 64 << 20
"""bytes up to which such a file is compared byte by byte; tokenizers are smaller"""
_SECTIONS = {"normalizer": "normalizers", "decoder": "decoders"}
_KEPT_LETTERS = string.ascii_letters + string.digits + "éßñΩяمअ中あ한"
"""letters that normalizer and pre-tokenizer must keep; those without a token become unknown ones"""
_MARKS = " ▁"
"""characters that tokenizers put before a text"""
SET_TOKENIZER_PATH = (
    "set model.tokenizer_path to a folder with tokenizer.json and tokenizer_config.json"
)
_REPEATS = 120
"""repeats of a letter or word in a probe: enough to show what takes exponential time"""
_MAX_PART = 400
"""characters of an expression that its probe is made of"""
_LETTERS = (
    string.printable[:-2] + "\u00e9\u00df\u00f1\u03a9\u044f\u0645\u0905\u4e2d\u3042\ud55c\u0301"
)
"""letters that are probes of every expression, one of most classes of characters"""
_CODE = re.compile(r"\\(?:x|u|x\{)([0-9a-fA-F]{2,8})")
_WORD = re.compile(r"[^\W\d_]{2,20}")


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
    _name_as_in_v4(folder / "tokenizer_config.json")
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


def _name_as_in_v4(file: Path) -> None:
    """Name class and special tokens as transformers 4 does, which 5 reads in the same way."""
    if not file.is_file():
        return
    settings, problem = read_json_object(file)
    if problem is not None:
        return  # one beyond the limits stays as it was saved
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(file, f"{text}\n")


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


def check_tokenizer_file(file: Path) -> list[str]:
    """Return the problems of a tokenizer.json: those of JSON, BPE dropout, endless expansion."""
    status = file.stat()
    problems = () if is_verified(file) else _problems(file, status.st_mtime_ns, status.st_size)
    return list(problems)


def is_verified(file: Path) -> bool:
    """Return whether an earlier start verified a tokenizer.json, see `remember_verified`."""
    return _note(file).is_file()


def remember_verified(file: Path) -> None:
    """Remember that a tokenizer.json passed all checks, and that transformers encodes as it says.

    For these bytes of all files in its folder, these versions of the libraries and of the checks.
    Nothing is written where no run has cached data, as where a model is only chatted with.
    """
    note = _note(file)
    if note.parent.parent.is_dir():
        with contextlib.suppress(OSError):  # without the note, the next start is a second slower
            note.parent.mkdir(exist_ok=True)
            note.open("x").close()


def _note(file: Path) -> Path:
    from importlib.metadata import version

    from data_modules import DataConfig

    digest = hashlib.sha256(f"{version('transformers')} {version('tokenizers')}".encode())
    read = [each for each in file.parent.iterdir() if each.suffix in _READ and each.is_file()]
    for each in (*sorted(Path(__file__).parent.glob("tokenizer*.py")), *sorted(read)):
        status = each.stat()
        is_small = status.st_size <= _MAX_READ
        content = hashlib.sha256(each.read_bytes()).hexdigest() if is_small else status.st_mtime_ns
        digest.update(f" {each.name} {status.st_size} {content}".encode())
    return Path(DataConfig().cache_dir).expanduser() / "tokenizers" / digest.hexdigest()


@functools.cache
def _problems(file: Path, _modified_ns: int, _size: int) -> tuple[str, ...]:
    content, problem = read_json_object(file)
    if problem is not None:
        return (problem,)
    model = content.get("model")
    if not isinstance(model, dict):
        return (
            f"{file} cannot be read: model={shortened(model)}: expected an object with the "
            "vocabulary; download the file again",
        )
    dropout = model.get("dropout")
    if type(dropout) in (int, float) and dropout != 0:
        return (
            f"{file}: model.dropout={dropout}: BPE dropout splits the same text into other tokens "
            "each time; set it to null to train on the tokens that the model is used with",
        )
    found = tuple(
        (section, expression)
        for section in _PARTS
        for expression in dict.fromkeys(_expressions_in(content.get(section)))
    )
    if found and (slow := _try_expressions(found)) is not None:
        return (
            f"{file}: its {slow}; write it without repeats of repeats, or download the file again",
        )
    for section in _SECTIONS:
        if (expansion := _find_expansion(section, content.get(section))) is not None:
            return (
                f"{file}: its {section} {expansion}; no text could be encoded with it; download "
                "the file again, or remove those steps",
            )
    try:
        with reading("tokenizer.json", "download it again"):
            split = _tokenizer_with(
                normalizer=content.get("normalizer"), pre_tokenizer=content.get("pre_tokenizer")
            )
            problem = letters_error(split, file)
    except UserError:  # reported in full when the file is loaded
        return ()
    return (problem,) if problem else ()


def letters_error(tokenizer: tokenizers.Tokenizer, file: Path) -> str | None:
    """Say which letters normalizer or pre-tokenizer drop, or replace by others; None if none.

    Case and accents may be removed, as by BERT's.
    """
    backend: Any = tokenizer
    lost = []
    for letter in _KEPT_LETTERS:
        text = backend.normalizer.normalize_str(letter) if backend.normalizer else letter
        is_kept = letter.casefold() in text.casefold() if letter.isascii() else text.strip(_MARKS)
        # Byte-level pre-tokenizers map the bytes of non-ASCII letters to other characters.
        if is_kept and letter.isascii() and backend.pre_tokenizer:
            pieces = backend.pre_tokenizer.pre_tokenize_str(text)
            is_kept = letter.casefold() in "".join(piece for piece, _ in pieces).casefold()
        if not is_kept:
            lost.append(letter)
    if not lost:
        return None
    return (
        f"{file}: its normalizer or pre_tokenizer drops or changes {len(lost)} of "
        f"{len(_KEPT_LETTERS)} letters and digits, such as {' '.join(lost[:5])}; download it "
        f"again, or {SET_TOKENIZER_PATH}"
    )


def _find_expansion(section: str, value: Any) -> str | None:
    """Return how a normalizer or decoder expands the probe texts, or None if it does not.

    One step at a time, so that texts are measured before they fill the memory.
    """
    steps = _steps(value, _SECTIONS[section])
    own = [text for step in steps for text in _texts_of(step)]
    deadline, long = time.thread_time() + _MAX_SECONDS, _TEXT + "".join(own)
    for probe, most in (("a", _MAX_ADDED), (long, _MAX_EXPANSION * len(long))):
        text = probe
        for number, step in enumerate(steps, 1):
            longest = max(map(len, _texts_of(step)), default=0)
            if len(text) * longest > _MAX_STEP_CHARACTERS:
                return f"writes up to {longest:,} characters for each one (step {number})"
            try:
                with reading(section, "download it again"):
                    one: Any = _tokenizer_with(**{section: step})
                    if section == "normalizer":
                        text = one.normalizer.normalize_str(text)
                    else:
                        text = one.decoder.decode([text])
            except UserError:  # reported in full when the file is loaded
                return None
            if len(text) > most:
                return (
                    f"makes {len(text):,} characters of {len(probe):,} in {number:,} of its "
                    f"{len(steps):,} steps"
                )
            if time.thread_time() > deadline:
                return f"takes over {_MAX_SECONDS:g} s for {len(probe):,} characters"
    return None


@functools.cache  # the file that a run saves has the expressions of its base
def _try_expressions(found: tuple[tuple[str, str], ...]) -> str | None:
    """Return the first section and regular expression of `found` that takes too long, or None.

    Rust cannot be interrupted, so the expressions are tried in a process of their own.
    """
    import tokenizers  # noqa: F401  once, before the process is forked

    index = mmap.mmap(-1, 4)  # shared with that process

    def try_all() -> str:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of Rust prints there
        for number, (_, expression) in enumerate(found):
            index[:] = number.to_bytes(4, "little")
            if problem := _try_expression(expression):
                return problem
        return ""

    try:
        problem = run_limited(try_all, ProcessLimits(seconds=_MAX_SECONDS))
    except LimitError as error:
        problem = f"cannot be matched {error}"
    section, expression = found[int.from_bytes(index[:], "little")]
    return f"{section}: the regular expression {expression:.80} {problem}" if problem else None


def _try_expression(expression: str) -> str:
    """Match an expression with repeated letters and words; return the library's error, or ""."""
    from tokenizers import Regex, pre_tokenizers

    part = expression[:_MAX_PART]
    codes = [int(code, 16) for code in _CODE.findall(part)]
    own = {chr(code) for code in codes if code < 0xD800} | set(part)
    repeated = sorted({*_LETTERS, *own, *_WORD.findall(part)})
    # An expression is not even tried on a text that lacks what it ends with.
    end = "!" + "!".join(part) + part
    text = "".join(f"{each * _REPEATS}!\n" for each in repeated) + end
    for variant in dict.fromkeys((expression, re.sub(r"\\[AG]", "", expression))):
        try:
            split = pre_tokenizers.Split(Regex(variant), "isolated")
        except Exception:  # noqa: BLE001  reported in full when the file is loaded
            continue
        try:
            split.pre_tokenize_str(text)
        except BaseException as error:  # noqa: BLE001  a panic of Rust is no Exception
            return f"fails for letters that are repeated {_REPEATS} times: {short_message(error)}"
    return ""


def _expressions_in(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if isinstance(expression := part.get("Regex"), str):
                yield expression
            part = list(part.values())
        if isinstance(part, list):
            pending += reversed(part)


def _steps(value: Any, key: str) -> list[Any]:
    steps, pending = [], [value]
    while pending:
        step = pending.pop()
        if isinstance(step, dict) and isinstance(step.get(key), list):
            pending += reversed(step[key])
        elif isinstance(step, dict):
            steps.append(step)
    return steps


def _texts_of(step: dict[str, Any]) -> list[str]:
    pattern = step.get("pattern")
    texts = [step.get("content"), step.get("prepend")]
    texts += pattern.values() if isinstance(pattern, dict) else []
    return [text for text in texts if isinstance(text, str)]


def _tokenizer_with(**sections: Any) -> tokenizers.Tokenizer:
    import tokenizers

    described = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps(described | sections))
