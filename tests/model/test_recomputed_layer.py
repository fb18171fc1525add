"""Recomputed layers: equal gradients, random numbers and hooks; errors for unsupported layers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from app.model.activation_checkpointing import run_recomputed

Run = Callable[..., Any]


def run_plainly(layer: Run, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


class Layer(torch.nn.Module):
    """Takes tensors as positional and keyword arguments and in a tuple; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(0.3)

    def forward(
        self, hidden: Tensor, scale: Tensor, *, pair: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        inner = self.drop(torch.tanh(self.first(hidden) * scale))
        return self.second(inner) + pair[0] * hidden, inner.sin() * pair[1]


def numbers(seed: int, requires_grad: bool = True) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=random).requires_grad_(requires_grad)


def gradients(run: Run, *, hidden_is_frozen: bool = False, times: int = 1) -> list[Tensor]:
    """Return gradients of inputs and weights after several forward passes, and random numbers."""
    layer = Layer()
    hidden, *others = (numbers(seed, seed > 0 or not hidden_is_frozen) for seed in range(4))
    torch.manual_seed(5)
    total = torch.zeros(())
    for _ in range(times):
        scale, *pair = others
        first, second = run(layer, hidden, scale, pair=tuple(pair))
        total = total + first.square().sum() + second.sum()
    next_numbers = [torch.rand(2)]
    total.backward()
    given = [*others] if hidden_is_frozen else [hidden, *others]
    grads = [one.grad for one in (*given, *layer.parameters())]
    assert all(grad is not None for grad in grads)
    return [*(grad for grad in grads if grad is not None), *next_numbers, torch.rand(2)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("hidden_is_frozen", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_and_random_state_are_unchanged(hidden_is_frozen: bool, times: int) -> None:
    found, expected = (
        gradients(run, hidden_is_frozen=hidden_is_frozen, times=times)
        for run in (run_recomputed, run_plainly)
    )
    assert_same(found, expected)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("forward", [contextlib.nullcontext, autocast])
@pytest.mark.parametrize("backward", [contextlib.nullcontext, autocast])
def test_the_recompute_uses_the_autocast_of_the_forward_pass(forward: Any, backward: Any) -> None:
    found = []
    for run in (run_recomputed, run_plainly):
        weight, hidden = numbers(0), numbers(1)
        with forward():
            output = run(lambda x, weight=weight: (x @ weight.T).exp(), hidden)
        with backward():
            output.float().sum().backward()
        assert weight.grad is not None and hidden.grad is not None
        found.append([weight.grad, hidden.grad])
    assert_same(*found)


class Counted(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_the_recompute_stops_at_the_last_saved_tensor() -> None:
    output = run_recomputed(lambda x: x.sin().neg(), numbers(0))
    with Counted() as counted:
        output.sum().backward()
    assert counted.names.count("aten::neg") == 1  # its gradient
    output = run_recomputed(lambda x: x.exp().sin(), numbers(0))
    with Counted() as counted:
        output.sum().backward()
    assert counted.names.count("aten::exp") == 1
    assert "aten::sin" not in counted.names


def test_without_gradients_nothing_is_recomputed() -> None:
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad(), Counted() as counted:
        output = run_recomputed(layer, numbers(0))
    assert counted.names.count("aten::addmm") == 1
    assert not output.requires_grad


def test_a_device_without_autocast_is_supported() -> None:
    weight = torch.empty(8, 8, device="meta", requires_grad=True)
    hidden = torch.empty(4, 8, device="meta")
    run_recomputed(lambda x: (x @ weight).exp(), hidden).sum().backward()
    assert weight.grad is not None and weight.grad.is_meta


def test_a_second_backward_pass_recomputes_again() -> None:
    layer, hidden = torch.nn.Linear(8, 8), numbers(0)
    output = run_recomputed(lambda x: layer(x).exp(), hidden).sum()
    output.backward(retain_graph=True)
    assert hidden.grad is not None
    once = hidden.grad.clone()
    output.backward()
    assert torch.equal(hidden.grad, 2 * once)


def test_each_hook_of_a_weight_is_called_once() -> None:
    """DDP, ZeRO and our gradient clipping read gradients in such hooks."""
    layer, calls = torch.nn.Linear(8, 8), []
    layer.weight.register_hook(lambda grad: calls.append("gradient"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    run_recomputed(lambda x: layer(x).exp(), numbers(0)).sum().backward()
    assert calls == ["gradient", "accumulated"]


def test_no_activation_of_the_layer_is_held() -> None:
    inner: list[StorageWeakRef] = []

    def layer(hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = hidden.sin().cos()  # each saves its input
            inner.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden.square().sum()

    gc.disable()  # what waits for the collector counts, too
    try:
        output = run_recomputed(layer, numbers(0))
        assert all(one.expired() for one in inner)
        output.backward()
        assert len(inner) == 6
        assert all(one.expired() for one in inner)
    finally:
        gc.enable()


def test_recomputed_tensors_are_released_once_they_are_used() -> None:
    inner: list[StorageWeakRef] = []
    alive: list[int] = []

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *outer: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            alive.append(sum(not one.expired() for one in inner))
            return outer[0] * x.cos()

    def layer(hidden: Tensor) -> Tensor:
        for _ in range(2):
            hidden = Sine.apply(hidden)
            inner.append(StorageWeakRef(hidden.untyped_storage()))
        output: Tensor = Sine.apply(hidden)
        return output.sum()

    gc.disable()  # what waits for the collector counts, too
    try:
        run_recomputed(layer, numbers(0)).backward()
    finally:
        gc.enable()
    assert alive == [2, 1, 0]


def test_an_input_modified_in_place_is_refused() -> None:
    hidden = numbers(0, requires_grad=False)
    weight = numbers(1)
    output = run_recomputed(lambda x: (x * weight).exp(), hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after the layer ran"):
        output.sum().backward()


@pytest.mark.parametrize("second", [(4, 4), (4, 8, 1)])
def test_a_layer_that_saves_different_tensors_is_refused(second: tuple[int, ...]) -> None:
    shapes = iter([(4, 8), second])

    def layer(hidden: Tensor) -> Tensor:
        shape = next(shapes)
        return hidden.flatten()[: torch.Size(shape).numel()].view(shape).exp().sum()

    output = run_recomputed(layer, numbers(0))
    with pytest.raises(RuntimeError, match="saved different tensors"):
        output.backward()


def test_a_layer_that_saves_fewer_tensors_is_refused() -> None:
    times = iter([2, 1])

    def layer(hidden: Tensor) -> Tensor:
        for _ in range(next(times)):
            hidden = hidden.sin()
        return hidden

    output = run_recomputed(layer, numbers(0))
    with pytest.raises(RuntimeError, match="saved different tensors"):
        output.sum().backward()
