"""How long, how precisely and on what a run trains: the Lightning trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from lightning import Callback, Trainer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

PRECISIONS = ("auto", "fp32", "bf16", "bf16-pure", "fp16")
VALIDATIONS_PER_RUN = 10


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    micro_batch_size: int = 1
    """packs (rows when not packing) a rank runs forward and backward at once; memory"""
    gradient_accumulation_steps: int = 8
    """micro-batches a rank adds up before an optimizer step"""
    global_batch_size: int | None = None
    """packs an optimizer step over all ranks; sets gradient_accumulation_steps"""
    num_epochs: int = 1
    """times the training data is seen"""
    max_steps: int | None = None
    """optimizer steps; wins over num_epochs, the data then repeats as often as needed"""
    precision: str = "auto"
    """fp32, bf16 (autocast, fp32 master weights), bf16-pure (all bf16), fp16 (GPU, scaled loss)"""
    max_grad_norm: float = 1.0
    """the global gradient norm is clipped to this"""
    accelerator: str = "auto"
    """auto, cpu or gpu"""
    devices: Any = "auto"
    """ranks on this machine; auto = all GPUs, 1 on CPU"""
    num_nodes: int = 1
    """machines that train together"""
    validate_every_steps: int | None = None
    """optimizer steps between validations; null = ten times a run"""
    log_every_steps: int = 10
    """optimizer steps between writes of the curves (every step has its row all the same)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a run computes, and how precisely: every `auto` resolved."""

    accelerator: str
    """gpu or cpu"""
    devices: int
    num_ranks: int
    precision: str
    accumulation: int
    """micro-batches a rank adds up before an optimizer step"""

    @property
    def torch_device(self) -> str:
        """Name of the first rank's device in torch."""
        return "cuda" if self.accelerator == "gpu" else "cpu"

    def __str__(self) -> str:
        return f"{self.num_ranks} x {self.accelerator}, precision {self.precision}"


def resolve_placement(config: TrainerConfig) -> Placement:
    """Look at this machine and resolve every `auto`; ValueError when it lacks what was typed."""
    accelerator = resolve_accelerator(config)
    devices = resolve_devices(config, accelerator)
    num_ranks = devices * config.num_nodes
    return Placement(
        accelerator=accelerator,
        devices=devices,
        num_ranks=num_ranks,
        precision=resolve_precision(config, accelerator),
        accumulation=accumulation_steps(config, num_ranks),
    )


def resolve_accelerator(config: TrainerConfig) -> str:
    """Return "gpu" where CUDA is and was not turned down, else "cpu"."""
    import torch

    if config.accelerator != "auto":
        return config.accelerator
    return "gpu" if torch.cuda.is_available() else "cpu"


def resolve_devices(config: TrainerConfig, accelerator: str) -> int:
    """Return the number of ranks on this machine; ValueError when fewer devices are there."""
    import torch

    present = torch.cuda.device_count() if accelerator == "gpu" else None
    if config.devices == "auto":
        return present or 1
    if present is not None and config.devices > present:
        raise ValueError(
            f"trainer.devices={config.devices}, but this machine has {present} GPUs: "
            f"type trainer.devices={present}"
        )
    return int(config.devices)


def resolve_precision(config: TrainerConfig, accelerator: str) -> str:
    """Return the precision's name with `auto` resolved: bf16 where the device is fast at it."""
    import torch

    if config.precision != "auto":
        return config.precision
    return "bf16" if accelerator == "gpu" and torch.cuda.is_bf16_supported() else "fp32"


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype that products are computed in under autocast; None without autocast."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def accumulation_steps(config: TrainerConfig, num_ranks: int) -> int:
    """Micro-batches a rank adds up; ValueError when the global batch does not divide."""
    if config.global_batch_size is None:
        return config.gradient_accumulation_steps
    packs_at_once = config.micro_batch_size * num_ranks
    if config.global_batch_size % packs_at_once:
        raise ValueError(
            f"trainer.global_batch_size={config.global_batch_size} is no multiple of "
            f"micro_batch_size {config.micro_batch_size} x {num_ranks} ranks = {packs_at_once}: "
            f"type trainer.global_batch_size="
            f"{math.ceil(config.global_batch_size / packs_at_once) * packs_at_once}"
        )
    return config.global_batch_size // packs_at_once


def build_trainer(
    config: TrainerConfig,
    *,
    placement: Placement,
    strategy: Strategy | str,
    total_steps: int,
    loggers: Sequence[Logger],
    callbacks: Sequence[Callback],
    folder: Path,
) -> Trainer:
    """Build the trainer of one run.

    A run is one sequence of `total_steps` global steps through all epochs of the data, which
    Lightning sees as one epoch: where an epoch ends is the data plan's business alone.
    """
    import lightning as L

    # Importing Lightning sets its log levels; what it says of devices is said by the verb.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    every = config.validate_every_steps or math.ceil(total_steps / VALIDATIONS_PER_RUN)
    return L.Trainer(
        accelerator=placement.accelerator,
        devices=placement.devices,
        num_nodes=config.num_nodes,
        strategy=strategy,
        # How weights are kept is the model's business; here only the autocast around a step.
        precision={"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(placement.precision, "32-true"),
        max_epochs=1,
        max_steps=total_steps,
        accumulate_grad_batches=placement.accumulation,
        gradient_clip_val=config.max_grad_norm,
        num_sanity_val_steps=-1,  # the whole validation set: the curves' step 0
        val_check_interval=min(every, total_steps) * placement.accumulation,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the plan already gives each rank its packs
        logger=list(loggers),
        callbacks=list(callbacks),
        default_root_dir=folder,
    )
