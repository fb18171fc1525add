"""What the activations of a training step take on a GPU, by arithmetic: bytes a token and layer.

Of decoder layers with attention and a gated feed-forward, as autograd keeps them; other layers are
a guess, as the plan says of what is not `COMPARED`. Needs no torch and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

FP32, HALF = 4, 2
"""bytes of a number"""
LOGITS_PER_CHUNK = 2**25
"""logits in memory at once: 128 MiB in fp32, enough for products at full speed"""
CPU_LOGITS, CPU_ROWS = 2**21, 256
"""logits of a chunk that stay in a CPU's cache, and its least rows for fast products"""
GPU_ROWS = 1024
"""least positions of a chunk on a GPU: with fewer, reading the weight dominates"""
GPU_TILE = 128
"""rows of a tile of a GPU's products"""
LOSS_BYTES = 6
"""of each logit of a chunk by PyTorch's operators: half precision, and fp32"""
FUSED_CHUNKS, TRAINED_CHUNKS = 2, 4
"""how much longer chunks are by one kernel, which needs no logits in fp32; and of a head that
trains, to whose gradient each chunk adds over all of it"""
WIDEST_FLASH_HEAD = 256
"""limit of FlashAttention"""
HALF_SCORES = ("gpt_oss",)
"""model types whose eager attention keeps its probabilities in half precision alone"""
CLAMPED_GATES = ("gpt_oss",)
"""model types whose gate is eight operators, which no module of theirs shows"""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
"""names of the gate's function in config.json"""
COMPARED = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "olmo3"),
    *("gemma", "gemma3_text", "gemma4_unified_text", "glm4", "glm4_moe", "gpt_oss", "t5"),
)
"""model types whose steps were simulated, a layer of which keeps what is said here within 3 %"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What a layer is made of, as far as it changes what it keeps; a Llama's if nothing is said."""

    num_norms: int = 2
    """of hidden states; four where what attention and feed-forward return is normalized, too"""
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    norms_values: bool = False
    has_rms_norms: bool = True
    """which a kernel may replace"""
    has_gate: bool = True
    """of matrices of their own, which a kernel may stand between"""
    activation: str = "silu"
    """of the gate, by config.json, or of the model type where that does not say"""
    shared_experts: int = 0
    """features of the experts that every token goes to"""


_PLAIN = LayerKind(has_rms_norms=False, has_gate=False)
KINDS = {
    "qwen3": LayerKind(norms_heads=True),
    "gemma": LayerKind(activation="gelu_pytorch_tanh"),
    "gemma2": LayerKind(num_norms=4, activation="gelu_pytorch_tanh"),
    "gemma3_text": LayerKind(num_norms=4, norms_heads=True, activation="gelu_pytorch_tanh"),
    "phi3": LayerKind(has_gate=False),
    **dict.fromkeys(("phi", "gpt2", "falcon", "bloom", "t5", "bart"), _PLAIN),
}
"""of model types that are planned before a layer is built, by a config.json that does not say it;
of all others it is found in their modules"""


