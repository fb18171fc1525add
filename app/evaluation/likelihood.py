"""Log-likelihoods of given continuations of given contexts.

Rows are sorted by length and batched by tokens, shared prefixes are computed once, and logits are
computed only at positions that predict a continuation. Which contexts are scored is decided by the
caller.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from app.model.attention import generation_attention
from app.model.layers import eval_mode
from app.model.tokenizer import num_rows

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_MAX_LOGITS = 1 << 28
"""largest number of logits of a batch: 1 GiB in fp32"""
_GPU_BATCH_TOKENS, _CPU_BATCH_TOKENS = 8192, 2048
"""default number of tokens per batch"""
_SAME_START_TOKENS = 32
"""contexts whose first tokens are equal up to this number (a task's few-shot examples) may share
one prefix"""
_MIN_SHARED_TOKENS = 8
"""shortest prefix in tokens that is worth computing separately"""


class Request(NamedTuple):
    """A context and a continuation to score, as token ids; neither is empty."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    logprob: float
    """log-probability, summed over the continuation's tokens, in nats"""
    num_tokens: int
    is_greedy: bool
    """whether greedy decoding would generate this continuation"""


@dataclass(slots=True)
class _Row:
    """The input tokens of one forward pass, and the requests that they answer."""

    ids: list[int]
    requests: list[tuple[int, list[int]]]
    """(index of the request, its target tokens); the last position predicts the last target"""

    @property
    def num_targets(self) -> int:
        """Return the number of positions, at the end of the row, that predict a target."""
        return max(len(targets) for _, targets in self.requests)

    @property
    def context(self) -> list[int]:
        """Return the tokens before the first target."""
        return self.ids[: len(self.ids) - self.num_targets + 1]


@dataclass(slots=True)
class _PrefixGroup:
    """Rows whose first `num_shared` tokens are equal."""

    rows: list[_Row]
    num_shared: int = 0
    suffixes: list[_Row] = field(init=False)
    """the rows without the shared tokens"""

    def __post_init__(self) -> None:
        self.suffixes = [_Row(row.ids[self.num_shared :], row.requests) for row in self.rows]

    @property
    def prefix(self) -> list[int]:
        return self.rows[0].ids[: self.num_shared]

    @property
    def num_tokens(self) -> int:
        return self.num_shared + sum(len(row.ids) for row in self.suffixes)


def encode_pair(
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    continuation: str,
    *,
    is_encoder_decoder: bool = False,
) -> Request:
    """Tokenize a context and its continuation as lm-evaluation-harness does.

    Spaces at the end of the context are moved to the continuation. An empty context becomes the
    BOS token. An encoder-decoder model gets both tokenized separately.
    """
    stripped = context.rstrip(" \t\n\r") if context.strip() else context
    continuation = context[len(stripped) :] + continuation
    if is_encoder_decoder:
        own: list[int] = tokenizer.encode(continuation, add_special_tokens=False)
        return Request(tokenizer.encode(stripped), own)
    if not stripped:
        return Request([first_token(tokenizer)], encode_after_first(tokenizer, continuation))
    whole = encode_text(tokenizer, stripped + continuation)
    num_context = len(encode_text(tokenizer, stripped))
    return Request(whole[:num_context], whole[num_context:])


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, is_encoder_decoder: bool = False
) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer puts before every text.

    Some tokenizers also end every text; what continues it would then start a new one. The text of
    an encoder is ended.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids: list[int] = encoded["input_ids"]
    kept = len(ids)
    while not is_encoder_decoder and kept > 1 and encoded["special_tokens_mask"][kept - 1]:
        kept -= 1
    return ids[:kept]


