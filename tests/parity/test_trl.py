"""Steps of each objective that TRL or transformers has equal those of its trainer, in fp32."""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from app.config import load_config
from app.python import train
from data_modules import Batch
from tests.conftest import ROOT
from tests.tiny import TINY_BASE

PREFERENCES = ROOT.parent / "shared" / "data" / "preference" / "dpo_en_demo.json"
pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PREFERENCES.exists(), reason="../shared/data is absent"),
]

STEPS, PAIRS, BETA, TOLERANCE = 8, 8, 0.1, 1e-5
LR, EPS = {"lora": 3e-4, "full": 3e-5}, 1e-2
"""of AdamW; with a smaller epsilon, rounding decides the sign of some updates"""
IN_TEST_SLOW = [("dpo", "lora"), ("classify", "full")]
"""the others by `make test-versions`; tests/training compares all with plain PyTorch"""
Rows = list[dict[str, Any]]


def pairs(prompt: str | None = None) -> Rows:
    """Return prompts with the beginnings of two real answers each, as text.

    Short ones: TRL adds log-probabilities in fp32.
    """
    found = []
    for number, row in enumerate(json.loads(PREFERENCES.read_text())[:PAIRS]):
        begin = prompt or row["conversations"][-1]["value"][:60] + "\n\n"
        answers = {side: row[side]["value"][: 20 + 5 * number] for side in ("chosen", "rejected")}
        found.append({"prompt": begin, **answers})
    return found


