"""Turn conversations and documents into token ids, and say which of them are learned."""

from data_modules.template.template import (
    TEMPLATE_NAMES,
    TEMPLATES_WITH_TOOLS,
    ChatTemplate,
    MaskConfig,
    RowProblem,
    check_mask,
)

__all__ = [
    "TEMPLATES_WITH_TOOLS",
    "TEMPLATE_NAMES",
    "ChatTemplate",
    "MaskConfig",
    "RowProblem",
    "check_mask",
]
