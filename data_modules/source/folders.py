"""Choose the files of one split among names, as the Hugging Face library `datasets` does.

Decides which names are not data, which split a name belongs to, which shards are missing, and what
the card of a data set (README.md) declares. Never opens a file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from common.errors import DataError
from common.text import listed, reason_of, shown

CARD = "README.md"
NOT_DATA = (
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)
"""files that `datasets` and the hub write beside the data"""
KINDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""word in a name -> the split that it means"""
_NO_LETTERS = re.compile(r"[\W\d_]+")
_HUB_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b.*")
_SHARD = re.compile(r"(.*?)(\d+)[-_]of[-_](\d+)(.*)", re.DOTALL)
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_MISSING = 1000


def is_set_aside(name: str) -> bool:
    """Return whether a file's name is that of a hidden, lock or backup file."""
    return name.startswith((".", "~$", "#")) or name.endswith(("~", "#"))


def split_word(name: str) -> str | None:
    """Return the word for a split in a file's path, as in `my_test.csv` and `dev/part-0.csv`."""
    for part in reversed(PurePosixPath(name).parts):
        words = _NO_LETTERS.split(part.lower())
        found = [word for word in words if word in KINDS]
        if found:
            return found[0] if words[0] in KINDS else found[-1]
    return None


def split_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name or word of the split that each name tells; others are left out.

    On the hub, `data/train_sft-00000-of-00002.parquet` is of the split train_sft, and not of train.
    """
    shards = {name: match[1] for name in names if (match := _HUB_SHARD.fullmatch(name))}
    if any(map(split_word, shards.values())):
        return shards
    return {name: word for name in names if (word := split_word(name))}


def select_split(names: Sequence[str], split: str) -> list[str]:
    """Return the names of one split; all are train if no name tells a split."""
    told = split_names(names)
    if not told:
        return list(names) if split == "train" else []
    own = [name for name, word in told.items() if word == split]
    kind = KINDS.get(split)
    return own or [name for name, word in told.items() if kind and KINDS.get(word) == kind]


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
class Card:
    """What a card declares: the patterns of each split's files, or the folder that they are in."""

    config: str
    folder: str = ""
    patterns: dict[str, list[str]] = field(default_factory=dict)

    def of_split(self, split: str) -> list[str]:
        """Return the patterns of a split; raises DataError if the card does not declare it."""
        kind = KINDS.get(split)
        same = [name for name in self.patterns if kind and KINDS.get(name) == kind]
        for name in (split, *same[:1]):
            if name in self.patterns:
                return self.patterns[name]
        raise DataError(f"declares no split '{split}'; it has {listed(self.patterns)}")


def read_card(text: str, name: str | None) -> Card | None:
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


def _card_of(config: dict[str, Any]) -> Card:
    """Return what one entry of `configs` declares."""
    files, patterns = config.get("data_files"), dict[str, list[str]]()
    folder = str(config.get("data_dir") or "")
    if isinstance(files, dict):
        files = [{"split": split, "path": paths} for split, paths in files.items()]
    for entry in _listed(files):
        split = str(entry["split"]) if isinstance(entry, dict) else "train"
        paths = _listed(entry["path"]) if isinstance(entry, dict) else [entry]
        patterns.setdefault(split, []).extend(_inside(path) for path in paths)
    return Card(str(config.get("config_name", "default")), _inside(folder), patterns)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _inside(path: Any) -> str:
    """Return a pattern of a card; DataError if it leads out of the folder."""
    parts = PurePosixPath(str(path)).parts
    if not isinstance(path, str) or "://" in path or ".." in parts or parts[:1] == ("/",):
        raise DataError(f"its path {shown(str(path))!r} does not lead into this folder; correct it")
    return str(PurePosixPath(path)) if parts else ""
