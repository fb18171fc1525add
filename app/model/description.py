"""A base as one object, described from its files' headers, its config.json, or its modules.

Names are those of transformers' modules in memory, whichever source they are taken from. The first
two need no torch. `families` tells what config.json does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.model.architecture import text_numbers
from app.model.families import Config, Shapes, family_of, shapes_of_config
from app.model.layers import is_inside, repeated_layers
from app.model.multimodal import describe_language_model, language_model_name
from app.model.rope import dynamic_factor

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_OLDER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "encoder_layers"),
    "num_attention_heads": ("n_head", "num_heads", "encoder_attention_heads"),
    "head_dim": ("d_kv",),
    "max_position_embeddings": ("n_positions",),
}
"""names of the same keys in older config.json files"""
_PREFIXES = ("", "model.", "transformer.")
"""names of the outermost module, which some files omit"""
_TABLE = re.compile(r"(^|\.)((?!embed_out$)\w*embed\w*|wte|wpe|shared|relative_attention_bias)$")
"""modules whose matrix is a lookup table (an embedding)"""
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)$")
INPUT_EMBEDDING = re.compile(r"(^|\.)(shared|embed_tokens|wte|word_embeddings|embed_in)$")
_NO_PREFIX = re.compile(r"(h|layers|blocks)\.\d+\.")
"""a layer's tensor in a file that omits the outermost module's name"""
LAYER = re.compile(r"(?P<layer>(?P<stack>\D*?\.|)(?P<number>\d+))\.")
"""a repeated layer: the first number in a name"""
_EXPERT = re.compile(
    r"(?P<layer>.*?)experts\.(?P<number>\d{1,6})\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
"""a matrix of a single expert, in files"""
_EXPERTS = re.compile(r"experts\.|block_sparse_moe\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDescription:
    """A base: its config.json, and its modules by full name; None if only loading can tell."""

    name: str = "the model"
    config: Config = field(default_factory=dict)
    """content of config.json; empty if it is not known"""
    linear: Mapping[str, tuple[int, ...]] | None = None
    """linear modules, also quantized and GPT-2's transposed ones: name -> shape of the weight"""
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """modules that look up rows, as embeddings: name -> shape of the weight"""
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """fused experts: full name of the parameter -> its shape, [experts, ...]"""
    weighted: Sequence[str] | None = None
    """modules that contain weights, directly or in a submodule"""
    layers: Sequence[str] | None = None
    """the repeated layers, an encoder's before its decoder's; empty if the model has none"""
    embeddings: Sequence[str] = ()
    """the input embedding, then the modules that share its weight"""
    head: str | None = None
    """the output embedding"""

    def get(self, key: str) -> Any:
        """Return the language model's value of a key of config.json, or the family's default.

        The key may have an older name in config.json; None if it is unknown.
        """
        text = text_numbers(self.config)
        for name in (key, *_OLDER_NAMES.get(key, ())):
            if name in text:
                return text[name]
        return family_of(text.get("model_type")).defaults.get(key)

    @property
    def model_type(self) -> str | None:
        return self.config.get("model_type")

    @property
    def is_tied(self) -> bool:
        return self.head in self.embeddings

    @property
    def is_pair(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return bool(self.get("is_encoder_decoder"))

    @property
    def num_layers(self) -> int | None:
        """Number of layers, of encoder and decoder together; None if it is not known."""
        layers = self.get("num_hidden_layers")
        if not isinstance(layers, int):
            return None
        if not self.is_pair:
            return layers
        return layers + (self.get("num_decoder_layers") or self.get("decoder_layers") or layers)

    @property
    def context_len(self) -> int | None:
        """Tokens of the longest text; None if it is not known, or unlimited as in T5."""
        is_limited = self.get("relative_attention_num_buckets") is None
        context = self.get("max_position_embeddings")
        if not is_limited or not isinstance(context, int):
            return None
        return round(context * dynamic_factor(text_numbers(self.config)))


def describe_files(
    name: str, config: Config, tensors: Shapes, *, is_packed: bool = False
) -> BaseDescription:
    """Describe a base from the shapes in the headers of its files, completed by config.json.

    `is_packed`: the tensors are quantized, so their shapes are not those of the matrices.
    """
    described: Shapes = {}
    tensors, experts = _fuse_experts(tensors)
    is_short = any(map(_NO_PREFIX.match, tensors))
    if is_packed or is_short or config.get("is_encoder_decoder"):
        described = shapes_of_config(config) or {}
        tensors = _with_full_names(tensors, described)
    if is_short and not described:
        return BaseDescription(name=name, config=config)  # the names in memory are unknown
    matrices = matrices_of(tensors)
    paths = [name.split(".")[:-1] for name in tensors] + [name.split(".") for name in described]
    head = next(filter(_HEAD.search, matrices), "lm_head")
    paths.append(head.split("."))
    tables = [each for each in described | matrices if _TABLE.search(each)]
    return _describe(
        name,
        config,
        described if is_packed else described | matrices,
        # With the modules that contain them.
        weighted=sorted(
            {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        ),
        layers=_layers(config, [*tensors, *experts]),
        experts=experts,
        # A weight shared by several modules is saved once.
        shared=[each for each in (*tables, head) if each not in matrices],
    )


def describe_config(name: str, config: Config) -> BaseDescription:
    """Describe a base from its config.json alone."""
    matrices = shapes_of_config(config) or {}
    is_tied = BaseDescription(config=config).get("tie_word_embeddings")
    layers, shared = _layers(config, matrices), ["lm_head"] if is_tied else []
    return _describe(name, config, matrices, weighted=None, layers=layers, shared=shared)


def _describe(
    name: str,
    config: Config,
    matrices: Shapes,
    *,
    weighted: Sequence[str] | None,
    layers: Sequence[str] | None,
    shared: Sequence[str],
    experts: Shapes | None = None,
) -> BaseDescription:
    embedding = next(filter(INPUT_EMBEDDING.search, sorted(matrices, key=len)), None)
    tables = {each: shape for each, shape in matrices.items() if _TABLE.search(each)}
    linear = {each: shape for each, shape in matrices.items() if each not in tables}
    head = next(filter(_HEAD.search, linear), "lm_head")
    if embedding is not None:
        linear.setdefault(head, matrices[embedding])
    return BaseDescription(
        name=name,
        config=config,
        linear=linear or None,
        tables=tables,
        experts=experts or {},
        weighted=weighted,
        layers=layers,
        embeddings=() if embedding is None else tuple(dict.fromkeys((embedding, *shared))),
        head=head,
    )


def _fuse_experts(tensors: Shapes) -> tuple[Shapes, Shapes]:
    """Return the tensors of files without those of experts, and the experts' fused weights.

    Files have one tensor per expert, or one for all; in memory, all experts of a layer have one
    `gate_up_proj` and one `down_proj` [experts, rows, columns].
    """
    rest: Shapes = {}
    fused: Shapes = {}
    rows: Counter[str] = Counter()
    for name, shape in tensors.items():
        single = _EXPERT.fullmatch(name)
        if single and len(shape) == 2:
            part = "down_proj" if single["part"] in ("down_proj", "w2") else "gate_up_proj"
            layer = single["layer"].replace("block_sparse_moe", "mlp")
            weight = f"{layer}experts.{part}"
            rows[weight] += shape[0]
            num_experts = max(int(single["number"]) + 1, fused.get(weight, (0,))[0])
            fused[weight] = (num_experts, rows[weight] // num_experts, shape[1])
        elif len(shape) == 3 and _EXPERTS.search(name):
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
    prefix = max(_PREFIXES, key=lambda p: sum(p + each in described for each in modules.values()))
    return {
        name if modules[name] in described else prefix + name: shape
        for name, shape in tensors.items()
    }


def _layers(config: Config, names: Iterable[str]) -> list[str] | None:
    """Return the repeated layers, an encoder's before its decoder's; None if it is ambiguous."""
    layers = {found["layer"]: found for name in names if (found := LAYER.match(name))}
    stacks = {found["stack"] for found in layers.values()}
    is_pair = len(stacks) == 2 and all(re.search("encoder|decoder", stack) for stack in stacks)
    if len(stacks) != 1 and not is_pair:
        return None
    # Multi-token prediction layers come after the others, and are not built.
    count = None if is_pair else config.get("num_hidden_layers")
    order = sorted(
        layers, key=lambda name: ("decoder" in layers[name]["stack"], int(layers[name]["number"]))
    )
    return order[:count] if isinstance(count, int) else order


def describe_model(model: PreTrainedModel) -> BaseDescription:
    """Describe a base from its modules, loaded or on meta; of a multimodal one, those for text."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear: Shapes = {}
    tables: Shapes = {}
    experts: Shapes = {}
    weighted = []
    head = model.get_output_embeddings()
    language_model = language_model_name(model)
    for name, module in model.named_modules():
        if language_model and module is not head and not is_inside(name, [language_model]):
            continue
        if isinstance(module, Conv1D):
            linear[name] = (module.nx, module.nf)
        elif isinstance(module, torch.nn.Linear):  # a quantized weight has another shape
            linear[name] = (module.out_features, module.in_features)
        elif isinstance(module, torch.nn.Embedding):
            tables[name] = (module.num_embeddings, module.embedding_dim)
        if name and next(module.parameters(), None) is not None:
            weighted.append(name)
        experts |= _experts_of(name, module)
    return BaseDescription(
        name=describe_language_model(model),
        config=model.config.to_dict(),
        linear=linear,
        tables=tables,
        experts=experts,
        weighted=weighted,
        layers=repeated_layers(model),
        embeddings=sharing_embedding(model),
        head=None if head is None else name_of(model, head),
    )


def _experts_of(name: str, module: Any) -> Shapes:
    """Return a module's parameters with one matrix per expert, by full name."""
    from app.model.experts import PackedExperts, packed_shapes

    if (
        isinstance(module, PackedExperts)
        or "expert" not in f"{name} {type(module).__name__}".lower()
    ):
        return {}
    parameters = module.named_parameters(recurse=False)
    shapes = {leaf: tuple(parameter.shape) for leaf, parameter in parameters}
    shapes |= packed_shapes(module)
    return {f"{name}.{leaf}": shape for leaf, shape in shapes.items() if len(shape) == 3}


def sharing_embedding(model: PreTrainedModel) -> list[str]:
    """Return full names of all modules that hold the input embedding's weight, embedding first."""
    embedding = model.get_input_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if module._parameters.get("weight") is embedding.weight
    ]
    own = name_of(model, embedding)
    return [own, *(name for name in names if name != own)]


def names_by_id(weights: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    """Return all names of each weight, by its `id`; a tied weight has several names."""
    names: dict[int, list[str]] = {}
    for name, weight in weights.items():
        names.setdefault(id(weight), []).append(name)
    return names


def name_of(model: PreTrainedModel, wanted: torch.nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether any weight of a module is quantized, and so cannot train itself."""
    import torch

    return any(
        type(weight) is not torch.nn.Parameter or weight.dtype.itemsize == 1
        for weight in module.parameters()
    )
