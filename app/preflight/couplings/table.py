"""THE TABLE of settings that do not go together. A row: when, why, what to type instead.

One function a subject; each `if` with its `yield` is a row. Rows marked `is_of_machine` may be
right on another machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from app.model.adapter import Ia3Config, LoraConfig, saves_whole_model
from app.model.attention import BACKEND_PACKAGES, GPU_ONLY, HALF_PRECISION_ONLY
from app.model.hub import COMMIT
from app.preflight.couplings.devices import (
    Devices,
    check_devices,
    check_global_batch,
    check_layout,
    has_data,
    is_training,
    requested_devices,
)
from app.process.errors import nearest
from app.strategy.deepspeed_config import keys_decided_elsewhere, unknown_keys
from app.strategy.settings import (
    DdpConfig,
    FsdpConfig,
    LocalSgdConfig,
    ZeroConfig,
    is_sharding,
    tensor_parallel_size,
)
from data_modules import check_values, dataset_names

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, TrainConfig, TunedConfig
    from app.training.optimizers import ScheduleFreeConfig

CHANGE_BASE = ("pissa", "olora")
"""values of adapter.init that take the adapter's start out of the base's weights"""
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
"""strategy of DeepSpeed -> PyTorch's nearest"""
SLURM_ONLY = ("partition", "account", "gpus", "cpus", "memory_gib")
"""settings of launcher that its jobs alone have"""


@dataclasses.dataclass(frozen=True, slots=True)
class Clash:
    """Settings that do not go together."""

    why: str
    instead: str
    is_of_machine: bool = False
    """whether another machine would change the answer"""


def check_compatibility(
    config: TrainConfig | TunedConfig,
    num_gpus: int | None = None,
    *,
    on_this_machine: bool = True,
) -> list[str]:
    """List the numbers out of range, and if there are none, what does not go together.

    `num_gpus`: GPUs of this machine, counted when not given. `on_this_machine` False leaves out
    what may be right on another machine.
    """
    if problems := check_values(config, skip=("data",)):  # check_datasets has those of the data
        return problems
    devices = requested_devices(config, num_gpus if on_this_machine else num_gpus or 0)
    clashes = [*_of_device(config, devices), *_of_base(config)]
    if has_data(config):
        clashes += _of_data(config)
    if is_training(config):
        clashes += [*_of_adapter(config), *_of_trainer(config), *_of_optimizer(config)]
        clashes += [*_of_sweep(config), *_of_logger(config), *_of_measurements(config)]
        clashes += _of_strategy(config, devices)
        if isinstance(config.strategy, FsdpConfig):
            clashes += _of_fsdp(config, config.strategy, devices)
        if isinstance(config.strategy, LocalSgdConfig):
            clashes += _of_local_sgd(config, config.strategy)
        if isinstance(config.strategy, ZeroConfig):
            clashes += _of_deepspeed(config, config.strategy, devices)
            clashes += _of_deepspeed_keys(config.strategy.config)
    problems = [
        f"{clash.why}; type {clash.instead}"
        for clash in clashes
        if on_this_machine or not clash.is_of_machine
    ]
    if is_training(config):
        trainer = config.trainer
        if on_this_machine:
            problems += check_devices(trainer, devices.num_gpus if devices.on_gpu else None)
        # A preview may be for a machine whose GPUs nobody has counted.
        if on_this_machine or isinstance(trainer.devices, int):
            problems += check_layout(config.strategy, trainer, devices.ranks_per_node)
        problems += check_global_batch(trainer, devices.num_ranks, devices.num_data_ranks)
    return problems


