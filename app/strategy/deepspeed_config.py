"""Build the DeepSpeed config of a run from our settings, and check the keys that a user adds.

DeepSpeed's keys are listed here so that an unknown one is refused before torch is imported; a test
compares the list with DeepSpeed's own config model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from app.strategy.settings import ZeroConfig

if TYPE_CHECKING:
    import torch

MAX_BUCKET = 500_000_000
"""largest number of elements in one message, as by DeepSpeed's default"""

DEEPSPEED_KEYS = {
    "train_batch_size": "trainer.global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "gradient_accumulation_steps": "trainer.gradient_accumulation_steps",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "zero_allow_untested_optimizer": "optimizer",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "data_types": "trainer.precision",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "bfloat16": "trainer.precision",
    "amp": "trainer.precision",
    "torch_autocast": "trainer.precision",
    "activation_checkpointing": "recompute",
    "tensor_parallel": "strategy=tp",
    "zero_optimization.stage": "strategy.stage",
    "zero_optimization.offload_optimizer.device": "strategy.offload_optimizer",
    "zero_optimization.cpu_offload": "strategy.offload_optimizer",
    "zero_optimization.offload_param.device": "strategy.offload_parameters",
    "zero_optimization.cpu_offload_param": "strategy.offload_parameters",
    "zero_optimization.zero_hpz_partition_size": "strategy.partition_within_node",
    "zero_optimization.zero_quantized_weights": "strategy.quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights": "strategy.quantized_weights",
    "zero_optimization.zero_quantized_gradients": "strategy.quantized_gradients",
}
"""keys of a DeepSpeed config (with all nested keys) that one of our settings decides"""
STAGE_3_KEYS = (
    "allgather_sequential",
    "gather_16bit_weights_on_model_save",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "use_all_reduce_for_fetch_params",
)
"""keys of zero_optimization that DeepSpeed accepts with and without the prefix `stage3_`"""
ZERO_KEYS = (
    "allgather_bucket_size",
    "allgather_partitions",
    "compute_grad_norm",
    "contiguous_gradients",
    "cpu_offload_use_pin_memory",
    "elastic_checkpoint",
    "enable_sanity_checks",
    "ignore_unused_parameters",
    "leaf_module",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "override_module_apply",
    "parameter_alignment",
    "pipeline_loading_checkpoint",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "stage3_gather_fp16_weights_on_model_save",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "zenflow",
)
FURTHER_DEEPSPEED_KEYS = (
    "aio",
    "autotuning",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "compile",
    "csv_monitor",
    "data_efficiency",
    "dataloader_drop_last",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "expert_parallel",
    "flops_profiler",
    "gradient_allreduce_op",
    "gradient_predivide_factor",
    "hybrid_engine",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "pipeline",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "sequence_parallel_size",
    "steps_per_print",
    "tensorboard",
    "timers",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    *(f"zero_optimization.{name}" for name in ZERO_KEYS),
    *(f"zero_optimization.{name}" for name in STAGE_3_KEYS),
    *(f"zero_optimization.stage3_{name}" for name in STAGE_3_KEYS),
)
"""all other keys of a DeepSpeed 0.19 config, at the top level and in zero_optimization"""


def keys_decided_elsewhere(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a DeepSpeed config that one of our settings decides, with the setting."""
    decided: dict[str, str] = {}
    for key in _dotted_keys(config, ""):
        for known, setting in DEEPSPEED_KEYS.items():
            if f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}."):
                decided.setdefault(key, setting)
    return decided


def _dotted_keys(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that DeepSpeed does not have, each with the nearest known key."""
    # DeepSpeed's own model, deepspeed.runtime.config, imports torch and takes two seconds.
    unknown = []
    parts = [("", config), ("zero_optimization.", config.get("zero_optimization"))]
    for prefix, values in parts:
        known = {
            key.removeprefix(prefix).partition(".")[0]
            for key in (*FURTHER_DEEPSPEED_KEYS, *DEEPSPEED_KEYS)
            if key.startswith(prefix)
        }
        given = set(map(str, values)) if isinstance(values, Mapping) else set()
        for name in sorted(given - known):
            guess = ""
            for near in difflib.get_close_matches(name, sorted(known), n=1):
                setting = DEEPSPEED_KEYS.get(f"{prefix}{near}")
                guess = f" (did you mean {near}{f', which is {setting} here' if setting else ''}?)"
            unknown.append(f"{prefix}{name}{guess}")
    return unknown


def deepspeed_config(
    config: ZeroConfig,
    *,
    on_gpu: bool,
    dtype: torch.dtype,
    num_trained: int,
    ranks_per_node: int,
    accumulation: int,
    max_norm: float,
) -> dict[str, Any]:
    """Return the DeepSpeed config of a run, merged with the user's keys in `config.config`.

    `dtype`, `num_trained`: dtype and number of elements of the trainable parameters.
    """
    import torch

    # DeepSpeed allocates buckets up front: make them no larger than all gradients together.
    bucket = min(MAX_BUCKET, num_trained + num_trained % 2)
    zero: dict[str, Any] = {
        "stage": config.stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    for key, home in (
        ("offload_optimizer", config.offload_optimizer),
        ("offload_param", config.offload_parameters),
    ):
        if home != "none":
            zero[key] = {"device": home, "pin_memory": on_gpu}
    if config.partition_within_node:
        zero["zero_hpz_partition_size"] = ranks_per_node
    if config.quantized_weights:
        zero["zero_quantized_weights"] = True
    if config.quantized_gradients:
        zero["zero_quantized_gradients"] = True
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only DeepSpeed's throughput log depends on it
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm,
        # PyTorch's fused AdamW is as fast as DeepSpeed's on a CPU, and needs no compiler.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if dtype == torch.bfloat16:
        # Everything in bf16, as under DDP: no fp32 master weights.
        made["bf16"] = {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
        made["data_types"] = {"grad_accum_dtype": "bf16"}
    return _merged(made, config.config)


def _merged(made: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested keys into a config; preflight has checked that they are allowed."""
    merged = dict(made)
    for key, value in further.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(known, value)
        else:
            merged[key] = value
    return merged
