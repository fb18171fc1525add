"""Run folders that were received or are not ours: nothing of them runs, nothing outside changes."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from app.config import run_verb
from app.run.folder import OutputConfig, check_output, decide_run_dir
from app.train import train
from tests.in_process import accepted, make_data, refused, run_command
from tests.resumed import contents
from tests.tiny import small_base, small_run, train_into

Run = Callable[..., tuple[int, str]]
EVIL = """
from pathlib import Path
Path(MARKER).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that has finished."""
    return train_into(tmp_path_factory.mktemp("finished") / "run", "logger=csv")


@pytest.fixture
def received(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, as somebody else has sent it."""
    return shutil.copytree(finished, tmp_path / "received")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    data = make_data(tmp_path / "data.jsonl", 40)
    return [
        f"model.path={small_base()}",
        f"data.datasets=[{{path: {data}}}]",
        "trainer.max_steps=4",
    ]


def bring_code(folder: Path, marker: Path) -> Path:
    """Put a base into a run's folder that runs Python, and let its settings trust it."""
    base = shutil.copytree(small_base(), folder / "base")
    numbers = json.loads((base / "config.json").read_text())
    numbers |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
    }
    (base / "config.json").write_text(json.dumps(numbers))
    (base / "evil.py").write_text(EVIL.replace("MARKER", repr(str(marker))))
    config = folder / "config.yaml"
    text = config.read_text().replace(str(small_base()), str(base))
    config.write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"))
    assert "trust_remote_code: true" in config.read_text()
    return base


def forge_manifest(folder: Path, base: Path) -> None:
    """Let the manifest and the adapter name the fingerprints of that base."""
    from app.model.base import ModelConfig
    from app.preflight import describe_base

    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["base"] = describe_base(ModelConfig(path=str(base)))
    file.write_text(json.dumps(manifest))
    (folder / "adapter" / "base.json").write_text(json.dumps(manifest["base"]))


@pytest.mark.parametrize("verb", ["evaluate", "train"])
def test_a_received_run_never_says_itself_that_its_code_may_run(
    verb: str, received: Path, tmp_path: Path, type_verb: Run
) -> None:
    marker = tmp_path / "marker"
    forge_manifest(received, bring_code(received, marker))
    (received / "metrics.json").rename(tmp_path / "metrics.json") if verb == "train" else None
    key = "run" if verb == "evaluate" else "resume"
    where = [f"output.dir={tmp_path / 'out'}"] if verb == "evaluate" else []
    code, said = type_verb(verb, f"{key}={received}", *where)
    assert not marker.exists(), "code of a received folder ran"
    assert code == 2
    assert f"{received}/config.yaml: model.trust_remote_code=true" in said
    assert "type model.trust_remote_code=true" in said
    # Without it the base's files are refused for what they bring.
    code, said = type_verb(verb, f"{key}={received}", "model.trust_remote_code=false", *where)
    assert (code, marker.exists()) == (2, False)
    assert "contains its own Python code (evil.py, auto_map in config.json)" in said


FOLDERS = ["adapter", "checkpoints"]
FILES = ["run.lock", "config.yaml", "tensorboard/events.out.tfevents.1"]


