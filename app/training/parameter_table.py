"""Tables of the trainable parameters: brief on screen, with all patterns and groups in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.model.adapter import report_trainable, trainable_weights
from app.process.logs import laid_out, show
from app.training.schedule import format_lr
from common.text import percent

if TYPE_CHECKING:
    import torch
    from rich.console import JustifyMethod
    from rich.table import Table

    from app.model.adapter.weights import TrainableReport

log = logging.getLogger(__name__)

MAX_ROWS = 20
MAX_BRIEF_ROWS = 5
MAX_SHAPES = 4
SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(slots=True)
class TrainedPattern:
    """Trainable parameters with the same name, except for layer numbers, and the same settings."""

    pattern: str
    """module names with `*` for layer numbers"""
    dtype: str
    lr: float
    """peak learning rate"""
    weight_decay: float
    num_weights: int = 0
    kinds: dict[str, None] = field(default_factory=dict)
    """trainable parts of the module, in the model's order: weight, bias, lora A, ..."""
    shapes: dict[str, None] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


def trained_patterns(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[TrainedPattern]:
    """Group trainable parameters by pattern, in the model's order, before a schedule is built."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    patterns: dict[Any, TrainedPattern] = {}
    for weight in trainable_weights(model):
        group = group_of[id(weight.parameter)]
        key = (
            ".".join("*" if part.isdigit() else part for part in weight.module.split(".")),
            str(weight.parameter.dtype).removeprefix("torch."),
            float(group["lr"]),
            float(group["weight_decay"]),
        )
        pattern = patterns.setdefault(key, TrainedPattern(*key))
        pattern.num_weights += weight.parameter.numel()
        pattern.kinds[weight.kind] = None
        pattern.shapes["x".join(map(str, weight.parameter.shape))] = None
        pattern.modules.add(weight.module)
    return list(patterns.values())


def trainable_table(patterns: list[TrainedPattern]) -> Table:
    """Build a table of the largest patterns, in the model's order; the last row sums up the others.

    Settings that all rows share (dtype, learning rate, decay) are in the title.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    shown, others = _largest(patterns)
    total = sum(pattern.num_weights for pattern in patterns)
    rows = [
        (
            escape(pattern.pattern),
            ", ".join(pattern.kinds),
            f"{len(pattern.modules):,}",
            _at_most(MAX_SHAPES, pattern.shapes),
            *_size(pattern.num_weights, total),
        )
        for pattern in shown
    ]
    if others:
        number = sum(len(pattern.modules) for pattern in others)
        size = _size(sum(pattern.num_weights for pattern in others), total)
        rows.append((f"{len(others):,} smaller ones", "", f"{number:,}", "", *size))
    settings = [_settings([pattern]) for pattern in shown] + [_settings(others)] * bool(others)
    shared = {name: text for name, text in settings[0].items() if _is_same(settings, name)}
    own = [name for name in settings[0] if name not in shared]

    title = ", ".join(
        ["trainable parameters", *(f"{name} {text}" for name, text in shared.items())]
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("module", "part", "modules", "shapes", "params", "share", *own):
        is_text = heading in ("module", "part", "shapes")
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=not is_text)
    for row, texts in zip(rows, settings, strict=True):
        table.add_row(*row, *(texts[name] for name in own))
    return table


def _largest(
    patterns: list[TrainedPattern],
) -> tuple[list[TrainedPattern], list[TrainedPattern]]:
    if len(patterns) <= MAX_ROWS:
        return patterns, []
    by_size = sorted(patterns, key=lambda pattern: pattern.num_weights, reverse=True)
    largest = {id(pattern) for pattern in by_size[: MAX_ROWS - 1]}
    return (
        [pattern for pattern in patterns if id(pattern) in largest],
        [pattern for pattern in patterns if id(pattern) not in largest],
    )


def _size(num_weights: int, total: int) -> tuple[str, str]:
    return f"{num_weights:,}", percent(num_weights / total)


def _settings(patterns: list[TrainedPattern]) -> dict[str, str]:
    """Return the settings of several patterns, as text."""
    texts = {
        "dtype": [pattern.dtype for pattern in patterns],
        "lr": [format_lr(pattern.lr) for pattern in patterns],
        "decay": [f"{pattern.weight_decay:g}" for pattern in patterns],
    }
    return {name: _at_most(2, dict.fromkeys(values)) for name, values in texts.items()}


def _is_same(settings: list[dict[str, str]], name: str) -> bool:
    return len({texts[name] for texts in settings}) == 1


def _at_most(count: int, words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:count] + ["..."] * (len(words) > count))


