"""Distillation equals plain PyTorch on full logits, which are never held; its runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

from app.assembly.base import build_objective
from app.model import recompute
from app.model.attention import attention_implementation
from app.model.head import fuse_head
from app.training.objective.distill import Teacher
from app.training.objective.objective import DatasetSums, batch_loss, losses_by_dataset
from app.training.objective.settings import DistillConfig
from common.errors import UserError
from data_modules import Batch
from tests import tiny
from tests.conftest import read_column
from tests.families import tiny_family
from tests.reliability.shell import Shell
from tests.runs import check_close
from tests.training.test_loss import IGNORED, make_batch, three_documents


def with_bias() -> Any:
    model = tiny.tiny_llama(tie_word_embeddings=False)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.vocab_size))
    return model


STUDENTS = {
    "tied": tiny.tiny_llama,
    "untied": lambda: tiny.tiny_llama(tie_word_embeddings=False),
    "softcap": lambda: tiny_family("gemma2", final_logit_softcapping=2.0),
    "bias": with_bias,
}
TEACHERS = {
    "as large": tiny.tiny_gpt2,
    "larger": lambda: tiny.tiny_llama(hidden_size=64, vocab_size=80),
    "smaller": lambda: tiny.tiny_llama(hidden_size=64, vocab_size=48),
    "scaled": lambda: tiny_family("granite", logits_scaling=3.0),
}
CONFIGS = [
    DistillConfig(teacher="larger"),
    DistillConfig(teacher="larger", direction="reverse"),
    DistillConfig(teacher="smaller", temperature=2.5),
    DistillConfig(teacher="smaller", direction="reverse", temperature=0.5, sft_weight=0.3),
    DistillConfig(teacher="as large", sft_weight=2.0),
    DistillConfig(teacher="scaled", direction="reverse", temperature=3.0),
]


def build(make: Any, *, fuses: bool = True, seed: int = 0) -> Any:
    """Return a model with random weights that are large enough for clear preferences."""
    model, generator = make(), torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    model.set_attn_implementation(attention_implementation("eager"))
    if fuses:
        fuse_head(model)
    return model.train()


def source_of(teacher: Any) -> Teacher:
    return Teacher(lambda *_: (teacher, "eager"), teacher.config.get_text_config().vocab_size)


def batch_of() -> Batch:
    # The smallest teacher has 48 rows.
    return three_documents((tiny.random_ids(tokens=15)[0] % 48).tolist())


def by_hand(model: Any, teacher: Any, batch: Batch, config: DistillConfig) -> list[Any]:
    """Return data set, weight, KL and cross-entropy of each trained token, of whole logits."""
    found, start = [], 0
    for length in batch.document_lengths[0]:
        ids = batch.input_ids[:, start : start + length]
        logits = model(input_ids=ids).logits[0].double()
        shared = min(logits.shape[1], teacher.config.vocab_size)
        with torch.no_grad():
            of_teacher = teacher(input_ids=ids).logits[0, :, :shared].double()
        pair = [
            log_softmax(each / config.temperature, -1) for each in (of_teacher, logits[:, :shared])
        ]
        first, second = pair if config.direction == "forward" else pair[::-1]
        kls = torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(1)
        for i in range(length - 1):
            if weight := batch.loss_weights[0, start + i].item():
                entropy = cross_entropy(logits[i], ids[0, i + 1])
                found.append((int(batch.dataset_ids[0, start]), weight, kls[i], entropy))
        start += length
    return found


@pytest.mark.parametrize(
    ("student", "config", "fuses"),
    [
        *((student, config, True) for config in CONFIGS[:3] for student in STUDENTS),
        *(("tied", config, True) for config in CONFIGS[3:]),
        *(("softcap", config, False) for config in CONFIGS),
    ],
    ids=str,
)
def test_loss_gradients_and_figures_are_those_of_whole_logits(
    student: str, config: DistillConfig, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "LOGITS_PER_CHUNK", 5 * 64)  # several chunks
    teacher = build(TEACHERS[str(config.teacher)], fuses=fuses, seed=1)
    model, batch = build(STUDENTS[student], fuses=fuses), batch_of()
    expected = by_hand(model, teacher, batch, config)
    scale = config.temperature**2
    total = sum(w * (scale * kl + config.sft_weight * ce) for _, w, kl, ce in expected)
    model.zero_grad()
    total.backward()
    plain = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    objective, sums = (build_objective(config, teacher=source_of(teacher)), DatasetSums(3))
    model.zero_grad()
    loss = batch_loss(objective, model, batch, "eager", sums)
    loss.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    norm = torch.stack([grad.norm() for grad in plain.values()]).norm()
    for name, weight in model.named_parameters():
        assert (weight.grad - plain[name]).norm() <= 1e-6 * norm, name
    assert not any(weight.grad is not None for weight in teacher.parameters())
    metrics = losses_by_dataset(sums.take(), ["a", "b", "c"], "val", objective.figures)
    for figure, place in (("kl", 2), ("cross_entropy", 3)):
        for name, number in (("a", 0), ("c", 2)):
            own = [row for row in expected if row[0] == number]
            mean = sum(row[1] * row[place].item() for row in own) / sum(row[1] for row in own)
            assert metrics[f"val/{figure}/{name}"] == pytest.approx(mean, rel=1e-5), figure


class OnlyBest(torch.nn.Module):
    """A head whose five highest logits are left."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight)
        return logits.masked_fill(logits < logits.topk(5).values[..., -1:], -1e4)


