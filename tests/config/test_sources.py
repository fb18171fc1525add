"""Where a key came from, and experiments that are files of one's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from app import config as door
from app.config import conf_files, load
from app.model.adapter import FullConfig
from common.errors import UserError
from tests.in_process import accepted, make_data, make_model, refused, run_command
from tests.resumed import make_run

HEAD = "# @package _global_\ndefaults:\n  - override /model: tiny\n  - override /data: skills\n"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return Path(shutil.copytree(conf_files.CONF, tmp_path / "conf"))


def typed(path: Path) -> str:
    return f'+experiment="{path}"' if "'" in str(path) else f"+experiment={path}"


def test_an_experiment_may_be_a_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "it's a=b"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = tmp_path / f"{name}.yaml"
    file.write_text(f"{HEAD}  - _self_\ntrainer: {{max_steps: 3, checkpoint: {{async: true}}}}\n")
    for word in (typed(file), typed(Path("..") / file.name), typed(file).removeprefix("+")):
        config = accepted(word, "trainer.log_every_steps=2")
        settings = config.trainer
        assert (settings.max_steps, settings.log_every_steps) == (3, 2)
        assert settings.checkpoint.asynchronous
    printed = yaml.safe_load(run_command(typed(file), "--cfg", "job").stdout)
    assert printed["output"]["name"] == config.output.name
    assert door.load_config("preview", [typed(file)]).trainer.max_steps == 3
    file.write_text(f"{HEAD}  - _self_\ntrainer:\n  max_stepz: 3\n")
    said = refused(typed(file), "adapter.rr=2")
    assert f"{name}.yaml:7 unknown key trainer.max_stepz=3; did you mean" in said
    assert "command line: unknown key adapter.rr=2" in said


def test_an_experiment_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nope.yaml: no such file in" in refused("+experiment=nope.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is a named pipe" in run_command(f"+experiment={tmp_path / 'pipe.yaml'}").stderr
    assert (
        "only one experiment can be typed"
        in run_command("+experiment=quickstart", "experiment=llama8b").stderr
    )


BAD_EXPERIMENTS = [
    ("defaults: [nope, _self_]", ": In 'experiment/mine': Could not load"),
    ("defaults: [{/model: tiny}]", ":2 defaults: `/model: tiny`: write `override /model: tiny`"),
    ("defaults: [{adapter: lora}]",
        ":2 defaults: `adapter: lora`: write `override /adapter: lora`"),
    ("adapter.r: 4", ":2 adapter.r: write `adapter: {r: ...}`"),
    ("defaults: [override /model: tinny]", ":2: model=tinny: no such option"),
    ("defaults: [override /nothing: x]", ":2: nothing=x: train has no group nothing; it has"),
    ("hydra: {run: {dir: x}}", ":2 unknown key hydra"),
    ("trainer: 3", ":2 trainer=3: trainer is a section of settings: write settings below it"),
    ("trainer:\n  max_steps: many", ":3 trainer.max_steps=many: expected a whole number"),
    ("data:\n  datasets:\n    - path: a\n      frmat: b", ":5 unknown key data.datasets[0].frmat"),
    ("model:\n  _target_: os.system", ":3 model._target_: _target_ is not allowed"),
    ("model: {architecture: {x: '${oc.env:HOME}'}}",
        "resolvers like ${oc.env:NAME} are not allowed"),
    ("output:\n  name: ${oc.env:HOME}", ":3 output.name=${oc.env:HOME}: resolvers"),
    ("schedule: {warmup_steps: '${trainer.nothing}'}", "'trainer.nothing' not found"),
    ("seed: 1\nseed: 2", ":3: seed is set twice, first on line 2"),
    ("trainer:\n  checkpoint:\n    async: maybe",
        ":4 trainer.checkpoint.asynchronous=maybe: expected true or false"),
    ("trainer:\n  checkpoint:\n    async: true\n    asynchronous: true",
        ":5: trainer.checkpoint.asynchronous is set twice, first on line 4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "problem"), BAD_EXPERIMENTS, ids=[row[0] for row in BAD_EXPERIMENTS]
)
def test_what_is_wrong_with_an_experiment_is_named_with_its_place(
    lines: str, problem: str, conf: Path
) -> None:
    (conf / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{lines}\n")
    with pytest.raises(UserError) as caught:
        door.load_config("train", ["experiment=mine"], conf)
    (found,) = caught.value.problems
    assert f"{'mine.yaml' if problem[0] == ':' else ''}{problem}" in found


def test_an_experiment_without_its_package_line_is_refused(conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match="the first line must be `# @package _global_`"):
        door.load_config("train", ["experiment=mine"], conf)


def test_the_words_of_another_tools_file_are_explained_with_its_first_line(conf: Path) -> None:
    file = conf / "experiment" / "mine.yaml"
    file.write_text("model_name_or_path: org/name\nlora_rank: 8\n")
    with pytest.raises(UserError) as caught:
        door.load_config("train", ["experiment=mine"], conf)
    first, *others = caught.value.problems
    assert "the first line must be `# @package _global_`" in first
    assert "type model.path=org/name" in others[0] and "type adapter.r=8" in others[1]


def test_hydras_own_settings_are_unknown() -> None:
    said = refused("+experiment=quickstart", *(own := ("hydra.run.dir=x", "hydra/launcher=x")))
    assert all(f"unknown key {word}" in said for word in own)


def test_an_experiment_may_write_a_word_of_python_as_a_key(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (conf / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: tiny\n  - _self_\n"
        "trainer:\n  checkpoint:\n    async: true\n    every_steps: 3\nadapter:\n  r: 4\n"
    )
    words = ["experiment=mine", "data=skills"]
    config = door.load_config("train", words, conf)
    assert config.trainer.checkpoint.asynchronous and config.trainer.checkpoint.every_steps == 3
    assert config.output.name == "mine" and config.adapter.r == 4
    assert capsys.readouterr().err == ""
    config = door.load_config(
        "train", [*words, "trainer.checkpoint.async=false", "adapter=full"], conf
    )
    assert not config.trainer.checkpoint.asynchronous
    assert config.adapter == FullConfig()


def test_one_of_two_ways_to_say_a_thing_wins_over_the_experiments_other_one(conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nschedule:\n  warmup_steps: 7\n"
        "trainer:\n  gradient_accumulation_steps: 3\n"
    )
    words = ["experiment=mine", "model=tiny", "data=skills"]
    assert door.load_config("train", words, conf).schedule.warmup_steps == 7
    config = door.load_config("train", [*words, "schedule.warmup_ratio=0.1"], conf)
    assert config.schedule.warmup_steps is None
    config = door.load_config("train", [*words, "trainer.global_batch_size=4"], conf)
    assert config.trainer.gradient_accumulation_steps == "auto"


BAD_OPTIONS = [
    ("shape: cosine\nshape: linear\n", ":2: shape is set twice, first on line 1"),
    ("shape: cosine\nwarm_up: 3\n", ":2 unknown key schedule.warm_up=3"),
]


@pytest.mark.parametrize(("text", "problem"), BAD_OPTIONS)
def test_what_is_wrong_with_an_option_is_named_with_its_place(
    text: str, problem: str, conf: Path
) -> None:
    (conf / "schedule" / "cosine.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        door.load_config("train", ["model=tiny"], conf)
    assert f"schedule/cosine.yaml{problem}" in str(caught.value)


def test_an_option_of_ones_own_says_of_which_kind_it_is(conf: Path) -> None:
    file = conf / "optimizer" / "mine.yaml"
    file.write_text("name: muon\nmomentum: 0.8\n")
    config = door.load_config("train", ["optimizer=mine"], conf)
    assert (config.optimizer.name, config.optimizer.momentum) == ("muon", 0.8)
    file.write_text("momentum: 0.8\n")
    with pytest.raises(UserError, match=r"mine\.yaml:1 optimizer\.name: expected one of adamw"):
        door.load_config("train", ["optimizer=mine"], conf)


def test_an_experiment_may_build_on_another(conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [llama8b, _self_]\nseed: 3\n"
    )
    whole = door.load_config("train", ["experiment=llama8b"])
    config = door.load_config("train", ["experiment=mine"], conf)
    assert (config.seed, config.model, config.output.name) == (3, whole.model, "mine")
    text = (conf / "experiment" / "llama8b.yaml").read_text()
    (conf / "experiment" / "llama8b.yaml").write_text(f"{text}\nseedz: 4\n")
    with pytest.raises(UserError, match=rf"llama8b\.yaml:{text.count(chr(10)) + 2} unknown key"):
        door.load_config("train", ["experiment=mine"], conf)


def test_the_settings_of_a_run_are_read_once(tmp_path: Path) -> None:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    run = make_run(tmp_path / "run", f"model.path={model}", f"data.datasets=[{{path: {data}}}]")
    reads: list[Any] = []

    def read(path: Path, *rest: Any, **named: Any) -> Any:
        reads.append(path)
        return conf_files.read_conf_file(path, *rest, **named)

    with mock.patch.object(load, "read_conf_file", read):
        config = accepted(f"resume={run}")
        door.load_run_config(run).seed = 7
        assert door.load_run_config(run).seed == config.seed == 42
    assert reads.count(run / "config.yaml") == 1
