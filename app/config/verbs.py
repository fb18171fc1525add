"""The settings of each verb, composed of the dataclasses of the rooms that read them.

Imports nothing heavy.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from app.config.schema import Setting, list_settings
from app.evaluation.conversation import ConversationConfig
from app.evaluation.generation import EvaluationConfig, TrainEvaluationConfig
from app.evaluation.judge.questions import JudgeConfig
from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
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
from app.run.find import FINAL, saved_folder
from app.run.folder import OutputConfig, TrainOutputConfig
from app.serving.api import ServeConfig
from app.strategy.settings import STRATEGY_CONFIGS, StrategyConfig
from app.training import optimizers
from app.training.objective.settings import OBJECTIVES, ObjectiveConfig
from app.training.trainer import (
    ACCELERATORS,
    DEFAULT_MONITOR,
    PRECISIONS,
    LoggerConfig,
    TrainerConfig,
)
from common.facts import setting
from data_modules import DataConfig, PackingConfig

_SITES = (
    "hsdp_local_sgd strategy.sites=2 strategy.site_address=HOST:29400 "
    "strategy.synchronous_steps=0 trainer.max_steps=200"
)
"""what to type for the names of federated averaging in other tools"""
_FSDP_PP = "fsdp_pp trainer.devices=2 trainer.gradient_accumulation_steps=8"
"""what to type for the names of pipeline parallelism in other tools"""


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """Choose which trials a sweep (`-m`) runs, and how many at a time."""

    search: str = setting("grid", choices=("grid", "optuna"))
    """grid = every combination of the listed values; optuna = trials proposed from earlier results,
    also from ranges as in 'optimizer.lr=interval(1e-5,1e-3)'"""
    trials: int | None = setting(None, ge=1)
    """number of trials of an optuna search; null = 20"""
    prune: str = setting("none", choices=("none", "median", "halving"))
    """stop a trial of an optuna search early: median = if its validation is worse than the median
    of the others at the same step, halving = if it is not among the best (successive halving)"""
    parallel: int = setting(1, ge=1, le=1024)
    """trials that run at the same time, each on its own trainer.devices GPUs; with
    launcher=slurm, jobs submitted at the same time"""


@dataclass(kw_only=True, slots=True)
class LauncherConfig:
    """Choose what starts a run elsewhere (`loft launch`), or the trials of a sweep.

    kubernetes, sky and ray start a run; a sweep's trials run locally or as SLURM jobs.
    """

    name: str = setting("local", choices=("local", "slurm", "kubernetes", "sky", "ray"))
    """local = processes on this machine; slurm = a job of sbatch, for a sweep one single-node job
    per trial; kubernetes = a JobSet or TrainJob; sky = a managed job of SkyPilot; ray = Ray
    Train"""
    partition: str | None = setting(None, grants="nothing")
    """SLURM partition of a job; null = the cluster's default"""
    account: str | None = setting(None, grants="nothing")
    """SLURM account that is billed; null = the cluster's default"""
    minutes: int = setting(1440, ge=10)
    """time limit of a SLURM job, in minutes; a run that reaches it saves a checkpoint and is
    requeued"""
    gpus: int | None = setting(None, ge=0, le=64)
    """GPUs of a trial's job; null = trainer.devices if that is a number, else 1"""
    cpus: int | None = setting(None, ge=1)
    """CPU cores of a rank of a SLURM job, or of a pod or machine; null = 8 a rank, else the
    cluster's default"""
    memory_gib: int | None = setting(None, ge=1)
    """host memory of a job, pod or machine, in GiB; null = the cluster's default"""


