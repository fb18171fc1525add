"""FSDP2 and tensor parallelism train as one process without sharding."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from app.strategy.settings import FsdpConfig
from tests.ranks import on_ranks
from tests.strategy import fsdp_training as fsdp
from tests.strategy.fsdp_training import model_builder

pytestmark = pytest.mark.slow

FSDP = FsdpConfig()
GRAD_OP = FsdpConfig(name="fsdp_grad_op", reshard_after_forward=False)
ONCE, ONCE_KEPT = (replace(each, sync_each_micro_batch=False) for each in (FSDP, GRAD_OP))
COPIES = FsdpConfig(name="fsdp_hybrid", replicas=2)
TP = FsdpConfig(name="tp", tensor_parallel_size=2, shards_data_parallel=False)
FSDP_TP = FsdpConfig(name="fsdp_tp", tensor_parallel_size=2)

UNTIED = {"tie_word_embeddings": False}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "lora"}, {}),
    ({"kind": "full"}, {"accumulation": 1}),
    ({"kind": "full", **UNTIED}, {"clip": 1e9}),
    ({"kind": "ia3"}, {"bad_step": 1}),
    ({"kind": "head", **UNTIED}, {}),
]
OF_FSDP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "dora"}, {}),
    ({"kind": "top layer", "recompute": "full"}, {}),
    ({"kind": "full", "recompute": "selective"}, {}),
]
OF_ONCE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "full", "recompute": "selective"}, {"accumulation": 4}),
    ({"kind": "full", **UNTIED}, {"bad_step": 1, "accumulation": 4}),
]
OF_TP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Norms of single heads, biases of split matrices, and a bias after an all-reduce.
    ({"kind": "full", "model_type": "qwen3", "head_dim": 8}, {}),
    ({"kind": "full", "model_type": "qwen2", "recompute": "full"}, {}),
    ({"kind": "lora", "model_type": "gpt_neox", "backend": "eager"}, {}),
    ({"kind": "lora", **UNTIED}, {}),
]


BF16, FP32 = "torch.bfloat16", "torch.float32"
IN_BF16 = [({"kind": kind, "precision": "bf16"}, {"autocast": True}) for kind in ("lora", "full")]
SUMS_IN_BF16 = replace(FSDP, reduce_dtype="bf16")
REFUSED: list[tuple[FsdpConfig, dict[str, Any], str]] = [
    (TP, {"num_key_value_heads": 1}, "does not divide the 1 key heads"),
    (TP, {"kind": "dora"}, "adapter.use_dora=true"),
    (TP, {"intermediate_size": 49}, "49 features of mlp.gate_proj; type a divisor of 49"),
    (TP, {"model_type": "phi3"}, "phi3 model uses the style colwise_gather_output"),
    # What ranks alone decide, `check_layout` refuses before they start.
]
QUESTIONS: dict[str, tuple[Any, ...]] = {
    "few gradients": (fsdp.has_gradients_by_micro_batch, FSDP, "lora"),
    "many gradients": (fsdp.has_gradients_by_micro_batch, FSDP, "full"),
    "whole gradients": (fsdp.has_gradients_by_micro_batch, ONCE, "full"),
    "gathers of grad_op": (fsdp.gathers_by_micro_batch, GRAD_OP),
    "gathers": (fsdp.gathers_by_micro_batch, FSDP),
    "unsharded": (fsdp.unsharded_weights_after_forward, FSDP),
    "dtypes of full": (fsdp.dtypes_in_layers, FSDP, "full"),
    "dtypes of lora": (fsdp.dtypes_in_layers, FSDP, "lora"),
    "bf16": (fsdp.train_cases, [(FSDP, *case) for case in IN_BF16]),
    "sums": (fsdp.train_cases, [(each, *IN_BF16[1]) for each in (FSDP, SUMS_IN_BF16)]),
    "4 bits": (fsdp.quantized_losses,),
    "scales": (fsdp.shards_of_scales,),
    "devices of scales": (fsdp.devices_of_scales,),
    "replicated": (fsdp.replicated_weights_after_unequal_gradients, TP),
    "errors": (fsdp.errors_of_different_models,),
    "refusals": (fsdp.refusals, [(config, made) for config, made, _ in REFUSED]),
}
Answers = dict[str, list[Any]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """What both ranks answer to each question."""
    first, second = on_ranks(2, fsdp.answer_all, list(QUESTIONS.values()))
    return dict(zip(QUESTIONS, map(list, zip(first, second, strict=True)), strict=True))


@cache
def train_alone(case: str) -> dict[str, Any]:
    """Train a case, by its text, in one process."""
    made, how = ast.literal_eval(case)
    return fsdp.train(model_builder(**made)(), **how)


def assert_same_results(found: dict[str, Any], alone: dict[str, Any], which: str) -> None:
    for key in ("losses", "validations"):
        assert found[key] == pytest.approx(alone[key], abs=1e-5, nan_ok=True), (which, key)
    assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4, nan_ok=True), which
    for key in ("gradients", "weights"):
        assert found[key].keys() == alone[key].keys()
        for name, value in alone[key].items():
            torch.testing.assert_close(
                found[key][name], value, atol=1e-4, rtol=1e-4, msg=f"{which}: {key} {name}"
            )


@pytest.mark.parametrize(
    ("num_ranks", "config", "cases"),
    [
        (2, FSDP, CASES + OF_FSDP),
        (2, GRAD_OP, CASES[:2]),
        (2, ONCE, OF_ONCE),
        (2, ONCE_KEPT, OF_ONCE[:1]),
        (2, TP, CASES[1:4] + OF_TP),
        (4, COPIES, CASES[1:2]),
        (4, FSDP_TP, [CASES[0], OF_TP[0]]),
    ],
    ids=["fsdp", "grad_op", "once", "once, kept", "tp", "2x2", "fsdp_tp"],
)
def test_ranks_train_as_one(num_ranks: int, config: FsdpConfig, cases: list[Any]) -> None:
    """Shards, replicated shards, split matrices, and shards of these."""
    assert min(train_alone(str(CASES[0]))["norms"]) > fsdp.CLIP, "clipping would not be tested"
    by_rank = on_ranks(num_ranks, fsdp.train_cases, [(config, *case) for case in cases])
    for number, case in enumerate(cases):
        for found in by_rank:
            assert_same_results(found[number], train_alone(str(case)), f"{config.name} {case}")


KERNELS: list[tuple[dict[str, Any], int]] = [
    ({"kind": "full", "model_type": "qwen3", "head_dim": 8}, 13),
    ({"kind": "lora", **UNTIED}, 7),
]
"""models, and how many norms of each a kernel computes"""


def test_kernels_train_on_split_weights() -> None:
    questions = [(fsdp.train_with_kernels, TP, made) for made, _ in KERNELS]
    by_rank = on_ranks(2, fsdp.answer_all, questions)
    for number, (made, norms) in enumerate(KERNELS):
        for answers in by_rank:
            kernels = {"FusedNorm": norms, "FusedGate": 3, "FusedLayer": 3}
            assert answers[number]["kernels"] == kernels
            assert_same_results(answers[number], train_alone(str((made, {}))), "tp")


def test_few_gradients_are_reduced_once_per_step(answers: Answers) -> None:
    """Many gradients are sharded after every micro-batch, since unsharded ones might not fit."""
    assert answers["few gradients"] == [(False, True)] * 2
    assert answers["many gradients"] == [(True, True)] * 2
    assert answers["whole gradients"] == [(False, True)] * 2


def test_weights_that_stay_gathered_are_gathered_once_per_step(answers: Answers) -> None:
    assert answers["gathers of grad_op"] == [([4, 0, 0], [])] * 2
    assert answers["gathers"][0] == ([7, 7, 7], [])
    # And are resharded after an evaluation.
    assert answers["unsharded"] == [[], []]


def test_autocast_does_not_copy_gathered_weights(answers: Answers) -> None:
    """Copies of all layers, saved for the backward pass, would be a full model on every rank."""
    assert answers["dtypes of full"] == [[[BF16], [FP32], [FP32]]] * 2
    assert answers["dtypes of lora"] == [[[BF16, FP32], [FP32], [FP32]]] * 2


def test_bf16_is_close_to_one_process(answers: Answers) -> None:
    for case, found in zip(IN_BF16, answers["bf16"][0], strict=True):
        alone = train_alone(str(case))
        assert found["losses"] == pytest.approx(alone["losses"], abs=0.05)
        for name, value in alone["gradients"].items():
            assert (found["gradients"][name] - value).norm() < 0.1 * value.norm() + 1e-3, name


def test_gradients_may_be_summed_in_bf16(answers: Answers) -> None:
    exact, rounded = answers["sums"][0]
    assert 0 < fsdp.difference(rounded["gradients"], exact["gradients"]) < 2**-8


def test_4bit_weights_and_their_scales_are_sharded(answers: Answers) -> None:
    """QLoRA: ranks that did not quantize the base compute the same losses."""
    alone = fsdp.train(fsdp.build_quantized())["losses"]
    assert answers["4 bits"] == [pytest.approx(alone, abs=1e-5)] * 2
    for scales in answers["scales"]:
        assert len(scales) == 28 and all(is_sharded for is_sharded, _ in scales)
        assert [part for _, part in scales] == pytest.approx([0.5] * 28, abs=0.1)
    assert answers["devices of scales"] == [{"meta"}, {"meta"}]


def test_replicated_weights_stay_equal_despite_rounding(answers: Answers) -> None:
    """Includes Qwen3's norms of single heads, whose partial gradients are summed."""
    first, second = answers["replicated"]
    assert len(first) >= 12
    for name, weight in first.items():
        assert torch.equal(second[name], weight), name


