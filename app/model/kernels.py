"""Fused kernels in place of a model's own norms, gates, rope and linear layers, proven equal.

Liger's on a GPU; our own norm and oneDNN's products on a CPU. Only in training, so that evaluation
runs the model as it is. A module's `forward` is replaced and restored after the fit; its parameters
are untouched, so that adapters, sharding and saving are not affected.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from app.model.head import LossHead, linear_cross_entropy

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
PROBE_SIZES = (-2.0, 1.5)
"""powers of ten: scale of the first token, and of the last"""
LOSS_WIDTH, LOSS_VOCABULARY = 64, 40_000
ROUNDING_STEPS = 8
"""largest difference of two results in eps of their dtype, over a tensor's norm"""
NORM_VARIANTS = ((0.0, "llama"), (1.0, "gemma"))
"""offset of a norm's weight, and where it rounds"""


@dataclass(slots=True)
class FusedNorm:
    """The forward of an RMS norm, by one kernel."""

    kernel: Callable[..., torch.Tensor]
    module: torch.nn.Module
    eps: float
    offset: float
    casting: str

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return _forward(self, *given, *named.values())

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        # Not in place: it would overwrite a gradient that another branch still reads.
        weight = self.module.weight
        return self.kernel(hidden, weight, self.eps, self.offset, self.casting, False)


@dataclass(slots=True)
class FusedGate:
    """The forward of a gated MLP, down(silu(gate) * up), with one kernel between the products."""

    kernel: Callable[..., torch.Tensor]
    module: Any

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return _forward(self, *given, *named.values())

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.module
        gated: torch.Tensor = layer.down_proj(
            self.kernel(layer.gate_proj(hidden), layer.up_proj(hidden))
        )
        return gated


@dataclass(slots=True)
class FusedLinear:
    """The forward of a linear layer, by another library's products."""

    kernel: Callable[..., torch.Tensor]
    module: Any

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return _forward(self, *given, *named.values())

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.kernel(hidden, self.module.weight, self.module.bias)


Fused = FusedNorm | FusedGate | FusedLinear
ROPE = "apply_rotary_pos_emb"
"""what transformers' modules name their rotation of queries and keys"""
Rotation = Callable[..., tuple["torch.Tensor", "torch.Tensor"]]


