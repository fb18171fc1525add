"""The config that DeepSpeed is given: made from our settings alone, so that none is said twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.strategy.settings import ZeroConfig

if TYPE_CHECKING:
    import torch

MAX_BUCKET = 500_000_000
"""numbers that travel at once, as many as DeepSpeed itself would take"""


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
    """Return the DeepSpeed config of a run: ours, and under it what `config.config` adds.

    `dtype` is that of the weights that train, `num_trained` counts their elements.
    """
    import torch

    # What is given space for it beforehand need not be larger than all there is to send.
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
        "train_micro_batch_size_per_gpu": 1,  # only its own figures of speed go by it
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm,
        # PyTorch's fused AdamW: as fast as DeepSpeed's own on a CPU, and nothing is compiled.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if dtype == torch.bfloat16:
        # All in bf16, as under DDP: no second, precise copy of the weights.
        made["bf16"] = {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
        made["data_types"] = {"grad_accum_dtype": "bf16"}
    return _merged(made, config.config)


def _merged(made: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Add keys to a config, at any depth; which of them may be given is checked before a run."""
    merged = dict(made)
    for key, value in further.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(known, value)
        else:
            merged[key] = value
    return merged
