"""Turn conversations and documents into token ids and their loss weights."""

from data_modules.template.encoding import CharacterCheck as CharacterCheck
from data_modules.template.masking import MaskConfig as MaskConfig
from data_modules.template.named_templates import TEMPLATE_NAMES as TEMPLATE_NAMES
from data_modules.template.rendering import RowRefusedError as RowRefusedError
from data_modules.template.rendering import UnusableTemplateError as UnusableTemplateError
from data_modules.template.template import ChatTemplate as ChatTemplate
from data_modules.template.template import Prompt as Prompt
