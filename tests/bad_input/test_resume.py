"""Messages when a resumed run has changed, does not exist, or is used by another process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import load_run_config
from app.model.adapter import keep_start
from app.run.find import select_checkpoint
from common.errors import UserError
from common.installation import ROOT
from tests.in_process import accepted, make_adapter, make_data, make_model, refused, run_command
from tests.resumed import contents, damage, damage_all, make_run, seal, start


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a run that is right, on files of this test."""
    folder = tmp_path_factory.mktemp("files")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl", 40)
    others = make_data(folder / "others.jsonl", 40)
    return [
        f"model.path={model}",
        f"data.datasets=[{{path: {data}}}, {{path: {others}}}]",
        "trainer.max_steps=4",
        "trainer.gradient_accumulation_steps=4",
        "schedule.warmup_steps=1",
        "optimizer.lr=1e-3",
    ]


@pytest.fixture
def run(words: list[str], tmp_path: Path) -> Path:
    """A run that was killed after its fourth step."""
    return make_run(tmp_path / "run", *words)


EVERYTHING = "resume_allow=[lr,schedule,epochs,data,precision]"
REFUSED = {
    "adapter.r=8": "adapter.r was 16 and is 8: that is another run; type adapter.r=16",
    "optimizer.weight_decay=0.1": "type optimizer.weight_decay=0.0",
    "data.sequence_len=64": "data.sequence_len was null and is 64: that is another run",
    "packing=none": "packing.method was multipack and is none: that is another run",
    "seed=7": "seed was 42 and is 7: that is another run; type seed=42",
    "model.added_tokens=[<x>]": "type 'model.added_tokens=[]'",
}
OTHER_OPTIONS = {
    "adapter=full": "adapter was lora and is full: that is another run",
    "optimizer=adafactor": "optimizer was adamw and is adafactor: that is another run",
}
ALLOWED = [
    ("optimizer.lr=2e-3", "lr", "optimizer.lr was 0.001 and is 0.002"),
    ("trainer.max_grad_norm=0.5", "lr", "trainer.max_grad_norm was 1.0 and is 0.5"),
    ("schedule=linear", "schedule", "schedule.shape was cosine and is linear"),
    ("schedule.warmup_ratio=0.1", "schedule", "schedule.warmup_steps was 1 and is null"),
    ("schedule.warmup_ratio=0.1", "schedule", "schedule.warmup_ratio was 0.03 and is 0.1"),
    ("trainer.max_steps=8", "epochs", "trainer.max_steps was 4 and is 8"),
    ("trainer.num_epochs=3", "epochs", "trainer.num_epochs was 1 and is 3"),
    ("data.on_long=truncate_left", "data", "data.on_long was drop and is truncate_left"),
    ("data.val_set_size=2", "data", "data.val_set_size was 0.05 and is 2"),
    ("data.mixture.weights=rows", "data", "data.mixture.weights was epochs and is rows"),
]
CATEGORIES = sorted({allow for _, allow, _ in ALLOWED})
HARMLESS = [
    "trainer.log_every_steps=1", "trainer.validate_every_steps=2",
    "trainer.checkpoint.every_steps=3", "trainer.checkpoint.async=true", "logger=csv",
    "evaluation.exact_match=true", "data.cache_dir=elsewhere", "data.num_workers=2",
    "output.name=other", "attention=eager", "recompute=full",
]  # fmt: skip


@pytest.mark.parametrize("changed", [REFUSED, OTHER_OPTIONS], ids=["values", "options"])
def test_settings_that_make_another_run_are_refused(run: Path, changed: dict[str, str]) -> None:
    result = run_command(f"resume={run}", *changed, EVERYTHING)
    assert result.code == 2
    for said in changed.values():
        assert said in result.stderr
    if changed is REFUSED:
        assert result.stderr.startswith(f"error: {len(changed)} problems")


