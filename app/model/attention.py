"""Which attention runs, and how the documents of a batch are kept apart from each other.

A packed batch holds many documents in one row. Here is decided how no token sees another
document; boundaries come from the batch, are turned into indices once, and every layer gets them.
A model that would not hand them on to its layers is refused by `check_isolation`, not trusted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

BACKENDS = ("auto", "sdpa", "eager", "flash2")
BY_DOCUMENT = "sdpa_by_document"
"""the name under which transformers knows our attention function"""

MAX_PADDED_SHARE = 1.25
"""documents are attended to together while padding them to one length costs at most this factor"""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    backend: str = "auto"
    """auto: flash2 where CUDA and flash-attn are, else sdpa; eager: the slow reference"""


def choose_backend(
    config: AttentionConfig, architecture: PretrainedConfig, accelerator: str, precision: str
) -> str:
    """Resolve `auto` to the fastest backend that this model, device and precision can run.

    ValueError when the typed one cannot compute this model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(architecture) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(architecture)] if known else None
    has_sdpa = model_class is None or (
        model_class._supports_sdpa and model_class._can_set_attn_implementation()
    )
    if config.backend == "sdpa" and not has_sdpa:
        raise ValueError(
            f"attention=sdpa: {architecture.model_type} models compute their attention themselves; "
            "type attention=eager"
        )
    if config.backend != "auto":
        return config.backend
    if not has_sdpa:
        return "eager"
    flash_installed = importlib.util.find_spec("flash_attn") is not None
    can_flash = accelerator == "gpu" and precision != "fp32" and flash_installed
    return "flash2" if can_flash else "sdpa"


def attention_implementation(backend: str) -> str:
    """Name of `backend` in transformers; registers ours there."""
    if backend == "sdpa":
        from transformers import AttentionInterface

        # It has no mask function on purpose: transformers then builds no mask of its own.
        AttentionInterface.register(BY_DOCUMENT, attend_by_document)
    return {"sdpa": BY_DOCUMENT, "eager": "eager", "flash2": "flash_attention_2"}[backend]


@dataclass(slots=True)
class DocumentGroups:
    """Documents of like length, to be attended to as dense causal batches.

    `gather[i]` [documents, longest]: flat positions (row * tokens + column) of group i's tokens;
    the padding at a short document's end repeats its last token, which no real token can see.
    `restore` [rows * tokens]: where each flat position's output lies in the groups' outputs.
    """

    gather: list[torch.Tensor]
    restore: torch.Tensor


def group_documents(
    document_lengths: Sequence[Sequence[int]], shape: tuple[int, int], device: torch.device
) -> DocumentGroups | None:
    """Group a batch's documents by length; None when every row is one document.

    What lies beyond a row's documents is padding and counts as one more document of that row.
    """
    import torch

    if all(len(lengths) == 1 for lengths in document_lengths):
        return None
    rows, tokens = shape
    documents: list[tuple[int, int]] = []  # (length, flat start)
    for row, lengths in enumerate(document_lengths):
        start = row * tokens
        for length in (*lengths, tokens - sum(lengths)):
            if length:
                documents.append((length, start))
            start += length
    documents.sort(reverse=True)

    gather, restore, first_slot = [], torch.empty(rows * tokens, dtype=torch.int64), 0
    while documents:
        longest, real = documents[0][0], 0
        size = 0
        for size, (length, _) in enumerate(documents, start=1):
            real += length
            if longest * size > MAX_PADDED_SHARE * real:
                size -= 1
                break
        members, documents = documents[:size], documents[size:]
        lengths = torch.tensor([length for length, _ in members]).unsqueeze(1)
        starts = torch.tensor([start for _, start in members]).unsqueeze(1)
        columns = torch.arange(longest).unsqueeze(0)
        index = starts + torch.minimum(columns, lengths - 1)
        slots = first_slot + torch.arange(index.numel()).view_as(index)
        is_real = columns < lengths
        restore[index[is_real]] = slots[is_real]
        first_slot += index.numel()
        gather.append(index.to(device, non_blocking=True))
    return DocumentGroups(gather, restore.to(device, non_blocking=True))


