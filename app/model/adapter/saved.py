"""Save and load adapters, check saved ones, and compute how they change the weights of their base.

A saved adapter is checked to be complete, and equal to the one in memory. Its change of each weight
is computed in fp32: peft wraps a base on the meta device, which tells which adapter tensor belongs
to which weight; the values come from the adapter's file. No whole model is held in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter.settings import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ORIGIN_FILE,
    load_peft_config,
    read_adapter_config,
)
from app.model.adapter.wrap import WRAPPERS, unfuse_adapters, without_bitsandbytes, wrap
from app.model.architecture import is_classifier
from app.model.description import is_tied, name_of, names_by_id, sharing_embedding
from app.model.layers import (
    check_patterns,
    eval_mode,
    expression_of_key,
    find_bypassed_linears,
    last_parts,
)
from common.errors import UserError
from common.untrusted import reading

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""largest difference of a reloaded model's logits from memory, as a share of the largest logit"""
_DEFAULT = "default"
"""peft's name of a model's first adapter"""


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists()


@without_bitsandbytes()
def load_adapter(
    model: PreTrainedModel, folder: Path, *, trainable: bool = False, half_precision: bool = False
) -> peft.PeftModel:
    """Load a saved adapter onto its base with its own settings: for inference, or `trainable`.

    If `folder` is a file, it has the settings, and the weights are loaded later from a checkpoint.
    Trainable weights are fp32 unless `half_precision`. Raises ValueError if the file does not fit
    the base, or changes nothing. peft ignores missing tensors, and the model then answers like its
    base.
    """
    from app.model.adapter.experts import from_stock_config

    has_weights = not folder.is_file()
    folder = folder if has_weights else folder.parent
    with reading(f"the adapter in {folder}", "save it again, or use another one"):
        config = from_stock_config(load_peft_config(folder), model)
        if config.task_type == "SEQ_CLS" and not is_classifier(model):
            raise UserError(
                f"{folder / ADAPTER_CONFIG}: task_type=SEQ_CLS is an adapter of a classifier or a "
                "reward model; type model.labels=[NAME, ...] with the names of its outputs"
            )
        _check_patterns(config, model, folder)
        if trainable:
            _check_can_continue(config, model, folder)
        recorded = config.base_model_name_or_path
        # Bases of our own adapters are compared by fingerprint.
        if recorded and recorded != model.name_or_path and not (folder / ORIGIN_FILE).exists():
            where = recorded, model.name_or_path
            log.info("adapter: %s was trained on %s and is loaded onto %s", folder, *where)
        config.base_model_name_or_path = model.name_or_path or None
        config.inference_mode = False
        wrapped = wrap(model, config, autocast_adapter_dtype=False)
        if trainable:
            _check_targets_train(wrapped, model.config.model_type, folder)
        if has_weights:
            in_fp32 = not half_precision if trainable else _is_fp32(folder)
            _read_into(wrapped, folder, "default", in_fp32=in_fp32)
    if trainable:
        log.info("adapter: continuing %s, with the settings it was saved with", folder)
        return wrapped.train()
    config.inference_mode = True
    return wrapped.requires_grad_(False).eval()


def _check_can_continue(config: Any, model: PreTrainedModel, folder: Path) -> None:
    """Raise UserError for an adapter that peft could train further, but not save as a whole."""
    settings = vars(config)
    init, bias = settings.get("init_lora_weights"), settings.get("bias", "none")
    where = f"{folder / ADAPTER_CONFIG}: "
    if init in ("pissa", "olora"):
        raise UserError(
            f"{where}init_lora_weights={init} has changed the base, and the change is not in the "
            "adapter's files, so it cannot be trained further; have the tool that made it save a "
            f"plain LoRA, or leave out adapter.path and type adapter.init={init}"
        )
    if bias != "none":
        raise UserError(
            f"{where}bias={bias} trains biases of the base, which cannot be trained further with "
            "an adapter; merge it into its base, and train a new adapter on that"
        )
    if settings.get("ensure_weight_tying") and is_tied(model):
        shared = [name.rpartition(".")[2] for name in sharing_embedding(model)]
        targets = settings.get("target_modules") or []
        if settings.get("modules_to_save") or any(name in targets for name in shared):
            raise UserError(
                f"{where}ensure_weight_tying=true on a base with a tied head, for the embedding, "
                "cannot be trained further, since peft would save one side only; merge it into "
                "its base, and train a new adapter on that"
            )


