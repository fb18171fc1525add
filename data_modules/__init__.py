"""The public names of the data pipeline, imported lazily.

The settings and `check_datasets` need neither torch nor lightning, so importing this package must
not import them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_modules.audit import Audit as Audit
    from data_modules.collator import Batch as Batch
    from data_modules.collator import DecoderInputs as DecoderInputs
    from data_modules.datamodule import FinetuneDataModule as FinetuneDataModule
    from data_modules.datamodule import StepRow as StepRow
    from data_modules.facts import Facts as Facts
    from data_modules.facts import Grant as Grant
    from data_modules.facts import ResumeRule as ResumeRule
    from data_modules.facts import check_values as check_values
    from data_modules.facts import describe_values as describe_values
    from data_modules.facts import expected as expected
    from data_modules.facts import facts_of as facts_of
    from data_modules.facts import hints_of as hints_of
    from data_modules.facts import is_optional as is_optional
    from data_modules.facts import is_settings as is_settings
    from data_modules.facts import setting as setting
    from data_modules.facts import takes as takes
    from data_modules.limited import LimitError as LimitError
    from data_modules.limited import ProcessLimits as ProcessLimits
    from data_modules.limited import run_limited as run_limited
    from data_modules.messages import REDACTED as REDACTED
    from data_modules.messages import DataError as DataError
    from data_modules.messages import DiskError as DiskError
    from data_modules.messages import Origin as Origin
    from data_modules.messages import RemoteError as RemoteError
    from data_modules.messages import formatted as formatted
    from data_modules.messages import holds_token as holds_token
    from data_modules.messages import percent as percent
    from data_modules.messages import printable as printable
    from data_modules.messages import redact as redact
    from data_modules.messages import redacted as redacted
    from data_modules.messages import redacted_keys as redacted_keys
    from data_modules.packing import PackingConfig as PackingConfig
    from data_modules.settings import DEFAULT_SEQUENCE_LEN as DEFAULT_SEQUENCE_LEN
    from data_modules.settings import DataConfig as DataConfig
    from data_modules.settings import DatasetConfig as DatasetConfig
    from data_modules.settings import check_datasets as check_datasets
    from data_modules.settings import dataset_names as dataset_names
    from data_modules.source import explain_refusal as explain_refusal
    from data_modules.source import is_hub_id as is_hub_id
    from data_modules.source import open_regular as open_regular
    from data_modules.source import read_rows as read_rows
    from data_modules.template import TEMPLATE_NAMES as TEMPLATE_NAMES
    from data_modules.template import ChatTemplate as ChatTemplate
    from data_modules.template import Prompt as Prompt
    from data_modules.template.syntax import OWN_TEMPLATE as OWN_TEMPLATE
    from data_modules.template.syntax import find_syntax_error as find_syntax_error
    from data_modules.tokens.datasets import DataReport as DataReport
    from data_modules.tokens.datasets import DataSpec as DataSpec
    from data_modules.tokens.size import EpochTokens as EpochTokens
    from data_modules.tokens.size import estimate_epoch as estimate_epoch
    from data_modules.types import BatchSpec as BatchSpec
    from data_modules.types import Conversation as Conversation
    from data_modules.types import Example as Example
    from data_modules.types import ModelSpec as ModelSpec
    from data_modules.types import Turn as Turn

_HOMES = {
    "Audit": "audit",
    "BatchSpec": "types",
    "Batch": "collator",
    "ChatTemplate": "template",
    "Conversation": "types",
    "DEFAULT_SEQUENCE_LEN": "settings",
    "DataConfig": "settings",
    "DataError": "messages",
    "DataReport": "tokens.datasets",
    "DataSpec": "tokens.datasets",
    "DatasetConfig": "settings",
    "DecoderInputs": "collator",
    "DiskError": "messages",
    "EpochTokens": "tokens.size",
    "Example": "types",
    "Facts": "facts",
    "FinetuneDataModule": "datamodule",
    "LimitError": "limited",
    "ModelSpec": "types",
    "OWN_TEMPLATE": "template.syntax",
    "Origin": "messages",
    "PackingConfig": "packing",
    "ProcessLimits": "limited",
    "Prompt": "template",
    "REDACTED": "messages",
    "RemoteError": "messages",
    "Grant": "facts",
    "ResumeRule": "facts",
    "StepRow": "datamodule",
    "TEMPLATE_NAMES": "template",
    "Turn": "types",
    "check_datasets": "settings",
    "check_values": "facts",
    "dataset_names": "settings",
    "describe_values": "facts",
    "estimate_epoch": "tokens.size",
    "expected": "facts",
    "explain_refusal": "source",
    "facts_of": "facts",
    "find_syntax_error": "template.syntax",
    "formatted": "messages",
    "hints_of": "facts",
    "holds_token": "messages",
    "is_hub_id": "source",
    "is_optional": "facts",
    "is_settings": "facts",
    "open_regular": "source",
    "read_rows": "source",
    "percent": "messages",
    "printable": "messages",
    "redact": "messages",
    "redacted": "messages",
    "redacted_keys": "messages",
    "run_limited": "limited",
    "setting": "facts",
    "takes": "facts",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'data_modules' has no attribute '{name}'")
    return getattr(import_module(f"data_modules.{_HOMES[name]}"), name)
