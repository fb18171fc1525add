"""Compile the layers of a model one by one with torch.compile; a failure only leaves them plain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, get_compilation_metrics
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from app.model.layers import compile_error, decoder_layers
from common.errors import UserError

log = logging.getLogger(__name__)

_FOR_ATTENTION = ("documents", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""arguments that a layer only passes on to its attention; different in every batch"""
_MODE_CHANGES = ("GLOBAL_STATE changed", "requires_grad mismatch")
"""recompile reasons of an expected second graph: validation, or a layer below all trained ones"""
BACKEND = "inductor"
_MAX_SHOWN = 200
_LAST_COMPILING_STEP = 3
"""step by which every shape and mode has occurred"""


class CompiledLayers:
    """Compiles the layers of one model; `remove` restores them.

    Names of modules and weights do not change. The first failure to compile is logged, and all
    layers run uncompiled from then on. Raises UserError for an encoder-decoder, and ValueError for
    a model that does not declare the class of its layers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if problem := compile_error(model.config.to_dict()):
            raise UserError(problem)
        self.failure: str | None = None
        self.for_attention: dict[str, Any] = {}
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        kinds = {part.config._attn_implementation for part in parts}
        functions = ALL_ATTENTION_FUNCTIONS
        self._attention = {kind: functions[kind] for kind in sorted(kinds & set(functions))}
        for name, function in self._attention.items():
            AttentionInterface.register(name, self._outside(function))
        names = decoder_layers(model, "trainer.compile=false")
        self._layers = [_CompiledLayer(model.get_submodule(name), self) for name in names]

    def fail(self, error: Exception) -> None:
        """Disable compiled layers, and log the reason once."""
        if self.failure is None:
            cause = getattr(error, "inner_exception", error)
            self.failure = _shorten(f"{type(cause).__name__}: {cause}")
            log.warning("compile: %s; the run continues without it", self.failure)

    def _outside(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """Exclude an attention from compilation, and pass it the current layer's arguments."""

        @torch.compiler.disable
        def attend_outside(*args: Any, **kwargs: Any) -> Any:
            output, *others = attend(*args, **kwargs, **self.for_attention)
            # Graphs are specialized even on the stride of a dimension of size 1; `view` resets it.
            return output.contiguous().view(output.shape), *others

        return attend_outside

    def remove(self) -> None:
        for layer in self._layers:
            layer.remove()
        for name, function in self._attention.items():
            AttentionInterface.register(name, function)


class _CompiledLayer:
    def __init__(self, layer: Any, owner: CompiledLayers) -> None:
        self._layer, self._owner = layer, owner
        self._plain: Callable[..., Any] = layer.forward
        self._compiled = torch.compile(self._plain, backend=_compile_whole)
        # The layer class would apply recompute inside the compiled forward.
        self._recompute: Callable[..., Any] | None = None
        if getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = False
            self._recompute = layer._gradient_checkpointing_func
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._owner.failure is None:
            try:
                return self._run(self._run_compiled, *args, **kwargs)
            except TorchDynamoException as error:
                self._owner.fail(error)
        # Run the whole layer again, even if part of it ran: recompute repeats whole forwards.
        return self._run(self._plain, *args, **kwargs)

    def remove(self) -> None:
        del self._layer.forward
        if self._recompute is not None:
            self._layer.gradient_checkpointing = True

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._recompute is not None and self._layer.training and torch.is_grad_enabled():
            return self._recompute(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        named = {name: kwargs[name] for name in kwargs if name not in _FOR_ATTENTION}
        self._owner.for_attention = {name: kwargs[name] for name in kwargs.keys() - named.keys()}
        try:
            return self._compiled(*args, **named)
        finally:
            self._owner.for_attention = {}


def num_compiled_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def recompile_reason(count: int) -> str:
    """Return why the latest `count` graphs were recompiled."""
    metrics = get_compilation_metrics()
    reasons = [each.recompile_reason for each in metrics if each.recompile_reason]
    # A reason is the guard that failed on the newest graph, which may belong to another mode.
    unexpected = [
        reason for reason in reasons[-count:] if not any(mode in reason for mode in _MODE_CHANGES)
    ]
    candidates = unexpected or reasons[-1:] or ["a layer ran for the first time"]
    return _shorten(candidates[0])


def _compile_whole(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile forward and backward at once, so that a failure can still fall back to eager."""
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
    return compiled


def _shorten(text: str) -> str:
    line = " ".join(text.split("\n", 1)[0].split())
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."


class Compilation(L.Callback):
    """Compile the model's layers, warn of recompilation, and restore the layers at the end."""

    def __init__(self) -> None:
        self.layers: CompiledLayers | None = None
        self.num_compiled_graphs: int | None = None
        self.has_warned = False

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compile, unless the sanity check before did.

        After the probes of `on_fit_start`, whose inputs have other shapes.
        """
        if self.layers is None:
            self.layers = CompiledLayers(pl_module.model)

    on_sanity_check_start = on_train_start

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Restore the layers if compiling failed; warn once if later steps compile again."""
        if self.layers is None:
            return
        if self.layers.failure is not None:
            self.on_fit_end()
        elif trainer.global_step >= _LAST_COMPILING_STEP:
            self._warn(trainer.global_step)

    def on_fit_end(self, *_: Any) -> None:
        """Restore the layers: the plain model is saved and evaluated."""
        if self.layers is not None:
            self.layers.remove()
            self.layers = None

    on_exception = on_fit_end

    def _warn(self, step: int) -> None:
        now, before = num_compiled_graphs(), self.num_compiled_graphs
        if before is not None and now > before and not self.has_warned:
            self.has_warned = True
            log.warning(
                "compile: layers were recompiled at step %d, although no new shapes were expected "
                "(%s); recompiling delays the step: type trainer.compile=false if it happens again",
                step,
                recompile_reason(now - before),
            )
        self.num_compiled_graphs = now
