"""A trained model for evaluation, merging and chat: base, adapter, chat template, stop tokens.

The result of a run, or one of its checkpoints, saved as a finished run saves its result.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.assembly.base import Base, open_base
from app.config import EvaluateConfig, TunedConfig, load_config, load_run_config
from app.evaluation.conversation import Responder
from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    LoraConfig,
    apply_adapter,
    is_adapter,
    saves_whole_model,
)
from app.model.architecture import load_architecture
from app.model.attention import generation_attention
from app.model.base import ModelConfig
from app.model.build import weight_dtype
from app.model.classifier import has_reward
from app.model.tokenizer import build_tokenizer, num_rows, saved_stop_ids
from app.preflight.couplings.settings import CHANGE_BASE
from app.process.launch import is_child, is_first_rank
from app.run.find import FINAL, select_checkpoint
from app.training.checkpoint.documents import MODEL, OPTIMIZER, TRAINING
from app.training.optimizers import ScheduleFreeConfig
from app.training.trainer import Environment, resolve_single_device
from common.errors import UserError
from data_modules import ChatTemplate, Turn, dataset_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from app.config import TrainConfig
    from app.training.checkpoint.checkpoint import Checkpoint

C = TypeVar("C", bound=TunedConfig)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A base with its trained adapter or weights, and the chat template of its training."""

    base: Base
    adapter: AdapterConfig
    folder: Path | None
    """folder of the adapter or the whole model; None for the base alone"""
    tokenizer: PreTrainedTokenizerBase
    """the tokenizer saved by the training run, with its chat template"""
    template: ChatTemplate
    stop_ids: set[int]
    """token ids that end an answer"""

    def load(self, env: Environment) -> torch.nn.Module:
        """Load the tuned model in evaluation mode on the device of `env`."""
        device = env.rank_device
        if self.folder is None:
            model: torch.nn.Module = self.base.load(device)
        else:
            model = self.base.load_tuned(self.folder, device)
        return place_as_trained(model, self.adapter, env).eval()

    def responder(self, model: torch.nn.Module, env: Environment) -> Responder:
        """Build the responder of `model`, with the chat template and stops of its training."""
        return Responder(
            model.eval(),
            self.tokenizer,
            self.template,
            self.stop_ids,
            context_len=self.base.spec.context_len,
            autocast=env.autocast,
        )


def open_tuned(config: TunedConfig, env: Environment) -> Tuned:
    """Open a base, and the tokenizer and stop tokens saved by its training; reads no weights.

    UserError if a run's adapter or model no longer exists.
    """
    adapter = adapter_of(config)
    folder = None if config.tuned_path is None else Path(config.tuned_path)
    if folder and not is_adapter(folder) and not (folder / "config.json").is_file():
        raise UserError(f"run={config.run}: {folder} has neither an adapter nor a model")
    base = open_base(config, env, adapter)
    tokenizer, stop_ids = base.tokenizer, set(base.stop_ids)
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        tokenizer = build_tokenizer(ModelConfig(path=str(folder)))
        rows = num_rows(base.architecture, base.new_ids)
        stop_ids |= saved_stop_ids(folder, max(rows, len(tokenizer)))
    template = ChatTemplate.resolve(
        tokenizer,
        None if tokenizer.chat_template else base.config.chat_template,
        is_encoder_decoder=base.architecture.is_encoder_decoder,
    )
    return Tuned(
        base=base,
        adapter=adapter,
        folder=folder,
        tokenizer=tokenizer,
        template=template,
        stop_ids=stop_ids | template.stop_token_ids,
    )


def adapter_of(config: TunedConfig) -> AdapterConfig:
    """Return the adapter settings of the training, which determine the dtypes of the weights."""
    if config.is_of_run:
        return load_run_config(Path(str(config.run))).adapter
    is_lora = config.tuned_path is None or is_adapter(Path(config.tuned_path))
    return LoraConfig() if is_lora else FullConfig()


