"""Documents fitted to length, stored as raw numbers and read through memory maps.

Decides what of a row fits and how documents are stored. Never decides which documents are trained
on, or when.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import Origin
from data_modules.types import Encoded, Example

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from data_modules.template import ChatTemplate
    from data_modules.tokens.encode import Counts

_NAMES_FILE, _DOCUMENTS_FILE = "files.json", "documents"
_TOKEN_FILES = {"input_ids": "int32", "weights": "float32", "target_ids": "int32"}
"""file with the tokens or labels of all documents -> type of its numbers"""
_RECORD = [
    ("file", "int64"),  # its number in `files.json`
    *((name, "int64") for name in ("lengths", "target_lengths", "rows", "lines", "trained")),
    *(("label_weights", "float64"), ("digests", "uint64"), ("ends_in_stop", "bool")),
    *(("double_bos", "bool"), ("rejected_starts", "int64"), ("row_labels", "float64")),
]
"""what the file of documents holds of each"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The concatenated documents of a chunk of rows, as sent between processes and stored.

    input_ids      int32 [tokens of all documents], document after document
    lengths        int64 [documents], tokens of each
    weights        float32 [labels of all documents]; one per token, or per target if there are
                   targets
    target_ids     int32 [targets of all documents], None for causal models
    target_lengths int64 [documents], None for causal models
    rows           int64 [documents], number of the document's row, from 0 in reading order,
                   including bad rows
    lines          int64 [documents], line of the row in the chunk's file
    trained        int64 [documents], number of labels with a weight
    label_weights  float64 [documents], weight in the mean over a step: the sum of the labels'
                   weights, for a pair the largest
    digests        uint64 [documents], hash of the ids
    ends_in_stop   bool [documents], whether the last trained token is a stop token
    double_bos     bool [documents], whether it starts with two BOS tokens
    rejected_starts int64 [documents], where the second answer of a pair starts, 0 without one
    row_labels     float64 [documents], label of the row: a verdict, 1 or 0; NaN without one
    """

    file: str
    input_ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    target_ids: npt.NDArray[np.int32] | None
    target_lengths: npt.NDArray[np.int64] | None
    rows: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    label_weights: npt.NDArray[np.float64]
    digests: npt.NDArray[np.uint64]
    ends_in_stop: npt.NDArray[np.bool_]
    double_bos: npt.NDArray[np.bool_]
    rejected_starts: npt.NDArray[np.int64]
    row_labels: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all documents, targets included."""
        return len(self.input_ids) + (0 if self.target_ids is None else len(self.target_ids))

    def examples(self, dataset: int) -> Iterator[Example]:
        """Yield the documents as examples of data set number `dataset`."""
        import numpy as np

        borders = np.cumsum(self.lengths)[:-1]
        sources = np.split(self.input_ids, borders)
        targets: list[Any] = [None] * len(self)
        if self.target_ids is not None and self.target_lengths is not None:
            borders = np.cumsum(self.target_lengths)[:-1]
            targets = np.split(self.target_ids, borders)
        labels = np.split(self.weights, borders)
        columns = (self.lines, self.rejected_starts, self.row_labels)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for ids, weights, target_ids, (line, start, label) in zip(
            sources, labels, targets, rows, strict=True
        ):
            origin, known = Origin(self.file, line), None if math.isnan(label) else label
            yield Example(ids, weights, dataset, origin, target_ids, start, known)

    def largest_token(self) -> tuple[int, str]:
        """Return the largest token id and its file:line."""
        sides = [(self.input_ids, self.lengths)]
        if self.target_ids is not None and self.target_lengths is not None:
            sides.append((self.target_ids, self.target_lengths))
        found = []
        for ids, lengths in sides:
            place = int(ids.argmax())
            document = int(lengths.cumsum().searchsorted(place, side="right"))
            found.append((int(ids[place]), f"{self.file}:{self.lines[document]}"))
        return max(found)

    def count_token(self, token_id: int | None) -> int:
        """Return how often a token occurs; 0 for None."""
        sides = [self.input_ids, *([] if self.target_ids is None else [self.target_ids])]
        return 0 if token_id is None else sum(int((ids == token_id).sum()) for ids in sides)


