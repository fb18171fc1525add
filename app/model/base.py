"""The base model: its settings, loading its weights, and the check of its weight files.

transformers ignores tensors that the model does not have, and loads NaN without a warning:
therefore shapes, dtypes, unused tensors and NaN are checked against config.json here.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.model.architecture import (
    HEAD,
    base_commit,
    base_folder,
    generation_config,
    init_head,
    is_classifier,
    load_architecture,
    model_class,
    reading_base,
)
from app.model.attention.backends import check_implementation
from app.model.description import names_by_id
from app.model.multimodal import outermost, record_tower_files, tower_modules
from app.model.quantization import (
    QuantizationConfig,
    cast_unquantized,
    find_quantization_conflict,
    prepare_quantized,
    quantizable_layers,
    quantization_settings,
    quantize_experts,
    quantize_on_device,
    quantize_on_meta,
    stored_quantization,
)
from app.model.rope import fix_rope_factors
from app.model.tokenizer import resize_embeddings
from app.process.launch import is_first_on_machine, is_first_rank
from common.errors import UserError
from common.facts import setting
from common.untrusted import FLOATS, Header, read_header

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT = re.compile(r"(^|\.)weight$")
"""matches names of weights; other tensors may be masks or positions"""
_DIGITS = re.compile(r"\d+")
_LABELS = re.compile(r"Classification|Reward|QuestionAnswering|MultipleChoice|NextSentence")
"""matches class names of models that do not generate text"""
_HEADS = {"lm_head", "embed_out", "output_layer"}
"""names of language-model heads"""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str | None = setting(
        None,
        resume="content",
        shown=True,
        aliases=("base_model", "model_name_or_path"),
        is_path=True,
    )
    """folder or hub id of the base model (config.json, safetensors, tokenizer)"""
    revision: str | None = setting(None, resume="content", grants="nothing")
    """hub commit, tag or branch to download"""
    trust_remote_code: bool = setting(False, resume="per_start", grants="code")
    """run Python files from the model's repository; requires a pinned revision, and must be typed
    at every start: it is never read from the files of a run"""
    tokenizer_path: str | None = setting(None, resume="content", shown=("preview",), is_path=True)
    """folder or hub id of the tokenizer, if it is not in the model's folder"""
    added_tokens: list[str] = setting(default_factory=list, grants="nothing")
    """special tokens to add to the base, as [<|im_start|>, <|im_end|>]; their embedding rows are
    trained"""
    from_scratch: bool = False
    """start from random weights of `architecture` instead of a pretrained base"""
    architecture: dict[str, Any] = setting(default_factory=dict, grants="nothing")
    """values of the model's config.json, which allow checks without a download"""
    chat_template: str | None = setting(None, resume="content", grants="nothing")
    """name of the chat template for a tokenizer without one; null = the base has no chat tokens"""
    stop_tokens: list[str] = setting(default_factory=list, resume="free", grants="nothing")
    """tokens that end an answer, in addition to EOS and those of the template, as [<|eot_id|>]"""
    router_aux_loss: float | None = setting(None, ge=0, le=10, note="0.001 to 0.02 is usual")
    """adapter=full: weight of the load-balancing loss of a mixture of experts, computed per
    document; null = router_aux_loss_coef of config.json, 0 = off; adapters keep routers frozen"""
    rope_len: int | None = setting(None, ge=1)
    """longrope and dynamic NTK: tokens of the longest sequence, by which all documents get the
    factors of short or of long texts; null = model.context_len or data.sequence_len of the run,
    without a run the base's context"""
    context_len: int | None = setting(None, ge=1, resume="content")
    """tokens of the longest sequence, if that is more than the base's context: its rope is scaled,
    and the result saved so; null = the base's context"""
    rope_scaling: str | None = setting(
        None, choices=("yarn", "llama3", "linear", "dynamic"), resume="content"
    )
    """how the rope is scaled to model.context_len; null = yarn"""
    labels: list[str] = setting(default_factory=list, resume="content", grants="nothing")
    """objective=classify and reward: outputs of a head in place of the language model's: the names
    of the classes, or one name for a number"""
    multi_label: bool = setting(False, resume="content", grants="nothing")
    """a text may have several of model.labels, or none"""
    wrap_class: str | None = setting(None, resume="rounding", grants="nothing")
    """layer class that sharding strategies wrap; null = the classes the model declares"""
    stream: str | None = setting(None, choices=("host", "disk"), resume="free")
    """for an adapter on a base larger than the GPU: where frozen matrices of layers are, except for
    those of two layers at a time: host (pinned memory), disk (the base's files); same results,
    slower. null = on the device"""


