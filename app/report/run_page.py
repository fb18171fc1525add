"""The page of a run: what it learned, how fast, on what; and several runs side by side.

Made of the files in the runs' folders alone: the same at the end of a run, after a failure, and
years later. One HTML file without script, font or network.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.files import write_whole
from app.process.launch import is_first_rank
from app.report.chart import HUES, Chart, Series, draw_svg, frame_of, write_png
from app.report.run_files import NOT_DRAWN, RunFiles, read_run_files
from app.training.logger import finish_loggers
from data_modules import printable, redact

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

log = logging.getLogger(__name__)

PAGE_FILE, CURVES_FILE = "report.html", "training_curves.png"
MAX_TEXT = 1200
"""letters of a prompt or an answer that are shown"""
MAX_DRAWN = 6
"""charts of a picture for a card"""
WAITS = 0.2
"""share of the time spent waiting for data from which on the page says that it bound the speed"""
BUSY = 0.9
"""utilisation of a GPU from which on it counts as busy"""
TITLES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "speed/tokens_per_second": "tokens per second",
    "speed/data_wait": "share of the time spent waiting for data",
    "speed/mfu": "MFU: model FLOPs of the GPUs' datasheet rate",
    "machine/gpu_utilization": "GPU utilisation",
    "machine/gpu_memory_gib": "GPU memory",
    "machine/host_memory_gib": "host memory of the first rank",
    "machine/host_left_gib": "host memory left",
    "machine/disk_left_gib": "disk left",
}
OF_MACHINE = ("speed/", "machine/")
"""prefixes of the figures that stand apart from what was learned"""
BY_PHASE = re.compile("(train|val)/(.+)")
PHASES = {"train": "training", "val": "validation"}
Setting = tuple[str, str, str]
"""a setting that differs from its default: key, value, default"""
Cells = list[list[str]]
"""a table: headings, and its rows"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading of the page, and what stands below it."""

    title: str
    about: str = ""
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Cells] = ()
    predictions: Sequence[Mapping[str, Any]] = ()


@contextmanager
def page_where_it_stops(
    folder: Path, settings: Sequence[Setting], loggers: Sequence[Logger] = ()
) -> Iterator[None]:
    """Write the page of a run that stops inside, by an error or a signal, once it has curves.

    `loggers` are then ended.
    """
    try:
        yield
    except BaseException as error:
        if is_first_rank() and (folder / "metrics.csv").is_file():
            write_page(folder, settings, why_stopped=str(error) or type(error).__name__)
            end_loggers(loggers, folder, {}, settings, is_done=False)
        raise


def end_loggers(
    loggers: Sequence[Logger],
    folder: Path,
    metrics: Mapping[str, float],
    settings: Sequence[Setting],
    *,
    is_done: bool = True,
) -> None:
    """Give the loggers of a run how it ended, its settings file and its page."""
    from app.training.log_files import Outcome

    files = [file for name in ("config.yaml", PAGE_FILE) if (file := folder / name).is_file()]
    outcome = Outcome(metrics=metrics, settings=settings, files=files, is_done=is_done)
    finish_loggers(loggers, outcome)


def write_page(
    folder: Path, settings: Sequence[Setting] = (), *, why_stopped: str = ""
) -> Path | None:
    """Write the page of the run in `folder`, and the picture of its curves where it has any.

    `settings`: those that differ from their defaults. Never raises: a page that cannot be written
    fails no run; returns None then, and says why.
    """
    try:
        run = read_run_files(folder)
        run = replace(run, error=why_stopped or run.error)
        write_whole(folder / PAGE_FILE, render_run(run, settings))
        if charts := learned_charts({"": run})[:MAX_DRAWN]:
            write_png(charts, folder / CURVES_FILE)
    except Exception as error:  # noqa: BLE001  whatever it is, the run itself is done
        log.warning("%s was not written: %s", PAGE_FILE, printable(redact(str(error))))
        return None
    return folder / PAGE_FILE


