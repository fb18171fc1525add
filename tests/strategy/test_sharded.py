"""FSDP2 and tensor parallelism train as one process without sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.strategy.settings import FsdpConfig
from tests.ranks import on_ranks
from tests.strategy import fsdp_training as fsdp
from tests.strategy.fsdp_training import CLIP, model_builder

pytestmark = pytest.mark.slow

FSDP = FsdpConfig()
GRAD_OP = FsdpConfig(name="fsdp_grad_op", reshard_after_forward=False)
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
OF_TP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Norms of single heads, biases of split matrices, and a bias after an all-reduce.
    ({"kind": "full", "model_type": "qwen3", "head_dim": 8}, {}),
    ({"kind": "full", "model_type": "qwen2", "recompute": "full"}, {}),
    ({"kind": "lora", "model_type": "gpt_neox", "backend": "eager"}, {}),
    ({"kind": "lora", **UNTIED}, {}),
]


def check_cases(num_ranks: int, config: FsdpConfig, cases: list[Any]) -> None:
    answers = on_ranks(num_ranks, fsdp.train_cases, [(config, *case) for case in cases])
    for number, (made, how) in enumerate(cases):
        alone = fsdp.train(model_builder(**made)(), **how)
        for answer in answers:
            assert_same_results(answer[number], alone, f"{config.name} {made} {how}")


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
    ("config", "cases"),
    [(FSDP, CASES + OF_FSDP), (GRAD_OP, CASES[:2]), (TP, CASES + OF_TP)],
    ids=["fsdp", "grad_op", "tp"],
)
def test_two_ranks_train_as_one(config: FsdpConfig, cases: list[Any]) -> None:
    check_cases(2, config, cases)


@pytest.mark.parametrize(
    "made",
    [{"kind": "full", "model_type": "qwen3", "head_dim": 8}, {"kind": "lora", **UNTIED}],
    ids=["full", "lora"],
)
@pytest.mark.parametrize(("num_ranks", "config"), [(2, TP), (4, FSDP_TP)], ids=["tp", "fsdp_tp"])
def test_kernels_train_on_split_weights(
    num_ranks: int, config: FsdpConfig, made: dict[str, Any]
) -> None:
    norms = 13 if "model_type" in made else 7
    alone = fsdp.train(model_builder(**made)())
    for answer in on_ranks(num_ranks, fsdp.train_with_kernels, config, made):
        assert answer["kernels"] == {"FusedNorm": norms, "FusedGate": 3, "FusedLayer": 3}
        assert_same_results(answer, alone, config.name)


@pytest.mark.parametrize("config", [COPIES, FSDP_TP], ids=["2x2", "fsdp_tp"])
def test_four_ranks_train_as_one(config: FsdpConfig) -> None:
    """Replicated shards, and shards of split matrices."""
    check_cases(4, config, [*CASES[:2], OF_TP[0]])


def test_gradients_of_the_cases_are_large_enough_to_clip() -> None:
    """Otherwise the cases would not test clipping."""
    norms = fsdp.train(model_builder("lora")())["norms"]
    assert min(norms) > CLIP


def test_a_run_continues_under_another_strategy() -> None:
    answers = on_ranks(2, fsdp.train_under_two_strategies, FSDP, TP, "lora")
    alone = fsdp.train(model_builder("lora")())
    for answer in answers:
        assert answer["losses"] == pytest.approx(alone["losses"][2:], abs=1e-5)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(answer["weights"][name], value, atol=1e-4, rtol=1e-4)


def test_few_gradients_are_reduced_once_per_step() -> None:
    """Many gradients are sharded after every micro-batch, since unsharded ones might not fit."""
    assert on_ranks(2, fsdp.has_gradients_by_micro_batch, FSDP, "lora") == [(False, True)] * 2
    assert on_ranks(2, fsdp.has_gradients_by_micro_batch, FSDP, "full") == [(True, True)] * 2


def test_weights_that_stay_gathered_are_gathered_once_per_step() -> None:
    assert on_ranks(2, fsdp.gathers_by_micro_batch, GRAD_OP) == [([4, 0, 0], [])] * 2
    (each, _) = on_ranks(2, fsdp.gathers_by_micro_batch, FSDP)
    assert each == ([7, 7, 7], [])


def test_weights_are_resharded_after_evaluation() -> None:
    for config in (FSDP, GRAD_OP):
        assert on_ranks(2, fsdp.unsharded_weights_after_forward, config) == [[], []]


def test_autocast_does_not_copy_gathered_weights() -> None:
    """Copies of all layers, saved for the backward pass, would be a full model on every rank."""
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    assert on_ranks(2, fsdp.dtypes_in_layers, FSDP, "full") == [[[bf16], [fp32], [fp32]]] * 2
    assert on_ranks(2, fsdp.dtypes_in_layers, FSDP, "lora") == [[[bf16, fp32], [fp32], [fp32]]] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_states_between_layers_are_bf16(tied: bool) -> None:
    """Also if all weights are trained: fp32 would double their memory and traffic."""
    for config in (FSDP, GRAD_OP):
        found = on_ranks(2, fsdp.hidden_dtypes, config, {"tie_word_embeddings": tied})
        assert found == [["torch.bfloat16"]] * 2


def test_embedding_and_head_are_gathered_only_while_in_use() -> None:
    """They are the largest modules: for a 4-bit 70B base, a tenth of a 24 GB card each."""
    frozen = {"forward": [], "loss": ["head"], "backward": [], "after": []}
    assert on_ranks(2, fsdp.gathered_ends_in_step, FSDP, "lora") == [frozen] * 2
    (trained, _) = on_ranks(2, fsdp.gathered_ends_in_step, FSDP, "full")
    assert "embedding" not in trained["forward"] + trained["loss"] and trained["after"] == []


def test_bf16_is_close_to_one_process() -> None:
    cases = [({"kind": kind, "precision": "bf16"}, {"autocast": True}) for kind in ("lora", "full")]
    answers = on_ranks(2, fsdp.train_cases, [(FSDP, *case) for case in cases])
    for number, (made, how) in enumerate(cases):
        alone = fsdp.train(model_builder(**made)(), **how)
        found = answers[0][number]
        assert found["losses"] == pytest.approx(alone["losses"], abs=0.05)
        for name, value in alone["gradients"].items():
            assert (found["gradients"][name] - value).norm() < 0.1 * value.norm() + 1e-3, name


def test_4bit_weights_are_sharded() -> None:
    """QLoRA: ranks that did not quantize the base compute the same losses."""
    alone = fsdp.train(fsdp.build_quantized())["losses"]
    assert on_ranks(2, fsdp.quantized_losses) == [pytest.approx(alone, abs=1e-5)] * 2


def test_scales_of_4bit_weights_are_sharded() -> None:
    for answer in on_ranks(2, fsdp.shards_of_scales):
        assert len(answer) == 28
        assert all(is_sharded for is_sharded, _ in answer)
        assert [part for _, part in answer] == pytest.approx([0.5] * 28, abs=0.1)


def test_scales_of_4bit_weights_are_on_the_device() -> None:
    assert on_ranks(2, fsdp.devices_of_scales) == [{"meta"}, {"meta"}]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_tensor_parallel_has_two_all_reduces_per_layer_and_pass(kind: str) -> None:
    layers = fsdp.ARCHITECTURE["num_hidden_layers"]
    assert isinstance(layers, int)
    (forward, backward), other = on_ranks(2, fsdp.count_all_reduces, TP, kind)
    assert (forward, backward) == other
    assert forward == 2 * layers
    # Nothing below the lowest LoRA matrix needs a gradient.
    assert backward == 2 * layers - (kind == "lora")


def test_a_split_head_never_gathers_logits() -> None:
    """test_two_ranks_train_as_one compares its loss, gradients and weights."""
    layers = fsdp.ARCHITECTURE["num_hidden_layers"]
    assert isinstance(layers, int)
    # Per chunk: the largest logit, the label's logit with the sum; backward: hidden states once.
    assert (
        on_ranks(2, fsdp.count_all_reduces, TP, "lora", UNTIED)
        == [(2 * layers + 2, 2 * layers)] * 2
    )


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_replicated_weights_stay_equal_despite_rounding(kind: str) -> None:
    """Includes Qwen3's norms of single heads, whose partial gradients are summed."""
    first, second = on_ranks(2, fsdp.replicated_weights_after_unequal_gradients, TP, kind)
    assert len(first) >= 12
    for name, weight in first.items():
        assert torch.equal(second[name], weight), name