def _of_device(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Clash]:
    trainer, backend = config.trainer, config.attention.backend
    if trainer.accelerator == "gpu" and devices.num_gpus == 0:
        yield Clash(
            "trainer.accelerator=gpu, but no GPU was found",
            "trainer.accelerator=cpu (CUDA_VISIBLE_DEVICES hides GPUs, too)",
            is_of_machine=True,
        )
    if trainer.precision == "fp16" and not devices.on_gpu:
        yield Clash(
            f"trainer.precision=fp16 needs a GPU, and this run is on {devices}",
            "trainer.precision=fp32 or bf16",
            is_of_machine=True,
        )
    if backend in GPU_ONLY and not devices.on_gpu:
        needs = (
            "computes gradients on NVIDIA GPUs only" if backend == "flex" else "needs an NVIDIA GPU"
        )
        yield Clash(
            f"attention={backend} {needs}, and this run is on {devices}: attention without a "
            "document mask would let the documents of a pack see each other",
            "attention=sdpa (computed document by document there, which keeps them apart)",
            is_of_machine=True,
        )
    if backend in HALF_PRECISION_ONLY and trainer.precision == "fp32":
        yield Clash(
            f"attention={backend} computes in half precision only, but trainer.precision=fp32",
            "trainer.precision=bf16, or attention=sdpa",
        )
    module, package = BACKEND_PACKAGES.get(backend, (None, None))
    if module is not None and devices.on_gpu and not is_installed(module):
        yield Clash(
            f"attention={backend} needs the package {package}, which is not installed",
            "attention=varlen, which comes with PyTorch, or install the package",
            is_of_machine=True,
        )


def is_installed(module: str) -> bool:
    """Return whether a package is installed, without importing it."""
    spec = importlib.util.find_spec(module)
    # flash-attn-4 alone leaves a folder flash_attn that is no package.
    return spec is not None and spec.origin is not None


def _of_logger(config: TrainConfig) -> Iterator[Clash]:
    chosen = [config.logger.name, *config.logger.also]
    for tracker in ("wandb", "mlflow"):
        if tracker in chosen and not is_installed(tracker):
            yield Clash(
                f"logger={tracker} needs the package {tracker}, which is not installed",
                f"pip install -e '.[{tracker}]', or logger=tensorboard",
                is_of_machine=True,
            )


def _of_base(config: TrainConfig | TunedConfig) -> Iterator[Clash]:
    model = config.model
    from_hub = [p for p in (model.path, model.tokenizer_path) if p and not Path(p).is_dir()]
    if model.trust_remote_code and from_hub and not COMMIT.fullmatch(model.revision or ""):
        yield Clash(
            "model.trust_remote_code=true runs whatever is on the hub that day",
            "model.revision=COMMIT beside it (40 hex digits; branches and tags move)",
        )
    if model.trust_remote_code and len(set(from_hub)) > 1:
        yield Clash(
            f"model.trust_remote_code=true runs what is in {model.tokenizer_path} that day: "
            "model.revision is a commit of model.path",
            "model.tokenizer_path=FOLDER, with a copy of it",
        )
    if config.quantization.method != "none" and model.from_scratch:
        yield Clash(
            f"quantization={config.quantization.method} freezes the weights in few bits, but "
            "model.from_scratch=true starts from random ones, which have to be trained",
            "quantization=none",
        )


def _of_data(config: TrainConfig | EvaluateConfig) -> Iterator[Clash]:
    data = config.data
    if config.evaluation.exact_match and not data.val_set_size and not data.test_datasets:
        yield Clash(
            "evaluation.exact_match=true, but there are no rows to evaluate",
            "data.val_set_size=0.05, or data.test_datasets=[{path: FILE}]",
        )
    names = {*dataset_names(data.datasets), *dataset_names(data.test_datasets)}
    for name in [task.name for task in config.evaluation.tasks if task.name in names]:
        yield Clash(
            f"evaluation.tasks: {name} is the name of a data set, too, and figures go by name",
            "another name: there, and form: beside it where it is a known task",
        )
    if data.streaming and is_training(config) and config.trainer.max_steps is None:
        yield Clash(
            "data.streaming=true without trainer.max_steps: a stream has no end",
            "trainer.max_steps=N, or data.streaming=false",
        )
    if data.streaming and config.packing.window is not None:
        yield Clash(
            f"packing.window={config.packing.window} has no effect with data.streaming=true, which "
            "packs windows of its own",
            "packing.window=null",
        )


