"""attention=sdpa: the attention and mask functions, computed document by document.

Attention sinks, as gpt-oss has them, are a learned logit per head that takes a share of the
softmax. The kernels have no sinks, but return the log-sum-exp of the scores, to which a sink is
added afterwards. Their backward pass computes the probabilities from the log-sum-exp, and the sum
of probabilities times gradients from the output: given both with the sink, its gradients are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.model import cpu
from app.model.activation_checkpointing import attend_once
from app.model.attention.backends import MAX_FLASH_HEAD_DIM, SINKS_ERROR
from app.model.attention.documents import (
    DocumentGroups,
    PairGroups,
    place_documents,
    stack_documents,
)
from common.errors import UserError

BLOCK_TOKENS = 512
"""queries that attend together under a window"""
Kernel = Callable[..., Any]
Attend = Callable[..., Tensor]
Parts = tuple[Tensor, Tensor, Tensor]
"""query, key and value"""
_STATE = ("rng_state", "unused")
"""further outputs of the GPU's forward operator that its backward operator takes"""


@dataclass(slots=True)
class MaskRule:
    """A sliding window or chunk, as a rule on the positions of a query and a key in a document.

    A matrix over whole rows, as transformers builds from such a function, could not be applied to
    the documents of a pack.
    """

    function: Callable[..., Tensor]
    """(row, head, query position, key position) -> whether the query sees the key"""
    size: int
    """length of the window or chunk in tokens; shorter documents are not affected"""
    _visible: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def visible(
        self, queries: range, keys: range, device: torch.device, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the mask of positions in a document, bool [1, 1, queries, keys].

        With a `dtype`, what kernels add to the scores: 0 or -inf. Cached for all layers, and for
        the positions that are a multiple of `size` further on, where windows and chunks look the
        same.
        """
        shift = keys.start // self.size * self.size
        place = (queries.start - shift, len(queries), keys.start - shift, len(keys), dtype)
        if place not in self._visible:
            zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
            query = torch.arange(len(queries), device=device).view(1, 1, -1, 1) + place[0]
            key = torch.arange(len(keys), device=device).view(1, 1, 1, -1) + place[2]
            mask = self.function(zero, zero, query, key)
            mask = mask.expand(1, 1, len(queries), len(keys))
            if dtype is not None:
                # In lines of whole multiples of 8, to which CUDA's kernels would pad a copy.
                added = query.new_zeros(1, 1, len(queries), -(-len(keys) // 8) * 8, dtype=dtype)
                mask = added[..., : len(keys)].masked_fill_(~mask, -torch.inf)
            self._visible[place] = mask
        return self._visible[place]


def window_rule(size: int) -> MaskRule:
    """Return the rule of a causal window: a query sees itself and the `size - 1` keys before it."""
    return MaskRule(lambda row, head, query, key: (key <= query) & (key > query - size), size)


def build_mask_rule(
    *,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> MaskRule | None:
    """Build what transformers passes to layers as their mask; None for a plain causal mask.

    Registered together with our attention functions. Raises UserError for a mask that depends on
    more than positions.
    """
    if use_vmap:
        raise UserError(
            "this model's attention mask depends on more than the positions of tokens, which only "
            "eager attention computes: type attention=eager packing=none"
        )
    return None if local_size is None else MaskRule(mask_function, local_size)


def attend_by_document(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: DocumentGroups | PairGroups | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend inside each document; without `documents`, every row is one document.

    query [rows, heads, tokens, head_dim]; key and value may have fewer heads (GQA). position_bias
    [1, heads, query tokens, key tokens] depends on the distance of tokens. s_aux [heads]: attention
    sinks. Returns [rows, tokens, heads, head_dim]. Raises UserError for variants and masks that
    only `eager` computes.
    """
    if not (attention_mask is None or isinstance(attention_mask, MaskRule)):
        raise UserError(
            f"attention=sdpa cannot split the mask that {type(module).__name__} computed for whole "
            "rows into documents: type attention=eager"
        )
    if isinstance(documents, DocumentGroups) and position_bias is not None:
        raise UserError(
            "attention=sdpa cannot split this model's position_bias, which covers whole rows, into "
            "documents: type packing=none"
        )
    if softcap is not None:
        raise UserError("attention=sdpa cannot compute this model's softcap: type attention=eager")
    # The mask includes the window, which layers also pass as an argument for other kernels.
    window = None if attention_mask is not None else sliding_window
    attend = partial(_attend, dropout=dropout, scaling=scaling, sinks=s_aux)
    attend = partial(attend, window=window, rule=attention_mask)
    parts = (query, key, value)
    if isinstance(documents, DocumentGroups):
        longest = max(document.length for document in documents.documents)
        reach = attention_mask.size if attention_mask is not None else sliding_window
        is_full = reach is None or reach >= longest
        if is_full and s_aux is None and cpu.attends_faster(query, value, dropout):
            output = cpu.attend_causally(*cast_to_one_dtype(*parts), documents.stacks, scaling)
            return output, None
        return _attend_causally(parts, documents, partial(attend, is_causal=True)), None
    # As in transformers: a layer without the attribute is causal.
    attend = partial(attend, is_causal=getattr(module, "is_causal", True))
    if documents is None:
        return attend(*parts, bias=position_bias).transpose(1, 2), None
    return _attend_encoder_decoder(module, parts, documents, position_bias, attend), None


def cast_to_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> Parts:
    """Cast query, key and value to autocast's dtype, or to the values' dtype without autocast.

    Rotary embeddings in fp32 leave queries and keys in fp32, and autocast does not cover every
    kernel.
    """
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _attend_encoder_decoder(
    module: Any, parts: Parts, documents: PairGroups, bias: Tensor | None, attend: Attend
) -> Tensor:
    """Attend as encoder, decoder or cross-attention, depending on the layer's attributes."""
    if module.is_causal:
        longest = documents.decoder.gather[0].shape[1] if documents.decoder else None
        attend = partial(attend, bias=_slice_bias(bias, longest, documents))
        return _attend_causally(parts, documents.decoder, attend)
    # Layers without the attribute mix encoder and decoder (T5Gemma 2).
    if getattr(module, "is_decoder", None) is None:
        raise UserError(
            f"attention=sdpa cannot tell encoder and decoder apart in {type(module).__name__}: "
            "type attention=eager packing=none"
        )
    groups = documents.cross if module.is_decoder else documents.encoder
    # No bias in cross-attention: T5 passes zeros, which would cost a mask and its gradient.
    if not module.is_decoder:
        longest = groups.groups[0].keys.shape[1] if groups else None
        attend = partial(attend, bias=_slice_bias(bias, longest, documents))
    if groups is None:
        return attend(*parts).transpose(1, 2)
    members = ((group.queries, group.keys, group.visible) for group in groups.groups)
    return _attend_in_groups(parts, members, groups.restore, attend)


def _slice_bias(bias: Tensor | None, longest: int | None, documents: PairGroups) -> Tensor | None:
    """Return the bias for the longest document, cached since all layers of T5 share it.

    Each further slice would allocate a gradient of the whole bias.
    """
    if bias is None or longest is None:
        return bias
    if documents.sliced_bias is None or documents.sliced_bias[0] is not bias:
        documents.sliced_bias = bias, bias[..., :longest, :longest]
    return documents.sliced_bias[1]


def _attend_causally(parts: Parts, groups: DocumentGroups | None, attend: Attend) -> Tensor:
    if groups is None:
        return attend(*parts).transpose(1, 2)
    members = ((index, index, None) for index in groups.gather)
    return _attend_in_groups(parts, members, groups.restore, attend)


def _attend_in_groups(
    parts: Parts,
    groups: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    restore: Tensor,
    attend: Attend,
) -> Tensor:
    """Attend in each group, and return the outputs in the order of the rows.

    A group: flat positions of queries and of keys, and the mask of visible keys.
    """
    rows, _, tokens, _ = parts[0].shape
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in parts)
    outputs = []
    for queries, keys, visible in groups:
        grouped = (part.transpose(1, 2) for part in (query[queries], key[keys], value[keys]))
        outputs.append(attend(*grouped, visible=visible).transpose(1, 2).flatten(0, 1))
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output[restore].unflatten(0, (rows, tokens))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None,
    window: int | None,
    rule: MaskRule | None,
    is_causal: bool,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Run PyTorch's attention on a dense batch of documents.

    `visible` bool [documents, 1, 1, keys]; None for causal attention.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if rule is None and window is not None and is_causal:
        rule = window_rule(window)
    if rule is not None and rule.size >= num_keys:
        rule = None
    if rule is not None and is_causal and visible is None and bias is None:
        parts = query, key, value
        return attend_in_blocks(*parts, rule, dropout=dropout, scaling=scaling, sinks=sinks)
    mask = visible
    if rule is not None:
        in_reach = rule.visible(range(num_queries), range(num_keys), query.device)
        mask = in_reach if mask is None else mask & in_reach
    elif is_causal and bias is not None:
        position = torch.arange(num_queries, device=query.device)
        mask = position.unsqueeze(1) >= position.unsqueeze(0)
    if bias is not None:
        bias = bias[..., :num_queries, :num_keys].to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    is_causal = is_causal and mask is None
    if is_causal and sinks is None and cpu.attends_faster(query, value, dropout):
        rows = stack_documents(place_documents([[num_queries]] * len(query), num_queries))
        parts = cast_to_one_dtype(query, key, value)
        return cpu.attend_causally(*parts, rows, scaling).transpose(1, 2)
    return _run_kernel((query, key, value), mask, dropout, scaling, sinks, is_causal=is_causal)


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    *,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally by blocks of queries, which stand at the last of the keys' positions.

    A block reads only keys within the reach of `rule`: no mask is that of a whole document. If
    that is all keys, there is one block: each allocates a gradient of all keys.
    """
    query, key, value = cast_to_one_dtype(query, key, value)
    key, value = repeat_heads(query, key, value)  # once, not in every block
    num_keys, outputs = key.shape[2], []
    first = num_keys - query.shape[2]
    size = BLOCK_TOKENS if rule.size < num_keys else query.shape[2]
    for start in range(first, num_keys, size):
        queries = range(start, min(start + size, num_keys))
        # Whole multiples of 8, as CUDA's kernels ask of the masks.
        keys = range(max(0, (start - rule.size + 1) // 8 * 8), queries.stop)
        parts = (
            query[:, :, queries.start - first : queries.stop - first],
            key[:, :, keys.start : keys.stop],
            value[:, :, keys.start : keys.stop],
        )
        # Of a bool mask, each layer would save a copy in the dtype of its queries.
        mask = rule.visible(queries, keys, query.device, query.dtype)
        output = _run_kernel(parts, mask, dropout, scaling, sinks, is_causal=False)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1).transpose(1, 2)  # contiguous by token, as models expect


def _run_kernel(
    parts: Parts,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    if sinks is not None:
        if dropout or parts[0].device.type != "cpu":
            raise UserError(f"attention=sdpa: {SINKS_ERROR}; type attention=eager")
        parts = cast_to_one_dtype(*parts)
        return attend_to_rows(parts, sinks, mask, scaling, is_causal=is_causal)
    query, key, value = parts
    if query.is_cuda and not _runs_flash(query, value, mask):
        key, value = repeat_heads(query, key, value)
    output: Tensor = attend_once(
        torch.nn.functional.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key heads on a GPU for its kernels with a mask.

    They do not support GQA, and the fallback saves all scores in fp32.
    """
    if not query.is_cuda or query.shape[1] == key.shape[1]:
        return key, value
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def _runs_flash(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether PyTorch runs this attention on a GPU by its FlashAttention kernel."""
    if torch.cuda.get_device_capability() < (8, 0):
        return False
    query, _, value = cast_to_one_dtype(query, value, value)
    widest = max(query.shape[-1], value.shape[-1])
    return mask is None and query.dtype.itemsize == 2 and widest <= MAX_FLASH_HEAD_DIM


class _SinkAttention(torch.autograd.Function):
    """Attention by a kernel's forward and backward operators, with a logit per head in `sinks`.

    query, key, value, and the output: [rows, heads, tokens, head_dim], or [tokens, heads, head_dim]
    if they are packed; the log-sum-exp: [rows, heads, tokens], or [heads, tokens].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        kernels: tuple[Kernel, Kernel],
        options: dict[str, Any],
    ) -> Tensor:
        attended, without_sink, *state = attend_once(kernels[0], query, key, value, **options)
        log_sum = torch.logaddexp(without_sink, sinks.to(without_sink).unsqueeze(-1))
        share = _by_token((without_sink - log_sum).exp(), query).unsqueeze(-1)
        # Computed in fp32 and rounded once; not in place, as recompute may have saved the tensor.
        output = torch.mul(attended, share, out=torch.empty_like(attended))
        ctx.save_for_backward(query, key, value, sinks, output, log_sum, *state[: len(_STATE)])
        ctx.backward_kernel, ctx.options = kernels[1], options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum, *rest = ctx.saved_tensors
        state = dict(zip(_STATE, rest, strict=False))  # empty on a CPU
        gradient = gradients[0].contiguous()  # the operators read no expanded gradient
        grads = ctx.backward_kernel(
            gradient, query, key, value, output, log_sum, **state, **ctx.options
        )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            probs = (sinks.to(log_sum).unsqueeze(-1) - log_sum).exp()
            of_output = _by_token((gradient.to(log_sum) * output).sum(-1), query)
            of_sinks = -(probs * of_output).movedim(-2, 0).flatten(1).sum(1).to(sinks)
        return *grads, of_sinks, None, None


