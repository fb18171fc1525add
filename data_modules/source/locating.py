"""Resolve a path and a split to files, on disk or remote, and to a slice of their rows.

Decides, as the Hugging Face library `datasets` does, which names are not data, which split a name
belongs to, what the card of a data set (README.md) declares, and which shards are missing. Never
reads a row.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import os
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import DataError, Problems
from common.text import listed, reason_of, shown, unreadable
from data_modules.source import opening
from data_modules.source.opening import Chunk, File, ReadLimits, ReadOptions, Url, query_remote
from data_modules.source.tables import read_arrow, read_csv, read_parquet
from data_modules.source.text import read_json, read_jsonl, read_txt

_SAMPLE_PREFIX = "sample:"
_SAMPLES = Path(__file__).parents[1] / "samples"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_DEPTH = 3
_MAX_NAMES = 20_000
_MAX_CARD_BYTES = 1 << 20
_CARD = "README.md"
_NOT_DATA = (
    *("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"),
    "state.json",
)
"""files that `datasets` and the hub write beside the data"""
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""word in a name -> the split that it means"""
_NO_LETTERS = re.compile(r"[\W\d_]+")
_HUB_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b.*")
_SHARD = re.compile(r"(.*?)(\d+)[-_]of[-_](\d+)(.*)", re.DOTALL)
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_MISSING = 1000
_BOUND = r"-?\d[\d_]*(?:\.\d+)?%?"
_PART = re.compile(rf"([\w.-]+)(?:\[({_BOUND})?:({_BOUND})?\])?")
_REMOTE_MARKS = (
    *("ETag", "etag", "md5Hash", "sha256", "LastModified", "last_modified", "updated", "mtime"),
    *("created", "blob_id", "last_commit"),
)
READERS: dict[str, Callable[[File, ReadOptions], Iterator[Chunk]]] = {
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": read_csv,
    ".tsv": partial(read_csv, separator="\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_txt,
}


def default_name(path: str) -> str:
    """Return the default name of a data set: the file's name without suffix.

    For a pattern it is the part before the first wildcard, unless that is the name of a split.
    """
    file = Path(str(Url(path)) if "://" in path else path.removeprefix(_SAMPLE_PREFIX))
    while glob.has_magic(file.name):
        fixed = re.split(r"[*?[]", file.name)[0]
        stem = (opening.stem_of(fixed) if _is_readable(fixed) else fixed).rstrip("-_.")
        if stem and stem not in SPLIT_WORDS:
            return stem
        file = file.parent
    if _is_readable(file.name):
        return opening.stem_of(file.name)
    return file.name or "data"


def is_remote(path: str) -> bool:
    """Return whether the rows of `path` are downloaded: it is a URL or a hub id."""
    return "://" in path or is_hub_id(path)


def is_hub_id(path: str) -> bool:
    """Return whether `path` names a data set of the Hugging Face hub: `owner/name`, not a file."""
    if "://" in path or not _HUB_ID.fullmatch(path) or path.startswith("."):
        return False
    file = Path(path)
    return not file.exists() and not file.parent.exists() and not _is_readable(file.name)


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of one split, and in words what was left out beside them."""

    files: list[File]
    notes: list[str] = field(default_factory=list)


def locate(
    path: str, split: str, limits: ReadLimits | None = None, name: str | None = None
) -> _Found:
    """Return the files of one split; raises DataError if there is none that can be read.

    `name` is that of a configuration in a folder's card.
    """
    if path.startswith(_SAMPLE_PREFIX):
        return _Found(_only(path, _sample_file(path), split))
    if "://" in path:
        return _remote_files(Url(path, limits or ReadLimits()), split, name)
    file = Path(path).expanduser()
    if glob.has_magic(path) and not file.exists():
        named = sorted(glob.glob(str(file), recursive=True))
        return _matching(path, {match: Path(match) for match in named}, split)
    try:
        if file.is_dir():
            return _files_in(_Folder(file), split, name)
        exists = file.exists()
    except OSError as error:
        raise DataError(unreadable(path, error)) from error
    if not exists:
        raise DataError(f"{path}: no such file (searched from {Path.cwd().name}/){_nearest(file)}")
    _check_readable(path, file.name)
    return _Found(_only(path, file, split))


def stamp_of(file: File) -> object:
    """Return a value that changes with the file's content; None if there is none."""
    if isinstance(file, Path):
        try:
            stat = file.stat()
        except OSError as error:
            return str(error)
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def fresh_info(file_system: Any, place: str) -> dict[str, Any]:
        file_system.invalidate_cache(place)
        found: dict[str, Any] = file_system.info(place)
        return found

    info = query_remote(file, fresh_info)
    values = [str(info[key]) for key in _REMOTE_MARKS if info.get(key)]
    return (info.get("size"), *values) if values else None


def size_of(file: File) -> int:
    """Return the stored size of a file in bytes; 0 if it is unknown."""
    if isinstance(file, Path):
        return file.stat().st_size
    info = query_remote(file, lambda fs, place: fs.info(place))
    return int(info.get("size") or 0)


def _check_readable(path: str, name: str) -> None:
    if not _is_readable(name):
        known = ", ".join(READERS)
        suffix = Path(name).suffix or "a file without suffix"
        raise DataError(f"{path}: cannot read {suffix}; use {known} (also with .gz or .zst)")


def _remote_files(url: Url, split: str, name: str | None) -> _Found:
    if "*" in url.address:
        found = query_remote(
            url, lambda fs, place: [*map(fs.unstrip_protocol, sorted(fs.glob(place)))]
        )
        files = [Url(address, url.limits) for address in found]
        return _matching(str(url), {str(file): file for file in files}, split)
    if _is_readable(url.name):
        # Checks that its package is installed before anything is read.
        query_remote(url, lambda fs, place: None)
        return _Found(_only(str(url), url, split))
    if not query_remote(url, lambda fs, place: fs.isdir(place)):
        _check_readable(str(url), url.name)
    return _files_in(_RemoteFolder(url), split, name)


def _matching(path: str, matches: Mapping[str, File], split: str) -> _Found:
    """Return the files that match a pattern, without other splits than the one it names."""
    if "://" in path:
        pattern, root = PurePosixPath(path).name, path.rpartition("/")[0]
    else:
        first = next(part for part in Path(path).parts if glob.has_magic(part))
        root = path[: path.index(first)]
        pattern = path.removeprefix(root)
        root = str(Path(root).expanduser())
    inner = {os.path.relpath(name, root) if root else name: name for name in matches}
    junk = [] if "/." in f"/{pattern}" else [n for n in inner if _is_set_aside(Path(n).name)]
    names = [n for n in inner if _is_readable(Path(n).name) and n not in junk]
    if not names:
        beside = (
            "" if "://" in path else f" (searched from {Path.cwd().name}/){_beside(Path(path))}"
        )
        raise DataError(f"{path}: no file matches{beside}")
    chosen = _select_split(names, split)
    if split == "train":
        unnamed = [n for n in names if split_word(n) is None]
        chosen = names if split_word(pattern) else chosen or unnamed or names
    if not chosen:
        raise DataError(_only_train(path, split))
    # Those that the pattern would match, were they there.
    bare = PurePosixPath(pattern).name
    missing = ((n, PurePosixPath(n).name.replace("*", ".x")) for n in missing_shards(chosen))
    lost = [n for n, name in missing if fnmatch.fnmatchcase(name, bare)]
    notes = _notes(junk, [n for n in names if n not in chosen])
    return _complete(path, [matches[inner[n]] for n in chosen], lost, notes)


def _sample_file(path: str) -> Path:
    name = path.removeprefix(_SAMPLE_PREFIX)
    file = _SAMPLES / name
    if Path(name).name == name and _is_readable(name) and file.is_file():
        return file
    known = sorted(f.name for f in _SAMPLES.iterdir() if _is_readable(f.name))
    raise DataError(f"{path}: no such sample; there are {', '.join(known)}")


class _Folder:
    """A folder on disk; names are relative to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self, depth: int) -> list[str]:
        """Return the names of all entries down to `depth` folders below, sorted."""
        names: list[str] = []
        for root, folders, files in os.walk(self.path, onerror=_raise):
            here = Path(root).relative_to(self.path)
            names += [(here / name).as_posix() for name in (*folders, *files)]
            entered = (name for name in folders if not name.startswith((".", "__")))
            folders[:] = sorted(entered) if len(here.parts) < depth else []
            if len(names) > _MAX_NAMES:
                raise DataError(f"{self}: has over {_MAX_NAMES:,} files; give a smaller folder")
        return sorted(names)

    def matching(self, pattern: str) -> list[str]:
        found = glob.glob(pattern, root_dir=self.path, recursive=True)
        return sorted(name for name in found if not (self.path / name).is_dir())

    def file(self, name: str) -> File:
        return self.path / name

    def inner(self, name: str) -> _Folder | None:
        return _Folder(self.path / name) if (self.path / name).is_dir() else None


def _raise(error: OSError) -> None:
    raise error


class _RemoteFolder(_Folder):
    """A folder behind a URL."""

    def __init__(self, url: Url) -> None:
        self.url = url

    def __str__(self) -> str:
        return str(self.url)

    def names(self, depth: int) -> list[str]:
        if not depth:
            return self._ask(lambda fs, place: fs.ls(place, detail=False))
        found = self._ask(lambda fs, place: fs.find(place, maxdepth=depth + 1))
        return [name for name in found if not re.search(r"(^|/)(\.|__)[^/]*/", name)]

    def matching(self, pattern: str) -> list[str]:
        return self._ask(lambda fs, place: fs.glob(f"{place.rstrip('/')}/{pattern}"))

    def file(self, name: str) -> File:
        return Url(f"{self.url.address.rstrip('/')}/{name}", self.url.limits)

    def inner(self, name: str) -> _Folder | None:
        url = Url(f"{self.url.address.rstrip('/')}/{name}", self.url.limits)
        is_folder = query_remote(url, lambda fs, place: fs.isdir(place))
        return _RemoteFolder(url) if is_folder else None

    def _ask(self, ask: Callable[[Any, str], list[str]]) -> list[str]:
        def names(fs: Any, place: str) -> list[str]:
            found = [name.removeprefix(place).strip("/") for name in ask(fs, place)]
            return sorted(filter(None, found))

        found: list[str] = query_remote(self.url, names)
        return found


def _files_in(folder: _Folder, split: str, name: str | None) -> _Found:
    """Return the files of a split: those that the card declares, else those whose names say so."""
    entries = folder.names(0)
    if _CARD in entries and (found := _declared(folder, split, name)) is not None:
        return found
    if (inner := folder.inner(split)) is not None:
        # The layout of DatasetDict.save_to_disk, and of many data sets on the hub.
        names, junk = _data_in(inner)
        return _checked(inner, names, split, _notes(junk, []))
    names, junk = _data_in(folder)
    chosen = _select_split(names, split)
    if not chosen:
        raise DataError(_no_split(folder, split, entries, names))
    return _checked(folder, chosen, split, _notes(junk, [n for n in names if n not in chosen]))


def _data_in(folder: _Folder) -> tuple[list[str], list[str]]:
    """Return the names of data files, of subfolders if there is none beside them, and others'."""
    for depth in (0, _MAX_DEPTH):
        every = folder.names(depth)
        junk = [name for name in every if _looks_set_aside(PurePosixPath(name).name)]
        names = [
            name
            for name in every
            if _is_readable(name)
            and not _is_set_aside(PurePosixPath(name).name)
            and PurePosixPath(name).name not in _NOT_DATA
        ]
        if names:
            break
    return names, junk


def _declared(folder: _Folder, split: str, name: str | None) -> _Found | None:
    """Return the files that a folder's card declares; None if it declares none."""
    file = folder.file(_CARD)
    with opening.open_stored(file) as stream:
        text = stream.read(_MAX_CARD_BYTES).decode(errors="replace")
    try:
        card = _read_card(text, name)
        if card is None:
            return None
        patterns = card.of_split(split) if card.patterns else []
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    if not patterns:
        if (inner := folder.inner(card.folder)) is None:
            raise DataError(f"{file}: declares the folder {card.folder!r}, which is missing")
        return _files_in(inner, split, None)
    names: dict[str, None] = {}
    for pattern in patterns:
        place = f"{card.folder}/{pattern}".lstrip("/")
        found = [n for n in folder.matching(place) if _is_readable(n)]
        if "/." not in f"/{place}":
            found = [n for n in found if not _is_set_aside(PurePosixPath(n).name)]
        if not found:
            raise DataError(
                f"{file}: declares {place!r} for split '{split}', and no such data file is in this "
                "folder; download it"
            )
        names |= dict.fromkeys(found)
    return _checked(folder, list(names), split, [f"as {_CARD} declares '{card.config}'"])


def _checked(folder: _Folder, names: Sequence[str], split: str, notes: list[str]) -> _Found:
    if not names:
        raise DataError(_no_split(folder, split, folder.names(0)))
    files = [folder.file(name) for name in names]
    return _complete(str(folder), files, list(missing_shards(names)), notes)


def _complete(path: str, files: list[File], missing: list[str], notes: list[str]) -> _Found:
    """Return the files; raises DataError if a shard is missing, or one is not a regular file.

    Skipping them silently would lose a part of the data.
    """
    if missing:
        raise DataError(
            f"{path}: {len(missing):,} shards are missing: {listed(missing)}; download them again, "
            "or give a pattern that only the wanted shards match"
        )
    problems = Problems()
    for file in (file for file in files if isinstance(file, Path)):
        problem = opening.special_file(file)
        if problem is None and not file.exists():
            problem = f"{file}: is a link to a missing file; restore the file"
        if problem is not None:
            problems.add(f"{problem}, or remove it from the data set")
    problems.raise_if_any()
    return _Found(files, notes)


def _looks_set_aside(name: str) -> bool:
    """Return whether a hidden, lock or backup file is one of data."""
    bare = name.strip("~#")
    return _is_set_aside(name) and (_is_readable(bare) or _is_readable(PurePosixPath(bare).stem))


def _notes(junk: Sequence[str], others: Sequence[str]) -> list[str]:
    kinds = (("hidden, lock or backup files", junk), ("files of other splits", others))
    return [f"left out {len(names):,} {kind}: {listed(names)}" for kind, names in kinds if names]


def _no_split(
    folder: _Folder, split: str, entries: Sequence[str], names: Sequence[str] = ()
) -> str:
    found = ", ".join(sorted(entries)[:8]) or "nothing"
    told = sorted(set(_split_names(names).values()))
    splits = f", with the splits {', '.join(map(shown, told[:8]))}" if told else ""
    fix = "give the file, or a pattern that only the wanted files match" if names else ""
    return (
        f"{folder}: no data file for split '{split}' in this folder; found {found}{splits}"
        f"{fix and '; '}{fix}"
    )


def _only(path: str, file: File, split: str) -> list[File]:
    """Return a file, which is the train split whatever its name is."""
    if split != "train" and not _select_split([file.name], split):
        raise DataError(_only_train(path, split))
    return [file]


def _only_train(path: str, split: str) -> str:
    return (
        f"{path}: no split '{split}': a single file, or files named one by one, are the train "
        "split; give a folder, or the file of that split"
    )


def _beside(pattern: Path) -> str:
    """Describe the content of the folder in which a glob matched nothing."""
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
    if not close or folder == folder.parent:  # never suggest an entry of the root folder
        return "; check data.datasets[].path"
    return f"; did you mean {' or '.join(str(folder / name) for name in close)}?"


def _is_readable(name: str) -> bool:
    return opening.suffix_of(name) in READERS


def _is_set_aside(name: str) -> bool:
    """Return whether a file's name is that of a hidden, lock or backup file."""
    return name.startswith((".", "~$", "#")) or name.endswith(("~", "#"))


def split_word(name: str) -> str | None:
    """Return the word for a split in a file's path, as in `my_test.csv` and `dev/part-0.csv`."""
    for part in reversed(PurePosixPath(name).parts):
        words = _NO_LETTERS.split(part.lower())
        found = [word for word in words if word in SPLIT_WORDS]
        if found:
            return found[0] if words[0] in SPLIT_WORDS else found[-1]
    return None


def _split_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name or word of the split that each name tells; others are left out.

    On the hub, `data/train_sft-00000-of-00002.parquet` is of the split train_sft, and not of train.
    """
    shards = {name: match[1] for name in names if (match := _HUB_SHARD.fullmatch(name))}
    if any(map(split_word, shards.values())):
        return shards
    return {name: word for name in names if (word := split_word(name))}


def _select_split(names: Sequence[str], split: str) -> list[str]:
    """Return the names of one split; all are train if no name tells a split."""
    told = _split_names(names)
    if not told:
        return list(names) if split == "train" else []
    own = [name for name, word in told.items() if word == split]
    kind = SPLIT_WORDS.get(split)
    return own or [name for name, word in told.items() if kind and SPLIT_WORDS.get(word) == kind]


def missing_shards(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of the shards that are missing, as of `train-00001-of-00004.parquet`."""
    groups: defaultdict[tuple[str, str], dict[int, tuple[str, str]]] = defaultdict(dict)
    for name in names:
        folder, _, bare = name.rpartition("/")
        if match := _SHARD.fullmatch(bare):
            head, number, total, tail = match.groups()
            groups[f"{folder}/{head}".lstrip("/"), total][int(number)] = (number, tail)
    for (head, total), found in groups.items():
        widths = {len(number) for number, _ in found.values()}
        # A single `best_1_of_4` is not a shard.
        if len(found) >= int(total) or (len(found) == 1 and max(widths) < 3):
            continue
        first = int(0 not in found and int(total) in found)
        tails = {tail for _, tail in found.values()}
        tail = tails.pop() if len(tails) == 1 else "*"
        joint = "_of_" if any("_of_" in name for name in names) else "-of-"
        numbers = range(first, min(int(total) + first, _MAX_MISSING))
        for number in numbers:
            if number not in found:
                yield f"{head}{number:0{min(widths)}}{joint}{total}{tail}"


@dataclass(frozen=True, slots=True)
class _Card:
    """What a card declares: the patterns of each split's files, or the folder that they are in."""

    config: str
    folder: str = ""
    patterns: dict[str, list[str]] = field(default_factory=dict)

    def of_split(self, split: str) -> list[str]:
        """Return the patterns of a split; raises DataError if the card does not declare it."""
        kind = SPLIT_WORDS.get(split)
        same = [name for name in self.patterns if kind and SPLIT_WORDS.get(name) == kind]
        for name in (split, *same[:1]):
            if name in self.patterns:
                return self.patterns[name]
        raise DataError(f"declares no split '{split}'; it has {listed(self.patterns)}")


def _read_card(text: str, name: str | None) -> _Card | None:
    """Return what a card's `configs` declare of the configuration `name`; None if it has none.

    Without `name`, or if none is called so, it is the default one. Raises DataError without the
    card's name.
    """
    matter = _FRONT_MATTER.match(text)
    if matter is None or not re.search(r"^configs\s*:", matter[1], re.MULTILINE):
        return None
    import yaml  # type: ignore[import-untyped]

    try:
        configs = yaml.safe_load(matter[1])["configs"]
        cards = [(_card_of(config), config.get("default") is True) for config in configs]
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"its configs cannot be read: {reason_of(error)}") from error
    except AttributeError as error:
        raise DataError("its configs are not a list of mappings") from error
    declared = {card.config: card for card, _ in cards if card.patterns or card.folder}
    if not declared:
        return None
    default = [card.config for card, is_default in cards if is_default and card.config in declared]
    for config in (name, *default, "default", *(declared if len(declared) == 1 else ())):
        if config in declared:
            return declared[config]
    first = shown(next(iter(declared)))
    raise DataError(
        f"declares several configurations, {listed(declared)}; choose one by its name: "
        f"data.datasets[].name={first}"
    )