def render_run(run: RunFiles, settings: Sequence[Setting] = ()) -> str:
    """Return the page of one run."""
    sections = [
        Section(title="Base and tuned", tables=[comparison_cells(run.metrics)]),
        Section(title="What was learned", charts=learned_charts({"": run})),
        Section(
            title="Before and after",
            about="Held-out prompts, answered by the base and by what was trained.",
            predictions=[shown_prediction(line) for line in run.predictions],
        ),
        Section(title="Speed and machine", lines=bound_by(run), charts=machine_charts({"": run})),
        Section(title="Data", lines=data_notes(run), tables=[mixture_cells(run), audit_cells(run)]),
        Section(
            title="Settings",
            about="Those that differ from their defaults; config.yaml has all.",
            tables=[[["setting", "value", "default"], *map(list, settings)]],
        ),
        Section(title="Where it ran", tables=[place_cells(run)]),
    ]
    return _render(title_of(run.folder), run_facts(run), sections)


def render_comparison(
    runs: Mapping[str, RunFiles], settings: Mapping[str, Sequence[Setting]]
) -> str:
    """Return the page of several runs side by side, by the name that each is shown by."""
    sections = [
        Section(title="Figures", tables=[figures_cells(runs)]),
        Section(title="What was learned", charts=learned_charts(runs)),
        Section(title="Speed and machine", charts=machine_charts(runs)),
        Section(
            title="Settings",
            about="Those in which the runs differ; - is the default.",
            tables=[differing_cells(runs, settings)],
        ),
    ]
    facts = [f"{name}: {'; '.join(run_facts(run))}" for name, run in runs.items()]
    return _render(" and ".join(runs), facts, sections)


