"""Where metrics are logged: metrics.csv always, TensorBoard beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

NAMES = ("tensorboard", "csv")


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    name: str = "tensorboard"
    """tensorboard: event files beside metrics.csv; csv: metrics.csv alone"""


def build_loggers(
    config: LoggerConfig, folder: Path, dataset_names: list[str], *, last_step: int | None = None
) -> list[Logger]:
    """Build the loggers of a run in `folder` that resumes from `last_step`, or starts at None.

    Existing files stay as they are: `drop_rows_after` changes them once the run owns its folder.
    """
    from app.training.log_files import CsvLogger, TensorBoardLogger

    loggers: list[Logger] = [CsvLogger(folder / "metrics.csv", dataset_names)]
    if config.name == "tensorboard":
        loggers.append(TensorBoardLogger(folder / "tensorboard", last_step=last_step))
    return loggers


def drop_rows_after(last_step: int | None, loggers: list[Logger]) -> None:
    """Drop the rows of metrics.csv after `last_step`, from which the run resumes; None: all rows.

    TensorBoard hides its own once the first new event is written.
    """
    from app.training.log_files import CsvLogger

    (rows,) = (logger for logger in loggers if isinstance(logger, CsvLogger))
    if last_step is None:
        rows.clear()
    else:
        rows.drop_rows_after(last_step)
