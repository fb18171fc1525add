"""A checkpoint that is as it was written and cannot be used is refused by file and key.

Its hashes fit: whoever changed it has computed them again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.adapter import LoraConfig
from app.strategy.ddp import SingleDevice
from app.training.checkpoint.checkpoint import load_checkpoint
from app.training.checkpoint.documents import MODEL, check_documents, read_training
from app.training.checkpoint.state import Resume
from app.training.optimizers import AdamWConfig
from common.errors import UserError
from tests.resumed import seal
from tests.training.checkpoint.test_fuzz import save
from tests.training.checkpoint.test_state import Training

Change = Callable[[Path], None]


def of_document(name: str, change: Callable[[Any], Any]) -> Change:
    """Change a document; what `change` returns takes its place, if anything."""

    def apply(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        changed = change(document)
        (folder / name).write_text(json.dumps(document if changed is None else changed))

    return apply


def of_tensors(name: str, change: Callable[[dict[str, torch.Tensor], str], Any]) -> Change:
    """Change the tensors of a file; `change` receives all of them and the name of the last."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors, sorted(tensors)[-1])
        save_file(tensors, folder / name)

    return apply


def first_moment(tensors: dict[str, torch.Tensor]) -> str:
    return min(name for name in tensors if name.startswith("exp_avg/"))


def spoil(value: float, prefix: str) -> Callable[[dict[str, torch.Tensor], str], None]:
    def change(tensors: dict[str, torch.Tensor], last: str) -> None:
        tensors[min(name for name in tensors if name.startswith(prefix))].view(-1)[0] = value

    return change


def text(content: bytes) -> Change:
    return lambda folder: (folder / "training.json").write_bytes(content) and None


def without_training(folder: Path) -> None:
    of_document("manifest.json", lambda m: m["files"].pop("training.json") and None)(folder)
    (folder / "training.json").unlink()


