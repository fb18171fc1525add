"""What cannot be combined with the strategy: its splits and its offloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import LoraConfig
from app.model.attention import EXCHANGED
from app.preflight.couplings import conflict
from app.preflight.couplings.conflict import Conflict
from app.preflight.couplings.devices import Devices, is_training
from app.strategy.deepspeed_config import conflicting_keys, given_keys, refused_keys
from app.strategy.settings import (
    FsdpConfig,
    LocalSgdConfig,
    PipelineConfig,
    ZeroConfig,
    context_parallel_size,
    describe_split,
    is_sharding,
    num_stages,
    states_folder,
    tensor_parallel_size,
)
from common.files import file_system_of
from common.installation import install_extra
from data_modules import DEFAULT_SEQUENCE_LEN

if TYPE_CHECKING:
    from app.config.verbs import TrainConfig, TunedConfig

MIN_SLICE_TOKENS = 64
"""fewest tokens of a row on each of the ranks that split it"""
MEMORY_FILES = ("tmpfs", "ramfs")
REMOTE_FILES = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *("9p", "afs"),
)
"""file systems that optimizer states are not kept on; `fuse.NAME` are taken for remote, too"""
NEAREST_IN_PYTORCH = {
    "zero1": "fsdp_grad_op",
    "zero2": "fsdp_grad_op",
    "zero2_offload": "fsdp_offload",
    "zero3": "fsdp",
    "zero3_offload": "fsdp_offload",
    "zero3_nvme": "fsdp_offload",
    "zero3_hpz": "fsdp_hybrid",
    "zeropp": "fsdp_hybrid",
}
"""DeepSpeed strategy -> the nearest PyTorch strategy"""


def find_conflicts(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield the conflicts of the settings `strategy`."""
    if not is_training(config):
        return
    yield from _of_strategy(config, devices)
    yield from _of_context(config, devices)
    if isinstance(config.strategy, FsdpConfig):
        yield from _of_fsdp(config, config.strategy, devices)
        yield from _of_experts(config, config.strategy, devices)
    if isinstance(config.strategy, PipelineConfig):
        yield from _of_pipeline(config, config.strategy)
        yield from _of_schedule(config, config.strategy, devices)
    if isinstance(config.strategy, LocalSgdConfig):
        yield from _of_local_sgd(config, config.strategy)
    if isinstance(config.strategy, ZeroConfig):
        yield from _of_deepspeed(config, config.strategy, devices)
        yield from _of_deepspeed_keys(config.strategy.config, config)


def _of_strategy(config: TrainConfig, devices: Devices) -> Iterator[Conflict]:
    strategy, trainer = config.strategy, config.trainer
    optimizer, name = config.optimizer.name, f"strategy={config.strategy.name}"
    if strategy.name == "single" and devices.num_ranks > 1:
        yield Conflict(
            f"strategy=single runs on one device, but {devices.num_ranks} ranks were requested",
            "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
        )
    if strategy.offload_optimizer == "disk":
        yield from _of_disk_states(config)
    if not is_sharding(strategy):
        return
    if trainer.precision == "fp16":
        yield Conflict(
            f"{name} and trainer.precision=fp16: each rank would decide from its own shard of the "
            "gradients whether a scaled step overflowed",
            "trainer.precision=bf16, or strategy=ddp",
        )
    if trainer.compile:
        yield Conflict(
            f"{name} and trainer.compile=true have not been tested together yet",
            "trainer.compile=false, or strategy=ddp",
        )
    if trainer.checkpoint.asynchronous:
        yield Conflict(
            f"trainer.checkpoint.async=true copies the state of one rank, but {name} shards it "
            "over all ranks, which gather and write it together",
            "trainer.checkpoint.async=false, or strategy=ddp",
        )
    elementwise, per_node = ["adamw"], devices.ranks_per_node
    is_whole = tensor_parallel_size(strategy, per_node) == num_stages(strategy) == 1
    if isinstance(strategy, FsdpConfig) and is_whole:
        elementwise.append("schedule_free")
    if optimizer not in elementwise:
        yield Conflict(
            f"optimizer={optimizer} cannot update shards of weights, and {name} shards them",
            "optimizer=adamw, or strategy=ddp",
        )


