"""DeepSpeed's own keys: from any source only those that write nothing, and a user's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.preflight import check_compatibility
from app.strategy.deepspeed_config import (
    ALLOWED_KEYS,
    deepspeed_config,
    given_keys,
    refused_keys,
)
from tests.in_process import CommandResult, make_data, make_model, run_command
from tests.preflight.test_couplings import settings

WRITES: dict[str, Any] = {
    "flops_profiler": {"enabled": True, "output_file": "/tmp/x"},
    "wandb": {"enabled": True, "project": "a"},
    "data_efficiency": {"enabled": True, "data_sampling": {"metric_path": "/tmp/x"}},
    "zero_optimization": {"offload_optimizer": {"nvme_path": "/tmp/x"}},
    "unheard_of": {"output_file": "/tmp/x"},
}
OF_OTHER_TOOLS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": False},
    "bf16": {"enabled": "auto"},
    "wandb": {"enabled": False},
    "optimizer": "auto",
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1000000000,
        "offload_param": {"device": "none", "pin_memory": True},
    },
    "steps_per_print": 10,
}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "d.jsonl", 40)
    return [f"model.path={model}", f"data.datasets=[{{path: {data}}}]", "strategy=zero3"]


def train_with(words: list[str], keys: Any, *typed: str) -> CommandResult:
    Path("ds config.json").write_text(json.dumps(keys))
    return run_command(*words, "strategy.config=ds config.json", *typed)


def problems_with(keys: dict[str, Any], typed: str = "") -> list[str]:
    changed = settings(f"strategy=zero3 {typed}")
    changed.strategy.config = keys  # type: ignore[attr-defined]
    return [
        problem for problem in check_compatibility(changed, 0) if "not installed" not in problem
    ]


def test_only_keys_that_name_no_file_and_no_host_are_allowed() -> None:
    parts = {part for key in ALLOWED_KEYS for name in key.split(".") for part in name.split("_")}
    assert not parts & {"path", "file", "dir", "folder", "url", "host", "key", "team", "job"}
    assert len(ALLOWED_KEYS) > 90
    for key, value in WRITES.items():
        unknown, refused = refused_keys(given_keys({key: value}))
        assert [each for each in (*unknown, *refused) if each.startswith(key)], key


def test_keys_are_refused_from_a_file_and_from_the_command_line(words: list[str]) -> None:
    for result in (
        train_with(words, {"wandb": WRITES["wandb"]}),
        run_command(*words, "strategy.config={wandb: {enabled: true}}"),
    ):
        assert (result.code, " wandb" in result.stderr) == (2, True), result.stderr


def test_a_file_for_another_tool_is_read(words: list[str]) -> None:
    result = train_with(words, OF_OTHER_TOOLS)
    assert result.code == 0, result.stderr
    made = deepspeed_config(
        result.config.strategy,
        on_gpu=False,
        dtype=torch.float32,
        num_trained=10,
        ranks_per_node=2,
        accumulation=1,
        max_norm=1.0,
    )
    zero = made["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["reduce_bucket_size"]) == (3, True, 10)
    assert zero["stage3_max_live_parameters"] == 1_000_000_000
    assert (made["steps_per_print"], made["gradient_clipping"]) == (10, 1.0)
    assert not {"wandb", "optimizer", "fp16", "bf16", "train_batch_size"} & made.keys()
    # The run's config.yaml keeps the keys, not the name of the file.
    assert result.config.strategy.config == OF_OTHER_TOOLS


@pytest.mark.parametrize(
    ("keys", "both"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5 is set by trainer.max_grad_norm=1.0"),
        ({"train_micro_batch_size_per_gpu": 7}, "=7 is set by trainer.micro_batch_size=auto"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=True is set by trainer.precision"),
        ({"zero_optimization": {"stage": 1}}, "=1 is set by strategy.stage=3"),
        ({"zero_optimization": None}, None),
        ({"optimizer": {"type": "AdamW"}}, "optimizer.type=AdamW is set by optimizer"),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device=cpu is set by strategy.offload_parameters",
        ),
        ({"steps_per_print": 1, "zero_optimization": {"overlap_comm": True}}, None),
    ],
)
def test_what_contradicts_a_setting_is_refused_naming_both(
    keys: dict[str, Any], both: str | None
) -> None:
    problems = problems_with(keys)
    assert len(problems) == (both is not None)
    for problem in problems:
        assert both in problem


def test_what_says_the_same_as_a_setting_is_accepted() -> None:
    keys = {"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 8}
    typed = "trainer.max_grad_norm=null trainer.micro_batch_size=2 trainer.global_batch_size=8"
    assert problems_with(keys, typed) == []


def test_a_damaged_file_is_named(words: list[str]) -> None:
    Path("ds.json").write_bytes(b"{")
    for file in ("ds.json", "missing.json"):
        result = run_command(*words, f"strategy.config={file}")
        assert (result.code, f"strategy.config={file}: " in result.stderr) == (2, True)
