"""Between two writes of the metrics no step waits for the device: no value is read from it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.config.verbs import PARTS
from app.strategy.ddp import SingleDevice
from app.training import callbacks
from app.training.checkpoint.saving import CheckpointSaver
from app.training.metrics import Metrics
from app.training.module import FinetuneModule
from tests.conftest import TrainRun
from tests.tiny import SAMPLES, save_with_tokenizer, small_run, tiny_t5

pytestmark = pytest.mark.slow

EVERY, STEPS = 2, 5
WRITES = [[1], [2], [3, 4]]
RUN = {
    "data.val_set_size": "0",
    "data.sequence_len": "128",
    "trainer.max_steps": f"{STEPS}",
    "trainer.log_every_steps": f"{EVERY}",
    "logger": "csv",
}
META = torch.device("meta")
VALUE_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"}
"""operators called by `.item()`, `if tensor`, `torch.equal` and indexing with a mask"""


class EndOfTraining(Exception):
    """Ends a run after its last step."""


@pytest.fixture(autouse=True)
def _end_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(module: FinetuneModule) -> None:
        raise EndOfTraining

    monkeypatch.setattr(FinetuneModule, "on_train_end", end)
    monkeypatch.setattr(CheckpointSaver, "save", lambda *_: None)  # of the last step


def words(*changed: str) -> list[str]:
    """Return overrides of a run of five steps that writes its metrics at steps 1, 2 and 4."""
    own = RUN | dict(word.split("=", 1) for word in changed)
    return small_run(*(f"{key}={value}" for key, value in own.items()))


class DeviceWithoutValues(SingleDevice):
    """Train on meta tensors, which have no values: reading one is an error."""

    def model_to_device(self) -> None:
        self.model.to(META)

    def run_micro_batches(self, batches: Any, loss: Any) -> Any:
        """Move micro-batches to meta; Lightning reads values on the root device before steps."""
        before, self._root_device = self._root_device, META
        try:
            return super().run_micro_batches(batches, loss)
        finally:
            self._root_device = before

    def teardown(self) -> None:
        """Leave the weights on meta: they cannot be copied back."""


class AdamWWithoutValues(torch.optim.AdamW):
    """AdamW that receives `found_inf` like fused AdamW, whose kernels do not support meta."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        assert self.found_inf.device == META  # type: ignore[has-type]
        self.found_inf = None
        self.call_fused(False)
        super().step()
        self.call_fused(True)
        return loss

    def call_fused(self, is_fused: bool) -> None:
        """Set whether the groups are marked as fused."""
        for group in self.param_groups:
            group["fused"] = is_fused


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Run on meta; return the steps of every write of the metrics."""
    found: list[list[int]] = []

    def write(metrics: Metrics, reduce: Any, *, pause: bool = False) -> None:
        found.append([record.step for record in metrics.pending])
        metrics.pending = []

    from app.training.optimizers import build_optimizer

    def plain(*args: Any, **settings: Any) -> Any:
        optimizer: Any = build_optimizer(*args, **(settings | {"fused": False}))
        optimizer.__class__ = AdamWWithoutValues
        optimizer.call_fused(True)
        return optimizer

    strategy = DeviceWithoutValues(torch.device("cpu"))
    monkeypatch.setattr("app.assembly.training.build_strategy", lambda *_, **__: strategy)
    monkeypatch.setattr("app.assembly.training.build_optimizer", plain)
    monkeypatch.setattr(FinetuneModule, "on_fit_start", lambda module: None)  # it measures values
    monkeypatch.setattr(Metrics, "flush", write)
    # It also reads values, but only in the first step, whose metrics are written anyway.
    monkeypatch.setattr(callbacks, "_record", lambda is_reached, _: is_reached.fill_(1))
    # Autocast does not know this device; it is off in fp32.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **settings: nullcontext())
    return found


@pytest.mark.parametrize(
    "changed",
    [
        ["adapter=lora", "adapter.use_dora=true", "adapter.neftune_alpha=5"],
        ["adapter=ia3", "packing=none", "trainer.micro_batch_size=2"],
        ["adapter=full", "recompute=full"],
    ],
    ids=" ".join,
)
def test_a_step_trains_without_reading_a_value(
    changed: list[str], train_run: TrainRun, writes: list[list[int]]
) -> None:
    with pytest.raises(EndOfTraining):
        train_run(*words(*changed))
    assert writes == WRITES


def test_a_step_of_an_encoder_decoder_reads_no_value(
    tmp_path: Path, train_run: TrainRun, writes: list[list[int]]
) -> None:
    base = save_with_tokenizer(tiny_t5(vocab_size=768), tmp_path / "base")
    lists = f"data.datasets=[{{path: {SAMPLES / 'lists_test.json'}}}]"
    with pytest.raises(EndOfTraining):
        train_run(*words(f"model.path={base}", lists))
    assert writes == WRITES


class ReadRecorder(TorchDispatchMode):
    """Record the call sites that read a value while `is_watching`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_watching = False
        self.reads: list[str] = []

    def watch(self, is_watching: bool) -> None:
        self.is_watching = is_watching

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_watching and func._schema.name in VALUE_READS:
            calls = traceback.extract_stack()[:-1]
            self.reads.append(f"{func}: {' < '.join(str(call) for call in calls[:-8:-1])}")
        return func(*args, **(kwargs or {}))


def watch_between_writes(monkeypatch: pytest.MonkeyPatch, watch: Callable[[bool], None]) -> None:
    """Watch from the first write of the metrics to the last step, except during writes."""
    write, end_training = Metrics.flush, FinetuneModule.on_train_end

    def flush(metrics: Metrics, *args: Any, **settings: Any) -> None:
        watch(False)
        write(metrics, *args, **settings)
        watch(True)

    def end(module: FinetuneModule) -> None:
        watch(False)
        end_training(module)

    monkeypatch.setattr(Metrics, "flush", flush)
    monkeypatch.setattr(FinetuneModule, "on_train_end", end)


# On a CPU, paged_adamw8bit is adamw8bit.
@pytest.mark.parametrize("optimizer", sorted({*PARTS["optimizer"]} - {"paged_adamw8bit"}))
def test_no_optimizer_reads_a_value_except_to_skip_a_step(
    optimizer: str, train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = ReadRecorder()
    watch_between_writes(monkeypatch, recorder.watch)
    with recorder, pytest.raises(EndOfTraining):
        train_run(*words("adapter=full", f"optimizer={optimizer}", "trainer.precision=bf16"))
    # AdamW skips on the device; the check of other optimizers reads one value per step.
    assert len(recorder.reads) == (0 if optimizer == "adamw" else STEPS - 1)
    assert all("skip_nonfinite_step" in read for read in recorder.reads)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changed",
    [[], ["packing=none"], ["adapter=full"], ["quantization=nf4"], ["recompute=full"]],
    ids=" ".join,
)
def test_no_step_waits_for_a_gpu(
    changed: list[str], train_run: TrainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(is_watching: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if is_watching else "default")

    watch_between_writes(monkeypatch, watch)
    try:
        with pytest.raises(EndOfTraining):
            train_run(*words("trainer.accelerator=gpu", "trainer.precision=bf16", *changed))
    finally:
        watch(False)
