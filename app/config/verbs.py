"""The settings of each verb, by parts that stand in the rooms which read them.

Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.config.schema import list_settings
from app.evaluation.conversation import ConversationConfig
from app.evaluation.generation import EvaluationConfig, TrainEvaluationConfig
from app.evaluation.judge.settings import JudgeConfig
from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
)
from app.model.attention import AttentionConfig
from app.model.base import ModelConfig
from app.model.merging import MergingConfig
from app.model.quantization import QuantizationConfig
from app.model.recompute import RecomputeConfig
from app.planning.hardware import HardwareConfig
from app.planning.planned import EnforceConfig, PlanningConfig
from app.process.supervisor import SuperviseConfig
from app.report.preview import ShownConfig
from app.run import ALLOWED
from app.run.find import saved_folder
from app.run.folder import OutputConfig
from app.serving.address import ServeConfig
from app.strategy.settings import FAMILIES, StrategyConfig
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
from app.training.trainer import ACCELERATORS, PRECISIONS, TrainerConfig
from data_modules import DataConfig, PackingConfig, setting


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """Choose which trials a sweep (`-m`) runs, and how many at a time."""

    search: str = setting("grid", choices=("grid", "optuna"))
    """grid = every combination of the listed values; optuna = proposals that learn from the trials
    before, also within 'optimizer.lr=interval(1e-5,1e-3)'"""
    trials: int | None = setting(None, ge=1)
    """trials of a search; null = 20"""
    prune: str = setting("none", choices=("none", "median", "halving"))
    """stops a trial of a search whose validation loss is worse than the median of the others at the
    same step, or not among their best (successive halving); it keeps its curve"""
    parallel: int = setting(1, ge=1, le=1024)
    """trials at a time, each with trainer.devices GPUs of its own; jobs in the queue at a time"""


@dataclass(kw_only=True, slots=True)
class LauncherConfig:
    """Choose where the trials of a sweep run: here, or each as a job of SLURM."""

    name: str = setting("local", choices=("local", "slurm"))
    """local = processes of this machine; slurm = jobs of one node each, submitted by submitit"""
    partition: str | None = None
    """of a job; null = the cluster's default"""
    account: str | None = None
    """that a job is billed to; null = the cluster's default"""
    minutes: int = setting(1440, ge=10)
    """of a job; at their end a trial saves itself and is put back into the queue, three times"""
    gpus: int | None = setting(None, ge=0, le=64)
    """of a job; null = trainer.devices where that is a number, 1 otherwise"""
    cpus: int | None = setting(None, ge=1)
    """of a job; null = the cluster's default"""
    memory_gib: int | None = setting(None, ge=1)
    """of a job; null = the cluster's default"""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The settings of a training run; each part goes to the room of its name."""

    model: ModelConfig = setting(default_factory=ModelConfig, resume="fixed")
    """the base model"""
    adapter: AdapterConfig = setting(
        resume="fixed",
        options_elsewhere={
            "qlora": "lora quantization=nf4",
            "dora": "lora adapter.use_dora=true",
            "rslora": "lora adapter.use_rslora=true",
            "pissa": "lora adapter.init=pissa",
            "none": "full",
        },
    )
    """what is trained"""
    quantization: QuantizationConfig = setting(
        default_factory=QuantizationConfig,
        resume="fixed",
        aliases=("load_in_4bit=nf4", "load_in_8bit=int8"),
        options_elsewhere={
            "4bit": "nf4",
            "8bit": "int8",
        },
    )
    """the frozen base in 4 or 8 bits"""
    attention: AttentionConfig = setting(
        default_factory=AttentionConfig,
        resume="rounding",
        options_elsewhere={
            "flash_attention_2": "auto",
            "flash_attention_3": "auto",
            "flex_attention": "flex",
        },
    )
    """how attention is computed"""
    recompute: RecomputeConfig = setting(
        default_factory=RecomputeConfig,
        resume="rounding",
        aliases=("gradient_checkpointing=full", "activation_checkpointing=full"),
        options_elsewhere={
            "true": "full",
            "block": "full",
            "cpu_offload": "offload",
        },
    )
    """activations computed again in the backward pass: less memory for time"""
    data: DataConfig = setting(default_factory=DataConfig, resume="data")
    """the data, and what of it is trained on"""
    packing: PackingConfig = setting(default_factory=PackingConfig, resume="fixed")
    """how documents share a row"""
    optimizer: OptimizerConfig = setting(
        resume="fixed",
        aliases=("optim",),
        options_elsewhere={
            "adamw_torch": "adamw",
            "adamw_torch_fused": "adamw",
            "adamw_8bit": "adamw8bit",
            "adamw_bnb_8bit": "adamw8bit",
            "paged_adamw_8bit": "paged_adamw8bit",
            "schedule_free_adamw": "schedule_free schedule=constant",
            "adamw_schedule_free": "schedule_free schedule=constant",
        },
    )
    """what moves the weights"""
    schedule: ScheduleConfig = setting(
        default_factory=ScheduleConfig,
        resume="schedule",
        aliases=("lr_scheduler_type",),
        options_elsewhere={
            "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine schedule.min_lr_ratio=0.1",
            "cosine_with_restarts": "cosine",
            "warmup_stable_decay": "wsd",
        },
    )
    """how the learning rate moves over a run"""
    trainer: TrainerConfig = setting(default_factory=TrainerConfig)
    """batches, length, precision and devices of a run"""
    strategy: StrategyConfig = setting(
        default_factory=StrategyConfig,
        resume="rounding",
        aliases=("deepspeed=zero2", "fsdp=fsdp", "tensor_model_parallel_size=fsdp_tp"),
        options_elsewhere={
            "dp": "ddp",
            "ddp_spawn": "ddp",
            "powersgd": "ddp_compressed strategy.compression=powersgd",
            "topk": "ddp_compressed strategy.compression=topk",
            "deepspeed": "zero2",
            "deepspeed_stage_1": "zero1",
            "deepspeed_stage_2": "zero2",
            "deepspeed_stage_3": "zero3",
            "deepspeed_stage_2_offload": "zero2_offload",
            "deepspeed_stage_3_offload": "zero3_offload",
            "deepspeed_stage_3_offload_nvme": "zero3_offload",
            "zero_infinity": "zero3_offload",
            "zero++": "zeropp",
            "fsdp2": "fsdp",
            "full_shard": "fsdp",
            "shard_grad_op": "fsdp_grad_op",
            "hybrid_shard": "fsdp_hybrid",
            "hsdp": "fsdp_hybrid",
            "local_sgd": "hsdp_local_sgd strategy.replicas=2 (leave it out for one a node)",
            "post_local_sgd": "hsdp_local_sgd strategy.replicas=2 (leave it out for one a node)",
            "diloco": "hsdp_local_sgd strategy.replicas=2 strategy.outer_lr=0.7 "
            "strategy.outer_momentum=0.9 (leave replicas out for one a node)",
            "fsdp_cpu_offload": "fsdp_offload",
            "tensor_parallel": "tp",
            "model_parallel": "fsdp_tp",
            "2d": "fsdp_tp",
            "pp": "fsdp (there is no pipeline parallelism yet)",
            "pipeline": "fsdp (there is no pipeline parallelism yet)",
            "pipeline_parallel": "fsdp (there is no pipeline parallelism yet)",
        },
    )
    """how a run is spread over several devices"""
    logger: LoggerConfig = setting(
        default_factory=LoggerConfig, resume="free", aliases=("report_to", "log_with")
    )
    """where the curves go"""
    evaluation: TrainEvaluationConfig = setting(
        default_factory=TrainEvaluationConfig, resume="free"
    )
    """what the trained model is asked"""
    output: OutputConfig = setting(default_factory=OutputConfig, resume="per_start")
    """the folder of a run"""
    plan: EnforceConfig = setting(default_factory=EnforceConfig, resume="per_start")
    """what the arithmetic of a plan decides"""
    supervise: SuperviseConfig = setting(default_factory=SuperviseConfig, resume="per_start")
    """what happens when a run dies or hangs"""
    sweep: SweepConfig = setting(default_factory=SweepConfig, resume="per_start")
    """the trials of a sweep, with -m"""
    launcher: LauncherConfig = setting(default_factory=LauncherConfig, resume="per_start")
    """where the trials of a sweep run"""
    seed: int = setting(42, ge=0, le=2**32 - 1, resume="fixed", shown=("train", "preview"))
    """every random choice follows from it: weights, order of the data, dropout"""
    resume: str = setting(
        "never", resume="per_start", shown=("train",), aliases=("resume_from_checkpoint",)
    )
    """never; auto = from the newest good checkpoint in output.dir, or of the newest unfinished run
    of this name, if there is one; must = the same, or an error; or the folder of a run or of one
    of its checkpoints, which brings the run's own settings"""
    resume_allow: list[str] = setting(
        default_factory=list, choices=tuple(ALLOWED), resume="per_start", shown=("train",)
    )
    """what may differ from the run that is resumed: lr, schedule, epochs, data, precision;
    checkpoint = a named checkpoint may be of another run"""
    faults: list[str] = setting(default_factory=list, resume="per_start")
    """faults to inject, each once: rank_killed@12, nan@7, hang@9, enospc, ckpt:POINT"""


