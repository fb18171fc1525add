"""A stalled run ends within seconds of SIGTERM, with all its processes.

One function of an ordinary command stalls: in a system call that a signal interrupts, or in library
code that no signal interrupts.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.training.checkpoint.store import CheckpointStore
from tests.processes import LONGEST, ends_within
from tests.reliability.shell import Shell
from tests.runs import check_same_run
from tests.tiny import SAMPLES, TINY_BASE, small_run, train_into

pytestmark = pytest.mark.slow

TOKENS = "data_modules.tokens.encode:ChunkEncoder.__call__"
WHERE = {
    "tokens in workers": (TOKENS, "data.num_proc=2"),
    "answers at the end": (
        "app.evaluation.evaluator:answer_batches",
        "evaluation.exact_match=true",
    ),
}

Stall = Callable[..., tuple[int, float, str]]


@pytest.fixture
def stall(shell: Shell) -> Stall:
    def stall_and_stop(
        folder: Path, verb: str, place: str, how: str, calls: int, words: list[str]
    ) -> tuple[int, float, str]:
        """Send SIGTERM to a stalled command; return its exit code, seconds to the end, and output.

        No temporary files may be left.
        """
        folder.mkdir(exist_ok=True)
        sent = []

        def stop(pid: int) -> None:
            until = time.monotonic() + LONGEST
            while not (folder / "stalls").exists():
                assert Path(f"/proc/{pid}").exists() and time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.3)
            sent.append(time.monotonic())
            os.kill(pid, signal.SIGTERM)

        typed = [verb, place, how, str(folder), str(calls), *words]
        module = "tests.end_to_end.stalling"
        ending = shell.type_train(typed, folder, module=module, meanwhile=stop)
        seconds = time.monotonic() - sent[0]
        left = [
            file.name
            for file in folder.rglob("*")
            if re.search(r"\.tmp|^\.\w+\.\w+\.\d+$", file.name)
        ]
        assert not left
        return ending.code, seconds, ending.output

    return stall_and_stop


@pytest.mark.parametrize("case", WHERE.values(), ids=WHERE)
def test_a_stalled_run_ends_within_the_limit(
    tmp_path: Path, stall: Stall, case: tuple[str, str]
) -> None:
    place, word = case
    typed = [
        *small_run("trainer.max_steps=1", word),
        f"data.cache_dir={tmp_path / 'run' / 'cache'}",
        f"output.dir={tmp_path / 'run' / 'out'}",
    ]
    code, seconds, output = stall(tmp_path / "run", "train", place, "hangs", 0, typed)
    assert (code, seconds < ends_within()) == (143, True), (seconds, output)


def test_completed_steps_are_saved_if_data_stalls(tmp_path: Path, stall: Stall) -> None:
    """test_signals.py of process has data that hangs in a library: then nothing can be saved."""
    folder = tmp_path / "run"
    typed = [
        *small_run("trainer.max_steps=9", "data.val_set_size=0", "logger=csv"),
        "trainer.checkpoint.every_steps=9",
        "evaluation.exact_match=false",
        f"output.dir={folder / 'out'}",
    ]
    batches = "data_modules.datamodule:_Batches.__getitem__"
    code, seconds, output = stall(folder, "train", batches, "sleeps", 4, typed)  # two per step
    assert (code, seconds < ends_within()) == (143, True), (seconds, output)
    saved = CheckpointStore(folder / "out" / "checkpoints").newest_good()[0]
    assert saved is not None and saved.step == 2
    assert "the data of the next step did not arrive; step 2 is saved" in output


def test_an_interrupted_evaluation_is_repeated_on_resume(tmp_path: Path, stall: Stall) -> None:
    measured = (
        *small_run("trainer.validate_every_steps=2", "trainer.checkpoint.every_steps=9"),
        "logger=csv",
        "evaluation.tasks=[{name: boolq, few_shot: 0}]",
        *("evaluation.exact_match=false", "evaluation.every_steps=2"),
    )
    folder = tmp_path / "run"
    code, seconds, output = stall(
        *(folder, "train", "app.evaluation.likelihood:score", "sleeps", 1),  # after step 2
        [*measured, f"output.dir={folder / 'out'}"],
    )
    assert (code, seconds < ends_within()) == (143, True), (seconds, output)
    assert "the interrupted measurement will be repeated; step 2 is saved" in output
    resumed = train_into(folder / "out", *measured, "resume=must")
    check_same_run(resumed, train_into(tmp_path / "whole", *measured))


def test_another_stalled_verb_ends_within_the_limit(tmp_path: Path, stall: Stall) -> None:
    data = f"data.test_datasets=[{{path: {SAMPLES / 'orders_test.jsonl'}}}]"
    words = [data, f"model.path={TINY_BASE}", f"data.cache_dir={tmp_path / 'run' / 'cache'}"]
    words.append(f"output.dir={tmp_path / 'run' / 'out'}")
    code, seconds, output = stall(tmp_path / "run", "evaluate", TOKENS, "sleeps", 0, words)
    assert (code, seconds < ends_within()) == (143, True), (seconds, output)
    assert "stopped by SIGTERM" in output and "Traceback" not in output
