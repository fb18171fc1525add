"""What Hydra's grammar and omegaconf say of a single word or value."""

from __future__ import annotations

import functools
from typing import Any

from app.config.schema import Leaf


def parse_override(word: str) -> tuple[Any, bool]:
    """Return an override's value, and whether it lists several for a sweep; or ValueError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        parsed = OverridesParser.create().parse_override(word)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from error
    if parsed.is_sweep_override():
        return None, True
    return parsed.value(), False


@functools.cache
def _node_of(schema: type) -> Any:
    """Return one node a schema, to try values on."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def takes_value(leaf: Leaf) -> bool:
    """Tell whether a value can become what its field is declared as."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        _node_of(leaf.owner)[leaf.field] = leaf.value
    except OmegaConfBaseException:
        return False
    return True


def first_line(error: Exception) -> str:
    """Return what of an error of these libraries is for people."""
    return str(error).strip().splitlines()[0]
