"""The structure and dimensions of a model's layers, as far as they affect activation memory.

The structure is detected from a layer's modules or, before a layer is built, looked up by model
type. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ALL_EXPERTS = ("llama4_text",)
"""model types in which every expert computes every token, with weight 0 if it was not chosen"""
DROPOUTS = ("resid_pdrop", "hidden_dropout", "dropout")
"""names in config.json of the dropout on the outputs of attention and feed-forward"""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
"""names in config.json of the feed-forward's activation function"""
VERIFIED = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "olmo3"),
    *("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "phi", "phi3"),
    *("glm4", "glm4_moe", "gpt_oss", "gpt2", "falcon", "bloom", "llama4_text", "deepseek_v3", "t5"),
    "bart",
)
"""model types whose estimates were verified: within 2.5 % of a simulated training step"""
JOINED = ("qkv_proj",)
"""names of a joint matrix for queries, keys and values whose output is not copied for the values"""
UNGATED = ("fc1", "fc_in", "c_fc", "dense_h_to_4h")
"""names of the first matrix of an ungated feed-forward"""


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


LLAMA_LAYER = LayerKind()
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
"""structures by model type, for estimates from config.json alone, which does not contain them"""


def kind_of_config(config: Any) -> LayerKind:
    """Return the structure of a model's layers from its config and `KINDS`."""
    kind = KINDS.get(config.model_type, LLAMA_LAYER)
    if config.model_type != "falcon" or getattr(config, "new_decoder_architecture", False):
        return kind
    return replace(kind, num_norms=1 if getattr(config, "parallel_attn", True) else 2)


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
        is_gated=names.isdisjoint(UNGATED),
        joins_heads=not names.isdisjoint(JOINED),
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
    kind: LayerKind = LLAMA_LAYER
    """structure of the layers"""

    @property
    def is_compared(self) -> bool:
        """Return whether estimates for these layers were compared with a simulated step."""
        return self.model_type in VERIFIED and not self.layer_inputs

    @property
    def inputs(self) -> int:
        """Input features of all matrices of a layer."""
        return 5 * self.hidden + self.query + self.feed_forward

    @property
    def outputs(self) -> int:
        """Output features of all matrices of a layer."""
        return self.query + 2 * self.key_value + 2 * self.hidden + 2 * self.feed_forward


def widths_of(architecture: Any, kind: LayerKind | None = None) -> Widths | None:
    """Return the dimensions of a transformers config; None if it lacks the basic ones.

    `kind`: structure of the layers, if it was detected from built layers.
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
    # GPT-2's n_inner may be null, which means four times the hidden size.
    dense = find(*names, "n_inner") or 4 * hidden
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
    if rotated := find("qk_rope_head_dim"):  # flash attention pads values to the keys' head size
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
    """Return a config value; the mean over layers if each layer has its own (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # raised by transformers for values that differ between layers
        numbers = [getattr(layer, name) for layer in config.per_layer_config]
        return sum(numbers) / len(numbers)


def _is_pair(config: Any) -> bool:
    return bool(config.is_encoder_decoder)