@dataclass(kw_only=True, slots=True)
class LaunchSettings:
    """How a run is started elsewhere, with launcher=slurm, kubernetes, sky or ray."""

    submit: bool = setting(True, shown=True)
    """whether to submit the job; false = only write its file, and print it"""
    watch: bool = setting(False, shown=True)
    """whether to print the job's log until it ends, and to end with the exit code of the run"""
    image: str | None = setting(None, shown=True, grants="nothing")
    """container image with this program in /loft (`make image` builds one); kubernetes needs one;
    slurm runs NAME or FILE.sqsh by pyxis, and docker://NAME or FILE.sif by apptainer"""
    volume: str = setting("shared", shown=True, grants="nothing")
    """kubernetes: the volume claim (ReadWriteMany), sky: the volume, that is mounted at /shared"""
    kind: str = setting("JobSet", choices=("JobSet", "TrainJob"))
    """kubernetes: JobSet, or TrainJob of Kubeflow Trainer 2 with its TrainingRuntime"""
    min_nodes: int | None = setting(None, ge=1)
    """slurm, ray: fewest nodes with which the job starts, or goes on when it has lost one; null =
    all"""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The settings of a training run; each part is read by the room of its name."""

    model: ModelConfig = setting(default_factory=ModelConfig, resume="fixed")
    """the base model"""
    adapter: AdapterConfig = setting(
        resume="fixed",
        option_aliases={
            "qlora": "lora quantization=nf4",
            "dora": "lora adapter.use_dora=true",
            "rslora": "lora adapter.use_rslora=true",
            "pissa": "lora adapter.init=pissa",
            "none": "full",
        },
    )
    """which parameters are trained"""
    quantization: QuantizationConfig = setting(
        default_factory=QuantizationConfig,
        resume="fixed",
        aliases=("load_in_4bit=nf4", "load_in_8bit=int8"),
        option_aliases={"4bit": "nf4", "8bit": "int8"},
    )
    """quantization of the frozen base to 4 or 8 bits"""
    attention: AttentionConfig = setting(
        default_factory=AttentionConfig,
        resume="rounding",
        option_aliases={
            "flash_attention_2": "auto",
            "flash_attention_3": "auto",
            "flex_attention": "flex",
        },
    )
    """attention implementation"""
    recompute: RecomputeConfig = setting(
        default_factory=RecomputeConfig,
        resume="rounding",
        aliases=("gradient_checkpointing", "activation_checkpointing"),
        option_aliases={"true": "full", "false": "none", "block": "full", "cpu_offload": "offload"},
    )
    """activation checkpointing: recompute in the backward pass, less memory for more time"""
    objective: ObjectiveConfig = setting(default_factory=ObjectiveConfig, resume="fixed")
    """what is minimized: learning from answers, or from pairs of a better and a worse one"""
    data: DataConfig = setting(default_factory=DataConfig, resume="data")
    """data sets, chat template, and which tokens are trained on"""
    packing: PackingConfig = setting(
        default_factory=PackingConfig,
        resume="fixed",
        aliases=("sample_packing",),
        option_aliases={"true": "multipack", "false": "none"},
    )
    """packing of several documents into one row"""
    optimizer: optimizers.OptimizerConfig = setting(
        resume="fixed",
        aliases=("optim",),
        option_aliases={
            "adamw_torch": "adamw",
            "adamw_torch_fused": "adamw",
            "adamw_8bit": "adamw8bit",
            "adamw_bnb_8bit": "adamw8bit",
            "paged_adamw_8bit": "paged_adamw8bit",
            "schedule_free_adamw": "schedule_free schedule=constant",
            "adamw_schedule_free": "schedule_free schedule=constant",
        },
    )
    """optimizer, learning rate and weight decay"""
    schedule: optimizers.ScheduleConfig = setting(
        default_factory=optimizers.ScheduleConfig,
        resume="schedule",
        aliases=("lr_scheduler_type",),
        option_aliases={
            "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine schedule.min_lr_ratio=0.1",
            "cosine_with_restarts": "cosine",
            "warmup_stable_decay": "wsd",
        },
    )
    """learning rate schedule"""
    trainer: TrainerConfig = setting(default_factory=TrainerConfig)
    """batch size, length, precision and devices of a run"""
    strategy: StrategyConfig = setting(
        default_factory=StrategyConfig,
        resume="rounding",
        aliases=("fsdp=fsdp", "tensor_model_parallel_size=fsdp_tp"),
        option_aliases={
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
            "deepspeed_stage_3_offload_nvme": "fsdp strategy.offload_optimizer=disk",
            "zero_infinity": "fsdp strategy.offload_optimizer=disk",
            "zero++": "zeropp",
            "fsdp2": "fsdp",
            "full_shard": "fsdp",
            "shard_grad_op": "fsdp_grad_op",
            "hybrid_shard": "fsdp_hybrid",
            "hsdp": "fsdp_hybrid",
            "local_sgd": "hsdp_local_sgd strategy.replicas=2 (leave it out for one a node)",
            "post_local_sgd": "hsdp_local_sgd strategy.replicas=2 (leave it out for one a node)",
            "fedavg": _SITES,
            "federated": _SITES,
            "diloco": "hsdp_local_sgd strategy.replicas=2 strategy.outer_lr=0.7 "
            "strategy.outer_momentum=0.9 (leave replicas out for one a node)",
            "fsdp_cpu_offload": "fsdp_offload",
            "tensor_parallel": "tp",
            "model_parallel": "fsdp_tp",
            "2d": "fsdp_tp",
            "pp": _FSDP_PP,
            "pipeline": _FSDP_PP,
            "pipeline_parallel": _FSDP_PP,
            "3d": _FSDP_PP,
        },
    )
    """distributed strategy: how a run is spread over several devices"""
    logger: LoggerConfig = setting(
        default_factory=LoggerConfig,
        resume="free",
        aliases=("report_to", "log_with"),
        option_aliases={"none": "csv", "false": "csv", "null": "csv", "[]": "csv"},
    )
    """experiment trackers that metrics are logged to"""
    evaluation: TrainEvaluationConfig = setting(
        default_factory=TrainEvaluationConfig, resume="free"
    )
    """metrics and tasks of the model, during a run and at its end"""
    output: TrainOutputConfig = setting(default_factory=TrainOutputConfig, resume="per_start")
    """name and folder of a run, and which weights it saves"""
    plan: EnforceConfig = setting(default_factory=EnforceConfig, resume="per_start")
    """what a run does if the plan says that it does not fit"""
    supervise: SuperviseConfig = setting(default_factory=SuperviseConfig, resume="per_start")
    """supervision: what happens if a run crashes or hangs"""
    sweep: SweepConfig = setting(default_factory=SweepConfig, resume="per_start")
    """trials of a sweep, with -m"""
    launcher: LauncherConfig = setting(default_factory=LauncherConfig, resume="per_start")
    """where the trials of a sweep run"""
    seed: int = setting(42, ge=0, le=2**32 - 1, resume="fixed", shown=("train", "preview"))
    """seed of every random choice: initial weights, order of the data, dropout"""
    resume: str = setting("never", resume="per_start", shown=("train",), grants="write")
    """never; auto = from the newest checkpoint of output.dir, else of the newest unfinished run of
    this name; must = the same or an error; or the folder of a run or checkpoint"""
    resume_allow: list[str] = setting(
        default_factory=list, choices=tuple(ALLOWED), resume="per_start", shown=("train",)
    )
    """what may differ from the resumed run: lr, schedule, epochs, data, precision; checkpoint =
    the one that `resume` names may be another run's"""
    faults: list[str] = setting(default_factory=list, resume="per_start", grants="nothing")
    """faults to inject once each, for tests: rank_killed@12, nan@7, hang@9, enospc, ckpt:POINT"""

    @property
    def ends_with_best(self) -> bool:
        """Whether the result is the best step's weights: by default if a metric is monitored."""
        trainer, checkpoint = self.trainer, self.trainer.checkpoint
        is_monitored = (
            trainer.early_stopping_patience is not None
            or checkpoint.keep_best > 0
            or checkpoint.monitor != DEFAULT_MONITOR
        )
        return self.output.weights == "best" or (self.output.weights == "auto" and is_monitored)


