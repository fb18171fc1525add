"""An adapter on disk: written, read back, and refused when it is not what it should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter.settings import ADAPTER_FILE

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel


def is_adapter(folder: Path) -> bool:
    """Say whether `folder` holds an adapter rather than a whole model."""
    return (folder / "adapter_config.json").exists()


def load_adapter(model: PreTrainedModel, folder: Path) -> peft.PeftModel:
    """Put a saved adapter on its base, for use and not for training.

    ValueError when the file lacks tensors or was made for other shapes: peft itself says nothing
    when a file holds none of the adapter's tensors, and the model then answers like its base.
    """
    import peft

    # What does not fit is left out while loading, and refused by the check below in one sentence.
    wrapped = peft.PeftModel.from_pretrained(
        model,
        str(folder),
        autocast_adapter_dtype=_is_fp32(folder),
        ignore_mismatched_sizes=True,
    )
    check_adapter_file(wrapped, folder, trained=False)
    wrapped.eval()
    return wrapped


def _is_fp32(folder: Path) -> bool:
    """Say whether the adapter is kept in fp32; on a half-precision base peft would round it."""
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        return any(file.get_slice(name).get_dtype() == "F32" for name in file.keys())  # noqa: SIM118


def save_adapter(model: peft.PeftModel, folder: Path) -> None:
    """Write the adapter in peft's own format, as safetensors."""
    model.save_pretrained(str(folder), save_embedding_layers=False)


def check_adapter_file(model: peft.PeftModel, folder: Path, *, trained: bool) -> None:
    """Raise ValueError unless the file holds each adapter tensor, finite, of the right shape.

    `trained` also demands that something was learned.
    """
    import peft
    import torch
    from safetensors.torch import load_file

    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    file = folder / ADAPTER_FILE
    saved = load_file(file)
    if saved.keys() != expected.keys():
        missing, unknown = expected.keys() - saved.keys(), saved.keys() - expected.keys()
        raise ValueError(
            f"{file}: {len(missing)} of {len(expected)} adapter tensors are missing "
            f"{sorted(missing)[:3]}, {len(unknown)} are unknown {sorted(unknown)[:3]}"
        )
    for name, tensor in saved.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{file}: {name} has shape {list(tensor.shape)}, "
                f"this base needs {list(expected[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{file}: {name} holds NaN or infinity")
    # lora_B starts at zero: if every one still is, the adapter changes nothing.
    updates = [tensor for name, tensor in saved.items() if "lora_B" in name]
    if trained and updates and not any(tensor.any() for tensor in updates):
        raise ValueError(f"{file}: every lora_B is zero, nothing was learned")


def verify_adapter(model: peft.PeftModel, folder: Path, probe: Mapping[str, torch.Tensor]) -> float:
    """Reopen a saved adapter beside the one in memory and compare their logits.

    `probe` is what `probe_logits` takes; returns the largest difference of two logits. ValueError
    when they differ by more than the file's rounding.
    """
    check_adapter_file(model, folder, trained=True)
    in_memory = probe_logits(model, probe)
    was_training = model.training  # peft switches to eval when it loads
    model.load_adapter(
        str(folder), adapter_name="reopened", autocast_adapter_dtype=_is_fp32(folder)
    )
    model.set_adapter("reopened")
    reopened = probe_logits(model, probe)
    model.set_adapter("default")
    model.delete_adapter("reopened")
    model.train(was_training)
    return check_same_logits(in_memory, reopened, folder)


def probe_logits(model: torch.nn.Module, probe: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one row, without dropout or gradient.

    `probe`: `input_ids` [1, tokens], and `decoder_input_ids` for an encoder-decoder model.
    """
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(**probe, use_cache=False).logits[0].float()
    model.train(was_training)
    return logits


def check_same_logits(in_memory: torch.Tensor, reopened: torch.Tensor, folder: Path) -> float:
    """Return the largest difference; ValueError when what was saved is not what was trained."""
    difference = (in_memory - reopened).abs().max().item()
    scale = in_memory.abs().max().item()
    if not math.isfinite(difference) or difference > 1e-3 * max(scale, 1.0):
        raise ValueError(f"{folder}: reopened, its logits differ by {difference:.3g} from memory")
    return difference
