"""Run the rows of an evaluation on all ranks, save each result when computed, show the progress.

An evaluation that was killed resumes from the saved results, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from app.process.collectives import all_gather
from app.process.launch import is_first_rank, local_rank, read_launch
from app.training.checkpoint.documents import differences
from app.training.run_documents import RESULT
from common.errors import UserError
from common.files import open_no_follow
from common.text import counted, duration
from common.untrusted import parse_json

if TYPE_CHECKING:
    from torch import Tensor

_RANK_TIMEOUT = timedelta(hours=12)
"""timeout of a collective operation: other ranks wait while the first one queries a judge"""
PARTIAL = "partial"
"""subfolder of the evaluation's folder with the results so far; removed at the end"""
Batches = Iterator[list[tuple[int, Any]]]
"""batches of (row index, JSON-serializable result)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRunner:
    """Divides rows among ranks, and saves and reuses their results."""

    folder: Path | None = None
    """folder of the evaluation, in which results are saved; None = results are not saved"""
    identity: str = ""
    """identifies the measured models: saved results of other models are not reused"""
    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[dict[int, Any]], Sequence[dict[int, Any]]] = lambda own: [own]
    """collective that returns the argument of every rank, on every rank"""
    show: Callable[[str, int, int], None] = lambda key, done, total: None
    """shows the progress of this rank: (key, number of rows done, total)"""
    own_rows: Callable[[], AbstractContextManager[object]] = nullcontext
    """context of this rank's work on its rows; may end it early if `agree` then raises"""
    agree: Callable[[], object] = lambda: None
    """collective before results are gathered; raises on all ranks if they do not continue"""

    def run(
        self, key: str, content: Any, count: int, work: Callable[[list[int]], Batches]
    ) -> list[Any]:
        """Return the results of rows 0 to `count` - 1, on every rank.

        `work` computes the rows whose indices it gets, and yields (position in that list, result).
        `key` names the file of the results; saved results are reused if `content`, all that they
        depend on besides the model, is unchanged.
        """
        fingerprint = self._fingerprint(content)
        saved = self._saved_on_any_rank(key, fingerprint)
        remaining = [row for row in range(count) if row not in saved]
        own = remaining[self.rank :: self.num_ranks]
        results = {row: result for row, result in saved.items() if row < count}
        computed: dict[int, Any] = {}
        self.show(key, 0, len(own))
        if own:
            with self.own_rows(), self._writer(key, fingerprint) as write:
                for batch in work(own):
                    numbered = [(own[index], result) for index, result in batch]
                    write(numbered)
                    computed.update(numbered)
                    self.show(key, len(computed), len(own))
        self.agree()
        for of_rank in self.gather(computed):
            results.update(of_rank)
        return [results[row] for row in range(count)]

    def run_once(self, key: str, content: Any, work: Callable[[], Any]) -> Any:
        """Return the saved result of `work`; if there is none, run it on all ranks and save it."""
        fingerprint = self._fingerprint(content)
        saved = self._saved_on_any_rank(key, fingerprint)
        if 0 in saved:
            return saved[0]
        result = work()
        if self.rank == 0:
            with self._writer(key, fingerprint) as write:
                write([(0, result)])
        return result

    def remove_partial_results(self) -> None:
        """Remove the saved results, once the evaluation has written its own files."""
        if self.folder is None or not (self.folder / PARTIAL).is_dir():
            return
        for file in (self.folder / PARTIAL).glob("*.jsonl"):
            file.unlink()
        (self.folder / PARTIAL).rmdir()

    def _fingerprint(self, content: Any) -> str:
        text = json.dumps([self.identity, content], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _file(self, key: str, rank: int | str) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._-]', '_', key)}.{rank}.jsonl"

    def _saved_on_any_rank(self, key: str, fingerprint: str) -> dict[int, Any]:
        """Return the saved results that any rank has read, the same on every rank.

        Otherwise a late rank would read what another has just written, and would divide fewer rows
        than the others.
        """
        saved: dict[int, Any] = {}
        for of_rank in self.gather(self._read_saved(key, fingerprint)):
            saved.update(of_rank)
        return saved

    def _read_saved(self, key: str, fingerprint: str) -> dict[int, Any]:
        """Return the results in the files of all ranks; an incomplete last line is ignored."""
        saved: dict[int, Any] = {}
        if self.folder is None:
            return saved
        for file in sorted((self.folder / PARTIAL).glob(self._file(key, "*"))):
            with open_no_follow(file, "r", encoding="utf-8") as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.endswith("\n"):
                        break
                    entry, problem = parse_json(line, file)
                    problem = problem or next(differences(entry, RESULT, ""), None)
                    if problem is not None:
                        raise UserError(
                            f"{file}:{number}: {problem}; remove the file to measure its rows again"
                        )
                    if entry["stamp"] == fingerprint:
                        saved[entry["row"]] = entry["result"]
        return saved

    @contextmanager
    def _writer(
        self, key: str, fingerprint: str
    ) -> Iterator[Callable[[list[tuple[int, Any]]], object]]:
        if self.folder is None:
            yield lambda results: None
            return
        (self.folder / PARTIAL).mkdir(exist_ok=True)
        file = self.folder / PARTIAL / self._file(key, self.rank)
        is_cut = file.is_file() and not file.read_bytes().endswith(b"\n")
        with open_no_follow(file, "a", encoding="utf-8") as stream:
            if is_cut:  # the process was killed while it wrote the last line
                lines = file.read_bytes().splitlines(keepends=True)[:-1]
                stream.truncate(sum(map(len, lines)))

            def write(results: list[tuple[int, Any]]) -> None:
                for row, result in results:
                    line = {"stamp": fingerprint, "row": row, "result": result}
                    stream.write(json.dumps(line) + "\n")
                stream.flush()

            yield write