@dataclass(kw_only=True, slots=True)
class PreviewConfig(TrainConfig):
    """The settings of a preview: those of a training, and how much is shown."""

    preview: ShownConfig = setting(default_factory=ShownConfig)
    """how much a preview shows"""


@dataclass(kw_only=True, slots=True)
class PlanConfig(TrainConfig):
    """The settings of a plan: those of a training, and the hardware that it is for."""

    hardware: HardwareConfig = setting(default_factory=HardwareConfig)
    """the machine that a plan is for"""
    plan: PlanningConfig = setting(default_factory=PlanningConfig)
    """what a plan is asked"""


@dataclass(kw_only=True, slots=True)
class DeviceConfig:
    """The trainer's settings that mean something without data; one process, one device."""

    precision: str = setting("auto", choices=PRECISIONS)
    """fp32, bf16 (autocast), bf16-pure (all bf16), fp16 (GPU); a run's own when there is a run"""
    accelerator: str = setting(
        "auto", choices=ACCELERATORS, shown=("evaluate", "merge", "chat", "serve")
    )
    """auto, cpu or gpu"""


@dataclass(kw_only=True, slots=True)
class EvaluateTrainerConfig(DeviceConfig):
    """The trainer's settings that mean something without training."""

    micro_batch_size: int = setting(1, ge=1)
    """packs (rows when not packing) that run forward at once; memory"""
    devices: int | str = setting("auto", choices=("auto",), ge=1, shown=("evaluate",))
    """ranks on this machine, each with a share of the rows; auto = all GPUs, 1 on CPU"""