def _of_measurements(config: TrainConfig) -> Iterator[Clash]:
    """What is asked of a model that trains."""
    asked, data, strategy = config.evaluation, config.data, config.strategy
    if config.trainer.early_stopping_patience is not None and not data.val_set_size:
        yield Clash(
            f"trainer.early_stopping_patience={config.trainer.early_stopping_patience} goes by "
            f"{config.trainer.checkpoint.monitor}, but there are no validation rows",
            "data.val_set_size=0.05",
        )
    yield from _of_monitor(config)
    shards_weights = getattr(strategy, "stage", 3) == 3 and is_sharding(strategy)
    if asked.harness and shards_weights:
        yield Clash(
            f"evaluation.harness=[{', '.join(asked.harness)}] asks a whole model, but "
            f"strategy={strategy.name} leaves each rank a part of the weights",
            "evaluation.harness=[], and python -m app.evaluate run=FOLDER with them afterwards",
        )
    if asked.every_steps is None:
        return
    key = f"evaluation.every_steps={asked.every_steps}"
    if not asked.tasks and not asked.answers_prompts:
        yield Clash(
            f"{key}, but nothing is asked{' but the harness, at the end' * bool(asked.harness)}",
            "evaluation.tasks=[{name: mmlu}] or evaluation.exact_match=true beside it",
        )
    if not data.val_set_size:
        yield Clash(
            f"{key} measures at validations, but there are no validation rows",
            "data.val_set_size=0.05",
        )
    if config.trainer.compile:
        yield Clash(
            f"{key} generates with layers that trainer.compile=true has compiled for one size of "
            "batch",
            "trainer.compile=false, or evaluation.every_steps=null",
        )


def _of_monitor(config: TrainConfig) -> Iterator[Clash]:
    """What the best checkpoint and an early stop go by."""
    asked, data, monitor = config.evaluation, config.data, config.trainer.checkpoint.monitor
    losses = ["val/loss", *(f"val/loss/{name}" for name in dataset_names(data.datasets))]
    if monitor in losses:
        if data.val_set_size == 0 and monitor != "val/loss":
            yield Clash(
                f"trainer.checkpoint.monitor={monitor} is of validation rows, and there are none",
                "data.val_set_size=0.05",
            )
        return
    tasks = [task.name for task in asked.tasks]
    if asked.answers_prompts:
        tasks += {*dataset_names(data.datasets), *dataset_names(data.test_datasets)}
    _, metric, name = [*monitor.split("/", 2), "", ""][:3]
    key = f"trainer.checkpoint.monitor={monitor}"
    if not any(f"{name}/".startswith(f"{one}/") for one in tasks):  # a task, or a group of one
        known = [*losses, *(f"val/{metric}/{one}" for one in sorted(tasks))]
        yield Clash(
            f"{key} is not measured{nearest(monitor, known)}; there are {', '.join(known[:12])}",
            "one of them; evaluation.every_steps=N measures evaluation.tasks, too",
        )
    elif asked.every_steps is None:
        yield Clash(
            f"{key} is measured at the end alone",
            "evaluation.every_steps=N measures it while the model trains",
        )


