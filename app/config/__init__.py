"""Settings: what a person types and what conf/ says becomes one typed object, or an error.

`dispatch` is a verb's command line, `load` composes and types, `run_config` has the settings of an
existing run; `overrides` reads words, `conf_files` YAML files; `validation` finds every wrong
key and value with its place; `schema` is the tree of names, `verbs` what each verb
takes, `help` the page.
"""

from app.config.dispatch import check_before_start, run_verb
from app.config.load import Config, compose, load_config, load_run_config, settings_of
from app.config.run_config import changed_settings, save_config, write_experiment
from app.config.verbs import (
    ChatConfig,
    EvaluateConfig,
    LauncherConfig,
    MergeConfig,
    PlanConfig,
    PreviewConfig,
    ServerConfig,
    SweepConfig,
    TrainConfig,
    TunedConfig,
)

__all__ = [
    "ChatConfig",
    "Config",
    "EvaluateConfig",
    "LauncherConfig",
    "MergeConfig",
    "PlanConfig",
    "PreviewConfig",
    "ServerConfig",
    "SweepConfig",
    "TrainConfig",
    "TunedConfig",
    "changed_settings",
    "check_before_start",
    "compose",
    "load_config",
    "load_run_config",
    "run_verb",
    "save_config",
    "settings_of",
    "write_experiment",
]
