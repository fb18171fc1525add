"""What a decoder layer is made of and how wide it is, as far as it changes the memory of a step.

Found in its modules, or known of model types whose config.json does not say it. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ALL_EXPERTS = ("llama4_text",)
"""model types each of whose experts computes every token, weighted by 0 where it was not chosen"""
DROPOUTS = ("resid_pdrop", "hidden_dropout", "dropout")
"""names in config.json of the dropout of what attention and feed-forward return"""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
"""names of the gate's function in config.json"""
COMPARED = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "olmo3"),
    *("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "phi", "phi3"),
    *("glm4", "glm4_moe", "gpt_oss", "gpt2", "falcon", "bloom", "llama4_text", "deepseek_v3", "t5"),
    "bart",
)
"""model types whose steps were simulated, in which a layer keeps what is computed here within
2.5 %"""
JOINED = ("qkv_proj",)
"""names of one matrix that gives queries, keys and values, of which the values are not copied"""
UNGATED = ("fc1", "fc_in", "c_fc", "dense_h_to_4h")
"""names of the first matrix of a feed-forward without a gate"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What a layer is made of, as far as it changes what it keeps; a Llama's if nothing is said."""

    num_norms: int = 2
    """of hidden states; four where what attention and feed-forward return is normalized, too"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    has_plain_head_norms: bool = False
    """by norms without weights, which no kernel takes"""
    norms_values: bool = False
    norms_routed: bool = False
    """whether what the router reads is normalized, without weights"""
    has_rms_norms: bool = True
    """which a kernel may replace"""
    has_gate: bool = True
    """of matrices of their own, which a kernel may stand between"""
    is_gated: bool = True
    """whether the feed-forward multiplies by a gate, of whatever matrices"""
    joins_heads: bool = False
    """whether one matrix gives queries, keys and values: its output is kept for the values"""
    activation: str = "silu"
    """of the feed-forward, by config.json, or of the model type where that does not say"""
    shared_experts: int = 0
    """features of the experts that every token goes to, or of a feed-forward beside the experts"""


OF_LLAMA = LayerKind()
_UNGATED = LayerKind(has_rms_norms=False, has_gate=False, is_gated=False, activation="gelu")
KINDS = {
    "qwen3": LayerKind(norms_heads=True),
    "gemma": LayerKind(activation="gelu_pytorch_tanh"),
    "gemma2": LayerKind(num_norms=4, activation="gelu_pytorch_tanh"),
    "gemma3_text": LayerKind(num_norms=4, norms_heads=True, activation="gelu_pytorch_tanh"),
    "phi3": LayerKind(has_gate=False, joins_heads=True),
    "phi": replace(_UNGATED, num_norms=1, activation="gelu_new"),
    "gpt2": replace(_UNGATED, activation="gelu_new"),
    **dict.fromkeys(("falcon", "bloom", "bart"), _UNGATED),
    "t5": LayerKind(has_rms_norms=False, has_gate=False),
}
"""of model types that are planned before a layer is built, by a config.json that does not say it;
of all others it is found in their modules"""


def kind_of_config(config: Any) -> LayerKind:
    """Return what the layers of a config.json are made of, as far as it and the table say."""
    kind = KINDS.get(config.model_type, OF_LLAMA)
    if config.model_type != "falcon" or getattr(config, "new_decoder_architecture", False):
        return kind
    return replace(kind, num_norms=1 if getattr(config, "parallel_attn", True) else 2)


def kind_of_layer(layer: Any, shared_experts: int) -> LayerKind:
    """Return what a layer's module is made of; two norms where none has that name.

    Classes and names are those by which `app.model.kernels` finds what a kernel may replace.
    """
    modules = dict(layer.named_modules())
    names = {name.rpartition(".")[2] for name in modules}
    norms = [child for child in layer.children() if "Norm" in type(child).__name__]
    of_heads = [
        module
        for name, module in modules.items()
        if name.rpartition(".")[2] in ("q_norm", "k_norm", "qk_norm")
    ]
    return LayerKind(
        num_norms=len(norms) or 2,
        norms_heads=bool(of_heads),
        has_plain_head_norms=any(not list(module.parameters()) for module in of_heads),
        norms_values="v_norm" in names,
        norms_routed=any(name.endswith("router.norm") for name in modules),
        has_rms_norms=any("RMSNorm" in type(module).__name__ for module in modules.values()),
        has_gate=names.issuperset(("gate_proj", "up_proj", "down_proj")),
        is_gated=names.isdisjoint(UNGATED),
        joins_heads=not names.isdisjoint(JOINED),
        shared_experts=shared_experts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """The numbers of a model's layers that its activations follow from."""

    layers: int
    hidden: int
    query: int
    key_value: int
    feed_forward: int
    """of all experts that a token goes to"""
    heads: int
    vocabulary: int
    routed_copies: int = 0
    """times a token's input is copied for experts"""
    routed_features: int = 0
    """of `feed_forward`, of the experts that a token is routed to"""
    latent: int = 0
    """features of what queries, keys and values are made from (multi-head latent attention), and of
    its output without padding"""
    has_dropout: bool = False
    """whether what attention and feed-forward return is dropped: each keeps a mask"""
    caps_scores: bool = False
    """whether scores go through a tanh"""
    layer_inputs: int = 0
    """features of a table that each layer reads beside what the layer before returned"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    widest_head: int = 0
    model_type: str = ""
    kind: LayerKind = OF_LLAMA

    @property
    def is_compared(self) -> bool:
        """Return whether what is said of its layers was found in simulated steps."""
        return self.model_type in COMPARED and not self.layer_inputs

    @property
    def inputs(self) -> int:
        """Features read by the matrices of a layer."""
        return 5 * self.hidden + self.query + self.feed_forward

    @property
    def outputs(self) -> int:
        """Features written by the matrices of a layer."""
        return self.query + 2 * self.key_value + 2 * self.hidden + 2 * self.feed_forward

    @property
    def matrices(self) -> int:
        """Weights of a layer's matrices, those of the experts not counted."""
        attention = 2 * self.query + 2 * self.key_value
        return self.hidden * (attention + 3 * self.feed_forward)