def open_reward_model(
    path: str | None, accelerator: str
) -> Callable[[Sequence[Sequence[Turn]]], list[float]] | None:
    """Return a function that loads a reward model, and rates the last answers of conversations.

    `path`: `evaluation.judge.reward_model`, None for none. UserError if it is something else.
    """
    if path is None:
        return None
    folder = Path(path)
    is_run = folder.is_dir() and not (folder / "config.json").is_file()
    named = {"run": path} if is_run else {"model.path": path, "objective": "reward"}
    config = load_config("evaluate", named | {"trainer.accelerator": accelerator})
    assert isinstance(config, EvaluateConfig)
    is_whole = is_run or has_reward(load_architecture(ModelConfig(path=path)))
    if config.objective.name != "reward" or not is_whole:
        raise UserError(
            f"evaluation.judge.reward_model={path} has no head for a reward; type the folder of a "
            "run of objective=reward, or of a sequence classifier with one output"
        )
    env = resolve_single_device(accelerator, config.trainer.precision)
    return partial(_rate, open_tuned(config, env), env)


def _rate(tuned: Tuned, env: Environment, conversations: Sequence[Sequence[Turn]]) -> list[float]:
    """Load a reward model; return what it says at the last token of each conversation."""
    import torch

    rows = [tuned.template.answered_ids(turns) for turns in conversations]
    longest, context = max(map(len, rows)), tuned.base.spec.context_len
    if context is not None and longest > context:
        raise UserError(
            f"evaluation.judge.reward_model reads {context:,} tokens, and a conversation has "
            f"{longest:,}; type a smaller evaluation.judge.max_new_tokens"
        )
    model: Any = tuned.load(env)
    with torch.no_grad(), env.autocast(), generation_attention(model):
        ids = [torch.tensor([row], device=env.rank_device) for row in rows]
        return [model(input_ids=row, logits_to_keep=1).logits.item() for row in ids]


def place_as_trained(model: Any, adapter: AdapterConfig, env: Environment) -> torch.nn.Module:
    """Give a loaded model the dtypes of its training, and move it to the device of `env`."""
    if isinstance(adapter, FreezeConfig):  # the trained layers have another dtype than the frozen
        model = apply_adapter(model, adapter, half_precision=env.precision == "bf16-pure")
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(weight_dtype(env.precision, adapter))
    placed: torch.nn.Module = model.to(env.rank_device)
    return placed


def trained_datasets(config: EvaluateConfig) -> set[str] | None:
    """Return the names of the data sets that the evaluated run was trained on, by name or path.

    None if no run is evaluated.
    """
    if not config.is_of_run:
        return None
    of_run = load_run_config(Path(str(config.run))).data.datasets
    trained, paths = set(dataset_names(of_run)), {dataset.path for dataset in of_run}
    for datasets in (config.data.loss_datasets, config.data.test_datasets):
        named = zip(dataset_names(datasets), datasets, strict=True)
        trained |= {name for name, dataset in named if dataset.path in paths}
    return trained


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
        _save_step(config, env, run, checkpoint, unfinished)
        unfinished.rename(saved)
    log.info("checkpoint: step %d of %s", checkpoint.step, config.run)
    return replace(config, adapter_path=str(saved))


def _save_step(
    config: TunedConfig, env: Environment, run: TrainConfig, checkpoint: Checkpoint, folder: Path
) -> None:
    """Save the adapter or model of a checkpoint in `folder`.

    Reads no weights of the base for an adapter, unless its initialization changed them.
    """
    from app.model.adapter import save_adapter, save_converted, write_origin
    from app.model.quantization import QuantizationConfig
    from app.model.recompute import RecomputeConfig
    from app.model.save import trained_dtype, write_model
    from app.model.tokenizer_file import save_tokenizer
    from app.training.checkpoint.state import restore_model, trainable_parameters

    base = open_base(config, env, run.adapter)
    build = partial(base.model_builder(run, env), recompute=RecomputeConfig(mode="none"))
    trained = _averaged_weights(checkpoint, run)
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


def _averaged_weights(checkpoint: Checkpoint, run: TrainConfig) -> dict[str, Tensor]:
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
