"""Where and how long a run trains: its environment, and the Lightning trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.preflight import check_devices, check_global_batch, check_layout, count_gpus
from app.process.errors import DeviceError, UserError
from app.process.gpus import ON_CPU
from app.strategy.settings import StrategyConfig, tensor_parallel_size
from data_modules import setting

if TYPE_CHECKING:
    import torch
    from lightning import Callback, Trainer
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

PRECISIONS = ("auto", "fp32", "bf16", "bf16-pure", "fp16")
ACCELERATORS = ("auto", "cpu", "gpu")
VALIDATIONS_PER_RUN = 10


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every_steps: int | None = setting(
        None, ge=1, shown=("train",), aliases=("save_steps", "save_every_steps")
    )
    """optimizer steps between checkpoints; null = ten a run and one an epoch;
    one more at the end"""
    keep_last: int = setting(2, ge=1, shown=("train",), aliases=("save_total_limit",))
    """newest checkpoints that are kept; more disk"""
    keep_best: int = setting(0, ge=0)
    """checkpoints that are best by `monitor` and are kept, too"""
    monitor: str = setting("val/loss", resume="fixed", aliases=("metric_for_best_model",))
    """what `keep_best` goes by: val/loss, val/loss/DATA_SET, or with evaluation.every_steps a
    metric of a task or data set, such as val/accuracy/mmlu; losses and perplexities are best where
    lowest, all else where highest"""
    asynchronous: bool = setting(False, typed="async")
    """write while training goes on; one more copy of the trainable parameters in host memory"""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    micro_batch_size: int | str = setting(
        "auto",
        choices=("auto",),
        ge=1,
        resume="content",
        shown=("train", "preview"),
        aliases=("batch_size", "per_device_train_batch_size"),
    )
    """packs (rows when not packing) a rank runs forward and backward at once; auto = on a GPU as
    many as fit, 1 on a CPU or of a stream"""
    gradient_accumulation_steps: int = setting(
        8,
        ge=1,
        resume="content",
        shown=("train", "preview"),
        aliases=("accumulate_grad_batches",),
    )
    """micro-batches a rank accumulates before an optimizer step; fewer where auto takes larger
    ones: the global batch stays"""
    global_batch_size: int | None = setting(
        None,
        ge=1,
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
    """times the training data is seen"""
    max_steps: int | None = setting(None, ge=1, resume="epochs", shown=("train",))
    """optimizer steps; wins over num_epochs, the data then repeats as often as needed"""
    precision: str = setting(
        "auto",
        choices=PRECISIONS,
        resume="content",
        shown=("train",),
        aliases=("bf16=bf16", "fp16=fp16", "mixed_precision"),
    )
    """auto, fp32, bf16 (autocast, fp32 master weights), bf16-pure (all bf16), fp16 (scaled
    loss)"""
    max_grad_norm: float = setting(
        1.0, gt=0, note="1.0 is usual", resume="lr", aliases=("gradient_clip_val",)
    )
    """the global gradient norm is clipped to this"""
    max_skipped_steps: int = setting(0, ge=0, resume="free")
    """optimizer steps of a run that may be skipped because their loss or gradient norm was not
    finite, each with a warning; one more stops the run. None ever moves a weight; with adamw no
    step waits for the device to know, the other optimizers read one number a step"""
    compile: bool = setting(False, resume="rounding", aliases=("torch_compile=true",))
    """compile the layers with torch.compile: a minute or more at the start, faster steps on a GPU;
    nothing gained on a CPU"""
    kernels: str = setting("auto", choices=("auto", "torch"), resume="rounding")
    """auto: on a GPU Liger's for norms, gates and rope, one for the loss, and FlashAttention 4 for
    `varlen`, where installed, our own for norms on a CPU, where proven equal (faster, less memory;
    left to the compiler with `compile`); torch: the model's own"""
    accelerator: str = setting("auto", choices=ACCELERATORS, resume="rounding")
    """auto, cpu or gpu"""
    devices: int | str = setting(
        "auto",
        choices=("auto",),
        ge=1,
        resume="content",
        shown=("train", "preview"),
        aliases=("num_gpus", "nproc_per_node"),
    )
    """ranks on this machine; auto = all GPUs, 1 on CPU"""
    num_nodes: int = setting(1, ge=1, resume="content")
    """machines that train together"""
    validate_every_steps: int | None = setting(
        None, ge=1, resume="free", shown=("train",), aliases=("val_check_interval",)
    )
    """optimizer steps between validations; null = ten times a run"""
    early_stopping_patience: int | None = setting(None, ge=1, resume="free", aliases=("patience",))
    """measurements of `checkpoint.monitor` without a better one, after which the run ends; null =
    it goes on to its last step"""
    log_every_steps: int = setting(10, ge=1, resume="free")
    """optimizer steps between writes of the curves (every step has its row all the same)"""
    checkpoint: CheckpointConfig = setting(default_factory=CheckpointConfig, resume="free")
    """checkpoints of a run, and how many are kept"""

    @property
    def least_micro_batch(self) -> int:
        """Return the packs a rank runs at once; 1 where they are yet to be chosen."""
        size = self.micro_batch_size
        return 1 if isinstance(size, str) else size


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Devices, ranks, precision and accumulation of a run: every `auto` resolved."""

    accelerator: str
    """gpu or cpu"""
    devices: int
    num_ranks: int
    num_data_ranks: int
    """ranks with data of their own; the ranks of a tensor-parallel group count as one"""
    precision: str
    accumulation: int
    """micro-batches a rank adds up before an optimizer step"""
    micro_batch_size: int = 1
    """packs of a micro-batch"""
    probes_micro_batch: bool = False
    """whether the first one is to be tried, and halved where it does not fit"""

    @property
    def packs_of_rank(self) -> int:
        """Return the packs that a rank does before an optimizer step."""
        return self.micro_batch_size * self.accumulation

    def with_micro_batch(self, size: int) -> Environment:
        """Return it with micro-batches of `size` packs; those of a step stay."""
        return replace(self, micro_batch_size=size, accumulation=self.packs_of_rank // size)

    @property
    def torch_device(self) -> str:
        """Return torch's name of the first rank's device."""
        return "cuda" if self.accelerator == "gpu" else "cpu"

    @property
    def row_multiple(self) -> int:
        """Return what the tokens of a packed row are rounded up to a multiple of."""
        # On a CPU a kernel is made for every new shape, which costs as much as a layer. A GPU's
        # products work in tiles of 128 rows, and its allocator finds blocks of few sizes again.
        return 64 if self.accelerator == "cpu" else 128

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a training step."""
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return torch.autocast(self.torch_device, dtype=dtype, enabled=dtype is not None)

    def __str__(self) -> str:
        group = self.num_ranks // self.num_data_ranks
        split = f" (tensor parallel {group})" if group > 1 else ""
        return f"{self.num_ranks} x {self.accelerator}{split}, precision {self.precision}"