def attend_by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: DocumentGroups | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document.

    query [rows, heads, tokens, head_dim], key and value with fewer heads where they are shared;
    returns [rows, tokens, heads, head_dim]. ValueError for variants that only `eager` computes.
    """
    import torch

    for variant in ("softcap", "s_aux", "position_bias"):
        if unsupported.get(variant) is not None:
            raise ValueError(
                f"attention=sdpa cannot compute this model's {variant}: type attention=eager"
            )
    causal = partial(_causal, dropout=dropout, scaling=scaling, window=sliding_window)
    if documents is None:
        return causal(query, key, value).transpose(1, 2), None

    rows, _, tokens, _ = query.shape
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    outputs = []
    for index in documents.gather:
        grouped = [part[index].transpose(1, 2) for part in flat]
        outputs.append(causal(*grouped).transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output[documents.restore].unflatten(0, (rows, tokens)), None


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    import torch

    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=query.device)
        distance = position.unsqueeze(1) - position.unsqueeze(0)
        mask = (distance >= 0) & (distance < window)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attention_inputs(
    model: PreTrainedModel,
    backend: str,
    document_lengths: Sequence[Sequence[int]],
    shape: tuple[int, int],
) -> dict[str, Any]:
    """Compute what a model's forward needs to keep documents apart, once per batch.

    shape is (rows, tokens); the result is passed on as keyword arguments.
    """
    device = model.device
    if backend == "sdpa":
        return {
            "attention_mask": None,
            "documents": group_documents(document_lengths, shape, device),
        }
    if backend == "eager":
        return {"attention_mask": _block_masks(model, document_lengths, shape)}
    return _flash_boundaries(document_lengths, shape, device)


def _block_masks(
    model: PreTrainedModel, document_lengths: Sequence[Sequence[int]], shape: tuple[int, int]
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Masks as the model's layers want them: one, or one a kind of layer where these differ."""
    numbers = model.config.to_dict()
    window, layer_types = numbers.get("sliding_window"), numbers.get("layer_types")
    build = partial(_block_mask, document_lengths, shape, model.device, model.dtype)
    if layer_types is None:
        return build(window=window)
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = set(layer_types)
    if not kinds <= windows.keys():
        raise ValueError(
            f"attention=eager cannot pack for {', '.join(sorted(kinds - windows.keys()))} layers: "
            "type packing=none"
        )
    masks = {kind: build(window=windows[kind]) for kind in sorted(kinds)}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _block_mask(
    document_lengths: Sequence[Sequence[int]],
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


def _flash_boundaries(
    document_lengths: Sequence[Sequence[int]], shape: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    import torch

    if all(len(lengths) == 1 for lengths in document_lengths):
        return {"attention_mask": None}  # right padding cannot be seen by causal attention
    _, tokens = shape
    lengths = [n for row in document_lengths for n in (*row, tokens - sum(row)) if n]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    boundaries = ends.to(device, non_blocking=True)
    return {
        "attention_mask": None,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


@contextmanager
def generation_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let `model.generate` use transformers' own attention, which knows caches and left padding."""
    implementation = model.config._attn_implementation
    if implementation != BY_DOCUMENT:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def check_isolation(model: PreTrainedModel, backend: str) -> None:
    """Raise ValueError if editing one document of a pack changes another one's logits.

    Costs two forward passes of eight tokens; run before training, since models differ in what they
    hand on to their layers and libraries change.
    """
    import torch

    parameter = next(model.parameters())
    vocab_size = model.get_input_embeddings().num_embeddings
    tokens = torch.arange(8, device=parameter.device).unsqueeze(0) % vocab_size
    edited = tokens.clone()
    edited[0, :4] = (edited[0, :4] + 11) % vocab_size
    inputs = attention_inputs(model, backend, [[4, 4]], (1, 8))
    position_ids = torch.arange(4, device=parameter.device).repeat(1, 2)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = [
            model(input_ids=ids, position_ids=position_ids, use_cache=False, **inputs).logits[0]
            for ids in (tokens, edited)
        ]
    model.train(was_training)
    changes = (logits[0] - logits[1]).float().abs()
    # Experts see other numbers of rows after the edit, so their products may round otherwise.
    rounding = 100 * torch.finfo(logits[0].dtype).eps * logits[0].float().abs().max().item()
    if changes[:4].max().item() <= rounding:
        raise ValueError(f"attention={backend}: the isolation probe saw no effect of its own edit")
    difference = changes[4:].max().item()
    if difference > rounding:
        raise ValueError(
            f"attention={backend}: documents packed together see each other "
            f"(logits differ by {difference:.2g}): type attention=eager, or packing=none"
        )
