"""Pages of docs/ are correct: answers to questions, runnable Python, choices that compose."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import app
from app import python
from app.config import compose, load_config
from app.process import launch
from app.strategy.settings import FAMILIES
from common.errors import UserError
from tests.conftest import ROOT
from tests.tiny import small_run

PAGES = {page.name: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
QUESTIONS = re.findall(r"^- \*\*(.+?)\*\*(.+?)(?=^- |^#|\Z)", PAGES["questions.md"], re.M | re.S)
ON_A_RUN = ("resume=", "adapter.path=", "+experiment=mine", "-m ", "merge.", "serve.")
"""what needs a finished run, a file, or another verb to compose"""


def settings_in(answer: str) -> list[list[str]]:
    """Return the settings that an answer says to type, as words of a command."""
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", answer)]
    settings = [span for span in spans if re.match(r"'?[a-z_.]+=.", span)]
    return [shlex.split(span) for span in settings if not span.lstrip("'").startswith(ON_A_RUN)]


@pytest.mark.parametrize("question", QUESTIONS, ids=[question for question, _ in QUESTIONS])
def test_what_an_answer_says_to_type_composes(question: tuple[str, str]) -> None:
    answer = question[1]
    assert "`" in answer
    for words in settings_in(answer):
        verb = "plan" if words[0].startswith("hardware=") else "train"
        compose(verb, ["+experiment=llama8b", *words])


def test_forty_questions_are_answered_and_their_links_lead_somewhere() -> None:
    assert len(QUESTIONS) >= 50
    for link in re.findall(r"\]\((\w+\.md)\)", PAGES["questions.md"]):
        assert link in PAGES


GREPPED = {
    "csv": "data.datasets=mine.jsonl", "columns": "columns: {instruction", "mask": "roles_to_train",
    "template": "data.chat_template=chatml", "128k": "data.sequence_len=131072",
    "disk": "data.streaming=true", "streaming": "data.streaming=true", "mix": "mixture.weights",
    "how much data": "early_stopping_patience", "early stopping": "early_stopping_patience",
    "overfit": "early_stopping_patience", "validation": "data.val_set_size", "rank": "adapter.r=16",
    "which lr": "optimizer.lr=", "learning rate": "+sweep=find_lr",
    "batch size": "trainer.micro_batch_size=auto",
    "qlora": "quantization=nf4", "full fine-tuning": "adapter=full", "freeze": "adapter=freeze",
    "classif": "objective=classify", "reward": "objective=reward", "dpo": "objective=dpo",
    "distill": "objective.teacher=", "new tokens": "model.added_tokens", "will it fit": "app.plan",
    "out of memory": "recompute=full", "oom": "recompute=full", "slower": "app.doctor",
    "deepspeed": "strategy=", "4 gpus": "trainer.devices=4", "t4": "trainer.precision=fp16",
    "colab": "quantization=nf4", "kaggle": "trainer.devices=2", "macos": "trainer.accelerator=cpu",
    "wsl": "trainer.devices=1", "rocm": "attention=sdpa", "amd": "attention=sdpa",
    "docker": "--shm-size", "continue": "resume=outputs/mine", "spot": "resume=auto",
    "preempt": "resume=auto", "checkpoint": "checkpoint.every_steps", "multi-node": "num_nodes=2",
    "slurm": "trainer.num_nodes=2", "offline": "HF_HUB_OFFLINE=1", "gated": "hf auth login",
    "wandb": "logger=wandb", "hyperparameter": "adapter.r=8,16", "notebook": "from app import",
    "loss is 0": "app.preview", "loss is nan": "trainer.precision=bf16",
    "forgot": "evaluation=mmlu", "never stops": "model.stop_tokens", "reproduc": "seed=7",
    "gguf": "merge.gguf", "ollama": "merge.gguf",
    "vllm": "serve.engine=vllm", "several adapters": "merge.adapters", "upload": "app.push",
    "mmlu": "evaluation=mmlu", "pipx": "loft train", "wheel": "pip install loft",
}  # fmt: skip
"""words of a question, as a person searches them -> what its answer says to type"""


@pytest.mark.parametrize("words", GREPPED)
def test_a_search_for_the_words_of_a_question_finds_its_answer(words: str) -> None:
    """`grep -i`: among at most five answers, on lines that may be broken between the words."""
    found = [" ".join(f"{question}{answer}".split()) for question, answer in QUESTIONS]
    found = [text for text in found if re.search(rf"\b{words}", text, re.IGNORECASE)]
    assert len(found) <= 5 and any(GREPPED[words] in text for text in found), found


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES["python.md"], re.DOTALL)


def short(blocks: list[str]) -> list[str]:
    """Return the blocks with fewer steps and answers."""
    words = '"trainer": {"max_steps": 20}'
    assert words in blocks[0] and len(blocks) == 6
    less = '"trainer": {"max_steps": 2}, "evaluation": {"max_rows": 4}'
    return [block.replace(words, less) for block in blocks]


def test_importing_app_does_not_import_torch_or_hydra() -> None:
    code = "import sys, app; assert not {'torch', 'hydra', 'app.train'} & set(sys.modules)"
    code += "; from app import load_config, train; assert callable(train)"
    code += "; assert 'torch' not in sys.modules"
    code += "; from app import train as again; assert again is train"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_train_does_not_change_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.train import train

    for name in ("LOFT_RUN_DIR", "LOFT_RESUME_STEP"):
        monkeypatch.delenv(name, raising=False)
    words = small_run("trainer.max_steps=1", "logger=csv", f"output.dir={tmp_path / 'run'}")
    config = load_config("train", words)
    before = copy.deepcopy(config)
    train(config)
    assert config == before
    for name in ("LOFT_RUN_DIR", "LOFT_RESUME_STEP"):
        os.environ.pop(name, None)


@pytest.mark.slow
def test_the_blocks_of_the_python_page_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vars(app), "train", python.train)  # as `from app import train` in a script
    monkeypatch.setattr(launch, "_own_run_dir", None)
    monkeypatch.setenv("LOFT_RUN_DIR", "")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in short(python_blocks()):
        exec(block, names)  # noqa: S102
    run = names["run"]
    assert run.folder == tmp_path / "outputs/from_python" and names["steps"].seen == 2
    assert [row["step"] for row in run.rows if "val/loss" in row] == [0, 1, 2]
    assert run.report.is_file() and len(run.generate(["2 1"], {"chat.max_new_tokens": 1})) == 1
    assert names["metrics"]["tuned/val/loss"] == pytest.approx(run.metrics["val/loss"], rel=1e-4)
    assert (names["folder"] / "model.safetensors").is_file()
    assert "verdict" in json.loads((run.folder / "verdict.json").read_text())
    with pytest.raises(UserError, match="max_rows"):
        run.evaluate({"output": {"dir": "x"}, "evaluation.max_row": 3})


@pytest.mark.slow
def test_a_notebook_trains_and_uses_the_adapter(tmp_path: Path) -> None:
    """In a separate environment with jupyter, which uses the packages of this one."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    install += ["nbclient", "nbformat", "ipykernel"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip("no network to install jupyter from")
    site = next(folder.glob("lib/python*/site-packages"))
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([*shared, str(ROOT)]))
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    codes = ["import signal; before = signal.getsignal(signal.SIGINT)", *short(python_blocks())[:4]]
    codes.append("assert signal.getsignal(signal.SIGINT) is before")
    codes.append(
        'try:\n    load_config("train", ["+experiment=no"])\nexcept ValueError as e: print(e)'
    )
    cells = [{**empty, "source": code} for code in codes]
    file = tmp_path / "train.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    file.write_text(
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4})
    )
    run = (
        "import jupyter_client, nbformat, nbclient, sys; book = nbformat.read(sys.argv[1], 4); "
        # By files, since another test may take a port that was free.
        "manager = jupyter_client.AsyncKernelManager(transport='ipc', ip='kernel'); "
        "nbclient.NotebookClient(book, km=manager, timeout=900).execute(); "
        "nbformat.write(book, sys.argv[1])"
    )
    done = subprocess.run(
        [python, "-c", run, str(file)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "outputs/from_python/adapter/adapter_config.json").exists()
    cells_text = json.dumps(json.loads(file.read_text())["cells"])
    assert "validation loss" in cells_text and "no such option" in cells_text


CHOICES = [
    words
    for line in PAGES["choosing.md"].splitlines()
    if line.startswith("| ")
    for words in re.findall(r"`([a-z_.]+=[^`]+)`", line)
]


@pytest.mark.parametrize("words", CHOICES)
def test_overrides_in_choosing_md_compose(words: str) -> None:
    load_config("train", ["+experiment=llama8b", *words.split()])


def test_choosing_md_has_overrides_and_all_strategies() -> None:
    page = PAGES["choosing.md"]
    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    for row in rows:
        is_head = row.startswith(("| case", "| if", "| rule", "| not supported"))
        assert is_head or re.search(r"`[\w.]+(=[^`]+)?`", row), row
    left_out = {"auto", "zero2_offload", "zero3_nvme", "tp"}
    for strategy in set(FAMILIES) - left_out:
        assert f"strategy={strategy}`" in page or f"strategy={strategy} " in page, strategy
