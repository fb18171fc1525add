"""The description of a run: compared when it is resumed, written when its training starts.

Also its page, which is written again while it trains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lightning as L

from app.assembly.base import Base
from app.config import TrainConfig, changed_settings, save_config
from app.model.adapter import keep_start
from app.process.logs import open_run_log
from app.report.run_page import write_page
from app.run import Run, global_batch_of
from app.run.folder import CONFIG_FILE
from app.run.manifest import save_manifest
from app.strategy.settings import words_of
from app.training.log_files import RunLogger
from app.training.trainer import Environment
from common.redaction import redacted
from data_modules import BatchSpec, FinetuneDataModule

_PAGE_SECONDS = 60
"""shortest time between two writes of the page of a run that trains"""
_PAGE_SHARE = 0.01
"""largest share of the training time that writing it takes: a long run's page is written less
often"""


def describe_run(
    config: TrainConfig,
    base: Base,
    data: FinetuneDataModule,
    env: Environment,
) -> dict[str, Any]:
    """Return the facts about a run in its manifest, which a resumed run is compared with."""
    return {
        "seed": config.seed,
        "base": base.description,
        "data": [asdict(dataset) for dataset in data.report.datasets],
        "test_data": [asdict(dataset) for dataset in data.report.test_datasets],
        "precision": "fp8" if config.trainer.precision == "fp8" else env.precision,
        "strategy": words_of(config.strategy),
        "global_batch": _global_batch(data),
        "total_steps": data.total_steps,
        **data.fingerprints(),
    }


def _global_batch(data: FinetuneDataModule) -> dict[str, int]:
    batching = data.batching
    return global_batch_of(
        batching.micro_batch_size, batching.accumulation_steps, batching.num_ranks
    )


class WriteMetadata(L.Callback):
    """Write config.yaml, manifest.json and the data reports on rank 0.

    Written when a new run is set up, and when a resumed run starts to train: until then its folder
    stays unchanged, since this process may still fail. The manifest is written again if probing
    before the first step has changed the micro-batch size.
    """

    def __init__(
        self,
        run: Run,
        identity: Mapping[str, Any],
        facts: Mapping[str, Any],
        data: FinetuneDataModule,
    ) -> None:
        """`identity` is saved in the run's checkpoints; `facts` are those of `describe_run`."""
        self.run, self.identity, self.facts, self.data = run, identity, facts, data
        self.is_written = False
        self._batching: BatchSpec | None = None

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.run.checkpoint is None:
            self._write(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metadata of a resumed run, once all ranks have loaded its checkpoint."""
        self._write(trainer)
        if trainer.is_global_zero and self.data.batching != self._batching:
            self._write_manifest()

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Write the metadata of a resumed run that had no steps left."""
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and not self.is_written:
            self._write_all(trainer.loggers)
        self.is_written = True

    def _write_all(self, loggers: Sequence[RunLogger]) -> None:
        run = self.run
        run.discard_later_steps()
        open_run_log(run.folder)
        # After the checkpoints: a crash in between must not leave checkpoints without their rows.
        for logger in loggers:
            logger.drop_rows_after(None if run.checkpoint is None else run.step)
        if run.config == run.typed_config:  # otherwise it is kept already
            keep_start(run.typed_config.adapter, run.folder)
        save_config(run.typed_config, run.folder / CONFIG_FILE)
        self.data.write_reports(run.folder)
        self._write_manifest()
        for logger in loggers:
            logger.log_hyperparams(redacted(asdict(run.typed_config)))
        self._batching = self.data.batching

    def _write_manifest(self) -> None:
        now = {**self.facts, "global_batch": _global_batch(self.data)}
        save_manifest(self.run.folder, **now, run=self.identity, earlier=self.run.history())


class LivePage(L.Callback):
    """Write report.html on rank 0 while a run trains, from the files in its folder alone."""

    def __init__(self, run: Run) -> None:
        self.run, self.next_write = run, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.next_write = time.monotonic() + _PAGE_SECONDS

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.is_global_zero or (started := time.monotonic()) < self.next_write:
            return
        settings = changed_settings(self.run.typed_config)
        write_page(self.run.folder, settings, refresh_seconds=_PAGE_SECONDS)
        ended = time.monotonic()
        self.next_write = ended + max(_PAGE_SECONDS, (ended - started) / _PAGE_SHARE)
