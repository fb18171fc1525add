"""How likely a model finds given continuations of given contexts.

Rows are batched by tokens and sorted by length, what several begin with is computed once, and
logits are taken where a continuation is predicted alone. Which contexts are asked is decided
elsewhere.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from app.model.attention import generation_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MOST_LOGITS = 1 << 28
"""most logits of a batch: one GiB in fp32"""
BATCH_TOKENS = {False: 8192, True: 2048}
"""whether it is on a CPU -> tokens of a batch"""
FAMILY_TOKENS = 32
"""contexts that begin with the same so many tokens (a task's examples) are planned together"""
LEAST_SHARED = 8
"""tokens below which nothing is gained by computing them once"""


class Request(NamedTuple):
    """A context and what may follow it, in token ids; neither is empty."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """What a model makes of a continuation."""

    logprob: float
    """sum over its tokens, in nats"""
    num_tokens: int
    is_greedy: bool
    """whether each of its tokens is the likeliest one"""


@dataclass(slots=True)
class Row:
    """Tokens that are read at once, and the requests whose continuations end there."""

    ids: list[int]
    asked: list[tuple[int, list[int]]]
    """(number of the request, its targets); the last position predicts the last target"""

    @property
    def num_targets(self) -> int:
        """Return how many of the last positions predict something."""
        return max(len(targets) for _, targets in self.asked)

    @property
    def context(self) -> list[int]:
        """Return the tokens before the first target."""
        return self.ids[: len(self.ids) - self.num_targets + 1]


@dataclass(slots=True)
class Unit:
    """Rows that begin with the same `num_shared` tokens."""

    rows: list[Row]
    num_shared: int = 0
    left: list[Row] = field(init=False)
    """the rows without them"""

    def __post_init__(self) -> None:
        self.left = [Row(row.ids[self.num_shared :], row.asked) for row in self.rows]

    @property
    def prefix(self) -> list[int]:
        """Return the shared tokens."""
        return self.rows[0].ids[: self.num_shared]

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are computed."""
        return self.num_shared + sum(len(row.ids) for row in self.left)


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, *, is_pair: bool = False
) -> Request:
    """Return the token ids of a context and its continuation, as lm-evaluation-harness has them.

    Spaces at the end of the context belong to the continuation. An empty context is the token that
    begins a text. `is_pair`: the model is an encoder-decoder, which reads them apart.
    """
    stripped = context.rstrip(" \t\n\r") if context.strip() else context
    continuation = context[len(stripped) :] + continuation
    if is_pair:
        own: list[int] = tokenizer.encode(continuation, add_special_tokens=False)
        return Request(tokenizer.encode(stripped), own)
    if not stripped:
        return Request([first_token(tokenizer)], _plain(tokenizer, continuation))
    whole: list[int] = tokenizer.encode(stripped + continuation)
    num_context = len(tokenizer.encode(stripped))
    return Request(whole[:num_context], whole[num_context:])


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token before a text without context: the first of a text, or the one that ends."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return int(eos if bos is None else bos)


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text)
    return ids[1:] if ids[:1] == [first_token(tokenizer)] else ids


def rolling_requests(ids: Sequence[int], first: int, max_len: int) -> list[Request]:
    """Return requests that predict each token of a text once, in windows of `max_len` tokens.

    The first window begins with token `first`; each other one with as much context as fits.
    """
    found = []
    for start in range(0, len(ids), max_len):
        end = min(start + max_len, len(ids))
        begin = 0 if start == 0 else end - max_len - 1
        before = [first] if start == 0 else list(ids[begin:start])
        found.append(Request(before, list(ids[start:end])))
    return found


def score(
    model: Any,
    requests: Sequence[Request],
    *,
    max_len: int,
    batch_tokens: int | None,
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: Any = None,
) -> Iterator[list[tuple[int, Likelihood]]]:
    """Yield batches of (number of a request, its likelihood), in an order of their own.

    A context is cut at its left where it and its continuation are longer than `max_len` + 1.
    `batch_tokens`: None takes what suits the device.
    `gathered` is entered around each forward pass: where weights are sharded, all ranks must call
    this with the same requests.
    """
    import torch

    was_training = model.training
    model.eval()
    device = device or model.device
    batch_tokens = batch_tokens or BATCH_TOKENS[device.type == "cpu"]
    scorer = _Scorer(model, gathered, device)
    is_pair = model.config.is_encoder_decoder
    with torch.no_grad(), generation_attention(model):
        if is_pair:
            yield from scorer.pairs(requests, batch_tokens)
        else:
            units = plan_units(requests, max_len, shares=can_share(model))
            yield from scorer.run(units, batch_tokens)
    model.train(was_training)


