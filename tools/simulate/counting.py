"""Count the kernels, FLOPs, bytes, live memory, syncs and copies of a device.

A dispatch mode sees every operator below autograd, in the forward and the backward pass. Operators
are classified by the module that calls them; in the backward pass by their autograd node, whose
class is known from the forward pass.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

CLASSES = (
    "norm", "rope", "gate", "lora", "dropout", "loss", "casts", "adds", "dequantization", "layout",
    "other",
)  # fmt: skip
"""classes of operators other than products and attention, in the order of display"""
NO_KERNEL = {
    "_unsafe_view", "detach", "alias", "lift_fresh", "empty", "empty_like", "empty_strided",
    "new_empty", "new_empty_strided", "is_same_size", "sym_size", "sym_stride", "device",
    "set_", "resize_",
}  # fmt: skip
"""operators, other than views, that launch no kernel"""
WRITES_ONLY = {"copy_", "fill_", "zero_", "full", "zeros", "ones", "zeros_like", "new_zeros"}
"""operators that do not read what they write"""
LOOKUPS = {"index", "embedding", "gather", "index_select"}
"""operators that read only as many bytes as they return"""
SYNCS = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "repeat_interleave",
}  # fmt: skip
"""operators for which the host waits, as it needs a value or the size of the result"""
BY_MODULE = (
    ("norm", r"norm$"),
    ("rope", r"rotary"),
    ("dropout", r"dropout"),
    ("loss", r"losshead$|forcausallm$"),
    ("lora", r"lora|fused"),
    ("gate", r"mlp$|silu|gelu|activation$"),
)
"""class, and a pattern for the lower-case `module.class` name of the calling module's class"""
ROTATIONS = {"mul", "add", "neg", "cat", "sub", "slice_backward", "add_", "mul_"}
"""operators with which an attention module itself rotates queries and keys; its other operators
change their layout"""
RANK_LIMIT = 128
"""length of a matrix side up to which a product counts as an adapter's"""
FLASH4 = " 4"
"""suffix of an attention kernel's name if FlashAttention 4 is active in PyTorch"""
ALIGNMENT = 512
"""bytes to which PyTorch's allocator rounds up"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kind of kernel launch; `flops` is 0 for memory-bound kernels."""

    phase: str
    kind: str
    """one of CLASSES, or `product` or `attention`"""
    name: str
    dtype: str
    flops: float
    num_bytes: int


