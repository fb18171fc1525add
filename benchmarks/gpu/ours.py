"""Our training, with the parts of `app.train`, from prepared batches."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.model import make_base
from benchmarks.gpu.task import Part, Task, lora_of

if TYPE_CHECKING:
    import torch

    from app.model.adapter import AdapterConfig
    from app.training.trainer import Environment
    from data_modules import Batch

NAMES = ["random"]


def train(task: Task, part: Part, recompute: str, batches: Sequence[Batch], clock: Clock) -> str:
    """Train with our model, module, optimizer and trainer; return the attention backend."""
    from app.assembly.training import build_strategy
    from app.model.adapter import FullConfig
    from app.model.architecture import load_architecture
    from app.model.attention import AttentionConfig, choose_backend
    from app.model.base import ModelConfig
    from app.model.recompute import WHOLE_LAYERS
    from app.strategy.settings import StrategyConfig
    from app.training.metrics import Metrics
    from app.training.module import FinetuneModule
    from app.training.objective.objective import Sft
    from app.training.optimizers import ScheduleConfig, build_optimizer
    from app.training.trainer import TrainerConfig, build_lightning_trainer, resolve_environment

    adapter: AdapterConfig = lora_of(part)
    config = TrainerConfig(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        devices=1,
        micro_batch_size=part.packs,
        gradient_accumulation_steps=task.tokens_per_step // (part.packs * task.sequence_len),
        precision="bf16",
    )
    if part.adapter == "full":
        adapter, config.precision = FullConfig(), "bf16-pure"
    env = resolve_environment(config)
    architecture = load_architecture(ModelConfig(from_scratch=True, architecture=task.shape))
    attention = choose_backend(AttentionConfig(), architecture, env.accelerator, env.precision)
    backend = attention.backend
    if recompute == "auto":
        recompute = resolve_recompute(task, part, adapter, env)
    total_steps = part.warm_up + task.steps + 1
    metrics = Metrics(NAMES, [], config.log_every_steps)
    module = FinetuneModule(
        partial(build, task, part, adapter, recompute, backend, env.precision),
        backend=backend,
        objective=Sft(),
        build_optimizer=partial(
            build_optimizer, config=optimizer_of(part), adapter=adapter, lr=1e-5, fused=True
        ),
        schedule=ScheduleConfig(shape="constant", warmup_steps=0),
        total_steps=total_steps,
        is_packed=True,
        metrics=metrics,
        uses_fused_kernels=not part.is_compiled,
        trains_in_fp8=part.trains_in_fp8,
        recomputes_layers=recompute.split()[0] in WHOLE_LAYERS,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_lightning_trainer(
            config,
            env=env,
            strategy=build_strategy(
                StrategyConfig(), accelerator=env.accelerator, num_ranks=env.num_ranks
            ),
            total_steps=total_steps,
            loggers=[],
            callbacks=[watch(clock), *compilation_of(part)],
            folder=Path(folder),
        )
        trainer.fit(module, datamodule=data_of(batches, env.accumulation))
    return backend


def resolve_recompute(task: Task, part: Part, adapter: AdapterConfig, env: Environment) -> str:
    """Return the choice of recompute=auto for a part on this device, as in `app.assembly.auto`.

    Assumes an 8B model in bf16, alone on its device.
    """
    import torch

    from app.model.quantization import QuantizationConfig
    from app.planning.choose import choose_recompute
    from app.planning.hardware import HardwareConfig
    from app.planning.memory import PlannedRun
    from app.planning.planned_model import model_from_modules
    from app.strategy.settings import StrategyConfig

    if env.accelerator == "cpu":
        return "none"
    empty = build(replace(task, device="meta"), part, adapter, "none", "eager", env.precision)
    model = model_from_modules("8B", empty, task.shape)
    assert model is not None
    gpu = torch.cuda.get_device_properties(0)
    run = PlannedRun(
        model=model,
        hardware=HardwareConfig(name=gpu.name, memory_gib=gpu.total_memory / 2**30),
        strategy=StrategyConfig(name="single"),
        quantization=QuantizationConfig(),
        recompute="none",
        precision=env.precision,
        optimizer=part.optimizer,
        micro_batch_size=part.packs,
        sequence_len=task.sequence_len,
        accumulation=env.accumulation,
        trains_base=part.adapter == "full",
        drops_inputs=getattr(adapter, "dropout", 0.0) > 0,
        fuses_norm_and_gate=part.is_compiled or find_spec("liger_kernel") is not None,
    )
    choice = choose_recompute(run, compiles=part.is_compiled)
    return f"{choice.name} {choice.num_layers or ''}".strip()


def build(
    task: Task,
    part: Part,
    adapter: AdapterConfig,
    recompute: str,
    backend: str,
    precision: str,
    *,
    device: torch.device | None = None,
) -> torch.nn.Module:
    """Build base and adapter in the order of `app.model.build`, all of it on the task's device.

    `recompute`: a mode, and the number of layers if not all are recomputed.
    `device`, which a strategy passes, is that of the task.
    """
    import torch

    from app.model.adapter import apply_adapter, skip_redundant_casts
    from app.model.attention import attention_implementation
    from app.model.recompute import RecomputeConfig, apply_recompute

    implementation = attention_implementation(backend)
    model = make_base(task, implementation, torch.bfloat16, part.quantization)
    mode, *number = recompute.split()
    apply_recompute(
        model, RecomputeConfig(mode=mode, num_layers=int(number[0]) if number else None)
    )
    with torch.device(task.device):
        adapted = apply_adapter(model, adapter, half_precision=precision == "bf16-pure")
    skip_redundant_casts(adapted)
    return adapted.train()


def optimizer_of(part: Part) -> Any:
    """Return the settings of a part's optimizer."""
    from app.training.optimizers import AdamW8bitConfig, AdamWConfig

    return {"adamw": AdamWConfig, "adamw8bit": AdamW8bitConfig}[part.optimizer]()


