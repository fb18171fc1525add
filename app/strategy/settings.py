"""Settings of the strategies, one class per family, and what is built from them.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.facts import setting

_OFFLOAD_DEVICES = ("none", "cpu")
"""devices that states can be offloaded to: none, or host memory"""
TIMEOUT = timedelta(minutes=30)
"""timeout of one collective under every strategy: long enough for the other ranks to wait while one
of them reads or writes a large model. Hangs during training are detected earlier, by
supervise.hang_minutes"""
MAX_UNSHARDED_SHARE = 0.1
"""largest trainable share of a model for which FSDP accumulates unsharded gradients"""


STATE_BLOCK_BYTES = 64 << 20
"""bytes of each of AdamW's two moments that are in memory at one time, if they are on a disk; a
multiple of pages and of the vectors of the fused kernels, so that steps are bit-identical"""


@dataclass(kw_only=True, slots=True)
class StrategyConfig:
    name: str = setting("auto", resume="content", grants="nothing")
    """name of the strategy; auto chooses one and logs the reason"""
    offload_optimizer: str = setting("none", choices=("none", "disk"), resume="free")
    """where the optimizer states are: none (on the training device), disk (in a file of
    offload_dir, of which a step maps a block at a time: hardly any memory, slower steps)"""
    offload_dir: str | None = setting(None, resume="free", grants="write")
    """folder on a local disk for the states of offload_optimizer=disk; null: the run's folder"""


@dataclass(kw_only=True, slots=True)
class RanksConfig(StrategyConfig):
    """A strategy of several ranks."""

    context_parallel_size: int = setting(1, ge=1, le=64)
    """number of neighbouring ranks that split the tokens of each row, for sequences too long for
    one device: activations shrink by it; ranks exchange heads for tokens in each layer"""


@dataclass(kw_only=True, slots=True)
class DdpConfig(RanksConfig):
    """Every rank holds all weights; gradients are averaged."""

    name: str = setting("ddp", resume="content")
    compression: str = setting("none", choices=("none", "bf16", "fp16", "powersgd", "topk"))
    """gradient compression: none, bf16 or fp16 (half the bytes of fp32), powersgd (low-rank, far
    fewer bytes), topk (only the largest gradients of each weight; the rest is added to the next
    step's gradients)"""
    powersgd_rank: int = setting(4, ge=1, note="1 to 32 is usual")
    """rank of PowerSGD's approximation; higher = more exact, more bytes"""
    topk_share: float = setting(0.01, gt=0, le=1, note="0.001 to 0.05 is usual")
    """share of each weight's gradients sent by topk; higher = more exact, more bytes"""


@dataclass(kw_only=True, slots=True)
class ZeroConfig(RanksConfig):
    """DeepSpeed ZeRO: each stage shards more of the model states over the ranks."""

    name: str = setting("zero3", resume="content")
    stage: int = setting(3, choices=(1, 2, 3))
    """states that are sharded: 1 = optimizer states, 2 = gradients too, 3 = weights too"""
    offload_optimizer: str = setting("none", choices=_OFFLOAD_DEVICES, note="fsdp takes disk, too")
    """device that keeps and steps the optimizer states: none (the training device), cpu"""
    offload_parameters: str = setting("none", choices=_OFFLOAD_DEVICES)
    """device that keeps weights while no layer uses them: none (the training device), cpu; stage 3
    only"""
    partition_within_node: bool = False
    """ZeRO++ hpZ: keep a second copy of the weights sharded inside each node, from which the
    backward pass gathers them; more memory, less traffic between nodes"""
    quantized_weights: bool = False
    """ZeRO++ qwZ: all-gather weights in 8 bits"""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: reduce gradients between nodes in 4 bits"""
    config: Any = setting(default_factory=dict, grants="nothing")
    """further keys of a DeepSpeed config, or the JSON file of one; what it says of batch size,
    clipping, precision and stage must agree with our settings, and keys that write files, contact
    hosts or run code are refused"""


@dataclass(kw_only=True, slots=True)
class FsdpConfig(RanksConfig):
    """PyTorch's own sharding (FSDP2), tensor parallelism, or both."""

    name: str = setting("fsdp", resume="content")
    reshard_after_forward: bool = True
    """free a layer's weights after its forward pass and gather them again for the backward pass;
    false, as in ZeRO-2: gather them once per optimizer step; more memory, less traffic"""
    sync_each_micro_batch: bool | None = setting(None, aliases=("sync_each_batch",))
    """average gradients over the ranks after each micro-batch, and shard them in between; false:
    once per optimizer step, holding them whole (more memory, less traffic); null: false if at most
    a tenth of the weights train, or with strategy=auto where that is planned to be faster"""
    reduce_dtype: str = setting("fp32", choices=("fp32", "bf16"), resume="precision")
    """dtype in which ranks sum gradients of fp32 weights that train with trainer.precision=bf16 or
    fp8: fp32, or bf16 (half the traffic; sums over the ranks are rounded)"""
    replicas: int | None = setting(1, ge=1, note="null: one per node")
    """number of rank groups that each hold all weights (hybrid sharding); null = one per node"""
    offload_parameters: bool = False
    """keep weights, gradients and optimizer states in pinned host memory; GPU only"""
    tensor_parallel_size: int | None = setting(1, ge=1, note="null: all of a node")
    """number of ranks that split each layer's matrices and see the same data; null = all ranks of a
    node"""
    shards_data_parallel: bool = True
    """shard weights over the data parallel ranks; false = split them by tensor parallelism only"""
    expert_parallel_size: int = setting(1, ge=1, le=64)
    """number of neighbouring ranks that hold different experts of a mixture: they gather fewer
    weights, and send each token to the ranks of its experts in each layer"""


