"""The dimensions and structure of a model's layers, as far as they affect activation memory.

The structure is detected from a layer's modules or, before a layer is built, taken from the family.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from app.model.families import PLAIN, Family, LayerKind, family_of

Getter = Callable[[str], Any]
"""returns the value of a key of config.json, None if it has none"""

_DROPOUTS = ("resid_pdrop", "hidden_dropout", "dropout")
"""names in config.json of the dropout on the outputs of attention and feed-forward"""
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
"""names in config.json of the feed-forward's activation function"""
_JOINED = ("qkv_proj",)
"""names of a joint matrix for queries, keys and values whose output is not copied for the values"""
_UNGATED = ("fc1", "fc_in", "c_fc", "dense_h_to_4h")
"""names of the first matrix of an ungated feed-forward"""


def _kind_of_type(get: Getter) -> LayerKind:
    """Return the structure of a model's layers as far as its family tells."""
    kind = family_of(get("model_type")).layer
    if get("model_type") != "falcon" or get("new_decoder_architecture"):
        return kind
    return replace(kind, num_norms=1 if get("parallel_attn") else 2)


def kind_of_layer(layer: Any, shared_experts: int) -> LayerKind:
    """Detect the structure of a layer from its modules; assumes two norms if it finds none.

    Uses the same class and module names as `app.model.kernels`, which replaces modules by kernels.
    """
    modules = dict(layer.named_modules())
    names = {name.rpartition(".")[2] for name in modules}
    norms = [child for child in layer.children() if "Norm" in type(child).__name__]
    head_norms = [
        module
        for name, module in modules.items()
        if name.rpartition(".")[2] in ("q_norm", "k_norm", "qk_norm")
    ]
    return LayerKind(
        num_norms=len(norms) or 2,
        norms_heads=bool(head_norms),
        has_plain_head_norms=any(not list(module.parameters()) for module in head_norms),
        norms_values="v_norm" in names,
        norms_routed=any(name.endswith("router.norm") for name in modules),
        has_rms_norms=any("RMSNorm" in type(module).__name__ for module in modules.values()),
        has_gate=names.issuperset(("gate_proj", "up_proj", "down_proj")),
        is_gated=names.isdisjoint(_UNGATED),
        joins_heads=not names.isdisjoint(_JOINED),
        shared_experts=shared_experts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """The dimensions of a model's layers that determine its activation memory."""

    layers: int
    """number of layers; of both stacks for an encoder-decoder"""
    hidden: int
    """features of the residual stream"""
    query: int
    """features of the queries of all heads"""
    key_value: int
    """features of the keys of all heads, and of the values"""
    feed_forward: int
    """features inside the feed-forward, summed over all experts of a token"""
    heads: int
    """number of query heads"""
    vocabulary: int
    """rows of the embedding"""
    routed_copies: int = 0
    """copies of a token's input that its experts need"""
    routed_features: int = 0
    """the part of `feed_forward` that belongs to routed experts"""
    latent: int = 0
    """features of the latent vectors of queries, keys and values (multi-head latent attention), and
    of the attention output without padding"""
    has_dropout: bool = False
    """whether the outputs of attention and feed-forward have dropout: each saves a mask"""
    caps_scores: bool = False
    """whether attention scores have a softcap"""
    layer_inputs: int = 0
    """features of an embedding table that each layer reads in addition to the residual stream"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    widest_head: int = 0
    """largest head dimension of any layer"""
    model_type: str = ""
    """`model_type` of config.json"""
    kind: LayerKind = PLAIN.layer
    """structure of the layers"""

    @property
    def family(self) -> Family:
        """What is known of the model type."""
        return family_of(self.model_type)

    @property
    def is_compared(self) -> bool:
        """Return whether estimates for these layers were compared with a simulated step."""
        return self.family.is_verified and not self.layer_inputs

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return max(1, self.key_value * self.heads // self.query)

    @property
    def inputs(self) -> int:
        """Input features of all matrices of a layer."""
        return 5 * self.hidden + self.query + self.feed_forward

    @property
    def outputs(self) -> int:
        """Output features of all matrices of a layer."""
        return self.query + 2 * self.key_value + 2 * self.hidden + 2 * self.feed_forward


def widths_of(get: Getter, kind: LayerKind | None = None) -> Widths | None:
    """Return the dimensions of a model's layers; None if its config lacks the basic ones.

    `get`: reads config.json, as `BaseDescription.get` or a `config_getter`. `kind`: structure of
    the layers, if it was detected from built layers.
    """

    def find(*names: str) -> int:
        found = map(get, names)
        return next((int(number) for number in found if isinstance(number, (int, float))), 0)

    hidden, layers = find("hidden_size"), find("num_hidden_layers")
    heads = find("num_attention_heads")
    if not (hidden and layers and heads):
        return None
    head_dim = find("head_dim") or hidden // heads
    experts = find("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    names = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "ffn_hidden_size")
    # GPT-2's n_inner may be null, which means four times the hidden size.
    dense = find(*names, "n_inner") or 4 * hidden
    of_type = _kind_of_type(get)
    kind = kind or of_type
    shared = find("shared_expert_intermediate_size") or kind.shared_experts
    functions = (each for each in map(get, _ACTIVATIONS) if isinstance(each, str))
    function = next(functions, of_type.activation)
    model_type = get("model_type")
    if family_of(model_type).computes_all_experts:
        experts = find("num_local_experts")
    routed = experts * (find("moe_intermediate_size") or dense)
    shares_all = get("multi_query") and not get("new_decoder_architecture")
    query, latent = heads * head_dim, 0
    key_value = head_dim if shares_all else (find("num_key_value_heads") or heads) * head_dim
    if rotated := find("qk_rope_head_dim"):  # flash attention pads values to the keys' head size
        query = key_value = heads * (find("qk_nope_head_dim") + rotated)
        latent = 2 * (find("q_lora_rank") + find("kv_lora_rank")) + rotated
        latent += heads * find("v_head_dim")
    if get("is_encoder_decoder"):
        layers += find("num_decoder_layers", "decoder_layers")
    return Widths(
        layers=layers,
        hidden=hidden,
        query=query,
        key_value=key_value,
        feed_forward=routed + shared if experts else dense,
        heads=heads,
        vocabulary=find("vocab_size"),
        routed_copies=2 * experts,
        routed_features=routed,
        latent=latent,
        has_dropout=any(map(get, _DROPOUTS)),
        caps_scores=bool(find("attn_logit_softcapping")),
        layer_inputs=find("hidden_size_per_layer_input"),
        norms_heads=kind.norms_heads,
        widest_head=max(head_dim, find("global_head_dim")),
        model_type=model_type,
        kind=replace(kind, activation="" if kind.is_gated and not kind.has_gate else function),
    )


def config_getter(architecture: Any) -> Getter:
    """Return a function that reads the language model's values of a transformers config.

    If each layer has its own value (Gemma 4), it returns their mean.
    """
    text = architecture.get_text_config()

    def get(name: str) -> Any:
        try:
            return getattr(text, name, None)
        except RuntimeError:  # raised by transformers for values that differ between layers
            numbers = [getattr(layer, name) for layer in text.per_layer_config]
            return sum(numbers) / len(numbers)

    return get
