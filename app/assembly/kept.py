"""Open a checkpoint of a run as its result: saved as a finished run saves it, for any verb."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.config import TunedConfig, load_run_config
from app.model.adapter import LoraConfig, saves_whole_model
from app.preflight.couplings.model import CHANGE_BASE
from app.process.launch import is_child, is_first_rank
from app.run.find import FINAL, select_checkpoint
from app.training.checkpoint.documents import MODEL, OPTIMIZER, TRAINING
from app.training.optimizers import ScheduleFreeConfig

if TYPE_CHECKING:
    from torch import Tensor

    from app.config import TrainConfig
    from app.training.checkpoint.checkpoint import Checkpoint
    from app.training.trainer import Environment

C = TypeVar("C", bound=TunedConfig)
log = logging.getLogger(__name__)


def with_checkpoint(config: C, env: Environment, folder: Path) -> C:
    """Return `config` with the run's checkpoint as its tuned model, saved under `folder`.

    Unchanged if the run's own result is used. UserError if there is no such checkpoint.
    """
    if config.checkpoint == FINAL:
        return config
    source = Path(str(config.run))
    checkpoint, run = select_checkpoint(source, config.checkpoint), load_run_config(source)
    kind = "model" if saves_whole_model(run.adapter) else "adapter"
    saved = folder / f"{kind}-step-{checkpoint.step}"
    if is_first_rank() and not is_child() and saved.is_dir():
        shutil.rmtree(saved)  # left by a process that was killed, perhaps of another run
    if not saved.is_dir():  # by the process that started this one
        unfinished = saved.with_name(f"{saved.name}.{os.getpid()}")
        save_step(config, env, run, checkpoint, unfinished)
        unfinished.rename(saved)
    log.info("checkpoint: step %d of %s", checkpoint.step, config.run)
    return replace(config, adapter_path=str(saved))


def save_step(
    config: TunedConfig, env: Environment, run: TrainConfig, checkpoint: Checkpoint, folder: Path
) -> None:
    """Save the adapter or model of a checkpoint in `folder`.

    Reads no weights of the base for an adapter, unless its initialization changed them.
    """
    from app.assembly.base import open_base
    from app.model.adapter import save_adapter, save_converted, write_origin
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig
    from app.model.save import trained_dtype
    from app.model.shards import write_model
    from app.model.tokenizer_file import save_tokenizer
    from app.training.checkpoint.state import restore_model, trainable_parameters

    base = open_base(config, env, run.adapter)
    build = partial(base.model_builder(run, env), recompute=RecomputeConfig(mode="none"))
    trained = averaged_weights(checkpoint, run)
    model: Any
    if saves_whole_model(run.adapter):
        model = build()
        restore_model(model, trained)
        write_model(model, folder, trained_dtype(model))
    elif isinstance(run.adapter, LoraConfig) and run.adapter.init in CHANGE_BASE:
        model = build()
        restore_model(model, trained)
        save_converted(model, folder)
    else:
        model = build(quantization=QuantizationConfig(), on_meta=True)
        restore_model(model, trained)
        names = {id(weight): name for name, weight in model.named_parameters()}
        weights = trainable_parameters(model).items()
        save_adapter(model, folder, {names[id(weight)]: trained[name] for name, weight in weights})
    if not saves_whole_model(run.adapter):
        write_origin(folder, base.description)
    save_tokenizer(base.tokenizer, folder)


def averaged_weights(checkpoint: Checkpoint, run: TrainConfig) -> dict[str, Tensor]:
    """Return the weights that a checkpoint would be evaluated with.

    A step of schedule-free AdamW without a validation was saved with the weights that gradients are
    taken at; the state `z` of the optimizer turns them into the average.
    """
    weights = checkpoint.tensors(MODEL)
    groups = checkpoint.document(TRAINING)["optimizer"]["groups"]
    is_averaged = not any(group.get("train_mode") for group in groups)
    if is_averaged or not isinstance(run.optimizer, ScheduleFreeConfig):
        return weights
    newest = {
        name.removeprefix("z/"): tensor
        for name, tensor in checkpoint.tensors(OPTIMIZER).items()
        if name.startswith("z/")
    }
    share = 1 - 1 / run.optimizer.beta1
    return {
        name: weight.lerp(newest[name].to(weight.dtype), share) if name in newest else weight
        for name, weight in weights.items()
    }
