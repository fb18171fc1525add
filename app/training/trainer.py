"""Settings of trainer and loggers, what they resolve to on this machine, and their builders."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.preflight import check_devices, check_global_batch, check_layout, count_gpus
from app.process.gpus import ON_CPU
from app.process.launch import read_launch
from app.strategy.settings import (
    StrategyConfig,
    context_parallel_size,
    describe_split,
    pipeline_parallel_size,
    ranks_per_row,
)
from common.errors import DeviceError, UserError
from common.facts import setting

if TYPE_CHECKING:
    import torch
    from lightning import Callback, Trainer
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

    from app.training.loggers import RunLogger

PRECISIONS = ("auto", "fp32", "bf16", "bf16-pure", "fp16", "fp8")
ACCELERATORS = ("auto", "cpu", "gpu")
_VALIDATIONS_PER_RUN = 10
DEFAULT_MONITOR = "val/loss"
_USUAL_ACCUMULATION = 8


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int | None = setting(
        None, ge=1, shown=("train",), aliases=("save_steps", "save_every_steps")
    )
    """optimizer steps between checkpoints; null = ten per run, one per epoch"""
    keep_last: int = setting(2, ge=1, aliases=("save_total_limit",))
    """number of newest checkpoints to keep; each takes disk space"""
    keep_best: int = setting(0, ge=0)
    """number of best checkpoints, ranked by `monitor`, to keep in addition; each is saved at its
    validation, whatever every_steps says"""
    monitor: str = setting(
        DEFAULT_MONITOR, resume="fixed", aliases=("metric_for_best_model",), grants="nothing"
    )
    """metric that `keep_best` ranks by: val/loss, val/loss/DATA_SET, a figure of the objective such
    as val/accuracy, or with evaluation.every_steps a metric of a task or data set, such as
    val/accuracy/mmlu. Lower is better for losses, perplexities, bits per byte, KL, cross-entropies
    and absolute errors, higher for all others"""
    asynchronous: bool = setting(False, typed="async")
    """write checkpoints in the background while training continues; needs host memory for one more
    copy of the trainable parameters"""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    micro_batch_size: int | str = setting(
        "auto",
        choices=("auto",),
        ge=1,
        le=1_000_000,
        resume="content",
        shown=("train", "preview"),
        aliases=("batch_size", "per_device_train_batch_size"),
    )
    """packs (rows when not packing) per pass of a rank; auto = as many as fit
    on a GPU, 1 on a CPU or for streamed data"""
    gradient_accumulation_steps: int | str = setting(
        "auto",
        choices=("auto",),
        ge=1,
        le=1_000_000,
        resume="content",
        shown=("train", "preview"),
        aliases=("accumulate_grad_batches",),
    )
    """micro-batches per optimizer step of a rank, fewer if larger ones fit; auto = 8, fewer for
    little data"""
    global_batch_size: int | None = setting(
        None,
        ge=1,
        le=1_000_000,
        resume="content",
        shown=("train", "preview"),
        instead_of="gradient_accumulation_steps",
    )
    """packs per optimizer step over all ranks; sets gradient_accumulation_steps"""
    num_epochs: int = setting(
        1,
        ge=1,
        resume="epochs",
        shown=("train",),
        aliases=("epochs", "max_epochs", "num_train_epochs"),
    )
    """passes over the training data"""
    max_steps: int | None = setting(None, ge=1, resume="epochs", shown=("train",))
    """optimizer steps of the run; overrides num_epochs, and the data repeats as often as needed"""
    precision: str = setting(
        "auto",
        choices=PRECISIONS,
        resume="content",
        shown=("train",),
        aliases=("bf16=bf16", "fp16=fp16"),
        option_aliases={
            **dict.fromkeys(("32", "32-true", "float32"), "fp32"),
            **dict.fromkeys(("16", "16-mixed", "16-true", "float16"), "fp16"),
            **dict.fromkeys(("bf16-mixed", "bfloat16"), "bf16"),
            "bf16-true": "bf16-pure",
        },
    )
    """auto, fp32, bf16 (autocast, fp32 master weights), bf16-pure (all bf16), fp16 (scaled
    loss), fp8 (bf16 with FP8 products, of adapter=full)"""
    max_grad_norm: float | None = setting(
        1.0, gt=0, note="1.0 is usual, null = off", resume="lr", aliases=("gradient_clip_val",)
    )
    """maximum global gradient norm; larger gradients are scaled down to it; null = no clipping"""
    max_skipped_steps: int = setting(0, ge=0, resume="free")
    """optimizer steps that a run may skip, each with a warning, because their loss or gradient norm
    is not finite; one more stops the run. A skipped step never changes a weight. The check does not
    synchronize the device with adamw; other optimizers read one number per step"""
    compile: bool = setting(False, resume="rounding", aliases=("torch_compile=true",))
    """compile the layers with torch.compile, which takes a minute or more at the start: for GPUs
    without liger-kernel (with it, LoRA was 9 % slower on an H100); no gain on a CPU"""
    kernels: str = setting("auto", choices=("auto", "torch"), resume="rounding")
    """auto = fused kernels, each checked against the model's own layers at the start (faster, less
    memory): on a GPU Liger's for norms and gates, ours for rope, adapters and loss, FlashAttention
    4 for attention=varlen, as far as installed; on a CPU ours for norms. With `compile` the
    compiler fuses layers instead. torch = the model's own layers"""
    accelerator: str = setting("auto", choices=ACCELERATORS, resume="rounding")
    """device to train on: auto (a GPU if available), cpu or gpu"""
    devices: int | str = setting(
        "auto",
        choices=("auto",),
        ge=1,
        resume="content",
        shown=("train", "preview"),
        aliases=("num_gpus", "nproc_per_node"),
    )
    """ranks on this machine; auto = one per GPU, 1 on a CPU"""
    num_nodes: int | str = setting(1, choices=("auto",), ge=1, resume="content")
    """machines of the run; auto = those on which torchrun (--nnodes=MIN:MAX), srun or Ray has
    started ranks, 1 without them"""
    validate_every_steps: int | None = setting(
        None, ge=1, resume="free", shown=("train",), aliases=("val_check_interval",)
    )
    """optimizer steps between validations; null = ten validations per run"""
    early_stopping_patience: int | None = setting(None, ge=1, resume="free", aliases=("patience",))
    """consecutive measurements of `checkpoint.monitor` without improvement after which the run
    ends; null = no early stopping"""
    log_every_steps: int = setting(10, ge=1, resume="free")
    """optimizer steps between writes of the metrics; every step still has its own row"""
    checkpoint: CheckpointConfig = setting(default_factory=CheckpointConfig, resume="free")
    """when to save checkpoints, and which ones to keep"""

    @property
    def nodes(self) -> int:
        """The machines of the run; `auto` is resolved by how this process was started."""
        return read_launch().num_nodes if isinstance(self.num_nodes, str) else self.num_nodes

    @property
    def least_micro_batch(self) -> int:
        """The micro-batch size; 1 if it is `auto` and not chosen yet."""
        size = self.micro_batch_size
        return 1 if isinstance(size, str) else size

    def accumulation(self, num_data_ranks: int) -> int:
        """Return the micro-batches per step of a rank, before small data lowers those of `auto`."""
        if self.global_batch_size is not None:
            return self.global_batch_size // (self.least_micro_batch * num_data_ranks)
        steps = self.gradient_accumulation_steps
        return _USUAL_ACCUMULATION if isinstance(steps, str) else steps

    @property
    def has_auto_batch(self) -> bool:
        """Whether neither the accumulation nor the global batch was given."""
        return self.gradient_accumulation_steps == "auto" and self.global_batch_size is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Devices, ranks, precision and accumulation of a run: every `auto` resolved."""

    accelerator: str
    """gpu or cpu"""
    precision: str
    devices: int = 1
    num_ranks: int = 1
    num_data_ranks: int = 1
    """ranks that see different data; those that split matrices or rows count as one"""
    accumulation: int = 1
    """micro-batches that a rank accumulates per optimizer step"""
    micro_batch_size: int = 1
    """packs per micro-batch"""
    context_size: int = 1
    """ranks that hold slices of the same rows"""
    split: str = ""
    """how ranks that get the same rows share the work"""
    probes_micro_batch: bool = False
    """whether to probe the micro-batch size before the first step, halving it until it fits"""

    @property
    def packs_of_rank(self) -> int:
        return self.micro_batch_size * self.accumulation

    def with_micro_batch(self, size: int) -> Environment:
        """Return a copy with micro-batches of `size` packs; the packs per step stay the same."""
        return replace(self, micro_batch_size=size, accumulation=self.packs_of_rank // size)

    def under(self, strategy: StrategyConfig) -> Environment:
        """Return a copy for `strategy`, with as many packs per step of all ranks as before."""
        groups = self.num_ranks // ranks_per_row(strategy, self.devices)
        return replace(
            self,
            num_data_ranks=groups,
            accumulation=self.accumulation * self.num_data_ranks // groups,
            context_size=context_parallel_size(strategy),
            split=describe_split(strategy, self.devices),
        )

    @property
    def rank_device(self) -> torch.device:
        """The device of this rank, where a verb without a strategy puts a model."""
        import torch

        if self.accelerator == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def row_multiple(self) -> int:
        """The number of tokens that the length of a packed row is rounded up to a multiple of."""
        # On a CPU every new shape costs a new kernel, which takes as long as a layer. GPU matrix
        # products use tiles of 128 rows, and the caching allocator reuses blocks of few sizes.
        return 64 if self.accelerator == "cpu" else 128

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a training step."""
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        device = "cuda" if self.accelerator == "gpu" else "cpu"
        return torch.autocast(device, dtype=dtype, enabled=dtype is not None)

    def __str__(self) -> str:
        split = f" ({self.split})" if self.split else ""
        return f"{self.num_ranks} x {self.accelerator}{split}, precision {self.precision}"


