"""HTML pages of runs, previews, plans, sweeps and judges, and model cards.

Each page is one HTML file without script, font or network, rendered from a template of this folder.
All values are escaped, and control characters in them shown as `\\x1b`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""control characters, which a terminal that shows the page would obey"""


def render_template(name: str, **values: Any) -> str:
    """Render `NAME.html.jinja`; a value that the template uses but does not get is an error."""
    page = _environment().get_template(f"{name}.html.jinja").render(**values)
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", page)


@functools.cache  # keeps compiled templates: a running run writes its page many times
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
