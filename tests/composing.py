"""Cache compositions: the shipped files of the same options are read and merged once per process.

Composing takes 0.4 s of a processor, and tests compose thousands of times. The cache holds the
shipped files, what Hydra composed from them for given options, parsed overrides, OmegaConf's
schemas, and what the first rows of the shipped samples show. Values of experiments and of the
command line, and a test's own files, are processed every time.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.config.conf_files import CONF
from app.config.load import EXPERIMENT_NODE
from data_modules import DataConfig, DatasetConfig
from data_modules import settings as data_settings
from data_modules.source import Budget

SHIPPED = str(CONF.resolve())
SAMPLES = CONF.parent / "data_modules" / "samples"


def keep_compositions(patch: pytest.MonkeyPatch) -> None:
    """Cache what depends only on the chosen options: list of files, merged values, schema.

    And overrides, which depend only on their text, and the checks of the shipped samples' rows.
    """
    find_defaults: Callable[..., Any] = config_loader_impl.create_defaults_list
    merge_files: Callable[..., Any] = ConfigLoaderImpl._compose_config_from_defaults_list
    make_node: Callable[..., Any] = OmegaConf.structured
    parse: Callable[..., Any] = OverridesParser.parse_rule
    load: Callable[..., Any] = ConfigRepository.load_config
    check_rows: Callable[..., Any] = data_settings._check_first_rows
    found: dict[Any, Any] = {}
    merged: dict[Any, bytes] = {}
    nodes: dict[Any, bytes] = {}
    loaded: dict[str, bytes] = {}
    checked: dict[str, list[str]] = {}
    parsed: dict[tuple[str, str], Any] = {}

    def copied(kept: dict[Any, bytes], key: Any, make: Callable[[], Any]) -> Any:
        if key not in kept:
            kept[key] = pickle.dumps(make())
        return pickle.loads(kept[key])  # noqa: S301

    def find_once(repo: Any, overrides_list: Sequence[Override], **rest: Any) -> Any:
        values = [one for one in overrides_list if not repo.group_exists(one.key_or_group)]
        chosen = [one.input_line for one in overrides_list if one not in values]
        key = (_files(repo), *chosen, *rest.items())
        if key[0] is None or any(isinstance(one.value(), dict) for one in overrides_list):
            return find_defaults(repo=repo, overrides_list=overrides_list, **rest)
        if key not in found:
            found[key] = find_defaults(repo=repo, overrides_list=overrides_list, **rest)
        return config_loader_impl.DefaultsList(
            defaults=found[key].defaults,
            config_overrides=values,
            defaults_tree=found[key].defaults_tree,
            overrides=found[key].overrides,
        )

    def merge_once(loader: Any, defaults: Sequence[Any], repo: Any) -> Any:
        files = _files(repo)
        if files is None:
            return merge_files(loader, defaults=defaults, repo=repo)
        paths = [each.config_path for each in defaults]
        typed = f"experiment/{EXPERIMENT_NODE}"
        end = paths.index(typed) if typed in paths else len(paths)
        key = (*map(repr, defaults[:end]),)
        shipped = copied(merged, key, lambda: merge_files(loader, defaults[:end], repo))
        try:
            if end < len(paths):
                shipped.merge_with(merge_files(loader, defaults=defaults[end:], repo=repo))
        except (OmegaConfBaseException, HydraException):  # which names other places
            return merge_files(loader, defaults=defaults, repo=repo)
        return shipped

    def make_node_once(schema: Any, parent: Any = None, flags: Any = None) -> Any:
        is_alone = isinstance(schema, type) and parent is None and flags is None
        if not is_alone or not schema.__module__.startswith(("app.", "data_modules.")):
            return make_node(schema, parent, flags)
        node = copied(nodes, schema, lambda: make_node(schema))
        if "data" in node and "cache_dir" in node.data:  # the default that the environment changes
            node.data.cache_dir = DataConfig().cache_dir
        return node

    def parse_once(parser: Any, text: str, rule: str) -> Any:
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(parser, text, rule)
        return copy.copy(parsed[text, rule])  # of an override, which is given its loader

    def load_once(repo: Any, config_path: str) -> Any:
        if _files(repo) is None or config_path == f"experiment/{EXPERIMENT_NODE}":
            return load(repo, config_path)
        return copied(loaded, config_path, lambda: load(repo, config_path))

    def check_rows_once(dataset: DatasetConfig, data: DataConfig, budget: Budget) -> list[str]:
        if not dataset.path.startswith(f"{SAMPLES}/"):
            return check_rows(dataset, data, budget)
        key = repr((dataset, replace(data, cache_dir=""), budget))
        if key not in checked:
            checked[key] = check_rows(dataset, data, budget)
        return checked[key]

    def keep_repository(caching: Any, delegate: IConfigRepository) -> None:
        # Copying it takes a sixth of a composition, and each composition has its own repository.
        caching.delegate, caching.cache = delegate, {}

    patch.setattr(data_settings, "_check_first_rows", check_rows_once)
    patch.setattr(ConfigRepository, "load_config", load_once)
    patch.setattr(CachingConfigRepository, "__init__", keep_repository)
    patch.setattr(OverridesParser, "parse_rule", parse_once)
    patch.setattr(OmegaConf, "structured", staticmethod(make_node_once))
    patch.setattr(config_loader_impl, "create_defaults_list", find_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)


def _files(repo: Any) -> str | None:
    """Return a cache key with the options of the experiment; None if other files are involved."""
    if not any(source.path == SHIPPED for source in repo.get_sources()):
        return None
    stored = ConfigStore.instance().repo.get("experiment", {}).get(f"{EXPERIMENT_NODE}.yaml")
    return "" if stored is None else str(stored.node["defaults"])
