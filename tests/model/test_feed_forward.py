"""Feed-forwards of long rows in chunks: the gradients of whole ones, and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from app.model import kernels
from app.model.adapter import AdapterConfig, FullConfig, LoraConfig
from app.model.base import ModelConfig
from app.model.layers import repeated_layers
from tests.strategy.context_training import LLAMA
from tests.tiny import built, move

TOKENS, CHUNK = 256, 24
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "layer_types": ["full_attention"] * 3}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 8,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}  # fmt: skip
MOE = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4}


def build(numbers: dict[str, Any], adapter: AdapterConfig, mode: str = "full") -> Any:
    config = ModelConfig(from_scratch=True, architecture=numbers)
    return move(built(config, adapter=adapter, recompute=mode), scale=0.02)


def step(model: Any, *, half: bool = False) -> tuple[dict[str, Tensor], int]:
    """Return loss and gradients of a step, and the most features of a feed-forward at a time."""
    torch.manual_seed(1)
    ids = torch.randint(3, 128, (2, TOKENS // 2))
    inner: list[int] = []
    hooks = [
        module.register_forward_hook(lambda _, args, output: inner.append(output.numel()))
        for name, module in model.named_modules()
        if name.endswith(("mlp.up_proj", "mlp.c_fc"))
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return found | {"loss": loss.detach()}, max(inner)


@pytest.mark.parametrize(
    ("numbers", "adapter", "half"),
    [
        (LLAMA, FullConfig(), False),
        (LLAMA, LoraConfig(r=4, dropout=0.0), True),
        (GEMMA, LoraConfig(r=4, dropout=0.0), False),  # a norm behind the feed-forward
        (GPT2, FullConfig(), True),
    ],
)
def test_chunks_give_the_gradients_of_whole_rows(
    numbers: dict[str, Any], adapter: AdapterConfig, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FEED_FORWARD_TOKENS", CHUNK)
    model = build(numbers, adapter)
    whole, most = step(model, half=half)
    kernels.chunk_feed_forwards(model)
    part, chunk = step(model, half=half)
    assert part.keys() == whole.keys()
    for name, expected in whole.items():
        bound = (2e-2 if half else 4e-6) * expected.abs().max()
        assert (part[name] - expected).abs().max() <= bound, name
    assert chunk * TOKENS == most * CHUNK


def test_restored_layers_still_compute_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an evaluation at the end of a run are as long; fused kernels are gone by then."""
    model = build(LLAMA, FullConfig()).eval()
    module = model.get_submodule(repeated_layers(model)[0]).mlp
    module.forward = lambda hidden: 0 * hidden  # a kernel
    kernels.chunk_feed_forwards(model)
    kernels.unfuse_layers(model)
    tokens: list[int] = []
    module.up_proj.register_forward_hook(lambda _, args, __: tokens.append(args[0].shape[1]))
    hidden = torch.randn(2, 64, 64)
    with torch.no_grad():
        whole = module(hidden)
        monkeypatch.setattr(kernels, "FEED_FORWARD_TOKENS", CHUNK)
        assert torch.allclose(module(hidden), whole, atol=1e-6) and whole.abs().max() > 0
    assert tokens == [64, *[CHUNK] * 5, 128 - 5 * CHUNK]


def test_a_pass_without_dropout_keeps_the_kernel_of_chunks() -> None:
    model = build(LLAMA, FullConfig())
    module = model.get_submodule(repeated_layers(model)[0]).mlp
    module.forward = kernels.FusedGate(lambda gate, up: 2 * gate * up, module, "silu")
    kernels.chunk_feed_forwards(model)
    hidden = torch.randn(2, 64, 64)
    trained = module(hidden)
    with kernels.without_dropout(model):
        assert torch.equal(module(hidden), trained)


def test_dropout_of_chunks_is_drawn_again_in_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "FEED_FORWARD_TOKENS", CHUNK)
    model = build(LLAMA, LoraConfig(r=4, dropout=0.5))
    kernels.chunk_feed_forwards(model)
    layer = model.get_submodule(repeated_layers(model)[0]).mlp
    hidden = torch.randn(1, TOKENS, 64, requires_grad=True)

    def run() -> Tensor:
        torch.manual_seed(3)
        return layer(hidden).square().sum()

    gradient = torch.autograd.grad(run(), hidden)[0]
    direction = torch.randn_like(hidden) * 1e-2
    with torch.no_grad():
        hidden += direction
        above = run()
        hidden -= 2 * direction
        below = run()
    assert ((above - below) / 2).item() == pytest.approx(
        (gradient * direction).sum().item(), rel=2e-2
    )


@pytest.mark.parametrize(("numbers", "mode"), [(LLAMA, "none"), (MOE, "full")])
def test_experts_and_layers_that_are_not_recomputed_stay_whole(
    numbers: dict[str, Any], mode: str
) -> None:
    model = build(numbers, FullConfig(), mode)
    kernels.chunk_feed_forwards(model)
    assert not any(
        isinstance(vars(m).get("forward"), kernels.ChunkedFeedForward) for m in model.modules()
    )
