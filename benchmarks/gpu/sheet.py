"""The results as a Markdown page per day and device."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from benchmarks.figure import Figure
from common.text import percent

PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "A100": 312.0}
"""peak dense bf16 FLOP/s by datasheet, for the MFU, by a part of the GPU's name"""
PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "lightning", "flash-attn", "liger-kernel"
)  # fmt: skip
COLUMNS = (
    "part", "system", "attention", "kernels", "tokens/s", "MFU", "peak GiB",
    "ms a step: forward", "head and loss in it", "backward", "optimizer", "between",
    "kernels' ms: attention", "products", "dequantizing", "other", "rounds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one system with one part; numbers are medians over its rounds."""

    part: str
    system: str
    note: str
    """how it differs from the requested configuration; empty if it does not"""
    attention: str
    kernels: str
    """kernels that replaced the model's norms and gates, as logged by the run"""
    tokens_per_second: float
    mfu: float | None
    """None if the GPU's peak is unknown"""
    peak_gib: float | None
    spans: dict[str, float]
    """milliseconds of a step by part"""
    kinds: dict[str, float]
    """milliseconds of a step's kernels by kind"""
    rounds: int

    def cells(self) -> list[str]:
        """Return the table's row."""
        inside = ("layers", "head and loss", "forward")
        forward = sum(self.spans.get(name, 0.0) for name in inside)
        head = self.spans.get("head and loss")
        spans = (self.spans.get(name, 0.0) for name in ("backward", "optimizer", "between"))
        other = self.kinds.get("other", 0.0) + self.kinds.get("copies", 0.0)
        kinds = (self.kinds.get(name, 0.0) for name in ("attention", "products", "dequantizing"))
        return [
            f"{self.part}{f' ({self.note})' if self.note else ''}",
            self.system,
            self.attention,
            self.kernels,
            f"{self.tokens_per_second:,.0f}",
            "-" if self.mfu is None else percent(self.mfu),
            "-" if self.peak_gib is None else f"{self.peak_gib:.1f}",
            f"{forward:,.0f}",
            "-" if head is None else f"{head:,.0f}",
            *(f"{span:,.0f}" for span in spans),
            *(f"{kind:,.0f}" for kind in (*kinds, other)),
            str(self.rounds),
        ]


T = TypeVar("T")


def of_device(by_name: dict[str, T], device: str) -> T | None:
    """Return the entry of a GPU, by the first key that is in its name."""
    return next((known for name, known in by_name.items() if name in device), None)


def write_sheet(
    folder: Path,
    device: str,
    about: str,
    results: Sequence[Result],
    figures: Sequence[Figure],
    aims: dict[str, float],
    left_out: Sequence[str],
) -> Path:
    """Write FOLDER/DATE_DEVICE.md; a sheet of the same day and device is replaced."""
    today = date.today().isoformat()
    path = folder / f"{today}_{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.md"
    lines = [
        f"# {today}, {device}",
        "",
        f"{versions()}. `make bench-gpu`. {about}",
        "",
        *_table(COLUMNS, [result.cells() for result in results]),
        "",
        *_table(
            ("figure", "value", "bar", "aim", "ok"),
            [
                [
                    figure.figure,
                    f"{figure.value:,.4g}" if figure.value < 100 else f"{figure.value:,.0f}",
                    f"{figure.bar:,.6g}",
                    f"{aims[figure.figure]:,.6g}" if figure.figure in aims else "",
                    "yes" if figure.ok else "no",
                ]
                for figure in figures
            ],
        ),
    ]
    if left_out:
        lines += ["", "Left out:", "", *(f"- {line}" for line in left_out)]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def versions() -> str:
    """Return the versions of the packages."""
    import platform

    import torch

    found = {name: _version(name) for name in PACKAGES}
    parts = [f"Python {platform.python_version()}"]
    parts += [f"{name} {version}" for name, version in found.items() if version]
    parts += [f"no {name}" for name, version in found.items() if not version]
    return ", ".join([*parts, f"CUDA {torch.version.cuda}", f"driver {driver()}"])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str:
    """Return the version of the NVIDIA driver, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"
