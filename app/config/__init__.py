"""Settings: the command line and the files of conf/ become one typed object, or an error.

`dispatch` runs a verb from its command line, or prints its help; `load` composes and types its
settings; `overrides` parses what is typed; `conf_files` reads YAML, and saves and inherits the
settings of a run; `validation` locates every wrong key and value; `schema` flattens dataclasses
into settings, `verbs` declares those of each verb.
"""

from app.config.conf_files import changed_settings, save_config, words_to_type, write_experiment
from app.config.dispatch import check_before_start, run_verb
from app.config.load import Config, compose, load_config, load_run_config, settings_of
from app.config.verbs import (
    ChatConfig,
    EvaluateConfig,
    LaunchConfig,
    LauncherConfig,
    MergeConfig,
    PlanConfig,
    PreviewConfig,
    ServerConfig,
    SweepConfig,
    TrainConfig,
    TunedConfig,
)
