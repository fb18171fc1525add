"""A resumed run equals, bit for bit, the run that was never interrupted."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import torch

from app.process import faults
from app.process.signals import DataStalled
from app.training.checkpoint import saving
from app.training.checkpoint.documents import MODEL, OPTIMIZER, TRAINING
from app.training.checkpoint.saving import SignalSync
from app.training.checkpoint.state import Resume, random_state
from app.training.checkpoint.store import CheckpointStore
from app.training.module import FinetuneModule
from common.errors import Interrupted
from tests.resumed import contents
from tests.runs import check_same_run, figures_of
from tests.tiny import SAMPLES, TINY_BASE, train_into

RUN = (
    "trainer.max_steps=8",
    "trainer.validate_every_steps=3",
    "trainer.checkpoint.every_steps=1",
    "trainer.checkpoint.keep_last=9",
    "evaluation.exact_match=false",
    "logger=csv",
)
FULL = ("adapter=full", "optimizer.lr=1e-3")
THREE_SETS = (
    "data.datasets="
    f"[{{path: {SAMPLES / 'lists_test.json'}, name: lists, weight: 2.0}},"
    f" {{path: {SAMPLES / 'orders_test.jsonl'}, name: orders}},"
    f" {{path: {SAMPLES / 'orders_test.jsonl'}, name: more, weight: 0.5}}]"
)
STREAM = ("data.streaming=true", "packing=multipack")

Ids = list[tuple[int, str]]


def record_batches(monkeypatch: pytest.MonkeyPatch) -> Ids:
    """Record the step and the hash of the token ids of every micro-batch."""
    ids: Ids = []
    plain = FinetuneModule.micro_batch_loss

    def watched(self: FinetuneModule, batch: Any) -> Any:
        ids.append(
            (self.trainer.global_step, hashlib.sha256(batch.input_ids.cpu().numpy()).hexdigest())
        )
        return plain(self, batch)

    monkeypatch.setattr(FinetuneModule, "micro_batch_loss", watched)
    return ids


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Ids:
    return record_batches(monkeypatch)


def run_into(folder: Path, *words: str) -> Path:
    return train_into(folder, *RUN, *words)


def resume_from(run: Path, step: int, *words: str, total: int = 8) -> Path:
    """Resume a copy of a finished run, as if it had been killed after `step`."""
    copy = run.parent / f"{run.name}-from-{step}"
    shutil.copytree(run, copy)
    for number in range(step + 1, total + 1):
        shutil.rmtree(copy / "checkpoints" / f"step-{number}", ignore_errors=True)
    for made in ("adapter", "model"):
        shutil.rmtree(copy / made, ignore_errors=True)
    (copy / "metrics.json").unlink()
    return run_into(copy, *words, "resume=must")


CASES = {
    "lora packed": ("adapter.dropout=0.1",),
    "stream by workers": (*STREAM, "data.num_workers=2", "adapter.dropout=0.1"),
    "8 bits of top layers in pure bf16, no validation": (
        *("adapter=freeze", "optimizer.lr=1e-3", "trainer.precision=bf16-pure"),
        *("optimizer=adamw8bit", "data.val_set_size=0"),
    ),
    "dora with new tokens on 4 bits in bf16": (
        *("adapter.use_dora=true", "adapter.dropout=0.1", "quantization=nf4"),
        *("model.added_tokens=[<|a|>,<|b|>]", "trainer.precision=bf16"),
    ),
    "principal components of three sets with noise, computed again": (
        *("adapter.init=pissa", THREE_SETS, "recompute=full"),
        *("adapter.dropout=0.1", "adapter.neftune_alpha=5"),
    ),
    "a base that is streamed from a disk": (
        *(f"model.path={TINY_BASE}", "model.stream=disk", "trainer.precision=bf16"),
        *("recompute=full", "adapter.dropout=0.1"),
    ),
    "several at once": (
        *(*FULL, THREE_SETS, "packing=none", "optimizer=schedule_free"),
        "trainer.gradient_accumulation_steps=4",
    ),
}
QUICK = ("lora packed", "several at once")
BETWEEN_VALIDATIONS, BEHIND_ONE = 4, 6
RESUMED_AT = {"stream by workers": (BEHIND_ONE,)}
RESUMED_AT |= dict.fromkeys(QUICK, (BETWEEN_VALIDATIONS, BEHIND_ONE))
"""where a validation could leave other weights, rows or random numbers to the next step"""


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        pytest.param(
            (*words, "trainer.checkpoint.every_steps=2"),
            RESUMED_AT.get(name, (BETWEEN_VALIDATIONS,)),
            id=name,
            marks=() if name in QUICK else pytest.mark.slow,
        )
        for name, words in CASES.items()
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, seen: Ids, words: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    whole = run_into(tmp_path / "whole", *words)
    everything = list(seen)
    assert len({step for step, _ in everything}) == 8
    seen.clear()
    for step in steps:
        resumed = resume_from(whole, step, *words)
        assert seen == [each for each in everything if each[0] >= step]
        check_same_run(resumed, whole)
        seen.clear()


class Stopped(Exception):
    """Stands for a kill."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a run die when a hook of the module is called for the n-th time."""

    def plan_faults(hook: str, number: int) -> None:
        calls = iter(range(1, 10_000))
        plain = getattr(FinetuneModule, hook)

        def dying(self: FinetuneModule, *args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                monkeypatch.setattr(FinetuneModule, hook, plain)
                raise Stopped
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(FinetuneModule, hook, dying)

    return plan_faults


BETWEEN = ("trainer.checkpoint.every_steps=2", "adapter.dropout=0.1", "data.sequence_len=128")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of BETWEEN."""
    return run_into(tmp_path_factory.mktemp("uninterrupted") / "run", *BETWEEN)


@pytest.mark.parametrize(
    ("hook", "number"),
    [
        ("micro_batch_loss", 14),  # between the micro-batches of step 7
        ("on_validation_epoch_end", 3),  # of step 6, whose row and checkpoint are not there yet
    ],
)
@pytest.mark.slow
def test_a_run_that_dies_anywhere_ends_as_if_it_had_not(
    tmp_path: Path, uninterrupted: Path, stop_at: Any, hook: str, number: int
) -> None:
    """A resume that fails before it trains leaves the run as it was."""
    run, words = tmp_path / "run", (*BETWEEN, "resume=auto")
    stop_at(hook, number)
    with pytest.raises(Stopped):
        run_into(run, *BETWEEN)
    if hook == "micro_batch_loss":
        before, words = contents(run), (*words, "trainer.log_every_steps=3")
        stop_at("on_fit_start", 1)
        with pytest.raises(Stopped):
            run_into(run, *words)
        after = contents(run)
        for name in ("config.yaml", "manifest.json", "audit.json"):
            assert after[name] == before[name], name
    check_same_run(run_into(run, *words), uninterrupted)
    assert len(json.loads((run / "manifest.json").read_text())["earlier"]) == 1


@pytest.mark.slow
def test_checkpoints_stand_at_the_ends_of_epochs_and_of_the_run(
    tmp_path: Path, seen: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SAVES_PER_RUN", 1)
    few = tmp_path / "few.jsonl"
    rows = (SAMPLES / "orders_test.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(rows[:40]))
    words = ("trainer.max_steps=null", "trainer.num_epochs=3", "adapter.dropout=0.1")
    words += ("trainer.checkpoint.every_steps=null", f"data.datasets=[{{path: {few}, name: few}}]")
    whole = run_into(tmp_path / "whole", *words)
    steps = [checkpoint.step for checkpoint in CheckpointStore(whole / "checkpoints").checkpoints()]
    first, second, last = steps
    assert 0 < first < second < last == len({step for step, _ in seen})
    check_same_run(resume_from(whole, second, *words, total=last), whole)


@pytest.mark.slow
def test_a_finished_run_goes_on_as_if_it_had_been_longer(tmp_path: Path) -> None:
    words = ("schedule=constant", "schedule.warmup_steps=0", "adapter.dropout=0.1")
    longer = (*words, "trainer.max_steps=5")
    whole = run_into(tmp_path / "whole", *longer)
    run = run_into(tmp_path / "run", *words, "trainer.max_steps=3")
    check_same_run(run_into(run, *longer, "resume=must", "resume_allow=[epochs]"), whole)


@pytest.mark.slow
def test_a_run_that_died_after_its_last_step_trains_nothing_more(tmp_path: Path, seen: Ids) -> None:
    words = (*FULL, "optimizer=schedule_free", "trainer.max_steps=2")
    for more in ((), ("data.val_set_size=0",)):
        whole = run_into(tmp_path / f"whole{len(more)}", *words, *more)
        seen.clear()
        check_same_run(resume_from(whole, 2, *words, *more), whole)
        assert not seen


@pytest.mark.slow
def test_asynchronous_checkpoints_are_the_same(tmp_path: Path) -> None:
    words = (*FULL, "trainer.max_steps=4")
    whole = run_into(tmp_path / "whole", *words)
    beside = run_into(tmp_path / "beside", *words, "trainer.checkpoint.async=true")
    stores = [CheckpointStore(run / "checkpoints").checkpoints() for run in (whole, beside)]
    assert len(stores[0]) == len(stores[1]) == 4
    for one, other in zip(*stores, strict=True):
        for name, written in one.manifest["files"].items():
            if name != "training.json":
                assert other.manifest["files"][name] == written, (one.step, name)
        documents = [each.document("training")["curves"] for each in (one, other)]
        assert documents[0]["validations"] == documents[1]["validations"]
        assert documents[0]["latest_step"] == documents[1]["latest_step"] == one.step
    check_same_run(resume_from(beside, 2, *words, "trainer.checkpoint.async=true"), whole)


def test_only_trainable_parameters_are_saved(tmp_path: Path) -> None:
    run = run_into(tmp_path / "run", "trainer.max_steps=1")
    (only,) = CheckpointStore(run / "checkpoints").checkpoints()
    assert only.names() == ["model", "optimizer", "random-rank-0", "training"]
    assert {".lora_A.", ".lora_B."} == {
        f".{name.split('.')[-2]}." for name in only.tensors("model")
    }
    assert only.metric == pytest.approx(figures_of(run)["val/loss"])
    assert not list(run.rglob("*.pt")) + list(run.rglob("*.ckpt")) + list(run.rglob("*.bin"))


ON_A_GPU = {
    "scaled loss": ("trainer.precision=fp16", "adapter.dropout=0.1"),
    "8 bits": ("adapter=full", "optimizer=paged_adamw8bit"),
    "beside the training": ("trainer.checkpoint.async=true", "adapter.dropout=0.1"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("words", ON_A_GPU.values(), ids=ON_A_GPU)
def test_all_state_is_restored_at_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    looked = []
    plain = Resume.restore_at_first_batch

    def look(self: Resume, batch: Any) -> None:
        plain(self, batch)
        module, source = self.module, self.source
        for name, kept in zip((MODEL, OPTIMIZER), module.checkpoint_tensors(), strict=True):
            saved = source.tensors(name)
            assert saved.keys() == kept.keys()
            for key, tensor in saved.items():
                assert torch.equal(tensor, kept[key].cpu()), (name, key)
        scaler = source.document(TRAINING)["lightning"].get("MixedPrecision", {})
        assert scaler == module.trainer.precision_plugin.state_dict()
        assert bool(scaler) == ("trainer.precision=fp16" in words)
        assert random_state(module.device) == source.document("random-rank-0")
        looked.append(source.step)

    monkeypatch.setattr(Resume, "restore_at_first_batch", look)
    words = (*words, "trainer.accelerator=gpu", "trainer.max_steps=3")
    whole = run_into(tmp_path / "whole", *words)
    assert not looked
    resume_from(whole, 2, *words)
    assert looked == [2]


@pytest.mark.parametrize(
    ("words", "every"),
    [
        pytest.param(("adapter.dropout=0.1",), 2, id="not due"),
        pytest.param(
            (*FULL, "optimizer=schedule_free", "trainer.checkpoint.async=true"),
            3,
            id="averaged weights, async, due",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_interrupts_a_validation_which_is_repeated_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], every: int
) -> None:
    words = (*words, f"trainer.checkpoint.every_steps={every}", "trainer.max_steps=4")
    whole = run_into(tmp_path / "whole", *words)
    polls = iter(range(1, 100))
    # Of steps 1 and 2, then of the first and the second batch of step 3's validation.
    monkeypatch.setattr(SignalSync, "poll", lambda _: SIGTERM if next(polls) == 4 else None)
    with pytest.raises(Interrupted, match="step 3 is saved"):
        run_into(tmp_path / "run", *words)
    newest = CheckpointStore(tmp_path / "run" / "checkpoints").checkpoints()[-1]
    assert (newest.step, newest.metric) == (3, None)
    monkeypatch.undo()
    seen: list[str] = []
    validate = FinetuneModule._validate_pending
    monkeypatch.setattr(
        FinetuneModule,
        "_validate_pending",
        lambda module: seen.append("validates") or validate(module),
    )
    monkeypatch.setattr(
        faults, "fault_point", lambda point, step=None: seen.append(f"{point} {step}")
    )
    check_same_run(run_into(tmp_path / "run", *words, "resume=must"), whole)
    assert seen.index("validates") < seen.index("batch 4")


def interrupt_measurement(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End what is measured after `step` as a signal does."""
    measured = FinetuneModule.on_validation_epoch_end

    def interrupted(self: FinetuneModule) -> None:
        if self.trainer.global_step == step:
            raise DataStalled(SIGTERM, "it is measured again")
        measured(self)

    monkeypatch.setattr(FinetuneModule, "on_validation_epoch_end", interrupted)


@pytest.mark.slow
def test_an_owed_validation_may_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "trainer.validate_every_steps=1",
        "trainer.checkpoint.every_steps=5",
        "trainer.early_stopping_patience=2",
        "optimizer.lr=1e-12",
        "trainer.precision=fp32",
        "trainer.checkpoint.monitor=val/loss",
    )
    stops = property(lambda self: self.metrics.validated_step == 2)
    monkeypatch.setattr(FinetuneModule, "stops_early", stops)
    whole = run_into(tmp_path / "whole", *words)
    with monkeypatch.context() as patched:
        interrupt_measurement(patched, 2)
        with pytest.raises(DataStalled, match="step 2 is saved"):
            run_into(tmp_path / "run", *words)
    ids, saved = record_batches(monkeypatch), []
    save = saving.CheckpointSaver.save
    monkeypatch.setattr(
        saving.CheckpointSaver,
        "save",
        lambda self, trainer, module: (
            saved.append(trainer.global_step) or save(self, trainer, module)
        ),
    )
    check_same_run(run_into(tmp_path / "run", *words, "resume=must"), whole)
    assert (ids, saved) == ([], [2])  # nothing is trained; the step is saved with its figures


def test_a_signal_interrupts_the_last_validation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run has no step left, and starts with that validation."""
    words = ("trainer.max_steps=1",)
    whole = run_into(tmp_path / "whole", *words)
    monkeypatch.setattr(SignalSync, "poll", lambda _: SIGTERM)
    with pytest.raises(Interrupted, match="step 1 is saved"):
        run_into(tmp_path / "run", *words)
    (newest,) = CheckpointStore(tmp_path / "run" / "checkpoints").checkpoints()
    assert (newest.step, newest.metric) == (1, None)
    monkeypatch.undo()
    check_same_run(run_into(tmp_path / "run", *words, "resume=must"), whole)