def resolve_environment(
    config: TrainerConfig, strategy: StrategyConfig | None = None
) -> Environment:
    """Resolve every `auto` on this machine; UserError where it lacks what was typed."""
    import torch

    strategy = strategy or StrategyConfig()
    accelerator = resolve_accelerator(config.accelerator)
    num_gpus = torch.cuda.device_count() if accelerator == "gpu" else None
    devices = (num_gpus or 1) if config.devices == "auto" else int(config.devices)
    num_ranks = devices * config.num_nodes
    problems = check_devices(config, num_gpus) + check_layout(strategy, config, devices)
    if problems:
        raise UserError(problems)
    num_data_ranks = num_ranks // tensor_parallel_size(strategy, devices)
    if problems := check_global_batch(config, num_ranks, num_data_ranks):
        raise UserError(problems)
    accumulation = config.gradient_accumulation_steps
    if config.global_batch_size is not None:
        accumulation = config.global_batch_size // (config.least_micro_batch * num_data_ranks)
    return Environment(
        accelerator=accelerator,
        devices=devices,
        num_ranks=num_ranks,
        num_data_ranks=num_data_ranks,
        precision=resolve_precision(config.precision, accelerator),
        accumulation=accumulation,
        micro_batch_size=config.least_micro_batch,
    )


def resolve_single_device(accelerator: str, precision: str) -> Environment:
    """Resolve the environment of an evaluation: one process, no optimizer steps."""
    accelerator = resolve_accelerator(accelerator)
    precision = resolve_precision(precision, accelerator)
    return Environment(
        accelerator=accelerator,
        devices=1,
        num_ranks=1,
        num_data_ranks=1,
        precision=precision,
        accumulation=1,
    )


def resolve_accelerator(accelerator: str) -> str:
    """Return gpu or cpu, with `auto` resolved to what is available.

    DeviceError where a GPU is there that PyTorch cannot use: a run on the CPU must be asked for.
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
    """Return the precision's name with `auto` resolved: bf16 where the device is fast at it.

    ValueError for bf16 on a GPU that would only imitate it.
    """
    import torch

    has_bf16 = accelerator == "gpu" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        return "bf16" if has_bf16 else "fp32"
    if precision.startswith("bf16") and accelerator == "gpu" and not has_bf16:
        raise UserError(
            f"trainer.precision={precision}: {torch.cuda.get_device_name()} has no bf16 of its own "
            "(GPUs have it from compute capability 8.0 on); type trainer.precision=fp16 or fp32"
        )
    return precision


def validation_interval(config: TrainerConfig, total_steps: int) -> int:
    """Return the number of steps between validations; one more runs at the end."""
    every = config.validate_every_steps or math.ceil(total_steps / VALIDATIONS_PER_RUN)
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

    For Lightning they are one epoch: only the data's plan knows where an epoch ends.
    """
    import lightning as L

    from app.training.stopping import FetchProfiler

    # Importing Lightning sets its log levels; the verb logs the devices itself.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return L.Trainer(
        accelerator=env.accelerator,
        devices=env.devices,
        num_nodes=config.num_nodes,
        strategy=strategy,
        # The model decides the dtypes of its weights; this is the autocast around a step.
        precision={"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(env.precision, "32-true"),
        max_epochs=1,
        max_steps=total_steps,
        accumulate_grad_batches=env.accumulation,
        gradient_clip_val=config.max_grad_norm,
        num_sanity_val_steps=-1,  # the whole validation set: step 0 of the metrics
        val_check_interval=validation_interval(config, total_steps) * env.accumulation,
        check_val_every_n_epoch=None,  # by batches from the start of the run, also after a resume
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
