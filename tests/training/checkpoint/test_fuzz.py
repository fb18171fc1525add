"""Checkpoints whose files were changed: refused by file and key, or restored as written.

At random, with the hashes that a file was written with and with hashes that fit it, in a child
process, since what crashes or hangs there must not take the tests along; then what no hash tells.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.model.adapter import FullConfig, LoraConfig
from app.run import find_newest_good
from app.strategy.ddp import SingleDevice
from app.training.checkpoint.checkpoint import Checkpoint, load_checkpoint
from app.training.checkpoint.documents import (
    MODEL,
    OPTIMIZER,
    TRAINING,
    check_documents,
    random_state_name,
    read_random_state,
    read_training,
)
from app.training.checkpoint.saving import StoredCheckpoints
from app.training.checkpoint.state import (
    Resume,
    check_random_state,
    model_state,
    optimizer_state,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
    restore_schedule,
)
from app.training.checkpoint.store import CHECKPOINTS, CheckpointStore
from app.training.metrics import Metrics
from app.training.optimizers import AdamWConfig, ScheduleFreeConfig
from common.errors import ENVIRONMENT_ERROR, USER_ERROR, UserError, exit_code
from tests.mutations import mutate_bytes, mutate_json, mutate_safetensors
from tests.resumed import IDENTITY, seal, training_document, write_manifest
from tests.training.checkpoint.saves import in_a_child
from tests.training.checkpoint.test_state import Training

NUM_CHANGES = 30
"""of each kind of file"""
LONGEST = 20
"""seconds that one of them may take"""
STEP, EARLIER = 4, 2
CPU = torch.device("cpu")
DOCUMENTS = ("manifest.json", "training.json", "random-rank-0.json")
TENSORS = ("model.safetensors", "optimizer.safetensors")
Dice = random.Random


def save(training: Training, folder: Path, step: int) -> None:
    """Save as a run of one rank does, without a trainer around it."""
    store = CheckpointStore(folder, keep_last=9)
    tensors, numbers = optimizer_state(training.model, training.optimizer)
    store.begin(step)
    store.add_tensors(step, MODEL, model_state(training.model))
    store.add_tensors(step, OPTIMIZER, tensors)
    store.add_document(step, TRAINING, training_document(step) | {"optimizer": numbers})
    store.add_document(step, random_state_name(0), random_state(CPU))
    counts = {"num_ranks": 1, "num_data_ranks": 1, "total_steps": 8}
    store.commit(step, details=counts | {"run": IDENTITY})


def restore(training: Training, checkpoint: Checkpoint) -> None:
    """Restore as a run does: documents, weights, states, schedule, curves, random numbers."""
    check_documents(checkpoint)
    read = StoredCheckpoints(CheckpointStore(checkpoint.folder.parent), checkpoint).load_checkpoint(
        checkpoint.folder
    )
    Metrics(["one"], [], 1).load_state_dict(read["training"]["curves"])
    restore_model(training.model, read["state_dict"])
    tensors, numbers = checkpoint.tensors(OPTIMIZER), read["training"]["optimizer"]
    restore_optimizer(training.model, training.optimizer, tensors, numbers, step=checkpoint.step)
    restore_schedule(training.schedule, checkpoint.step)
    state = read_random_state(checkpoint, 0)
    check_random_state(state, CPU)
    restore_random_state(state, CPU)


# What happens to tensors, besides what happens to any file.


def change_values(content: bytearray, dice: Dice) -> None:
    """Write numbers that no training leaves, whatever type they are read as."""
    start = 8 + int.from_bytes(content[:8], "little")
    at = start + 4 * dice.randrange(max(1, (len(content) - start) // 4))
    content[at : at + 4] = dice.choice(
        (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x00\x00\x80\xbf")
    )


def lose_or_add(content: bytearray, dice: Dice) -> None:
    """Write the file again, sound, with a tensor less, one more, or one of another dtype."""
    tensors: dict[str, Tensor] = safetensors.torch.load(bytes(content))
    name = dice.choice(sorted(tensors))
    what = dice.choice(("less", "more", "dtype", "empty", "none"))
    if what == "less":
        del tensors[name]
    elif what == "more":
        tensors[f"{name}2"] = tensors[name].clone()
    elif what == "dtype":
        dtype = dice.choice((torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool))
        tensors[name] = tensors[name].to(dtype)
    elif what == "empty":
        tensors[name] = torch.empty(0)
    else:
        tensors.clear()
    content[:] = safetensors.torch.save(tensors)


def changed(content: bytes, name: str, dice: Dice) -> bytes:
    """Return a file's bytes after one change that fits its kind, or any."""
    if name == "COMMITTED":
        return mutate_bytes(content, dice)
    if name not in TENSORS:
        return mutate_json(content, dice)
    change = dice.choice([mutate_safetensors, change_values, lose_or_add])
    if change is mutate_safetensors:
        return mutate_safetensors(content, dice)
    mutable = bytearray(content)
    change(mutable, dice)
    return bytes(mutable)


