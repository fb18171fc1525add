"""A nonfinite step changes nothing and is reported with its rows."""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from app.config import load_config, run_verb
from app.config.verbs import PARTS
from app.model.adapter import FullConfig
from app.model.attention import attention_implementation
from app.process import faults
from app.strategy.ddp import SingleDevice
from app.train import train
from app.training.checkpoint.state import model_state, optimizer_state
from app.training.checkpoint.store import CheckpointStore
from app.training.metrics import MAX_OVERFLOWS, Metrics, StepRecord, StepWatch, check_finite_state
from app.training.module import FinetuneModule, propagate_nonfinite, skip_nonfinite_step
from app.training.objective.objective import Sft
from app.training.optimizers import ScheduleConfig, build_optimizer
from app.training.trainer import TrainerConfig, build_lightning_trainer, resolve_environment
from common.errors import Origin, TrainingFault
from data_modules import Batch, StepRow
from tests.batches import datamodule_of, micro_batches
from tests.in_process import as_new_process
from tests.reliability.shell import Shell
from tests.runs import check_same_run
from tests.tiny import SAMPLES, random_ids, small_run, tiny_llama
from tests.training.test_loss import make_batch

NAMES = ["lists", "orders"]
every_optimizer = pytest.mark.parametrize("optimizer", list(PARTS["optimizer"]))
# On a CPU, paged_adamw8bit is adamw8bit.
ON_CPU = [name for name in PARTS["optimizer"] if name != "paged_adamw8bit"]
STEPS, BAD = 5, 3
State = tuple[dict[str, Tensor], dict[str, Tensor], Any]


@dataclass
class Fit:
    """States and metrics of a short run."""

    states: list[State] = field(default_factory=list)
    """weights, tensors and numbers of the optimizer before the first step and after each"""
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    metrics: Any = None
    fault: TrainingFault | None = None

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = metrics

    def save_state(self, module: FinetuneModule) -> None:
        tensors, numbers = optimizer_state(module.model, module.optimizers(use_pl_optimizer=False))
        parts = model_state(module.model), tensors
        weights, moments = ({k: v.clone() for k, v in part.items()} for part in parts)
        for group in numbers["groups"]:
            for name in ("scheduled_lr", "train_mode"):  # of the schedule, and of a validation
                group.pop(name, None)
        self.states.append((weights, moments, numbers))

    def moved(self, step: int) -> bool:
        """Return whether a step changed a weight or the state of the optimizer."""
        before, after = self.states[step - 1], self.states[step]
        # An optimizer may create moments of zeros in a step that it then skips.
        new = after[1].keys() - before[1].keys()
        return (
            any(not torch.equal(before[0][name], after[0][name]) for name in after[0])
            or any(not torch.equal(before[1][name], after[1][name]) for name in before[1])
            or any(bool(after[1][name].count_nonzero()) for name in new)
            or before[2]["numbers"] != after[2]["numbers"]
            or before[2]["groups"] != after[2]["groups"]
        )