@pytest.mark.parametrize("teacher", ["larger", "smaller"])
@pytest.mark.parametrize("top_k", [1000, 5])
def test_stored_tokens_of_a_teacher_teach_what_the_live_one_does(
    teacher: str, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "LOGITS_PER_CHUNK", 5 * 64)  # several chunks
    shared = {"teacher": teacher, "temperature": 2.5, "sft_weight": 0.3}
    made, batch = build(TEACHERS[teacher], seed=1), batch_of()
    cached = DistillConfig(**shared, teacher_logits="cached", teacher_top_k=top_k)
    asked = build_objective(cached, teacher=source_of(made))
    stored = asked.likeliest(batch)
    assert stored.shape == (7, 2, min(top_k, made.config.vocab_size))
    found = []
    for config, own in (
        (DistillConfig(**shared), batch),
        (cached, replace(batch, reference=stored)),
        (cached, batch),
    ):
        model = build(tiny.tiny_llama)
        objective = build_objective(config, teacher=source_of(made))
        loss = batch_loss(objective, model, own, "eager", DatasetSums(3))
        loss.backward()
        found.append((loss.item(), {n: w.grad for n, w in model.named_parameters()}))
        assert (objective.teacher is None) == (own is not batch)
    live, from_batch, asked_now = found
    assert from_batch[0] == asked_now[0]
    if top_k > 64:
        assert from_batch[0] == pytest.approx(live[0], rel=1e-6)
        for name, grad in live[1].items():
            assert (from_batch[1][name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7, name
    elif teacher == "smaller":  # all tokens but five are impossible
        made.lm_head = OnlyBest(made.lm_head)
        expected = by_hand(build(tiny.tiny_llama, fuses=False), made, batch, cached)
        total = sum(weight * (2.5**2 * kl + 0.3 * ce) for _, weight, kl, ce in expected)
        assert from_batch[0] == pytest.approx(total.item(), rel=1e-5)


def test_the_whole_logits_of_neither_model_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, positions, rows = 4096, 40, 4
    monkeypatch.setattr(recompute, "LOGITS_PER_CHUNK", rows * vocabulary)
    model, teacher = (
        build(lambda: tiny.tiny_llama(vocab_size=vocabulary, hidden_size=8, num_attention_heads=2))
        for _ in range(2)
    )
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    objective = build_objective(
        DistillConfig(teacher="tiny", sft_weight=1.0), teacher=source_of(teacher)
    )
    ids = tiny.random_ids(tokens=positions)[0].tolist()
    batch = make_batch([ids], [[0.0] + [1.0] * (positions - 1)], [0])
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and vocabulary == result.shape[-1:].numel():
                sizes.append(result.numel())
            return result

    with Watch():
        batch_loss(objective, model, batch, "eager", DatasetSums(1)).backward()
    weight = 8 * vocabulary  # the transposed weight has as many columns, too
    assert max(size for size in sizes if size != weight) == rows * vocabulary


def test_a_micro_batch_without_trained_tokens_has_a_loss_and_gradients_of_zero() -> None:
    model, sums = build(tiny.tiny_llama), DatasetSums(3)
    batch = batch_of()
    batch.labels.fill_(IGNORED)
    batch.loss_weights.zero_()
    config = DistillConfig(teacher="larger", sft_weight=1.0)
    teacher = build(TEACHERS["larger"])
    objective = build_objective(config, teacher=source_of(teacher))
    loss = batch_loss(objective, model, batch, "eager", sums)
    loss.backward()
    assert loss.item() == 0.0
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)
    assert not sums.take().any()


COLUMNS = ("train/loss", "train/kl", "val/loss", "val/cross_entropy/lists")


def words_of(*words: str) -> list[str]:
    """Return the overrides of a run of a shallow student whose teacher is the whole base."""
    base = [
        f"model.path={tiny.small_base()}",
        "objective=distill",
        f"objective.teacher={tiny.TINY_BASE}",
    ]
    return tiny.small_run(*base, "optimizer.lr=1e-3", "adapter.dropout=0", *words)


@pytest.fixture(scope="module")
def whole(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill") / "whole"
    shell.train_into(folder, *words_of("objective.sft_weight=0.5"))
    return folder


@pytest.mark.slow
def test_the_student_comes_closer_to_its_teacher(whole: Path) -> None:
    kls = read_column(whole, "val/kl")
    assert kls[4] < 0.9 * kls[0]
    losses, entropies = (read_column(whole, f"val/{each}") for each in ("loss", "cross_entropy"))
    assert losses[0] == pytest.approx(kls[0] + 0.5 * entropies[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["strategy=zero3"],
        ["strategy=fsdp", "objective.teacher_logits=cached", "objective.teacher_top_k=100000"],
    ],
    ids=["zero3", "fsdp, cached"],
)
def test_a_step_is_the_same_however_it_is_split(
    words: list[str], whole: Path, shell: Shell, tmp_path: Path
) -> None:
    words = [*words, "trainer.gradient_accumulation_steps=1", "trainer.devices=2"]
    shell.train_into(tmp_path / "split", *words_of("objective.sft_weight=0.5", *words))
    check_close(tmp_path / "split", whole, COLUMNS, abs=1e-5)


@pytest.mark.slow
def test_what_a_teacher_says_is_stored_once_and_trains_as_the_live_one(
    whole: Path, shell: Shell, tmp_path: Path
) -> None:
    stored = ["objective.teacher_logits=cached", "objective.teacher_top_k=100000"]
    stored += ["objective.sft_weight=0.5", f"data.cache_dir={tmp_path / 'cache'}"]
    words = words_of(*stored, "trainer.checkpoint.every_steps=1", "resume=auto")
    said = shell.train_into(tmp_path / "killed", *words, "faults=[rank_killed@3]", code=-9)
    assert "objective.teacher_logits=cached: computed for" in said
    assert "hold 100.00 % of the teacher's probability" in said
    said = shell.train_into(tmp_path / "killed", *words)
    assert "objective.teacher_logits=cached: found in the cache" in said
    check_close(tmp_path / "killed", whole, COLUMNS, abs=1e-5)


@pytest.mark.slow
def test_a_run_is_evaluated_against_its_teacher_which_may_be_quantized(
    whole: Path, shell: Shell, tmp_path: Path
) -> None:
    words = [f"run={whole}", "trainer.precision=fp32", "objective.teacher_quantization=nf4"]
    shell.train_into(tmp_path / "found", *words, module="app.evaluate")
    found = json.loads((tmp_path / "found" / "metrics.json").read_text())
    before, after = found["base/val/kl"], found["tuned/val/kl"]
    assert after < before
    assert after != read_column(whole, "val/kl")[4]
    assert after == pytest.approx(read_column(whole, "val/kl")[4], rel=0.1)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    teacher = shutil.copytree(tiny.TINY_BASE, tmp_path / "teacher")
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"2 of .*tokens differ.*type a teacher of"):
        tiny.train_into(tmp_path / "run", *words_of(f"objective.teacher={teacher}"))
