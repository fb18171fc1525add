"""Adapters: add them to a base, save, load and merge them. Only this folder imports peft."""

from app.model.adapter.apply import apply_adapter, initial_weights, save_converted
from app.model.adapter.saved import (
    is_adapter,
    load_adapter,
    load_weighted_adapters,
    probe_logits,
    required_embedding_rows,
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
    keep_start,
    resumed_adapter,
    saves_whole_model,
    write_origin,
)
from app.model.adapter.targets import Targets, find_targets
from app.model.adapter.wrap import (
    TrainableWeight,
    adapter_disabled,
    adapter_matrices,
    drop_pending_outputs,
    expert_matrices,
    external_parameters,
    group_adapters,
    hold_transposed,
    report_trainable,
    skip_redundant_casts,
    trainable_weights,
    unfuse_adapters,
    ungroup_adapters,
)
