"""Recompute changes only what is saved: gradients are bit-identical to those without it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BloomConfig, BloomForCausalLM

from app.model import activation_checkpointing as activations
from app.model import cpu
from app.model.activation_checkpointing import (
    LayerInput,
    OffloadedInputs,
    _ReuseMode,
    _SaveMode,
    run_recomputed,
    selective_contexts,
)
from app.model.adapter import (
    AdapterConfig,
    FreezeConfig,
    FullConfig,
    Ia3Config,
    LoraConfig,
    apply_adapter,
)
from app.model.attention import attention_implementation
from app.model.attention.inputs import attention_inputs, pair_inputs
from app.model.base import ModelConfig, load_base
from app.model.quantization import QuantizationConfig
from app.model.recompute import MODES, RecomputeConfig, apply_recompute
from tests.tiny import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

RECOMPUTING = [mode for mode in MODES if mode != "none"]
"""recompute modes; offload runs as full without a GPU"""
LENGTHS = [[7, 4, 5]]
SHAPE = (1, 16)


def tiny_bloom(**_: Any) -> BloomForCausalLM:
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


MAKERS: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "t5": tiny_t5,
    "bart": tiny_bart,
    "bloom": tiny_bloom,
}


def prepared(base: Any, config: RecomputeConfig, adapter: AdapterConfig | None = None) -> Any:
    """Apply recompute and an adapter to `base`; all adapter weights are nonzero."""
    apply_recompute(base, config)
    adapter = adapter or LoraConfig(r=4, dropout=0.2)
    torch.manual_seed(3)
    model = apply_adapter(base, adapter, half_precision=False).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


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
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS[0]])[None].to(ids.device)
    return inputs | attention_inputs(model, "sdpa", LENGTHS, ids)


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    inputs = packed_inputs(model)
    torch.manual_seed(11)  # of the dropout
    model(**inputs).logits.float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(
    found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> None:
    assert expected
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert found[name] is not None, name
        assert torch.equal(found[name], gradient), name


def with_our_attention(base: Any) -> Any:
    base.set_attn_implementation(attention_implementation("sdpa"))
    return base


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*itertools.product(["selective", "full"], MAKERS), ("offload", "llama")],
)
def test_gradients_equal_those_without_recompute(mode: str, kind: str) -> None:
    """Includes dropout, packed documents and a frozen base."""
    numbers = {"attn_pdrop": 0.1, "resid_pdrop": 0.1} if kind == "gpt2" else {}
    found = {}
    for each in ("none", mode):
        base = MAKERS[kind](**numbers)
        if kind != "bloom":
            base = with_our_attention(base)
        found[each] = gradients(prepared(base, RecomputeConfig(mode=each)))
    assert_equal(found[mode], found["none"])


ADAPTERS: dict[str, AdapterConfig] = {
    "full": FullConfig(),
    "ia3": Ia3Config(),
    "freeze": FreezeConfig(layers="top 1"),
    "dora": LoraConfig(r=4, dropout=0.1, use_dora=True),
    "top": LoraConfig(r=4, layers="top 1"),
    "lowest": LoraConfig(r=4, layers=[0]),
}


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*itertools.product(["selective"], ADAPTERS), ("full", "freeze"), ("full", "lowest")],
)
def test_gradients_of_every_adapter_are_unchanged(mode: str, kind: str) -> None:
    found = {
        each: gradients(
            prepared(with_our_attention(tiny_llama()), RecomputeConfig(mode=each), ADAPTERS[kind])
        )
        for each in ("none", mode)
    }
    assert_equal(found[mode], found["none"])


@pytest.mark.parametrize(("mode", "rank"), [("selective", 4), ("full", 16)])
def test_gradients_of_an_adapter_merged_in_the_forward_are_unchanged(mode: str, rank: int) -> None:
    ids = torch.randint(3, 64, (2, 64), generator=torch.Generator().manual_seed(1))
    found = {}
    for each in ("none", mode):
        adapter = LoraConfig(r=rank, dropout=0.0)
        model = prepared(tiny_llama(), RecomputeConfig(mode=each), adapter)
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        found[each] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert_equal(found[mode], found["none"])


@pytest.mark.parametrize(
    ("mode", "method"), [("selective", "nf4"), ("selective", "int8"), ("full", "nf4")]
)
def test_gradients_on_a_quantized_base_are_unchanged(
    method: str, mode: str, tmp_path: Path
) -> None:
    tiny_llama(hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    found = {}
    for each in ("none", mode):
        base = load_base(
            ModelConfig(path=str(tmp_path)),
            attention_implementation("sdpa"),
            torch.bfloat16,
            QuantizationConfig(method=method),
        )
        model = prepared(base, RecomputeConfig(mode=each))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[each] = gradients(model)
    assert_equal(found[mode], found["none"])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_half_precision_and_its_short_attention(mode: str) -> None:
    found = {}
    for each in ("none", mode):
        base = with_our_attention(tiny_llama()).to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[each] = gradients(prepared(base, RecomputeConfig(mode=each)))
    assert_equal(found[mode], found["none"])


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


@pytest.mark.parametrize(
    ("mode", "which"),
    [("full", {"every": 2}), ("selective", {"num_layers": 2}), ("offload", {"num_layers": 1})],
)
def test_some_recomputed_layers_give_the_same_gradients(mode: str, which: dict[str, int]) -> None:
    found = [
        gradients(prepared(with_our_attention(tiny_llama(num_hidden_layers=3)), config))
        for config in (RecomputeConfig(), RecomputeConfig(mode=mode, **which))
    ]
    assert_equal(found[1], found[0])


class Products(TorchDispatchMode):
    """Counts the matrix products by shape [in, out], and the attentions that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int]] = Counter()
        self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.shapes[tuple(args[1].shape)] += 1
        self.attentions += "scaled_dot_product" in func.name()
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_selective_does_not_recompute_attention_and_narrow_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "attends_faster", lambda *_: False)  # one kernel, as on a GPU
    base = with_our_attention(tiny_llama(num_hidden_layers=1))
    model = prepared(base, RecomputeConfig(), LoraConfig(r=4, dropout=0.0)).eval()
    forward, recompute = selective_contexts()
    first, second = Products(), Products()
    with first, forward:
        expected = model(**packed_inputs(model)).logits
    with second, recompute:
        logits = model(**packed_inputs(model)).logits
    assert torch.equal(logits, expected)
    assert first.attentions > 0 == second.attentions
    hidden, inner = base.config.hidden_size, base.config.intermediate_size
    # What is left: the MLP's two first products, the head's, and the second halves of LoRA.
    assert second.shapes == {
        shape: count for shape, count in first.shapes.items() if shape[0] < shape[1]
    }
    assert second.shapes[hidden, inner] == 2
    assert (inner, hidden) in first.shapes.keys() - second.shapes.keys()


