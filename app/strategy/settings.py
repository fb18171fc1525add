"""What can be said of where a run computes, by family of strategies. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_modules import setting

HOMES = ("none", "cpu")
"""where states may be kept besides the device: nowhere, in host memory"""


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    name: str = setting("auto", resume="content")
    """the option that was chosen; auto chooses one and says why"""


@dataclass(kw_only=True, slots=True)
class DdpConfig(StrategyConfig):
    """Every rank holds all weights; gradients are averaged."""

    name: str = setting("ddp", resume="content")
    compression: str = setting("none", choices=("none", "bf16", "fp16", "powersgd"))
    """how gradients travel: none, bf16, fp16 (half the bytes), powersgd (low rank, far fewer)"""
    powersgd_rank: int = setting(4, ge=1, note="1 to 32 is usual")
    """rank of PowerSGD's approximation; higher = more exact, more bytes"""


@dataclass(kw_only=True, slots=True)
class ZeroConfig(StrategyConfig):
    """DeepSpeed ZeRO: what is spread over the ranks grows with the stage."""

    name: str = setting("zero3", resume="content")
    stage: int = setting(3, choices=(1, 2, 3))
    """1: optimizer states, 2: gradients too, 3: weights too"""
    offload_optimizer: str = setting("none", choices=HOMES)
    """where optimizer states are kept and stepped: none (the device), cpu"""
    offload_parameters: str = setting("none", choices=HOMES)
    """where weights wait for their turn: none (the device), cpu; stage 3"""
    partition_within_node: bool = False
    """ZeRO++ hpZ: keep a second copy of the weights sharded inside each node, from which the
    backward pass gathers them; more memory, less traffic between nodes"""
    quantized_weights: bool = False
    """ZeRO++ qwZ: weights travel in 8 bits"""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: gradients travel in 4 bits between nodes"""
    config: dict[str, Any] = field(default_factory=dict)
    """further keys of a DeepSpeed config, but none that another setting stands for"""


@dataclass(kw_only=True, slots=True)
class FsdpConfig(StrategyConfig):
    """PyTorch's own sharding (FSDP2), tensor parallelism, or both."""

    name: str = setting("fsdp", resume="content")
    reshard_after_forward: bool = True
    """free a layer's weights after its forward pass and gather them again for the backward; false
    is ZeRO-2's trade: more memory, less traffic"""
    replicas: int | None = setting(1, ge=1, note="null: one a node")
    """groups of ranks that each hold all weights (hybrid sharding); null = one a node"""
    offload_parameters: bool = False
    """keep weights, gradients and optimizer states in pinned host memory; GPU only"""
    tensor_parallel_size: int | None = setting(1, ge=1, note="null: all of a node")
    """ranks that split each layer's matrices and see the same data; null = all of a node"""
    shards_data_parallel: bool = True
    """false: weights are only split by tensor parallelism"""


FAMILIES: dict[str, type[StrategyConfig]] = {
    "auto": StrategyConfig,
    "single": StrategyConfig,
    "ddp": DdpConfig,
    "ddp_compressed": DdpConfig,
    "zero1": ZeroConfig,
    "zero2": ZeroConfig,
    "zero3": ZeroConfig,
    "zero2_offload": ZeroConfig,
    "zero3_offload": ZeroConfig,
    "zero3_nvme": ZeroConfig,
    "zero3_hpz": ZeroConfig,
    "zeropp": ZeroConfig,
    "fsdp": FsdpConfig,
    "fsdp_grad_op": FsdpConfig,
    "fsdp_hybrid": FsdpConfig,
    "fsdp_offload": FsdpConfig,
    "tp": FsdpConfig,
    "fsdp_tp": FsdpConfig,
}
"""what each name can be told; its values stand in conf/strategy"""

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
"""keys of a DeepSpeed config that are said by another setting, and which; all that is below them"""
OF_STAGE_3 = (
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
"""keys of zero_optimization that DeepSpeed takes with `stage3_` before them, and without"""
OF_ZERO = (
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
    *(f"zero_optimization.{name}" for name in OF_ZERO),
    *(f"zero_optimization.{name}" for name in OF_STAGE_3),
    *(f"zero_optimization.stage3_{name}" for name in OF_STAGE_3),
)
"""the other keys of a DeepSpeed 0.19 config, at its top and in zero_optimization"""


def is_sharding(config: StrategyConfig) -> bool:
    """Say whether ranks hold parts of weights or of optimizer states."""
    return isinstance(config, (ZeroConfig, FsdpConfig))


def tensor_parallel_size(config: StrategyConfig, ranks_per_node: int) -> int:
    """Return how many ranks split each layer's matrices, and see the same data."""
    if not isinstance(config, FsdpConfig):
        return 1
    return config.tensor_parallel_size or ranks_per_node
