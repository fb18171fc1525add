"""Commands in the README and docs/ exist and compose, links lead somewhere, and their blocks run.

A word after `bash` states that a block takes minutes or needs something that this machine may not
have (`needs-hub`, `needs-gpu`, ...).
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import app
from app import python
from app.config import compose, load_config
from app.config.verbs import VERBS
from app.process import launch
from common.errors import UserError
from tests.conftest import ROOT
from tests.processes import LONGEST, start
from tests.reliability.shell import Shell
from tests.runs import metrics_of

README = ROOT / "README.md"
PAGES = {page: page.read_text() for page in (README, *sorted((ROOT / "docs").rglob("*.md")))}
FENCE = re.compile(r"^```(\w*) ?([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERB = re.compile(r"(?:^|\s)(?:-m app\.|loft )(\w+)(.*)")
PLAIN = {"init", "push", "report", "status"}
"""verbs without Hydra"""
ASSIGNED = re.compile(r'\b([A-Z_]+)=("[^"]*"|\S+)')
BASE = "model.path=data_modules/samples/tiny_base"
OTHERS = {"source", "seq", "hf", "export", "printf", "echo", "read", "for", "pip", "ollama"}
"""other programs that occur in blocks"""
SCHEDULERS = {"kubectl"}
"""programs that are called with a file of docs/clusters"""
LARGE = "+experiment=llama8b"


class Block(NamedTuple):
    language: str
    needs: str
    text: str

    @property
    def commands(self) -> list[str]:
        joined = re.sub(r" \\\n +", " ", self.text)
        values = {name: value.strip('"') for name, value in ASSIGNED.findall(joined)}
        lines = [line for line in joined.splitlines() if line.strip() and line[0] != "#"]
        return [re.sub(r"\$([A-Z_]+)", lambda at: values.get(at[1], at[0]), line) for line in lines]


def blocks_of(page: Path, language: str = "bash") -> list[Block]:
    blocks = [Block(*found) for found in FENCE.findall(PAGES[page])]
    return [block for block in blocks if block.language == language]


def first_values(word: str) -> str:
    """Return the override of a sweep's first trial."""
    word = re.sub(r"(?:choice|interval)\(([^,]+),.*\)", r"\1", word)
    return word if re.search(r"[\[{]", word) else word.partition(",")[0]


