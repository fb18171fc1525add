"""Merge adapters into their base, shard by shard: a Hugging Face folder, and never a whole model.

Every weight is read, changed in fp32 and written before the next one is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from app.model.adapter import read_weight_changes, required_embedding_rows
from app.model.architecture import base_folder
from app.model.attention import attention_implementation
from app.model.base import load_base
from app.model.base_files import read_shapes, weight_files
from app.model.multimodal import record_tower_files
from app.model.quantization import (
    QuantizationConfig,
    quantize_dequantize,
    quantized_layers,
    stored_quantization,
)
from app.model.shards import MAX_SHARD_BYTES, ModelFolder
from app.model.tokenizer import added_rows, resize_embeddings
from app.process.errors import UserError
from data_modules import setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from app.assembly.base import Base
    from app.model.adapter import WeightChange

log = logging.getLogger(__name__)

DTYPES = ("auto", "bf16", "fp32")
ONTO = ("dequantized", "original")
CHECKPOINTS = ("final", "newest")


@dataclass(kw_only=True, slots=True)
class WeightedAdapter:
    path: str = setting()
    """folder of an adapter of the same base"""
    weight: float = setting(1.0, ge=-10, le=10)
    """factor of what it adds"""


@dataclass(kw_only=True, slots=True)
class MergingConfig:
    dtype: str = setting("auto", choices=DTYPES, shown=True)
    """dtype of the merged weights; auto = that of the base's files"""
    onto: str = setting("dequantized", choices=ONTO, shown=True)
    """of a base that was quantized for training: dequantized weights, which the adapter has seen
    (the merged model answers as in training), or original ones (the difference is measured)"""
    checkpoint: str = setting("final", choices=CHECKPOINTS, shown=True)
    """final = the adapter of a finished run; newest = its newest checkpoint, of a run that is not
    finished or whose adapter is gone"""
    weight: float = setting(1.0, ge=-10, le=10)
    """factor of what the run's own adapter adds"""
    adapters: list[WeightedAdapter] = field(default_factory=list)
    """further LoRA adapters of the same base, added up, as [{path: FOLDER, weight: 0.5}]"""
    verify: bool = setting(True, shown=True)
    """compare logits and greedy tokens of the merged model with base + adapter, and the tokens of
    conversations with those of training; holds one of the models in memory at a time, in fp32"""
    gguf: bool = setting(False, shown=True)
    """write model.gguf as well, by llama.cpp's converter"""
    llama_cpp: str | None = None
    """folder with llama.cpp's convert_hf_to_gguf.py; null = the one on PATH"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergePlan:
    """What one merge is made of."""

    base_files: Sequence[Path]
    """safetensors of the base, as they are on disk"""
    changes: Mapping[str, WeightChange]
    """by the weight's name in the base"""
    dtype: torch.dtype
    """of the merged weights"""
    new_ids: Sequence[int] = ()
    """token ids without a trained row in the base"""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """how weights are rounded before they are merged onto"""
    quantized_from: torch.dtype | None = None
    """dtype in which training read what it quantized"""


def plan_merge(
    config: MergingConfig,
    base: Base,
    adapters: Sequence[tuple[Path, float]],
    num_tokens: int,
) -> tuple[PreTrainedModel, MergePlan]:
    """Return the shape of the merged model on `meta`, and what makes its weights.

    `num_tokens` are those of the tokenizer that goes with it. UserError where base or adapters
    cannot be merged.
    """
    import torch

    if stored_quantization(base.architecture):
        raise UserError(
            f"model.path={base.config.path} is stored quantized (config.json): an adapter is "
            "merged into whole weights; train on the unquantized base with quantization=nf4"
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
                    f"{adapters[0][0]} trains the row of token {needed - 1:,}, and the tokenizer "
                    f"has {num_tokens:,} tokens: it is of another vocabulary; type the base and "
                    "model.added_tokens, or model.tokenizer_path, of its training"
                )
            resize_embeddings(model, range(rows, needed))
        return model

    dtype = _merged_dtype(config.dtype, base.architecture.dtype)
    is_rounded = base.quantization.method != "none" and config.onto == "dequantized"
    plan = MergePlan(
        base_files=files,
        changes=read_weight_changes(build, adapters),
        dtype=dtype,
        new_ids=base.new_ids,
        quantization=base.quantization,
        quantized_from=base.dtype if is_rounded else None,
    )
    log.info("merge: %d weights of %s change", len(plan.changes), base.config.path)
    return build(), plan