@dataclass(kw_only=True, slots=True)
class LocalSgdConfig(FsdpConfig):
    """FSDP2 within each node; nodes train independently and periodically average their weights."""

    name: str = setting("hsdp_local_sgd", resume="content")
    replicas: int | None = setting(None, ge=1, note="null: one per node")
    """number of rank groups that train independently; null = one per node"""
    sync_every_steps: int = setting(8, ge=1, resume="fixed", note="4 to 100 is usual")
    """optimizer steps between two averages of the trainable weights; more = fewer bytes between
    nodes, further from synchronous training"""
    synchronous_steps: int = setting(10, ge=0, resume="fixed")
    """optimizer steps at the start of a run in which nodes average gradients, as in fsdp_hybrid"""
    outer_lr: float = setting(
        1.0, gt=0, resume="fixed", note="0.7 with outer_momentum=0.9 is DiLoCo"
    )
    """learning rate of the outer step towards the average; 1 without momentum sets the weights to
    the average"""
    outer_momentum: float = setting(0.0, ge=0, lt=1, resume="fixed")
    """Nesterov momentum of the outer steps; a value above 0, or an outer_lr other than 1, takes
    memory for two fp32 copies of the trainable weights"""
    sites: int = setting(1, ge=1, resume="fixed", aliases=("num_clients",))
    """runs on rows of their own that average their trainable weights in proportion to their tokens
    (federated averaging): each site types the same command with its own data and `site`"""
    site: int = setting(1, ge=1, resume="fixed", aliases=("client_id",))
    """number of this site"""
    site_address: str | None = setting(None, grants="host", aliases=("server_address",))
    """HOST:PORT on which the first site waits for the others, without password or encryption"""
    share_counts: bool = setting(False, resume="free")
    """whether each site also sends its losses and number of tokens, which the first site logs at
    each average; all sites type the same"""

    @property
    def uses_outer_optimizer(self) -> bool:
        """Whether the weights after an average differ from the plain mean."""
        return self.outer_lr != 1 or self.outer_momentum > 0

    @property
    def meeting_point(self) -> tuple[str, int] | None:
        """The host and port of `site_address`; None if it is not HOST:PORT."""
        host, _, port = (self.site_address or "").rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 2**16
        return (host, int(port)) if host and is_port else None