def compilation_of(part: Part) -> list[Any]:
    """Return the callback that compiles the layers, if the part does so."""
    if not part.is_compiled:
        return []
    from app.training.compilation import Compilation

    class MustCompile(Compilation):
        def on_train_end(self, *_: Any) -> None:
            if self.layers is None or self.layers.failure is not None:
                raise RuntimeError("the layers could not be compiled: see the warning above")

    return [MustCompile()]


def data_of(batches: Sequence[Batch], accumulation: int) -> Any:
    """Return a data module that serves these batches and moves them like ours."""
    import lightning as L
    from torch.utils.data import DataLoader

    from data_modules import FinetuneDataModule

    class Prepared(L.LightningDataModule):
        is_streamed = True  # so FP8 is not compared with bf16: random weights would be refused
        transfer_batch_to_device = FinetuneDataModule.transfer_batch_to_device

        def train_dataloader(self) -> DataLoader[Any]:
            starts = range(0, len(batches), accumulation)
            steps = [batches[start : start + accumulation] for start in starts]
            return DataLoader(steps, batch_size=None)

    return Prepared()


def watch(clock: Clock) -> Any:
    """Return a Lightning callback that records timestamps in the steps."""
    import lightning as L

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            head = module.model.get_output_embeddings()
            head.register_forward_pre_hook(lambda *_: clock.mark("layers"))
            head.register_forward_hook(lambda *_: clock.mark("head and loss"))
            clock.start()

        def on_train_batch_start(self, *_: Any) -> None:
            clock.mark("between")

        def on_before_backward(self, *_: Any) -> None:
            clock.mark("forward")

        def on_after_backward(self, *_: Any) -> None:
            clock.mark("backward")

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
        ) -> None:
            clock.micro_batch_done(sum(part.num_tokens for part in batch))
            clock.mark("optimizer")
            clock.step_done()

    return Watch()
