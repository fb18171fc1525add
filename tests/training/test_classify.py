"""objective=classify and reward equal plain PyTorch on each text, and open in transformers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from app.assembly.base import build_objective
from app.config import load_config
from app.model.adapter import FullConfig, LoraConfig
from app.model.architecture import RatesTokens, hidden_as_logits
from app.model.base import ModelConfig
from app.model.build import build_model
from app.model.quantization import QuantizationConfig
from app.model.recompute import RecomputeConfig
from app.training.objective.objective import DatasetSums, RowSums, batch_loss, losses_by_dataset
from app.training.objective.settings import (
    ClassifyConfig,
    ObjectiveConfig,
    RewardConfig,
)
from common.errors import DataError, Origin, UserError
from data_modules import Example
from data_modules.collator import Collator
from data_modules.format import CLASSIFICATION, RowError, convert_row, label_of, labels_of
from data_modules.types import Row
from tests.conftest import read_column
from tests.in_process import run_command
from tests.reliability.shell import Shell
from tests.runs import check_close
from tests.tiny import SAMPLES, tiny_llama, train_into
from tests.training.test_dpo import SPLITS, assert_same_gradients, batches, gradients, make_pairs

CLASSES, CLASS_WEIGHTS = ["first", "inside", "last"], [1.0, 2.0, 0.5]
WEIGHTED = ClassifyConfig(class_weights=CLASS_WEIGHTS)
LENGTHS, WEIGHTS = [5, 9, 3, 7], [1.0, 0.5, 1.0, 2.0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved language model, without a head for classes."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return str(folder)


def build(base: str, labels: list[str], adapter: Any = None) -> Any:
    """Build a classifier from a language model."""
    built: Any = build_model(
        ModelConfig(path=base, labels=labels),
        QuantizationConfig(),
        "sdpa",
        adapter or FullConfig(),
        RecomputeConfig(mode="none"),
        "fp32",
    )
    return built


def make_texts(labels: list[float]) -> list[Example]:
    """Return texts with a label, of which only the last token has a weight."""
    rng = np.random.default_rng(1)
    texts = []
    for number, (length, weight, label) in enumerate(zip(LENGTHS, WEIGHTS, labels, strict=True)):
        weights = np.zeros(length, np.float32)
        weights[-1] = weight
        ids, origin = rng.integers(3, 60, length).astype(np.int32), Origin("c.json", number)
        texts.append(Example(ids, weights, number % 2, origin, label=label))
    return texts


def outputs_alone(model: Any, document: Example) -> torch.Tensor:
    """Return the outputs at the last token of a document that is alone."""
    ids = torch.from_numpy(document.input_ids).long()[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state
    found: torch.Tensor = torch.nn.functional.linear(hidden[0, -1], model.score.weight)
    return found


def weighted(losses: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([w * loss for w, loss in zip(WEIGHTS, losses, strict=True)]).sum()


def classes(model: Any, texts: list[Example]) -> torch.Tensor:
    scale = torch.tensor(CLASS_WEIGHTS)
    truths = [torch.tensor(int(text.label or 0)) for text in texts]
    return weighted(
        scale[truth] * cross_entropy(outputs_alone(model, text), truth)
        for text, truth in zip(texts, truths, strict=True)
    )


def numbers(model: Any, texts: list[Example]) -> torch.Tensor:
    return weighted((outputs_alone(model, text)[0] - (text.label or 0)) ** 2 for text in texts)


def rewards(model: Any, pairs: list[Example]) -> torch.Tensor:
    losses = []
    for pair in pairs:
        chosen, rejected = (outputs_alone(model, answer)[0] for answer in pair.documents())
        loss = -logsigmoid(chosen - rejected - (pair.label or 0)) + 0.1 * (chosen + rejected) ** 2
        losses.append(float(pair.weights.max()) * loss)
    return torch.stack(losses).sum()


def several_classes(model: Any, texts: list[Example]) -> torch.Tensor:
    """As transformers' loss of problem_type=multi_label_classification, weighted by class."""
    scale, losses = torch.tensor(CLASS_WEIGHTS), []
    for text in texts:
        bits = int(text.label or 0)
        truth = torch.tensor([float(bits >> index & 1) for index in range(3)])
        logits = outputs_alone(model, text)
        losses.append(binary_cross_entropy_with_logits(logits, truth, weight=scale))
    return weighted(losses)


