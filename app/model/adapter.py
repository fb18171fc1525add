"""What is trained of the base, and how it is kept: the only file that knows peft."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import peft
    import torch
    from transformers import PreTrainedModel

DEFAULT_LR = {"lora": 2e-4, "full": 2e-5}
ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    name: str = "lora"
    """what is trained: lora (small matrices beside frozen weights) or full (every weight)"""


@dataclass(kw_only=True, slots=True)
class LoraConfig(AdapterConfig):
    name: str = "lora"
    r: int = 16
    """rank; more capacity, more memory"""
    alpha: float = 32.0
    """the update is scaled by alpha / r (alpha / sqrt(r) with use_rslora)"""
    dropout: float = 0.05
    """share of the adapter's inputs dropped in training"""
    target_modules: Any = "all-linear"
    """all-linear, a list of module name endings, or a regular expression over full names"""
    use_dora: bool = False
    """learn each weight's magnitude apart from its direction (slower; arXiv 2402.09353)"""
    use_rslora: bool = False
    """scale by alpha / sqrt(r), stable at high ranks (arXiv 2312.03732)"""


@dataclass(kw_only=True, slots=True)
class FullConfig(AdapterConfig):
    name: str = "full"


def apply_adapter(
    model: PreTrainedModel, config: AdapterConfig, *, half_precision: bool
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the base and put the adapter's weights beside it; `full` leaves all weights trainable.

    Adapter weights are fp32 unless `half_precision`. ValueError for a pattern that matches nothing.
    """
    if not isinstance(config, LoraConfig):
        return model
    import peft

    patterns = config.target_modules
    if isinstance(patterns, list):
        _check_every_pattern_matches(model, patterns)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=patterns,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=not half_precision)


def _check_every_pattern_matches(model: PreTrainedModel, patterns: list[str]) -> None:
    """peft is content when one pattern of several matches; a misspelt one would go unnoticed."""
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(name == pattern or name.endswith(f".{pattern}") for name in names):
            leaves = sorted({name.rpartition(".")[2] for name in names} - {""})
            raise ValueError(
                f"adapter.target_modules: {pattern!r} matches no module; "
                f"the model has {', '.join(leaves)}"
            )


@dataclass(slots=True)
class TrainableReport:
    """What trains: numbers of weights, and their dtypes."""

    num_trainable: int
    num_total: int
    dtypes: dict[str, int]

    def __str__(self) -> str:
        share = self.num_trainable / self.num_total
        dtypes = ", ".join(f"{count:,} in {name}" for name, count in sorted(self.dtypes.items()))
        counts = f"{self.num_trainable:,} of {self.num_total:,}"
        return f"{counts} weights train ({share:.2%}); kept: {dtypes}"


def report_trainable(model: torch.nn.Module) -> TrainableReport:
    """Count what trains; ValueError when nothing does."""
    dtypes: dict[str, int] = {}
    trainable = 0
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
    if not trainable:
        raise ValueError("no weight would be trained: look at adapter.target_modules")
    return TrainableReport(trainable, sum(dtypes.values()), dtypes)


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


def verify_adapter(model: peft.PeftModel, folder: Path, probe: torch.Tensor) -> float:
    """Reopen a saved adapter beside the one in memory and compare their logits.

    probe [1, tokens] are token ids; returns the largest difference of two logits. ValueError when
    they differ by more than the file's rounding.
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


def probe_logits(model: torch.nn.Module, probe: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one row of token ids, without dropout or gradient."""
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=probe, use_cache=False).logits[0].float()
    model.train(was_training)
    return logits


def check_same_logits(in_memory: torch.Tensor, reopened: torch.Tensor, folder: Path) -> float:
    """Return the largest difference; ValueError when what was saved is not what was trained."""
    difference = (in_memory - reopened).abs().max().item()
    scale = in_memory.abs().max().item()
    if not math.isfinite(difference) or difference > 1e-3 * max(scale, 1.0):
        raise ValueError(f"{folder}: reopened, its logits differ by {difference:.3g} from memory")
    return difference
