"""Check before training that a model is causal, and attends as its own eager attention."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.attention.backends import running
from app.model.attention.inputs import attention_inputs
from app.model.attention.isolation import distances, rounding
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


FIRST_ID, TOKENS = 3, 8
SEEN = 0.02
"""least change of a token's logits that shows it sees an edit, as a share of their spread"""


def check_causal(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Raise UserError where tokens see those after them, as in a BERT.

    Such a model would see the answers that it is trained on. Costs two forward passes of eight
    tokens, on `device` or the model's.
    """
    import torch

    vocab_size = model.config.get_text_config().vocab_size
    device = device or model.device
    ids = torch.arange(FIRST_ID, FIRST_ID + TOKENS, device=device).unsqueeze(0) % vocab_size
    edited, half = ids.clone(), TOKENS // 2
    edited[0, half:] = (edited[0, half:] + TOKENS) % vocab_size
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, others = (
            model(input_ids=one, use_cache=False).logits[0, :half].float() for one in (ids, edited)
        )
    model.train(was_training)
    # The median token: one or two may get another expert by rounding.
    moved = (logits - others).std(-1).median()
    if moved > SEEN * logits.std(-1).mean():
        raise UserError(
            f"{model.config.model_type} models let a token see those after it, so that this one "
            "would see the answers that it is trained on: type model.path=ANOTHER_BASE; "
            'a BERT is causal where its config.json says "is_decoder": true'
        )


BEFORE, TOKENS = 5, 12
"""tokens of the neighbour, and of the document after it"""
FIRST_ID = 3
REACH = 3
"""length of windows and chunks during the probe, shorter than its document"""
REACHES = ("sliding_window", "attention_chunk_size")
"""names of windows and chunks in configs and layers"""
ULPS, FLOOR = 24, 1e-3
"""rounding error between kernels: units in the last place, and a minimal share of the spread"""
NOT_TAKEN = (TypeError, AttributeError, IndexError)
"""errors of a model that cannot read our masks"""


def check_reference(
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

    lengths = [BEFORE, TOKENS] if is_packed else [TOKENS]
    vocab_size = model.config.get_text_config().vocab_size
    # Not the first ids: these are special tokens, and padding to some models.
    ids = torch.arange(FIRST_ID, FIRST_ID + BEFORE + TOKENS, device=device) % vocab_size
    ids, start = ids.unsqueeze(0), sum(lengths) - TOKENS
    document = slice(start, start + TOKENS)
    was_training = model.training
    model.eval()
    with torch.no_grad(), _short_reaches(model):
        with running(model, backend):
            found = _found(model, backend, ids, lengths)[document]
        with running(model, "eager"):
            expected = model(input_ids=ids[:, document], use_cache=False).logits[0]
    model.train(was_training)
    # The median token: one or two may get another expert by rounding.
    difference = distances(found, expected)[1:].median().item()
    return difference, rounding(model, expected, ULPS, FLOOR)


def _found(model: Any, backend: str, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    import torch

    inputs = attention_inputs(model, backend, [lengths], ids)
    if len(lengths) > 1:  # else the model computes positions itself, as in training
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs["position_ids"] = torch.zeros_like(ids)
        inputs["position_ids"][0, : len(positions)] = positions.to(ids.device)
    try:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    except NOT_TAKEN as error:
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
