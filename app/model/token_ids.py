"""Token ids that a base's config.json and generation_config.json name; needs no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

TOKEN_IDS = {
    "eos_token_id": "the id that ends its answers",
    "decoder_start_token_id": "the id that its decoder starts with",
    "bos_token_id": "the id that its texts begin with, or null for none",
    "pad_token_id": "the id that fills rows, or null for none",
}
VOCAB_SIZES = ("vocab_size", "decoder_vocab_size")


def text_numbers(numbers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the numbers of a multimodal model's language model; any other's are its own.

    How its files are quantized stands beside them, and stays.
    """
    text = numbers.get("text_config")
    if not isinstance(text, dict):
        return numbers
    stored = numbers.get("quantization_config")
    return text if stored is None else {"quantization_config": stored} | text


def check_token_ids(
    where: str, prefix: str, ids: Mapping[str, Any], numbers: Mapping[str, Any]
) -> list[str]:
    """List the token ids of a config.json or generation_config.json that are no row's.

    `numbers` say how many rows the embedding has; where they do not, only kinds are checked. What
    begins texts and fills rows is the tokenizer's here: published files name ids without a row
    (LLaMA's first ones -1, SmolVLM its whole model's), with which an embedding can be made but for
    the padding of its own config.
    """
    text = text_numbers(numbers)
    rows = max((text[key] for key in VOCAB_SIZES if type(text.get(key)) is int), default=None)
    problems = []
    for key, means in TOKEN_IDS.items():
        named = ids.get(key)
        listed = [] if named is None else [named]
        if isinstance(named, list) and key != "pad_token_id":  # answers end in several ways
            listed = named
        least, most = 0, rows or math.inf
        if key == "pad_token_id" and ids is text:
            least = -(rows or 0)  # counted from the end, as torch does
        elif key in ("pad_token_id", "bos_token_id"):
            least, most = -sys.maxsize, math.inf
        odd = [one for one in listed if type(one) is not int or not least <= one < most]
        if odd:
            size = "" if rows is None else f", whose vocab_size is {rows:,}"
            problems.append(
                f"{where}: {prefix}{key}={brief(named)}: {odd[0]!r:.80} is not a token of this "
                f"base{size}; write {means}, or download the file again"
            )
    return problems


def brief(value: Any) -> str:
    """Return a value of a file as a message shows it."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