@dataclass(kw_only=True, slots=True)
class PipelineConfig(FsdpConfig):
    """Stages of the model's layers on different ranks, through which micro-batches pass."""

    name: str = setting("fsdp_pp", resume="content")
    pipeline_parallel_size: int = setting(2, ge=2, le=64)
    """number of ranks that hold stages of the model's layers; a step needs at least as many
    micro-batches (trainer.gradient_accumulation_steps)"""
    schedule: str = setting(
        "1f1b",
        choices=("1f1b", "interleaved"),
        option_aliases={
            "interleaved1f1b": "interleaved",
            "gpipe": "1f1b (the same idle time, with fewer activations in memory)",
        }
        | dict.fromkeys(
            ("zb", "zero_bubble", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
            "interleaved (those of PyTorch without a bubble take twice the memory)",
        ),
    )
    """order of forward and backward passes: 1f1b (a stage a rank), interleaved (several stages a
    rank: less idle time, more messages)"""
    stages_per_rank: int = setting(2, ge=2, le=16, note="2 to 4 is usual")
    """number of stages of each rank with schedule=interleaved: more = less idle time"""

    @property
    def stages_of_rank(self) -> int:
        return self.stages_per_rank if self.schedule == "interleaved" else 1


PIPELINED = (
    *("gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"),
)
"""model types whose stages are tested against one process"""
STRATEGY_CONFIGS: dict[str, type[StrategyConfig]] = {
    **dict.fromkeys(("auto", "single"), StrategyConfig),
    **dict.fromkeys(("ddp", "ddp_compressed"), DdpConfig),
    **dict.fromkeys(("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"), ZeroConfig),
    **dict.fromkeys(("zero3_nvme", "zero3_hpz", "zeropp"), ZeroConfig),
    **dict.fromkeys(("fsdp", "fsdp_grad_op", "fsdp_hybrid", "fsdp_offload"), FsdpConfig),
    "hsdp_local_sgd": LocalSgdConfig,
    **dict.fromkeys(("tp", "fsdp_tp"), FsdpConfig),
    "fsdp_pp": PipelineConfig,
}
"""settings class of each strategy name; the values are in conf/strategy"""


def states_folder(config: StrategyConfig, run_folder: Path) -> Path | None:
    """Return the folder whose disk has the optimizer states; None if they are in memory."""
    if config.offload_optimizer != "disk":
        return None
    return Path(config.offload_dir or run_folder).expanduser()


def with_states_of(
    typed: StrategyConfig, strategies: Mapping[str, StrategyConfig]
) -> dict[str, StrategyConfig]:
    """Return the strategies with optimizer states on the disk, if `typed` has them there.

    Those of DeepSpeed are then left out.
    """
    if typed.offload_optimizer != "disk":
        return dict(strategies)
    return {
        name: replace(each, offload_optimizer="disk", offload_dir=typed.offload_dir)
        for name, each in strategies.items()
        if not isinstance(each, ZeroConfig)
    }


def is_sharding(config: StrategyConfig) -> bool:
    return isinstance(config, (ZeroConfig, FsdpConfig))


def shards_weights(config: StrategyConfig) -> bool:
    """Return whether no rank holds all weights, as under FSDP and ZeRO-3."""
    return config.stage == 3 if isinstance(config, ZeroConfig) else isinstance(config, FsdpConfig)


def tensor_parallel_size(config: StrategyConfig, ranks_per_node: int) -> int:
    """Return the number of ranks that split each layer's matrices and see the same data."""
    if not isinstance(config, FsdpConfig):
        return 1
    return config.tensor_parallel_size or ranks_per_node


def context_parallel_size(config: StrategyConfig) -> int:
    """Return the number of ranks that hold slices of the same rows."""
    return config.context_parallel_size if isinstance(config, RanksConfig) else 1


def expert_parallel_size(config: StrategyConfig) -> int:
    """Return the number of ranks that hold different experts of each layer."""
    return config.expert_parallel_size if isinstance(config, FsdpConfig) else 1


def pipeline_parallel_size(config: StrategyConfig) -> int:
    """Return the number of ranks that hold stages of the same copy of the model."""
    return config.pipeline_parallel_size if isinstance(config, PipelineConfig) else 1


def num_stages(config: StrategyConfig) -> int:
    """Return the number of stages that the layers are divided into, 1 without a pipeline."""
    if not isinstance(config, PipelineConfig):
        return 1
    return config.pipeline_parallel_size * config.stages_of_rank


def can_probe_micro_batch(strategy: StrategyConfig) -> bool:
    """Return whether a rank may run out of memory in a micro-batch without blocking other ranks.

    It may not if it gathers weights, sends gradients or exchanges heads during the pass.
    """
    is_whole = strategy.name == "single" or isinstance(strategy, DdpConfig)
    return is_whole and context_parallel_size(strategy) == 1


def divisors(number: int, least: int = 1) -> list[int]:
    """Return the divisors of a number from `least` on, in order."""
    return [each for each in range(least, number + 1) if number % each == 0]


def cut_layers(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Return the layers [first, stop) of each stage, so that the largest cost is the least.

    None is empty. If several cuts are equal, earlier stages, which hold more micro-batches, get
    fewer layers.
    """

    def fill(most: float) -> list[int]:
        """Return the first layer of each stage, the last first; they cost at most `most`."""
        firsts, first = [], len(costs)
        for before in reversed(range(num_stages)):
            first, total = first - 1, costs[first - 1]
            while first > before and total + costs[first - 1] <= most:
                first -= 1
                total += costs[first]
            firsts.append(first)
        return firsts

    low, high = max(costs), sum(costs)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle)[-1] == 0 else (middle, high)
    firsts = fill(high)[::-1]
    return list(zip(firsts, [*firsts[1:], len(costs)], strict=True))


def describe_split(config: StrategyConfig, ranks_per_node: int) -> str:
    """Return how ranks that get the same rows share the work, as `tensor parallel 2`; else ''."""
    sizes = {
        "pipeline": pipeline_parallel_size(config),
        "context": context_parallel_size(config),
        "tensor": tensor_parallel_size(config, ranks_per_node),
    }
    return ", ".join(f"{kind} parallel {size}" for kind, size in sizes.items() if size > 1)


def strategy_words(config: StrategyConfig) -> str:
    """Return what to type after `strategy=`: the name, and what `auto` chooses under it."""
    sizes = {
        "context_parallel_size": context_parallel_size(config),
        "pipeline_parallel_size": pipeline_parallel_size(config),
        "expert_parallel_size": expert_parallel_size(config),
    }
    if isinstance(config, PipelineConfig):
        sizes["tensor_parallel_size"] = config.tensor_parallel_size or 1
    split = [f"strategy.{name}={size}" for name, size in sizes.items() if size > 1]
    if isinstance(config, FsdpConfig) and config.sync_each_micro_batch is False:
        split.append("strategy.sync_each_micro_batch=false")
    return " ".join((config.name, *split))


def ranks_per_row(config: StrategyConfig, ranks_per_node: int) -> int:
    """Return the number of ranks that get the same rows: they split matrices, tokens or layers.

    A size of 0, which is refused with all other settings, counts as 1.
    """
    split = tensor_parallel_size(config, ranks_per_node) * context_parallel_size(config)
    return max(1, split * pipeline_parallel_size(config))


BY_ROWS, BY_COLUMNS, PARTIAL_GRADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""styles of transformers' tensor parallel plans, which name the split side of W in x W; torch
stores the transposed matrix"""


def layer_plan(model: Any) -> Mapping[str, str]:
    """Return the style in which each module of a layer is split, by its name in the layer."""
    text_config = model.config.get_text_config()
    full_plan = text_config.base_model_tp_plan or {}
    plan = {
        path: kind
        for name, kind in full_plan.items()
        for _, dot, path in [name.partition(".*.")]
        if dot
    }
    unknown = sorted(set(plan.values()) - {BY_ROWS, BY_COLUMNS, PARTIAL_GRADS})
    if not plan or unknown:
        why = f"uses the style {unknown[0]}" if unknown else "has no tensor parallel plan"
        raise UserError(
            f"strategy.tensor_parallel_size: transformers' {text_config.model_type} model {why}, "
            "which is not supported; type strategy=fsdp"
        )
    return plan


def split_dim(plan: Mapping[str, str], name: str) -> int | None:
    """Return the dimension along which a weight is split; None if it is replicated.

    `name`: the weight's name in its layer, with an adapter if it has one.
    """
    kind, part = next(
        ((kind, name[len(path) :]) for path, kind in plan.items() if name.startswith(f"{path}.")),
        (None, ""),
    )
    if kind == BY_ROWS:
        return None if ".lora_A." in part else 0
    is_whole = kind != BY_COLUMNS or ".lora_B." in part or part.endswith(".bias")
    return None if is_whole else 1