@dataclass(slots=True)
class FusedRope:
    """A rotation of queries and keys by their positions, by one kernel where gradients are taken.

    It stands in place of the function in the Python module `home` of a model's layers.
    """

    kernel: Rotation
    own: Rotation
    home: ModuleType

    def __call__(self, *given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if len(given) != 4 or named or not torch.is_grad_enabled():
            return self.own(*given, **named)
        return self.compute(*given)

    def compute(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The kernel writes over what it is given, which selective recompute may have kept.
        return self.kernel(query.clone(), key.clone(), cos, sin)


@dataclass(kw_only=True, slots=True)
class Kernels:
    """The kernels of a device; None where the model's own is as good."""

    norm: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor] | None = None
    linear: Callable[..., torch.Tensor] | None = None
    rope: Rotation | None = None


def _forward(fused: Fused, hidden: torch.Tensor) -> torch.Tensor:
    module = fused.module  # its own forward takes one tensor, of any name
    if module.training:
        return fused.compute(hidden)
    output: torch.Tensor = type(module).forward(module, hidden)
    return output


Gathered = Callable[["torch.nn.Module"], AbstractContextManager[None]]
"""a context in which a module's own sharded weights are gathered"""


def fuse_layers(
    model: Any,
    gathered: Gathered = lambda module: nullcontext(),
    device: torch.device | None = None,
    run: Callable[[], None] | None = None,
) -> None:
    """Replace the forward of each layer for which a kernel is proven to give the same results.

    Each layer is tried on random tokens, with gradients, on `device` or the model's. `run` runs the
    model once, which shows what its rope is given; without it the rope stays. Logs one line on a
    GPU.
    """
    device = device or model.device
    _fuse_loss(model, device)
    if not _is_on_gpu(device):
        if device.type == "cpu":
            from app.model.cpu.fp32 import rms_norm, trained_linear

            kernels = Kernels(norm=rms_norm, linear=trained_linear)
            _replace(_prove_all(model, kernels, gathered, device)[0])
        return
    if find_spec("liger_kernel") is None:
        log.info("kernels: the model's own (liger-kernel is not installed)")
        return
    try:
        from liger_kernel.transformers.functional import liger_rms_norm, liger_rope, liger_swiglu

        kernels = Kernels(norm=liger_rms_norm, gate=liger_swiglu, rope=liger_rope)
        fused, refused = _prove_all(model, kernels, gathered, device)
        ropes, refused_ropes = _prove_ropes(model, kernels, run) if run else ([], set())
    except Exception as error:  # noqa: BLE001  compilers of kernels raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("kernels: the model's own (liger-kernel is installed, but broken: %s)", reason)
        return
    _replace(fused)
    for rope in ropes:
        setattr(rope.home, ROPE, rope)
    counts = Counter(type(forward.module).__name__ for forward in fused)
    names = [f"{count} {name}" for name, count in counts.items()] + ["rope"] * bool(ropes)
    fused_names = ", ".join(names) or "none of the layers"
    differing = sorted(refused | refused_ropes)
    own = "".join(f"; the model's own for {name}, which differs" for name in differing)
    log.info("kernels: Liger's for %s, proven equal%s", fused_names, own)


def _fuse_loss(model: Any, device: torch.device) -> None:
    """Let a kernel compute the head's loss on a GPU, where it is proven equal; logs what does."""
    head = model.get_output_embeddings()
    if not (_is_on_gpu(device) and isinstance(head, LossHead)):
        return
    try:
        from app.model.loss_kernel import cross_entropy_

        reason = "" if _is_equal_loss(cross_entropy_, head.softcap, device) else "it differs"
    except Exception as error:  # noqa: BLE001  compilers of kernels raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason:
        log.warning("loss: by PyTorch's operators, not by one kernel (%s)", reason)
    else:
        head.kernel = cross_entropy_


def _is_equal_loss(
    kernel: Callable[..., None], softcap: float | None, device: torch.device
) -> bool:
    import torch

    random = torch.Generator(device).manual_seed(0)
    # More logits than a block of the kernel holds.
    shapes = ((PROBE_TOKENS, LOSS_WIDTH), (LOSS_VOCABULARY, LOSS_WIDTH))
    hidden, weight = (
        torch.randn(shape, generator=random, device=device).bfloat16().requires_grad_()
        for shape in shapes
    )
    labels = torch.arange(PROBE_TOKENS, device=device) * (LOSS_VOCABULARY // PROBE_TOKENS)
    labels[::3] = -100
    weights = torch.linspace(0.5, 2, PROBE_TOKENS, device=device)
    found = []
    with torch.enable_grad():
        for way in (None, kernel):
            total, losses = linear_cross_entropy(
                hidden, weight, labels, weights, softcap=softcap, kernel=way
            )
            found.append([losses, *torch.autograd.grad(total, [hidden, weight])])
    return all(map(_are_same, *found))


def _replace(fused: list[Fused]) -> None:
    for forward in fused:
        forward.module.forward = forward


def unfuse_layers(model: torch.nn.Module) -> None:
    """Restore every module's own forward, and its head's loss."""
    for module in model.modules():
        if isinstance(module, LossHead):
            module.kernel = None
        if isinstance(vars(module).get("forward"), Fused):
            del module.forward
    for home in _rope_homes(model):
        if isinstance(rope := vars(home)[ROPE], FusedRope):
            setattr(home, ROPE, rope.own)


def _rope_homes(model: torch.nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's layers that have a rope."""
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    return [home for home in homes if ROPE in vars(home)]


def _prove_ropes(
    model: torch.nn.Module, kernels: Kernels, run: Callable[[], None]
) -> tuple[list[FusedRope], set[str]]:
    """Return the proven ropes, and a name for those that differ."""
    proven: list[FusedRope] = []
    if kernels.rope is None:
        return proven, set()
    refused: set[str] = set()
    for home in _rope_homes(model):
        rope = FusedRope(kernels.rope, vars(home)[ROPE], home)
        calls: list[tuple[Any, ...]] = []
        setattr(home, ROPE, partial(_note_call, rope.own, calls))
        try:
            run()
        finally:
            setattr(home, ROPE, rope.own)
        if not calls or not all(map(_is_rotation, calls)):
            continue
        # Layers share their tables of angles, but local and global ones have their own.
        alike = {(id(given[2]), given[0].shape, given[1].shape): given for given in calls}
        if all(_turns_the_same(rope, *given) for given in alike.values()):
            proven.append(rope)
        else:
            refused.add("rope")
    return proven, refused


def _is_rotation(given: tuple[Any, ...]) -> bool:
    """Return whether a rope was given queries, keys and angles: Gemma 4's turns one at a time."""
    import torch

    return len(given) == 4 and all(isinstance(one, torch.Tensor) for one in given)


def _note_call(function: Rotation, calls: list[tuple[Any, ...]], *given: Any, **named: Any) -> Any:
    calls.append((*given, *named.values()))
    return function(*given, **named)


def _turns_the_same(
    rope: FusedRope, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> bool:
    """Compare both ways on random queries and keys of the model's shapes, with gradients."""
    import torch

    random = torch.Generator(query.device).manual_seed(0)
    given = [
        # In memory as the model has them: [rows, tokens, heads, width].
        torch.empty_like(one).normal_(generator=random).detach().requires_grad_()
        for one in (query, key)
    ]
    found = []
    with torch.enable_grad():
        ways: tuple[Rotation, ...] = (rope.own, rope.compute)
        for turn in ways:
            outputs = turn(*given, cos, sin)
            outer = [torch.linspace(-1, 1, one.numel()).to(one).view_as(one) for one in outputs]
            grads = torch.autograd.grad(outputs, given, outer)
            found.append([*outputs, *grads])
    return all(map(_are_same, *found))


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _prove_all(
    model: Any, kernels: Kernels, gathered: Gathered, device: torch.device
) -> tuple[list[Fused], set[str]]:
    """Return the proven forwards, and the names of classes with an unproven one."""
    fused: list[Fused] = []
    refused: set[str] = set()
    embedding = model.get_input_embeddings()
    with gathered(embedding):
        dtype = embedding.weight.dtype
    was_training = model.training
    model.eval()  # dropout would differ between the two
    for width, candidates in _candidates(model, kernels):
        with gathered(candidates[0].module):
            proven = (one for one in candidates if _is_equal(one, width, dtype, device))
            forward = next(proven, None)
        if forward is not None:
            fused.append(forward)
        else:
            refused.add(type(candidates[0].module).__name__)
    model.train(was_training)
    return fused, refused


def _candidates(model: torch.nn.Module, kernels: Kernels) -> Iterator[tuple[int, Sequence[Fused]]]:
    """Yield the input width of each module, and the fused forwards to try."""
    import torch

    for module in model.modules():
        own, children = vars(module), module._modules
        eps = own.get("variance_epsilon", own.get("eps"))
        if not _takes_one_tensor(module):
            continue
        if (
            "RMSNorm" in type(module).__name__
            and eps is not None
            and module._parameters.get("weight") is not None
        ):
            variants = (FusedNorm(kernels.norm, module, eps, *variant) for variant in NORM_VARIANTS)
            yield len(module.weight), list(variants)
        elif kernels.gate and {"gate_proj", "up_proj", "down_proj"} <= children.keys():
            yield module.gate_proj.in_features, [FusedGate(kernels.gate, module)]
        elif kernels.linear and type(module) is torch.nn.Linear and module.weight.requires_grad:
            yield module.in_features, [FusedLinear(kernels.linear, module)]


def _takes_one_tensor(module: torch.nn.Module) -> bool:
    """Return whether a module's forward takes one argument, as its replacement does.

    A gated norm takes a second one, which may be optional.
    """
    return len(inspect.signature(module.forward).parameters) == 1


def _is_equal(forward: Fused, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    import torch

    module = forward.module
    trained = [weight for weight in module.parameters(recurse=False) if weight.requires_grad]
    random = torch.Generator(device).manual_seed(0)
    # Of many scales: large tokens show a gate that is clamped, small ones an eps.
    sizes = torch.logspace(*PROBE_SIZES, PROBE_TOKENS, device=device).unsqueeze(1)
    hidden = torch.randn(1, PROBE_TOKENS, width, generator=random, device=device) * sizes
    hidden = hidden.to(dtype).requires_grad_()
    found = []
    with torch.enable_grad():
        for compute in (module.forward, forward.compute):
            output = compute(hidden)
            outer = torch.linspace(-1, 1, output.numel(), device=device, dtype=output.dtype)
            grads = torch.autograd.grad(
                output, [hidden, *trained], outer.view_as(output), materialize_grads=True
            )
            found.append((output, *grads))
    return all(map(_are_same, *found))


def _are_same(own: torch.Tensor, fused: torch.Tensor) -> bool:
    import torch

    if own.dtype != fused.dtype:
        return False
    # Under autocast even fp32 gradients come from products in half precision.
    device, dtype = own.device.type, own.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    apart = (own.float() - fused.float()).norm()
    return bool(apart <= ROUNDING_STEPS * torch.finfo(dtype).eps * own.float().norm())