def test_ranks_with_different_models_all_stop(answers: Answers) -> None:
    first, second = answers["errors"]
    assert first == second
    other, more, fewer, tied = first
    assert "'1.weight') where rank 1 has ('1.weight', (2, 3), torch.float32, '0.weight')" in tied
    assert "(2, 2)" in other and "where rank 1 has ('0.weight', (2, 3)" in other
    assert "built nothing where rank 1 has ('1.weight', (2, 4)" in more
    assert "('1.weight', (2, 4)" in fewer and "where rank 1 has nothing" in fewer


def test_indivisible_sizes_are_refused(answers: Answers) -> None:
    for messages in answers["refusals"]:
        for (_, _, expected), message in zip(REFUSED, messages, strict=True):
            assert expected in message


def test_only_the_reading_rank_holds_the_full_model() -> None:
    numbers = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536}
    numbers |= {"num_hidden_layers": 16, "num_attention_heads": 8}
    reader, other = on_ranks(2, fsdp.measure_loading_memory, numbers)
    assert reader["built"] == [{"cpu"}] and other["built"] == [{"meta"}]
    assert reader["kept"] + other["kept"] == reader["whole"]
    # The other rank has held one full layer at a time, and the overhead of gloo and malloc.
    assert other["grown"] < 0.9 * reader["whole"] < reader["grown"]


def check_close_on_gpus(folder: Path, names: tuple[str, str], *words: str, within: float) -> None:
    """Train with both strategies; their losses differ by no more than `within`."""
    from tests.conftest import read_column
    from tests.processes import type_train

    losses = []
    for name in names:
        typed = (f"strategy={name}", "trainer.accelerator=gpu", *words)
        code, _, message = type_train(folder / name, *typed)
        assert code == 0, message
        losses.append(read_column(folder / name, "train/loss"))
    assert losses[1] == pytest.approx(losses[0], abs=within)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fsdp", "fsdp_offload", "tp"])
def test_one_gpu_trains_as_with_strategy_single(name: str, tmp_path: Path) -> None:
    """Each shard is the full tensor: weights are gathered and offloaded, but not communicated."""
    words = ("adapter.dropout=0", "trainer.devices=1")
    check_close_on_gpus(tmp_path, ("single", name), *words, within=1e-3)


@pytest.mark.gpu
def test_one_gpu_trains_on_4bit_weights_packed_on_the_host(tmp_path: Path) -> None:
    words = ("adapter.dropout=0", "quantization=nf4", "trainer.devices=1")
    check_close_on_gpus(tmp_path, ("single", "fsdp"), *words, within=1e-2)