def adapts_to_small_data(trainer: TrainerConfig, strategy: StrategyConfig) -> bool:
    """Return whether small data lowers the accumulation of a new run.

    Not if its steps were given, or stages of a pipeline need micro-batches to be busy.
    """
    is_auto = trainer.has_auto_batch and trainer.max_steps is None
    return is_auto and pipeline_parallel_size(strategy) == 1


def resolve_environment(
    config: TrainerConfig, strategy: StrategyConfig | None = None
) -> Environment:
    """Resolve every `auto` on this machine; UserError if it lacks the requested devices."""
    import torch

    strategy = strategy or StrategyConfig()
    accelerator = resolve_accelerator(config.accelerator)
    num_gpus = torch.cuda.device_count() if accelerator == "gpu" else None
    devices = (num_gpus or 1) if config.devices == "auto" else int(config.devices)
    num_ranks = devices * config.nodes
    problems = check_devices(config, num_gpus) + check_layout(strategy, config, devices)
    if problems:
        raise UserError(problems)
    num_data_ranks = num_ranks // ranks_per_row(strategy, devices)
    if problems := check_global_batch(config, num_ranks, num_data_ranks):
        raise UserError(problems)
    return Environment(
        accelerator=accelerator,
        devices=devices,
        num_ranks=num_ranks,
        num_data_ranks=num_data_ranks,
        precision=resolve_precision(config.precision, accelerator),
        accumulation=config.accumulation(num_data_ranks),
        micro_batch_size=config.least_micro_batch,
        context_size=context_parallel_size(strategy),
        split=describe_split(strategy, devices),
    )


