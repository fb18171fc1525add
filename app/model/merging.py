"""Merge adapters into their base, and write the result as a Hugging Face model folder.

Each weight is read, changed in fp32 and written before the next one is read, so that the whole
model is never in memory. Also compares the logits of the merged model with those of base + adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter.saved import read_weight_changes, required_embedding_rows
from app.model.architecture import HEAD, base_folder, is_classifier
from app.model.attention import attention_implementation
from app.model.base import has_own_head, load_base, read_shapes, read_tensor, weight_files
from app.model.description import names_by_id
from app.model.gguf import GGUF_TYPES
from app.model.multimodal import record_tower_files
from app.model.quantization import (
    QuantizationConfig,
    quantize_dequantize,
    quantized_layers,
    stored_quantization,
)
from app.model.save import MAX_SHARD_BYTES, ModelFolder
from app.model.tokenizer import added_rows, resize_embeddings
from common.errors import UserError
from common.facts import setting
from common.text import percent

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from app.assembly.base import Base
    from app.model.adapter.saved import WeightChange

log = logging.getLogger(__name__)

_DTYPES = ("auto", "bf16", "fp32")
_ONTO = ("dequantized", "original")
_MAX_LOST = 0.1
"""largest share of the change that merge.dtype=auto lets rounding lose"""
_MAX_SAMPLED = 16
"""most weights that this share is measured on"""
_ROWS_AT_ONCE = 256
"""rows of a weight that are compared at once, which bounds the memory"""


@dataclass(kw_only=True, slots=True)
class WeightedAdapter:
    path: str = setting(is_path=True)
    """folder of an adapter of the same base"""
    weight: float = setting(1.0, ge=-10, le=10)
    """factor of its weight change"""


@dataclass(kw_only=True, slots=True)
class MergingConfig:
    dtype: str = setting("auto", choices=_DTYPES, shown=True)
    """dtype of the merged weights; auto = that of the base's files, or fp32 if rounding to it would
    lose more than a tenth of the adapters' change"""
    onto: str = setting("dequantized", choices=_ONTO, shown=True)
    """weights to merge into if the base was quantized in training. dequantized: as the adapter was
    trained with, so that the merged model answers as in training; original: the base's unrounded
    weights (the difference is measured)"""
    weight: float = setting(1.0, ge=-10, le=10)
    """factor of the weight change of the run's own adapter"""
    adapters: list[WeightedAdapter] = field(default_factory=list)
    """further LoRA adapters of the same base, whose weight changes are added, for example
    [{path: FOLDER, weight: 0.5}]"""
    verify: bool = setting(True, shown=True)
    """compare logits and greedy tokens of the merged model with those of base + adapter, and the
    tokens of conversations with those in training; needs memory for one of the models in fp32"""
    gguf: bool | str = setting(False, choices=(False, True, *GGUF_TYPES), shown=True)
    """also write model.gguf with weights of this type (true = that of the merged weights), and a
    Modelfile for Ollama; by llama.cpp, of the extra gguf"""
    llama_cpp: str | None = setting(None, is_path=True, grants="code")
    """folder with llama.cpp's convert_hf_to_gguf.py; null = the installed one"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergePlan:
    """Input files, weight changes and output dtype of a merge."""

    base_files: Sequence[Path]
    """safetensors files of the base"""
    changes: Mapping[str, WeightChange]
    """change of each weight that adapters modify, by the weight's name in the base"""
    dtype: torch.dtype
    """dtype of the merged weights"""
    may_widen: bool = False
    """whether they may be fp32 instead, if `dtype` cannot hold the change"""
    new_ids: Sequence[int] = ()
    """token ids without a trained row in the base"""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """quantization of the base in training"""
    quantized_from: torch.dtype | None = None
    """dtype of the base's weights before quantization in training; None to merge into the base's
    unrounded weights"""


