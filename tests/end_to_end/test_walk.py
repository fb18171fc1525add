"""What a new user does, command by command in a folder of their own: data to a used result."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import LONGEST, user_environment
from tests.reliability.shell import Shell
from tests.tiny import TINY_BASE

TRIPLES = [f"{a} {b} {c}" for a in range(4) for b in range(5) for c in range(3)]
SHORT = "trainer.max_steps=4 evaluation.show_answers=1 evaluation.max_new_tokens=4"
WALK = """
# An experiment for my model and my data
$ python -m app.init mine model=$BASE data=mine.jsonl
mine.yaml

# What will it be trained on?
$ python -m app.preview mine.yaml output.dir=outputs/look
Write 0 0 0 backwards
run: .*outputs/look
file outputs/look/preview.html

# Will it fit, and how fast?
$ python -m app.plan mine.yaml hardware=h100
GiB
tokens

# Train it
$ python -m app.train mine.yaml $SHORT output.dir=outputs/mine
trainable params
adapter verified
base vs tuned
next:
run: .*outputs/mine
file outputs/mine/report.html
file outputs/mine/metrics.csv
file outputs/mine/adapter/adapter_model.safetensors

# A key that is misspelt
$ python -m app.train mine.yaml optimizer.lrr=1e-3
did you mean optimizer.lr
exit 2

# A word of another tool
$ python -m app.train mine.yaml --num_train_epochs=2
type trainer.num_epochs=2
exit 2

# A row that is broken
$ python -m app.preview mine.yaml data.datasets=broken.jsonl
broken.jsonl:2
exit 2

# How is my run?
$ python -m app.status run=outputs/mine
finished

# Train it for longer
$ python -m app.train resume=outputs/mine trainer.max_steps=6 'resume_allow=[epochs]'
step 6/6
run: .*outputs/mine

# And once more, although it is finished
$ python -m app.train resume=outputs/mine
finished

# Measure it on a benchmark
$ python -m app.evaluate run=outputs/mine evaluation=gsm8k evaluation.max_rows=2 $ANSWER
gsm8k

# Merge it, and check the result
$ python -m app.merge run=outputs/mine output.dir=outputs/merged
merge verified
run: .*outputs/merged
file outputs/merged/model.safetensors
file outputs/merged/README.md

# Use the merged model
$ echo Write 1 2 3 backwards. | python -m app.chat model.path=outputs/merged chat.max_new_tokens=4
run:

# How would I serve it with vLLM?
$ python -m app.serve run=outputs/mine serve.engine=vllm
vllm serve

# Go on from the adapter
$ python -m app.train mine.yaml adapter.path=outputs/mine/adapter $SHORT output.dir=outputs/more
run: .*outputs/more

# The same run again
$ python -m app.train +experiment=outputs/mine/config.yaml trainer.max_steps=1 output.dir=outputs/2
run: .*outputs/2

# What differs between two runs?
$ python -m app.report run=outputs/mine run=outputs/more
html
"""
"""a wish, its command, patterns of what is seen in this order, files, the exit code if not 0"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a person, with data of their own."""
    chats = []
    for text in TRIPLES:
        question = {"role": "user", "content": f"Write {text} backwards."}
        chats.append({"messages": [question, {"role": "assistant", "content": text[::-1]}]})
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "broken.jsonl").write_text(json.dumps(chats[0]) + '\n{"messages": [\n')
    return tmp_path


def failure(task: str, folder: Path, python: str) -> str | None:
    """Type a task's command in a folder; return what is not as the task says, if anything."""
    _, command, *rest = task.splitlines()
    code = next((int(line[5:]) for line in rest if line.startswith("exit ")), 0)
    files = [line[5:] for line in rest if line.startswith("file ")]
    seen = [line for line in rest if not line.startswith(("file ", "exit "))]
    words = {"BASE": str(TINY_BASE), "SHORT": SHORT, "ANSWER": "evaluation.max_new_tokens=4"}
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.removeprefix("$ ")],
        cwd=folder,
        env=user_environment() | words | {"PYTHONPATH": str(ROOT), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    output = done.stdout
    missing = [name for name in files if not (folder / name).is_file()]
    is_seen = re.search(".*?".join(f"(?:{pattern})" for pattern in seen), output, re.DOTALL)
    if done.returncode == code and is_seen and not missing and "Traceback" not in output:
        return None
    return f"{task}\n--- exit code {done.returncode}, missing files {missing}\n{output}"


@pytest.mark.slow
def test_a_person_does_what_people_do_with_data_of_their_own(folder: Path, shell: Shell) -> None:
    tasks = WALK.strip().split("\n\n")
    failures = [said for task in tasks if (said := failure(task, folder, shell.python))]
    assert not failures, f"{len(failures)} of {len(tasks)} tasks\n" + "\n\n".join(failures)
