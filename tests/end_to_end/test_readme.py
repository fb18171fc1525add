"""Commands, files and make targets in the README and docs/ exist, and their blocks run.

The slow tests below run each block of ```bash, page by page in a fresh clone. A word after `bash`
states that a block takes minutes or needs something that this machine may not have (`needs-hub`,
`needs-gpu`, ...): then its commands are only composed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from app.config import load_config
from app.config.dispatch import VERBS
from tests.conftest import ROOT
from tests.processes import user_environment
from tests.reliability.shell import Shell

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


class Block(NamedTuple):
    page: str
    needs: str
    text: str

    @property
    def commands(self) -> list[str]:
        joined = re.sub(r" \\\n +", " ", self.text)
        values = {name: value.strip('"') for name, value in ASSIGNED.findall(joined)}
        lines = [line for line in joined.splitlines() if line.strip() and line[0] != "#"]
        return [re.sub(r"\$([A-Z_]+)", lambda at: values.get(at[1], at[0]), line) for line in lines]


def blocks_of(page: Path, language: str = "bash") -> list[Block]:
    return [
        Block(page.name, needs, text)
        for found, needs, text in FENCE.findall(page.read_text())
        if found == language
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[f"{block.page}-{n}" for n, block in enumerate(BLOCKS)]
)
def test_blocks_have_no_placeholders(block: Block) -> None:
    """Nothing in a block has to be filled in by the reader, except assigned variables."""
    left = re.findall(
        r"\b(?:HOST|OWNER|NAME|FOLDER|FILE|TASKS?|N)\b|<\w+>", " ".join(block.commands)
    )
    assigned = {name for name, _ in ASSIGNED.findall(block.text)}
    assert set(left) <= assigned


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


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.text[:40]}")
def test_commands_of_blocks_exist_and_compose(block: Block) -> None:
    assert block.needs == "" or block.needs.startswith("needs-"), block.needs
    assert "..." not in block.text and "FOLDER" not in block.text
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in block.commands:
        if (typed := VERB.search(command)) is not None:
            check_verb(typed[1], shlex.split(typed[2], comments=True))
        elif command.startswith("make "):
            assert command.split()[1] in targets, command
        elif command.split()[0] in SCHEDULERS:
            files = [word for word in command.split() if word.startswith("docs/")]
            assert files or command.startswith("kubectl create secret"), command
            assert all((ROOT / file).is_file() for file in files), command
        else:
            first = command.split()[0]
            assert "=" in first or Path(first).name in OTHERS, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_commands_are_in_checked_blocks(page: Path) -> None:
    """Indented blocks and text blocks are not checked, so they must not contain commands."""
    outside = FENCE.sub("", page.read_text())
    assert not re.findall(r"^    (?:python|make|torchrun|loft) .*", outside, re.MULTILINE)
    for language, _, text in FENCE.findall(page.read_text()):
        assert language in ("bash", "python", "text")
        assert language == "bash" or not re.search(r"^(python -m|make|torchrun) ", text, re.M)


def test_links_of_pages_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([\w./-]+)[)#]", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_readme_has_the_expected_sections() -> None:
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == [
        "Limitations",
        "Two commands",
        "Your model, your data",
        "Use the result",
        "Where to read on",
        "Results",
        "The tree",
    ]
    for word in ("row", "document", "pack", "step"):
        assert f"**{word}**" in README
    assert len(README.splitlines()) <= 200


def test_every_make_target_of_the_readme_exists() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}\s", listed.stdout, re.MULTILINE), target


def test_every_file_of_the_tree_exists() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    folder, seen = "", 0
    for line in tree.splitlines()[1:]:
        match = re.match(r"( {0}| {2})(\S+)", line)
        if match is None:
            continue
        indent, name = match.groups()
        path = name if not indent else folder + name
        folder = folder if indent else name
        assert (ROOT / path).exists(), path
        seen += 1
    assert seen > 30


class Clone(NamedTuple):
    """A fresh clone of the tracked files, with the environment of this checkout."""

    folder: Path
    python: Path
    """warm interpreter with the clone's code; blocks that activate the environment use that one"""

    def start(self, text: str) -> subprocess.Popen[str]:
        """Run a block in a shell whose working directory is the clone."""
        environment = user_environment() | {"PYTHONPATH": str(self.folder)}
        others = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment["PATH"] = f"{self.python.parent}:{others}"
        return subprocess.Popen(
            ["bash", "-e", "-c", text],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def paste(self, text: str) -> str:
        process = self.start(text)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, text + output
        return output


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    folder = tmp_path_factory.mktemp("hour") / "loft"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    someone = Shell(Path(os.environ["LOFT_DATA_CACHE"]), root=folder)
    yield Clone(folder, Path(someone.python))
    someone.close()


@pytest.mark.slow
def test_the_first_hour(clone: Clone) -> None:
    """With a CSV file and the tiny base: train, stop, resume, learn, inspect, use, merge."""
    runnable = [block for block in blocks_of(ROOT / "README.md") if not block.needs]
    mine = next(block.text for block in runnable if "MODEL=" in block.text)
    stopped = clone.start(mine)
    assert stopped.stdout is not None
    output = ""
    for line in stopped.stdout:
        output += line
        if re.match(r"step 1/", line):
            os.killpg(stopped.pid, signal.SIGINT)
            break
    output += stopped.stdout.read()
    assert stopped.wait(120) == 130 and "to resume: " in output, output
    resume = next(block.text for block in runnable if "resume=" in block.text)
    assert "step 40/40" in clone.paste(resume)
    figures = json.loads((clone.folder / "outputs/mine/metrics.json").read_text())
    assert figures["base/exact_match/mine"] == 0 and figures["tuned/exact_match/mine"] > 0.8
    for block in runnable:
        if block.text not in (mine, resume) and "MODEL=" not in block.text:
            clone.paste(block.text)
    (uses,) = blocks_of(ROOT / "README.md", "python")
    answer = subprocess.run(
        [sys.executable, "-c", uses.text],
        cwd=clone.folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0 and "assistant\n4 0 6" in answer.stdout, answer.stderr
    for name in ("mine/adapter", "mine/report.html", "mine/metrics.json", "merged/config.json"):
        assert (clone.folder / "outputs" / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_blocks_of_pages_run(page: Path, clone: Clone) -> None:
    """Runs after the first hour, since pages use the README's run."""
    blocks = [block for block in blocks_of(page) if not block.needs]
    if not blocks:
        pytest.skip("this machine can run no block of the page")
    if not (clone.folder / "outputs" / "mine").exists():
        test_the_first_hour(clone)
    for block in blocks:
        clone.paste(block.text)
