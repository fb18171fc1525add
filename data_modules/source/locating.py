"""Find the files that a path means, on disk or remote, and what tells that one has changed.

Decides which files belong to a split and what is said where there is none. Never reads a row.
"""

from __future__ import annotations

import asyncio
import difflib
import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data_modules.samples.corpus import CORPORA
from data_modules.source.limits import Limits
from data_modules.source.opening import File, Url, reason_of, special_file, stem_of, unreadable
from data_modules.source.readers import READERS, is_readable
from data_modules.source.remote import answer_within
from data_modules.types import DataError, Problems, RemoteError, printable

SAMPLE_PREFIX = "sample:"
SAMPLES = Path(__file__).parent.parent / "samples"
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_REMOTE_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "sha256",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
    "blob_id",
    "last_commit",
)


def name_of(path: str) -> str:
    """Return what a data set is called where it has no name: the file's without its suffix.

    Of a pattern it is what stands before the first wildcard, unless that is a split's name.
    """
    file = Path(str(Url(path)) if is_url(path) else path.removeprefix(SAMPLE_PREFIX))
    while glob.has_magic(file.name):
        fixed = re.split(r"[*?[]", file.name)[0]
        stem = (stem_of(fixed) if is_readable(fixed) else fixed).rstrip("-_.")
        if stem and stem not in SPLITS:
            return stem
        file = file.parent
    if is_readable(file.name):
        return stem_of(file.name)
    return file.name or "data"


def is_generated(path: str) -> bool:
    """Tell whether the rows of `path` are made while they are read: one of the base's corpora."""
    return path.startswith(SAMPLE_PREFIX) and path.removeprefix(SAMPLE_PREFIX) in CORPORA


def is_url(path: str) -> bool:
    """Tell whether `path` is the address of a file that fsspec opens, as in s3://bucket/a.jsonl."""
    return "://" in path


def is_remote(path: str) -> bool:
    """Tell whether the rows of `path` have to be fetched: a URL or a hub id."""
    return is_url(path) or is_hub_id(path)


def is_hub_id(path: str) -> bool:
    """Tell whether `path` names a data set of the Hugging Face hub: `owner/name`, not a file."""
    if is_url(path) or not _HUB_ID.fullmatch(path) or path.startswith("."):
        return False
    file = Path(path)
    return not file.exists() and not file.parent.exists() and not is_readable(file.name)


def files_of(path: str, split: str, limits: Limits | None = None) -> list[File]:
    """Return the files of one split; raises DataError when there is none that can be read."""
    if path.startswith(SAMPLE_PREFIX):
        return _named_by_split(path, [_sample_file(path)], split)
    if is_url(path):
        return _remote_files(Url(path, limits or Limits()), split)
    file = Path(path).expanduser()
    if glob.has_magic(path) and not file.exists():
        named = [Path(name) for name in sorted(glob.glob(str(file), recursive=True))]
        matches = _regular([match for match in named if is_readable(match.name)])
        if not matches:
            raise DataError(f"{path}: no file matches (looked from {_here()}){_beside(file)}")
        return _named_by_split(path, matches, split)
    try:
        if file.is_dir():
            return list(_files_in(file, split))
        exists = file.exists()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}") from error
    if not exists:
        raise DataError(f"{path}: no such file (looked from {_here()}){_nearest(file)}")
    _check_readable(path, file.name)
    return _named_by_split(path, [file], split)


def stamp_of(file: File) -> object:
    """Return what changes when a file does; None where that is not known."""
    if isinstance(file, Path):
        try:
            stat = file.stat()
        except OSError as error:
            return str(error)
        return stat.st_size, stat.st_mtime_ns, stat.st_ino
    info = _remote(file, _fresh_info)
    marks = [str(info[key]) for key in _REMOTE_MARKS if info.get(key)]
    return (info.get("size"), *marks) if marks else None


def size_of(file: File) -> int:
    """Return the bytes of a file as it is stored; 0 where that is not known."""
    if isinstance(file, Path):
        return file.stat().st_size
    info = _remote(file, lambda fs, place: fs.info(place))
    return int(info.get("size") or 0)


def _fresh_info(file_system: Any, place: str) -> dict[str, Any]:
    file_system.invalidate_cache(place)
    info: dict[str, Any] = file_system.info(place)
    return info


def _remote(url: Url, ask: Callable[[Any, str], Any]) -> Any:
    """Ask the file system of an address; raises DataError with what it says."""
    import fsspec

    def answer() -> Any:
        try:
            file_system, place = fsspec.core.url_to_fs(url.address, **url.options())
        except ValueError as error:
            known = "give a URL of https, s3, gs, ..."
            raise DataError(f"{url}: {reason_of(error)}; {known}") from error
        return ask(file_system, place)

    try:
        return answer_within(url.limits, answer)
    except ImportError as error:
        raise DataError(
            f"{url}: needs a package that is not installed ({reason_of(error)}); "
            "pip install 'loft[remote]'"
        ) from error
    except FileNotFoundError as error:
        raise _why_not_found(url, error.__cause__) from error
    except DataError:
        raise
    except Exception as error:
        # Each remote file system has errors of its own.
        raise RemoteError(unreadable(url, error)) from error