def plan_merge(
    config: MergingConfig, base: Base, adapters: Sequence[tuple[Path, float]], num_tokens: int
) -> tuple[PreTrainedModel, MergePlan]:
    """Return the merged model on `meta`, and the plan that computes its weights.

    `num_tokens`: size of the tokenizer's vocabulary. UserError if base and adapters cannot be
    merged.
    """
    import torch

    if stored_quantization(base.architecture):
        raise UserError(
            f"model.path={base.config.path} is stored quantized (config.json), and adapters are "
            "merged only into unquantized weights; train on the unquantized base with "
            "quantization=nf4"
        )
    files = weight_files(base_folder(base.config))
    if not files:
        raise UserError(f"model.path={base.config.path}: no safetensors to merge into")

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            implementation = attention_implementation(base.backend)
            model = load_base(base.config, implementation, dtype, None, base.new_ids, on_meta=True)
            rows = model.get_input_embeddings().num_embeddings
            needed = max(required_embedding_rows(model, folder) for folder, _ in adapters)
            if needed > max(rows, num_tokens):
                raise UserError(
                    f"{adapters[0][0]} has a trained row for token {needed - 1:,}, but the "
                    f"tokenizer has only {num_tokens:,} tokens: the adapter was trained with "
                    "another vocabulary; type the base and model.added_tokens, or "
                    "model.tokenizer_path, of its training"
                )
            resize_embeddings(model, range(rows, needed))
        return model

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = dtypes.get(config.dtype) or base.architecture.dtype or torch.float32
    is_rounded = base.quantization.method != "none" and config.onto == "dequantized"
    plan = MergePlan(
        base_files=files,
        changes=read_weight_changes(build, adapters),
        dtype=dtype,
        may_widen=config.dtype == "auto",
        new_ids=base.new_ids,
        quantization=base.quantization,
        quantized_from=base.dtype if is_rounded else None,
    )
    log.info("merge: %d weights of %s change", len(plan.changes), base.config.path)
    return build(), plan


def merge_weights(model: PreTrainedModel, plan: MergePlan, folder: Path) -> torch.dtype:
    """Write the merged weights of `plan` into `folder`; `model` is the merged model on `meta`.

    Weights of one file of the base stay in one file, up to MAX_SHARD_BYTES. Returns their dtype,
    which is fp32 if rounding to the plan's would lose more than _MAX_LOST of the change. UserError
    if a weight of the model is not in the base's files.
    """
    import torch

    tied = _aliases(model)
    _untie_changed(model, plan.changes)
    stored = plan.base_files[0].parent
    if model.config.is_encoder_decoder and has_own_head(model, stored):
        raise UserError(
            f"{stored}: the files hold a head unlike the embedding, which a merged "
            "encoder-decoder cannot keep; python -m app.chat and app.serve load base and adapter "
            "without merging"
        )
    record_tower_files(model, plan.base_files)
    files = ModelFolder(model, folder, plan.dtype)
    merger = _Merger(files, plan, tied)
    if plan.dtype != torch.float32:
        lost, name = merger.lost_share(), str(plan.dtype).removeprefix("torch.")
        is_widened = plan.may_widen and lost > _MAX_LOST
        log.info(
            "merge: rounding to %s loses %.1f %% of the change%s",
            *(name, 100 * lost),
            ": merged in fp32; merge.dtype=bf16 would save half the bytes" if is_widened else "",
        )
        if is_widened:
            plan = replace(plan, dtype=torch.float32)
            files = ModelFolder(model, folder, plan.dtype)
            merger = _Merger(files, plan, tied)
    files.begin()
    for names in merger.shards():
        files.stream(names, merger.read)
    files.end()
    return plan.dtype


def _untie_changed(model: PreTrainedModel, changes: Mapping[str, WeightChange]) -> None:
    """Untie embedding and head if an adapter changes them differently.

    UserError for an encoder-decoder, whose forward pass depends on the tie.
    """
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, weight in parameters if weight is embedding.weight]
    if _is_changed_equally(names, changes):
        return
    if model.config.is_encoder_decoder:
        raise UserError(
            f"the adapter changes {', '.join(n for n in names if n in changes)}, but this model "
            f"has one shared weight for {', '.join(names)}: it cannot be merged"
        )
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _is_changed_equally(names: Sequence[str], changes: Mapping[str, WeightChange]) -> bool:
    """Return whether the names of one shared weight have the same change, or none."""
    tensors = [changes[name].tensors if name in changes else None for name in names]
    return all(each == tensors[0] for each in tensors)


Location = tuple[Path, str, tuple[int, ...]]
"""file of the base, key and shape of a tensor in it"""
_NOT_IN_BASE = ""
"""key of a weight that the base does not have"""


