"""Turn rows into conversations, documents or tokens, by the name of their format."""

from data_modules.format.columns import suggest_settings
from data_modules.format.format import (
    FORMATS,
    ROLES,
    EmptyAnswerError,
    Format,
    MissingColumnError,
    RowError,
    apply_columns,
    check_columns,
    check_format,
    convert_row,
    guess_format,
    near_field,
)

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