class Bench:
    """A run's folder with two checkpoints, and a training that each of them is restored into."""

    def __init__(self, config: Any, adapter: Any) -> None:
        self.run = Path(tempfile.mkdtemp())
        self.folder = self.run / CHECKPOINTS / f"step-{STEP}"
        self.training = Training(config, adapter)
        (self.run / CHECKPOINTS).mkdir()
        for step in (EARLIER, STEP):
            self.training.take_steps(range(step - 2, step))
            save(self.training, self.run / CHECKPOINTS, step)
        self.last = "manifest.json"
        """what was changed before"""
        self.files = {file.name: file.read_bytes() for file in self.folder.iterdir()}

    def try_out(self, name: str, content: bytes, *, fits: bool) -> str:
        """Go on from the run with one file changed; return what came of it."""
        for other in {self.last, "manifest.json", "COMMITTED"}:
            (self.folder / other).write_bytes(self.files[other])
        self.last = name
        (self.folder / name).write_bytes(content)
        if fits and name == "manifest.json":
            write_manifest(self.folder, content)
        elif fits:
            seal(self.folder)
        try:
            good, damages = find_newest_good(self.run)
            assert good is not None
            if good.step == EARLIER:
                # A manifest that says something else of a file leaves that file to be named.
                assert name in damages[0] or name in ("COMMITTED", "manifest.json"), damages
                return "the one before"
            restore(self.training, good)
        except UserError as error:
            assert exit_code(error) in (USER_ERROR, ENVIRONMENT_ERROR)
            # By the functions of a state; a run's module puts the file before it.
            assert name in str(error) or "resume: " in str(error), error
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", str(error)), ascii(str(error))
            assert len(str(error)) < 9000
            return "refused"
        if name in TENSORS:
            self.check_restored(good)
        return "restored"

    def check_restored(self, good: Checkpoint) -> None:
        """Make sure that what was restored is what the files say, and a step can be taken."""
        for key, kept in model_state(self.training.model).items():
            assert torch.equal(kept, good.tensors(MODEL)[key]) and kept.isfinite().all()
        for tensor in optimizer_state(self.training.model, self.training.optimizer)[0].values():
            assert tensor.isfinite().all()
        self.training.take_steps(range(1))


KINDS = {
    "adamw": (AdamWConfig(), LoraConfig(r=2, dropout=0.0, target_modules=["q_proj"])),
    "schedule_free": (ScheduleFreeConfig(), FullConfig()),
}


def fuzz(name: str, kind: str) -> None:
    """Change one file of a checkpoint `NUM_CHANGES` times; raises where one is taken wrongly."""
    torch.set_num_threads(1)
    bench, outcomes = Bench(*KINDS[kind]), set()

    @settings(
        max_examples=NUM_CHANGES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32 - 1))
    def change_and_go_on(seed: int) -> None:
        signal.alarm(LONGEST)
        content = changed(bench.files[name], name, Dice(seed))
        for fits in (False,) if name == "COMMITTED" else (False, True):
            outcomes.add(bench.try_out(name, content, fits=fits))
        signal.alarm(0)

    try:
        change_and_go_on()
    finally:
        shutil.rmtree(bench.run)
    assert {"the one before", "refused"} <= outcomes or name == "COMMITTED", outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("adamw", name) for name in (*DOCUMENTS, *TENSORS, "COMMITTED")),
        ("schedule_free", "optimizer.safetensors"),  # the only file with other names
    ],
)
def test_a_changed_file_is_refused_or_restored_as_it_says(name: str, kind: str) -> None:
    ended = in_a_child(lambda: fuzz(name, kind))
    assert ended == 0, f"the child ended with {ended} (-14: one took over {LONGEST} s)"