def _render(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    shown = [
        section
        for section in sections
        if section.charts
        or section.predictions
        or section.lines
        or any(len(table) > 1 for table in section.tables)
    ]
    page = environment.get_template("run.html.jinja").render(
        title=printable(title), facts=facts, sections=shown, draw=draw_svg, hues=HUES
    )
    return page


def title_of(folder: Path) -> str:
    """Return a run's name: that of its folder, and of the one around it where that is a time."""
    absolute = folder.absolute()
    is_time = re.match(r"\d{4}-\d\d-\d\d_", absolute.name)
    return f"{absolute.parent.name} {absolute.name}" if is_time else absolute.name


def run_facts(run: RunFiles) -> list[str]:
    """Return in a line each how the run ended, what it trained, and how long."""
    total, manifest = run.manifest.get("total_steps"), run.manifest
    of = f" of {total:,}" if isinstance(total, int) else ""
    if run.metrics and not run.curves:
        lines = ["evaluated"]
    elif run.metrics:
        lines = [f"finished after step {run.last_step:,}"]
    elif run.error:
        lines = [f"stopped after step {run.last_step:,}{of}: {run.error.strip()}"]
    else:
        lines = [f"not finished: step {run.last_step:,}{of}"]
    model, adapter = run.config.get("model") or {}, run.config.get("adapter") or {}
    name = Path(str(model.get("path") or "from scratch")).name
    revision = f" (revision {model['revision']})" if model.get("revision") else ""
    rank = f", rank {adapter['r']}" if adapter.get("r") else ""
    kind = f", {adapter['name']}{rank}" if adapter.get("name") else ""
    lines.append(f"base {name}{revision}{kind}")
    seconds, speed = run.latest("speed/train_seconds"), run.latest("speed/tokens_per_second")
    if seconds is not None and speed is not None:
        tokens = run.latest("train/tokens") or 0
        lines.append(f"{tokens:,.0f} tokens in {duration(seconds)}: {speed:,.0f} tokens/s")
    elif speed is not None:
        lines.append(f"{speed:,.0f} tokens/s")
    first, last = run.curves.get("val/loss", [(0, math.nan)])[0][1], run.latest("val/loss")
    if last is not None and math.isfinite(first):
        lines.append(f"validation loss {first:.4f} at the start, {last:.4f} at the end")
    if started := manifest.get("started"):
        lines.append(f"started {started}")
    return [printable(line) for line in lines]


def duration(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def learned_charts(runs: Mapping[str, RunFiles]) -> list[Chart]:
    """Return the charts of losses and tasks: training and validation of a data set on one."""
    return [chart for chart, name in _charts(runs) if not _is_of_machine(name)]


def machine_charts(runs: Mapping[str, RunFiles]) -> list[Chart]:
    """Return the charts of speed, memory, learning rate and gradient norm."""
    return [chart for chart, name in _charts(runs) if _is_of_machine(name)]


def _is_of_machine(name: str) -> bool:
    return name.startswith(OF_MACHINE) or name in ("lr", "grad_norm")


def _charts(runs: Mapping[str, RunFiles]) -> list[tuple[Chart, str]]:
    groups: dict[str, list[Series]] = {}
    for number, (run_name, run) in enumerate(runs.items()):
        for column, points in run.curves.items():
            match = BY_PHASE.fullmatch(column)
            phase, name = match.groups() if match else ("", column)
            words = [run_name, PHASES.get(phase, "")] if len(runs) > 1 else [PHASES.get(phase, "")]
            hue = number if len(runs) > 1 else int(phase == "val")
            series = Series(
                name=printable(" ".join(filter(None, words)) or title_of_column(name)),
                points=points,
                hue=hue,
                is_measured_rarely=phase == "val",
            )
            groups.setdefault(name, []).append(series)
    charts = []
    for name, lines in groups.items():
        of_zero = name.startswith(OF_MACHINE) and not name.endswith("left_gib")
        unit = "GiB" if name.endswith("_gib") else ""
        title = printable(title_of_column(name))
        chart = Chart(title=title, series=lines, unit=unit, starts_at_zero=of_zero)
        if frame_of(chart) is not None:
            charts.append((chart, name))
    return charts


def title_of_column(name: str) -> str:
    """Return a column of metrics.csv in words: `loss/alpaca` is `loss: alpaca`."""
    what, _, dataset = name.partition("/")
    known = TITLES.get(name)
    return known or (f"{TITLES.get(what, what)}: {dataset}" if dataset else what)


def comparison_cells(metrics: Mapping[str, float]) -> Cells:
    """Return base and tuned side by side, a row a figure."""
    cells = [["figure", "base", "tuned", "difference"]]
    for name in metrics:
        variant, _, what = name.partition("/")
        if variant not in ("base", "tuned") or (variant == "tuned" and f"base/{what}" in metrics):
            continue
        if any(part in name for part in NOT_DRAWN):
            continue
        before, after = metrics.get(f"base/{what}"), metrics.get(f"tuned/{what}")
        both = before is not None and after is not None
        difference = f"{after - before:+.4g}" if both else "-"  # type: ignore[operator]
        cells.append([printable(what), format_number(before), format_number(after), difference])
    return cells


def format_number(value: float | None) -> str:
    """Return a figure for a table."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def bound_by(run: RunFiles) -> list[str]:
    """Say what bound the speed, by what was measured and nothing else."""
    wait, busy, mfu = (
        _mean(run, name) for name in ("speed/data_wait", "machine/gpu_utilization", "speed/mfu")
    )
    if wait is None:
        return []
    lines = [f"{wait:.1%} of the training time was spent waiting for data."]
    if wait >= WAITS and (busy is None or busy < BUSY):
        lines[0] += " That bound the speed: more data.num_workers prepare batches meanwhile."
    elif busy is None and mfu is None and not run.has_gpu:
        lines[0] += " The rest was computing on the CPU, which bound the speed."
    elif busy is None:
        lines.append("How busy the GPU was is not known: its driver does not say.")
    elif busy >= BUSY:
        lines.append(f"The GPU was busy {busy:.0%} of the time: its own work bound the speed.")
    else:
        lines.append(
            f"The GPU was busy {busy:.0%} of the time and did not wait for data: it waited for the "
            "host to launch kernels, or for other ranks; a larger trainer.micro_batch_size helps "
            "against the first."
        )
    if mfu is not None:
        lines.append(f"MFU {mfu:.1%}: model FLOPs of what the GPUs' datasheet promises.")
    if run.manifest.get("global_batch", {}).get("num_ranks", 1) > 1:
        lines.append("What ranks waited for each other (network) was not measured apart.")
    memory = run.curves.get("machine/host_memory_gib", [])
    if len(memory) > 1:
        rise = memory[-1][1] - memory[0][1]
        lines.append(
            f"Host memory of the first rank: {memory[-1][1]:.2f} GiB at the end, {rise:+.2f} GiB "
            "since the first steps."
        )
    return lines


def _mean(run: RunFiles, name: str) -> float | None:
    # The first value is of the first step alone, which warms up.
    values = [value for _, value in run.curves.get(name, []) if math.isfinite(value)]
    values = values[1:] or values
    return sum(values) / len(values) if values else None


def mixture_cells(run: RunFiles) -> Cells:
    """Return what each data set gave to an epoch."""
    cells = [["data set", "rows", "tokens", "rows an epoch", "times each", "of rows", "of tokens"]]
    for row in run.mixture:
        counts = [f"{int(row.get(name) or 0):,}" for name in ("rows", "tokens")]
        shares = [f"{row.get(name) or 0:.2%}" for name in ("share_of_rows", "share_of_tokens")]
        seen = f"{int(row.get('rows_seen') or 0):,}"
        times = f"{row.get('epochs') or 0:.3g}"
        cells.append([printable(str(row.get("name"))), *counts, seen, times, *shares])
    return cells


def audit_cells(run: RunFiles) -> Cells:
    """Return the counts of the audit, a row a data set; columns that are all zero are left out."""
    rows = [row for row in _listed(run.audit, "datasets") if isinstance(row, dict)]
    names = [
        name
        for name in (rows[0] if rows else ())
        if name not in ("name", "path", "rows", "tokens")
        and any(isinstance(row.get(name), int) and row.get(name) for row in rows)
    ]
    cells = [["data set", *(name.replace("_", " ") for name in names)]]
    for row in rows:
        counts = [f"{row.get(name) or 0:,}" for name in names]
        cells.append([printable(str(row.get("name"))), *counts])
    return cells


def _listed(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key)
    return found if isinstance(found, list) else []


def data_notes(run: RunFiles) -> list[str]:
    """Return what the audit warns of."""
    found = [*_listed(run.audit, "problems"), *_listed(run.audit, "warnings")]
    return [printable(f"warning: {line}") for line in found]


def shown_prediction(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a prediction: where it comes from, and its texts by heading."""
    texts = [("reference", line.get("reference"))]
    metrics = line.get("metrics")
    scores = metrics if isinstance(metrics, Mapping) else {}
    for variant in ("base", "tuned"):
        if variant in line:
            found = [
                f"{name} {_score(of[variant])}"
                for name, of in scores.items()
                if isinstance(of, Mapping) and variant in of
            ]
            texts.append((f"{variant} ({', '.join(found)})" if found else variant, line[variant]))
    where = f"{line.get('data_set', '')} {Path(str(line.get('source', ''))).name}".strip()
    shown = [(heading, shorten(str(text))) for heading, text in texts if text is not None]
    prompt = shorten(str(line.get("prompt", "")).strip())
    return {"where": printable(redact(where)), "prompt": prompt, "texts": shown}


def _score(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else printable(str(value)[:40])


def shorten(text: str) -> str:
    """Return a text without what could control the page, its middle left out where it is long."""
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - MAX_TEXT:,} letters ...]\n{text[-half:]}"
    return printable(redact(text), keep="\n")


def place_cells(run: RunFiles) -> Cells:
    """Return hardware, versions and command."""
    manifest = run.manifest
    cells = [["what", "value"]]
    hardware = manifest.get("hardware") or {}
    cells += [[name, str(value)] for name, value in hardware.items() if value is not None]
    for name in ("precision", "strategy", "python"):
        if manifest.get(name):
            cells.append([name, str(manifest[name])])
    versions = manifest.get("versions") or {}
    if versions:
        cells.append(["versions", ", ".join(f"{name} {each}" for name, each in versions.items())])
    if git := manifest.get("git"):
        cells.append(["commit", f"{git.get('commit')}{' and changes' * bool(git.get('changed'))}"])
    if command := manifest.get("command"):
        cells.append(["command", " ".join(map(str, command))])
    return [[printable(redact(cell)) for cell in row] for row in cells]


def figures_cells(runs: Mapping[str, RunFiles]) -> Cells:
    """Return the final figures, a column a run."""
    names = list(dict.fromkeys(name for run in runs.values() for name in run.metrics))
    if not names:
        names = list(dict.fromkeys(name for run in runs.values() for name in run.curves))
    # `tuned/val/loss` says what `val/loss` says.
    names = [
        name
        for name in names
        if f"tuned/{name}" not in names
        and not any(part in name for part in (*NOT_DRAWN, "/trained_tokens/"))
    ]
    cells = [["figure", *runs]]
    cells += [
        [printable(name), *(format_number(run.latest(name)) for run in runs.values())]
        for name in names
    ]
    return cells


def differing_cells(
    runs: Mapping[str, RunFiles], settings: Mapping[str, Sequence[Setting]]
) -> Cells:
    """Return the settings that are not the same in all runs, a column a run."""
    by_run = [{key: value for key, value, _ in settings.get(name, ())} for name in runs]
    keys = list(dict.fromkeys(key for one in by_run for key in one))
    rows = [[key, *(one.get(key, "-") for one in by_run)] for key in keys]
    return [["setting", *runs], *(row for row in rows if len(set(row[1:])) > 1)]
