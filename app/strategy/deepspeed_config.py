"""Build the DeepSpeed config of a run from our settings, and check the keys that a user adds.

DeepSpeed's keys are listed here so that an unknown one is refused before torch is imported; a test
compares the list with DeepSpeed's own config model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.strategy.settings import ZeroConfig
from common.errors import UserError
from common.untrusted import read_json_object

if TYPE_CHECKING:
    import torch

    from app.config import TrainConfig

_MAX_BUCKET = 500_000_000
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
_STAGE_3_KEYS = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters"),
    *("max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold"),
    *("param_persistence_threshold", "prefetch_bucket_size", "use_all_reduce_for_fetch_params"),
)
"""keys of zero_optimization that DeepSpeed accepts with and without the prefix `stage3_`"""
_ALLOWED = {
    "": "communication_data_type dataloader_drop_last disable_allgather disable_python_gc "
    "dump_state gradient_allreduce_op gradient_predivide_factor log_level memory_breakdown "
    "prescale_gradients seq_parallel_communication_data_type steps_per_print "
    "use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown",
    "aio": "block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds",
    "checkpoint": "load_universal tag_validation use_node_local_storage",
    "comms_logger": "debug enabled prof_all prof_ops verbose",
    "flops_profiler": "detailed enabled module_depth profile_step recompute_fwd_factor top_modules",
    "timers.throughput": "enabled synchronized",
    "zero_optimization": "allgather_bucket_size allgather_partitions compute_grad_norm "
    "contiguous_gradients cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks "
    "ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings "
    "memory_efficient_linear override_module_apply overlap_comm parameter_alignment "
    "pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients "
    "save_muon_momentum_buffer_in_memory stage3_gather_fp16_weights_on_model_save sub_group_size "
    "use_multi_rank_bucket_allreduce "
    + " ".join(f"{name} stage3_{name}" for name in _STAGE_3_KEYS),
    "zero_optimization.leaf_module": "classes name_suffixes names",
    "zero_optimization.offload_optimizer": "buffer_count cpuadam_cores_perc fast_init pin_memory "
    "pipeline_read pipeline_write ratio super_offload",
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.zenflow": "auto_ratio full_warm_up_rounds offload overlap_step "
    "pt_reserved_cores_perc select_interval select_strategy steps_per_epoch topk_ratio "
    "update_interval",
}
"""keys of a DeepSpeed 0.19 config that may be given, by section: they only set how it computes
and communicates. All others are refused, from a command line, a file, or the folder of a run."""
ALLOWED_KEYS = {
    f"{section}.{name}".lstrip(".") for section, names in _ALLOWED.items() for name in names.split()
}
REFUSED = {
    "autotuning": "starts further runs; python -m app.plan says what fits",
    "comet": "contacts a host; type logger=wandb or logger=mlflow",
    "compile": "compiles with its own passes; type trainer.compile=true",
    "csv_monitor": "writes files to a path; every run writes metrics.csv",
    "data_efficiency": "reads and writes index files and drops tokens",
    "datastates_ckpt": "replaces the checkpoints of a run",
    "expert_parallel": "replaces layers of the model",
    "hybrid_engine": "replaces layers for generation",
    "managed_gradient_accumulation": "is decided by trainer.gradient_accumulation_steps",
    "pipeline": "is for a model in pipeline stages",
    "sequence_parallel_size": "splits rows over ranks, which this run does not know",
    "tensorboard": "writes files to a path; type logger=tensorboard",
    "wandb": "contacts a host; type logger=wandb",
    "weight_quantization": "changes the weights; type quantization=int8",
    "flops_profiler.output_file": "writes a file; without it the profile is printed",
    "zero_optimization.offload_optimizer.nvme_path": "names a folder to write to",
    "zero_optimization.offload_param.nvme_path": "names a folder to write to",
}
"""further keys that DeepSpeed has, and why they may not be given; `enabled: false` is no problem"""
_AUTO = "auto"
"""value of a key that the integrations of other tools fill in: it is left out"""


def read_deepspeed_file(path: str) -> dict[str, Any]:
    """Read a user's own DeepSpeed config; UserError if it cannot be read."""
    content, problem = read_json_object(Path(path).expanduser())
    if problem is not None:
        raise UserError(f"strategy.config={path}: {problem}")
    return content


