"""Write places short enough for a line: a file by its last parts, and once a line.

Never opens a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

MAX_FILE = 32
"""letters of a file's path that are shown as they are"""
_PLACE = re.compile(r"(.+?):(\d+)(?= |$)")


def relative(text: str) -> str:
    """Return `text` with the paths in it that lie below the working directory relative to it."""
    return text.replace(f"{os.getcwd()}{os.sep}", "")


def short_file(file: str) -> str:
    """Return a file's path relative to here, or of a long one that lies elsewhere its end."""
    parts = file.replace("\\", "/").rsplit("/", 2)
    below = relative(file)
    if below != file or len(file) <= MAX_FILE or len(parts) < 3:
        return below
    return f".../{parts[1]}/{parts[2]}"


def short_places(places: Iterable[str]) -> list[str]:
    """Return places, `file:line` and what follows, short; a file that was just named only `:line`.

    What is no place stays as it is.
    """
    named, shown = "", []
    for place in places:
        found = _PLACE.match(place)
        if found is None:
            shown.append(place)
            continue
        file, line = found.groups()
        shown.append(f"{'' if file == named else short_file(file)}:{line}{place[found.end() :]}")
        named = file
    return shown
