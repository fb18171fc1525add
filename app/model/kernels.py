"""Fused kernels in place of a model's own norms and gates, where they are proven equal.

Liger's on a GPU; our own norm and oneDNN's products on a CPU. In training alone, so that what is
measured is the model as it is. A module's `forward` is replaced and given back after the fit; what
the module holds is never touched, so that adapters, sharding and saving know nothing of it.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CHOICES = ("auto", "torch")
PROBE_TOKENS = 64
PROBE_SIZES = (-2.0, 1.5)
"""powers of ten: how large the first of these tokens is, and the last"""
ROUNDING_STEPS = 8
"""how many steps of their dtype two ways may be apart, over the whole of a tensor"""
NORM_VARIANTS = ((0.0, "llama"), (1.0, "gemma"))
"""what is added to a norm's weight, and where it rounds"""


@dataclass(slots=True)
class FusedNorm:
    """An RMS norm's forward by one kernel."""

    kernel: Callable[..., torch.Tensor]
    module: torch.nn.Module
    eps: float
    offset: float
    casting: str

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return _forward(self, *given, *named.values())

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        # Not in place: a gradient that another branch still reads would be overwritten.
        weight = self.module.weight
        return self.kernel(hidden, weight, self.eps, self.offset, self.casting, False)


@dataclass(slots=True)
class FusedGate:
    """A gated layer's forward, down(silu(gate) * up), the middle by one kernel."""

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
    """A linear layer's forward by another library's products."""

    kernel: Callable[..., torch.Tensor]
    module: Any

    def __call__(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return _forward(self, *given, *named.values())

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.kernel(hidden, self.module.weight, self.module.bias)


Fused = FusedNorm | FusedGate | FusedLinear


@dataclass(kw_only=True, slots=True)
class Kernels:
    """What can compute layers on a device; None where nothing does it better than the model."""

    norm: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor] | None = None
    linear: Callable[..., torch.Tensor] | None = None


def _forward(fused: Fused, hidden: torch.Tensor) -> torch.Tensor:
    module = fused.module  # whose own forward takes one tensor, whatever it calls it
    if module.training:
        return fused.compute(hidden)
    output: torch.Tensor = type(module).forward(module, hidden)
    return output


Gathered = Callable[["torch.nn.Module"], AbstractContextManager[None]]
"""has a module's own weights whole, where a strategy keeps them in parts"""


def fuse_layers(
    model: Any,
    gathered: Gathered = lambda module: nullcontext(),
    device: torch.device | None = None,
) -> None:
    """Let a kernel compute each norm and gate of which it is proven that the results are the same.

    Each is tried by itself on random tokens, with gradients, on `device` or where the model is.
    Says in one line what runs on a GPU; on a CPU there is nothing to choose.
    """
    device = device or model.device
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
        from liger_kernel.transformers.functional import liger_rms_norm, liger_swiglu

        kernels = Kernels(norm=liger_rms_norm, gate=liger_swiglu)
        fused, refused = _prove_all(model, kernels, gathered, device)
    except Exception as error:  # noqa: BLE001  compilers of kernels raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("kernels: the model's own (liger-kernel is installed, but broken: %s)", reason)
        return
    _replace(fused)
    counts = Counter(type(forward.module).__name__ for forward in fused)
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none of the layers"
    own = "".join(f"; the model's own for {name}, which differs" for name in sorted(refused))
    log.info("kernels: Liger's for %s, proven equal%s", said, own)


def _replace(fused: list[Fused]) -> None:
    for forward in fused:
        forward.module.forward = forward


def unfuse_layers(model: torch.nn.Module) -> None:
    """Give every module its own forward back."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Fused):
            del module.forward


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _prove_all(
    model: Any, kernels: Kernels, gathered: Gathered, device: torch.device
) -> tuple[list[Fused], set[str]]:
    """Return what is proven, and the names of the classes of which a module is not."""
    fused: list[Fused] = []
    refused: set[str] = set()
    dtype = model.get_input_embeddings().weight.dtype
    was_training = model.training
    model.eval()  # an adapter's dropout would differ by itself
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
    """Yield the width of what a module reads, and the fused forwards that may be the same."""
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
    """Say whether a module's forward is a function of one argument, as what may replace it is.

    A norm that is gated takes two, or one that it may be called without.
    """
    return len(inspect.signature(module.forward).parameters) == 1


def _is_equal(forward: Fused, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    import torch

    module = forward.module
    trained = [weight for weight in module.parameters(recurse=False) if weight.requires_grad]
    random = torch.Generator(device).manual_seed(0)
    # Of many sizes: a gate that is cut off at a limit shows with large tokens, an eps with small.
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
    # Under autocast also a gradient in fp32 went through products that round to half precision.
    device, dtype = own.device.type, own.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    apart = (own.float() - fused.float()).norm()
    return bool(apart <= ROUNDING_STEPS * torch.finfo(dtype).eps * own.float().norm())