class StateRecorder(L.Callback):
    def __init__(self, fit: Fit, change: Callable[[FinetuneModule], None] | None = None) -> None:
        self.fit, self.change = fit, change

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.fit.save_state(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.change is not None and trainer.global_step == BAD - 1:
            self.change(pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.fit.save_state(pl_module)


def steps(accumulation: int) -> list[list[Batch]]:
    """Return the micro-batches of five steps, each with one document of either data set."""
    ids = random_ids(rows=STEPS * accumulation * 2, tokens=12).tolist()
    made = []
    for number in range(STEPS * accumulation):
        pair = ids[2 * number : 2 * number + 2]
        batch = make_batch(pair, [[0.0] + [1.0] * 11] * 2, [0, 1])
        batch.step_weight = 22.0 * accumulation
        made.append(batch)
    return [made[at : at + accumulation] for at in range(0, len(made), accumulation)]


def build_model(device: torch.device | None = None) -> Any:
    model = tiny_llama(vocab_size=96, hidden_size=64, intermediate_size=128)  # 8 bits need 4096
    model.set_attn_implementation(attention_implementation("sdpa"))
    return model.to(device).train()


def fit(
    folder: Path,
    optimizer: str = "adamw",
    *texts: str,
    accumulation: int = 1,
    precision: str = "fp32",
    change: Callable[[FinetuneModule], None] | None = None,
    watch: StepWatch | None = None,
    every: int = 10,
    accelerator: str = "cpu",
) -> Fit:
    """Train five steps with `faults=[texts]`; `change` is called before step BAD."""
    found = Fit()
    found.metrics = Metrics(NAMES, [found], every, watch)
    parsed, problems = faults.parse_faults(texts)
    assert problems == []
    faults.arm_faults(parsed, folder)
    module = FinetuneModule(
        build_model,
        backend="sdpa",
        objective=Sft(),
        build_optimizer=partial(
            build_optimizer,
            config=PARTS["optimizer"][optimizer](),
            adapter=FullConfig(),
            lr=1e-2,
            fused=precision != "fp16",
        ),
        schedule=ScheduleConfig(shape="constant", warmup_steps=0),
        total_steps=STEPS,
        is_packed=True,
        metrics=found.metrics,
    )
    config = TrainerConfig(
        accelerator=accelerator,
        devices=1,
        gradient_accumulation_steps=accumulation,
        precision=precision,
    )
    trainer = build_lightning_trainer(
        config,
        env=resolve_environment(config),
        strategy=SingleDevice("cuda:0" if accelerator == "gpu" else "cpu"),
        total_steps=STEPS,
        loggers=[],
        callbacks=[StateRecorder(found, change)],
        folder=folder,
    )
    try:
        trainer.fit(module, DataLoader(steps(accumulation), batch_size=None))  # type: ignore[arg-type]
    except TrainingFault as fault:
        found.fault = fault
    return found


def make_one_element_infinite(module: FinetuneModule) -> None:
    """Make one element of one gradient infinite in the next backward pass."""
    weight = module.model.model.layers[0].mlp.up_proj.weight

    def spoil(grad: Tensor) -> Tensor:
        hook.remove()
        return grad.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(math.inf))

    hook = weight.register_hook(spoil)


# Both a nonfinite loss and a nonfinite gradient show in the norm, which every optimizer checks.
CASES = [
    *((name, 1, "fp32", "nan") for name in ON_CPU),
    *(("adamw", 1, "fp32", fault_name) for fault_name in ("inf", "grad_inf")),
    ("adamw", 4, "bf16", "one number"),
]


@pytest.mark.parametrize(("optimizer", "accumulation", "precision", "fault_name"), CASES)
def test_a_nonfinite_step_changes_nothing_and_ends_the_run(
    optimizer: str, accumulation: int, precision: str, fault_name: str, tmp_path: Path
) -> None:
    is_fault = fault_name in faults.FAULT_NAMES
    found = fit(
        tmp_path,
        optimizer,
        *([f"{fault_name}@{BAD}"] if is_fault else []),
        accumulation=accumulation,
        precision=precision,
        change=None if is_fault else make_one_element_infinite,
    )
    assert [found.moved(step) for step in range(1, STEPS + 1)] == [True, True, False, True, True]
    assert all(weight.isfinite().all() for weight in found.states[-1][0].values())
    message = str(found.fault)
    row = found.rows[BAD]
    assert not math.isfinite(row["train/grad_norm"])
    if fault_name in ("nan", "inf"):
        assert message.startswith(
            f"step {BAD}: loss {fault_name} (of lists, orders), gradient norm nan"
        )
        assert str(row["train/loss"]) == str(row["train/loss/lists"]) == fault_name
    else:
        assert message.startswith(f"step {BAD}: loss {row['train/loss']}, gradient norm ")
        assert math.isfinite(row["train/loss"])
    assert "trainer.max_skipped_steps=1" in message


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_nonfinite_first_step_changes_nothing(optimizer: str, tmp_path: Path) -> None:
    watch = StepWatch(max_skipped_steps=1)
    found = fit(tmp_path, optimizer, "nan@1", watch=watch, every=1)
    assert [found.moved(step) for step in (1, 2)] == [False, True]
    assert found.fault is None


def test_an_infinite_loss_makes_its_gradients_nan() -> None:
    loss = torch.tensor(math.inf, requires_grad=True)
    propagate_nonfinite(loss).backward()
    assert loss.grad is not None and math.isnan(loss.grad.item())
    for value in (0.0, -2.5, 2.0**100):
        sound = torch.tensor(value, requires_grad=True)
        after = propagate_nonfinite(sound)
        after.backward()
        assert after.item() == value and sound.grad is not None and sound.grad.item() == 1


@pytest.mark.gpu
@every_optimizer
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fault_name", ["nan", "inf", "grad_inf"])
def test_a_nonfinite_step_changes_nothing_on_a_gpu(
    optimizer: str, precision: str, fault_name: str, tmp_path: Path
) -> None:
    found = fit(tmp_path, optimizer, f"{fault_name}@{BAD}", precision=precision, accelerator="gpu")
    # The first steps of a loss scaler may overflow, which is not an error.
    is_first = 1 if precision != "fp16" else BAD
    moved = [found.moved(step) for step in range(is_first, BAD + 1)]
    assert moved == [True] * (BAD - is_first) + [False]
    assert all(weight.isfinite().all() for weight in found.states[-1][0].values())
    if precision == "fp16" and fault_name == "grad_inf":
        assert found.fault is None
    else:
        assert str(found.fault).startswith(f"step {BAD}: loss ")


# Reports.


def test_skipped_steps_give_warnings_and_one_too_many_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["nan@2", "grad_inf@3", "inf@5"]
    with caplog.at_level(logging.WARNING):
        found = fit(tmp_path, "adamw", *texts, watch=StepWatch(max_skipped_steps=2), every=1)
    assert [found.moved(step) for step in range(1, STEPS)] == [True, False, False, True]
    warnings = [record.message for record in caplog.records if "is skipped" in record.message]
    assert len(warnings) == 2
    assert warnings[0].startswith("step 2: loss nan (of lists, orders), gradient norm nan; ")
    assert warnings[0].endswith("1 of trainer.max_skipped_steps=2")
    assert warnings[1].startswith("step 3: loss ")
    assert str(found.fault).startswith("step 5: loss inf (of lists, orders), gradient norm nan; ")
    assert "after 2 that trainer.max_skipped_steps=2 allows" in str(found.fault)
    assert "trainer.max_skipped_steps=3" in str(found.fault)


def test_skipped_steps_are_counted_across_a_resume_and_in_the_summary(tmp_path: Path) -> None:
    found = fit(tmp_path, "adamw", f"nan@{STEPS}", watch=StepWatch(max_skipped_steps=1))
    assert found.fault is None
    assert found.metrics.summary()["train/skipped_steps"] == 1.0
    state = found.metrics.state_dict()
    assert all(math.isfinite(value) for value in state["latest"].values())
    resumed = Metrics(NAMES, [], 1, StepWatch(max_skipped_steps=1))
    resumed.load_state_dict(state)
    with pytest.raises(TrainingFault, match="step 6: "):
        resumed.add(record_of(6), lambda tensor: tensor)


def record_of(
    step: int, losses: tuple[float, float] = (math.nan, 1.0), *, rank: int = 0, num_ranks: int = 1
) -> StepRecord:
    """Return a step of two micro-batches with these losses: the first of `lists`, then of both."""
    sums = torch.tensor([[losses[0] + losses[1], losses[1]], [2.0, 1.0], [2.0, 1.0]])
    return StepRecord(
        step=step,
        lr=1e-3,
        grad_norm=torch.tensor(math.nan),
        sums=sums.double(),
        num_tokens=10,
        is_scaled=False,
        losses=[torch.tensor(loss) for loss in losses],
        rank=rank,
        num_ranks=num_ranks,
    )


def rows_of(step: int) -> Iterator[StepRow]:
    """Yield three rows of either data set for each of two micro-batches of two ranks."""
    for rank in range(2):
        for micro_batch in range(2):
            for dataset in NAMES:
                for line in range(3):
                    yield StepRow(
                        rank, micro_batch, dataset, Origin(f"{dataset}-{rank}{micro_batch}", line)
                    )


def test_rows_of_the_nonfinite_data_set_and_micro_batch_are_named() -> None:
    metrics = Metrics(NAMES, [], 1, StepWatch(rows_of=rows_of))
    other_rank = torch.zeros(2, 2)

    def reduce(tensor: Tensor) -> Tensor:
        return tensor + other_rank if tensor.shape == (2, 2) else tensor

    record = record_of(7, rank=1, num_ranks=2)
    with pytest.raises(TrainingFault, match="loss nan") as caught:
        metrics.add(record, reduce)
    message = str(caught.value)
    assert "(of lists), gradient norm nan; rows lists-10:0, lists-10:1, lists-10:2. The" in message
    other_rank[0, 1] = 1.0  # the same of the other rank, in its second micro-batch
    with pytest.raises(TrainingFault) as caught:
        metrics.add(record, reduce)
    more = "rows lists-01:0, lists-01:1, lists-01:2, lists-10:0, lists-10:1 and 1 more"
    assert more in str(caught.value)
    # Finite losses: any of the step's rows; of a stream nothing is known.
    for watch, rows in ((StepWatch(rows_of=rows_of), "orders-00:1 and 19 more"), (None, "stream")):
        with pytest.raises(TrainingFault, match=rows):
            Metrics(NAMES, [], 1, watch).add(record_of(7, (1.0, 1.0), num_ranks=2), lambda one: one)


# Spikes.


def test_ranks_that_clip_by_their_own_norms_skip_separately_and_report_the_mean() -> None:
    for differs, message in ((True, "was skipped on the ranks whose"), (False, "was skipped;")):
        record = replace(record_of(7, num_ranks=2), norm_differs=differs)
        with pytest.raises(TrainingFault, match=message):
            Metrics(NAMES, [], 1, StepWatch()).add(record, lambda tensor: tensor)
        metrics = Metrics(NAMES, [], 1)
        good = replace(record_of(1, (1.0, 1.0), num_ranks=2), norm_differs=differs)
        good.grad_norm = torch.tensor(2.0)
        metrics.add(good, lambda tensor: tensor + 6.0 if tensor.ndim == 1 else tensor)
        assert metrics.latest["train/grad_norm"] == (4.0 if differs else 2.0)


def spike_warnings(losses: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    metrics = Metrics(NAMES, [], 1, StepWatch(rows_of=rows_of))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, loss in enumerate(losses, start=1):
            record = record_of(step, (loss, loss))
            record.grad_norm = torch.tensor(1.0)
            record.sums[0] = torch.tensor([loss * 2, loss])
            metrics.add(record, lambda tensor: tensor)
    return [record.message for record in caplog.records]


def test_a_spike_gives_one_warning_with_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    usual = [2.0, 2.2, 1.8, 2.1]
    losses = usual * 5 + [9.0, 9.5] + usual * 20 + [8.0]
    messages = spike_warnings(losses, caplog)
    assert len(messages) == 2
    start = "step 21: loss of lists 9.0000 is 4.4 times the median of the 20 steps before"
    assert messages[0].startswith(start) and "rows lists-00:0, " in messages[0]
    assert messages[1].startswith(f"step {len(losses)}: loss of lists 8.0000")
    (message,) = spike_warnings([0.0] * 30 + [5.0], caplog)
    assert "loss of lists 5.0000 is far above the median of the" in message


@pytest.mark.parametrize(
    "losses",
    [
        [6.0 * 0.9**step for step in range(60)],
        [2.0, 3.0] * 20 + [5.0],
        [0.001] * 40 + [0.9],
        [9.0, 1.0, 9.0],
        [3.0] * 4 + [0.02, 0.04, 0.01, 1.8, 0.02, 0.01, 0.05] * 9,
    ],
    ids=["falling", "twice the median", "memorized", "too early", "a seventh is harder"],
)
def test_not_a_spike(losses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    assert spike_warnings(losses, caplog) == []


def test_a_spike_is_one_of_its_own_data_set_and_of_a_full_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = StepWatch()
    hard, easy, few = {"lists": (4.0, 90)}, {"orders": (0.2, 80)}, {"orders": (4.0, 8)}

    def check(step: int, by_name: dict[str, tuple[float, int]]) -> None:
        metrics = {"train/loss": 1.0, "train/grad_norm": 1.0}
        for name, (loss, tokens) in by_name.items():
            metrics |= {f"train/loss/{name}": loss, f"train/tokens/{name}": tokens}
        watch.check(SimpleNamespace(step=step, is_scaled=False), metrics, lambda tensor: tensor)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        for step in range(40):
            check(step, hard if step % 20 == 19 else few if step % 9 == 8 else easy)
        assert not caplog.messages
        check(40, {"orders": (4.0, 80)})
    assert len(caplog.messages) == 1 and "loss of orders 4.0000 is 20.0 times" in caplog.text


def test_a_run_that_learns_nothing_is_warned_of_after_a_third(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for losses, warning in (
        ([2.30 + 0.004 * (-1) ** step for step in range(90)], "it was 2.3"),
        ([math.log(64)] * 90, "that of chance, log(64) = 4.1589"),
        ([2.30 - 0.004 * step for step in range(90)], ""),
        ([2.30] * 60, ""),  # too short a run
    ):
        caplog.clear()
        watch = StepWatch(total_steps=len(losses), vocab_size=64)
        for step, loss in enumerate(losses, start=1):
            record: Any = SimpleNamespace(step=step, is_scaled=False)
            watch.check(record, {"train/loss": loss, "train/grad_norm": 1.0}, torch.clone)
        assert len(caplog.messages) == bool(warning) and warning in caplog.text
        assert ("step 30: nothing is learned" in caplog.text) == bool(warning)


def test_a_loss_scaler_skips_nonfinite_steps_by_itself() -> None:
    for added, scale in ((0.0, 4.0), (math.inf, 2.0)):  # an infinite loss of finite gradients
        model, scaler = build_model(), torch.amp.GradScaler("cpu", init_scale=4.0)
        config, ids = PARTS["optimizer"]["adamw"](), random_ids(rows=2)
        own = build_optimizer(model, config, FullConfig(), lr=1e-2, fused=False)
        loss = model(input_ids=ids, labels=ids).loss + added
        scaler.scale(propagate_nonfinite(loss)).backward()
        scaler.unscale_(own)
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        skip_nonfinite_step(own, norm, is_scaled=True)
        scaler.step(own)
        scaler.update()
        assert scaler.get_scale() == scale and bool(own.state) == (added == 0.0)


def test_a_loss_scaler_that_skips_every_step_ends_the_run() -> None:
    metrics = Metrics(NAMES, [], 1)

    def overflow(step: int) -> None:
        record = record_of(step, (1.0, 1.0))
        record.is_scaled = True
        metrics.add(record, lambda tensor: tensor)

    for step in range(1, MAX_OVERFLOWS + 1):
        overflow(step)
    with pytest.raises(TrainingFault, match=r"step 33: .* in the 32 steps before"):
        overflow(33)
    assert metrics.watch.num_skipped == 0


# Checkpoints.


def test_nonfinite_tensors_are_not_saved() -> None:
    sound = {"a": torch.ones(3), "b": torch.full((2, 2), -3e38).bfloat16(), "n": torch.arange(3)}
    check_finite_state(4, sound, {"none": torch.zeros(0), "exp_avg/a": torch.zeros(3, 2)})
    for value in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            bad = torch.zeros(5, 7, dtype=dtype)
            bad[3, 2] = value
            with pytest.raises(TrainingFault, match=r"step 4: exp_avg/b .*, and so have 1 more"):
                check_finite_state(4, sound, {"exp_avg/b": bad.T, "x": bad[2:], "y": bad[:2]})


# Injected faults.


def test_the_rows_of_a_step_are_those_that_its_batches_hold() -> None:
    config = load_config("train", small_run("data.val_set_size=0"))
    datamodule = datamodule_of(config, micro_batch_size=2, accumulation_steps=2, max_steps=3)
    examples = {str(e.origin): e.input_ids.tolist() for e in datamodule.train_examples}
    for number, batch in enumerate(micro_batches(datamodule)):
        step, micro_batch = number // 2 + 1, number % 2
        rows = [r for r in datamodule.rows_of_step(step) if r.micro_batch == micro_batch]
        ids = [token for row in rows for token in examples[str(row.origin)]]
        held: list[int] = []
        for row_ids, lengths in zip(batch.input_ids, batch.document_lengths, strict=True):
            held += row_ids[: sum(lengths)].tolist()
        assert ids == held
        assert {f"{row.dataset}_test" for row in rows} == {
            Path(row.origin.file).stem for row in rows
        }
    assert number == 5


RUN = (
    "trainer.max_steps=6",
    "trainer.validate_every_steps=5",
    "trainer.checkpoint.every_steps=2",
    "trainer.checkpoint.keep_last=9",
    "trainer.log_every_steps=4",
    "evaluation.exact_match=false",
    "adapter.dropout=0.1",
    "logger=csv",
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the verb in this process; return its exit code and stderr."""

    def run(folder: Path, *words: str) -> tuple[int, str]:
        typed = [*small_run(*RUN, *words), f"output.dir={folder}"]
        with as_new_process():
            return run_verb("train", train, words=typed), capsys.readouterr().err

    return run


def saved_steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(folder / "checkpoints").checkpoints()]


def losses_of(folder: Path) -> dict[int, str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return {int(r["step"]): r["train/loss"] for r in csv.DictReader(file) if r["train/loss"]}


@pytest.mark.slow
def test_a_run_stops_naming_the_rows_and_resumes_as_if_uninterrupted(
    tmp_path: Path, run: Any
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert run(whole)[0] == 0
    words = ("resume=auto", "faults=[nan@4,grad_inf@5]")
    code, output = run(folder, *words)
    assert code == 4
    assert "error (training stopped): step 4: loss nan (of " in output
    named = re.findall(rf"{re.escape(str(SAMPLES))}/\w+\.jsonl?:(\d+)", output)
    assert named and all(int(line) >= 1 for line in named)
    assert saved_steps(folder) == [2] and losses_of(folder)[4] == "nan"
    assert not (folder / "adapter").exists() and not (folder / "metrics.json").exists()
    code, output = run(folder, *words)
    assert code == 4
    assert re.search(r"step 5: loss [\d.]+, gradient norm (inf|nan); rows ", output)
    assert saved_steps(folder) == [2, 4]
    assert run(folder, *words)[0] == 0
    check_same_run(folder, whole)


@pytest.mark.slow
def test_a_nonfinite_value_on_one_rank_stops_both_with_one_message(
    shell: Shell, tmp_path: Path
) -> None:
    words = [*small_run(*RUN, "trainer.devices=2"), "faults=[nan:1@3]"]
    output = shell.train_into(tmp_path / "run", *words, code=4)
    assert output.count("error (training stopped): ") == 1
    _, _, message = output.partition("error (training stopped): ")
    assert message.startswith("step 3: loss nan (of ") and f"{SAMPLES}" in message
    assert saved_steps(tmp_path / "run") == [2]
