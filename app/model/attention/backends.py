"""The attention backends: their names, the models that they cannot run, and the choice of a run's.

`auto` chooses by device, precision and model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app.model.families import family_of
from app.model.multimodal import language_model_class
from common.errors import UserError
from common.facts import setting

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

GPU_ONLY = ("flash2", "flash3", "varlen", "flex")
"""backends that can train only on an NVIDIA GPU"""
HALF_PRECISION_ONLY = ("flash2", "flash3", "varlen")
"""backends that compute in half precision only"""
MAX_FLASH_HEAD_DIM = 256
"""largest head dimension of FlashAttention"""
BACKEND_PACKAGES = {
    "flash2": ("flash_attn", "flash-attn"),
    "flash3": ("flash_attn_interface", "flash-attn-3"),
}
"""backend in a separate package -> the module to import, and the package's name"""
SINKS_ERROR = "attention sinks are computed on a CPU only, and without dropout"
EXCHANGED = ("sdpa", "varlen")
"""backends that can run on a share of the heads, for rows split over ranks"""
IN_TRANSFORMERS = {
    "eager": "eager",
    "sdpa": "attention_by_document",
    "varlen": "varlen_by_boundaries",
    "flex": "flex_attention_by_blocks",
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
}
"""backend -> its name in transformers; no name of ours contains "sdpa": transformers would then
refuse models without an sdpa of their own"""

# Properties of model types that config.json does not contain (transformers 5.23). The lists give an
# early message; the probes at the start of training refuse the models that are missing here.
_COUNTS_POSITIONS = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert", "data2vec-text"),
    *("fsmt", "led", "m2m_100", "marian", "mbart", "mvp", "nllb-moe", "pegasus", "pegasus_x"),
    *("plbart", "prophetnet", "roberta", "roberta-prelayernorm", "trocr", "xlm-roberta"),
    *("xlm-roberta-xl", "xmod"),
)
"""model types that compute positions themselves, counted from the start of the row"""
_WITHOUT_MASK = ("deepseek_v4", "openai-gpt", "xlm")
"""model types that ignore a mask of queries by keys, at least in some layers"""
_ALIBI = ("bloom", "mpt")
"""model types that compute their ALiBi bias from the mask of a whole row"""
_SEES_PADDING = ("encoder-decoder", "prophetnet")
"""model types that see padding whatever the mask is"""
_HASHES_ROWS = ("reformer",)
"""model types that attend inside buckets, into which they sort the tokens of a whole row"""
_SHARED_EXPERTS = ("nllb-moe",)
"""model types whose experts drop tokens above a capacity shared by the whole batch"""
SELECTED_TOKENS = ("index_topk", "keep_window_size", "indexer_budget")
"""names in config.json of the number of keys that each query selects by score"""
_COMPRESSED_TOKENS = {"deepseek_v4": 4}
"""model type -> number of tokens that each selected key represents, if more than one"""
BY_CLASS = {"falcon": ("flash2",)}
"""model types with one attention class per backend, and the backends to use with them: these get
only positions, which keep packed documents apart if the batch is a single row"""
_FASTEST_FIRST = ("flash3", "flash2", "varlen", "sdpa")
"""`auto` chooses the first that can run, else eager, which runs every model"""
_DESCRIPTIONS = {
    "varlen": "PyTorch's own, for NVIDIA GPUs in half precision",
    "flex": "PyTorch's flex_attention",
    "sdpa": "PyTorch's, document by document",
    "eager": "the slow reference",
}
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""names of the attention dropout in config.json"""
_HEAD_DIMS = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
"""names of head dimensions in config.json"""
_SELECTED_KEYS = (*SELECTED_TOKENS, "index_topk_blocks")
"""names in config.json of the number of keys, or blocks of keys, that each query selects"""
_MIN_FLEX_HEAD_DIM = 16
_OWN_MASKS = ("blt",)
"""model types whose layers compute their own masks"""
_MASKED_WINDOWS = ("phimoe",)
"""model types whose layers get their sliding window only from the mask"""
_MASK_ONLY = ("nemotron", "stablelm")
"""model types whose decoder layers pass only the mask to their attention (transformers 5.23)"""
ENCODER_DECODER_SINCE, ENCODER_DECODER_SINCE_BY_TYPE = "5.4", {"umt5": "5.18"}
"""first version of transformers whose encoder-decoder models pass on which attention is causal"""
FLASH4 = "flash-attn-4"
"""package of a faster kernel for `varlen`"""
_NOT_HOPPER = "flash-attn-3 is for Hopper GPUs"
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
"""errors of a package that was built for another PyTorch, or misses a library"""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    backend: str = setting(
        "auto", choices=("auto", "flash2", "flash3", "varlen", "flex", "sdpa", "eager")
    )
    """auto: the fastest for this device, precision and model; eager: the slow reference"""


def attention_implementation(backend: str) -> str:
    """Register our attention functions in transformers, and return the name of `backend` there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = IN_TRANSFORMERS[backend]
    if backend in EXCHANGED:
        from app.model.attention.attend import attend_by_document, build_mask_rule
        from app.model.attention.exchange import Attend, exchanging

        attend: Attend = attend_by_document
        if backend == "varlen":
            from app.model.attention.varlen import VarlenKernel, attend_by_boundaries

            attend = partial(attend_by_boundaries, kernel=VarlenKernel.installed())
        AttentionInterface.register(name, exchanging(attend))
        AttentionMaskInterface.register(name, build_mask_rule)
    elif backend == "flex":
        from app.model.attention.inputs import attend_by_blocks

        # No mask function: the block mask that is built for each batch is complete.
        AttentionInterface.register(name, attend_by_blocks)
    return name


