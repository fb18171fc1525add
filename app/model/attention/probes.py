"""Check before training that a model is causal, isolates documents, and attends as in eager."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.attention.backends import use_backend
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.attention.mixer_search import isolate_mixers
from app.model.attention.mixers import has_isolated_mixers
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


EDITS = (11, 29)
"""offsets added to token ids, one after the other"""
MIN_ULPS, MAX_ULPS, MIN_SHARE = 2, 8, 1e-4
"""rounding error between batches of one shape: least and most units in the last place, and least
share of the logits' spread"""
KERNEL_ULPS, KERNEL_MIN_SHARE = 24, 1e-3
"""rounding error between kernels: units in the last place, and least share of the logits' spread"""
TF32_EPS = 2**-10
FIRST_ID = 3
"""first token id of a probe: lower ids are special tokens, and padding to some models"""
CAUSAL_TOKENS = 8
"""tokens of the probe that a model is causal"""
VISIBLE_CHANGE = 0.02
"""least change of a token's logits that shows it sees an edit, as a share of their spread"""
NEIGHBOUR_TOKENS, DOCUMENT_TOKENS = 5, 12
"""lengths of the two documents of the comparison with eager attention"""
REACH = 3
"""length of windows and chunks during this comparison, shorter than its document"""
REACHES = ("sliding_window", "attention_chunk_size")
"""names of windows and chunks in configs and layers"""
MASK_ERRORS = (TypeError, AttributeError, IndexError)
"""errors of a model that cannot read our masks"""


def check_isolation(
    model: PreTrainedModel, backend: str, device: torch.device | None = None
) -> None:
    """Raise UserError if editing one document of a pack changes another one's logits.

    Costs three forward passes of eight tokens, on `device` or the model's. Needed since models
    differ in what they pass on to their layers, and libraries change.
    """
    device = device or model.device
    share = _seen(model, backend, device)
    if share is None:
        return
    if isolate_mixers(model, device, partial(attention_inputs, model, backend)):
        share = _seen(model, backend, device)
    if share is None:
        return
    raise UserError(
        f"attention={backend}: documents packed together see each other "
        f"(editing one changes another one's logits by {share:.1%} of its own change): "
        f"type {'attention=eager, or ' if _eager_isolates(model, backend, device) else ''}"
        "packing=none"
    )


def hide_boundaries_from_mixers(
    model: PreTrainedModel, backend: str, device: torch.device | None = None
) -> None:
    """Keep the boundaries that `backend` gives its attention for padded rows from the mixers.

    Few of their kernels take any, and these in one row alone: else there is a ValueError. Costs a
    forward pass of two rows of four tokens.
    """
    import torch

    device = device or model.device
    ids = torch.arange(8, device=device).view(2, 4) % model.config.get_text_config().vocab_size
    inputs = attention_inputs(model, backend, [[4], [4]], ids)
    if "cu_seq_lens_q" not in inputs:
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, **inputs)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        isolate_mixers(model, device, partial(attention_inputs, model, backend))
    finally:
        model.train(was_training)


def _seen(model: PreTrainedModel, backend: str, device: torch.device) -> float | None:
    """Return by how much an edit changes another document, as a share of its own change.

    None where the other one does not see it. A second edit where the first one is suspicious: an
    expert's products round differently with other numbers of rows, which may break a tie between
    experts.
    """
    share = 0.0
    for shift in EDITS:
        try:
            own, others, limit = _effects_of_edit(model, backend, device, shift)
        except ValueError as error:
            if has_isolated_mixers(model) or isinstance(error, UserError):
                raise
            return 1.0  # transformers knows that a layer cannot keep them apart
        if own <= limit:
            raise ValueError(
                f"attention={backend}: the isolation probe saw no effect of its own edit"
            )
        if not others > limit:  # also where weights are NaN, which is not attention's fault
            return None
        share = others / own
    return share


