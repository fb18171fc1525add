"""The doctor verb: check this machine, and measure the bandwidth between ranks.

`python -m app.doctor`, or `torchrun --nproc-per-node=2 -m app.doctor +experiment=llama8b`. Exit
code 3 if something would stop a run.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.config import PlanConfig, load_config
from app.config.dispatch import run_plain_verb, version
from app.doctor import bandwidth
from app.doctor.bandwidth import (
    CommunicationCost,
    estimate_communication,
    hardware_of_ranks,
    list_link_rows,
    list_step_rows,
)
from app.doctor.facts import MachineFacts, read_facts, run_folders
from app.doctor.rows import MALICIOUS, OK, PROBLEM, Finding, compare_machines, list_rows
from app.process.collectives import all_gather
from app.process.environment import configure_libraries, run_program
from app.process.launch import is_first_on_machine, is_first_rank, read_launch
from app.process.logs import print_table, text_table
from common.errors import ENVIRONMENT_ERROR
from common.text import counted, printable

if TYPE_CHECKING:
    from rich.table import Table

_AS_JSON = "--json"
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(kw_only=True, slots=True)
class DoctorConfig:
    """Check this machine; under torchrun or srun also measure the bandwidth between ranks.

    --json prints the findings and more as JSON. The overrides of a training run, such as
    +experiment=llama8b strategy=zero3 output.dir=runs/1, are accepted as well: its folders are
    checked, and the communication of its step is compared with the measured bandwidth. Exit code 3
    if something would stop a run.
    """

    hub: bool = False
    """also check whether the Hugging Face hub can be reached; otherwise nothing is sent"""
    seconds: int = 60
    """time limit of the bandwidth measurement between ranks, in seconds"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    machines: tuple[MachineFacts, ...]
    rows: tuple[Finding, ...]
    measured: tuple[bandwidth.Measurement, ...] = ()
    communication: CommunicationCost | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing would stop a run."""
        return all(row.status != PROBLEM for row in self.rows)


def _examine(config: DoctorConfig, run: PlanConfig) -> Findings:
    """Check this machine, or all machines of the launched ranks; called on each rank."""
    launch = read_launch()
    if (launch.num_ranks or 1) == 1:
        facts = _read(config, run, imports=True)
        return Findings(machines=(facts,), rows=tuple(_list_rows(facts, run)))
    with bandwidth.report_lost_ranks():
        world = bandwidth.join_world()
        # The first rank of each machine reads it. Connecting has already imported the packages.
        own = _read(config, run, imports=False) if is_first_on_machine() else None
        machines = tuple(facts for facts in all_gather(own) if facts is not None)
        skews = bandwidth.measure_skews()
        measured = tuple(bandwidth.measure(world, config.seconds))
    rows = _list_rows(machines[0], run)
    for other in machines[1:]:
        rows += [
            dataclasses.replace(row, what=f"{other.host}: {row.what}")
            for row in _list_rows(other, run)
            if row.status != OK
        ]
    rows += compare_machines(machines, skews)
    hardware = hardware_of_ranks(
        run.hardware, machines[0].machine, world.num_local_ranks, world.num_nodes
    )
    rows += list_link_rows(measured, hardware)
    cost = None
    if run.model.path is not None or run.model.architecture:
        cost = estimate_communication(run, hardware, measured)
        rows += list_step_rows(cost)
    return Findings(machines=machines, rows=tuple(rows), measured=measured, communication=cost)


def _read(config: DoctorConfig, run: PlanConfig, *, imports: bool) -> MachineFacts:
    folders = run_folders(run.output.dir, run.data.cache_dir)
    return read_facts(folders, list(MALICIOUS), checks_hub=config.hub, imports=imports)


def _list_rows(facts: MachineFacts, run: PlanConfig) -> list[Finding]:
    trainer = run.trainer
    return list_rows(
        facts, precision=trainer.precision, uses_gpus=trainer.accelerator in ("auto", "gpu")
    )


def as_json(findings: Findings) -> str:
    """Return all findings as one JSON object."""
    cost = findings.communication
    document: dict[str, Any] = {
        "ok": findings.is_good,
        "rows": [dataclasses.asdict(row) for row in findings.rows],
        "versions": {facts.host: facts.versions for facts in findings.machines},
        "bandwidth": [
            dataclasses.asdict(measurement) | {"gb_per_second": measurement.gb_per_second}
            for measurement in findings.measured
        ],
        "communication": None
        if cost is None
        else dataclasses.asdict(cost) | {"seconds": cost.seconds},
    }
    return json.dumps(document, indent=2)


def print_findings(findings: Findings) -> None:
    """Print the table of findings, and the bandwidth tables if ranks were launched."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table("", "", "found", box=None, pad_edge=False, show_header=False)
    for row in findings.rows:
        found = Text(printable(row.found))
        if row.fix:
            found.append(f"\n> {printable(row.fix)}", style="dim" if row.status == OK else "cyan")
        status = Text(row.status, style=_STYLES[row.status])
        table.add_row(status, Text(printable(row.what)), found)
    print_table(table, console)
    for further in _measured_tables(findings):
        console.print()
        print_table(further, console)
    bad = sum(row.status != OK for row in findings.rows)
    stops = sum(row.status == PROBLEM for row in findings.rows)
    console.print()
    if stops:
        console.print(
            f"{stops} of {counted(bad, 'finding')} would stop a run", style=_STYLES[PROBLEM]
        )
    else:
        console.print(f"nothing would stop a run; {counted(bad, 'warning')}")


