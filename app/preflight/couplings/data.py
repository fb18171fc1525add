"""What cannot be combined with the data, and with the objective that learns from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from app.model.adapter import LoraConfig, continued_from, saves_whole_model
from app.preflight.couplings.conflict import Conflict
from app.preflight.couplings.devices import Devices, has_data, is_training
from app.preflight.couplings.model import CHANGE_BASE
from app.strategy.settings import tensor_parallel_size
from common.installation import verb_command
from data_modules import dataset_names

if TYPE_CHECKING:
    from app.config.verbs import EvaluateConfig, TrainConfig, TunedConfig

OF_OBJECTIVES = {
    "preference": "objective=dpo, or format: prompt_completion, columns: {completion: chosen}",
    "kto": "objective=kto, or columns: {weight: label} without a format",
    "classification": "objective=classify, or format: alpaca, columns: {instruction: text, "
    "output: label}",
}
"""format of rows that only some objectives learn from -> what to type for another one"""


def find_conflicts(config: TrainConfig | TunedConfig, devices: Devices) -> Iterator[Conflict]:
    """Yield the conflicts of the settings `data`, `packing` and `objective`."""
    if has_data(config):
        yield from _of_data(config)
        yield from _of_objective(config)
        if config.objective.name == "distill":
            yield from _of_teacher(config, devices)


def _of_data(config: TrainConfig | EvaluateConfig) -> Iterator[Conflict]:
    data = config.data
    if config.evaluation.exact_match and not data.has_validation and not data.test_datasets:
        yield Conflict(
            "evaluation.exact_match=true, but there are no rows to evaluate",
            "data.val_set_size=0.05, or data.test_datasets=[{path: FILE}]",
        )
    names = {*dataset_names(data.loss_datasets), *dataset_names(data.test_datasets)}
    for name in [task.name for task in config.evaluation.tasks if task.name in names]:
        yield Conflict(
            f"evaluation.tasks: {name} is the name of a data set, too, and metrics have both names",
            "another name: for the task (and form: with it if it is a known task)",
        )
    if data.streaming and is_training(config) and config.trainer.max_steps is None:
        yield Conflict(
            "data.streaming=true without trainer.max_steps: a stream has no end",
            "trainer.max_steps=N, or data.streaming=false",
        )
    if data.streaming and config.packing.window is not None:
        yield Conflict(
            f"packing.window={config.packing.window} has no effect with data.streaming=true, which "
            "has its own packing window",
            "packing.window=null",
        )


def _of_objective(config: TrainConfig | EvaluateConfig) -> Iterator[Conflict]:
    name, needed, data = config.objective.name, config.objective.row_format, config.data
    for dataset in data.loss_datasets:
        if needed is None and dataset.format in OF_OBJECTIVES:
            yield Conflict(
                f"format: {dataset.format} of {dataset.path}: objective={name} learns from single "
                "answers that are all right",
                OF_OBJECTIVES[dataset.format],
            )
        if needed is not None and dataset.format not in (None, needed):
            yield Conflict(
                f"format: {dataset.format} of {dataset.path}: objective={name} learns from rows of "
                f"format {needed}",
                f"format: {needed} for them, or objective=sft",
            )
    if needed is None:
        return
    if data.train_on_inputs:
        yield Conflict(
            f"data.train_on_inputs=true: objective={name} learns what a better and a worse answer "
            "to a prompt differ in, and the prompt is the same",
            "data.train_on_inputs=false",
        )
    if data.on_long == "split":
        yield Conflict(
            f"data.on_long=split: objective={name} compares whole answers",
            "data.on_long=drop, truncate_left or truncate_right",
        )
    if is_training(config) and config.objective.compares_with_base:
        yield from _of_reference(config)
    if is_training(config) and config.objective.reference_source == "cached":
        if data.streaming:
            yield Conflict(
                "data.streaming=true does not know its pairs before the first step, when "
                "objective.reference=cached computes what the base says of them",
                "data.streaming=false, or objective.reference=base",
            )
        if config.model.from_scratch:
            yield Conflict(
                "model.from_scratch=true has no base whose log-probabilities objective.reference="
                "cached could store",
                "objective.reference=none" if config.objective.name != "kto" else "objective=orpo",
            )


def _of_reference(config: TrainConfig) -> Iterator[Conflict]:
    """Yield what keeps the model without its adapter from being what the run starts from."""
    adapter, needs = config.adapter, f"objective={config.objective.name} compares with the base"
    if saves_whole_model(adapter) and config.objective.reference_source == "base":
        yield Conflict(
            f"adapter={adapter.name} changes the base itself, and {needs}",
            "objective.reference=cached, or adapter=lora",
        )
    if (path := continued_from(adapter)) is not None:
        yield Conflict(
            f"adapter.path={path}: {needs}, which is then not what the run starts from",
            f"{verb_command('merge')} adapter_path={path} model.path={config.model.path} "
            "output.dir=MERGED first, and model.path=MERGED here",
        )
    if isinstance(adapter, LoraConfig) and adapter.init in CHANGE_BASE:
        yield Conflict(
            f"adapter.init={adapter.init} subtracts the adapter from the base, and {needs}",
            "adapter.init=default",
        )
    if config.trainer.compile:
        yield Conflict(
            f"trainer.compile=true compiles the layers with their adapter, and {needs} without it",
            "trainer.compile=false",
        )


def _of_teacher(config: TrainConfig | EvaluateConfig, devices: Devices) -> Iterator[Conflict]:
    if config.objective.teacher_path is None:
        yield Conflict(
            "objective=distill learns from a teacher, and none is named",
            "objective.teacher=FOLDER_OR_HUB_ID",
        )
    if not is_training(config):
        return
    if tensor_parallel_size(config.strategy, devices.ranks_per_node) > 1:
        yield Conflict(
            f"strategy={config.strategy.name} splits the tokens of the vocabulary among ranks, and "
            "objective=distill compares whole distributions",
            "strategy=fsdp, zero2 or ddp",
        )
    if config.trainer.compile:
        yield Conflict(
            "trainer.compile=true and objective=distill have not been tested together yet",
            "trainer.compile=false",
        )
