"""Put peft's adapters on a model, and correct what peft (0.21) does wrong there.

So with embedding and head beside an adapter: some of their rows train or all, and never half of a
tied pair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from app.model.adapter.modules import is_quantized, is_tied, name_of
from app.process.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

MODULES_TO_SAVE = "adapter.modules_to_save"


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Have peft pass over bitsandbytes where no weight is quantized: importing it takes seconds.

    peft (0.21) imports it wherever it is installed. What is None among the modules cannot be
    imported; peft's answers are forgotten at the end, since a quantized base may come next.
    """
    if "bitsandbytes" in sys.modules:  # by the base, which is quantized
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
    """Put a new adapter of these settings on a base, which is frozen.

    ValueError where some of the modules that share the embedding's weight would not be trained.
    """
    import peft

    from app.model.adapter.experts import fuse_experts, keep_target_modules, placeholders_for_packed

    declare_ties(model)
    with keep_target_modules(), placeholders_for_packed(model):
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    fuse_experts(adapted)
    check_tied_rows(adapted)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.ia3.IA3Layer) and is_quantized(module):
            module.register_forward_hook(_keep_dtype)
    # peft asks for gradients at the embedding's output where layers are computed again; only
    # reentrant checkpointing needs them, and the backward pass would go too deep.
    model.disable_input_require_grads()
    _fuse_lora(adapted)
    return adapted


IN_4_BITS, FUSED_IN_4_BITS = "Linear4bit", "FusedLora4bit"
"""classes of LoRA layers that are there only where bitsandbytes is, by name"""


def skip_redundant_casts(model: torch.nn.Module) -> None:
    """Let LoRA read its input, and a 4-bit layer's output, as they are.

    For models that run in half precision, by autocast or all of it. peft gives each input the dtype
    of its fp32 matrices, and autocast takes it back: two copies of every activation, of which one
    is kept for the backward pass, for the very same products. And it copies what a 4-bit layer
    returns before it adds to it, in case that were a view. DoRA computes norms in its input's dtype
    and stays as it is.
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


def _keep_dtype(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """On a quantized layer peft's IA3 returns fp32, also in the middle of a bf16 model."""
    return output.to(inputs[0].dtype)


def _fuse_lora(model: torch.nn.Module) -> None:
    """Let every plain LoRA beside a frozen matrix, whole or in 4 bits, compute in one step."""
    import peft

    from app.model.adapter.fused import FusedLoraLinear

    for module in model.modules():
        if type(module) is peft.tuners.lora.Linear and _is_plain(module):
            module.__class__ = FusedLoraLinear
        elif _is_in_4_bits(module) and _is_plain(module):
            from app.model.adapter.fused_4bit import FusedLora4bit

            module.__class__ = FusedLora4bit


def unfuse_adapters(model: torch.nn.Module) -> None:
    """Let every LoRA call the matrix beside it, for strategies that stand in its forward."""
    import peft

    from app.model.adapter.fused import FusedLoraLinear

    lora = peft.tuners.lora
    for module in model.modules():
        if type(module) is FusedLoraLinear:
            module.__class__ = lora.Linear
        elif type(module).__name__ == FUSED_IN_4_BITS:
            module.__class__ = lora.Linear4bit
            module.forward = MethodType(lora.Linear.forward, module)


def _is_in_4_bits(module: torch.nn.Module) -> bool:
    import peft

    # bitsandbytes' own class has the same name.
    return type(module).__name__ == IN_4_BITS and isinstance(module, peft.tuners.lora.LoraLayer)


def _is_plain(layer: Any) -> bool:
    """Whether it is W x + bias + scale B A x: no DoRA, one adapter, no transposed matrix."""
    import torch

    parts = (*layer.lora_A.values(), *layer.lora_B.values())
    return (
        (type(layer.base_layer) is torch.nn.Linear or _is_in_4_bits(layer))
        and list(layer.lora_A) == ["default"]
        and not layer.lora_variant
        and not layer.fan_in_fan_out
        and all(part.bias is None for part in parts)
    )


def group_adapters(model: torch.nn.Module, run: Callable[[], Any]) -> int:
    """Let fused layers of one module that read the same tensor compute together; count the groups.

    `run` runs the model once, which shows what each layer reads.
    """
    from app.model.adapter.fused import LoraGroup

    seen = _inputs_seen(model, run)
    count = 0
    for parent in model.modules():
        layers = [child for child in parent.children() if child in seen]
        while layers:
            first, *layers = layers
            alike = [other for other in layers if _go_together(first, other, seen)]
            if not alike:
                continue
            layers = [other for other in layers if other not in alike]
            group = LoraGroup(sorted([first, *alike], key=list(seen).index))
            for layer in group.layers:
                layer.group = group
            count += 1
    return count


