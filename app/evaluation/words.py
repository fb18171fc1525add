"""The words of a text in any script, for metrics that count common words.

Scripts that write no space between words (Chinese, Japanese, Thai, Khmer, ...) are split into
characters, as sacrebleu's tokenizers `zh` and `char` and MLQA's F1 do.
"""

from __future__ import annotations

import re
import unicodedata

_UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf"  # Thai, Lao,
    # Tibetan, Burmese, Khmer, Tai scripts
    "\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf"  # Yi, Javanese, Burmese, Tai Viet
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"  # Chinese and Japanese
)
_CHARACTER = re.compile(f"[{_UNSPACED}]")
_WIDE = re.compile(f"[{_UNSPACED}\u3000-\u303f\uff00-\uffef][\u0300-\u036f]*")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; an emoji is a word."""
    found: list[str] = []
    is_open = is_word = False  # whether a mark, or also a letter, continues the last word
    for character in unicodedata.normalize("NFC", text.lower()):
        kind = unicodedata.category(character)
        is_mark = kind[0] == "M" or (kind in ("Cf", "Sk") and not character.isascii())
        is_letter = kind[0] in "LN" or kind == "Co"
        if is_open and (is_mark or (is_word and is_letter and not _CHARACTER.match(character))):
            found[-1] += character
        elif is_letter or kind in ("So", "Cn", "Mn", "Mc"):
            found.append(character)
            is_open, is_word = True, kind != "So" and not _CHARACTER.match(character)
        else:
            is_open = False
    return found


def without_punctuation(text: str) -> str:
    """Return a text without the punctuation of any script, and without ASCII symbols."""
    return "".join(
        character
        for character in text
        if unicodedata.category(character)[0] != "P"
        and not (character.isascii() and unicodedata.category(character)[0] == "S")
    )


def space_characters(text: str) -> str:
    """Put spaces around each character of a script without spaces, and its wide punctuation."""
    return _WIDE.sub(r" \g<0> ", text)
