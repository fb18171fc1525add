"""Recompute of a layer's activations: all of them, or all but the expensive outputs.

Non-reentrant checkpointing: a layer runs again when the backward pass needs its saved tensors.
Works like PyTorch's own, whose bookkeeping costs the host as much per saved tensor as launching a
kernel; here a saved tensor is an index into a list. Mode `offload`: on a GPU, layer inputs are
copied to page-locked host memory on a separate stream while the next layer runs, and are copied
back one layer ahead of the backward pass, so that two of them are on the device at a time.

Mode `selective`: a dispatch mode saves outputs in a layer's forward pass, another one returns them
in its recompute. PyTorch's own contexts for selective checkpointing expect every operation to run
again, even those whose output was saved, and fail for what a model computes once for all layers
(T5's relative position bias). A dispatch mode costs the host as much per operation as launching it.
Adapters and attention therefore mark their expensive outputs explicitly (`product_once`,
`attend_once`); a layer in which nothing else was expensive runs without a dispatch mode from its
second forward pass on.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

log = logging.getLogger(__name__)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""contexts of a layer's forward pass and of its recompute"""
_NO_CONTEXTS: Contexts = (nullcontext(), nullcontext())


def run_recomputed(
    layer: Callable[..., Any], *args: Any, contexts: Contexts = _NO_CONTEXTS, **kwargs: Any
) -> Any:
    """Run `layer` without saving activations; the backward pass runs it again to get them.

    The recompute uses the arguments, random state and autocast of the forward pass, and stops at
    the last saved tensor.
    """
    if not torch.is_grad_enabled():
        return layer(*args, **kwargs)
    forward, recompute = contexts
    call = _Call(layer, args, kwargs, recompute)
    with saved_tensors_hooks(call.pack, call.unpack), forward:
        return layer(*args, **kwargs)


class _AllRecomputedError(Exception):
    """Raised to stop a recompute once it has all tensors that the forward pass saved."""


class _Call:
    """One forward pass of a layer: shapes of its saved tensors, and the state to recompute them."""

    def __init__(
        self,
        layer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any],
    ) -> None:
        self._layer, self._args, self._kwargs, self._context = layer, args, kwargs, context
        self._versions = [arg._version if isinstance(arg, Tensor) else 0 for arg in args]
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
        self._random, self._autocasts = RandomState(device), read_autocasts(device.type)
        self._types: list[tuple[torch.Size, torch.dtype]] = []
        """shape and dtype of each tensor that the forward pass saved"""
        self._recomputed: list[Tensor | None] = []

    def pack(self, tensor: Tensor) -> int:
        """Replace a saved tensor by its index."""
        self._types.append((tensor.shape, tensor.dtype))
        return len(self._types) - 1

    def unpack(self, index: int) -> Tensor:
        """Return a saved tensor and release it; recompute the layer if necessary."""
        # Also necessary if a second backward pass needs a tensor that was released.
        if not self._recomputed or self._recomputed[index] is None:
            self._recompute()
        tensor, self._recomputed[index] = self._recomputed[index], None
        if tensor is None or self._types[index] != (tensor.shape, tensor.dtype):
            raise RuntimeError(
                "recompute: a layer saved different tensors in its recompute than in its forward "
                "pass; type recompute=none"
            )
        return tensor

    def _pack_recomputed(self, tensor: Tensor) -> None:
        # Detached: its autograd history would keep the graph of the recompute alive.
        self._recomputed.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self._recomputed) == len(self._types):
            raise _AllRecomputedError

    def _recompute(self) -> None:
        for arg, version in zip(self._args, self._versions, strict=True):
            if isinstance(arg, Tensor) and arg._version != version:
                raise RuntimeError(
                    "recompute: the input of a layer was modified in place after the layer ran; "
                    "type recompute=none"
                )
        self._recomputed = []
        with (
            self._random.restored(),
            restored_autocasts(self._autocasts),
            saved_tensors_hooks(self._pack_recomputed, _refuse_unpack),
            torch.enable_grad(),
            suppress(_AllRecomputedError),
            self._context,
        ):
            self._layer(*self._args, **self._kwargs)
        self._recomputed += [None] * (len(self._types) - len(self._recomputed))


def _refuse_unpack(_: None) -> Tensor:
    raise RuntimeError(
        "recompute: a layer computes gradients in its forward pass; type recompute=none"
    )


