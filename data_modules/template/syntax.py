"""Find the syntax errors of a chat template without transformers, which takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.text import shown

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

OWN_TEMPLATE = "the tokenizer's own chat template"


def find_syntax_error(label: str, text: str) -> str | None:
    """Return why `text` is not a template in the dialect of transformers, None if it is one."""
    import jinja2
    import jinja2.ext

    class Generation(jinja2.ext.Extension):
        """The tag around what a model generates, see transformers' AssistantTracker."""

        tags = {"generation"}  # noqa: RUF012  as the class of jinja2 has it

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    try:
        environment.parse(text)  # compiling would compute constants, such as 9 ** 9 ** 9
    except jinja2.TemplateSyntaxError as error:
        return syntax_error(label, error)
    except RecursionError:
        return None  # reported by the check that renders the template
    return None


def syntax_error(label: str, error: jinja2.TemplateSyntaxError | SyntaxError) -> str:
    """Name the line of a chat template that is not valid, and the fix.

    A SyntaxError is of the code that jinja makes of a template: loops nested too deeply, a break
    without a loop. Its lines are not those of the template.
    """
    place = error.msg if isinstance(error, SyntaxError) else f"line {error.lineno}: {error.message}"
    return (
        f"{label} is not a valid template: {shown(place)}; fix it, or set data.chat_template=plain"
    )