def _by_token(values: Tensor, query: Tensor) -> Tensor:
    return values.T if query.ndim == 3 else values


def attend_to_rows(
    parts: Parts, sinks: Tensor, mask: Tensor | None, scaling: float | None, *, is_causal: bool
) -> Tensor:
    """Attend on a CPU; query, key, value, and the output: [rows, heads, tokens, head_dim].

    Key and value may have fewer heads (GQA), and values a smaller head_dim. sinks [heads]; mask
    bool, or added to the scores.
    """
    aten = torch.ops.aten
    query, key, value = parts
    value_dim = value.shape[-1]
    if value_dim != query.shape[-1]:  # the kernel has one width
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - value_dim))
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    kernels = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    options = {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": mask, "scale": scaling}
    output: Tensor = _SinkAttention.apply(query, key, value, sinks, kernels, options)
    return output[..., :value_dim]


def attend_to_documents(
    parts: Parts,
    sinks: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Attend on a GPU inside each document; all [tokens, heads, head_dim], as `varlen_attn` does.

    Key and value may have fewer heads (GQA). sinks [heads].
    """
    aten = torch.ops.aten
    options = {
        **dict.fromkeys(("cum_seq_q", "cum_seq_k"), boundaries),
        **dict.fromkeys(("max_q", "max_k"), longest),
        **dict(zip(("window_size_left", "window_size_right"), window_size, strict=True)),
        "is_causal": window_size == (-1, 0),
        "dropout_p": 0.0,
        "scale": scaling,
    }
    kernels = (
        partial(aten._flash_attention_forward, return_debug_mask=False),
        aten._flash_attention_backward,
    )
    output: Tensor = _SinkAttention.apply(*parts, sinks, kernels, options)
    return output