def plan_units(requests: Sequence[Request], max_len: int, *, shares: bool) -> list[Unit]:
    """Return the rows that answer all requests, with what they share where that saves tokens."""
    rows: dict[tuple[int, ...], Row] = {}
    for number, (context, continuation) in enumerate(requests):
        targets = continuation[-max_len:]
        ids = [*context, *continuation][-(max_len + 1) :][:-1]
        row = rows.setdefault(tuple(ids), Row(ids, []))
        row.asked.append((number, targets))
    if not shares:
        return [Unit([row]) for row in rows.values()]
    families: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows.values():
        families[tuple(row.context[:FAMILY_TOKENS])].append(row)
    units = []
    for family in families.values():
        apart = _by_context(family)
        together = Unit(family, _num_shared(family))
        cost = sum(unit.num_tokens for unit in apart)
        units += [together] if together.num_tokens < cost else apart
    return units


def _by_context(rows: Sequence[Row]) -> list[Unit]:
    """Return a unit for the rows of each context; those of one row share nothing."""
    by_context: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_context[tuple(row.context)].append(row)
    found = []
    for same in by_context.values():
        shared = _num_shared(same) if len(same) > 1 else 0
        found += [Unit(same, shared)] if shared else [Unit([row]) for row in same]
    return found


def _num_shared(rows: Sequence[Row]) -> int:
    """Return how many first tokens rows share; at least one of each, and its targets, are left."""
    first, last = min(row.ids for row in rows), max(row.ids for row in rows)
    most = min(len(row.ids) - row.num_targets for row in rows)
    same = next((n for n in range(min(most, len(first))) if first[n] != last[n]), most)
    return same if same >= LEAST_SHARED else 0


def can_share(model: Any) -> bool:
    """Tell whether the states of a prefix can be used by several rows: attention's alone can."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    return all(
        isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)
        for layer in _cache_layers(model)
    )


def has_growing_cache(model: Any) -> bool:
    """Tell whether every layer caches keys and values of all tokens, and nothing else."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in _cache_layers(model))


def _cache_layers(model: Any) -> Sequence[Any]:
    """Return the layers of a decoder's cache; [None] for a model that has another one."""
    from transformers import DynamicCache, GenerationMixin

    if model.config.is_encoder_decoder:
        return [None]
    inner = next(part for part in model.modules() if isinstance(part, GenerationMixin))
    layers: Sequence[Any] = DynamicCache(config=inner.config.get_text_config(decoder=True)).layers
    return [None] if inner._is_stateful else layers


