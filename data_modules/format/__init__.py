"""Convert rows of named formats to conversations, documents or tokens."""

from data_modules.format.columns import sort_unread
from data_modules.format.fields import (
    EmptyAnswerError,
    MissingColumnError,
    RowError,
    find_kwargs_problems,
)
from data_modules.format.format import (
    FORMATS,
    check_columns,
    check_format,
    check_guessed,
    convert_row,
    guess_format,
    unread_in,
)
from data_modules.format.labels import CLASSIFICATION, KTO, label_of, labels_of, with_other_answers
from data_modules.format.meaning import MeaningError
from data_modules.format.preference import PREFERENCE
from data_modules.format.turns import ROLES

__all__ = [
    "CLASSIFICATION",
    "FORMATS",
    "KTO",
    "PREFERENCE",
    "ROLES",
    "EmptyAnswerError",
    "MeaningError",
    "MissingColumnError",
    "RowError",
    "check_columns",
    "check_format",
    "check_guessed",
    "convert_row",
    "find_kwargs_problems",
    "guess_format",
    "label_of",
    "labels_of",
    "sort_unread",
    "unread_in",
    "with_other_answers",
]