def _inputs_seen(model: torch.nn.Module, run: Callable[[], Any]) -> dict[Any, torch.Tensor]:
    """Return what each layer that can be grouped has read, in the order of the forward pass."""
    import torch

    seen: dict[Any, torch.Tensor] = {}
    twice: set[Any] = set()

    def note(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        if layer in seen or not given:
            twice.add(layer)
        else:
            seen[layer] = given[0]

    fused = [layer for layer in model.modules() if "group" in vars(type(layer))]
    hooks = [layer.register_forward_pre_hook(note) for layer in fused if not _drops(layer)]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return {layer: given for layer, given in seen.items() if layer not in twice}


def _drops(layer: Any) -> bool:
    import torch

    return any(not isinstance(drop, torch.nn.Identity) for drop in layer.lora_dropout.values())


def _go_together(one: Any, other: Any, seen: dict[Any, torch.Tensor]) -> bool:
    return seen[one] is seen[other] and one.scaling == other.scaling


def ungroup_adapters(model: torch.nn.Module) -> None:
    """Let every layer compute alone again."""
    for layer in model.modules():
        vars(layer).pop("group", None)


def declare_ties(model: PreTrainedModel) -> None:
    """Have a model name exactly those weights as tied that are: peft believes the class.

    FLAN-T5's head is its own matrix, but T5's class calls it tied, and peft would put the
    embedding's rows into it.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    model._tied_weights_keys = {
        name: source
        for name, source in (model._tied_weights_keys or {}).items()
        if weights.get(name) is weights.get(source)
    }


def trainable_rows(
    model: PreTrainedModel, token_ids: Sequence[int], whole: Sequence[str]
) -> dict[str, list[int]]:
    """Return the rows that train, by full name of the embedding and, where it is untied, the head.

    What is in `whole` trains all its rows already.
    """
    if not token_ids:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows = embedding.num_embeddings
    if not (min(token_ids) >= 0 and max(token_ids) < num_rows):
        raise UserError(
            f"token {max(token_ids)} has no row: the embedding has {num_rows}; "
            "name new tokens in model.added_tokens"
        )
    modules: list[Any] = [embedding] if is_tied(model) else [embedding, head]
    names = [name_of(model, module) for module in modules]
    rows = {name: list(token_ids) for name in names if name not in whole}
    if rows and head.bias is not None and name_of(model, head) not in whole:
        raise UserError(
            "model.added_tokens, adapter.trainable_tokens: the head of this base has a bias, which "
            f"peft would lose; type {MODULES_TO_SAVE}=[{','.join(names)}] to train all rows"
        )
    return rows


def check_tied_rows(model: peft.PeftModel) -> None:
    """Raise ValueError if a module reads the embedding's weight past the rows that train."""
    import peft

    base = model.get_base_model()
    wrappers = [m for m in base.modules() if isinstance(m, peft.utils.other.TrainableTokensWrapper)]
    wrapped = {id(wrapper.original_module) for wrapper in wrappers}
    weights = {id(wrapper.original_module.weight) for wrapper in wrappers}
    for name, module in base.named_modules():
        if id(_own_weight(module)) in weights and id(module) not in wrapped:
            raise UserError(
                f"model.added_tokens, adapter.trainable_tokens: {name} shares the embedding's "
                "weight, and peft does not train its rows; type adapter=full"
            )


def check_token_rows_train(model: peft.PeftModel, token_ids: Sequence[int]) -> None:
    """Raise ValueError if the rows `token_ids` are not among those that an adapter trains."""
    import peft

    embedding = model.get_base_model().get_input_embeddings()
    if isinstance(embedding, peft.utils.other.ModulesToSaveWrapper):
        return
    is_partly = isinstance(embedding, peft.utils.other.TrainableTokensWrapper)
    trained = embedding.token_adapter.token_indices["default"] if is_partly else []
    if missing := sorted(set(token_ids) - set(trained)):
        raise UserError(
            f"model.added_tokens: the adapter of adapter.path trains no rows for tokens {missing}; "
            "start without adapter.path"
        )


def _own_weight(module: Any) -> Any:
    return module._parameters.get("weight")
