"""Tokenize a data set into the cache: read, convert, encode, fit to length, and count the rows.

Composes source -> format -> template for one data set, in several processes if it is large. Never
plans a step and never splits off validation rows.

The cache has a folder for each data set, keyed by everything that determines the tokens. Entries
are atomic: each is written to a temporary folder, sealed and renamed. The tokens of an epoch are
estimated within a second, from the cache or from the first rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import DataError, DiskError, RemoteError
from common.files import sync, write_atomically
from common.redaction import redact
from common.text import counted, printable, reason_of
from data_modules import source
from data_modules.settings import DataConfig, DatasetConfig
from data_modules.tokens import encode
from data_modules.tokens.encode import Counts, EncodedChunk, Rejected, TokenSpec
from data_modules.tokens.store import StoreWriter, TokenStore
from data_modules.types import Conversation, Document, Item, Tokens

if TYPE_CHECKING:
    import transformers

log = logging.getLogger(__name__)

KEY_FILE = "key.json"
_BLOCK_BYTES = 1 << 20
_NAME_BYTES = 64
_DISK_FULL = {errno.EDQUOT, errno.ENOSPC}
_NO_ROOM = _DISK_FULL | {errno.EACCES, errno.EEXIST, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_NO_LOCK = {errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV}
"""errors of opening a lock file if something else is in its place"""
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""errors of reading a note that a damaged entry holds"""
_LABELS = {
    "data": "the data changed",
    "tokenizer": "the tokenizer changed",
    "template": "the chat template changed",
    "settings": "settings changed",
    "code": "the code changed",
    "versions": "library versions changed",
}
COUNTS_FILE = "counts.json"
REJECTED_FILE = "rejected.jsonl"
TOKEN_SETTINGS = (
    *("train_on_inputs", "roles_to_train", "train_on_eos", "last_turn_only", "reasoning"),
    *("control_tokens", "unsupported_turns", "on_long", "on_bad_row", "drop_empty"),
    "max_row_bytes",
)
"""fields of DataConfig that affect the tokens"""
SAMPLE_BYTES = 512 << 10
"""bytes read of all data sets together"""
_TURN_TOKENS = 5
"""tokens that a chat template adds to a turn, as ChatML and Llama 3's do"""

CountTokens = Callable[[Sequence[str]], Sequence[int]]
_ROW_LIMITS = ("columns", "key_chars", "nesting")
"""fields of `data.limits` that affect which rows on_bad_row=quarantine leaves out"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set that is tokenized on disk."""

    store: TokenStore
    counts: Counts
    format: str
    format_guessed: bool
    sha256: str
    folder: Path
    how: str
    """whether it was tokenized now or found in the cache, in words"""
    is_cut: bool
    """whether there are more rows than `first_rows`"""
    notes: list[str]
    """in words, which files of a folder were left out"""


