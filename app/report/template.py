"""Rendering of this folder's templates: each page is one HTML file without script, font or network.

All values are escaped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render_template(name: str, **values: Any) -> str:
    """Render `NAME.html.jinja`; a value that the template uses but does not get is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(f"{name}.html.jinja").render(**values)
