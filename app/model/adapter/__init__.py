"""What is trained of the base, and how it is kept: the only folder that knows peft."""

from app.model.adapter.apply import apply_adapter
from app.model.adapter.saved import (
    check_adapter_file,
    check_same_logits,
    is_adapter,
    load_adapter,
    probe_logits,
    save_adapter,
    verify_adapter,
)
from app.model.adapter.settings import (
    ADAPTER_FILE,
    DEFAULT_LR,
    INITS,
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
    saves_whole_model,
)
from app.model.adapter.trained import report_trainable

__all__ = [
    "ADAPTER_FILE",
    "DEFAULT_LR",
    "INITS",
    "AdapterConfig",
    "FreezeConfig",
    "FullConfig",
    "Ia3Config",
    "LoraConfig",
    "apply_adapter",
    "check_adapter_file",
    "check_same_logits",
    "is_adapter",
    "load_adapter",
    "probe_logits",
    "report_trainable",
    "save_adapter",
    "saves_whole_model",
    "verify_adapter",
]
