"""The matrices of a model by the numbers of its config.json: names and shapes, without torch.

One function an architecture's family. Names are those of transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shapes = dict[str, tuple[int, ...]]
"""weight name without `.weight` -> shape"""
MAX_LAYERS = 10_000
Numbers = Mapping[str, Any]


def shapes_of_architecture(numbers: Numbers) -> Shapes | None:
    """Work out a model's matrices from its numbers; None for a type or numbers not known here."""
    family = _FAMILIES.get(str(numbers.get("model_type")))
    if family is None:
        return None
    try:
        return family(numbers)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _head_dim(numbers: Numbers) -> int:
    return int(numbers.get("head_dim") or numbers["hidden_size"] // numbers["num_attention_heads"])


def _query_and_key_rows(numbers: Numbers) -> tuple[int, int]:
    heads, head = int(numbers["num_attention_heads"]), _head_dim(numbers)
    return heads * head, int(numbers.get("num_key_value_heads") or heads) * head


def _repeat(prefix: str, layers: Any, layer: Shapes) -> Shapes:
    if not 0 <= int(layers) <= MAX_LAYERS:
        raise ValueError(f"{layers} layers")
    return {
        f"{prefix}.{index}.{name}": shape
        for index in range(int(layers))
        for name, shape in layer.items()
    }


def _decoder(numbers: Numbers, layer: Shapes) -> Shapes:
    """Return `model.layers` between an embedding and a head."""
    ends = (int(numbers["vocab_size"]), int(numbers["hidden_size"]))
    shapes: Shapes = {"model.embed_tokens": ends, "lm_head": ends}
    return shapes | _repeat("model.layers", numbers["num_hidden_layers"], layer)


def _separate_attention(numbers: Numbers, output: str) -> Shapes:
    """Return a layer's attention with a matrix each; `output` names the one behind it."""
    hidden = int(numbers["hidden_size"])
    queries, keys = _query_and_key_rows(numbers)
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        f"self_attn.{output}": (hidden, queries),
    }


def _llama(numbers: Numbers) -> Shapes:
    hidden, inner = int(numbers["hidden_size"]), int(numbers["intermediate_size"])
    feed_forward: Shapes = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return _decoder(numbers, _separate_attention(numbers, "o_proj") | feed_forward)


def _phi(numbers: Numbers) -> Shapes:
    hidden, inner = int(numbers["hidden_size"]), int(numbers["intermediate_size"])
    feed_forward: Shapes = {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
    return _decoder(numbers, _separate_attention(numbers, "dense") | feed_forward)


def _phi3(numbers: Numbers) -> Shapes:
    hidden, inner = int(numbers["hidden_size"]), int(numbers["intermediate_size"])
    queries, keys = _query_and_key_rows(numbers)
    layer: Shapes = {
        "self_attn.qkv_proj": (queries + 2 * keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_up_proj": (2 * inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return _decoder(numbers, layer)


def _gpt2(numbers: Numbers) -> Shapes:
    """Return GPT-2's shapes; its matrices stand the other way round, [inputs, outputs]."""
    hidden, vocab = int(numbers["n_embd"]), int(numbers["vocab_size"])
    inner = int(numbers.get("n_inner") or 4 * hidden)
    layer: Shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    shapes: Shapes = {
        "transformer.wte": (vocab, hidden),
        "transformer.wpe": (int(numbers["n_positions"]), hidden),
        "lm_head": (vocab, hidden),
    }
    return shapes | _repeat("transformer.h", numbers["n_layer"], layer)


def _falcon(numbers: Numbers) -> Shapes:
    head = _head_dim(numbers)
    if numbers["new_decoder_architecture"]:
        keys = int(numbers["num_kv_heads"]) * head
    elif numbers["multi_query"]:
        keys = head
    else:
        keys = int(numbers["hidden_size"])
    return _fused_transformer(numbers, int(numbers["hidden_size"]) + 2 * keys)


def _bloom(numbers: Numbers) -> Shapes:
    return _fused_transformer(numbers, 3 * int(numbers["hidden_size"]))


def _fused_transformer(numbers: Numbers, attention_rows: int) -> Shapes:
    """Return `transformer.h` with one matrix for queries, keys and values."""
    hidden, vocab = int(numbers["hidden_size"]), int(numbers["vocab_size"])
    inner = int(numbers.get("ffn_hidden_size") or 4 * hidden)
    layer: Shapes = {
        "self_attention.query_key_value": (attention_rows, hidden),
        "self_attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    shapes: Shapes = {"transformer.word_embeddings": (vocab, hidden), "lm_head": (vocab, hidden)}
    return shapes | _repeat("transformer.h", numbers["num_hidden_layers"], layer)


def _t5(numbers: Numbers) -> Shapes:
    model, inner, vocab = (int(numbers[name]) for name in ("d_model", "d_ff", "vocab_size"))
    heads = int(numbers["num_heads"])
    rows = heads * int(numbers["d_kv"])
    names = ("wi_0", "wi_1") if numbers["feed_forward_proj"].startswith("gated-") else ("wi",)
    feed_forward = _alike(names, (inner, model)) | {"wo": (model, inner)}
    attention = _alike(("q", "k", "v"), (rows, model)) | {"o": (model, rows)}
    tables = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    shapes = _alike(tables, (vocab, model))
    encoder = _within({"0.SelfAttention": attention, "1.DenseReluDense": feed_forward})
    decoder = _within(
        {
            "0.SelfAttention": attention,
            "1.EncDecAttention": attention,
            "2.DenseReluDense": feed_forward,
        }
    )
    for stack, layers, parts in (
        ("encoder", numbers["num_layers"], encoder),
        ("decoder", numbers.get("num_decoder_layers") or numbers["num_layers"], decoder),
    ):
        layer: Shapes = {f"layer.{name}": shape for name, shape in parts.items()}
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        shapes[bias] = (int(numbers["relative_attention_num_buckets"]), heads)
        shapes |= _repeat(f"{stack}.block", layers, layer)
    return shapes


def _bart(numbers: Numbers) -> Shapes:
    model, vocab = int(numbers["d_model"]), int(numbers["vocab_size"])
    attention = _alike(("k_proj", "v_proj", "q_proj", "out_proj"), (model, model))
    shapes: Shapes = {"model.shared": (vocab, model), "lm_head": (vocab, model)}
    for stack, parts in (
        ("encoder", {"self_attn": attention}),
        ("decoder", {"self_attn": attention, "encoder_attn": attention}),
    ):
        inner = int(numbers[f"{stack}_ffn_dim"])
        layer = _within(parts) | {"fc1": (inner, model), "fc2": (model, inner)}
        shapes[f"model.{stack}.embed_tokens"] = (vocab, model)
        # BART's table of positions begins at 2.
        shapes[f"model.{stack}.embed_positions"] = (numbers["max_position_embeddings"] + 2, model)
        shapes |= _repeat(f"model.{stack}.layers", numbers[f"{stack}_layers"], layer)
    return shapes


def _alike(names: Sequence[str], shape: tuple[int, ...]) -> Shapes:
    return dict.fromkeys(names, shape)


def _within(parts: Mapping[str, Shapes]) -> Shapes:
    return {
        f"{part}.{name}": shape for part, shapes in parts.items() for name, shape in shapes.items()
    }


_FAMILIES: dict[str, Callable[[Numbers], Shapes]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gemma": _llama,
    "gemma2": _llama,
    "gemma3_text": _llama,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "falcon": _falcon,
    "bloom": _bloom,
    "t5": _t5,
    "bart": _bart,
}
