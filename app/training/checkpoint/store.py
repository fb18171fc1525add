"""The checkpoints of one run: folders `step-N`, each either complete or absent.

A checkpoint is written as `step-N.tmp`. Its manifest lists size and sha256 of every file. A marker
file, `COMMITTED`, which contains the manifest's sha256, is written last; only then is the folder
renamed. A removal deletes the marker first. Readers never change anything; the next save removes
leftovers.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from app.process import faults
from app.training.checkpoint import disk
from app.training.checkpoint.checkpoint import (
    DOCUMENT,
    FILE_NAME,
    FORMAT,
    MANIFEST,
    MARKER,
    TENSORS,
    Checkpoint,
    DamageError,
    file_bytes,
    load_checkpoint,
    load_manifest,
    marker_of,
    versions,
    write_tensors,
)
from app.training.checkpoint.disk import SaveError, describe_shortage, format_bytes
from app.training.checkpoint.documents import Json
from common.errors import UserError
from common.text import counted

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""name of the store's folder in the folder of a run"""
_RECORD_SUFFIX = ".written"
"""suffix of the file in which another process records hash and size of a file that it wrote"""
VISIBILITY_TIMEOUT = 60.0
"""time within which a file written by another machine must become visible, in seconds; network file
systems poll for new files"""
STEP_FOLDER = re.compile(r"step-(\d+)")
"""name of a checkpoint's folder"""
_STEP = re.compile(rf"{STEP_FOLDER.pattern}(\.old)?")
_LEFTOVER = re.compile(rf"{STEP_FOLDER.pattern}\.tmp")