def given_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a DeepSpeed config with their values, without `auto` and sections off."""
    return {
        key: value
        for key, value in _dotted_keys(config, "")
        if value != _AUTO and not (key.endswith(".enabled") and value is False)
    }


def conflicting_keys(given: Mapping[str, Any], config: TrainConfig) -> dict[str, str]:
    """Return the keys that one of our settings decides otherwise, with what decides them.

    A key with the same value as the setting, as in a file for another tool, is no conflict.
    """
    trainer, strategy, precision = config.trainer, config.strategy, config.trainer.precision
    assert isinstance(strategy, ZeroConfig)
    ours: dict[str, Any] = {
        "train_batch_size": trainer.global_batch_size,
        "train_micro_batch_size_per_gpu": trainer.micro_batch_size,
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        "gradient_clipping": trainer.max_grad_norm or 0.0,
        "bf16.enabled": precision in ("bf16", "bf16-pure") or None,
        "fp16.enabled": precision == "fp16" or None,
        "zero_optimization.stage": strategy.stage,
        "zero_optimization.offload_optimizer.device": strategy.offload_optimizer,
        "zero_optimization.offload_param.device": strategy.offload_parameters,
        "zero_optimization.zero_quantized_weights": strategy.quantized_weights,
        "zero_optimization.zero_quantized_gradients": strategy.quantized_gradients,
    }
    if trainer.global_batch_size is not None:  # it decides the accumulation
        del ours["gradient_accumulation_steps"]
    decided = _keys_decided_elsewhere(given)
    return {
        key: f"{name}={ours[key]}" if ours.get(key) is not None else name
        for key, name in decided.items()
        if given[key] != ours.get(key)
    }


def _keys_decided_elsewhere(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys, with dots, that one of our settings decides, with the setting."""
    decided: dict[str, str] = {}
    for key in given:
        for known, setting in DEEPSPEED_KEYS.items():
            if f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}."):
                decided.setdefault(key, setting)
    return decided


def _dotted_keys(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def refused_keys(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the keys that DeepSpeed does not have, each with the nearest one, and those refused.

    A refused key is followed by why.
    """
    # DeepSpeed's own model, deepspeed.runtime.config, imports torch and takes two seconds.
    unknown, refused = [], []
    for key in sorted(set(given) - ALLOWED_KEYS - _keys_decided_elsewhere(given).keys()):
        reasons = (why for known, why in REFUSED.items() if f"{key}.".startswith(f"{known}."))
        if (why := next(reasons, None)) is None:
            unknown.append(_unknown_part(key))
        else:
            refused.append(f"{key} {why}")
    return list(dict.fromkeys(unknown)), refused


def _unknown_part(key: str) -> str:
    """Return a key up to the first part that DeepSpeed does not have, with the nearest one."""
    prefix = ""
    for name in key.split("."):
        known = {
            each.removeprefix(prefix).partition(".")[0]
            for each in (*ALLOWED_KEYS, *DEEPSPEED_KEYS)
            if each.startswith(prefix)
        }
        if name not in known:
            break
        prefix += f"{name}."
    for near in difflib.get_close_matches(name, sorted(known), n=1):
        setting = DEEPSPEED_KEYS.get(f"{prefix}{near}")
        hint = f"did you mean {near}{f', which is {setting} here' if setting else ''}?"
        return f"{prefix}{name} ({hint})"
    return f"{prefix}{name}"


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
    bucket = min(_MAX_BUCKET, num_trained + num_trained % 2)
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
    for key, value in given_keys(config.config).items():
        if key in ALLOWED_KEYS:  # the others say what our settings say, as preflight has checked
            *sections, name = key.split(".")
            inner = made
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    return made
