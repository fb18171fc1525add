"""Optimizers and schedules that do not go together, or whose numbers mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import load_config
from tests.door import ask, make_data, make_model
from tests.tiny import small_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]


FREE = ["optimizer=schedule_free", "schedule=constant"]
REFUSED = [
    # what was typed, what must be said, what is right
    (
        ["optimizer=schedule_free"],
        "instead of lowering the learning rate, which schedule=cosine lowers; "
        "type schedule=constant",
        FREE,
    ),
    (
        [*FREE, "trainer.precision=bf16-pure"],
        "too few digits for the share of one step among hundreds; type trainer.precision=bf16",
        [*FREE, "trainer.precision=bf16"],
    ),
    (
        [*FREE, "optimizer.beta1=0"],
        "optimizer.beta1=0 leaves optimizer=schedule_free no share",
        ["optimizer.beta1=0"],
    ),
    (
        ["schedule.decay_ratio=0.1"],
        "schedule.decay_ratio means nothing for schedule=cosine; type schedule=wsd",
        ["schedule=wsd", "schedule.decay_ratio=0.1"],
    ),
    (
        ["schedule=wsd", "schedule.start_lr_ratio=0.1"],
        "schedule.start_lr_ratio means nothing for schedule=wsd; type schedule=one_cycle",
        ["schedule=one_cycle", "schedule.start_lr_ratio=0.1"],
    ),
    (
        ["schedule=wsd", "schedule.decay_ratio=0.9", "schedule.warmup_ratio=0.25"],
        "are more than all steps; type schedule.decay_ratio=0.75",
        ["schedule=wsd", "schedule.decay_ratio=0.75", "schedule.warmup_ratio=0.25"],
    ),
    (
        ["schedule=wsd", "schedule.decay_ratio=0"],
        "schedule.decay_ratio=0.0: expected above 0",
        ["schedule=wsd", "schedule.decay_ratio=1", "schedule.warmup_ratio=0"],
    ),
    (
        ["schedule=one_cycle", "schedule.start_lr_ratio=0"],
        "schedule.start_lr_ratio=0.0: expected above 0",
        ["schedule=one_cycle"],
    ),
    (
        ["optimizer=adafactor", "optimizer.beta1=0.9"],
        "optimizer.beta1: a setting of optimizer=adamw, but here optimizer=adafactor",
        ["optimizer=adafactor", "optimizer.clip_threshold=2"],
    ),
    (
        ["optimizer=adafactor", "optimizer.beta2_decay=0.8"],
        "optimizer.beta2_decay=0.8: expected from -1, below 0",
        ["optimizer=adafactor", "optimizer.beta2_decay=-0.9"],
    ),
    (
        ["optimizer=adafactor", "optimizer.clip_threshold=0"],
        "optimizer.clip_threshold=0.0: expected above 0",
        ["optimizer=adafactor"],
    ),
    (
        ["optimizer.lr_by_pattern=[{pattern: a, ratio: 0}, {pattern: b, ratio: 2}]"],
        "a ratio is above 0 and at most 1000, and not 0 (a); type ratio: 0.1",
        ["optimizer.lr_by_pattern=[{pattern: a, ratio: 0.1}]"],
    ),
    (
        ["optimizer.lr_by_pattern=[{pattern: a}]"],
        "optimizer.lr_by_pattern[0].ratio is missing",
        ["optimizer.lr_by_pattern=[{pattern: *.layers.0.*, ratio: 2}]"],
    ),
    (
        ["optimizer.lr_by_pattern=[{patern: a, ratio: 1}]"],
        "did you mean optimizer.lr_by_pattern[0].pattern?",
        ["optimizer.lr_by_pattern=[]"],
    ),
]


@pytest.mark.parametrize(("bad", "said", "good"), REFUSED, ids=[" ".join(r[0]) for r in REFUSED])
def test_what_does_not_go_together_is_said_with_what_does(
    base: list[str], bad: list[str], said: str, good: list[str]
) -> None:
    answer = ask(*base, *bad)
    assert answer.code == 2, answer.said
    assert said in answer.said
    assert "Traceback" not in answer.said
    answer = ask(*base, *good)
    assert answer.code == 0, answer.said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("optimizer=adamw_bnb_8bit", "type optimizer=adamw8bit"),
        ("optimizer=paged_adamw_8bit", "type optimizer=paged_adamw8bit"),
        ("optimizer=adamw_torch_fused", "type optimizer=adamw"),
        ("optimizer=schedule_free_adamw", "type optimizer=schedule_free schedule=constant"),
        ("schedule=cosine_with_restarts", "type schedule=cosine"),
        ("schedule=warmup_stable_decay", "type schedule=wsd"),
        ("schedule=onecycle", "did you mean one_cycle?"),
        ("trainer.adam_beta1=0.9", "did you mean optimizer.beta1?"),
    ],
)
def test_words_of_other_tools_are_understood(base: list[str], typed: str, said: str) -> None:
    answer = ask(*base, typed)
    assert answer.code == 2
    assert said in answer.said


def test_one_cycle_brings_its_own_warm_up_which_can_be_typed_over(base: list[str]) -> None:
    schedule = ask(*base, "schedule=one_cycle").config.schedule
    assert (schedule.warmup_ratio, schedule.min_lr_ratio) == (0.3, 4e-6)
    assert ask(*base, "schedule=one_cycle", "schedule.warmup_ratio=0.1").config.schedule == (
        type(schedule)(shape="one_cycle", warmup_ratio=0.1, min_lr_ratio=4e-6)
    )


def test_a_pattern_without_a_weight_ends_a_run_before_its_first_step(tmp_path: Path) -> None:
    from app.config import run_verb
    from app.train import train

    words = [*small_run(), f"output.dir={tmp_path / 'run'}"]
    words.append("optimizer.lr_by_pattern=[{pattern: '*.embed_tokens.*', ratio: 0.1}]")
    assert load_config("train", words).optimizer.lr_by_pattern[0].ratio == 0.1
    assert run_verb("train", train, words=words) == 2
    said = (tmp_path / "run" / "error.txt").read_text()
    assert "*.embed_tokens.* matches no trainable parameter; the nearest are model.layers.*" in said