@pytest.mark.parametrize("category", CATEGORIES)
def test_settings_that_may_change_say_the_word_for_it(run: Path, category: str) -> None:
    typed = {word for word, *_ in ALLOWED}
    others = ",".join(one for one in CATEGORIES if one != category)
    result = run_command(f"resume={run}", *typed, f"resume_allow=[{others}]")
    assert result.code == 2
    for _, allow, said in ALLOWED:
        assert (said in result.stderr) is (allow == category), said
    assert result.stderr.count("resume_allow=[") == result.stderr.count(f"{category}]'")


def test_settings_that_may_change_may_change_together(run: Path) -> None:
    typed = {word for word, *_ in ALLOWED}
    accepted(f"resume={run}", *typed, EVERYTHING)
    accepted(f"resume={run}", *HARMLESS)


def test_what_resume_and_resume_allow_do_not_take(
    run: Path, words: list[str], tmp_path: Path
) -> None:
    for value, said in (
        ("atuo", "did you mean auto?"),
        ("no/such/folder", "no such folder; expected never, auto, must, or the folder of a run"),
        (str(tmp_path), ": not a training run"),
    ):
        assert said in refused(*words, f"resume={value}")
    for allowed, said in (("[epoch]", "did you mean epochs?"), ("3", "expected a list")):
        assert said in refused(f"resume={run}", f"resume_allow={allowed}")


def test_what_is_no_training_resumes_nothing(run: Path, words: list[str], tmp_path: Path) -> None:
    assert "a preview trains nothing" in refused(*words, f"resume={run}", verb="preview")
    (tmp_path / "config.yaml").write_text("model:\n  path: null\n")
    for typed in (str(tmp_path), f"{tmp_path}/"):
        said = f"output.dir={typed} holds an evaluation"
        assert said in refused(*words, f"output.dir={typed}", "resume=auto")


def test_a_run_goes_on_in_its_own_folder_alone(run: Path, tmp_path: Path) -> None:
    assert "leave output.dir out" in refused(f"resume={run}", f"output.dir={tmp_path / 'other'}")
    assert run_command(f"resume={run}", f"output.dir={run}").code == 0