class RandomState:
    """State of the random generators of the CPU and a layer's GPU at construction."""

    def __init__(self, device: torch.device) -> None:
        # Reading a GPU generator's state would create a CUDA context if there is none.
        uses_gpu = device.type == "cuda" and torch.cuda.is_initialized()
        self._gpu = device if uses_gpu else None
        self._states = self._read()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the generators to this state in the context, and reset them at its end."""
        before = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(before)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        cpu_state = torch.get_rng_state()
        return cpu_state, None if self._gpu is None else torch.cuda.get_rng_state(self._gpu)

    def _write(self, states: tuple[Tensor, Tensor | None]) -> None:
        cpu_state, gpu_state = states
        torch.set_rng_state(cpu_state)
        if self._gpu is not None and gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, self._gpu)


Autocasts = list[tuple[str, bool, torch.dtype, bool]]
"""per device type: its name, whether autocast is enabled, the dtype, whether weights are cached"""


def read_autocasts(device: str) -> Autocasts:
    """Return the autocast of a device type, and of the CPU."""
    return [
        (
            each,
            torch.is_autocast_enabled(each),
            torch.get_autocast_dtype(each),
            torch.is_autocast_cache_enabled(),
        )
        for each in dict.fromkeys((device, "cpu"))
        if torch.amp.is_autocast_available(each)
    ]


@contextmanager
def restored_autocasts(autocasts: Autocasts) -> Iterator[None]:
    """Apply the forward pass's autocast, which is not active in the backward pass or its thread."""
    with ExitStack() as stack:
        for device, is_enabled, dtype, caches in autocasts:
            if is_enabled or torch.is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(device, dtype, enabled=is_enabled, cache_enabled=caches)
                )
        yield