@dataclass(kw_only=True, slots=True)
class PreviewConfig(TrainConfig):
    """The settings of a preview: those of a training run, and how much is shown."""

    preview: ShownConfig = setting(default_factory=ShownConfig)
    """how much a preview shows"""


@dataclass(kw_only=True, slots=True)
class PlanConfig(TrainConfig):
    """The settings of a plan: those of a training run, and the hardware that it is for."""

    hardware: HardwareConfig = setting(default_factory=HardwareConfig)
    """hardware to plan for"""
    plan: PlanningConfig = setting(default_factory=PlanningConfig)
    """size of the run, and how it is estimated"""


@dataclass(kw_only=True, slots=True)
class LaunchConfig(PlanConfig):
    """The settings of a run that starts elsewhere: those of its plan, and of its job."""

    launch: LaunchSettings = setting(default_factory=LaunchSettings)
    """the job of the run"""


@dataclass(kw_only=True, slots=True)
class DeviceConfig:
    """Precision and accelerator of verbs that use a model in one process, on one device."""

    precision: str = setting("auto", choices=PRECISIONS)
    """fp32, bf16 (autocast), bf16-pure (all bf16), fp16 (GPU); auto = the run's precision"""
    accelerator: str = setting(
        "auto", choices=ACCELERATORS, shown=("evaluate", "merge", "chat", "serve")
    )
    """auto, cpu or gpu"""