def _check_targets_train(model: peft.PeftModel, model_type: str, folder: Path) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    endings = tuple(f".{ending}" for ending in find_bypassed_linears(model_type))
    tuned = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if refused := [name for name in tuned if name.endswith(endings)]:
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: target_modules: {', '.join(last_parts(refused))} of "
            f"{model_type} models cannot take an adapter: their layers do not use it as a plain "
            "linear module, so the adapter would not train; leave out adapter.path to train a new "
            "adapter on other modules"
        )


def _check_patterns(config: peft.PeftConfig, model: PreTrainedModel, folder: Path) -> None:
    settings = config.to_dict()
    expressions: dict[str, list[str]] = {}
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(settings.get(key), str):
            expressions[key] = [settings[key]]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in settings.get(key) or {}:
            expressions[f"{key}: {pattern}"] = [expression_of_key(pattern)]
    layers = settings.get("layers_pattern") or []
    for pattern in [layers] if isinstance(layers, str) else layers:
        expressions[f"layers_pattern: {pattern}"] = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."]
    for name in settings.get("modules_to_save") or []:
        expressions[f"modules_to_save: {name}"] = [rf"(^|.*\.){name}($|\..*)"]
    names = [name for name, _ in model.named_modules()]
    if problems := check_patterns(expressions, names):
        raise UserError([f"{folder / ADAPTER_CONFIG}: {problem}" for problem in problems])


def required_embedding_rows(model: PreTrainedModel, folder: Path) -> int:
    """Return the least number of embedding rows that a saved adapter needs; 0 if it needs none."""
    from safetensors import safe_open

    settings, problems = read_adapter_config(folder)
    if problems:
        raise UserError(problems)
    trained = settings.get("trainable_token_indices")
    lists = trained.values() if isinstance(trained, dict) else [trained or []]
    rows = max((index + 1 for indices in lists for index in indices), default=0)
    name = name_of(model, model.get_input_embeddings())
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        whole = f"base_model.model.{name}.weight"
        if whole in file.keys():  # noqa: SIM118
            rows = max(rows, file.get_slice(whole).get_shape()[0])
    return rows


def save_adapter(
    model: peft.PeftModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Save the adapter in peft's own format, as safetensors.

    `weights`: the full trainable parameters by name, if the model holds only shards of them.
    """
    from app.model.adapter.experts import to_stock_config

    own = model.peft_config["default"]
    sort_sets(own)
    (folder / ORIGIN_FILE).unlink(missing_ok=True)  # of an earlier adapter in this folder
    model.peft_config["default"] = to_stock_config(own, model.get_base_model())
    try:
        model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=weights)
    finally:
        model.peft_config["default"] = own


def sort_sets(config: peft.PeftConfig) -> None:
    """Replace a config's sets by sorted lists: the order of sets differs between processes."""
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))


