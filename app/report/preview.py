"""Collect what a preview shows of the data that a run would learn from.

Decides which rows and packs are shown. Never draws: the page and the terminal do. All text is made
printable here, so that no file can steer either of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.report.token_text import Passage, Speller, visible
from data_modules import setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

    from data_modules import Audit, Example, FinetuneDataModule, Origin

SHOWN_STEPS = 2
MAX_PACKS = 10_000
"""packs that are looked at for the realised shares"""
MAX_FILE = 32
"""letters of a file's path that are shown as they are"""
NUM_BINS = 32


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
    """Hold one document as the model sees it; `targets` are what a decoder has to say."""

    origin: str
    num_tokens: int
    num_learned: int
    tokens: Passage
    targets: Passage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetView:
    """Hold what is shown of a data set: some rows, and how long all of them are.

    `counts` are training documents by length, in `NUM_BINS` equal bins from 0 to `Preview.longest`.
    """

    name: str
    about: str
    rows: list[RowView]
    counts: list[int]
    median: int
    percentile_95: int
    longest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDocument:
    """Hold a document's place in a pack; `dataset` is the data set's index."""

    dataset: int
    origin: str
    tokens: int
    learned: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackView:
    """Hold the documents of one pack of `capacity` tokens."""

    step: int
    number: int
    capacity: int
    documents: list[PackedDocument]

    @property
    def tokens(self) -> int:
        """Return the tokens that are no padding."""
        return sum(document.tokens for document in self.documents)

    @property
    def shades(self) -> list[bool]:
        """Return which documents take their data set's other shade: no two neighbours are alike."""
        shades: list[bool] = []
        for number, document in enumerate(self.documents):
            follows = number > 0 and self.documents[number - 1].dataset == document.dataset
            shades.append(follows and not shades[-1])
        return shades


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """Hold all that is shown, as printable text and numbers.

    `mixture` is the table that a run shows of its first epoch, here of the steps `mixture_of`:
    headings, and a row a data set.
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
    """Look at a data module that is set up and no stream."""
    examples = datamodule.train_examples
    longest = int(examples.lengths.max())
    speller = Speller(tokenizer)
    datasets = [
        _dataset_view(config, datamodule, speller, index, longest)
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
    """Return file:line, relative to here where it lies below; of a long path its end."""
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
    speller: Speller,
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
        rows=[_row_view(examples[int(own[place])], speller) for place in places],
        counts=counts.tolist(),
        median=median,
        percentile_95=percentile,
        longest=int(lengths.max()),
    )


def _row_view(example: Example, speller: Speller) -> RowView:
    import numpy as np

    labels = example.weights
    if example.target_ids is None:
        labels = labels.copy()
        labels[:1] = 0  # nothing comes before the first token from which it could be predicted
        tokens, targets = speller.passage(example.input_ids, labels), None
    else:
        tokens = speller.passage(example.input_ids, np.zeros(len(example.input_ids), np.float32))
        targets = speller.passage(example.target_ids, labels)
    return RowView(
        origin=_place(example.origin),
        num_tokens=len(example.input_ids),
        num_learned=int(np.count_nonzero(labels)),
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
                    learned=int(examples.trained[index]),
                )
                for index in pack.tolist()
            ]
            capacity = datamodule.sequence_len
            views.append(PackView(step=step, number=number, capacity=capacity, documents=documents))
    return views


def count(number: int, what: str) -> str:
    """Word a number of things."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _mixture_cells(datamodule: FinetuneDataModule) -> tuple[list[list[str]], str]:
    """Count what the packs of a run hold of each data set, and say of how much of the run."""
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
    all_gather_list = "" if num_steps == plan.num_steps else f" of {plan.num_steps:,}"
    over = f"{part} {num_steps:,}{all_gather_list} steps" if plan.num_steps > 1 else "the only step"
    cells = [list(rows[0].HEADINGS), *(list(row.cells()) for row in rows)]
    return cells, f"{over} ({count(len(packs), 'pack')})"
