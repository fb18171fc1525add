"""The public names of the data pipeline, imported lazily.

The settings and `check_datasets` need neither torch nor lightning, so importing this package must
not import them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_modules.audit.findings import Audit as Audit
    from data_modules.collator import Batch as Batch
    from data_modules.collator import DecoderInputs as DecoderInputs
    from data_modules.collator import SequenceSlice as SequenceSlice
    from data_modules.collator import deal_columns as deal_columns
    from data_modules.datamodule import FinetuneDataModule as FinetuneDataModule
    from data_modules.datamodule import StepRow as StepRow
    from data_modules.packing import fit_accumulation as fit_accumulation
    from data_modules.settings import DEFAULT_SEQUENCE_LEN as DEFAULT_SEQUENCE_LEN
    from data_modules.settings import DataConfig as DataConfig
    from data_modules.settings import DatasetConfig as DatasetConfig
    from data_modules.settings import PackingConfig as PackingConfig
    from data_modules.settings import check_datasets as check_datasets
    from data_modules.settings import dataset_names as dataset_names
    from data_modules.settings import found_labels as found_labels
    from data_modules.settings import with_format as with_format
    from data_modules.source import explain_refusal as explain_refusal
    from data_modules.source import is_hub_id as is_hub_id
    from data_modules.source import open_regular as open_regular
    from data_modules.source import read_rows as read_rows
    from data_modules.template import TEMPLATE_NAMES as TEMPLATE_NAMES
    from data_modules.template import ChatTemplate as ChatTemplate
    from data_modules.template import Prompt as Prompt
    from data_modules.template.named_templates import OWN_TEMPLATE as OWN_TEMPLATE
    from data_modules.template.named_templates import find_syntax_error as find_syntax_error
    from data_modules.tokens.datasets import DataSpec as DataSpec
    from data_modules.tokens.prepare import EpochTokens as EpochTokens
    from data_modules.tokens.prepare import estimate_epoch as estimate_epoch
    from data_modules.tokens.store import padding_id as padding_id
    from data_modules.types import BatchSpec as BatchSpec
    from data_modules.types import Conversation as Conversation
    from data_modules.types import Example as Example
    from data_modules.types import ModelSpec as ModelSpec
    from data_modules.types import Turn as Turn

_NAMES = {
    "audit.findings": ("Audit",),
    "collator": ("Batch", "DecoderInputs", "SequenceSlice", "deal_columns"),
    "datamodule": ("FinetuneDataModule", "StepRow"),
    "packing": ("fit_accumulation",),
    "settings": (
        *("DEFAULT_SEQUENCE_LEN", "DataConfig", "DatasetConfig", "PackingConfig"),
        *("check_datasets", "dataset_names", "found_labels", "with_format"),
    ),
    "source": ("explain_refusal", "is_hub_id", "open_regular", "read_rows"),
    "template": ("ChatTemplate", "Prompt", "TEMPLATE_NAMES"),
    "template.named_templates": ("OWN_TEMPLATE", "find_syntax_error"),
    "tokens.datasets": ("DataSpec",),
    "tokens.prepare": ("EpochTokens", "estimate_epoch"),
    "tokens.store": ("padding_id",),
    "types": ("BatchSpec", "Conversation", "Example", "ModelSpec", "Turn"),
}
"""module -> its names that are public"""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'data_modules' has no attribute '{name}'")
    return getattr(import_module(f"data_modules.{_HOMES[name]}"), name)