def widths_of(architecture: Any, kind: LayerKind | None = None) -> Widths | None:
    """Return the widths of a transformers config; None where it does not say them.

    `kind`: of its layers, where they are built.
    """
    text = architecture.get_text_config()

    def find(*names: str) -> int:
        found = (_number(text, name) for name in names)
        return next((int(number) for number in found if isinstance(number, (int, float))), 0)

    hidden, layers = find("hidden_size"), find("num_hidden_layers")
    heads = find("num_attention_heads")
    if not (hidden and layers and heads):
        return None
    head_dim = find("head_dim") or hidden // heads
    experts = find("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    names = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "ffn_hidden_size")
    width = find(*names, "n_inner")  # where GPT-2 leaves its own empty, four times the hidden ones
    dense = width or 4 * hidden
    kind = kind or kind_of_config(text)
    shared = find("shared_expert_intermediate_size") or kind.shared_experts
    functions = (_number(text, name) for name in ACTIVATIONS)
    default = kind_of_config(text).activation
    function = next((each for each in functions if isinstance(each, str)), default)
    if text.model_type in ALL_EXPERTS:
        experts = find("num_local_experts")
    routed = experts * (find("moe_intermediate_size") or dense)
    shares_all = _number(text, "multi_query") and not _number(text, "new_decoder_architecture")
    query, latent = heads * head_dim, 0
    key_value = head_dim if shares_all else (find("num_key_value_heads") or heads) * head_dim
    if rotated := find("qk_rope_head_dim"):  # flash attention pads values to the width of keys
        query = key_value = heads * (find("qk_nope_head_dim") + rotated)
        latent = 2 * (find("q_lora_rank") + find("kv_lora_rank")) + rotated
        latent += heads * find("v_head_dim")
    return Widths(
        layers=layers + (find("num_decoder_layers", "decoder_layers") if _is_pair(text) else 0),
        hidden=hidden,
        query=query,
        key_value=key_value,
        feed_forward=routed + shared if experts else dense,
        heads=heads,
        vocabulary=find("vocab_size"),
        routed_copies=2 * experts,
        routed_features=routed,
        latent=latent,
        has_dropout=any(_number(text, name) for name in DROPOUTS),
        caps_scores=bool(find("attn_logit_softcapping")),
        layer_inputs=find("hidden_size_per_layer_input"),
        norms_heads=kind.norms_heads,
        widest_head=max(head_dim, find("global_head_dim")),
        model_type=text.model_type,
        kind=replace(kind, activation="" if kind.is_gated and not kind.has_gate else function),
    )


def _number(config: Any, name: str) -> Any:
    """Return a number of a config; the mean of its layers' where each has its own (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read such a number of the whole config
        numbers = [getattr(layer, name) for layer in config.per_layer_config]
        return sum(numbers) / len(numbers)


def _is_pair(config: Any) -> bool:
    return bool(config.is_encoder_decoder)