def resolve_single_device(accelerator: str, precision: str) -> Environment:
    """Resolve the environment of an evaluation: one process, no optimizer steps."""
    accelerator = resolve_accelerator(accelerator)
    precision = resolve_precision(precision, accelerator)
    return Environment(accelerator=accelerator, precision=precision)


def resolve_accelerator(accelerator: str) -> str:
    """Return gpu or cpu, with `auto` resolved to what is available.

    DeviceError if there is a GPU that PyTorch cannot use: falling back to the CPU must be explicit.
    """
    import torch

    if accelerator != "auto":
        return accelerator
    if torch.cuda.is_available():
        return "gpu"
    if not count_gpus():
        return "cpu"
    try:
        torch.cuda.init()
        reason = "it finds no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    raise DeviceError([f"PyTorch {torch.__version__} cannot use a GPU here: {reason}; {ON_CPU}"])


def resolve_precision(precision: str, accelerator: str) -> str:
    """Return the precision with `auto` resolved: bf16 on a GPU with native support, else fp32.

    That of fp8 is bf16: only the products of trained layers are in FP8. UserError for bf16 on a GPU
    that would only emulate it.
    """
    import torch

    has_bf16 = accelerator == "gpu" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        return "bf16" if has_bf16 else "fp32"
    if precision.startswith(("bf16", "fp8")) and accelerator == "gpu" and not has_bf16:
        raise UserError(
            f"trainer.precision={precision}: {torch.cuda.get_device_name()} has no native bf16 "
            "(it needs compute capability 8.0 or higher); type trainer.precision=fp16 or fp32"
        )
    return "bf16" if precision == "fp8" else precision


