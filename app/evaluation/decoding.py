"""Greedy decoding with continuous batching: finished answers give their rows to waiting prompts.

`model.generate` keeps all rows of a batch until the last answer ends, and only then starts the next
batch. Here a step mostly computes rows that are still generating.
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

MIN_FINISHED = 0.25
"""share of a batch's rows that must be finished before they are replaced: replacing copies the
cache"""
UNSUPPORTED_TYPES = frozenset({"cpmant", "mpt"})
"""model types whose cache cannot be split and joined by row: CPM-Ant prepends its own tokens to a
prompt, and MPT's ALiBi table ends at the longest row"""


@dataclass(slots=True)
class _Row:
    index: int
    """index of the prompt"""
    tokens: list[int]
    is_finished: bool = False


@dataclass(slots=True)
class _Batch:
    """Rows that are decoded together; the cache holds all their tokens but the last."""

    rows: list[_Row]
    cache: Any
    mask: Tensor
    """[rows, cached positions]; shorter rows are padded on the left"""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and the columns that are then padding in every row."""
        import torch

        index = torch.tensor(rows, device=self.mask.device)
        self.rows = [self.rows[row] for row in rows]
        self.mask = self.mask[index]
        first = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[index, :, first:]
            layer.values = layer.values[index, :, first:]

    def join(self, other: _Batch) -> None:
        import torch
        from torch.nn.functional import pad

        longest = max(self.mask.shape[1], other.mask.shape[1])
        gaps = [longest - batch.mask.shape[1] for batch in (self, other)]

        def concatenate(own: Tensor, others: Tensor, num_trailing: int) -> Tensor:
            """Concatenate rows, left-padded in the dimension before the last `num_trailing`."""
            padded_parts = [
                pad(part, (0, 0) * num_trailing + (gap, 0))
                for part, gap in zip((own, others), gaps, strict=True)
            ]
            return torch.cat(padded_parts)

        self.rows += other.rows
        self.mask = concatenate(self.mask, other.mask, 0)
        for layer, other_layer in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = concatenate(layer.keys, other_layer.keys, 1)
            layer.values = concatenate(layer.values, other_layer.values, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyDecoder:
    """Greedy decoder for models whose key-value cache can be split and joined by row."""

    model: Any
    stop_ids: frozenset[int]
    """token ids that end an answer"""
    max_new_tokens: int
    batch_size: int
    is_done: Callable[[list[int]], bool] = lambda tokens: False
    """returns whether an answer of these tokens is complete without a stop token"""

    @staticmethod
    def supports(model: Any) -> bool:
        """Return whether rows can be removed from and added to the cache of `model`."""
        config = model.config.get_text_config(decoder=True)
        return (
            "past_key_values" in _forward_parameters(model)  # else forward ignores the cache
            and config.model_type not in UNSUPPORTED_TYPES
            and has_growing_cache(model)
        )

    def answers(self, prompts: Sequence[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield (index of a prompt, tokens of its answer) as they finish, longest prompts first."""
        waiting = deque(sorted(range(len(prompts)), key=lambda n: -len(prompts[n])))
        batch: _Batch | None = None
        while waiting or batch:
            num_free = self.batch_size - (len(batch.rows) if batch else 0)
            if chosen := [waiting.popleft() for _ in range(min(num_free, len(waiting)))]:
                prefilled = self._prefill(chosen, [prompts[index] for index in chosen])
                if batch is None:
                    batch = prefilled
                else:
                    batch.join(prefilled)
            assert batch is not None
            while sum(row.is_finished for row in batch.rows) < MIN_FINISHED * len(batch.rows):
                self._step(batch)
            yield [(row.index, row.tokens) for row in batch.rows if row.is_finished]
            unfinished = [number for number, row in enumerate(batch.rows) if not row.is_finished]
            if unfinished:
                batch.keep(unfinished)
            else:
                batch = None

    def _prefill(self, indices: Sequence[int], prompts: Sequence[list[int]]) -> _Batch:
        """Compute the cache of prompts, and the first token of each answer."""
        from transformers import DynamicCache

        ids, mask = (part.to(self.model.device) for part in padded(prompts, on_the_left=True))
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        batch = _Batch([_Row(index, []) for index in indices], cache, mask)
        self._forward(batch, ids, (mask.cumsum(-1) - 1).clamp(min=0))
        return batch

    def _step(self, batch: _Batch) -> None:
        """Append one token to each unfinished row.

        Finished rows are computed at position 0: their next position may exceed the model's limit.
        """
        import torch

        ids = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=batch.mask.device)
        positions = batch.mask.sum(-1, keepdim=True)
        batch.mask = torch.cat([batch.mask, torch.ones_like(positions)], dim=1)
        finished = torch.tensor([[row.is_finished] for row in batch.rows], device=positions.device)
        self._forward(batch, ids, positions.masked_fill(finished, 0))

    def _forward(self, batch: _Batch, ids: Tensor, positions: Tensor) -> None:
        inputs = {
            "input_ids": ids,
            "attention_mask": batch.mask,
            "position_ids": positions,
            "past_key_values": batch.cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        accepted = _forward_parameters(self.model)
        inputs = {name: value for name, value in inputs.items() if name in accepted}
        logits = self.model(**inputs).logits
        for row, token in zip(batch.rows, logits[:, -1].argmax(-1).tolist(), strict=True):
            if not row.is_finished:
                row.tokens.append(token)
                row.is_finished = (
                    token in self.stop_ids
                    or len(row.tokens) == self.max_new_tokens
                    or self.is_done(row.tokens)
                )


def _forward_parameters(model: Any) -> Collection[str]:
    from transformers import PreTrainedModel

    inner = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
    return inspect.signature(inner.forward).parameters
