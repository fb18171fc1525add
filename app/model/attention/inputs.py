"""Build the arguments of a model's forward that keep the documents of a batch apart.

With attention=flex, PyTorch's `flex_attention`, these are a block mask built from document lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig

from app.model.attention.backends import BY_CLASS, batching_error, packing_error
from app.model.attention.documents import (
    Lengths,
    RowSlices,
    boundary_arguments,
    group_documents,
    group_pairs,
    place_documents,
    place_in_chunks,
    to_device,
)
from app.model.attention.mixers import masks_recurrent_layers, mixer_inputs
from common.errors import UserError
from data_modules import SequenceSlice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLEX_BLOCK = 128
"""tokens per block of PyTorch's kernels"""


def attention_inputs(
    model: PreTrainedModel,
    backend: str,
    document_lengths: Lengths,
    ids: Tensor,
    sequence: SequenceSlice | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments with which a model's forward keeps documents apart.

    Computed once per batch. `ids` [rows, tokens]: the model's input, the slice `sequence` of rows
    whose other slices other ranks hold; None for whole rows.
    """
    _check_batch(model, document_lengths)
    if sequence is not None and sequence.ranks is not None:
        return _sliced_inputs(model, backend, document_lengths, ids, sequence, sequence.ranks)
    inputs: dict[str, Any] = {"attention_mask": None}
    if has_attention(model):
        inputs = _mask_inputs(model, backend, document_lengths, ids)
    return inputs | mixer_inputs(model, document_lengths, _shape(ids), ids.device)


def _sliced_inputs(
    model: PreTrainedModel,
    backend: str,
    document_lengths: Lengths,
    ids: Tensor,
    sequence: SequenceSlice,
    ranks: ProcessGroup,
) -> dict[str, Any]:
    """Return the inputs of a slice: its mask, and the documents of whole rows and its own."""
    rows, tokens = _shape(ids)
    whole = ids.new_zeros(()).expand(rows, tokens * ranks.size())
    inputs = mixer_inputs(model, document_lengths, _shape(whole), ids.device, ranks)
    if not has_attention(model):
        return inputs | {"attention_mask": None}
    pieces = place_in_chunks(document_lengths, whole.shape[1], sequence.chunks)
    begun = {}
    if lengths := [length for piece in pieces for length in piece.begun]:
        begun = _mask_inputs(model, backend, [lengths], whole.new_zeros(1, sum(lengths)))
        del begun["attention_mask"]
    inputs |= _mask_inputs(model, backend, document_lengths, whole)
    slices = RowSlices(ranks=ranks, pieces=pieces, begun=begun)
    return inputs | {"attention_mask": _placeholder_mask(model, ids), "exchange": slices}


def has_attention(model: PreTrainedModel) -> bool:
    """Return whether a model has any attention layer; Mamba has none, and needs no mask."""
    text = model.config.get_text_config()
    # Not by getattr, which fails if the number differs by layer.
    name = text.attribute_map.get("num_attention_heads", "num_attention_heads")
    return text.__dict__.get(name) is not None


def _mask_inputs(
    model: PreTrainedModel, backend: str, document_lengths: Lengths, ids: Tensor
) -> dict[str, Any]:
    # Not the model's device: its weights may be offloaded to host memory between passes.
    shape, device = _shape(ids), ids.device
    model_type, is_packed = model.config.model_type, any(len(row) > 1 for row in document_lengths)
    if backend == "sdpa":
        return {
            "attention_mask": _placeholder_mask(model, ids),
            "documents": group_documents(document_lengths, shape, device),
        }
    if is_packed and len(document_lengths) > 1 and backend in BY_CLASS.get(model_type, ()):
        raise UserError(
            f"attention={backend} of {model_type} models would let packed documents see each "
            "other if a batch has several rows: type trainer.micro_batch_size=1, or attention=eager"
        )
    if backend == "eager":
        if all(len(lengths) == 1 for lengths in document_lengths):
            # Causal attention never sees the padding at a row's end.
            return {"attention_mask": torch.ones_like(ids)}
        build = partial(_dense_mask, document_lengths, shape, device, model.dtype)
        return {"attention_mask": _by_layer(model, backend, build)}
    if backend == "flex":
        build = partial(block_mask, document_lengths, shape, device)
        return {"attention_mask": _by_layer(model, backend, build)}
    # For rows of one document, too: transformers would search for boundaries in every layer, and
    # wait for the device.
    boundaries = boundary_arguments(place_documents(document_lengths, shape[1]), device)
    mask = _placeholder_mask(model, ids) if backend == "varlen" else None
    return {"attention_mask": mask} | boundaries


def _check_batch(model: PreTrainedModel, *sides: Lengths) -> None:
    """Raise UserError if no attention keeps the documents of this batch apart in `model`.

    `sides`: document lengths by row, for each sequence that the model reads.
    """
    config = _config_values(model.config)
    is_packed = any(len(row) > 1 for side in sides for row in side)
    longest = max((length for side in sides for row in side for length in row), default=None)
    if is_packed and (reason := packing_error(config)):
        raise UserError(f"{reason}: type packing=none")
    if reason := batching_error(config, longest):
        raise UserError(reason)


def _config_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return a config's values by their names in config.json, without the deep copy of `to_dict`.

    It is called once per batch.
    """
    parts = {
        name: _config_values(value) if isinstance(value, PretrainedConfig) else value
        for name, value in vars(config).items()
    }
    return parts | {"model_type": config.model_type}


def _placeholder_mask(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return a mask of ones for our attention, which ignores it.

    Without a mask, transformers would search the positions for documents, and wait for the device.
    [rows, tokens], or [rows, 1, tokens] for a model with recurrent layers, for which transformers
    would test whether all entries are ones, and wait for the device. It expects padding only in
    masks of two dimensions.
    """
    mask = torch.ones_like(ids)
    return mask.unsqueeze(1) if masks_recurrent_layers(model) else mask


def _by_layer(model: PreTrainedModel, backend: str, build: Callable[..., Any]) -> Any:
    config = model.config.get_text_config().to_dict()
    window, layer_types = config.get("sliding_window"), config.get("layer_types")
    if layer_types is None:
        return build(window=window)
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = set(layer_types)
    if not kinds <= windows.keys():
        if backend == "eager":
            return None  # the model builds its own masks from the positions
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
) -> Tensor:
    """Return an additive mask [rows, 1, tokens, tokens]: 0 where a query sees the key.

    `window`: most tokens that a token sees, itself included.
    """
    rows, tokens = shape
    document = torch.zeros(rows, tokens, dtype=torch.int64)
    for row, lengths in enumerate(document_lengths):
        ends = torch.tensor(lengths).cumsum(0)
        document[row] = torch.bucketize(torch.arange(tokens), ends, right=True)
    # Not made on the host: a mask of 8,192 tokens takes 128 MiB.
    document = to_device(document, device)
    visible = (document.unsqueeze(2) == document.unsqueeze(1)).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    # transformers' eager attention misreads Boolean masks.
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def pair_inputs(
    model: PreTrainedModel,
    backend: str,
    source_lengths: Lengths,
    target_lengths: Lengths,
    source_ids: Tensor,
    target_ids: Tensor,
) -> dict[str, Any]:
    """Return the keyword arguments with which an encoder-decoder model keeps documents apart.

    Computed once per batch. `source_ids`, `target_ids` [rows, tokens]: the inputs of encoder and
    decoder. Raises UserError if packed documents cannot be kept apart.
    """
    _check_batch(model, source_lengths, target_lengths)
    if backend != "sdpa" and any(len(lengths) > 1 for lengths in source_lengths):
        raise UserError(
            f"attention={backend} gives encoder and cross-attention one mask, which cannot keep "
            "packed documents apart: type packing=none"
        )
    device, (_, tokens) = source_ids.device, _shape(source_ids)
    if backend == "sdpa":
        shapes = _shape(source_ids), _shape(target_ids)
        groups = group_pairs(source_lengths, target_lengths, *shapes, device)
        return {"attention_mask": None, "documents": groups}
    # 1 at tokens, 0 at padding; all 1 in a row without documents.
    ends = torch.tensor([sum(row) or tokens for row in source_lengths]).unsqueeze(1)
    return {"attention_mask": (torch.arange(tokens).unsqueeze(0) < ends).long().to(device)}


def _shape(ids: Tensor) -> tuple[int, int]:
    return ids.shape[0], ids.shape[1]


def attend_by_blocks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call the kernel as transformers does; without a mask, every row is one document.

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads (GQA). Returns
    [rows, tokens, heads, head_dim].
    """
    from transformers.integrations.flex_attention import flex_attention_forward

    from app.model.attention.attend import cast_to_one_dtype

    # As in transformers: a layer without the attribute is causal.
    if attention_mask is None and getattr(module, "is_causal", True):
        rows, _, tokens, _ = query.shape
        documents = [[tokens]] * rows
        attention_mask = block_mask(documents, (rows, tokens), query.device, window=sliding_window)
    if query.is_cuda and query.shape[2] < FLEX_BLOCK:
        # PyTorch would choose its decoding kernel, for which these blocks are too large.
        options["kernel_options"] = {"BACKEND": "TRITON"}
    parts = cast_to_one_dtype(query, key, value)
    attended: tuple[Tensor, Tensor | None] = flex_attention_forward(
        module, *parts, attention_mask, **options
    )
    return attended


def block_mask(
    document_lengths: Lengths, shape: tuple[int, int], device: torch.device, *, window: int | None
) -> BlockMask:
    """Build the mask of a batch: a token sees its document's past, at most `window` tokens.

    `shape`: rows and tokens. Computed from the document lengths, never as a matrix of tokens.
    """
    first = _first_visible_keys(document_lengths, shape, window)
    blocks = first.unflatten(1, (-1, FLEX_BLOCK))
    lowest, highest = blocks.amin(2).unsqueeze(2), blocks.amax(2).unsqueeze(2)
    number = torch.arange(blocks.shape[1])
    is_past = number.unsqueeze(0) < number.unsqueeze(1)
    is_needed = (is_past | torch.eye(len(number), dtype=torch.bool)) & (
        (number + 1) * FLEX_BLOCK > lowest
    )
    is_whole = is_past & (number * FLEX_BLOCK >= highest)
    first = first.to(device)

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[row, query] <= key) & (key <= query)

    mask: BlockMask = BlockMask.from_kv_blocks(
        *_list_key_blocks(is_needed & ~is_whole),
        *_list_key_blocks(is_whole),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(shape[1], shape[1]),
    )
    return mask.to(device)


def _first_visible_keys(
    document_lengths: Lengths, shape: tuple[int, int], window: int | None
) -> Tensor:
    """Return the column of the first key that each query sees, [rows, tokens padded to a block].

    The padding of a row counts as one more document.
    """
    rows, tokens = shape
    padded = -(-tokens // FLEX_BLOCK) * FLEX_BLOCK
    first = torch.empty(rows, padded, dtype=torch.int32)
    for row, documents in enumerate(document_lengths):
        lengths = torch.tensor([*documents, padded - sum(documents)])
        starts = lengths.cumsum(0) - lengths
        first[row] = starts.repeat_interleave(lengths)
    if window is not None:
        first = torch.maximum(first, torch.arange(padded, dtype=torch.int32) + 1 - window)
    return first


def _list_key_blocks(is_chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and indices that start with these."""
    counts = is_chosen.sum(-1, dtype=torch.int32)
    numbers = is_chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts.unsqueeze(1), numbers.unsqueeze(1)
