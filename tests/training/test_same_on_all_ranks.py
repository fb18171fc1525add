"""Ranks with different settings or files stop before training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config import load_config
from app.process.launch import free_port
from app.training import callbacks
from app.training.callbacks import SameOnAllRanks, program_values, rank_invariant_values
from common.errors import USER_ERROR, UserError
from tests.processes import LONGEST, RUN, start_train
from tests.reliability.shell import Shell
from tests.tiny import SAMPLES, small_run

FACTS: dict[str, Any] = {
    "base": {"path": "base", "weights": "a" * 64},
    "data": [{"path": "rows.json", "sha256": "b" * 64}],
    "test_data": [],
    "tokens_sha256": "c" * 64,
    "tokenizer_sha256": "d" * 64,
    "template_sha256": "e" * 64,
    "total_steps": 4,
    "global_batch": {"packs": 8},
    "precision": "fp32",
    "strategy": "ddp",
}


@cache
def _composed(words: tuple[str, ...]) -> Any:
    return load_config("train", ["+experiment=quickstart", *words])


def settings(*words: str) -> Any:
    return copy.deepcopy(_composed(words))


def compare(*parts: dict[str, Any], programs: Sequence[dict[str, Any]] = ()) -> None:
    """Run the check on each rank; the last rank receives the tensors of all others."""
    sent: dict[int, list[torch.Tensor]] = {}
    comparisons = count()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        here = sent.setdefault(next(comparisons), [])
        here.append(tensor)
        return torch.stack([*here, *[tensor] * (len(parts) - len(here))])

    strategy = SimpleNamespace(root_device=torch.device("cpu"), all_gather=gather)
    trainer: Any = SimpleNamespace(strategy=strategy, is_global_zero=True)
    for rank, part in enumerate(parts):
        comparisons = count()
        program = programs[rank] if programs else {"versions of Python": "3"}
        SameOnAllRanks(part, program).setup(trainer, None, "fit")


def test_locations_may_differ_between_ranks() -> None:
    one = settings("data.cache_dir=/a", "output.dir=/b", "trainer.devices=2")
    other = settings("data.cache_dir=/c", "output.dir=/d", "trainer.devices=2", "resume=auto")
    one.model.path, other.model.path = "/one/base", "/other/base"
    compare(rank_invariant_values(one, FACTS), rank_invariant_values(other, FACTS))


@pytest.mark.parametrize(
    ("words", "facts", "output"),
    [
        (["optimizer.lr=1e-3"], {}, "settings of optimizer"),
        (["strategy=fsdp"], {"strategy": "fsdp"}, "different strategy;"),
        (["trainer.validate_every_steps=3"], {}, "settings of trainer"),
        (["seed=1"], {}, "settings of seed"),
        ([], {"data": [{"path": "rows.json", "sha256": "0" * 64}]}, "different rows;"),
        ([], {"data": [{"path": "hub/other", "sha256": None}]}, "different rows;"),
        ([], {"base": {"path": "base", "weights": "0" * 64}}, "files of the base model"),
        ([], {"tokens_sha256": "0" * 64}, "different tokens;"),
        ([], {"tokenizer_sha256": "0" * 64}, "tokenizer files"),
        ([], {"strategy": "fsdp"}, "different strategy;"),
        ([], {"total_steps": 5}, "plan of steps"),
    ],
)
def test_differences_are_named_with_their_rank(
    words: list[str], facts: dict[str, Any], output: str
) -> None:
    same, other = (
        rank_invariant_values(settings(), FACTS),
        rank_invariant_values(settings(*words), FACTS | facts),
    )
    with pytest.raises(UserError, match="rank 2 and rank 0 have") as caught:
        compare(same, same, other)
    assert output in str(caught.value)
    assert "rank 1" not in str(caught.value)


def test_other_code_and_other_libraries_are_named_before_what_they_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rank_invariant_values(settings(), FACTS)
    other = rank_invariant_values(settings("seed=1"), FACTS)
    same, newer = program_values({"torch": "2.13.0"}), program_values({"torch": "2.14.0"})
    compare(values, values, programs=[same, dict(same)])
    with pytest.raises(UserError, match="have different versions of libraries; start"):
        compare(values, other, programs=[same, newer])
    for package in ("app", "common", "data_modules", "conf"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "one.py").write_text("edited = True\n")
    monkeypatch.setattr(callbacks, "ROOT", tmp_path)
    with pytest.raises(UserError, match="rank 1 and rank 0 have different code"):
        compare(values, other, programs=[same, program_values({"torch": "2.13.0"})])


def test_ranks_with_another_gpu_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callbacks, "_different", lambda _, v: {2: ["GPU"]} if "GPU" in v else {})
    compare({})
    assert "ranks 2 have another GPU than rank 0" in caplog.text


@pytest.mark.slow
def test_ranks_with_other_settings_stop_before_the_first_step(shell: Shell, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text((SAMPLES / "lists_test.json").read_text().replace("biggest", "largest"))
    words = small_run(*RUN, "trainer.devices=2", "trainer.accelerator=cpu")
    other = [
        word.replace(str(SAMPLES / "lists_test.json"), str(rows)) if "lists" in word else word
        for word in words
    ]
    typed = [*words, "strategy=ddp"], [*other, "adapter.dropout=0.2", "strategy=fsdp"]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(free_port())
    folders = f"output.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"
    ranks = [
        start_train(
            *(*own, *folders),
            environment=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            python=shell.python,
        )
        for rank, own in enumerate(typed)
    ]
    output = "".join(rank.communicate(timeout=LONGEST)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [USER_ERROR, USER_ERROR], output
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert "rank 1 and rank 0 have different settings of adapter, rows, tokens, strategy;" in output
