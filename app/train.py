"""Train: config in, verified adapter out. `python -m app.train +experiment=quickstart`.

`train` shows the whole program in order. Each step builds one object that later steps use:

    Run                 the run's folder, locked, and the checkpoint to resume from
    Environment         devices, ranks, precision and batch sizes
    Base                config, tokenizer and attention of the base model; no weights yet
    FinetuneDataModule  tokenized and packed rows, and which of them each step trains on
    L.Trainer           strategy, loggers, checkpoints and callbacks
    FinetuneModule      model, optimizer, schedule and loss

`finish` then saves the adapter, reloads and verifies it, compares it with the base on held-out
rows, and writes the report. `start` runs `train` in this process, or in one process per device.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.assembly.finish import finish, print_done
from app.config import TrainConfig, changed_settings, load_run_config, run_verb, words_to_type
from app.model.hub import is_offline
from app.process.environment import configure_libraries, protect_streams, retain_freed_memory
from app.process.launch import exit_with_parent, set_typed_again
from app.process.logs import print_loading
from app.process.signals import end_process, exit_after_grace, install_signal_handlers
from app.report.run_page import page_on_failure
from app.run import ExistingRun, compare_existing, open_run
from app.run.ranks import requeue, resume_command, run_ranks, starts_ranks
from app.run.upload import uploading
from app.sweep import run_sweep
from common.errors import Interrupted

if TYPE_CHECKING:
    import lightning as L


def train(
    config: TrainConfig, existing: ExistingRun | None = None, callbacks: Sequence[L.Callback] = ()
) -> float | None:
    """Fine-tune as `config` says, on this rank; return the validation loss, None on ranks above 0.

    `existing` is the run to resume, if it has been compared with `config` already. `callbacks`:
    further ones of Lightning, from Python.
    """
    configure_libraries(offline=is_offline(config.model, config.data))
    run = open_run(config, existing or compare_existing(config, load_run_config))
    if run.is_done:
        return print_done(run)

    print_loading()
    # Imported late, so that --help and config errors do not wait for torch.
    import lightning as L

    from app.assembly.auto import resolve_auto
    from app.assembly.base import build_data, open_base
    from app.assembly.training import build_module, build_trainer, describe_run
    from app.training.trainer import resolve_environment

    # Environment, base and data: every step is planned before any weight is loaded.
    config = run.config  # of a resumed run: the same commit of the base, the checkpoint's adapter
    env = resolve_environment(config.trainer, config.strategy)
    L.seed_everything(config.seed, verbose=False)
    base = open_base(config, env, config.adapter)
    data = build_data(config, base, env, run)
    # Replace each `auto` by a choice that fits; run.typed_config keeps it for config.yaml.
    config, env, estimate = resolve_auto(config, base, data, env, run)
    facts = describe_run(config, base, data, env)
    run.check_unchanged(facts)  # a resumed run needs the same rows, tokens and precision

    # Trainer and module: weights are loaded when `fit` starts, so that a strategy can shard them.
    trainer = build_trainer(config, run, env, data, facts, estimate)
    trainer.callbacks.extend(callbacks)
    module = build_module(config, base, data, env, trainer)
    with (
        uploading(run.folder),
        page_on_failure(run.folder, changed_settings(run.typed_config), trainer.loggers),
    ):
        trainer.fit(module, data, ckpt_path=run.checkpoint_path)
        return finish(config, run, module, data, base, estimate)


def start(config: TrainConfig, existing: ExistingRun | None = None) -> None:
    """Train in this process, or start the ranks of this machine and supervise them."""
    install_signal_handlers()
    set_typed_again(words_to_type(config))
    try:
        if not starts_ranks(config):
            train(config, existing)
            return
        # The supervisor opens the run once; its ranks use the same folder and checkpoint.
        configure_libraries(offline=is_offline(config.model, config.data))
        run = open_run(config, existing)
        if run.is_done:
            print_done(run)
        elif code := run_ranks(config, run, sys.argv[1:]):
            sys.exit(code)
    except Interrupted as interrupted:
        if interrupted.signum == signal.SIGUSR1:  # SLURM announces the job's time limit
            requeue(config.supervise)
        interrupted.message += f"\n{resume_command()}"
        exit_after_grace()
        raise


if __name__ == "__main__":
    exit_with_parent()  # a rank ends with its supervisor
    retain_freed_memory()  # on a CPU, reuse freed memory
    protect_streams()  # continue if the reader of the output ends
    end_process(run_verb("train", start, sweep=run_sweep))
