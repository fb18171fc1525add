"""Turn a data set into tokens on disk: read, convert, encode, fit, and count what became of rows.

Composes source -> format -> template for one data set, in several processes where it is large, and
keeps the result in the cache. Never plans a step and never splits off a validation share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_modules import source
from data_modules.messages import DataError, RemoteError, printable, reason_of, redact
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.template import ChatTemplate
from data_modules.tokens.encode import (
    BadRows,
    ChunkEncoder,
    Counts,
    EncodedChunk,
    FirstRows,
    check_dropped,
    chunks_of,
    encode_chunks,
    find_format,
)
from data_modules.tokens.store import StoreWriter, TokenStore

if TYPE_CHECKING:
    import transformers

COUNTS_FILE = "counts.json"
REJECTED_FILE = "rejected.jsonl"
TOKEN_SETTINGS = (
    "train_on_inputs",
    "roles_to_train",
    "train_on_eos",
    "last_turn_only",
    "reasoning",
    "control_tokens",
    "unsupported_turns",
    "on_long",
    "on_bad_row",
    "drop_empty",
    "max_row_bytes",
)
"""what of DataConfig shapes the tokens"""
ROW_LIMITS = ("columns", "key_chars", "nesting")
"""limits beyond which a row is left out where on_bad_row=quarantine"""

log = logging.getLogger(__name__)

KEY_FILE = "key.json"
_NAME_BYTES = 64
_NO_ROOM = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_NO_LOCK = {errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}
"""what opening a lock ends with where something else is in its place"""
_LABELS = {
    "data": "the data changed",
    "tokenizer": "the tokenizer changed",
    "template": "the chat template changed",
    "settings": "settings changed",
    "code": "the code changed",
    "versions": "library versions changed",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Hold a data set that is ready on disk: its tokens, its counts, and how it came there."""

    store: TokenStore
    counts: Counts
    format: str
    format_guessed: bool
    sha256: str
    folder: Path
    how: str
    is_cut: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec:
    """What the tokens of a data set follow from, beside its rows."""

    config: DataConfig
    template: ChatTemplate
    sequence_len: int
    tokenizer_hash: str
    tokenizer: str = ""
    """its path or hub id, by which a plan finds the tokens"""
    first_rows: int | None = None
    """read only so many rows"""


def prepare_dataset(dataset: DatasetConfig, spec: TokenSpec) -> Prepared:
    """Return a data set's tokens, from the cache where they stand there.

    `is_cut` says whether there are more rows than `first_rows`. The content of a stream's files,
    and of those read in part, is taken from their size and time: they are not read to the end.
    Raises DataError with all rows that cannot be read, and where the files change meanwhile.
    """
    data = spec.config
    # A branch of the hub moves: what is read is the commit that the key names.
    revision = source.resolved_revision(dataset.path, dataset.revision) or dataset.revision
    dataset = dataclasses.replace(dataset, revision=revision)

    def fingerprint() -> str:
        return source.fingerprint(
            dataset.path,
            dataset.split,
            dataset.revision,
            by_stamp=data.streaming or spec.first_rows is not None,
            limits=data.limits,
        )

    sha256 = fingerprint()
    key = _key(dataset, spec, sha256)

    def make(folder: Path) -> None:
        _write(folder, dataset, spec)
        if fingerprint() != sha256:
            raise DataError(f"{dataset.path}: changed while it was being read; start again")

    folder, how = open_or_make(Path(data.cache_dir).expanduser(), key, make)
    try:
        note, store = read_note(folder / COUNTS_FILE), TokenStore(folder)
        counts = Counts(**note["counts"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder}: this entry of the cache cannot be read: {reason_of(error)}; remove it, and "
            "it is made anew"
        ) from error
    check_dropped(counts, dataset.path, data, spec.sequence_len)
    return Prepared(
        store=store,
        counts=counts,
        format=note["format"],
        format_guessed=dataset.format is None,
        sha256=sha256,
        folder=folder,
        how=how,
        is_cut=note["is_cut"],
    )


