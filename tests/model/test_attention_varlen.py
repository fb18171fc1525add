"""PyTorch's variable-length attention equals attention by document.

Its kernel runs only on GPUs. Here, substitutes with the kernel's signatures check the arguments
that it gets and refuse what it does not support; the tests marked `gpu` run the kernel itself.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import _registry, current_flash_attention_impl
from torch.nn.attention import varlen as torch_varlen
from transformers.integrations import flash_attention

from app.model.attention import attention_implementation, varlen
from app.model.attention.inputs import attention_inputs
from tests.families import tiny_family
from tests.tiny import random_ids, tiny_llama

PACKED = [[5, 9, 3, 30, 7, 20], [40, 1, 2]]
PADDED = [[80], [33]]
TOKENS = 80
WHOLE = [[TOKENS], [TOKENS]]
HALVES = [[40, 40], [40, 40]]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor], longest: tuple[int, int],
    scale: float | None, window: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Attention [tokens, heads, head_dim] by its formula, one document after another."""
    assert ends[0] is ends[1] and ends[0].dtype == torch.int32
    lengths = ends[0].diff().tolist()
    assert longest == (max(lengths), max(lengths)) and sum(lengths) == len(query) == len(key)
    assert query.dtype == key.dtype == value.dtype and query.shape[2] == value.shape[2]
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    outputs = []
    for q, k, v in zip(*(part.split(lengths) for part in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q)).unsqueeze(0)
        if window[0] >= 0:
            scores = scores.masked_fill(distance > window[0], -torch.inf)
        if window[1] >= 0:
            scores = scores.masked_fill(-distance > window[1], -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)


def varlen_of_all_releases(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    *, is_causal: bool = False, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert enable_gqa or query.shape[1] == key.shape[1]
    window = (-1, 0) if is_causal else window_size
    return attend(query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), scale, window)


def release_without(*missing: str) -> Callable[..., Any]:
    """Return the kernel of a release that does not have these arguments."""
    signature = inspect.signature(varlen_of_all_releases)
    kept = [each for each in signature.parameters.values() if each.name not in missing]
    signature = signature.replace(parameters=kept)

    def kernel(*given: Any, **named: Any) -> torch.Tensor:
        bound = signature.bind(*given, **named)
        return varlen_of_all_releases(*bound.args, **bound.kwargs)

    kernel.__signature__ = signature  # type: ignore[attr-defined]
    return kernel


varlen_2_10 = release_without("scale", "window_size", "enable_gqa")
varlen_2_11 = release_without("is_causal", "enable_gqa")
varlen_2_13 = release_without("is_causal")


def mistral(**numbers: Any) -> Any:
    return tiny_family("mistral", **({"sliding_window": 8} | numbers)).eval()


def granite() -> Any:
    return tiny_family("granite", attention_multiplier=0.7).eval()


