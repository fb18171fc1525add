"""Convert rows of named formats to conversations, documents or tokens."""

from data_modules.format.fields import EmptyAnswerError as EmptyAnswerError
from data_modules.format.fields import MissingColumnError as MissingColumnError
from data_modules.format.fields import RowError as RowError
from data_modules.format.fields import find_kwargs_problems as find_kwargs_problems
from data_modules.format.format import check_columns as check_columns
from data_modules.format.format import check_format as check_format
from data_modules.format.format import check_guessed as check_guessed
from data_modules.format.format import convert_row as convert_row
from data_modules.format.format import guess_format as guess_format
from data_modules.format.meaning import CLASSIFICATION as CLASSIFICATION
from data_modules.format.meaning import KTO as KTO
from data_modules.format.meaning import PREFERENCE as PREFERENCE
from data_modules.format.meaning import MeaningError as MeaningError
from data_modules.format.meaning import label_of as label_of
from data_modules.format.meaning import label_text as label_text
from data_modules.format.meaning import labels_of as labels_of
from data_modules.format.meaning import sort_unread as sort_unread
from data_modules.format.meaning import with_other_answers as with_other_answers
