"""Ranks with sharded weights save the same files as one process, and generate the same answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.evaluation.generation import EvaluationConfig, answer_prompts
from app.model.adapter import probe_logits
from app.model.save import save_model
from app.process.collectives import is_rank0, run_on_rank0
from app.strategy.mixin import REPLICATED
from app.strategy.settings import FsdpConfig
from common.errors import TrainingFault
from data_modules import Prompt
from tests.ranks import connect, on_ranks
from tests.strategy.fsdp_training import ADAPTERS, model_builder

pytestmark = pytest.mark.slow

STRATEGIES = {
    "fsdp": FsdpConfig(),
    "tp": FsdpConfig(name="tp", tensor_parallel_size=2, shards_data_parallel=False),
}
CASES = [
    *(("fsdp", kind) for kind in ("dora", "full", "head")),
    *(("tp", kind) for kind in ("ia3", "full")),
]
IDS = [5, 9, 60, 33, 21, 7, 8]
PROMPTS = [Prompt(ids, "", "") for ids in (IDS, IDS[2:], IDS[3:5])]


def train_weights(model: Any, strategy: Any) -> None:
    """Change the trainable weights by the same values under every strategy."""
    random = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            full = strategy.full_tensor(parameter)
            strategy.restore_weight(
                parameter, full + 0.1 * torch.randn(full.shape, generator=random)
            )


def save(model: Any, kind: str, folder: Path, shards: Any = None) -> dict[str, Any]:
    # What is frozen is as it was read from a base of that dtype.
    dtype = torch.bfloat16 if kind == "full" else torch.float32
    architecture = SimpleNamespace(dtype=dtype, is_encoder_decoder=False, problem_type=None)
    probe = {"input_ids": IDS}
    row = {"input_ids": torch.tensor([IDS])}
    before = probe_logits(model, row)
    config: Any = ADAPTERS[kind]
    save_model(model, config, architecture, folder, probe, base={}, reload_base=None, shards=shards)
    tokenizer: Any = SimpleNamespace(
        pad_token_id=0, decode=lambda ids, **_: " ".join(str(int(i)) for i in ids)
    )
    how = EvaluationConfig(max_new_tokens=5, batch_size=2)
    answers = answer_prompts(model, tokenizer, PROMPTS, set(range(10, 30)), how, shards)
    return {"before": before, "after": probe_logits(model, row), "answers": answers}


def shard_and_save(cases: list[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """Save each case on this rank."""
    found = []
    for name, kind in cases:
        strategy = connect(STRATEGIES[name])
        model = strategy.build_model(model_builder(kind))
        train_weights(model, strategy)
        found.append(save(model, kind, folder / name / kind, strategy))
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_ranks(2, shard_and_save, CASES, folder)


def files_of(folder: Path) -> list[Path]:
    return sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_saved_files_equal_those_of_one_process(
    case: tuple[str, str], of_ranks: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    name, kind = case
    folder, found = of_ranks
    model: Any = model_builder(kind)()
    train_weights(model, REPLICATED)
    whole = save(model, kind, tmp_path)
    ours, theirs = folder / name / kind, tmp_path
    files = files_of(theirs)
    assert files == files_of(ours)
    for file in files:
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    for rank in found:
        here = rank[CASES.index(case)]
        assert torch.allclose(here["before"], whole["before"], atol=1e-4)
        assert torch.allclose(here["after"], whole["after"], atol=1e-4)
        assert here["answers"] == whole["answers"]
        assert any(answer is not None for answer in here["answers"])


def save_with_a_lost_shard(folder: Path) -> str:
    """Save on ranks of which rank 0 does not receive the other's shard."""
    strategy = connect(FsdpConfig())
    model = strategy.build_model(model_builder("lora"))
    train_weights(model, strategy)
    gather = strategy.full_tensor

    def lose(weight: Any) -> torch.Tensor:
        whole: torch.Tensor = gather(weight).clone()
        if is_rank0():
            whole[len(whole) // 2 :] = 0
        return whole

    strategy.full_tensor = lose
    with pytest.raises(TrainingFault) as fault:
        save(model, "lora", folder, strategy)
    return str(fault.value)


def test_a_shard_lost_on_rank_0_ends_all_ranks(tmp_path: Path) -> None:
    for message in on_ranks(2, save_with_a_lost_shard, tmp_path):
        assert "differs between ranks" in message


def fail_on_rank_0(folder: Path) -> str:
    """Run work that fails on rank 0; return the error of this rank."""
    connect(FsdpConfig())

    def write() -> None:
        raise PermissionError(13, "no room", str(folder))

    with pytest.raises(OSError, match="no room") as failure:
        run_on_rank0(write)
    assert run_on_rank0(lambda: 7) == (7 if is_rank0() else None)
    return str(failure.value)


def test_errors_on_rank_0_are_raised_on_all_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, fail_on_rank_0, tmp_path)
    assert first == second and "no room" in first
