"""Replace a model's norms, gated MLPs, rope, linear layers and loss by equivalent fused kernels.

Liger's kernels on a GPU, and our own for rope; our own RMS norm and oneDNN's matrix products on a
CPU. A kernel is used only if it gives the same results and gradients as the module on random
inputs, and only in training, and for what a training step compares itself with: evaluation runs the
original forward.
The `forward` of a module is replaced, and restored after the fit; its parameters stay, so that
adapters, sharding and saving are not affected.

Feed-forward networks of long rows run a chunk of tokens at a time: a recomputed layer needs their
activations for all tokens at once, which for long rows are most of a GPU's memory. In chunks the
backward pass computes one chunk after the other (arXiv 2506.13996, section 4). That costs no time:
a recompute ends before the feed-forward, whose input is the last tensor that a usual layer saves.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from app.model.accumulation import accumulated_linear, accumulating_in_products
from app.model.activation_checkpointing import RandomState, read_autocasts, restored_autocasts
from app.model.adapter.wrap import is_fused
from app.model.attention.mixers import MixerForward
from app.model.head import LossHead, linear_cross_entropy
from app.model.layers import eval_mode, repeated_layers, replaced
from app.model.quantization import int8_layers
from app.model.recompute import FEED_FORWARD_TOKENS
from app.process.collectives import all_gather
from common.text import reason_of

if TYPE_CHECKING:
    from app.model.adapter.gated import GatedLora

log = logging.getLogger(__name__)

_PROBE_TOKENS = 64
_PROBE_SIZES = (-2.0, 1.5)
"""scale of the first and of the last probe token, as powers of ten"""
LOSS_WIDTH, LOSS_VOCABULARY = 64, 40_000
_ROUNDING_STEPS = 8
"""largest relative difference of two results, in eps of their dtype"""
_NORM_VARIANTS = ((0.0, "llama"), (1.0, "gemma"))
"""offset added to a norm's weight, and Liger's name for where the norm rounds"""
_TIMED_RUNS, _TIMED_TOKENS, _MAX_SLOWDOWN = 10, 4096, 1.1
_FEED_FORWARD, _EXPERTS = "mlp", "experts"
"""names of the feed-forward in a layer, and of the experts in one that has some"""
NORMED = "normed"
"""attribute of a residual sum that was normed with it: the `FusedNorm`, and its output"""


@dataclass(slots=True)
class Fused:
    """Forward of a module by a kernel; in evaluation, that of its class."""

    kernel: Callable[..., Tensor]
    module: Any

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (hidden,) = (*args, *kwargs.values())  # its forward names its one argument as it likes
        if self.module.training:
            return self.compute(hidden)
        output: Tensor = type(self.module).forward(self.module, hidden)
        return output

    def compute(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(slots=True)
class FusedNorm(Fused):
    """An RMS norm by one kernel."""

    eps: float
    offset: float
    casting: str
    adds: Callable[..., tuple[Tensor, Tensor]] | None = None
    """the kernel that adds to a residual first, with one argument more"""

    def add(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + hidden, and the sum."""
        if self.adds is None or hidden.dtype != residual.dtype:
            total = residual + hidden
            return self.compute(total), total
        weight = self.module.weight
        return self.adds(hidden, residual, weight, self.eps, self.offset, self.casting, False)

    def compute(self, hidden: Tensor) -> Tensor:
        norm, normed = vars(hidden).pop(NORMED, (None, None))
        if norm is self:
            return normed
        # Not in place: it would overwrite a gradient that another branch still reads.
        weight = self.module.weight
        return self.kernel(hidden, weight, self.eps, self.offset, self.casting, False)


@dataclass(slots=True)
class FusedGate(Fused):
    """A gated MLP, down(activation(gate) * up), with one kernel for activation and product."""

    activation: str
    joined: GatedLora | None = None
    """computes the MLP with its adapters, if it can"""

    def compute(self, hidden: Tensor) -> Tensor:
        if self.joined is not None and (output := self.joined(hidden)) is not None:
            return output
        layer = self.module
        gated: Tensor = layer.down_proj(self.kernel(layer.gate_proj(hidden), layer.up_proj(hidden)))
        return gated


class FusedLinear(Fused):
    """A linear layer by another matrix product than PyTorch's."""

    __slots__ = ()

    def compute(self, hidden: Tensor) -> Tensor:
        return self.kernel(hidden, self.module.weight, self.module.bias)


