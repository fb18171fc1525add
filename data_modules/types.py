"""Share the words of the data path: what the steps hand to each other, and their one error.

No step is imported here, and neither is torch: the settings and the checks need these names first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data_modules.messages import Origin

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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
    """Hold one turn; `weight` None means that the role decides its weight.

    `role` is system, user, assistant or tool. `reasoning` is what an answer thinks before it
    speaks; `name` and `tool_call_id` say which call a tool turn answers. `input_start` is where the
    `input` of an alpaca row begins in `content`, 0 where it has none.
    """

    role: str
    content: str
    weight: float | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    input_start: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the turns that go through the chat template, with the tools that it may call.

    `weight` multiplies the weight of every trained token of the row.
    """

    turns: tuple[Turn, ...]
    origin: Origin
    tools: tuple[Mapping[str, Any], ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold a stretch of raw text and its weight in the loss (0 = masked)."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Document:
    """Hold raw text that goes through no template; the tokenizer's EOS is appended to it."""

    segments: tuple[Segment, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Tokens:
    """Hold a row that is tokenized already; `weights` has one number a token (0 = masked)."""

    input_ids: tuple[int, ...]
    weights: tuple[float, ...]
    origin: Origin


Item = Conversation | Document | Tokens
"""what a row becomes before it is tokenized"""


@dataclass(frozen=True, slots=True)
class Example:
    """Hold one tokenized document.

    `input_ids` int32 [tokens]; `weights` float32 [tokens], the weight of each token as a label
    (0 = masked; the first token is never a label); `dataset` is the data set's index.
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
class Note:
    """Note a fact about a row that is not an error: a kind to count by, and what was seen."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What the data depends on of the model that is trained on it."""

    context_len: int | None
    """tokens of the longest document; None: no limit is known"""
    vocab_size: int | None = None
    """rows of the embedding: a token id beyond them is an error"""
    decoder_start_token_id: int | None = None
    """of an encoder-decoder model; None for a causal one"""
    why_not_packed: str | None = None
    """why the documents of a pack cannot be kept apart in it; None where they can"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """How rows become the optimizer steps of a run."""

    micro_batch_size: int = 1
    accumulation_steps: int = 1
    num_ranks: int = 1
    """ranks with data of their own; the trainer must have as many"""
    num_epochs: int = 1
    max_steps: int | None = None
    row_multiple: int = 1
    """tokens of a packed row are rounded up to a multiple of this"""
    pad_packs: bool = False
    """give all packed rows of a causal model the size of a full one"""
