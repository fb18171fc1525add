"""Recompute changes only what is saved: gradients are bit-identical to those without it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import call as run_plainly
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from app.model import activation_checkpointing as activations
from app.model import cpu
from app.model.activation_checkpointing import LayerInput, run_recomputed, selective_contexts
from app.model.adapter import AdapterConfig, FreezeConfig, FullConfig, Ia3Config, LoraConfig
from app.model.adapter.apply import apply_adapter
from app.model.attention import attention_implementation
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.base import ModelConfig, load_base
from app.model.quantization import QuantizationConfig
from app.model.recompute import MODES, RecomputeConfig, apply_recompute
from tests.families import tiny_family
from tests.model.test_experts import tiny_mixture
from tests.operators import Operators
from tests.tiny import move, tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

LENGTHS = [[7, 4, 5]]
SHAPE = (1, 16)


MAKERS: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "t5": tiny_t5,
    "bart": tiny_bart,
    "bloom": partial(tiny_family, "bloom"),
}


def prepared(base: Any, config: RecomputeConfig, adapter: AdapterConfig | None = None) -> Any:
    """Apply recompute and an adapter to `base`; all adapter weights are nonzero."""
    apply_recompute(base, config)
    adapter = adapter or LoraConfig(r=4, dropout=0.2)
    torch.manual_seed(3)
    return move(apply_adapter(base, adapter, half_precision=False).train(), scale=0.05)


def packed_inputs(model: Any) -> dict[str, Any]:
    """Return three documents in one row if the model supports packing."""
    ids = torch.randint(3, 64, SHAPE, generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :9]
        lengths = ([[7, 9]], [[4, 5]]) if kind == "t5" else ([[16]], [[9]])
        return inputs | pair_inputs(model, "sdpa", *lengths, ids, ids[:, :9])
    if kind == "bloom":
        return inputs
    positions = torch.cat([torch.arange(n) for n in LENGTHS[0]])[None].to(ids.device)
    inputs["position_ids"] = positions.expand(ids.shape)
    return inputs | attention_inputs(model, "sdpa", LENGTHS, ids)


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    inputs = packed_inputs(model)
    torch.manual_seed(11)  # of the dropout
    model(**inputs).logits.float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert expected and found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None and found[name] is not None, name
        assert torch.equal(found[name], gradient), name


def with_our_attention(base: Any) -> Any:
    base.set_attn_implementation(attention_implementation("sdpa"))
    return base


def check_gradients(
    mode: str, make: Callable[[], Any], adapter: AdapterConfig | None = None, *, half: bool = False
) -> None:
    """Compare the gradients of two passes; `selective` runs the second one without its mode."""
    found = {}
    for each in ("none", mode):
        model = prepared(make(), RecomputeConfig(mode=each), adapter)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            for _ in range(2):
                model.zero_grad()
                found[each] = gradients(model)
    assert_equal(found[mode], found["none"])


@pytest.mark.parametrize(
    ("mode", "kind"), [*itertools.product(["selective", "full"], MAKERS), ("offload", "llama")]
)
def test_gradients_equal_those_without_recompute(mode: str, kind: str) -> None:
    """Includes dropout, packed documents and a frozen base."""
    numbers = {"attn_pdrop": 0.1, "resid_pdrop": 0.1} if kind == "gpt2" else {}
    attend = (lambda base: base) if kind == "bloom" else with_our_attention
    check_gradients(mode, lambda: attend(MAKERS[kind](**numbers)))


ADAPTERS: dict[str, AdapterConfig] = {
    "full": FullConfig(),
    "ia3": Ia3Config(),
    "freeze": FreezeConfig(layers="top 1"),
    "dora": LoraConfig(r=4, dropout=0.1, use_dora=True),
    "top": LoraConfig(r=4, layers="top 1"),
    "lowest": LoraConfig(r=4, layers=[0]),
    "experts": LoraConfig(r=2, dropout=0.0, experts="lora"),
}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *itertools.product(["selective"], ADAPTERS),
        ("full", "freeze"),
        ("full", "lowest"),
        ("offload", "top"),
    ],
)
def test_gradients_of_every_adapter_are_unchanged(mode: str, kind: str) -> None:
    make = (lambda: tiny_mixture("qwen3_moe")) if kind == "experts" else tiny_llama
    check_gradients(mode, lambda: with_our_attention(make()), ADAPTERS[kind])


@pytest.mark.parametrize(("mode", "rank"), [("selective", 4), ("full", 16)])
def test_gradients_of_an_adapter_merged_in_the_forward_are_unchanged(
    mode: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SHAPE", (4, 16))  # full tiles, by which it is merged
    monkeypatch.setitem(globals(), "LENGTHS", LENGTHS * 4)
    check_gradients(mode, lambda: with_our_attention(tiny_llama()), LoraConfig(r=rank, dropout=0.0))


@pytest.mark.parametrize(
    ("mode", "method"), [("selective", "nf4"), ("selective", "int8"), ("full", "none")]
)
def test_gradients_in_half_precision_on_a_quantized_base_are_unchanged(
    method: str, mode: str, tmp_path: Path
) -> None:
    tiny_llama(hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    config, sdpa = ModelConfig(path=str(tmp_path)), attention_implementation("sdpa")
    quantization = QuantizationConfig(method=method)
    check_gradients(mode, lambda: load_base(config, sdpa, torch.bfloat16, quantization), half=True)


@pytest.mark.parametrize(
    ("mode", "every", "num_layers", "expected"),
    [
        ("full", 1, None, [2, 2, 2, 2]),
        ("selective", 2, None, [2, 1, 2, 1]),
        ("full", 2, 2, [2, 1, 1, 1]),
        ("selective", 1, 3, [2, 2, 2, 1]),
    ],
)
def test_layers_that_are_recomputed(
    mode: str, every: int, num_layers: int | None, expected: list[int]
) -> None:
    base = with_our_attention(tiny_llama(num_hidden_layers=4))
    model = prepared(base, RecomputeConfig(mode=mode, every=every, num_layers=num_layers))
    calls = [0] * 4
    for number, layer in enumerate(base.model.layers):

        def count(*_: Any, number: int = number) -> None:
            calls[number] += 1

        layer.input_layernorm.register_forward_hook(count)
    gradients(model)
    assert calls == expected


@torch.no_grad()
def test_selective_does_not_recompute_attention_and_narrow_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "attends_faster", lambda *_: False)  # one kernel, as on a GPU
    base = with_our_attention(tiny_llama(num_hidden_layers=1))
    model = prepared(base, RecomputeConfig(), LoraConfig(r=4, dropout=0.0)).eval()
    found = []
    for context in selective_contexts():
        shapes: Counter[tuple[int, int]] = Counter()

        def note(func: Any, args: Any, *_: Any, shapes: Any = shapes) -> None:
            if func is torch.ops.aten.mm.default:
                shapes[tuple(args[1].shape)] += 1

        with Operators(note) as operators, context:
            logits = model(**packed_inputs(model)).logits
        attends = any("scaled_dot_product" in name for name in operators.counts)
        found.append((logits, shapes, attends))
    (expected, every, attended), (logits, again, attends) = found
    assert torch.equal(logits, expected) and attended and not attends
    # What is left: the MLP's two first products, the head's, and the second halves of LoRA.
    assert again == {shape: count for shape, count in every.items() if shape[0] < shape[1]}
    assert again[base.config.hidden_size, base.config.intermediate_size] == 2


def test_selective_refuses_a_layer_that_modifies_a_saved_output() -> None:
    weight, hidden = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def layer(x: torch.Tensor) -> torch.Tensor:
        product = x @ weight
        product[:, 4:].mul_(2)  # as rotations of a part of it
        return product.exp()

    with pytest.raises(RuntimeError, match="type recompute=full"):
        run_recomputed(layer, hidden, contexts=selective_contexts())


class Doubled(torch.autograd.Function):
    """A product that is marked as expensive."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return activations.product_once(8, 8, torch.matmul, rows, weight)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return outer[0] @ weight.T, torch.zeros_like(weight)