def validation_interval(config: TrainerConfig, total_steps: int) -> int:
    """Return the optimizer steps between validations; the last step is always validated."""
    every = config.validate_every_steps or math.ceil(total_steps / _VALIDATIONS_PER_RUN)
    return min(every, total_steps)


def build_lightning_trainer(
    config: TrainerConfig,
    *,
    env: Environment,
    strategy: Strategy,
    total_steps: int,
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback],
    folder: Path,
    checkpoints: CheckpointIO | None = None,
) -> Trainer:
    """Build the trainer of one run of `total_steps` optimizer steps.

    For Lightning they are one epoch, since only the data plan knows where an epoch ends, of as many
    batches: the strategy runs the micro-batches of a step.
    """
    import lightning as L

    from app.training.callbacks import FetchProfiler

    # Importing Lightning sets its log levels; the verb logs the devices itself.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return L.Trainer(
        accelerator=env.accelerator,
        devices=env.devices,
        num_nodes=config.nodes,
        strategy=strategy,
        # The model decides the dtypes of its weights; this is the autocast around a step.
        precision={"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(env.precision, "32-true"),
        max_epochs=1,
        max_steps=total_steps,
        gradient_clip_val=config.max_grad_norm,
        num_sanity_val_steps=-1,  # the whole validation set: step 0 of the metrics
        val_check_interval=validation_interval(config, total_steps),
        check_val_every_n_epoch=None,  # count steps from the start of the run, also when resumed
        plugins=[checkpoints] if checkpoints is not None else None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the plan already gives each rank its packs
        # Weights that are gathered in inference mode cannot train afterwards.
        inference_mode=not strategy.shards_weights,
        profiler=FetchProfiler(),
        logger=list(loggers),
        callbacks=list(callbacks),
        default_root_dir=folder,
    )


LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
_TRACKERS = ("wandb", "mlflow")


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    name: str = setting("tensorboard", choices=LOGGERS)
    """logger in addition to metrics.csv, which is always written: tensorboard (event files), wandb
    or mlflow (a tracker, offline unless WANDB_API_KEY or MLFLOW_TRACKING_URI is set), or csv for
    none; for several type a list: logger=[tensorboard,wandb]"""
    also: list[str] = setting(default_factory=list, choices=LOGGERS)
    """further loggers, next to the one of `name`"""
    details: bool = False
    """also log the shares and tokens of each data set and the expert load, which metrics.csv
    always has"""


def build_loggers(
    config: LoggerConfig, folder: Path, dataset_names: list[str], *, last_step: int | None = None
) -> list[RunLogger]:
    """Build the loggers of a run in `folder` that resumes after `last_step`, or starts if None.

    Existing files are not changed: `drop_rows_after` does that once the run owns its folder.
    """
    from app.training.loggers import CsvLogger, TensorBoardLogger

    loggers: list[RunLogger] = [CsvLogger(folder / "metrics.csv", dataset_names)]
    chosen = list(dict.fromkeys([config.name, *config.also]))
    if "tensorboard" in chosen:
        loggers.append(
            TensorBoardLogger(
                folder / "tensorboard", dataset_names, last_step=last_step, details=config.details
            )
        )
    if trackers := [kind for kind in chosen if kind in _TRACKERS]:
        from app.training.loggers import Tracker

        loggers += [Tracker(kind, folder, details=config.details) for kind in trackers]
    return loggers