def _card_of(config: dict[str, Any]) -> _Card:
    """Return what one entry of `configs` declares."""
    files, patterns = config.get("data_files"), dict[str, list[str]]()
    folder = str(config.get("data_dir") or "")
    if isinstance(files, dict):
        files = [{"split": split, "path": paths} for split, paths in files.items()]
    for entry in _listed(files):
        split = str(entry["split"]) if isinstance(entry, dict) else "train"
        paths = _listed(entry["path"]) if isinstance(entry, dict) else [entry]
        patterns.setdefault(split, []).extend(_inside(path) for path in paths)
    return _Card(str(config.get("config_name", "default")), _inside(folder), patterns)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _inside(path: Any) -> str:
    """Return a pattern of a card; DataError if it leads out of the folder."""
    parts = PurePosixPath(str(path)).parts
    if not isinstance(path, str) or "://" in path or ".." in parts or parts[:1] == ("/",):
        raise DataError(f"its path {shown(str(path))!r} does not lead into this folder; correct it")
    return str(PurePosixPath(path)) if parts else ""


@dataclass(frozen=True, slots=True)
class Part:
    """A split and a slice of its rows, whose ends are as typed: 10, -10 (from the end) or 10%."""

    name: str
    start: str = ""
    stop: str = ""

    @property
    def needs_total(self) -> bool:
        ends = filter(None, (self.start, self.stop))
        return any(end.endswith("%") or _value(end) < 0 for end in ends)

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]" if self.start or self.stop else self.name