@pytest.mark.parametrize("has_mode", [True, False])
def test_selective_refuses_a_layer_that_modifies_a_marked_output(has_mode: bool) -> None:
    weight, hidden = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def layer(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Doubled.apply(x, weight)
        product.view(-1)[:4].mul_(2)
        return product.exp()

    contexts = selective_contexts(has_mode=has_mode)
    with pytest.raises(RuntimeError, match="type recompute=full"):
        run_recomputed(layer, hidden, contexts=contexts).sum().backward()


class TestOffload:
    """Order of copies and waits, with test doubles for CUDA streams and copies."""

    @pytest.fixture
    def log(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        lines: list[str] = []

        class Stream:
            def __init__(self, name: str) -> None:
                self.name, self.count = name, 0

            def record_event(self) -> str:
                self.count += 1
                return f"{self.name}{self.count}"

            def wait_event(self, event: str) -> None:
                lines.append(f"{self.name} waits for {event}")

            def wait_stream(self, other: Stream) -> None:
                lines.append(f"{self.name} waits for {other.name}")

        class Within:
            def __init__(self, stream: Stream) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: Any) -> None: ...

        main = Stream("main")
        monkeypatch.setattr(activations, "is_on_host", lambda hidden: False)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
        monkeypatch.setattr(torch.cuda, "stream", Within)
        monkeypatch.setattr(
            LayerInput, "_copy_to_host", staticmethod(lambda source: Away(source.clone()))
        )
        return lines

    @pytest.mark.parametrize("kind", ["llama", "t5"])
    def test_gradients(self, log: list[str], kind: str) -> None:
        check_gradients("offload", lambda: with_our_attention(MAKERS[kind]()))

    def test_each_side_waits_for_the_other(self, log: list[str]) -> None:
        gradients(prepared(tiny_llama(), RecomputeConfig(mode="offload")))
        # Forward: a copy waits only for its own input (main1, main2), and the first input's memory
        # is released when its copy (side1) is done. Backward: the second input is still on the
        # device; the first is copied back after everything before the second layer.
        assert log == [
            "side waits for main1",
            "side waits for main2",
            "main waits for side1",
            "main waits for side2",
            "side waits for main",
            "main waits for side3",
        ]

    def test_no_input_below_the_lowest_adapter_is_offloaded(self, log: list[str]) -> None:
        adapter = LoraConfig(r=4, layers="top 2")
        gradients(
            prepared(tiny_llama(num_hidden_layers=4), RecomputeConfig(mode="offload"), adapter)
        )
        assert log[:3] == ["side waits for main3", "side waits for main4", "main waits for side1"]

    def test_on_the_cpu_it_runs_as_full_and_logs_it_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = prepared(tiny_llama(), RecomputeConfig(mode="offload"))
        with caplog.at_level(logging.INFO):
            gradients(model)
            gradients(model)
        lines = [record.message for record in caplog.records if "recompute" in record.message]
        assert lines == ["recompute: offload has no effect on the CPU, and runs as full"]


class Away:
    """A tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return self.tensor.to(device, copy=True)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
    def test_gradients_equal_those_without_recompute(self, mode: str, dtype: torch.dtype) -> None:
        # The second pass takes host memory that the first gave back.
        check_gradients(
            mode, lambda: with_our_attention(tiny_llama(num_hidden_layers=6)).to("cuda", dtype)
        )

    def test_peak_memory_falls_from_none_over_selective_and_full_to_offload(self) -> None:
        numbers = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 16}
        peaks = {}
        for mode in ("none", "selective", "full", "offload"):
            base = with_our_attention(tiny_llama(**numbers)).to("cuda", torch.bfloat16)
            model = prepared(base, RecomputeConfig(mode=mode))
            ids = torch.randint(3, 64, (64, 128), device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.sum().backward()
            torch.cuda.synchronize()
            peaks[mode] = torch.cuda.max_memory_allocated() - before
            del model, base
        assert peaks["none"] > peaks["selective"] > peaks["full"] > peaks["offload"]


Run = Callable[..., Any]


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


def values(seed: int, requires_grad: bool = True) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=random).requires_grad_(requires_grad)


def gradients_of_layer(run: Run, *, hidden_is_frozen: bool = False, times: int = 1) -> list[Tensor]:
    """Return gradients of inputs and weights after several forward passes, and random numbers."""
    layer = Layer()
    hidden, *others = (values(seed, seed > 0 or not hidden_is_frozen) for seed in range(4))
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
        gradients_of_layer(run, hidden_is_frozen=hidden_is_frozen, times=times)
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
        weight, hidden = values(0), values(1)
        with forward():
            output = run(lambda x, weight=weight: (x @ weight.T).exp(), hidden)
        with backward():
            output.float().sum().backward()
        assert weight.grad is not None and hidden.grad is not None
        found.append([weight.grad, hidden.grad])
    assert_same(*found)


def test_a_second_backward_pass_recomputes_again() -> None:
    layer, hidden = torch.nn.Linear(8, 8), values(0)
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
    run_recomputed(lambda x: layer(x).exp(), values(0)).sum().backward()
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
        output = run_recomputed(layer, values(0))
        assert all(one.expired() for one in inner)
        output.backward()
        assert len(inner) == 6
        assert all(one.expired() for one in inner)
    finally:
        gc.enable()


def test_an_input_modified_in_place_is_refused() -> None:
    hidden = values(0, requires_grad=False)
    weight = values(1)
    output = run_recomputed(lambda x: (x * weight).exp(), hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified in place after the layer ran"):
        output.sum().backward()


@pytest.mark.parametrize("second", [(4, 4), (4, 8, 1), None])
def test_a_layer_that_saves_different_or_fewer_tensors_is_refused(
    second: tuple[int, ...] | None,
) -> None:
    shapes = iter([(4, 8), second])

    def layer(hidden: Tensor) -> Tensor:
        if (shape := next(shapes)) is None:
            return hidden.sum()
        return hidden.flatten()[: torch.Size(shape).numel()].view(shape).exp().sum()

    output = run_recomputed(layer, values(0))
    with pytest.raises(RuntimeError, match="saved different tensors"):
        output.backward()
