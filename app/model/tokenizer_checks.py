"""Refuse a tokenizer.json that draws its tokens at random, or expands texts without end."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

from app.process.errors import UserError
from app.process.untrusted import read_json_object, reading

TOKENIZER_FILE = "tokenizer.json"
MAX_STEP_CHARACTERS = 2_000_000
"""characters that one step of a normalizer may have to write for the probe text"""
MAX_EXPANSION = 50
"""largest ratio of a text's length after and before a normalizer or decoder"""
MAX_ADDED = 100
"""characters that a normalizer or decoder may make of one letter"""
MAX_SECONDS = 1.5
"""time for the probe text, which takes milliseconds"""
_TEXT = (
    "The quick brown fox, 1234567890.\n\tdef f(x): return {'a': [x, \"b\"]}  # \u00e9\u4f60\u597d "
)
_SECTIONS = {"normalizer": "normalizers", "decoder": "decoders"}


def check_tokenizer_file(file: Path) -> list[str]:
    """Return the problems of a tokenizer.json: those of JSON, BPE dropout, endless expansion."""
    status = file.stat()
    return list(_problems(file, status.st_mtime_ns, status.st_size))


@functools.cache
def _problems(file: Path, _modified_ns: int, _size: int) -> tuple[str, ...]:
    content, problem = read_json_object(file)
    if problem is not None:
        return (problem,)
    model = content.get("model")
    dropout = model.get("dropout") if isinstance(model, dict) else None
    if type(dropout) in (int, float) and dropout != 0:
        return (
            f"{file}: model.dropout={dropout}: BPE dropout splits the same text into other tokens "
            "each time; set it to null to train on the tokens that the model is used with",
        )
    for section in _SECTIONS:
        if (expansion := _find_expansion(section, content.get(section))) is not None:
            return (
                f"{file}: its {section} {expansion}; no text could be encoded with it; download "
                "the file again, or remove those steps",
            )
    return ()


def _find_expansion(section: str, value: Any) -> str | None:
    """Return how a normalizer or decoder expands the probe texts, or None if it does not.

    One step at a time, so that texts are measured before they fill the memory.
    """
    steps = _steps(value, _SECTIONS[section])
    own = [text for step in steps for text in _texts_of(step)]
    deadline, long = time.monotonic() + MAX_SECONDS, _TEXT + "".join(own)
    for probe, most in (("a", MAX_ADDED), (long, MAX_EXPANSION * len(long))):
        text = probe
        for number, step in enumerate(steps, 1):
            longest = max(map(len, _texts_of(step)), default=0)
            if len(text) * longest > MAX_STEP_CHARACTERS:
                return f"writes up to {longest:,} characters for each one (step {number})"
            try:
                with reading(section, "download it again"):
                    text = _apply(section, step, text)
            except UserError:  # reported in full when the file is loaded
                return None
            if len(text) > most:
                return (
                    f"makes {len(text):,} characters of {len(probe):,} in {number:,} of its "
                    f"{len(steps):,} steps"
                )
            if time.monotonic() > deadline:
                return f"takes over {MAX_SECONDS:g} s for {len(probe):,} characters"
    return None


def _steps(value: Any, key: str) -> list[Any]:
    """Return the steps of a normalizer or decoder, those of sequences in its place."""
    steps, pending = [], [value]
    while pending:
        step = pending.pop()
        if isinstance(step, dict) and isinstance(step.get(key), list):
            pending += reversed(step[key])
        elif isinstance(step, dict):
            steps.append(step)
    return steps


def _texts_of(step: dict[str, Any]) -> list[str]:
    """Return the texts that a step looks for or writes."""
    pattern = step.get("pattern")
    texts = [step.get("content"), step.get("prepend")]
    texts += pattern.values() if isinstance(pattern, dict) else []
    return [text for text in texts if isinstance(text, str)]


def _apply(section: str, step: dict[str, Any], text: str) -> str:
    import tokenizers

    described = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel()).to_str())
    tokenizer: Any = tokenizers.Tokenizer.from_str(json.dumps(described | {section: step}))
    if section == "normalizer":
        changed: str = tokenizer.normalizer.normalize_str(text)
    else:
        changed = tokenizer.decoder.decode([text])
    return changed