def groups_table(optimizer: torch.optim.Optimizer) -> Table:
    """Build a table of the optimizer's groups, before a schedule is built."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    title = f"parameter groups of {type(optimizer).__name__}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("group", "tensors", "params", "share", "lr", "decay"):
        table.add_column(heading, justify="left" if heading == "group" else "right")
    total = num_grouped(optimizer)
    for group in optimizer.param_groups:
        table.add_row(
            escape(group["name"]),
            f"{len(group['params']):,}",
            *_size(sum(p.numel() for p in group["params"]), total),
            format_lr(group["lr"]),
            f"{group['weight_decay']:g}",
        )
    return table


def num_grouped(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of weights in all groups of the optimizer."""
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def describe_parameters(report: TrainableReport) -> list[str]:
    """Return a line about the trainable parameters, and one about the memory of all weights."""
    share = percent(report.num_trainable / report.num_total, 2)
    counts = {SHORT_DTYPES.get(name, name): n for name, n in sorted(report.dtypes.items())}
    dtypes = ", ".join(f"{n:,} {name}" for name, n in counts.items())
    if len(counts) == 1:
        dtypes = next(iter(counts))
    mib = report.num_bytes / 2**20
    size = f"{mib:,.1f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
    return [
        f"trainable params: {report.num_trainable:,} / {report.num_total:,} ({share})",
        f"model weights: {dtypes}, {size}",
    ]


def brief_table(patterns: list[TrainedPattern]) -> Table:
    """Build a table that fits into 80 columns, with short names and a row for each parent module.

    `self_attn: q_proj, k_proj` are these modules in every layer. Settings that differ between rows
    have their own columns.
    """
    from rich.markup import escape
    from rich.table import Table

    rows: dict[Any, list[TrainedPattern]] = {}
    for pattern in patterns:
        parent, _ = _short_name(pattern.pattern)
        settings = (pattern.dtype, pattern.lr, pattern.weight_decay)
        rows.setdefault((parent, tuple(pattern.kinds), settings), []).append(pattern)
    by_size = sorted(rows.values(), key=_num_weights, reverse=True)
    largest = {id(row) for row in by_size[: MAX_BRIEF_ROWS - 1]}
    if len(rows) <= MAX_BRIEF_ROWS:
        largest = {id(row) for row in by_size}
    shown = [row for row in rows.values() if id(row) in largest]
    others = [pattern for row in rows.values() if id(row) not in largest for pattern in row]
    total = _num_weights(patterns)

    own = [name for name in _settings(patterns) if name not in shared_settings(patterns)]
    table = Table(box=None, pad_edge=False)
    for heading in ("module", "part", "modules", "params", "share", *own):
        is_text = heading in ("module", "part")
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=not is_text)
    for row in [*shown, *([others] if others else [])]:
        name = f"{len(others):,} smaller ones" if row is others else _names_of(row)
        kinds = "" if row is others else ", ".join(row[0].kinds).replace(", lora ", ", ")
        number = sum(len(pattern.modules) for pattern in row)
        settings_of_row = _settings(row)
        table.add_row(
            escape(name),
            kinds,
            f"{number:,}",
            *_size(_num_weights(row), total),
            *(settings_of_row[setting] for setting in own),
        )
    return table


def _num_weights(patterns: Iterable[TrainedPattern]) -> int:
    return sum(pattern.num_weights for pattern in patterns)


def _short_name(pattern: str) -> tuple[str, str]:
    """Return the parent and the name of a module, relative to its layer if it is in one."""
    before, star, inside = pattern.partition("*.")
    parent, _, name = (inside if star else before).rpartition(".")
    return (parent, name) if star else ("", name)


def _names_of(row: list[TrainedPattern]) -> str:
    parents, names = zip(*(_short_name(pattern.pattern) for pattern in row), strict=True)
    joined = ", ".join(dict.fromkeys(names))
    return f"{parents[0]}: {joined}" if parents[0] else joined


def shared_settings(patterns: list[TrainedPattern]) -> dict[str, str]:
    """Return the settings (dtype, learning rate, decay) that all patterns share, as text."""
    settings = [_settings([pattern]) for pattern in patterns]
    return {name: text for name, text in settings[0].items() if _is_same(settings, name)}


def print_parameter_table(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print the trainable parameters, and log every pattern, shape and group of the optimizer.

    ValueError if the groups do not hold all trainable parameters.
    """
    report = report_trainable(model)
    if (grouped := num_grouped(optimizer)) != report.num_trainable:
        raise ValueError(
            f"the optimizer's groups hold {grouped:,} weights, but {report.num_trainable:,} are "
            "trainable"
        )
    patterns = trained_patterns(model, optimizer)
    for table in (trainable_table(patterns), groups_table(optimizer)):
        log.debug("%s", laid_out(table))
    trainable, memory = describe_parameters(report)
    shared = shared_settings(patterns)
    texts = [
        SHORT_DTYPES.get(text, text) if name == "dtype" else f"{name} {text}"
        for name, text in shared.items()
    ]
    log.info("%s", ", ".join([trainable, *texts]))
    log.info("%s", memory)
    show(brief_table(patterns))