def prepare_dataset(dataset: DatasetConfig, spec: TokenSpec) -> Prepared:
    """Return a data set's tokens, from the cache if they are there.

    Files of a stream, and files that are read in part, are identified by size and time instead of
    their content. Raises DataError with all rows that cannot be read, and if the files change while
    they are read.
    """
    data = spec.config
    # A branch on the hub moves, so the commit that the cache key names is read.
    revision = source.resolved_revision(dataset.path, dataset.revision) or dataset.revision
    dataset = dataclasses.replace(dataset, revision=revision)

    def fingerprint() -> str:
        return source.fingerprint(
            dataset.path,
            dataset.split,
            dataset.revision,
            name=dataset.name,
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
    except _MALFORMED as error:
        raise DataError(
            f"{folder}: this entry of the cache cannot be read: {reason_of(error)}; remove it, and "
            "the data set is tokenized again"
        ) from error
    encode.check_dropped(counts, dataset.path, data, spec.sequence_len)
    return Prepared(
        store=store,
        counts=counts,
        format=note["format"],
        format_guessed=dataset.format is None,
        sha256=sha256,
        folder=folder,
        how=how,
        is_cut=note["is_cut"],
        notes=source.notes_on_files(dataset.path, dataset.split, data.limits, dataset.name),
    )


def hash_of(tokenizer: transformers.PreTrainedTokenizerBase) -> str:
    """Return a hash of everything in a tokenizer that affects tokens."""
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
        "labels": [*spec.labels, spec.is_multi_label],
        "encoder_decoder": template.is_encoder_decoder,
        "limits": {name: getattr(data.limits, name) for name in _ROW_LIMITS},
    }
    return Key(
        path=redact(dataset.path),  # the signature or password in a URL changes
        split=dataset.split if first_rows is None else f"{dataset.split}, first {first_rows}",
        parts={
            # Data without a fingerprint is never found in the cache.
            "data": sha256 or uuid.uuid4().hex,
            "tokenizer": spec.tokenizer_hash,
            # A template that writes the date gives different tokens tomorrow.
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
    data = spec.config
    first_rows = encode.FirstRows(encode.chunks_of(dataset, data), spec.first_rows)
    format_name, chunks = encode.find_format(dataset, iter(first_rows))
    encoder = encode.ChunkEncoder(dataset, format_name or "", spec)
    counts, writer = Counts(), StoreWriter(folder)
    num_proc = data.num_proc or len(os.sched_getaffinity(0))
    num_rows = num_tokens = 0
    with (folder / REJECTED_FILE).open("w") as rejected:
        bad = encode.BadRows(data, rejected)
        try:
            with _progress(dataset) as advance:
                for part in encode.encode_chunks(encoder, chunks, num_proc):
                    for row in part.rejected:
                        bad.add(row)
                    if part.documents is not None:
                        rows = part.documents.rows + num_rows
                        writer.add(dataclasses.replace(part.documents, rows=rows))
                        num_tokens += part.documents.num_tokens
                    num_rows += part.num_rows
                    if num_rows > data.limits.rows:
                        raise DataError(
                            f"{dataset.path}: has more than {data.limits.rows:,} rows "
                            "(data.limits.rows); raise it if the data is right, or use a part of "
                            "it: data.datasets[].split=train[:10%]"
                        )
                    counts.merge(part.counts)
                    advance(part)
        except RemoteError:
            raise
        except DataError as error:
            # The rest of the file cannot be read; reported together with its bad rows.
            bad.add_problems(error.problems)
    writer.close()
    bad.raise_if_any(counts.rows)
    counts.rejected = bad.num_kept
    counts.rows += bad.num_empty
    for origin in bad.first_empty:
        counts.add_empty(str(origin))
    counts.empty += bad.num_empty - len(bad.first_empty)
    if not counts.rows and bad.num_kept:
        first = f"{dataset.path}: all {bad.num_kept:,} rows are bad; the first:"
        raise DataError([first, *bad.first_kept])
    if not counts.rows:
        raise DataError(f"{dataset.path}: 0 rows; give a file with at least one row")
    encode.check_dropped(counts, dataset.path, data, spec.sequence_len)
    note = {
        "format": format_name,
        "counts": dataclasses.asdict(counts),
        "is_cut": first_rows.is_cut,
        "tokens": num_tokens,
        "tokenizer": spec.tokenizer,
    }
    (folder / COUNTS_FILE).write_text(json.dumps(note, indent=2) + "\n")


@contextlib.contextmanager
def _progress(dataset: DatasetConfig) -> Iterator[Callable[[EncodedChunk], None]]:
    """Show a progress bar of the tokenization, on a terminal; yield what adds a tokenized chunk."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    name, rows = printable(dataset.name or source.default_name(dataset.path)), 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=source.text_bytes(dataset.path, dataset.split, dataset.name))

        def advance(part: EncodedChunk) -> None:
            nonlocal rows
            rows += part.counts.rows
            text = f"tokenizing {name}: {counted(rows, 'row')}"
            bar.update(task, advance=part.num_bytes, description=text)

        yield advance


@dataclass(frozen=True, slots=True)
class Key:
    """The identity of a tokenized data set; `parts` has a hash or value for each of `_LABELS`."""

    path: str
    split: str
    parts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return _hashed(json.dumps([self.path, self.split, self.parts], sort_keys=True))

    @property
    def newest(self) -> str:
        """Return the name of the file that names the newest entry of the same data."""
        return _hashed(json.dumps([self.path, self.split])) + ".newest"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def code_version() -> str:
    """Return a hash of the source files that determine a row's tokens."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    files = [*package.rglob("*.py"), *package.rglob("*.jinja"), *package.parent.glob("common/*.py")]
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def open_or_make(root: Path, key: Key, make: Callable[[Path], None]) -> tuple[Path, str]:
    """Return the folder of an entry, and in words whether it was found or made.

    If it is missing or damaged, `make(folder)` writes it into an empty folder. Raises DataError if
    the cache cannot be written.
    """
    folder = root / key.name
    if is_whole(folder):
        return folder, "found in the cache"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key.name}.lock"):
            if is_whole(folder):
                return folder, "tokenized by another process"
            if os.path.lexists(folder):
                reason = "the entry was damaged"
                log.warning("data: %s is damaged; its data is tokenized again", folder)
            else:
                reason = _describe_change(root, key)
            # Damaged, or left over from a killed process.
            for path in (folder, *root.glob(f"{key.name}.tmp-*")):
                _remove(path)
            unfinished = root / f"{key.name}.tmp-{os.getpid()}"
            unfinished.mkdir()
            try:
                make(unfinished)
                _seal(unfinished, key)
                os.replace(unfinished, folder)
                _remove(root / key.newest)
                write_atomically(root / key.newest, key.name)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        is_full, detail = error.errno in _DISK_FULL, ""
        if is_full and root.is_dir() and (disk := os.statvfs(root)).f_files > disk.f_favail == 0:
            detail = f" (all its {disk.f_files:,} inodes are used)"
        raise (DiskError if is_full else DataError)(
            f"{root}: cannot write the tokenized data: {os.strerror(error.errno)}{detail}; set "
            "data.cache_dir=FOLDER to a writable folder with free space"
        ) from error
    return folder, f"tokenized ({reason})"


def _seal(folder: Path, key: Key) -> None:
    """Sync the files of a folder, then write the key file by which damage is detected."""
    digests = {}
    for file in sorted(folder.iterdir()):
        digests[file.name] = _digest_of(file)
        sync(file)
    note = {"path": key.path, "split": key.split, "parts": key.parts, "digests": digests}
    (folder / KEY_FILE).write_text(json.dumps(note, indent=2) + "\n")
    sync(folder / KEY_FILE)
    sync(folder)


def is_whole(folder: Path, names: Iterable[str] | None = None) -> bool:
    """Return whether a folder has all files that were written into it, and no links or pipes.

    The bytes of the files `names` (None: of all) are compared with their digests. The key file is
    right if it makes the folder's name.
    """
    if not folder.is_dir():
        return False
    try:
        note = read_note(folder / KEY_FILE)
        if Key(note["path"], note["split"], note["parts"]).name != folder.name:
            return False
        digests = dict[str, str](note["digests"])
        if not all(stat.S_ISREG((folder / name).lstat().st_mode) for name in digests):
            return False
        read = digests if names is None else names
        return all(_digest_of(folder / name) == digests[name] for name in read)
    except (OSError, *_MALFORMED):
        return False


def _digest_of(file: Path) -> str:
    """Return a hash of a file's bytes, as fast as memory: it detects damage, not malice."""
    import xxhash

    digest = xxhash.xxh3_128()
    with source.open_regular(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_note(file: Path) -> Any:
    """Return the JSON of a file in the cache; DataError if it is missing or not a regular file."""
    with source.open_regular(file) as stream:
        return json.load(stream)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    # Neither follows a link nor blocks on a pipe.
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
            f"{file}: the cache needs a regular file there as a lock, and found a link, a folder, "
            "a pipe, a socket or a device; remove it, or set data.cache_dir to another folder"
        ) from error
    with open(descriptor, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("data: another process prepares the same data; waiting for it (%s)", file)
            fcntl.flock(stream, fcntl.LOCK_EX)
        # Released by the kernel when the process ends, however it ends.
        yield


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        # Not by shutil alone, which blocks on a pipe.
        shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()


def read_newest(root: Path, key: Key) -> str:
    """Return the name of the newest entry of the same data; DataError if there is none."""
    with source.open_regular(root / key.newest) as stream:
        return Path(stream.read(_NAME_BYTES).decode()).name


def _describe_change(root: Path, key: Key) -> str:
    """Describe what changed since the newest entry of the same data."""
    if not (root / key.newest).exists():
        return "now cached"
    try:
        # Looked up by name: scanning all entries would take longer with each one.
        before = dict(read_note(root / read_newest(root, key) / KEY_FILE)["parts"])
    except (OSError, *_MALFORMED):
        return "now cached"  # it was removed
    changed = [part for part in key.parts if before.get(part) != key.parts[part]]
    reasons = []
    for part in changed:
        then, now = before.get(part), key.parts[part]
        if isinstance(then, dict) and isinstance(now, dict):
            names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
            reasons.append(f"{_LABELS[part]}: {', '.join(names)}")
        else:
            reasons.append(_LABELS[part])
    return ", ".join(reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochTokens:
    """The estimated tokens of an epoch, and in words what the estimate is based on."""

    tokens: int
    how: str


class _Size(NamedTuple):
    tokens: float
    rows: float
    rows_read: int
    is_cached: bool = False


def estimate_epoch(
    config: DataConfig, *, sequence_len: int, tokenizer: str, count_tokens: CountTokens
) -> EpochTokens:
    """Estimate the tokens of an epoch; DataError with a short phrase if it cannot be estimated.

    `tokenizer` is the path or hub id with which cached tokens must have been made. `count_tokens`
    returns the number of tokens of each text.
    """
    datasets = config.datasets
    if not datasets:
        raise DataError("no data set is named")
    if config.streaming:
        raise DataError("the length of a stream is unknown")
    if config.mixture.weights != "epochs" and len(datasets) > 1:
        raise DataError(f"data.mixture.weights={config.mixture.weights} mixes data sets by shares")
    tokens, sizes = 0.0, list[_Size]()
    for dataset in datasets:
        size = _find_cached(dataset, config, sequence_len, tokenizer)
        if size is None:
            budget = source.Budget(SAMPLE_BYTES // len(datasets))
            size = _sample(dataset, config, sequence_len, count_tokens, budget)
        held_out = config.held_out
        left = 1 - (held_out if held_out < 1 else min(1.0, held_out / max(1.0, size.rows)))
        if dataset.max_rows is not None:
            left = min(left, dataset.max_rows / max(1.0, size.rows))
        weight = dataset.weight if config.mixture.weights == "epochs" else 1.0
        tokens += size.tokens * left * weight
        sizes.append(size)
    rows, read = round(sum(size.rows for size in sizes)), sum(size.rows_read for size in sizes)
    how = f"all {rows:,} rows" if read == rows else f"the first {read:,} of about {rows:,} rows"
    if all(size.is_cached for size in sizes):
        how = f"{counted(rows, 'row')} tokenized in the cache"
    return EpochTokens(tokens=round(tokens), how=how)


def _find_cached(
    dataset: DatasetConfig, data: DataConfig, sequence_len: int, tokenizer: str
) -> _Size | None:
    """Return the size in the newest entry of the cache, if its settings and files are the same."""
    root = Path(data.cache_dir).expanduser()
    try:
        folder = root / read_newest(root, Key(redact(dataset.path), dataset.split, {}))
        settings = read_note(folder / KEY_FILE)["parts"]["settings"]
        note = read_note(folder / COUNTS_FILE)
        rows, tokens = int(note["counts"]["rows"]), int(note["tokens"])
        size = _Size(tokens, rows, rows, is_cached=True)
        requested: dict[str, Any] = {name: getattr(data, name) for name in TOKEN_SETTINGS}
        requested |= {"format": dataset.format, "columns": dataset.columns}
        requested |= {"sequence_len": sequence_len}
        is_same = note["tokenizer"] == tokenizer and all(
            settings[name] == value for name, value in requested.items()
        )
        # The files of a remote data set are not looked at.
        is_current, written = source.is_remote(dataset.path), (folder / KEY_FILE).stat().st_mtime
        if not is_current:
            files = source.find_files(dataset.path, dataset.split, name=dataset.name)
            local = [file for file in files if isinstance(file, Path)]
            is_current = all(file.stat().st_mtime <= written for file in local)
    except (OSError, *_MALFORMED):
        return None
    return size if is_same and is_current and is_whole(folder, [COUNTS_FILE]) else None


def _sample(
    dataset: DatasetConfig,
    data: DataConfig,
    sequence_len: int,
    count_tokens: CountTokens,
    budget: source.Budget,
) -> _Size:
    """Count the tokens of the first rows, and extrapolate by bytes."""
    if source.is_remote(dataset.path):
        raise DataError(f"{redact(dataset.path)} is not in the cache of tokenized data")
    limit, num_bytes, num_rows = budget.left, 0, 0
    items: list[Item] = []
    name, chunks = encode.find_format(dataset, encode.chunks_of(dataset, data, budget))
    is_cut = False
    for chunk in chunks:
        for row in encode.read_chunk(chunk, name or "", dataset):
            items += [] if isinstance(row, Rejected) else row
        num_bytes, num_rows = num_bytes + chunk.num_bytes, num_rows + chunk.count()
        if is_cut := num_bytes >= limit:
            break
    if not items:
        raise DataError(f"{dataset.path}: its first {limit >> 10} KiB hold no row that can be read")
    texts, tokens = [_texts(item) for item in items], 0
    numbers = iter(count_tokens([text for of_item in texts for text in of_item]))
    for item, of_item in zip(items, texts, strict=True):
        length = sum(itertools.islice(numbers, len(of_item)))
        if isinstance(item, Tokens):
            length += len(item.input_ids)
        else:
            length += 1 + (_TURN_TOKENS * len(item.turns) if isinstance(item, Conversation) else 0)
        if length > sequence_len and data.on_long != "split":
            length = sequence_len if data.on_long.startswith("truncate") else 0
        tokens += length
    if not (is_cut or budget.spent):
        return _Size(tokens, num_rows, num_rows)
    total = source.text_bytes(dataset.path, dataset.split, dataset.name)
    if total is None:
        raise DataError(f"{dataset.path}: the size of its rows is unknown until they are read")
    factor = max(1.0, total / num_bytes)  # not the budget, which may end within a row
    return _Size(tokens * factor, num_rows * factor, num_rows)


def _texts(item: Item) -> list[str]:
    """Return the texts of an item that are tokenized."""
    if isinstance(item, Tokens):
        return []
    if isinstance(item, Document):
        return [item.text]
    texts = [turn.content + (turn.reasoning or "") for turn in item.turns]
    calls = [
        json.dumps({"name": call.name, "arguments": call.arguments}, default=dict)
        for turn in item.turns
        for call in turn.tool_calls
    ]
    return texts + calls + [json.dumps(tool, default=dict) for tool in item.tools]