def hash_of(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """Return a hash of all of a tokenizer that shapes tokens."""
    state = [tokenizer.backend_tokenizer.to_str(), sorted(tokenizer.special_tokens_map.items())]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _key(dataset: DatasetConfig, spec: TokenSpec, sha256: str) -> Key:
    import tokenizers
    import transformers

    data, template, first_rows = spec.config, spec.template, spec.first_rows
    settings = {name: getattr(data, name) for name in TOKEN_SETTINGS}
    settings |= {
        "format": dataset.format,
        "columns": dict(dataset.columns),
        "revision": dataset.revision,
        "sequence_len": spec.sequence_len,
        "encoder_decoder": template.is_encoder_decoder,
        "limits": {name: getattr(data.limits, name) for name in ROW_LIMITS},
    }
    return Key(
        path=redact(dataset.path),  # a signed URL is another one each day, and so is a password
        split=dataset.split if first_rows is None else f"{dataset.split}, first {first_rows}",
        parts={
            # What nobody can name is never found again.
            "data": sha256 or uuid.uuid4().hex,
            "tokenizer": spec.tokenizer_hash,
            # A template that writes the day gives other tokens tomorrow.
            "template": f"{template.hash} {template.date_key}".strip(),
            "settings": settings,
            "code": code_version(),
            "versions": {
                "tokenizers": tokenizers.__version__,
                "transformers": transformers.__version__,
            },
        },
    )


def _write(folder: Path, dataset: DatasetConfig, spec: TokenSpec) -> None:
    """Tokenize a data set into `folder`."""
    data = spec.config
    read = FirstRows(chunks_of(dataset, data), spec.first_rows)
    format_name, chunks = find_format(dataset, iter(read))
    encoder = ChunkEncoder(
        format=format_name or "",
        columns=dataset.columns,
        template=spec.template,
        sequence_len=spec.sequence_len,
        on_long=data.on_long,
    )
    counts, writer = Counts(), StoreWriter(folder)
    num_proc = data.num_proc or len(os.sched_getaffinity(0))
    num_rows = num_tokens = 0
    with (folder / REJECTED_FILE).open("w") as rejected:
        bad = BadRows(data, rejected)
        try:
            with _Progress(dataset) as progress:
                for part in encode_chunks(encoder, chunks, num_proc):
                    bad.add_all(part.rejected)
                    if part.documents is not None:
                        rows = part.documents.rows + num_rows
                        writer.add(dataclasses.replace(part.documents, rows=rows))
                        num_tokens += part.documents.num_tokens
                    num_rows += part.num_rows
                    if num_rows > data.limits.rows:
                        raise DataError(_too_many_rows(dataset, data))
                    counts.merge(part.counts)
                    progress.advance(part)
        except RemoteError:
            raise
        except DataError as error:
            # The rest of a file cannot be read: said together with its bad rows.
            bad.add_problems(error.problems)
    writer.close()
    bad.raise_if_any()
    counts.rejected = bad.num_kept
    counts.rows += bad.num_empty
    for origin in bad.first_empty:
        counts.add_empty(str(origin))
    counts.empty += bad.num_empty - len(bad.first_empty)
    _check_rows_left(dataset, counts, bad)
    check_dropped(counts, dataset.path, data, spec.sequence_len)
    note = {
        "format": format_name,
        "counts": dataclasses.asdict(counts),
        "is_cut": read.is_cut,
        "tokens": num_tokens,
        "tokenizer": spec.tokenizer,
    }
    (folder / COUNTS_FILE).write_text(json.dumps(note, indent=2) + "\n")


def _too_many_rows(dataset: DatasetConfig, data: DataConfig) -> str:
    return (
        f"{dataset.path}: has more than {data.limits.rows:,} rows, which is data.limits.rows; "
        "raise it if the data is right, or give a part of it: data.datasets[].split=train[:10%]"
    )


def _check_rows_left(dataset: DatasetConfig, counts: Counts, bad: BadRows) -> None:
    if counts.rows:
        return
    if bad.num_kept:
        raise DataError(
            [
                f"{dataset.path}: all {bad.num_kept:,} rows are bad, so none is left; the first:",
                *bad.first_kept,
            ]
        )
    raise DataError(f"{dataset.path}: 0 rows; give a file with at least one row")


class _Progress:
    """Show how far a data set is prepared, where a person looks on."""

    def __init__(self, dataset: DatasetConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._name = printable(dataset.name or source.name_of(dataset.path))
        self._rows = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        console = Console(stderr=True)
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=source.num_bytes(dataset.path, dataset.split))

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, part: EncodedChunk) -> None:
        """Count a chunk that is done."""
        self._rows += part.counts.rows
        text = f"tokenizing {self._name}: {self._rows:,} rows"
        self._bar.update(self._task, advance=part.num_bytes, description=text)