def load_base(
    config: ModelConfig,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
    new_ids: Sequence[int] = (),
    *,
    on_meta: bool = False,
    on_host: bool = False,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a base model's weights, or initialize random ones from `config.architecture`.

    The tokens `new_ids` get rows in embedding and head. `on_meta` builds the same modules on the
    meta device without reading weights. Files are loaded to `device`; with `on_host` or
    `model.stream` the weights stay on the CPU and are only quantized on `device`. UserError if the
    files are inconsistent or weights are not finite.
    """
    from transformers.utils import logging as transformers_logging

    from app.model.experts import use_grouped_experts
    from app.model.head import fuse_head

    transformers_logging.disable_progress_bar()  # it shows one bar per file
    if not config.from_scratch and not on_meta:
        _log_download(config)
    quantization = quantization or QuantizationConfig()
    with reading_base(config):
        architecture = load_architecture(config)
        how = config, architecture, implementation, dtype, quantization, new_ids
        if config.from_scratch:
            model = model_class(architecture).from_config(
                architecture, attn_implementation=implementation, dtype=dtype
            )
            check_implementation(model, implementation)
            resize_embeddings(model, new_ids)
            if is_classifier(model):
                init_head(model)
        elif on_meta:
            model = _build_on_meta(*how)
        else:
            on_host = on_host or config.stream is not None
            model = _read_weights(*how, on_host=on_host, device=device)
        fix_rope_factors(model, config.rope_len)
        if not is_classifier(model):
            fuse_head(model)
        use_grouped_experts(model)
        return model


def _read_weights(
    config: ModelConfig,
    architecture: PretrainedConfig,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig,
    new_ids: Sequence[int],
    *,
    on_host: bool,
    device: torch.device | None,
) -> PreTrainedModel:
    """Read weights in their training dtype, and quantize them while they are read."""
    from app.model.experts import has_experts

    stored = stored_quantization(architecture)
    if stored and (problem := find_quantization_conflict(stored, quantization, config.path)):
        raise UserError(problem)
    # Even None would override the files' quantization_config: packed bits read as values.
    settings = quantization_settings(quantization, dtype, architecture.model_type)
    options: dict[str, Any] = {} if stored else {"quantization_config": settings}
    if config.context_len is not None or config.labels:
        options["config"] = architecture
    # Experts in 4 bits, and FP8, are quantized after the weights were read.
    is_staged = quantization.method in (("nf4", "fp8") if has_experts(architecture) else ("fp8",))
    if on_host or is_staged:
        options["device_map"] = {"": "cpu"}
    elif device is not None and (device.type != "cpu" or quantization.method != "none"):
        # Tensor by tensor: the model never fills host memory. Without a map, transformers moves
        # quantized models to a GPU if there is one.
        options["device_map"] = {"": device}
    folder = Path(str(config.path))
    shapes = read_shapes(weight_files(folder)) if folder.is_dir() else {}
    if shapes and not stored:
        _check_shapes(architecture, shapes, folder, trust_remote_code=config.trust_remote_code)
    at = device if on_host or is_staged else None
    with quantizable_layers(architecture.model_type), quantize_on_device(at):
        model, loading = model_class(architecture).from_pretrained(
            config.path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=implementation,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    check_implementation(model, implementation)
    _draw_missing_head(model, loading["missing_keys"])
    _check_loaded(config, model, loading, shapes, None if stored else dtype)
    _untie_in_config(model)
    resize_embeddings(model, new_ids)
    if stored:
        cast_unquantized(model, dtype)
    else:
        quantize_experts(model, quantization, device)
    if stored or quantization.method != "none":
        prepare_quantized(model, quantization, dtype, device)
    if is_staged and not on_host and device is not None:
        model.to(device)
    return model


def _draw_missing_head(model: PreTrainedModel, missing: set[str]) -> None:
    """Draw a classifier's head if its base is a language model, and take it off `missing`."""
    name = f"{HEAD}.weight"
    if is_classifier(model) and name in missing:
        missing.remove(name)
        init_head(model)


def check_described(config: ModelConfig, architecture: PretrainedConfig) -> None:
    """Raise UserError if config.json describes a different model from the weights next to it.

    Reads only the headers of local files, and skips bases that are stored quantized.
    """
    if config.from_scratch or stored_quantization(architecture):
        return
    with reading_base(config):
        folder = base_folder(config)
        files = weight_files(folder)
        if all(file.is_file() for file in files) and (shapes := read_shapes(files)):
            where = f"{config.path}/config.json"
            problems = check_head(where, architecture.architectures, shapes)
            if problems and not config.labels:
                raise UserError(problems)
            _check_shapes(architecture, shapes, folder, trust_remote_code=config.trust_remote_code)


def _check_loaded(
    config: ModelConfig,
    model: PreTrainedModel,
    loading: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
) -> None:
    """Compare a model with the files it was read from; `dtype` is None for quantized files."""
    # transformers only warns about missing tensors, and initializes them at random.
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[problem])):
            raise UserError(
                f"model.path={config.path}: {problem.replace('_keys', '')} tensors in its files: "
                f"{len(names)}, first {names[0]}; copy or download the model again"
            )
    if model._hf_peft_config_loaded:
        raise UserError(
            f"model.path={config.path}: the folder of the base contains an adapter_config.json, "
            "and transformers has applied that adapter; use a copy without it"
        )
    files = weight_files(base_folder(config))
    record_tower_files(model, files)
    if dtype is not None:
        if problems := check_dtypes(read_headers(files)):
            raise UserError(problems)
        check_all_used(model, loading["unexpected_keys"], shapes, str(config.path))
        _check_finite(files, dtype)