def check_adapter_file(
    model: peft.PeftModel,
    folder: Path,
    *,
    adapter_name: str = "default",
    weights: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """Raise ValueError unless the file has every adapter tensor, finite and of the right shape.

    Returns the names of tensors that are copies of the base's own, and have no effect.

    Also raised for an adapter that changes nothing, and for tensors that differ from `weights`, as
    these were given to `save_adapter`.
    """
    import peft
    import torch
    from safetensors.torch import load_file

    expected = peft.get_peft_model_state_dict(
        model, state_dict=weights, adapter_name=adapter_name, save_embedding_layers=False
    )
    file = folder / ADAPTER_FILE
    saved = load_file(file)
    copies = _find_base_copies(model, file, saved, saved.keys() - expected.keys())
    for name in copies:
        del saved[name]
    if saved.keys() != expected.keys():
        missing, unknown = expected.keys() - saved.keys(), saved.keys() - expected.keys()
        raise ValueError(
            f"{file}: {len(missing)} of {len(expected)} adapter tensors are missing "
            f"{sorted(missing)[:3]}, {len(unknown)} are unknown {sorted(unknown)[:3]}"
        )
    for name, tensor in saved.items():
        if not tensor.numel():
            raise ValueError(
                f"{file}: {name} is empty (shape {list(tensor.shape)}), as if sharded weights had "
                f"been saved; this base needs {list(expected[name].shape)}"
            )
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{file}: {name} has shape {list(tensor.shape)}, "
                f"this base needs {list(expected[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{file}: {name} holds NaN or infinity")
        if weights is not None and not torch.equal(tensor, expected[name]):
            raise ValueError(f"{file}: {name} differs from the tensor that was written")
    _check_changes_something(file, saved)
    return copies


def _find_base_copies(
    model: peft.PeftModel, file: Path, saved: Mapping[str, torch.Tensor], names: Collection[str]
) -> list[str]:
    """Return the weights of the base among the tensors `names` of an adapter's file.

    peft adds embedding and head if they have an adapter or more rows than the published base.
    Raises UserError if they differ from those of this base, or cannot be compared.
    """
    import torch

    weights = dict(model.named_parameters(remove_duplicate=False))
    copies = [name for name in sorted(names) if name in weights]
    for name in copies:
        ours, theirs = weights[name], saved[name]
        if ours.is_meta:  # a merge refuses them, and another rank compares them
            continue
        if ours.shape != theirs.shape or not torch.equal(theirs.to(ours), ours):
            raise UserError(
                f"{file}: besides the adapter it holds {name} {list(theirs.shape)}, which differs "
                f"from that of this base {list(ours.shape)}: the adapter was trained on a base "
                "with other embeddings; use that base, or merge the adapter with the tool that "
                "made it"
            )
    return copies