MARGINS = [0.5, None, 0.0, -1.0]
RATED = [replace(pair, label=it) for pair, it in zip(make_pairs(), MARGINS, strict=True)]
CASES: dict[str, tuple[ObjectiveConfig, list[str], Any, list[Example]]] = {
    "classes": (WEIGHTED, CLASSES, classes, make_texts([0.0, 2.0, 1.0, 2.0])),
    "several": (WEIGHTED, CLASSES, several_classes, make_texts([0.0, 5.0, 2.0, 7.0])),
    "numbers": (ClassifyConfig(), ["score"], numbers, make_texts([0.5, -2.0, 1.0, 3.0])),
    "rewards": (RewardConfig(centering=0.1), ["reward"], rewards, RATED),
}


@pytest.mark.parametrize(("packed", "sizes"), SPLITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_each_text_alone(
    base: str, name: str, sizes: list[int], packed: bool
) -> None:
    config, labels, formula, rows = CASES[name]
    model = build(base, labels)
    expected = formula(model, rows)
    by_name = gradients(model, expected)
    objective = build_objective(config, ModelConfig(labels=labels, multi_label=name == "several"))
    sums, losses = DatasetSums(2), RowSums()
    found = [
        batch_loss(objective, model, batch, "sdpa", sums, losses)
        for batch in batches(rows, sizes, packed=packed)
    ]
    assert sum(loss.item() for loss in found) == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(gradients(model, torch.stack(found).sum()), by_name, 2e-6)
    assert losses.take(range(4), 4)[0].sum().item() == pytest.approx(expected.item(), rel=1e-6)


def test_recall_and_precision_are_of_the_texts_and_the_guesses_of_a_class(base: str) -> None:
    config, labels, _, texts = CASES["classes"]
    model, sums = build(base, labels), DatasetSums(2)
    objective = build_objective(config, ModelConfig(labels=labels))
    for batch in batches(texts, [3, 1], packed=True):
        batch_loss(objective, model, batch, "sdpa", sums)
    found = losses_by_dataset(sums.take(), ["a", "b"], "val", objective.figures)
    guesses = [int(outputs_alone(model, text).argmax()) for text in texts]
    truth = [int(text.label or 0) for text in texts]
    right = [float(guess == true) for guess, true in zip(guesses, truth, strict=True)]
    assert found["val/accuracy"] == pytest.approx(np.average(right, weights=WEIGHTS))
    for index, name in enumerate(labels):
        for figure, of in (("recall", truth), ("precision", guesses)):
            own = [number for number in range(4) if of[number] == index]
            if own:
                mean = np.average([right[n] for n in own], weights=[WEIGHTS[n] for n in own])
                assert found[f"val/{figure}_{name}"] == pytest.approx(mean)
            else:
                assert f"val/{figure}_{name}" not in found


@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_without_rows_has_a_loss_and_gradients_of_zero(base: str, name: str) -> None:
    config, labels, _, _ = CASES[name]
    model = build(base, labels)
    objective = build_objective(config, ModelConfig(labels=labels, multi_label=name == "several"))
    empty = Collator(0, True)([[]], 1.0)
    loss = batch_loss(objective, model, empty, "sdpa", DatasetSums(2))
    assert loss.item() == 0.0
    found = gradients(model, loss)
    assert "score.weight" in found and not any(grad.any() for grad in found.values())


def test_lora_trains_the_head_whole_and_every_build_draws_the_same_one(base: str) -> None:
    torch.manual_seed(1)
    first = build(base, CLASSES, LoraConfig())
    torch.manual_seed(2)
    second = build(base, CLASSES, LoraConfig())
    trained = {name for name, weight in first.named_parameters() if weight.requires_grad}
    assert any("score.modules_to_save" in name for name in trained)
    assert first.peft_config["default"].task_type == "SEQ_CLS"
    heads = [model.get_base_model().score.weight for model in (first, second)]
    assert torch.equal(*heads) and heads[0].std() > 0


def test_attention_is_verified_on_hidden_states(base: str) -> None:
    model = build(base, ["reward"])
    ids = torch.arange(3, 9)[None]
    assert isinstance(model, RatesTokens)
    with hidden_as_logits(model):
        assert model(input_ids=ids).logits.shape == (1, 6, model.config.hidden_size)
    assert model(input_ids=ids).logits.shape == (1, 6, 1)
    assert model(input_ids=ids, logits_to_keep=2).logits.shape == (1, 2, 1)


def test_models_without_one_linear_head_are_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    GraniteForCausalLM(GraniteConfig(**tiny, **heads)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no working class of granite models"):
        build(str(tmp_path), CLASSES)


def test_a_row_is_a_text_with_its_class() -> None:
    for values, label in (
        ({"text": "t", "label": "Spam"}, "Spam"),
        ({"content": "t", "labels": 3}, "3"),
        ({"sentence": "t", "label": True}, "true"),
        ({"messages": [{"role": "user", "content": "t"}], "class": "a"}, "a"),
        ({"text": "t", "labels": ["a", 2]}, ("a", "2")),
    ):
        (item,) = convert_row(Row(values, Origin("c.json", 1)), CLASSIFICATION, {})
        assert not isinstance(item, tuple) and item.label == label
    for values, said in (
        ({"text": "t", "label": [["a"]]}, "label is list; write the name of a class"),
        ({"text": "t", "label": ""}, "label is ''; write the name of a class"),
        ({"label": "a", "id": 3}, "no text beside the label"),
        ({"text": "t"}, "missing 'label'"),
    ):
        with pytest.raises(RowError, match=said):
            convert_row(Row(values, Origin("c.json", 1)), CLASSIFICATION, {})


def test_labels_are_found_by_name_or_read_as_numbers() -> None:
    assert [label_of(text, CLASSES) for text in ("inside", "LAST")] == [1.0, 2.0]
    assert label_of("-0.5", ["score"]) == -0.5
    with pytest.raises(RowError, match=r"label is 'other'; model\.labels has first, inside, last"):
        label_of("other", CLASSES)
    assert [labels_of(each, CLASSES) for each in ((), "last", ("Last", "first"))] == [0.0, 4.0, 5.0]
    with pytest.raises(RowError, match=r"label is a list; .*type model\.multi_label=true"):
        label_of(("inside",), CLASSES)
    with pytest.raises(RowError, match=r"label is 'other'; model\.labels has"):
        labels_of(("inside", "other"), CLASSES)
    with pytest.raises(RowError, match=r"label is 'good', and model.labels=.score. is for numbers"):
        label_of("good", ["score"])


def test_missing_labels_are_named_and_a_label_that_is_none_of_them_is_refused(
    tmp_path: Path,
) -> None:
    said = run_command("objective=classify", "data=classes", "model=tiny")
    assert said.code == 2 and "'model.labels=[first, inside, last]'" in said.stderr
    labels = [
        "0",
        "10",
        "-1",
        "1.5",
        "true",
        "none of them",
        "a, b",
        "O'Neil",
        'a "b"',
        "ä",
        "sci/tech",
    ]
    rows = [{"text": f"Text {n}.", "label": label} for n, label in enumerate(labels)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    typed = ["objective=classify", "model=tiny", f"data.datasets={tmp_path / 'rows.jsonl'}"]
    (word,) = re.findall(r"type (.*), or model\.labels=\[NAME\]", run_command(*typed).stderr)
    found = load_config("train", [*typed, *shlex.split(word)]).model.labels
    assert sorted(found) == sorted(labels)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "a", "label": each}) + "\n" for each in ("x", "a\\b", "a\nb"))
    )
    assert "'model.labels=[..., ..., x]'" in run_command(*typed).stderr  # cannot be typed
    words = ["+experiment=classify_tiny", "model.labels=[first, last]"]
    words += [f"data.datasets=[{{path: {SAMPLES / 'classes.json'}}}]"]
    with pytest.raises(
        DataError, match=r"label is 'inside'; model.labels has first, last: type it"
    ):
        train_into(tmp_path / "run", *words)


