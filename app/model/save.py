"""Save the trained model or adapter, read it back, and compare it with the one in memory.

A whole model is written as a Hugging Face folder, file by file: at most one file's weights are in
memory in addition to the model, so that sharded weights of any size can be gathered one by one.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from app.model.adapter.apply import has_modified_base, reopen_converted, save_converted
from app.model.adapter.saved import (
    check_adapter_file,
    check_same_logits,
    probe_logits,
    save_adapter,
    verify_adapter,
)
from app.model.adapter.settings import AdapterConfig, saves_whole_model, write_origin
from app.model.architecture import is_classifier, model_class
from app.model.base import INDEX, WEIGHTS
from app.model.multimodal import copy_processors, read_towers
from app.process.collectives import all_gather_list, broadcast_from_rank0, is_rank0, run_on_rank0
from common.errors import TrainingFault
from common.files import write_atomically
from common.untrusted import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
"""largest file, unless a single weight is larger"""
_ROPE_OUTSIDE = ("rope_theta", "partial_rotary_factor")
"""values of `rope_parameters` that transformers 4 has beside `rope_scaling`, not in it"""
_ROPE_BY_LAYER = ("gemma3_text", "gemma3n_text", "olmo3")
"""families of transformers 4 whose layers with a sliding window have rope settings of their own"""
_ROPE_OF_GPT_NEOX = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""names that transformers 4 has in GPT-NeoX -> those of `rope_parameters`"""
_LAYER_PREFIX = re.compile(r".*?\.\d+\.")
"""matches the common prefix of the names of a layer's weights"""


def save_model(
    model: Any,
    adapter: AdapterConfig,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, Sequence[int]],
    *,
    base: Mapping[str, str | None],
    reload_base: Callable[[], PreTrainedModel],
    shards: Shards | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Path, Any]:
    """Save a trained model under `folder` and verify it; return its folder and the saved model.

    An adapter is written to `adapter/` in peft's format, together with the description `base` of
    its base model; a full model to `model/` as a Hugging Face folder in `dtype`, by default that of
    the base. The files are reloaded, and the logits of `probe` (token ids by model argument)
    compared with those of the trained model; what rounding to `dtype` changes is logged. The
    returned model has the saved weights. It is not `model` if the adapter had changed its base,
    which is then reloaded. TrainingFault if the reloaded model differs by more than rounding.

    If weights are sharded, all ranks call this with their `shards`, and rank 0 writes. There is no
    memory for a second model then: the gathered weights are restored into the model, and its logits
    compared with those from before.
    """
    import torch

    device = model.device if shards is None else shards.root_device
    rows = {name: torch.tensor([list(ids)], device=device) for name, ids in probe.items()}
    is_whole = saves_whole_model(adapter)
    saved = folder / ("model" if is_whole else "adapter")
    if not is_whole:  # peft's AutoPeftModel loads this revision of the base
        model.peft_config["default"].revision = base.get("revision")
    written = dtype or stored_dtype(model, architecture)
    is_rounded = is_whole and loses_bits(trained_dtype(model), written)
    try:
        if is_whole and shards is not None:
            difference = _save_gathered_model(model, saved, rows, shards, written)
        elif is_whole:
            difference = _save_whole(model, architecture, saved, rows, written)
        elif shards is not None:
            difference = _save_gathered_adapter(model, saved, rows, base, shards)
        else:
            difference, model = _save_adapter(model, saved, rows, reload_base)
            write_origin(saved, base)
    except ValueError as error:
        raise TrainingFault(f"the saved files failed verification: {error}") from error
    if is_rounded:
        log.info(
            "%s verified: reloaded as written in %s, which moves the logits of the trained weights "
            "by up to %.2g",
            saved.name,
            dtype_name(written),
            difference,
        )
    else:
        log.info("%s verified: reloaded logits match (max difference %.1g)", saved.name, difference)
    return saved, model


