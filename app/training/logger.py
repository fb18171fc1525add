"""Where the curves go: metrics.csv always, TensorBoard beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_modules import setting

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    name: str = setting("tensorboard", choices=("tensorboard", "csv"))
    """tensorboard: event files beside metrics.csv; csv: metrics.csv alone"""


def build_loggers(
    config: LoggerConfig, folder: Path, dataset_names: list[str], *, last_step: int | None = None
) -> list[Logger]:
    """Build the loggers of a run that writes into `folder`, and goes on from `last_step` or anew.

    They change nothing that is there: `drop_rows_after` does, when the run takes its folder.
    """
    from app.training.csv_logger import CsvLogger

    loggers: list[Logger] = [CsvLogger(folder / "metrics.csv", dataset_names)]
    if config.name == "tensorboard":
        from app.training.tensorboard_logger import TensorBoardLogger

        loggers.append(TensorBoardLogger(folder / "tensorboard", last_step=last_step))
    return loggers


def drop_rows_after(last_step: int | None, loggers: list[Logger]) -> None:
    """Keep the rows of metrics.csv up to `last_step`, from which the run goes on; None: no row.

    TensorBoard hides its own when the first new one comes.
    """
    from app.training.csv_logger import CsvLogger

    (rows,) = (logger for logger in loggers if isinstance(logger, CsvLogger))
    if last_step is None:
        rows.begin_anew()
    else:
        rows.cut_after(last_step)
