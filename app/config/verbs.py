"""What each verb can be told: its parts, and the few words that some settings take.

The parts themselves stand in the rooms that read them. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.config.conf_files import CONF, find_option, read_conf_file
from app.evaluation.generation import EvaluationConfig
from app.model import attention, kernels, quantization, recompute
from app.model.adapter import (
    INITS,
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
)
from app.model.attention import AttentionConfig
from app.model.base import ModelConfig
from app.model.quantization import QuantizationConfig
from app.model.recompute import RecomputeConfig
from app.process.supervisor import SuperviseConfig
from app.report.preview import ShownConfig
from app.run.find import saved_folder
from app.run.folder import OutputConfig
from app.strategy import settings as strategy
from app.strategy.settings import FAMILIES, StrategyConfig
from app.training import logger, schedule, trainer
from app.training.logger import LoggerConfig
from app.training.optimizers import (
    AdafactorConfig,
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    PagedAdamW8bitConfig,
    ScheduleFreeConfig,
)
from app.training.schedule import ScheduleConfig
from app.training.trainer import TrainerConfig
from data_modules import PACKING_METHODS, DataConfig, PackingConfig


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """All that a training run can be told; each part goes to the room of its name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    seed: int = 42
    """every random choice follows from it: weights, order of the data, dropout"""
    resume: str = "never"
    """never; auto = from the newest good checkpoint in output.dir, or of the newest unfinished run
    of this name, if there is one; must = the same, or an error; or the folder of a run or of one
    of its checkpoints, which brings the run's own settings"""
    resume_allow: list[str] = field(default_factory=list)
    """what may differ from the run that is resumed: lr, schedule, epochs, data, precision;
    checkpoint = a typed checkpoint may be of another run"""
    faults: list[str] = field(default_factory=list)
    """faults to try a run out with, each once: rank_killed@12, nan@7, hang@9, enospc, ckpt:POINT"""


@dataclass(kw_only=True, slots=True)
class PreviewConfig(TrainConfig):
    """All that a preview can be told: what training can, and how much is shown."""

    preview: ShownConfig = field(default_factory=ShownConfig)


@dataclass(kw_only=True, slots=True)
class EvaluateTrainerConfig:
    """What of the trainer's settings means something without training; one process, one device."""

    micro_batch_size: int = 1
    """packs (rows when not packing) that run forward at once; memory"""
    precision: str = "auto"
    """fp32, bf16 (autocast), bf16-pure (all bf16), fp16 (GPU); a run's own when there is a run"""
    accelerator: str = "auto"
    """auto, cpu or gpu"""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """All that an evaluation can be told."""

    run: str | None = None
    """folder of a finished run; null = the newest under outputs/, unless model.path is given"""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter_path: str | None = None
    """folder of an adapter on top of model.path, where there is no run"""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    trainer: EvaluateTrainerConfig = field(default_factory=EvaluateTrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    seed: int = 42
    """every random choice follows from it"""

    @property
    def tuned_path(self) -> str | None:
        """What is compared with the base: the typed adapter, else what the run has saved."""
        if self.adapter_path is not None or self.run is None:
            return self.adapter_path
        return str(saved_folder(Path(self.run)))


VERBS: dict[str, type] = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "preview": PreviewConfig,
}
PARTS: dict[str, dict[str, type]] = {
    "adapter": {"lora": LoraConfig, "ia3": Ia3Config, "freeze": FreezeConfig, "full": FullConfig},
    "optimizer": {
        "adamw": AdamWConfig,
        "adamw8bit": AdamW8bitConfig,
        "paged_adamw8bit": PagedAdamW8bitConfig,
        "adafactor": AdafactorConfig,
        "muon": MuonConfig,
        "schedule_free": ScheduleFreeConfig,
    },
    "strategy": FAMILIES,
}
"""the parts whose settings depend on the option: group -> option -> schema"""
CHOICES: dict[str, Sequence[str]] = {
    "adapter.init": INITS,
    "quantization.method": quantization.METHODS,
    "attention.backend": attention.BACKENDS,
    "recompute.mode": recompute.MODES,
    "packing.method": PACKING_METHODS,
    "optimizer.scale_lr": ("none", "linear", "sqrt"),
    "schedule.shape": schedule.SHAPES,
    "trainer.precision": trainer.PRECISIONS,
    "trainer.kernels": kernels.CHOICES,
    "trainer.accelerator": ("auto", "cpu", "gpu"),
    "strategy.compression": strategy.COMPRESSIONS,
    "strategy.offload_optimizer": strategy.HOMES,
    "logger.name": logger.NAMES,
}
"""settings that take one of a few words"""
ALTERNATIVES = (
    ("trainer.global_batch_size", "trainer.gradient_accumulation_steps"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
)
"""two ways to say the same thing"""


def settings_of(group: str, option: str) -> Any:
    """Return the settings that `group=option` means, as its file has them."""
    file = read_conf_file(find_option(CONF, group, option), package=group)
    return PARTS[group][option](**file.values)