@dataclass(kw_only=True, slots=True)
class EvaluateTrainerConfig(DeviceConfig):
    """The trainer's settings that apply to an evaluation."""

    micro_batch_size: int = setting(1, ge=1)
    """packs (rows if not packing) per forward pass; more is faster and needs more memory"""
    devices: int | str = setting("auto", choices=("auto",), ge=1, shown=("evaluate",))
    """ranks on this machine, which share the rows; auto = all GPUs, 1 on CPU"""


@dataclass(kw_only=True, slots=True)
class JudgedConfig(EvaluationConfig):
    """The evaluation settings of a run, and those of an LLM as judge."""

    judge: JudgeConfig = setting(default_factory=JudgeConfig)
    """LLM as judge: questions, endpoint and grading"""


@dataclass(kw_only=True, slots=True)
class TunedConfig:
    """The settings of a verb that uses a trained model."""

    run: str | None = setting(None, shown=True, grants="nothing")
    """folder of a finished run; null = the newest under outputs/, unless model.path is given"""
    model: ModelConfig = setting(default_factory=ModelConfig)
    """the base model"""
    adapter_path: str | None = setting(None, shown=True, is_path=True)
    """folder of an adapter for model.path, if the model is not from a run"""
    checkpoint: str = setting("final", shown=True, grants="nothing")
    """which weights of the run: final = its result; or those of one of its checkpoints, also of a
    run that is not finished: best (by trainer.checkpoint.monitor), newest, or step-N"""
    quantization: QuantizationConfig = setting(default_factory=QuantizationConfig)
    """quantization of the base to 4 or 8 bits"""
    attention: AttentionConfig = setting(default_factory=AttentionConfig)
    """attention implementation"""
    trainer: DeviceConfig = setting(default_factory=DeviceConfig)
    """precision and accelerator"""
    output: OutputConfig = setting(default_factory=OutputConfig)
    """folder of the results"""

    @property
    def is_of_run(self) -> bool:
        """Whether the trained model is the run's, its result or one of its checkpoints."""
        return self.run is not None and (self.adapter_path is None or self.checkpoint != FINAL)

    @property
    def tuned_path(self) -> str | None:
        """Folder of the trained adapter or model: `adapter_path`, else of the run; or None."""
        if self.adapter_path is not None or self.run is None:
            return self.adapter_path
        return str(saved_folder(Path(self.run)))


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(TunedConfig):
    """The settings of an evaluation."""

    objective: ObjectiveConfig = setting(default_factory=ObjectiveConfig)
    """what the loss on the data sets is"""
    data: DataConfig = setting(default_factory=DataConfig)
    """data sets to evaluate on"""
    packing: PackingConfig = setting(default_factory=PackingConfig)
    """packing of several documents into one row"""
    trainer: EvaluateTrainerConfig = setting(default_factory=EvaluateTrainerConfig)
    """batch size, precision and devices"""
    evaluation: JudgedConfig = setting(default_factory=JudgedConfig)
    """metrics, tasks and judge"""
    seed: int = setting(42, ge=0, le=2**32 - 1)
    """seed of every random choice"""


@dataclass(kw_only=True, slots=True)
class MergeConfig(TunedConfig):
    """The settings of a merge."""

    merge: MergingConfig = setting(default_factory=MergingConfig)
    """adapters to merge, formats to write, and the check of the result"""


@dataclass(kw_only=True, slots=True)
class ChatConfig(TunedConfig):
    """The settings of a chat."""

    chat: ConversationConfig = setting(default_factory=ConversationConfig)
    """system message and sampling"""


@dataclass(kw_only=True, slots=True)
class ServerConfig(TunedConfig):
    """The settings of a server."""

    serve: ServeConfig = setting(default_factory=ServeConfig)
    """address, limits and engine of the server"""
    chat: ConversationConfig = setting(default_factory=ConversationConfig)
    """system message and sampling of requests that set none"""


@dataclass(frozen=True, slots=True)
class Verb:
    """What a verb does, and its settings."""

    what: str
    schema: type | None = None
    """None for a verb that composes no model: it has a few settings of its own"""


