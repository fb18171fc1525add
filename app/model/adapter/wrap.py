"""Wrap a model with peft's adapters, and work around what peft (0.21) gets wrong or does slowly.

Covers embedding and head too: rows of both train, or all of it, but never one module of a tied pair
without the other. Trainable weights are listed by the base's names, without the parts that peft
adds to a name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from app.model.description import is_quantized, is_tied, name_of
from app.model.layers import find_bypassed_children, replaced
from app.model.quantization import storage_of
from common.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel


def adapter_disabled(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Run the base without its adapter in this context; a model without one runs as it is.

    peft's own context also stops the adapter's weights from requiring gradients, which a strategy
    that shards them would see, and ends an outer context of its kind.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = (module for module in model.modules() if isinstance(module, wrappers))
    return replaced((layer, "_disable_adapters", True) for layer in layers)


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Stop peft from importing bitsandbytes, which takes seconds, if no weight is quantized.

    peft (0.21) imports it wherever it is installed. A module that is None in `sys.modules` cannot
    be imported. peft caches what it finds; the caches are cleared at the end, since a quantized
    base may come next.
    """
    if "bitsandbytes" in sys.modules:  # imported by a quantized base
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    try:
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        is_bnb_available.cache_clear()
        is_bnb_4bit_available.cache_clear()
        yield
        is_bnb_available.cache_clear()
        is_bnb_4bit_available.cache_clear()
    finally:
        del sys.modules["bitsandbytes"]


def wrap(
    model: PreTrainedModel, config: peft.PeftConfig, *, autocast_adapter_dtype: bool = True
) -> peft.PeftModel:
    """Add a new adapter with these settings to a base, and freeze the base.

    Raises UserError if a module shares the embedding's weight but would not see its trained rows.
    """
    import peft

    from app.model.adapter.experts import fuse_experts, keep_target_modules, placeholders_for_packed
    from app.model.adapter.fused import FusedLoraFp8, FusedLoraLinear, lora_4bit_class

    # peft trusts these keys. FLAN-T5's head is a separate matrix, but T5's class lists it as tied,
    # and peft would copy the embedding's rows to it.
    weights = dict(model.named_parameters(remove_duplicate=False))
    model._tied_weights_keys = {
        name: source
        for name, source in (model._tied_weights_keys or {}).items()
        if weights.get(name) is weights.get(source)
    }
    with keep_target_modules(), placeholders_for_packed(model):
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    fuse_experts(adapted)
    _check_tied_rows(adapted)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.ia3.IA3Layer) and is_quantized(module):
            # On a quantized layer, peft's IA3 returns fp32.
            module.register_forward_hook(lambda _, inputs, output: output.to(inputs[0].dtype))
    # With activation checkpointing, peft makes the embedding's output require gradients. Only
    # reentrant checkpointing needs this, and the backward pass would run through frozen layers.
    model.disable_input_require_grads()
    for module in adapted.modules():
        if type(module) is peft.tuners.lora.Linear and _is_plain(module):
            is_fp8 = is_quantized(module.base_layer)
            module.__class__ = FusedLoraFp8 if is_fp8 else FusedLoraLinear
        elif _is_in_4_bits(module) and _is_plain(module):
            module.__class__ = lora_4bit_class()
    return adapted


IN_4_BITS, FUSED_IN_4_BITS = "Linear4bit", "FusedLora4bit"
"""names of LoRA layer classes that exist only if bitsandbytes is installed"""


def skip_redundant_casts(model: torch.nn.Module) -> None:
    """Stop peft from casting LoRA's inputs, and from copying the outputs of 4-bit layers.

    For models in half precision, by autocast or as a whole. peft casts each input to the dtype of
    its fp32 matrices, and autocast casts it back: two copies of every activation, one of them saved
    for the backward pass, for the same products. peft also copies the output of a 4-bit layer, in
    case it is a view. DoRA computes norms in its input's dtype, so its layers keep the casts.
    """
    import peft

    lora = peft.tuners.lora
    for module in model.modules():
        if not isinstance(module, lora.LoraLayer) or module.lora_variant:
            continue
        kind = type(module).__name__
        if kind == IN_4_BITS:
            module.forward = MethodType(lora.Linear.forward, module)
        if kind in (IN_4_BITS, FUSED_IN_4_BITS) or isinstance(module, lora.Linear):
            module.cast_input_dtype_enabled = False


