"""The modules of a base before it is loaded: from the headers of its files, else its config.json.

Names are those of transformers' modules in memory. One function per family of architectures
computes names and shapes of the matrices from the numbers in config.json. Needs no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from app.model.adapter import BaseModules

Shapes = dict[str, tuple[int, ...]]
"""weight name without `.weight` -> shape"""
MAX_LAYERS = 10_000
Numbers = Mapping[str, Any]
PREFIXES = ("", "model.", "transformer.")
"""names of the outermost module, which some files omit"""
TABLE = re.compile(r"(^|\.)((?!embed_out$)\w*embed\w*|wte|wpe|shared|relative_attention_bias)$")
"""modules whose matrix is a lookup table (an embedding)"""
HEAD = re.compile(r"(^|\.)(lm_head|embed_out)$")
INPUT_EMBEDDING = re.compile(r"(^|\.)(shared|embed_tokens|wte|word_embeddings|embed_in)$")
NO_PREFIX = re.compile(r"(h|layers|blocks)\.\d+\.")
"""a layer's tensor in a file that omits the outermost module's name"""
LAYER = re.compile(r"(?P<layer>(?P<stack>\D*?\.|)(?P<number>\d+))\.")
"""a repeated layer: the first number in a name"""
EXPERT = re.compile(
    r"(?P<layer>.*?)experts\.(?P<number>\d{1,6})\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
"""a matrix of a single expert, in files"""
EXPERTS = re.compile(r"experts\.|block_sparse_moe\.")


def modules_of_files(
    name: str, numbers: Numbers, tensors: Shapes, *, is_packed: bool = False
) -> BaseModules:
    """Return the modules of a base from the headers of its files, completed by `numbers`.

    `numbers`: content of config.json. `is_packed`: the tensors are quantized, so their shapes are
    not those of the matrices.
    """
    described: Shapes = {}
    tensors, experts = fuse_experts(tensors)
    is_short = any(map(NO_PREFIX.match, tensors))
    if is_packed or is_short or numbers.get("is_encoder_decoder"):
        described = shapes_of_architecture(numbers) or {}
        tensors = _with_full_names(tensors, described)
    if is_short and not described:
        return BaseModules(name=name)  # the names in memory are unknown
    matrices = matrices_of(tensors)
    paths = [name.split(".")[:-1] for name in tensors] + [name.split(".") for name in described]
    head = next(filter(HEAD.search, matrices), "lm_head")
    paths.append(head.split("."))
    tables = [each for each in described | matrices if TABLE.search(each)]
    return _modules(
        name,
        numbers,
        described if is_packed else described | matrices,
        # With the modules that contain them.
        weighted=sorted(
            {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        ),
        layers=_layers(numbers, [*tensors, *experts]),
        experts=experts,
        # A weight shared by several modules is saved once.
        shared=[each for each in (*tables, head) if each not in matrices],
    )


def modules_of_architecture(name: str, numbers: Numbers) -> BaseModules:
    """Return the modules of a base from the numbers in its config.json alone."""
    described = shapes_of_architecture(numbers) or {}
    shared = ["lm_head"] if numbers.get("tie_word_embeddings") is True else []
    layers = _layers(numbers, described)
    return _modules(name, numbers, described, weighted=None, layers=layers, shared=shared)


def _modules(
    name: str,
    numbers: Numbers,
    matrices: Shapes,
    *,
    weighted: Sequence[str] | None,
    layers: Sequence[str] | None,
    shared: Sequence[str],
    experts: Shapes | None = None,
) -> BaseModules:
    embedding = next(filter(INPUT_EMBEDDING.search, sorted(matrices, key=len)), None)
    linear = {each: shape for each, shape in matrices.items() if not TABLE.search(each)}
    head = next(filter(HEAD.search, linear), "lm_head")
    if embedding is not None:
        linear.setdefault(head, matrices[embedding])
    return BaseModules(
        name=name,
        model_type=numbers.get("model_type"),
        linear=linear or None,
        experts=experts or {},
        weighted=weighted,
        layers=layers,
        embeddings=() if embedding is None else tuple(dict.fromkeys((embedding, *shared))),
        head=head,
    )


def fuse_experts(tensors: Shapes) -> tuple[Shapes, Shapes]:
    """Return the tensors of files without those of experts, and the experts' fused weights.

    Files have one tensor per expert, or one for all; in memory, all experts of a layer have one
    `gate_up_proj` and one `down_proj` [experts, rows, columns].
    """
    rest: Shapes = {}
    fused: Shapes = {}
    rows: Counter[str] = Counter()
    for name, shape in tensors.items():
        single = EXPERT.fullmatch(name)
        if single and len(shape) == 2:
            part = "down_proj" if single["part"] in ("down_proj", "w2") else "gate_up_proj"
            layer = single["layer"].replace("block_sparse_moe", "mlp")
            weight = f"{layer}experts.{part}"
            rows[weight] += shape[0]
            num_experts = max(int(single["number"]) + 1, fused.get(weight, (0,))[0])
            fused[weight] = (num_experts, rows[weight] // num_experts, shape[1])
        elif len(shape) == 3 and EXPERTS.search(name):
            fused[_name_in_memory(name)] = shape
        else:
            rest[name] = shape
    return rest, fused


def _name_in_memory(name: str) -> str:
    """Return the name in memory of fused experts, which differs in Granite's files."""
    for theirs, ours in (("input_linear", "gate_up_proj"), ("output_linear", "down_proj")):
        name = name.replace(f"block_sparse_moe.{theirs}.weight", f"block_sparse_moe.experts.{ours}")
    return name