def _merged_dtype(name: str, of_base: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the merged weights; `auto` is the base's, fp32 where it states none."""
    import torch

    known = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return (of_base or torch.float32) if name == "auto" else known[name]


def merge_weights(model: PreTrainedModel, plan: MergePlan, folder: Path) -> None:
    """Write what `plan` makes of a base, whose shape is `model` on `meta`, into `folder`.

    The files are cut as those of the base are. UserError where a weight of the model is not in the
    base's files by its name.
    """
    tied = _aliases(model)
    untie_changed(model, plan.changes)
    record_tower_files(model, plan.base_files)
    files = ModelFolder(model, folder, plan.dtype)
    merger = _Merger(files, plan, tied)
    files.begin()
    for names in merger.shards():
        files.stream(names, merger.read)
    files.end()


def untie_changed(model: PreTrainedModel, changes: Mapping[str, WeightChange]) -> None:
    """Untie embedding and head where an adapter has changed one of them only.

    UserError for a model whose forward pass depends on the tie.
    """
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    every = model.named_parameters(remove_duplicate=False)
    names = [name for name, weight in every if weight is embedding.weight]
    found = [changes[name].tensors if name in changes else None for name in names]
    if all(tensors == found[0] for tensors in found):
        return
    if model.config.is_encoder_decoder:
        raise UserError(
            f"the adapter changes {', '.join(n for n in names if n in changes)}, and this model "
            f"computes with one weight for {', '.join(names)}: it cannot be merged"
        )
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _check_shared(
    aliases: Mapping[str, Sequence[str]], changes: Mapping[str, WeightChange]
) -> None:
    """UserError where an adapter changes a weight of several layers for each of them apart."""
    for names in aliases.values():
        found = [changes[name].tensors if name in changes else None for name in names]
        if any(tensors != found[0] for tensors in found):
            raise UserError(
                f"the adapter changes {names[0]} otherwise than {names[1]}, and this model keeps "
                "one weight for both: it cannot be merged; python -m app.chat and app.serve run "
                "the adapter beside its base"
            )


Place = tuple[Path, str, tuple[int, ...]]
"""file of the base, the tensor's key in there, its shape"""


class _Merger:
    """The weights of a merged model by their names on disk, each made when it is asked for.

    `tied`: all names that each weight of the base has, by the first of them.
    """

    def __init__(self, files: ModelFolder, plan: MergePlan, tied: Mapping[str, list[str]]) -> None:
        model = files.model
        self.files, self.plan = files, plan
        aliases = _aliases(model)
        _check_shared(aliases, plan.changes)
        self.names = _names_in_model(files)
        """name on disk -> name in the model, where both hold the same"""
        self.changes = {
            first: plan.changes[name]
            for first, others in aliases.items()
            for name in others
            if name in plan.changes
        }
        shapes = {file: read_shapes([file]) for file in plan.base_files}
        prefix = f"{model.base_model_prefix}."
        of_name = {name: names for names in tied.values() for name in names}
        self.places = {
            name: _find(name, of_name.get(self.names.get(name, ""), ()), prefix, shapes)
            for name in files.on_disk
        }
        rows = {self.names.get(name): place[2] for name, place in self.places.items()}
        self.made = added_rows(model, plan.new_ids, rows)
        self.rounded: Mapping[str, bool] = {}
        if plan.quantized_from is not None:
            self.rounded = quantized_layers(model, plan.quantization, plan.quantized_from)
        self.parts = self._parts_on_disk()
        """name on disk -> name in the model of the changed or rounded weight that it is a part of
        """
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def shards(self) -> Iterator[list[str]]:
        """Yield the names of each file's weights: those of a file of the base stay together."""
        order = {file: number for number, file in enumerate(self.plan.base_files)}
        shard: list[str] = []
        num_bytes, last = 0, None
        for name in sorted(self.files.on_disk, key=lambda name: order[self.places[name][0]]):
            file, more = self.places[name][0], self.files.on_disk[name].nbytes
            if shard and (file != last or num_bytes + more > MAX_SHARD_BYTES):
                yield shard
                shard, num_bytes = [], 0
            shard.append(name)
            num_bytes, last = num_bytes + more, file
        yield shard

    def read(self, name: str) -> Tensor:
        """Return a weight as it is written."""
        weight, dtype = self._read_base(name), self.files.on_disk[name].dtype
        in_model = self.names.get(name, "")
        if in_model in self.made:
            weight = self.made[in_model].grow(weight)
        if in_model in self.rounded:
            weight = self._rounded(in_model, weight)
        if in_model in self.changes:
            weight = self.changes[in_model].apply(weight)
        elif name in self.parts:
            whole = self.parts[name]
            part = self._parts_of(whole)[name]
            weight = part if whole in self.rounded else weight.float() + part
        return weight.to(dtype)

    def _rounded(self, name: str, weight: Tensor) -> Tensor:
        return quantize_dequantize(
            weight.to(self.plan.quantized_from),
            self.plan.quantization,
            is_transposed=self.rounded[name],
        )

    def _parts_on_disk(self) -> dict[str, str]:
        found: dict[str, str] = {}
        touched = self.changes.keys() | self.rounded.keys()
        for name in sorted(touched.difference(self.names.values())):
            weight = self.files.needed[name]
            parts = self.files.named_as_on_disk({name: weight})
            is_sum = name not in self.changes or self.changes[name].deltas
            if not is_sum or not parts.keys() <= self.files.on_disk.keys():
                raise UserError(
                    f"{name}: the adapter changes it, and the base's files keep it in another form "
                    "that takes other weights as well: it cannot be merged"
                )
            found |= dict.fromkeys(parts, name)
        return found

    def _parts_of(self, name: str) -> dict[str, Tensor]:
        """Return what is added to each part of a weight on disk; of a rounded one, what it becomes.

        Those of the last one are kept.
        """
        if self._last[0] != name:
            if name not in self.rounded:
                value = self.changes[name].delta()
            else:  # scales are those of the whole
                value = self._rounded(name, self._read_whole(name))
                value = self.changes[name].apply(value) if name in self.changes else value
            self._last = name, self.files.named_as_on_disk({name: value})
        return self._last[1]

    def _read_whole(self, name: str) -> Tensor:
        """Return a weight of the base that its files keep in parts."""
        import torch

        shape = self.files.needed[name].shape
        # Which numbers a part holds is known to transformers alone: it takes the whole apart.
        places = self.files.named_as_on_disk({name: torch.arange(shape.numel()).view(shape)})
        whole = torch.empty(shape.numel(), dtype=self.plan.quantized_from)
        for part, place in places.items():
            whole[place.flatten()] = self._read_base(part).to(whole.dtype).flatten()
        return whole.view(shape)

    def _read_base(self, name: str) -> Tensor:
        from safetensors import safe_open

        file, key, _ = self.places[name]
        # Opened for one tensor: pages of a mapped file count as memory until it is closed.
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key).clone()
        return tensor