def latent() -> transformers.DeepseekV3ForCausalLM:
    """A model whose values have a smaller head dimension than its keys."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    widths = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2}
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 32}
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**shape, **widths, **heads, **ranks)
    ).eval()


def run(
    model: transformers.LlamaForCausalLM, backend: str, lengths: list[list[int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of the documents' tokens without padding, and the gradients of a loss over them."""
    ids = random_ids(len(lengths), TOKENS).to(model.device)
    model.set_attn_implementation(attention_implementation(backend))
    model.zero_grad()
    inputs = attention_inputs(model, backend, lengths, ids)
    rows = [torch.cat([torch.arange(n) for n in (*row, TOKENS - sum(row))]) for row in lengths]
    positions = torch.stack(rows).to(model.device)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
    own = torch.cat([row[: sum(n)] for row, n in zip(logits, lengths, strict=True)])
    own.float().logsumexp(-1).sum().backward()
    return own.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(
    one: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("release", "make"),
    [
        *itertools.product([varlen_2_10, varlen_2_13], [granite, latent]),
        (varlen_2_11, tiny_llama),
        (varlen_2_11, mistral),
    ],
)
def test_logits_and_gradients_equal_attention_by_document(
    release: Callable[..., Any], make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", release)
    model = make()
    for lengths in (PACKED, PADDED, HALVES):
        assert_same(run(model, "varlen", lengths), run(model, "sdpa", lengths))


@pytest.mark.parametrize(
    ("lengths", "window", "runs_kernel"),
    [
        (WHOLE, None, False),
        (HALVES, None, False),
        (WHOLE, 8, True),
        ([[TOKENS], [30, 50]], None, True),
        ([[TOKENS], [79]], None, True),
    ],
)
def test_boundaries_and_windows_need_the_variable_length_kernel(
    lengths: list[list[int]], window: int | None, runs_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    @wraps(varlen_2_13)
    def note(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return varlen_2_13(*given, **named)

    monkeypatch.setattr(torch_varlen, "varlen_attn", note)
    model = mistral(sliding_window=window)
    assert_same(run(model, "varlen", lengths), run(model, "sdpa", lengths))
    assert bool(calls) == runs_kernel


@pytest.mark.parametrize("make", [tiny_llama, mistral])
def test_flash_attention_gets_the_same_boundaries(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a substitute for the function through which transformers calls the packages."""

    def substitute(
        query: Any, key: Any, value: Any, attention_mask: Any, *,
        is_causal: bool, softmax_scale: float, sliding_window: int | None,
        cu_seq_lens_q: Any, cu_seq_lens_k: Any, max_length_q: int, max_length_k: int, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        assert is_causal and attention_mask is None
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        parts = (part.flatten(0, 1) for part in (query, key, value))
        ends, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        output = attend(*parts, ends, longest, softmax_scale, window)
        return output.unflatten(0, query.shape[:2])

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", substitute)
    monkeypatch.setattr(
        transformers.PreTrainedModel, "get_correct_attn_implementation", lambda _, name, *__: name
    )
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda _, name, **__: name,
    )
    model = make()
    for backend in ("flash2", "flash3"):
        assert_same(run(model, backend, PACKED), run(model, "sdpa", PACKED))


def test_attention_by_document_with_narrow_values_equals_eager() -> None:
    """`tests/parity/test_attention_families.py` has the other shapes."""
    model = latent()
    assert_same(run(model, "sdpa", PACKED), run(model, "eager", PACKED))


@pytest.mark.parametrize(
    ("variant", "instead"),
    [
        ({"softcap": 50.0}, "attention=eager"),
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, "attention=eager"),
        ({"dropout": 0.1}, "attention=sdpa"),
    ],
)
def test_an_unsupported_variant_is_refused(variant: dict[str, Any], instead: str) -> None:
    part, kernel = torch.zeros(1, 4, 6, 8), varlen.VarlenKernel.of(varlen_2_13)
    with pytest.raises(ValueError, match=f"attention=varlen .* type {instead}"):
        varlen.attend_by_boundaries(
            torch.nn.Identity(), part, part, part, None, kernel=kernel, **variant
        )


@pytest.mark.parametrize("window", [None, 3])
def test_the_installed_kernel_accepts_our_arguments(window: int | None) -> None:
    kernel = varlen.VarlenKernel.installed()
    if window is not None and not kernel.takes_window:
        pytest.skip("this PyTorch has no window")
    assert set(inspect.signature(kernel.function).parameters) >= {"cu_seq_q", "max_k", "return_aux"}
    query, key, value = (
        torch.empty(12, heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    ends = torch.empty(3, device="meta", dtype=torch.int32)
    output = kernel(query, key, value, ends, 7, is_causal=True, window=window, scaling=0.3)
    assert output.shape == query.shape
    output.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape


class Handle:
    def remove(self) -> None: ...


@pytest.mark.parametrize("behaviour", ["right", "wrong", "broken"])
def test_flash_attention_4_is_activated_if_it_is_equal(
    behaviour: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @wraps(varlen_2_13)
    def dispatch(query: Any, key: Any, *given: Any, **named: Any) -> torch.Tensor:
        """Compute like the kernel that was activated last, as PyTorch does."""
        assert query.shape[1] == 4 * key.shape[1]
        if current_flash_attention_impl() == "FA4" and behaviour == "broken":
            raise AssertionError("(head_dim, head_dim_v)=(300, 300) is not supported on SM90")
        output = varlen_2_13(query, key, *given, **named)
        return output * 1.1 if current_flash_attention_impl() and behaviour == "wrong" else output

    monkeypatch.setattr(torch_varlen, "varlen_attn", dispatch)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", Handle)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with caplog.at_level("INFO"):
        varlen.activate_flash4([16, 32], 4, torch.device("cpu"))
    is_taken = current_flash_attention_impl() == "FA4"
    varlen.restore_flash2()
    assert current_flash_attention_impl() is None
    assert is_taken == (behaviour == "right")
    message = {
        "right": "varlen runs FlashAttention 4, proven equal",
        "wrong": "varlen runs FlashAttention 2 instead of 4 (its results differ)",
        "broken": "instead of 4 ((head_dim, head_dim_v)=(300, 300) is not supported on SM90)",
    }
    assert message[behaviour] in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_flash_attention_4_equals_2(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    if torch.cuda.get_device_capability(device)[0] not in varlen.FLASH4_CAPABILITIES:
        pytest.skip("this GPU has no FlashAttention 4")
    with caplog.at_level("INFO"):
        varlen.activate_flash4([64, 128], 4, device)
    varlen.restore_flash2()
    if "backward unsupported: windowed attention" in caplog.text:
        pytest.skip("PyTorch 2.11 takes causal documents for a window, of which it has no backward")
    assert "varlen runs FlashAttention 4, proven equal" in caplog.text


@pytest.mark.gpu
def test_on_a_gpu_documents_of_equal_lengths_equal_the_variable_length_kernel() -> None:
    torch.manual_seed(0)
    device, lengths = torch.device("cuda"), torch.tensor([0, 1024, 2048], dtype=torch.int32)
    parts = [
        torch.randn(2, heads, 1024, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    kernel, layer = varlen.VarlenKernel.installed(), torch.nn.Identity()
    dense, _ = varlen.attend_by_boundaries(layer, *parts, None, kernel=kernel)
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    by_boundaries = kernel(
        *flat, lengths.to(device), 1024, is_causal=True, window=None, scaling=None
    )
    towards = torch.randn_like(by_boundaries)
    expected = [by_boundaries, *torch.autograd.grad(by_boundaries, parts, towards)]
    ours = [dense.flatten(0, 1), *torch.autograd.grad(dense.flatten(0, 1), parts, towards)]
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).float().norm() <= varlen.TOLERANCE * other.float().norm()
