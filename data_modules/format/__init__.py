"""Turn rows into conversations, documents or tokens, by the name of their format."""

from data_modules.format.columns import suggest_settings
from data_modules.format.fields import EmptyAnswerError, MissingColumnError, RowError
from data_modules.format.format import (
    FORMATS,
    Format,
    apply_columns,
    check_columns,
    check_format,
    convert_row,
    guess_format,
    near_field,
)
from data_modules.format.turns import ROLES

__all__ = [
    "FORMATS",
    "ROLES",
    "EmptyAnswerError",
    "Format",
    "MissingColumnError",
    "RowError",
    "apply_columns",
    "check_columns",
    "check_format",
    "convert_row",
    "guess_format",
    "near_field",
    "suggest_settings",
]
