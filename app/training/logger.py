"""Loggers of a run: always metrics.csv, in addition TensorBoard or experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.facts import setting

if TYPE_CHECKING:
    from app.training.log_files import RunLogger

KINDS = ("tensorboard", "csv", "wandb", "mlflow")
_TRACKERS = ("wandb", "mlflow")


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    name: str = setting("tensorboard", choices=KINDS)
    """logger in addition to metrics.csv, which is always written: tensorboard (event files), wandb
    or mlflow (a tracker, offline unless WANDB_API_KEY or MLFLOW_TRACKING_URI is set), or csv for
    none; for several type a list: logger=[tensorboard,wandb]"""
    also: list[str] = setting(default_factory=list, choices=KINDS)
    """further loggers, next to the one of `name`"""
    details: bool = False
    """also log the shares and tokens of each data set and the expert load, which metrics.csv
    always has"""


def build_loggers(
    config: LoggerConfig, folder: Path, dataset_names: list[str], *, last_step: int | None = None
) -> list[RunLogger]:
    """Build the loggers of a run in `folder` that resumes after `last_step`, or starts if None.

    Existing files are not changed: `drop_rows_after` does that once the run owns its folder.
    """
    from app.training.log_files import CsvLogger, TensorBoardLogger

    loggers: list[RunLogger] = [CsvLogger(folder / "metrics.csv", dataset_names)]
    chosen = list(dict.fromkeys([config.name, *config.also]))
    if "tensorboard" in chosen:
        loggers.append(
            TensorBoardLogger(
                folder / "tensorboard",
                dataset_names,
                last_step=last_step,
                details=config.details,
            )
        )
    if trackers := [kind for kind in chosen if kind in _TRACKERS]:
        from app.training.trackers import Tracker

        loggers += [Tracker(kind, folder, details=config.details) for kind in trackers]
    return loggers