DOCUMENTS: dict[str, tuple[Change, str]] = {
    "no optimizer": (
        of_document("training.json", lambda training: training.pop("optimizer") and None),
        r"step-4: training.json: optimizer is missing; type resume=\S*step-2 to resume from",
    ),
    "a shorter random state": (
        of_document("random-rank-0.json", lambda state: state["python"][1].pop() and None),
        r"random-rank-0.json: python is a list of 3; expected the value of random.getstate\(\)",
    ),
    "a position behind the state": (
        of_document("random-rank-0.json", lambda state: state["numpy"].__setitem__(2, 10**6)),
        "random-rank-0.json: numpy is a list of 5; expected the value of numpy",
    ),
    "what is for a library": (
        of_document("training.json", lambda t: t["lightning"].update(loops={"fit_loop": 1})),
        "training.json: lightning.loops is not a known key",
    ),
    "a list": (
        of_document("training.json", lambda training: [training]),
        "training.json: the document is a list of 1; expected an object",
    ),
    "another step": (
        of_document("training.json", lambda training: training.update(step=3)),
        "training.json: step is 3; expected 4, the step of the checkpoint",
    ),
    "text for a number": (
        of_document("training.json", lambda t: t["curves"].update(num_tokens="\x1b[31m9")),
        r'curves.num_tokens is "\\u001b\[31m9"; expected a whole number of at least 0',
    ),
    "more tokens than data sets": (
        of_document("training.json", lambda t: t["curves"]["trained_tokens"].append(1.0)),
        "curves.trained_tokens has 2 numbers; expected 1, one for each data set",
    ),
    "an infinite number": (
        of_document("training.json", lambda t: t["curves"].update(train_seconds=float("inf"))),
        "training.json: curves.train_seconds is Infinity; expected a finite number",
    ),
    "nested": (text(b"[" * 100_000), "training.json: is nested too deeply"),
    "many digits": (text(b'{"step": ' + b"1" * 5000 + b"}"), "training.json: Exceeds the limit"),
    "not UTF-8": (text(b'{"step": "\xff"}'), "training.json: is not UTF-8 at byte 10"),
    "no ranks": (
        of_document("manifest.json", lambda m: m["details"].update(num_ranks=0)),
        "manifest.json: details.num_ranks is 0; expected a whole number of at least 1",
    ),
    "more ranks": (
        of_document("manifest.json", lambda m: m["details"].update(num_ranks=2)),
        "manifest.json: files lacks random-rank-1.json",
    ),
    "no training": (without_training, "manifest.json: files lacks training.json"),
}
TENSORS: dict[str, tuple[Change, str]] = {
    "a moment is missing": (
        of_tensors("optimizer.safetensors", lambda t, last: t.pop(first_moment(t))),
        r"step-4: optimizer.safetensors: exp_avg/\S+ is missing; type resume=\S*step-2 ",
    ),
    "an unknown state": (
        of_tensors(
            "optimizer.safetensors",
            lambda tensors, last: tensors.update(
                {last.replace("step/", "steps/"): torch.ones(()), last: torch.ones(())}
            ),
        ),
        r"steps/\S+ is not a state of this optimizer, which has exp_avg, exp_avg_sq, step",
    ),
    "another dtype": (
        of_tensors(
            "optimizer.safetensors",
            lambda tensors, last: tensors.update(
                {n: t.view(torch.int32) for n, t in tensors.items() if n.startswith("exp_avg/")}
            ),
        ),
        r"exp_avg/\S+ is int32 \[\d+, \d+\]; expected float32",
    ),
    "another shape": (
        of_tensors(
            "optimizer.safetensors", lambda t, last: t.update({first_moment(t): torch.zeros(3)})
        ),
        r"exp_avg/\S+ is float32 \[3\]; expected float32 \[\d+, \d+\]",
    ),
    "NaN in a state": (
        of_tensors("optimizer.safetensors", spoil(float("nan"), "exp_avg/")),
        r"optimizer.safetensors: exp_avg/\S+ has non-finite values \(nan\)",
    ),
    "a negative second moment": (
        of_tensors("optimizer.safetensors", spoil(-1.0, "exp_avg_sq/")),
        r"exp_avg_sq/\S+ holds -1.0; expected no number below 0",
    ),
    "more steps than were taken": (
        of_tensors("optimizer.safetensors", spoil(9.0, "step/")),
        r"step/\S+ is 9.0; expected a whole number up to 4",
    ),
    "an infinite weight": (
        of_tensors("model.safetensors", spoil(float("inf"), "")),
        r"model.safetensors: \S+ has non-finite values \(inf\)",
    ),
    "a torch state of another size": (
        of_document("random-rank-0.json", lambda state: state.update(torch="AAAA")),
        "random-rank-0.json: torch has 3 bytes; expected 5,056",
    ),
    "a torch state of nothing": (
        of_document("random-rank-0.json", lambda state: state.update(torch="/" * 6740 + "/w==")),
        "random-rank-0.json: torch is not a valid state of its generator",
    ),
}


@pytest.mark.parametrize(("change", "words"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_document_that_is_not_what_was_saved_is_named(
    saved: tuple[Training, Path], tmp_path: Path, change: Change, words: str
) -> None:
    folder = shutil.copytree(saved[1], tmp_path / "checkpoints") / "step-4"
    change(folder)
    seal(folder)
    with pytest.raises(UserError, match=words):
        check_documents(load_checkpoint(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    """A training, and the folder of the checkpoints of its second and fourth step."""
    training, folder = Training(AdamWConfig(), LoraConfig(r=4)), tmp_path_factory.mktemp("saved")
    for step in (2, 4):
        training.take_steps(range(step - 2, step))
        save(training, folder / "checkpoints", step)
    return training, folder / "checkpoints"


@pytest.mark.parametrize(("change", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_the_run_are_named(
    saved: tuple[Training, Path], tmp_path: Path, change: Change, words: str
) -> None:
    training, folder = saved[0], shutil.copytree(saved[1], tmp_path / "checkpoints") / "step-4"
    module: Any = SimpleNamespace(
        model=training.model,
        optimizer=training.optimizer,
        strategy=SingleDevice("cpu"),
        lr_schedulers=lambda: training.schedule,
    )

    def resume() -> None:
        checkpoint = load_checkpoint(folder)
        check_documents(checkpoint)
        resume = Resume(module, checkpoint, read_training(checkpoint))
        resume.restore_model(checkpoint.tensors(MODEL))
        resume.restore_optimizer()

    resume()
    change(folder)
    seal(folder)
    with pytest.raises(UserError, match=words):
        resume()