def _check_changes_something(file: Path, saved: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if the tensors leave the base unchanged, or set what they scale to zero."""
    # lora_B is initially zero, and IA3's vectors are ones.
    for kind in ("lora_A", "lora_B", "ia3_l", "trainable_tokens_delta"):
        tensors = [tensor for name, tensor in saved.items() if kind in name]
        if tensors and not any(tensor.any() for tensor in tensors):
            raise ValueError(f"{file}: every {kind} is zero: nothing was learned")
        if kind == "ia3_l" and tensors and all((tensor == 1).all() for tensor in tensors):
            raise ValueError(f"{file}: every ia3_l is one: nothing was learned")


def verify_adapter(model: peft.PeftModel, folder: Path, probe: Mapping[str, torch.Tensor]) -> float:
    """Load a saved adapter next to the one in memory and compare their logits.

    `probe`: arguments of `probe_logits`. Returns the largest difference of two logits. Raises
    ValueError if it is more than the file's rounding.
    """
    in_memory = probe_logits(model, probe)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    was_training = model.training
    _add_empty(model, folder, "reopened")
    try:
        _read_into(model, folder, "reopened", in_fp32=_is_fp32(folder))
        model.set_adapter("reopened")
        reopened = probe_logits(model, probe)
    finally:
        model.set_adapter("default")
        model.delete_adapter("reopened")
        for parameter in trained:
            parameter.requires_grad_(True)
        model.train(was_training)
    return check_same_logits(in_memory, reopened, folder)


def add_saved_adapter(model: peft.PeftModel, folder: Path, name: str) -> None:
    """Load another saved adapter onto a model, for inference; `name` is not active yet.

    Raises UserError if it does not fit the base.
    """
    from app.model.adapter.experts import fuse_experts

    with reading(f"the adapter in {folder}", "save it again, or use another one"):
        _add_empty(model, folder, name)
        _read_into(model, folder, name, in_fp32=_is_fp32(folder))
    fuse_experts(model)


def _add_empty(model: peft.PeftModel, folder: Path, name: str) -> None:
    from app.model.adapter.experts import (
        from_stock_config,
        keep_target_modules,
        placeholders_for_packed,
    )

    base = model.get_base_model()
    config = from_stock_config(load_peft_config(folder), base)
    with keep_target_modules(), placeholders_for_packed(base):
        model.add_adapter(name, config, autocast_adapter_dtype=_is_fp32(folder))


def _read_into(model: peft.PeftModel, folder: Path, adapter_name: str, *, in_fp32: bool) -> None:
    import peft
    import torch
    from safetensors.torch import load_file

    check_adapter_file(model, folder, adapter_name=adapter_name)
    # Cast first: peft creates the weights in the base layer's dtype, which would round them on a
    # half-precision base, but creates fp32 on an int8 base.
    dtype = torch.float32 if in_fp32 else model.get_base_model().dtype
    for name, parameter in model.named_parameters():
        if adapter_name in name.split("."):
            parameter.data = parameter.data.to(dtype)
    own = peft.get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=False
    )
    saved = load_file(folder / ADAPTER_FILE)  # with copies of the base's weights in some files
    saved = {name: tensor for name, tensor in saved.items() if name in own}
    peft.set_peft_model_state_dict(model, saved, adapter_name=adapter_name)
    # DoRA has computed norms of the initial weights; autocast would reuse its cached copies.
    torch.clear_autocast_cache()


def _is_fp32(folder: Path) -> bool:
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        return any(file.get_slice(name).get_dtype() == "F32" for name in file.keys())  # noqa: SIM118


def probe_logits(model: torch.nn.Module, probe: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return logits [tokens, vocabulary] of one row, without dropout or gradient.

    `probe`: `input_ids` [1, tokens], and `decoder_input_ids` for an encoder-decoder model.
    """
    with eval_mode(model):
        logits: torch.Tensor = model(**probe, use_cache=False).logits[0].float()
    return logits


def check_same_logits(in_memory: torch.Tensor, reopened: torch.Tensor, folder: Path) -> float:
    """Return the largest difference of two logits; raise ValueError if it exceeds _TOLERANCE."""
    difference = (in_memory - reopened).abs().max().item()
    scale = in_memory.abs().max().item()
    if not math.isfinite(difference) or difference > _TOLERANCE * max(scale, 1.0):
        raise ValueError(f"{folder}: reloaded, its logits differ by {difference:.3g} from memory")
    return difference


@dataclass(slots=True)
class WeightChange:
    """The change that adapters make to one weight of the base."""

    update: Callable[[torch.Tensor], torch.Tensor] | None = None
    """weight in fp32 -> merged weight; None if the change is the sum of `deltas`"""
    deltas: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    """functions that compute the tensors to add to the weight"""
    tensors: set[int] = field(default_factory=set)
    """addresses of the adapter's tensors: tied weights that share all of them stay tied"""

    def delta(self) -> torch.Tensor:
        """Return the sum of the deltas, in fp32."""
        total = self.deltas[0]()
        for delta in self.deltas[1:]:
            total += delta()
        return total

    def apply(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the merged weight, in fp32."""
        if self.update is not None:
            return self.update(weight.float())
        return weight.float() + self.delta()


def read_weight_changes(
    build: Callable[[], PreTrainedModel], adapters: Sequence[tuple[Path, float]]
) -> dict[str, WeightChange]:
    """Return the changes that adapters make to their base, by name of the base's weight.

    `adapters`: folder and factor of each; `build` returns the base on the meta device. Raises
    UserError for an adapter that cannot be merged, or not together with others.
    """
    changes: dict[str, WeightChange] = {}
    for folder, factor in adapters:
        with reading(f"the adapter in {folder}", "save it again, or use another one"):
            for name, change in _read_adapter_changes(build(), folder, factor).items():
                if change.update is not None and (len(adapters) > 1 or factor != 1):
                    raise UserError(
                        f"{folder} replaces or scales {name}, but only plain LoRA can be weighted "
                        "or summed; merge it alone, with merge.weight=1"
                    )
                known = changes.setdefault(name, WeightChange())
                known.update = change.update
                known.deltas += change.deltas
                known.tensors |= change.tensors
    return changes


def _read_adapter_changes(
    model: PreTrainedModel, folder: Path, factor: float
) -> dict[str, WeightChange]:
    from app.model.adapter.experts import from_stock_config

    config = from_stock_config(load_peft_config(folder), model)
    if getattr(config, "init_lora_weights", None) in ("pissa", "olora"):
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: init_lora_weights={config.init_lora_weights} changes the "
            "base, but the change is not in the adapter's files; have the tool that made it save "
            "a plain LoRA"
        )
    config.inference_mode = False
    names = dict(model.named_parameters(remove_duplicate=False))
    adapted = wrap(model, config, autocast_adapter_dtype=False)
    if copies := check_adapter_file(adapted, folder):
        raise UserError(
            f"{folder / ADAPTER_FILE}: it holds weights of the base too ({copies[0]}), which a "
            "merge cannot compare with those of this base; have the tool that made it save it with "
            "save_embedding_layers=False"
        )
    _load_on_meta(adapted, folder)
    changes: dict[str, WeightChange] = {}

    def add(name: str, change: WeightChange) -> None:
        if name in changes:
            raise UserError(f"{folder}: {name} is changed in two ways, so it cannot be merged")
        if name not in names:
            raise UserError(f"{folder}: the base has no weight {name} to merge into")
        changes[name] = change

    modules = list(adapted.get_base_model().named_modules(remove_duplicate=False))
    for path, module in modules:
        for leaf, change in _layer_changes(module, factor):
            add(_name_in_base(f"{path}.{leaf}"), change)
    for path, weight in adapted.get_base_model().named_parameters():
        name = _name_in_base(path)
        if weight.device.type != "meta" and name in names and name not in changes:
            add(name, _replacement(weight))
    return changes


def _load_on_meta(adapted: peft.PeftModel, folder: Path) -> None:
    """Replace the adapter's parameters, which are on the meta device, by the tensors of its file.

    peft's own loading would move the tensors to the base's device.
    """
    import peft
    import torch
    from safetensors.torch import load_file

    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    in_file = peft.get_peft_model_state_dict(
        adapted, state_dict=dict(parameters), adapter_name=_DEFAULT, save_embedding_layers=False
    )
    names = names_by_id(parameters)
    tensors = load_file(folder / ADAPTER_FILE)
    for key, parameter in in_file.items():
        value = torch.nn.Parameter(tensors[key], requires_grad=False)
        for name in names[id(parameter)]:
            path, _, leaf = name.rpartition(".")
            adapted.get_submodule(path)._parameters[leaf] = value


def _name_in_base(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _replacement(weight: torch.Tensor) -> WeightChange:
    return WeightChange(update=lambda _: weight.float(), tensors={weight.data_ptr()})


def _layer_changes(module: Any, factor: float) -> list[tuple[str, WeightChange]]:
    """Return the changes that one of peft's layers makes, by name of the base layer's weight."""
    import peft

    if isinstance(module, peft.tuners.lora.LoraLayer):
        return _lora_changes(module, factor)
    if isinstance(module, peft.tuners.ia3.IA3Layer):
        return _ia3_changes(module)
    if isinstance(module, peft.tuners.trainable_tokens.TrainableTokensLayer):
        rows, indices = module.trainable_tokens_delta[_DEFAULT], module.token_indices[_DEFAULT]

        def replace_rows(weight: torch.Tensor) -> torch.Tensor:
            weight = weight.clone()
            weight[indices] = rows.float()
            return weight

        return [("weight", WeightChange(update=replace_rows, tensors={rows.data_ptr()}))]
    return []


def _lora_changes(layer: Any, factor: float) -> list[tuple[str, WeightChange]]:
    import peft

    is_embedding = _DEFAULT in layer.lora_embedding_A
    if is_embedding:
        a, b = layer.lora_embedding_A[_DEFAULT], layer.lora_embedding_B[_DEFAULT]
    elif _DEFAULT in layer.lora_A:
        a, b = layer.lora_A[_DEFAULT].weight, layer.lora_B[_DEFAULT].weight
    else:
        return []
    a, b = _fp32(a), _fp32(b)
    tensors, scale = {a.data_ptr(), b.data_ptr()}, layer.scaling[_DEFAULT] * factor
    if isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
        deltas = [lambda: _experts_delta(layer, a, b, scale)]
        return [(layer.parameter_name, WeightChange(deltas=deltas, tensors=tensors))]
    bias = None if is_embedding else layer.lora_B[_DEFAULT].bias
    if bias is not None:
        raise UserError(
            "lora_bias=true cannot be merged, since layers of the base may have no bias"
        )
    if a.ndim != 2:
        raise UserError(f"LoRA on a {type(layer.get_base_layer()).__name__} cannot be merged")
    is_transposed = is_embedding or layer.fan_in_fan_out

    def delta() -> torch.Tensor:
        product = b @ a * scale
        return product.T if is_transposed else product

    if _DEFAULT not in layer.lora_magnitude_vector:
        return [("weight", WeightChange(deltas=[delta], tensors=tensors))]
    if factor != 1:
        raise UserError("a DoRA adapter cannot be weighted; type merge.weight=1")
    magnitude = _fp32(layer.lora_magnitude_vector[_DEFAULT].weight)

    def apply_dora(weight: torch.Tensor) -> torch.Tensor:
        whole = weight + delta()
        norms = whole.norm(dim=0 if is_transposed else 1)
        ratio = magnitude / norms
        return whole * (ratio if is_transposed else ratio.unsqueeze(1))

    return [("weight", WeightChange(update=apply_dora, tensors=tensors))]


def _experts_delta(layer: Any, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale B A for a parameter of fused experts: [experts, ...], in its orientation."""
    import torch

    if layer.num_experts == 1:
        return b @ a * scale
    # peft's layout: A is [experts * rank, in], B is [out, rank * experts].
    a = a.reshape(layer.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, layer.num_experts)
    equation = "ore,eri->eoi" if layer._did_swap_in_out_features else "ore,eri->eio"
    return torch.einsum(equation, b, a) * scale


def _ia3_changes(layer: Any) -> list[tuple[str, WeightChange]]:
    if _DEFAULT not in layer.ia3_l:
        return []
    vector = _fp32(layer.ia3_l[_DEFAULT])
    tensors = {vector.data_ptr()}
    factors = vector.T if layer.fan_in_fan_out else vector
    changes = [("weight", WeightChange(update=lambda weight: weight * factors, tensors=tensors))]
    if not layer.is_feedforward and layer.get_base_layer().bias is not None:
        changes.append(
            ("bias", WeightChange(update=lambda bias: bias * vector.flatten(), tensors=tensors))
        )
    return changes


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float()


def load_weighted_adapters(
    model: PreTrainedModel, adapters: Sequence[tuple[Path, float]]
) -> peft.PeftModel:
    """Load adapters (folder and factor of each) onto their base, unmerged, for inference."""
    import peft

    (first_folder, first_factor), *others = adapters
    adapted = load_adapter(model, first_folder)
    factors = {_DEFAULT: first_factor}
    for number, (folder, factor) in enumerate(others, start=1):
        factors[f"adapter{number}"] = factor
        add_saved_adapter(adapted, folder, f"adapter{number}")
    if factors == {_DEFAULT: 1.0}:
        return adapted
    unfuse_adapters(adapted)
    adapted.base_model.set_adapter(list(factors))
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in factors.keys() & module.scaling.keys():
                module.scaling[name] *= factors[name]
    return adapted.requires_grad_(False).eval()
