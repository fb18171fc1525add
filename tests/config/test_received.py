"""What a folder that is read back may never decide: every setting is judged, and one rule holds."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, load_run_config, words_to_type
from app.config.conf_files import not_taken
from app.config.schema import Setting, list_settings
from app.config.verbs import GRANTING, PARTS, VERBS, TrainConfig
from app.process.launch import quote_words, resume_words
from app.sweep import run_sweep
from app.sweep.trials import LocalLauncher, SlurmLauncher
from common.facts import default_of
from common.installation import ROOT
from tests.in_process import accepted, make_adapter, make_words, refused, run_command
from tests.resumed import make_run
from tests.sweep.short_trials import short_trials

JUDGED = [setting for top in VERBS.values() for setting in list_settings(top, PARTS)]


def holds_text(hint: Any) -> bool:
    return hint in (str, Any) or any(map(holds_text, typing.get_args(hint)))


def undecided(setting: Setting) -> bool:
    facts = setting.facts
    is_text = holds_text(setting.hint) and not setting.is_part
    return is_text and not (facts.choices or facts.is_path or facts.grants)


def test_every_text_says_what_its_value_lets_the_program_do() -> None:
    """A new setting states it at its field: `grants="nothing"`, or code, write or host."""
    assert len(JUDGED) > 900
    assert [setting.key for setting in JUDGED if undecided(setting)] == []


GRANTED = {
    "model.trust_remote_code": "true",
    "evaluation.metric": "FILE.py:score",
    "evaluation.allow_code": "true",
    "evaluation.harness_dir": "tasks",
    "data.cache_dir": "elsewhere",
    "strategy.offload_dir": "elsewhere",
    "strategy.site_address": "example.org:29400",
    "data.datasets": "[{path: 'https://example.org/rows.jsonl'}]",
    "data.val_datasets": "[{path: 'gs://bucket/rows.jsonl'}]",
    "data.test_datasets": "[{path: 's3://bucket/rows.jsonl'}]",
}


WHOLE = {
    "evaluation.metric": ["evaluation.allow_code=true"],
    "evaluation.harness_dir": ["evaluation.allow_code=true", "evaluation.harness=[own]"],
    "strategy.offload_dir": ["strategy.offload_optimizer=disk"],
    "strategy.site_address": [
        *("strategy=hsdp_local_sgd", "strategy.sites=2", "strategy.synchronous_steps=0"),
        "trainer.max_steps=9",
    ],
}
"""what a setting needs to have an effect"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.py").write_text("def score(answer, reference):\n    return 1.0\n")
    return make_words(tmp_path)


@pytest.mark.parametrize("key", GRANTING)
def test_each_is_found_in_a_config_and_not_when_it_is_typed(key: str, words: list[str]) -> None:
    option = [word for word in WHOLE.get(key, ()) if word.startswith("strategy=")]
    config = load_config("train", [*words, *option, f"{key}={GRANTED[key]}"])
    assert isinstance(config, TrainConfig)
    assert [each.key for each in not_taken(config, set())] == [key]
    group = key.partition(".")[0]
    for typed in (key, group):
        assert not_taken(config, {typed}) == []
    assert not_taken(config, set(), skip={group}) == []
    assert GRANTED.keys() == GRANTING.keys()


def test_what_each_grants_is_known() -> None:
    assert {key: each.facts.grants for key, each in GRANTING.items()} == {
        **dict.fromkeys(["model.trust_remote_code", "evaluation.metric"], "code"),
        **dict.fromkeys(["evaluation.allow_code", "evaluation.harness_dir"], "code"),
        **dict.fromkeys(["data.datasets", "data.val_datasets", "data.test_datasets"], "host"),
        "strategy.site_address": "host",
        **dict.fromkeys(["data.cache_dir", "strategy.offload_dir"], "write"),
    }


def written_otherwise(key: str, folder: Path) -> Iterator[str]:
    """Yield words that set a key of GRANTED in other ways than by its name."""
    group, _, name = key.partition(".")
    value = GRANTED[key]
    yield f"{key}={value}"
    file = folder / "of the sweep.yaml"
    file.write_text(f"# @package _global_\n{group}:\n  {name}: {value}\n")
    yield f"+experiment={file}"


def received_sweep(folder: Path, *words: str) -> Path:
    """Write what is kept of a sweep of two ranks, as another user may have written it."""
    folder.mkdir()
    (folder / "sweep.yaml").write_text(f"words: {[*words, 'adapter.r=2,4']}\n")
    return folder


