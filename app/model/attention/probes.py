"""Checks at the start of training: a model is causal, isolates documents, and attends correctly."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from app.model.attention.backends import use_backend
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.attention.mixer_search import FIRST_ID, isolate_mixers, probe_ids
from app.model.attention.mixers import has_isolated_mixers
from app.model.layers import eval_mode, replaced
from common.errors import UserError
from common.text import percent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EDITS = (11, 29)
"""offsets added to token ids; the second edit confirms what the first one shows"""
MIN_ULPS, MAX_ULPS, MIN_SHARE = 2, 8, 1e-4
"""rounding error between batches of one shape: least and most units in the last place, and least
share of the logits' spread"""
KERNEL_ULPS, KERNEL_MIN_SHARE = 24, 1e-3
"""rounding error between kernels: units in the last place, and least share of the logits' spread"""
_TF32_EPS = 2**-10
_CAUSAL_TOKENS = 8
"""tokens of the probe that a model is causal"""
_VISIBLE_CHANGE = 0.02
"""least change of a token's logits that shows it sees an edit, as a share of their spread"""
NEIGHBOUR_TOKENS, DOCUMENT_TOKENS = 5, 12
"""lengths of the two documents of the comparison with eager attention"""
_SPREAD = 192
"""positions between tokens of the probe for documents of other lengths, as a divisor of the model's
context: below the length at which published models change their rotary embeddings"""
_REACH = 3
"""length of windows and chunks during this comparison, shorter than its document"""
_REACHES = ("sliding_window", "attention_chunk_size")
"""names of windows and chunks in configs and layers"""
_MASK_ERRORS = (TypeError, AttributeError, IndexError)
"""errors of a model that cannot read our masks"""


def check_isolation(
    model: PreTrainedModel, backend: str, device: torch.device | None = None
) -> None:
    """Raise UserError if editing one document of a pack changes another one's logits.

    Also raised if the length of one changes another one's logits. Costs five forward passes of
    eight tokens, on `device` or the model's device. Models differ in what they pass on to their
    layers, and libraries change, so only a test run can show it.
    """
    device = device or model.device
    leak = _measure_leak(model, backend, device)
    if leak is not None and isolate_mixers(
        model, device, partial(attention_inputs, model, backend)
    ):
        leak = _measure_leak(model, backend, device)
    if leak is None:
        _check_positions(model, backend, device, [[4, 4]])
        return
    raise UserError(
        f"attention={backend}: documents packed together see each other "
        f"(editing one changes another one's logits by {percent(leak)} of its own change): "
        f"type {'attention=eager, or ' if _eager_isolates(model, backend, device) else ''}"
        "packing=none"
    )


def hide_boundaries_from_mixers(
    model: PreTrainedModel, backend: str, device: torch.device | None = None
) -> None:
    """Isolate the mixers of a model for padded rows, if they fail with `backend`'s boundaries.

    Few kernels of mixers support boundaries, and only in a single row; others raise ValueError.
    Costs a forward pass of two rows of four tokens.
    """
    device = device or model.device
    ids = probe_ids(model, 0, 8, device).view(2, 4)
    inputs = attention_inputs(model, backend, [[4], [4]], ids)
    if "cu_seq_lens_q" not in inputs:
        return
    try:
        with eval_mode(model):
            model(input_ids=ids, use_cache=False, **inputs)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        isolate_mixers(model, device, partial(attention_inputs, model, backend))


def check_padded_rows(
    model: PreTrainedModel, backend: str, device: torch.device | None = None
) -> None:
    """Prepare a model for padded rows; raise UserError if they depend on each other's length.

    Costs three forward passes of two rows of four tokens.
    """
    device = device or model.device
    hide_boundaries_from_mixers(model, backend, device)
    _check_positions(model, backend, device, [[4], [4]])