def _why_not_found(url: Url, cause: BaseException | None) -> DataError:
    """Word what fsspec calls a missing file: it does so whatever goes wrong over http."""
    if cause is not None and url.address.startswith(("http://", "https://")):
        import aiohttp

        if isinstance(cause, aiohttp.ClientResponseError) and cause.status != 404:
            kind = DataError if 400 <= cause.status < 500 else RemoteError
            return kind(
                f"{url}: cannot be read: the server says {cause.status} {printable(cause.message)}"
            )
        if isinstance(cause, (aiohttp.ClientConnectionError, asyncio.TimeoutError)):
            reason = reason_of(cause) if isinstance(cause, Exception) else ""
            return RemoteError(
                f"{url}: host {urlsplit(str(url)).netloc} cannot be reached ({reason}; no "
                "network?); check the address, or give a local file"
            )
    return DataError(f"{url}: no such file")


def _check_readable(path: str, name: str) -> None:
    if not is_readable(name):
        known = ", ".join(READERS)
        suffix = Path(name).suffix or "a file without suffix"
        raise DataError(f"{path}: cannot read {suffix}; use {known} (also with .gz or .zst)")


def _remote_files(url: Url, split: str) -> list[File]:
    if "*" in url.address:
        found = _remote(url, lambda fs, place: _addresses(url, fs, fs.glob(place)))
        files = [file for file in found if is_readable(file.name)]
        if not files:
            raise DataError(f"{url}: no file matches")
        return _named_by_split(str(url), files, split)
    if is_readable(url.name):
        # That its package is there is asked here, before anything is read.
        _remote(url, lambda fs, place: None)
        return _named_by_split(str(url), [url], split)
    if not _remote(url, lambda fs, place: fs.isdir(place)):
        _check_readable(str(url), url.name)
    listed = _remote(url, lambda fs, place: _addresses(url, fs, fs.ls(place, detail=False)))
    files = _of_split([file for file in listed if is_readable(file.name)], split)
    if not files:
        raise DataError(_no_split(str(url), split, [file.name for file in listed]))
    return files


def _addresses(folder: Url, file_system: Any, places: Sequence[str]) -> list[Url]:
    return [Url(file_system.unstrip_protocol(place), folder.limits) for place in sorted(places)]


def _sample_file(path: str) -> Path:
    name = path.removeprefix(SAMPLE_PREFIX)
    file = SAMPLES / name
    if Path(name).name == name and is_readable(name) and file.is_file():
        return file
    known = [*CORPORA, *(f.name for f in SAMPLES.iterdir() if is_readable(f.name))]
    raise DataError(f"{path}: no such sample; there are {', '.join(sorted(known))}")


def _files_in(folder: Path, split: str) -> list[File]:
    inner = folder / split
    if inner.is_dir():
        # What DatasetDict.save_to_disk writes, and many a data set on the hub.
        folder = inner
    entries = sorted(folder.iterdir())
    found = _regular(
        [f for f in entries if is_readable(f.name) and f.name not in _SAVED_BY_DATASETS]
    )
    files = found if folder == inner else _of_split(found, split)
    if not files:
        raise DataError(_no_split(str(folder), split, [f.name for f in entries]))
    return files


def _regular(files: Sequence[Path]) -> list[File]:
    """Return files that a folder or a pattern has; raises DataError where one is no file.

    Left out in silence, it would be a part of the data that nobody misses.
    """
    problems = Problems()
    for file in files:
        problem = special_file(file)
        if problem is None and not file.exists():
            problem = f"{file}: is a link to a file that is not there"
        if problem is not None:
            problems.add(f"{problem}, or take it out of the data set")
    problems.raise_if_any()
    return list(files)


def _of_split(files: Sequence[File], split: str) -> list[File]:
    """Return the files named by `split`; all of them where no name tells a split."""
    if any(_split_of(file) for file in files):
        return [file for file in files if _split_of(file) == split]
    return list(files) if split == "train" else []


def _no_split(folder: str, split: str, names: Sequence[str]) -> str:
    found = ", ".join(sorted(names)[:8]) or "nothing"
    return f"{folder}: no data file for split '{split}' in this folder; found {found}"


def _named_by_split(path: str, files: Sequence[File], split: str) -> list[File]:
    """Return files that were named one by one, which are train whatever their names say."""
    named = [file for file in files if split in ("train", _split_of(file))]
    if not named:
        raise DataError(only_train(path, split))
    return named


def only_train(path: str, split: str) -> str:
    """Say that what is no folder has no split but train."""
    return (
        f"{path}: no split '{split}' in what is one file, or files named one by one: their split "
        "is train; give a folder, or the file of that split"
    )


def _split_of(file: File) -> str | None:
    word = re.split(r"[-_.]", file.name)[0]
    return word if word in SPLITS else None


def _here() -> str:
    return str(Path.cwd().name) + "/"


def _beside(pattern: Path) -> str:
    """Say what stands in the folder in which a glob found nothing."""
    folder = pattern.parent
    while glob.has_magic(str(folder)) or not folder.is_dir():
        if folder == folder.parent:
            return ""
        folder = folder.parent
    names = sorted(f.name for f in folder.iterdir())
    close = difflib.get_close_matches(pattern.name, names, 3, 0.3) or names[:8]
    return f"; {folder} has {', '.join(close) or 'nothing'}"


def _nearest(file: Path) -> str:
    folder = file.parent
    while not folder.is_dir():
        folder = folder.parent
    missing = file.relative_to(folder).parts[0]
    close = difflib.get_close_matches(missing, [f.name for f in folder.iterdir()], 3, 0.5)
    if not close:
        return "; check data.datasets[].path"
    return f"; did you mean {' or '.join(str(folder / name) for name in close)}?"
