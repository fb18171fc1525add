"""Turn conversations and documents into token ids, and say which of them are learned."""

from data_modules.template.masking import MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES, TEMPLATES_WITH_TOOLS
from data_modules.template.template import ChatTemplate, RowProblem
from data_modules.template.trial import Limits

__all__ = [
    "TEMPLATES_WITH_TOOLS",
    "TEMPLATE_NAMES",
    "ChatTemplate",
    "Limits",
    "MaskConfig",
    "RowProblem",
]
