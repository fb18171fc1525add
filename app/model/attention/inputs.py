"""Arguments of a model's forward by which its layers keep the documents of a batch apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.attention.backends import BY_CLASS, why_not_batched, why_not_packed
from app.model.attention.documents import Lengths, group_documents, group_pairs, to_device
from app.model.attention.flex import block_mask
from app.model.attention.mixers import masks_recurrent_layers, mixer_inputs
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def attention_inputs(
    model: PreTrainedModel,
    backend: str,
    document_lengths: Lengths,
    ids: torch.Tensor,
) -> dict[str, Any]:
    """Compute what a model's forward needs to keep documents apart, once per batch.

    `ids` [rows, tokens] are its input; the result is passed to it as keyword arguments.
    """
    _check_batch(model, document_lengths)
    inputs: dict[str, Any] = {"attention_mask": None}
    if _has_attention(model):
        inputs = _inputs_of_attention(model, backend, document_lengths, ids)
    return inputs | mixer_inputs(model, document_lengths, _shape(ids), ids.device)


def _has_attention(model: PreTrainedModel) -> bool:
    """Return whether a model has any attention, as Mamba has none: no mask is for its mixers."""
    text = model.config.get_text_config()
    # Not the attribute: it is an error where the number differs by layer.
    name = text.attribute_map.get("num_attention_heads", "num_attention_heads")
    return text.__dict__.get(name) is not None


def _inputs_of_attention(
    model: PreTrainedModel, backend: str, document_lengths: Lengths, ids: torch.Tensor
) -> dict[str, Any]:
    # Not the model's device: its weights may be in host memory between two passes.
    shape, device = _shape(ids), ids.device
    kind, is_packed = model.config.model_type, any(len(row) > 1 for row in document_lengths)
    if backend == "sdpa":
        return {
            "attention_mask": _unread_mask(model, ids),
            "documents": group_documents(document_lengths, shape, device),
        }
    if is_packed and len(document_lengths) > 1 and backend in BY_CLASS.get(kind, ()):
        raise UserError(
            f"attention={backend} of {kind} models would let the documents of a pack see each "
            "other where a batch has several: type trainer.micro_batch_size=1, or attention=eager"
        )
    if backend == "eager":
        return {"attention_mask": _dense_masks(model, document_lengths, ids)}
    if backend == "flex":
        build = partial(block_mask, document_lengths, shape, device)
        return {"attention_mask": _by_layer(model, backend, build)}
    boundaries = _boundaries(document_lengths, shape, device)
    mask = _unread_mask(model, ids) if backend == "varlen" else None
    return {"attention_mask": mask} | boundaries


def _check_batch(model: PreTrainedModel, *sides: Lengths) -> None:
    """Raise UserError where no attention keeps the documents of this batch apart in `model`.

    `sides`: document lengths by row, of each sequence that the model reads.
    """
    numbers = _config_numbers(model.config)
    is_packed = any(len(row) > 1 for side in sides for row in side)
    longest = max((length for side in sides for row in side for length in row), default=None)
    if is_packed and (reason := why_not_packed(numbers)):
        raise UserError(f"{reason}: type packing=none")
    if reason := why_not_batched(numbers, longest):
        raise UserError(reason)


def _config_numbers(config: PretrainedConfig) -> dict[str, Any]:
    """Return a config as config.json has it, without the deep copy of `to_dict`: once per batch."""
    from transformers import PretrainedConfig

    parts = {
        name: _config_numbers(value) if isinstance(value, PretrainedConfig) else value
        for name, value in vars(config).items()
    }
    return parts | {"model_type": config.model_type}


def _whole_rows(ids: torch.Tensor) -> torch.Tensor:
    """Return a mask [rows, tokens] of ones: documents and padding are up to our attention.

    Without a mask, transformers looks for documents in the positions, and waits for the device.
    """
    import torch

    return torch.ones_like(ids)


def _unread_mask(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return ones for our attention, which reads none: [rows, tokens], or [rows, 1, tokens].

    The latter where transformers would ask for recurrent layers whether all are ones, and wait for
    the device: it reads no padding in other than two dimensions.
    """
    mask = _whole_rows(ids)
    return mask.unsqueeze(1) if masks_recurrent_layers(model) else mask