def verdicts() -> Rows:
    """Return single answers, of which every other one is wanted."""
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair, side in zip(pairs(), ("chosen", "rejected") * (PAIRS // 2), strict=True)
    ]


CLASSES = ["short", "middle", "long"]


def texts() -> Rows:
    """Return texts with classes."""
    return [
        {"text": pair["prompt"] + pair["chosen"], "label": CLASSES[number % 3]}
        for number, pair in enumerate(pairs())
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of an objective, and the trainer of TRL that has it."""

    ours: list[str]
    module: str = "trl"
    trainer: str
    arguments: str = ""
    """the class of its arguments, if that is another one than the trainer's Config"""
    theirs: dict[str, Any]
    rows: Callable[[], Rows] = pairs
    is_reversed: bool = False
    micro_batch_size: int = PAIRS
    has_reference: bool = True
    figures: dict[str, str] = field(default_factory=lambda: {"margin": "rewards/margins"})
    """what is compared beside the loss: our name -> theirs"""


CASES = {
    "dpo": Case(ours=[f"objective.beta={BETA}"], trainer="DPO", theirs={"beta": BETA}),
    "ipo": Case(
        ours=[f"objective.beta={BETA}"],
        trainer="DPO",
        theirs={"beta": BETA, "loss_type": ["ipo"]},
        figures={},  # theirs are not per token, as their loss is
    ),
    # Their drift from the base is measured on the answer of the row before, ours of the one after.
    "kto": Case(
        ours=[f"objective.beta={BETA}", "objective.desirable_weight=1.5"],
        trainer="KTO",
        theirs={
            "beta": BETA,
            "desirable_weight": 1.5,
            "train_sampling_strategy": "sequential",
        },
        rows=verdicts,
        is_reversed=True,
        figures={"desirable_reward": "rewards/chosen", "undesirable_reward": "rewards/rejected"},
    ),
    # Theirs also trains the prompt, of which a first token is never predicted, and takes the mean
    # over the tokens of a micro-batch.
    "orpo": Case(
        ours=[f"objective.beta={BETA}"],
        module="trl.experimental.orpo",
        trainer="ORPO",
        theirs={"beta": BETA},
        rows=lambda: pairs("\n"),
        micro_batch_size=1,
        has_reference=False,
    ),
    "simpo": Case(
        ours=["objective.beta=2", "objective.margin=0.7"],
        module="trl.experimental.cpo",
        trainer="CPO",
        theirs={"beta": 2.0, "simpo_gamma": 0.7, "loss_type": "simpo", "cpo_alpha": 0.0},
        has_reference=False,
    ),
    "reward": Case(
        ours=["objective.centering=0.1"],
        trainer="Reward",
        theirs={"center_rewards_coefficient": 0.1},
        has_reference=False,
        figures={"margin": "margin"},
    ),
    "classify": Case(
        ours=[f"model.labels=[{','.join(CLASSES)}]", "packing=none"],
        module="transformers",
        trainer="",
        arguments="TrainingArguments",
        theirs={},
        rows=texts,
        has_reference=False,
        figures={},
    ),
}
HEADS = {"reward": 1, "classify": len(CLASSES)}
"""objectives with a head of their own -> its outputs"""


@dataclass
class Training:
    """The weights that a training begins with, and what it reports of each step."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    figures: list[list[float]] = field(default_factory=list)
    texts: Rows = field(default_factory=list)
    """token ids and classes of a step's rows, if they are classified"""


def trained(model: Any) -> dict[str, Any]:
    """Return the trainable weights of a model by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def texts_of(batch: Batch) -> Rows:
    """Return the texts of a batch, each in a row of its own, with their classes."""
    assert batch.unit_labels is not None
    rows = zip(batch.input_ids, batch.document_lengths, batch.unit_labels, strict=True)
    return [
        {"input_ids": row[:length].tolist(), "labels": int(label)} for row, (length,), label in rows
    ]


def train_ours(name: str, adapter: str, folder: Path) -> Training:
    """Run `app.train` with a global step of all rows."""
    case, found, rows = CASES[name], Training(), folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in case.rows()))

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.weights = {n: w.detach().clone() for n, w in trained(module.model).items()}

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.gradients.append({n: w.grad.clone() for n, w in trained(module.model).items()})

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            found.texts = [] if name != "classify" else texts_of(*rest[1])

    words = [
        *(f"objective={name}", *case.ours, f"adapter={adapter}"),
        *(f"optimizer.lr={LR[adapter]}", f"optimizer.eps={EPS}"),
        *(f"model.path={TINY_BASE}", f"data.datasets=[{{path: {rows}}}]", "data.val_set_size=0"),
        *("data.sequence_len=1024", f"data.cache_dir={folder / 'cache'}", "logger=csv"),
        *("schedule=constant", "schedule.warmup_steps=0", "trainer.max_grad_norm=null"),
        *("trainer.precision=fp32", "trainer.accelerator=cpu", "trainer.log_every_steps=1"),
        *(f"trainer.micro_batch_size={PAIRS}", "trainer.gradient_accumulation_steps=1"),
        *(f"trainer.max_steps={STEPS}", f"output.dir={folder / 'run'}"),
    ]
    words += ["adapter.dropout=0"] if adapter == "lora" else []
    words += ["objective.reference=cached"] if adapter == "full" and case.has_reference else []
    os.environ.pop("LOFT_RUN_DIR", None)
    names = [f"train/{figure}" for figure in ("loss", *case.figures)]
    run = train(load_config("train", words), [Watch()])
    found.figures = [[row[name] for name in names] for row in run.rows if names[0] in row]
    return found


def train_theirs(name: str, adapter: str, folder: Path, ours: Training) -> Training:
    """Run TRL's trainer on the same rows, from the same weights."""
    case, found, module = CASES[name], Training(), importlib.import_module(CASES[name].module)
    if name in HEADS:
        model = AutoModelForSequenceClassification.from_pretrained(
            TINY_BASE, dtype=torch.float32, num_labels=HEADS[name]
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32)
    if adapter == "lora":
        kind = "SEQ_CLS" if name in HEADS else "CAUSAL_LM"
        lora = peft.LoraConfig(kind, r=16, lora_alpha=32, target_modules="all-linear")
        model = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for parameter, weight in trained(model).items():
            weight.copy_(ours.weights[parameter])

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **rest: Any) -> None:
            found.gradients.append({n: w.grad.clone() for n, w in trained(model).items()})

        def on_log(self, *_: Any, logs: Any, **rest: Any) -> None:
            if "loss" in logs:
                found.figures.append([logs[key] for key in ("loss", *case.figures.values())])

    arguments = getattr(module, case.arguments or f"{case.trainer}Config")(
        str(folder / "trl"),
        per_device_train_batch_size=case.micro_batch_size,
        gradient_accumulation_steps=PAIRS // case.micro_batch_size,
        max_steps=STEPS,
        learning_rate=LR[adapter],
        adam_epsilon=EPS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **case.theirs,
    )
    rows = ours.texts or case.rows()
    getattr(module, f"{case.trainer}Trainer")(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows[::-1] if case.is_reversed else rows),
        processing_class=AutoTokenizer.from_pretrained(TINY_BASE),
        callbacks=[Watch()],
    ).train()
    return found


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        pytest.param(*case, marks=() if case in IN_TEST_SLOW else pytest.mark.versions)
        for case in itertools.product(CASES, LR)
    ],
)
def test_losses_margins_and_gradients_are_those_of_trl(
    name: str, adapter: str, tmp_path: Path
) -> None:
    ours = train_ours(name, adapter, tmp_path)
    theirs = train_theirs(name, adapter, tmp_path, ours)
    assert len(ours.figures) == len(ours.gradients) == STEPS
    for figures, expected in zip(ours.figures, theirs.figures, strict=True):
        assert figures == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    for gradients, known in zip(ours.gradients, theirs.gradients, strict=True):
        assert gradients.keys() == known.keys()
        norm = torch.stack([gradient.norm() for gradient in known.values()]).norm()
        for parameter, gradient in gradients.items():
            assert (gradient - known[parameter]).norm() <= TOLERANCE * norm, parameter