def _of_disk_states(config: TrainConfig) -> Iterator[Conflict]:
    """Yield conflicts of optimizer states that are on a disk."""
    strategy, trainer, name = config.strategy, config.trainer, "strategy.offload_optimizer=disk"
    without = "strategy.offload_optimizer=none"
    if config.optimizer.name != "adamw":
        yield Conflict(
            f"{name} steps AdamW with fp32 states, not optimizer={config.optimizer.name}",
            f"optimizer=adamw, or {without}",
        )
    if trainer.precision == "fp16":
        yield Conflict(
            f"{name} and trainer.precision=fp16: its fused steps take no loss scaler",
            f"trainer.precision=bf16, or {without}",
        )
    if trainer.checkpoint.asynchronous:
        yield Conflict(
            "trainer.checkpoint.async=true copies the optimizer states to host memory, where "
            f"{name} never has all of them",
            f"trainer.checkpoint.async=false, or {without}",
        )
    if isinstance(strategy, LocalSgdConfig):
        yield Conflict(
            f"strategy={strategy.name} averages optimizer states over the nodes, which is not "
            f"built for {name}",
            f"strategy=fsdp_hybrid, or {without}",
        )
    folder = states_folder(strategy, Path(config.output.dir or "."))
    kind = "" if folder is None else file_system_of(folder)
    why = "is in memory itself" if kind in MEMORY_FILES else "may be remote, and slow or lost"
    if kind in (*MEMORY_FILES, *REMOTE_FILES) or kind.startswith("fuse."):
        yield Conflict(
            f"{name}: {folder} is on {kind}, which {why}",
            f"strategy.offload_dir=FOLDER on a local disk, or {without}",
            is_of_machine=True,
        )