CODE = [key for key, each in GRANTING.items() if each.facts.grants == "code"]


@pytest.mark.parametrize("key", [*CODE, "data.cache_dir", "data.test_datasets"])
def test_a_received_sweep_grants_nothing(
    key: str, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, word in enumerate(written_otherwise(key, tmp_path)):
        folder = received_sweep(tmp_path / f"sweep-{number}", *words, word)
        with short_trials() as commands:
            result = run_command("-m", f"resume={folder}", sweep=run_sweep)
            if key == "data.cache_dir":
                assert result.code == 0, (word, result.stderr)
                assert f"{folder}/sweep.yaml: {key}=elsewhere is not inherited" in caplog.text
                default = default_of(GRANTING[key].field)
                assert all(f"{key}={default}" in command for command in commands)
                assert len(commands) == 2 and "elsewhere" not in str(commands)
                continue
            assert (result.code, commands) == (2, []), word
            assert f"sweep.yaml: {key}" in result.stderr, (word, result.stderr)
            typed = f"{key}={GRANTED[key]}" if key in CODE else None
            assert typed is None or f"type {typed}" in result.stderr, result.stderr


def test_trust_that_is_typed_beside_a_sweep_holds_for_its_trials(
    words: list[str], tmp_path: Path
) -> None:
    words += ["evaluation.allow_code=true", "evaluation.metric=FILE.py:score"]
    folder = received_sweep(tmp_path / "sweep", *words)
    shutil.copy("FILE.py", "OTHER.py")  # what is typed must be what was saved
    asked = {
        "evaluation.allow_code=true evaluation.metric=FILE.py:score": 0,
        "evaluation.allow_code=false evaluation.metric=null": 0,
        "evaluation.allow_code=true": 2,
        "evaluation.allow_code=true evaluation.metric=OTHER.py:score": 2,
        "evaluation.allow_code=true evaluation.metric=FILE.py:score seed=3": 2,
    }
    for typed, code in asked.items():
        with short_trials() as commands:
            result = run_command("-m", f"resume={folder}", *typed.split(), sweep=run_sweep)
        assert result.code == code, (typed, result.stderr)
        (folder / "sweep.json").unlink(missing_ok=True)
        assert len(commands) == (2 if code == 0 else 0)
        trials = [
            {
                word.replace("\\", "").replace("True", "true").replace("False", "false")
                for word in command
            }
            for command in commands
        ]
        missing = [set(typed.split()) - trial for trial in trials if code == 0]
        assert missing == [set()] * len(commands)


def test_a_sweep_in_a_folder_with_links_is_refused(words: list[str], tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("of somebody")
    for name in ("0.log", "sweep.csv", "run.lock", "0", "sweep.yaml"):
        folder = received_sweep(tmp_path / f"with {name}", *words)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        with short_trials() as commands:
            said = refused("-m", f"resume={folder}", sweep=run_sweep)
        assert commands == [] and f"{name} is a link" in said
        assert victim.read_text() == "of somebody"


@pytest.mark.parametrize("name", ["0.log", "sweep.csv", "sweep.json"])
def test_a_sweep_does_not_write_into_hard_links(
    name: str, words: list[str], tmp_path: Path
) -> None:
    victim, folder = tmp_path / "victim.txt", received_sweep(tmp_path / "sweep", *words)
    victim.write_text("[]")
    (folder / name).hardlink_to(victim)
    says = "import sys; print('to the log'); sys.exit(4)"
    with short_trials(says) as commands:
        run_command("-m", f"resume={folder}", sweep=run_sweep)
    assert len(commands) == 2 and "to the log" in (folder / "0.log").read_text()
    assert victim.read_text() == "[]"
    (folder / "1.log").unlink()
    (folder / "1.log").symlink_to(victim)  # a link that came later
    config = load_config("train", words)
    assert isinstance(config, TrainConfig)
    for launcher in (LocalLauncher([None]), SlurmLauncher(config, folder)):
        with pytest.raises(OSError, match=r"1\.log"):
            launcher.start(0, [], folder / "1", folder / "1.log")
    assert victim.read_text() == "[]"


MAY_WRITE = re.compile(r"open|write_|save|copy|FileHandler|touch")
"""an expression of files that are parsed, which takes a second for all"""
WRITES = re.compile(r"[rbt]*[wax+][rwabtx+]*")
IN_NEW_FOLDERS = {
    "app/model/adapter/apply.py": "a folder that is renamed when it is complete",
    "app/model/adapter/settings.py": "the same, and start_adapter/, whose old files are removed",
    "app/model/multimodal.py": "the same",
    "app/model/save.py": "the same",
    "app/push.py": "a temporary folder",
    "app/__main__.py": "a file of the shell, of this user",
    "app/process/reporting.py": "the error file that torchrun names",
    "app/strategy/deepspeed.py": "the cache of compiled operators",
    "app/run/remote.py": "an object store",
    "app/run/folder.py": "a copy whose earlier name is removed",
    "data_modules/audit/findings.py": "a run: links are refused and hard links copied at its start",
    "data_modules/datamodule.py": "the same",
    "data_modules/tokens/prepare.py": "the cache of tokens",
    "data_modules/tokens/store.py": "the same",
}
"""files that write in other ways than `open_no_follow` and `write_atomically` -> what into"""


def test_every_file_is_written_without_following_links() -> None:
    found: dict[str, list[str]] = {}
    for file in (*ROOT.glob("app/**/*.py"), *ROOT.glob("data_modules/**/*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if MAY_WRITE.search(text) else ():
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            modes = [ast.literal_eval(each) for each in node.args if isinstance(each, ast.Constant)]
            writes = any(isinstance(mode, str) and WRITES.fullmatch(mode) for mode in modes)
            if (name == "open" and writes and "x" not in modes and "xb" not in modes) or name in (
                *("write_text", "write_bytes", "savefig", "copyfile", "copy2", "save_file"),
                *("FileHandler", "touch"),
            ):
                found.setdefault(str(file.relative_to(ROOT)), []).append(ast.unparse(node)[:80])
    assert {name: calls for name, calls in found.items() if name not in IN_NEW_FOLDERS} == {}
    assert found.keys() == IN_NEW_FOLDERS.keys()


def test_the_name_of_a_job_is_one_word(words: list[str]) -> None:
    """sbatch reads the lines of a script: a line break in a name would add a command to it."""
    typed = [*words, "adapter.r=2,4", "launcher=slurm", "launcher.partition='x\ntouch marker'"]
    said = refused("-m", *typed, sweep=run_sweep)
    assert "launcher.partition='x\\ntouch marker': expected a name" in said


ONE_OF_EACH = ("model.trust_remote_code", "evaluation.metric", "data.cache_dir", "data.datasets")


@pytest.mark.parametrize("key", ONE_OF_EACH)
def test_the_commands_that_are_printed_work_as_typed(
    key: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a folder never grants is in the command that resumes, evaluates or merges the run."""
    monkeypatch.setattr("app.config.dispatch.check_files", lambda *_, **__: [])  # contacts hosts
    run = make_run(tmp_path / "a run", *words, f"{key}={GRANTED[key]}", *WHOLE.get(key, ()))
    config = load_run_config(run)
    monkeypatch.setattr("app.process.launch._typed_again", words_to_type(config))
    assert run_command(f"resume={run}").code == (0 if GRANTING[key].facts.grants == "write" else 2)
    result = run_command(*shlex.split(resume_words(run)))
    assert (result.code, result.stderr) == (0, "")
    owner, name = key.split(".")
    assert getattr(getattr(result.config, owner), name) == getattr(getattr(config, owner), name)
    said = run_command(f"run={run}", verb="evaluate").stderr
    printed = said.partition("app.train ")[2].partition(", or use that")[0]
    assert run_command(*shlex.split(printed)).code == 0, said

    (run / "metrics.json").write_text("{}")
    make_adapter(run / "adapter")
    for verb in ("evaluate", "merge"):
        typed = shlex.split(quote_words(f"run={run}", *words_to_type(config, verb)))
        assert len(typed) > 1 or key.split(".")[0] in ("data", "evaluation", "strategy")
        result = run_command(*typed, verb=verb)
        assert (result.code, result.stderr) == (0, ""), (verb, typed)


def test_an_interrupted_sweep_prints_words_that_resume_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [*words, "adapter.r=2,4", "evaluation.allow_code=true", "data.cache_dir=elsewhere"]
    typed.append("evaluation.metric=FILE.py:score")
    with short_trials(interrupt_at=0):
        result = run_command("-m", *typed, f"output.dir={tmp_path / 'a sweep'}", sweep=run_sweep)
    assert result.code == 130
    line = next(line for line in result.stderr.splitlines() if "resumes the sweep" in line)
    printed = shlex.split(line, comments=True)
    with short_trials() as commands:
        accepted(*printed[printed.index("-m", 2) :], sweep=run_sweep)
    assert len(commands) == 2
    assert all("data.cache_dir=elsewhere" in command for command in commands)