def key_repeats(heads: int, key_heads: int, size: int) -> int:
    """Return how often each key head is repeated so that `size` ranks get equally many of them.

    Where they do not divide `heads`, as the mean of unlike layers in a plan, nearly once a head.
    """
    most = heads // key_heads
    return next(
        (
            times
            for times in range(1, most + 1)
            if key_heads * times % size == 0 and heads % (key_heads * times) == 0
        ),
        most,
    )


def gather_reason(heads: int, key_heads: int, size: int) -> str | None:
    """Return why `size` ranks gather keys and values; None if they exchange heads for tokens.

    Exchanged heads run the fastest kernel, so gathering must send less than half as much.
    """
    if heads % size:
        return f"{size} ranks cannot share {heads} attention heads equally"
    repeats = key_repeats(heads, key_heads, size)
    exchanged, gathered = heads + repeats * key_heads, size * key_heads
    if repeats == 1 or exchanged <= 2 * gathered:
        return None
    return (
        f"{size} ranks have too few key heads ({key_heads}) to share: {gathered} heads to send "
        f"instead of {exchanged}"
    )


def check_implementation(model: PreTrainedModel, implementation: str) -> None:
    """Raise UserError if a part of `model` runs another attention than `implementation`.

    transformers silently replaces an attention that a model does not support.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        actual = part.config._attn_implementation
        if actual != implementation:
            raise UserError(
                f"{type(part).__name__} should run {implementation}, but transformers replaced it "
                f"by {actual}: type attention=sdpa or attention=eager"
            )


def packing_error(config: Mapping[str, Any], backend: str = "auto") -> str | None:
    """Return why documents cannot be packed for a model, or None; they go into padded rows instead.

    `config`: contents of its config.json.
    """
    model_type = config.get("model_type")
    if model_type in _COUNTS_POSITIONS:
        reason = (
            "compute positions from the start of the row, which are wrong for every document of a "
            "pack but the first"
        )
    elif model_type in _ALIBI or (model_type == "falcon" and config.get("alibi")):
        reason = (
            "compute their ALiBi bias over the whole row, and support no mask that separates the "
            "documents of a pack"
        )
    elif model_type in _WITHOUT_MASK:
        reason = "support no mask that separates the documents of a pack"
    elif config.get("is_encoder_decoder") and backend == "eager":
        reason = (
            "have an encoder, and attention=eager gives it and cross-attention one mask, which "
            "cannot keep the documents of a pack apart"
        )
    else:
        return None
    return f"{model_type} models {reason}"


def batching_error(config: Mapping[str, Any], longest: int | None = None) -> str | None:
    """Return why a document's logits depend on the rest of its batch, or None if they do not.

    Holds for packed and for padded batches of documents up to `longest` tokens. `config`: contents
    of config.json.
    """
    model_type = config.get("model_type")
    if model_type in _SEES_PADDING:
        reason = "let documents see the padding after them, and each other in a pack"
    elif model_type in _HASHES_ROWS:
        reason = (
            "sort the tokens of a whole row into buckets, so that the logits of a document depend "
            "on its padding and its neighbours"
        )
    elif model_type in _SHARED_EXPERTS:
        reason = (
            "drop tokens beyond an expert_capacity that all documents of a batch share, so that "
            "the logits of one depend on the others"
        )
    elif model_type == "t5gemma" and _starts_with_padding(config):
        reason = (
            "mask tokens whose id is pad_token_id, and this decoder starts with one "
            "(decoder_start_token_id): its logits depend on the padding of the row"
        )
    else:
        return _length_error(config, longest)
    return f"{model_type} models {reason}: type model.path=ANOTHER_BASE"


def _length_error(config: Mapping[str, Any], longest: int | None) -> str | None:
    text = _nested_config(config, "text_config")
    model_type = str(text.get("model_type"))
    keys = next((text[name] for name in SELECTED_TOKENS if text.get(name)), None)
    if longest is None or keys is None:
        return None
    selected = keys * _COMPRESSED_TOKENS.get(model_type, 1)
    if longest <= selected:
        return None
    return (
        f"{model_type} models let each token attend to the {keys:,} keys of the highest scores, "
        "and the choice between equal scores depends on the rest of the row: "
        f"type data.sequence_len={selected}"
    )


def _starts_with_padding(config: Mapping[str, Any]) -> bool:
    start = config.get("decoder_start_token_id")
    return start is not None and start == _nested_config(config, "decoder").get("pad_token_id")


def _nested_config(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    nested = config.get(name)
    return nested if isinstance(nested, Mapping) else config


def generation_attention(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Use transformers' own attention in `model.generate`, which needs a cache and left padding."""
    ours = [IN_TRANSFORMERS[backend] for backend in ("sdpa", "varlen", "flex")]

    def choose(part: PreTrainedModel) -> str:
        own: str = part.config._attn_implementation
        return own if own not in ours else "sdpa" if part._supports_sdpa else "eager"

    return _implementations(model, choose)


