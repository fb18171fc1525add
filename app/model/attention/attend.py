"""The attention function that transformers calls in every layer, and its mask: by document."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.activation_memory import WIDEST_FLASH_HEAD
from app.model.attention.documents import (
    DocumentGroups,
    PairGroups,
    place_documents,
    stack_documents,
)
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class MaskRule:
    """A window or chunk: which keys a query sees, by their positions in the document.

    transformers describes a mask by such a function of row, head, query and key. Kept as a function
    instead of a matrix over whole rows, it holds inside each document of a pack. It has no effect
    on documents up to `size` tokens.
    """

    function: Callable[..., torch.Tensor]
    size: int
    _visible: dict[int, torch.Tensor] = field(default_factory=dict)

    def visible(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the mask of a document, bool [1, 1, tokens, tokens]; cached for all layers."""
        import torch

        if tokens not in self._visible:
            zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
            position = torch.arange(tokens, device=device)
            seen = self.function(zero, zero, position.view(1, 1, -1, 1), position.view(1, 1, 1, -1))
            self._visible[tokens] = seen.expand(1, 1, tokens, tokens)
        return self._visible[tokens]


def build_mask_rule(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> MaskRule | None:
    """Return what transformers passes to layers as their mask; None where all of the past is seen.

    Registered beside our attention functions. UserError for masks of more than positions.
    """
    if use_vmap:
        raise UserError(
            "this model's attention mask depends on more than the positions of tokens, which only "
            "eager attention computes: type attention=eager packing=none"
        )
    return None if local_size is None else MaskRule(mask_function, local_size)


def attend_by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: DocumentGroups | PairGroups | None = None,
    position_bias: torch.Tensor | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Attend inside each document; without `documents`, every row is one.

    query [rows, heads, tokens, head_dim], key and value with fewer heads where they are shared;
    position_bias [1, heads, query tokens, key tokens], by distance. Returns
    [rows, tokens, heads, head_dim]. UserError for variants and masks that only `eager` computes.
    """
    if not (attention_mask is None or isinstance(attention_mask, MaskRule)):
        raise UserError(
            f"attention=sdpa cannot cut the mask that {type(module).__name__} computed of whole "
            "rows into documents: type attention=eager"
        )
    if isinstance(documents, DocumentGroups) and position_bias is not None:
        raise UserError(
            "attention=sdpa cannot cut this model's position_bias, which is of whole rows, into "
            "documents: type packing=none"
        )
    for variant in ("softcap", "s_aux"):
        if unsupported.get(variant) is not None:
            raise UserError(
                f"attention=sdpa cannot compute this model's {variant}: type attention=eager"
            )
    # The mask holds the window, which layers get as an argument for other kernels.
    window = None if attention_mask is not None else sliding_window
    attend = partial(_attend, dropout=dropout, scaling=scaling, window=window, rule=attention_mask)
    parts = (query, key, value)
    if isinstance(documents, DocumentGroups):
        from app.model.cpu import causal_attention as matmul

        longest = max(one.length for one in documents.documents)
        reach = attention_mask.size if attention_mask is not None else sliding_window
        is_full = reach is None or reach >= longest
        if is_full and matmul.is_faster(query, value, dropout):
            output = matmul.attend_causally(*in_one_dtype(*parts), documents.stacks, scaling)
            return output, None
        return _attend_causally(parts, documents, partial(attend, is_causal=True)), None
    # As in transformers: a layer without the attribute is causal.
    attend = partial(attend, is_causal=getattr(module, "is_causal", True))
    if documents is None:
        return attend(*parts, bias=position_bias).transpose(1, 2), None
    return _attend_to_pairs(module, parts, documents, position_bias, attend), None


def in_one_dtype(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast query, key and value to autocast's dtype, or without one to the values'.

    Rotary embeddings in fp32 leave queries in fp32, and autocast does not cover every kernel.
    """
    import torch

    device = query.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _attend_to_pairs(
    module: Any,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    documents: PairGroups,
    bias: torch.Tensor | None,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attend as encoder, decoder or cross-attention, by the layer's attributes."""
    if module.is_causal:
        longest = documents.decoder.gather[0].shape[1] if documents.decoder else None
        attend = partial(attend, bias=_cut(bias, longest, documents))
        return _attend_causally(parts, documents.decoder, attend)
    # Layers without the attribute mix encoder and decoder (T5Gemma 2).
    if getattr(module, "is_decoder", None) is None:
        raise UserError(
            f"attention=sdpa cannot tell encoder from decoder in {type(module).__name__}: "
            "type attention=eager packing=none"
        )
    groups = documents.cross if module.is_decoder else documents.encoder
    # No bias in cross-attention: T5 passes zeros, which would cost a mask and its gradient.
    if not module.is_decoder:
        longest = groups.groups[0].keys.shape[1] if groups else None
        attend = partial(attend, bias=_cut(bias, longest, documents))
    if groups is None:
        return attend(*parts).transpose(1, 2)
    members = ((group.queries, group.keys, group.visible) for group in groups.groups)
    return _attend_in_groups(parts, members, groups.restore, attend)


def _cut(
    bias: torch.Tensor | None, longest: int | None, documents: PairGroups
) -> torch.Tensor | None:
    """Return the bias of the longest document, cached since T5's layers share it.

    Each slice of the bias of a whole row would cost a gradient of its size.
    """
    if bias is None or longest is None:
        return bias
    if documents.cut is None or documents.cut[0] is not bias:
        documents.cut = bias, bias[..., :longest, :longest]
    return documents.cut[1]


def _attend_causally(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    groups: DocumentGroups | None,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    if groups is None:
        return attend(*parts).transpose(1, 2)
    members = ((index, index, None) for index in groups.gather)
    return _attend_in_groups(parts, members, groups.restore, attend)


def _attend_in_groups(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    groups: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    restore: torch.Tensor,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attend in each group: flat positions of queries and keys, and which keys are visible."""
    import torch

    rows, _, tokens, _ = parts[0].shape
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in parts)
    outputs = []
    for queries, keys, visible in groups:
        grouped = (part.transpose(1, 2) for part in (query[queries], key[keys], value[keys]))
        outputs.append(attend(*grouped, visible=visible).transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output[restore].unflatten(0, (rows, tokens))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    rule: MaskRule | None,
    is_causal: bool,
    visible: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense attention; `visible` bool [documents, 1, 1, keys], only where it is not causal."""
    import torch

    from app.model.activation_checkpointing import attend_once
    from app.model.cpu import causal_attention as matmul

    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = visible
    if window is not None and window >= num_queries:
        window = None
    if rule is not None and rule.size < num_keys:
        seen = rule.visible(num_keys, query.device)
        mask = seen if mask is None else mask & seen
    elif is_causal and (window is not None or bias is not None):
        position = torch.arange(num_queries, device=query.device)
        distance = position.unsqueeze(1) - position.unsqueeze(0)
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if bias is not None:
        bias = bias[..., :num_queries, :num_keys].to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    if is_causal and mask is None and matmul.is_faster(query, value, dropout):
        rows = stack_documents(place_documents([[num_queries]] * len(query), num_queries))
        parts = in_one_dtype(query, key, value)
        return matmul.attend_causally(*parts, rows, scaling).transpose(1, 2)
    if query.is_cuda and query.shape[1] != key.shape[1] and not _takes_flash(query, value, mask):
        # CUDA's other kernels take no shared heads: all scores would be kept, in fp32.
        shared = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    output: torch.Tensor = attend_once(
        torch.nn.functional.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal and mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def _takes_flash(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether PyTorch gives a GPU's attention to its FlashAttention."""
    import torch

    if torch.cuda.get_device_capability() < (8, 0):
        return False
    query, _, value = in_one_dtype(query, value, value)
    widest = max(query.shape[-1], value.shape[-1])
    return mask is None and query.dtype.itemsize == 2 and widest <= WIDEST_FLASH_HEAD
