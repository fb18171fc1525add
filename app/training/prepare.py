"""Prepare a model for its first batch: verify it, fuse its layers, seed and restore this rank."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from app.model.adapter import group_adapters, report_trainable, trainable_weights
from app.model.architecture import hidden_as_logits, reading_first_forward
from app.model.attention import probes, select_fastest_kernel
from app.model.attention.exchange import check_exchange
from app.model.attention.inputs import attention_inputs
from app.model.attention.mixer_search import isolate_mixers
from app.model.attention.mixers import mixers_run_by_document
from app.model.fp8 import (
    Fp8Linear,
    Fp8TrainedLinear,
    quantize_weight,
    train_in_fp8,
    without_rounding,
)
from app.model.head import check_head_loss, run_probe
from app.model.kernels import chunk_feed_forwards, fuse_layers, join_adapters, seconds_of
from app.model.quantization import quantize_tokens_independently
from app.model.residuals import fuse_sums
from app.process.launch import is_first_rank
from app.process.logs import laid_out, show, text_table
from app.training.checkpoint.disk import format_bytes
from app.training.checkpoint.state import check_same_step
from app.training.optimizers import format_lr
from common.errors import UserError
from common.text import percent

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from app.training.module import FinetuneModule
    from data_modules import Batch

log = logging.getLogger(__name__)

MAX_LOSS_CHANGE, MIN_COSINE = 0.005, 0.99
"""largest relative change of the loss, and smallest cosine of all gradients, by rounding to FP8"""
_MIN_TOKENS = 4096
"""tokens from which on the limits decide: the errors of single tokens average out over many"""
_SPARE, _FULL = 0.1, 0.9
"""shares: of a GPU, left free beside copies of weights; of a full micro-batch, to tell its peak"""
_MAX_ROWS, _MAX_SHAPES = 5, 4
_SETTINGS = ("dtype", "lr", "decay")
_SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def prepare_model(module: FinetuneModule) -> None:
    """Verify and speed up the module's built model, then seed this rank and restore the optimizer.

    UserError if the model mixes documents, or computes another attention or loss than its
    definition; a faster layer that computes something else is only left out.
    """
    model, strategy, backend = module.model, module.strategy, module.backend
    device = strategy.root_device
    per_token = quantize_tokens_independently(model)
    with module.trainer.precision_plugin.forward_context(), per_token:
        # 1. The attention kernel, first: everything below verifies the one that will train.
        if module.uses_fused_kernels:
            select_fastest_kernel(backend, model.config, device)
        # 2. Attention and head against their definitions, while all layers are still the base's.
        with reading_first_forward(model), hidden_as_logits(model):
            verify_attention(module, device)
            check_head_loss(model, backend, device)
        # 3. Products in FP8, then fused layers, each verified against the layer that it replaces.
        if module.trains_in_fp8:
            train_in_fp8(model)
        on_gpu = device.type == "cuda"
        if module.uses_fused_kernels and (on_gpu or strategy.fuses_adapters):
            run = partial(run_probe, model, backend, device)
            kinds = {weight.kind for weight in trainable_weights(model)}
            # Fused adapters read the weights of their layers without calling them.
            accumulates = strategy.accumulates_in_products and kinds <= {"weight", "bias"}
            fuse_layers(model, strategy.gathered, device, run, accumulates=accumulates)
            if on_gpu and not strategy.gathers_by_module:  # results on a CPU must not change
                joins_layers = not strategy.shards_weights
                fuse_sums(model, strategy.gathered, run, joins_layers=joins_layers)
            if on_gpu and strategy.fuses_adapters:
                group_adapters(model, run)
                decided = module.resume.state.get("joined_gates", {}) if module.resume else {}
                module.joined_gates = join_adapters(model, strategy.gathered, device, decided)
            if module.recomputes_layers and strategy.fuses_adapters:
                chunk_feed_forwards(model)
    # 4. The base's log-probabilities, by the layers that will train.
    if module.store_references is not None:
        module.store_references(module)
    # 5. The micro-batch, measured with these layers, too.
    if module.probe_micro_batch is not None:
        module.probe_micro_batch(module)
    # 6. Products in FP8 against bf16, on a first micro-batch of the size that was found.
    check_fp8(module)
    # 7. From here on only dropout draws random numbers, and each rank must draw different ones.
    torch.manual_seed(torch.initial_seed() + strategy.random_rank)
    # 8. The checkpoint's optimizer, last: all before it has run forward and backward passes.
    check_same_step(module.trainer, module.resume)
    if module.resume is not None:
        module.resume.restore_optimizer()


def verify_attention(module: FinetuneModule, device: torch.device) -> None:
    """Verify that no token reads a later one or another document, and the result against eager.

    Layers that must run document by document to keep documents apart are told to the strategy.
    """
    model, backend, is_packed = module.model, module.backend, module.is_packed
    ranks = module.strategy.context_ranks
    if model.config.is_encoder_decoder:
        probes.check_pair_isolation(model, backend, device, is_packed=is_packed)
        return
    probes.check_causal(model, device)
    if is_packed:
        probes.check_isolation(model, backend, device)
    else:
        probes.check_padded_rows(model, backend, device)
        if ranks is not None:  # recurrent layers gather the slices of padded rows, too
            isolate_mixers(model, device, partial(attention_inputs, model, backend))
    module.strategy.set_leaf_modules(mixers_run_by_document(model))
    probes.check_against_eager(model, backend, device, is_packed=is_packed)
    if ranks is not None:
        check_exchange(model, backend, device, ranks)


def check_fp8(module: FinetuneModule) -> None:
    """Compare the first micro-batch in FP8 with the same in bf16; UserError if it does not pay.

    Both draw the same random numbers; gradients, sums and random numbers are then as before. With
    fewer than `_MIN_TOKENS` tokens it only warns of what the limits would refuse. Does nothing
    without layers in FP8, on resume, or for a stream, whose rows are not known yet.
    """
    layers = [
        each for each in module.model.modules() if isinstance(each, (Fp8Linear, Fp8TrainedLinear))
    ]
    if not layers or module.resume is not None:
        return
    data: Any = module.trainer.datamodule
    if data.is_streamed:
        return
    device = module.strategy.root_device
    batch = module.strategy.shard_batch(data.fullest_batch(1)).to(device)
    numbers, counts = compare_passes(module, batch), [float(batch.num_tokens)]
    on_gpu, num_rows = device.type == "cuda", batch.input_ids.numel()
    counts += time_products(layers, num_rows, device) if on_gpu else [0.0, 0.0]
    # Summed, so that all ranks decide alike.
    exact, rounded, product, *squares = module.sum_over_ranks(numbers).tolist()
    num_tokens, in_fp8, in_bf16 = module.sum_over_ranks(numbers.new_tensor(counts)).tolist()
    if not (exact and math.isfinite(exact) and all(squares)):
        return  # there is nothing to learn from this micro-batch, or it fails in bf16, too
    change, cosine = abs(rounded / exact - 1), product / math.sqrt(squares[0] * squares[1])
    found = f"the loss changes by {percent(change, 2)}, the gradients' cosine is {cosine:.4f}"
    key, instead = (
        ("trainer.precision=fp8", "trainer.precision=bf16")
        if module.trains_in_fp8
        else ("quantization=fp8", "quantization=none, or nf4")
    )
    limits = f"(limits: {percent(MAX_LOSS_CHANGE, 1)} and {MIN_COSINE})"
    is_exact = change <= MAX_LOSS_CHANGE and cosine >= MIN_COSINE
    if (not is_exact and num_tokens >= _MIN_TOKENS) or math.isnan(change + cosine):
        raise UserError(
            f"{key} is too coarse for this model: on the first {num_tokens:,.0f} tokens {found} "
            f"{limits}; type {instead}"
        )
    if in_fp8 > in_bf16:
        raise UserError(
            f"{key} is slower than bf16 here: the products of a micro-batch take "
            f"{in_fp8 / in_bf16:.2f} times as long; type {instead}, or a larger "
            "trainer.micro_batch_size"
        )
    if is_first_rank():
        faster = f"; products take {in_fp8 / in_bf16:.2f} of the time" if in_bf16 else ""
        compared = f"fp8: against bf16 on the first {num_tokens:,.0f} tokens {found}"
        if is_exact:
            log.info("%s%s", compared, faster)
        else:
            log.warning("%s %s, but so few tokens do not decide%s", compared, limits, faster)


def room_for_transposed(module: FinetuneModule, batches: Sequence[Batch]) -> int | None:
    """Return the bytes of transposed copies of a frozen FP8 base, 0 if they are not to be held.

    Call it after a step of `batches`: its peak decides; None if they were too small for that.
    Ranks, and a resumed run, may decide otherwise: results have the same bits.
    """
    device = module.strategy.root_device
    layers = [each for each in module.model.modules() if isinstance(each, Fp8Linear)]
    is_there = device.type == "cuda" and all(each.weight.device == device for each in layers)
    is_left_out = module.model.config.is_encoder_decoder or not module.uses_fused_kernels
    if is_left_out or module.strategy.shards_weights or not (layers and is_there):
        return 0
    data: Any = module.trainer.datamodule
    inputs, packs = [batch.input_ids for batch in batches], data.batching.micro_batch_size
    if all(ids.numel() < _FULL * data.sequence_len * max(packs, len(ids)) for ids in inputs):
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    num_bytes = sum(each.weight.nbytes for each in layers)
    left = free + unused - num_bytes
    holds = "holds" if left >= _SPARE * total else "does not hold"
    if is_first_rank():
        text = "fp8: %s transposed copies of the weights: %.2f GiB, which leave %.1f of %.1f GiB"
        log.info(text, holds, *(size / 2**30 for size in (num_bytes, left, total)))
    return num_bytes if left >= _SPARE * total else 0


def compare_passes(module: FinetuneModule, batch: Batch) -> Tensor:
    """Return loss and gradients of `batch` without and with rounding, as numbers; fp64 [5].

    Both losses, and the sums of g h, g g and h h over the gradients g and h: 1 if the strategy
    keeps none.
    """
    strategy, keeps = module.strategy, module.strategy.keeps_gradients
    weights = [weight for weight in module.model.parameters() if weight.requires_grad]
    with without_rounding():
        exact = _run(module, batch)
    # On the host: no training step needs room for gradients twice.
    kept = [None if (g := strategy.gradient(w)) is None else g.bfloat16().cpu() for w in weights]
    module.zero_grad()
    rounded = _run(module, batch)
    sums = torch.full((3,), 0.0 if keeps else 1.0, dtype=torch.float64, device=exact.device)
    for weight, before in zip(weights, kept, strict=True):
        if before is not None and (gradient := strategy.gradient(weight)) is not None:
            g, h = before.to(gradient.device).float(), gradient.float()
            products = [(a * b).sum(dtype=torch.float64) for a, b in ((g, h), (g, g), (h, h))]
            sums += torch.stack(products).to(sums.device)
    module.reset_step()
    return torch.cat([torch.stack([exact, rounded]).double(), sums])


def _run(module: FinetuneModule, batch: Batch) -> Tensor:
    keeps = module.strategy.keeps_gradients
    with isolate_rng():
        with torch.set_grad_enabled(keeps), module.trainer.precision_plugin.forward_context():
            loss = module.loss(batch)
        if keeps:
            loss.backward()
    return loss.detach()


def time_products(
    layers: Sequence[Fp8Linear | Fp8TrainedLinear], num_rows: int, device: torch.device
) -> list[float]:
    """Return the seconds of the products of `layers` with `num_rows` rows, in FP8 and in bf16.

    Measured with layers of random weights of the same shapes, forward and backward.
    """
    seconds = [0.0, 0.0]
    shapes = Counter((type(each), each.in_features, each.out_features) for each in layers)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    with isolate_rng():
        for (kind, *shape), count in shapes.items():
            plain = torch.nn.Linear(*shape, bias=False, **options)
            if kind is Fp8Linear:
                plain.requires_grad_(False)
                rounded = Fp8Linear(plain, quantize_weight(plain.weight), torch.bfloat16)
            else:
                rounded = Fp8TrainedLinear(*shape, bias=False, **options)
            rows = torch.randn(num_rows, shape[0], requires_grad=True, **options)
            for index, layer in enumerate((rounded, plain)):
                seconds[index] += count * seconds_of(partial(_products, layer, rows), device)
    return seconds


def _products(layer: torch.nn.Module, rows: Tensor) -> None:
    output = layer(rows)
    trained = [weight for weight in layer.parameters() if weight.requires_grad]
    torch.autograd.grad(output, [rows, *trained], output.detach())


@dataclass(slots=True)
class TrainedPattern:
    """Trainable parameters with the same name, except for layer numbers, and the same settings."""

    pattern: str
    """module names with `*` for layer numbers"""
    settings: tuple[str, str, str]
    """dtype, peak learning rate and weight decay, as text"""
    num_weights: int = 0
    kinds: dict[str, None] = field(default_factory=dict)
    """trainable parts of the module, in the model's order: weight, bias, lora A, ..."""
    shapes: dict[str, None] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)

    @property
    def place(self) -> tuple[str, str]:
        """Parent and name of the module, relative to its layer if it is in one."""
        before, star, inside = self.pattern.partition("*.")
        parent, _, name = (inside if star else before).rpartition(".")
        return (parent, name) if star else ("", name)