def first(tensors: dict[str, Tensor], prefix: str) -> str:
    return min(name for name in tensors if name.startswith(prefix))


Change = Callable[[dict[str, Tensor]], object]
WRONG: list[tuple[str, Change, str]] = [
    (
        OPTIMIZER,
        lambda t: t.pop(first(t, "exp_avg/")),
        r"step-4: optimizer.safetensors: exp_avg/\S+ is missing; type resume=\S*step-2 ",
    ),
    (
        OPTIMIZER,
        lambda t: t.update({first(t, "step/").replace("step/", "steps/"): torch.ones(())}),
        r"steps/\S+ is not a state of this optimizer, which has exp_avg, exp_avg_sq, step",
    ),
    (
        OPTIMIZER,
        lambda t: t.update({first(t, "exp_avg/"): torch.zeros(3)}),
        r"exp_avg/\S+ is float32 \[3\]; expected float32 \[\d+, \d+\]",
    ),
    (
        OPTIMIZER,
        lambda t: t[first(t, "exp_avg/")].fill_(torch.nan),
        r"optimizer.safetensors: exp_avg/\S+ has non-finite values \(nan\)",
    ),
    (
        OPTIMIZER,
        lambda t: t[first(t, "exp_avg_sq/")].fill_(-1.0),
        r"exp_avg_sq/\S+ holds -1.0; expected no number below 0",
    ),
    (
        OPTIMIZER,
        lambda t: t[first(t, "step/")].fill_(9.0),
        r"step/\S+ is 9.0; expected a whole number up to 4",
    ),
    (
        MODEL,
        lambda t: t[first(t, "")].fill_(torch.inf),
        r"model.safetensors: \S+ has non-finite values \(inf\)",
    ),
]


def test_tensors_that_do_not_fit_the_run_are_named(tmp_path: Path) -> None:
    """Their hashes fit: whoever changed them has computed them again."""
    training = Training(*KINDS["adamw"])
    for step in (EARLIER, STEP):
        training.take_steps(range(step - 2, step))
        save(training, tmp_path / "saved", step)
    module: Any = SimpleNamespace(
        model=training.model,
        optimizer=training.optimizer,
        strategy=SingleDevice("cpu"),
        lr_schedulers=lambda: training.schedule,
    )

    def resume(folder: Path) -> None:
        checkpoint = load_checkpoint(folder)
        check_documents(checkpoint)
        resume = Resume(module, checkpoint, read_training(checkpoint))
        resume.restore_model(checkpoint.tensors(MODEL))
        resume.restore_optimizer()

    resume(tmp_path / "saved" / f"step-{STEP}")
    for part, change, words in WRONG:
        folder = shutil.copytree(tmp_path / "saved", Path(tempfile.mkdtemp(dir=tmp_path)) / "run")
        folder /= f"step-{STEP}"
        tensors = safetensors.torch.load_file(folder / f"{part}.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, folder / f"{part}.safetensors")
        seal(folder)
        with pytest.raises(UserError, match=words):
            resume(folder)


CONTRADICTIONS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (TRAINING, lambda d: d.update(step=3), "training.json: step is 3; expected 4"),
    (
        TRAINING,
        lambda d: d["curves"]["trained_tokens"].append(1.0),
        "curves.trained_tokens has 2 numbers; expected 1",
    ),
    (random_state_name(0), lambda d: d.update(torch="AAAA"), "torch has 3 bytes; expected"),
    ("manifest", lambda d: d["details"].update(num_ranks=2), "lacks random-rank-1.json"),
]


@pytest.mark.parametrize(("name", "change", "words"), CONTRADICTIONS)
def test_documents_that_contradict_each_other_are_named(
    name: str, change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    training = Training(*KINDS["adamw"])
    training.take_steps(range(STEP))
    save(training, tmp_path, STEP)
    file = tmp_path / f"step-{STEP}" / f"{name}.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    if name == "manifest":
        write_manifest(file.parent, file.read_bytes())
    else:
        seal(file.parent)
    with pytest.raises(UserError, match=words):
        restore(training, load_checkpoint(file.parent))
