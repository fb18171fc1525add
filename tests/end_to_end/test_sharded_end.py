"""A run with sharded weights leaves the same files and figures as a run on one device.

With mixers that read sharded weights themselves, and the language model of a multimodal checkpoint.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.conftest import read_column
from tests.families import tiny_family
from tests.multimodal import tiny_multimodal
from tests.processes import LONGEST
from tests.reliability.shell import Shell
from tests.runs import adapter_of, figures_of
from tests.tiny import save_with_tokenizer, small_run

RUN = (
    "trainer.max_steps=2",
    "trainer.accelerator=cpu",
    "evaluation.exact_match=true",
    "evaluation.max_rows=3",
    "evaluation.max_new_tokens=8",
    "logger=csv",
)
TWO_RANKS = ("trainer.devices=2", "trainer.gradient_accumulation_steps=1")


def check_same_end(run: Path, of_one_rank: Path) -> None:
    ours, theirs = map(adapter_of, (run, of_one_rank))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.allclose(ours[name], tensor, atol=1e-4), name
    for name in ("adapter_config.json", "base.json", "tokenizer.json"):
        assert (run / "adapter" / name).read_text() == (of_one_rank / "adapter" / name).read_text()
    assert figures_of(run) == pytest.approx(figures_of(of_one_rank), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "strategy"), [("qwen3_5_text", "zero3"), ("falcon_h1", "fsdp")])
def test_sharded_ranks_end_a_run_as_one_rank(
    family: str, strategy: str, shell: Shell, tmp_path: Path
) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    model = tiny_family(family, vocab_size=768, max_position_embeddings=256)
    base = save_with_tokenizer(model, tmp_path / "base")
    words = (*RUN, f"model.path={base}", "adapter.r=4")
    one, two = tmp_path / "one", tmp_path / "two"
    shell.train_into(one, *small_run(*words))
    output = shell.train_into(two, *small_run(*words, *TWO_RANKS, f"strategy={strategy}"))
    check_same_end(two, one)
    assert output.count("verified: reloaded logits match") == output.count("base vs tuned") == 1
    figures = figures_of(two)
    assert figures["base/val/loss"] != figures["tuned/val/loss"]
    assert "base/exact_match/lists" in figures


@pytest.mark.slow
def test_sharded_ranks_save_a_whole_multimodal_model(shell: Shell, tmp_path: Path) -> None:
    base = save_with_tokenizer(tiny_multimodal("mistral3"), tmp_path / "base")
    words = (*RUN, "adapter=full", f"model.path={base}")
    one, two = tmp_path / "one", tmp_path / "two"
    shell.train_into(one, *small_run(*words))
    shell.train_into(two, *small_run(*words, *TWO_RANKS, "strategy=fsdp"))
    expected = figures_of(one)
    # The sharded model leaves no room for its base: answers of the base and intervals of their
    # change are missing, and with fewer intervals each of the others is narrower.
    for figure, value in figures_of(two).items():
        if not figure.endswith(("/low", "/high")):
            assert value == pytest.approx(expected[figure], abs=1e-5), figure
    before = dict(AutoModelForImageTextToText.from_pretrained(base).named_parameters())
    opened, loading = AutoModelForImageTextToText.from_pretrained(
        two / "model", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    for name, weight in opened.named_parameters():
        is_trained = "language_model" in name or "lm_head" in name
        assert torch.equal(weight, before[name]) is not is_trained


@pytest.mark.slow
def test_sharded_ranks_restore_the_best_step_of_a_whole_model(shell: Shell, tmp_path: Path) -> None:
    """The learning rate is so large that step 1 is better than step 2."""
    run = tmp_path / "run"
    early = ("trainer.validate_every_steps=1", "trainer.early_stopping_patience=2")
    rate = ("optimizer.lr=0.1", "schedule=constant", "schedule.warmup_steps=0")
    words = (*TWO_RANKS, *early, *rate, "adapter=full", "strategy=fsdp", "logger=csv")
    output = shell.train_into(
        run, *small_run("trainer.max_steps=3", "trainer.accelerator=cpu", *words)
    )
    losses = read_column(run, "val/loss")
    assert losses[1] < losses[2]
    assert f"result: step 1 of 2, the best by val/loss ({losses[1]:.4f})" in output
    assert f"rounding to bf16 changes val/loss from {losses[1]:.4f}" in output
    assert output.count("model verified: reloaded") == 1


@pytest.mark.slow
def test_a_write_error_on_rank_0_ends_all_ranks(shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def create_conflicting_file() -> None:
        """Create the file during the run: an existing one would be refused at the start."""
        until = time.monotonic() + LONGEST
        while not (run / "run.lock").exists() and time.monotonic() < until:
            time.sleep(0.01)
        (run / "adapter").touch()

    creator = threading.Thread(target=create_conflicting_file)
    creator.start()
    output = shell.train_into(run, *small_run(*RUN, *TWO_RANKS, "strategy=fsdp"), code=3)
    creator.join()
    assert output.count("Not a directory") == 1
    assert not (run / "metrics.json").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_offload"])
@pytest.mark.parametrize("placed", [("trainer.devices=1",), TWO_RANKS], ids=["one", "two"])
def test_sharded_ranks_on_gpus_end_a_run_as_one_rank(
    placed: tuple[str, ...], strategy: str, shell: Shell, tmp_path: Path
) -> None:
    """Also one GPU, which has every shard but ends as the strategy does."""
    if placed == TWO_RANKS and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one, run = tmp_path / "one", tmp_path / "run"
    shell.train_into(one, *small_run(*RUN))
    words = (*placed, "trainer.accelerator=gpu", f"strategy={strategy}")
    shell.train_into(run, *small_run(*RUN, *words))
    check_same_end(run, one)