@dataclass(slots=True)
class Tally:
    """The counts of a step."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    """operators for which the host waits for the device"""
    to_host: Counter[str] = field(default_factory=Counter)
    """copies from the device to the host"""
    pageable: Counter[str] = field(default_factory=Counter)
    """copies to the device from host memory that is not page-locked"""
    live_bytes: int = 0
    peak_bytes: int = 0
    """peak live bytes of a micro-batch: activations, and gradients until stored in their weights"""
    peak_phase: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """The counts of a micro-batch and of the optimizer step after it."""

    tally: Tally
    model: Any
    optimizer: torch.optim.Optimizer
    num_tokens: int
    num_trained: int
    """number of positions for which the head computes a loss"""


class OperatorCounter(TorchDispatchMode):
    """Counts operators into `tally`; `phase` is the current phase of the step.

    `num_pairs`: sum of the squared document lengths of the batch; causal attention computes half of
    these pairs. A request for a value on the device is answered with 1 (or True) and counted.
    """

    def __init__(self, num_pairs: float) -> None:
        super().__init__()
        self.tally = Tally()
        self.phase = "forward"
        self._num_pairs = num_pairs
        self._modules: list[torch.nn.Module] = []
        self._kinds: dict[int, str] = {}
        """class of an autograd node, by its sequence number"""
        self._storages: dict[int, Any] = {}
        self._gradients: set[int] = set()

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Track the module that calls each operator."""
        hooks = torch.nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(lambda module, _: self._modules.append(module)),
            hooks.register_module_forward_hook(
                lambda *_: self._modules.pop() and None, always_call=True
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def without_gradients(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Exclude gradients from the live memory once they are stored in their weights.

        Gradients persist between micro-batches, and their size is known from the weights.
        """

        def keep(weight: Tensor) -> None:
            storage = weight.grad.untyped_storage()
            key = id(storage)
            if key in self._storages and key not in self._gradients:
                self._gradients.add(key)
                self.tally.live_bytes -= _aligned(storage.nbytes())

        handles = [
            weight.register_post_accumulate_grad_hook(keep)
            for weight in weights
            if weight.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        given = _tensors((args, kwargs))
        if on_device := any(map(_is_on_device, given)):
            self._count_waits(func, name, given, kwargs)
            if name == "_local_scalar_dense":
                return 1 if not given[0].is_floating_point() else 1.0
            if name == "equal":
                return True
        output = func(*args, **kwargs)
        returned = _tensors(output)
        # A view takes no new memory; this includes views of weights, which existed before.
        known = {id(tensor.untyped_storage()) for tensor in given}
        for tensor in returned:
            if _is_on_device(tensor) and id(tensor.untyped_storage()) not in known:
                self._keep(tensor)
        if not (on_device or any(map(_is_on_device, returned))):
            return output
        self._count_copies(func, given, returned)
        kind = self._kind_of(func, name, given, returned)
        if name not in NO_KERNEL and not func.is_view and name not in SYNCS:
            self._count_kernel(kind, func, name, given, returned, args, kwargs, output)
        return output

    def _count_waits(self, func: Any, name: str, given: list[Tensor], kwargs: Any) -> None:
        is_known = name == "repeat_interleave" and kwargs.get("output_size") is not None
        by_mask = name.startswith("index") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:]
        )
        if (name in SYNCS and not is_known) or by_mask:
            self.tally.syncs[f"{self.phase}: {func}"] += 1

    def _count_copies(self, func: Any, given: list[Tensor], returned: list[Tensor]) -> None:
        if func._overloadpacket.__name__ not in ("_to_copy", "copy_"):
            return
        source, target = given[-1], returned[0]
        if _is_on_device(source) and not _is_on_device(target):
            self.tally.to_host[f"{self.phase}: {func} {tuple(source.shape)}"] += 1
            self.tally.syncs[f"{self.phase}: {func}"] += 1
        elif _is_on_device(target) and not (_is_on_device(source) or _is_pinned(source)):
            self.tally.pageable[f"{self.phase}: {func} {tuple(source.shape)}"] += 1

    def _count_kernel(
        self,
        kind: str,
        func: Any,
        name: str,
        given: list[Tensor],
        returned: list[Tensor],
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        flops = 0.0
        if name == "gemm_4bit":
            self._count_gemm_4bit(given, args, returned[0])
            return
        dtype = str(given[0].dtype if given else returned[0].dtype).removeprefix("torch.")
        formula = flop_registry.get(func._overloadpacket) or flop_registry.get(
            getattr(torch.ops.aten, name.removesuffix("_"), None)
        )
        if _is_attention(func):
            flops = self._attention_flops(name, given)
            is_dense = name.startswith("_scaled_dot_product")  # CUDA may select cuDNN's kernel
            if not is_dense and current_flash_attention_impl() == "FA4":
                name += FLASH4
        elif name in ("_grouped_mm", "_scaled_mm_v2"):  # PyTorch has no formula of theirs
            kind, flops = "product", _rows_flops(*args[:2])
        elif formula is not None and "mm" in name:
            flops = float(formula(*args, **kwargs, out_val=output))
        num_bytes = _bytes_moved(func, name, args, kwargs, given, returned)
        self.tally.kernels[Kernel(self.phase, kind, name, dtype, flops, num_bytes)] += 1

    def _count_gemm_4bit(self, given: list[Tensor], args: Any, output: Tensor) -> None:
        """Count bitsandbytes' product as its CUDA code computes it for more than 1,536 rows.

        It dequantizes the matrix into a new one, then multiplies (0.50.2, backends/cuda/ops.py).
        """
        rows, (height, width) = args[0], args[2]
        dtype = str(rows.dtype).removeprefix("torch.")
        unpacked = height * width * rows.element_size()
        packed = sum(map(_size, given)) - _size(rows)
        flops = 2.0 * rows.numel() * height
        num_bytes = _size(rows) + unpacked + _size(output)
        self.tally.kernels.update(
            [
                Kernel(self.phase, "dequantization", "gemm_4bit", dtype, 0.0, packed + unpacked),
                Kernel(self.phase, "product", "gemm_4bit", dtype, flops, num_bytes),
            ]
        )

    def _attention_flops(self, name: str, given: list[Tensor]) -> float:
        """Return the FLOPs of two products forward, or of five backward."""
        query, key = given[1:3] if "backward" in name else given[:2]  # a gradient comes first
        is_by_head = "scaled_dot" in name
        heads = query.shape[1] if is_by_head else query.shape[-2]
        # A block of queries has a mask, and may be a small part of the row.
        in_block = query[..., 0].numel() / heads * key.shape[2 if is_by_head else -3]
        forward = 2 * 2 * heads * query.shape[-1] * min(self._num_pairs / 2, in_block)
        return 2.5 * forward if "backward" in name else forward

    def _kind_of(self, func: Any, name: str, given: list[Tensor], returned: list[Tensor]) -> str:
        node = torch._C._current_autograd_node()
        if self._modules or node is None:
            kind = self._kind_forward(func, name, given, returned)
            if node is None:
                # A node is created just before its operator runs; operators without a node follow.
                self._kinds.setdefault(torch.autograd._get_sequence_nr() - 1, kind)
        else:
            kind = self._kinds.get(node._sequence_nr(), "other")
        if kind == "other":
            kind = {"_to_copy": "casts", "add": "adds", "add_": "adds"}.get(name, kind)
        return self._kind_of_operator(func, name, given, returned) or kind

    def _kind_of_operator(
        self, func: Any, name: str, given: list[Tensor], returned: list[Tensor]
    ) -> str | None:
        """Return the class if the operator alone determines it."""
        if _is_attention(func):
            return "attention"
        if func.namespace == "bitsandbytes":
            return "dequantization"
        if name in ("dropout", "native_dropout", "native_dropout_backward"):
            return "dropout"
        if name == "rope":
            return "rope"
        if name.startswith("add_rms_norm"):
            return "norm"
        if "mm" in name:
            sides = {side for tensor in (*given, *returned) for side in tensor.shape[-2:]}
            return "lora" if min(sides) <= RANK_LIMIT else "product"
        return None

    def _kind_forward(
        self, func: Any, name: str, given: list[Tensor], returned: list[Tensor]
    ) -> str:
        if not self._modules:
            return "loss" if self.phase == "forward" else "other"
        module = type(self._modules[-1])
        place = f"{module.__module__}.{module.__name__}".lower()
        for kind, pattern in BY_MODULE:
            if re.search(pattern, place):
                return kind
        if place.endswith("attention"):
            return "rope" if name in ROTATIONS else "layout"
        return "other"

    def _keep(self, tensor: Tensor) -> None:
        """Count a storage as live until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = _aligned(storage.nbytes())
        tally = self.tally

        def freed(_: Any) -> None:
            del self._storages[key]
            if key not in self._gradients:
                tally.live_bytes -= size
            self._gradients.discard(key)

        self._storages[key] = weakref.ref(storage, freed)
        tally.live_bytes += size
        if self.phase != "step" and tally.live_bytes > tally.peak_bytes:
            tally.peak_bytes, tally.peak_phase = tally.live_bytes, self.phase


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _rows_flops(left: Tensor, right: Tensor) -> float:
    """Return the FLOPs of rows times a matrix, or times their expert's, or of rows by expert."""
    return 2.0 * left.numel() * right.shape[-1]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def _is_pinned(tensor: Tensor) -> bool:
    with _disable_current_modes():
        return bool(tensor.is_pinned())


def _is_attention(func: Any) -> bool:
    return bool(re.search("attention|attn", func._overloadpacket.__name__))


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor, at most those of its storage: an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _bytes_moved(
    func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], returned: list[Tensor]
) -> int:
    given = [tensor for tensor in given if _is_on_device(tensor)]
    written = [tensor for tensor in returned if _is_on_device(tensor)]
    mutated: list[Tensor] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated += _tensors(value)
    returned_places = {id(tensor.untyped_storage()) for tensor in written}
    written += [each for each in mutated if id(each.untyped_storage()) not in returned_places]
    if name in LOOKUPS:
        return 2 * sum(map(_size, written))
    if name == "scatter_add_":
        return 3 * _size(args[3])
    read = given
    if name in WRITES_ONLY:
        read = [tensor for tensor in given if all(tensor is not target for target in mutated)]
    return sum(map(_size, read)) + sum(map(_size, written))
