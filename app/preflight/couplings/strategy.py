"""What cannot be combined with the strategy: its splits and its offloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.model.attention import EXCHANGED
from app.preflight.couplings import devices as requested
from app.preflight.couplings.devices import Conflict, Devices, Group, is_training, splits_matrices
from app.preflight.couplings.settings import uses_dora
from app.strategy.deepspeed_config import conflicting_keys, given_keys, refused_keys
from app.strategy.settings import (
    FsdpConfig,
    LocalSgdConfig,
    PipelineConfig,
    ZeroConfig,
    context_parallel_size,
    describe_split,
    expert_parallel_size,
    is_sharding,
    num_stages,
    states_folder,
)
from common.files import file_system_of
from common.installation import install_extra
from data_modules import DEFAULT_SEQUENCE_LEN

_MIN_SLICE_TOKENS = 64
"""fewest tokens of a row on each of the ranks that split it"""
MEMORY_FILES = ("tmpfs", "ramfs")
_REMOTE_FILES = (
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
    "zero3_hpz": "fsdp_hybrid",
    "zeropp": "fsdp_hybrid",
}
"""DeepSpeed strategy that can run -> the nearest PyTorch strategy"""
_UNSPLIT = {"nf4": "packs weights in blocks that cross both", "fp8": "scales whole rows"}
"""quantization -> why its matrices cannot be split by rows and columns"""


def _updates_shards(config: Any, devices: Devices) -> bool:
    is_whole = not splits_matrices(config, devices) and num_stages(config.strategy) == 1
    elementwise = ["adamw"]
    if isinstance(config.strategy, FsdpConfig) and is_whole:
        elementwise.append("schedule_free")
    return config.optimizer.name in elementwise


def _unfit_folder(config: Any) -> str:
    """Say which file system the optimizer states would be on, if they should not be."""
    folder = states_folder(config.strategy, Path(config.output.dir or "."))
    kind = "" if folder is None else file_system_of(folder)
    if kind in MEMORY_FILES:
        return f"{folder} is on {kind}, which is in memory itself"
    if kind in _REMOTE_FILES or kind.startswith("fuse."):
        return f"{folder} is on {kind}, which may be remote, and slow or lost"
    return ""


def _short_slices(config: Any) -> tuple[int, int] | None:
    """Return the tokens of a row and the fewest that its slices may have together, if more."""
    tokens = config.data.sequence_len or DEFAULT_SEQUENCE_LEN
    least = config.strategy.context_parallel_size * _MIN_SLICE_TOKENS
    return (tokens, least) if tokens < least else None


def _wrong_micro_batches(config: Any, devices: Devices) -> tuple[int, str] | None:
    """Return the micro-batches of a step and what to type, if stages would be idle with as many."""
    trainer, size = config.trainer, config.strategy.pipeline_parallel_size
    batches = trainer.accumulation(devices.num_data_ranks)
    if batches >= size and (batches % size == 0 or config.strategy.schedule != "interleaved"):
        return None
    least = max(1, round(batches / size)) * size
    if trainer.global_batch_size is None:
        return batches, f"trainer.gradient_accumulation_steps={least}"
    packs = least * trainer.least_micro_batch * devices.num_data_ranks
    return batches, f"trainer.global_batch_size={packs}"


def _only_node(config: Any) -> str:
    """Return the setting that leaves a single group of ranks, if there is one only."""
    replicas, nodes = config.strategy.replicas, config.trainer.nodes
    if (replicas or nodes) != 1 or config.strategy.sites > 1:
        return ""
    return f"trainer.num_nodes={nodes}" if replicas is None else "strategy.replicas=1"


def _nearest_without_deepspeed(config: Any, devices: Devices) -> str:
    nearest = NEAREST_IN_PYTORCH.get(config.strategy.name, "")
    if requested.is_installed("deepspeed"):
        return ""
    return "fsdp" if nearest == "fsdp_offload" and not devices.on_gpu else nearest


def _given_keys(config: Any) -> dict[str, Any]:
    given = config.strategy.config
    return given_keys(given) if isinstance(given, dict) else {}


def _keys_set_elsewhere(config: Any) -> tuple[str, str] | None:
    """Return the keys of strategy.config that settings decide, and these settings."""
    keys = _given_keys(config)
    conflicts = conflicting_keys(keys, config)
    settings = ", ".join(dict.fromkeys(each.partition("=")[0] for each in conflicts.values()))
    said = ", ".join(f"{key}={keys[key]} is set by {name}" for key, name in conflicts.items())
    return (said, settings) if conflicts else None


def _quantizes_messages(config: Any) -> bool:
    return config.strategy.quantized_weights or config.strategy.quantized_gradients


ROWS_OF_STRATEGIES = (
    Group(lambda c, d: is_training(c), rows=(
        Conflict(lambda c, d: c.strategy.name == "single" and d.num_ranks > 1,
                 "strategy=single runs on one device, but {d.num_ranks} ranks were requested",
                 "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1"),
    )),
    Group(lambda c, d: is_training(c) and c.strategy.offload_optimizer == "disk",
          "strategy.offload_optimizer=disk", "strategy.offload_optimizer=none", (
        Conflict(lambda c, d: c.optimizer.name != "adamw",
                 "{name} steps AdamW with fp32 states, not optimizer={c.optimizer.name}",
                 "optimizer=adamw, or {without}"),
        Conflict(lambda c, d: c.trainer.precision == "fp16",
                 "{name} and trainer.precision=fp16: its fused steps take no loss scaler",
                 "trainer.precision=bf16, or {without}"),
        Conflict(lambda c, d: c.trainer.checkpoint.asynchronous,
                 "trainer.checkpoint.async=true copies the optimizer states to host memory, where "
                 "{name} never has all of them",
                 "trainer.checkpoint.async=false, or {without}"),
        Conflict(lambda c, d: isinstance(c.strategy, LocalSgdConfig),
                 "{strategy} averages optimizer states over the nodes, which is not built for "
                 "{name}",
                 "strategy=fsdp_hybrid, or {without}"),
        Conflict(lambda c, d: _unfit_folder(c),
                 "{name}: {found}",
                 "strategy.offload_dir=FOLDER on a local disk, or {without}", is_of_machine=True),
    )),
    Group(lambda c, d: is_training(c) and is_sharding(c.strategy), rows=(
        Conflict(lambda c, d: c.trainer.precision == "fp16",
                 "{strategy} and trainer.precision=fp16: each rank would decide from its own shard "
                 "of the gradients whether a scaled step overflowed",
                 "trainer.precision=bf16, or strategy=ddp"),
        Conflict(lambda c, d: c.trainer.compile,
                 "{strategy} and trainer.compile=true have not been tested together yet",
                 "trainer.compile=false, or strategy=ddp"),
        Conflict(lambda c, d: c.trainer.checkpoint.asynchronous,
                 "trainer.checkpoint.async=true copies the state of one rank, but {strategy} "
                 "shards it over all ranks, which gather and write it together",
                 "trainer.checkpoint.async=false, or strategy=ddp"),
        Conflict(lambda c, d: not _updates_shards(c, d),
                 "optimizer={c.optimizer.name} cannot update shards of weights, and {strategy} "
                 "shards them",
                 "optimizer=adamw, or strategy=ddp"),
    )),
    Group(lambda c, d: is_training(c) and context_parallel_size(c.strategy) > 1,
          "strategy.context_parallel_size={c.strategy.context_parallel_size}",
          "strategy.context_parallel_size=1", (
        Conflict(splits_matrices,
                 "{name} splits rows, and {strategy} matrices: together they are not built yet",
                 "strategy=fsdp, or {without}"),
        Conflict(lambda c, d: isinstance(c.strategy, LocalSgdConfig),
                 "{name} and {strategy}: nodes that train separately are not built yet for split "
                 "rows",
                 "strategy=fsdp_hybrid, or {without}"),
        Conflict(lambda c, d: c.attention.backend not in ("auto", *EXCHANGED),
                 "{name} gives each rank a share of the heads, which {attention} cannot compute",
                 f"attention={' or '.join(EXCHANGED)}, or {{without}}"),
        Conflict(lambda c, d: c.objective.name != "sft",
                 "{name} splits rows, and {objective} is not built for slices of them",
                 "objective=sft, or {without}"),
        Conflict(lambda c, d: c.trainer.compile,
                 "{name} and trainer.compile=true have not been tested together yet",
                 "trainer.compile=false, or {without}"),
        Conflict(lambda c, d: c.adapter.neftune_alpha is not None,
                 "adapter.neftune_alpha={c.adapter.neftune_alpha:g} scales its noise by the length "
                 "of a document, of which {name} gives a rank a part",
                 "adapter.neftune_alpha=null, or {without}"),
        Conflict(lambda c, d: _short_slices(c),
                 "{name}: rows of {found[0]} tokens (data.sequence_len) leave a rank fewer than "
                 f"{_MIN_SLICE_TOKENS}",
                 "data.sequence_len={found[1]}, or {without}"),
    )),
    Group(lambda c, d: is_training(c) and isinstance(c.strategy, FsdpConfig), rows=(
        Conflict(lambda c, d: c.strategy.offload_parameters and not d.on_gpu,
                 "strategy.offload_parameters=true keeps weights in host memory that is pinned for "
                 "a GPU, but this run is on {d}, where weights are in host memory anyway",
                 "strategy=fsdp", is_of_machine=True),
        Conflict(lambda c, d: c.strategy.offload_parameters and splits_matrices(c, d),
                 "{strategy} splits matrices, whose gradients are summed on the devices, but "
                 "strategy.offload_parameters=true keeps them in host memory",
                 "strategy=fsdp_offload, or strategy.offload_parameters=false"),
        Conflict(lambda c, d: c.quantization.method == "int8",
                 "{strategy} shards weights of one floating-point dtype, but those of "
                 "quantization=int8 are integers with separate scales",
                 "quantization=nf4, or strategy=zero2 or ddp"),
        Conflict(lambda c, d: splits_matrices(c, d) and _UNSPLIT.get(c.quantization.method),
                 "{strategy} splits matrices by rows and columns, but {quantization} {found}",
                 "strategy=fsdp, or quantization=none"),
        Conflict(lambda c, d: uses_dora(c) and splits_matrices(c, d),
                 "adapter.use_dora=true needs the norms of whole columns of a matrix, but "
                 "{strategy} splits them between ranks",
                 "adapter.use_dora=false, or strategy=fsdp"),
        Conflict(lambda c, d: uses_dora(c) and c.quantization.method == "nf4",
                 "adapter.use_dora=true needs the norms of the base's columns while it is built, "
                 "but {strategy} builds it with its 4-bit weights on rank 0 only",
                 "adapter.use_dora=false, or strategy=ddp"),
    )),
    Group(lambda c, d: is_training(c) and expert_parallel_size(c.strategy) > 1,
          "strategy.expert_parallel_size={c.strategy.expert_parallel_size}",
          "strategy.expert_parallel_size=1", (
        Conflict(lambda c, d: describe_split(c.strategy, d.ranks_per_node),
                 "{name} sends tokens between ranks with different rows, and {found} gives several "
                 "ranks the same rows: together they are not built yet",
                 "strategy=fsdp without it, or {without}"),
        Conflict(lambda c, d: c.strategy.replicas != 1 or not c.strategy.shards_data_parallel,
                 "{name} shards each expert over all ranks that hold it, and {strategy} replicates "
                 "weights: together they are not built yet",
                 "strategy=fsdp, or {without}"),
        Conflict(lambda c, d: c.strategy.offload_parameters,
                 "{name} and strategy.offload_parameters=true have not been tested together yet",
                 "strategy.offload_parameters=false, or {without}"),
        Conflict(lambda c, d: c.trainer.precision == "fp8",
                 "{name} and trainer.precision=fp8 have not been tested together yet",
                 "trainer.precision=bf16, or {without}"),
        Conflict(lambda c, d: c.quantization.method != "none",
                 "{name} splits plain experts, and {quantization} has not been tested with it yet",
                 "quantization=none, or {without}"),
    )),
    Group(lambda c, d: is_training(c) and isinstance(c.strategy, PipelineConfig), rows=(
        Conflict(lambda c, d: c.packing.method == "none",
                 "{strategy} sends hidden states of one shape, and rows of packing=none differ in "
                 "length",
                 "packing=multipack, or strategy=fsdp"),
        Conflict(lambda c, d: c.data.streaming,
                 "{strategy} has not been tested with data.streaming=true yet",
                 "data.streaming=false, or strategy=fsdp"),
        Conflict(lambda c, d: c.objective.name in ("classify", "reward", "distill"),
                 "{strategy} computes losses of tokens in its last stage; {objective} is not built "
                 "yet",
                 "objective=sft, or strategy=fsdp"),
        Conflict(lambda c, d: c.objective.reference_source == "base",
                 "{strategy} runs each micro-batch through its stages once, and "
                 "objective.reference=base a second time without the adapter",
                 "objective.reference=cached, or strategy=fsdp"),
        Conflict(lambda c, d: c.quantization.method == "fp8",
                 "{strategy} has not been tested with quantization=fp8 yet",
                 "quantization=nf4 or none, or strategy=fsdp"),
        Conflict(lambda c, d: c.strategy.context_parallel_size > 1,
                 "strategy.context_parallel_size={c.strategy.context_parallel_size} splits rows, "
                 "and {strategy} layers: together they are not built yet",
                 "strategy.context_parallel_size=1, or strategy=fsdp"),
        Conflict(lambda c, d: c.strategy.offload_parameters or c.strategy.replicas != 1
                 or c.strategy.offload_optimizer != "none" or not c.strategy.shards_data_parallel,
                 "{strategy} shards a stage over all ranks that hold it, on their devices: "
                 "strategy.offload_parameters, strategy.offload_optimizer, strategy.replicas and "
                 "strategy.shards_data_parallel are not built yet",
                 "strategy=fsdp_pp without them, or strategy=fsdp_hybrid"),
        Conflict(lambda c, d: c.recompute.num_layers is not None,
                 "recompute.num_layers={c.recompute.num_layers} counts from the first layer, and "
                 "would slow down the first stages of {strategy}, for which all others wait",
                 "recompute.num_layers=null, recompute.every=2, or strategy=fsdp"),
        Conflict(lambda c, d: c.adapter.neftune_alpha is not None,
                 "adapter.neftune_alpha={c.adapter.neftune_alpha:g} adds noise to an embedding, "
                 "which {strategy} computes on one rank of several; together they are not tested "
                 "yet",
                 "adapter.neftune_alpha=null, or strategy=fsdp"),
        Conflict(lambda c, d: (wrong := _wrong_micro_batches(c, d))
                 and wrong[0] < c.strategy.pipeline_parallel_size and wrong,
                 "strategy.pipeline_parallel_size={c.strategy.pipeline_parallel_size} needs at "
                 "least {c.strategy.pipeline_parallel_size} micro-batches in a step, to keep all "
                 "stages busy, and there would be {found[0]}",
                 "{found[1]}"),
        Conflict(lambda c, d: (wrong := _wrong_micro_batches(c, d))
                 and wrong[0] > c.strategy.pipeline_parallel_size and wrong,
                 "strategy.schedule=interleaved passes micro-batches through "
                 "{c.strategy.pipeline_parallel_size} ranks in rounds of "
                 "{c.strategy.pipeline_parallel_size}, which do not divide the {found[0]} of a "
                 "step",
                 "{found[1]}, or strategy.schedule=1f1b"),
    )),
    Group(lambda c, d: is_training(c) and isinstance(c.strategy, LocalSgdConfig), rows=(
        Conflict(lambda c, d: _only_node(c),
                 "{strategy} averages the weights of nodes that train separately, but {found} "
                 "leaves nothing to average",
                 "strategy=fsdp, or strategy.replicas=2 for groups of ranks on one node"),
        Conflict(lambda c, d: c.strategy.tensor_parallel_size != 1
                 or not c.strategy.shards_data_parallel,
                 "{strategy} always shards weights over the ranks of a node and never splits "
                 "matrices, against strategy.tensor_parallel_size and "
                 "strategy.shards_data_parallel",
                 "strategy.tensor_parallel_size=1 strategy.shards_data_parallel=true, or "
                 "strategy=fsdp_tp"),
        Conflict(lambda c, d: c.strategy.offload_parameters,
                 "{strategy} averages weights on the devices, but strategy.offload_parameters=true "
                 "keeps them in host memory",
                 "strategy.offload_parameters=false, or strategy=fsdp_offload"),
        Conflict(lambda c, d: c.trainer.max_steps is not None
                 and c.trainer.max_steps <= c.strategy.synchronous_steps
                 and str(c.trainer.max_steps // 4),
                 "{strategy} lets nodes train separately after "
                 "strategy.synchronous_steps={c.strategy.synchronous_steps}, but "
                 "trainer.max_steps={c.trainer.max_steps} ends the run before that",
                 "strategy.synchronous_steps={found}, or strategy=fsdp_hybrid"),
        Conflict(lambda c, d: c.optimizer.name == "schedule_free",
                 "optimizer=schedule_free keeps its own average of the weights, which {strategy} "
                 "does not share between nodes",
                 "optimizer=adamw, or strategy=fsdp_hybrid"),
    )),
    Group(lambda c, d: is_training(c) and isinstance(c.strategy, LocalSgdConfig)
          and c.strategy.sites > 1, "strategy.sites={c.strategy.sites}", "strategy.sites=1", (
        Conflict(lambda c, d: c.strategy.meeting_point is None,
                 "{name} meet at HOST:PORT of the first site, and "
                 "strategy.site_address={c.strategy.site_address}",
                 "strategy.site_address=HOST:PORT, or {without}"),
        Conflict(lambda c, d: c.strategy.site > c.strategy.sites,
                 "{name}, and strategy.site={c.strategy.site} is none of them",
                 "strategy.site=N, from 1 to {c.strategy.sites}"),
        Conflict(lambda c, d: (c.strategy.replicas or c.trainer.nodes) != 1,
                 "{name} average with each other, and replicas within a site are not built for it",
                 "strategy.replicas=1, or {without}"),
        Conflict(lambda c, d: c.strategy.synchronous_steps > 0,
                 "strategy.synchronous_steps={c.strategy.synchronous_steps} sends the gradients of "
                 "each step, of which {name} keep their own",
                 "strategy.synchronous_steps=0, or {without}"),
        Conflict(lambda c, d: c.trainer.max_steps is None,
                 "{name} take the same number of steps, and num_epochs of their own rows would "
                 "differ",
                 "trainer.max_steps=N, or {without}"),
        Conflict(lambda c, d: c.trainer.early_stopping_patience is not None,
                 "trainer.early_stopping_patience={c.trainer.early_stopping_patience} would end "
                 "one of {name} before the others",
                 "trainer.early_stopping_patience=null, or {without}"),
    )),
    Group(lambda c, d: is_training(c) and isinstance(c.strategy, ZeroConfig), rows=(
        Conflict(_nearest_without_deepspeed,
                 "{strategy} needs the package deepspeed, which is not installed",
                 f"strategy={{found}}, or DS_BUILD_OPS=0 {install_extra('deepspeed')} (which "
                 "builds its operators when they are first used)", is_of_machine=True),
        Conflict(lambda c, d: c.strategy.stage < 3 and c.strategy.offload_parameters != "none",
                 "strategy.offload_parameters={c.strategy.offload_parameters} moves sharded "
                 "weights, but strategy.stage={c.strategy.stage} keeps all weights on every rank",
                 "strategy.stage=3, or strategy.offload_parameters=none"),
        Conflict(lambda c, d: c.strategy.name == "zero3_nvme",
                 "strategy=zero3_nvme would have DeepSpeed keep weights and optimizer states on a "
                 "disk, which is not built; fsdp keeps the states there",
                 "strategy=fsdp strategy.offload_optimizer=disk, or strategy=zero3_offload"),
        Conflict(lambda c, d: c.strategy.stage < 3
                 and (c.strategy.partition_within_node or _quantizes_messages(c)),
                 "partition_within_node, quantized_weights and quantized_gradients set how sharded "
                 "weights are communicated, but strategy.stage={c.strategy.stage} does not shard "
                 "weights",
                 "strategy.stage=3, or strategy=zeropp"),
        Conflict(lambda c, d: _quantizes_messages(c) and not d.on_gpu,
                 "{strategy} quantizes communication with DeepSpeed operators that need a GPU, but "
                 "this run is on {d}",
                 "strategy=zero3_hpz, which does not quantize it", is_of_machine=True),
        Conflict(lambda c, d: c.strategy.offload_optimizer != "none"
                 and c.trainer.precision == "bf16-pure",
                 "{strategy} and trainer.precision=bf16-pure: the optimizer in host memory keeps "
                 "its weights in fp32",
                 "trainer.precision=bf16, or strategy.offload_optimizer=none"),
        Conflict(lambda c, d: c.strategy.stage == 3 and c.quantization.method != "none",
                 "{strategy} shards plain weights while they are loaded, but those of "
                 "{quantization} are packed, with separate scales",
                 "strategy=fsdp (with nf4 or fp8), strategy=zero2 (each rank holds the whole "
                 "quantized base), or quantization=none"),
        Conflict(lambda c, d: not isinstance(c.strategy.config, dict),
                 "strategy.config={c.strategy.config} is neither keys of DeepSpeed nor a file",
                 "'strategy.config={{KEY: VALUE}}' or strategy.config=FILE.json"),
        Conflict(lambda c, d: _keys_set_elsewhere(c),
                 "strategy.config: {found[0]}",
                 "{found[1]} instead, and leave it out of strategy.config"),
        Conflict(lambda c, d: ", no key ".join(refused_keys(_given_keys(c))[0]),
                 "strategy.config: DeepSpeed has no key {found}",
                 "a key that it has, or leave it out of strategy.config"),
        Conflict(lambda c, d: "; ".join(refused_keys(_given_keys(c))[1]),
                 "strategy.config may not have keys that write files, contact hosts, run code or "
                 "change the model: {found}",
                 "strategy.config without them"),
    )),
)  # fmt: skip
"""the rows of the settings `strategy`"""
