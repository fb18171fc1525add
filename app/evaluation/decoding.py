"""Greedy answers to many prompts at once: those that have ended give their places to the next.

`model.generate` keeps every row of a batch until the last one has ended, and begins the next batch
then. Here what is computed a step is what is still being answered.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.evaluation.likelihood import has_growing_cache, padded

if TYPE_CHECKING:
    from torch import Tensor

LEAST_ENDED = 0.25
"""share of a batch's rows that have ended before they are replaced: each time copies the cache"""
NOT_BY_ROWS = frozenset({"cpmant", "mpt"})
"""model types whose cache cannot outgrow a row: CPM-Ant puts tokens of its own before a prompt, and
MPT's ALiBi table ends at its longest row"""


@dataclass(slots=True)
class _Row:
    """A prompt, and the tokens that answer it so far."""

    number: int
    tokens: list[int]
    has_ended: bool = False


@dataclass(slots=True)
class _Batch:
    """Rows whose last tokens are to be read, and what is cached of all tokens before these."""

    rows: list[_Row]
    cache: Any
    mask: Tensor
    """[rows, cached positions]; shorter rows are padded on the left"""

    def keep(self, chosen: Sequence[int]) -> None:
        """Drop all rows but `chosen`, and the columns that none of these has."""
        import torch

        index = torch.tensor(chosen, device=self.mask.device)
        self.rows = [self.rows[number] for number in chosen]
        self.mask = self.mask[index]
        first = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, first:]
            layer.values = layer.values[index, :, first:]

    def join(self, other: _Batch) -> None:
        """Take the rows of `other` too."""
        import torch
        from torch.nn.functional import pad

        longest = max(self.mask.shape[1], other.mask.shape[1])
        gaps = [longest - batch.mask.shape[1] for batch in (self, other)]

        def joined(one: Tensor, another: Tensor, after: int) -> Tensor:
            """Concatenate, with zeros at the left of a dimension that `after` others follow."""
            wide = [
                pad(part, (0, 0) * after + (gap, 0))
                for part, gap in zip((one, another), gaps, strict=True)
            ]
            return torch.cat(wide)

        self.rows += other.rows
        self.mask = joined(self.mask, other.mask, 0)
        for layer, its in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = joined(layer.keys, its.keys, 1)
            layer.values = joined(layer.values, its.values, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyDecoder:
    """Answers prompts with a decoder whose cache is one row apart from another."""

    model: Any
    stops: frozenset[int]
    """token ids that end an answer"""
    max_new_tokens: int
    batch_size: int
    is_done: Callable[[list[int]], bool] = lambda tokens: False
    """whether an answer of these tokens needs no more"""

    @staticmethod
    def fits(model: Any) -> bool:
        """Tell whether rows can leave and join the cache of a model."""
        config = model.config.get_text_config(decoder=True)
        return (
            "past_key_values" in _parameters(model)  # else a forward pass ignores the cache
            and config.model_type not in NOT_BY_ROWS
            and has_growing_cache(model)
        )

    def answers(self, prompts: Sequence[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield (number of a prompt, tokens of its answer) as they end; longest prompts first."""
        waiting = deque(sorted(range(len(prompts)), key=lambda n: -len(prompts[n])))
        batch: _Batch | None = None
        while waiting or batch:
            free = self.batch_size - (len(batch.rows) if batch else 0)
            if chosen := [waiting.popleft() for _ in range(min(free, len(waiting)))]:
                begun = self._begin(chosen, [prompts[number] for number in chosen])
                if batch is None:
                    batch = begun
                else:
                    batch.join(begun)
            assert batch is not None
            while self._num_ended(batch) < LEAST_ENDED * len(batch.rows):
                self._step(batch)
            yield [(row.number, row.tokens) for row in batch.rows if row.has_ended]
            left = [number for number, row in enumerate(batch.rows) if not row.has_ended]
            if left:
                batch.keep(left)
            else:
                batch = None

    @staticmethod
    def _num_ended(batch: _Batch) -> int:
        return sum(row.has_ended for row in batch.rows)

    def _begin(self, numbers: Sequence[int], prompts: Sequence[list[int]]) -> _Batch:
        """Read prompts, and add the first token of each answer."""
        from transformers import DynamicCache

        ids, mask = (part.to(self.model.device) for part in padded(prompts, on_the_left=True))
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        batch = _Batch([_Row(number, []) for number in numbers], cache, mask)
        self._read(batch, ids, (mask.cumsum(-1) - 1).clamp(min=0))
        return batch

    def _step(self, batch: _Batch) -> None:
        """Read the last token of each row, and add the next.

        Rows that have ended are read at position 0: there may be none after their last one.
        """
        import torch

        ids = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=batch.mask.device)
        positions = batch.mask.sum(-1, keepdim=True)
        batch.mask = torch.cat([batch.mask, torch.ones_like(positions)], dim=1)
        ended = torch.tensor([[row.has_ended] for row in batch.rows], device=positions.device)
        self._read(batch, ids, positions.masked_fill(ended, 0))

    def _read(self, batch: _Batch, ids: Tensor, positions: Tensor) -> None:
        inputs = {"input_ids": ids, "attention_mask": batch.mask, "position_ids": positions}
        how = {"past_key_values": batch.cache, "use_cache": True, "logits_to_keep": 1}
        known = _parameters(self.model)
        given = {name: value for name, value in (inputs | how).items() if name in known}
        logits = self.model(**given).logits
        for row, token in zip(batch.rows, logits[:, -1].argmax(-1).tolist(), strict=True):
            if not row.has_ended:
                row.tokens.append(token)
                row.has_ended = (
                    token in self.stops
                    or len(row.tokens) == self.max_new_tokens
                    or self.is_done(row.tokens)
                )


def _parameters(model: Any) -> Collection[str]:
    """Return the names of what a model's forward pass takes."""
    from transformers import PreTrainedModel

    inner = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
    return inspect.signature(inner.forward).parameters