class _Merger:
    """Computes the weights of a merged model, each when `read` is called with its name on disk.

    `tied`: all names of each weight of the base, by its first name.
    """

    def __init__(self, files: ModelFolder, plan: MergePlan, tied: Mapping[str, list[str]]) -> None:
        model = files.model
        self.files, self.plan = files, plan
        aliases = _aliases(model)
        for names in aliases.values():
            if not _is_changed_equally(names, plan.changes):
                raise UserError(
                    f"the adapter changes {names[0]} differently from {names[1]}, but this model "
                    "has one shared weight for both: it cannot be merged; python -m app.chat and "
                    "app.serve load base and adapter without merging"
                )
        by_id = {id(weight): name for name, weight in files.needed.items()}
        self.names = {
            name: by_id[id(weight)] for name, weight in files.on_disk.items() if id(weight) in by_id
        }
        """name on disk -> name in the model, of weights stored in the model's layout"""
        self.changes = {
            first: plan.changes[name]
            for first, others in aliases.items()
            for name in others
            if name in plan.changes
        }
        shapes = {file: read_shapes([file]) for file in plan.base_files}
        prefix = f"{model.base_model_prefix}."
        tied_names = {name: names for names in tied.values() for name in names}
        self.locations = {
            name: _find_tensor(name, tied_names.get(self.names.get(name, ""), ()), prefix, shapes)
            for name in files.on_disk
            if not (is_classifier(model) and name == f"{HEAD}.weight")
        }
        if is_classifier(model):  # its head is new: the adapter holds all of it
            shape = tuple(files.on_disk[f"{HEAD}.weight"].shape)
            self.locations[f"{HEAD}.weight"] = (plan.base_files[-1], _NOT_IN_BASE, shape)
        base_shapes = {self.names.get(name): shape for name, (*_, shape) in self.locations.items()}
        self.added_rows = added_rows(model, plan.new_ids, base_shapes)
        self.rounded: Mapping[str, bool] = {}
        if plan.quantized_from is not None:
            self.rounded = quantized_layers(model, plan.quantization, plan.quantized_from)
        self.parts = self._parts_on_disk()
        """name on disk -> name in the model of the changed or rounded weight that it is a part of
        """
        self._last_parts: tuple[str, dict[str, Tensor]] = ("", {})
        """last result of `_parts_of`, with the name of the weight"""

    def shards(self) -> Iterator[list[str]]:
        """Yield the names of the weights of each file to write, in the base's grouping."""
        order = {file: number for number, file in enumerate(self.plan.base_files)}
        shard: list[str] = []
        num_bytes, last = 0, None
        for name in sorted(self.files.on_disk, key=lambda name: order[self.locations[name][0]]):
            file, more = self.locations[name][0], self.files.on_disk[name].nbytes
            if shard and (file != last or num_bytes + more > MAX_SHARD_BYTES):
                yield shard
                shard, num_bytes = [], 0
            shard.append(name)
            num_bytes, last = num_bytes + more, file
        yield shard

    def lost_share(self) -> float:
        """Return the share of the change that rounding to the plan's dtype loses, 0 to 1.

        It is the part of the change, in its own direction, that the rounded weights lack, over
        _MAX_SAMPLED weights spread over the model: values below half a unit in the last place
        vanish, while the rounding of larger ones averages out.
        """
        names = [name for name, in_model in self.names.items() if in_model in self.changes]
        total = kept = 0.0
        for name in names[:: max(1, len(names) // _MAX_SAMPLED)]:
            before = self._read_unchanged(name).float()
            merged = self.changes[self.names[name]].apply(before)
            for old, new in zip(
                before.split(_ROWS_AT_ONCE), merged.split(_ROWS_AT_ONCE), strict=True
            ):
                change = (new - old).double()
                rounded = new.to(self.plan.dtype).float() - old
                total += change.square().sum().item()
                kept += (rounded.double() * change).sum().item()
        return min(1.0, max(0.0, 1.0 - kept / total)) if total else 0.0

    def _read_unchanged(self, name: str) -> Tensor:
        """Return the weight of the base that an adapter changes, as it was in training."""
        weight, in_model = self._read_base(name), self.names.get(name, "")
        if in_model in self.added_rows:
            weight = self.added_rows[in_model].grow(weight)
        return self._round(in_model, weight) if in_model in self.rounded else weight

    def read(self, name: str) -> Tensor:
        weight, dtype = self._read_unchanged(name), self.files.on_disk[name].dtype
        in_model = self.names.get(name, "")
        if in_model in self.changes:
            weight = self.changes[in_model].apply(weight)
        elif name in self.parts:
            whole = self.parts[name]
            part = self._parts_of(whole)[name]
            weight = part if whole in self.rounded else weight.float() + part
        return weight.to(dtype)

    def _round(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with the values that its quantization had in training."""
        return quantize_dequantize(
            weight.to(self.plan.quantized_from),
            self.plan.quantization,
            is_transposed=self.rounded[name],
        )

    def _parts_on_disk(self) -> dict[str, str]:
        """Return the parts on disk of weights that are stored in a different layout."""
        found: dict[str, str] = {}
        modified = self.changes.keys() | self.rounded.keys()
        for name in sorted(modified.difference(self.names.values())):
            weight = self.files.needed[name]
            parts = self.files.named_as_on_disk({name: weight})
            is_sum = name not in self.changes or self.changes[name].deltas
            if not is_sum or not parts.keys() <= self.files.on_disk.keys():
                raise UserError(
                    f"{name}: the adapter changes it, but the base's files store it in a layout "
                    "that is combined with other weights: it cannot be merged"
                )
            found |= dict.fromkeys(parts, name)
        return found

    def _parts_of(self, name: str) -> dict[str, Tensor]:
        """Return the summand of each part of a weight on disk; for a rounded weight, the result.

        The result for the last weight is cached.
        """
        if self._last_parts[0] != name:
            if name not in self.rounded:
                value = self.changes[name].delta()
            else:  # scales of the quantization depend on the whole weight
                value = self._round(name, self._read_whole(name))
                value = self.changes[name].apply(value) if name in self.changes else value
            self._last_parts = name, self.files.named_as_on_disk({name: value})
        return self._last_parts[1]

    def _read_whole(self, name: str) -> Tensor:
        """Assemble a weight of the base that its files store in parts."""
        import torch

        shape = self.files.needed[name].shape
        # Only transformers knows which values belong to which part: let it split the indices.
        indices = self.files.named_as_on_disk({name: torch.arange(shape.numel()).view(shape)})
        whole = torch.empty(shape.numel(), dtype=self.plan.quantized_from)
        for part, indices_of_part in indices.items():
            whole[indices_of_part.flatten()] = self._read_base(part).to(whole.dtype).flatten()
        return whole.view(shape)

    def _read_base(self, name: str) -> Tensor:
        import torch

        file, key, shape = self.locations[name]
        return torch.zeros(shape) if key == _NOT_IN_BASE else read_tensor(file, key)


def _aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return all names of each weight, by its first name; a tied weight has several names."""
    names = names_by_id(model.state_dict(keep_vars=True)).values()
    return {each[0]: each for each in names}


def _find_tensor(
    name: str,
    aliases: Sequence[str],
    prefix: str,
    shapes: Mapping[Path, Mapping[str, tuple[int, ...]]],
) -> Location:
    """Return the location of a weight in the base's files, under any of its names.

    `prefix`: of the base model, which may be missing or additional in the base's files.
    """
    names = [name, *aliases]
    for key in (
        *names,
        *(f"{prefix}{each}" for each in names),
        *(each.removeprefix(prefix) for each in names),
    ):
        for file, shapes_in_file in shapes.items():
            if key in shapes_in_file:
                return file, key, shapes_in_file[key]
    raise UserError(
        f"the base's files have no tensor {name}, its name in this version of transformers: load "
        "the base once, save it again with save_pretrained, and type model.path=THAT_FOLDER"
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of the logits of two models on the same tokens."""

    largest: float
    """largest absolute difference"""
    mean: float
    """mean absolute difference"""
    scale: float
    """largest absolute logit of the first model"""
    agreement: float
    """share of tokens after which both models predict the same token greedily"""
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"logits differ by at most {self.largest:.2g}, {self.mean:.2g} on average (largest "
            f"logit {self.scale:.3g}); greedy tokens agree on {percent(self.agreement, 2)} of "
            f"{self.num_tokens}"
        )

    def is_within(self, bound: Bound) -> bool:
        """Return whether the difference is small enough to be rounding of the merged weights."""
        scale = max(self.scale, 1.0)
        return (
            self.largest <= bound.largest * scale
            and self.mean <= bound.mean * scale
            and self.agreement >= bound.agreement
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest accepted difference of a merged model."""

    largest: float
    """largest difference, as a share of the largest logit"""
    mean: float
    """mean difference, as a share of the largest logit"""
    agreement: float
    """smallest share of tokens with equal greedy predictions"""

    def __str__(self) -> str:
        return (
            f"differences of {self.largest:g} of the largest logit, {self.mean:g} on average, "
            f"and {percent(self.agreement, 0)} of the greedy tokens"
        )


BOUNDS = {
    "float32": Bound(1e-3, 1e-4, 0.99),
    "float16": Bound(0.02, 0.002, 0.97),
    "bfloat16": Bound(0.1, 0.01, 0.9),
    "int8": Bound(0.1, 0.01, 0.9),
    "fp8": Bound(0.3, 0.03, 0.8),
}
"""bounds by dtype of the merged weights; int8 and fp8 if the base was quantized so, which also
rounds the inputs of layers, so that merged weights cannot reproduce it"""


def measure_difference(
    expected_logits: Sequence[Tensor], merged_logits: Sequence[Tensor]
) -> Difference:
    """Compare the logits [tokens, vocabulary] of two models on the same rows."""
    import torch

    first, second = torch.cat(list(expected_logits)), torch.cat(list(merged_logits))
    difference = (first - second).abs()
    return Difference(
        largest=difference.max().item(),
        mean=difference.mean().item(),
        scale=first.abs().max().item(),
        agreement=(first.argmax(-1) == second.argmax(-1)).double().mean().item(),
        num_tokens=len(first),
    )