def encode_after_first(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that follow `first_token`, which is not in it a second time."""
    ids = encode_text(tokenizer, text)
    return ids[1:] if ids[:1] == [first_token(tokenizer)] else ids


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the context of a text that has none: the BOS token, or EOS if there is no BOS."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return int(eos if bos is None else bos)


def rolling_requests(ids: Sequence[int], first: int, max_len: int) -> list[Request]:
    """Return requests that predict each token of a text once, in windows of `max_len` tokens.

    The context of the first window is the token `first`; that of each later one is as much of the
    preceding text as fits.
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
    """Yield batches of (index of a request, its likelihood), in no particular order.

    A context is truncated on the left if it and its continuation exceed `max_len` + 1 tokens.
    `batch_tokens`: None = the default of the device. `gathered` is entered around each forward
    pass; if weights are sharded, all ranks must call this with the same requests.
    """
    device = device or model.device
    if batch_tokens is None:
        batch_tokens = _CPU_BATCH_TOKENS if device.type == "cpu" else _GPU_BATCH_TOKENS
    scorer = _Scorer(model, gathered, device)
    is_encoder_decoder = model.config.is_encoder_decoder
    with eval_mode(model), generation_attention(model):
        if is_encoder_decoder:
            yield from scorer.run_encoder_decoder(requests, batch_tokens)
        else:
            groups = plan_groups(requests, max_len, shares_prefixes=can_share_prefixes(model))
            yield from scorer.run(groups, batch_tokens)


def score_groups(
    model: Any, groups: Sequence[Sequence[Request]], **options: Any
) -> Iterator[list[tuple[int, list[Likelihood]]]]:
    """Yield batches of (index of a group of requests, their likelihoods) as groups are complete.

    `options`: those of `score`.
    """
    group_of = [number for number, group in enumerate(groups) for _ in group]
    starts = list(itertools.accumulate(map(len, groups), initial=0))
    likelihoods: dict[int, Likelihood] = {}
    if not all(groups):
        yield [(number, []) for number, group in enumerate(groups) if not group]
    num_pending = [len(group) for group in groups]
    for batch in score(model, [request for group in groups for request in group], **options):
        finished = []
        for index, likelihood in batch:
            likelihoods[index] = likelihood
            number = group_of[index]
            num_pending[number] -= 1
            if not num_pending[number]:
                own = range(starts[number], starts[number + 1])
                finished.append((number, [likelihoods[n] for n in own]))
        yield finished


def plan_groups(
    requests: Sequence[Request], max_len: int, *, shares_prefixes: bool
) -> list[_PrefixGroup]:
    """Return the rows that answer all requests, grouped by prefix where that saves tokens."""
    rows: dict[tuple[int, ...], _Row] = {}
    for number, (context, continuation) in enumerate(requests):
        targets = continuation[-max_len:]
        ids = [*context, *continuation][-(max_len + 1) :][:-1]
        row = rows.setdefault(tuple(ids), _Row(ids, []))
        row.requests.append((number, targets))
    if not shares_prefixes:
        return [_PrefixGroup([row]) for row in rows.values()]
    by_start: dict[tuple[int, ...], list[_Row]] = defaultdict(list)
    for row in rows.values():
        by_start[tuple(row.context[:_SAME_START_TOKENS])].append(row)
    groups = []
    for same_start in by_start.values():
        separate = _group_by_context(same_start)
        joint = _PrefixGroup(same_start, _num_shared(same_start))
        cost = sum(group.num_tokens for group in separate)
        groups += [joint] if joint.num_tokens < cost else separate
    return groups


def _group_by_context(rows: Sequence[_Row]) -> list[_PrefixGroup]:
    by_context: dict[tuple[int, ...], list[_Row]] = defaultdict(list)
    for row in rows:
        by_context[tuple(row.context)].append(row)
    groups = []
    for same in by_context.values():
        shared = _num_shared(same) if len(same) > 1 else 0
        groups += [_PrefixGroup(same, shared)] if shared else [_PrefixGroup([row]) for row in same]
    return groups


def _num_shared(rows: Sequence[_Row]) -> int:
    """Return the length of the rows' common prefix before all targets; 0 if too short to share."""
    first, last = min(row.ids for row in rows), max(row.ids for row in rows)
    longest = min(len(row.ids) - row.num_targets for row in rows)
    same = next((n for n in range(min(longest, len(first))) if first[n] != last[n]), longest)
    return same if same >= _MIN_SHARED_TOKENS else 0


def can_share_prefixes(model: Any) -> bool:
    """Return whether several rows can use the cache of one prefix: only attention's can be."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

    return all(
        isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)
        for layer in _cache_layers(model)
    )


def has_growing_cache(model: Any) -> bool:
    """Return whether every layer caches the keys and values of all tokens, and nothing else."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in _cache_layers(model))


def _cache_layers(model: Any) -> Sequence[Any]:
    """Return the layers of a decoder's cache, [None] for a model with another kind of cache."""
    from transformers import DynamicCache, GenerationMixin

    if model.config.is_encoder_decoder:
        return [None]
    inner = next(part for part in model.modules() if isinstance(part, GenerationMixin))
    layers: Sequence[Any] = DynamicCache(config=inner.config.get_text_config(decoder=True)).layers
    return [None] if inner._is_stateful else layers


class _Scorer:
    def __init__(self, model: Any, gathered: Callable[[], Any], device: Any) -> None:
        from transformers import PreTrainedModel

        self.model, self.gathered, self.device = model, gathered, device
        inner = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
        self.parameters = inspect.signature(inner.forward).parameters
        self.vocab_size = num_rows(model.config)

    def run(
        self, groups: Sequence[_PrefixGroup], batch_tokens: int
    ) -> Iterator[list[tuple[int, Likelihood]]]:
        """Score groups of a decoder; first all rows without a shared prefix."""
        single = [group.rows[0] for group in groups if not group.num_shared]
        for rows in self._row_batches(single, batch_tokens):
            yield self._forward(rows)
        shared = [group for group in groups if group.num_shared]
        for batch in self._group_batches(shared, batch_tokens):
            cache, mask = self._compute_prefixes([group.prefix for group in batch])
            prefix_of = {
                id(row): number for number, group in enumerate(batch) for row in group.suffixes
            }
            suffixes = [row for group in batch for row in group.suffixes]
            longest = max(group.num_shared for group in batch)
            # Every row of a batch needs its own copy of the prefix's cache.
            batches = list(self._row_batches(suffixes, 4 * batch_tokens, longest))
            for number, rows in enumerate(batches):
                is_last = number == len(batches) - 1
                used = cache if is_last else copy.deepcopy(cache)
                yield self._forward(rows, used, mask, [prefix_of[id(row)] for row in rows])

    def _row_batches(
        self, rows: Sequence[_Row], batch_tokens: int, num_shared: int = 0
    ) -> Iterator[list[_Row]]:
        """Yield batches of rows of similar length, longest first.

        `num_shared`: length of the cached prefix before each row, which counts as tokens too.
        """
        batch: list[_Row] = []
        widest = targets = 0
        for row in sorted(rows, key=lambda row: -len(row.ids)):
            widest, targets = max(widest, len(row.ids)), max(targets, row.num_targets)
            size = len(batch) + 1
            # Logits are computed for all columns from the first target of any row on.
            columns = min(widest, targets + widest - len(row.ids))
            too_many = size * columns * self.vocab_size > _MAX_LOGITS
            if batch and (size * (num_shared + widest) > batch_tokens or too_many):
                yield batch
                batch, widest, targets = [], len(row.ids), row.num_targets
            batch.append(row)
        if batch:
            yield batch

    def _group_batches(
        self, groups: Sequence[_PrefixGroup], batch_tokens: int
    ) -> Iterator[list[_PrefixGroup]]:
        """Yield groups with prefixes of similar length whose suffixes fit into one batch."""
        batch: list[_PrefixGroup] = []
        for group in sorted(groups, key=lambda group: -group.num_shared):
            candidates = [*batch, group]
            rows = [row for candidate in candidates for row in candidate.suffixes]
            widest = candidates[0].num_shared + max(len(row.ids) for row in rows)
            if batch and len(rows) * widest > 4 * batch_tokens:
                yield batch
                batch = []
            batch.append(group)
        if batch:
            yield batch

    def _compute_prefixes(self, prefixes: Sequence[Sequence[int]]) -> tuple[Any, Tensor]:
        """Return the cache of left-padded prefixes, and their mask [prefixes, positions]."""
        import torch
        from transformers import DynamicCache

        ids, mask = padded(prefixes, on_the_left=True)
        mask = mask.to(self.device)
        inputs = self._inputs(ids.to(self.device), mask, mask)
        inner = self.model.config.get_text_config(decoder=True)
        cache = DynamicCache(config=inner)
        with self.gathered():
            last = torch.tensor([ids.shape[1] - 1], device=self.device)
            self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=last)
        return cache, mask

    def _inputs(self, ids: Tensor, mask: Tensor, own_mask: Tensor) -> dict[str, Any]:
        """Return the inputs of a forward pass; unlike `own_mask`, `mask` also covers the cache."""
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in self.parameters:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -own_mask.shape[1] :]
        return inputs

    def _forward(
        self,
        rows: Sequence[_Row],
        cache: Any = None,
        prefix_mask: Tensor | None = None,
        prefix_indices: Sequence[int] = (),
    ) -> list[tuple[int, Likelihood]]:
        """Score rows, each after the cached prefix with its index in `prefix_indices`, if any."""
        import torch

        ids, own_mask = padded([row.ids for row in rows], on_the_left=False)
        ids, own_mask = ids.to(self.device), own_mask.to(self.device)
        mask = own_mask
        cache_inputs: dict[str, Any] = {"use_cache": False}
        if cache is not None and prefix_mask is not None:
            index = torch.tensor(prefix_indices, device=self.device)
            cache.batch_select_indices(index)
            mask = torch.cat([prefix_mask[index], own_mask], dim=1)
            cache_inputs = {"use_cache": True, "past_key_values": cache}
        first = min(len(row.ids) - row.num_targets for row in rows)
        columns = torch.arange(first, ids.shape[1], device=self.device)
        with self.gathered():
            inputs = self._inputs(ids, mask, own_mask)
            logits = self.model(**inputs, **cache_inputs, logits_to_keep=columns).logits
        return _gather_likelihoods(logits, [(row.requests, len(row.ids) - first) for row in rows])

    def run_encoder_decoder(
        self, requests: Sequence[Request], batch_tokens: int
    ) -> Iterator[list[tuple[int, Likelihood]]]:
        """Score requests with an encoder-decoder; no EOS is appended to continuations."""
        start = self.model.config.decoder_start_token_id
        order = sorted(range(len(requests)), key=lambda n: -sum(map(len, requests[n])))
        widest = 1 if not order else sum(map(len, requests[order[0]]))
        size = max(1, min(batch_tokens // widest, _MAX_LOGITS // (widest * self.vocab_size)))
        for begin in range(0, len(order), size):
            chosen = order[begin : begin + size]
            ids, mask = padded([requests[n].context for n in chosen], on_the_left=False)
            targets = [requests[n].continuation for n in chosen]
            decoder_ids, _ = padded([[start, *ids[:-1]] for ids in targets], on_the_left=False)
            with self.gathered():
                logits = self.model(
                    input_ids=ids.to(self.device),
                    attention_mask=mask.to(self.device),
                    decoder_input_ids=decoder_ids.to(self.device),
                    use_cache=False,
                ).logits
            rows = [([(n, ids)], len(ids)) for n, ids in zip(chosen, targets, strict=True)]
            yield _gather_likelihoods(logits, rows)


def _gather_likelihoods(
    logits: Tensor, rows: Sequence[tuple[Sequence[tuple[int, list[int]]], int]]
) -> list[tuple[int, Likelihood]]:
    """Return (index, likelihood) of each request from logits [rows, columns, vocabulary].

    `rows` has for each row its requests as (index, targets), and the column after the one that
    predicts the last target.
    """
    import torch

    positions = [
        (index, end - len(targets) + offset, target)
        for index, (requests, end) in enumerate(rows)
        for _, targets in requests
        for offset, target in enumerate(targets)
    ]
    row, column, target = torch.tensor(positions, device=logits.device).T
    chosen = logits[row, column].float()
    logprobs = torch.log_softmax(chosen, -1).gather(1, target.unsqueeze(1)).squeeze(1)
    # Summed in fp64, so that the order does not matter.
    values, greedy = logprobs.double().cpu(), (chosen.argmax(-1) == target).cpu()
    likelihoods, start = [], 0
    for requests, _ in rows:
        for number, targets in requests:
            part = slice(start, start + len(targets))
            total, is_greedy = float(values[part].sum()), bool(greedy[part].all())
            likelihoods.append((number, Likelihood(total, len(targets), is_greedy)))
            start += len(targets)
    return likelihoods


def padded(rows: Sequence[Sequence[int]], *, on_the_left: bool) -> tuple[Tensor, Tensor]:
    """Return ids and mask, both [rows, longest]; padding is 0."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    pad = partial(pad_sequence, batch_first=True, padding_side="left" if on_the_left else "right")
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad(ids), pad(list(map(torch.ones_like, ids)))
