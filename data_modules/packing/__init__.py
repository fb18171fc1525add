"""The plan of the steps: which documents share a pack, and which rank trains on them when."""

from dataclasses import dataclass

from data_modules.facts import setting


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """Choose how documents share a row."""

    method: str = setting("multipack", choices=("multipack", "like_length", "none"))
    """multipack: documents fill packs of `data.sequence_len` tokens and cannot see each other
    (fastest); like_length: the same with documents of like length in a pack (cheaper attention,
    packs less alike); none: one document a row, right-padded (the plain way, slower), which a run
    takes by itself, and says so, for models whose documents cannot be kept apart in a pack"""
    window: int | None = setting(None, ge=1)
    """documents that are packed among themselves; null = all of an epoch (fuller packs)"""
