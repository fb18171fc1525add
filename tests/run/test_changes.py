"""Which run and checkpoint is found or resumed, with which settings, and permitted changes."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.config import load_config, load_run_config, save_config
from app.process.launch import read_launch
from app.run import find_run
from app.run.folder import is_training_run
from app.run.manifest import compare_facts, compare_settings
from common.errors import UserError
from tests.in_process import accepted, make_words, refused, run_command
from tests.resumed import go_on, make_run, open_typed, seal, start
from tests.tiny import train_into


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a run that is right, on files of this test."""
    folder = tmp_path_factory.mktemp("files")
    return [*make_words(folder, 40), "trainer.max_steps=4"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resumed(*typed: str) -> Path | None:
    """Return the run that the words mean; None where they start a new one."""
    config = load_config("train", typed)
    if config.output.dir is None or not (Path(config.output.dir) / "config.yaml").exists():
        return None
    return Path(config.output.dir)


def test_nothing_differs_from_itself_and_everything_that_differs_is_found(words: list[str]) -> None:
    typed = ["adapter.r=8", "data.val_set_size=2", "trainer.checkpoint.keep_last=3", "seed=1"]
    one, other = load_config("train", words), load_config("train", [*words, *typed])
    assert compare_settings(one, load_config("train", words)) == []
    found = {change.what: (change.before, change.now) for change in compare_settings(one, other)}
    assert found == {
        "adapter.r": (16, 8),
        "data.val_set_size": (0.05, 2),
        "trainer.checkpoint.keep_last": (2, 3),
        "seed": (42, 1),
    }


def test_a_folder_brings_the_runs_own_settings(words: list[str], tmp_path: Path) -> None:
    typed = ["adapter=ia3", "optimizer=adafactor", "optimizer.clip_threshold=0.8", "seed=5"]
    typed += ["schedule=linear", "trainer.gradient_accumulation_steps=3", "output.name=mine"]
    run = make_run(tmp_path / "run", *words, *typed, "faults=[nan@2]", "resume_allow=[lr]")
    config = load_config("train", [f"resume={run}"])
    assert (config.faults, config.resume_allow) == ([], [])  # they were typed for one start
    before = load_run_config(run)
    now = accepted(f"resume={run}", "trainer.log_every_steps=2", "faults=[nan@3]")
    assert (now.resume, now.faults, now.trainer.log_every_steps) == (str(run), ["nan@3"], 2)
    assert now.output.name == "mine"
    assert [change.what for change in compare_settings(before, now)] == ["trainer.log_every_steps"]
    # Of two ways to say the same thing, the typed one is taken.
    now = accepted(f"resume={run}", "trainer.global_batch_size=3")
    assert now.trainer.gradient_accumulation_steps == "auto"


def test_an_experiment_is_compared_and_not_replaced(words: list[str], tmp_path: Path) -> None:
    typed = ["+experiment=quickstart", *words, "data.sequence_len=512"]
    run = make_run(tmp_path / "run", *typed, "adapter.r=4")
    again = [*typed, "resume=auto", f"output.dir={run}"]
    assert "adapter.r was 4 and is 16" in refused(*again)
    accepted(*again, "adapter.r=4")


def test_a_run_may_be_moved_and_typed_by_a_folder_in_it(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(here / "run", *words, "adapter.r=4")
    shutil.move(here / "run", here / "with rün")
    for tail in ("", "/", "/checkpoints", "/checkpoints/step-2"):
        assert resumed(f"resume=with rün{tail}") == Path("with rün")
    assert "r: 4\n" in run_command("resume=with rün", "--cfg", "job").stdout
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert resumed("resume=../with rün") == here / "with rün"
    monkeypatch.chdir(here / "with rün")
    assert resumed("resume=.") == Path(".")


def test_auto_takes_the_newest_unfinished_run_of_the_name(words: list[str], here: Path) -> None:
    outputs = here / "outputs"
    mine = [*words, "output.name=mine"]
    make_run(outputs / "mine" / "2026-01-01_10-00-00", *mine)
    newest = make_run(outputs / "mine" / "2026-01-02_10-00-00_1", *mine)
    make_run(outputs / "mine" / "2026-01-02_10-00-00", *mine)
    make_run(outputs / "mine" / "2026-01-03_10-00-00", *mine, finished=True)
    make_run(outputs / "mine" / "typed", *mine)  # its name tells no time
    make_run(outputs / "other" / "2026-01-05_10-00-00", *words, "output.name=other")
    (outputs / "mine" / "2026-01-06_10-00-00").mkdir()
    os.utime(outputs / "mine" / "2026-01-01_10-00-00")  # a copy is newer on the disk
    for word in ("auto", "must"):
        assert resumed(*mine, f"resume={word}") == newest.relative_to(here)
    assert resumed(*words, "output.name=third", "resume=auto") is None
    with pytest.raises(UserError, match="no unfinished run in outputs/third"):
        resumed(*words, "output.name=third", "resume=must")
    config = load_config("train", ["resume=auto"])  # of any name
    assert config.output.name == "other"
    assert config.output.dir == "outputs/other/2026-01-05_10-00-00"


def test_the_newest_run_starts_anew_where_it_has_not_saved(
    words: list[str], here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.delenv("LOFT_RESUME_STEP", raising=False)
    outputs = here / "outputs" / "train"
    make_run(outputs / "2026-01-01_10-00-00", *words)
    make_run(outputs / "2026-01-02_10-00-00", *words, "adapter.r=4", steps=())
    newest = Path("outputs/train/2026-01-02_10-00-00")
    assert f"{newest} has no checkpoint" in refused(*words, "resume=must")
    started = open_typed(*words, "resume=auto")
    assert started.config.adapter.r == 4
    assert (started.folder, started.checkpoint) == (newest, None)
    assert f"RESUME: fresh start, no checkpoint in {newest}" in caplog.messages


def test_a_typed_folder_decides_and_one_whose_name_tells_no_time_counts_where_it_is_the_only_one(
    words: list[str], here: Path
) -> None:
    outputs = here / "outputs" / "train"
    make_run(outputs / "2026-01-01_10-00-00", *words, finished=True)
    typed = make_run(outputs / "typed", *words)
    assert resumed(*words, "resume=auto") == typed.relative_to(here)
    make_run(outputs / "2026-01-01_copy", *words)
    assert resumed(*words, "resume=auto") is None
    timed = make_run(outputs / "2025-01-01_10-00-00", *words)
    assert resumed(*words, "resume=auto") == timed.relative_to(here)
    assert resumed(*words, "resume=auto", "output.dir=new") is None
    run = make_run(here / "run", *words, steps=(2,))
    assert resumed(*words, "resume=auto", "output.dir=run") == Path("run")
    assert resumed("resume=must", f"output.dir={run}") == run


def test_ranks_are_told_the_checkpoint(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", *words)
    typed = [f"resume={run / 'checkpoints' / 'step-2'}"]
    monkeypatch.delenv("LOFT_RESUME_STEP", raising=False)
    assert open_typed(*typed).step == 2
    assert os.environ["LOFT_RUN_DIR"] == str(run)
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}.get(name, "0"))
    monkeypatch.setenv("LOFT_PARENT", str(os.getppid()))
    read_launch.cache_clear()
    # A rank neither looks for the newest one, nor judges what the data became.
    rank = open_typed(*typed)
    assert (rank.step, rank.folder) == (2, run)
    rank.check_unchanged({"total_steps": 0})
    monkeypatch.setenv("LOFT_RESUME_STEP", "6")
    with pytest.raises(UserError, match=r"from step 6, .* every machine must see the same files"):
        open_typed(*typed)
    read_launch.cache_clear()


def test_another_strategy_only_rounds_unless_it_is_lossy(words: list[str], tmp_path: Path) -> None:
    batch = ["trainer.devices=2", "trainer.global_batch_size=8"]
    run = make_run(tmp_path / "run", *words, *batch, "strategy=ddp", strategy="ddp")
    for other in ("single trainer.devices=1", "fsdp_tp trainer.devices=4"):
        accepted(f"resume={run}", *f"strategy={other}".split())
    lossy = (f"resume={run}", "strategy=ddp_compressed")
    said = refused(*lossy)
    assert "lossy communication was none and is gradient compression (bf16) (" in said
    accepted(*lossy, "resume_allow=[precision]")


def test_communicating_quantized_weights_is_another_precision(words: list[str]) -> None:
    zero3, zeropp = (load_config("train", [*words, f"strategy={n}"]) for n in ("zero3", "zeropp"))
    (change,) = [each for each in compare_settings(zero3, zeropp) if each.rule == "precision"]
    assert str(change).endswith("was none and is quantized weights and gradients")
    (change,) = compare_facts({"strategy": "ddp"}, {"strategy": "fsdp"})
    assert change.rule == "rounding"


def test_another_version_of_a_library_only_rounds() -> None:
    (change,) = compare_facts({"versions": {"torch": "2.9.0"}}, {"versions": {"torch": "2.13.0"}})
    assert (change.what, change.rule) == ("torch", "rounding")


def test_the_newest_run_is_the_one_that_started_last(here: Path) -> None:
    noon = 1767268800  # 2026-01-01T12:00:00+0000
    for name, started, ended in (
        ("a", "2026-01-01T10:00:00+0000", noon + 9999),  # copied
        ("b", "2026-01-01T12:30:00+0100", noon),
    ):
        folder = here / "outputs/train" / name
        folder.mkdir(parents=True)
        save_config(load_config("train", ["+experiment=quickstart"]), folder / "config.yaml")
        (folder / "manifest.json").write_text(json.dumps({"started": started}))
        (folder / "metrics.json").write_text("{}")
        os.utime(folder / "metrics.json", (ended, ended))
    assert find_run(None) == Path("outputs/train/b")
    (here / "outputs/train/b/manifest.json").write_text("{}")  # as earlier versions wrote it
    assert find_run(None) == Path("outputs/train/b")


def test_the_verb_that_wrote_a_folder_is_recorded(words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for verb in ("train", "preview"):
        save_config(load_config(verb, words), file)
        first, *settings = file.read_text().splitlines(keepends=True)
        assert (first, is_training_run(file)) == (f"# settings of loft {verb}\n", verb == "train")
        file.write_text("".join(settings))  # as earlier versions wrote it
        assert is_training_run(file) == (verb == "train")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A killed run with checkpoints of steps 2 and 4."""
    return make_run(tmp_path / "run", *make_words(tmp_path), "trainer.max_steps=4")


def change(file: Path, how: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    how(content)
    file.write_text(json.dumps(content))


def change_run(checkpoint: Path, **identity: str) -> None:
    """Change which run a checkpoint says to be of."""
    change(checkpoint / "manifest.json", lambda m: m["details"]["run"].update(identity))
    seal(checkpoint)


def test_a_checkpoint_of_another_run_is_refused_by_name(ours: Path) -> None:
    theirs = ours / "checkpoints" / "step-4"
    change_run(theirs, id="c" * 32)
    with pytest.raises(
        UserError, match=r"step-4 was saved by another run \(c{8}, this one is a{8}"
    ):
        start(f"resume={ours}")
    with pytest.raises(UserError, match=r"'resume_allow=\[checkpoint\]'"):
        start(f"resume={theirs}")
    with pytest.raises(UserError, match="was saved by another run"):  # not typed by its own name
        start(f"resume={ours}", "resume_allow=[checkpoint]")
    assert start(f"resume={theirs}", "resume_allow=[checkpoint]").step == 4
    assert start(f"resume={ours / 'checkpoints' / 'step-2'}").step == 2


def test_a_moved_run_goes_on_and_stays_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = ("trainer.checkpoint.every_steps=1", "trainer.max_steps=2", "data.val_set_size=0")
    whole = train_into(tmp_path / "run", *words, "logger=csv")
    moved = shutil.copytree(whole, tmp_path / "moved")
    (moved / "metrics.json").unlink()
    shutil.rmtree(moved / "checkpoints" / "step-2")
    go_on(moved)
    before, after = (json.loads((run / "manifest.json").read_text()) for run in (whole, moved))
    assert after["run"] == before["run"]
    assert after["earlier"][0]["plan"] == before["run"]["plan"]
    newest = json.loads((moved / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert newest["details"]["run"] == before["run"]
    assert "no id" not in caplog.text


def test_a_copy_that_was_trained_on_other_data_is_another_course(ours: Path) -> None:
    other = "0" * 32
    change_run(ours / "checkpoints" / "step-4", plan=other)
    with pytest.raises(UserError, match="by a copy of this run that was trained on other data"):
        start(f"resume={ours}")
    # Unless this run has itself been on that plan, before what it was resumed with.
    change(ours / "manifest.json", lambda m: m.update(earlier=[{"plan": other}]))
    assert start(f"resume={ours}").step == 4
