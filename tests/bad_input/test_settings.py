"""Settings that mean nothing, or not on this base, are refused with what to type, before torch.

`tests/config` has what is wrong with a word itself, `tests/preflight` what does not go together.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from app.run.ranks import check_supervise
from tests.in_process import accepted, make_adapter, make_words, refused, run_command
from tests.resumed import make_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    return make_words(folder)


REFUSED = [
    # what was typed, what must be said, what is right
    ("schedule=wsd schedule.decay_ratio=0", "schedule.decay_ratio=0.0: expected above 0",
     "schedule=wsd schedule.decay_ratio=1 schedule.warmup_ratio=0"),
    ("optimizer=adafactor optimizer.beta2_decay=0.8", "beta2_decay=0.8: expected -1 or more, below",
     "optimizer=adafactor optimizer.beta2_decay=-0.9 optimizer.clip_threshold=2"),
    ("optimizer.lr_by_pattern=[{pattern:a}]", "optimizer.lr_by_pattern[0].ratio is missing",
     "optimizer.lr_by_pattern=[{pattern:*.layers.0.*,ratio:2}]"),
    ("supervise.hang_minutes=0", "supervise.hang_minutes=0.0: expected above 0", ""),
    ("supervise.requeue=true", "type resume=auto", ""),
    ("faults=[sigtem@3]", "did you mean sigterm?", ""),
    ("faults=[worker_killed@3]", "data.num_workers=0; type data.num_workers=1", ""),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "said", "good"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_means_nothing_is_refused_with_what_does(
    base: list[str], bad: str, said: str, good: str
) -> None:
    result = run_command(*base, *bad.split())
    assert result.code == 2, result.stderr
    assert said in result.stderr and "Traceback" not in result.stderr
    if good:
        accepted(*base, *good.split())


def test_an_evaluation_is_checked_as_a_training_is(base: list[str], tmp_path: Path) -> None:
    words = [*base, f"adapter_path={make_adapter(tmp_path / 'adapter')}"]
    result = run_command(*words, "attention=flash2", verb="evaluate")
    assert result.code == 2 and "attention=flash2 needs an NVIDIA GPU" in result.stderr
    assert "let the documents of a pack attend to each other; type attention=sdpa" in result.stderr
    assert run_command(*words, "attention=sdpa", verb="evaluate").code == 0


def test_a_job_that_goes_back_is_not_requeued(base: list[str], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *base)
    said = refused(f"resume={run / 'checkpoints' / 'step-2'}", "supervise.requeue=true")
    assert "would go back to step 2 each time" in said
    assert f"type resume=auto output.dir={run} " in said
    assert check_supervise(run_command(f"resume={run}", "supervise.requeue=true").config) == []


def test_what_started_the_ranks_starts_them_again(base: list[str]) -> None:
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = [*base, "trainer.devices=2"]
    assert run_command(*words, environment=torchrun).code == 0
    said = refused(*words, "supervise.max_restarts=2", environment=torchrun)
    assert "RANK is set" in said and "torchrun has --max-restarts" in said
    assert check_supervise(run_command(*words, "supervise.max_restarts=2").config) == []
