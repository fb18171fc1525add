"""Words of other tools, and near misses: each is answered with what to type here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import __main__ as console
from app.__main__ import FILES, completion_script
from app.config import compose, conf_files, load_config, save_config
from app.config.overrides import answer_for, read_other_tools
from app.config.schema import aliases_of, element_of, suggest_by_name
from app.config.verbs import OPTION_ALIASES, SETTINGS
from app.init import init, run
from common.errors import UserError
from tests.in_process import accepted, make_data, make_model, refused, run_command

RUN = "+experiment=quickstart"
ANSWERS = [
    ("report_to=wandb", "type logger=wandb"),
    ("bf16=true", "type trainer.precision=bf16"),
    ("trainer.precision=bf16-mixed", "; type trainer.precision=bf16\n"),
    ("precision=bf16-mixed", "; type trainer.precision=bf16\n"),
    ("deepspeed=x.json", "type strategy=zero2"),
    ("model=meta-llama/Llama-3.1-8B", "type model.path=meta-llama/Llama-3.1-8B"),
    ("model=llama-3-8b", "did you mean llama3_8b?"),
    ("--learning-rate=1e-4", "type optimizer.lr=1e-4"),
    ("flash_attention_2", "type attention=auto"),
    ("trainer=dpo", "type objective=dpo"),
    ("rl=ppo", "not built: objective=sft, distill, dpo, ipo, orpo, simpo, kto, reward and"),
    ("data.per_site=true", "strategy=hsdp_local_sgd strategy.sites=2 strategy.site=1"),
    ("sample_packing=true", "unknown key sample_packing=true; type packing=multipack"),
    ("--config=mine.yaml", "type +experiment=mine.yaml"),
    ("optimizer.beta=0.9", "did you mean optimizer.beta"),
    (
        "hardware=8xh100",
        "hardware=8xh100: train has no group hardware; only launch and plan have it",
    ),
    ("lora.r=8", "unknown key lora.r=8; type adapter.r=8"),
]


@pytest.mark.parametrize(("word", "fragment"), ANSWERS, ids=[word for word, _ in ANSWERS])
def test_a_word_of_another_tool_is_answered_with_ours(word: str, fragment: str) -> None:
    said = refused(RUN, word)
    assert fragment in said and len(said) < 400


WORDS_OF_OTHERS = [
    word
    for line in Path(__file__).with_name("other_tools.txt").read_text().splitlines()
    if not line.startswith("#")
    for word in line.split()
]


NAMES_OF_FILES = ("+experiment=VALUE", "strategy=zero2 strategy.config=VALUE", "resume=VALUE")


def sample_of(key: str) -> str:
    """Return a value that setting `key` takes, as typed."""
    setting = next(each for each in SETTINGS if each.typed_key == key)
    if setting.is_part:
        return conf_files.list_groups(conf_files.CONF)[key][0]
    if setting.facts.choices:
        return str(setting.facts.choices[-1])
    by_type = {int: "2", float: "0.1", int | float: "0.1", bool: "true", str: "auto", Any: "[a]"}
    return by_type.get(element_of(setting.hint), "{a: 2}" if "dict" in str(setting.hint) else "[a]")


def answered(word: str) -> str | None:
    others = read_other_tools()
    key = others.keys.get(word) or aliases_of(SETTINGS).get(word, "=")
    said = others.values.get(word, {}).get("any", "")
    if "VALUE" in said and said not in NAMES_OF_FILES:
        key = said.split()[-1].removesuffix("=VALUE")
    value = "true" if "=" in key else sample_of(key)
    return answer_for(word, value, SETTINGS) or suggest_by_name(word, value, SETTINGS) or None


def test_every_word_of_other_tools_is_answered() -> None:
    assert len(WORDS_OF_OTHERS) > 500
    assert [word for word in WORDS_OF_OTHERS if not answered(word)] == []


def test_what_an_answer_says_to_type_is_accepted() -> None:
    """All answers of the table; composing takes a quarter of a second, so settings are joined."""
    others = read_other_tools()
    answers = {answered(word) or "" for word in (*WORDS_OF_OTHERS, *others.keys)}
    for word, by_value in others.values.items():
        for value, said in by_value.items():
            if said not in NAMES_OF_FILES:
                of_key = said.split()[-1].removesuffix("=VALUE")
                typed_value = sample_of(of_key) if "VALUE" in said else value
                answers.add(answer_for(word, typed_value, SETTINGS) or "")
    for group, options in OPTION_ALIASES.items():
        answers |= {f"type {group}={hint.partition(' (')[0]}" for hint in options.values()}
    setting = r"(?<!\S)(?:'[a-z][\w.]*=[^']+'|\+?(?!run=|repo=)[a-z][\w.]*=[^\s,;:)']+)"
    texts = {
        text for answer in answers for text in re.findall(rf"{setting}(?: {setting})*", answer)
    }
    typed = {tuple(shlex.split(re.sub(r"=N\b", "=1", text))) for text in texts}
    assert len(typed) > 100
    groups = conf_files.list_groups(conf_files.CONF).keys() - {"experiment"}
    of_options = {words for words in typed if len(words) == 1 and words[0].split("=")[0] in groups}
    for (word,) in of_options:
        assert conf_files.find_option(conf_files.CONF, *word.split("=")).exists()
    remaining = sorted(typed - of_options)
    while remaining:  # composed together if they belong to different groups
        together: dict[str, tuple[str, ...]] = {}
        for words in remaining:
            together.setdefault(re.split(r"[.=]", words[0])[0], words)
        remaining = [words for words in remaining if words not in together.values()]
        of_merge = together.pop("merge", ())
        try:
            compose("train", [RUN, *(word for words in together.values() for word in words)])
            if of_merge:
                compose("merge", of_merge)
        except UserError as error:  # what a value means on this machine is not asked here
            for refusal in ("unknown key", "no such option", "expected"):
                assert not [each for each in error.problems if refusal in each], together


def test_a_token_is_a_secret_and_a_number_is_none() -> None:
    assert "secrets do not go into settings" in run_command(RUN, "model.token=hf_abcdefgh").stderr
    assert (
        "did you mean plan.tokens?"
        in run_command("+experiment=llama8b", "plan.token=5", verb="plan").stderr
    )


def test_a_whole_number_may_be_typed_with_an_exponent() -> None:
    config: Any = load_config("plan", ["+experiment=llama8b", "plan.tokens=1e9"])
    assert config.plan.tokens == 10**9 and isinstance(config.plan.tokens, int)
    assert "expected a whole number" in run_command(RUN, "trainer.max_steps=1.5").stderr


def test_without_a_model_and_data_the_quickstart_runs() -> None:
    for verb in ("train", "preview", "plan"):
        result = run_command("trainer.max_steps=12", verb=verb)
        assert result.code == 0 and result.config.trainer.max_steps == 12
        assert "no model and no data given: +experiment=quickstart" in result.stderr
    for words in (["model=nope"], ["data.datasets=nope.jsonl"], ["nope=1"], ["resume=auto"]):
        assert "quickstart (--help" not in run_command(*words).stderr


def test_an_experiment_of_ones_own_needs_no_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\ndefaults: [override /model: tiny]\nseed: 5\n")
    assert run_command(str(file), "data=skills").config.seed == 5
    assert "no such file" in run_command(str(tmp_path / "none.yaml")).stderr


def test_the_settings_of_a_run_are_an_experiment(tmp_path: Path) -> None:
    words = (RUN, "adapter.r=16", "data.cache_dir=cache", f"output.dir={tmp_path / 'run'}")
    config = load_config("train", words)
    save_config(config, tmp_path / "config.yaml")
    for verb in ("train", "preview"):
        again: Any = load_config(verb, [f"{tmp_path / 'config.yaml'}", "seed=3"])
        assert (again.adapter.r, again.seed, again.output.dir) == (16, 3, None)
        assert again.data.cache_dir != "cache"  # a folder never decides where to write


def test_a_path_alone_is_a_data_set(tmp_path: Path) -> None:
    one, two = make_data(tmp_path / "a.jsonl"), make_data(tmp_path / "b c.jsonl")
    for word in (f"data.datasets={one}", f"data.datasets=[{one}]"):
        (dataset,) = run_command(RUN, word).config.data.datasets
        assert dataset.path == str(one)
    both = run_command(
        RUN, f"data.datasets=[{one}, {{path: '{two}', weight: 2}}]"
    ).config.data.datasets
    assert [(each.path, each.weight) for each in both] == [(str(one), 1), (str(two), 2)]
    assert "no such file" in run_command(RUN, f"data.datasets={tmp_path / 'none.json'}").stderr


def test_the_version_and_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--version").stdout.startswith("loft ")
    for words, fragment in ((["--version"], "loft "), (["--help"], "  init"), ([], "  train")):
        with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["loft", *words])
            console.main()
        assert ended.value.code == 0 and fragment in capsys.readouterr().out


@pytest.mark.parametrize("shell", FILES)
def test_shells_complete_verbs_settings_and_options(shell: str, tmp_path: Path) -> None:
    script = completion_script(shell)
    assert all(word in script for word in ("train", "optimizer.lr=", "muon", "quickstart"))
    if shell == "bash":
        line = (
            f"source {tmp_path}/loft; COMP_WORDS=({{}}); COMP_CWORD=$((${{{{#COMP_WORDS[@]}}}}-1));"
            "compopt() { :; }; _loft; echo ${COMPREPLY[@]}"
        )
        (tmp_path / "loft").write_text(script)
        for typed, expected in (("loft tr", "train"), ("loft train optimizer = mu", "muon")):
            words = line.replace("({})", f"({typed})").replace("{{", "{").replace("}}", "}")
            shown = subprocess.run(
                ["bash", "-c", words], capture_output=True, text=True, check=True
            )
            assert shown.stdout.split() == [expected]


def test_init_writes_an_experiment_that_validates(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = make_model(tmp_path / "my model"), make_data(tmp_path / "a.jsonl")
    file = init(["mine", f"model={model}", f"data={data},{data}"], None)
    assert file == Path("mine.yaml") and file.read_text().count("#") > 10
    config = accepted(f"+experiment={file}")
    assert config.model.path == str(model) and len(config.data.datasets) == 2
    with pytest.raises(UserError, match=r"mine.yaml exists"):
        init(["mine", f"model={model}", f"data={data}"], None)
    with pytest.raises(UserError, match=r"data is missing; type data=data.jsonl"):
        init(["other", f"model={model}"], None)
    asked: list[str] = []

    def answer_of(question: str) -> str:
        asked.append(question)
        return str(model if "base model" in question else data)

    assert run_command(f"+experiment={init(['asked'], answer_of)}").code == 0 and len(asked) == 2


def test_the_commands_of_init_are_typed_as_they_are_shown(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "a.jsonl")
    name = "it's mine.yaml"
    assert run(["mine", f"model={model}", f"data={data}", f"output={name}"]) == 0
    printed = capsys.readouterr().out.splitlines()[-2:]
    commented = re.findall(r"^# (?:preview|train): +(.*)", Path(name).read_text(), re.MULTILINE)
    for line in (*printed, *commented):
        assert shlex.split(line)[-1] == f"+experiment={name}"
    assert run_command(f"+experiment={name}").code == 0


def test_what_init_writes_as_comments_are_the_defaults(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    file = init(["mine", "model=llama8b", "data=dolly"], None)
    before, text = load_config("train", [f"experiment={file}"]), file.read_text()
    start = text.index("_self_")
    uncommented = re.sub(
        r"^( *)# ( *[a-z_]+:( [^ ]+)?)$", r"\1\2", text[start:], flags=re.MULTILINE
    )
    file.write_text(text[:start] + uncommented)
    values = yaml.safe_load(file.read_text())
    assert values["adapter"]["r"] == 16 and "sequence_len" in values["data"]
    assert load_config("train", [f"experiment={file}"]) == before
