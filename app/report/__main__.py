"""Report: rewrite the page of a run, or compare several runs on one page.

`python -m app.report run=FOLDER run=FOLDER`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from app.config import changed_settings, load_run_config
from app.config.dispatch import run_plain_verb
from app.process.environment import run_program
from app.report import run_page
from app.run import find_run
from app.run.folder import (
    CONFIG_FILE,
    OutputConfig,
    decide_run_dir,
    expand_home,
    is_training_run,
    refuse_special_entries,
)
from common.errors import UserError
from common.facts import setting
from common.files import write_atomically
from common.text import printable


@dataclass(kw_only=True, slots=True)
class ReportConfig:
    """Rewrite the page of a run, or compare several runs on one page."""

    run: list[str] = field(default_factory=list)
    """folder of a run, finished or not, or of an evaluation; repeat for several; default = the
    newest finished run"""
    output_dir: str | None = setting(None, typed="output.dir")
    """folder of the page that compares several runs; default = outputs/report/<time>"""


def report_runs(config: ReportConfig) -> Path:
    """Write the page that `config` requests, print its path, and return it."""
    folders = [_existing_run(path) for path in config.run] or [find_run(None, verb="report")]
    if len(folders) == 1:
        if config.output_dir is not None:
            raise UserError(
                "output.dir: the page of a single run is written into its own folder; leave it out"
            )
        run_page.refuse_damaged(run_page.read_run_files(folders[0]))
        if run_page.write_page(folders[0], settings_in(folders[0])) is None:
            raise UserError(f"run={folders[0]}: its page could not be written")
        folder = folders[0]
    else:
        names = [run_page.title_of(folder) for folder in folders]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in folders]
        if len(set(names)) < len(names):
            raise UserError(f"run={names[0]}: the same run is given twice")
        runs = {
            name: run_page.read_run_files(run) for name, run in zip(names, folders, strict=True)
        }
        for run in runs.values():
            run_page.refuse_damaged(run)
        settings = {name: settings_in(run) for name, run in zip(names, folders, strict=True)}
        folder = decide_run_dir(OutputConfig(name="report", dir=config.output_dir))
        write_atomically(folder / run_page.PAGE_FILE, run_page.render_comparison(runs, settings))
    print(f"{printable(str(folder / run_page.PAGE_FILE))}: open it in a browser")
    print(f"run: {printable(str(folder))}")
    return folder / run_page.PAGE_FILE


def _existing_run(path: str) -> Path:
    """Return the folder of a run or an evaluation; raise UserError if it has no metrics."""
    folder = expand_home("run", path)
    if not folder.is_dir():
        raise UserError(f"run={path}: no such folder")
    refuse_special_entries(folder)
    if not any((folder / name).is_file() for name in ("metrics.csv", "metrics.json")):
        raise UserError(
            f"run={path}: the folder has neither metrics.csv nor metrics.json, so there is nothing "
            "to show; type the folder that a run printed as its last line"
        )
    return folder


def settings_in(folder: Path) -> list[run_page.ChangedSetting]:
    """Return the settings of a training run that differ from their defaults, if readable."""
    if not (folder / CONFIG_FILE).is_file() or not is_training_run(folder / CONFIG_FILE):
        return []
    try:
        return changed_settings(load_run_config(folder))
    except UserError:
        return []


if __name__ == "__main__":
    run_program(lambda: run_plain_verb("report", ReportConfig, report_runs))
