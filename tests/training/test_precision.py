"""What each precision keeps in which dtype, and that it trains on the CPU or is refused there."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.training.module import FinetuneModule
from app.training.trainer import resolve_precision, resolve_single_device
from tests.conftest import read_column
from tests.runs import check_same_run
from tests.tiny import TINY_BASE, train_into

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32


@functools.cache
def run_of(precision: str, adapter: str) -> tuple[Path, dict[str, Any]]:
    """Return a run, and the dtypes of weights, products and optimizer state in its last step."""
    found: dict[str, Any] = {}
    step = FinetuneModule.optimizer_step

    def look(module: FinetuneModule, *args: Any) -> None:
        def keep(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found["products"] = output.dtype

        projections = [m for name, m in module.model.named_modules() if name.endswith("up_proj")]
        hook = projections[0].register_forward_hook(keep)
        step(module, *args)
        hook.remove()
        parameters = list(module.model.parameters())
        found["trained"] = {p.dtype for p in parameters if p.requires_grad}
        found["frozen"] = {p.dtype for p in parameters if not p.requires_grad}
        states = module.optimizers().optimizer.state.values()
        found["moments"] = {state["exp_avg"].dtype for state in states}

    words = [f"trainer.precision={precision}", f"adapter={adapter}", "logger=csv"]
    words += ["adapter.dropout=0"] if adapter == "lora" else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FinetuneModule, "optimizer_step", look)
        return train_into(Path(tempfile.mkdtemp()) / "run", *words), found


@pytest.mark.parametrize(
    ("precision", "adapter", "frozen", "trained", "products"),
    [
        ("fp32", "lora", {FP32}, FP32, FP32),
        ("bf16", "lora", {BF16}, FP32, BF16),
        ("bf16-pure", "full", set(), BF16, BF16),
    ],
)
def test_a_run_on_the_cpu_has_the_dtypes_of_its_precision(
    precision: str,
    adapter: str,
    frozen: set[torch.dtype],
    trained: torch.dtype,
    products: torch.dtype,
) -> None:
    folder, seen = run_of(precision, adapter)
    dtypes = {"trained": {trained}, "moments": {trained}, "products": products}
    assert seen == dtypes | {"frozen": frozen}
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["tuned/val/loss"] < metrics["base/val/loss"]
    # Adapters are saved as they were trained, full models in the dtype of their base.
    file, expected = next(folder.glob("*/*model.safetensors")), trained
    if adapter == "full":
        expected = next(iter(load_file(TINY_BASE / "model.safetensors").values())).dtype
    assert {tensor.dtype for tensor in load_file(file).values()} == {expected}


def test_precisions_train_alike() -> None:
    fp32, bf16 = (
        list(read_column(run_of(precision, "lora")[0], "train/loss").values())
        for precision in ("fp32", "bf16")
    )
    assert bf16 == pytest.approx(fp32, rel=0.03) and bf16 != fp32


def test_fp8_trains_as_bf16_saves_the_same_weights_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    words = ("adapter=full", f"model.path={TINY_BASE}", "logger=csv")  # of four layers
    saved = ("trainer.checkpoint.every_steps=1", "trainer.checkpoint.keep_last=9")
    plain, rounded = (
        train_into(tmp_path / precision, *words, *saved, f"trainer.precision={precision}")
        for precision in ("bf16", "fp8")
    )
    losses = [list(read_column(run, "train/loss").values()) for run in (plain, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.06) and losses[1] != losses[0]
    tensors = [load_file(run / "model" / "model.safetensors") for run in (plain, rounded)]
    shapes = [{name: (t.shape, t.dtype) for name, t in each.items()} for each in tensors]
    assert shapes[0] == shapes[1]
    assert json.loads((rounded / "manifest.json").read_text())["precision"] == "fp8"
    resumed = shutil.copytree(rounded, tmp_path / "resumed")
    step = f"resume={resumed / 'checkpoints' / 'step-2'}"
    train_into(resumed, *words, *saved, "trainer.precision=fp8", step)
    check_same_run(resumed, rounded)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_bf16_is_refused_on_a_gpu_that_would_emulate_it(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(ValueError, match=r"Tesla T4 .* type trainer\.precision=fp16"):
        resolve_precision(precision, "gpu")
    assert resolve_precision("auto", "gpu") == "fp32"
    assert resolve_precision(precision, "cpu") == precision


def test_bf16_is_what_auto_means_on_a_gpu_that_has_it_and_rows_come_in_few_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_precision("auto", "gpu") == resolve_precision("bf16", "gpu") == "bf16"
    for precision in ("bf16", "bf16-pure", "fp32"):
        assert resolve_single_device("cpu", precision).row_multiple == 64
        assert resolve_single_device("gpu", precision).row_multiple == 128