class OffloadedInputs:
    """Runs a model's layers with their inputs in host memory from forward to backward pass."""

    def __init__(self) -> None:
        self._newest: weakref.ref[LayerInput] | None = None
        self._stream: Any = None
        self._is_logged = False

    def run_layer(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `layer` on a hidden state [rows, tokens, width] and further arguments.

        The backward pass recomputes the layer from the copy in host memory.
        """
        hidden, *others = args
        if is_on_host(hidden):
            if not self._is_logged:
                self._is_logged = True
                log.info("recompute: offload has no effect on the CPU, and runs as full")
            return run_recomputed(layer, *args, **kwargs)
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        layer_input = LayerInput(hidden, self._stream, self._newest)

        # `run_recomputed` keeps its arguments, so the hidden state must not be one of them. The
        # empty tensor determines the device whose random state is restored.
        def run(_: Tensor, *rest: Any, **named: Any) -> Any:
            return layer(layer_input.read(), *rest, **named)

        output = run_recomputed(run, hidden.new_empty(0), *others, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:  # otherwise no backward pass reaches this layer
            layer_input.start_offload()
            self._newest = weakref.ref(layer_input)
        return output


def is_on_host(hidden: Tensor) -> bool:
    """Return whether a layer's input is in host memory already."""
    return hidden.device.type == "cpu"


class LayerInput:
    """A layer's input: on the device in the forward pass, then on the host, then back.

    `stream` runs the copies; `previous` is the input of the previous layer, which the backward pass
    needs next. Streams wait for each other instead of using `record_stream`, which frees memory
    late if the host runs ahead.
    """

    def __init__(
        self, hidden: Tensor, stream: Any, previous: weakref.ref[LayerInput] | None
    ) -> None:
        self._on_device: Tensor | None = hidden
        self._on_host: Tensor | None = None
        self._needs_grad = hidden.requires_grad
        self._device, self._stream, self._previous = hidden.device, stream, previous
        # The copy waits for the kernel that computes the input, not for the layer that reads it.
        self._computed = torch.cuda.current_stream(self._device).record_event()
        self._copied: Any = None

    def start_offload(self) -> None:
        """Start the copy to the host; release the device memory of the previous layer's input."""
        source = self._device_tensor().detach()
        self._stream.wait_event(self._computed)
        with torch.cuda.stream(self._stream):
            self._on_host = self._copy_to_host(source)
            self._copied = self._stream.record_event()
        if (previous := self._find_previous()) is not None:
            previous.release()

    def release(self) -> None:
        """Release the device memory, for reuse after the copy to the host."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._on_device = None

    def start_reload(self) -> None:
        """Start the copy back to the device, into memory that other layers no longer use."""
        if self._on_device is not None or self._on_host is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._on_device = self._on_host.to(self._device, non_blocking=True)
            self._copied = self._stream.record_event()

    def read(self) -> Tensor:
        """Return the input; in the backward pass its copy, and prefetch the previous layer's."""
        if self._on_host is None:
            return self._device_tensor()
        self.start_reload()
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        hidden, self._on_device = self._device_tensor().detach(), None
        if (previous := self._find_previous()) is not None:
            previous.start_reload()
        return hidden.requires_grad_(self._needs_grad)

    def _device_tensor(self) -> Tensor:
        if self._on_device is None:
            raise RuntimeError("a layer's input was released before it was copied")
        return self._on_device

    def _find_previous(self) -> LayerInput | None:
        return None if self._previous is None else self._previous()

    @staticmethod
    def _copy_to_host(source: Tensor) -> Tensor:
        """Copy to page-locked memory; from pageable memory the copy would not be asynchronous."""
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        return host.copy_(source, non_blocking=True)


ATTENTION_KERNELS = (
    *("aten::_scaled_dot_product_", "aten::_flash_attention_forward"),
    *("aten::_efficient_attention_forward", "torch_attn::_varlen_attn"),
    *("flash_attn::", "flash_attn_3::"),
)
"""prefixes of the fused attention operators of PyTorch and flash-attn; our own CPU attention, made
of matrix products, is recomputed"""
_RIGHT_HAND_SIDE = {"aten::mm": 1, "aten::addmm": 2}
"""matrix products -> index of the right-hand matrix [k, n] in their arguments"""
_TRANSPOSED = {
    "mkldnn::_linear_pointwise": 1,
    "bitsandbytes::int8_scaled_mm": 1,
    "bitsandbytes::int8_mixed_scaled_mm": 2,
}
"""products with a transposed matrix -> index of the matrix [n, k]"""
_PACKED = {"bitsandbytes::gemm_4bit": 2}
"""products with a packed matrix -> index of the argument that is its shape [n, k]"""


def is_expensive(operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether an output is saved: that of an attention, or of a product with n <= k.

    Each output value of a product with a matrix [k, n] costs k multiplications to recompute. With
    n <= k that is expensive for the memory it saves: the down projection of an MLP, projections of
    attention, A of LoRA. Products with n > k, such as the up projection and B, are recomputed.
    """
    return _properties_of(operator).is_expensive(args)


def _never(args: tuple[Any, ...]) -> bool:
    return False


def _always(args: tuple[Any, ...]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Properties:
    """The properties of an operator that determine whether its output is saved."""

    is_expensive: Callable[[tuple[Any, ...]], bool]
    """returns whether the output is saved, by the operator's arguments"""
    written: tuple[int, ...]
    """indices of the arguments that it modifies in place"""
    is_plain: bool
    """modifies nothing and is never saved: true for most calls, which must cost the mode little"""


_properties: dict[int, _Properties] = {}


def _properties_of(operator: torch._ops.OpOverload) -> _Properties:
    # Keyed by identity: operators live as long as the process, and hashing them is slow.
    if (properties := _properties.get(id(operator))) is None:
        arguments = enumerate(operator._schema.arguments)
        written = tuple(n for n, arg in arguments if arg.alias_info and arg.alias_info.is_write)
        rule = _rule_of(operator.name())
        properties = _Properties(rule, written, not written and rule is _never)
        _properties[id(operator)] = properties
    return properties


def _rule_of(name: str) -> Callable[[tuple[Any, ...]], bool]:
    """Return the `is_expensive` of an operator."""
    if name in _RIGHT_HAND_SIDE:
        right = _RIGHT_HAND_SIDE[name]
        return lambda args: bool(args[right].shape[1] <= args[right].shape[0])
    if name in _TRANSPOSED:
        matrix = _TRANSPOSED[name]
        return lambda args: bool(args[matrix].shape[0] <= args[matrix].shape[1])
    if name in _PACKED:
        shape = _PACKED[name]
        return lambda args: bool(args[shape][0] <= args[shape][1])
    return _always if name.startswith(ATTENTION_KERNELS) else _never


class SelectiveLayers:
    """Runs a model's layers, each with a dispatch mode until it turns out to need none."""

    def __init__(self) -> None:
        self._without_mode: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def run_layer(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `layer` on its arguments; the backward pass recomputes its cheap outputs."""
        module = _module_of(layer)
        has_mode = module not in self._without_mode
        forward, recompute = selective_contexts(has_mode=has_mode)
        output = run_recomputed(layer, *args, contexts=(forward, recompute), **kwargs)
        if has_mode and module is not None and forward.mode.is_all_marked:
            self._without_mode.add(module)
        return output


def _module_of(layer: Callable[..., Any]) -> torch.nn.Module | None:
    """Return the module whose forward transformers bound to `layer`; None for a compiled layer."""
    bound = inspect.unwrap(layer)
    if not isinstance(bound, partial):
        return None
    # A function with the module as its first argument, or in transformers 5.17 a bound method.
    first = bound.args[0] if bound.args else getattr(bound.func, "__self__", None)
    return first if isinstance(first, torch.nn.Module) else None


def selective_contexts(*, has_mode: bool = True) -> tuple[LayerPass, LayerPass]:
    """Return the contexts of a layer's forward pass and of its recompute.

    Without a dispatch mode only explicitly marked outputs are saved.
    """
    saved: list[tuple[Any, int | None]] = []
    return LayerPass(_SaveMode(saved), has_mode), LayerPass(_ReuseMode(saved), has_mode)


class _Running:
    """The mode of the layer that is being computed.

    Not a context variable: autograd may recompute a layer in a thread of its own.
    """

    mode: _LayerMode | None = None


def product_once(outputs: int, inputs: int, compute: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return compute(*args), a product from `inputs` to `outputs` features.

    It is saved as expensive if `outputs <= inputs`. A recompute returns the saved output without
    autograd history; only for use in the forward of autograd functions, where outputs have none.
    """
    mode = _Running.mode
    if mode is None or outputs > inputs:
        return compute(*args)
    return mode.compute_once(compute, args)


def attend_once(attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return attend(*args, **kwargs), whose fused attention operator is saved as expensive.

    Autograd computes its gradients as usual.
    """
    mode = _Running.mode
    return attend(*args, **kwargs) if mode is None else mode.attend(attend, args, kwargs)


class LayerPass:
    """The context of a layer's forward pass, or of its recompute."""

    def __init__(self, mode: _LayerMode, has_mode: bool) -> None:
        self.mode = mode
        self._has_mode = has_mode
        self._before: _LayerMode | None = None

    def __enter__(self) -> None:
        self._before, _Running.mode = _Running.mode, self.mode
        self.mode.restart()
        if self._has_mode:
            self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._has_mode:
            self.mode.__exit__(*error)
        _Running.mode = self._before


class _LayerMode(TorchDispatchMode):
    """Dispatch mode for the pass of one layer that is not compiled."""

    def __init__(self, saved: list[tuple[Any, int | None]]) -> None:
        super().__init__()
        self._saved = saved
        """outputs; with their version if the mode cannot see later changes, else None"""
        self.is_all_marked = False
        """whether every saved output of the last forward pass was marked explicitly"""
        self._is_on = False
        self._is_marking = False
        """whether the call is inside `attend_once`"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise PyTorch wraps every call to exclude it from compilation, which
        costs several times the call itself."""
        return False

    def __enter__(self) -> Any:
        self._is_on = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_on = False

    def restart(self) -> None:
        """Begin a pass of the layer."""
        raise NotImplementedError

    def compute_once(self, compute: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Return an expensive output, computed or saved before."""
        raise NotImplementedError

    def attend(
        self, attend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention in this mode; enter the mode if it is not active."""
        self._is_marking = True
        try:
            if self._is_on:
                return attend(*args, **kwargs)
            with self:
                return attend(*args, **kwargs)
        finally:
            self._is_marking = False


class _SaveMode(_LayerMode):
    """Saves expensive outputs in the order in which they are computed."""

    def __init__(self, saved: list[tuple[Any, int | None]]) -> None:
        super().__init__(saved)
        self._computes = False
        self._storages: set[int] = set()

    def restart(self) -> None:
        self.is_all_marked = True

    def compute_once(self, compute: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Compute and save an output, with its version, which reveals later changes."""
        self._computes = True
        try:
            output = compute(*args)
        finally:
            self._computes = False
        self._save(output, output._version)
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        properties = _properties.get(id(func)) or _properties_of(func)
        if properties.is_plain or self._computes:
            return func(*args, **kwargs) if kwargs else func(*args)
        if properties.written:
            written = (args[index] for index in properties.written if index < len(args))
            if not self._storages.isdisjoint(map(_storage_of, filter(_is_tensor, written))):
                raise _modified_output(func.name())
        output = func(*args, **(kwargs or {}))
        if properties.is_expensive(args):
            self._save(output, None)
            self.is_all_marked &= self._is_marking
        return output

    def _save(self, output: Any, version: int | None) -> None:
        # Detached: autograd is about to attach a history to the tensor itself.
        saved = _detach(output)
        self._saved.append((saved, version))
        if self._is_on:
            tensors = filter(_is_tensor, tree_leaves(saved))
            self._storages.update(map(_storage_of, tensors))


class _ReuseMode(_LayerMode):
    """Returns the saved outputs in the same order."""

    _next = 0

    def restart(self) -> None:
        self._next = 0

    def compute_once(self, compute: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        output: Tensor = self._next_saved()
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        properties = _properties.get(id(func)) or _properties_of(func)
        if properties.is_plain or not properties.is_expensive(args):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._next_saved()

    def _next_saved(self) -> Any:
        saved, version = self._saved[self._next]
        self._next += 1
        if version is not None and saved._version != version:
            raise _modified_output("an operator")
        return _detach(saved)


def _modified_output(operator: str) -> RuntimeError:
    return RuntimeError(
        f"recompute=selective: {operator} of a layer modifies a saved output in place; "
        "type recompute=full"
    )


def _detach(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return tree_map_only(Tensor, Tensor.detach, output)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _storage_of(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, which its views share; also works for fake tensors."""
    return int(tensor.untyped_storage()._cdata)
