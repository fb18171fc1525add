"""Tables of the trainable parameters: brief on screen, with all patterns and groups in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.model.adapter import report_trainable, trainable_weights
from app.process.logs import laid_out, show, text_table
from app.training.schedule import format_lr
from common.text import percent

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from app.model.adapter.weights import TrainableReport

log = logging.getLogger(__name__)

MAX_ROWS = 20
MAX_BRIEF_ROWS = 5
_MAX_SHAPES = 4
_SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


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


def trainable_table(patterns: list[TrainedPattern], *, is_brief: bool = False) -> Table:
    """Build a table of the largest patterns, in the model's order; the last row sums up the others.

    Settings that all rows share (dtype, learning rate, decay) are in the title. `is_brief`: without
    title and shapes, with a row for each parent module, to fit into 80 columns:
    `self_attn: q_proj, k_proj` are these modules in every layer.
    """
    from rich.box import SIMPLE_HEAD

    rows = _by_parent(patterns) if is_brief else [[pattern] for pattern in patterns]
    most, others = MAX_BRIEF_ROWS if is_brief else MAX_ROWS, []
    if len(rows) > most:
        largest = sorted(rows, key=_num_weights, reverse=True)[: most - 1]
        others = [pattern for row in rows if row not in largest for pattern in row]
        rows = [*(row for row in rows if row in largest), others]
    shared, total = shared_settings(patterns), _num_weights(patterns)
    own = [name for name in _settings(patterns) if name not in shared]
    shapes = [] if is_brief else ["shapes"]
    cells = [["module", "part", "modules", *shapes, "params", "share", *own]]
    for row in rows:
        names = [f"{len(others):,} smaller ones", ""] if row is others else _names_of(row, is_brief)
        number = sum(len(pattern.modules) for pattern in row)
        own_shapes = "" if row is others else _at_most(_MAX_SHAPES, row[0].shapes)
        settings = _settings(row)
        row_cells = [*names, f"{number:,}", *([own_shapes] * len(shapes))]
        cells.append([*row_cells, *_size(_num_weights(row), total), *(settings[n] for n in own)])
    texts = ("part", "shapes")
    if is_brief:
        return text_table(cells, texts=texts, box=None, pad_edge=False)
    title = ["trainable parameters", *(f"{name} {text}" for name, text in shared.items())]
    return text_table(cells, ", ".join(title), texts, box=SIMPLE_HEAD)


def _by_parent(patterns: list[TrainedPattern]) -> list[list[TrainedPattern]]:
    rows: dict[Any, list[TrainedPattern]] = {}
    for pattern in patterns:
        parent, _ = _short_name(pattern.pattern)
        settings = (pattern.dtype, pattern.lr, pattern.weight_decay)
        rows.setdefault((parent, tuple(pattern.kinds), settings), []).append(pattern)
    return list(rows.values())


def _num_weights(patterns: Iterable[TrainedPattern]) -> int:
    return sum(pattern.num_weights for pattern in patterns)


def _short_name(pattern: str) -> tuple[str, str]:
    """Return the parent and the name of a module, relative to its layer if it is in one."""
    before, star, inside = pattern.partition("*.")
    parent, _, name = (inside if star else before).rpartition(".")
    return (parent, name) if star else ("", name)


def _names_of(row: list[TrainedPattern], is_brief: bool) -> list[str]:
    """Return the names of the modules of a row, and of their trainable parts."""
    kinds = ", ".join(row[0].kinds)
    if not is_brief:
        return [row[0].pattern, kinds]
    parents, names = zip(*(_short_name(pattern.pattern) for pattern in row), strict=True)
    joined = ", ".join(dict.fromkeys(names))
    name = f"{parents[0]}: {joined}" if parents[0] else joined
    return [name, kinds.replace(", lora ", ", ")]


def _size(num_weights: int, total: int) -> tuple[str, str]:
    return f"{num_weights:,}", percent(num_weights / total)


def _settings(patterns: list[TrainedPattern]) -> dict[str, str]:
    texts = {
        "dtype": [pattern.dtype for pattern in patterns],
        "lr": [format_lr(pattern.lr) for pattern in patterns],
        "decay": [f"{pattern.weight_decay:g}" for pattern in patterns],
    }
    return {name: _at_most(2, dict.fromkeys(values)) for name, values in texts.items()}


def _at_most(count: int, words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:count] + ["..."] * (len(words) > count))


def shared_settings(patterns: list[TrainedPattern]) -> dict[str, str]:
    """Return the settings (dtype, learning rate, decay) that all patterns share, as text."""
    first, *others = (_settings([pattern]) for pattern in patterns)
    return {name: text for name, text in first.items() if all(o[name] == text for o in others)}


def _groups_table(optimizer: torch.optim.Optimizer) -> Table:
    """Build a table of the optimizer's groups, before a schedule is built."""
    from rich.box import SIMPLE_HEAD

    cells = [["group", "tensors", "params", "share", "lr", "decay"]]
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    for group, num_weights in zip(optimizer.param_groups, sizes, strict=True):
        size = _size(num_weights, sum(sizes))
        settings = format_lr(group["lr"]), f"{group['weight_decay']:g}"
        cells.append([group["name"], f"{len(group['params']):,}", *size, *settings])
    title = f"parameter groups of {type(optimizer).__name__}"
    return text_table(cells, title, box=SIMPLE_HEAD)


def describe_parameters(report: TrainableReport) -> list[str]:
    """Return a line about the trainable parameters, and one about the memory of all weights."""
    share = percent(report.num_trainable / report.num_total, 2)
    counts = {_SHORT_DTYPES.get(name, name): n for name, n in sorted(report.dtypes.items())}
    dtypes = ", ".join(f"{n:,} {name}" for name, n in counts.items())
    if len(counts) == 1:
        dtypes = next(iter(counts))
    mib = report.num_bytes / 2**20
    size = f"{mib:,.1f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"
    return [
        f"trainable params: {report.num_trainable:,} / {report.num_total:,} ({share})",
        f"model weights: {dtypes}, {size}",
    ]


def print_parameter_table(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print the trainable parameters, and log every pattern, shape and group of the optimizer."""
    patterns = trained_patterns(model, optimizer)
    for table in (trainable_table(patterns), _groups_table(optimizer)):
        log.debug("%s", laid_out(table))
    trainable, memory = describe_parameters(report_trainable(model))
    shared = shared_settings(patterns)
    texts = [
        _SHORT_DTYPES.get(text, text) if name == "dtype" else f"{name} {text}"
        for name, text in shared.items()
    ]
    log.info("%s", ", ".join([trainable, *texts]))
    log.info("%s", memory)
    show(trainable_table(patterns, is_brief=True))
