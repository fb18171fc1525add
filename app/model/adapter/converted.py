"""PiSSA and OLoRA change the base; what is saved of them is an ordinary LoRA of the base as it was.

Both start from A0, B0 taken out of each weight: W = (W - s B0 A0) + s B0 A0. After training, what
was learned is s (B A - B0 A0), which is a LoRA of twice the rank, [B, -B0] [A; A0].
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.adapter.saved import load_adapter, probe_logits, put_in_order
from app.model.adapter.settings import ADAPTER_FILE

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_START_A, _START_B = "lora_A_at_start", "lora_B_at_start"


def remember_start(model: peft.PeftModel) -> None:
    """Keep what A and B of each LoRA layer start from, as buffers that no checkpoint holds."""
    for _, layer in _lora_layers(model):
        layer.register_buffer(_START_A, layer.lora_A["default"].weight.detach().clone(), False)
        layer.register_buffer(_START_B, layer.lora_B["default"].weight.detach().clone(), False)


def changed_its_base(model: torch.nn.Module) -> bool:
    """Say whether the adapter of a model took its start out of the base's weights."""
    return any(_START_A in layer._buffers for layer in model.modules())


def start_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return A0 and B0 of every layer whose base was changed, by full name; {} where none was."""
    return {
        f"{name}.{part}": layer._buffers[part]
        for name, layer in model.named_modules()
        for part in (_START_A, _START_B)
        if part in layer._buffers
    }


def save_converted(model: peft.PeftModel, folder: Path) -> None:
    """Write the adapter as a LoRA of twice the rank, for the base as it was before.

    ValueError when nothing was learned.
    """
    import peft
    import torch
    from safetensors.torch import save_file

    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    moved = False
    for name, layer in _lora_layers(model):
        keys = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        (a, b), (a0, b0) = (
            (tensors[key] for key in keys),
            (layer.lora_A_at_start, layer.lora_B_at_start),
        )
        moved = moved or not (torch.equal(a, a0) and torch.equal(b, b0))
        tensors |= dict(zip(keys, (torch.cat([a, a0]), torch.cat([b, -b0], dim=1)), strict=True))
    if not moved:
        raise ValueError("every lora_A and lora_B is what it started from, nothing was learned")
    folder.mkdir(parents=True, exist_ok=True)
    config = _of_twice_the_rank(model.peft_config["default"])
    put_in_order(config)
    config.save_pretrained(str(folder))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / ADAPTER_FILE, metadata={"format": "pt"})


def reopen_converted(
    model: peft.PeftModel,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    reload_base: Callable[[], PreTrainedModel],
) -> tuple[float, peft.PeftModel]:
    """Put what `save_converted` wrote on a base that was just read, and compare the logits.

    Returns the largest difference and the reopened model. ValueError where a matrix differs by more
    than the rounding of the base, which was rounded in memory after A0 and B0 were taken out of it.
    How far the logits come apart by that is for the model to say, and no sign of a wrong file.
    """
    in_memory = probe_logits(model, probe)
    reopened = load_adapter(reload_base().to(model.device), folder)
    pairs = zip(_lora_layers(model), _lora_layers(reopened), strict=True)
    for (name, ours), (_, read) in pairs:
        _check_same_matrix(f"{folder}: {name}", ours, read)
    difference = (in_memory - probe_logits(reopened, probe)).abs().max().item()
    rank = reopened.peft_config["default"].r
    log.info("adapter: kept as a LoRA of rank %d for the base as it was", rank)
    return difference, reopened


def _check_same_matrix(where: str, ours: Any, read: Any) -> None:
    import torch

    residual, delta = ours.get_base_layer().weight.float(), _delta(ours)
    # Half a step of the dtype in the residual; the rest is room for the sums in fp32.
    eps = torch.finfo(ours.get_base_layer().weight.dtype).eps
    rounding = 4 * eps * max(residual.abs().max().item(), delta.abs().max().item())
    whole = read.get_base_layer().weight.float() + _delta(read)
    difference = (residual + delta - whole).abs().max().item()
    if not difference <= rounding:
        raise ValueError(
            f"{where} is reopened another matrix: an entry differs by {difference:.2g}, and "
            f"rounding explains {rounding:.2g}"
        )


def _delta(layer: Any) -> torch.Tensor:
    """Return what a LoRA layer adds to its weight, in fp32 and the weight's orientation."""
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    delta = layer.scaling["default"] * b @ a
    return delta.T if layer.fan_in_fan_out else delta


def _of_twice_the_rank(config: peft.LoraConfig) -> peft.LoraConfig:
    """Return settings of rank 2r with the scale kept: alpha / r, or alpha / sqrt(r) (rsLoRA)."""
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
    import peft

    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and "default" in module.lora_A:
            yield name, module
