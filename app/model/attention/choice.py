"""Choose the attention of a run: what the device, the precision and the model can run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.model.attention.backends import (
    BACKEND_PACKAGES,
    BY_CLASS,
    GPU_ONLY,
    HALF_PRECISION_ONLY,
    IN_TRANSFORMERS,
    SELECTED_TOKENS,
    AttentionConfig,
)
from app.model.multimodal import language_model_class
from app.process.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

FASTEST_FIRST = ("flash3", "flash2", "varlen", "sdpa")
"""`auto` takes the first that can run, else eager, which runs every model"""
DESCRIPTIONS = {
    "varlen": "PyTorch's own, for NVIDIA GPUs in half precision",
    "flex": "PyTorch's flex_attention",
    "sdpa": "PyTorch's, document by document",
    "eager": "the slow reference",
}
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
HEAD_WIDTHS = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
"""names in config.json"""
SELECTED_KEYS = (*SELECTED_TOKENS, "index_topk_blocks")
"""names in config.json of how many keys, or blocks of them, a query selects by score"""
WIDEST_HEAD = 256
"""limit of all flash attention kernels"""
SMALLEST_FLEX_HEAD = 16
OWN_MASKS = ("blt",)
"""model types whose layers compute masks of their own"""
MASKED_WINDOWS = ("phimoe",)
"""model types whose layers know their sliding window from the mask only"""
TAKES_MASK_ONLY = ("nemotron", "stablelm")
"""model types whose decoder layers pass nothing but the mask on to their attention (as of
transformers 5.23)"""
PAIRS_SINCE, PAIRS_OF_KIND_SINCE = "5.4", {"umt5": "5.18"}
"""the transformers from which on encoder-decoder models tell sdpa what each attention is"""
FLASH4 = "flash-attn-4"
"""the package of a faster kernel for `varlen`"""
NO_HOPPER = "flash-attn-3 is for Hopper GPUs"
IMPORT_FAULTS = (ImportError, OSError, RuntimeError, AttributeError)
"""errors of a package that was built for another PyTorch, or lacks a library"""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention of a run and why it was chosen; printed as its string."""

    backend: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.why})"