def _log_download(config: ModelConfig) -> None:
    """Log a download from the hub, and enable the hub library's progress bar on a terminal."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import enable_progress_bars

    if base_commit(config) is None or any(base_folder(config).glob("*.safetensors")):
        return
    if is_first_rank():
        log.info("downloading %s", config.path)
        if not constants.HF_HUB_DISABLE_PROGRESS_BARS:
            enable_progress_bars()


def _build_on_meta(
    config: ModelConfig,
    architecture: PretrainedConfig,
    implementation: str,
    dtype: torch.dtype,
    quantization: QuantizationConfig,
    new_ids: Sequence[int],
) -> PreTrainedModel:
    """Build the same model as `from_pretrained`, without reading weights."""
    import torch

    if stored_quantization(architecture):
        raise UserError(
            f"model.path={config.path} is stored quantized (config.json), which cannot be sharded; "
            "type the unquantized base with quantization=nf4, or strategy=ddp"
        )
    with quantizable_layers(architecture.model_type):
        model = model_class(architecture).from_config(
            architecture,
            trust_remote_code=config.trust_remote_code,
            attn_implementation=implementation,
            dtype=dtype,
        )
    if not is_classifier(model):
        model.generation_config = generation_config(config) or model.generation_config
    if has_own_head(model, base_folder(config)):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    _untie_in_config(model)
    resize_embeddings(model, new_ids)
    if quantization.method != "none":
        quantize_on_meta(model, quantization, dtype)
        prepare_quantized(model, quantization, dtype)
    return model


def _untie_in_config(model: PreTrainedModel) -> None:
    # transformers declares every T5 as tied, and would tie FLAN-T5's separate head when resizing.
    # A head may be tied to an embedding that is not the model's input embedding (T5Gemma).
    head = model.get_output_embeddings().weight
    every = model.named_parameters(remove_duplicate=False)
    if sum(weight is head for _, weight in every) == 1:
        model.config.tie_word_embeddings = False


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads from a base's folder."""
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return sorted({folder / name for name in weight_map.values()})


