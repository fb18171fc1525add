"""Train: config in, verified adapter out. `python -m app.train +experiment=quickstart`."""

from __future__ import annotations

import json
import logging
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.config import TrainConfig, load_run_config, run_verb, save_config, settings_of
from app.finish import finish
from app.model.hub import is_offline
from app.model.quantization import QuantizationConfig, stored_settings
from app.preflight import check_compatibility, describe_base
from app.process.environment import quiet_libraries
from app.process.errors import Interrupted, UserError
from app.process.faults import arm, parse_faults
from app.process.heartbeat import is_watched
from app.process.launch import is_first_rank, live_with_parent
from app.process.memory import keep_memory
from app.process.signals import end_process, exit_after_grace, install_signal_handlers
from app.process.stdio import keep_streams
from app.run import Run, describe_global_batch, open_run
from app.run.folder import CONFIG_FILE, METRICS_FILE
from app.run.manifest import save_manifest
from app.run.ranks import requeue, resume_command, run_ranks, starts_ranks
from app.strategy.settings import StrategyConfig
from app.sweep import run_sweep
from data_modules import printable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from app.training.trainer import Placement

log = logging.getLogger(__name__)


def train(config: TrainConfig) -> float | None:
    """Fine-tune as `config` says; return the final validation loss, None on ranks above 0."""
    quiet_libraries(offline=is_offline(config.model, config.data))
    run = open_run(config, load_run_config)
    if run.is_done:
        return print_done(run)
    folder, source = run.folder, run.checkpoint

    # Imported here and not above: --help and a config error must not wait for torch.
    import lightning as L

    from app.model.attention import choose_backend
    from app.model.base import context_len, decoder_start_token_id, load_architecture
    from app.model.build import build_model
    from app.model.chat import stop_token_ids, with_chat_template
    from app.model.tokenizer import build_tokenizer, new_token_ids
    from app.model.tokens import num_rows, trained_token_ids
    from app.strategy.build import build_strategy
    from app.training.callbacks.gradient_check import GradientCheck
    from app.training.callbacks.heartbeat import Heartbeat
    from app.training.callbacks.progress import ProgressBar
    from app.training.callbacks.same_on_all_ranks import SameOnAllRanks, told
    from app.training.callbacks.write_metadata import WriteMetadata
    from app.training.checkpoint.saving import build_checkpoints, build_saver
    from app.training.learning_rate import resolve_lr
    from app.training.logger import build_loggers, drop_rows_after
    from app.training.metrics import Curves
    from app.training.module import FinetuneModule
    from app.training.nonfinite import StepWatch
    from app.training.optimizers import build_optimizer
    from app.training.trainer import build_trainer, resolve_placement
    from data_modules import FinetuneDataModule

    # Where it runs, and what follows from that.
    placement = resolve_placement(config.trainer, config.strategy)
    precision = placement.precision
    architecture = load_architecture(config.model)
    attention = choose_backend(config.attention, architecture, placement.accelerator, precision)
    backend = attention.backend
    lr = resolve_lr(
        config.optimizer,
        config.adapter,
        config.trainer.micro_batch_size * placement.accumulation * placement.num_data_ranks,
        from_scratch=config.model.from_scratch,
    )
    L.seed_everything(config.seed, verbose=False)

    # What it learns from: the whole plan of the run is known before a weight is read.
    tokenizer = build_tokenizer(config.model)
    new_ids = new_token_ids(config.model, tokenizer, num_rows(architecture))
    token_ids = trained_token_ids(tokenizer, config.model.added_tokens, config.adapter)
    stop_ids = stop_token_ids(tokenizer, config.model.stop_tokens)
    datamodule = FinetuneDataModule(
        with_chat_template(config.data, config.model, tokenizer),
        config.packing,
        tokenizer,
        context_len=context_len(architecture),
        vocab_size=num_rows(architecture, new_ids),
        decoder_start_token_id=decoder_start_token_id(architecture),
        micro_batch_size=config.trainer.micro_batch_size,
        accumulation_steps=placement.accumulation,
        num_ranks=placement.num_data_ranks,
        num_epochs=config.trainer.num_epochs,
        max_steps=config.trainer.max_steps,
        seed=config.seed,
        row_multiple=placement.row_multiple,
        pad_packs=config.trainer.compile,  # one size of batch is compiled for, not each that comes
    )
    datamodule.first_step = run.step
    datamodule.setup("fit")
    prompts = datamodule.prompts(config.evaluation.max_rows)
    if is_first_rank():
        for line in (*datamodule.report.lines(), *datamodule.audit.lines()):
            log.info("data: %s", line)
        datamodule.audit.check()
    build = partial(
        build_model,
        config.model,
        quantization=config.quantization,
        backend=backend,
        adapter=config.adapter,
        recompute=config.recompute,
        precision=precision,
        new_ids=new_ids,
        token_ids=token_ids,
    )
    shapes = partial(build, quantization=QuantizationConfig(), on_meta=True)
    strategy = resolve_strategy(config, placement, architecture, shapes)
    facts: dict[str, Any] = {
        "seed": config.seed,
        "base": describe_base(config.model),
        "data": [asdict(dataset) for dataset in datamodule.report.datasets],
        "test_data": [asdict(dataset) for dataset in datamodule.report.test_datasets],
        "precision": precision,
        "strategy": strategy.name,
        "global_batch": describe_global_batch(config.trainer, placement.num_data_ranks),
        "total_steps": datamodule.total_steps,
        **datamodule.fingerprints(),
    }
    run.check_unchanged(facts)
    log.info("plan: %s; %s", datamodule.plan.line(), lr.sentence)
    if lr.warning is not None and is_first_rank():
        log.warning(lr.warning)
    log.info("device: %s, attention %s", placement, attention)

    # How it learns.
    last_step = None if source is None else source.step
    loggers = build_loggers(config.logger, folder, datamodule.dataset_names, last_step=last_step)
    watch = StepWatch(config.trainer.max_skipped_steps, datamodule.rows_of_step)
    curves = Curves(datamodule.dataset_names, loggers, config.trainer.log_every_steps, watch)
    module = FinetuneModule(
        build,
        backend=backend,
        build_optimizer=partial(
            build_optimizer,
            config=config.optimizer,
            adapter=config.adapter,
            lr=lr.value,
            # Lightning clips nothing itself, yet refuses fused optimizers beside a loss scaler.
            fused=precision != "fp16",
        ),
        schedule=config.schedule,
        total_steps=datamodule.total_steps,
        is_packed=config.packing.method != "none",
        curves=curves,
        uses_fused_kernels=config.trainer.kernels == "auto" and not config.trainer.compile,
    )
    watched: list[L.Callback] = [SameOnAllRanks(told(config, facts)), GradientCheck()]
    if config.trainer.compile:
        # Imported where it is asked for: the compiler is large.
        from app.training.callbacks.compilation import Compilation

        watched.append(Compilation())
    identity = run.identity(facts)
    checkpoints = build_checkpoints(config.trainer.checkpoint, folder, source, identity)
    if is_watched():
        watched.append(Heartbeat(folder))

    def take_over() -> None:
        run.discard_later_steps()
        drop_rows_after(last_step, loggers)  # behind it: else rows of a checkpoint could be missing
        save_config(config, folder / CONFIG_FILE)
        datamodule.write_reports(folder)
        save_manifest(folder, **facts, run=identity, earlier=run.history())

    saver = build_saver(
        config.trainer,
        checkpoints,
        datamodule.plan,
        has_validation=len(datamodule.val_examples) > 0,
    )
    trainer = build_trainer(
        config.trainer,
        placement=placement,
        strategy=build_strategy(
            strategy, accelerator=placement.accelerator, num_ranks=placement.num_ranks
        ),
        total_steps=datamodule.total_steps,
        loggers=loggers,
        callbacks=[
            *(ProgressBar(curves), *watched, saver),
            WriteMetadata(take_over, is_resumed=source is not None),
        ],
        folder=folder,
        checkpoints=checkpoints,
    )
    arm(
        parse_faults(config.faults)[0],
        folder,
        rank=trainer.global_rank,
        num_ranks=placement.num_ranks,
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=run.checkpoint_path)

    # What is left of it: saved, reopened and checked, compared with its base.
    return finish(
        config,
        module,
        datamodule,
        folder,
        tokenizer=tokenizer,
        architecture=architecture,
        precision=precision,
        new_ids=new_ids,
        prompts=prompts,
        stop_ids=datamodule.stop_token_ids | stop_ids,
        base=facts["base"],
    )