def num_kept() -> int:
    gc.collect()
    return sum(type(one) is _ReuseMode for one in gc.get_objects())


def test_selective_saves_nothing_below_the_lowest_adapter() -> None:
    base = with_our_attention(tiny_llama(num_hidden_layers=4))
    model = prepared(base, RecomputeConfig(mode="selective"), LoraConfig(r=4, layers="top 1"))
    others = num_kept()  # of a graph that a test before, which failed, may hold
    logits = model(**packed_inputs(model)).logits
    assert num_kept() - others == 1
    logits.sum().backward()


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("context", [contextlib.nullcontext, FakeTensorMode])
def test_selective_refuses_a_layer_that_modifies_a_saved_output(first: int, context: Any) -> None:
    with context(), pytest.raises(RuntimeError, match="type recompute=full"):
        weight = torch.randn(8, 8, requires_grad=True)
        hidden = torch.randn(4, 8)

        def layer(x: torch.Tensor) -> torch.Tensor:
            product = x @ weight
            product[:, first:].mul_(2)  # as rotations of a part of it
            return product.exp()

        run_recomputed(layer, hidden, contexts=selective_contexts())


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the operators that pass through the modes of forward pass and recompute."""
    calls: Counter[str] = Counter()
    for kind in (_SaveMode, _ReuseMode):

        def count(self: Any, func: Any, *rest: Any, plain: Any = kind.__torch_dispatch__) -> Any:
            calls[func.name()] += 1
            return plain(self, func, *rest)

        monkeypatch.setattr(kind, "__torch_dispatch__", count)
    return calls


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_layers_with_marked_outputs_run_without_a_mode_from_the_second_pass_on(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode costs as much per operation as launching it."""
    adapter = LoraConfig(r=4, dropout=dropout)
    base = with_our_attention(tiny_llama())
    expected = gradients(prepared(base, RecomputeConfig(mode="none"), adapter))
    model = prepared(with_our_attention(tiny_llama()), RecomputeConfig(mode="selective"), adapter)
    calls, computed = count_calls(monkeypatch), []
    for _ in range(2):
        model.zero_grad()
        calls.clear()
        with Products() as products:
            assert_equal(gradients(model), expected)
        computed.append((products.shapes, products.attentions))
    assert computed[1][1] == computed[0][1]
    assert sum(computed[1][0].values()) <= sum(computed[0][0].values())
    attentions = {name for name in calls if name.startswith(activations.ATTENTION_KERNELS)}
    # An attention's own operators, which are few, and nothing of the rest.
    assert not attentions or len(calls) < 10
    assert not any("addmm" in name or name == "aten::mul.Tensor" for name in calls)