def _of_context(config: TrainConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield conflicts of rows whose tokens are split over ranks."""
    strategy, data = config.strategy, config.data
    size, without = context_parallel_size(strategy), "strategy.context_parallel_size=1"
    if size == 1:
        return
    name = f"strategy.context_parallel_size={size}"
    if tensor_parallel_size(strategy, devices.ranks_per_node) > 1:
        yield Conflict(
            f"{name} splits rows, and strategy={strategy.name} matrices: together they are not "
            "built yet",
            f"strategy=fsdp, or {without}",
        )
    if isinstance(strategy, LocalSgdConfig):
        yield Conflict(
            f"{name} and strategy={strategy.name}: nodes that train separately are not built yet "
            "for split rows",
            f"strategy=fsdp_hybrid, or {without}",
        )
    if config.attention.backend not in ("auto", *EXCHANGED):
        yield Conflict(
            f"{name} gives each rank a share of the heads, which attention="
            f"{config.attention.backend} cannot compute",
            f"attention={' or '.join(EXCHANGED)}, or {without}",
        )
    if config.objective.name != "sft":
        yield Conflict(
            f"{name} splits rows, and objective={config.objective.name} is not built "
            "for slices of them",
            f"objective=sft, or {without}",
        )
    if config.trainer.compile:
        yield Conflict(
            f"{name} and trainer.compile=true have not been tested together yet",
            f"trainer.compile=false, or {without}",
        )
    if config.adapter.neftune_alpha is not None:
        yield Conflict(
            f"adapter.neftune_alpha={config.adapter.neftune_alpha:g} scales its noise by the "
            f"length of a document, of which {name} gives a rank a part",
            f"adapter.neftune_alpha=null, or {without}",
        )
    tokens = data.sequence_len or DEFAULT_SEQUENCE_LEN
    if tokens < size * MIN_SLICE_TOKENS:
        yield Conflict(
            f"{name}: rows of {tokens} tokens (data.sequence_len) leave a rank fewer than "
            f"{MIN_SLICE_TOKENS}",
            f"data.sequence_len={size * MIN_SLICE_TOKENS}, or {without}",
        )


def _of_fsdp(config: TrainConfig, strategy: FsdpConfig, devices: Devices) -> Iterator[Conflict]:
    method, name = config.quantization.method, f"strategy={strategy.name}"
    use_dora = isinstance(config.adapter, LoraConfig) and config.adapter.use_dora
    splits_matrices = tensor_parallel_size(strategy, devices.ranks_per_node) > 1
    if strategy.offload_parameters and not devices.on_gpu:
        yield Conflict(
            "strategy.offload_parameters=true keeps weights in host memory that is pinned for a "
            f"GPU, but this run is on {devices}, where weights are in host memory anyway",
            "strategy=fsdp",
            is_of_machine=True,
        )
    if strategy.offload_parameters and splits_matrices:
        yield Conflict(
            f"{name} splits matrices, whose gradients are summed on the devices, but "
            "strategy.offload_parameters=true keeps them in host memory",
            "strategy=fsdp_offload, or strategy.offload_parameters=false",
        )
    if method == "int8":
        yield Conflict(
            f"{name} shards weights of one floating-point dtype, but those of quantization=int8 "
            "are integers with separate scales",
            "quantization=nf4, or strategy=zero2 or ddp",
        )
    if method in ("nf4", "fp8") and splits_matrices:
        why = "packs weights in blocks that cross both" if method == "nf4" else "scales whole rows"
        yield Conflict(
            f"{name} splits matrices by rows and columns, but quantization={method} {why}",
            "strategy=fsdp, or quantization=none",
        )
    if use_dora and splits_matrices:
        yield Conflict(
            f"adapter.use_dora=true needs the norms of whole columns of a matrix, but {name} "
            "splits them between ranks",
            "adapter.use_dora=false, or strategy=fsdp",
        )
    if use_dora and method == "nf4":
        yield Conflict(
            f"adapter.use_dora=true needs the norms of the base's columns while it is built, but "
            f"{name} builds it with its 4-bit weights on rank 0 only",
            "adapter.use_dora=false, or strategy=ddp",
        )


def _of_experts(config: TrainConfig, strategy: FsdpConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield conflicts of experts that are split over ranks."""
    size, without = strategy.expert_parallel_size, "strategy.expert_parallel_size=1"
    if size == 1:
        return
    name = f"strategy.expert_parallel_size={size}"
    if split := describe_split(strategy, devices.ranks_per_node):
        yield Conflict(
            f"{name} sends tokens between ranks with different rows, and {split} gives several "
            "ranks the same rows: together they are not built yet",
            f"strategy=fsdp without it, or {without}",
        )
    if strategy.replicas != 1 or not strategy.shards_data_parallel:
        yield Conflict(
            f"{name} shards each expert over all ranks that hold it, and strategy={strategy.name} "
            "replicates weights: together they are not built yet",
            f"strategy=fsdp, or {without}",
        )
    if strategy.offload_parameters:
        yield Conflict(
            f"{name} and strategy.offload_parameters=true have not been tested together yet",
            f"strategy.offload_parameters=false, or {without}",
        )
    if config.trainer.precision == "fp8":
        yield Conflict(
            f"{name} and trainer.precision=fp8 have not been tested together yet",
            f"trainer.precision=bf16, or {without}",
        )
    if config.quantization.method != "none":
        yield Conflict(
            f"{name} splits plain experts, and quantization={config.quantization.method} has not "
            "been tested with it yet",
            f"quantization=none, or {without}",
        )


def _of_pipeline(config: TrainConfig, strategy: PipelineConfig) -> Iterator[Conflict]:
    """Yield conflicts of layers that are divided into stages."""
    name = f"strategy={strategy.name}"
    if config.packing.method == "none":
        yield Conflict(
            f"{name} sends hidden states of one shape, and rows of packing=none differ in length",
            "packing=multipack, or strategy=fsdp",
        )
    if config.data.streaming:
        yield Conflict(
            f"{name} has not been tested with data.streaming=true yet",
            "data.streaming=false, or strategy=fsdp",
        )
    if config.objective.name != "sft":
        yield Conflict(
            f"{name} computes the loss of objective=sft in its last stage; objective="
            f"{config.objective.name} is not built yet",
            "objective=sft, or strategy=fsdp",
        )
    if config.quantization.method != "none":
        yield Conflict(
            f"{name} has not been tested with quantization={config.quantization.method} yet",
            "quantization=none, or strategy=fsdp",
        )
    if strategy.context_parallel_size > 1:
        yield Conflict(
            f"strategy.context_parallel_size={strategy.context_parallel_size} splits rows, and "
            f"{name} layers: together they are not built yet",
            "strategy.context_parallel_size=1, or strategy=fsdp",
        )
    offloads = strategy.offload_parameters or strategy.offload_optimizer != "none"
    if offloads or strategy.replicas != 1 or not strategy.shards_data_parallel:
        yield Conflict(
            f"{name} shards a stage over all ranks that hold it, on their devices: "
            "strategy.offload_parameters, strategy.offload_optimizer, strategy.replicas and "
            "strategy.shards_data_parallel are not built yet",
            "strategy=fsdp_pp without them, or strategy=fsdp_hybrid",
        )
    if config.adapter.neftune_alpha is not None:
        yield Conflict(
            f"adapter.neftune_alpha={config.adapter.neftune_alpha:g} adds noise to an embedding, "
            f"which {name} computes on one rank of several; together they are not tested yet",
            "adapter.neftune_alpha=null, or strategy=fsdp",
        )


def _of_schedule(
    config: TrainConfig, strategy: PipelineConfig, devices: Devices
) -> Iterator[Conflict]:
    """Yield conflicts of the micro-batches that pass through the stages in a step."""
    trainer, size = config.trainer, strategy.pipeline_parallel_size
    batches = trainer.accumulation(devices.num_data_ranks)
    least = max(1, round(batches / size)) * size
    typed = f"trainer.gradient_accumulation_steps={least}"
    if trainer.global_batch_size is not None:
        packs = least * trainer.least_micro_batch * devices.num_data_ranks
        typed = f"trainer.global_batch_size={packs}"
    if batches < size:
        yield Conflict(
            f"strategy.pipeline_parallel_size={size} needs at least {size} micro-batches in a "
            f"step, to keep all stages busy, and there would be {batches}",
            typed,
        )
    elif strategy.schedule == "interleaved" and batches % size:
        yield Conflict(
            f"strategy.schedule=interleaved passes micro-batches through {size} ranks in rounds "
            f"of {size}, which do not divide the {batches} of a step",
            f"{typed}, or strategy.schedule=1f1b",
        )


def _of_local_sgd(config: TrainConfig, strategy: LocalSgdConfig) -> Iterator[Conflict]:
    name, nodes = f"strategy={strategy.name}", config.trainer.nodes
    if (strategy.replicas or nodes) == 1:
        only = f"trainer.num_nodes={nodes}" if strategy.replicas is None else "strategy.replicas=1"
        yield Conflict(
            f"{name} averages the weights of nodes that train separately, but {only} leaves "
            "nothing to average",
            "strategy=fsdp, or strategy.replicas=2 for groups of ranks on one node",
        )
    if strategy.tensor_parallel_size != 1 or not strategy.shards_data_parallel:
        yield Conflict(
            f"{name} always shards weights over the ranks of a node and never splits matrices, "
            "against strategy.tensor_parallel_size and strategy.shards_data_parallel",
            "strategy.tensor_parallel_size=1 strategy.shards_data_parallel=true, or "
            "strategy=fsdp_tp",
        )
    if strategy.offload_parameters:
        yield Conflict(
            f"{name} averages weights on the devices, but strategy.offload_parameters=true keeps "
            "them in host memory",
            "strategy.offload_parameters=false, or strategy=fsdp_offload",
        )
    max_steps, first = config.trainer.max_steps, strategy.synchronous_steps
    if max_steps is not None and max_steps <= first:
        yield Conflict(
            f"{name} lets nodes train separately after strategy.synchronous_steps={first}, but "
            f"trainer.max_steps={max_steps} ends the run before that",
            f"strategy.synchronous_steps={max_steps // 4}, or strategy=fsdp_hybrid",
        )
    if config.optimizer.name == "schedule_free":
        yield Conflict(
            f"optimizer=schedule_free keeps its own average of the weights, which {name} does not "
            "share between nodes",
            "optimizer=adamw, or strategy=fsdp_hybrid",
        )


def _of_deepspeed(
    config: TrainConfig, strategy: ZeroConfig, devices: Devices
) -> Iterator[Conflict]:
    method = config.quantization.method
    name, stage = f"strategy={strategy.name}", strategy.stage
    if not conflict.is_installed("deepspeed"):
        nearest = NEAREST_IN_PYTORCH[strategy.name]
        if nearest == "fsdp_offload" and not devices.on_gpu:
            nearest = "fsdp"
        yield Conflict(
            f"{name} needs the package deepspeed, which is not installed",
            f"strategy={nearest}, or DS_BUILD_OPS=0 {install_extra('deepspeed')} (which builds its "
            "operators when they are first used)",
            is_of_machine=True,
        )
    if stage < 3 and strategy.offload_parameters != "none":
        yield Conflict(
            f"strategy.offload_parameters={strategy.offload_parameters} moves sharded weights, but "
            f"strategy.stage={stage} keeps all weights on every rank",
            "strategy.stage=3, or strategy.offload_parameters=none",
        )
    if strategy.name == "zero3_nvme":
        yield Conflict(
            "strategy=zero3_nvme would have DeepSpeed keep weights and optimizer states on a disk, "
            "which is not built; fsdp keeps the states there",
            "strategy=fsdp strategy.offload_optimizer=disk, or strategy=zero3_offload",
        )
    is_quantized = strategy.quantized_weights or strategy.quantized_gradients
    if stage < 3 and (strategy.partition_within_node or is_quantized):
        yield Conflict(
            "partition_within_node, quantized_weights and quantized_gradients set how sharded "
            f"weights are communicated, but strategy.stage={stage} does not shard weights",
            "strategy.stage=3, or strategy=zeropp",
        )
    if is_quantized and not devices.on_gpu:
        yield Conflict(
            f"{name} quantizes communication with DeepSpeed operators that need a GPU, but this "
            f"run is on {devices}",
            "strategy=zero3_hpz, which does not quantize it",
            is_of_machine=True,
        )
    if strategy.offload_optimizer != "none" and config.trainer.precision == "bf16-pure":
        yield Conflict(
            f"{name} and trainer.precision=bf16-pure: the optimizer in host memory keeps its "
            "weights in fp32",
            "trainer.precision=bf16, or strategy.offload_optimizer=none",
        )
    if stage == 3 and method != "none":
        yield Conflict(
            f"{name} shards plain weights while they are loaded, but those of "
            f"quantization={method} are packed, with separate scales",
            "strategy=fsdp (with nf4 or fp8), strategy=zero2 (each rank holds the whole quantized "
            "base), or quantization=none",
        )


def _of_deepspeed_keys(given: Any, config: TrainConfig) -> Iterator[Conflict]:
    """Yield keys of `strategy.config` that contradict a setting, or that may not be given."""
    if not isinstance(given, dict):
        yield Conflict(
            f"strategy.config={given} is neither keys of DeepSpeed nor a file",
            "'strategy.config={KEY: VALUE}' or strategy.config=FILE.json",
        )
        return
    keys = given_keys(given)
    if conflicts := conflicting_keys(keys, config):
        settings = ", ".join(dict.fromkeys(each.partition("=")[0] for each in conflicts.values()))
        said = [f"{key}={keys[key]} is set by {name}" for key, name in conflicts.items()]
        yield Conflict(
            "strategy.config: " + ", ".join(said),
            f"{settings} instead, and leave it out of strategy.config",
        )
    unknown, refused = refused_keys(keys)
    if unknown:
        yield Conflict(
            "strategy.config: DeepSpeed has no key " + ", no key ".join(unknown),
            "a key that it has, or leave it out of strategy.config",
        )
    if refused:
        yield Conflict(
            "strategy.config may not have keys that write files, contact hosts, run code or change "
            "the model: " + "; ".join(refused),
            "strategy.config without them",
        )
