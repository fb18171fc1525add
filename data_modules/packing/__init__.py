"""The step plan: which documents share a pack, and in which step and rank they are trained on."""

from dataclasses import dataclass

from common.facts import setting


@dataclass(kw_only=True, slots=True)
class PackingConfig:
    """How documents are packed."""

    method: str = setting("multipack", choices=("multipack", "like_length", "none"))
    """multipack: documents fill packs of `data.sequence_len` tokens, each attending to itself only
    (fastest); like_length: the same with documents of similar length in a pack (cheaper attention,
    packs differ more); none: one document a row, right-padded (slower), which is chosen
    automatically, with a message, for models that cannot keep the documents of a pack apart"""
    window: int | None = setting(None, ge=1)
    """number of documents that are packed together; null = all of an epoch (fuller packs)"""
