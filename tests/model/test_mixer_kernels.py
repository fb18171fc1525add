"""Kernels that support document boundaries get them; other mixers run document by document.

The kernels run only on GPUs. Here, substitutes with the signatures of their packages record their
arguments, and compute by transformers' own reference; the test marked `gpu` runs installed ones.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from app.model.adapter import LoraConfig, apply_adapter
from app.model.attention.inputs import attention_inputs
from app.model.attention.mixer_search import missing_kernels
from app.model.attention.mixers import CHUNK, MixerForward, causal_conv1d, triton_causal_conv1d
from app.model.attention.probes import check_isolation, hide_boundaries_from_mixers
from app.model.layers import disable_bypassing_kernels
from common.installation import install_extra
from tests.families import tiny_family
from tests.model.test_mixers import alone, ids_and_positions, isolated_model, packed
from tests.tiny import built

hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
DOCUMENT_LENGTHS = [13, 7, 17, 3, 21, 9, 10]
"""document lengths of both joined rows; the padding of a row is a document too"""


def cut(
    recorded: list[list[int]], lengths: list[int] | None, tensors: list[Tensor], axis: int
) -> Any:
    """Split a kernel's inputs into documents if it gets boundaries, and record the lengths."""
    if lengths is None:
        return [tensors]
    assert all(len(each) == 1 for each in tensors)
    recorded.append(lengths)
    return zip(*(each.split(lengths, axis) for each in tensors), strict=True)


def lengths_of(numbers: Tensor | None) -> list[int] | None:
    """Return the document lengths of a `seq_idx`, int32 [1, tokens]."""
    if numbers is None:
        return None
    assert numbers.dtype == torch.int32 and numbers.is_contiguous() and len(numbers) == 1
    return numbers[0].unique_consecutive(return_counts=True)[1].tolist()


