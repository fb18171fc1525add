"""Collect what a preview shows of the data that a run would train on, token by token.

Decides which rows and packs are shown; `preview_page` renders them. All text is made printable
here, so that no file can control the page or the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_modules import setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from data_modules import Audit, Example, FinetuneDataModule, Origin

SHOWN_STEPS = 2
MAX_PACKS = 10_000
"""packs that are counted for the realised shares of the mixture"""
MAX_FILE = 32
"""characters of a path that are shown in full"""
NUM_BINS = 32
MAX_TOKENS = 4096
"""tokens of a row that are kept: half from its beginning, half from its end"""
INCOMPLETE = "\ufffd"


@dataclass(kw_only=True, slots=True)
class ShownConfig:
    """Choose how much a preview shows."""

    rows: int = setting(3, ge=1, shown=True)
    """rows of each data set, evenly spread over it"""
    packs: int = setting(2, ge=1, shown=True)
    """packs of each of the first two steps"""
    tokens: int = setting(400, ge=2, shown=True)
    """tokens of a row in the terminal, from its beginning and its end; the page shows 4,096"""
    max_rows: int | None = setting(100_000, ge=10, note="null reads all", shown=True)
    """rows read of all data sets together, the first ones of each in equal parts: takes seconds;
    null = all, for exact counts and steps: takes as long as a training needs to start"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowView:
    """One document as the model sees it; `targets` are those of a decoder."""

    origin: str
    num_tokens: int
    num_trained: int
    tokens: Passage
    targets: Passage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetView:
    """What is shown of a data set: some rows, and the lengths of all of them.

    `counts` are training documents by length, in `NUM_BINS` equal bins from 0 to `Preview.longest`.
    """

    name: str
    about: str
    rows: list[RowView]
    counts: list[int]
    median: int
    percentile_95: int
    longest: int

    @property
    def lengths(self) -> str:
        """Return the lengths in words."""
        return (
            f"median {self.median:,} tokens, 95 % up to {self.percentile_95:,}, "
            f"longest {self.longest:,}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDocument:
    """A document in a pack; `dataset` is the index of its data set."""

    dataset: int
    origin: str
    tokens: int
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackView:
    """The documents of one pack of `capacity` tokens."""

    step: int
    number: int
    capacity: int
    documents: list[PackedDocument]

    @property
    def heading(self) -> str:
        """Return which pack it is, and how full."""
        return (
            f"step {self.step}, pack {self.number}: {count(len(self.documents), 'document')}, "
            f"{self.tokens:,} of {self.capacity:,} tokens ({self.tokens / self.capacity:.1%} full)"
        )

    @property
    def tokens(self) -> int:
        """Return the tokens that are not padding."""
        return sum(document.tokens for document in self.documents)

    @property
    def shades(self) -> list[bool]:
        """Return which documents take the darker shade: neighbours of one data set alternate."""
        shades: list[bool] = []
        for number, document in enumerate(self.documents):
            follows = number > 0 and self.documents[number - 1].dataset == document.dataset
            shades.append(follows and not shades[-1])
        return shades


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """All that is shown, as printable text and numbers.

    `mixture` is a table of the steps `mixture_of`: headings, and a row a data set.
    """

    title: str
    facts: list[str]
    datasets: list[DatasetView]
    longest: int
    packs: list[PackView]
    mixture: list[list[str]]
    mixture_of: str
    audit: Audit

    @property
    def names(self) -> list[str]:
        """Return the data sets' names."""
        return [dataset.name for dataset in self.datasets]


def collect_preview(
    config: ShownConfig,
    datamodule: FinetuneDataModule,
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str,
    facts: Sequence[str],
) -> Preview:
    """Collect what is shown of a data module that is set up and not a stream."""
    examples = datamodule.train_examples
    longest = int(examples.lengths.max())
    renderer = TokenRenderer(tokenizer)
    datasets = [
        _dataset_view(config, datamodule, renderer, index, longest)
        for index in range(len(datamodule.dataset_names))
    ]
    mixture, mixture_of = _mixture_cells(datamodule)
    warned = [line for line in datamodule.report.mixture if line.startswith("warning:")]
    return Preview(
        title=visible(title),
        facts=[visible(fact) for fact in (*facts, datamodule.plan.line(), *warned)],
        datasets=datasets,
        longest=longest,
        packs=_pack_views(config, datamodule),
        mixture=mixture,
        mixture_of=mixture_of,
        audit=datamodule.audit,
    )


def _place(origin: Origin) -> str:
    """Return file:line, relative to the working folder where possible, long paths shortened."""
    file, here = Path(origin.file), Path.cwd()
    if file.is_relative_to(here):
        shown = str(file.relative_to(here))
    elif len(origin.file) > MAX_FILE and len(file.parts) > 2:
        shown = str(Path("...", *file.parts[-2:]))
    else:
        shown = origin.file
    return visible(f"{shown}:{origin.line}")


def _dataset_view(
    config: ShownConfig,
    datamodule: FinetuneDataModule,
    renderer: TokenRenderer,
    index: int,
    longest: int,
) -> DatasetView:
    import numpy as np

    examples, report = datamodule.train_examples, datamodule.report.datasets[index]
    own = np.flatnonzero(examples.datasets == index)
    lengths = examples.lengths[own]
    places = np.unique(np.linspace(0, len(own) - 1, min(config.rows, len(own))).astype(int))
    counts, _ = np.histogram(lengths, bins=NUM_BINS, range=(0, longest))
    median, percentile = np.percentile(lengths, [50, 95]).astype(int).tolist()
    return DatasetView(
        name=visible(report.name),
        about=visible(report.line()),
        rows=[_row_view(examples[int(own[place])], renderer) for place in places],
        counts=counts.tolist(),
        median=median,
        percentile_95=percentile,
        longest=int(lengths.max()),
    )


def _row_view(example: Example, renderer: TokenRenderer) -> RowView:
    import numpy as np

    labels = example.weights
    if example.target_ids is None:
        labels = labels.copy()
        labels[:1] = 0  # the first token has no context to be predicted from
        tokens, targets = renderer.passage(example.input_ids, labels), None
    else:
        tokens = renderer.passage(example.input_ids, np.zeros(len(example.input_ids), np.float32))
        targets = renderer.passage(example.target_ids, labels)
    return RowView(
        origin=_place(example.origin),
        num_tokens=len(example.input_ids),
        num_trained=int(np.count_nonzero(labels)),
        tokens=tokens,
        targets=targets,
    )


def _packs_of(datamodule: FinetuneDataModule, step: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the documents of each pack of a step that has any."""
    plan: Any = datamodule.plan  # never that of a stream: a preview reads the beginning
    for rank in range(plan.world_size):
        for micro_batch in plan.micro_batches(step, rank):
            yield from (pack for pack in micro_batch.packs if len(pack))


def _pack_views(config: ShownConfig, datamodule: FinetuneDataModule) -> list[PackView]:
    examples = datamodule.train_examples
    views = []
    for step in range(min(SHOWN_STEPS, datamodule.total_steps)):
        for number, pack in enumerate(_packs_of(datamodule, step)):
            if number == config.packs:
                break
            documents = [
                PackedDocument(
                    dataset=int(examples.datasets[index]),
                    origin=_place(examples.origin(index)),
                    tokens=int(examples.lengths[index]),
                    trained=int(examples.trained[index]),
                )
                for index in pack.tolist()
            ]
            capacity = datamodule.sequence_len
            views.append(PackView(step=step, number=number, capacity=capacity, documents=documents))
    return views


def count(number: int, what: str) -> str:
    """Return a number with its noun, in plural where needed."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _mixture_cells(datamodule: FinetuneDataModule) -> tuple[list[list[str]], str]:
    """Count what the packs hold of each data set, and describe which steps were counted."""
    import numpy as np

    examples, plan = datamodule.train_examples, datamodule.plan
    num_steps = min(plan.num_steps, max(1, MAX_PACKS // plan.packs_per_step))
    packs = [pack for step in range(num_steps) for pack in _packs_of(datamodule, step)]
    seen = np.concatenate(packs)
    datasets, tokens = examples.datasets[seen], examples.lengths[seen]
    report = datamodule.mixture.report(datamodule.dataset_names)
    rows_seen = np.bincount(datasets, minlength=len(report)).tolist()
    tokens_seen = np.bincount(datasets, weights=tokens, minlength=len(report)).tolist()
    rows = [
        replace(
            row,
            name=visible(row.name),
            rows_seen=rows_seen[index],
            tokens_seen=int(tokens_seen[index]),
            epochs=rows_seen[index] / max(1, row.rows),
            share_of_rows=rows_seen[index] / len(seen),
            share_of_tokens=tokens_seen[index] / int(tokens.sum()),
        )
        for index, row in enumerate(report)
    ]
    part = "all" if num_steps == plan.num_steps else "the first"
    total = "" if num_steps == plan.num_steps else f" of {plan.num_steps:,}"
    over = f"{part} {num_steps:,}{total} steps" if plan.num_steps > 1 else "the only step"
    cells = [list(rows[0].HEADINGS), *(list(row.cells()) for row in rows)]
    return cells, f"{over} ({count(len(packs), 'pack')})"


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, or of several that make up one character."""

    text: str
    ids: tuple[int, ...]
    weight: float
    is_special: bool

    @property
    def is_trained(self) -> bool:
        """Tell whether it counts in the loss."""
        return self.weight > 0

    @property
    def kinds(self) -> str:
        """Return its CSS classes: t trained on, p with a weight of its own, s special."""
        is_weighted = self.is_trained and self.weight != 1
        return " ".join("t" * self.is_trained + "p" * is_weighted + "s" * self.is_special)


@dataclass(frozen=True, slots=True)
class Passage:
    """The pieces of a row; `left_out` tokens are omitted between `head` and `tail`."""

    head: list[Piece]
    left_out: int = 0
    tail: list[Piece] = field(default_factory=list)

    def cut(self, limit: int) -> Passage:
        """Return its first and last pieces, at most `limit` of them."""
        pieces = [*self.head, *self.tail]
        if len(pieces) <= limit:
            return self
        first, last = limit - limit // 2, limit // 2
        # What was left out before lies between head and tail.
        gone = pieces[first : len(pieces) - last]
        left_out = self.left_out + sum(len(piece.ids) for piece in gone)
        return Passage(pieces[:first], left_out, pieces[len(pieces) - last :])


def visible(text: str) -> str:
    """Escape what is not printable in `text`, except newlines: `\\x1b`, `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter == "\n" or letter.isprintable()
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


class TokenRenderer:
    """Render token ids as text, token by token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}
        self._special |= set(tokenizer.all_special_ids)

    def passage(self, ids: npt.NDArray[Any], weights: npt.NDArray[Any]) -> Passage:
        """Render a document; of a long one its beginning and its end."""
        left_out = len(ids) - MAX_TOKENS
        if left_out <= 0:
            return Passage(list(self._pieces(ids.tolist(), weights.tolist())))
        half = MAX_TOKENS // 2
        head = self._pieces(ids[:half].tolist(), weights[:half].tolist())
        tail = self._pieces(ids[-half:].tolist(), weights[-half:].tolist())
        return Passage(list(head), left_out, list(tail))

    def _pieces(self, ids: list[int], weights: list[float]) -> Iterator[Piece]:
        """Yield a piece a token; tokens that hold parts of one character make one piece.

        Each is decoded with the one before it: alone, some tokenizers drop its leading space.
        """
        before, start = 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[before:end])
            is_last = end == len(ids) or ids[end] in self._special
            if text.endswith(INCOMPLETE) and not is_last and end - start < 4:
                continue
            text = text[len(self._decode(ids[before:start])) :]
            yield Piece(
                text=visible(text),
                ids=tuple(ids[start:end]),
                weight=max(weights[start:end]),
                is_special=ids[end - 1] in self._special,
            )
            before, start = start, end

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
