"""Share the words of the data path: what the steps hand to each other, and their one error.

No step is imported here, and neither is torch: the settings and the checks need these names first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from data_modules.redaction import redact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

MAX_PROBLEMS = 20
MAX_SHOWN = 80
MAX_LISTED = 20


def printable(text: str, *, keep: str = "") -> str:
    """Return `text` with its control characters escaped: a file must not steer a terminal.

    Those of `keep` stay, such as the line ends of a message of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def shown(text: str) -> str:
    """Return at most 80 characters of a file's text, as a message may quote it."""
    return printable(text[:MAX_SHOWN])[:MAX_SHOWN]


def listed(names: Iterable[object]) -> str:
    """Return names as a message quotes a list of them: the first 20, at most 80 characters each."""
    every = list(names)
    found = [str(name)[:MAX_SHOWN] for name in every[:MAX_LISTED]]
    more = len(every) - len(found)
    return f"{found}" if not more else f"[{', '.join(map(repr, found))}, and {more:,} more]"


class DataError(ValueError):
    """Say what is wrong with the data, all problems of one phase together, a line each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        problems = [problems] if isinstance(problems, str) else problems
        self.problems = [printable(redact(problem)) for problem in problems]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[DataError], tuple[list[str]]]:
        return type(self), (self.problems,)


class RemoteError(DataError):
    """Say that a server could not be reached, was too slow or broke off: no fault of the data."""


class Problems:
    """Collect problems: at most MAX_PROBLEMS lines, the last one says how many are left out."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, problem: str) -> None:
        """Keep `problem`, or only count it when there are MAX_PROBLEMS already."""
        self._count += 1
        if len(self._kept) < MAX_PROBLEMS:
            self._kept.append(problem)

    def lines(self) -> list[str]:
        """Return the problems kept, or all but one of them and how many more there are."""
        if self._count <= MAX_PROBLEMS:
            return list(self._kept)
        hidden = self._count - MAX_PROBLEMS + 1
        return [*self._kept[:-1], f"... and {hidden:,} more like these"]

    def raise_if_any(self) -> None:
        """Raise DataError when there is a problem."""
        if self._count:
            raise DataError(self.lines())


def seeded_generator(seed: int, *keys: object) -> np.random.Generator:
    """Return a generator that depends on `seed` and `keys` only, on every machine."""
    import numpy as np

    digest = hashlib.sha256(repr((seed, *keys)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


@dataclass(frozen=True, slots=True)
class Origin:
    """Name the place that a row comes from, counted from 1.

    `line` is the row's first line; its number in parquet files and in JSON arrays on one line.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True)
class StepRow:
    """Name a row that a global step learns from, and who does it; numbers from 0."""

    rank: int
    micro_batch: int
    dataset: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one row as its file has it."""

    values: dict[str, Any]
    origin: Origin


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold one call of a tool; `arguments` as the row has them, parsed from JSON."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold one turn; `weight` None means that the role decides whether it is learned.

    `role` is system, user, assistant or tool. `reasoning` is what an answer thinks before it
    speaks; `name` and `tool_call_id` say which call a tool turn answers.
    """

    role: str
    content: str
    weight: float | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the turns that go through the chat template, with the tools that it may call.

    `weight` multiplies the weight of every learned token of the row.
    """

    turns: tuple[Turn, ...]
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold a stretch of raw text and its weight in the loss (0 = not learned)."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Document:
    """Hold raw text that goes through no template; the tokenizer's EOS is appended to it."""

    segments: tuple[Segment, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Tokens:
    """Hold a row that is tokenised already; `weights` has one number a token (0 = not learned)."""

    input_ids: tuple[int, ...]
    weights: tuple[float, ...]
    origin: Origin


Item = Conversation | Document | Tokens
"""what a row becomes before it is tokenised"""


@dataclass(frozen=True, slots=True)
class Note:
    """Say something about a row that is no error: a kind to count by, and what was seen."""

    kind: str
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Hold the tokens of one item.

    `input_ids` int32 [tokens]; `weights` float32 [tokens], the weight of each token as a label. For
    encoder-decoder models `input_ids` are the encoder's, `target_ids` int32 [targets] the
    decoder's labels, and `weights` float32 [targets] belong to those.
    """

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    target_ids: npt.NDArray[np.int32] | None = None
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """Hold one tokenised document.

    `input_ids` int32 [tokens]; `weights` float32 [tokens], the weight of each token as a label
    (0 = not learned; the first token is never a label); `dataset` is the data set's index.
    For encoder-decoder models `target_ids` int32 [targets] are the decoder's labels and `weights`
    float32 [targets] belong to those, all of them labels.
    """

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    dataset: int
    origin: Origin
    target_ids: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens it takes in a pack: those of its longer side."""
        targets = 0 if self.target_ids is None else len(self.target_ids)
        return max(len(self.input_ids), targets)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Hold what a model is asked (all tokens before the last answer) and the answer expected."""

    input_ids: list[int]
    answer: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class DecoderInputs:
    """Hold what a decoder reads: its labels, moved right behind the start token of each document.

    `input_ids`, `position_ids` int64 [rows, targets]; `document_lengths` as in `Batch`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_lengths: list[list[int]]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> DecoderInputs:
        """Return a copy with its tensors on `device`."""
        ids, positions = (
            tensor.to(device, non_blocking=non_blocking)
            for tensor in (self.input_ids, self.position_ids)
        )
        return DecoderInputs(ids, positions, self.document_lengths)

    def pin_memory(self) -> DecoderInputs:
        """Return a copy with its tensors in page-locked memory."""
        return DecoderInputs(
            self.input_ids.pin_memory(), self.position_ids.pin_memory(), self.document_lengths
        )


@dataclass(slots=True)
class Batch:
    """Hold one micro-batch.

    input_ids        int64 [rows, tokens]
    position_ids     int64 [rows, tokens], from 0 in each document
    labels           int64 [rows, tokens], already shifted: the token that this position must
                     predict, -100 where nothing is learned
    loss_weights     float32 [rows, tokens], weight of that label, 0 where it is -100
    dataset_ids      int64 [rows, tokens], index of the data set, 0 in padding
    trained_columns  int64 [k], columns in which any row has a label; column 0 when there is none
    document_lengths per row the tokens of each document; what lies beyond their sum is padding
    step_weight      sum of `loss_weights` over the whole global step (all micro-batches, all
                     ranks), a tensor where ranks had to add it up; 1.0 in validation, where there
                     is no step
    num_tokens       tokens in this micro-batch that are not padding
    decoder          what the decoder reads, for encoder-decoder models: `input_ids`,
                     `position_ids` and `document_lengths` are then the encoder's, and `labels`,
                     `loss_weights`, `dataset_ids` and `trained_columns` [rows, targets] the
                     decoder's
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    dataset_ids: torch.Tensor
    trained_columns: torch.Tensor
    document_lengths: list[list[int]]
    step_weight: float | torch.Tensor
    num_tokens: int
    decoder: DecoderInputs | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return a copy with its tensors on `device`."""
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self._tensors().items()
        }
        decoder = None if self.decoder is None else self.decoder.to(device, non_blocking)
        return replace(self, **moved, decoder=decoder)

    def pin_memory(self) -> Batch:
        """Return a copy with its tensors in page-locked memory."""
        pinned = {name: tensor.pin_memory() for name, tensor in self._tensors().items()}
        decoder = None if self.decoder is None else self.decoder.pin_memory()
        return replace(self, **pinned, decoder=decoder)

    def _tensors(self) -> dict[str, Any]:
        plain = ("document_lengths", "step_weight", "num_tokens", "decoder")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in plain}
