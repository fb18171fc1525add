"""The checkpoints of one run: folders `step-N`, each complete or absent.

A checkpoint is written as `step-N.tmp`. Its manifest has size and sha256 of every file, the marker
`COMMITTED` is written last and has the manifest's sha256, and only then the folder is renamed. A
removal deletes the marker first. Readers never change anything; the next save removes leftovers.
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
from app.process.errors import UserError
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
    load_checkpoint,
    marker_of,
    read_manifest,
    versions,
)
from app.training.checkpoint.disk import SaveError, format_bytes, free_bytes
from app.training.checkpoint.schema import Json
from app.training.checkpoint.tensors import file_bytes, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""the store's folder in a run's folder"""
NOTE = ".written"
"""suffix of the note in which another process records hash and size of a file that it wrote"""
VISIBILITY_TIMEOUT = 60.0
"""seconds until a file that another machine has written must be visible here: network file systems
poll for new files"""
STEP_FOLDER = re.compile(r"step-(\d+)")
"""name of a checkpoint's folder"""
_STEP = re.compile(rf"{STEP_FOLDER.pattern}(\.old)?")
_LEFTOVER = re.compile(rf"{STEP_FOLDER.pattern}\.tmp")


class CheckpointStore:
    """Write, rotate and find the checkpoints of one run in `folder`."""

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_best: int = 0) -> None:
        if keep_last < 1 or keep_best < 0:
            raise UserError(
                f"keep_last={keep_last}, keep_best={keep_best}: a run needs at least its last "
                "checkpoint; type trainer.checkpoint.keep_last=1 or more"
            )
        self.folder = folder
        self.keep_last, self.keep_best = keep_last, keep_best
        self._written: dict[str, disk.Written] = {}
        """files of the current save, in the process that began it"""
        self._current_step: int | None = None

    def begin(self, step: int) -> Path:
        """Begin the save of `step`, on rank 0, before any rank adds to it."""
        faults.reach("save", step)
        self._written, self._current_step = {}, step
        unfinished = self._unfinished(step)
        with self._raising_save_errors(step):
            if not self.folder.exists():
                disk.make_folder(self.folder)
                disk.sync_folder(self.folder.parent)
            self._remove_leftovers()
            disk.make_folder(unfinished)
            faults.reach("ckpt:after_begin", step)
        return unfinished

    def add_tensors(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors` to the file `name`; on any rank, each name once."""
        with self._raising_save_errors(step, file_bytes(tensors)):
            file = self._new_file(step, name + TENSORS)
            self._note(step, file, write_tensors(file, tensors))

    def add_document(self, step: int, name: str, content: Json) -> None:
        """Write `content` as JSON to the file `name`; on any rank, each name once.

        Floats keep every bit.
        """
        text = json.dumps(content, indent=1).encode() + b"\n"
        with self._raising_save_errors(step, len(text)):
            file = self._new_file(step, name + DOCUMENT)
            self._note(step, file, disk.write_file(file, [text]))

    def commit(
        self,
        step: int,
        *,
        needed: Iterable[str] = (),
        metric: float | None = None,
        details: Json = None,
    ) -> Checkpoint:
        """Commit the save of `step`, on rank 0 after all ranks have added; remove old checkpoints.

        `needed`: documents of all ranks that must be there. `metric`: what `keep_best` ranks by,
        lower is better; None or NaN is never among the best.
        """
        unfinished, folder = self._unfinished(step), self._folder(step)
        with self._raising_save_errors(step):
            self._collect_notes(step, [name + DOCUMENT for name in needed])
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
            faults.reach("ckpt:after_manifest", step)
            disk.write_file(unfinished / MARKER, [marker_of(written.sha256)])
            disk.sync_folder(unfinished)
            faults.reach("ckpt:after_marker", step)
            if folder.exists():  # the same step again: one of the two exists at any moment
                disk.replace(folder, folder.with_suffix(".old"))
            disk.replace(unfinished, folder)
            disk.sync_folder(self.folder)
            faults.reach("ckpt:after_rename", step)
        self._current_step = None
        committed = Checkpoint(folder=folder, step=step, manifest=manifest)
        self._rotate(committed)
        return committed

    def abandon(self, step: int) -> None:
        """Remove the files of a save that will not be committed."""
        self._current_step = None
        with suppress(OSError):
            disk.remove_folder(self._unfinished(step))

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first, without verifying their files."""
        found = []
        for step, folder in self._folders():
            with suppress(DamageError, UserError):
                found.append(Checkpoint(folder=folder, step=step, manifest=read_manifest(folder)))
        return found

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest undamaged checkpoint, and a sentence for each newer, damaged one.

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
            sentences[-1] += f"; using {good.folder.name}, {lost} steps lost"
        elif sentences:
            sentences[-1] += "; no good checkpoint is left"
        return good, sentences

    def _folders(self) -> list[tuple[int, Path]]:
        """Return step and folder of finished saves, oldest first; damaged ones too."""
        found: dict[int, Path] = {}
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                match = _STEP.fullmatch(entry.name)
                if match is None or entry.is_symlink() or not entry.is_dir():
                    continue
                step = int(match[1])
                if match[2] is None or step not in found:  # .old: replaced, or about to be
                    found[step] = entry
        return sorted(found.items())

    def _folder(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"step-{step}.tmp"

    def _new_file(self, step: int, name: str) -> Path:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid file name")
        return self._unfinished(step) / name

    def _note(self, step: int, file: Path, written: disk.Written) -> None:
        if self._current_step == step:
            self._written[file.name] = written
        else:  # another process commits, and need not read the file again to hash it
            note = file.with_name(file.name + NOTE)
            disk.write_file(note, [json.dumps(asdict(written)).encode()])
        faults.reach("ckpt:after_file", step)

    def _collect_notes(self, step: int, needed: Sequence[str]) -> None:
        """Read the notes of other processes; SaveError if some of `needed` do not appear."""
        deadline = time.monotonic() + VISIBILITY_TIMEOUT
        self._read_notes(self._unfinished(step))
        while missing := [name for name in needed if name not in self._written]:
            if time.monotonic() > deadline:
                self.abandon(step)
                raise SaveError(
                    f"{self.folder}: the checkpoint of step {step} lacks {', '.join(missing)}, "
                    "which other ranks have written elsewhere: all machines must share one folder; "
                    "type an output.dir that they share"
                )
            time.sleep(0.2)
            self._read_notes(self._unfinished(step))

    def _read_notes(self, unfinished: Path) -> None:
        for note in sorted(unfinished.glob(f"*{NOTE}")):
            self._written[note.name.removesuffix(NOTE)] = disk.Written(
                **json.loads(note.read_text())
            )
            disk.remove_file(note)

    def _remove_leftovers(self) -> None:
        """Remove what killed processes have left of saves and removals."""
        for entry in sorted(self.folder.iterdir()):
            if entry.is_symlink() or not entry.is_dir():
                continue
            match = _STEP.fullmatch(entry.name)
            is_unfinished = _LEFTOVER.fullmatch(entry.name) is not None
            is_unmarked = match is not None and not (entry / MARKER).exists()
            is_replaced = (
                match is not None
                and match[2] is not None
                and (entry.with_suffix("") / MARKER).exists()
            )
            if is_unfinished or is_unmarked or is_replaced:
                self._remove(entry)

    def drop_newer(self, step: int) -> list[int]:
        """Remove checkpoints after `step`, for a run that resumes from it; return their steps."""
        newer = [(number, folder) for number, folder in self._folders() if number > step]
        for _, folder in newer:
            self._remove(folder)
        return [number for number, _ in newer]

    def _rotate(self, newest: Checkpoint) -> None:
        """Remove checkpoints that are neither among the last nor the best; never `newest`."""
        # Newer ones belong to a history that this run has left by resuming before them.
        known = [one for one in self.checkpoints() if one.step <= newest.step]
        last = {one.step for one in known[-self.keep_last :]}
        ranked = [one for one in known if one.metric is not None]
        best = {one.step for one in sorted(ranked, key=_by_metric)[: self.keep_best]}
        for step, folder in self._folders():
            if step > newest.step:
                log.warning("%s removed: the run was resumed from an earlier step", folder)
            if step not in {newest.step, *last, *best}:
                self._remove(folder, newest.step)
        replaced = newest.folder.with_suffix(".old")
        if replaced.exists():
            self._remove(replaced, newest.step)
        faults.reach("ckpt:after_rotation", newest.step)

    def _remove(self, folder: Path, step: int | None = None) -> None:
        """Remove a checkpoint, its marker first; a removal that fails is tried again later."""
        try:
            if (folder / MARKER).exists():
                disk.remove_file(folder / MARKER)
                disk.sync_folder(folder)
                faults.reach("ckpt:after_unmark", step)
            disk.remove_folder(folder)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error.strerror)

    @contextmanager
    def _raising_save_errors(self, step: int, num_bytes: int = 0) -> Iterator[None]:
        """Raise a disk error as SaveError, and remove the files of the save.

        `num_bytes`: about to be written.
        """
        try:
            yield
        except SaveError:
            raise
        except OSError as error:
            need = max(self._largest_bytes(), num_bytes + sum(map(_size, self._written.values())))
            if self._current_step == step:  # else other ranks still write, and rank 0 removes all
                self.abandon(step)
            raise SaveError(self._describe(error, step, need)) from error

    def _describe(self, error: OSError, step: int, need: int) -> str:
        what = f"{self.folder}: the checkpoint of step {step} could not be written"
        existing = self._folders()
        rest = f"{existing[-1][1].name} is kept" if existing else "there is no earlier one"
        if error.errno in disk.NO_ROOM:
            return (
                f"{what}: {error.strerror}; it needs {format_bytes(need)}, "
                f"{format_bytes(free_bytes(self.folder))} are free; {rest}; make room, or type "
                "trainer.checkpoint.keep_last=1"
            )
        where = f" ({error.filename})" if error.filename else ""
        return f"{what}: {error.strerror}{where}; {rest}"

    def _largest_bytes(self) -> int:
        """Return the bytes of the largest checkpoint."""
        sizes = (one.manifest["files"].values() for one in self.checkpoints())
        return max((sum(file["num_bytes"] for file in files) for files in sizes), default=0)


def _by_metric(checkpoint: Checkpoint) -> tuple[float, int]:
    return checkpoint.manifest["metric"], -checkpoint.step


def _size(written: disk.Written) -> int:
    return written.num_bytes