def _eager_isolates(model: PreTrainedModel, backend: str, device: torch.device) -> bool:
    """Return whether eager attention keeps the documents apart."""
    if backend == "eager" or not model._can_set_attn_implementation():
        return False
    try:
        with use_backend(model, "eager"):
            _, others, limit = _effects_of_edit(model, "eager", device, EDITS[0])
    except (UserError, RuntimeError):  # transformers before 5.14 gives recurrent layers its mask
        return False
    return others <= limit


def _effects_of_edit(
    model: PreTrainedModel, backend: str, device: torch.device, shift: int
) -> tuple[float, float, float]:
    """Return how far an edit moves its own document's logits and the other's, and the rounding.

    Each is the largest of the document's tokens. Rounding is measured by how far an edit of the
    second document moves the first one, whose tokens all come before it.
    """
    import torch

    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(8, device=device).unsqueeze(0) % vocab_size
    edits = [tokens.clone(), tokens.clone()]
    for edited, document in zip(edits, (slice(0, 4), slice(4, 8)), strict=True):
        edited[0, document] = (edited[0, document] + shift) % vocab_size
    inputs = attention_inputs(model, backend, [[4, 4]], tokens)
    position_ids = torch.arange(4, device=device).repeat(1, 2)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, first_edited, second_edited = (
            model(input_ids=ids, position_ids=position_ids, use_cache=False, **inputs).logits[0]
            for ids in (tokens, *edits)
        )
    model.train(was_training)
    moved = distances(logits, first_edited)
    noise = 4 * distances(logits, second_edited)[:4].max().item()
    least, most = (rounding(model, logits, ulps, MIN_SHARE) for ulps in (MIN_ULPS, MAX_ULPS))
    limit = min(max(noise, least), most)
    return moved[:4].max().item(), moved[4:].max().item(), limit


def check_pair_isolation(
    model: PreTrainedModel, backend: str, device: torch.device | None = None, *, is_packed: bool
) -> None:
    """Raise UserError if a document's logits depend on what it shares a batch with.

    For encoder-decoder models; costs two forward passes of nine and five tokens, on `device` or the
    model's. Packed, a document is compared before one neighbour and after another: if it sees
    either, or positions count from the row's start, its logits differ. Padded, the padding's tokens
    change.
    """
    device = device or model.device
    difference, limit = _pair_difference(model, backend, device, is_packed=is_packed)
    if difference > limit:
        raise UserError(
            f"attention={backend}: {_fault(is_packed)} (logits differ by {difference:.2g}): "
            f"type {_instead_of_pairs(model, backend, device, is_packed=is_packed)}"
        )


def _pair_difference(
    model: PreTrainedModel, backend: str, device: torch.device, *, is_packed: bool
) -> tuple[float, float]:
    """Return how far a document's logits move with what is around it, and the rounding error."""
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad(), use_backend(model, backend):
        logits, others = (_moved if is_packed else _padded)(model, backend, device)
    model.train(was_training)
    # Of equal shapes, so that rounding is small: a wrong position changes far more.
    return distances(logits, others).max().item(), rounding(model, logits, MAX_ULPS, MIN_SHARE)


def _instead_of_pairs(
    model: PreTrainedModel, backend: str, device: torch.device, *, is_packed: bool
) -> str:
    """Return what to type to keep the documents of this model apart, after trying it."""
    choices = {"packing=none": backend} if is_packed else {}
    if backend != "eager":
        choices["attention=eager packing=none" if is_packed else "attention=eager"] = "eager"
    for words, other in choices.items():
        difference, limit = _pair_difference(model, other, device, is_packed=False)
        if difference <= limit:
            return words
    return "model.path=ANOTHER_BASE"


def _fault(is_packed: bool) -> str:
    if is_packed:
        return "documents packed together see each other, or begin at wrong positions"
    return "documents see the padding after them"