class StoreWriter:
    """Write chunks of documents into `folder`, one at a time, in bounded memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: list[str] = []

    def add(self, documents: Documents) -> None:
        """Append the documents of a chunk."""
        import numpy as np

        if self._names[-1:] != [documents.file]:
            self._names.append(documents.file)
        records = np.zeros(len(documents), _RECORD)
        records["file"] = len(self._names) - 1
        for name, _ in _RECORD[1:]:
            if (column := getattr(documents, name)) is not None:
                records[name] = column
        arrays: dict[str, npt.NDArray[Any]] = {_DOCUMENTS_FILE: records}
        for name, kind in _TOKEN_FILES.items():
            if (values := getattr(documents, name)) is not None:
                arrays[name] = values.astype(kind, copy=False)
        for name, array in arrays.items():
            with (self._folder / name).open("ab") as stream:
                stream.write(array.tobytes())

    def close(self) -> None:
        """Write the names of the files that the documents are of."""
        (self._folder / _NAMES_FILE).write_text(json.dumps(self._names))


class TokenStore:
    """One tokenized data set, memory-mapped; token ids are read when they are used.

    Raises ValueError if its files are not of the same documents.
    """

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._folder = folder
        self._names = json.loads((folder / _NAMES_FILE).read_text())
        records = np.fromfile(folder / _DOCUMENTS_FILE, _RECORD)

        columns = {name: np.ascontiguousarray(records[name]) for name, _ in _RECORD}
        borders = {
            name: np.concatenate([[0], np.cumsum(columns[name])])
            for name in ("lengths", "target_lengths")
        }
        tokens = {
            name: np.asarray(np.memmap(folder / name, kind, "r"))
            for name, kind in _TOKEN_FILES.items()
            if (folder / name).exists()
        }
        self._files = columns["file"]
        self.rows, self.lines = columns["rows"], columns["lines"]
        self.trained, self.label_weights = columns["trained"], columns["label_weights"]
        self.digests, self.ends_in_stop = columns["digests"], columns["ends_in_stop"]
        self.double_bos = columns["double_bos"]
        self.rejected_starts, self.row_labels = columns["rejected_starts"], columns["row_labels"]
        self.lengths = np.maximum(records["lengths"], records["target_lengths"])
        """tokens that a document takes in a pack: the longer of input and target"""
        self._input_ids, self._weights = tokens["input_ids"], tokens["weights"]
        self._target_ids = tokens.get("target_ids")
        self._borders = borders["lengths"]
        has_targets = self._target_ids is not None
        self._label_borders = borders["target_lengths" if has_targets else "lengths"]
        ends = self._borders[-1], self._label_borders[-1]
        if ends != (len(self._input_ids), len(self._weights)):
            raise ValueError("tokens and documents do not belong together")
        if self._target_ids is not None and len(self._target_ids) != len(self._weights):
            raise ValueError("targets and weights do not belong together")

    # A memory map cannot be pickled; the workers of a loader open the file again.
    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self._folder,)

    def __len__(self) -> int:
        return len(self.rows)

    def origin(self, index: int) -> Origin:
        """Return the file and line of document `index`."""
        return Origin(self._names[self._files[index]], int(self.lines[index]))

    def example(self, index: int, dataset: int) -> Example:
        """Return document `index` as an example of data set number `dataset`."""
        tokens = slice(*self._borders[index : index + 2])
        labels = slice(*self._label_borders[index : index + 2])
        label = float(self.row_labels[index])
        return Example(
            input_ids=self._input_ids[tokens],
            weights=self._weights[labels],
            dataset=dataset,
            origin=self.origin(index),
            target_ids=None if self._target_ids is None else self._target_ids[labels],
            rejected_start=int(self.rejected_starts[index]),
            label=None if math.isnan(label) else label,
        )

    def token_ids(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the concatenated ids of the documents at `indices`, and the length of each."""
        import numpy as np

        starts = self._borders[indices]
        lengths = self._borders[indices + 1] - starts
        ends = np.cumsum(lengths)
        where = np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
        return self._input_ids[where], lengths


class TokenValues:
    """Values of each trained token of a store's documents, memory-mapped.

    `trained`: int64 [documents], trained labels of each; `[document]` is an array [trained, ...].
    """

    def __init__(self, file: Path, trained: npt.NDArray[np.int64]) -> None:
        import numpy as np

        self._file, self._trained = file, trained
        self._values = np.load(file, mmap_mode="r", allow_pickle=False)
        self._ends = np.cumsum(trained)

    # As of a TokenStore: the workers of a loader open the file again.
    def __reduce__(self) -> tuple[type[TokenValues], tuple[Any, ...]]:
        return TokenValues, (self._file, self._trained)

    def __getitem__(self, document: int) -> Any:
        import numpy as np

        end = self._ends[document]
        return np.array(self._values[end - self._trained[document] : end])


