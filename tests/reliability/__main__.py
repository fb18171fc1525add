"""Run all chains of a seed and print their results; chains with saved results are skipped.

`python -m tests.reliability [seed=N] [full] [only=PART_OF_A_NAME]`; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from queue import Queue

from benchmarks.figure import Figure, print_figures
from tests.conftest import ROOT
from tests.processes import GONE_WITHIN
from tests.reliability.cases import Chain, make_base
from tests.reliability.chain import References, Result, count_operations, run_chain
from tests.reliability.plans import COUNTED, NUM_KILLS, plan_chains
from tests.reliability.shell import Shell

AT_ONCE = 2
"""number of concurrent runs"""
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
"""kind of a death -> name of its figure"""


def main(words: list[str]) -> int:
    """Run the chains without a saved result."""
    options = dict(word.partition("=")[::2] for word in words)
    seed, is_full = int(options.get("seed") or 0), "full" in options
    folder = ROOT / "outputs" / "chaos" / f"seed-{seed}{'-full' if is_full else ''}"
    remove_outdated_results(folder)
    make_base(folder)
    part = options.get("only", "")
    references = References(folder)
    people = [Shell(folder / "cache") for _ in range(AT_ONCE)]
    began = time.monotonic()
    counted = {variant: count_operations(variant, people[0], references) for variant in COUNTED}
    planned = plan_chains(seed, counted, is_full=is_full)
    chains = [chain for chain in planned if part in chain.name]
    results = Results(folder / "results.jsonl", chains)
    left = [chain for chain in chains if chain.name not in results.good]
    print(f"{len(chains)} chains, {len(chains) - len(left)} of them done before; {folder}")
    run_all(left, references, people, seed, results)
    shown = [results.of[chain.name] for chain in chains]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{len(left)} chains in {time.monotonic() - began:.0f} s, {cpu:.0f} s of processors")
    figures = figures_of(shown)
    print_figures(figures)
    return 0 if all(result.is_good for result in shown) and all(f.ok for f in figures) else 1


class Results:
    """Results in a file, each used as long as its chain is unchanged."""

    def __init__(self, file: Path, chains: Sequence[Chain]) -> None:
        self.file = file
        self.of: dict[str, Result] = {}
        self.chains = {chain.name: repr(chain) for chain in chains}
        for line in file.read_text().splitlines() if file.exists() else []:
            saved = json.loads(line)
            if saved.pop("plan") == self.chains.get(saved["chain"]):
                self.of[saved["chain"]] = Result(**saved)

    @property
    def good(self) -> set[str]:
        return {name for name, result in self.of.items() if result.is_good}

    def save(self, result: Result) -> None:
        self.of[result.chain] = result
        with self.file.open("a") as file:
            row = {"plan": self.chains[result.chain], **asdict(result)}
            file.write(json.dumps(row) + "\n")


def remove_outdated_results(folder: Path) -> None:
    """Empty `folder` if its results are of another version of the program."""
    sources, hash_file = hash_sources(), folder / "sources"
    if not hash_file.exists() or hash_file.read_text() != sources:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        hash_file.write_text(sources)


def hash_sources() -> str:
    """Return a hash of the program, its settings and the harness."""
    files = [
        file
        for folder in ("app", "common", "data_modules", "conf")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".py", ".yaml")
    ]
    own = ("cases", "chain", "python", "shell", "warm")
    files += [Path(__file__).parent / f"{name}.py" for name in own]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def run_all(
    chains: list[Chain], references: References, people: list[Shell], seed: int, results: Results
) -> None:
    """Run `chains`, one per shell at a time, and print the outcome of each."""
    free: Queue[Shell] = Queue()
    for shell in people:
        free.put(shell)

    def run(chain: Chain) -> Result:
        shell = free.get()
        try:
            return run_chain(chain, shell, references, seed)
        finally:
            free.put(shell)

    with ThreadPoolExecutor(len(people)) as pool:
        running = [pool.submit(run, chain) for chain in chains]
        for number, done in enumerate(as_completed(running), 1):
            result = done.result()
            results.save(result)
            outcome = "equal" if result.is_good else f"FAILED: {result.problems}"
            print(f"[{number}/{len(chains)}] {result.chain}: {outcome}", flush=True)


def figures_of(results: list[Result]) -> list[Figure]:
    """Return the figures: planned deaths, and those of successful chains."""
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
    kinds = ("kills", "kills in a save")
    if any(planned[what] for what in kinds):
        killed = sum(done[what] for what in kinds)
        bar = min(NUM_KILLS, sum(planned[what] for what in kinds))
        first = Figure(figure="chaos/kills_bitwise_equal", value=killed, bar=bar, better="higher")
        most = max(result.kills_in_one_epoch for result in results if "kills" in result.planned)
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