def _check_positions(
    model: PreTrainedModel, backend: str, device: torch.device, lengths: list[list[int]]
) -> None:
    """Raise UserError if a document's logits depend on the length of another one in its batch.

    The other document, of four tokens, is moved to the last positions of the model's context. Those
    of the first document are spread over the first part of it.
    """
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if context is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return
    ids = probe_ids(model, 0, 8, device).view(len(lengths), -1)
    step = max(1, context // _SPREAD)
    first = step * torch.arange(4, device=device)
    near, far = (
        torch.cat([first, start + torch.arange(4, device=device)]).view_as(ids)
        for start in (0, max(0, context - 4))
    )
    inputs = attention_inputs(model, backend, lengths, ids)
    with eval_mode(model):
        logits, others = (
            model(input_ids=ids, position_ids=positions, use_cache=False, **inputs)
            .logits.flatten(0, 1)[:4]
            .float()
            for positions in (near, far)
        )
    # The median token: rounding may send one or two tokens to another expert.
    difference = distances(logits, others).median().item()
    if difference > rounding(model, logits, MAX_ULPS, MIN_SHARE):
        raise UserError(
            f"{model.config.model_type} models compute other logits for a document if another one "
            f"in its batch is long (difference {difference:.2g}), as some rotary embeddings do: "
            "type packing=none trainer.micro_batch_size=1, or model.path=ANOTHER_BASE"
        )


def _measure_leak(model: PreTrainedModel, backend: str, device: torch.device) -> float | None:
    """Return the change of the other document by an edit, as a share of the edited one's change.

    None if the other document does not see the edit. A change must be confirmed by a second edit:
    an expert's products round differently for another number of rows, which may flip the choice of
    an expert.
    """
    share = 0.0
    for shift in EDITS:
        try:
            own, others, limit = _effects_of_edit(model, backend, device, shift)
        except ValueError as error:
            if has_isolated_mixers(model) or isinstance(error, UserError):
                raise
            return 1.0  # transformers reports that a layer cannot keep documents apart
        if own <= limit:
            raise ValueError(
                f"attention={backend}: the isolation probe saw no effect of its own edit"
            )
        if not others > limit:  # or if weights are NaN, which is not a fault of attention
            return None
        share = others / own
    return share


def _eager_isolates(model: PreTrainedModel, backend: str, device: torch.device) -> bool:
    if backend == "eager" or not model._can_set_attn_implementation():
        return False
    try:
        with use_backend(model, "eager"):
            _, others, limit = _effects_of_edit(model, "eager", device, EDITS[0])
    except (UserError, RuntimeError):  # transformers < 5.14 passes its mask to recurrent layers
        return False
    return others <= limit


def _effects_of_edit(
    model: PreTrainedModel, backend: str, device: torch.device, shift: int
) -> tuple[float, float, float]:
    """Return the changes of the edited document's and the other's logits, and the rounding error.

    A change is the largest of the document's tokens. Rounding is measured by how far an edit of the
    second document moves the first, whose tokens all come before it.
    """
    tokens, shifted = (probe_ids(model, first, first + 8, device) for first in (0, shift))
    edits = (
        torch.cat([shifted[:, :4], tokens[:, 4:]], 1),
        torch.cat([tokens[:, :4], shifted[:, 4:]], 1),
    )
    inputs = attention_inputs(model, backend, [[4, 4]], tokens)
    position_ids = torch.arange(4, device=device).repeat(1, 2)
    with eval_mode(model):
        logits, first_edited, second_edited = (
            model(input_ids=ids, position_ids=position_ids, use_cache=False, **inputs).logits[0]
            for ids in (tokens, *edits)
        )
    changes = distances(logits, first_edited)
    noise = 4 * distances(logits, second_edited)[:4].max().item()
    lower, upper = (rounding(model, logits, ulps, MIN_SHARE) for ulps in (MIN_ULPS, MAX_ULPS))
    limit = min(max(noise, lower), upper)
    return changes[:4].max().item(), changes[4:].max().item(), limit


def check_pair_isolation(
    model: PreTrainedModel, backend: str, device: torch.device | None = None, *, is_packed: bool
) -> None:
    """Raise UserError if a document's logits depend on the rest of its batch.

    For encoder-decoder models. Costs two forward passes of nine source and five target tokens, on
    `device` or the model's device. Packed, a document is placed before one neighbour, then after
    another: its logits differ if it sees either of them, or if positions count from the start of
    the row. Padded, the tokens of the padding differ.
    """
    device = device or model.device
    measure = partial(_pair_difference, model, device)
    difference, limit = measure(backend, is_packed)
    if difference > limit:
        others = {"packing=none": (backend, False)} if is_packed else {}
        if backend != "eager":
            others[f"attention=eager{' packing=none' * is_packed}"] = ("eager", False)
        override = _first_working(measure, others)
        fault = "documents see the padding after them"
        if is_packed:
            fault = "documents packed together see each other, or start at wrong positions"
        raise UserError(
            f"attention={backend}: {fault} (logits differ by {difference:.2g}): type {override}"
        )


def _pair_difference(
    model: PreTrainedModel, device: torch.device, backend: str, is_packed: bool
) -> tuple[float, float]:
    """Return the difference of a document's logits in two contexts, and the rounding error.

    Packed, before one neighbour and after another one; padded, before some tokens and others.
    """
    source, target, others, other_targets = (
        probe_ids(model, length, 2 * length, device)[0] for length in (4, 3, 10, 4)
    )
    first = torch.cat([source, others[:5]]), torch.cat([target, other_targets[:2]])
    second = (source, others[5:]), (target, other_targets[2:])
    lengths: list[tuple[list[int], list[int]]] = [([4], [3])] * 2
    if is_packed:
        second = second[0][::-1], second[1][::-1]
        lengths = [([4, 5], [3, 2]), ([5, 4], [2, 3])]
    with eval_mode(model), use_backend(model, backend):
        logits = _pair_logits(model, backend, first, lengths[0])[:3]
        changed = _pair_logits(model, backend, map(torch.cat, second), lengths[1])
    changed = changed[2:] if is_packed else changed[:3]
    # The shapes are equal, so rounding is small; a wrong position changes far more.
    return distances(logits, changed).max().item(), rounding(model, logits, MAX_ULPS, MIN_SHARE)


def _first_working(
    measure: Callable[[str, bool], tuple[float, float]], others: Mapping[str, tuple[str, bool]]
) -> str:
    """Return the first override to type whose backend and packing work, after trying them."""
    working = (override for override, run in others.items() if operator.le(*measure(*run)))
    return next(working, "model.path=ANOTHER_BASE")


def distances(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the RMS difference of each token's logits [tokens, vocabulary]: [tokens].

    A difference that all logits of a token share is subtracted: it changes no probability.
    """
    return _spread(logits.float() - others.float())


def rounding(model: PreTrainedModel, logits: torch.Tensor, ulps: float, min_share: float) -> float:
    """Return the RMS rounding error to expect of `logits` [tokens, vocabulary].

    It is `ulps` units in the last place of their spread, or `min_share` of the spread if that is
    more, plus half a unit of their mean, which the last addition rounds. A unit is that of the
    coarsest of weights, autocast and matrix products.
    """
    device, dtypes = logits.device.type, [logits.dtype, model.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, _TF32_EPS)
    spread = _spread(logits.float()).square().mean().sqrt().item()
    mean = logits.float().mean(-1).abs().max().item()
    return max(ulps * eps, min_share) * spread + eps / 2 * mean


def _spread(logits: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each token's logits."""
    return (logits - logits.mean(-1, keepdim=True)).square().mean(-1).sqrt()


def _pair_logits(
    model: Any, backend: str, pair: Iterable[torch.Tensor], lengths: tuple[list[int], list[int]]
) -> torch.Tensor:
    sources, targets = (tokens.unsqueeze(0) for tokens in pair)
    inputs = pair_inputs(model, backend, [lengths[0]], [lengths[1]], sources, targets)
    inputs |= {"input_ids": sources, "decoder_input_ids": targets}
    logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


def check_causal(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Raise UserError if tokens attend to later tokens, as in BERT.

    Such a model would see the answers that it is trained on. Costs two forward passes of eight
    tokens, on `device` or the model's device.
    """
    device, half = device or model.device, _CAUSAL_TOKENS // 2
    ids, later = (
        probe_ids(model, first, first + _CAUSAL_TOKENS, device)
        for first in (FIRST_ID, FIRST_ID + _CAUSAL_TOKENS)
    )
    edited = torch.cat([ids[:, :half], later[:, half:]], 1)
    with eval_mode(model):
        logits, others = (
            model(input_ids=tokens, use_cache=False).logits[0, :half].float()
            for tokens in (ids, edited)
        )
    # The median token: rounding may send one or two tokens to another expert.
    change = (logits - others).std(-1).median()
    if change > _VISIBLE_CHANGE * logits.std(-1).mean():
        fields = ("is_decoder", "causal")
        field = next((name for name in fields if getattr(model.config, name, None) is False), None)
        model_type = model.config.model_type
        hint = f'; {model_type} models with "{field}": true in config.json are causal'
        raise UserError(
            f"{model_type} models attend to later tokens, so this one would see the answers that "
            f"it is trained on: type model.path=ANOTHER_BASE{hint if field else ''}"
        )


def check_against_eager(
    model: PreTrainedModel, backend: str, device: torch.device | None = None, *, is_packed: bool
) -> None:
    """Raise UserError if a document's logits are not those of the model's own eager attention.

    The document is packed after another one, or followed by padding; the reference is the document
    alone. Sliding windows and chunks are shortened meanwhile, below the document's length. For
    causal models. Costs forward passes of 17 and 12 tokens, on `device` or the model's device.
    """
    if backend != "eager" and not model._can_set_attn_implementation():
        return  # its layers compute attention themselves and run no other
    measure = partial(_difference_to_eager, model, device or model.device)
    difference, limit = measure(backend, is_packed)
    if difference <= limit or math.isnan(limit):  # NaN weights are not a fault of attention
        return
    others = {"attention=eager": ("eager", is_packed)} if backend != "eager" else {}
    if is_packed:
        others["packing=none"] = (backend, False)
    raise UserError(
        f"attention={backend}: {model.config.model_type} models compute other logits for a "
        f"document in a {'pack' if is_packed else 'padded row'} than for the same document alone "
        f"with their own eager attention (difference {difference:.2g}, rounding {limit:.2g}): "
        f"type {_first_working(measure, others)}"
    )


def _difference_to_eager(
    model: Any, device: torch.device, backend: str, is_packed: bool
) -> tuple[float, float]:
    """Return the difference of a document's logits to eager attention, and the rounding error."""
    lengths = [NEIGHBOUR_TOKENS, DOCUMENT_TOKENS] if is_packed else [DOCUMENT_TOKENS]
    ids = probe_ids(model, FIRST_ID, FIRST_ID + NEIGHBOUR_TOKENS + DOCUMENT_TOKENS, device)
    start = sum(lengths) - DOCUMENT_TOKENS
    document = slice(start, start + DOCUMENT_TOKENS)
    with eval_mode(model), _short_reaches(model):
        with use_backend(model, backend):
            found = _row_logits(model, backend, ids, lengths)[document]
        with use_backend(model, "eager"):
            expected = model(input_ids=ids[:, document], use_cache=False).logits[0]
    # The median token: rounding may send one or two tokens to another expert.
    difference = distances(found, expected)[1:].median().item()
    return difference, rounding(model, expected, KERNEL_ULPS, KERNEL_MIN_SHARE)


def _row_logits(model: Any, backend: str, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    inputs = attention_inputs(model, backend, [lengths], ids)
    if len(lengths) > 1:  # for a single document, models compute positions themselves
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs["position_ids"] = torch.zeros_like(ids)
        inputs["position_ids"][0, : len(positions)] = positions.to(ids.device)
    try:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    except _MASK_ERRORS as error:
        if backend == "eager":
            raise
        raise UserError(
            f"attention={backend}: {model.config.model_type} models need an attention mask that "
            f"only eager attention builds ({type(error).__name__}: {error}): "
            "type attention=eager"
        ) from error
    return logits


def _short_reaches(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Shorten the windows and chunks of a model to `_REACH` tokens in this context."""
    from transformers import PreTrainedModel

    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    holders = [*model.modules(), *configs, *(config.get_text_config() for config in configs)]
    return replaced(
        (holder, name, _REACH)
        for holder in holders
        for name in _REACHES
        if type(reach := vars(holder).get(name)) is int and reach > _REACH
    )