ROPE = "apply_rotary_pos_emb"
"""name of the function of transformers' modules that rotates queries and keys"""
Rotation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True)
class FusedRope:
    """Rotation of queries and keys by their positions, by one kernel while gradients are enabled.

    Replaces the function `original` of the Python module `source`, which defines a model's layers.
    """

    kernel: Rotation
    original: Rotation
    source: ModuleType
    runs_without_gradients: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        is_training = self.runs_without_gradients or torch.is_grad_enabled()
        if len(args) != 4 or kwargs or not is_training:
            return self.original(*args, **kwargs)
        return self.kernel(*args)


@dataclass(kw_only=True, slots=True)
class Kernels:
    """The kernels of a device; None if the device has no better one than the model's own."""

    norm: Callable[..., Tensor]
    norm_of_sum: Callable[..., tuple[Tensor, Tensor]] | None = None
    gates: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    """by activation: part of its class's name in transformers"""
    linear: Callable[..., Tensor] | None = None


Gathered = Callable[["torch.nn.Module"], AbstractContextManager[None]]
"""returns a context in which the sharded weights of one module are gathered"""


def fuse_layers(
    model: Any,
    gathered: Gathered = lambda module: nullcontext(),
    device: torch.device | None = None,
    run: Callable[[], None] | None = None,
    *,
    accumulates: bool = False,
) -> None:
    """Replace the forward of each module for which a kernel gives the same results.

    Each module is compared with its kernel on random tokens, with gradients, on `device` or the
    model's. `run` runs the model once, to observe the inputs of its rope, which otherwise stays.
    `accumulates`: whether trained layers on a GPU may add gradients to earlier ones. Logs a line.
    """
    device = device or model.device
    _fuse_loss(model, device)
    if not _is_on_gpu(device):
        if device.type == "cpu":
            from app.model.cpu import rms_norm, trained_linear

            kernels = Kernels(norm=rms_norm, linear=trained_linear)
            _replace(_find_equal_forwards(model, kernels, gathered, device)[0])
        return
    if find_spec("liger_kernel") is None:
        log.info("kernels: the model's own (liger-kernel is not installed)")
        return
    try:
        from liger_kernel.transformers import functional

        from app.model.rope_kernel import rotate

        kernels = Kernels(
            norm=functional.liger_rms_norm,
            norm_of_sum=functional.liger_fused_add_rms_norm,
            gates={"silu": functional.liger_swiglu, "gelutanh": functional.liger_geglu},
            linear=accumulated_linear if accumulates else None,
        )
        fused, differing = _find_equal_forwards(model, kernels, gathered, device)
        ropes: list[FusedRope] = []
        if run is not None:
            ropes, is_rope_different = _find_equal_ropes(model, rotate, run)
            differing |= {"rope"} if is_rope_different else set()
    except Exception as error:  # noqa: BLE001  kernel compilers raise any type
        reason = reason_of(error)
        log.warning("kernels: the model's own (liger-kernel is installed, but broken: %s)", reason)
        return
    _replace(fused)
    for rope in ropes:
        setattr(rope.source, ROPE, rope)
    by_liger = [forward for forward in fused if not isinstance(forward, FusedLinear)]
    counts = Counter(type(forward.module).__name__ for forward in by_liger)
    names = [f"{count} {name}" for name, count in counts.items()] + ["rope"] * bool(ropes)
    fused_names = ", ".join(names) or "none of the layers"
    own = "".join(f"; the model's own for {name}, which differs" for name in sorted(differing))
    log.info("kernels: Liger's for %s, proven equal%s", fused_names, own)


def join_adapters(
    model: Any, gathered: Gathered, device: torch.device, decided: Mapping[str, bool]
) -> dict[str, bool]:
    """Compute gated MLPs together with their adapters where that is faster; logs it.

    Returns by widths whether it is, on all ranks; a resumed run computes what its checkpoint has
    `decided`. Call it after `fuse_layers` and `group_adapters`.
    """
    from app.model.adapter.gated import join_gate  # imports peft

    are_faster: dict[str, bool] = {}
    count, dtype = 0, model.get_input_embeddings().weight.dtype
    for module in model.modules():
        forward = vars(module).get("forward")
        if not isinstance(forward, FusedGate):
            continue
        with gathered(module):
            if (joined := join_gate(module, forward.activation, device)) is None:
                continue
            width = module.up_proj.in_features
            widths = f"{width}x{module.up_proj.out_features}"
            if widths in decided:
                are_faster[widths] = decided[widths]
            elif widths not in are_faster:
                own = is_faster(forward, joined, width, dtype, device)
                are_faster[widths] = all(all_gather(own)) if dist.is_initialized() else own
        if are_faster[widths]:
            forward.joined = joined
            count += 1
    if are_faster:
        others = "" if all(are_faster.values()) else " (others would be slower)"
        log.info("kernels: adapters of %d gated MLPs run in the gate's kernel%s", count, others)
    return are_faster