def unfuse_adapters(model: torch.nn.Module) -> None:
    """Give all LoRA layers peft's forward again, for strategies that hook the matrix's forward."""
    import peft

    from app.model.adapter.fused import FusedLoraLinear

    lora = peft.tuners.lora
    for module in model.modules():
        if isinstance(module, FusedLoraLinear):
            module.__class__ = lora.Linear
        elif type(module).__name__ == FUSED_IN_4_BITS:
            module.__class__ = lora.Linear4bit
            module.forward = MethodType(lora.Linear.forward, module)


def is_fused(layer: torch.nn.Module) -> bool:
    """Return whether a module is a LoRA layer with a fused forward."""
    return "group" in vars(type(layer))


def _is_in_4_bits(module: torch.nn.Module) -> bool:
    import peft

    # bitsandbytes has a class of the same name.
    return type(module).__name__ == IN_4_BITS and isinstance(module, peft.tuners.lora.LoraLayer)


def _is_plain(layer: Any) -> bool:
    """Return whether a layer computes W x + bias + scale B A x: one adapter, no DoRA, no Conv1D."""
    import torch

    from app.model.fp8 import Fp8Linear

    parts = (*layer.lora_A.values(), *layer.lora_B.values())
    return (
        (type(layer.base_layer) in (torch.nn.Linear, Fp8Linear) or _is_in_4_bits(layer))
        and list(layer.lora_A) == ["default"]
        and not layer.lora_variant
        and not layer.fan_in_fan_out
        and all(part.bias is None for part in parts)
    )


def group_adapters(model: torch.nn.Module, run: Callable[[], Any]) -> int:
    """Compute fused layers of one module that read the same tensor together; count the groups.

    `run` runs the model once, to record the input of each layer.
    """
    from app.model.adapter.fused import LoraGroup

    inputs = _record_inputs(model, run)
    count = 0
    for parent in model.modules():
        alike: dict[Any, list[Any]] = {}
        for layer in filter(inputs.__contains__, parent.children()):
            key = id(inputs[layer]), *layer.scaling.values()
            alike.setdefault(key, []).append(layer)
        for layers in alike.values():
            if len(layers) > 1:
                group = LoraGroup(sorted(layers, key=list(inputs).index))
                for layer in layers:
                    layer.group = group
                count += 1
    return count


