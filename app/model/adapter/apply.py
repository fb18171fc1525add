"""Apply an adapter to a base: freeze weights, add new ones, choose which train.

PiSSA and OLoRA subtract their initial B A from the base. Such an adapter is saved as a plain LoRA
of twice the rank for the unchanged base (`save_converted`). NEFTune adds noise to the input
embeddings during training (arXiv 2310.05914).
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter import settings, targets
from app.model.adapter.saved import load_adapter, probe_logits, sort_sets
from app.model.adapter.wrap import (
    check_token_rows_train,
    trainable_rows,
    without_bitsandbytes,
    wrap,
)
from app.model.architecture import HEAD, is_classifier
from app.model.description import describe_model, is_quantized, name_of, sharing_embedding
from app.model.layers import by_ending, is_inside, last_parts, shortest
from app.model.multimodal import tower_modules
from common.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


@without_bitsandbytes()
def _apply_ia3(model: PreTrainedModel, config: settings.Ia3Config) -> peft.PeftModel:
    """Add IA3 vectors, initially ones, to keys and values (outputs) and feed-forward (inputs).

    Raises UserError if a pattern matches nothing or the architecture is unknown.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    found = targets.find_targets(config, describe_model(model))
    if found.problems:
        raise UserError(found.problems)
    names, inner = found.matrices, found.scaled_inputs
    all_names = [*(name for name, _ in model.named_modules()), *tower_modules(model)]
    short = shortest(names, found.endings, all_names)
    short_inner = [ending for ending in short if by_ending(ending, inner)]
    # peft wants feedforward_modules to be among target_modules, and compares endings without a dot.
    if {name for name in names if name.endswith(tuple(short_inner))} != set(inner):
        short, short_inner = sorted(names), sorted(inner)
    counts = Counter(name.rpartition(".")[2] for name in names)
    log.info("ia3: vectors on %s", ", ".join(f"{end} x {count}" for end, count in counts.items()))
    return wrap(
        model,
        peft.IA3Config(
            task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
            target_modules=short,
            feedforward_modules=short_inner,
            fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
        ),
    )


def _apply_freeze(
    model: PreTrainedModel, config: settings.FreezeConfig, *, token_ids: Sequence[int] = ()
) -> PreTrainedModel:
    """Make only the chosen layers and modules trainable.

    Raises UserError if a pattern matches nothing, a chosen weight is quantized, or the rows of
    `token_ids` would stay frozen.
    """
    found = targets.find_targets(config, describe_model(model))
    if found.problems:
        raise UserError(found.problems)
    model.requires_grad_(False)
    for name in found.full_modules:
        module = model.get_submodule(name)
        if is_quantized(module):
            raise UserError(
                f"adapter=freeze: {name} is quantized and cannot train; type quantization=none, "
                "or adapter=lora"
            )
        module.requires_grad_(True)
    sharing = sharing_embedding(model)
    if len(sharing) > 1 and model.get_input_embeddings().weight.requires_grad:
        named = next(name for name in sharing if is_inside(name, found.full_modules))
        others = ", ".join(name for name in sharing if name != named)
        log.info("freeze: %s is tied to %s, so both are trained", named, others)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if token_ids and not module.weight.requires_grad:
            name = name_of(model, module)
            raise UserError(
                f"model.added_tokens: with adapter=freeze the rows of new tokens in {name} would "
                f"keep their initial values; type adapter.modules=[{name.rpartition('.')[2]}] "
                "(and the modules already in that list), or adapter=lora"
            )
    return model