def _of_adapter(config: TrainConfig) -> Iterator[Clash]:
    adapter, model, method = config.adapter, config.model, config.quantization.method
    if method != "none" and saves_whole_model(adapter):
        yield Clash(
            f"quantization={method} freezes the weights in few bits, but adapter={adapter.name} "
            "trains them",
            "quantization=none, or adapter=lora",
        )
    if model.router_aux_loss and adapter.name != "full":
        yield Clash(
            f"model.router_aux_loss={model.router_aux_loss:g} balances routers that train, and "
            f"adapter={adapter.name} leaves them frozen",
            "model.router_aux_loss=null, or adapter=full",
        )
    if isinstance(adapter, Ia3Config) and model.added_tokens:
        yield Clash(
            f"model.added_tokens={model.added_tokens} need rows that train, and adapter=ia3 trains "
            "vectors only",
            "adapter=lora or adapter=full",
        )
    if model.from_scratch and adapter.name != "full":
        yield Clash(
            f"model.from_scratch=true with adapter={adapter.name}: small matrices beside random "
            "frozen weights learn nothing",
            "adapter=full",
        )
    if not isinstance(adapter, LoraConfig):
        return
    if adapter.lora_plus_weight_decay is not None and adapter.lora_plus_ratio is None:
        yield Clash(
            "adapter.lora_plus_weight_decay has no effect without adapter.lora_plus_ratio",
            "adapter.lora_plus_ratio=16 beside it, or optimizer.weight_decay",
        )
    if adapter.init not in CHANGE_BASE:
        return
    start = f"adapter.init={adapter.init} takes its start out of the base's weights, and "
    strategy = config.strategy
    if adapter.use_dora:
        yield Clash(
            f"{start}adapter.use_dora=true learns the magnitudes of whole weights",
            "adapter.init=default, or adapter.use_dora=false",
        )
    if isinstance(strategy, FsdpConfig) or (
        isinstance(strategy, ZeroConfig) and strategy.stage == 3
    ):
        yield Clash(
            f"{start}is saved for the base as it was, which is read again and compared: strategy="
            f"{strategy.name} leaves no rank room for that",
            "adapter.init=default, or strategy=ddp",
        )
    if method != "none":
        yield Clash(
            f"{start}weights of quantization={method} cannot hold what is left",
            "adapter.init=default, or quantization=none",
        )


def _of_trainer(config: TrainConfig) -> Iterator[Clash]:
    trainer, schedule = config.trainer, config.schedule
    if trainer.compile and config.recompute.mode == "selective":
        yield Clash(
            "recompute=selective keeps single operations of a layer, and trainer.compile=true "
            "fuses them into others",
            "recompute=full, or trainer.compile=false",
        )
    if trainer.global_batch_size is not None and _is_set(trainer, "gradient_accumulation_steps"):
        yield Clash(
            f"trainer.global_batch_size={trainer.global_batch_size} and trainer."
            f"gradient_accumulation_steps={trainer.gradient_accumulation_steps} decide the same "
            "thing",
            "one of the two",
        )
    warmup, steps = schedule.warmup_steps, trainer.max_steps
    if warmup is not None and steps is not None and warmup >= steps > 0:
        yield Clash(
            f"schedule.warmup_steps={warmup} leaves nothing of trainer.max_steps={steps}",
            f"schedule.warmup_steps={max(steps // 10, 0)}",
        )
    for name, shape in (("decay_ratio", "wsd"), ("start_lr_ratio", "one_cycle")):
        if schedule.shape != shape and _is_set(schedule, name):
            yield Clash(
                f"schedule.{name} has no effect with schedule={schedule.shape}",
                f"schedule={shape} beside it",
            )
    warmup_ratio, decay_ratio = schedule.warmup_ratio, schedule.decay_ratio
    if schedule.shape == "wsd" and warmup is None and warmup_ratio + decay_ratio > 1:
        yield Clash(
            f"schedule.warmup_ratio={warmup_ratio:g} and schedule.decay_ratio={decay_ratio:g} are "
            "more than all steps",
            f"schedule.decay_ratio={1 - warmup_ratio:g}",
        )