def _record_inputs(model: torch.nn.Module, run: Callable[[], Any]) -> dict[Any, torch.Tensor]:
    """Return the input of each layer that can be grouped, in order of the forward pass.

    Layers with dropout, and layers that run more than once, cannot be grouped.
    """
    import torch

    inputs: dict[Any, torch.Tensor] = {}
    excluded: set[Any] = set()

    def record(layer: Any, args: tuple[torch.Tensor, ...]) -> None:
        if layer in inputs or not args:
            excluded.add(layer)
        else:
            inputs[layer] = args[0]

    hooks = [
        layer.register_forward_pre_hook(record)
        for layer in model.modules()
        if is_fused(layer)
        and all(isinstance(drop, torch.nn.Identity) for drop in layer.lora_dropout.values())
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return {layer: given for layer, given in inputs.items() if layer not in excluded}


def hold_transposed(model: PreTrainedModel) -> None:
    """Hold transposed copies of frozen FP8 weights, those of a group's layers side by side."""
    from app.model.adapter.fused import FusedLoraFp8
    from app.model.fp8 import Fp8Linear, transpose

    groups = {layer: [layer] for layer in model.modules() if isinstance(layer, Fp8Linear)}
    for module in model.modules():
        if isinstance(module, FusedLoraFp8) and module.group is not None:
            layers = [each.base_layer for each in module.group.layers]
            groups |= dict.fromkeys(layers, layers)
    for layer, layers in groups.items():
        if layer is layers[0] and layer.columns is None:
            layer.columns = transpose([each.weight for each in layers])


def ungroup_adapters(model: torch.nn.Module) -> None:
    """Compute every layer by itself again."""
    for layer in model.modules():
        vars(layer).pop("group", None)


def drop_pending_outputs(model: torch.nn.Module) -> None:
    """Release outputs that groups computed for layers which an error kept from running."""
    for layer in model.modules():
        if is_fused(layer) and layer.group is not None:
            layer.group.drop_outputs()


def trainable_rows(
    model: PreTrainedModel, token_ids: Sequence[int], full_modules: Sequence[str]
) -> dict[str, list[int]]:
    """Return the rows to train, by full name of the embedding and, if it is untied, the head.

    Modules in `full_modules` train all their rows anyway. Raises UserError for a token without a
    row, and if peft could not train the head's rows.
    """
    if not token_ids:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows = embedding.num_embeddings
    if not (min(token_ids) >= 0 and max(token_ids) < num_rows):
        raise UserError(
            f"token {max(token_ids)} has no row: the embedding has {num_rows} rows; "
            "list new tokens in model.added_tokens"
        )
    modules: list[Any] = [embedding] if is_tied(model) else [embedding, head]
    names = [name_of(model, module) for module in modules]
    rows = {name: list(token_ids) for name in names if name not in full_modules}
    if rows and head.bias is not None and name_of(model, head) not in full_modules:
        raise UserError(
            "model.added_tokens, adapter.trainable_tokens: the head of this base has a bias, which "
            "peft would drop; type adapter.modules_to_save="
            f"[{','.join(names)}] to train all rows"
        )
    return rows


def _check_tied_rows(model: peft.PeftModel) -> None:
    """Raise UserError if a module shares the embedding's weight but not its trained rows."""
    import peft

    base = model.get_base_model()
    wrappers = [m for m in base.modules() if isinstance(m, peft.utils.other.TrainableTokensWrapper)]
    wrapped = {id(wrapper.original_module) for wrapper in wrappers}
    weights = {id(wrapper.original_module.weight) for wrapper in wrappers}
    for name, module in base.named_modules():
        if id(module._parameters.get("weight")) in weights and id(module) not in wrapped:
            raise UserError(
                f"model.added_tokens, adapter.trainable_tokens: {name} shares the embedding's "
                "weight, but peft would not train its rows; type adapter=full"
            )


def check_token_rows_train(model: peft.PeftModel, token_ids: Sequence[int]) -> None:
    """Raise UserError if an adapter does not train the rows of all `token_ids`."""
    import peft

    embedding = model.get_base_model().get_input_embeddings()
    if isinstance(embedding, peft.utils.other.ModulesToSaveWrapper):
        return
    is_partly = isinstance(embedding, peft.utils.other.TrainableTokensWrapper)
    trained = embedding.token_adapter.token_indices["default"] if is_partly else []
    if missing := sorted(set(token_ids) - set(trained)):
        raise UserError(
            f"model.added_tokens: the adapter in adapter.path does not train the rows of tokens "
            f"{missing}; leave out adapter.path"
        )


@dataclass(slots=True)
class TrainableReport:
    num_trainable: int
    num_total: int
    dtypes: dict[str, int]
    """number of parameters by dtype"""
    num_bytes: int
    """size of all parameters"""


def report_trainable(model: torch.nn.Module) -> TrainableReport:
    """Count the parameters of a model; raise UserError if none is trainable."""
    dtypes: dict[str, int] = {}
    trainable = num_bytes = 0
    for parameter in model.parameters():
        storage = storage_of(parameter)
        dtypes[storage.dtype] = dtypes.get(storage.dtype, 0) + storage.num_weights
        num_bytes += storage.num_bytes
        trainable += storage.num_weights if parameter.requires_grad else 0
    if not trainable:
        raise UserError("no parameter would be trained: check adapter.target_modules")
    return TrainableReport(trainable, sum(dtypes.values()), dtypes, num_bytes)


def external_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, torch.nn.Parameter]]:
    """Yield each layer with the weights it reads without calling the module that owns them.

    A strategy that shards weights must gather these for the layer too (DeepSpeed calls them
    external parameters). IA3's vectors and LoRA's embedding matrices are in parameter containers;
    trained token rows are written into the whole embedding; DoRA computes norms of a matrix and its
    adapter; fused experts receive A and B; mixers read the weight of their convolution.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    containers = (torch.nn.ParameterDict, torch.nn.ParameterList)
    for layer in model.modules():
        owners: list[torch.nn.Module] = [
            child for child in layer.children() if isinstance(child, containers)
        ]
        if isinstance(layer, TrainableTokensLayer):
            owners.append(layer.get_base_layer())
            if layer.tied_adapter is not None:
                owners.append(layer.tied_adapter)
        elif isinstance(layer, ParamWrapper):
            owners += [*layer.lora_A.values(), *layer.lora_B.values()]
        elif isinstance(layer, LoraLayer) and len(layer.lora_magnitude_vector) > 0:
            owners += layer.children()
        read = (layer._modules.get(name) for name in find_bypassed_children(layer.__class__))
        owners += [child for child in read if child is not None]
        for owner in owners:
            for weight in owner.parameters():
                yield layer, weight


ADAPTER_PARTS = {
    "lora_A": "lora A",
    "lora_B": "lora B",
    "lora_embedding_A": "lora embedding A",
    "lora_embedding_B": "lora embedding B",
    "lora_magnitude_vector": "magnitude",
    "ia3_l": "ia3 vector",
    "trainable_tokens_delta": "token rows",
}
"""peft's name of an adapter's part -> its usual name"""
_PREFIX = "base_model.model."
WRAPPERS = {"base_layer", "original_module", "modules_to_save", "token_adapter", "default"}
"""parts that peft adds to the name of a base's weight"""