def parse_split(split: str) -> list[Part]:
    """Return the parts of `split`, as in `train[:90%]+validation`; raises ValueError."""
    parts = []
    for text in split.split("+"):
        match = _PART.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"split '{text}' cannot be read; use NAME, NAME[:90%], NAME[100:200] or NAME+NAME"
            )
        part = Part(match[1], match[2] or "", match[3] or "")
        ends = [(end.endswith("%"), _value(end), end) for end in (part.start, part.stop) if end]
        for is_percent, value, end in ends:
            if is_percent and abs(value) > 100:
                raise ValueError(f"split '{text}' has {end}; use a percentage up to 100")
            if not is_percent and value.denominator != 1:
                raise ValueError(
                    f"split '{text}' has row {end}; use a whole number, or a percentage"
                )
        # -10 and 90 cannot be compared until the rows are counted.
        kinds = {(is_percent, value < 0) for is_percent, value, _ in ends}
        if len(ends) == 2 and len(kinds) == 1 and ends[0][1] >= ends[1][1]:
            raise ValueError(f"split '{text}' has no row: its end is not after its start")
        parts.append(part)
    return parts


def _value(end: str) -> Fraction:
    return Fraction(end.removesuffix("%").replace("_", ""))


def _row_at(end: str, total: int) -> int:
    """Return the row number, from 0; a percentage gives the same row as start and as stop."""
    value, is_percent = _value(end), end.endswith("%")
    if value < 0:
        value += 100 if is_percent else total
    return min(total, max(0, round(value * total / 100) if is_percent else int(value)))