def test_ranks_with_different_models_all_stop() -> None:
    first, second = on_ranks(2, fsdp.errors_of_different_models)
    assert first == second
    other, more, fewer, tied = first
    assert "'1.weight') where rank 1 has ('1.weight', (2, 3), torch.float32, '0.weight')" in tied
    assert "(2, 2)" in other and "where rank 1 has ('0.weight', (2, 3)" in other
    assert "built nothing where rank 1 has ('1.weight', (2, 4)" in more
    assert "('1.weight', (2, 4)" in fewer and "where rank 1 has nothing" in fewer


def test_only_the_reading_rank_holds_the_full_model() -> None:
    numbers = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536}
    numbers |= {"num_hidden_layers": 16, "num_attention_heads": 8}
    reader, other = on_ranks(2, fsdp.measure_loading_memory, numbers)
    assert reader["built"] == [{"cpu"}] and other["built"] == [{"meta"}]
    assert reader["kept"] + other["kept"] == reader["whole"]
    # The other rank has held one full layer at a time, and the overhead of gloo and malloc.
    assert other["grown"] < 0.9 * reader["whole"] < reader["grown"]


REFUSED: list[tuple[FsdpConfig, dict[str, Any], str]] = [
    (TP, {"num_key_value_heads": 1}, "does not divide the 1 key heads"),
    (TP, {"kind": "dora"}, "adapter.use_dora=true"),
    (TP, {"intermediate_size": 49}, "49 features of mlp.gate_proj; type a divisor of 49"),
    (TP, {"model_type": "phi3"}, "phi3 model uses the style colwise_gather_output"),
    # What ranks alone decide, `check_layout` refuses before they start.
]


