"""Turn conversations and documents into token ids and their loss weights."""

from data_modules.template.masking import MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES, TEMPLATES_WITH_TOOLS
from data_modules.template.template import ChatTemplate, Prompt, RowProblem
from data_modules.types import Encoded, Note

__all__ = [
    "TEMPLATES_WITH_TOOLS",
    "TEMPLATE_NAMES",
    "ChatTemplate",
    "Encoded",
    "MaskConfig",
    "Note",
    "Prompt",
    "RowProblem",
]