def _of_sweep(config: TrainConfig) -> Iterator[Clash]:
    sweep = config.sweep
    if sweep.search == "grid" and sweep.trials is not None:
        yield Clash(
            f"sweep.trials={sweep.trials}, and a grid runs every combination",
            "sweep.search=optuna, or leave it out",
        )
    if sweep.search == "grid" and sweep.prune != "none":
        yield Clash(
            f"sweep.prune={sweep.prune}, and a grid shows every trial whole",
            "sweep.search=optuna, or leave it out",
        )
    launcher = config.launcher
    if launcher.name == "slurm" and config.trainer.num_nodes > 1:
        yield Clash(
            f"trainer.num_nodes={config.trainer.num_nodes}, and launcher=slurm runs each trial on "
            "one node",
            "trainer.num_nodes=1",
        )
    typed = [name for name in SLURM_ONLY if getattr(launcher, name) is not None]
    if launcher.name == "local" and typed:
        yield Clash(
            f"launcher.{typed[0]}={getattr(launcher, typed[0])} means nothing to launcher=local",
            "launcher=slurm, or leave it out",
        )


def _of_optimizer(config: TrainConfig) -> Iterator[Clash]:
    trainer, optimizer, schedule = config.trainer, config.optimizer, config.schedule
    adapter = config.adapter
    if optimizer.name == "muon":
        if isinstance(adapter, LoraConfig) and adapter.lora_plus_ratio is not None:
            yield Clash(
                f"adapter.lora_plus_ratio={adapter.lora_plus_ratio:g} sets the learning rate of "
                "every B, which optimizer=muon sets by the matrix's own size",
                "optimizer=adamw, or adapter.lora_plus_ratio=null",
            )
        if isinstance(adapter, Ia3Config):
            yield Clash(
                "optimizer=muon updates matrices, and adapter=ia3 trains vectors only",
                "optimizer=adamw",
            )
    if optimizer.name == "schedule_free":
        if schedule.shape != "constant":
            yield Clash(
                "optimizer=schedule_free averages its weights instead of lowering the learning "
                f"rate, which schedule={schedule.shape} lowers",
                "schedule=constant (its warm-up stays), or optimizer=adamw",
            )
        if trainer.precision == "bf16-pure":
            yield Clash(
                "optimizer=schedule_free adds to an average of all steps, and trainer.precision="
                "bf16-pure has too few digits for the share of one step among hundreds",
                "trainer.precision=bf16, or optimizer=adamw",
            )
        if cast("ScheduleFreeConfig", optimizer).beta1 == 0:
            yield Clash(
                "optimizer.beta1=0 leaves optimizer=schedule_free no share of the averaged weights",
                "optimizer.beta1=0.9",
            )
    if wrong := [each for each in optimizer.lr_by_pattern if not 0 < each.ratio <= 1000]:
        yield Clash(
            "optimizer.lr_by_pattern: a ratio is above 0 and at most 1000, and not "
            + ", ".join(f"{each.ratio:g} ({each.pattern})" for each in wrong),
            "ratio: 0.1 (adapter=freeze keeps weights as they are)",
        )


def _is_set(part: Any, name: str) -> bool:
    """Return whether a setting differs from its default."""
    default = next(field.default for field in dataclasses.fields(part) if field.name == name)
    return bool(getattr(part, name) != default)


def _of_strategy(config: TrainConfig, devices: Devices) -> Iterator[Clash]:
    strategy, trainer = config.strategy, config.trainer
    optimizer, name = config.optimizer.name, f"strategy={config.strategy.name}"
    if strategy.name == "single" and devices.num_ranks > 1:
        yield Clash(
            f"strategy=single runs on one device, but {devices.num_ranks} ranks were requested",
            "strategy=ddp, or trainer.devices=1 trainer.num_nodes=1",
        )
    if isinstance(strategy, DdpConfig):
        for key, compression in (("topk_share", "topk"), ("powersgd_rank", "powersgd")):
            if _is_set(strategy, key) and strategy.compression != compression:
                yield Clash(
                    f"strategy.{key} has no effect with strategy.compression="
                    f"{strategy.compression}",
                    f"strategy.compression={compression}, or leave it out",
                )
    if not is_sharding(strategy):
        return
    if trainer.precision == "fp16":
        yield Clash(
            f"{name} and trainer.precision=fp16: each rank would decide by its own shard of the "
            "gradients whether a scaled step overflowed",
            "trainer.precision=bf16, or strategy=ddp",
        )
    if trainer.compile:
        yield Clash(
            f"{name} and trainer.compile=true are not tried together yet",
            "trainer.compile=false, or strategy=ddp",
        )
    if trainer.checkpoint.asynchronous:
        yield Clash(
            f"trainer.checkpoint.async=true copies what one rank holds, and {name} shards it over "
            "all of them, which gather and write together",
            "trainer.checkpoint.async=false, or strategy=ddp",
        )
    elementwise, per_node = ["adamw"], devices.ranks_per_node
    if isinstance(strategy, FsdpConfig) and tensor_parallel_size(strategy, per_node) == 1:
        elementwise.append("schedule_free")
    if optimizer not in elementwise:
        yield Clash(
            f"optimizer={optimizer} does not step shards of weights, which are what {name} leaves "
            "on a rank",
            "optimizer=adamw, or strategy=ddp",
        )