def test_indivisible_sizes_are_refused() -> None:
    for answer in on_ranks(2, fsdp.refusals, [(config, made) for config, made, _ in REFUSED]):
        for (_, _, expected), message in zip(REFUSED, answer, strict=True):
            assert expected in message


def losses_on_gpus(folder: Path, *words: str) -> dict[int, float]:
    from tests.conftest import read_column
    from tests.processes import type_train

    code, _, message = type_train(folder, "trainer.accelerator=gpu", "adapter.dropout=0", *words)
    assert code == 0, message
    return read_column(folder, "train/loss")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fsdp", "fsdp_offload", "tp"])
def test_one_gpu_trains_as_with_strategy_single(name: str, tmp_path: Path) -> None:
    """Each shard is the full tensor: weights are gathered and offloaded, but not communicated."""
    alone, shared = (
        losses_on_gpus(tmp_path / strategy, f"strategy={strategy}", "trainer.devices=1")
        for strategy in ("single", name)
    )
    assert shared == pytest.approx(alone, abs=1e-3)


@pytest.mark.gpu
def test_one_gpu_trains_on_4bit_weights_packed_on_the_host(tmp_path: Path) -> None:
    words = ("quantization=nf4", "trainer.devices=1")
    alone, shared = (
        losses_on_gpus(tmp_path / strategy, f"strategy={strategy}", *words)
        for strategy in ("single", "fsdp")
    )
    assert shared == pytest.approx(alone, abs=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words", [["fsdp"], ["fsdp", "quantization=nf4"], ["fsdp_offload"], ["tp"]]
)
def test_two_gpus_train_as_one_process(words: list[str], tmp_path: Path) -> None:
    """By NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    name, *quantized = words
    micro_batches = 2 if name == "tp" else 1  # of a step, which has two
    alone = losses_on_gpus(tmp_path / "one", "strategy=single", "trainer.devices=1", *quantized)
    shared = losses_on_gpus(
        tmp_path / name,
        f"strategy={name}",
        "trainer.devices=2",
        f"trainer.gradient_accumulation_steps={micro_batches}",
        *quantized,
    )
    assert shared == pytest.approx(alone, abs=1e-2 if quantized else 1e-3)