def rows_of(path: str, part: Part, total: int | None) -> tuple[int, int | None]:
    """Return the first row of the slice, from 0, and the row after the last; raises DataError."""
    known = total if total is not None else 1 << 62
    start = _row_at(part.start, known) if part.start else 0
    stop = _row_at(part.stop, known) if part.stop else None
    is_empty = start == total or (stop is not None and stop <= start)
    if is_empty and (part.start or part.stop):
        rows = "" if total is None else f" of {total:,} rows"
        raise DataError(f"{path}: 0 rows in '{part}'{rows}; give another slice")
    return start, stop


def take(
    chunks: Iterator[Chunk], start: int, stop: int | None, shard: tuple[int, int] = (0, 1)
) -> Generator[Chunk, None, int]:
    """Yield every count-th of the rows from `start` to `stop`; return the number of rows read.

    Rows are not counted if all of them are taken.
    """
    index, count = shard
    position = 0
    if start == 0 and stop is None and count == 1:
        yield from chunks
        return position
    for chunk in chunks:
        num_rows = chunk.count()
        first = max(start - position, 0)
        last = num_rows if stop is None else min(stop - position, num_rows)
        offset = (index - (position + first - start)) % count
        kept = range(num_rows)[first:last][offset::count]
        position += num_rows
        if len(kept) == num_rows:
            yield chunk
        elif kept:
            yield chunk.select(kept)
        if stop is not None and position >= stop:
            break
    return position