def _measured_tables(findings: Findings) -> Iterator[Table]:
    """Yield the bandwidth by message size, and the communication of a step."""
    style: dict[str, Any] = {"box": None, "pad_edge": False}
    if measured := findings.measured:
        by_size: dict[int, dict[str, str]] = {}
        for each in measured:
            speeds = by_size.setdefault(each.num_bytes, {})
            speeds[each.kind] = bandwidth.format_speed(each.gb_per_second)
        cells: list[Sequence[str]] = [("message", *bandwidth.COLLECTIVES)]
        for size, speeds in by_size.items():
            mebibytes = size // bandwidth.MIB
            name = f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes // 1024} GiB"
            cells.append((name, *(speeds.get(kind, "-") for kind in bandwidth.COLLECTIVES)))
        title = f"bus bandwidth of {measured[0].num_ranks} ranks, GB/s (as in nccl-tests)"
        yield text_table(cells, title, **style)
    if (cost := findings.communication) is not None:
        cells = [("tensors", "collective", "times", "GB per rank", "x weights", "seconds")]
        for sent in cost.collectives:
            numbers = (f"{sent.times:g}", f"{sent.gb:.3g}", f"{sent.models:.3g}")
            seconds = "-" if sent.seconds is None else f"{sent.seconds:.3g}"
            cells.append((sent.what, sent.kind, *numbers, seconds))
        title = f"communication of a step under {cost.strategy}"
        yield text_table(cells, title, ("collective",), **style)


def doctor(config: DoctorConfig, overrides: Sequence[str], *, prints_json: bool) -> None:
    """Print the findings; SystemExit with code 3 if something would stop a run."""
    if is_first_rank():
        print(
            f"loft {version()} on {socket.gethostname()}: checking packages, devices, disks ...",
            file=sys.stderr if prints_json else sys.stdout,
            flush=True,
        )
    run = load_config("plan", list(overrides))
    assert isinstance(run, PlanConfig)
    findings = _examine(config, run)
    if is_first_rank():
        print(as_json(findings), flush=True) if prints_json else print_findings(findings)
    if not findings.is_good:
        raise SystemExit(ENVIRONMENT_ERROR)


def run_doctor(words: Sequence[str]) -> int:
    """Run the verb; return its exit code."""
    keys = {field.name for field in dataclasses.fields(DoctorConfig)}
    own = [word for word in words if word.partition("=")[0] in keys or word in ("--help", "-h")]
    run_overrides = [word for word in words if word not in (*own, _AS_JSON)]

    def start(config: DoctorConfig) -> None:
        doctor(config, run_overrides, prints_json=_AS_JSON in words)

    return run_plain_verb("doctor", DoctorConfig, start, own)


if __name__ == "__main__":
    configure_libraries(offline=False)  # so that HF_HUB_OFFLINE is reported as the user has set it
    run_program(lambda: run_doctor(sys.argv[1:]))
