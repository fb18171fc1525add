"""What is trained of the base, and how it is kept: the only folder that knows peft."""

from app.model.adapter.apply import apply_adapter
from app.model.adapter.lora import (
    changed_its_base,
    remember_start,
    reopen_converted,
    save_converted,
    start_weights,
)
from app.model.adapter.merge import Change, load_weighted, read_changes
from app.model.adapter.modules import BaseModules, modules_of
from app.model.adapter.saved import (
    check_adapter_file,
    check_same_logits,
    is_adapter,
    load_adapter,
    probe_logits,
    rows_needed,
    save_adapter,
    verify_adapter,
)
from app.model.adapter.settings import (
    ADAPTER_FILE,
    DEFAULT_LR,
    ORIGIN_FILE,
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
    continued_from,
    saves_whole_model,
    write_origin,
)
from app.model.adapter.targets import Targets, find_targets
from app.model.adapter.weights import (
    TrainedWeight,
    adapter_matrices,
    reached_weights,
    report_trainable,
    trained_weights,
)
from app.model.adapter.wrap import (
    drop_needless_copies,
    group_adapters,
    unfuse_adapters,
    ungroup_adapters,
)

__all__ = [
    "ADAPTER_FILE",
    "DEFAULT_LR",
    "ORIGIN_FILE",
    "AdapterConfig",
    "BaseModules",
    "Change",
    "FreezeConfig",
    "FullConfig",
    "Ia3Config",
    "LoraConfig",
    "Targets",
    "TrainedWeight",
    "adapter_matrices",
    "apply_adapter",
    "changed_its_base",
    "check_adapter_file",
    "check_same_logits",
    "continued_from",
    "drop_needless_copies",
    "find_targets",
    "group_adapters",
    "is_adapter",
    "load_adapter",
    "load_weighted",
    "modules_of",
    "probe_logits",
    "reached_weights",
    "read_changes",
    "remember_start",
    "reopen_converted",
    "report_trainable",
    "rows_needed",
    "save_adapter",
    "save_converted",
    "saves_whole_model",
    "start_weights",
    "trained_weights",
    "unfuse_adapters",
    "ungroup_adapters",
    "verify_adapter",
    "write_origin",
]