class Examples:
    """Selected documents of several data sets as one sequence, with their columns.

    `lengths` int64 [n], tokens in a pack; `trained` int64 [n], trained labels; `label_weights`
    float64 [n]; `datasets` int64 [n]; `digests` uint64 [n]; `ends_in_stop`, `double_bos` bool [n];
    `rejected_starts` int64 [n]; `row_labels` float64 [n].
    """

    def __init__(
        self, stores: Sequence[TokenStore], chosen: Sequence[npt.NDArray[np.int64]]
    ) -> None:
        import numpy as np

        self._stores = list(stores)
        self._places = np.concatenate([np.zeros(0, np.int64), *chosen])
        counts = [len(places) for places in chosen]
        self.datasets = np.repeat(np.arange(len(chosen)), counts)

        def column(name: str, dtype: Any) -> Any:
            parts = [getattr(s, name)[p] for s, p in zip(self._stores, chosen, strict=True)]
            return np.concatenate([np.zeros(0, dtype), *parts])

        self.lengths = column("lengths", np.int64)
        self.trained = column("trained", np.int64)
        self.label_weights = column("label_weights", np.float64)
        self.digests = column("digests", np.uint64)
        self.ends_in_stop = column("ends_in_stop", np.bool_)
        self.double_bos = column("double_bos", np.bool_)
        self.rejected_starts = column("rejected_starts", np.int64)
        self.row_labels = column("row_labels", np.float64)
        self.references: npt.NDArray[np.float64] | None = None
        """the base's log-probabilities of the answers of each pair [n, 2], None if not stored"""
        self._of_tokens: Sequence[TokenValues] | None = None

    @property
    def has_stored(self) -> bool:
        """Whether what a base or a teacher says of the examples is stored."""
        return self.references is not None or self._of_tokens is not None

    def __len__(self) -> int:
        return len(self._places)

    def take_references(self, values: Sequence[npt.NDArray[np.float64] | TokenValues]) -> None:
        """Take what is stored of each store's documents: `references` [documents, 2], or tokens."""
        import numpy as np

        of_tokens = [each for each in values if isinstance(each, TokenValues)]
        if of_tokens:
            self._of_tokens = of_tokens
            return
        self.references = np.empty((len(self), 2))
        for number, of_store in enumerate(values):
            own = self.datasets == number
            self.references[own] = of_store[self._places[own]]

    def __getitem__(self, index: int) -> Example:
        place, dataset = int(self._places[index]), int(self.datasets[index])
        example = self._stores[dataset].example(place, dataset)
        if self._of_tokens is not None:
            return replace(example, reference=self._of_tokens[dataset][place])
        if self.references is None:
            return example
        return replace(example, reference=self.references[index])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def token_ids(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the concatenated ids of the examples at `indices`, and the length of each."""
        import numpy as np

        ids, sizes = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        datasets = self.datasets[indices]
        # Consecutive examples of one store are copied together.
        for run in np.split(indices, np.flatnonzero(np.diff(datasets)) + 1):
            if len(run):
                store = self._stores[int(self.datasets[run[0]])]
                own_ids, own_sizes = store.token_ids(self._places[run])
                ids.append(own_ids)
                sizes.append(own_sizes)
        return np.concatenate(ids), np.concatenate(sizes)

    def origin(self, index: int) -> Origin:
        """Return the file and line of example `index`."""
        return self._stores[int(self.datasets[index])].origin(int(self._places[index]))


class DocumentBuilder:
    """Build the documents of one chunk of a file; `counts` gets the rows that are cut or dropped.

    With `has_verdicts`, the second answer of a pair is that of another row.
    """

    def __init__(
        self,
        file: str,
        template: ChatTemplate,
        sequence_len: int,
        on_long: str,
        counts: Counts,
        *,
        has_verdicts: bool = False,
    ) -> None:
        self._file, self._template, self._counts = file, template, counts
        self._sequence_len, self._on_long = sequence_len, on_long
        self._has_verdicts = has_verdicts
        self._pieces: list[Encoded] = []
        self._rows: list[int] = []
        self._lines: list[int] = []
        self._labels: list[float] = []
        self.num_rows = 0

    def add(self, encoded: Sequence[Encoded], number: int, origin: Origin) -> None:
        """Add row `number` of the chunk, with one `Encoded` per item."""
        counts, longest = self._counts, max(map(_num_tokens, encoded), default=0)
        counts.add_length(longest, str(origin))
        fitting = [piece for item in encoded for piece in self._fit(item)]
        useful = [piece for piece in fitting if is_trained(piece)]
        if longest > self._sequence_len:
            if not fitting or self._on_long == "error":
                counts.dropped += 1
            elif self._on_long == "drop":
                counts.add_note("branch_dropped", str(origin))
            elif self._on_long == "split":
                counts.split += 1
            else:
                counts.truncated += 1
            if self._on_long != "split":
                kept = sum(map(_num_tokens, fitting))
                counts.lost_tokens += sum(map(_num_tokens, encoded)) - kept
        if useful:
            self._store(useful, encoded, number, origin)
        elif fitting or longest <= self._sequence_len:
            counts.add_empty(str(origin))

    def add_pair(
        self, pair: Sequence[Encoded], number: int, origin: Origin, label: float | None = None
    ) -> None:
        """Add row `number` of the chunk, two answers to a prompt, as one document.

        `label` is the margin of the pair, or with verdicts that on the first answer. A pair is too
        long if both answers together are; what is cut is the end, or the beginning, of the longer
        one first.
        """
        counts, lengths = self._counts, [_num_tokens(answer) for answer in pair]
        counts.add_length(sum(lengths), str(origin))
        if sum(lengths) > self._sequence_len and self._on_long in ("drop", "error"):
            counts.dropped += 1
            counts.lost_tokens += sum(lengths)
            return
        # The shorter answer keeps up to half of the tokens.
        half, rest = self._sequence_len // 2, self._sequence_len - lengths[1]
        most = min(lengths[0], max(half, rest))
        shares = most, min(lengths[1], self._sequence_len - most)
        cut = [self._fit(answer, most)[0] for answer, most in zip(pair, shares, strict=True)]
        lost = self._count_cut(sum(lengths) - sum(map(_num_tokens, cut)))
        is_same = not self._has_verdicts and cut[0].input_ids.tolist() == cut[1].input_ids.tolist()
        if is_same:
            counts.add_note("cut_to_the_same" if lost else "same_answers", str(origin))
        if is_same or not all(map(is_trained, cut)):
            counts.add_empty(str(origin))
        else:
            self._store([_joined(*cut)], pair, number, origin, label)

    def add_labelled(self, encoded: Encoded, number: int, origin: Origin, label: float) -> None:
        """Add row `number` of the chunk, a text whose last token is rated: its class or number."""
        import numpy as np

        counts, length = self._counts, len(encoded.input_ids)
        weight = float(encoded.weights.max())
        counts.add_length(length, str(origin))
        pieces = self._fit(replace(encoded, target_ids=None))
        if not pieces:
            counts.dropped += 1
            counts.lost_tokens += length
            return
        ids = pieces[0].input_ids
        if len(ids) < 2 or not weight:
            counts.add_empty(str(origin))
            return
        self._count_cut(length - len(ids))
        weights = np.zeros(len(ids), np.float32)
        weights[-1] = weight
        whole = Encoded(ids, weights, notes=encoded.notes)
        self._store([whole], [encoded], number, origin, label)

    def _fit(self, item: Encoded, most: int | None = None) -> list[Encoded]:
        """Return the documents of at most `most` tokens that an item is cut into.

        Truncation on the left keeps the BOS; encoder-decoder items are not split.
        """
        sequence_len = self._sequence_len if most is None else most
        if _num_tokens(item) <= sequence_len:
            return [item]
        if self._on_long in ("drop", "error"):
            return []
        keeps_end = self._on_long == "truncate_left"
        cut = slice(-sequence_len, None) if keeps_end else slice(sequence_len)
        if item.target_ids is not None:
            return [Encoded(item.input_ids[cut], item.weights[cut], item.target_ids[cut])]
        bos = self._template.bos_token_id
        starts_with_bos = bos is not None and int(item.input_ids[0]) == bos
        if self._on_long == "split":
            return _split(item, sequence_len, int(starts_with_bos))
        ids, weights = item.input_ids[cut].copy(), item.weights[cut].copy()
        if keeps_end and starts_with_bos:
            ids[0], weights[0] = item.input_ids[0], 0.0
        return [Encoded(ids, weights)]

    def _count_cut(self, num_lost: int) -> int:
        self._counts.truncated += num_lost > 0
        self._counts.lost_tokens += num_lost
        return num_lost

    def _store(
        self,
        useful: list[Encoded],
        encoded: Sequence[Encoded],
        number: int,
        origin: Origin,
        label: float | None = None,
    ) -> None:
        """Keep the documents of a row, and count the notes on what they were made of."""
        notes = {note.kind: note.seen for item in encoded for note in item.notes}
        for kind, seen in notes.items():
            self._counts.add_note(kind, f"{origin} {seen}".rstrip())
        self._pieces += useful
        self._rows += [number] * len(useful)
        self._lines += [origin.line] * len(useful)
        self._labels += [math.nan if label is None else label] * len(useful)
        self.num_rows += 1

    def build(self) -> Documents | None:
        import numpy as np

        pieces = self._pieces
        if not pieces:
            return None
        targets = [each.target_ids for each in pieces if each.target_ids is not None]
        stops, bos = self._template.stop_token_ids, self._template.bos_token_id
        tail, has_verdicts = self._template.tail_ids, self._has_verdicts

        def column(of: Callable[[Encoded], Any], dtype: Any) -> Any:
            return np.array([of(each) for each in pieces], dtype)

        return Documents(
            file=self._file,
            input_ids=np.concatenate([each.input_ids for each in pieces]),
            lengths=column(lambda each: len(each.input_ids), np.int64),
            weights=np.concatenate([each.weights for each in pieces]),
            target_ids=np.concatenate(targets) if targets else None,
            target_lengths=np.array([len(each) for each in targets]) if targets else None,
            rows=np.array(self._rows, dtype=np.int64),
            lines=np.array(self._lines, dtype=np.int64),
            trained=column(
                # The answer of another row has no labels.
                lambda each: np.count_nonzero(
                    _labels(each)[: each.rejected_start - 1 if has_verdicts else None]
                ),
                np.int64,
            ),
            label_weights=column(_step_weight, np.float64),
            digests=column(_digest, np.uint64),
            ends_in_stop=column(lambda each: _ends_in_stop(each, stops, tail), np.bool_),
            double_bos=column(lambda each: each.input_ids[:2].tolist() == [bos, bos], np.bool_),
            rejected_starts=column(lambda each: each.rejected_start, np.int64),
            row_labels=np.array(self._labels, dtype=np.float64),
        )


def padding_id(tokenizer: Any) -> int:
    """Return the id of padding, that of EOS without one."""
    found = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if found is None else found)


def without_ends(document: Encoded, ends: Collection[int]) -> Encoded:
    """Return a document without the tokens `ends` at its end; two tokens are left."""
    size = len(document.input_ids)
    while size > 2 and int(document.input_ids[size - 1]) in ends:
        size -= 1
    return replace(document, input_ids=document.input_ids[:size], weights=document.weights[:size])


def _split(document: Encoded, sequence_len: int, bos: int) -> list[Encoded]:
    """Cut a document into pieces of similar length, each starting with its first `bos` tokens."""
    import numpy as np

    num_tokens = len(document.input_ids) - bos
    num_pieces = -(-num_tokens // (sequence_len - bos))
    cuts = [bos + num_tokens * piece // num_pieces for piece in range(num_pieces + 1)]
    return [
        Encoded(
            np.concatenate([document.input_ids[:bos], document.input_ids[start:end]]),
            np.concatenate([np.zeros(bos, np.float32), document.weights[start:end]]),
        )
        for start, end in itertools.pairwise(cuts)
    ]


def _joined(chosen: Encoded, rejected: Encoded) -> Encoded:
    """Return the two answers of a pair as one document, whose first tokens are no labels."""
    import numpy as np

    weights = np.concatenate([chosen.weights, rejected.weights])
    start = len(chosen.input_ids)
    weights[start] = 0  # nothing predicts it
    return Encoded(
        np.concatenate([chosen.input_ids, rejected.input_ids]), weights, rejected_start=start
    )


def _step_weight(document: Encoded) -> Any:
    """Return the weight of a document in the mean over a step: that of its labels, or of a pair."""
    import numpy as np

    if document.rejected_start:
        return document.weights.max().astype(np.float64)
    return _labels(document).sum(dtype=np.float64)


def is_trained(document: Encoded) -> bool:
    return bool(_labels(document).any())


def _num_tokens(document: Encoded) -> int:
    targets = 0 if document.target_ids is None else len(document.target_ids)
    return max(len(document.input_ids), targets)


def _labels(document: Encoded) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the labels' weights: a causal model never predicts the first token."""
    return document.weights[1:] if document.target_ids is None else document.weights


def _ends_in_stop(document: Encoded, stops: set[int], tail: list[int]) -> bool:
    """Return whether the last trained token is a stop token, or in the `tail` written after it."""
    ids = document.input_ids if document.target_ids is None else document.target_ids
    last = int(document.weights.nonzero()[0][-1])
    if int(ids[last]) in stops:
        return True
    for length in range(1, min(len(tail), last) + 1):
        stop = last - length
        if int(ids[stop]) in stops and document.weights[stop]:
            return ids[stop + 1 : last + 1].tolist() == tail[:length]
    return False


def _digest(document: Encoded) -> int:
    content = hashlib.blake2b(document.input_ids.tobytes(), digest_size=8)
    if document.target_ids is not None:
        content.update(document.target_ids.tobytes())
    return int.from_bytes(content.digest(), "little")