def read_headers(files: Iterable[Path]) -> dict[Path, Header]:
    """Return the header of each file; UserError for a damaged one."""
    headers = {}
    for file in files:
        headers[file], problems = read_header(file)
        if problems:
            raise UserError(problems)
    return headers


def read_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in `files`; UserError for a damaged header."""
    headers = read_headers(files).values()
    return {name: shape for header in headers for name, shape in header.shapes.items()}


def check_dtypes(headers: Mapping[Path, Header]) -> list[str]:
    """Return a problem for weights that are not floats, although config.json has no quantization.

    At most one problem, for the first such file.
    """
    for file, header in headers.items():
        if others := header.non_floats(_WEIGHT):
            return [
                f"{file}: {others[0]}, but config.json has no quantization_config for it; expected "
                "F32, BF16, F16 or F64: download config.json and the weights again, or use "
                "another base"
            ]
    return []


def check_head(where: str, classes: object, names: Iterable[str]) -> list[str]:
    """Return a problem if a base is a classifier or reward model without a language-model head.

    `classes` is `architectures` of config.json, `names` are the tensors in its files. With tied
    embeddings such a base would load and train without an error.
    """
    labels = [name for name in classes if _LABELS.search(name)] if isinstance(classes, list) else []
    if not labels or any(_HEADS & set(name.split(".")) for name in names):
        return []
    return [
        f"{where}: architectures={labels[0]}: this model classifies or rates texts, and its files "
        "have no language-model head; type model.path=FOLDER_OR_HUB_ID of the language model that "
        "it was trained from"
    ]


def has_own_head(model: PreTrainedModel, folder: Path) -> bool:
    """Return whether the files of a model that is tied hold a head unlike its embedding.

    transformers loads these as two weights, whatever config.json says.
    """
    import torch

    stored = [file for file in weight_files(folder) if file.is_file()]
    files = {name: file for file in stored for name in read_shapes([file])}
    pairs = [
        (head, embedding)
        for head, embedding in model.all_tied_weights_keys.items()
        if _HEADS & set(head.split(".")) and head in files and embedding in files
    ]
    return any(
        not torch.equal(read_tensor(files[head], head), read_tensor(files[embedding], embedding))
        for head, embedding in pairs
    )


def read_tensor(file: Path, name: str) -> torch.Tensor:
    """Return one tensor of a file, which is opened for it alone.

    Pages of a mapped file count as used memory until it is closed.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name).clone()
    return tensor


def _check_shapes(
    architecture: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path, **how: bool
) -> None:
    """Raise UserError if the shapes in the weight files are not those of config.json.

    The model is built on `meta`, before memory is allocated; `how` are further arguments of
    `from_config`. Tensors with other names in the files are left to the loader.
    """
    import torch

    with torch.device("meta"), quantizable_layers(architecture.model_type):
        model = model_class(architecture).from_config(copy.deepcopy(architecture), **how)
    for name, parameter in model.named_parameters():
        in_file, described = shapes.get(name), tuple(parameter.shape)
        if in_file is not None and in_file != described:
            raise UserError(
                f"{folder / 'config.json'} describes a different model from the weights beside it: "
                f"{name} would be {_describe(described)}, and is {_describe(in_file)} in the "
                "files; copy or download config.json and the weights again"
            )
    if missing := _missing(model, shapes):
        raise UserError(
            f"{folder / 'config.json'} describes a different model from the weights beside it: "
            f"{len(missing)} tensors are not in the files, first {missing[0]}; copy or download "
            "config.json and the weights again"
        )