def check_verb(verb: str, words: list[str]) -> None:
    assert find_spec(f"app.{verb}") is not None, verb
    if verb in PLAIN:
        files = [*(ROOT / "app").glob(f"{verb}.py"), *(ROOT / "app" / verb).glob("*.py")]
        source = "".join(file.read_text() for file in files)
        assert all(re.search(rf"\b{word.split('=')[0]}\b", source) for word in words if "=" in word)
        return
    if verb == "doctor":
        load_config("plan", [word for word in words if not word.startswith(("-", "hub=", "sec"))])
        return
    assert verb in VERBS
    of_a_run = [word for word in words if word.startswith(("run=", "resume=outputs/"))]
    words = [BASE] * bool(of_a_run) + [word for word in words if word not in of_a_run]
    if "-m" in words:
        left_out = ("-m", "+sweep=find_lr")  # conf/sweep is composed in tests/sweep
        words = [first_values(word) for word in words if word not in left_out]
    left_out = ["+experiment=mine.yaml"]
    if any("=s3://" in word for word in words):
        left_out.append("resume=auto")  # asks the object store for the run's settings
    load_config(verb, [word for word in words if word not in left_out])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_exist_and_compose(page: Path) -> None:
    """Only blocks of bash are checked, so other text must not contain commands."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks_of(page):
        assert block.needs == "" or block.needs.startswith("needs-"), block.needs
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for command in block.commands:
            first = command.split()[0]
            if (typed := VERB.search(command)) is not None:
                check_verb(typed[1], shlex.split(typed[2], comments=True))
            elif first == "make":
                assert command.split()[1] in targets, command
            elif first in SCHEDULERS:
                files = [word for word in command.split() if word.startswith("docs/")]
                assert files or command.startswith("kubectl create secret"), command
                assert all((ROOT / file).is_file() for file in files), command
            else:
                assert "=" in first or Path(first).name in OTHERS, command
    others = [block.text for block in map(Block._make, FENCE.findall(PAGES[page]))]
    others = [text for text in others if text not in {each.text for each in blocks_of(page)}]
    prose = FENCE.sub("", PAGES[page])
    assert not re.search(r"^(python -m|make|torchrun) ", "".join(others), re.MULTILINE)
    assert not re.search(r"^    (?:python|make|torchrun|loft) ", prose, re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", prose)) <= set(targets)


ON_A_RUN = ("resume=", "adapter.path=", "+experiment=mine", "-m ", "merge.", "serve.")
"""what needs a finished run, a file, or another verb to compose"""


def test_what_answers_and_choices_say_to_type_composes() -> None:
    questions, choosing = (PAGES[ROOT / "docs" / name] for name in ("questions.md", "choosing.md"))
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", questions)]
    settings = [span for span in spans if re.match(r"'?[a-z_.]+=.", span)]
    typed = [shlex.split(each) for each in settings if not each.lstrip("'").startswith(ON_A_RUN)]
    assert len(typed) > 60
    for words in typed:
        compose("plan" if words[0].startswith("hardware=") else "train", [LARGE, *words])
    choices = re.findall(r"`([a-z_.]+=[^`]+)`", "".join(re.findall(r"^\| .*", choosing, re.M)))
    assert len(choices) > 30
    for words in choices:
        load_config("train", [LARGE, *words.split()])


def test_links_of_pages_and_files_of_the_tree_exist() -> None:
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([\w./-]+)[)#]", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    tree = PAGES[README].split("## The tree")[1].split("```")[1]
    folder, seen = "", 0
    for indent, name in re.findall(r"^( {0}| {2})(?! )(\S+)", tree.partition("\n")[2], re.M):
        path = folder + name if indent else name
        folder = folder if indent else name
        assert (ROOT / path).exists(), path
        seen += 1
    assert seen > 30


def test_importing_app_does_not_import_torch_or_hydra() -> None:
    code = "import sys, app; assert not {'torch', 'hydra', 'app.train'} & set(sys.modules)"
    code += "; from app import load_config, train; assert callable(train)"
    code += "; assert 'torch' not in sys.modules"
    code += "; from app import train as again; assert again is train"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_the_blocks_of_the_python_page_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an event loop and without a real standard output, as in a notebook."""
    monkeypatch.setitem(vars(app), "train", python.train)  # as `from app import train` in a script
    monkeypatch.setattr(launch, "_own_run_dir", None)
    monkeypatch.setenv("LOFT_RUN_DIR", "")
    monkeypatch.chdir(tmp_path)
    first, *others = (block.text for block in blocks_of(ROOT / "docs" / "python.md", "python"))
    names: dict[str, Any] = {}
    exec(first, names)  # noqa: S102
    names["config"].trainer.max_steps, names["config"].evaluation.max_rows = 2, 4
    config, handler = copy.deepcopy(names["config"]), signal.getsignal(signal.SIGINT)

    async def run_the_others() -> None:
        for block in others:
            exec(block, names)  # noqa: S102

    asyncio.run(run_the_others())
    assert names["config"] == config and signal.getsignal(signal.SIGINT) is handler
    run = names["run"]
    assert run.folder == tmp_path / "outputs/from_python" and names["steps"].seen == 2
    assert [row["step"] for row in run.rows if "val/loss" in row] == [0, 1, 2]
    assert run.report.is_file() and len(run.generate(["2 1"], {"chat.max_new_tokens": 1})) == 1
    loaded = run._loaded
    run.generate(["2 1"], {"chat.max_new_tokens": 2})
    assert run._loaded is loaded
    with pytest.raises(UserError, match="checkpoint=step-9: the run has step-1"):
        run.generate(["2 1"], {"checkpoint": "step-9"})
    assert run._loaded is loaded
    run.generate(["2 1"], {"checkpoint": "step-1", "chat.max_new_tokens": 1})
    final, of_step = (dict(own[1].model.named_parameters()) for own in (loaded, run._loaded))
    name = next(name for name in final if "lora_B" in name)
    assert not final[name].equal(of_step[name])
    assert names["metrics"]["tuned/val/loss"] == pytest.approx(run.metrics["val/loss"], rel=1e-4)
    assert (names["folder"] / "model.safetensors").is_file()
    assert "verdict" in json.loads((run.folder / "verdict.json").read_text())
    with pytest.raises(UserError, match="max_rows"):
        run.evaluate({"output": {"dir": "x"}, "evaluation.max_row": 3})
    with pytest.raises(ValueError, match="no such option"):  # as a notebook catches it
        names["load_config"]("train", ["+experiment=no"])


class Folder(NamedTuple):
    """A folder in which a person follows the README."""

    path: Path
    python: Path

    def start(self, text: str) -> subprocess.Popen[str]:
        """Run a block in a shell whose working directory is the folder."""
        others = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        path = {"PATH": f"{self.python.parent}:{others}"}
        command, merged = ("bash", "-e", "-c", text), {"stderr": subprocess.STDOUT}
        return start(*command, environment=path, cwd=self.path, **merged)

    def paste(self, text: str) -> str:
        process = self.start(text)
        output, _ = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, text + output
        return output


@pytest.mark.slow
def test_the_first_hour(
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a CSV file and the tiny base: train, stop, resume, learn, inspect, use, merge."""
    folder = Folder(tmp_path, Path(shell.python))
    (tmp_path / "data_modules").mkdir()
    (tmp_path / "data_modules" / "samples").symlink_to(ROOT / "data_modules" / "samples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()  # the shell's Python is found already
    runnable = [block.text for block in blocks_of(README) if not block.needs]
    mine = next(text for text in runnable if "MODEL=" in text)
    resume = next(text for text in runnable if "resume=" in text)
    stopped = folder.start(mine)
    assert stopped.stdout is not None
    output = ""
    for line in stopped.stdout:
        output += line
        if re.match(r"step 1/", line):
            os.killpg(stopped.pid, signal.SIGINT)
            break
    output += stopped.stdout.read()
    assert stopped.wait(LONGEST) == 130 and "to resume: " in output, output
    assert "step 40/40" in folder.paste(resume)
    figures = metrics_of(tmp_path / "outputs/mine")
    assert figures["base/exact_match/mine"] == 0 and figures["tuned/exact_match/mine"] > 0.8
    for text in runnable:
        if text not in (mine, resume):
            folder.paste(text)
    (uses,) = blocks_of(README, "python")
    monkeypatch.chdir(tmp_path)
    exec(uses.text, {})  # noqa: S102
    assert "assistant\n4 0 6" in capsys.readouterr().out
    for name in ("mine/adapter", "mine/report.html", "mine/metrics.json", "merged/config.json"):
        assert (tmp_path / "outputs" / name).exists(), name
