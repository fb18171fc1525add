"""A preview of the data that a run would train on, token by token: collected, printed, and a page.

Decides which rows and packs are shown. All text is made printable as it is collected, so that no
data file can control the page or the terminal, which has colors or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.process.logs import print_table, text_table, wrapped
from app.report import render_template
from app.training.objective.settings import KtoConfig
from common.facts import setting
from common.text import counted, percent, printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from common.errors import Origin
    from data_modules import Audit, Example, FinetuneDataModule

_SHOWN_STEPS = 2
"""steps whose packs are shown"""
_MAX_PACKS = 10_000
"""maximum number of packs from which the actual shares of the mixture are computed"""
_MAX_PATH = 32
"""longest path that is shown in full, in characters"""
_NUM_BINS = 32
"""bins of a histogram of lengths"""
MAX_ROW_TOKENS = 4096
"""maximum tokens of a row on the page: half from its beginning, half from its end"""
_INCOMPLETE = "\ufffd"
"""what tokens decode to that end within a character"""
_NUM_PAGE_COLORS = 6
"""colors of data sets in the CSS of the page"""
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_PACK_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_LISTED = 6
"""documents of a pack that are listed in the terminal"""
_TERMINAL_COLORS = ("blue", "magenta", "yellow", "green", "cyan", "red")
"""colors of data sets in the terminal"""
_TRAINED, _SPECIAL = "bold green", "cyan"
"""styles of tokens in the terminal"""


@dataclass(kw_only=True, slots=True)
class ShownConfig:
    """How much a preview shows."""

    rows: int = setting(3, ge=1, shown=True)
    """number of rows of each data set, evenly spread over it"""
    packs: int = setting(2, ge=1, shown=True)
    """number of packs in each of the first two steps"""
    tokens: int = setting(400, ge=2, shown=True)
    """tokens of a row in the terminal, from its beginning and its end; the page shows 4,096"""
    max_rows: int | None = setting(100_000, ge=10, note="null reads all", shown=True)
    """maximum number of rows to read in total, the first ones of each data set in equal parts
    (takes seconds); null = all, for exact counts and steps (takes as long as the start of a
    training run)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    origin: str
    """file:line, and the label of a row that has one"""
    num_tokens: int
    num_trained: int
    """number of tokens that are trained on"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowView(_Document):
    """One document as the model sees it."""

    tokens: Passage
    targets: Passage | None
    """targets of the decoder, or the second answer to a prompt; None for a single document"""
    targets_are: str = "decoder targets"


@dataclass(frozen=True, kw_only=True, slots=True)
class _DatasetView:
    """Some rows of a data set, and the lengths of all of them."""

    name: str
    about: str
    rows: list[_RowView]
    counts: list[int]
    """number of training documents in each of `_NUM_BINS` equal bins from 0 to `Preview.longest`
    tokens"""
    lengths: str
    """summary of the lengths"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedDocument(_Document):
    dataset: int
    """index of its data set"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackView:
    step: int
    number: int
    """index within the step"""
    capacity: int
    """size of the pack in tokens"""
    documents: list[_PackedDocument]

    @property
    def heading(self) -> str:
        """Which pack it is, and how full."""
        return (
            f"step {self.step}, pack {self.number}: {counted(len(self.documents), 'document')}, "
            f"{self.num_tokens:,} of {self.capacity:,} tokens "
            f"({percent(self.num_tokens / self.capacity)} full)"
        )

    @property
    def num_tokens(self) -> int:
        return sum(document.num_tokens for document in self.documents)

    @property
    def shades(self) -> list[bool]:
        """Whether each document has the darker shade: it alternates within a data set."""
        shades: list[bool] = []
        for number, document in enumerate(self.documents):
            follows = number > 0 and self.documents[number - 1].dataset == document.dataset
            shades.append(follows and not shades[-1])
        return shades


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """The content of a preview, as printable text and numbers."""

    title: str
    facts: list[str]
    datasets: list[_DatasetView]
    longest: int
    """length of the longest document in tokens"""
    packs: list[_PackView]
    mixture: list[list[str]]
    """table with a heading row and a row for each data set"""
    mixture_of: str
    """steps and packs that `mixture` was computed from"""
    audit: Audit

    @property
    def names(self) -> list[str]:
        return [dataset.name for dataset in self.datasets]


def collect_preview(
    config: ShownConfig,
    datamodule: FinetuneDataModule,
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str,
    facts: Sequence[str],
) -> Preview:
    """Collect the preview of a data module, which must be set up and not be a stream."""
    examples = datamodule.train_examples
    longest = int(examples.lengths.max())
    renderer = TokenRenderer(tokenizer)
    datasets = [
        _dataset_view(config, datamodule, renderer, index, longest)
        for index in range(len(datamodule.dataset_names))
    ]
    mixture, mixture_of = _mixture_cells(datamodule)
    warnings = [line for line in datamodule.report.mixture if line.startswith("warning:")]
    return Preview(
        title=printable(title),
        facts=[printable(fact) for fact in (*facts, datamodule.plan.line(), *warnings)],
        datasets=datasets,
        longest=longest,
        packs=_pack_views(config, datamodule),
        mixture=mixture,
        mixture_of=mixture_of,
        audit=datamodule.audit,
    )


def _format_origin(origin: Origin) -> str:
    """Return file:line, relative to the working folder if inside it, long paths shortened."""
    file, working_folder = Path(origin.file), Path.cwd()
    if file.is_relative_to(working_folder):
        shown = str(file.relative_to(working_folder))
    elif len(origin.file) > _MAX_PATH and len(file.parts) > 2:
        shown = str(Path("...", *file.parts[-2:]))
    else:
        shown = origin.file
    return printable(f"{shown}:{origin.line}")


def _dataset_view(
    config: ShownConfig,
    datamodule: FinetuneDataModule,
    renderer: TokenRenderer,
    index: int,
    longest: int,
) -> _DatasetView:
    import numpy as np

    examples, report = datamodule.train_examples, datamodule.report.datasets[index]
    if not report.is_trained:
        examples = datamodule.val_examples
    own = np.flatnonzero(examples.datasets == index)
    lengths = examples.lengths[own]
    chosen = np.unique(np.linspace(0, len(own) - 1, min(config.rows, len(own))).astype(int))
    has_verdict = report.format == KtoConfig.row_format
    rows = []
    for example in (examples[int(own[number])] for number in chosen):
        if example.rejected_start:
            rows.append(_pair_view(example, renderer, has_verdict=has_verdict))
            continue
        label = "" if example.label is None else f", label {datamodule.label_text(example.label)}"
        rows.append(_row_view(example, renderer, label))
    counts, _ = np.histogram(lengths, bins=_NUM_BINS, range=(0, longest))
    median, percentile = np.percentile(lengths, [50, 95]).astype(int).tolist()
    return _DatasetView(
        name=printable(report.name),
        about=printable(report.line()),
        rows=rows,
        counts=counts.tolist(),
        lengths=(
            f"median {median:,} tokens, 95 % up to {percentile:,}, longest {int(lengths.max()):,}"
        ),
    )


def _row_view(example: Example, renderer: TokenRenderer, label: str = "") -> _RowView:
    import numpy as np

    labels = example.weights
    if example.target_ids is None:
        labels = labels.copy()
        labels[:1] = 0  # nothing predicts the first token
        tokens, targets = renderer.passage(example.input_ids, labels), None
    else:
        tokens = renderer.passage(example.input_ids, np.zeros(len(example.input_ids), np.float32))
        targets = renderer.passage(example.target_ids, labels)
    return _RowView(
        origin=_format_origin(example.origin) + printable(label),
        num_tokens=len(example.input_ids),
        num_trained=int(np.count_nonzero(labels)),
        tokens=tokens,
        targets=targets,
    )


def _pair_view(example: Example, renderer: TokenRenderer, *, has_verdict: bool) -> _RowView:
    """Return both answers of a row, the second one without the prompt that they share.

    `has_verdict`: the second is the answer of another row.
    """
    import numpy as np

    first, second = example.documents()
    shared = min(len(first.input_ids), len(second.input_ids), np.flatnonzero(second.weights)[0])
    is_same = first.input_ids[:shared] == second.input_ids[:shared]
    start = int(shared if is_same.all() else is_same.argmin())
    chosen, other = (_row_view(each, renderer) for each in (first, second))
    longer = other.num_trained - chosen.num_trained
    than = f"{counted(abs(longer), 'token')} {'longer' if longer > 0 else 'shorter'}"
    answer, label = f"rejected answer, {than if longer else 'as long'}", ""
    if has_verdict:
        answer, label = "answer of another row", f", label {'true' if example.label else 'false'}"
    elif example.label is not None:
        label = f", margin {example.label:g}"
    return replace(
        chosen,
        origin=chosen.origin + label,
        num_tokens=chosen.num_tokens + other.num_tokens,
        num_trained=chosen.num_trained + other.num_trained,
        targets=renderer.passage(second.input_ids[start:], second.weights[start:]),
        targets_are=f"{answer}, after the same prompt",
    )


def _packs_of(datamodule: FinetuneDataModule, step: int) -> Iterator[npt.NDArray[np.int64]]:
    plan: Any = datamodule.plan  # never that of a stream, of which a preview reads the beginning
    for rank in range(plan.world_size):
        for micro_batch in plan.micro_batches(step, rank):
            yield from (pack for pack in micro_batch.packs if len(pack))


def _pack_views(config: ShownConfig, datamodule: FinetuneDataModule) -> list[_PackView]:
    examples = datamodule.train_examples
    views = []
    for step in range(min(_SHOWN_STEPS, datamodule.total_steps)):
        for number, pack in enumerate(_packs_of(datamodule, step)):
            if number == config.packs:
                break
            documents = [
                _PackedDocument(
                    dataset=int(examples.datasets[index]),
                    origin=_format_origin(examples.origin(index)),
                    num_tokens=int(examples.lengths[index]),
                    num_trained=int(examples.trained[index]),
                )
                for index in pack.tolist()
            ]
            capacity = datamodule.sequence_len
            views.append(
                _PackView(step=step, number=number, capacity=capacity, documents=documents)
            )
    return views


def _mixture_cells(datamodule: FinetuneDataModule) -> tuple[list[list[str]], str]:
    """Return the table of each data set's share of the packs, and which steps were counted."""
    import numpy as np

    examples, plan = datamodule.train_examples, datamodule.plan
    num_steps = min(plan.num_steps, max(1, _MAX_PACKS // plan.packs_per_step))
    packs = [pack for step in range(num_steps) for pack in _packs_of(datamodule, step)]
    seen = np.concatenate(packs)
    datasets, tokens = examples.datasets[seen], examples.lengths[seen]
    report = datamodule.mixture.report(datamodule.trained_names)
    rows_seen = np.bincount(datasets, minlength=len(report)).tolist()
    tokens_seen = np.bincount(datasets, weights=tokens, minlength=len(report)).tolist()
    rows = [
        replace(
            row,
            name=printable(row.name),
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
    return cells, f"{over} ({counted(len(packs), 'pack')})"


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """The text of one token, or of several that make up one character."""

    text: str
    ids: tuple[int, ...]
    weight: float
    is_special: bool

    @property
    def is_trained(self) -> bool:
        return self.weight > 0

    @property
    def kinds(self) -> str:
        """CSS classes: t = trained on, p = with a weight other than 1, s = special token."""
        is_weighted = self.is_trained and self.weight != 1
        return " ".join("t" * self.is_trained + "p" * is_weighted + "s" * self.is_special)


@dataclass(frozen=True, slots=True)
class Passage:
    """The pieces of a row, without the tokens between `head` and `tail`."""

    head: list[TokenPiece]
    num_omitted: int = 0
    """number of tokens omitted between `head` and `tail`"""
    tail: list[TokenPiece] = field(default_factory=list)

    def cut(self, limit: int) -> Passage:
        """Return the first and last pieces, at most `limit` of them."""
        pieces = [*self.head, *self.tail]
        if len(pieces) <= limit:
            return self
        num_first, num_last = limit - limit // 2, limit // 2
        # Tokens that were already omitted are between these pieces, too.
        omitted = pieces[num_first : len(pieces) - num_last]
        num_omitted = self.num_omitted + sum(len(piece.ids) for piece in omitted)
        return Passage(pieces[:num_first], num_omitted, pieces[len(pieces) - num_last :])


class TokenRenderer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}
        self._special |= set(tokenizer.all_special_ids)

    def passage(self, ids: npt.NDArray[Any], weights: npt.NDArray[Any]) -> Passage:
        """Render a document, a long one without its middle."""
        num_omitted = len(ids) - MAX_ROW_TOKENS
        if num_omitted <= 0:
            return Passage(list(self._pieces(ids.tolist(), weights.tolist())))
        half = MAX_ROW_TOKENS // 2
        head = self._pieces(ids[:half].tolist(), weights[:half].tolist())
        tail = self._pieces(ids[-half:].tolist(), weights[-half:].tolist())
        return Passage(list(head), num_omitted, list(tail))

    def _pieces(self, ids: list[int], weights: list[float]) -> Iterator[TokenPiece]:
        """Yield a piece for each token; tokens that form one character together form one piece.

        Each is decoded after the one before it, since some tokenizers drop the leading space of a
        token that is decoded alone.
        """
        before, start = 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[before:end])
            is_last = end == len(ids) or ids[end] in self._special
            if text.endswith(_INCOMPLETE) and not is_last and end - start < 4:
                continue
            text = text[len(self._decode(ids[before:start])) :]
            yield TokenPiece(
                text=printable(text, keep="\n"),
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


def render_page(preview: Preview) -> str:
    return render_template(
        "preview", title=preview.title, preview=preview, num_colors=_NUM_PAGE_COLORS
    )


def print_preview(preview: Preview, console: Console, max_tokens: int) -> None:
    """Print a preview, with at most `max_tokens` tokens of each row."""
    from rich.text import Text

    def write(text: str | Text = "", style: str = "") -> None:
        shown = Text(wrapped(text), style=style) if isinstance(text, str) else text
        console.print(shown, soft_wrap=True)

    write(preview.title, style="bold")
    for fact in preview.facts:
        write(f"  {fact}")
    write(_legend(console))
    for dataset in preview.datasets:
        write()
        write(dataset.about, style="bold")
        for row in dataset.rows:
            heading = f"{row.num_tokens:,} tokens, {row.num_trained:,} trained on"
            write(f"-- {row.origin}: {heading}", style="bold")
            write(render_passage(row.tokens.cut(max_tokens), console))
            if row.targets is not None:
                write(f"-- {row.targets_are}:")
                write(render_passage(row.targets.cut(max_tokens), console))
    write("\npacks: one letter per document, its width in proportion to its length", style="bold")
    for pack in preview.packs:
        for line in _pack_lines(pack, preview, console):
            write(line)
    write(f"\nlengths in tokens, from 0 to {preview.longest:,}", style="bold")
    width = max(map(len, preview.names))
    for dataset in preview.datasets:
        write(_histogram_line(dataset, width, ascii_only=console.options.ascii_only))
    write(f"\nmixture over {preview.mixture_of}", style="bold")
    print_table(text_table(preview.mixture, box=None, pad_edge=False, header_style=""), console)
    write("\naudit", style="bold")
    for line in preview.audit.lines():
        style = "yellow" if line.startswith("warning:") else ""
        write(line, style="bold red" if line.startswith("problem:") else style)


def render_passage(passage: Passage, console: Console) -> Text:
    """Return a passage in which tokens that are trained on are marked by color or by « »."""
    from rich.text import Text

    text = Text()
    opening, closing = _marks(console)

    def add(pieces: Sequence[TokenPiece]) -> None:
        # Consecutive tokens of one kind are marked together.
        for is_trained, run in itertools.groupby(pieces, lambda piece: piece.is_trained):
            if is_trained:
                inside = "".join(piece.text for piece in run)
                text.append(f"{opening}{inside}{closing}", style=_TRAINED)
                continue
            for is_special, part in itertools.groupby(run, lambda piece: piece.is_special):
                inside = "".join(piece.text for piece in part)
                text.append(inside, style=_SPECIAL if is_special else "")

    add(passage.head)
    if passage.num_omitted:
        text.append(f"\n[... {passage.num_omitted:,} tokens omitted ...]\n", style="italic")
    add(passage.tail)
    return text


def _has_colors(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _marks(console: Console) -> tuple[str, str]:
    if _has_colors(console):
        return "", ""
    return ("<<", ">>") if console.options.ascii_only else ("«", "»")


def _legend(console: Console) -> Text:
    from rich.text import Text

    opening, closing = _marks(console)
    text = Text("  below: ")
    text.append(f"{opening}trained on{closing}", style=_TRAINED)
    text.append(", masked")
    if _has_colors(console):
        text.append(", ")
        text.append("special token", style=_SPECIAL)
    return text


def _pack_lines(pack: _PackView, preview: Preview, console: Console) -> list[str | Text]:
    from rich.text import Text

    width = min(console.width, 100) - 4
    bar, end = Text("  |"), 0
    for number, document in enumerate(pack.documents):
        start, end = end, end + document.num_tokens
        cells = round(end / pack.capacity * width) - round(start / pack.capacity * width)
        letter = _PACK_LETTERS[number % len(_PACK_LETTERS)]
        color = _TERMINAL_COLORS[document.dataset % len(_TERMINAL_COLORS)]
        bar.append(letter * cells, style=f"bright_{color}" if pack.shades[number] else color)
    bar.append(" " * (width - round(end / pack.capacity * width)) + "|")
    listed = [
        f"{_PACK_LETTERS[number % len(_PACK_LETTERS)]} {preview.names[document.dataset]} "
        f"{document.origin} {document.num_tokens:,} ({document.num_trained:,} trained on)"
        for number, document in enumerate(pack.documents[:_MAX_LISTED])
    ]
    if len(pack.documents) > len(listed):
        listed.append(f"and {len(pack.documents) - len(listed):,} more on the page")
    return [pack.heading, bar, *(f"    {line}" for line in listed)]


def _histogram_line(dataset: _DatasetView, width: int, *, ascii_only: bool) -> str:
    levels = _ASCII_BARS if ascii_only else _BARS
    highest = max(dataset.counts)
    bars = "".join(
        " " if not count else levels[min(len(levels) - 1, count * len(levels) // (highest + 1))]
        for count in dataset.counts
    )
    return f"  {dataset.name.ljust(width)} |{bars}| {dataset.lengths}"