@dataclass(frozen=True, slots=True)
class Key:
    """Name a prepared data set: what it is of, and a hash or value of each thing that shapes it.

    `parts` has the entries of `_LABELS`.
    """

    path: str
    split: str
    parts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the folder's name."""
        text = json.dumps([self.path, self.split, self.parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def newest(self) -> str:
        """Return the name of the file that names the newest entry of the same data."""
        text = json.dumps([self.path, self.split])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.newest"


def code_version() -> str:
    """Return a hash of the files that decide what a row's tokens are."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.jinja")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def open_or_make(root: Path, key: Key, make: Callable[[Path], None]) -> tuple[Path, str]:
    """Return the folder of a prepared data set, and whether it was there, in words.

    Where it is not, or not whole, `make(folder)` writes it into an empty folder. Raises DataError
    where the cache's own folder cannot be written.
    """
    folder = root / key.name
    if is_whole(folder):
        return folder, "found in the cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key.name}.lock"):
            if is_whole(folder):
                return folder, "tokenized by another process"
            reason = "the entry was damaged" if os.path.lexists(folder) else _why_missing(root, key)
            _remove_left_over(root, key)
            unfinished = root / f"{key.name}.tmp-{os.getpid()}"
            unfinished.mkdir()
            try:
                make(unfinished)
                _seal(unfinished, key)
                os.replace(unfinished, folder)
                _note_newest(root, key)
                _sync(root)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DataError(
            f"{root}: the prepared data cannot be written: {error.strerror}; give a folder with "
            "room by data.cache_dir=FOLDER"
        ) from error
    return folder, f"tokenized ({reason})"


def _seal(folder: Path, key: Key) -> None:
    """Write what tells a whole folder from a damaged one, when all else is on the disk."""
    sizes = {}
    for file in sorted(folder.iterdir()):
        sizes[file.name] = file.stat().st_size
        _sync(file)
    note = {"path": key.path, "split": key.split, "parts": key.parts, "sizes": sizes}
    (folder / KEY_FILE).write_text(json.dumps(note, indent=2) + "\n")
    _sync(folder / KEY_FILE)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_whole(folder: Path) -> bool:
    """Tell whether a folder holds all that was written into it: files, no links and no pipes."""
    try:
        sizes = read_note(folder / KEY_FILE)["sizes"]
        entries = [((folder / name).lstat(), size) for name, size in sizes.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    return all(stat.S_ISREG(entry.st_mode) and entry.st_size == size for entry, size in entries)


def read_note(file: Path) -> Any:
    """Return the JSON in a file of the cache; raises DataError where there is none or a pipe."""
    with source.open_regular(file) as stream:
        return json.load(stream)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    # Neither waits for the other side of a pipe nor writes where a link leads.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a file")
    except OSError as error:
        if error.errno not in _NO_LOCK:
            raise
        raise DataError(
            f"{file}: the cache needs a file to lock there, and finds a link, a folder, a pipe, a "
            "socket or a device; remove it, or give another folder by data.cache_dir=FOLDER"
        ) from error
    with open(descriptor, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("data: another process prepares the same data; waiting for it (%s)", file)
            fcntl.flock(stream, fcntl.LOCK_EX)
        # The system lets go of it when the process ends, however it ends.
        yield


def _remove_left_over(root: Path, key: Key) -> None:
    """Remove what is damaged, or left by a killed process; the lock says that none is at work."""
    for left in (root / key.name, *root.glob(f"{key.name}.tmp-*")):
        _remove(left)


def _remove(left: Path) -> None:
    with contextlib.suppress(OSError):
        # Not by shutil alone: it waits for the other side of a pipe.
        shutil.rmtree(left) if stat.S_ISDIR(left.lstat().st_mode) else left.unlink()


def _note_newest(root: Path, key: Key) -> None:
    unfinished = root / f"{key.newest}.tmp-{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    with unfinished.open("x") as stream:
        stream.write(key.name)
    _remove(root / key.newest)
    os.replace(unfinished, root / key.newest)


def read_newest(root: Path, key: Key) -> str:
    """Return the name of the newest entry of the same data; DataError where there is none."""
    with source.open_regular(root / key.newest) as stream:
        return Path(stream.read(_NAME_BYTES).decode()).name


def _why_missing(root: Path, key: Key) -> str:
    """Say what changed since the newest entry of the same data."""
    try:
        # By its name: to look at every entry would take longer with each one that is kept.
        before = dict(read_note(root / read_newest(root, key) / KEY_FILE)["parts"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "now cached"  # there was none, or it was removed
    changed = [part for part in key.parts if before.get(part) != key.parts[part]]
    return ", ".join(_in_words(part, before.get(part), key.parts[part]) for part in changed)


def _in_words(part: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        return f"{_LABELS[part]}: {', '.join(names)}"
    return _LABELS[part]