def _dense_masks(model: PreTrainedModel, document_lengths: Lengths, ids: torch.Tensor) -> Any:
    if all(len(lengths) == 1 for lengths in document_lengths):
        return _whole_rows(ids)  # the padding at a row's end cannot be seen by causal attention
    build = partial(_dense_mask, document_lengths, _shape(ids), ids.device, model.dtype)
    return _by_layer(model, "eager", build)


def _by_layer(model: PreTrainedModel, backend: str, build: Callable[..., Any]) -> Any:
    """Return one mask, or one by layer type where these differ."""
    numbers = model.config.get_text_config().to_dict()
    window, layer_types = numbers.get("sliding_window"), numbers.get("layer_types")
    if layer_types is None:
        return build(window=window)
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = set(layer_types)
    if not kinds <= windows.keys():
        if backend == "eager":
            return None  # the model builds its own from the positions
        raise UserError(
            f"attention={backend} has no mask for "
            f"{', '.join(sorted(kinds - windows.keys()))} layers: type attention=sdpa"
        )
    masks = {kind: build(window=windows[kind]) for kind in sorted(kinds)}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _dense_mask(
    document_lengths: Lengths,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: int | None,
) -> torch.Tensor:
    """Additive [rows, 1, tokens, tokens] mask: 0 inside a document's past, else the minimum."""
    import torch

    rows, tokens = shape
    document = torch.zeros(rows, tokens, dtype=torch.int64)
    for row, lengths in enumerate(document_lengths):
        ends = torch.tensor(lengths).cumsum(0)
        document[row] = torch.bucketize(torch.arange(tokens), ends, right=True)
    visible = (document.unsqueeze(2) == document.unsqueeze(1)).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    # Boolean masks are read wrongly by transformers' eager attention.
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return mask.unsqueeze(1).to(device)


def _boundaries(
    document_lengths: Lengths, shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    """Return the boundaries of documents, counted through all rows, by transformers' names.

    The padding of a row counts as one more document. Rows of one document have boundaries, too:
    else transformers looks for some in every layer, and waits for the device.
    """
    import torch

    _, tokens = shape
    lengths = [n for row in document_lengths for n in (*row, tokens - sum(row)) if n]
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    boundaries = to_device(ends, device)
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def pair_inputs(
    model: PreTrainedModel,
    backend: str,
    source_lengths: Lengths,
    target_lengths: Lengths,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
) -> dict[str, Any]:
    """Compute what an encoder-decoder model's forward needs, once per batch.

    ids [rows, tokens]: the input of encoder and decoder. UserError where the documents of a pack
    cannot be kept apart.
    """
    _check_batch(model, source_lengths, target_lengths)
    if backend != "sdpa" and any(len(lengths) > 1 for lengths in source_lengths):
        raise UserError(
            f"attention={backend} gives encoder and cross-attention one mask, which cannot "
            "keep the documents of a pack apart: type packing=none"
        )
    device = source_ids.device
    if backend == "sdpa":
        shapes = _shape(source_ids), _shape(target_ids)
        groups = group_pairs(source_lengths, target_lengths, *shapes, device)
        return {"attention_mask": None, "documents": groups}
    return {"attention_mask": _padding_mask(source_lengths, _shape(source_ids), device)}


def _shape(ids: torch.Tensor) -> tuple[int, int]:
    return ids.shape[0], ids.shape[1]


def _padding_mask(lengths: Lengths, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Mask [rows, tokens]: 1 at tokens, 0 at padding; a row without any document is all tokens."""
    import torch

    ends = torch.tensor([sum(row) or shape[1] for row in lengths]).unsqueeze(1)
    return (torch.arange(shape[1]).unsqueeze(0) < ends).long().to(device)