@pytest.mark.slow
def test_a_trained_classifier_opens_in_transformers_with_the_same_outputs(
    shell: Shell, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = tmp_path / "run"
    shell.train_into(
        run,
        "+experiment=classify_tiny",
        "trainer.max_steps=30",
        "logger=csv",
        "trainer.precision=fp32",
    )
    accuracies = read_column(run, "val/accuracy")
    assert accuracies[max(accuracies)] > 0.8 > accuracies[0]
    folder = tmp_path / "merged"
    typed = [f"run={run}", f"output.dir={folder}", "merge.dtype=fp32"]
    assert shell.type_train(typed, tmp_path, module="app.merge").code == 0
    assert "trained by objective=classify, in float32" in (folder / "README.md").read_text()
    assert shell.type_train([f"run={run}"], tmp_path, module="app.chat").code == 2

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert list(model.config.id2label.values()) == CLASSES
    texts = json.loads((SAMPLES / "classes.json").read_text())
    with torch.no_grad():
        rows = tokenizer([row["text"] for row in texts], padding=True, return_tensors="pt")
        batched = model(**rows).logits.argmax(1).tolist()
    named = [model.config.id2label[index] for index in batched]
    right = [name == row["label"] for name, row in zip(named, texts, strict=True)]
    assert np.mean(right) > 0.85
    typed = [f"run={run}", f"output.dir={tmp_path / 'eval'}"]
    assert shell.type_train(typed, tmp_path, module="app.evaluate").code == 0
    metrics = json.loads((run / "metrics.json").read_text())
    again = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert again["tuned/val/loss"] == pytest.approx(metrics["tuned/val/loss"], abs=1e-5)
    table = (tmp_path / "eval" / "confusion.csv").read_text().splitlines()
    assert table[0] == "class,first,inside,last" and len(table) == 4
    assert not (run / "confusion.csv").exists()


RUN = ["+experiment=classify_tiny", "logger=csv", "trainer.precision=fp32", "trainer.max_steps=3",
       "trainer.micro_batch_size=4", "trainer.gradient_accumulation_steps=1"]  # fmt: skip


@pytest.mark.slow
def test_a_text_with_several_classes_is_learned(shell: Shell, tmp_path: Path) -> None:
    """The classes of a list of digits: which of 1, 2 and 3 are in it, maybe none."""
    from transformers import AutoModelForSequenceClassification

    texts = [row["text"] for row in json.loads((SAMPLES / "classes.json").read_text())]
    names = ["one", "two", "three"]
    rows = [
        {
            "text": text,
            "labels": [n for n, digit in zip(names, "123", strict=True) if digit in text],
        }
        for text in texts
    ]
    file, run = tmp_path / "rows.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["+experiment=classify_tiny", "model.multi_label=true", "trainer.max_steps=10"]
    words += [f"model.labels=[{', '.join(names)}]", f"data.datasets=[{{path: {file}}}]"]
    shell.train_into(run, *words, "logger=csv", "adapter=full")
    model = AutoModelForSequenceClassification.from_pretrained(run / "model")
    assert model.config.problem_type == "multi_label_classification"
    typed = [f"run={run}", f"output.dir={tmp_path / 'eval'}"]
    assert shell.type_train(typed, tmp_path, module="app.evaluate").code == 0
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    for figure in ("auc", "f1", "accuracy"):
        assert metrics[f"tuned/val/{figure}"] > metrics[f"base/val/{figure}"], figure
    assert not (tmp_path / "eval" / "confusion.csv").exists()


@pytest.mark.slow
def test_a_step_is_the_same_however_it_is_split(shell: Shell, tmp_path: Path) -> None:
    shell.train_into(tmp_path / "whole", *RUN)
    words = ["trainer.micro_batch_size=1", "trainer.gradient_accumulation_steps=2"]
    shell.train_into(tmp_path / "split", *RUN, *words, "trainer.devices=2", "strategy=zero3")
    columns = ("train/loss", "val/loss", "val/accuracy", "train/recall_first")
    check_close(tmp_path / "split", tmp_path / "whole", columns)