def use_backend(model: torch.nn.Module, backend: str) -> AbstractContextManager[None]:
    """Run `model` with the attention of `backend` in this context."""
    name = attention_implementation(backend)
    return _implementations(model, lambda part: name)


@contextmanager
def _implementations(
    model: torch.nn.Module, choose: Callable[[PreTrainedModel], str]
) -> Iterator[None]:
    """Switch the attention of all parts of a model in this context, as transformers names them."""
    from transformers import PreTrainedModel

    # Encoder and decoder have separate configs.
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    changed = [
        (part, part.config._attn_implementation, name)
        for part in parts
        if (name := choose(part)) != part.config._attn_implementation
    ]
    for part, _, name in changed:
        part.set_attn_implementation(name)
    try:
        yield
    finally:
        for part, own, _ in changed:
            part.set_attn_implementation(own)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention backend of a run, and why it was chosen; printed by `str`."""

    backend: str
    why: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.why})"


@dataclass(frozen=True, slots=True)
class ModelOnDevice:
    """A model with the device and precision that it runs on."""

    architecture: PretrainedConfig
    accelerator: str
    precision: str

    @property
    def model_type(self) -> str:
        return str(self.architecture.model_type)

    def config_value(self, name: str) -> Any:
        """Return a value of config.json by its usual name; None if the model has none.

        The largest one if layers differ, as Gemma 4's heads do.
        """
        # Not by `to_dict`: GPT-2 uses other names, which only attributes are mapped to.
        text = self.architecture.get_text_config()
        try:
            return getattr(text, name, None)
        except RuntimeError:  # transformers raises it for values that differ by layer
            return max(getattr(layer, name) for layer in text.per_layer_config)

    def head_dims(self) -> list[int]:
        dims = [dim for name in _HEAD_DIMS if (dim := self.config_value(name))]
        heads = self.config_value("num_attention_heads")
        return dims or ([self.config_value("hidden_size") // heads] if heads else [])

    def query_heads_per_key(self) -> int:
        """Return the number of query heads that share a key head; 1 without GQA."""
        heads = self.config_value("num_attention_heads") or 1
        return int(heads // (self.config_value("num_key_value_heads") or heads))


def choose_backend(
    config: AttentionConfig, architecture: PretrainedConfig, accelerator: str, precision: str
) -> AttentionChoice:
    """Resolve `auto` to the fastest backend that can run; `precision` is resolved already.

    Raises UserError if the configured backend cannot run this model on this device, ImportError if
    its package is missing or cannot be imported.
    """
    model = ModelOnDevice(architecture, accelerator, precision)
    if config.backend == "auto":
        return _choose_fastest(model)
    if reason := support_error(config.backend, model):
        raise UserError(f"attention={config.backend}: {reason}; type {_suggest_backend(model)}")
    if problem := find_package_problem(config.backend):
        raise ImportError(f"attention={config.backend}: {problem}; type {_suggest_backend(model)}")
    return AttentionChoice(config.backend, f"{_describe(config.backend)}, as typed")


def _choose_fastest(model: ModelOnDevice) -> AttentionChoice:
    reasons: dict[str, None] = {}  # ordered, without duplicates
    chosen = "eager"
    for backend in _FASTEST_FIRST:
        if backend in BY_CLASS.get(model.model_type, ()):
            continue  # works only for batches of one row
        reason = support_error(backend, model) or find_package_problem(backend)
        if reason is None:
            chosen = backend
            break
        if reason != _NOT_HOPPER:  # expected on most GPUs
            reasons[reason] = None
    return AttentionChoice(chosen, "; ".join([_describe(chosen), *reasons]))


def _suggest_backend(model: ModelOnDevice) -> str:
    backend = _choose_fastest(model).backend
    cannot_pack = backend == "eager" and model.architecture.is_encoder_decoder
    return f"attention={backend}{' packing=none' if cannot_pack else ''}"


def support_error(backend: str, model: ModelOnDevice) -> str | None:
    """Return why `backend` cannot run this model on its device, or None if it can."""
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
            f"{backend} gives all layers the same document boundaries, but {model_type} models "
            "have an encoder and a decoder"
        )
    if model.architecture.is_encoder_decoder and (since := _required_transformers(model_type)):
        yield (
            f"before transformers {since}, {model_type} models do not pass on which attention is "
            "causal"
        )
    if any(model.config_value(name) for name in _SELECTED_KEYS):
        yield f"{model_type} models select what they attend to from a mask that only eager builds"
    if model_type in _MASK_ONLY and backend != "flex":
        yield f"{model_type} models do not pass document boundaries on to their attention"
    if model_type in _OWN_MASKS:
        yield f"{model_type} models build their own attention masks, which only eager supports"
    if backend in ("sdpa", "varlen") and model.config_value("attn_logit_softcapping"):
        yield f"{backend} has no softcap of attention logits, which {model_type} models need"
    if not _supports(backend, model.architecture):
        if backend in ("sdpa", "varlen"):
            yield f"{model_type} models compute their attention themselves"
        yield f"transformers has no {backend} for {model_type} models"
    if tower := _find_tower_without(backend, model.architecture):
        yield f"transformers has no {backend} for {tower}, a part of {model_type} models"
    dropout = max(model.config_value(name) or 0 for name in _DROPOUTS)
    if backend == "sdpa":
        if family_of(model_type).has_sinks and (dropout or model.accelerator != "cpu"):
            yield SINKS_ERROR
        return
    if backend != "flash2" and dropout:
        yield f"{backend} has no attention dropout, and this model has {dropout:g}"
    if backend in (*HALF_PRECISION_ONLY, "flex") and model.config_value("attention_chunk_size"):
        yield f"{backend} has no chunked attention, which {model_type} models need"
    if backend in HALF_PRECISION_ONLY and model_type in _MASKED_WINDOWS:
        yield f"{model_type} models do not pass their sliding window on to {backend}"
    if backend == "varlen" and model.config_value("sliding_window"):
        from app.model.attention.varlen import VarlenKernel

        if not VarlenKernel.installed().takes_window:
            yield "varlen has no sliding window before PyTorch 2.11"
    dims = model.head_dims()
    if backend == "flex":
        if min(dims, default=_MIN_FLEX_HEAD_DIM) < _MIN_FLEX_HEAD_DIM:
            yield f"flex needs a head dimension of {_MIN_FLEX_HEAD_DIM} or more, not {min(dims)}"
    elif max(dims, default=0) > MAX_FLASH_HEAD_DIM:
        limit = MAX_FLASH_HEAD_DIM
        yield f"flash attention supports head dimensions up to {limit}, not {max(dims)}"
    elif backend == "varlen" and any(dim % 8 for dim in dims):
        yield f"varlen needs a head dimension that is a multiple of 8, not {dims[0]}"


def _obstacles_of_gpu(backend: str) -> Iterator[str]:
    import torch

    capability = torch.cuda.get_device_capability()
    if backend == "flash3" and capability[0] != 9:
        yield _NOT_HOPPER
    if backend in HALF_PRECISION_ONLY and capability < (8, 0):
        name = "sm{}{}".format(*capability)
        yield f"flash attention needs an Ampere GPU (sm80) or a newer one, and this is {name}"
    if backend == "varlen" and not torch.backends.cuda.is_flash_attention_available():
        yield "this PyTorch was built without flash attention"


def _required_transformers(model_type: str) -> str | None:
    """Return the transformers version whose models of this type run by sdpa, if it is newer."""
    import transformers
    from packaging.version import Version

    since = ENCODER_DECODER_SINCE_BY_TYPE.get(model_type, ENCODER_DECODER_SINCE)
    return since if Version(transformers.__version__) < Version(since) else None


def _supports(backend: str, architecture: PretrainedConfig) -> bool:
    from transformers.models.auto import modeling_auto

    classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if architecture.is_encoder_decoder:
        classes = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    language_model = language_model_class(architecture)
    model_class = language_model or classes.get(type(architecture), None)
    if model_class is None:
        return True
    if not model_class._can_set_attn_implementation():
        return backend in BY_CLASS.get(architecture.model_type, ())
    if backend in ("sdpa", "varlen"):
        return bool(model_class._supports_sdpa) or family_of(architecture.model_type).has_sinks
    if backend == "flex":
        return bool(model_class._supports_flex_attn)
    # A model with attention sinks lists the kernels that support them.
    compatible = getattr(model_class, "_compatible_flash_implementations", None)
    return bool(model_class._supports_flash_attn) and (
        compatible is None or IN_TRANSFORMERS[backend] in compatible
    )


def _find_tower_without(backend: str, architecture: PretrainedConfig) -> str | None:
    """Return the class of a nested model that does not support this attention, if any.

    Towers of multimodal models do not count: they do not run.
    """
    from transformers.models.auto import modeling_auto

    if language_model_class(architecture) is not None:
        return None
    flags = {"sdpa": "_supports_sdpa", "varlen": "_supports_sdpa", "flex": "_supports_flex_attn"}
    for name in architecture.sub_configs:
        tower = modeling_auto.MODEL_MAPPING.get(type(getattr(architecture, name, None)), None)
        if tower is not None and not getattr(tower, flags.get(backend, "_supports_flash_attn")):
            return str(tower.__name__)
    return None


def find_package_problem(backend: str) -> str | None:
    """Return why the package of `backend` cannot be used, or None if it can."""
    if backend not in BACKEND_PACKAGES:
        return None
    module, package = BACKEND_PACKAGES[backend]
    version = package_version(package)
    if version is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(module)
    except _IMPORT_ERRORS as error:
        message = " ".join(str(error).split()) or type(error).__name__
        return f"{package} {version} is installed, but its import fails ({message})"
    if not _transformers_accepts(backend):
        return f"{package} {version} is installed, but transformers does not accept it"
    return None


def select_fastest_kernel(
    backend: str, architecture: PretrainedConfig, device: torch.device
) -> None:
    """Select the fastest kernel of `backend` whose results on `device` are proven equal."""
    if backend == "varlen" and device.type == "cuda" and package_version(FLASH4) is not None:
        from app.model.attention.varlen import activate_flash4

        model = ModelOnDevice(architecture, "gpu", "bf16")
        has_sinks = family_of(model.model_type).has_sinks
        activate_flash4(model.head_dims(), model.query_heads_per_key(), device, has_sinks=has_sinks)


def restore_kernel(backend: str) -> None:
    """Undo `select_fastest_kernel`."""
    if backend == "varlen":
        from app.model.attention.varlen import restore_flash2

        restore_flash2()


def package_version(package: str) -> str | None:
    import importlib.metadata  # slow: it imports the email package

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformers_accepts(backend: str) -> bool:
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    checks = {"flash2": is_flash_attn_2_available, "flash3": is_flash_attn_3_available}
    return bool(checks[backend]())


def _describe(backend: str) -> str:
    if backend in BACKEND_PACKAGES:
        package = BACKEND_PACKAGES[backend][1]
        return f"{package} {package_version(package)}"
    return _DESCRIPTIONS[backend]
