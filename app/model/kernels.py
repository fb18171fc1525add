"""Fused kernels in place of a model's own norms, gates and linear layers, where proven equal.

Liger's on a GPU; our own norm and oneDNN's products on a CPU. Only in training, so that evaluation
runs the model as it is. A module's `forward` is replaced and restored after the fit; its parameters
are untouched, so that adapters, sharding and saving are not affected.
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

PROBE_TOKENS = 64
PROBE_SIZES = (-2.0, 1.5)
"""powers of ten: scale of the first token, and of the last"""
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


@dataclass(kw_only=True, slots=True)
class Kernels:
    """The kernels of a device; None where the model's own is as good."""

    norm: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor] | None = None
    linear: Callable[..., torch.Tensor] | None = None


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
) -> None:
    """Replace the forward of each layer for which a kernel is proven to give the same results.

    Each layer is tried on random tokens, with gradients, on `device` or the model's. Logs one line
    on a GPU.
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
    """Restore every module's own forward."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), Fused):
            del module.forward


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
