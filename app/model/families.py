"""What the config.json of a model type does not say: one table of families' quirks.

A row of `FAMILIES` tells how the model type differs from Llama; model types without a row differ in
nothing that is asked here. Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Config = Mapping[str, Any]
"""content of config.json"""
Shapes = dict[str, tuple[int, ...]]
"""weight name without `.weight` -> shape"""
_MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """The structure of a layer, as far as it affects activation memory; defaults to Llama's."""

    num_norms: int = 2
    """norms of hidden states; four if the outputs of attention and feed-forward have norms too"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    has_plain_head_norms: bool = False
    """whether the norms of queries and keys have no weights, so that no kernel replaces them"""
    norms_values: bool = False
    """whether values are normalized"""
    norms_routed: bool = False
    """whether the router's input is normalized, without weights"""
    has_rms_norms: bool = True
    """whether the norms are RMS norms, which a fused kernel may replace"""
    has_gate: bool = True
    """whether gate and up projection are separate matrices, so that a fused kernel may be used"""
    is_gated: bool = True
    """whether the feed-forward is gated, whatever the layout of its matrices"""
    joins_heads: bool = False
    """whether a joint matrix computes queries, keys and values; its output is saved for the values
    """
    activation: str = "silu"
    """activation of the feed-forward, from config.json or the default of the model type"""
    shared_experts: int = 0
    """features of the shared experts, or of a dense feed-forward parallel to the experts"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What is known of a model type besides its config.json."""

    matrices: Callable[[Config], Shapes] | None = None
    """computes the names and shapes of all matrices from config.json; None if only the model tells
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """values of keys that config.json may omit"""
    layer: LayerKind = LayerKind()
    """structure of the layers, for estimates before they are built"""
    is_verified: bool = False
    """whether estimates of activation memory were compared with a simulated step: within 2.5 %"""
    queries_and_keys: str | None = None
    """the matrix that holds query, key and value; IA3 then scales the query too"""
    refuses_lora: str | None = None
    """a linear module on which peft refuses LoRA, since its output is not W x: a kernel reads its
    weight, or its forward returns two tensors"""
    has_tensor_plan: bool = True
    """whether transformers has a usable tensor parallel plan"""
    has_attention_kernel: bool = True
    """whether attention=auto is more than eager: not if the layers compute attention themselves"""
    has_sinks: bool = False
    """whether layers pass attention sinks, for which transformers has no PyTorch kernel; ours has:
    varlen, and sdpa on a CPU"""
    computes_all_experts: bool = False
    """whether every expert computes every token, with weight 0 if it was not chosen"""
    has_half_scores: bool = False
    """whether eager attention saves its probabilities in half precision only"""
    clamps_gate: bool = False
    """whether separate operators clamp the gate, which save seven tensors in all; this cannot be
    seen in the modules"""
    has_post_norms: bool = False
    """encoder-decoders: whether norms come after each residual sum; their attention has no position
    bias, but their logits have a bias, which requires the full logits"""
    joins_rotated: bool = False
    """whether the rotated part of each head is concatenated with the rest: the attention output is
    then copied back to token order"""


def family_of(model_type: object) -> Family:
    """Return what is known of a model type; that of Llama's kind if it has no row."""
    return FAMILIES.get(str(model_type), PLAIN)


def shapes_of_config(config: Config) -> Shapes | None:
    """Compute a model's matrices from its config.json; None if the family or a value is unknown."""
    matrices = family_of(config.get("model_type")).matrices
    if matrices is None:
        return None
    try:
        return matrices(config)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _query_and_key_rows(config: Config) -> tuple[int, int]:
    heads, head = int(config["num_attention_heads"]), _head_dim(config)
    return heads * head, int(config.get("num_key_value_heads") or heads) * head


def _repeat(prefix: str, layers: Any, layer: Shapes) -> Shapes:
    if not 0 <= int(layers) <= _MAX_LAYERS:
        raise ValueError(f"{layers} layers")
    return {
        f"{prefix}.{index}.{name}": shape
        for index in range(int(layers))
        for name, shape in layer.items()
    }