def build_row_runner(
    folder: Path, identity: Any, show: Callable[[str, int, int], None], *, on_gpu: bool
) -> RowRunner:
    """Build the runner of this rank; with several ranks, initialize the process group."""
    num_ranks, rank = read_launch().num_ranks or 1, local_rank()
    text = json.dumps(identity, sort_keys=True, default=str)
    runner = RowRunner(folder=folder, identity=text, show=show)
    if num_ranks == 1:
        return runner
    import torch
    import torch.distributed as dist

    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=_RANK_TIMEOUT)
    return replace(runner, rank=rank, num_ranks=num_ranks, gather=all_gather)


def build_sum_over_ranks(runner: RowRunner) -> Callable[[Tensor], Tensor] | None:
    """Return a collective that sums a tensor over all ranks, on the CPU; None for one rank."""
    if runner.num_ranks == 1:
        return None
    import torch.distributed as dist

    def sum_over_ranks(values: Tensor) -> Tensor:
        on_cpu = values.cpu()
        dist.all_reduce(on_cpu)
        return on_cpu

    return sum_over_ranks


class Progress:
    """Shows the progress of the first rank, which stands for the others: their shares are equal."""

    def __init__(self, *, prints_lines: bool = True) -> None:
        self.prints_lines = prints_lines
        self.console = Console(file=sys.stdout, highlight=False)
        self.is_silent = not is_first_rank()
        self.bar: Bar | None = None
        self.tasks: dict[str, TaskID] = {}
        self.started = 0.0

    def __enter__(self) -> Progress:
        if not self.is_silent and self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=16),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, key: str, done: int, total: int) -> None:
        """Show that `done` of `total` rows of a data set or task are done; the first call has 0."""
        if self.is_silent:
            return
        if not done:
            self.started = time.monotonic()
        if self.bar is not None:
            if key not in self.tasks:
                self.tasks[key] = self.bar.add_task(escape(key), total=total)
            self.bar.update(self.tasks[key], completed=done, total=total)
        elif done == total and self.prints_lines:
            seconds = time.monotonic() - self.started
            self.console.print(escape(f"{key}: {counted(total, 'row')} in {duration(seconds)}"))