def _of_fsdp(config: TrainConfig, strategy: FsdpConfig, devices: Devices) -> Iterator[Clash]:
    method, name = config.quantization.method, f"strategy={strategy.name}"
    use_dora = isinstance(config.adapter, LoraConfig) and config.adapter.use_dora
    splits_matrices = tensor_parallel_size(strategy, devices.ranks_per_node) > 1
    if strategy.offload_parameters and not devices.on_gpu:
        yield Clash(
            "strategy.offload_parameters=true keeps weights in host memory that is pinned for a "
            f"GPU, and this run is on {devices}, where they are in host memory anyway",
            "strategy=fsdp",
            is_of_machine=True,
        )
    if strategy.offload_parameters and splits_matrices:
        yield Clash(
            f"{name} splits matrices, whose ranks add up gradients on their devices, and "
            "strategy.offload_parameters=true keeps those in host memory",
            "strategy=fsdp_offload, or strategy.offload_parameters=false",
        )
    if method == "int8":
        yield Clash(
            f"{name} shards weights of one floating type, and those of quantization=int8 are whole "
            "numbers with scales beside them",
            "quantization=nf4, or strategy=zero2 or ddp",
        )
    if method == "nf4" and splits_matrices:
        yield Clash(
            f"{name} splits matrices by their rows and columns, and quantization=nf4 packs weights "
            "in blocks that cross both",
            "strategy=fsdp, or quantization=none",
        )
    if use_dora and splits_matrices:
        yield Clash(
            f"adapter.use_dora=true measures whole columns of a matrix, and {name} leaves a rank "
            "parts of them",
            "adapter.use_dora=false, or strategy=fsdp",
        )
    if use_dora and method == "nf4":
        yield Clash(
            f"adapter.use_dora=true measures the base's columns while it is built, and {name} "
            "builds it without its 4-bit weights on all ranks but one",
            "adapter.use_dora=false, or strategy=ddp",
        )


def _of_local_sgd(config: TrainConfig, strategy: LocalSgdConfig) -> Iterator[Clash]:
    name, nodes = f"strategy={strategy.name}", config.trainer.num_nodes
    if (strategy.replicas or nodes) == 1:
        only = f"trainer.num_nodes={nodes}" if strategy.replicas is None else "strategy.replicas=1"
        yield Clash(
            f"{name} averages the weights of nodes that train apart, and {only} leaves nothing to "
            "average",
            "strategy=fsdp, or strategy.replicas=2 for groups of ranks on one node",
        )
    if strategy.tensor_parallel_size != 1 or not strategy.shards_data_parallel:
        yield Clash(
            f"{name} shards weights over the ranks of a node and splits no matrices, which "
            "strategy.tensor_parallel_size and strategy.shards_data_parallel ask for",
            "strategy.tensor_parallel_size=1 strategy.shards_data_parallel=true, or "
            "strategy=fsdp_tp",
        )
    if strategy.offload_parameters:
        yield Clash(
            f"{name} averages weights on the devices, and strategy.offload_parameters=true keeps "
            "them in host memory",
            "strategy.offload_parameters=false, or strategy=fsdp_offload",
        )
    max_steps, first = config.trainer.max_steps, strategy.synchronous_steps
    if max_steps is not None and max_steps <= first:
        yield Clash(
            f"{name} lets nodes train apart after strategy.synchronous_steps={first}, and "
            f"trainer.max_steps={max_steps} ends the run before",
            f"strategy.synchronous_steps={max_steps // 4}, or strategy=fsdp_hybrid",
        )
    if config.optimizer.name == "schedule_free":
        yield Clash(
            f"optimizer=schedule_free keeps an average of its own weights, which {name} does not "
            "share between nodes",
            "optimizer=adamw, or strategy=fsdp_hybrid",
        )