def _decoder(config: Config, layer: Shapes) -> Shapes:
    """Return the shapes of `model.layers`, an embedding and a head."""
    ends = (int(config["vocab_size"]), int(config["hidden_size"]))
    shapes: Shapes = {"model.embed_tokens": ends, "lm_head": ends}
    return shapes | _repeat("model.layers", config["num_hidden_layers"], layer)


def _separate_attention(config: Config, output: str) -> Shapes:
    """Return a layer's attention with separate matrices; `output` names the output projection."""
    hidden = int(config["hidden_size"])
    queries, keys = _query_and_key_rows(config)
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        f"self_attn.{output}": (hidden, queries),
    }


def _llama(config: Config) -> Shapes:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    feed_forward: Shapes = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return _decoder(config, _separate_attention(config, "o_proj") | feed_forward)


def _phi(config: Config) -> Shapes:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    feed_forward: Shapes = {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
    return _decoder(config, _separate_attention(config, "dense") | feed_forward)


def _phi3(config: Config) -> Shapes:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    queries, keys = _query_and_key_rows(config)
    layer: Shapes = {
        "self_attn.qkv_proj": (queries + 2 * keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_up_proj": (2 * inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return _decoder(config, layer)


def _gpt2(config: Config) -> Shapes:
    """Return GPT-2's shapes; its matrices are transposed: [inputs, outputs]."""
    hidden, vocab = int(config["n_embd"]), int(config["vocab_size"])
    inner = int(config.get("n_inner") or 4 * hidden)
    layer: Shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    shapes: Shapes = {
        "transformer.wte": (vocab, hidden),
        "transformer.wpe": (int(config["n_positions"]), hidden),
        "lm_head": (vocab, hidden),
    }
    return shapes | _repeat("transformer.h", config["n_layer"], layer)


def _falcon(config: Config) -> Shapes:
    head = _head_dim(config)
    if config["new_decoder_architecture"]:
        keys = int(config["num_kv_heads"]) * head
    elif config["multi_query"]:
        keys = head
    else:
        keys = int(config["hidden_size"])
    return _fused_transformer(config, int(config["hidden_size"]) + 2 * keys)


def _bloom(config: Config) -> Shapes:
    return _fused_transformer(config, 3 * int(config["hidden_size"]))


def _fused_transformer(config: Config, attention_rows: int) -> Shapes:
    """Return the shapes of `transformer.h` with one matrix for queries, keys and values."""
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    inner = int(config.get("ffn_hidden_size") or 4 * hidden)
    layer: Shapes = {
        "self_attention.query_key_value": (attention_rows, hidden),
        "self_attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (inner, hidden),
        "mlp.dense_4h_to_h": (hidden, inner),
    }
    shapes: Shapes = {"transformer.word_embeddings": (vocab, hidden), "lm_head": (vocab, hidden)}
    return shapes | _repeat("transformer.h", config["num_hidden_layers"], layer)


def _t5(config: Config) -> Shapes:
    model, inner, vocab = (int(config[name]) for name in ("d_model", "d_ff", "vocab_size"))
    heads = int(config["num_heads"])
    rows = heads * int(config["d_kv"])
    names = ("wi_0", "wi_1") if config["feed_forward_proj"].startswith("gated-") else ("wi",)
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
        ("encoder", config["num_layers"], encoder),
        ("decoder", config.get("num_decoder_layers") or config["num_layers"], decoder),
    ):
        layer: Shapes = {f"layer.{name}": shape for name, shape in parts.items()}
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        shapes[bias] = (int(config["relative_attention_num_buckets"]), heads)
        shapes |= _repeat(f"{stack}.block", layers, layer)
    return shapes


def _bart(config: Config) -> Shapes:
    model, vocab = int(config["d_model"]), int(config["vocab_size"])
    attention = _alike(("k_proj", "v_proj", "q_proj", "out_proj"), (model, model))
    shapes: Shapes = {"model.shared": (vocab, model), "lm_head": (vocab, model)}
    for stack, parts in (
        ("encoder", {"self_attn": attention}),
        ("decoder", {"self_attn": attention, "encoder_attn": attention}),
    ):
        inner = int(config[f"{stack}_ffn_dim"])
        layer = _within(parts) | {"fc1": (inner, model), "fc2": (model, inner)}
        shapes[f"model.{stack}.embed_tokens"] = (vocab, model)
        # BART's position ids begin at 2.
        shapes[f"model.{stack}.embed_positions"] = (config["max_position_embeddings"] + 2, model)
        shapes |= _repeat(f"model.{stack}.layers", config[f"{stack}_layers"], layer)
    return shapes


def _alike(names: Sequence[str], shape: tuple[int, ...]) -> Shapes:
    return dict.fromkeys(names, shape)


def _within(parts: Mapping[str, Shapes]) -> Shapes:
    return {
        f"{part}.{name}": shape for part, shapes in parts.items() for name, shape in shapes.items()
    }


PLAIN = Family()
_CAUSAL = Family(is_verified=True)
_LLAMA = Family(matrices=_llama, is_verified=True)
_TIED = {"tie_word_embeddings": True}
_UNGATED = LayerKind(has_rms_norms=False, has_gate=False, is_gated=False, activation="gelu")
_GEMMA = LayerKind(activation="gelu_pytorch_tanh")
_OLDER = replace(_LLAMA, defaults=_TIED, layer=_UNGATED, has_tensor_plan=False)
_PAIR = replace(_OLDER, defaults={**_TIED, "is_encoder_decoder": True})
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, layer=LayerKind(norms_heads=True)),
    "gemma": replace(_LLAMA, defaults=_TIED, layer=_GEMMA),
    "gemma2": replace(_LLAMA, defaults=_TIED, layer=replace(_GEMMA, num_norms=4)),
    "gemma3_text": replace(
        _LLAMA, defaults=_TIED, layer=replace(_GEMMA, num_norms=4, norms_heads=True)
    ),
    "phi": replace(
        _LLAMA,
        matrices=_phi,
        layer=replace(_UNGATED, num_norms=1, activation="gelu_new"),
        joins_rotated=True,
    ),
    "phi3": replace(
        _LLAMA,
        matrices=_phi3,
        layer=LayerKind(has_gate=False, joins_heads=True),
        queries_and_keys="qkv_proj",
        has_tensor_plan=False,
    ),
    "gpt2": replace(
        _OLDER,
        matrices=_gpt2,
        defaults={**_TIED, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        layer=replace(_UNGATED, activation="gelu_new"),
        queries_and_keys="c_attn",
    ),
    "falcon": replace(
        _OLDER,
        matrices=_falcon,
        defaults={**_TIED, "multi_query": True, "parallel_attn": True},
        queries_and_keys="query_key_value",
        has_attention_kernel=False,
    ),
    "bloom": replace(
        _OLDER, matrices=_bloom, queries_and_keys="query_key_value", has_attention_kernel=False
    ),
    "t5": replace(_PAIR, matrices=_t5, layer=LayerKind(has_rms_norms=False, has_gate=False)),
    "bart": replace(
        _PAIR, matrices=_bart, defaults={**_PAIR.defaults, "dropout": 0.1}, has_post_norms=True
    ),
    "gpt_oss": replace(_CAUSAL, has_sinks=True, has_half_scores=True, clamps_gate=True),
    **dict.fromkeys(
        ("flint", "granite_swa", "granitemoe_swa", "mimo_v2_flash"), Family(has_sinks=True)
    ),
    "llama4_text": replace(_CAUSAL, refuses_lora="router", computes_all_experts=True),
    "llama4": Family(refuses_lora="router"),
    "gpt_neox": Family(queries_and_keys="query_key_value", joins_rotated=True),
    "gpt_bigcode": Family(queries_and_keys="c_attn"),
    "mpt": Family(queries_and_keys="Wqkv"),
    **dict.fromkeys(("persimmon", "stablelm"), Family(joins_rotated=True)),
    **dict.fromkeys(
        ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"),
        Family(refuses_lora="out_proj"),
    ),
    **dict.fromkeys(("qwen3_moe", "ministral3", "smollm3", "olmo3"), _CAUSAL),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _CAUSAL),
    **dict.fromkeys(("glm4", "glm4_moe", "deepseek_v3"), _CAUSAL),
}
