"""The page of a run: metrics, curves, predictions, speed, data and settings; and of several runs.

Built only from the files in the runs' folders, so it can be written at the end of a run, after a
failure, or later: a missing or damaged file is treated as empty. One HTML file without script, font
or network.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.launch import is_first_rank
from app.report import render_template
from app.report.chart import COLORS, Chart, Series, draw_png, draw_svg, format_number, frame_of
from app.training import run_documents as documents
from app.training.checkpoint.documents import differences
from app.training.machine import LOST
from common.errors import UserError
from common.files import write_atomically
from common.redaction import redact
from common.text import duration, percent, printable

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

log = logging.getLogger(__name__)

PAGE_FILE, CURVES_FILE = "report.html", "training_curves.png"
_MAX_PREDICTIONS = 10
"""number of predictions that a page shows"""
_NOT_DRAWN = ("/tokens/", "/share/", "experts/", "/disk_left")
"""substrings of metric names that have no chart: shares of a mixture, figures per layer, disk"""
_MAX_TEXT = 1200
"""characters of a prompt or an answer that are shown"""
_NUM_OPEN = 3
"""number of predictions that are shown without a click"""
_MAX_PNG_CHARTS = 6
"""number of charts in the PNG file for a model card"""
_SLOW_DATA_SHARE = 0.2
"""share of time spent waiting for data from which the page calls data the bottleneck"""
_BUSY_GPU = 0.9
"""GPU utilization from which the GPU counts as busy"""
_WARM_SECONDS = 30.0
"""seconds of training from which its speed is compared with the plan"""
_NOTABLE_LOSS = 0.05
"""share of a step from which the largest cause is named"""
_CAUSES = {
    "data_wait": "{} of the time waiting for data; type a larger data.num_workers",
    "launches": "{} of the time without a running kernel; type a larger trainer.micro_batch_size",
    "mixers": "{} of the time without a running kernel, as recurrent layers run document by "
    "document; the start of train.log names the package with their kernels, if there is one",
    "padding": "{} of the positions are padding; type packing=multipack",
    "kernels": "{} of a step by norms and gates without fused kernels; type trainer.kernels=auto, "
    "with liger-kernel installed (pip install liger-kernel)",
    "recompute": "{} of a step by recomputing more than has to be; type recompute=auto",
    "micro_batch": "{} of a step by small micro-batches; type trainer.micro_batch_size=auto",
}
"""what costs speed, by the metric after `speed/lost/`, and what to type"""
_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "speed/tokens_per_second": "tokens per second",
    "speed/data_wait": "share of time spent waiting for data",
    "speed/mfu": "MFU (share of the GPUs' datasheet FLOP/s)",
    "machine/gpu_utilization": "GPU utilization",
    "machine/gpu_memory_gib": "GPU memory",
    "machine/host_memory_gib": "host memory of the first rank",
    "machine/host_left_gib": "free host memory",
}
"""column of metrics.csv, without train/ or val/ -> title of its chart"""
SHARES = ("speed/data_wait", "speed/mfu", "speed/padding", "machine/gpu_utilization")
"""metrics that are shares, next to those of `MEASURES`"""
_MACHINE_PREFIXES = ("speed/", "machine/")
"""prefixes of the metrics in the section on speed and hardware"""
_LOSSES = "loss per data set"
"""title of the chart with the losses of a few data sets"""
_BY_PHASE = re.compile("(train|val)/(.+)")
_PHASES = {"train": "training", "val": "validation"}
_FOLDERS = re.compile(r"""(?<![\w./:~-])[~/](?:[^\s/'"\[\]{},;:()<>|]*/)*(?=[^\s/])""")
"""folders in front of the name in an absolute path"""
_STARTED = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+0000")
"""date and time in manifest.json, of which the page shows the minute"""
ChangedSetting = tuple[str, str, str]
"""a setting that differs from its default: key, value, default"""
_Cells = list[list[str]]
"""a table: heading row and rows"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """The content of the files in a run's folder; empty for a missing file."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """metrics.json, which only a finished run has"""
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """column of metrics.csv -> its (step, value)"""
    predictions: Sequence[Mapping[str, Any]] = ()
    """some lines of predictions.jsonl"""
    verdict: Mapping[str, Any] = field(default_factory=dict)
    """verdict.json, which a run has whose base and tuned model were compared"""
    mixture: Sequence[Mapping[str, Any]] = ()
    audit: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """why the run stopped"""
    problems: Sequence[str] = ()
    """files that are damaged or of another shape, and count as missing"""

    @property
    def has_gpu(self) -> bool:
        """Whether the driver reported a GPU on the run's machine."""
        hardware = self.manifest.get("hardware")
        return isinstance(hardware, Mapping) and bool(hardware.get("gpus"))

    @property
    def last_step(self) -> int:
        """The last step with a row in metrics.csv."""
        return int(max((points[-1][0] for points in self.curves.values() if points), default=0))

    def latest(self, name: str) -> float | None:
        """Return a metric of the finished run, else the last value of its curve, else None."""
        if name in self.metrics:
            return self.metrics[name]
        points = self.curves.get(name)
        return points[-1][1] if points else None


def read_run_files(folder: Path, metrics: Mapping[str, Any] | None = None) -> RunFiles:
    """Read all files that a page or a card needs.

    `metrics`: those of a run that has not written metrics.json yet, its last file.
    """
    problems: list[str] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        for step, row in documents.read_curves(folder / documents.CSV_FILE):
            for name, value in row.items():
                if not any(part in name for part in _NOT_DRAWN):
                    curves.setdefault(name, []).append((step, value))
    except UserError as error:
        problems += error.problems

    def read(name: str, shape: Any) -> Any:
        if not (folder / name).is_file():
            return {}
        content, problem = documents.find_problem(folder / name, shape)
        if problem is not None:
            problems.append(f"{problem}; {documents.AGAIN}")
        return {} if problem is not None else content

    return RunFiles(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        manifest=read("manifest.json", documents.SHOWN_MANIFEST),
        metrics={
            name: value
            for name, value in (metrics or read("metrics.json", documents.METRICS)).items()
            if value is not None and math.isfinite(value)
        },
        curves=curves,
        predictions=_choose_predictions(documents.read_lines(folder / "predictions.jsonl")),
        verdict=read("verdict.json", documents.VERDICT),
        mixture=read("mixture.json", documents.MIXTURE) or [],
        audit=read("audit.json", documents.OBJECT),
        error=_read_text(folder / "error.txt"),
        problems=problems,
    )


def refuse_damaged(run: RunFiles) -> None:
    """Raise UserError if a file of the run is damaged, for whoever asks for a page or a card."""
    if run.problems:
        raise UserError(run.problems)


def _choose_predictions(lines: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few lines from the data sets in turn, those with changed answers first."""
    by_dataset: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        by_dataset[str(line.get("data_set", ""))].append(line)
    for of_dataset in by_dataset.values():
        of_dataset.sort(key=lambda line: line.get("base") == line.get("tuned"))
    in_turn = chain.from_iterable(zip_longest(*by_dataset.values()))
    return list(islice(filter(None, in_turn), _MAX_PREDICTIONS))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)  # the page of a running run is written after each validation
def _parse_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = _parse_yaml(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if next(differences(config, documents.SHOWN_CONFIG, ""), None) is None else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSection:
    """A section of the page; left out if it has no content."""

    title: str
    description: str = ""
    command: str = ""
    """what to type"""
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[_Cells] = ()
    predictions: Sequence[Mapping[str, Any]] = ()


@contextmanager
def page_on_failure(
    folder: Path, settings: Sequence[ChangedSetting], loggers: Sequence[Logger] = ()
) -> Iterator[None]:
    """Write the page and finish the loggers if an error or signal ends the run inside this context.

    Does nothing before the run has written metrics.csv.
    """
    try:
        yield
    except BaseException as error:
        if is_first_rank() and (folder / "metrics.csv").is_file():
            write_page(folder, settings, error=str(error) or type(error).__name__)
            end_loggers(loggers, folder, {}, settings, is_done=False)
        raise


def end_loggers(
    loggers: Sequence[Logger],
    folder: Path,
    metrics: Mapping[str, float],
    settings: Sequence[ChangedSetting],
    *,
    is_done: bool = True,
) -> None:
    """Report the outcome of a run to its loggers, with its config file and its page."""
    from app.training.loggers import RunLogger, RunSummary

    files = [file for name in ("config.yaml", PAGE_FILE) if (file := folder / name).is_file()]
    summary = RunSummary(metrics=metrics, settings=settings, files=files, is_done=is_done)
    for logger in loggers:
        if isinstance(logger, RunLogger):
            logger.finish(summary)


def write_page(
    folder: Path,
    settings: Sequence[ChangedSetting] = (),
    *,
    metrics: Mapping[str, float] | None = None,
    error: str = "",
    refresh_seconds: int | None = None,
) -> Path | None:
    """Write the page of the run in `folder`, and a PNG of its curves if it has any.

    `settings`: those that differ from their defaults; `metrics`: those of metrics.json, if it is
    not written yet; `error`: why the run stopped, if it failed; `refresh_seconds`:
    how often a browser reads the page of a running run again, without a PNG.
    Never raises, because a page must not fail a run: logs the problem and returns None.
    """
    try:
        run = read_run_files(folder, metrics)
        run = replace(run, error=error or run.error)
        write_atomically(folder / PAGE_FILE, render_run(run, settings, refresh_seconds))
        charts = _charts({"": run})[:_MAX_PNG_CHARTS]
        if charts and refresh_seconds is None:
            write_atomically(folder / CURVES_FILE, draw_png(charts))
    except Exception as problem:  # noqa: BLE001  whatever it is, the run itself is complete
        log.warning("%s was not written: %s", PAGE_FILE, printable(redact(str(problem))))
        return None
    return folder / PAGE_FILE


def render_run(
    run: RunFiles, settings: Sequence[ChangedSetting] = (), refresh_seconds: int | None = None
) -> str:
    notes = [*_listed(run.audit, "problems"), *_listed(run.audit, "warnings")]
    notes = [*(f"warning: {note}" for note in notes), *map(str, _listed(run.audit, "unread"))]
    sections = [
        PageSection(
            title="Predictions",
            description="Answers of the base and the tuned model to held-out prompts.",
            predictions=[_shown_prediction(line) for line in run.predictions],
        ),
        PageSection(title="Base vs tuned", tables=[run.verdict.get("table", [])]),
        PageSection(title="Curves", charts=_charts({"": run})),
        PageSection(
            title="Speed and hardware",
            lines=_bottleneck_lines(run),
            charts=_charts({"": run}, of_machine=True),
        ),
        PageSection(
            title="Data",
            lines=[_without_folders(printable(note)) for note in notes],
            tables=[_mixture_cells(run), _audit_cells(run)],
        ),
        PageSection(
            title="Settings",
            description="Settings that differ from their defaults; config.yaml has all.",
            tables=[[["setting", "value", "default"], *map(list, settings)]],
        ),
        PageSection(title="Environment", tables=[_environment_cells(run)]),
    ]
    facts = _run_facts(run)
    if run.verdict.get("verdict"):
        facts.append(f"verdict: {printable(run.verdict['verdict'])}")
    return render_sections(title_of(run.folder), facts, sections, refresh_seconds)


def render_comparison(
    runs: Mapping[str, RunFiles], settings: Mapping[str, Sequence[ChangedSetting]]
) -> str:
    """Return the page that compares several runs; `runs` and `settings` are by shown name."""
    by_run = [{key: value for key, value, _ in settings.get(name, ())} for name in runs]
    keys = dict.fromkeys(key for values in by_run for key in values)
    rows = [[key, *(values.get(key, "-") for values in by_run)] for key in keys]
    sections = [
        PageSection(title="Metrics", tables=[_metrics_cells(runs)]),
        PageSection(title="Curves", charts=_charts(runs)),
        PageSection(title="Speed and hardware", charts=_charts(runs, of_machine=True)),
        PageSection(
            title="Settings",
            description="Settings that differ between the runs; - is the default.",
            tables=[[["setting", *runs], *(row for row in rows if len(set(row[1:])) > 1)]],
        ),
    ]
    facts = [f"{name}: {'; '.join(_run_facts(run))}" for name, run in runs.items()]
    return render_sections(" and ".join(runs), facts, sections)


def render_sections(
    title: str,
    facts: Sequence[str],
    sections: Sequence[PageSection],
    refresh_seconds: int | None = None,
) -> str:
    """Return a page as HTML, without the sections that have no content."""
    shown = [
        section
        for section in sections
        if section.charts
        or section.command
        or section.predictions
        or section.lines
        or any(len(table) > 1 for table in section.tables)
    ]
    return render_template(
        "run",
        title=printable(title),
        facts=facts,
        sections=shown,
        draw=draw_svg,
        colors=COLORS,
        num_open=_NUM_OPEN,
        refresh_seconds=refresh_seconds,
    )


def title_of(folder: Path) -> str:
    """Return the name of a run's folder, with that of its parent if the name is only a time."""
    absolute = folder.absolute()
    is_time = re.match(r"\d{4}-\d\d-\d\d_", absolute.name)
    return f"{absolute.parent.name} {absolute.name}" if is_time else absolute.name


def _run_facts(run: RunFiles) -> list[str]:
    total, manifest = run.manifest.get("total_steps"), run.manifest
    of_total = f" of {total:,}" if isinstance(total, int) else ""
    if run.metrics and not run.curves:
        lines = ["evaluated"]
    elif run.metrics:
        lines = [f"finished after step {run.last_step:,}"]
    elif run.error:
        why = _without_folders(run.error.strip())
        lines = [f"stopped after step {run.last_step:,}{of_total}: {why}"]
    else:
        lines = [f"not finished: step {run.last_step:,}{of_total}"]
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
        lines.append(_STARTED.sub(r"\1 \2 UTC", f"started {started}"))
    return [printable(line) for line in lines]


def _is_share(name: str) -> bool:
    measure, _ = documents.measure_of(re.sub("^(base|tuned|change)/", "", name))
    is_percent = documents.MEASURES.get(measure, documents.OTHER).number_format.endswith("%")
    return is_percent or name in SHARES or name.startswith(LOST)


def _format_metric(name: str, value: float | None) -> str:
    return "-" if value is None else format_number(value, is_share=_is_share(name))


def _charts(runs: Mapping[str, RunFiles], *, of_machine: bool = False) -> list[Chart]:
    """Return a chart for each column of metrics.csv, training and validation in one.

    With `of_machine` those of speed, memory, learning rate and gradient norm, else all others.
    Losses of a few data sets of one run are in one chart; that of a single one is the loss.
    """
    groups: dict[str, list[Series]] = {}
    for number, (run_name, run) in enumerate(runs.items()):
        losses = (name.partition("val/loss/")[2] for name in run.curves)
        datasets = sorted(filter(None, losses)) if len(runs) == 1 else []
        for column, points in run.curves.items():
            match = _BY_PHASE.fullmatch(column)
            phase, name = match.groups() if match else ("", column)
            if of_machine != (name.startswith(_MACHINE_PREFIXES) or name in ("lr", "grad_norm")):
                continue
            dataset = name.partition("loss/")[2] if name.startswith("loss/") else ""
            if dataset in datasets and len(datasets) <= len(COLORS):
                if len(datasets) > 1:
                    series = Series(
                        name=printable(f"{dataset}, {_PHASES[phase]}"),
                        points=points,
                        color_index=datasets.index(dataset),
                        is_sparse=phase == "val",
                    )
                    groups.setdefault(_LOSSES, []).append(series)
                continue
            words = [run_name if len(runs) > 1 else "", _PHASES.get(phase, "")]
            series = Series(
                name=printable(" ".join(filter(None, words)) or _title_of_column(name)),
                points=points,
                color_index=number if len(runs) > 1 else int(phase == "val"),
                is_sparse=phase == "val",
            )
            groups.setdefault(name, []).append(series)
    charts = (
        Chart(
            title=printable(_title_of_column(name)),
            series=lines,
            unit="GiB" if name.endswith("_gib") else "",
            is_share=_is_share(name),
            starts_at_zero=name.startswith(_MACHINE_PREFIXES) and not name.endswith("left_gib"),
        )
        for name, lines in groups.items()
    )
    return [chart for chart in charts if frame_of(chart) is not None]


def _title_of_column(name: str) -> str:
    """Return the title of a column of metrics.csv: `loss/alpaca` is `loss: alpaca`."""
    if name in _TITLES:
        return _TITLES[name]
    measure, dataset = documents.measure_of(name)
    if measure == name:
        measure, _, dataset = name.partition("/")
    heading = documents.MEASURES[measure].heading if measure in documents.MEASURES else measure
    return f"{heading}: {dataset}" if dataset else heading


def speed_lines(metrics: Mapping[str, float]) -> list[str]:
    """Compare a finished run's speed with its plan, and name what costs the most.

    Nothing is said of a device without a plan, or of a run too short to have warmed up.
    """
    planned = metrics.get("speed/planned_tokens_per_second")
    if planned is None or metrics["speed/train_seconds"] < _WARM_SECONDS:
        return []
    measured, lowest = metrics["speed/tokens_per_second"], metrics["speed/planned_lowest"]
    compared = (
        f"speed: {measured:,.0f} tokens/s measured, {planned:,.0f} planned ({lowest:,.0f} to "
        f"{metrics['speed/planned_highest']:,.0f})"
    )
    share, cause = max((metrics.get(LOST + name, 0.0), name) for name in _CAUSES)
    if share >= _NOTABLE_LOSS:
        return [compared, f"largest loss of speed: {_CAUSES[cause].format(percent(share, 0))}"]
    if measured < lowest:
        compared += "; none of the causes that are measured explains it: other programs on the "
        compared += "GPU, a power limit and slow links are not measured"
    return [compared]


def _bottleneck_lines(run: RunFiles) -> list[str]:
    wait, busy, mfu = (
        _mean(run, name) for name in ("speed/data_wait", "machine/gpu_utilization", "speed/mfu")
    )
    if wait is None:
        return []
    planned = speed_lines(run.metrics)
    lines = [f"{percent(wait)} of the training time was spent waiting for data."]
    if wait >= _SLOW_DATA_SHARE and (busy is None or busy < _BUSY_GPU):
        lines[0] += (
            " Data was the bottleneck: a larger data.num_workers prepares more batches in parallel."
        )
    elif busy is None and mfu is None and not run.has_gpu:
        lines[0] += " The bottleneck was computation on the CPU."
    elif busy is None:
        lines.append("GPU utilization is unknown: the driver does not report it.")
    elif busy >= _BUSY_GPU:
        lines.append(f"The GPU was busy {percent(busy, 0)} of the time: it was the bottleneck.")
    else:
        lines.append(
            f"The GPU was busy {percent(busy, 0)} of the time and did not wait for data: it waited "
            "for kernel launches, which a larger trainer.micro_batch_size makes fewer, or for "
            "other ranks."
        )
    if mfu is not None:
        lines.append(f"MFU: {percent(mfu)} of the GPUs' datasheet FLOP/s.")
    if run.manifest.get("global_batch", {}).get("num_ranks", 1) > 1:
        lines.append("The time that ranks waited for each other was not measured separately.")
    memory = run.curves.get("machine/host_memory_gib", [])
    if len(memory) > 1:
        rise = memory[-1][1] - memory[0][1]
        lines.append(
            f"Host memory of the first rank: {memory[-1][1]:.2f} GiB at the end, {rise:+.2f} GiB "
            "since the first steps."
        )
    return lines + planned


def _mean(run: RunFiles, name: str) -> float | None:
    # The first value covers only the first step, which includes warm-up.
    values = [value for _, value in run.curves.get(name, []) if math.isfinite(value)]
    values = values[1:] or values
    return sum(values) / len(values) if values else None


def _mixture_cells(run: RunFiles) -> _Cells:
    headings = ["data set", "rows", "tokens", "rows per epoch", "repeats per epoch"]
    cells = [[*headings, "share of rows", "share of tokens"]]
    for row in run.mixture:
        counts = [f"{int(row.get(name) or 0):,}" for name in ("rows", "tokens", "rows_seen")]
        repeats = f"{row.get('epochs') or 0:.3g}"
        shares = [percent(row.get(name) or 0, 2) for name in ("share_of_rows", "share_of_tokens")]
        cells.append([printable(str(row.get("name"))), *counts, repeats, *shares])
    return cells


def _audit_cells(run: RunFiles) -> _Cells:
    rows = [row for row in _listed(run.audit, "datasets") if isinstance(row, dict)]
    names = [
        name
        for name in (rows[0] if rows else ())
        if name not in ("name", "path", "rows", "tokens")
        and any(isinstance(row.get(name), int) and row.get(name) for row in rows)
    ]
    cells = [["data set", *(name.replace("_", " ") for name in names)]]
    for row in rows:
        counts = [row.get(name) for name in names]
        shown = [f"{count:,}" if isinstance(count, int) else "0" for count in counts]
        cells.append([printable(str(row.get("name"))), *shown])
    return cells


def _listed(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key)
    return found if isinstance(found, list) else []


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", ""))


def _shown_prediction(line: Mapping[str, Any]) -> dict[str, Any]:
    texts = [("reference", line.get("reference"))]
    metrics = line.get("metrics")
    scores = metrics if isinstance(metrics, Mapping) else {}
    for variant in ("base", "tuned"):
        if variant in line:
            listed = ", ".join(
                f"{_title_of_column(name)} {_format_score(name, by_variant[variant])}"
                for name, by_variant in scores.items()
                if isinstance(by_variant, Mapping) and variant in by_variant
            )
            texts.append((f"{variant} ({listed})" if listed else variant, line[variant]))
    source = f"{line.get('data_set', '')} {Path(str(line.get('source', ''))).name}".strip()
    shown = [(heading, _shorten(str(text))) for heading, text in texts if text is not None]
    prompt = _shorten(str(line.get("prompt", "")).strip())
    return {"source": printable(redact(source)), "prompt": prompt, "texts": shown}


def _format_score(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    is_number = isinstance(value, float)
    return _format_metric(name, value) if is_number else printable(str(value)[:40])


def _shorten(text: str) -> str:
    """Return a text without control characters and secrets, a long one without its middle."""
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - _MAX_TEXT:,} characters ...]\n{text[-half:]}"
    return printable(redact(text), keep="\n")


def _environment_cells(run: RunFiles) -> _Cells:
    manifest = run.manifest
    cells = [["property", "value"]]
    hardware = manifest.get("hardware") or {}
    cells += [[name, str(value)] for name, value in hardware.items() if value is not None]
    for name in ("precision", "strategy", "python"):
        if manifest.get(name):
            cells.append([name, str(manifest[name])])
    versions = manifest.get("versions") or {}
    if versions:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        cells.append(["versions", listed])
    if git := manifest.get("git"):
        changed = " with uncommitted changes" if git.get("changed") else ""
        cells.append(["commit", f"{git.get('commit')}{changed}"])
    if command := manifest.get("command"):
        cells.append(["command", " ".join(_without_folders(str(word)) for word in command)])
    return [[printable(redact(cell)) for cell in row] for row in cells]


def _metrics_cells(runs: Mapping[str, RunFiles]) -> _Cells:
    names = list(dict.fromkeys(name for run in runs.values() for name in run.metrics))
    if not names:
        names = list(dict.fromkeys(name for run in runs.values() for name in run.curves))
    # `val/loss` is the same as `tuned/val/loss`.
    names = [
        name
        for name in names
        if f"tuned/{name}" not in names
        and not any(part in name for part in (*_NOT_DRAWN, "/trained_tokens/"))
    ]
    cells = [["metric", *runs]]
    cells += [
        [printable(name), *(_format_metric(name, run.latest(name)) for run in runs.values())]
        for name in names
    ]
    return cells