def apply_adapter(
    model: PreTrainedModel,
    config: settings.AdapterConfig,
    *,
    half_precision: bool,
    token_ids: Sequence[int] = (),
    device: torch.device | None = None,
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the base and add the adapter's weights; `full` leaves all weights trainable.

    Trainable parameters are fp32 unless `half_precision`. The rows `token_ids` of embedding and
    head train too. `device`: where PiSSA and OLoRA decompose the base's weights. Raises UserError
    if a pattern matches nothing.
    """
    import torch

    dtype = model.dtype if half_precision else torch.float32
    if isinstance(config, settings.Ia3Config) and token_ids:
        raise UserError(
            "adapter=ia3 cannot train the embedding rows of new tokens (model.added_tokens); "
            "type adapter=lora or adapter=full"
        )
    if folder := settings.continued_from(config):
        adapted = load_adapter(model, Path(folder), trainable=True, half_precision=half_precision)
        check_token_rows_train(adapted, token_ids)
    elif isinstance(config, settings.LoraConfig):
        adapted = apply_lora(
            model, config, half_precision=half_precision, token_ids=token_ids, device=device
        )
    elif isinstance(config, settings.Ia3Config):
        adapted = _apply_ia3(model, config)
    elif isinstance(config, settings.FreezeConfig):
        adapted = _apply_freeze(model, config, token_ids=token_ids)
    else:
        return model
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def apply_neftune(model: torch.nn.Module, alpha: float | None) -> None:
    """Add uniform noise of size alpha / sqrt(tokens * width) to every document's embeddings.

    Apply it after the adapter, which may replace the embedding module. The noise is off in
    evaluation and not saved. None has no effect; UserError for encoder-decoder models.
    """
    if alpha is None:
        return
    if problem := find_neftune_problem(alpha, model.config.to_dict()):
        raise UserError(problem)
    noise = _EmbeddingNoise(alpha)
    model.register_forward_pre_hook(noise.record_positions, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(noise.add)


def find_neftune_problem(alpha: float, numbers: Mapping[str, Any]) -> str | None:
    """Return why NEFTune does not support a model with this config.json, or None if it does."""
    if not numbers.get("is_encoder_decoder"):
        return None
    return (
        f"adapter.neftune_alpha={alpha:g} is for causal models, and {numbers.get('model_type')} is "
        "an encoder-decoder: type adapter.neftune_alpha=null"
    )


class _EmbeddingNoise:
    """Hooks of one model: one records the positions of a batch, the other adds the noise."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.position_ids: torch.Tensor | None = None

    def record_positions(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.position_ids = kwargs.get("position_ids")

    def add(
        self, embedding: torch.nn.Module, args: Any, embedded: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `embedded` [rows, tokens, width] with noise, or None in evaluation."""
        import torch

        if not embedding.training:
            return None
        lengths = torch.full_like(embedded[..., 0], embedded.shape[1], dtype=torch.float32)
        if self.position_ids is not None:
            lengths = document_lengths(self.position_ids).float()
        size = self.alpha * (lengths * embedded.shape[-1]).rsqrt()
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * size.unsqueeze(-1).to(embedded.dtype)


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the length of each token's document, given positions that start at 0 in each document.

    int64 [rows, tokens] in and out, without a device sync. Padding tokens, all at position 0, count
    as documents of one token.
    """
    import torch

    document = (position_ids == 0).cumsum(dim=1) - 1
    counts = torch.zeros_like(position_ids).scatter_add_(1, document, torch.ones_like(position_ids))
    return counts.gather(1, document)


INITIAL_A, INITIAL_B = "lora_A_at_start", "lora_B_at_start"
"""buffers of a LoRA layer, and parts of their names in checkpoints"""


def has_modified_base(model: torch.nn.Module) -> bool:
    """Return whether the initial weights of a model's adapter were subtracted from its base."""
    return any(INITIAL_A in layer._buffers for layer in model.modules())


def initial_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the initial A and B of layers whose base was modified, by full name; {} if none."""
    return {
        f"{name}.{part}": layer._buffers[part]
        for name, layer in model.named_modules()
        for part in (INITIAL_A, INITIAL_B)
        if part in layer._buffers
    }


def save_converted(model: peft.PeftModel, folder: Path) -> None:
    """Save the adapter as a LoRA of twice the rank for the unmodified base: B A - B0 A0.

    Raises ValueError if A and B still have their initial values.
    """
    import peft
    import torch
    from safetensors.torch import save_file

    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    has_changed = False
    for name, layer in _lora_layers(model):
        key_a, key_b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        a, b, a0, b0 = tensors[key_a], tensors[key_b], layer.lora_A_at_start, layer.lora_B_at_start
        has_changed = has_changed or not (torch.equal(a, a0) and torch.equal(b, b0))
        tensors[key_a], tensors[key_b] = torch.cat([a, a0]), torch.cat([b, -b0], dim=1)
    if not has_changed:
        raise ValueError("every lora_A and lora_B has its initial value: nothing was learned")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / settings.ORIGIN_FILE).unlink(missing_ok=True)  # of an earlier adapter in this folder
    config = _with_twice_the_rank(model.peft_config["default"])
    sort_sets(config)
    config.save_pretrained(str(folder))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / settings.ADAPTER_FILE, metadata={"format": "pt"})


def reopen_converted(
    model: peft.PeftModel,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    reload_base: Callable[[], PreTrainedModel],
) -> tuple[float, peft.PeftModel]:
    """Load what `save_converted` wrote onto a reloaded base, and compare it with `model`.

    Returns the largest difference of the logits, and the reopened model. Raises ValueError if a
    matrix W + B A differs by more than the rounding of the modified base. The logits are not
    checked: how far that rounding moves them depends on the model.
    """
    in_memory = probe_logits(model, probe)
    reopened = load_adapter(reload_base().to(model.device), folder)
    pairs = zip(_lora_layers(model), _lora_layers(reopened), strict=True)
    for (name, trained), (_, loaded) in pairs:
        _check_same_matrix(f"{folder}: {name}", trained, loaded)
    difference = (in_memory - probe_logits(reopened, probe)).abs().max().item()
    rank = reopened.peft_config["default"].r
    log.info("adapter: saved as a LoRA of rank %d for the unmodified base", rank)
    return difference, reopened


def _check_same_matrix(where: str, trained: Any, loaded: Any) -> None:
    import torch

    residual, delta = trained.get_base_layer().weight.float(), _delta(trained)
    # The residual is off by half a unit in the last place; the rest is margin for fp32 sums.
    eps = torch.finfo(trained.get_base_layer().weight.dtype).eps
    rounding = 4 * eps * max(residual.abs().max().item(), delta.abs().max().item())
    reloaded = loaded.get_base_layer().weight.float() + _delta(loaded)
    difference = (residual + delta - reloaded).abs().max().item()
    if not difference <= rounding:
        raise ValueError(
            f"{where} differs from the trained matrix after reloading: by {difference:.2g} in one "
            f"entry, of which rounding explains {rounding:.2g}"
        )


def _delta(layer: Any) -> torch.Tensor:
    """Return scale B A of a LoRA layer, in fp32 and the weight's orientation."""
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    delta = layer.scaling["default"] * b @ a
    return delta.T if layer.fan_in_fan_out else delta


def _with_twice_the_rank(config: peft.LoraConfig) -> peft.LoraConfig:
    """Return settings of rank 2r and the same scale: alpha / r, or alpha / sqrt(r) (rsLoRA)."""
    doubled = copy.deepcopy(config)
    factor = 2**0.5 if config.use_rslora else 2
    doubled.r = 2 * config.r
    doubled.lora_alpha = factor * config.lora_alpha
    doubled.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    doubled.alpha_pattern = {name: factor * alpha for name, alpha in config.alpha_pattern.items()}
    doubled.init_lora_weights = True
    doubled.inference_mode = True
    return doubled


def _lora_layers(model: peft.PeftModel) -> Iterator[tuple[str, Any]]:
    """Yield the name of each LoRA layer on a matrix, and the layer, in forward order."""
    import peft

    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and "default" in module.lora_A:
            yield name, module


_MAX_GROWTH = 4.0
"""growth of a weight's largest entry, when B A is subtracted, above which a warning is logged"""


@without_bitsandbytes()
def apply_lora(
    model: PreTrainedModel,
    config: settings.LoraConfig,
    *,
    half_precision: bool,
    token_ids: Sequence[int] = (),
    device: torch.device | None = None,
) -> peft.PeftModel:
    """Add A and B to the target matrices, in fp32 unless `half_precision`.

    The rows `token_ids` of embedding and head train too. `device`: where PiSSA and OLoRA decompose
    the base's weights. Raises UserError if a pattern matches nothing, a rank exceeds a matrix's,
    or peft would train something wrongly.
    """
    import torch

    from app.model.adapter.experts import check_stock_peft_loads

    if is_classifier(model):
        config = replace(config, modules_to_save=[*config.modules_to_save, HEAD])
    found = targets.find_targets(config, describe_model(model))
    if found.problems:
        raise UserError(found.problems)
    for name in found.full_modules:
        if is_quantized(model.get_submodule(name)):
            raise UserError(
                f"adapter.modules_to_save: {name} is quantized and cannot train; leave it out"
            )
    modules = {name: model.get_submodule(name) for name in found.matrices}
    _log_skipped(config, found)
    _check_init(config, modules)
    check_stock_peft_loads(config, model, found.matrices)
    rows = trainable_rows(model, token_ids, found.full_modules)
    log.debug("lora: %s", _describe_targets(config, modules, found.experts))
    adapted = wrap(model, _peft_config(model, config, found, rows))
    if config.use_dora and not half_precision:
        # peft has computed the magnitudes in the base's dtype: a rounded magnitude would scale its
        # row from the first step on.
        for _, layer in _lora_layers(adapted):
            layer.lora_magnitude_vector["default"].update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=layer.lora_A["default"].weight.detach(),
                lora_B=layer.lora_B["default"].weight.detach(),
                scaling=layer.scaling["default"],
            )
    if config.init in ("pissa", "olora"):
        dtype = model.dtype if half_precision else torch.float32
        if model.device.type != "meta":
            _init_from_base(adapted, config.init, dtype, device)
        adapted.peft_config["default"].init_lora_weights = config.init
        for _, layer in _lora_layers(adapted):
            for part, own in ((INITIAL_A, layer.lora_A), (INITIAL_B, layer.lora_B)):
                layer.register_buffer(part, own["default"].weight.detach().clone(), False)
    return adapted


def _peft_config(
    model: PreTrainedModel, config: settings.LoraConfig, found: targets.Targets, rows: Any
) -> peft.LoraConfig:
    """Return peft's settings of a new adapter on `found`.

    `rows`: token ids whose rows train, by full name of the module.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    all_names = [
        name for name, _ in model.named_modules() if not is_inside(name, found.full_modules)
    ]
    all_names += tower_modules(model)
    endings = {".".join(name.split(".")[-2:]) for name in found.experts}
    is_transposed = (isinstance(model.get_submodule(name), Conv1D) for name in found.matrices)
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    return peft.LoraConfig(
        task_type="SEQ_CLS" if is_classifier(model) else task,
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=shortest(found.matrices, found.endings, all_names),
        target_parameters=shortest(found.experts, endings, describe_model(model).experts) or None,
        fan_in_fan_out=any(is_transposed),
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        modules_to_save=found.full_modules or None,
        trainable_token_indices=rows or None,
    )


def _log_skipped(config: settings.LoraConfig, found: targets.Targets) -> None:
    if found.thin:
        log.info("lora: skipped, too thin for rank %d: %s", config.r, ", ".join(found.thin))
    if found.own_adapters:
        log.info("lora: skipped %d matrices, the base's own adapters", len(found.own_adapters))
    if found.not_plain:
        names = ", ".join(last_parts(found.not_plain))
        log.info("lora: skipped, not used as plain linear modules: %s", names)
    if found.frozen_experts:
        log.warning("lora: the experts stay frozen: %s", found.frozen_experts)


def _check_init(config: settings.LoraConfig, modules: Mapping[str, torch.nn.Module]) -> None:
    from transformers.pytorch_utils import Conv1D

    if config.init not in settings.INITS:
        raise UserError(
            f"adapter.init={config.init!r}: expected one of {', '.join(settings.INITS)}"
        )
    if config.init not in ("pissa", "olora"):
        return
    for name, module in modules.items():
        if is_quantized(module):
            raise UserError(
                f"adapter.init={config.init} decomposes the base's weights, but {name} is "
                "quantized; type adapter.init=default or quantization=none"
            )
        if config.init == "olora" and isinstance(module, Conv1D):
            raise UserError(
                f"adapter.init=olora: {name} is a Conv1D, which peft cannot decompose; "
                "type adapter.init=pissa"
            )


def _init_from_base(
    model: peft.PeftModel, init: str, dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Move each weight's principal components (PiSSA) or QR factors (OLoRA) into A and B.

    `dtype` is that of A and B in training. They are rounded to it before B A is subtracted from the
    weight; peft subtracts first. Each layer is moved to `device` meanwhile: on a CPU, an 8B model
    would take hours.
    """
    import torch

    growth = 1.0
    for _, layer in _lora_layers(model):
        base = layer.get_base_layer().weight
        home = base.device
        weights = base, layer.lora_A["default"].weight, layer.lora_B["default"].weight
        for weight in weights:
            weight.data = weight.data.to(device or home)
        growth = max(growth, _init_layer_from_base(layer, init, dtype))
        for weight in weights:
            weight.data = weight.data.to(home)
    if growth > _MAX_GROWTH and model.get_base_model().dtype != torch.float32:
        log.warning(
            "warning: adapter.init=%s makes entries of the base up to %.0f times as large, and so "
            "their rounding error in half precision; type a smaller adapter.alpha, "
            "adapter.init=pissa or trainer.precision=fp32",
            init,
            growth,
        )


def _init_layer_from_base(layer: Any, init: str, dtype: torch.dtype) -> float:
    """Initialize one layer; return the factor by which its weight's largest entry has grown."""
    weight = layer.get_base_layer().weight
    original = weight.data.float().clone()
    if init == "pissa":
        layer.pissa_init("default", "pissa")
    else:
        layer.olora_init("default")
    for part in (layer.lora_A, layer.lora_B):
        part["default"].weight.data = part["default"].weight.data.to(dtype).contiguous()
    residual = original - _delta(layer).detach()
    weight.data = residual.to(weight.dtype)
    growth: float = (residual.abs().max() / original.abs().max()).item()
    return growth


def _describe_targets(
    config: settings.LoraConfig, modules: Mapping[str, torch.nn.Module], experts: Sequence[str]
) -> str:
    counts = Counter(name.rpartition(".")[2] for name in modules)
    endings = ", ".join(f"{ending} x {count}" for ending, count in counts.items())
    text = f"rank {config.r} on {len(modules)} matrices ({endings})"
    if experts:
        counts = Counter(".".join(name.split(".")[-2:]) for name in experts)
        text += ", and each expert of " + ", ".join(f"{e} x {n}" for e, n in counts.items())
    return text