@dataclass(frozen=True, slots=True)
class TrainableWeight:
    """One trainable parameter."""

    name: str
    """full name in the base, as model.layers.0.self_attn.q_proj.lora_A.weight"""
    module: str
    """full name of its module in the base, as model.layers.0.self_attn.q_proj"""
    kind: str
    """a value of ADAPTER_PARTS; for a parameter of the base its own name: weight, bias"""
    parameter: torch.nn.Parameter

    @property
    def is_vector(self) -> bool:
        """Whether it scales or shifts single features; IA3 stores its vectors as [n, 1]."""
        return self.parameter.ndim < 2 or self.kind == "ia3 vector"


def trainable_weights(model: torch.nn.Module) -> list[TrainableWeight]:
    """List the trainable parameters in the model's order; a tied one is listed once."""
    from peft.tuners.lora.layer import ParamWrapper

    expert_parameters = {
        name: module.parameter_name
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper)
    }

    def unique_name(name: str) -> str:
        """Insert the expert parameter: one module may have an adapter on each of several."""
        owner, _, part = name.partition(".lora_")
        parameter = expert_parameters.get(owner)
        return name if parameter is None else f"{owner}.{parameter}.lora_{part}"

    return [
        _described(unique_name(name), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def adapter_matrices(model: torch.nn.Module) -> list[TrainableWeight]:
    """List the adapter weights that every token passes through: all but trained token rows."""
    on_modules = set(ADAPTER_PARTS.values()) - {"token rows"}
    return [weight for weight in trainable_weights(model) if weight.kind in on_modules]


def expert_matrices(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int, int]]:
    """Yield the low-rank matrices of fused experts, each with the dimension of its experts.

    The last number is that of equal blocks of this dimension that hold parts of all experts: peft
    has A [experts x rank, in], and B [out, rank x experts].
    """
    from peft.tuners.lora.layer import ParamWrapper

    for layer in module.modules():
        if isinstance(layer, ParamWrapper):
            for name, rank in layer.r.items():
                yield layer.lora_A[name], 0, 1
                yield layer.lora_B[name], 1, rank


def _described(name: str, parameter: torch.nn.Parameter) -> TrainableWeight:
    parts = name.split(".")
    if name.startswith(_PREFIX):
        parts = [part for part in name.removeprefix(_PREFIX).split(".") if part not in WRAPPERS]
    name = ".".join(parts)
    for place, part in enumerate(parts):
        if part in ADAPTER_PARTS:
            return TrainableWeight(name, ".".join(parts[:place]), ADAPTER_PARTS[part], parameter)
    return TrainableWeight(name, ".".join(parts[:-1]), parts[-1], parameter)