@dataclass(kw_only=True, slots=True)
class JudgedConfig(EvaluationConfig):
    """What an evaluation asks beyond a training's own: an LLM as judge."""

    judge: JudgeConfig = setting(default_factory=JudgeConfig)
    """questions whose answers an LLM judges"""


@dataclass(kw_only=True, slots=True)
class TunedConfig:
    """The settings of a verb that uses what a run has trained."""

    run: str | None = setting(None, shown=True)
    """folder of a finished run; null = the newest under outputs/, unless model.path is given"""
    model: ModelConfig = setting(default_factory=ModelConfig)
    """the base model"""
    adapter_path: str | None = setting(None, shown=True)
    """folder of an adapter on top of model.path, where there is no run"""
    quantization: QuantizationConfig = setting(default_factory=QuantizationConfig)
    """the base in 4 or 8 bits"""
    attention: AttentionConfig = setting(default_factory=AttentionConfig)
    """how attention is computed"""
    trainer: DeviceConfig = setting(default_factory=DeviceConfig)
    """precision and device"""
    output: OutputConfig = setting(default_factory=OutputConfig)
    """the folder of the results"""

    @property
    def tuned_path(self) -> str | None:
        """What was trained on the base: the typed adapter, else what the run has saved."""
        if self.adapter_path is not None or self.run is None:
            return self.adapter_path
        return str(saved_folder(Path(self.run)))


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(TunedConfig):
    """The settings of an evaluation."""

    data: DataConfig = setting(default_factory=DataConfig)
    """the data"""
    packing: PackingConfig = setting(default_factory=PackingConfig)
    """how documents share a row"""
    trainer: EvaluateTrainerConfig = setting(default_factory=EvaluateTrainerConfig)
    """batches, precision and device"""
    evaluation: JudgedConfig = setting(default_factory=JudgedConfig)
    """what the models are asked"""
    seed: int = setting(42, ge=0, le=2**32 - 1)
    """every random choice follows from it"""


@dataclass(kw_only=True, slots=True)
class MergeConfig(TunedConfig):
    """The settings of a merge."""

    merge: MergingConfig = setting(default_factory=MergingConfig)
    """what is merged, onto what, and how it is checked"""


@dataclass(kw_only=True, slots=True)
class ChatConfig(TunedConfig):
    """The settings of a chat."""

    chat: ConversationConfig = setting(default_factory=ConversationConfig)
    """how the model answers"""


@dataclass(kw_only=True, slots=True)
class ServerConfig(TunedConfig):
    """The settings of a server."""

    serve: ServeConfig = setting(default_factory=ServeConfig)
    """where it listens, and its limits"""
    chat: ConversationConfig = setting(default_factory=ConversationConfig)
    """how the model answers where a request does not say"""


VERBS: dict[str, type] = {
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "preview": PreviewConfig,
    "plan": PlanConfig,
    "merge": MergeConfig,
    "chat": ChatConfig,
    "serve": ServerConfig,
}
ON_A_RUN = tuple(verb for verb, schema in VERBS.items() if issubclass(schema, TunedConfig))
"""verbs that take a finished run, the newest where none is typed"""
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
SETTINGS = list_settings(TrainConfig, PARTS)
"""every setting of a training"""
TRUST_KEYS = [one.key for one in SETTINGS if one.resume == "trust"]
"""settings that let code run: typed at each start, never taken from a run's own files"""
PER_START = {one.key for one in SETTINGS if one.resume == "per_start" and "." not in one.key}
"""parts and settings of one start of a run: never taken from it"""
TYPED_KEYS = {one.typed_key: one.key for one in SETTINGS if one.facts.typed}
"""keys as people type them, where Python keeps the word for itself"""
OPTIONS_ELSEWHERE = {one.key: one.facts.options_elsewhere for one in SETTINGS if one.is_part}
"""group -> what other tools call its options"""
ALTERNATIVES = [
    (one.key, f"{one.key.rpartition('.')[0]}.{one.facts.instead_of}")
    for one in SETTINGS
    if one.facts.instead_of
]
"""two ways to say the same thing"""