def link_into(folder: Path, name: str, victim: Path) -> Path:
    """Replace an entry of a run by a link to the same content elsewhere."""
    entry, target = folder / name, victim / name.replace("/", "-")
    entry.parent.mkdir(exist_ok=True)
    if entry.exists():
        shutil.move(entry, target)
    elif name in FOLDERS:
        target.mkdir()
        (target / "kept.txt").write_text("of somebody")
    else:
        target.write_text("of somebody")
    entry.symlink_to(target)
    return entry


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_links_in_a_run_are_not_followed(
    name: str, received: Path, words: list[str], tmp_path: Path, type_verb: Run
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    link = link_into(received, name, victim)
    before = contents(victim), contents(received)
    out = f"output.dir={tmp_path / 'out'}"
    here = f"output.dir={received}"
    longer = ["trainer.max_steps=6", "resume_allow=[epochs]"]
    asked = [("train", f"resume={received}", *longer), ("evaluate", f"run={received}", out)]
    if name in ("run.lock", "config.yaml", "checkpoints"):
        asked += [
            ("train", *words, here, "resume=auto"),
            ("train", *words, here),
            ("evaluate", *words[:2], here),
            ("preview", *words, here),
        ]
    for verb, *typed in asked:
        code, said = type_verb(verb, *typed)
        assert code == 2, (verb, typed, said)
        assert f"{link.relative_to(received)} is a link" in said, (verb, typed, said)
        assert "Traceback" not in said
        assert (contents(victim), contents(received)) == before, (verb, typed)


def test_a_file_with_another_name_elsewhere_is_not_written_to(
    received: Path, tmp_path: Path, type_verb: Run
) -> None:
    """Hard links look like files of the run: the copy that it writes to is its own."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in [file for file in sorted(received.rglob("*")) if file.is_file()]:
        os.link(file, outside / str(file.relative_to(received)).replace("/", " "))
    before = contents(outside)
    longer = ["trainer.max_steps=6", "resume_allow=[epochs]"]
    code, said = type_verb("train", f"resume={received}", *longer)
    assert code == 0, said
    assert contents(outside) == before


def test_a_received_run_does_not_choose_where_the_cache_is_written(
    received: Path, tmp_path: Path, type_verb: Run, caplog: pytest.LogCaptureFixture
) -> None:
    config, elsewhere = received / "config.yaml", tmp_path / "elsewhere"
    text = config.read_text()
    named = next(line for line in text.splitlines() if line.strip().startswith("cache_dir:"))
    config.write_text(text.replace(named, f"  cache_dir: {elsewhere}"))
    asked = {
        "evaluate": [f"run={received}", f"output.dir={tmp_path / 'out'}"],
        "train": [f"resume={received}", "trainer.max_steps=6", "resume_allow=[epochs]"],
    }
    for verb, typed in asked.items():
        code, said = type_verb(verb, *typed)
        assert (code, elsewhere.exists()) == (0, False), said
    assert f"data.cache_dir={elsewhere} is not inherited" in caplog.text
    (received / "metrics.json").unlink()
    typed = [f"data.cache_dir={elsewhere}", "trainer.max_steps=8", "resume_allow=[epochs]"]
    code, said = type_verb("train", f"resume={received}", *typed)
    assert (code, elsewhere.exists()) == (0, True), said


@pytest.mark.parametrize("name", ["metrics.csv", "config.yaml"])
def test_a_pipe_or_a_socket_in_a_files_place_is_refused(
    name: str, received: Path, type_verb: Run
) -> None:
    (received / name).unlink(missing_ok=True)
    os.mkfifo(received / name)
    code, said = type_verb("train", f"resume={received}")
    assert (code, f"{name} is a named pipe" in said) == (2, True), said
    (received / name).unlink()
    here = os.getcwd()
    os.chdir(received)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(name)
    finally:
        os.chdir(here)
    code, said = type_verb("train", f"resume={received}")
    assert (code, f"{name} is a socket" in said) == (2, True), said


def test_what_a_run_writes_itself_follows_no_link_that_came_later(tmp_path: Path) -> None:
    from app.process.heartbeat import start_heartbeat
    from app.run.folder import lock_run
    from app.training.loggers import CsvLogger
    from common.files import write_atomically

    victim, folder = tmp_path / "victim", tmp_path / "run"
    folder.mkdir()
    victim.write_text("step\n1\n2\n")
    for name in ("run.lock", "metrics.csv", "stacks-rank-0.txt", f".config.yaml.{os.getpid()}"):
        (folder / name).symlink_to(victim)
    with pytest.raises(OSError, match=r"run\.lock"):
        lock_run(folder)
    rows = CsvLogger(folder / "metrics.csv", ["d"])
    with pytest.raises(OSError, match=r"metrics\.csv"):
        rows.drop_rows_after(1)
    with pytest.raises((OSError, RuntimeError), match=r"metrics\.csv"):
        rows.log_metrics({}, 3)
    with pytest.raises(OSError, match="stacks-rank-0"):
        start_heartbeat(folder, 0)
    write_atomically(folder / "config.yaml", "seed: 1\n")
    assert victim.read_text() == "step\n1\n2\n"
    assert (folder / "config.yaml").read_text() == "seed: 1\n"


FOREIGN = {
    "notes.txt": "mine",
    "metrics.csv": "a,b\n1,2\n",
    "checkpoints/step-3/weights.bin": "weights",
    "adapter/adapter_config.json": "{}",
    "error.txt": "from another program",
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    folder = tmp_path / "foreign"
    for name, text in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("verb", ["train", "train resume=auto", "preview", "evaluate"])
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(
    verb: str, foreign: Path, words: list[str], type_verb: Run
) -> None:
    before = contents(foreign)
    verb, *resume = verb.split()
    typed = [*words, *resume] if verb == "train" else words[:2]
    code, said = type_verb(verb, *typed, f"output.dir={foreign}")
    assert code == 2, said
    assert (
        f"output.dir={foreign} holds files that do not belong to a run: adapter, checkpoints"
        in said
    )
    assert "type a new folder's name" in said
    assert contents(foreign) == before


@pytest.mark.parametrize("name", list(FOREIGN))
def test_one_other_file_is_enough(name: str, tmp_path: Path) -> None:
    (tmp_path / "one" / name).parent.mkdir(parents=True)
    (tmp_path / "one" / name).write_text(FOREIGN[name])
    for goes_on in (False, True):
        config = OutputConfig(dir=str(tmp_path / "one"))
        (problem,) = check_output(config, resumes=goes_on)
        assert name.partition("/")[0] in problem
    with pytest.raises(ValueError, match="holds files that do not belong to a run"):
        decide_run_dir(OutputConfig(dir=str(tmp_path / "one")))


def test_a_run_that_was_refused_at_its_start_does_not_block_the_corrected_command(
    tmp_path: Path, type_verb: Run
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "late.jsonl").write_text(
        '{"instruction": "a", "output": "b"}\n' * 400 + '{"instruction": 1, "output": []}\n'
    )
    words = small_run("trainer.max_steps=1", "data.val_set_size=0", "logger=csv")
    small = dict(word.split("=", 1) for word in words)
    for wrong in (
        {"data.datasets": f"[{{path: {tmp_path / 'late.jsonl'}}}]"},  # found while it is read
        {"model.wrap_class": "Nope"},  # found when the model is built, and config.yaml is there
    ):
        typed = [f"{key}={value}" for key, value in (small | wrong).items()]
        code, said = type_verb("train", *typed, f"output.dir={folder}")
        assert code == 2, said
    assert (folder / "config.yaml").exists()
    code, said = type_verb("train", *words, f"output.dir={folder}")
    assert code == 0, said
    assert (folder / "metrics.json").exists()
    assert not (folder / "error.txt").exists()
    # What has trained is not replaced.
    code, said = type_verb("train", *words, f"output.dir={folder}")
    assert (code, "holds another run" in said) == (2, True)


def test_a_current_folder_that_was_deleted_is_named(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = run_command(*words, environment={"PWD": str(gone)})
    assert result.code == 3
    assert f"{gone} no longer exists" in result.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("output.dir", ""), ("resume", "' '"), ("run", ""), ("model.revision", "")),
        *(("adapter.path", ""), ("model.tokenizer_path", ""), ("data.cache_dir", "' '")),
    ],
)
def test_an_empty_folder_name_is_refused(
    key: str, value: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    typed = [f"{key}={value}"] if key == "run" else [*words, f"{key}={value}"]
    result = run_command(*typed, verb="evaluate" if key == "run" else "train")
    assert result.code == 2, result.config
    assert f"{key} is empty" in result.stderr
    assert "variable that is not set" in result.stderr
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("key", ["output.dir", "data.cache_dir"])
def test_an_address_in_a_folders_place_is_refused_without_its_password(
    key: str, words: list[str]
) -> None:
    said = refused(*words, f"{key}=ftp://me:word@bucket/run")
    assert "only train writes to s3://" in said and "word@" not in said


@pytest.mark.parametrize("key", ["output.dir", "model.path"])
def test_a_user_without_a_home_folder_is_named(key: str, words: list[str]) -> None:
    assert "no home folder" in refused(*words, f"{key}=~nobody-of-that-name/x")


def of_a_shell(run: Path) -> dict[str, str]:
    return {"LOFT_RUN_DIR": str(run), "LOFT_RESUME_STEP": "4"}


def test_a_run_folder_that_was_inherited_is_not_believed(
    received: Path, words: list[str], tmp_path: Path
) -> None:
    before = contents(received)
    result = run_command("model.path=/nope", *words[1:], environment=of_a_shell(received))
    assert (result.code, "/nope: no such folder" in result.stderr) == (2, True)
    accepted(*words, f"output.dir={tmp_path / 'new'}", environment=of_a_shell(received))
    assert contents(received) == before
    # Nor by a process that only has been started by another one than it names.
    other = of_a_shell(received) | {"LOFT_PARENT": str(os.getpid())}
    refused("model.path=/nope", *words[1:], environment=other)


def test_the_whole_verb_does_not_write_into_an_inherited_folder(
    received: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(received)
    monkeypatch.setenv("LOFT_RUN_DIR", str(received))
    folder = tmp_path / "new"
    words = small_run("trainer.max_steps=1", "data.val_set_size=0")
    code = run_verb("train", train, words=[*words, f"output.dir={folder}"])
    os.environ.pop("LOFT_RESUME_STEP", None)
    assert code == 0
    assert contents(received) == before
    assert (folder / "metrics.json").exists()
    monkeypatch.setenv("LOFT_RUN_DIR", str(received))
    assert run_verb("train", train, words=["oops=1"]) == 2
    assert contents(received) == before
    monkeypatch.delenv("LOFT_RUN_DIR")
