"""THE DOOR: what a person types and what conf/ says becomes one typed object, or an error.

`door` calls Hydra; `of_run` has the settings of a run that is there; `nodes` asks of one value
what it is; `verbs` says what each verb can be told; `conf_files` reads conf/ and knows its
lines; `overrides` quotes and refuses words; `schema` and `settings_check` find every wrong key and
value at once; `help` is the page.
"""

from app.config.load import check_before_start, check_words, load_config, run_verb, settings_of
from app.config.run_config import load_run_config, save_config
from app.config.verbs import EvaluateConfig, PreviewConfig, TrainConfig

__all__ = [
    "EvaluateConfig",
    "PreviewConfig",
    "TrainConfig",
    "check_before_start",
    "check_words",
    "load_config",
    "load_run_config",
    "run_verb",
    "save_config",
    "settings_of",
]
