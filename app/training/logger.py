"""Where the curves go: metrics.csv always, TensorBoard beside it."""

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
    """Build the loggers of a run that writes into `folder`.

    What is there is kept up to `last_step`, from which the run goes on; None where it starts anew.
    """
    from app.training.csv_logger import CsvLogger

    rows = CsvLogger(folder / "metrics.csv", dataset_names)
    if last_step is None:
        rows.begin_anew()
    else:
        rows.cut_after(last_step)
    loggers: list[Logger] = [rows]
    if config.name == "tensorboard":
        from app.training.tensorboard_logger import TensorBoardLogger

        loggers.append(TensorBoardLogger(folder / "tensorboard", last_step=last_step))
    return loggers