@dataclass(frozen=True, slots=True)
class ModelOnDevice:
    """A model, and the device and precision that it runs on."""

    architecture: PretrainedConfig
    accelerator: str
    precision: str

    @property
    def model_type(self) -> str:
        return str(self.architecture.model_type)

    def number(self, name: str) -> Any:
        """Return a value of config.json by its usual name; None where the model has none.

        The largest of its layers' where each has its own, as Gemma 4's heads.
        """
        # Not by `to_dict`: GPT-2 has other names, which only the attributes map.
        text = self.architecture.get_text_config()
        try:
            return getattr(text, name, None)
        except RuntimeError:  # transformers refuses to read such a number of the whole config
            return max(getattr(layer, name) for layer in text.per_layer_config)

    def head_widths(self) -> list[int]:
        widths = [width for name in HEAD_WIDTHS if (width := self.number(name))]
        heads = self.number("num_attention_heads")
        return widths or ([self.number("hidden_size") // heads] if heads else [])


def choose_backend(
    config: AttentionConfig, architecture: PretrainedConfig, accelerator: str, precision: str
) -> AttentionChoice:
    """Resolve `auto` to the fastest backend that can run; `precision` is a resolved name.

    UserError when the chosen one cannot run this model here; ImportError when its package is
    missing or does not import.
    """
    model = ModelOnDevice(architecture, accelerator, precision)
    if config.backend == "auto":
        return _fastest(model)
    if reason := why_not_here(config.backend, model):
        raise UserError(f"attention={config.backend}: {reason}; type {_instead(model)}")
    if fault := find_package_problem(config.backend):
        raise ImportError(f"attention={config.backend}: {fault}; type {_instead(model)}")
    return AttentionChoice(config.backend, f"{_describe(config.backend)}, as typed")


def _fastest(model: ModelOnDevice) -> AttentionChoice:
    reasons: dict[str, None] = {}  # ordered, without duplicates
    taken = "eager"
    for backend in FASTEST_FIRST:
        if backend in BY_CLASS.get(model.model_type, ()):
            continue  # it needs batches of one row
        reason = why_not_here(backend, model) or find_package_problem(backend)
        if reason is None:
            taken = backend
            break
        if reason != NO_HOPPER:  # not worth a line
            reasons[reason] = None
    return AttentionChoice(taken, "; ".join([_describe(taken), *reasons]))


def _instead(model: ModelOnDevice) -> str:
    """Return what to type instead of a backend that cannot run."""
    backend = _fastest(model).backend
    needs_rows = backend == "eager" and model.architecture.is_encoder_decoder
    return f"attention={backend}{' packing=none' if needs_rows else ''}"


def why_not_here(backend: str, model: ModelOnDevice) -> str | None:
    """Return why `backend` cannot run this model on its device, None where it can."""
    return next(_obstacles(backend, model), None)


def _obstacles(backend: str, model: ModelOnDevice) -> Iterator[str]:
    if backend == "eager":
        return
    if backend in GPU_ONLY and model.accelerator != "gpu":
        kernel = "the gradient of flex_attention" if backend == "flex" else "flash attention"
        yield f"{kernel} needs an NVIDIA GPU"
        return
    if backend in HALF_PRECISION_ONLY and model.precision == "fp32":
        yield "flash attention computes in half precision only, and the precision is fp32"
    yield from _obstacles_of_model(backend, model)
    if backend in GPU_ONLY:
        yield from _obstacles_of_gpu(backend)


def _obstacles_of_model(backend: str, model: ModelOnDevice) -> Iterator[str]:
    model_type = model.model_type
    if backend != "sdpa" and model.architecture.is_encoder_decoder:
        yield (
            f"all layers get one set of boundaries, but {model_type} models have an encoder and "
            "a decoder"
        )
    if model.architecture.is_encoder_decoder and (since := _newer_for_pairs(model_type)):
        yield f"before transformers {since}, {model_type} models do not tell sdpa what is causal"
    if any(model.number(name) for name in SELECTED_KEYS):
        yield f"{model_type} models select what they attend to from a mask that only eager has"
    if model_type in TAKES_MASK_ONLY and backend != "flex":
        yield f"{model_type} models do not pass document boundaries on to their attention"
    if model_type in OWN_MASKS:
        yield f"{model_type} models attend by masks of their own, which only eager takes"
    if backend in ("sdpa", "varlen") and model.number("attn_logit_softcapping"):
        yield f"{backend} has no softcap of attention logits, as {model_type} models have"
    if not _takes(backend, model.architecture):
        if backend in ("sdpa", "varlen"):
            yield f"{model_type} models compute their attention themselves"
        yield f"transformers has no {backend} for {model_type} models"
    if tower := _tower_without(backend, model.architecture):
        yield f"transformers has no {backend} for {tower}, a part of {model_type} models"
    if backend == "sdpa":
        return
    if backend != "flash2" and (dropout := max(model.number(n) or 0 for n in DROPOUTS)):
        yield f"{backend} has no attention dropout, and this model has {dropout:g}"
    if backend in (*HALF_PRECISION_ONLY, "flex") and model.number("attention_chunk_size"):
        yield f"{backend} has no chunked attention, as {model_type} models have"
    if backend in HALF_PRECISION_ONLY and model_type in MASKED_WINDOWS:
        yield f"{backend} does not get the sliding window of {model_type} models"
    if backend == "varlen" and model.number("sliding_window") and not _varlen_takes_windows():
        yield "varlen has no sliding window before PyTorch 2.11"
    widths = model.head_widths()
    if backend == "flex":
        if min(widths, default=SMALLEST_FLEX_HEAD) < SMALLEST_FLEX_HEAD:
            yield f"flex needs heads {SMALLEST_FLEX_HEAD} wide, and this model's are {min(widths)}"
    elif max(widths, default=0) > WIDEST_HEAD:
        yield f"flash attention takes heads up to {WIDEST_HEAD} wide, not {max(widths)}"
    elif backend == "varlen" and any(width % 8 for width in widths):
        yield f"varlen takes heads whose width is a multiple of 8, not {widths[0]}"


def _obstacles_of_gpu(backend: str) -> Iterator[str]:
    import torch

    capability = torch.cuda.get_device_capability()
    if backend == "flash3" and capability[0] != 9:
        yield NO_HOPPER
    if backend in HALF_PRECISION_ONLY and capability < (8, 0):
        name = "sm{}{}".format(*capability)
        yield f"flash attention needs an Ampere GPU (sm80) or a newer one, and this is {name}"
    if backend == "varlen" and not torch.backends.cuda.is_flash_attention_available():
        yield "this PyTorch was built without flash attention"


def _newer_for_pairs(model_type: str) -> str | None:
    """Return the transformers whose encoder-decoder models run by sdpa, where this one is older."""
    import transformers
    from packaging.version import Version

    since = PAIRS_OF_KIND_SINCE.get(model_type, PAIRS_SINCE)
    return since if Version(transformers.__version__) < Version(since) else None


def _varlen_takes_windows() -> bool:
    from app.model.attention.varlen import VarlenKernel

    return VarlenKernel.installed().takes_window


def _takes(backend: str, architecture: PretrainedConfig) -> bool:
    """Return whether the model's layers can run this attention through transformers."""
    model_class = _model_class(architecture)
    if model_class is None:
        return True
    if not model_class._can_set_attn_implementation():
        return backend in BY_CLASS.get(architecture.model_type, ())
    if backend in ("sdpa", "varlen"):
        return bool(model_class._supports_sdpa)
    if backend == "flex":
        return bool(model_class._supports_flex_attn)
    # A model with attention sinks lists the kernels that support them.
    listed = getattr(model_class, "_compatible_flash_implementations", None)
    return bool(model_class._supports_flash_attn) and (
        listed is None or IN_TRANSFORMERS[backend] in listed
    )


def _tower_without(backend: str, architecture: PretrainedConfig) -> str | None:
    """Return a part of the model without this attention; towers of multimodal ones do not run."""
    from transformers.models.auto import modeling_auto

    if language_model_class(architecture) is not None:
        return None
    flags = {"sdpa": "_supports_sdpa", "varlen": "_supports_sdpa", "flex": "_supports_flex_attn"}
    for name in architecture.sub_configs:
        tower = modeling_auto.MODEL_MAPPING.get(type(getattr(architecture, name, None)), None)
        if tower is not None and not getattr(tower, flags.get(backend, "_supports_flash_attn")):
            return str(tower.__name__)
    return None


def _model_class(architecture: PretrainedConfig) -> Any:
    """Return the class that transformers has for an architecture, None for remote code."""
    from transformers.models.auto import modeling_auto

    if (language_model := language_model_class(architecture)) is not None:
        return language_model
    known = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if architecture.is_encoder_decoder
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return known.get(type(architecture), None)


def find_package_problem(backend: str) -> str | None:
    """Return what is wrong with the package of `backend`, None where it can be used."""
    if backend not in BACKEND_PACKAGES:
        return None
    module, package = BACKEND_PACKAGES[backend]
    version = _version(package)
    if version is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except IMPORT_FAULTS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        return f"{package} {version} is installed, but its import fails ({message})"
    if not _transformers_takes(backend):
        return f"{package} {version} is installed, but transformers does not take it"
    return None


def select_fastest_kernel(
    backend: str, architecture: PretrainedConfig, device: torch.device
) -> None:
    """Let `backend` run the fastest of its kernels that are proven equal on `device`."""
    if backend == "varlen" and device.type == "cuda" and _version(FLASH4) is not None:
        from app.model.attention.varlen import take_flash4

        take_flash4(ModelOnDevice(architecture, "gpu", "bf16").head_widths(), device)


def restore_kernel(backend: str) -> None:
    """Let `backend` run its own kernel again."""
    if backend == "varlen":
        from app.model.attention.varlen import restore_flash2

        restore_flash2()


def _version(package: str) -> str | None:
    import importlib.metadata  # here: it imports the parsing of e-mail

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformers_takes(backend: str) -> bool:
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    asks = {"flash2": is_flash_attn_2_available, "flash3": is_flash_attn_3_available}
    return bool(asks[backend]())


def _describe(backend: str) -> str:
    if backend in BACKEND_PACKAGES:
        package = BACKEND_PACKAGES[backend][1]
        return f"{package} {_version(package)}"
    return DESCRIPTIONS[backend]