def resolve_strategy(
    config: TrainConfig,
    placement: Placement,
    architecture: PretrainedConfig,
    build: Callable[[], Any],
) -> StrategyConfig:
    """Return the strategy that was typed, or choose one, by what `build` makes without numbers."""
    from app.strategy.choose import choose_strategy
    from app.training.footprint import gather_facts

    if config.strategy.name != "auto":
        return config.strategy
    choice = choose_strategy(
        gather_facts(
            placement,
            config.trainer,
            config.optimizer,
            config.quantization,
            None if stored_settings(architecture) else build,
        )
    )
    chosen: StrategyConfig = settings_of("strategy", choice.name)
    known = check_compatibility(config)
    found = check_compatibility(replace(config, strategy=chosen))
    if problems := [problem for problem in found if problem not in known]:
        raise UserError([f"strategy=auto is {choice}; but {problem}" for problem in problems])
    if is_first_rank():
        log.info("strategy: %s", choice)
    return chosen


def start(config: TrainConfig) -> None:
    """Train in this process, or start the ranks of this machine and watch over them."""
    install_signal_handlers()
    try:
        if not starts_ranks(config):
            train(config)
            return
        quiet_libraries(offline=is_offline(config.model, config.data))
        run = open_run(config, load_run_config)
        if run.is_done:
            print_done(run)
        elif code := run_ranks(config, run, sys.argv[1:]):
            sys.exit(code)
    except Interrupted as interrupted:
        if interrupted.signum == signal.SIGUSR1:
            requeue(config.supervise)
        interrupted.message += f"\n{resume_command()}"
        exit_after_grace()
        raise


def print_done(run: Run) -> float | None:
    """Say that nothing is left to train; return the run's final validation loss."""
    if is_first_rank():
        shown = printable(str(run.folder))
        print(f"done at step {run.manifest.get('total_steps')}: {shown} has finished")
        where = shlex.quote(shown)
        print(f"to train on: resume={where} trainer.max_steps=N 'resume_allow=[epochs]'")
        print(f"run: {shown}")
    metrics = json.loads((run.folder / METRICS_FILE).read_text(encoding="utf-8"))
    return metrics.get("val/loss")


if __name__ == "__main__":
    live_with_parent()
    keep_memory()
    keep_streams()
    end_process(run_verb("train", start, sweep=run_sweep))