ALL_VERBS = {
    "doctor": Verb("check this machine, and measure how fast its ranks communicate"),
    "init": Verb("write a commented experiment for your model and data"),
    "train": Verb(
        "fine-tune a language model; saves a verified adapter under outputs/", TrainConfig
    ),
    "evaluate": Verb(
        "measure loss, metrics of answers and tasks (MMLU, GSM8K, ...); base vs tuned",
        EvaluateConfig,
    ),
    "launch": Verb(
        "start a run on SLURM, Kubernetes, SkyPilot or Ray: writes and submits its job",
        LaunchConfig,
    ),
    "status": Verb("show what a run is doing: step, loss, time left; its exit code is for scripts"),
    "report": Verb("write the report page of a run, or compare several runs"),
    "preview": Verb(
        "show what a run would train on: rows, loss mask, packs, audit; needs a tokenizer",
        PreviewConfig,
    ),
    "plan": Verb(
        "estimate memory and speed, and what to change; needs no weights, GPU or network",
        PlanConfig,
    ),
    "merge": Verb(
        "merge an adapter into its base and verify it: a Hugging Face folder, and GGUF", MergeConfig
    ),
    "push": Verb("upload a run's adapter or model and its card to the Hugging Face hub"),
    "chat": Verb("chat with a base and its adapter in the terminal", ChatConfig),
    "serve": Verb(
        "serve the model with OpenAI's chat API and a page for the browser", ServerConfig
    ),
}
VERBS: dict[str, type] = {
    name: verb.schema for name, verb in ALL_VERBS.items() if verb.schema is not None
}
"""verbs that compose their settings -> schema"""
VERBS_ON_A_RUN = tuple(verb for verb, schema in VERBS.items() if issubclass(schema, TunedConfig))
"""verbs that use a finished run, by default the newest"""
PARTS: dict[str, dict[str, type]] = {
    "adapter": {"lora": LoraConfig, "ia3": Ia3Config, "freeze": FreezeConfig, "full": FullConfig},
    "optimizer": {
        "adamw": optimizers.AdamWConfig,
        "adamw8bit": optimizers.AdamW8bitConfig,
        "paged_adamw8bit": optimizers.PagedAdamW8bitConfig,
        "adafactor": optimizers.AdafactorConfig,
        "muon": optimizers.MuonConfig,
        "schedule_free": optimizers.ScheduleFreeConfig,
    },
    "objective": OBJECTIVES,
    "strategy": STRATEGY_CONFIGS,
}
"""groups whose settings depend on the option: group -> option -> schema"""
_LIST_INDEX = re.compile(r"\[\d+\]")


@functools.cache
def all_settings(verb: str) -> list[Setting]:
    """List every setting of a verb, with those of all options of its groups."""
    return list_settings(VERBS[verb], PARTS)


def only_in(key: str) -> str:
    """Return `; only plan has it` for a group or setting of some verbs; empty if no verb has it."""
    verbs = [verb for verb in VERBS if any(key in (e.key, e.typed_key) for e in all_settings(verb))]
    *first, last = verbs or [""]
    names = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    return f"; only {names} it" if verbs else ""


@functools.cache
def _known_keys(verb: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the keys of a verb's settings, and those under which any key may stand."""
    settings = all_settings(verb)
    keys = {key for each in settings for key in (each.key, each.typed_key)}
    takes_any = [e.key for e in settings if "dict[" in str(e.hint) or "Any" in str(e.hint)]
    return frozenset(keys | RENAMED.keys()), tuple(f"{key}." for key in takes_any)


def may_be_key(verb: str, key: str) -> bool:
    """Return whether a full key is one of a verb's settings, whatever options are chosen."""
    known, takes_any = _known_keys(verb)
    key = _LIST_INDEX.sub("[]", key)
    return key.removesuffix("[]") in known or key.startswith(takes_any)


SETTINGS = all_settings("train")
"""every setting of a training run"""
PER_START = {each.key for each in SETTINGS if each.resume == "per_start" and "." not in each.key}
"""groups and settings of a single start of a run: never inherited from it"""
GRANTING = {
    each.key.partition("[")[0]: each
    for each in SETTINGS
    if each.facts.grants not in (None, "nothing") and each.key.partition(".")[0] not in PER_START
}
"""settings that are never taken from a folder (`app.config.conf_files`), by the key to type"""
RENAMED = {"merge.checkpoint": "checkpoint"}
"""key as typed -> its name since it applies to more verbs"""
TYPED_KEYS = {each.typed_key: each.key for each in SETTINGS if each.facts.typed}
"""key as typed -> key in Python, for names that are Python keywords"""
OPTION_ALIASES = {each.key: each.facts.option_aliases for each in SETTINGS if each.is_part}
"""group -> other tools' names of its options -> our option"""
ALTERNATIVES = [
    (each.key, f"{each.key.rpartition('.')[0]}.{each.facts.instead_of}")
    for each in SETTINGS
    if each.facts.instead_of
]
"""pairs of settings that set the same thing, of which only one applies"""
