"""Find the text of a chat template: by its name, in a file, or in a tokenizer.

Decides which tokens a tokenizer needs for the named ones, each a file in `named/`. Never
renders: that is the renderer's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from data_modules.types import DataError

if TYPE_CHECKING:
    import transformers

_CHATML = ("<|im_start|>", "<|im_end|>")
_NEEDED = {
    "plain": (),
    "chatml": _CHATML,
    "alpaca": (),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama2": (),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "qwen3": _CHATML,
    "t5": (),
    "vicuna": (),
    "zephyr": (),
}
"""the control tokens that each template writes; without any it ends answers with the EOS"""
TEMPLATE_NAMES = tuple(_NEEDED)
TEMPLATES_WITH_TOOLS = ("plain", "qwen3")
"""those that write tools, the calls of an answer and what the tools gave back"""
MAX_TEMPLATE_BYTES = 1 << 20
_FOLDER = Path(__file__).parent / "named"


def named_template(name: str) -> str:
    """Return the text of the template `name`, one of TEMPLATE_NAMES."""
    return (_FOLDER / f"{name}.jinja").read_text("utf-8").removesuffix("\n")


def check_named(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> None:
    """Raise DataError when `tokenizer` lacks a token that the template `name` writes."""
    known = tokenizer.get_added_vocab()
    missing = [token for token in _NEEDED[name] if token not in known]
    if missing:
        raise DataError(
            f"data.chat_template={name} needs the tokens {' and '.join(missing)}, which this "
            "tokenizer does not have; use data.chat_template=plain"
        )
    if not _NEEDED[name] and tokenizer.eos_token is None:
        raise DataError(
            f"the tokenizer has no eos token, so `{name}` cannot end an answer; set eos_token in "
            "its tokenizer_config.json"
        )


def read_template(name: str) -> str:
    """Return the text of the .jinja file `name`; raises DataError where it is no template."""
    file = Path(name).expanduser()
    if file.suffix != ".jinja" or not file.is_file():
        what = "no such file" if file.suffix == ".jinja" else "unknown chat template"
        raise DataError(
            f"data.chat_template={name}: {what}; use {', '.join(TEMPLATE_NAMES)}, a .jinja "
            "file, or null for the tokenizer's own"
        )
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise DataError(
            f"data.chat_template={name}: {file.stat().st_size:,} bytes are no chat template; give "
            "a .jinja file"
        )
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.chat_template={name}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def default_of(template: str | dict[str, str]) -> str:
    """Return the default of a tokenizer's template; some ship several by name."""
    if isinstance(template, str):
        return template
    if "default" in template:
        return template["default"]
    raise DataError(
        f"the tokenizer has the chat templates {', '.join(template)} but no default; save one of "
        "them as a file and set data.chat_template=FILE.jinja"
    )
