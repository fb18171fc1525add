"""Turn conversations and documents into token ids, and say which of them are learned."""

from data_modules.template.template import (
    TEMPLATE_NAMES,
    ChatTemplate,
    MaskConfig,
    RowProblem,
    check_mask,
)

__all__ = [
    "TEMPLATE_NAMES",
    "ChatTemplate",
    "MaskConfig",
    "RowProblem",
    "check_mask",
]