def kind_of_layer(layer: Any, shared_experts: int) -> LayerKind:
    """Return what a layer's module is made of; a norm alone is counted as two, with room to spare.

    Classes and names are those by which `app.model.kernels` finds what a kernel may replace.
    """
    modules = dict(layer.named_modules())
    names = {name.rpartition(".")[2] for name in modules}
    norms = [child for child in layer.children() if "Norm" in type(child).__name__]
    return LayerKind(
        num_norms=max(2, len(norms)),
        norms_heads=not names.isdisjoint(("q_norm", "k_norm", "qk_norm")),
        norms_values="v_norm" in names,
        has_rms_norms=any("RMSNorm" in type(module).__name__ for module in modules.values()),
        has_gate=names.issuperset(("gate_proj", "up_proj", "down_proj")),
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
    norms_heads: bool = False
    """whether queries and keys are normalized"""
    widest_head: int = 0
    model_type: str = ""
    kind: LayerKind = LayerKind()

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
    kind = kind or KINDS.get(text.model_type, LayerKind())
    shared = find("shared_expert_intermediate_size") or kind.shared_experts
    functions = (_number(text, name) for name in ACTIVATIONS)
    function = next((each for each in functions if isinstance(each, str)), kind.activation)
    routed = experts * (find("moe_intermediate_size") or dense)
    return Widths(
        layers=layers + (find("num_decoder_layers", "decoder_layers") if _is_pair(text) else 0),
        hidden=hidden,
        query=heads * head_dim,
        key_value=(find("num_key_value_heads") or heads) * head_dim,
        feed_forward=routed + shared if experts else dense,
        heads=heads,
        vocabulary=find("vocab_size"),
        routed_copies=2 * experts,
        norms_heads=kind.norms_heads,
        widest_head=max(head_dim, find("global_head_dim")),
        model_type=text.model_type,
        kind=replace(kind, activation=function if kind.has_gate else ""),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """How a model's layers are computed, as far as it changes what they keep."""

    tokens: int
    """of a micro-batch on one device"""
    width: int = HALF
    """bytes of what matrices read and write"""
    residual: int = HALF
    """bytes of the stream between layers"""
    fuses_norm_and_gate: bool = False
    trains_base: bool = False
    drops: bool = False
    """whether each adapter reads its own dropped input"""
    copies: int = 0
    """of what each matrix reads, that its adapter keeps in place of what they share: autocast's of
    an input in fp32"""
    results: int = 0
    """of what each matrix writes, that its adapter keeps: DoRA scales the base's and LoRA's"""
    keeps_scores: bool = False
    """whether attention is not one kernel: scores [heads, tokens, tokens] of each sequence"""
    sequence_len: int = 0
    groups_documents: bool = False
    """whether each document's queries, keys and values are copied for attention, and its output"""
    repeats_heads: bool = False
    """and keys and values are, for each query's head"""
    ranks: float = 0.0
    """of a layer's adapters together: each keeps what its first matrix returns"""
    scaled_inputs: float = 0.0
    """features of a layer that IA3 scales before a matrix reads them"""
    scaled_outputs: float = 0.0
    """and those that it scales after one"""
    adapter_width: int = FP32
    """bytes of a number of what trains"""

    def fuses_gate(self, widths: Widths) -> bool:
        """Return whether the gate's product is one kernel, which that of experts is not."""
        has_kernel = widths.kind.has_gate and widths.kind.activation in ("silu", "swish")
        return self.fuses_norm_and_gate and has_kernel and not widths.routed_copies

    def norm_bytes(self) -> int:
        """Return the bytes of a feature that a norm keeps: its input, or a copy in fp32."""
        return self.residual if self.fuses_norm_and_gate else FP32


def bytes_of_layer(widths: Widths, kept: Kept, mode: str) -> float:
    """Return the bytes a token that one layer keeps from its forward to its backward pass."""
    hidden, width = widths.hidden, kept.width
    if mode == "offload":
        return 0
    if mode == "full":
        return kept.residual * hidden
    if mode == "selective":
        # Products that do not widen, and attention where it is one operator.
        keeps_queries = (widths.query <= hidden) + (not kept.keeps_scores)
        narrow = keeps_queries * widths.query + 2 * widths.key_value + 2 * hidden
        return kept.residual * hidden + width * narrow
    # Two norms and what they return, attention's four tensors, the gate's three.
    norm = kept.norm_bytes()
    if kept.trains_base and not kept.fuses_norm_and_gate:
        norm += kept.residual
    of_layer = 2.0 * (norm + width) * hidden + bytes_of_feed_forward(widths, kept)
    of_layer += width * 2 * (widths.query + widths.key_value)
    of_layer += (widths.kind.num_norms - 2) * norm * hidden
    of_layer += norm * (widths.query + widths.key_value) * widths.norms_heads
    if widths.kind.norms_values:  # in Gemma 4 by a norm without weights, which no kernel takes
        of_layer += FP32 * widths.key_value
    if kept.groups_documents:
        of_layer += width * widths.query
        of_layer += 2 * width * (widths.query - widths.key_value) * kept.repeats_heads
    if widths.routed_copies:  # each expert has its own copy of the second norm's
        of_layer -= width * hidden
    of_layer += _kept_by_adapters(widths, kept)
    if kept.keeps_scores:
        of_layer += score_bytes(widths, kept) * widths.heads * kept.sequence_len
    return of_layer


def bytes_of_feed_forward(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token that a layer's gate keeps, and its experts of their inputs."""
    of_gate = 8 if widths.model_type in CLAMPED_GATES else 3 if kept.fuses_gate(widths) else 4
    features = of_gate * widths.feed_forward + widths.routed_copies * widths.hidden
    return float(kept.width * features)


def score_bytes(widths: Widths, kept: Kept) -> int:
    """Return the bytes that attention in more than one kernel keeps of a score: its probability,
    in fp32 and in the values' dtype.
    """
    return kept.width if widths.model_type in HALF_SCORES else FP32 + kept.width


def bytes_of_pair_layer(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token of its side that a layer of a T5 keeps, the mean of both sides.

    Its norms keep their input and a copy in fp32; its GELU is five operators, four of which keep
    fp32; each dropout keeps a mask; a decoder's layer has a causal copy of the bias.
    """
    hidden, width = widths.hidden, kept.width
    of_norm = (FP32 + kept.residual + width) * hidden
    attention = of_norm + width * 2 * (widths.query + widths.key_value) + hidden
    feed_forward = of_norm + hidden + (4 * FP32 + 3 * width + 1) * widths.feed_forward
    causal_bias = bias_bytes(widths, kept) / (kept.tokens / 2)
    both = (attention + feed_forward) + (2 * attention + feed_forward + causal_bias)
    return both / 2 + width * kept.ranks


def _kept_by_adapters(widths: Widths, kept: Kept) -> float:
    """Return the bytes a token that adapters keep beside what their layer does, which may be
    less: matrices that do not train need no inputs.
    """
    width = kept.width
    shared = width * (2 * widths.hidden + widths.feed_forward)
    if kept.scaled_inputs or kept.scaled_outputs:
        scaled = kept.adapter_width * kept.scaled_inputs + width * kept.scaled_outputs
        return scaled - shared
    own = max(kept.copies, int(kept.drops))
    copied = (width * own + kept.drops) * widths.inputs - shared if own else 0
    return copied + width * (kept.results * widths.outputs + kept.ranks)


def bias_bytes(widths: Widths, kept: Kept) -> float:
    """Return the bytes of a T5's bias of attention, the same for all sequences."""
    return float(kept.width * widths.heads * kept.sequence_len**2)


def rows_per_chunk(vocabulary: int, device: str) -> int:
    """Return the number of positions whose logits are in memory at once."""
    rows = max(1, LOGITS_PER_CHUNK // vocabulary)
    if device == "cpu":
        from app.model.cpu.fp32 import ROWS

        rows = min(rows, max(CPU_LOGITS // vocabulary, CPU_ROWS))
        return rows - rows % ROWS or rows
    rows = max(rows, GPU_ROWS)
    return rows - rows % GPU_TILE