def _missing(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return weights that the files lack although they have them for other layers, and the head.

    A weight shared by several modules may be stored under any of their names.
    """
    names = names_by_id(dict(model.named_parameters(remove_duplicate=False)))
    known = {_DIGITS.sub("#", name) for name in shapes}
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        shared[0]
        for shared in names.values()
        if not any(name in shapes for name in shared)
        and any(_DIGITS.sub("#", name) in known for name in shared)
        and not any(each.search(name) for each in ignored for name in shared)
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is head.weight or is_classifier(model):
        return missing  # a language model's files have no head of a classifier yet
    embeddings, heads = names[id(embedding.weight)], names[id(head.weight)]
    # Compare shapes, because a head may have any name in the files.
    alike = {name for name, shape in shapes.items() if shape == tuple(head.weight.shape)}
    is_known = any(name in shapes for name in embeddings)
    return missing + (heads[:1] if is_known and not alike - set(embeddings) else [])


def _describe(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def check_all_used(
    model: PreTrainedModel,
    unexpected: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    path: str,
) -> None:
    """Raise UserError if the model does not use layers or biases that its files contain.

    Tensors of parts that the model class does not have, such as an image encoder, are only logged.
    """
    modules = {_DIGITS.sub("#", name) for name, _ in model.named_modules()}
    prefix = f"{model.base_model_prefix}."
    unused: list[str] = []
    other_parts: list[str] = []
    for name in sorted(unexpected):
        module, _, leaf = name.rpartition(".")
        module = _DIGITS.sub("#", module)
        known = {module, prefix + module, module.removeprefix(prefix)} & modules
        # Old files contain masks, such as `attn.bias` with four dimensions.
        is_mask = leaf == "bias" and len(shapes.get(name, (1,))) != 1
        is_extra = _is_in_extra_layer(name, model.config)
        is_unused = known and leaf in ("weight", "bias") and not is_mask and not is_extra
        (unused if is_unused else other_parts).append(name)
    if unused:
        raise UserError(
            f"model.path={path}: {len(unused)} tensors in its files would not be used, first "
            f"{unused[0]}: config.json describes a smaller model (the number of layers, as "
            "num_hidden_layers, or whether they have a bias); download config.json again"
        )
    if not is_first_rank():
        return
    if towers := outermost(tower_modules(model)):
        log.info("model: %s not loaded: text does not use them", ", ".join(towers))
    elif other_parts:
        log.info(
            "model: %d tensors in its files belong to parts that %s does not have, first %s",
            len(other_parts),
            type(model).__name__,
            other_parts[0],
        )


def _is_in_extra_layer(name: str, config: PretrainedConfig) -> bool:
    """Return whether a tensor belongs to a multi-token prediction layer, after all other layers."""
    text = config.get_text_config()
    extra = getattr(text, "num_nextn_predict_layers", None) or 0
    number = _DIGITS.search(name)
    layers = getattr(text, "num_hidden_layers", None)
    if number is None or layers is None:
        return False
    return bool(layers <= int(number[0]) < layers + extra)


def _check_finite(files: Iterable[Path], dtype: torch.dtype) -> None:
    """Raise UserError for weights that are not finite, or would overflow in `dtype`.

    The first rank of each node checks the node's own files. transformers has just read them, so
    they come from the page cache.
    """
    if not is_first_on_machine():
        return
    import torch

    for file in files:
        state = file.stat()
        for name, smallest, largest in _extremes(file, state.st_size, state.st_mtime_ns):
            if not (float("-inf") < smallest and largest < float("inf")):
                raise UserError(
                    f"{file}: {name} contains NaN or infinity, so no loss could be finite; "
                    "download the file again, or use another base"
                )
            most = torch.finfo(dtype).max
            if not (-most <= smallest and largest <= most):
                raise UserError(
                    f"{file}: {name} contains {max(largest, -smallest):.3g}, which overflows in "
                    f"{dtype}; type trainer.precision=bf16 or fp32"
                )


@cache
def _extremes(file: Path, size: int, changed: int) -> list[tuple[str, float, float]]:
    """Return name, minimum and maximum of each float tensor; NaN if it contains any.

    `size` and `changed` (its modification time) only identify the file's version in the cache.
    """
    import torch
    from safetensors import safe_open

    found = []
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if opened.get_slice(name).get_dtype() in FLOATS:
                tensor = opened.get_tensor(name)
                if tensor.numel():
                    smallest, largest = torch.aminmax(tensor)
                    found.append((name, smallest.item(), largest.item()))
    return found
