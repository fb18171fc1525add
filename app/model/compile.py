"""torch.compile, one decoder layer at a time.

All layers of one shape share the graph compiled for the first. Attention stays outside, with its
own arguments: documents differ from batch to batch, and it is fused already. So does the head.
Recompute wraps a compiled layer instead of being inside: the backward pass must recompute what ran
in the forward pass, and a compiled layer with a checkpoint around an attention is not compiled at
all (pytorch issue 139989).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, get_compilation_metrics
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from app.model.layers import decoder_layers, why_not_compiled
from app.process.errors import UserError

log = logging.getLogger(__name__)

ONLY_FOR_ATTENTION = (
    "documents",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)
"""arguments that a layer passes on to its attention, different in every batch"""
OF_MODES = ("GLOBAL_STATE changed", "requires_grad mismatch")
"""the compiler's words for a graph of validation, or of a layer below all trained ones"""
BACKEND = "inductor"
MAX_SHOWN = 200


class CompiledLayers:
    """The compiled layers of one model, until `remove`.

    Names of modules and weights do not change. The first layer that cannot be compiled is logged;
    it and all later ones run uncompiled. UserError for encoder-decoder models, and models whose
    layers are not known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if problem := why_not_compiled(model.config.to_dict()):
            raise UserError(problem)
        self.failure: str | None = None
        self.for_attention: dict[str, Any] = {}
        self._attention = {name: ALL_ATTENTION_FUNCTIONS[name] for name in _attentions_of(model)}
        for name, function in self._attention.items():
            AttentionInterface.register(name, self._outside(function))
        names = decoder_layers(model, "trainer.compile=false")
        self._layers = [_CompiledLayer(model.get_submodule(name), self) for name in names]

    def fail(self, error: Exception) -> None:
        """Log, once, why layers run uncompiled from here on."""
        if self.failure is None:
            self.failure = _first_line(error)
            log.warning("compile: %s; the run continues without it", self.failure)

    def _outside(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """Exclude an attention from compiling, and give it the layer's own arguments."""

        @torch.compiler.disable
        def attend_outside(*args: Any, **kwargs: Any) -> Any:
            output, *others = attend(*args, **kwargs, **self.for_attention)
            # Graphs depend even on the stride of a single row: `view` makes it the same.
            return output.contiguous().view(output.shape), *others

        return attend_outside

    def remove(self) -> None:
        """Restore plain layers and attention."""
        for layer in self._layers:
            layer.remove()
        for name, function in self._attention.items():
            AttentionInterface.register(name, function)


class _CompiledLayer:
    """Replaces one layer's forward."""

    def __init__(self, layer: Any, owner: CompiledLayers) -> None:
        self._layer, self._owner = layer, owner
        self._plain: Callable[..., Any] = layer.forward
        self._compiled = torch.compile(self._plain, backend=_compile_whole)
        # A layer class with recompute would apply it inside.
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
        # From the start, even where half of it ran: a recompute repeats a whole forward pass.
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
        named = {name: kwargs[name] for name in kwargs if name not in ONLY_FOR_ATTENTION}
        self._owner.for_attention = {name: kwargs[name] for name in kwargs.keys() - named.keys()}
        try:
            return self._compiled(*args, **named)
        finally:
            self._owner.for_attention = {}


def num_compiled_graphs() -> int:
    """Return how many graphs this process has compiled."""
    return int(counters["stats"]["unique_graphs"])


def recompile_reason(count: int) -> str:
    """Return why the latest `count` graphs were recompiled."""
    reasons = [one.recompile_reason for one in get_compilation_metrics() if one.recompile_reason]
    # Each gives the guard that failed on the newest graph, which may be of another mode.
    telling = [one for one in reasons[-count:] if not any(words in one for words in OF_MODES)]
    found = telling or reasons[-1:] or ["a layer ran for the first time"]
    return _shortened(found[0])


def _compile_whole(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Compile forward and backward together, while the layer can still run uncompiled."""
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
    return compiled


def _attentions_of(model: torch.nn.Module) -> list[str]:
    """Return the names of the attention functions of the model's layers."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    names = {part.config._attn_implementation for part in parts}
    return sorted(names & set(ALL_ATTENTION_FUNCTIONS))


def _first_line(error: Exception) -> str:
    cause = getattr(error, "inner_exception", error)
    return _shortened(f"{type(cause).__name__}: {cause}")


def _shortened(text: str) -> str:
    line = " ".join(text.split("\n", 1)[0].split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