def _of_deepspeed(config: TrainConfig, strategy: ZeroConfig, devices: Devices) -> Iterator[Clash]:
    method = config.quantization.method
    name, stage = f"strategy={strategy.name}", strategy.stage
    if not is_installed("deepspeed"):
        nearest = NEAREST_IN_PYTORCH[strategy.name]
        if nearest == "fsdp_offload" and not devices.on_gpu:
            nearest = "fsdp"
        yield Clash(
            f"{name} needs the package deepspeed, which is not installed",
            f"strategy={nearest}, or DS_BUILD_OPS=0 pip install deepspeed (its operators are built "
            "when they are first used)",
            is_of_machine=True,
        )
    if stage < 3 and strategy.offload_parameters != "none":
        yield Clash(
            f"strategy.offload_parameters={strategy.offload_parameters} moves weights that are "
            f"sharded over the ranks, and strategy.stage={stage} leaves all of them on every rank",
            "strategy.stage=3, or strategy.offload_parameters=none",
        )
    if strategy.name == "zero3_nvme":
        yield Clash(
            "strategy=zero3_nvme would keep weights and optimizer states on a disk, which is not "
            "implemented yet",
            "strategy=zero3_offload, which keeps them in host memory",
        )
    is_quantized = strategy.quantized_weights or strategy.quantized_gradients
    if stage < 3 and (strategy.partition_within_node or is_quantized):
        yield Clash(
            "partition_within_node, quantized_weights and quantized_gradients say how sharded "
            f"weights travel, and strategy.stage={stage} shards none",
            "strategy.stage=3, or strategy=zeropp",
        )
    if is_quantized and not devices.on_gpu:
        yield Clash(
            f"{name} quantizes what travels by operators that DeepSpeed has for GPUs only, and "
            f"this run is on {devices}",
            "strategy=zero3_hpz, which leaves the quantizing out",
            is_of_machine=True,
        )
    if strategy.offload_optimizer != "none" and config.trainer.precision == "bf16-pure":
        yield Clash(
            f"{name} and trainer.precision=bf16-pure: the optimizer that steps weights in host "
            "memory keeps them in fp32",
            "trainer.precision=bf16, or strategy.offload_optimizer=none",
        )
    if stage == 3 and method != "none":
        yield Clash(
            f"{name} shards weights as plain numbers while they are loaded, and those of "
            f"quantization={method} are packed and have scales beside them",
            "strategy=fsdp (with nf4), strategy=zero2 (each rank holds the whole quantized base), "
            "or quantization=none",
        )


def _of_deepspeed_keys(config: Mapping[str, Any]) -> Iterator[Clash]:
    """Yield the keys of `strategy.config` that another setting decides, or that DeepSpeed lacks."""
    if decided := keys_decided_elsewhere(config):
        settings = ", ".join(dict.fromkeys(decided.values()))
        yield Clash(
            "strategy.config: "
            + ", ".join(f"{key} is {setting} here" for key, setting in decided.items()),
            f"{settings} instead, and leave it out of strategy.config",
        )
    if unknown := unknown_keys(config):
        yield Clash(
            "strategy.config: DeepSpeed has no key " + ", no key ".join(unknown),
            "a key that it has, or leave it out of strategy.config",
        )
