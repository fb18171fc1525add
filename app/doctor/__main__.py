"""Doctor: what is wrong with this machine, and how fast its ranks talk.

`python -m app.doctor`, or `torchrun --nproc-per-node=2 -m app.doctor +experiment=llama8b`. Exit
code 3 where something would stop a run.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.config import PlanConfig, load_config
from app.config.dispatch import version
from app.config.plain import run_plain_verb
from app.doctor import bandwidth
from app.doctor.facts import Facts, folders_of, read_facts
from app.doctor.needs import (
    Needs,
    estimate_needs,
    hardware_of_ranks,
    judge_link,
    judge_needs,
)
from app.doctor.rows import MALICIOUS, OK, PROBLEM, Row, compare_machines, list_rows
from app.process.environment import keep_streams, quiet_libraries
from app.process.errors import ENVIRONMENT_ERROR
from app.process.launch import is_first_here, is_first_rank, read_launch
from app.process.signals import end_process, install_signal_handlers
from data_modules import printable

AS_JSON = "--json"
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(kw_only=True, slots=True)
class DoctorConfig:
    """Say what is wrong with this machine; under torchrun or srun, how fast its ranks talk.

    --json prints the same and more as JSON. Further words are those of a training, as
    +experiment=llama8b strategy=zero3 output.dir=runs/1: its folders are looked at, and what its
    step sends stands beside what was measured. Exit code 3: something would stop a run.
    """

    hub: bool = False
    """also whether the Hugging Face hub can be reached; nothing is sent unless asked"""
    seconds: int = 60
    """that measuring the bandwidth between ranks may take"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All that is printed."""

    machines: tuple[Facts, ...]
    rows: tuple[Row, ...]
    measured: tuple[bandwidth.Measured, ...] = ()
    needs: Needs | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing would stop a run."""
        return all(row.status != PROBLEM for row in self.rows)


def examine(config: DoctorConfig, run: PlanConfig) -> Findings:
    """Look at this machine, or at all machines of the ranks that were launched, on each rank."""
    launch = read_launch()
    if (launch.num_ranks or 1) == 1:
        facts = _read(config, run, imports=True)
        return Findings(machines=(facts,), rows=tuple(_judge(facts, run)))
    with bandwidth.lost_ranks_named():
        world = bandwidth.join_world()
        # What is imported here has shown that it can be; the first of each machine looks.
        own = _read(config, run, imports=False) if is_first_here() else None
        machines = tuple(one for one in bandwidth.gather(own) if one is not None)
        skews = bandwidth.measure_skews()
        measured = tuple(bandwidth.measure(world, config.seconds))
    rows = _judge(machines[0], run)
    for other in machines[1:]:
        rows += [
            dataclasses.replace(row, what=f"{other.host}: {row.what}")
            for row in _judge(other, run)
            if row.status != OK
        ]
    rows += compare_machines(machines, skews)
    hardware = hardware_of_ranks(
        run.hardware, machines[0].machine, world.ranks_here, world.num_nodes
    )
    rows += judge_link(measured, hardware)
    needs = None
    if run.model.path is not None or run.model.architecture:
        needs = estimate_needs(run, hardware, measured)
        rows += judge_needs(needs)
    return Findings(machines=machines, rows=tuple(rows), measured=measured, needs=needs)


def _read(config: DoctorConfig, run: PlanConfig, *, imports: bool) -> Facts:
    folders = folders_of(run.output.dir, run.data.cache_dir)
    return read_facts(folders, list(MALICIOUS), asks_hub=config.hub, imports=imports)


def _judge(facts: Facts, run: PlanConfig) -> list[Row]:
    trainer = run.trainer
    return list_rows(
        facts, precision=trainer.precision, uses_gpus=trainer.accelerator in ("auto", "gpu")
    )


def as_json(findings: Findings) -> str:
    """Return all findings as one JSON object."""
    needs = findings.needs
    document: dict[str, Any] = {
        "ok": findings.is_good,
        "rows": [dataclasses.asdict(row) for row in findings.rows],
        "versions": {one.host: one.versions for one in findings.machines},
        "bandwidth": [
            dataclasses.asdict(one) | {"gb_per_second": one.gb_per_second}
            for one in findings.measured
        ],
        "needs": None if needs is None else dataclasses.asdict(needs) | {"seconds": needs.seconds},
    }
    return json.dumps(document, indent=2)


def print_findings(findings: Findings) -> None:
    """Print the table of rows, and those of the bandwidth where ranks were launched."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table("", "", "found", box=None, pad_edge=False, show_header=False)
    for row in findings.rows:
        found = Text(printable(row.found))
        if row.fix:
            found.append(f"\n> {printable(row.fix)}", style="dim" if row.status == OK else "cyan")
        status = Text(row.status, style=STYLES[row.status])
        table.add_row(status, Text(printable(row.what)), found)
    console.print(table)
    if findings.measured:
        _print_bandwidth(console, findings.measured)
    if findings.needs is not None:
        _print_needs(console, findings.needs)
    bad = sum(row.status != OK for row in findings.rows)
    stops = sum(row.status == PROBLEM for row in findings.rows)
    console.print()
    if stops:
        console.print(f"{stops} of {bad} findings would stop a run", style=STYLES[PROBLEM])
    else:
        console.print(f"nothing would stop a run; {bad} warning{'s' * (bad != 1)}")