def _save_adapter(
    model: Any,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    reload_base: Callable[[], PreTrainedModel],
) -> tuple[float, Any]:
    if has_modified_base(model):
        save_converted(model, folder)
        return reopen_converted(model, folder, probe, reload_base)
    save_adapter(model, folder)
    return verify_adapter(model, folder, probe), model


def _save_whole(
    model: PreTrainedModel,
    architecture: PretrainedConfig,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> float:
    """Return the largest difference of the reloaded logits from those of the trained model."""
    trained = probe_logits(model, probe)
    write_model(model, folder, dtype)
    # From here on the saved weights are evaluated, in their training dtypes.
    round_weights(model, dtype)
    saved = probe_logits(model, probe)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    widest = max(dtypes.values(), key=lambda dtype: dtype.itemsize)
    attention = model.config._attn_implementation
    reopened = model_class(architecture).from_pretrained(
        folder, dtype=widest, attn_implementation=attention
    )
    for name, parameter in reopened.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    reloaded = probe_logits(reopened.to(model.device), probe)
    return max(check_same_logits(saved, reloaded, folder), _largest_difference(trained, reloaded))


def _save_gathered_model(
    model: PreTrainedModel,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    shards: Shards,
    dtype: torch.dtype,
) -> float:
    trained = probe_logits(model, probe)
    shards.reshard(model)
    write_model(model, folder, dtype, shards)
    difference = _check_on_all(trained, probe_logits(model, probe), folder)
    # From here on the saved weights are evaluated, in their training dtypes.
    if not round_weights(model, dtype, shards):
        return difference
    return max(difference, _largest_difference(trained, probe_logits(model, probe)))


def _save_gathered_adapter(
    model: Any,
    folder: Path,
    probe: Mapping[str, torch.Tensor],
    base: Mapping[str, str | None],
    shards: Shards,
) -> float:
    if has_modified_base(model):
        raise ValueError("an adapter that changed its base can only be saved by a single process")
    in_memory = probe_logits(model, probe)
    shards.reshard(model)
    gatherer = WeightGatherer(shards)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = shards.weight_state(parameter).shape
            weight = gatherer.gather(name, parameter, shape)
            if is_rank0():
                weights[name] = weight.cpu()
    gatherer.check()

    def write() -> None:
        save_adapter(model, folder, weights)
        check_adapter_file(model, folder, weights=weights)
        write_origin(folder, base)

    run_on_rank0(write)
    return _check_on_all(in_memory, probe_logits(model, probe), folder)


def _check_on_all(in_memory: torch.Tensor, now: torch.Tensor, folder: Path) -> float:
    """Compare logits with `check_same_logits`; ValueError on all ranks if they differ on any."""
    difference, problems = 0.0, []
    try:
        difference = check_same_logits(in_memory, now, folder)
    except ValueError as error:
        problems = [str(error)]
    if gathered := all_gather_list(problems):
        raise ValueError(gathered[0])
    return difference


def stored_dtype(model: Any, architecture: PretrainedConfig) -> torch.dtype:
    """Return the dtype of the base's files, or the model's widest dtype if it has no base."""
    stored = architecture.dtype or architecture.get_text_config().dtype
    dtype: torch.dtype = stored or trained_dtype(model)
    return dtype


def trained_dtype(model: Any) -> torch.dtype:
    """Return the widest dtype of a model's trainable parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    widest: torch.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    return widest


def loses_bits(trained: torch.dtype, written: torch.dtype) -> bool:
    """Return whether weights of one dtype are rounded if they are written in another."""
    import torch

    return torch.promote_types(trained, written) != written


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name, as in settings: fp32, bf16 or fp16."""
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def _largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


class Shards(Protocol):
    """The methods of a sharding strategy that saving needs."""

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank."""

    def reshard(self, model: Any) -> None:
        """Free all gathered weights."""

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Gather a weight; collective: all ranks call it in the same order."""

    def weight_state(self, weight: torch.nn.Parameter) -> Any:
        """Return an object with the shape of the whole weight."""

    def restore_weight(self, weight: torch.nn.Parameter, value: Tensor) -> None:
        """Copy a whole value into a weight; collective: all ranks call it in the same order."""


class WeightGatherer:
    """Gathers weights, broadcasts rank 0's copy, which is saved, and restores it on all ranks.

    A later forward pass thus verifies the saved weights: anything lost while gathering is then
    missing from the model as well.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.problems: list[str] = []

    def gather(self, name: str, weight: Any, shape: torch.Size) -> Tensor:
        """Return a whole weight of shape `shape` on every rank."""
        import torch

        own = self.shards.full_tensor(weight)
        is_whole = own.shape == shape
        if not is_whole:
            found, needed = list(own.shape), list(shape)
            self.problems.append(f"{name} was gathered with shape {found}, expected {needed}")
            own = torch.full(shape, torch.nan, dtype=own.dtype, device=own.device)
        taken = broadcast_from_rank0(own, self.shards.root_device)
        if is_whole and not torch.equal(taken, own.to(taken.device)):
            self.problems.append(f"{name} is not finite, or differs between ranks")
        if weight.requires_grad:
            self.shards.restore_weight(weight, taken)
        return taken

    def check(self) -> None:
        """Raise ValueError on all ranks if gathering a weight failed on any rank."""
        if problems := all_gather_list(self.problems):
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ValueError(problems[0] + more)


def round_weights(model: torch.nn.Module, dtype: torch.dtype, shards: Shards | None = None) -> bool:
    """Round the trainable weights to `dtype`, the dtype of the saved files, in place.

    Each weight keeps its own dtype; frozen weights were loaded in `dtype` already. Returns whether
    any weight has a dtype that loses bits. If weights are sharded, all ranks call this.
    """
    import torch

    if shards is not None:
        shards.reshard(model)
    rounded = [w for w in model.parameters() if w.requires_grad and loses_bits(w.dtype, dtype)]
    for weight in rounded:
        if shards is None:
            weight.data.copy_(weight.data.to(dtype))
        else:
            shards.restore_weight(weight, shards.full_tensor(weight).to(dtype).to(weight.dtype))
    torch.clear_autocast_cache()  # casts of the unrounded weights
    return bool(rounded)


def write_model(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    shards: Shards | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model's weights in `dtype`, its config and its generation config into `folder`.

    If weights are sharded, all ranks call this with their `shards`; rank 0 writes the files, and
    all ranks continue with the weights it gathered. ValueError if a weight is incomplete or a file
    differs when read back.
    """
    import torch

    def on_rank0(work: Callable[[], None]) -> None:
        if shards is None:
            work()
        else:
            run_on_rank0(work)

    gatherer = None if shards is None else WeightGatherer(shards)
    files = ModelFolder(model, folder, dtype)
    on_rank0(files.begin)
    weights = model.state_dict(keep_vars=True)
    shard: dict[str, Tensor] = {}
    num_bytes = 0

    def write() -> None:
        if gatherer is not None:
            gatherer.check()
        on_rank0(partial(files.write, shard))

    for names in files.groups:
        taken = {}
        for name in names:
            weight, needed = weights[name], files.needed[name]
            if gatherer is None or not isinstance(weight, torch.nn.Parameter):
                taken[name] = weight.detach().to(needed.dtype)
            else:
                taken[name] = gatherer.gather(name, weight, needed.shape).to(needed.dtype)
        more = sum(tensor.nbytes for tensor in taken.values())
        if num_bytes and num_bytes + more > max_shard_bytes:
            write()
            shard, num_bytes = {}, 0
        num_bytes += more
        if shards is None or is_rank0():
            shard |= {name: tensor.cpu() for name, tensor in taken.items()}
    write()
    on_rank0(files.end)


class ModelFolder:
    """Writes the files of one model and checks them against the weights its config requires."""

    def __init__(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
        self.model, self.folder = model, folder
        self.shape = _shape_of(model, dtype)
        self.needed = _each_once(self.shape, self.shape.state_dict(keep_vars=True))
        """all weights that the model's config requires, on `meta`; tied weights once"""
        if differing := _differing(model, self.shape):
            raise ValueError(f"{folder}: model and config.json differ in {differing[0]}")
        for name, buffer in model.named_buffers():
            if name in self.needed:  # buffers keep their dtype
                self.needed[name] = self.needed[name].to(buffer.dtype)
        self.on_disk = self.named_as_on_disk(self.needed)
        self.written: list[dict[str, Tensor]] = []
        """tensors on `meta`, by name, for each file"""

    @property
    def groups(self) -> list[list[str]]:
        """Names of weights that must be converted together: single weights, or those of a layer.

        Some architectures are stored in a different layout from the one in memory (one tensor per
        expert), and converting back may need several weights of a layer.
        """
        if self.on_disk.keys() == self.needed.keys():
            return [[name] for name in self.needed]
        groups: dict[str, list[str]] = {}
        for name in self.needed:
            layer = _LAYER_PREFIX.match(name)
            groups.setdefault(layer[0] if layer else name, []).append(name)
        return list(groups.values())

    def begin(self) -> None:
        """Remove old weight files, and write everything but the weights, as `save_pretrained`."""
        for old in self.folder.glob(f"{Path(WEIGHTS).stem}*.safetensors*"):
            old.unlink()
        self.shape.save_pretrained(self.folder, state_dict={})
        _add_rope_of_v4(type(self.model.config), self.folder)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write one file and read it back; ValueError if it differs."""
        named = {name: t.contiguous() for name, t in self.named_as_on_disk(tensors).items()}
        self._write_file(named)

    def _write_file(self, named: Mapping[str, Tensor]) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        file = self._file(len(self.written))
        save_file(dict(named), file, metadata={"format": "pt"})
        for name, tensor in load_file(file).items():
            if not torch.equal(tensor, named[name]):
                raise ValueError(f"{file}: {name} is not finite, or differs when read back")
        self.written.append({name: t.to("meta") for name, t in named.items()})

    def stream(self, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
        """Write one file with the weights `names` (names on disk), one after another.

        `read` returns a weight by name, so that only one is in memory at a time. ValueError if one
        does not have the shape and dtype that the model's config requires, or is not finite.
        """
        import torch

        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name in names:
            needed = self.on_disk[name]
            ends = [place, place + needed.nbytes]
            kind = SAFETENSORS_DTYPES[str(needed.dtype).removeprefix("torch.")]
            header[name] = {"dtype": kind, "shape": list(needed.shape), "data_offsets": ends}
            place = ends[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with self._file(len(self.written)).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor, needed = read(name), self.on_disk[name]
                if (found := _describe(tensor)) != _describe(needed):
                    raise ValueError(f"{name} is {found}, the model expects {_describe(needed)}")
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise ValueError(f"{name} is not finite after merging")
                stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self.written.append({name: self.on_disk[name] for name in names})

    def end(self) -> None:
        """Add the towers of a multimodal base, rename the files and write their index.

        ValueError if weights are missing.
        """
        found = {name: tensor for file in self.written for name, tensor in file.items()}
        for name in sorted(found.keys() | self.on_disk.keys()):
            actual, expected = _describe(found.get(name)), _describe(self.on_disk.get(name))
            if actual != expected:
                raise ValueError(f"{self.folder}: {name} is {actual} on disk, expected {expected}")
        for towers in read_towers(self.model):
            self._write_file(towers)
            found |= self.written[-1]
        copy_processors(self.model, self.folder)
        num_files = len(self.written)
        if num_files == 1:
            self._file(0).rename(self.folder / WEIGHTS)
            return
        names = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
        for index, name in enumerate(names):
            self._file(index).rename(self.folder / name)
        numbers = {
            "total_parameters": sum(tensor.numel() for tensor in found.values()),
            "total_size": sum(tensor.nbytes for tensor in found.values()),
        }
        places = {n: file for file, held in zip(names, self.written, strict=True) for n in held}
        text = json.dumps({"metadata": numbers, "weight_map": places}, indent=2, sort_keys=True)
        (self.folder / INDEX).write_text(f"{text}\n", encoding="utf-8")

    def _file(self, index: int) -> Path:
        return self.folder / f"model-{index + 1:05}.safetensors"

    def named_as_on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert weights to the names and layout that they have on disk."""
        from transformers.core_model_loading import revert_weight_conversion

        named: dict[str, Tensor] = revert_weight_conversion(self.model, dict(tensors))
        return named


def _shape_of(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    import torch
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 replaces a model's class by a subclass.
    own = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config = copy.deepcopy(model.config)
    config._experts_implementation = None  # transformers 5.3 accepts only its own names here
    with torch.device("meta"):
        shape = own(config)
    for parameter in shape.parameters():
        parameter.data = parameter.data.to(dtype)
    if not is_classifier(model):
        shape.generation_config = model.generation_config
    return shape


def _add_rope_of_v4(kind: type[PretrainedConfig], folder: Path) -> None:
    """Add to config.json the rope settings under their names in transformers 4.

    Transformers 4, and servers built on it, ignore `rope_parameters` and would use other angles.
    The file stays as it was if version 5 then reads another config, or none.
    """
    file = folder / "config.json"
    own = file.read_text(encoding="utf-8")
    content = json.loads(own)
    try:
        expected = kind.from_pretrained(folder).to_dict()
        for part in (content, *content.values()):
            if isinstance(part, dict) and isinstance(part.get("rope_parameters"), dict):
                part.update(_rope_of_v4(part))
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
        write_atomically(file, f"{text}\n")
        read = kind.from_pretrained(folder).to_dict()
        is_same = read == read | expected
    except Exception:  # noqa: BLE001  classes raise any type for values that they do not know
        is_same = False
    if not is_same:
        write_atomically(file, own)


def _rope_of_v4(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers 4 reads in place of the `rope_parameters` of a config."""
    rope, family = part["rope_parameters"], part.get("model_type")
    found: dict[str, Any] = {}
    if family in _ROPE_BY_LAYER and "full_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return {}
    found |= {name: rope[name] for name in _ROPE_OUTSIDE if name in rope}
    if family == "gpt_neox":
        found |= {name: rope[own] for name, own in _ROPE_OF_GPT_NEOX.items() if own in rope}
    scaling = {name: rope[name] for name in rope if name not in _ROPE_OUTSIDE}
    kind = scaling.get("rope_type", "default")
    if kind == "longrope" and family == "phi3":  # refuses more than these three
        scaling = {"type": kind} | {name: scaling[name] for name in ("short_factor", "long_factor")}
    if kind != "default" or scaling.keys() - {"rope_type", "type"}:
        found["rope_scaling"] = scaling
    return found


def has_config_of_its_own(model: PreTrainedModel) -> bool:
    """Return whether a model built of its config alone has the same weights, tied in the same way.

    Else it cannot be saved: an encoder-decoder whose files hold a head unlike the embedding.
    """
    return not _differing(model, _shape_of(model, model.dtype))


def _differing(model: PreTrainedModel, shape: PreTrainedModel) -> list[str]:
    """Return the names of weights that only one of two models has, tied ones once."""
    held, needed = (_each_once(each, each.state_dict(keep_vars=True)) for each in (model, shape))
    return sorted(held.keys() ^ needed.keys())


def _each_once(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop what `save_pretrained` drops: further names of tied weights, and ignored keys."""
    ignored = set(model._keys_to_ignore_on_save or ())
    seen: set[int] = set()
    found = {}
    for name, weight in weights.items():
        if id(weight) not in seen and name not in ignored:
            found[name] = weight
        seen.add(id(weight))
    return found


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
