"""Residual sums by the kernel of the norm that follows them, which adds up both gradients, too.

For layers whose forward is that of Llama, statement by statement, as that of 70 families is. A norm
reads a sum that was just written, and the sum is read again as the next residual; in the backward
pass, their two gradients are added. The last sum of a layer is joined with the next layer's first
norm, except where weights are there only while their layer runs. Recomputed layers are left alone:
transformers recomputes them in the forward that would be replaced.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from app.model.kernels import NORMED, Fused, FusedNorm, Gathered, agree
from app.model.layers import eval_mode, repeated_layers
from common.text import reason_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FusedLayer(Fused):
    """A layer of attention and feed-forward, each with a norm before and a sum after it."""

    following: FusedNorm | None = None
    """the first norm of the next layer, if this layer computes it"""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states for the next layer."""
        if args or not self.module.training:
            output: Tensor = type(self.module).forward(self.module, hidden_states, *args, **kwargs)
            return output
        return self.run(hidden_states, **kwargs)

    def run(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Compute the layer with fused sums."""
        # Each tensor is released as soon as by the layer's own forward.
        layer = self.module
        hidden, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        norm = layer.post_attention_layernorm.forward
        hidden, hidden_states = norm.add(hidden, hidden_states)
        hidden = layer.mlp(hidden)
        if self.following is None:
            return hidden_states + hidden
        hidden, hidden_states = self.following.add(hidden, hidden_states)
        # The norm finds it there; one that no layer takes is released with its sum.
        vars(hidden_states)[NORMED] = self.following, hidden
        return hidden_states


def fuse_sums(
    model: Any, gathered: Gathered, run: Callable[[], None], *, joins_layers: bool
) -> None:
    """Replace the forward of layers, after `fuse_layers`, if the results of one are equal; log it.

    `run` runs the model once, to record a layer's arguments. `joins_layers`: whether a layer may
    use the weights of the next one.
    """
    layers = [model.get_submodule(name) for name in repeated_layers(model)]
    fused = [
        FusedLayer(layer.post_attention_layernorm.forward.adds, layer)
        for layer in layers
        if _can_fuse(layer)
    ]
    if not fused or not _is_equal(fused[0], gathered, run):
        return
    for forward in fused:
        forward.module.forward = forward
    if joins_layers and len(fused) == len(layers):
        for forward, after in zip(fused, layers[1:], strict=False):
            forward.following = after.input_layernorm.forward
    log.info("kernels: residual sums in the norms of %d layers, proven equal", len(fused))


def _can_fuse(layer: Any) -> bool:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    is_alike = _statements(type(layer)) == _statements(LlamaDecoderLayer)
    if not is_alike or layer.gradient_checkpointing:
        return False
    norms = layer.input_layernorm, layer.post_attention_layernorm
    forwards = (vars(norm).get("forward") for norm in norms)
    return all(isinstance(each, FusedNorm) and each.adds is not None for each in forwards)


def _statements(kind: type) -> str:
    """Return the statements of a class's forward, without its docstring, in a comparable form."""
    source = inspect.getsource(inspect.unwrap(kind.forward))  # type: ignore[attr-defined]
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    skipped = ast.get_docstring(function) is not None
    return "\n".join(map(ast.dump, function.body[skipped:]))


def _is_equal(forward: FusedLayer, gathered: Gathered, run: Callable[[], None]) -> bool:
    """Compare a layer with and without fused sums, on the arguments that `run` gives it."""
    layer, calls = forward.module, []
    hook = layer.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    try:
        run()
    finally:
        hook.remove()
    ((hidden,), kwargs), *_ = calls
    random = torch.Generator(hidden.device).manual_seed(0)
    hidden = torch.empty_like(hidden).normal_(generator=random).detach().requires_grad_()
    forwards = partial(type(layer).forward, layer), forward.run
    try:
        with gathered(layer), eval_mode(layer):
            if agree([partial(compute, hidden, **kwargs) for compute in forwards], [hidden]):
                return True
            reason = "the results differ"
    except Exception as error:  # noqa: BLE001  kernel compilers raise any type
        reason = reason_of(error)
    log.warning("kernels: residual sums by PyTorch's operators (%s)", reason)
    return False