def convolution(plain: Any, recorded: list[list[int]]) -> Any:
    def causal_conv1d_fn(
        x: Tensor, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> Tensor:
        assert seq_idx is None or x.stride(1) == 1  # the kernel's own condition
        documents = cut(recorded, lengths_of(seq_idx), [x], 2)
        return torch.cat([plain(one, weight, bias, activation) for (one,) in documents], 2)

    return causal_conv1d_fn


def delta_rule(plain: Any, recorded: list[list[int]]) -> Any:
    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        lengths = None if cu_seqlens is None else cu_seqlens.diff().tolist()
        documents = cut(recorded, lengths, [q, k, v, g, beta], 1)
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return torch.cat([plain(*one, **options)[0] for one in documents], 1), None

    return chunk_gated_delta_rule


def scan(plain: Any, recorded: list[list[int]]) -> Any:
    def mamba_chunk_scan_combined(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None,
        dt_bias: Any = None, seq_idx: Any = None, dt_softplus: bool = False,
        dt_limit: Any = (0.0, float("inf")),
    ) -> Tensor:  # fmt: skip
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        documents = cut(recorded, lengths_of(seq_idx), [x, dt, B, C], 1)
        outputs = [plain(x, t, A, b, c, chunk_size, **options) for x, t, b, c in documents]
        return torch.cat(outputs, 1)

    return mamba_chunk_scan_combined


def fused(plain: Any, recorded: list[list[int]]) -> Any:
    """Mamba 2 in one kernel, which also reads the weights of the modules after the scan."""
    plain_conv, plain_scan = (
        inspect.unwrap(plain.__globals__[name])
        for name in ("causal_conv1d_fn", "mamba2_chunk_scan")
    )
    conv, chunks = convolution(plain_conv, recorded), scan(plain_scan, recorded)

    def mamba_split_conv1d_scan_combined(
        zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Any, dt_bias: Tensor, A: Tensor,
        D: Tensor, chunk_size: int, seq_idx: Any = None, dt_limit: Any = (0.0, float("inf")),
        activation: str = "silu", rmsnorm_weight: Any = None, rmsnorm_eps: float = 1e-6,
        outproj_weight: Any = None, outproj_bias: Any = None, headdim: int = 0, ngroups: int = 1,
    ) -> Tensor:  # fmt: skip
        FUSED.append(outproj_weight)
        heads, (rows, tokens, _) = len(A), zxbcdt.shape
        states = (zxbcdt.shape[-1] - 2 * heads * headdim - heads) // 2
        sizes = [heads * headdim, heads * headdim + 2 * states, heads]
        gate, mixed, dt = zxbcdt.split(sizes, -1)
        mixed = conv(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation)
        x, B, C = mixed.transpose(1, 2).split([heads * headdim, states, states], -1)
        x, B, C = (
            one.reshape(rows, tokens, number, -1)
            for one, number in ((x, heads), (B, ngroups), (C, ngroups))
        )
        options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
        y = chunks(x, dt, A, B, C, chunk_size, seq_idx=seq_idx, **options)
        y = y.reshape(rows, tokens, -1) * functional.silu(gate)
        if rmsnorm_weight is not None:
            groups = y.unflatten(-1, (ngroups, -1))
            size = groups.square().mean(-1, keepdim=True) + rmsnorm_eps
            y = rmsnorm_weight * (groups * size.rsqrt()).flatten(-2)
        return functional.linear(y, outproj_weight, outproj_bias)

    return mamba_split_conv1d_scan_combined


def inner(plain: Any, recorded: list[list[int]]) -> Any:
    """Mamba 1 in one kernel without boundaries, which reads the weights of all inner modules."""
    conv, scan_all = (
        inspect.unwrap(plain.__globals__[name])
        for name in ("causal_conv1d_fn", "mamba_selective_scan")
    )

    def mamba_inner_fn(
        xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Any, x_proj_weight: Tensor,
        delta_proj_weight: Tensor, out_proj_weight: Tensor, out_proj_bias: Any, A: Tensor,
        B: Any = None, C: Any = None, D: Any = None, delta_bias: Any = None,
        delta_softplus: bool = True,
    ) -> Tensor:  # fmt: skip
        FUSED.append(out_proj_weight)
        x, z = xz.chunk(2, dim=1)
        x = conv(x, conv1d_weight.squeeze(1), conv1d_bias, "silu")
        rank, states = delta_proj_weight.shape[1], A.shape[1]
        projected = functional.linear(x.transpose(1, 2), x_proj_weight)
        delta, B, C = projected.split([rank, states, states], -1)
        delta, B, C = delta_proj_weight @ delta.mT, B.mT, C.mT
        y = scan_all(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
        return functional.linear(y.mT, out_proj_weight, out_proj_bias)

    return mamba_inner_fn


FUSED: list[Tensor] = []
"""weight of the output projection in each call of a fused kernel"""
SUBSTITUTES = {
    "causal_conv1d_fn": ("causal_conv1d", convolution),
    "torch_chunk_gated_delta_rule": ("fla", delta_rule),
    "mamba2_chunk_scan": ("mamba_ssm", scan),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", fused),
    "mamba_inner_fn": ("mamba_ssm", inner),
}
NUM_KERNELS = {"bamba": 2, "lfm2": 1, "mamba2": 2, "qwen3_5_text": 2, "zamba2": 2}
"""number of kernels that a mixer calls: a convolution, and a scan"""


def install(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Install the substitutes as packages; return the list of document lengths they will record."""
    module, recorded = sys.modules[type(model).__module__], list[list[int]]()
    for reference, (package, build) in SUBSTITUTES.items():
        if (wrapped := vars(module).get(reference)) is None:
            continue
        plain = inspect.unwrap(wrapped)
        kernel = build(plain, recorded)
        owner = ModuleType(package)
        owner.__spec__ = ModuleSpec(package, None)
        setattr(owner, kernel.__name__, kernel)
        monkeypatch.setitem(sys.modules, package, owner)
        find = hub_kernels.use_kernel_func_from_hub_with_fallback(kernel.__name__, package)
        monkeypatch.setattr(module, reference, find(plain))
    return recorded


def takes_boundaries(model: Any) -> set[bool]:
    found = (vars(module).get("forward") for module in model.modules())
    return {one.takes_boundaries for one in found if isinstance(one, MixerForward)}


@pytest.mark.parametrize("family", NUM_KERNELS)
def test_kernels_get_document_boundaries(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(tiny_family(family))
    recorded = install(tiny_family(family), monkeypatch)
    model = isolated_model(family)
    assert takes_boundaries(model) == {True}
    recorded.clear()
    found = packed(model.train())
    assert torch.allclose(found, expected, atol=1e-4)
    assert recorded and all(lengths == DOCUMENT_LENGTHS for lengths in recorded)
    assert len(recorded) % NUM_KERNELS[family] == 0
    found.logsumexp(1).sum().backward()


@pytest.mark.parametrize(
    ("family", "targets", "is_fused"),
    [
        ("bamba", "all-linear", False),
        ("bamba", ["in_proj"], True),
        ("falcon_h1", "all-linear", True),  # peft puts none on out_proj
        ("mamba", ["x_proj"], False),
        ("mamba", ["in_proj"], True),
    ],
)
def test_training_applies_every_adapter(
    family: str, targets: Any, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused training kernel reads weights, and would ignore an adapter on them."""
    install(tiny_family(family), monkeypatch)
    adapter = LoraConfig(r=2, dropout=0.0, target_modules=targets)
    model = apply_adapter(tiny_family(family), adapter, half_precision=False)
    disable_bypassing_kernels(model)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, _ = ids_and_positions()
    expected = model.eval()(input_ids=ids, use_cache=False).logits
    FUSED.clear()
    found = model.train()(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert bool(FUSED) == is_fused
    found.logsumexp(-1).sum().backward()
    assert all(one.grad is not None and one.grad.any() for one in trained.values())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_no_kernel_reads_packed_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_family(family).save_pretrained(tmp_path)
    install(tiny_family(family), monkeypatch)
    model = built(tmp_path, "nf4", backend="eager")
    kinds = {name.rpartition(".")[2]: type(one).__name__ for name, one in model.named_modules()}
    assert kinds["out_proj"] == "Linear4bit" and kinds["lm_head"] != "Linear4bit"
    assert kinds.get("dt_proj", "Linear") == "Linear"  # its weight is read in every forward
    ids, _ = ids_and_positions()
    expected = model.eval()(input_ids=ids, use_cache=False).logits
    FUSED.clear()
    assert torch.allclose(model.train()(input_ids=ids, use_cache=False).logits, expected, atol=1e-4)
    assert not FUSED


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_a_wrong_kernel_is_not_used(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts boundaries but ignores them, or raises."""
    expected = alone(tiny_family(family))
    recorded = install(tiny_family(family), monkeypatch)
    monkeypatch.setitem(globals(), "lengths_of", lambda numbers: None)
    model = isolated_model(family)
    assert takes_boundaries(model) == {False} and not any(
        one == DOCUMENT_LENGTHS for one in recorded
    )
    assert torch.allclose(packed(model), expected, atol=1e-4)


@pytest.mark.parametrize("wrong", ["in training", "backwards"])
def test_a_kernel_that_is_wrong_in_training_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kernel runs in training, or a gradient leaks into the previous document."""
    expected = alone(tiny_family("bamba"))
    model = tiny_family("bamba")
    install(model, monkeypatch)
    module = sys.modules[type(model).__module__]
    if wrong == "in training":
        right = module.mamba2_split_conv1d_scan_combined
        name = "mamba2_split_conv1d_scan_combined"

        def replaced(*args: Any, **kwargs: Any) -> Tensor:
            return right(*args, **kwargs | {"seq_idx": None})
    else:
        right, name = module.causal_conv1d_fn, "causal_conv1d_fn"

        def replaced(*args: Any, **kwargs: Any) -> Tensor:
            late = args[0].roll(1, 2) if kwargs.get("seq_idx") is not None else args[0]
            return right(*args, **kwargs) + late - late.detach()

        fused_call = module.mamba2_split_conv1d_scan_combined.__wrapped__
        monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", fused_call)
    monkeypatch.setattr(module, name, replaced)
    model = isolated_model("bamba")
    assert takes_boundaries(model) == {False}
    assert torch.allclose(packed(model.train()), expected, atol=1e-4)


@pytest.mark.parametrize("family", ["lfm2", "olmo_hybrid", "qwen3_next"])
def test_a_pack_on_the_cpu(family: str) -> None:
    """Without packages; documents shorter than a chunk, longer, and of whole chunks."""
    model = isolated_model(family)
    assert takes_boundaries(model) == {True}
    lengths = [[1, CHUNK, 3 * CHUNK + 5, 9, 2 * CHUNK, 2 * CHUNK + 1]]
    tokens = sum(lengths[0])
    ids = torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths[0]])[None]
    trained = dict(model.named_parameters())

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        logits.logsumexp(-1).sum().backward()
        found = {name: one.grad for name, one in trained.items() if one.grad is not None}
        model.zero_grad()
        return found

    documents = ids.split(lengths[0], 1)
    expected = torch.cat([model(input_ids=one, use_cache=False).logits for one in documents], 1)
    inputs = attention_inputs(model, "sdpa", lengths, ids)
    found = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    of_pack, of_documents = gradients(found), gradients(expected)
    assert of_pack.keys() == of_documents.keys()
    limit = 1e-5 * max(one.norm() for one in of_documents.values())
    assert all((of_pack[name] - one).norm() <= limit for name, one in of_documents.items())


def test_mixers_do_not_get_the_boundaries_of_padded_rows() -> None:
    """They count through all rows, which neither mixer kernels nor the CPU support."""
    model, (ids, _) = tiny_family("qwen3_5_text"), ids_and_positions()
    model.set_attn_implementation("sdpa")
    inputs = attention_inputs(model, "varlen", [[40], [30]], ids)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 40, 70, 80]
    hide_boundaries_from_mixers(model, "varlen")
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    plain = tiny_family("qwen3_5_text")
    for row, length in enumerate((40, 30)):
        expected = plain(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0]
        assert torch.allclose(logits[row, :length], expected, atol=1e-4)


def test_the_convolution_of_flash_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor, *, activation: str, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        assert x.is_contiguous() and activation == "silu"
        taps, width = weight.unsqueeze(1), weight.shape[1]
        lengths = cu_seqlens.diff().tolist()
        rows = [functional.pad(one.mT, (width - 1, 0)) for one in x.split(lengths, 1)]
        mixed = [functional.conv1d(row, taps, bias, groups=len(taps)) for row in rows]
        return functional.silu(torch.cat(mixed, 2)).mT, None

    module = ModuleType("fla.modules.causal_conv1d")
    monkeypatch.setattr(module, "causal_conv1d", convolve, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hidden, weight, bias = torch.randn(1, 8, 11), torch.randn(8, 4), torch.randn(8)
    seq_idx = torch.tensor([[0] * 5 + [1] * 6], dtype=torch.int32)
    expected = causal_conv1d(hidden, weight, bias, "silu", seq_idx=seq_idx)
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 5, 11]), "seq_idx": seq_idx}
    found = triton_causal_conv1d(hidden, weight, bias, "silu", **boundaries)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "extra"),
    [("qwen3_5_text", "hybrid"), ("lfm2", "hybrid"), ("bamba", "mamba"), ("jamba", "")],
)
def test_the_extra_with_missing_kernels_is_named(family: str, extra: str) -> None:
    """Jamba's scan has no kernel with boundaries."""
    found = [type(each) for each in isolated_model(family).modules() if "forward" in vars(each)]
    kinds = [kind for kind in found if not issubclass(kind, PreTrainedModel)]
    assert kinds and missing_kernels(kinds) == (f"type {install_extra(extra)}" if extra else "")


@pytest.mark.gpu
@pytest.mark.parametrize("family", NUM_KERNELS)
def test_the_installed_kernels(family: str) -> None:
    is_hybrid = family.startswith(("qwen", "lfm"))
    for package in ("fla",) if is_hybrid else ("causal_conv1d", "mamba_ssm"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    expected = alone(tiny_family(family))
    model = tiny_family(family).cuda()
    check_isolation(model, "eager")
    assert takes_boundaries(model) == {True}
    found = packed(model, "eager").cpu()
    assert (found - expected).norm() <= 2**-5 * expected.norm()
