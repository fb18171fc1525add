"""Fused kernels replace layers only if their results and gradients are equal."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaMLP

from app.model import kernels
from app.model.accumulation import accumulated_linear, accumulating_in_products
from app.model.adapter import LoraConfig, apply_adapter
from app.model.head import fuse_head, run_probe
from app.model.recompute import RecomputeConfig, apply_recompute
from tests.families import tiny_family
from tests.model.test_head import assert_near, gradients_of, losses_of
from tests.model.test_head import by_torch as cross_entropy_by_torch
from tests.operators import Operators
from tests.tiny import move, random_ids, tiny_llama

gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool
) -> Tensor:
    """Reference of Liger's RMS norm, with the same arguments."""
    assert not in_place
    scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (hidden.float() * scale * (weight.float() + offset)).to(hidden.dtype)
    return (hidden.float() * scale).to(hidden.dtype) * weight


def add_rms_norm(hidden: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Reference of Liger's norm of a sum."""
    total = residual + hidden
    return rms_norm(total, *rest), total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Reference of Liger's SwiGLU."""
    return silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Reference of Liger's GEGLU."""
    return gelu(gate, approximate="tanh") * up


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Reference of our kernel."""
    return tuple(Turn.apply(each, cos, sin) for each in (query, key))


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, each: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(each, cos, sin)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return turn(outer, cos, -sin), None, None


def turn(each: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = each.chunk(2, dim=-1)
    cos, sin = (table.unsqueeze(1).chunk(2, dim=-1)[0] for table in (cos, sin))
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Wrong(torch.autograd.Function):
    """Correct forward, wrong gradient, which a comparison of logits would not detect."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return outer * up, outer * silu(gate)


def install_references(
    patch: pytest.MonkeyPatch, rms_norm: Any = rms_norm, swiglu: Any = swiglu, rope: Any = rope
) -> None:
    """Replace Liger's package and our rope by the references above, and pretend to be on a GPU."""
    package = types.ModuleType("liger_kernel")
    package.__spec__ = importlib.util.spec_from_loader("liger_kernel", None)
    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_rms_norm, functional.liger_swiglu = rms_norm, swiglu  # type: ignore[attr-defined]
    functional.liger_fused_add_rms_norm = add_rms_norm  # type: ignore[attr-defined]
    functional.liger_geglu = geglu  # type: ignore[attr-defined]
    own = types.ModuleType("app.model.rope_kernel")
    own.rotate = rope  # type: ignore[attr-defined]
    for name, module in (
        ("liger_kernel", package),
        ("liger_kernel.transformers", types.ModuleType("liger_kernel.transformers")),
        ("liger_kernel.transformers.functional", functional),
        ("app.model.rope_kernel", own),
    ):
        patch.setitem(sys.modules, name, module)
    patch.setattr(kernels, "_is_on_gpu", lambda model: True)


@pytest.fixture
def references(install: Callable[..., None]) -> None:
    """Replace the kernels by correct references."""
    install()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace the kernels by references; a rope that a test has replaced is restored after it."""
    yield partial(install_references, monkeypatch)
    for source in list(sys.modules.values()):
        if isinstance(replaced := vars(source).get(kernels.ROPE), kernels.FusedRope):
            setattr(source, kernels.ROPE, replaced.original)


def fused_of(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules with a fused forward."""
    kinds = (kernels.FusedNorm, kernels.FusedGate, kernels.FusedLinear)
    return [n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), kinds)]


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_fused_layers_are_equal_and_can_be_restored(
    references: None, adapter: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny_llama()
    if adapter == "lora":
        model = apply_adapter(model, LoraConfig(r=4, dropout=0.5), half_precision=False).eval()
        move(model)  # while B is zero, dropout would change nothing
    names = model.state_dict().keys()
    total, _, _, grads = losses_of(model)
    with caplog.at_level(logging.INFO):
        kernels.fuse_layers(model.train())
    assert model.training
    assert "Liger's for 2 LlamaMLP, 5 LlamaRMSNorm, proven equal" in caplog.text
    assert len(fused_of(model)) == 7
    assert model.state_dict().keys() == names
    assert losses_of(model.eval())[0].item() == total.item()  # measured by its own layers
    for name in fused_of(model):  # and not the adapter's dropout
        model.get_submodule(name).training = True
    fused_total, _, _, fused_grads = losses_of(model)
    assert fused_total.item() == pytest.approx(total.item(), rel=1e-6)
    assert_near(fused_grads, grads, 1e-5)
    kernels.unfuse_layers(model)
    assert fused_of(model) == []
    assert losses_of(model)[0].item() == total.item()


def trained(model: Any, ids: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of rows."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def packed_losses(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of a row of two documents."""
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    return trained(model, random_ids(1, 12), position_ids=positions)


@pytest.mark.parametrize(("kind", "mode"), [("qwen3", "selective"), ("gemma3_text", "none")])
def test_rope_is_replaced_by_one_kernel(
    references: None, kind: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_family(kind)
    apply_recompute(model.train(), RecomputeConfig(mode=mode))
    loss, grads = packed_losses(model)
    own = vars(sys.modules[type(model).__module__])[kernels.ROPE]
    with caplog.at_level(logging.INFO):
        kernels.fuse_layers(model, run=lambda: run_probe(model, "sdpa", torch.device("cpu")))
    home = sys.modules[type(model).__module__]
    assert isinstance(vars(home)[kernels.ROPE], kernels.FusedRope)
    assert "rope, proven equal" in caplog.text
    turned, turned_grads = packed_losses(model)
    assert turned.item() == pytest.approx(loss.item(), rel=1e-6)
    assert_near(turned_grads, grads, 1e-5)
    with torch.no_grad():
        assert torch.equal(vars(home)[kernels.ROPE](*angles())[0], own(*angles())[0])  # evaluated
    with kernels.without_dropout(model):  # compared with a training step
        assert vars(home)[kernels.ROPE].runs_without_gradients
    assert not vars(home)[kernels.ROPE].runs_without_gradients
    kernels.unfuse_layers(model)
    assert vars(home)[kernels.ROPE] is own


def angles() -> tuple[Tensor, ...]:
    query = torch.arange(48.0).view(1, 2, 3, 8)
    return query, query, torch.full((1, 3, 8), 0.6), torch.full((1, 3, 8), 0.8)


@pytest.mark.parametrize("wrong", ["values", "gradients"])
def test_a_rope_that_differs_is_not_replaced_and_logged(
    install: Callable[..., None], wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    def differs(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if wrong == "values":
            return rope(query, key, cos, -sin)
        with torch.no_grad():
            turned = [one.detach() for one in rope(query.clone(), key.clone(), cos, sin)]
        return tuple(a - a.detach() + b for a, b in zip((query, key), turned, strict=True))

    install(rope=differs)
    model = tiny_llama().train()
    own = vars(sys.modules[type(model).__module__])[kernels.ROPE]
    with caplog.at_level(logging.INFO):
        kernels.fuse_layers(model, run=lambda: run_probe(model, "sdpa", torch.device("cpu")))
    assert vars(sys.modules[type(model).__module__])[kernels.ROPE] is own
    assert "the model's own for rope, which differs" in caplog.text


def test_each_norm_gets_its_variant(references: None) -> None:
    model = tiny_family("gemma2")
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight)
    kernels.fuse_layers(model)
    assert model.model.norm.forward.offset == 1.0
    exact = tiny_family("gemma2", hidden_activation="gelu")  # not by tanh, as Liger's
    kernels.fuse_layers(exact)
    assert fused_of(exact) and not any("mlp" in name for name in fused_of(exact))


@pytest.mark.parametrize(
    ("norm", "gate", "left"),
    [
        (lambda x, w, eps, *rest: rms_norm(x, w, eps + 0.1, *rest), swiglu, "LlamaRMSNorm"),
        (rms_norm, lambda gate, up: silu(gate) * up * 1.001, "LlamaMLP"),
        (lambda *given: rms_norm(*given).double(), swiglu, "LlamaRMSNorm"),
        (rms_norm, lambda gate, up: silu(gate) * up / 0, "LlamaMLP"),
        (rms_norm, Wrong.apply, "LlamaMLP"),
    ],
)
def test_a_kernel_that_differs_is_not_used_and_logged(
    install: Callable[..., None], norm: Any, gate: Any, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(norm, gate)
    model = tiny_llama()
    with caplog.at_level(logging.INFO):
        kernels.fuse_layers(model)
    assert f"the model's own for {left}, which differs" in caplog.text
    classes = {type(model.get_submodule(name)).__name__ for name in fused_of(model)}
    assert classes == {"LlamaRMSNorm", "LlamaMLP"} - {left}


def test_gradients_of_trainable_weights_are_compared(install: Callable[..., None]) -> None:
    def of_frozen_weights(hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return rms_norm(hidden, weight.detach() + 0 * weight, *rest)

    install(of_frozen_weights)
    model = tiny_llama()
    kernels.fuse_layers(model)
    assert len(fused_of(model)) == 2
    kernels.unfuse_layers(model)
    kernels.fuse_layers(model.requires_grad_(False))
    assert len(fused_of(model)) == 7


@pytest.mark.parametrize("mode", ["none", "selective", "full", "chunks"])
def test_products_add_the_gradients_of_later_micro_batches(
    mode: str, references: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(
        attention_bias=True, hidden_act="gelu", tie_word_embeddings=False
    )  # whose gate no kernel computes
    if mode == "chunks":
        monkeypatch.setattr(kernels, "FEED_FORWARD_TOKENS", 8)
    apply_recompute(model, RecomputeConfig(mode="full" if mode == "chunks" else mode))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        with Operators() as operators, accumulating_in_products():
            for tokens in (12, 16, 20):
                model(input_ids=random_ids(2, tokens)).logits.square().mean().backward()
        counted.append((operators.counts["aten::add_.Tensor"], operators.counts["aten::addmm_"]))
        return gradients_of(model)

    counted: list[tuple[int, int]] = []
    exact = gradients()
    kernels.fuse_layers(model.train(), accumulates=True)
    if mode == "chunks":
        kernels.chunk_feed_forwards(model)
    assert len([m for m in model.modules() if is_accumulated(m)]) == 15
    assert_near(gradients(), exact, 1e-6)
    # Both later micro-batches, and the head; a feed-forward in chunks sums their gradients first.
    (plain_adds, no_products), (adds, products) = counted
    assert (no_products, products) == (0, 2 * (9 if mode == "chunks" else 15))
    assert adds == plain_adds - products
    kernels.unfuse_layers(model)
    assert not any(map(is_accumulated, model.modules()))


def is_accumulated(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, kernels.FusedLinear) and forward.kernel is accumulated_linear


@pytest.mark.parametrize("way", ["right", "wrong", "missing"])
def test_the_loss_kernel_is_used_if_it_is_equal(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(logits: Tensor, *given: Any, writes_gradient: bool) -> None:
        cross_entropy_by_torch(logits, *given, writes_gradient=writes_gradient)
        logits.mul_(1.1)

    module = types.ModuleType("app.model.loss_kernel")
    if way != "missing":
        module.cross_entropy_ = wrong if way == "wrong" else cross_entropy_by_torch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "_is_on_gpu", lambda device: True)
    model = tiny_llama()
    fuse_head(model)
    with caplog.at_level("INFO"):
        kernels.fuse_layers(model)
    reasons = {"wrong": "(it differs)", "missing": "cannot import name"}
    if way == "right":
        assert model.lm_head.kernel is cross_entropy_by_torch
        assert "loss:" not in caplog.text
    else:
        assert model.lm_head.kernel is None
        assert "loss: by PyTorch's operators" in caplog.text
        assert reasons[way] in caplog.text
    kernels.unfuse_layers(model)
    assert model.lm_head.kernel is None


def test_a_broken_package_is_logged_once_and_not_used(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("0 active drivers ([]). There should only be one.\nmore lines")

    install(broken)
    model = tiny_llama()
    with caplog.at_level(logging.INFO):
        kernels.fuse_layers(model)
    assert "liger-kernel is installed, but broken: 0 active drivers" in caplog.text
    assert fused_of(model) == []


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", torch.float32), ("gemma2", torch.float32), ("qwen3", torch.bfloat16)],
)
def test_norms_are_fused_on_a_cpu(kind: str, dtype: torch.dtype) -> None:
    model = tiny_family(kind).eval().to(dtype)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight)
    model.requires_grad_(False)
    for weight in model.model.norm.parameters():
        weight.requires_grad_(True)
    total, _, _, grads = losses_of(model.train())
    kernels.fuse_layers(model)
    assert {type(model.get_submodule(name)) for name in fused_of(model)} == {type(model.model.norm)}
    fused_total, _, _, fused_grads = losses_of(model)
    bound = 1e-5 if dtype == torch.float32 else 0.05
    assert fused_total.item() == pytest.approx(total.item(), rel=bound)
    assert_near(fused_grads, grads, bound)


@pytest.mark.parametrize(("kind", "tokens"), [("llama", 16), ("qwen2", 64)])
def test_trainable_linear_layers_are_fused_on_a_cpu(kind: str, tokens: int) -> None:
    model = tiny_family(kind).train()
    ids = torch.randint(0, 32, (1, tokens), generator=torch.Generator().manual_seed(0))
    _, own = trained(model, ids)
    kernels.fuse_layers(model)
    assert sum("proj" in name for name in fused_of(model)) == 7 * len(model.model.layers)
    assert_near(trained(model, ids)[1], own, 1e-5)


@pytest.mark.parametrize(
    ("family", "on_gpu"),
    [("bamba", True), ("diffllama", True), ("qwen3_next", True), ("bamba", False)],
)
def test_losses_and_gradients_of_every_architecture_are_equal(
    install: Callable[..., None], family: str, on_gpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if on_gpu:
        install()
    model, ids = tiny_family(family).train(), random_ids(2, 64)
    _, own = trained(model, ids)
    with caplog.at_level(logging.INFO):
        kernels.fuse_layers(model)
    assert fused_of(model) and "broken" not in caplog.text
    assert_near(trained(model, ids)[1], own, 1e-4)


class Limited(LlamaMLP):
    """A gated MLP that clamps large values, as in DeepSeek-V4 and GLM-5."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=7.0), self.up_proj(x).clamp(-7.0, 7.0)
        return self.down_proj(self.act_fn(gate) * up)


def test_a_clamped_gate_is_not_fused(references: None) -> None:
    model: Any = tiny_llama()
    model.model.layers[0].mlp.__class__ = Limited
    kernels.fuse_layers(model)
    assert "model.layers.0.mlp" not in fused_of(model)
    assert "model.layers.1.mlp" in fused_of(model)


@pytest.mark.gpu
def test_products_add_gradients_on_a_gpu() -> None:
    weight = torch.nn.Parameter(torch.randn(256, 128, device="cuda", dtype=torch.bfloat16))
    exact = torch.zeros(256, 128, device="cuda")
    for seed in range(3):
        torch.manual_seed(seed)
        rows = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        outer = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        exact += outer.float().T @ rows.detach().float()
        with accumulating_in_products():
            accumulated_linear(rows, weight, None).backward(outer)
        assert rows.grad is not None and weight.grad is not None
        assert (rows.grad - outer @ weight).norm() <= 1e-2 * rows.grad.norm()
    assert (weight.grad.float() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [64, 16])
def test_rope_is_equal_on_a_gpu(rotated: int) -> None:
    from app.model.rope_kernel import rotate

    inputs = [
        torch.randn(2, 40, heads, 64, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
        for heads in (6, 2)
    ]
    angles = torch.randn(1, 40, rotated // 2, device="cuda").repeat(1, 1, 2)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    ways = (apply_rotary_pos_emb, rotate)
    assert kernels.agree([partial(way, *inputs, *tables) for way in ways], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_liger_kernels_are_used_and_equal_in_training(dtype: torch.dtype, adapter: str) -> None:
    pytest.importorskip("liger_kernel")
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 688}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = tiny_llama(**sizes, initializer_range=0.05).to("cuda", dtype)
    if adapter == "lora":
        model = apply_adapter(model, LoraConfig(r=4, dropout=0.0), half_precision=True)
    ids = random_ids(2, 64).cuda()
    _, own = trained(model, ids)
    kernels.fuse_layers(model)
    assert len(fused_of(model)) == 13
    assert_near(trained(model, ids)[1], own, 20 * torch.finfo(dtype).eps)