def test_nothing_to_resume_is_an_error_where_something_must_be(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(*words, "resume=must")
    assert "resume=must, but there is no unfinished run" in said
    assert "outputs/train; type resume=auto" in said
    result = run_command(*words, "resume=must", f"output.dir={tmp_path / 'new'}")
    assert f"there is no run in {tmp_path / 'new'}" in result.stderr
    make_run(tmp_path / "empty", *words, steps=())
    assert f"{tmp_path / 'empty'} has no checkpoint; type resume=auto" in refused(
        "resume=must", f"output.dir={tmp_path / 'empty'}"
    )


def test_nothing_to_resume_is_a_line_where_a_run_may_start(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for folder in (tmp_path / "new", make_run(tmp_path / "empty", *words, steps=())):
        caplog.clear()
        started = start(*words, "resume=auto", f"output.dir={folder}")
        assert (started.step, started.checkpoint) == (0, None)
        assert caplog.messages == [f"RESUME: fresh start, no checkpoint in {folder}"]


def test_a_run_that_never_saved_starts_anew_with_any_settings(
    words: list[str], tmp_path: Path
) -> None:
    empty = make_run(tmp_path / "empty", *words, steps=())
    accepted(*words, "adapter.r=8", "resume=auto", f"output.dir={empty}")


def test_an_existing_run_is_refused_without_resume(run: Path, words: list[str]) -> None:
    said = refused(*words, f"output.dir={run}")
    assert "holds another run" in said and "resume=auto" in said


def test_a_finished_run_says_so_and_touches_nothing(words: list[str], tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", *words, finished=True)
    shutil.move(tmp_path / "done", tmp_path / "moved")
    done, before = tmp_path / "moved", contents(tmp_path / "moved")
    before_it = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "app.train", f"resume={done}", "logger=csv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    after_it = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said.returncode == 0, said.stderr[-500:]
    assert said.stdout.startswith(f"done at step 4: {done} has finished")
    assert said.stdout.splitlines()[-1] == f"run: {done}"
    imported = {line.rpartition("|")[2].strip() for line in said.stderr.splitlines()}
    assert not {"torch", "lightning", "transformers", "datasets"} & imported
    assert after_it.ru_utime - before_it.ru_utime < 3, "seconds of a processor"
    assert contents(done) == before


def test_a_finished_run_needs_neither_data_nor_model(words: list[str], tmp_path: Path) -> None:
    files = tmp_path / "files"
    model, data = make_model(files / "model"), make_data(files / "data.jsonl")
    own = [*words, f"model.path={model}", f"data.datasets=[{{path: {data}}}]"]
    done = make_run(tmp_path / "done", *own, finished=True)
    data.unlink()
    assert run_command(f"resume={done}").code == 0
    assert start(f"resume={done}").is_done


def test_a_finished_run_goes_on_where_it_is_made_longer(words: list[str], tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", *words, finished=True)
    said = refused(*words, "adapter.r=8", "resume=auto", f"output.dir={done}")
    assert "adapter.r was 16 and is 8" in said
    longer = [f"resume={done}", "trainer.max_steps=8"]
    assert "type 'resume_allow=[epochs]'" in run_command(*longer).stderr
    started = start(*longer, "resume_allow=[epochs]")
    assert (started.is_done, started.step) == (False, 4)
    assert (done / "metrics.json").exists()
    started.discard_later_steps()
    assert not (done / "metrics.json").exists()


def test_damaged_checkpoints_are_named_and_the_good_one_is_taken(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    damage(run / "checkpoints" / "step-4" / "training.json")
    assert start(f"resume={run}").step == 2
    said = "\n".join(caplog.messages)
    assert "step-4 damaged (sha256 of training.json); using step-2, 2 steps lost" in said
    assert "RESUME: from" in said and "step-2" in said


def test_a_typed_checkpoint_is_taken_or_named_as_damaged(run: Path) -> None:
    typed = run / "checkpoints" / "step-2"
    assert run_command(f"resume={typed}").code == 0
    assert start(f"resume={typed}").step == 2
    damage(typed / "training.json")
    with pytest.raises(UserError, match=r"step-2 is damaged \(sha256 of training.json\)"):
        start(f"resume={typed}")


def test_documents_are_checked_before_a_run_resumes_or_is_measured(run: Path) -> None:
    step = run / "checkpoints" / "step-4"
    training = json.loads((step / "training.json").read_text())
    del training["optimizer"]
    (step / "training.json").write_text(json.dumps(training))
    seal(step)
    for read in (lambda: start(f"resume={run}"), lambda: select_checkpoint(run, "newest")):
        with pytest.raises(UserError, match=r"training.json: optimizer is missing"):
            read()


@pytest.mark.parametrize("word", ["auto", "must"])
def test_nothing_is_started_anew_over_damaged_checkpoints(run: Path, word: str) -> None:
    damage_all(run)
    before = contents(run)
    with pytest.raises(UserError) as caught:
        start(f"resume={word}", f"output.dir={run}")
    said = str(caught.value)
    assert "step-4 damaged" in said and "step-2 damaged" in said
    assert contents(run).keys() - {"run.lock"} == before.keys()


def test_a_checkpoint_of_a_newer_format_is_not_read(run: Path) -> None:
    import hashlib

    folder = run / "checkpoints" / "step-4"
    text = (folder / "manifest.json").read_text().replace('"format": 1', '"format": 99')
    (folder / "manifest.json").write_text(text)
    (folder / "COMMITTED").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    with pytest.raises(UserError, match=r"format 99.*upgrade loft"):
        start(f"resume={run}")


def test_a_changed_base_is_refused(words: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    own = [*words, f"model.path={model}"]
    run = make_run(tmp_path / "run", *own)
    moved = Path(shutil.move(model, tmp_path / "moved"))
    accepted(f"resume={run}", f"model.path={moved}")
    weights = moved / "model.safetensors"
    damage(weights)
    assert "the base model's weights (sha256) was" in refused(
        f"resume={run}", f"model.path={moved}", "resume_allow=[data]"
    )
    make_model(moved, context=256)
    result = run_command(f"resume={run}", f"model.path={moved}")
    assert "the base model (sha256 of its config and the shapes of its weights)" in result.stderr


def test_another_number_of_ranks_keeps_the_global_batch_or_says_how(
    words: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *words, "trainer.devices=2")
    said = refused(f"resume={run}", "trainer.devices=1")
    assert (
        "the run took 8 packs per step (micro_batch_size 1 x accumulation 4 x 2 ranks) and would "
        "now take 4 (micro_batch_size 1 x accumulation 4 x 1 rank)" in said
    )
    (fix,) = [word for word in said.split() if word.startswith("trainer.grad")]
    assert fix == "trainer.gradient_accumulation_steps=8"
    accepted(f"resume={run}", "trainer.devices=1", fix)
    accepted(f"resume={run}", "trainer.devices=1", "trainer.micro_batch_size=2")
    result = run_command(f"resume={run}", "trainer.devices=1", "trainer.global_batch_size=16")
    assert "type trainer.global_batch_size=8" in result.stderr
    result = run_command(f"resume={run}", "trainer.devices=3")
    assert "type trainer.devices=2" in result.stderr


def test_a_stream_wants_its_ranks_and_workers_back(words: list[str], tmp_path: Path) -> None:
    stream = ["data.streaming=true", "data.mixture.weights=rows", "data.val_set_size=2"]
    run = make_run(tmp_path / "run", *words, *stream, "trainer.devices=2")
    said = refused(f"resume={run}", "trainer.devices=1", "trainer.gradient_accumulation_steps=8")
    assert "the run had 2 ranks and would now have 1" in said
    result = run_command(f"resume={run}", "data.num_workers=2")
    assert "data.num_workers was 0 and is 2" in result.stderr
    assert run_command(f"resume={run}").code == 0


FACTS = [
    ({"data": [{"name": "d", "path": "p", "sha256": "1" * 64, "rows": 999}]}, "data", "1,000 -> 9"),
    ({"template_sha256": "d" * 64}, "data", "the chat template (sha256) was aaaaaaaaaaaa and is"),
    ({"tokens_sha256": "d" * 64}, "data", "what is learned from the same rows"),
    ({"precision": "bf16"}, "precision", "the precision was fp32 and is bf16"),
    ({"precision": "bf16-pure"}, None, "the precision was fp32 and is bf16-pure: that is another"),
    ({"tokenizer_sha256": "d" * 64}, None, "the tokenizer (sha256) was bbbbbbbbbbbb and is"),
    ({"total_steps": 3}, None, "the run has 3 steps now, and resumes at step 4"),
]


def test_what_the_data_became_is_compared_once_it_is_read(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    facts = {name: manifest[name] for name in ("data", "precision", "total_steps", "base")}
    facts |= {name: manifest[name] for name in manifest if name.endswith("sha256")}
    started, everything = start(f"resume={run}"), start(f"resume={run}", EVERYTHING)
    started.check_unchanged(facts)
    for fact, allow, said in FACTS:
        with pytest.raises(UserError) as caught:
            started.check_unchanged(facts | fact)
        assert said in str(caught.value)
        if allow is None:
            with pytest.raises(UserError):
                everything.check_unchanged(facts | fact)
        else:
            assert f"type 'resume_allow=[{allow}]'" in str(caught.value)
            everything.check_unchanged(facts | fact)


@pytest.mark.parametrize("content", [None, "{}", "[1]"])
def test_a_run_without_its_manifest_is_not_resumed(run: Path, content: str | None) -> None:
    (run / "manifest.json").unlink()
    if content is not None:
        (run / "manifest.json").write_text(content)
    assert "manifest.json cannot be read" in refused(f"resume={run}")


HOLD = """
import sys, time
from pathlib import Path
from app.run.folder import lock_run
lock_run(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold a run by another process, which forks a worker as a data loader does."""
    script = HOLD.replace("time.sleep", "import os; os.fork(); time.sleep")
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            os.killpg(process.pid, 9)


def test_a_second_process_on_a_run_is_refused_and_a_dead_ones_lock_is_taken(
    run: Path, words: list[str], tmp_path: Path
) -> None:
    with held(run) as process:
        before = contents(run)
        with pytest.raises(UserError) as caught:
            start(f"resume={run}")
        said = str(caught.value)
        assert f"process {process.pid} on {socket.gethostname()}, started " in said
        assert "is working on this run" in said
        assert contents(run) == before
        process.kill()  # its worker lives on
        process.wait()
        assert start(f"resume={run}").step == 4
    note = json.loads((run / "run.lock").read_text())
    assert (note["pid"], note["host"]) == (os.getpid(), socket.gethostname())


def test_two_new_runs_do_not_share_a_folder(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    with held(folder), pytest.raises(UserError, match="is working on this run"):
        start(*words, f"output.dir={folder}")


def test_a_disk_without_locks_is_reported_and_used(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", lockf)
    assert start(f"resume={run}").step == 4
    assert any("run one process at a time" in line for line in caplog.messages)


LOST = {
    "model.path={0}/model": "model: no such folder",
    "objective.teacher={0}/teacher": "teacher: no such folder",
    "data.chat_template={0}/of_data.jinja": "no such file",
    "data.datasets=[{{path: {0}/data.jsonl}}]": "data.jsonl: no such file",
    "data.test_datasets=[{{path: {0}/test.jsonl}}]": "test.jsonl: no such file",
    "evaluation.metric={0}/metric.py:score": "there is no file",
    "adapter.path={0}/adapter": None,
    "strategy.config={0}/deepspeed.json": None,
    "+experiment={0}/mine.yaml": None,
    "data.cache_dir={0}/cache": None,
}
"""a file or folder that starts a run -> what is said of it when it is gone; None: not needed"""


@pytest.mark.parametrize("word", LOST)
def test_what_a_run_started_from_and_is_gone_is_named_or_not_needed(
    word: str, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    base, data = make_model(files / "model"), make_data(files / "data.jsonl")
    shutil.copytree(base, files / "teacher")
    shutil.copy(data, files / "test.jsonl")
    (files / "of_data.jinja").write_text("{{ messages }}")
    (files / "metric.py").write_text("def score(answer, reference):\n    return 1.0\n")
    (files / "deepspeed.json").write_text('{"steps_per_print": 7}')
    (files / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    make_adapter(files / "adapter")
    key, _, value = word.format(files).partition("=")
    settings = {"model.path": str(base), "data.datasets": f"[{{path: {data}}}]"}
    settings |= {"strategy": "zero2"} if key == "strategy.config" else {}
    settings |= {"objective": "distill"} if key == "objective.teacher" else {}
    typed = [f"{name}={text}" for name, text in (settings | {key: value}).items()]
    granted = [] if key != "evaluation.metric" else ["evaluation.allow_code=true", typed[-1]]
    run = make_run(tmp_path / "run", *typed, *granted[:1])
    keep_start(load_run_config(run).adapter, run)
    lost = Path(re.split("[:}]", value.removeprefix("[{path: "))[0])
    if lost.is_dir():
        shutil.rmtree(lost)
    elif lost.exists():
        lost.unlink()
    result = run_command(f"resume={run}", *granted)
    said = LOST[word]
    if said is None:
        assert (result.code, result.stderr) == (0, "")
        return
    assert result.code == 2
    assert said in result.stderr and str(lost) in result.stderr
