"""Run all cases of a seed and print what they showed; what is done already is not done again.

`python -m tests.reliability [seed=N] [full] [only=PART_OF_A_NAME]`; exit code 1 when a bar is
missed.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import Queue

from benchmarks.figure import Figure, print_figures
from tests.conftest import ROOT
from tests.processes import GONE_WITHIN
from tests.reliability.cases import Chain, make_base
from tests.reliability.chain import Result, Whole, count_operations, run_chain
from tests.reliability.person import Person
from tests.reliability.plans import COUNTED, NUM_KILLS, plan_chains

AT_ONCE = 2
"""runs"""
FIGURES = {
    "kills in a save": "kills_in_a_save",
    "write points": "write_points_survived",
    "damaged": "damaged_skipped",
    "sigterms": "sigterms_saved",
    "processes killed": "killed_processes_survived",
    "bad numbers": "bad_numbers_stopped",
    "disk full": "disk_full_last_good_kept",
    "kills of shares": "kills_under_strategies_bitwise_equal",
    "disk full for a share": "disk_full_for_a_share_last_good_kept",
}
"""of what a death is"""


def main(words: list[str]) -> int:
    """Run the chains that are not done."""
    options = dict(word.partition("=")[::2] for word in words)
    seed, is_full = int(options.get("seed") or 0), "full" in options
    folder = ROOT / "outputs" / "chaos" / f"seed-{seed}{'-full' if is_full else ''}"
    forget_other_programs(folder)
    make_base(folder)
    part = options.get("only", "")
    whole = Whole(folder)
    people = [Person(folder / "cache") for _ in range(AT_ONCE)]
    began = time.monotonic()
    counted = {variant: count_operations(variant, people[0], whole) for variant in COUNTED}
    planned = plan_chains(seed, counted, is_full=is_full)
    chains = [one for one in planned if part in one.name]
    results = Results(folder / "results.jsonl", chains)
    left = [chain for chain in chains if chain.name not in results.good]
    print(f"{len(chains)} chains, {len(chains) - len(left)} of them done before; {folder}")
    run_all(left, whole, people, seed, results)
    shown = [results.of[chain.name] for chain in chains]
    print_table(shown)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{len(left)} chains in {time.monotonic() - began:.0f} s, {cpu:.0f} s of processors")
    figures = figures_of(shown)
    print_figures(figures)
    return 0 if all(result.is_good for result in shown) and all(f.ok for f in figures) else 1


class Results:
    """Results that are kept in a file, as long as their chain is the same."""

    def __init__(self, file: Path, chains: Sequence[Chain]) -> None:
        self.file = file
        self.of: dict[str, Result] = {}
        self.chains = {chain.name: repr(chain) for chain in chains}
        for line in file.read_text().splitlines() if file.exists() else []:
            kept = json.loads(line)
            if kept.pop("plan") == self.chains.get(kept["chain"]):
                self.of[kept["chain"]] = Result(**kept)

    @property
    def good(self) -> set[str]:
        return {name for name, result in self.of.items() if result.is_good}

    def keep(self, result: Result) -> None:
        self.of[result.chain] = result
        with self.file.open("a") as file:
            told = {"plan": self.chains[result.chain], **asdict(result)}
            file.write(json.dumps(told) + "\n")


def forget_other_programs(folder: Path) -> None:
    """Empty `folder` of what another version of the program has shown."""
    sources, of_folder = hash_sources(), folder / "sources"
    if not of_folder.exists() or of_folder.read_text() != sources:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        of_folder.write_text(sources)


def hash_sources() -> str:
    """Hash all that is run."""
    files = [
        file
        for folder in ("app", "data_modules", "conf")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".py", ".yaml")
    ]
    own = ("cases", "chain", "person", "warm")
    files += [Path(__file__).parent / f"{name}.py" for name in own]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def run_all(
    chains: list[Chain], whole: Whole, people: list[Person], seed: int, results: Results
) -> None:
    """Run `chains`, one a person at once, and say how each went."""
    free: Queue[Person] = Queue()
    for person in people:
        free.put(person)

    def run(chain: Chain) -> Result:
        person = free.get()
        try:
            return run_chain(chain, person, whole, seed)
        finally:
            free.put(person)

    with ThreadPoolExecutor(len(people)) as pool:
        running = [pool.submit(run, chain) for chain in chains]
        for number, done in enumerate(as_completed(running), 1):
            result = done.result()
            results.keep(result)
            how = "equal" if result.is_good else f"NOT AS IT MUST BE: {result.problems}"
            print(f"[{number}/{len(chains)}] {result.chain}: {how}", flush=True)
    for person in people:
        person.close()


def print_table(results: Iterable[Result]) -> None:
    """Print a line a chain."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("case", "done", "equal", "seconds"):
        table.add_column(column, justify="left" if column in ("case", "equal") else "right")
    for one in results:
        done = f"{sum(one.done.values())}/{sum(one.planned.values())}"
        table.add_row(one.chain, done, "yes" if one.is_equal else "NO", f"{one.seconds:.1f}")
    Console().print(table)


def figures_of(results: list[Result]) -> list[Figure]:
    """Return the figures: what was done, of what was planned, in runs that were as they must be."""
    planned, done = Counter[str](), Counter[str]()
    for result in results:
        planned.update(result.planned)
        if result.is_good:
            done.update(result.done)
    figures = [
        Figure(figure=f"chaos/{name}", value=done[what], bar=planned[what], better="higher")
        for what, name in FIGURES.items()
        if planned[what]
    ]
    in_all = ("kills", "kills in a save")
    if any(planned[what] for what in in_all):
        killed = sum(done[what] for what in in_all)
        bar = min(NUM_KILLS, sum(planned[what] for what in in_all))
        first = Figure(figure="chaos/kills_bitwise_equal", value=killed, bar=bar, better="higher")
        most = max(one.kills_in_one_epoch for one in results if "kills" in one.planned)
        figures = [
            first,
            Figure(figure="chaos/kills_in_one_epoch", value=most, bar=2, better="higher"),
            *figures,
        ]
    if results:
        longest = max(result.seconds_until_gone for result in results)
        figures.append(
            Figure(figure="chaos/seconds_until_no_process_left", value=longest, bar=GONE_WITHIN)
        )
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
