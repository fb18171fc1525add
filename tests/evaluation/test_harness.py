"""Tasks of lm-evaluation-harness, run by the library, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.evaluation.generation import EvaluationConfig
from app.evaluation.likelihood import Likelihood
from app.evaluation.metrics import Answer
from app.evaluation.row_runner import RowRunner
from app.evaluation.tasks import measure
from app.evaluation.tasks.measure import Harness, TaskRunner, check_harness
from app.evaluation.tasks.questions import SAMPLES, TaskConfig, build_tasks
from tests.evaluation.test_evaluate_tasks import run_evaluation
from tests.tiny import TINY_BASE

HEAD = "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
CHOICES = """test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices.label.index(answerKey)}}"
doc_to_choice: "{{choices.text}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


class Ended:
    """A tokenizer that puts 0 before every text and 99 after it."""

    bos_token_id, eos_token_id = 0, 99

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text), "special_tokens_mask": [1, *[0] * 98, 1]}

    def encode(self, text: str) -> list[int]:
        return list(range(100))


ENDED: Any = Ended()
DECODER = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    head = HEAD.format(name="own_arc", file=SAMPLES / "arc_easy_validation.jsonl")
    (tasks / "own_arc.yaml").write_text(head + CHOICES)
    return tasks


@pytest.mark.slow
def test_scores_of_the_library_equal_those_of_the_built_in_task(
    folder: Path, tmp_path: Path
) -> None:
    metrics = run_evaluation(
        tmp_path / "out",
        f"model.path={TINY_BASE}",
        "evaluation.tasks=[{name: arc}]",
        "evaluation.harness=[own_arc]",
        f"evaluation.harness_dir={folder}",
        "evaluation.allow_code=true",
    )
    for name in ("accuracy", "accuracy_norm"):
        assert metrics[f"base/{name}/own_arc"] == metrics[f"base/{name}/arc"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").open()]
    ours, theirs = (
        [line["metrics"]["accuracy"]["base"] for line in lines if line["data_set"] == name]
        for name in ("arc", "own_arc")
    )
    assert ours == theirs and len(ours) == 6


def test_an_answer_as_long_as_the_context_leaves_room_for_the_end_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def answer(_: Any, __: Any, prompts: list[Any], ___: Any, config: Any, *____: Any) -> Any:
        seen.append((prompts[0].input_ids, config.max_new_tokens))
        return iter([[(0, Answer("yes", is_finished=True))]])

    monkeypatch.setattr(measure, "answer_batches", answer)
    harness = Harness(config=EvaluationConfig(), tokenizer=ENDED, stop_ids=set(), max_len=64)
    for most, kept, new in ((8, 56, 8), (64, 16, 48), (4096, 16, 48)):
        requests = [("a prompt", {"until": [], "max_gen_toks": most})]
        assert measure._answers(harness, DECODER, RowRunner(), "key", requests) == ["yes"]
        assert seen.pop() == (list(range(99 - kept, 99)), new)


def test_what_a_task_gives_to_a_model_begins_once_and_has_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, continues = [], []

    def answer(_: Any, __: Any, prompts: list[Any], *___: Any, **how: Any) -> Any:
        seen.extend(prompt.input_ids for prompt in prompts)
        continues.append(how["continues_text"])
        return iter([[(n, Answer("yes", is_finished=True)) for n in range(len(prompts))]])

    def score(_: Any, groups: list[Any], **__: Any) -> Any:
        seen.extend([*context, *text] for ((context, text),) in groups)
        return iter([[(n, [Likelihood(0.0, 1, True)]) for n in range(len(groups))]])

    monkeypatch.setattr(measure, "answer_batches", answer)
    monkeypatch.setattr(measure, "score_groups", score)
    monkeypatch.setattr(measure, "program_passes", lambda program: False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", cast(Any, SimpleNamespace(LM=object)))
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    texts = TaskConfig(name="texts", path=str(tmp_path / "texts.jsonl"), kind="perplexity")
    tasks = [TaskConfig(name="gsm8k"), TaskConfig(name="humaneval"), texts]
    config = EvaluationConfig(tasks=tasks, allow_code=True)
    TaskRunner(config, build_tasks(config), ENDED, set(), 1024).measure(
        "tuned", DECODER, RowRunner()
    )
    assert continues == [False, True]  # only a program keeps the space at its start
    harness = Harness(config=config, tokenizer=ENDED, stop_ids=set(), max_len=512)
    model = measure._language_model(harness, "tuned", DECODER, RowRunner())
    request = SimpleNamespace(args=("a text",), task_name="own")
    assert model.loglikelihood_rolling([request]) == [0.0]
    assert len(seen) > 2 and seen == [list(range(99))] * len(seen)


def test_a_folder_of_tasks_needs_allow_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # as if it were installed
    config = EvaluationConfig(harness=["own_arc"], harness_dir=str(tmp_path))
    # By !function, without a .py file.
    assert "can run code with your permissions" in check_harness(config)[0]
    config.allow_code = True
    assert check_harness(config) == []


@pytest.mark.slow
def test_without_network_a_hub_task_fails_without_retries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    harness = Harness(
        config=EvaluationConfig(harness=["arc_easy"]),
        tokenizer=cast(Any, None), stop_ids=set(), max_len=1,
    )  # fmt: skip
    with pytest.raises(OSError, match=r"harness=\[arc_easy\]: its rows cannot be read"):
        harness.load_tasks()
    assert constants.HF_HUB_OFFLINE  # its client asks no more