def _names_in_model(files: ModelFolder) -> dict[str, str]:
    own = {id(weight): name for name, weight in files.needed.items()}
    return {name: own[id(weight)] for name, weight in files.on_disk.items() if id(weight) in own}


def _aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return every name of each weight, tied ones have several, by the first."""
    names: dict[int, list[str]] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        names.setdefault(id(weight), []).append(name)
    return {each[0]: each for each in names.values()}


def _find(
    name: str,
    aliases: Sequence[str],
    prefix: str,
    shapes: Mapping[Path, Mapping[str, tuple[int, ...]]],
) -> Place:
    """Return where the base's files hold what is called `name` in the merged ones."""
    names = [name, *aliases]
    for key in (
        *names,
        *(f"{prefix}{one}" for one in names),
        *(o.removeprefix(prefix) for o in names),
    ):
        for file, held in shapes.items():
            if key in held:
                return file, key, held[key]
    raise UserError(
        f"the base's files have no {name}, as this version of transformers calls it: load the base "
        "once, save it again with save_pretrained, and type model.path=THAT_FOLDER"
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the logits of two models are from each other, over the tokens of a probe."""

    largest: float
    mean: float
    scale: float
    """largest logit of the first model"""
    agreement: float
    """share of the tokens after which both would go on greedily with the same one"""
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"logits differ by at most {self.largest:.2g}, {self.mean:.2g} on average (largest "
            f"logit {self.scale:.3g}); greedy tokens agree on {self.agreement:.2%} of "
            f"{self.num_tokens}"
        )

    def is_within(self, bound: Bound) -> bool:
        """Return whether the rounding of merged weights explains it."""
        scale = max(self.scale, 1.0)
        return (
            self.largest <= bound.largest * scale
            and self.mean <= bound.mean * scale
            and self.agreement >= bound.agreement
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """What a merged model may differ by: shares of the largest logit, least agreement."""

    largest: float
    mean: float
    agreement: float

    def __str__(self) -> str:
        return (
            f"differences of {self.largest:g} of the largest logit, {self.mean:g} on average, "
            f"and {self.agreement:.0%} of the greedy tokens"
        )


BOUNDS = {
    "float32": Bound(1e-3, 1e-4, 0.99),
    "float16": Bound(0.02, 0.002, 0.97),
    "bfloat16": Bound(0.1, 0.01, 0.9),
    "int8": Bound(0.1, 0.01, 0.9),
}
"""by the dtype of the merged weights; int8 where the base that they are compared with rounds what
its layers are given to 8 bits as well, which no merged weight can"""


def measure_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> Difference:
    """Compare the logits [tokens, vocabulary] of two models on the same rows."""
    import torch

    first, second = torch.cat(list(one)), torch.cat(list(other))
    apart = (first - second).abs()
    return Difference(
        largest=apart.max().item(),
        mean=apart.mean().item(),
        scale=first.abs().max().item(),
        agreement=(first.argmax(-1) == second.argmax(-1)).double().mean().item(),
        num_tokens=len(first),
    )