def matrices_of(tensors: Shapes) -> Shapes:
    """Return the shapes of two-dimensional weights by module."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in tensors.items()
        if len(shape) == 2 and name.endswith(".weight")
    }


def _with_full_names(tensors: Shapes, described: Shapes) -> Shapes:
    """Return tensors under their names in memory: with the omitted name of the outermost module."""
    modules = {name: name.rpartition(".")[0] for name in tensors}
    prefix = max(PREFIXES, key=lambda p: sum(p + each in described for each in modules.values()))
    return {
        name if modules[name] in described else prefix + name: shape
        for name, shape in tensors.items()
    }


def _layers(numbers: Numbers, names: Iterable[str]) -> list[str] | None:
    """Return the repeated layers, an encoder's before its decoder's; None if it is ambiguous."""
    layers = {found["layer"]: found for name in names if (found := LAYER.match(name))}
    stacks = {found["stack"] for found in layers.values()}
    is_pair = len(stacks) == 2 and all(re.search("encoder|decoder", stack) for stack in stacks)
    if len(stacks) != 1 and not is_pair:
        return None
    # Multi-token prediction layers come after the others, and are not built.
    count = None if is_pair else numbers.get("num_hidden_layers")
    order = sorted(
        layers, key=lambda name: ("decoder" in layers[name]["stack"], int(layers[name]["number"]))
    )
    return order[:count] if isinstance(count, int) else order


def shapes_of_architecture(numbers: Numbers) -> Shapes | None:
    """Compute a model's matrices from its numbers; None for an unknown type or missing numbers."""
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
    """Return the shapes of `model.layers`, an embedding and a head."""
    ends = (int(numbers["vocab_size"]), int(numbers["hidden_size"]))
    shapes: Shapes = {"model.embed_tokens": ends, "lm_head": ends}
    return shapes | _repeat("model.layers", numbers["num_hidden_layers"], layer)


def _separate_attention(numbers: Numbers, output: str) -> Shapes:
    """Return a layer's attention with separate matrices; `output` names the output projection."""
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
    """Return GPT-2's shapes; its matrices are transposed: [inputs, outputs]."""
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
    """Return the shapes of `transformer.h` with one matrix for queries, keys and values."""
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
        # BART's position ids begin at 2.
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
