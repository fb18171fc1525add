from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given
from hypothesis import strategies as st

from app import config as door
from app.config import conf_files, schema
from app.config.overrides import PLAIN_VALUE, quote_value, words_of_mapping
from app.config.verbs import OPTION_ALIASES, PARTS, VERBS, PlanConfig
from app.model.adapter import FullConfig
from app.process.launch import read_launch
from app.run.folder import OutputConfig, decide_run_dir
from common.errors import UserError
from common.facts import hints_of
from common.installation import ROOT
from tests.in_process import (
    accepted,
    make_adapter,
    make_data,
    make_model,
    make_words,
    refused,
    run_command,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a run that is right, on files of this test."""
    folder = tmp_path_factory.mktemp("files")
    return make_words(folder)


BAD_WORDS = [
    # what was typed, what must be said, what is right
    (["trainer.max_stepz=3"], ["unknown key trainer.max_stepz=3", "trainer.max_steps?"],
     ["trainer.max_steps=3"]),
    (["learning_rate=1e-3"], ["unknown key learning_rate", "type optimizer.lr=1e-3"],
     ["optimizer.lr=1e-3"]),
    (["optimizer.lr=abc"], ["optimizer.lr=abc: expected a number or null"], ["optimizer.lr=1"]),
    (["strategy=ddp", "strategy.stage=2"],
     ["strategy.stage: a setting of strategy=zero1, but strategy=ddp is chosen"],
     ["strategy=zero3", "strategy.stage=2"]),
    (["trainer.precision=fp17"], ["trainer.precision=fp17: expected", "bf16-pure", "fp16?"],
     ["trainer.precision=bf16"]),
    (["adapter.name=full"], ["adapter.name=full", "type adapter=full"], ["adapter=full"]),
    (["adapter=full", "adapter.r=4"],
     ["adapter.r: a setting of adapter=lora, but adapter=full is chosen"],
     ["adapter=lora", "adapter.r=4"]),
    (["experiment=quickstrat"],
     ["experiment=quickstrat: no such option", "did you mean quickstart?"],
     ["experiment=llama8b", "data.sequence_len=64"]),
    (["data=rows.json"], ["data=rows.json", "'data.datasets=[{path: rows.json}]'"], ["data=dolly"]),
    (["adapter.r=4,8"], ["adapter.r=4,8 lists several values: add -m"], ["adapter.r=8"]),
    (["~adapter.r"], ["~adapter.r: expected key=value"], []),
    (["quickstart"], ["quickstart: expected key=value; did you mean experiment=quickstart?"], []),
    (["data.datasets[0].format=alpaca"],
     ["single elements of a list cannot be set; type data.datasets=[...]"], []),
    (["data.datasets=[{path: a.json, frmat: alpaca}]"],
     ["unknown key data.datasets[0].frmat=alpaca", "data.datasets[0].format?"], []),
    (["model.architecture={_target_: os.system}"], ["_target_ is not allowed"], []),
    (["output.name=${oc.env:HOME}"], ["resolvers like ${oc.env:NAME} are not allowed"],
     ["output.name=home"]),
    (["output.name=${oc.${data.chat_template}:HOME}"],
     ["resolvers like ${oc.env:NAME} are not allowed"], ["output.name=${strategy.name}"]),
    (["model.token=abcdef"], ["secrets do not go into settings", "HF_TOKEN"], []),
    (["output.name=hf_" + "a1B2" * 9], ["secrets do not go into settings"], []),
    (["sweep=lora_rank"], ["add -m"], []),
    (["sweep.trials=3"], ["sweep settings have no effect in a single run; add -m"], []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "fragments", "good"), BAD_WORDS, ids=[" ".join(row[0]) for row in BAD_WORDS]
)
def test_bad_words_are_named_and_their_twins_pass(
    base: list[str], bad: list[str], fragments: list[str], good: list[str]
) -> None:
    result = run_command(*base, *bad)
    assert result.code == 2, result.stderr
    assert result.config is None
    for fragment in fragments:
        assert fragment in result.stderr
    assert "Traceback" not in result.stderr
    if good:
        assert accepted(*base, *good) is not None


def test_a_refused_secret_is_not_repeated(base: list[str]) -> None:
    assert "zebra" not in run_command(*base, "model.token=zebra").stderr


def test_an_option_of_other_tools_is_answered() -> None:
    for group, them in OPTION_ALIASES.items():
        for option, hint in them.items():
            for typed in (option, option.upper()):
                with pytest.raises(UserError, match=re.escape(f"type {group}={hint}")):
                    conf_files.find_option(conf_files.CONF, group, typed)


def test_all_problems_are_named_together(base: list[str]) -> None:
    said = run_command(
        *base, "trainer.max_stepz=3", "optimizer.lr=abc", "oops", "adapter.rr=1"
    ).stderr
    assert said.startswith("error: 4 problems")
    for fragment in ("trainer.max_stepz", "optimizer.lr=abc", "oops", "adapter.rr"):
        assert fragment in said


def test_odd_letters_in_paths_arrive_as_typed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a=b (1): ümläut \\")
    data = make_data(tmp_path / "it's a=b, (1).jsonl")
    config = accepted(f"model.path={model}", f'data.datasets=[{{path: "{data}", format: alpaca}}]')
    assert config.model.path == str(model)
    assert config.data.datasets[0].path == str(data)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "d.jsonl")
    make_adapter(tmp_path / "adapter")
    config = accepted(
        *("model.path=~/model", "data.datasets=[{path: ~/d.jsonl}]", "adapter.path=~/adapter"),
        "output.dir=~/new",
    )
    assert config.output.dir == str(tmp_path / "new")
    assert config.model.path == str(model)
    assert config.adapter.path == str(tmp_path / "adapter")
    assert config.data.datasets[0].path == str(data)
    missing = run_command("model.path=~/none", "data.datasets=[{path: ~/d.jsonl}]")
    assert f"model.path={tmp_path / 'none'}: no such folder" in missing.stderr


@given(st.text(st.sampled_from("ab 1=:()'\"\\\\,ü~#!&;<>.-"), min_size=1))
def test_quoted_text_arrives_as_it_was(text: str) -> None:
    assume(text[0] not in "'\"" and not PLAIN_VALUE.fullmatch(text))
    parsed = OverridesParser.create().parse_override(f"key={quote_value(text)}")
    assert parsed.value() == text
    inside = text.replace(",", "").strip()
    assume(inside and inside[0] not in "'\"" and not PLAIN_VALUE.fullmatch(inside))
    parsed = OverridesParser.create().parse_override(f"key={quote_value(f'[{{path: {inside}}}]')}")
    assert parsed.value() == [{"path": inside}]


def test_a_bare_word_is_a_list_below_other_keys_too(base: list[str]) -> None:
    config = run_command(
        *base, "model.added_tokens=<|it's|>", "adapter.modules_to_save=norm"
    ).config
    assert config.model.added_tokens == ["<|it's|>"]
    assert config.adapter.modules_to_save == ["norm"]
    for word in ("faults=3", "faults=", "faults=null", "data.datasets=3"):
        assert "expected a list" in run_command(*base, word).stderr


def test_a_word_of_python_is_a_key_in_a_mapping(base: list[str]) -> None:
    for typed in ("{every_steps: 3,async: true}", "{ asynchronous : true, every_steps: 3}"):
        checkpoint = accepted(*base, f"trainer.checkpoint={typed}").trainer.checkpoint
        assert (checkpoint.asynchronous, checkpoint.every_steps) == (True, 3)
    result = run_command(*base, "trainer.checkpoint={async: true, asynchronous: false}")
    assert "unknown key trainer.checkpoint.async=true" in result.stderr


def test_the_command_line_replaces_parts_of_an_experiment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = door.load_config("train", ["+experiment=quickstart"])
    config = door.load_config("train", ["+experiment=quickstart", "adapter=full"])
    assert config == dataclasses.replace(whole, adapter=FullConfig())
    assert "adapter.r" in (note := capsys.readouterr().err)
    assert "do not apply to adapter=full" in note


def test_cfg_prints_settings_that_load_again() -> None:
    printed = run_command("experiment=tiny_base", "adapter=full", "--cfg", "job").stdout
    values = yaml.safe_load(printed)
    assert values["adapter"] == {"name": "full", "neftune_alpha": None}
    assert set(values) == set(hints_of(VERBS["train"]))


@pytest.mark.parametrize(
    ("verb", "name"), [("preview", "quickstart-preview"), ("train", "quickstart")]
)
def test_an_experiment_names_its_folder(verb: str, name: str) -> None:
    assert door.load_config(verb, ["+experiment=quickstart"]).output.name == name


def test_printed_settings_and_a_runs_settings_are_an_experiment_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+experiment=quickstart", "adapter.r=4", "optimizer=muon", "seed=7"]
    config = door.load_config("train", words)
    Path("printed.yaml").write_text(run_command(*words, "--cfg", "job").stdout)
    conf_files.save_config(config, Path("copied.yaml"))
    for name in ("printed", "copied"):
        assert door.load_config("train", [f"+experiment={name}.yaml"]) == config
        plan = door.load_config("plan", [f"+experiment={name}.yaml", "adapter.r=8"])
        assert plan.output.name == "quickstart-plan"
        assert isinstance(plan, PlanConfig)
        assert (plan.seed, plan.optimizer.name) == (7, "muon")
    Path("plan.yaml").write_text(run_command(*words, "--cfg", "job", verb="plan").stdout)
    for verb in ("plan", "train"):
        with pytest.raises(UserError, match=r"^plan\.yaml:1: settings of another verb than train;"):
            door.load_config(verb, ["+experiment=plan.yaml"])


def all_schemas() -> set[type]:
    settings = [one for top in VERBS.values() for one in schema.list_settings(top, PARTS)]
    classes = {base for one in settings for base in one.owner.__mro__}
    return {each for each in classes if dataclasses.is_dataclass(each)}


def test_every_schema_and_base_has_slots() -> None:
    # One base without slots lets +adapter.rr=3 through in silence.
    schemas = all_schemas()
    assert len(schemas) > 15
    for each in schemas:
        assert "__slots__" in vars(each), each
        assert not hasattr(each, "__dict__") or "__dict__" not in dir(each), each


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    for experiment in ("quickstart", "tiny_base", "llama8b"):
        config = door.load_config("train", [f"experiment={experiment}"])
        door.save_config(config, tmp_path / "config.yaml")
        assert door.load_run_config(tmp_path) == config


def test_a_runs_damaged_config_is_named_with_its_line(tmp_path: Path) -> None:
    config = door.load_config("train", ["experiment=quickstart"])
    door.save_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    for old, new, problem in (
        ("  r: ", "  rr: ", "unknown key adapter.rr="),
        ("seed: 42", "seed: x", "seed=x: expected a whole number"),
        ("seed: 42", "seed: ${oc.env:HOME}", "resolvers"),
        ("name: lora", "name: lore", "adapter.name: expected one of lora, ia3, freeze, full"),
    ):
        (tmp_path / "config.yaml").write_text(text.replace(old, new))
        with pytest.raises(UserError, match=r"config\.yaml") as caught:
            door.load_run_config(tmp_path)
        assert problem in str(caught.value)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run in outputs/ of an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
    make_model(tmp_path / "model")
    make_data(tmp_path / "data.jsonl")
    words = [
        "model.path=model",
        "data.datasets=[{path: data.jsonl}]",
        "data.chat_template=mine.jinja",
        "seed=7",
        "trainer.devices=2",
        "trainer.micro_batch_size=3",
        "trainer.precision=fp32",
    ]
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    config = door.load_config("train", words)
    run = tmp_path / "outputs" / "train" / "one"
    run.mkdir(parents=True)
    door.save_config(config, run / "config.yaml")
    (run / "metrics.json").write_text("{}")
    (run / "adapter").mkdir()
    return run


def test_evaluate_starts_from_the_newest_run(finished: Path) -> None:
    evaluation = finished.parent.parent / "evaluate" / "later"  # is no training run
    evaluation.mkdir(parents=True)
    door.save_config(door.EvaluateConfig(), evaluation / "config.yaml")
    (evaluation / "metrics.json").write_text("{}")
    config = accepted("evaluation.max_rows=3", verb="evaluate")
    assert (config.seed, config.evaluation.max_rows) == (7, 3)
    assert config.output.name == "train-evaluate"  # outputs/<name of the run>-<verb>
    assert (config.trainer.micro_batch_size, config.trainer.precision) == (3, "fp32")
    assert "unknown key trainer.max_steps=3" in refused("trainer.max_steps=3", verb="evaluate")
    assert Path(config.tuned_path).resolve() == finished / "adapter"


def test_a_run_is_evaluated_from_another_folder(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = accepted(f"run={finished}", verb="evaluate")
    assert config.model.path == str(tmp_path / "model")
    assert config.data.datasets[0].path == str(tmp_path / "data.jsonl")
    assert config.data.chat_template == str(tmp_path / "mine.jinja")
    monkeypatch.chdir(tmp_path)
    typed = ("model.path=model", "data.datasets=[{path: data.jsonl}]", "adapter_path=adapter")
    make_adapter(tmp_path / "adapter")
    assert accepted(*typed, verb="evaluate").adapter_path == str(tmp_path / "adapter")


def test_evaluate_of_an_unknown_run_names_the_newest(finished: Path) -> None:
    said = refused("run=outputs/train/two", verb="evaluate")
    assert "run=outputs/train/two: no such folder" in said
    assert "outputs/train/one" in said
    assert "not the folder of a finished" in refused(f"run={finished.parent}", verb="evaluate")
    (finished / "metrics.json").unlink()
    assert "no finished run" in run_command(verb="evaluate").stderr


def test_evaluate_without_a_run_needs_data(finished: Path) -> None:
    assert "no data" in refused("model.path=model", verb="evaluate")
    typed = ("model.path=model", "data.datasets=[{path: data.jsonl}]")
    assert accepted(*typed, verb="evaluate").tuned_path is None


def test_a_second_run_never_gets_the_folder_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = set()
    for _ in range(3):
        monkeypatch.delenv("LOFT_RUN_DIR", raising=False)
        folders.add(decide_run_dir(OutputConfig(name="same")))
    assert len(folders) == 3
    # A child rank gets its parent's folder.
    monkeypatch.setenv("LOFT_PARENT", str(os.getppid()))
    read_launch.cache_clear()
    assert decide_run_dir(OutputConfig(name="same")).resolve() in {f.resolve() for f in folders}
    read_launch.cache_clear()
    monkeypatch.delenv("LOFT_RUN_DIR", raising=False)


def test_errors_and_help_never_wait_for_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from app.config import run_verb\n"
        "assert run_verb('train', print, words=['--help']) == 0\n"
        "assert run_verb('train', print, words=['+experiment=quickstart', 'adapter.r=0']) == 2\n"
        "heavy = {'torch', 'lightning', 'transformers', 'peft', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.parametrize("path", ["null", "it's=[x],{y}:#.json", "C:\\"])
def test_a_mapping_gives_the_same_settings_as_its_words(path: str) -> None:
    values = {
        "experiment": "quickstart",
        "adapter": "lora",
        "adapter.rank_pattern": {"q_proj": 4},
        "data": {
            "datasets": [{"path": path, "columns": {"instruction": "a b"}, "weight": 0.5}],
            "val_set_size": 0.1,
        },
        "trainer": {"checkpoint": {"keep_last": 2}, "max_steps": 5, "validate_every_steps": None},
        "evaluation.exact_match": False,
    }
    config = door.compose("train", words_of_mapping(values, hints_of(VERBS["train"])))
    (dataset,) = config.data.datasets
    assert (dataset.path, dataset.columns) == (path, {"instruction": "a b"})
    assert dataset.weight == 0.5 and config.data.val_set_size == 0.1
    assert config.adapter.rank_pattern == {"q_proj": 4}
    assert (config.trainer.checkpoint.keep_last, config.trainer.max_steps) == (2, 5)
    assert not config.evaluation.exact_match and config.trainer.validate_every_steps is None
    assert door.load_config("train", values).data.val_set_size == 0.1


def test_a_reward_is_named_unless_a_name_is_typed() -> None:
    words = ["model=tiny", "data=pairs"]
    for verb in ("train", "evaluate", "plan"):
        assert door.load_config(verb, [*words, "objective=reward"]).model.labels == ["reward"]
    typed = door.load_config("train", [*words, "objective=reward", "model.labels=[score]"])
    assert typed.model.labels == ["score"]
    assert door.load_config("train", [*words, "objective=dpo"]).model.labels == []
