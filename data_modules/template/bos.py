"""Make a chat template write the BOS that the tokenizer itself puts before every text.

Decides where in the template it is written. Whoever serves the model renders the template that is
saved with it and adds nothing to that, so what training saw must stand in the template. Never
tokenises.
"""

from __future__ import annotations

import re

from data_modules.template.rendering import Chat, Renderer
from data_modules.types import ToolCall, Turn

_ASKS, _SAYS = Turn("user", "a"), Turn("assistant", "b")
_CALLS = Turn("assistant", "", tool_calls=(ToolCall("f", {}),))
_TOOL = {"type": "function", "function": {"name": "f", "description": "c", "parameters": {}}}
_PROBES = (
    Chat((_ASKS,)),
    Chat((_ASKS, _SAYS)),
    Chat((_ASKS, _SAYS, _ASKS, _SAYS)),
    Chat((Turn("system", "d"), _ASKS, _SAYS)),
    Chat((_ASKS, _CALLS, Turn("tool", "e"), _SAYS), (_TOOL,)),
    Chat((Turn("system", "d"), _ASKS), (_TOOL,)),
)
# Blanks before a block are taken out at the beginning of a line only, which this is no longer.
_BLANKS = re.compile(r"\A[ \t]+(?=\{[%#](?!\+))")
_LAST_NEWLINE = re.compile(r"(?:\r\n|\r|\n)\Z")


def begun_with_bos(text: str, bos: str, renderer: Renderer) -> str:
    """Return the template `text` so that it begins every chat with `bos`, once.

    `renderer` renders `text` itself. A template that begins all chats so is returned as it is; one
    that does so for some chats is asked for its chat first.
    """
    rendered = [one for prompt in (False, True) for one in renderer.render(_PROBES, prompt)]
    begins = [one.lstrip().startswith(bos) for one in rendered if isinstance(one, str)]
    if begins and all(begins):
        return text
    if any(begins) or "bos_token" in text or bos in text:
        # Its own line, so that blanks and newlines at both ends mean what they meant before.
        return (
            "{% set chat_of_template %}\n" + _LAST_NEWLINE.sub("", text) + "{%+ endset %}"
            "{% if not chat_of_template.lstrip().startswith(bos_token) %}{{ bos_token }}{% endif %}"
            "{{ chat_of_template }}"
        )
    return "{{ bos_token }}" + _BLANKS.sub("", text)
