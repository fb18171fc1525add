"""The language model of a multimodal checkpoint, trained by several ranks."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from app.model.adapter import probe_logits
from tests.multimodal import tiny_multimodal
from tests.reliability.shell import Shell
from tests.runs import figures_of
from tests.tiny import probe, save_with_tokenizer, small_run

pytestmark = pytest.mark.slow


RUN = (
    "trainer.max_steps=2",
    "trainer.accelerator=cpu",
    "trainer.gradient_accumulation_steps=1",
    "evaluation.exact_match=true",
    "evaluation.max_rows=3",
    "evaluation.max_new_tokens=8",
    "logger=csv",
)


ADAPTERS = {
    "lora": ("adapter=lora", "adapter.dropout=0", "adapter.r=4"),
    "full": ("adapter=full",),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tiny_multimodal("mistral3"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def of_one_rank(
    request: pytest.FixtureRequest,
    base: Path,
    shell: Shell,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """Name of an adapter, and a run of one rank with it."""
    run = tmp_path_factory.mktemp("one") / "run"
    words = (*RUN, *ADAPTERS[request.param], f"model.path={base}")
    shell.train_into(run, *small_run(*words, "trainer.gradient_accumulation_steps=2"))
    return request.param, run


@pytest.mark.parametrize(
    ("of_one_rank", "strategy"),
    [("lora", "zero3"), ("full", "fsdp")],
    indirect=["of_one_rank"],
)
def test_several_ranks_give_the_figures_and_weights_of_one(
    strategy: str, of_one_rank: tuple[str, Path], base: Path, shell: Shell, tmp_path: Path
) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    (adapter, one), two = of_one_rank, tmp_path / "two"
    words = (*RUN, *ADAPTERS[adapter], f"model.path={base}", f"strategy={strategy}")
    shell.train_into(two, *small_run(*words, "trainer.devices=2"))
    expected, found = figures_of(one), figures_of(two)
    # A sharded, fully tuned model leaves no room for its base: answers of the base and intervals
    # of their change are missing. With fewer intervals, each of the others is narrower.
    intervals = [{name for name in each if name.endswith("/low")} for each in (expected, found)]
    for figure, value in found.items():
        if intervals[0] == intervals[1] or not figure.endswith(("/low", "/high")):
            assert value == pytest.approx(expected[figure], abs=1e-5), figure
    if adapter == "lora":
        name = "adapter/adapter_model.safetensors"
        mine, theirs = load_file(two / name), load_file(one / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in theirs)
        whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
        probe_logits(peft.PeftModel.from_pretrained(whole, two / "adapter"), probe())
        return
    before = dict(AutoModelForImageTextToText.from_pretrained(base).named_parameters())
    opened, loading = AutoModelForImageTextToText.from_pretrained(
        two / "model", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, before[name]) == (
            "language_model" not in name and "lm_head" not in name
        )
