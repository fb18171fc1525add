"""The types that the steps of the data pipeline pass to each other.

Imports neither a step nor torch, because the settings and their checks need these names first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import Origin

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


Ranges = tuple[tuple[int, int], ...]
"""character ranges of a text, start and end"""
BLANKS = "  "
"""stands for repeated blanks among the characters that a tokenizer loses: some make them one"""


@dataclass(frozen=True, slots=True)
class Row:
    """A row as read from its file."""

    values: dict[str, Any]
    origin: Origin


class Struct(dict[str, Any]):
    """An object of an arrow column, without its null fields, whose names are `nulls`."""

    nulls: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` as in the row, parsed from JSON."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    `role` is system, user, assistant or tool; `weight` None means the weight of its role.
    `reasoning` is the thinking in front of an answer; `name` and `tool_call_id` name the call that
    a tool turn answers. `input_start` is the offset of an alpaca row's `input` in `content`, 0
    without one. `trained` are the character ranges of an answer's `content` that are trained on,
    None for the whole turn.
    """

    role: str
    content: str
    weight: float | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    input_start: int = 0
    trained: Ranges | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns and tools that the chat template renders.

    `weight` multiplies the weight of every trained token of the row; `template_kwargs` are the
    row's own arguments of the template. `label` is the verdict on the last answer, 1 or 0, or the
    class of the whole text, by its name.
    """

    turns: tuple[Turn, ...]
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()
    weight: float = 1.0
    template_kwargs: Mapping[str, Any] | None = None
    label: float | str | tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of raw text and its weight in the loss (0 = masked)."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Document:
    """Raw text without a chat template; the tokenizer's EOS is appended. `label` as of a chat.

    `weight` is the row's weight. With `train_on_inputs`, segments of weight 0 get it; the weights
    of other segments include it already.
    """

    segments: tuple[Segment, ...]
    origin: Origin
    label: float | str | tuple[str, ...] | None = None
    weight: float = 1.0

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row that is already tokenized; `weights` has a number per token (0 = masked)."""

    input_ids: tuple[int, ...]
    weights: tuple[float, ...]
    origin: Origin


Item = Conversation | Document | Tokens
"""a converted row, before tokenization"""


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized document.

    `input_ids` int32 [tokens]; `weights` float32 [tokens], the weight of each token as a label
    (0 = masked; the first token is never a label); `dataset` is the index of its data set.
    For encoder-decoder models `target_ids` int32 [targets] are the decoder's labels, and `weights`
    float32 [targets] are theirs. A preference pair is one example, so that nothing can part it: the
    document of its chosen answer, then from `rejected_start` on that of its rejected one; an answer
    with a verdict `label`, 1 or 0, is one with the same prompt and the answer of another row. The
    `label` of a single document is its class or its number; that of a pair, its margin.
    """

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    dataset: int
    origin: Origin
    target_ids: npt.NDArray[np.int32] | None = None
    rejected_start: int = 0
    """0 if the example is not a pair"""
    label: float | None = None
    reference: npt.NDArray[Any] | None = None
    """the base's log-probabilities of both answers of a pair [2], or what a teacher says at each
    trained token, float32 [trained, 2, k]; None if nothing is stored"""

    @property
    def is_unit(self) -> bool:
        """Return whether it has one loss, not one per token: a pair, or a row with a label."""
        return bool(self.rejected_start) or self.label is not None

    @property
    def num_tokens(self) -> int:
        """Return the tokens that it takes in a pack: the longer of input and target."""
        targets = 0 if self.target_ids is None else len(self.target_ids)
        return max(len(self.input_ids), targets)

    def documents(self) -> list[Example]:
        """Return the documents of the example: itself, or those of both answers of a pair."""
        if not self.rejected_start:
            return [self]
        return [
            Example(self.input_ids[part], self.weights[part], self.dataset, self.origin)
            for part in (slice(self.rejected_start), slice(self.rejected_start, None))
        ]


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about a row that is not an error: its kind, for counting, and what was seen."""

    kind: str
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one item.

    `input_ids` int32 [tokens]; `weights` float32 [tokens], the weight of each token as a label. For
    encoder-decoder models `input_ids` are the encoder's, `target_ids` int32 [targets] the
    decoder's labels, and `weights` float32 [targets] are theirs. `rejected_start` as in `Example`.
    """

    input_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    target_ids: npt.NDArray[np.int32] | None = None
    notes: tuple[Note, ...] = ()
    rejected_start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The properties of the model that the data depends on."""

    context_len: int | None
    """longest document that the model takes, in tokens; None if no limit is known"""
    vocab_size: int | None = None
    """rows of the embedding; a token id beyond them is an error"""
    decoder_start_token_id: int | None = None
    """token that starts the decoder's input; None for a causal model"""
    labels: tuple[str, ...] = ()
    """names of the classes that its head tells apart, one for a number; none of a language model"""
    is_multi_label: bool = False
    """whether a text may have several of them, or none"""
    packing_error: str | None = None
    """why the model cannot keep the documents of a pack apart; None if it can"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """How rows are grouped into the optimizer steps of a run."""

    micro_batch_size: int = 1
    accumulation_steps: int = 1
    num_ranks: int = 1
    """data-parallel ranks; must be those of the trainer"""
    num_epochs: int = 1
    max_steps: int | None = None
    row_multiple: int = 1
    """tokens of a packed row are rounded up to a multiple of this"""
    row_slices: int = 1
    """ranks that share a row, whose tokens are rounded up to two equal chunks for each of them"""
    pad_packs: bool = False
    """pad every packed row of a causal model to the size of a full one"""