def is_faster(
    forward: FusedGate, joined: GatedLora, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether an MLP takes less time with its adapters in the gate's kernel than without.

    Or little more, since less memory is saved.
    """
    random = torch.Generator(device).manual_seed(0)
    shape = 1, _TIMED_TOKENS, width
    hidden = torch.randn(shape, generator=random, device=device, dtype=dtype).requires_grad_()

    def run() -> None:
        output = forward.compute(hidden)
        torch.autograd.grad(output, hidden, output.detach())

    seconds = []
    with torch.enable_grad():
        for each in (None, joined):
            forward.joined = each
            seconds.append(seconds_of(run, device))
    forward.joined = None
    return seconds[1] < _MAX_SLOWDOWN * seconds[0]


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one run, of several; a first round compiles and selects kernels."""
    start = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(_TIMED_RUNS):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / _TIMED_RUNS


def _fuse_loss(model: Any, device: torch.device) -> None:
    """Compute the head's loss by a kernel on a GPU if the results are equal; log it if not."""
    head = model.get_output_embeddings()
    if not (_is_on_gpu(device) and isinstance(head, LossHead)):
        return
    try:
        from app.model.loss_kernel import cross_entropy_

        reason = "" if _is_equal_loss(cross_entropy_, head.softcap, device) else "it differs"
    except Exception as error:  # noqa: BLE001  kernel compilers raise any type
        reason = reason_of(error)
    if reason:
        log.warning("loss: by PyTorch's operators, not by one kernel (%s)", reason)
    else:
        head.kernel = cross_entropy_


def _is_equal_loss(
    kernel: Callable[..., None], softcap: float | None, device: torch.device
) -> bool:
    random = torch.Generator(device).manual_seed(0)
    # More logits per row than the kernel processes at a time.
    shapes = ((_PROBE_TOKENS, LOSS_WIDTH), (LOSS_VOCABULARY, LOSS_WIDTH))
    hidden, weight = (
        torch.randn(shape, generator=random, device=device).bfloat16().requires_grad_()
        for shape in shapes
    )
    labels = torch.arange(_PROBE_TOKENS, device=device) * (LOSS_VOCABULARY // _PROBE_TOKENS)
    labels[::3] = -100
    weights = torch.linspace(0.5, 2, _PROBE_TOKENS, device=device)
    results = []
    with torch.enable_grad():
        for kernel_or_none in (None, kernel):
            total, losses = linear_cross_entropy(
                hidden, weight, labels, weights, softcap=softcap, kernel=kernel_or_none
            )
            results.append([losses, *torch.autograd.grad(total, [hidden, weight])])
    return all(map(_are_close, *results))


def _replace(fused: list[Fused]) -> None:
    for forward in fused:
        forward.module.forward = forward


def unfuse_layers(model: torch.nn.Module) -> None:
    """Restore the original forward of every module, the original rope, and the head's loss."""
    for module in model.modules():
        if isinstance(module, LossHead):
            module.kernel = None
        forward = vars(module).get("forward")
        if isinstance(forward, Fused):
            del module.forward
        elif isinstance(forward, ChunkedFeedForward):
            forward.restore()  # stays: rows are as long where they are tested
    for source in _rope_sources(model):
        if isinstance(rope := vars(source)[ROPE], FusedRope):
            setattr(source, ROPE, rope.original)


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout and gradients in this context, but keep the kernels of a model that trains.

    What is measured so differs from a training step's results by the weights alone: in bf16, two
    kernels' roundings add up to more than a nat over the tokens of a long answer.
    """
    forwards = [m for m in model.modules() if isinstance(_forward_of(m), Fused) or is_fused(m)]
    forwards += int8_layers(model)
    ropes = [vars(source)[ROPE] for source in _rope_sources(model)]
    ropes = [rope for rope in ropes if isinstance(rope, FusedRope)]
    is_training = model.training
    with (
        eval_mode(model),
        replaced((module, "training", is_training) for module in forwards),
        replaced((rope, "runs_without_gradients", is_training) for rope in ropes),
    ):
        yield


def _forward_of(module: Any) -> Any:
    """Return what replaces a module's forward, or that of a chunk of it; None if nothing does."""
    forward = vars(module).get("forward")
    return forward.whole if isinstance(forward, ChunkedFeedForward) else forward


def _rope_sources(model: torch.nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's layers that define a rope function."""
    sources = {sys.modules[type(module).__module__] for module in model.modules()}
    return [source for source in sources if ROPE in vars(source)]


def _find_equal_ropes(
    model: torch.nn.Module, kernel: Rotation, run: Callable[[], None]
) -> tuple[list[FusedRope], bool]:
    """Return the ropes that `kernel` may replace, and whether it differs from any other."""
    equal: list[FusedRope] = []
    is_any_different = False

    def record(rope: FusedRope, *args: Any, **kwargs: Any) -> Any:
        calls.append((*args, *kwargs.values()))
        return rope.original(*args, **kwargs)

    for source in _rope_sources(model):
        rope = FusedRope(kernel, vars(source)[ROPE], source)
        calls: list[tuple[Any, ...]] = []
        setattr(source, ROPE, partial(record, rope))
        try:
            run()
        finally:
            setattr(source, ROPE, rope.original)
        # Queries, keys, cos and sin; Gemma 4's takes only one of the two.
        takes_pairs = all(
            len(args) == 4 and all(isinstance(arg, Tensor) for arg in args) for args in calls
        )
        if not calls or not takes_pairs:
            continue
        # Layers share tables of angles, except that local and global layers have different ones.
        distinct = {(id(args[2]), args[0].shape, args[1].shape): args for args in calls}
        if all(_is_equal_rope(rope, *args) for args in distinct.values()):
            equal.append(rope)
        else:
            is_any_different = True
    return equal, is_any_different


def _is_equal_rope(rope: FusedRope, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Compare kernel and original on random queries and keys of the model's shapes and strides."""
    random = torch.Generator(query.device).manual_seed(0)
    inputs = [
        # `empty_like` keeps the model's memory layout, [rows, tokens, heads, width].
        torch.empty_like(tensor).normal_(generator=random).detach().requires_grad_()
        for tensor in (query, key)
    ]
    rotations = [partial(each, *inputs, cos, sin) for each in (rope.original, rope.kernel)]
    return agree(rotations, inputs)


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _find_equal_forwards(
    model: Any, kernels: Kernels, gathered: Gathered, device: torch.device
) -> tuple[list[Fused], set[str]]:
    """Return the forwards with equal results, and the classes of modules without one."""
    fused: list[Fused] = []
    differing: set[str] = set()
    embedding = model.get_input_embeddings()
    with gathered(embedding):
        dtype = embedding.weight.dtype
    was_training = model.training
    model.eval()  # dropout would make the two results differ
    for width, candidates in _candidates(model, kernels):
        module = candidates[0].module
        with gathered(module):
            if any(weight.is_meta for weight in module.parameters()):
                continue  # of another rank's stage
            width = width or len(module.weight)
            equal = (each for each in candidates if is_equal(each, width, dtype, device))
            forward = next(equal, None)
        if forward is not None:
            fused.append(forward)
        else:
            differing.add(type(module).__name__)
    model.train(was_training)
    return fused, differing


def _candidates(model: torch.nn.Module, kernels: Kernels) -> Iterator[tuple[int, Sequence[Fused]]]:
    """Yield the input width of each replaceable module, and the fused forwards to compare.

    The width of a norm, yielded as 0, is that of its weight, which may have to be gathered first.
    """
    for module in model.modules():
        attributes, children = vars(module), module._modules
        eps = attributes.get("variance_epsilon", attributes.get("eps"))
        # As its replacement takes one argument; a gated norm takes a second, possibly optional.
        if len(inspect.signature(module.forward).parameters) != 1:
            continue
        if (
            "RMSNorm" in type(module).__name__
            and eps is not None
            and module._parameters.get("weight") is not None
        ):
            variants = (
                FusedNorm(kernels.norm, module, eps, *variant, kernels.norm_of_sum)
                for variant in _NORM_VARIANTS
            )
            yield 0, list(variants)
        elif kernels.gates and {"gate_proj", "up_proj", "down_proj"} <= children.keys():
            gates = [FusedGate(kernel, module, name) for name, kernel in kernels.gates.items()]
            yield module.gate_proj.in_features, gates
        elif kernels.linear and type(module) is torch.nn.Linear and module.weight.requires_grad:
            yield module.in_features, [FusedLinear(kernels.linear, module)]


def is_equal(forward: Fused, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    module = forward.module
    trained = [weight for weight in module.parameters(recurse=False) if weight.requires_grad]
    random = torch.Generator(device).manual_seed(0)
    # Tokens of many scales: large ones reveal a clamped gate, small ones a different eps.
    sizes = torch.logspace(*_PROBE_SIZES, _PROBE_TOKENS, device=device).unsqueeze(1)
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=random, device=device) * sizes
    hidden = hidden.to(dtype).requires_grad_()
    forwards = (module.forward, forward.compute)
    return agree([partial(compute, hidden) for compute in forwards], [hidden, *trained])


def agree(functions: Sequence[Callable[[], Any]], inputs: Sequence[Tensor]) -> bool:
    """Return whether two functions have equal outputs and gradients of `inputs`, up to rounding."""
    results = []
    with torch.enable_grad():
        for compute in functions:
            outputs = compute()
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            outer = [torch.linspace(-1, 1, out.numel()).to(out).view_as(out) for out in outputs]
            grads = torch.autograd.grad(outputs, inputs, outer, materialize_grads=True)
            results.append([*outputs, *grads])
    return all(map(_are_close, *results))


def _are_close(own: Tensor, fused: Tensor) -> bool:
    """Return whether two results differ by no more than rounding."""
    if own.dtype != fused.dtype:
        return False
    # Under autocast even fp32 gradients were computed by products in half precision.
    device, dtype = own.device.type, own.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    difference = (own.float() - fused.float()).norm()
    return bool(difference <= _ROUNDING_STEPS * torch.finfo(dtype).eps * own.float().norm())


class ChunkedFeedForward:
    """The forward of a feed-forward that saves only its input if there are many tokens."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.whole = module, module.forward

    def restore(self) -> None:
        """Compute the chunks by the module's own forward."""
        self.whole = MethodType(type(self.module).forward, self.module)

    def __call__(self, hidden: Tensor) -> Tensor:
        needs_graph = torch.is_grad_enabled()
        if hidden.shape[:-1].numel() <= FEED_FORWARD_TOKENS or (
            needs_graph and not hidden.requires_grad
        ):
            return self.whole(hidden)
        if not needs_graph:
            return _in_chunks(self.whole, hidden)
        kept = _Kept.apply(hidden)
        weights = [each for each in self.module.parameters() if each.requires_grad]
        output: Tensor = _Chunks.apply(self.whole, kept.grad_fn, kept, *weights)
        return output


def chunk_feed_forwards(model: Any) -> None:
    """Compute the dense feed-forwards of recomputed layers in chunks; call after `fuse_layers`."""
    for layer in map(model.get_submodule, repeated_layers(model)):
        module: Any = dict(layer.named_children()).get(_FEED_FORWARD)
        if module is None or not (
            isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
        ):
            continue
        takes_one = len(inspect.signature(type(module).forward).parameters) == 2  # and `self`
        has_experts = _EXPERTS in dict(module.named_children())
        if takes_one and not has_experts and not isinstance(module.forward, MixerForward):
            module.forward = ChunkedFeedForward(module)


def _in_chunks(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    first, *rest = _split(hidden)
    output = forward(first)
    whole = output.new_empty(hidden.shape)
    own, *others = _split(whole)  # filled one by one: a list of parts would take them twice
    own.copy_(output)
    for part, place in zip(rest, others, strict=True):
        place.copy_(forward(part))
    return whole


def _split(hidden: Tensor) -> tuple[Tensor, ...]:
    """Return contiguous [rows, tokens, width] as views [1, tokens, width]."""
    return hidden.view(1, -1, hidden.shape[-1]).split(FEED_FORWARD_TOKENS, dim=1)


class _Kept(torch.autograd.Function):
    """Save a tensor; for a recomputed layer before the feed-forward runs, so that it ends here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Chunks(torch.autograd.Function):
    """Compute a feed-forward in chunks, and each of them again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, whole: Callable[[Tensor], Tensor], kept: Any, hidden: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.whole, ctx.kept, ctx.weights = whole, kept, weights
        # Casts of weights that autocast caches here would have no gradients.
        ctx.autocasts = [(*each[:3], False) for each in read_autocasts(hidden.device.type)]
        ctx.random = RandomState(hidden.device)
        with restored_autocasts(ctx.autocasts):
            return _in_chunks(whole, hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.kept.saved_tensors
        of_hidden, totals = torch.empty_like(hidden), ()
        parts = zip(_split(hidden), _split(gradients[0]), _split(of_hidden), strict=True)
        with ctx.random.restored():
            for part, gradient, place in parts:
                own = part.detach().requires_grad_()
                with torch.enable_grad(), restored_autocasts(ctx.autocasts):
                    output = ctx.whole(own)
                with accumulating_in_products(False):
                    found = torch.autograd.grad(output, (own, *ctx.weights), gradient)
                place.copy_(found[0])
                totals = tuple(map(torch.add, totals, found[1:])) if totals else found[1:]
        return None, None, of_hidden, *totals