def trained_patterns(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[TrainedPattern]:
    """Group trainable parameters by pattern, in the model's order, before a schedule is built."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    patterns: dict[Any, TrainedPattern] = {}
    for weight in trainable_weights(model):
        group = group_of[id(weight.parameter)]
        dtype = str(weight.parameter.dtype).removeprefix("torch.")
        key = (
            ".".join("*" if part.isdigit() else part for part in weight.module.split(".")),
            (dtype, format_lr(group["lr"]), f"{group['weight_decay']:g}"),
        )
        pattern = patterns.setdefault(key, TrainedPattern(*key))
        pattern.num_weights += weight.parameter.numel()
        pattern.kinds[weight.kind] = None
        pattern.shapes["x".join(map(str, weight.parameter.shape))] = None
        pattern.modules.add(weight.module)
    return list(patterns.values())


def trainable_table(patterns: list[TrainedPattern]) -> Table:
    """Build a table of the largest parts, in the model's order; the last row sums up the others.

    It fits 80 columns: a row has the modules of one parent in all layers, and settings that all
    rows share are left out.
    """
    by_row: dict[Any, list[TrainedPattern]] = {}
    for each in patterns:
        by_row.setdefault((each.place[0], *each.kinds, each.settings), []).append(each)
    rows, others = list(by_row.values()), []
    if len(rows) > _MAX_ROWS:
        largest = sorted(rows, key=_num_weights, reverse=True)[: _MAX_ROWS - 1]
        others = [pattern for row in rows if row not in largest for pattern in row]
        rows = [*(row for row in rows if row in largest), others]
    own = [index for index, name in enumerate(_SETTINGS) if name not in shared_settings(patterns)]
    cells = [["module", "part", "modules", "params", "share", *(_SETTINGS[index] for index in own)]]
    for row in rows:
        kinds = ", ".join(row[0].kinds).replace(", lora ", ", ")
        joined = ", ".join(dict.fromkeys(each.place[1] for each in row))
        parent = f"{row[0].place[0]}: " if row[0].place[0] else ""
        names = [f"{len(others):,} smaller ones", ""] if row is others else [parent + joined, kinds]
        number = sum(len(pattern.modules) for pattern in row)
        texts = [_at_most(2, (each.settings[index] for each in row)) for index in own]
        size = _size(_num_weights(row), _num_weights(patterns))
        cells.append([*names, f"{number:,}", *size, *texts])
    return text_table(cells, texts=("part",), box=None, pad_edge=False)


def shared_settings(patterns: list[TrainedPattern]) -> dict[str, str]:
    """Return the settings (dtype, learning rate, decay) that all patterns share, as text."""
    texts = zip(*(pattern.settings for pattern in patterns), strict=True)
    named = zip(_SETTINGS, map(set, texts), strict=True)
    return {name: values.pop() for name, values in named if len(values) == 1}


def _num_weights(patterns: Iterable[TrainedPattern]) -> int:
    return sum(pattern.num_weights for pattern in patterns)


def _size(num_weights: int, total: int) -> tuple[str, str]:
    return f"{num_weights:,}", percent(num_weights / total)


def _at_most(count: int, words: Iterable[str]) -> str:
    different = list(dict.fromkeys(words))
    return ", ".join(different[:count] + ["..."] * (len(different) > count))


def _tables_of_log(patterns: list[TrainedPattern], optimizer: torch.optim.Optimizer) -> list[Table]:
    """Build a table of every pattern with its shapes, and one of the optimizer's groups."""
    from rich.box import SIMPLE_HEAD

    total = _num_weights(patterns)
    cells = [["module", "part", "modules", "shapes", "params", "share", *_SETTINGS]]
    for each in patterns:
        words = [each.pattern, ", ".join(each.kinds), f"{len(each.modules):,}"]
        words.append(_at_most(_MAX_SHAPES, each.shapes))
        cells.append([*words, *_size(each.num_weights, total), *each.settings])
    of_groups = [["group", "tensors", "params", "share", "lr", "decay"]]
    for group in optimizer.param_groups:
        size = _size(sum(weight.numel() for weight in group["params"]), total)
        settings = format_lr(group["lr"]), f"{group['weight_decay']:g}"
        of_groups.append([group["name"], f"{len(group['params']):,}", *size, *settings])
    title = f"parameter groups of {type(optimizer).__name__}"
    return [
        text_table(cells, "trainable parameters", ("part", "shapes"), box=SIMPLE_HEAD),
        text_table(of_groups, title, box=SIMPLE_HEAD),
    ]


def print_parameter_table(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print the trainable parameters, and log every pattern, shape and group of the optimizer."""
    patterns, report = trained_patterns(model, optimizer), report_trainable(model)
    for table in _tables_of_log(patterns, optimizer):
        log.debug("%s", laid_out(table))
    texts = [
        _SHORT_DTYPES.get(text, text) if name == "dtype" else f"{name} {text}"
        for name, text in shared_settings(patterns).items()
    ]
    share = percent(report.num_trainable / report.num_total, 2)
    numbers = f"{report.num_trainable:,} / {report.num_total:,} ({share})"
    log.info("%s", ", ".join([f"trainable params: {numbers}", *texts]))
    counts = {_SHORT_DTYPES.get(name, name): n for name, n in sorted(report.dtypes.items())}
    dtypes = ", ".join(f"{n:,} {name}" if len(counts) > 1 else name for name, n in counts.items())
    log.info("model weights: %s, %s", dtypes, format_bytes(report.num_bytes))
    show(trainable_table(patterns))
