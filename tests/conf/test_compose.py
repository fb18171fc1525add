"""Every YAML file under conf/ composes into typed settings."""

from __future__ import annotations

import pytest

from app.config import compose, conf_files, load_config
from app.config.overrides import GROUPS_WITH_PLUS
from app.config.verbs import PARTS, VERBS, TunedConfig
from app.model.base import ModelConfig
from app.sweep.parameters import parse_parameters

GROUPS = conf_files.list_groups(conf_files.CONF)
FAST_MODELS = ("llama8b", "qwen3_30b_a3b", "t5_small", "tiny")
"""one model of each kind; test_models composes all of them"""
OPTIONS = {
    group: [option for option in options if group != "model" or option in FAST_MODELS]
    for group, options in GROUPS.items()
    if group not in GROUPS_WITH_PLUS
}
VERB_OF = {"evaluation": "evaluate", "hardware": "plan"}
"""group -> verb that has it, for groups that train does not have"""


def rows() -> list[tuple[str, dict[str, str]]]:
    """Return verbs with options of several groups, so that every option occurs."""
    groups_of_verbs: dict[str, dict[str, list[str]]] = {}
    for group, options in OPTIONS.items():
        groups_of_verbs.setdefault(VERB_OF.get(group, "train"), {})[group] = options
    found = []
    for verb, groups in groups_of_verbs.items():
        for row in range(max(map(len, groups.values()))):
            chosen = {group: options[row % len(options)] for group, options in groups.items()}
            found.append((verb, {"model": "tiny", "data": "skills"} | chosen))
    return found


@pytest.mark.parametrize(("verb", "options"), rows())
def test_every_option_composes(verb: str, options: dict[str, str]) -> None:
    config = load_config(verb, [f"{group}={option}" for group, option in options.items()])
    assert isinstance(config, VERBS["train"]) or verb == "evaluate"
    for group in PARTS.keys() & options.keys():
        assert type(getattr(config, group)) is PARTS[group][options[group]]


def test_every_model_file_has_keys_of_a_model() -> None:
    for option in GROUPS["model"]:
        file = conf_files.find_option(conf_files.CONF, "model", option)
        model = ModelConfig(**conf_files.read_conf_file(file, package="model").values)
        assert not model.architecture or model.architecture["model_type"], option


@pytest.mark.parametrize("name", GROUPS["experiment"])
def test_every_experiment_composes(name: str) -> None:
    config = load_config("train", [f"experiment={name}"])
    assert config.output.name == name
    text = (conf_files.CONF / "experiment" / f"{name}.yaml").read_text()
    for heading in ("# What:", "# Needs:", "# Results:"):
        assert heading in text, f"the header says {heading}"
    assert name in (conf_files.CONF / "experiment" / "README.md").read_text()


@pytest.mark.parametrize("name", GROUPS["sweep"])
def test_every_sweep_file_lists_values_that_exist(name: str) -> None:
    swept = parse_parameters(["experiment=quickstart", f"sweep={name}"])
    assert any(word.varies for word in swept)


def test_every_verb_composes_alone() -> None:
    for verb in VERBS:
        compose(verb, ["model=tiny"] if issubclass(VERBS[verb], TunedConfig) else [])


def test_every_yaml_file_belongs_to_a_verb_or_a_group() -> None:
    known = {conf_files.CONF / f"{verb}.yaml" for verb in VERBS}
    known |= {conf_files.CONF / g / f"{o}.yaml" for g, options in GROUPS.items() for o in options}
    assert set(conf_files.CONF.rglob("*.yaml")) == known
