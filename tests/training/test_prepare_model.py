"""What is tried before the first step: random numbers of ranks, and FP8 against bf16."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.model.adapter import hold_transposed
from app.model.fp8 import Fp8Linear, Fp8TrainedLinear, quantize_weight
from app.strategy.mixin import Step
from app.training import module as modules
from app.training import prepare
from app.training.prepare import check_fp8, room_for_transposed
from common.errors import UserError
from tests.resumed import go_on
from tests.runs import check_same_run
from tests.tiny import train_into


class Ranks(Step):
    """A rank, of which `copies` neighbours compute the same loss."""

    def __init__(self, global_rank: int, copies: int) -> None:
        self.global_rank, self.copies, self.root_device = global_rank, copies, torch.device("cpu")

    @property
    def num_loss_copies(self) -> int:
        return self.copies


def first_number(monkeypatch: pytest.MonkeyPatch, global_rank: int, copies: int) -> float:
    """Return the first random number that a rank draws after its model is prepared."""
    for name in ("verify_attention", "check_head_loss", "check_fp8", "check_same_step"):
        monkeypatch.setattr(prepare, name, lambda *_: None)
    for name in ("quantize_tokens_independently", "reading_first_forward", "hidden_as_logits"):
        monkeypatch.setattr(prepare, name, lambda *_: nullcontext())
    module: Any = SimpleNamespace(
        model=None,
        strategy=Ranks(global_rank, copies),
        backend="sdpa",
        trains_in_fp8=False,
        uses_fused_kernels=False,
        store_references=None,
        probe_micro_batch=None,
        resume=None,
        trainer=SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext)),
    )
    torch.manual_seed(5)
    prepare.prepare_model(module)
    return torch.rand(()).item()


def test_ranks_draw_other_dropout_unless_they_share_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [first_number(monkeypatch, rank, 1) for rank in (0, 1, 2)]
    assert len(set(drawn)) == 3
    assert [first_number(monkeypatch, rank, 2) for rank in (2, 3)] == [drawn[1], drawn[1]]


GIB = 2**30
LAYER = torch.nn.Linear(64, 32)
FROZEN = Fp8Linear(LAYER, quantize_weight(LAYER.weight.data), torch.bfloat16)
TRAINED = Fp8TrainedLinear(64, 32)


def check(
    monkeypatch: pytest.MonkeyPatch,
    layer: torch.nn.Module,
    numbers: list[float],
    seconds: list[float],
    resume: object = None,
    num_tokens: int = 2048,
) -> None:
    """Check a model of one layer on a GPU of which these numbers were measured."""
    monkeypatch.setattr(prepare, "compare_passes", lambda *_: torch.tensor(numbers).double())
    monkeypatch.setattr(prepare, "time_products", lambda *_: seconds)
    batch = SimpleNamespace(
        input_ids=torch.zeros(2, 8), num_tokens=num_tokens, to=lambda device: batch
    )
    data = SimpleNamespace(is_streamed=False, fullest_batch=lambda steps: batch)
    module: Any = SimpleNamespace(
        model=torch.nn.Sequential(layer),
        trainer=SimpleNamespace(datamodule=data),
        strategy=SimpleNamespace(root_device=torch.device("cuda"), shard_batch=lambda one: one),
        resume=resume,
        trains_in_fp8=layer is TRAINED,
        sum_over_ranks=lambda tensor: 2 * tensor,
    )
    check_fp8(module)


EXACT, FAST = [3.0, 3.0149, 0.991, 1.0, 1.0], [0.5, 1.0]


@pytest.mark.parametrize(
    ("layer", "numbers", "seconds", "said"),
    [
        (FROZEN, [3.0, 3.0151, 1.0, 1.0, 1.0], FAST, "by 0.50 %.* type quantization=none"),
        (TRAINED, [3.0, 2.9, 1.0, 1.0, 1.0], FAST, "by 3.33 %.* type trainer.precision=bf16"),
        (FROZEN, [3.0, 3.0, 1.978, 1.0, 4.0], FAST, "cosine is 0.9890 .limits: 0.5 % and 0.99"),
        (FROZEN, [3.0, float("nan"), 1.0, 1.0, 1.0], FAST, "quantization=fp8 is too coarse"),
        (TRAINED, EXACT, [1.2, 1.0], r"slower than bf16 here: .* take 1\.20 times"),
    ],
)
def test_fp8_that_does_not_pay_is_refused(
    layer: torch.nn.Module,
    numbers: list[float],
    seconds: list[float],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match=said):
        check(monkeypatch, layer, numbers, seconds)
    check(monkeypatch, layer, EXACT, FAST)
    check(monkeypatch, LAYER, numbers, seconds)  # nothing is in FP8
    check(monkeypatch, layer, [0.0, 0.1, 0.0, 0.0, 1.0], FAST)  # nothing to learn
    check(monkeypatch, layer, numbers, seconds, resume=object())


def test_few_tokens_only_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check(monkeypatch, FROZEN, [3.0, 3.2, 0.9, 1.0, 1.0], FAST, num_tokens=2047)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "4,094 tokens the loss changes by 6.67 %" in record.message


@pytest.mark.parametrize(("peak_gib", "found"), [(65.9, 6 * GIB), (66.1, 0)])
def test_transposed_copies_are_held_where_memory_is_left(
    peak_gib: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    # 70 GiB reserved by this process, 10 not used by anybody.
    for name, value in {
        "mem_get_info": (10 * GIB, 80 * GIB),
        "memory_reserved": 70 * GIB,
        "max_memory_allocated": int(peak_gib * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    layer = Fp8Linear(LAYER, quantize_weight(LAYER.weight.data), torch.bfloat16)
    layer._parameters["weight"] = SimpleNamespace(device=gpu, nbytes=6 * GIB)  # type: ignore
    model: Any = torch.nn.Sequential(layer)
    model.config = SimpleNamespace(is_encoder_decoder=False)
    data = SimpleNamespace(sequence_len=8, batching=SimpleNamespace(micro_batch_size=2))

    def decided(num_tokens: int = 16, **others: Any) -> int | None:
        facts = {"root_device": gpu, "shards_weights": False} | others
        module: Any = SimpleNamespace(
            model=model,
            strategy=SimpleNamespace(**facts),
            trainer=SimpleNamespace(datamodule=data),
            uses_fused_kernels=True,
        )
        batches: Any = [SimpleNamespace(input_ids=torch.zeros(1, n)) for n in (3, num_tokens)]
        return room_for_transposed(module, batches)

    assert decided() == found
    assert decided(num_tokens=14) is None  # so small a step does not tell
    assert decided(shards_weights=True) == decided(root_device=torch.device("cpu")) == 0
    model.config.is_encoder_decoder = True
    assert decided() == 0


WORDS = ("quantization=fp8", "adapter.dropout=0.1", "logger=csv")
WORDS += ("trainer.checkpoint.every_steps=1",)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on an FP8 base."""
    return train_into(tmp_path_factory.mktemp("fp8") / "run", *WORDS)


@pytest.mark.slow
def test_a_run_that_holds_copies_and_is_resumed_without_gives_the_same_bits(
    checked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []

    def hold(model: Any) -> None:
        if held:
            raise RuntimeError("the third step")
        hold_transposed(model)
        held.extend(each.columns for each in model.modules() if isinstance(each, Fp8Linear))

    with monkeypatch.context() as patch:
        patch.setattr(modules, "room_for_transposed", lambda *_: 1)
        patch.setattr(modules, "hold_transposed", hold)
        with pytest.raises(RuntimeError, match="the third step"):
            train_into(tmp_path / "held", *WORDS)
    assert held and None not in held
    check_same_run(go_on(tmp_path / "held"), checked)


@pytest.mark.slow
def test_the_check_leaves_no_trace(
    checked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "fp8: against bf16 on the first" in (checked / "train.log").read_text()
    monkeypatch.setattr(prepare, "check_fp8", lambda module: None)
    check_same_run(train_into(tmp_path / "plain", *WORDS), checked)
