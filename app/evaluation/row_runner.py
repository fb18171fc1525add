"""The rows of an evaluation: divided among ranks, each kept as it is done, gathered at the end.

An evaluation that was killed goes on where it was, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.files import open_no_follow
from app.process.launch import local_rank, read_launch

if TYPE_CHECKING:
    from torch import Tensor

WAITS = timedelta(hours=12)
"""how long ranks wait for each other: the first one alone asks a judge"""
PARTIAL = "partial"
"""folder of the results so far, in the evaluation's; removed when all is written"""
Batches = Iterator[list[tuple[int, Any]]]
"""(row, its result as JSON has it), a list a batch"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRunner:
    """Who does which rows, and where they are kept."""

    folder: Path | None = None
    """the evaluation's, in which results are kept; None keeps none"""
    identity: str = ""
    """identifies the models that are measured: results of others are not reused"""
    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[dict[int, Any]], Sequence[dict[int, Any]]] = lambda own: [own]
    """returns what every rank has given, on every rank"""
    show: Callable[[str, int, int], None] = lambda key, done, total: None
    """shows how much of this rank's share is done"""

    def run(
        self, key: str, content: Any, count: int, work: Callable[[list[int]], Batches]
    ) -> list[Any]:
        """Return a result for each of `count` rows, on every rank; `work` does those it is given.

        `key` names them in the folder, `content` is what they are made of.
        """
        stamp = self._stamp(content)
        done = self._done(key, stamp)
        left = [row for row in range(count) if row not in done]
        own = left[self.rank :: self.num_ranks]
        kept = {row: result for row, result in done.items() if row < count}
        found: dict[int, Any] = {}
        self.show(key, 0, len(own))
        if own:
            with self._writer(key, stamp) as write:
                for batch in work(own):
                    numbered = [(own[index], result) for index, result in batch]
                    write(numbered)
                    found.update(numbered)
                    self.show(key, len(found), len(own))
        for part in self.gather(found):
            kept.update(part)
        return [kept[row] for row in range(count)]

    def once(self, key: str, content: Any, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, which all ranks do together; it is kept."""
        stamp = self._stamp(content)
        done = self._done(key, stamp)
        if 0 in done:
            return done[0]
        result = work()
        if self.rank == 0:
            with self._writer(key, stamp) as write:
                write([(0, result)])
        return result

    def clear(self) -> None:
        """Remove what was kept: all of it is written elsewhere."""
        if self.folder is None or not (self.folder / PARTIAL).is_dir():
            return
        for file in (self.folder / PARTIAL).glob("*.jsonl"):
            file.unlink()
        (self.folder / PARTIAL).rmdir()

    def _stamp(self, content: Any) -> str:
        text = json.dumps([self.identity, content], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _file(self, key: str, rank: int | str) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._-]', '_', key)}.{rank}.jsonl"

    def _done(self, key: str, stamp: str) -> dict[int, Any]:
        """Return what any rank has read as done, the same on every rank.

        Without that a rank that comes late reads what another has just written, and divides fewer
        rows than the others.
        """
        done: dict[int, Any] = {}
        for part in self.gather(self._read(key, stamp)):
            done.update(part)
        return done

    def _read(self, key: str, stamp: str) -> dict[int, Any]:
        """Return the rows that are done, of every rank; a line that was cut off is not."""
        found: dict[int, Any] = {}
        if self.folder is None:
            return found
        for file in sorted((self.folder / PARTIAL).glob(self._file(key, "*"))):
            with open_no_follow(file, "r", encoding="utf-8") as stream:
                for line in stream:
                    if not line.endswith("\n"):
                        break
                    one = json.loads(line)
                    if one["stamp"] == stamp:
                        found[one["row"]] = one["result"]
        return found

    def _writer(self, key: str, stamp: str) -> _Writer:
        if self.folder is None:
            return _Writer(None, stamp)
        (self.folder / PARTIAL).mkdir(exist_ok=True)
        return _Writer(self.folder / PARTIAL / self._file(key, self.rank), stamp)


class _Writer:
    """Appends results to a file, a flush a batch."""

    def __init__(self, file: Path | None, stamp: str) -> None:
        self._file, self._stamp = file, stamp
        self._stream: Any = None

    def __enter__(self) -> Callable[[list[tuple[int, Any]]], None]:
        if self._file is not None:
            cut = self._file.is_file() and not self._file.read_bytes().endswith(b"\n")
            self._stream = open_no_follow(self._file, "a", encoding="utf-8")
            if cut:  # a kill has cut off the last line: it is done again
                lines = self._file.read_bytes().splitlines(keepends=True)[:-1]
                self._stream.truncate(sum(map(len, lines)))
        return self._write

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def _write(self, results: list[tuple[int, Any]]) -> None:
        if self._stream is None:
            return
        for row, result in results:
            line = {"stamp": self._stamp, "row": row, "result": result}
            self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def build_row_runner(
    folder: Path, identity: Any, show: Callable[[str, int, int], None], *, on_gpu: bool
) -> RowRunner:
    """Join the other ranks that were started with this one; a rank on GPUs takes its own."""
    num_ranks = read_launch().num_ranks or 1
    stamp = json.dumps(identity, sort_keys=True, default=str)
    if num_ranks == 1:
        return RowRunner(folder=folder, identity=stamp, show=show)
    import torch
    import torch.distributed as dist

    if on_gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("gloo", rank=local_rank(), world_size=num_ranks, timeout=WAITS)
    return RowRunner(
        folder=folder,
        identity=stamp,
        rank=local_rank(),
        num_ranks=num_ranks,
        gather=gather_results,
        show=show,
    )


def gather_results(own: dict[int, Any]) -> Sequence[dict[int, Any]]:
    """Return what every rank has done, on every rank."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def sum_over_ranks(runner: RowRunner) -> Callable[[Tensor], Tensor] | None:
    """Return what sums a tensor over all ranks, on the host; None for a single rank."""
    if runner.num_ranks == 1:
        return None
    import torch.distributed as dist

    def total(values: Tensor) -> Tensor:
        on_host = values.cpu()
        dist.all_reduce(on_host)
        return on_host

    return total