class CheckpointStore:
    """Write, find and rotate the checkpoints of one run in `folder`."""

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_best: int = 0) -> None:
        self.folder = folder
        self.keep_last, self.keep_best = keep_last, keep_best
        self._written: dict[str, disk.WrittenFile] = {}
        """files of the current save, in the process that started it"""
        self._current_step: int | None = None

    def begin(self, step: int) -> Path:
        """Start the save of `step`; called on rank 0 before any rank adds files."""
        faults.fault_point("save", step)
        self._written, self._current_step = {}, step
        unfinished = self._unfinished(step)
        with self._raising_save_errors(step):
            if not self.folder.exists():
                disk.make_folder(self.folder)
                disk.sync_folder(self.folder.parent)
            self._remove_leftovers()
            disk.make_folder(unfinished)
            faults.fault_point("ckpt:after_begin", step)
        return unfinished

    def add_tensors(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors` to the file `name`; any rank may call this, once per name."""
        with self._raising_save_errors(step, file_bytes(tensors)):
            file = self._new_file(step, name + TENSORS)
            self._record(step, file, write_tensors(file, tensors))

    def add_document(self, step: int, name: str, content: Json) -> None:
        """Write `content` as JSON to the file `name`; any rank may call this, once per name.

        Floats keep their full precision.
        """
        text = json.dumps(content, indent=1).encode() + b"\n"
        with self._raising_save_errors(step, len(text)):
            file = self._new_file(step, name + DOCUMENT)
            self._record(step, file, disk.write_file(file, [text]))

    def commit(
        self,
        step: int,
        *,
        needed: Iterable[str] = (),
        metric: float | None = None,
        details: Json = None,
    ) -> Checkpoint:
        """Commit the save of `step` and remove old checkpoints.

        Called on rank 0 after all ranks have added their files. `needed`: documents that must
        exist. `metric`: what `keep_best` ranks by, lower is better; None or NaN is never ranked.
        """
        unfinished, folder = self._unfinished(step), self.folder / f"step-{step}"
        with self._raising_save_errors(step):
            self._collect_records(step, [name + DOCUMENT for name in needed])
            manifest = {
                "format": FORMAT,
                "step": step,
                "metric": metric if metric is not None and math.isfinite(metric) else None,
                "details": details,
                "versions": versions(),
                "files": {name: asdict(self._written[name]) for name in sorted(self._written)},
            }
            text = json.dumps(manifest, indent=1).encode() + b"\n"
            written = disk.write_file(unfinished / MANIFEST, [text])
            disk.sync_folder(unfinished)
            faults.fault_point("ckpt:after_manifest", step)
            disk.write_file(unfinished / MARKER, [marker_of(written.sha256)])
            disk.sync_folder(unfinished)
            faults.fault_point("ckpt:after_marker", step)
            if folder.exists():  # this step was saved before: one of the two exists at any moment
                disk.replace(folder, folder.with_suffix(".old"))
            disk.replace(unfinished, folder)
            disk.sync_folder(self.folder)
            faults.fault_point("ckpt:after_rename", step)
        self._current_step = None
        committed = Checkpoint(folder=folder, step=step, manifest=manifest)
        self._rotate(committed)
        return committed

    def abandon(self, step: int) -> None:
        """Remove the files of a save that is not going to be committed."""
        self._current_step = None
        with suppress(OSError):
            disk.remove_folder(self._unfinished(step))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first, without verifying their files."""
        found = []
        for step, folder in self._folders():
            with suppress(DamageError, UserError):
                found.append(Checkpoint(folder=folder, step=step, manifest=load_manifest(folder)))
        return found

    def ranked(self) -> list[Checkpoint]:
        """Return the committed checkpoints that have a metric, the best first, not verified."""
        return _rank(self.checkpoints())

    def would_keep(self, metric: float) -> bool:
        """Return whether a checkpoint with this metric would be among the best that are kept."""
        ranked = self.ranked()[: self.keep_best]
        return len(ranked) < self.keep_best or metric < ranked[-1].manifest["metric"]

    def best_good(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the best undamaged checkpoint, and a sentence about each better, damaged one."""
        damaged: list[str] = []
        for ranked in self.ranked():
            try:
                return load_checkpoint(ranked.folder, ranked.step), damaged
            except DamageError as error:
                damaged.append(f"{ranked.folder.name} damaged ({error})")
        return None, damaged

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest undamaged checkpoint, and a sentence about each newer, damaged one.

        UserError if the newest undamaged one was written by a newer version of this program.
        """
        damaged: list[tuple[int, str]] = []
        good = None
        for step, folder in reversed(self._folders()):
            try:
                good = load_checkpoint(folder, step)
                break
            except DamageError as error:
                damaged.append((step, f"{folder.name} damaged ({error})"))
        sentences = [sentence for _, sentence in damaged]
        if sentences and good is not None:
            lost = damaged[0][0] - good.step
            sentences[-1] += f"; using {good.folder.name}, {counted(lost, 'step')} lost"
        elif sentences:
            sentences[-1] += "; no undamaged checkpoint is left"
        return good, sentences

    def newest_step(self) -> int | None:
        """Return the step of the newest finished save, None without one; no file is read."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Return the steps of the finished saves, oldest first; no file is read."""
        return [step for step, _ in self._folders()]

    def _folders(self) -> list[tuple[int, Path]]:
        """Return step and folder of each finished save, oldest first, damaged ones included."""
        found: dict[int, Path] = {}
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                match = _STEP.fullmatch(entry.name)
                if match is None or entry.is_symlink() or not entry.is_dir():
                    continue
                step = int(match[1])
                if match[2] is None or step not in found:  # .old: being replaced
                    found[step] = entry
        return sorted(found.items())

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"step-{step}.tmp"

    def _new_file(self, step: int, name: str) -> Path:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid file name")
        return self._unfinished(step) / name

    def _record(self, step: int, file: Path, written: disk.WrittenFile) -> None:
        """Record hash and size of a written file, for the process that commits the save."""
        if self._current_step == step:
            self._written[file.name] = written
        else:
            record = file.with_name(file.name + _RECORD_SUFFIX)
            disk.write_file(record, [json.dumps(asdict(written)).encode()])
        faults.fault_point("ckpt:after_file", step)

    def _collect_records(self, step: int, needed: Sequence[str]) -> None:
        """Read the records of other processes; SaveError if some of `needed` do not appear."""
        deadline = time.monotonic() + VISIBILITY_TIMEOUT
        while True:
            for record in sorted(self._unfinished(step).glob(f"*{_RECORD_SUFFIX}")):
                written = disk.WrittenFile(**json.loads(record.read_text()))
                self._written[record.name.removesuffix(_RECORD_SUFFIX)] = written
                disk.remove_file(record)
            if not (missing := [name for name in needed if name not in self._written]):
                return
            if time.monotonic() > deadline:
                self.abandon(step)
                raise SaveError(
                    f"{self.folder}: the checkpoint of step {step} lacks {', '.join(missing)}, "
                    "which other ranks have written elsewhere: all machines must share one folder; "
                    "type output.dir=FOLDER with a folder on a shared disk"
                )
            time.sleep(0.2)

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left behind of saves and removals."""
        for entry in sorted(self.folder.iterdir()):
            if entry.is_symlink() or not entry.is_dir():
                continue
            match = _STEP.fullmatch(entry.name)
            if match is None:
                is_left = _LEFTOVER.fullmatch(entry.name) is not None
            else:  # not marked, or replaced
                is_left = not (entry / MARKER).exists()
                is_left |= bool(match[2]) and (entry.with_suffix("") / MARKER).exists()
            if is_left:
                self._remove(entry)

    def drop_newer(self, step: int) -> list[int]:
        """Remove checkpoints newer than `step`, where a run resumes; return their steps."""
        newer = [(number, folder) for number, folder in self._folders() if number > step]
        for _, folder in newer:
            self._remove(folder)
        return [number for number, _ in newer]

    def _rotate(self, newest: Checkpoint) -> None:
        """Remove checkpoints that are neither among the last nor the best; never `newest`."""
        # Newer ones were saved before this run was resumed from an earlier step.
        known = [saved for saved in self.checkpoints() if saved.step <= newest.step]
        last = {saved.step for saved in known[-self.keep_last :]}
        best = {saved.step for saved in _rank(known)[: self.keep_best]}
        for step, folder in self._folders():
            if step > newest.step:
                log.warning("%s removed: the run was resumed from an earlier step", folder)
            if step not in {newest.step, *last, *best}:
                self._remove(folder, newest.step)
        replaced = newest.folder.with_suffix(".old")
        if replaced.exists():
            self._remove(replaced, newest.step)
        faults.fault_point("ckpt:after_rotation", newest.step)

    def _remove(self, folder: Path, step: int | None = None) -> None:
        """Remove a checkpoint, its marker first; a failed removal is retried by the next save."""
        try:
            if (folder / MARKER).exists():
                disk.remove_file(folder / MARKER)
                disk.sync_folder(folder)
                faults.fault_point("ckpt:after_unmark", step)
            disk.remove_folder(folder)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error.strerror)

    @contextmanager
    def _raising_save_errors(self, step: int, num_bytes: int = 0) -> Iterator[None]:
        """Turn a disk error into a SaveError, and remove the files of the save.

        `num_bytes`: size of the file that is about to be written.
        """
        try:
            yield
        except SaveError:
            raise
        except OSError as error:
            written_bytes = sum(written.num_bytes for written in self._written.values())
            of_others = (
                sum(file["num_bytes"] for file in saved.manifest["files"].values())
                for saved in self.checkpoints()
            )
            need = max([num_bytes + written_bytes, *of_others])
            if self._current_step == step:  # otherwise other ranks still write; rank 0 removes all
                self.abandon(step)
            raise SaveError(self._describe(error, step, need)) from error

    def _describe(self, error: OSError, step: int, need: int) -> str:
        failure = f"{self.folder}: the checkpoint of step {step} could not be written"
        existing = self._folders()
        earlier = f"{existing[-1][1].name} is kept" if existing else "there is no earlier one"
        if error.errno in disk.DISK_FULL:
            shortage = describe_shortage(self.folder, format_bytes(need))
            return (
                f"{failure}: {error.strerror}; {shortage}; {earlier}; free disk space, or type "
                "trainer.checkpoint.keep_last=1"
            )
        filename = f" ({error.filename})" if error.filename else ""
        return f"{failure}: {error.strerror}{filename}; {earlier}"


def _rank(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Sort the checkpoints that have a metric, the best first; of equal ones, the newest."""
    ranked = [saved for saved in checkpoints if saved.metric is not None]
    return sorted(ranked, key=lambda saved: (saved.manifest["metric"], -saved.step))