def test_a_layer_with_products_outside_adapters_keeps_its_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = LoraConfig(r=4, dropout=0.0, target_modules=["q_proj"])
    model = prepared(tiny_llama(), RecomputeConfig(mode="selective"), adapter)
    calls, found = count_calls(monkeypatch), []
    for _ in range(2):
        model.zero_grad()
        calls.clear()
        gradients(model)
        found.append(calls.copy())
    assert found[1] == found[0]
    assert any("mm" in name or "linear" in name for name in calls)


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


OF_BITSANDBYTES: dict[str, Callable[..., Any]] = {
    "bitsandbytes::gemm_4bit": lambda args: tuple(args[2]),
    "bitsandbytes::int8_scaled_mm": lambda args: tuple(args[1].shape),
    "bitsandbytes::int8_mixed_scaled_mm": lambda args: tuple(args[2].shape),
}
"""functions from the arguments of bitsandbytes' products to the shape [out, in] of the matrix"""


class QuantizedProducts(TorchDispatchMode):
    """Records the shapes [out, in] of quantized matrices in the products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in OF_BITSANDBYTES:
            self.shapes[OF_BITSANDBYTES[func.name()](args)] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_selective_does_not_recompute_narrow_quantized_products(
    method: str, tmp_path: Path
) -> None:
    tiny_llama(num_hidden_layers=1, tie_word_embeddings=False).save_pretrained(tmp_path)
    base = load_base(
        ModelConfig(path=str(tmp_path)),
        "sdpa",
        torch.bfloat16,
        QuantizationConfig(method=method),
    )
    # Where it trains, int8 is no product of its own on a CPU.
    model = prepared(base, RecomputeConfig(), LoraConfig(r=4, dropout=0.0)).eval()
    forward, recompute = selective_contexts()
    first, second = QuantizedProducts(), QuantizedProducts()
    ids = torch.arange(16)[None]
    with first, forward:
        expected = model(ids).logits
    with second, recompute:
        logits = model(ids).logits
    assert torch.equal(logits, expected)
    assert first.shapes.total() == 7
    assert second.shapes == {shape: n for shape, n in first.shapes.items() if shape[0] > shape[1]}
    assert second.shapes.total() == 2  # the MLP's two first products


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

    def test_gradients_and_what_is_on_the_device(self, log: list[str]) -> None:
        expected = gradients(prepared(tiny_llama(num_hidden_layers=5), RecomputeConfig()))
        with watch_inputs() as inputs:
            found = gradients(
                prepared(tiny_llama(num_hidden_layers=5), RecomputeConfig(mode="offload"))
            )
        assert_equal(found, expected)
        assert inputs.most_on_device == 2

    @pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
    def test_other_architectures(self, log: list[str], kind: str) -> None:
        models = [
            prepared(with_our_attention(MAKERS[kind]()), RecomputeConfig(mode=mode))
            for mode in ("none", "offload")
        ]
        expected, found = (gradients(model) for model in models)
        assert_equal(found, expected)

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
        base = tiny_llama(num_hidden_layers=4)
        with watch_inputs() as inputs:
            gradients(
                prepared(base, RecomputeConfig(mode="offload"), LoraConfig(r=4, layers="top 2"))
            )
        assert inputs.num_offloaded == 2

    def test_a_second_backward_pass_recomputes_again(self, log: list[str]) -> None:
        model = prepared(tiny_llama(num_hidden_layers=3), RecomputeConfig(mode="offload"))
        loss = model(**packed_inputs(model)).logits.square().mean()
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.manual_seed(1)
        first = torch.autograd.grad(loss, trained, retain_graph=True)
        second = torch.autograd.grad(loss, trained)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

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


class watch_inputs:
    """Counts the offloaded layer inputs, and the most that are on the device at once."""

    def __init__(self) -> None:
        self.most_on_device, self.num_offloaded = 0, 0
        self.inputs: list[LayerInput] = []
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> watch_inputs:
        watch = self
        construct = LayerInput.__init__
        offload, reload = LayerInput.start_offload, LayerInput.start_reload

        def counted_init(layer_input: LayerInput, *args: Any) -> None:
            construct(layer_input, *args)
            watch.inputs.append(layer_input)
            watch.count()

        def counted_offload(layer_input: LayerInput) -> None:
            watch.num_offloaded += 1
            offload(layer_input)

        def counted_reload(layer_input: LayerInput) -> None:
            reload(layer_input)
            watch.count()

        self.patch.setattr(LayerInput, "__init__", counted_init)
        self.patch.setattr(LayerInput, "start_offload", counted_offload)
        self.patch.setattr(LayerInput, "start_reload", counted_reload)
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()

    def count(self) -> None:
        on_device = sum(each._on_device is not None for each in self.inputs)
        self.most_on_device = max(self.most_on_device, on_device)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mode", RECOMPUTING)
    def test_gradients_equal_those_without_recompute(self, mode: str, dtype: torch.dtype) -> None:
        found = {}
        for each in ("none", mode):
            base = with_our_attention(tiny_llama(num_hidden_layers=6)).to("cuda", dtype)
            model = prepared(base, RecomputeConfig(mode=each))
            torch.cuda.manual_seed(5)
            for _ in range(3):  # the second step takes host memory that the first gave back
                model.zero_grad()
                found[each] = gradients(model)
        assert_equal(found[mode], found["none"])

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

    def test_an_offloaded_input_is_restored_exactly(self) -> None:
        inputs = OffloadedInputs()
        weight = torch.randn(256, 256, device="cuda", requires_grad=True)
        hidden = torch.randn(4, 1024, 256, device="cuda")
        states = hidden
        for _ in range(8):
            states = inputs.run_layer(lambda x: torch.tanh(x @ weight), states)
        states.square().sum().backward()
        found, weight.grad = weight.grad, None
        states = hidden
        for _ in range(8):
            states = torch.tanh(states @ weight)
        states.square().sum().backward()
        assert torch.equal(found, weight.grad)


def test_pytorch_does_not_wrap_the_dispatch_modes() -> None:
    """PyTorch would wrap every call to exclude it from compilation, which is costly."""
    for each in selective_contexts():
        call = type(each.mode).__torch_dispatch__
        assert call.__code__.co_filename == activations.__file__
        assert not hasattr(call, "_torchdynamo_orig_callable")