class _Scorer:
    """Runs batches of a model."""

    def __init__(self, model: Any, gathered: Callable[[], Any], device: Any) -> None:
        from transformers import PreTrainedModel

        self.model, self.gathered, self.device = model, gathered, device
        inner = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
        self.parameters = inspect.signature(inner.forward).parameters
        self.vocab_size = model.get_input_embeddings().num_embeddings

    def run(
        self, units: Sequence[Unit], batch_tokens: int
    ) -> Iterator[list[tuple[int, Likelihood]]]:
        plain = [unit.rows[0] for unit in units if not unit.num_shared]
        for rows in self._row_batches(plain, batch_tokens):
            yield self._forward(rows)
        shared = [unit for unit in units if unit.num_shared]
        for batch in self._unit_batches(shared, batch_tokens):
            cache, mask = self._prefixes([unit.prefix for unit in batch])
            owner = {id(row): number for number, unit in enumerate(batch) for row in unit.left}
            left = [row for unit in batch for row in unit.left]
            most = max(unit.num_shared for unit in batch)
            # Every row of a batch has a copy of its prefix's cache.
            batches = list(self._row_batches(left, 4 * batch_tokens, most))
            for number, chosen in enumerate(batches):
                is_last = number == len(batches) - 1
                used = cache if is_last else copy.deepcopy(cache)
                yield self._forward(chosen, used, mask, [owner[id(row)] for row in chosen])

    def _row_batches(
        self, rows: Sequence[Row], batch_tokens: int, num_shared: int = 0
    ) -> Iterator[list[Row]]:
        """Yield rows of like lengths, the longest first; each has `num_shared` tokens before it."""
        batch: list[Row] = []
        widest = targets = 0
        for row in sorted(rows, key=lambda row: -len(row.ids)):
            widest, targets = max(widest, len(row.ids)), max(targets, row.num_targets)
            size = len(batch) + 1
            # Logits are taken of the columns from the first target of any row on.
            columns = min(widest, targets + widest - len(row.ids))
            too_many = size * columns * self.vocab_size > MOST_LOGITS
            if batch and (size * (num_shared + widest) > batch_tokens or too_many):
                yield batch
                batch, widest, targets = [], len(row.ids), row.num_targets
            batch.append(row)
        if batch:
            yield batch

    def _unit_batches(self, units: Sequence[Unit], batch_tokens: int) -> Iterator[list[Unit]]:
        """Yield units whose prefixes are of like lengths, with rows that fit one batch together."""
        batch: list[Unit] = []
        for unit in sorted(units, key=lambda unit: -unit.num_shared):
            every = [*batch, unit]
            rows = [row for one in every for row in one.left]
            widest = every[0].num_shared + max(len(row.ids) for row in rows)
            if batch and len(rows) * widest > 4 * batch_tokens:
                yield batch
                batch = []
            batch.append(unit)
        if batch:
            yield batch

    def _prefixes(self, prefixes: Sequence[Sequence[int]]) -> tuple[Any, Tensor]:
        """Return the cache of prefixes, padded at their left, and their mask."""
        import torch
        from transformers import DynamicCache

        ids, mask = padded(prefixes, on_the_left=True)
        mask = mask.to(self.device)
        inputs = self._inputs(ids.to(self.device), mask, mask)
        inner = self.model.config.get_text_config(decoder=True)
        cache = DynamicCache(config=inner)
        with self.gathered():
            kept = torch.tensor([ids.shape[1] - 1], device=self.device)
            self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=kept)
        return cache, mask

    def _inputs(self, ids: Tensor, mask: Tensor, own_mask: Tensor) -> dict[str, Any]:
        """Return inputs of a forward pass; `mask` covers the cache too, `own_mask` the ids."""
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in self.parameters:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -own_mask.shape[1] :]
        return inputs

    def _forward(
        self,
        rows: Sequence[Row],
        cache: Any = None,
        prefix_mask: Tensor | None = None,
        owners: Sequence[int] = (),
    ) -> list[tuple[int, Likelihood]]:
        import torch

        ids, own_mask = padded([row.ids for row in rows], on_the_left=False)
        ids, own_mask = ids.to(self.device), own_mask.to(self.device)
        mask = own_mask
        how: dict[str, Any] = {"use_cache": False}
        if cache is not None and prefix_mask is not None:
            index = torch.tensor(owners, device=self.device)
            cache.batch_select_indices(index)
            mask = torch.cat([prefix_mask[index], own_mask], dim=1)
            how = {"use_cache": True, "past_key_values": cache}
        first = min(len(row.ids) - row.num_targets for row in rows)
        columns = torch.arange(first, ids.shape[1], device=self.device)
        with self.gathered():
            inputs = self._inputs(ids, mask, own_mask)
            logits = self.model(**inputs, **how, logits_to_keep=columns).logits
        ends = [len(row.ids) - first for row in rows]
        return likelihoods_of(
            logits, [(row.asked, end) for row, end in zip(rows, ends, strict=True)]
        )

    def pairs(
        self, requests: Sequence[Request], batch_tokens: int
    ) -> Iterator[list[tuple[int, Likelihood]]]:
        """Yield the likelihoods that an encoder-decoder gives; continuations end without EOS."""
        start = self.model.config.decoder_start_token_id
        order = sorted(range(len(requests)), key=lambda n: -sum(map(len, requests[n])))
        widest = 1 if not order else sum(map(len, requests[order[0]]))
        size = max(1, min(batch_tokens // widest, MOST_LOGITS // (widest * self.vocab_size)))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            ids, mask = padded([requests[n].context for n in chosen], on_the_left=False)
            targets = [requests[n].continuation for n in chosen]
            read, _ = padded([[start, *one[:-1]] for one in targets], on_the_left=False)
            with self.gathered():
                logits = self.model(
                    input_ids=ids.to(self.device),
                    attention_mask=mask.to(self.device),
                    decoder_input_ids=read.to(self.device),
                    use_cache=False,
                ).logits
            asked = [([(n, one)], len(one)) for n, one in zip(chosen, targets, strict=True)]
            yield likelihoods_of(logits, asked)


def likelihoods_of(
    logits: Tensor, rows: Sequence[tuple[Sequence[tuple[int, list[int]]], int]]
) -> list[tuple[int, Likelihood]]:
    """Return the likelihoods of requests from logits [rows, columns, vocabulary].

    Of each row: its requests (number, targets), and the column after that of the last target.
    """
    import torch

    places = [
        (index, end - len(targets) + offset, target)
        for index, (asked, end) in enumerate(rows)
        for _, targets in asked
        for offset, target in enumerate(targets)
    ]
    row, column, target = torch.tensor(places, device=logits.device).T
    chosen = logits[row, column].float()
    logprobs = torch.log_softmax(chosen, -1).gather(1, target.unsqueeze(1)).squeeze(1)
    # A sum in fp64, of which the order does not matter.
    values, greedy = logprobs.double().cpu(), (chosen.argmax(-1) == target).cpu()
    found, position = [], 0
    for asked, _ in rows:
        for number, targets in asked:
            part = slice(position, position + len(targets))
            total, is_greedy = float(values[part].sum()), bool(greedy[part].all())
            found.append((number, Likelihood(total, len(targets), is_greedy)))
            position += len(targets)
    return found


def padded(rows: Sequence[Sequence[int]], *, on_the_left: bool) -> tuple[Tensor, Tensor]:
    """Return ids and mask [rows, longest]; masked tokens are 0."""
    import torch

    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if on_the_left else slice(0, len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    return ids, mask