def distances(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the RMS difference of each token's logits [tokens, vocabulary]: [tokens].

    The mean of a token's logits, such as a head's bias, changes no probability and is taken off.
    """
    difference = logits.float() - others.float()
    return _spread(difference)


def rounding(model: PreTrainedModel, logits: torch.Tensor, ulps: float, floor: float) -> float:
    """Return the RMS rounding error of `logits` [tokens, vocabulary].

    `ulps` units in the last place of their spread, at least `floor` of it; and half a unit of their
    mean, to which the last sum rounds them.
    """
    eps = _precision(model, logits)
    spread = _spread(logits.float()).square().mean().sqrt().item()
    shared = logits.float().mean(-1).abs().max().item()
    return max(ulps * eps, floor) * spread + eps / 2 * shared


def _spread(logits: torch.Tensor) -> torch.Tensor:
    return (logits - logits.mean(-1, keepdim=True)).square().mean(-1).sqrt()


def _precision(model: PreTrainedModel, logits: torch.Tensor) -> float:
    """Return the coarsest machine epsilon of weights, autocast and matrix products."""
    import torch

    device = logits.device.type
    dtypes = [logits.dtype, model.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return eps if is_exact else max(eps, TF32_EPS)


def _moved(
    model: PreTrainedModel, backend: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [3, vocabulary] of a document before one neighbour, and after another."""
    import torch

    source, target = _ids(model, device, 4, 3)
    others, other_targets = _ids(model, device, 10, 4)
    first = torch.cat([source, others[:5]]), torch.cat([target, other_targets[:2]])
    second = torch.cat([others[5:], source]), torch.cat([other_targets[2:], target])
    before = _pair_logits(model, backend, *first, [4, 5], [3, 2])
    return before[:3], _pair_logits(model, backend, *second, [5, 4], [2, 3])[2:]


def _padded(
    model: PreTrainedModel, backend: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [3, vocabulary] of a document before two kinds of padding."""
    import torch

    source, target = _ids(model, device, 4, 3)
    padding, other_padding = _ids(model, device, 10, 4)
    first = torch.cat([source, padding[:5]]), torch.cat([target, other_padding[:2]])
    second = torch.cat([source, padding[5:]]), torch.cat([target, other_padding[2:]])
    before = _pair_logits(model, backend, *first, [4], [3])
    return before[:3], _pair_logits(model, backend, *second, [4], [3])[:3]


def _ids(model: PreTrainedModel, device: torch.device, *lengths: int) -> tuple[torch.Tensor, ...]:
    """Return two ranges of token ids that start at different tokens."""
    import torch

    vocab_size = model.config.get_text_config().vocab_size
    return tuple(torch.arange(n, n + n, device=device) % vocab_size for n in lengths)


def _pair_logits(
    model: PreTrainedModel,
    backend: str,
    sources: torch.Tensor,
    targets: torch.Tensor,
    source_lengths: list[int],
    target_lengths: list[int],
) -> torch.Tensor:
    ids = {"input_ids": sources.unsqueeze(0), "decoder_input_ids": targets.unsqueeze(0)}
    inputs = pair_inputs(model, backend, [source_lengths], [target_lengths], *ids.values())
    logits: torch.Tensor = model(**ids, use_cache=False, **inputs).logits[0]
    return logits


def check_causal(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Raise UserError where tokens see those after them, as in a BERT.

    Such a model would see the answers that it is trained on. Costs two forward passes of eight
    tokens, on `device` or the model's.
    """
    import torch

    vocab_size = model.config.get_text_config().vocab_size
    device = device or model.device
    ids = torch.arange(FIRST_ID, FIRST_ID + CAUSAL_TOKENS, device=device).unsqueeze(0) % vocab_size
    edited, half = ids.clone(), CAUSAL_TOKENS // 2
    edited[0, half:] = (edited[0, half:] + CAUSAL_TOKENS) % vocab_size
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, others = (
            model(input_ids=one, use_cache=False).logits[0, :half].float() for one in (ids, edited)
        )
    model.train(was_training)
    # The median token: one or two may get another expert by rounding.
    moved = (logits - others).std(-1).median()
    if moved > VISIBLE_CHANGE * logits.std(-1).mean():
        kind, fields = model.config.model_type, ("is_decoder", "causal")
        causal = next((one for one in fields if getattr(model.config, one, None) is False), None)
        other = f'; one is causal where its config.json says "{causal}": true' if causal else ""
        raise UserError(
            f"{kind} models let a token see those after it, so that this one would see the answers "
            f"that it is trained on: type model.path=ANOTHER_BASE{other}"
        )


def check_against_eager(
    model: PreTrainedModel, backend: str, device: torch.device | None = None, *, is_packed: bool
) -> None:
    """Raise UserError if a document's logits are not those of the model's own eager attention.

    Packed, the document comes after another one; padded, before padding; the reference is the
    document alone. Windows and chunks are shortened meanwhile, so that the document is longer. For
    causal models; costs two forward passes of 17 and 12 tokens, on `device` or the model's.
    """
    if backend != "eager" and not model._can_set_attn_implementation():
        return  # layers of a class of their own cannot run another attention
    probe = partial(_difference, model, device or model.device)
    difference, limit = probe(backend, is_packed)
    if difference <= limit or math.isnan(limit):  # NaN weights are not attention's fault
        return
    others = {"attention=eager": ("eager", is_packed)} if backend != "eager" else {}
    if is_packed:
        others["packing=none"] = (backend, False)
    agree = (words for words, other in others.items() if operator.le(*probe(*other)))
    instead = next(agree, "model.path=ANOTHER_BASE")
    raise UserError(
        f"attention={backend}: {model.config.model_type} models compute other logits for a "
        f"document in a {'pack' if is_packed else 'padded row'} than for the same document alone "
        f"with their own eager attention (difference {difference:.2g}, rounding {limit:.2g}): "
        f"type {instead}"
    )


def _difference(
    model: Any, device: torch.device, backend: str, is_packed: bool
) -> tuple[float, float]:
    """Return the difference of the logits, and the rounding error."""
    import torch

    lengths = [NEIGHBOUR_TOKENS, DOCUMENT_TOKENS] if is_packed else [DOCUMENT_TOKENS]
    vocab_size = model.config.get_text_config().vocab_size
    num_tokens = NEIGHBOUR_TOKENS + DOCUMENT_TOKENS
    ids = torch.arange(FIRST_ID, FIRST_ID + num_tokens, device=device).unsqueeze(0) % vocab_size
    start = sum(lengths) - DOCUMENT_TOKENS
    document = slice(start, start + DOCUMENT_TOKENS)
    was_training = model.training
    model.eval()
    with torch.no_grad(), _short_reaches(model):
        with use_backend(model, backend):
            found = _found(model, backend, ids, lengths)[document]
        with use_backend(model, "eager"):
            expected = model(input_ids=ids[:, document], use_cache=False).logits[0]
    model.train(was_training)
    # The median token: one or two may get another expert by rounding.
    difference = distances(found, expected)[1:].median().item()
    return difference, rounding(model, expected, KERNEL_ULPS, KERNEL_MIN_SHARE)


def _found(model: Any, backend: str, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    import torch

    inputs = attention_inputs(model, backend, [lengths], ids)
    if len(lengths) > 1:  # else the model computes positions itself, as in training
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs["position_ids"] = torch.zeros_like(ids)
        inputs["position_ids"][0, : len(positions)] = positions.to(ids.device)
    try:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    except MASK_ERRORS as error:
        if backend == "eager":
            raise
        raise UserError(
            f"attention={backend}: {model.config.model_type} models read the attention mask as "
            f"only eager attention builds it ({type(error).__name__}: {error}): "
            "type attention=eager"
        ) from error
    return logits


@contextmanager
def _short_reaches(model: torch.nn.Module) -> Iterator[None]:
    """Shorten the windows and chunks of a model's configs and layers to `REACH` tokens."""
    from transformers import PreTrainedModel

    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    holders = [*model.modules(), *configs, *(config.get_text_config() for config in configs)]
    before = [
        (holder, name, reach)
        for holder in holders
        for name in REACHES
        if type(reach := vars(holder).get(name)) is int and reach > REACH
    ]
    for holder, name, _ in before:
        setattr(holder, name, REACH)
    try:
        yield
    finally:
        for holder, name, reach in before:
            setattr(holder, name, reach)