def _print_bandwidth(console: Any, measured: Sequence[bandwidth.Measured]) -> None:
    by_size: dict[int, dict[str, str]] = {}
    for one in measured:
        by_size.setdefault(one.num_bytes, {})[one.kind] = bandwidth.format_speed(one.gb_per_second)
    rows = []
    for size, cells in by_size.items():
        mebibytes = size // bandwidth.MIB
        name = f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes // 1024} GiB"
        rows.append((name, *(cells.get(kind, "-") for kind in bandwidth.KINDS)))
    title = f"bus bandwidth of {measured[0].num_ranks} ranks, GB/s (as nccl-tests count it)"
    _print_table(console, title, ("message", *bandwidth.KINDS), rows, names=1)


def _print_needs(console: Any, needs: Needs) -> None:
    rows = [
        (
            need.what,
            need.kind,
            f"{need.times:g}",
            f"{need.gb:.3g}",
            f"{need.models:.3g}",
            "-" if need.seconds is None else f"{need.seconds:.3g}",
        )
        for need in needs.needs
    ]
    columns = ("what", "by", "times", "GB a rank", "x weights", "seconds")
    _print_table(console, f"what a step under {needs.strategy} sends", columns, rows, names=2)
    rule = "" if needs.rule_seconds is None else f", {needs.rule_seconds:.3g} s"
    console.print(
        f"48 x M / N, of full sharding: {needs.rule_gbit:,.3g} Gbit a node and micro-step{rule}"
    )


def _print_table(
    console: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: int
) -> None:
    """Print rows below a title, numbers to the right; the first `names` columns hold none."""
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for column in table.columns[names:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def doctor(config: DoctorConfig, words: Sequence[str], *, json_asked: bool) -> None:
    """Print what is found; SystemExit with code 3 where something would stop a run."""
    if is_first_rank():
        print(
            f"loft {version()} on {socket.gethostname()}: looking at packages, devices, disks ...",
            file=sys.stderr if json_asked else sys.stdout,
            flush=True,
        )
    run = load_config("plan", list(words))
    assert isinstance(run, PlanConfig)
    findings = examine(config, run)
    if is_first_rank():
        print(as_json(findings), flush=True) if json_asked else print_findings(findings)
    if not findings.is_good:
        raise SystemExit(ENVIRONMENT_ERROR)


def run_doctor(words: Sequence[str]) -> int:
    """Run the verb; return its exit code."""
    keys = {field.name for field in dataclasses.fields(DoctorConfig)}
    own = [word for word in words if word.partition("=")[0] in keys or word in ("--help", "-h")]
    of_run = [word for word in words if word not in (*own, AS_JSON)]

    def start(config: DoctorConfig) -> None:
        doctor(config, of_run, json_asked=AS_JSON in words)

    return run_plain_verb("doctor", DoctorConfig, start, own)


if __name__ == "__main__":
    keep_streams()
    quiet_libraries(offline=False)  # else it would seem that the user had set it
    install_signal_handlers()
    end_process(run_doctor(sys.argv[1:]))
